"""Training speed (tokens/s, MFU) and, with --timing, the time spent in each phase of a step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lab.hardware import peak_flops


class Throughput:
    """Speed of training, without evaluation, saving and the first update, which compiles and allocates.
    The device is synchronized only when a line is logged or a callback is due."""

    def __init__(self, trainer, log):
        self.trainer, self.world, self.log = trainer, trainer.world, log
        self.peak = peak_flops(trainer.world.device)
        self.flops_per_token = trainer.raw_model.flops_per_token(trainer.cfg.seq_len)
        self.t0, self.first = time.perf_counter(), True
        self.start_step, self.start_tokens = trainer.step, trainer.loader.position

    @contextlib.contextmanager
    def paused(self, due: list) -> Iterator[None]:
        """Exclude the time of the body; does nothing if no callback is due."""
        if not due:
            yield
            return
        self.log.close_bar()  # callbacks may have their own progress bar
        self.world.synchronize()  # otherwise pending kernels would count as evaluation
        t0 = time.perf_counter()
        yield
        self.world.synchronize()
        self.t0 += time.perf_counter() - t0

    def tick(self) -> None:
        """Call after launching each update; the first one is logged separately."""
        self.log.advance_bar(self.trainer.step)
        if self.first:
            self.log.event("first_step", self.trainer.step, {"seconds": self.restart()})
            self.first = False
            self.trainer.timer.read()

    def restart(self) -> float:
        """Reset the counters. Returns the seconds counted so far."""
        self.world.synchronize()
        now = time.perf_counter()
        seconds, self.t0 = now - self.t0, now
        self.start_step, self.start_tokens = self.trainer.step, self.trainer.loader.position
        return seconds

    def read(self) -> dict[str, float]:
        """Speed since the last read, for the log; {} if only the first update was made."""
        steps = self.trainer.step - self.start_step
        if not steps:
            return {}
        # counted, because steps may differ in size (speedrun.py)
        tokens = self.trainer.loader.position - self.start_tokens
        seconds = self.restart()
        tok_per_s = tokens / seconds
        values = {"dt_ms": 1000 * seconds / steps, "tok_per_s": tok_per_s}
        if self.peak:
            values["mfu"] = tok_per_s * self.flops_per_token / (self.peak * self.world.world_size)
        if self.world.device.type == "cuda":
            values["peak_gib"] = torch.cuda.max_memory_allocated(self.world.device) / 2**30
        trainer = self.trainer
        remaining = range(trainer.step, trainer.cfg.max_steps)
        values["seconds_left"] = seconds / tokens * sum(map(step_tokens_of(trainer), remaining))
        return values | self.trainer.timer.read()


def step_tokens_of(trainer: Any) -> Callable[[int], int]:
    """The function from a step to its number of tokens, which changes in speedrun.py."""
    return getattr(trainer, "step_tokens", lambda step: trainer.cfg.total_batch_size)


class StepTimer:
    """Milliseconds of data, forward, backward and optimizer in a step; does nothing unless enabled.

    train_step marks the end of each phase. On a GPU the marks are CUDA events, read when a line is
    logged, so that the device never waits.
    """

    def __init__(self, device: torch.device, enabled: bool):
        self.cuda, self.enabled, self.marks = device.type == "cuda", enabled, []

    def mark(self, phase: str) -> None:
        """Mark the end of `phase`, or with "start" the beginning of a step."""
        if not self.enabled:
            return
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if isinstance(now, torch.cuda.Event):
            now.record()
        self.marks.append((phase, now))

    def read(self) -> dict[str, float]:
        """Means over the steps since the last read, as {"forward_ms": 31.2}; needs an idle device."""
        sums: dict[str, float] = {}
        for (_, a), (phase, b) in zip(self.marks, self.marks[1:]):
            if phase != "start":
                ms = a.elapsed_time(b) if self.cuda else 1000 * (b - a)
                sums[f"{phase}_ms"] = sums.get(f"{phase}_ms", 0) + ms
        steps = max(1, sum(phase == "start" for phase, _ in self.marks))
        self.marks = []
        return {name: round(ms / steps, 3) for name, ms in sums.items()}
