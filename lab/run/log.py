"""What a run says of itself: the log file, the line for people, and where its time goes."""

import contextlib
import errno
import json
import sys
import time

import torch

from lab.device import peak_flops


class Meter:
    """Speed of training alone: evaluation and saving are not counted, and the device is waited for only where a line is
    logged."""

    def __init__(self, cfg, world, model, first_step):
        self.cfg, self.world, self.peak = cfg, world, peak_flops(world.device)
        # 6 FLOPs per token for each weight that multiplies (all but the positions, pad rows too), and 12 L C T for
        # attention, counted without causality as is the custom (Chowdhery et al. 2022, PaLM, appendix B)
        c = model.config
        weights = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
        self.flops_per_token = 6 * weights + 12 * c.n_layer * c.n_embd * cfg.seq_len
        self.t0, self.paused, self.step = time.perf_counter(), 0.0, first_step

    @contextlib.contextmanager
    def pause(self):
        self.world.synchronize()  # or what is still in flight would count as evaluation
        t0 = time.perf_counter()
        yield
        self.world.synchronize()
        self.paused += time.perf_counter() - t0

    def restart(self, step):
        """Forget what was so far; returns its seconds."""
        self.world.synchronize()
        now = time.perf_counter()
        seconds, self.t0, self.paused, self.step = now - self.t0 - self.paused, now, 0.0, step
        return seconds

    def read(self, step):
        """Speed of the steps since the last read."""
        steps, seconds = step - self.step, self.restart(step)
        tok_per_s = steps * self.cfg.total_batch_size / seconds
        values = {"dt_ms": 1000 * seconds / steps, "tok_per_s": tok_per_s}
        if self.peak:
            values["mfu"] = tok_per_s * self.flops_per_token / (self.peak * self.world.world_size)
        if self.world.device.type == "cuda":
            values["peak_gib"] = torch.cuda.max_memory_allocated(self.world.device) / 2**30
        return values | {"seconds_left": seconds / steps * (self.cfg.max_steps - step)}


class Logger:
    """One JSON line an event in log.jsonl, the same numbers to TensorBoard, a line or a bar for people. Rank 0 only."""

    def __init__(self, run_dir, cfg, is_main, first_step=0):
        self.is_main, self.bar, self.status, self.wandb = is_main, None, "", None
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.file = (run_dir / "log.jsonl").open("a", buffering=1)  # a resumed run goes on in the same file
        self.tensorboard = SummaryWriter(str(run_dir), purge_step=first_step + 1)  # the step it resumes at was logged before
        if cfg.wandb:
            import wandb

            self.wandb = wandb.init(project="gpt2", name=run_dir.name, config=vars(cfg), resume="allow")
        if sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} | {remaining} left{postfix}"
            self.bar = tqdm(total=cfg.max_steps, initial=first_step, bar_format=layout, dynamic_ncols=True)

    def event(self, kind, step, **values):
        if not self.is_main:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | values
        self.file.write(json.dumps(record) + "\n")
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        for name, value in numbers.items():
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(numbers, step=step)

    def say(self, text):
        """A line for people; goes above the bar if there is one. A terminal that has gone is no reason to end: SIGHUP is."""
        if not self.is_main:
            return
        try:
            self.bar.write(text) if self.bar is not None else print(text, flush=True)
        except OSError as error:
            if error.errno != errno.EIO:
                raise

    def busy(self, what=""):
        """What is going on, where a bar can say it ("validating" takes a minute on a slow machine), or how it went last."""
        if self.bar is not None:
            self.bar.set_postfix_str(what or self.status)

    def tick(self, step):
        """A step is over, or launched, and the bar moves: log_every of them may take minutes."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def train(self, step, max_steps, seconds_left=None, **values):
        """The train event; for people, the bar's text, or a line where there is no terminal. A run's first step, whose
        speed would be the compiler's, comes without what Meter.read gives."""
        self.event("train", step, **values)
        speed = f" | {values['tok_per_s']:,.0f} tok/s" if "tok_per_s" in values else ""
        speed += f" | MFU {values['mfu']:.1%}" if values.get("mfu") else ""
        if self.bar is not None:
            self.status = f"loss {values['loss']:.3f}{speed}"  # fits beside a bar in 80 columns
            self.busy()
        elif self.is_main:
            left = " | {}:{:02d} left".format(*divmod(int(seconds_left), 60)) if seconds_left is not None else ""
            phases = "".join(f" | {k[:-3]} {v:.1f} ms" for k, v in values.items() if k.endswith("_ms") and k != "dt_ms")
            short = f"loss {values['loss']:.4f} | lr {values['lr']:.2e} | norm {values['grad_norm']:.2f}{speed}"
            self.say(f"step {step:5d}/{max_steps} | {short}{left}{phases}")

    def close(self):
        if self.is_main:
            self.bar.close() if self.bar is not None else None
            self.tensorboard.close()
            self.file.close()
            self.wandb.finish() if self.wandb else None


class PhaseClock:
    """Milliseconds of each phase of a step (--timing). On CUDA it drops events into the stream and reads them when a
    line is logged, so the device never waits; switched off it does nothing at all."""

    def __init__(self, on, device):
        self.on, self.cuda, self.marks = on, device.type == "cuda", []

    def mark(self, phase):
        """The time since the mark before this one belongs to `phase`."""
        if self.on:
            now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
            now.record() if self.cuda else None
            self.marks.append((phase, now))

    def read(self):
        """Sums since the last read, e.g. {"forward_ms": 31.2}; the device must be idle."""
        sums = {}
        for (_, a), (phase, b) in zip(self.marks, self.marks[1:]):
            if phase != "start":
                sums[f"{phase}_ms"] = sums.get(f"{phase}_ms", 0) + (a.elapsed_time(b) if self.cuda else 1000 * (b - a))
        steps = max(1, sum(phase == "start" for phase, _ in self.marks))
        self.marks = []
        return {name: round(ms / steps, 3) for name, ms in sums.items()}
