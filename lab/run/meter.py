"""Speed of training alone, and where the time of a step goes."""

import contextlib
import time

import torch

from lab.device import peak_flops


class Meter:
    """Evaluation and saving are not counted, nor is the first update, which compiles and allocates.
    The device is waited for only where a line is logged or an event is due."""

    def __init__(self, run, log):
        self.run, self.world, self.log = run, run.world, log
        self.peak = peak_flops(run.world.device)
        self.flops_per_token = run.raw_model.flops_per_token(run.cfg.seq_len)
        self.phases = Phases(run) if run.cfg.timing else None
        self.t0, self.first = time.perf_counter(), True
        self.counted_from, self.position = run.step, run.loader.position

    @contextlib.contextmanager
    def paused(self, due):
        """What is done in the body does not count; where nothing is due, nobody waits either."""
        if not due:
            yield
            return
        self.world.synchronize()  # or what is still underway would count as evaluation
        t0 = time.perf_counter()
        yield
        self.world.synchronize()
        self.t0 += time.perf_counter() - t0

    def tick(self):
        """An update was launched."""
        if self.first:
            self.log.event("first_step", self.run.step, {"seconds": self.restart()})
            self.first = False
            if self.phases:
                self.phases.read()

    def restart(self):
        """Count from here; returns the seconds that were counted until here."""
        self.world.synchronize()
        now = time.perf_counter()
        seconds, self.t0 = now - self.t0, now
        self.counted_from, self.position = self.run.step, self.run.loader.position
        return seconds

    def read(self):
        """Speed of the steps since the last read: {} where the first update is the only one."""
        steps = self.run.step - self.counted_from
        if not steps:
            return {}
        tokens = self.run.loader.position - self.position  # speedrun.py has steps of two sizes
        seconds = self.restart()
        tok_per_s = tokens / seconds
        values = {"dt_ms": 1000 * seconds / steps, "tok_per_s": tok_per_s}
        if self.peak:
            values["mfu"] = tok_per_s * self.flops_per_token / (self.peak * self.world.world_size)
        if self.world.device.type == "cuda":
            values["peak_gib"] = torch.cuda.max_memory_allocated(self.world.device) / 2**30
        values["seconds_left"] = seconds / steps * (self.run.cfg.max_steps - self.run.step)
        return values | (self.phases.read() if self.phases else {})


class Phases:
    """Milliseconds of data, forward, backward and optimizer (--timing), from outside: what
    Run.update calls between its phases is made to note the time. On CUDA these are events in the
    stream, read when a line is logged, so the device never waits."""

    def __init__(self, run):
        self.cuda, self.marks = run.world.device.type == "cuda", []
        clips = run.optimizer if hasattr(run.optimizer, "clip_grad_norm") else run
        self.note(run.loader, "next_batch", before="backward", after="data")
        self.note(run.precision.scaler, "scale", before="forward")
        self.note(clips, "clip_grad_norm", before="backward")
        self.note(run.optimizer, "zero_grad", after="optimizer")

    def note(self, owner, name, before=None, after=None):
        """Have a method of `owner` end the phase `before` when it begins, `after` when it ends."""
        function = getattr(owner, name)

        def noting(*args, **kwargs):
            if before:
                self.mark(before)
            result = function(*args, **kwargs)
            if after:
                self.mark(after)
            return result

        setattr(owner, name, noting)

    def mark(self, phase):
        """The end of `phase`, or of the time between two steps, which belongs to none."""
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        if self.marks and self.marks[-1][0] == "optimizer":
            phase = "start"
        self.marks.append((phase, now))

    def read(self):
        """Means over the steps since the last read, as {"forward_ms": 31.2}, of an idle device."""
        sums = {}
        for (_, a), (phase, b) in zip(self.marks, self.marks[1:]):
            if phase != "start":
                ms = a.elapsed_time(b) if self.cuda else 1000 * (b - a)
                sums[f"{phase}_ms"] = sums.get(f"{phase}_ms", 0) + ms
        steps = max(1, sum(phase == "optimizer" for phase, _ in self.marks[1:]))
        self.marks = self.marks[-1:]
        return {name: round(ms / steps, 3) for name, ms in sums.items()}
