"""Is the run alive and well? Losses and weights that are not finite, and signals, looked at without
making the device wait."""

import math
from collections import deque

import torch

from lab.cli import RunError
from lab.run.stop import Stopped

LOWER = "try a lower --lr (Muon: and --muon_lr)"


class Underway:
    """Copy of a tensor on its way to the CPU. arrive() waits for what was launched before the copy
    was, and no longer; item() would wait for all that was launched since, and the device would then
    have nothing to do while the host launches the next step."""

    def __init__(self, tensor):
        cuda = tensor.is_cuda
        self.copy = torch.empty_like(tensor, device="cpu", pin_memory=cuda).copy_(
            tensor, non_blocking=cuda
        )
        self.there = torch.cuda.Event() if cuda else None
        if self.there:
            self.there.record()

    def arrive(self):
        if self.there:
            self.there.synchronize()
        return self.copy


class Vitals:
    """Each step, one small exchange through the CPU carries the loss of the step before and whether
    any process was asked to stop. All processes call each method together."""

    def __init__(self, run, world, stop):
        self.run, self.world, self.stop = run, world, stop
        self.pending = deque()  # (step, losses underway, the loader's place after it)

    def watch(self, losses):
        """Note the losses (micro-steps,) of the update that was just launched."""
        self.pending.append((self.run.step, Underway(losses), self.run.loader.sequence))

    def read(self, newest, heed=True):
        """Look at the steps noted, at the newest one only if asked to, as it may not be done yet.

        Raises RunError for a loss that is not finite and, where the newest was looked at, for
        weights that are not; Stopped where a process was asked to stop, unless heed is False.
        """
        found = [self.pending.popleft() for _ in range(len(self.pending) - (not newest))]
        losses = [(step, copies.arrive(), place) for step, copies, place in found]
        told = [each.sum().item() for _, each, _ in losses] + [float(bool(self.stop.name))]
        *means, stops = self.world.all_reduce(torch.tensor(told, dtype=torch.float64)).tolist()
        for mean, (step, micro_losses, place) in zip(means, losses):
            if not math.isfinite(mean):
                self.fail(step, mean / self.world.world_size, micro_losses, place)
        if newest and losses:
            self.check_weights()
        if stops and heed:
            raise Stopped(self.stop.name or "signal on another rank")

    def fail(self, step, loss, micro_losses, place):
        """Raise RunError naming the sequences on which the loss was not finite."""
        loader, folder = self.run.loader, self.run.folder
        bad = [i for i, value in enumerate(micro_losses.tolist()) if not math.isfinite(value)]
        mine = [name for i in bad for name in loader.step_positions(place, i)]
        names = [name for part in self.world.gather(mine) for name in part]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        kept = ", ".join(sorted(path.name for path in folder.glob("model_*.pt")))
        again = f"{folder} has no checkpoint yet; {LOWER}, or more --warmup_steps"
        if kept:
            again = f"{folder} keeps {kept}; {LOWER}, or --resume to see whether it comes back"
        sequences = f"the sequences at {', '.join(names[:8])}{more}"
        raise RunError(
            f"the loss is {loss} at step {step}, on {sequences}; the run stops and {again}"
        )

    def check_weights(self):
        """Raise RunError where a finite loss has led to weights that are not: not worth keeping."""
        params = [getattr(p, "_local_tensor", p) for p in self.run.raw_model.parameters()]  # FSDP2
        norms = torch.stack(torch._foreach_norm(params))
        if not self.world.all(norms.isfinite().all().item()):
            raise RunError(
                f"the weights are not finite after step {self.run.step}; they are not saved, "
                f"{self.run.folder} keeps the checkpoints before; {LOWER}"
            )
