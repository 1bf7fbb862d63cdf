"""Is the run alive and well? Losses and weights that are not finite, spikes, and signals, looked at
without making the device wait."""

import math
from collections import deque

import torch

from lab.cli import RunError
from lab.device import Underway
from lab.run.spikes import SERIES, Spikes
from lab.run.stop import Stopped

LOWER = "try a lower --lr (and --muon_lr, --embed_lr, where there are such)"


class Vitals:
    """Each step, one small exchange through the CPU carries the loss of the step before and whether
    any process was asked to stop. All processes call each method together."""

    def __init__(self, run, stop, log):
        self.run, self.world, self.stop, self.log = run, run.world, stop, log
        self.spikes = Spikes(run)
        self.left_out = 0  # how many updates in a row were not finite
        self.pending = deque()  # (step, losses and norms underway, its sequences)

    def watch(self, losses):
        """Note the losses (micro-steps,) of the update that was just launched, and its norms."""
        underway = Underway(losses), Underway(self.spikes.numbers)
        end, length = self.run.loader.sequence, self.run.loader.step_sequences
        self.pending.append((self.run.step, *underway, range(end - length, end)))

    def read(self, newest, heed=True):
        """Look at the steps noted, at the newest one only if asked to, as it may not be done yet.

        Raises RunError for a loss or a norm that is not finite, unless the update was left out; for
        a spike where cfg.on_spike says so; where the newest was looked at, for weights that are not
        finite. Raises Stopped where a process was asked to stop, unless heed is False.
        """
        self.run.writer.check()
        found = [self.pending.popleft() for _ in range(len(self.pending) - (not newest))]
        steps = [(step, a.arrive(), b.arrive(), read) for step, a, b, read in found]
        told = [(losses.sum().item(), self.spikes.is_spike(n)) for _, losses, n, _ in steps]
        told = torch.tensor([*told, (bool(self.stop.name), 0)], dtype=torch.float64)
        *told, (stops, _) = self.world.all_reduce(told).tolist()
        for step, (loss, spike) in zip(steps, told):
            self.judge(*step, loss / self.world.world_size, spike)
        if newest and steps:
            self.check_weights()
        if stops and heed:
            raise Stopped(self.stop.name or "signal on another rank")
        if self.spikes.recorder:
            self.spikes.recorder.begin()

    def judge(self, step, micro_losses, numbers, read, loss, spike):
        """Report a spike; raise RunError where the run is not to go on after this step."""
        policy, norm = self.run.cfg.on_spike, numbers[0].item()
        if spike:
            with self.log.attempt(f"spike_{step:06d}.json"):
                values = self.spikes.report(step, numbers, micro_losses, read)
                self.log.event("spike", step, values)
        good = math.isfinite(loss) and math.isfinite(norm)
        self.left_out = 0 if good else self.left_out + 1
        if spike and policy == "skip" and self.left_out <= SERIES:
            return
        if not math.isfinite(loss):
            self.fail(step, f"the loss is {loss}", micro_losses, read)
        if spike and (policy == "stop" or not math.isfinite(norm)):
            self.fail(step, f"the gradient norm is {norm:.4g}", micro_losses, read, spike)

    def fail(self, step, what, micro_losses, read, spike=False):
        """Raise RunError, naming the sequences of the micro-steps whose loss is not finite."""
        loader = self.run.loader
        bad = [i for i, value in enumerate(micro_losses.tolist()) if not math.isfinite(value)]
        mine = [name for i in bad for name in loader.step_positions(read.start, i)]
        names = [name for part in self.world.gather(mine) for name in part]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        on = f", on the sequences at {', '.join(names[:3])}{more}" if names else ""
        raise RunError(f"{what} at step {step}{on}; the run stops and {self.way_out(spike)}")

    def way_out(self, spike=False):
        """What the folder keeps, and what to try."""
        folder = self.run.folder
        kept = ", ".join(sorted(path.name for path in folder.glob("model_*.pt")))
        if not kept:
            return f"{folder} has no checkpoint yet; {LOWER}, or more --warmup_steps"
        can_skip = self.run.cfg.optimizer == "adamw" and not self.run.precision.scaler.is_enabled()
        skip = " (with --on_spike skip it is left out then)" if spike and can_skip else ""
        return f"{folder} keeps {kept}; {LOWER}, or --resume to see whether it comes back{skip}"

    def check_weights(self):
        """Raise RunError where a finite loss has led to weights that are not: not worth keeping."""
        params = [getattr(p, "_local_tensor", p) for p in self.run.raw_model.parameters()]  # FSDP2
        norms = torch.stack(torch._foreach_norm(params))
        if not self.world.all(norms.isfinite().all().item()):
            raise RunError(
                f"the weights are not finite after step {self.run.step}; they are not saved, "
                f"{self.way_out()}"
            )
