"""Health checks of a run: non-finite losses, gradients and weights, gradient spikes, stop signals.

The GPU never waits for a check: numbers are copied to the CPU while the next step runs, and are checked
one step later. A spike is a gradient norm far above the ones before it. It leaves spike_<step>.json in
the run directory and, with --on_spike record, skip or stop, spike_<step>.pt with the weights before
that step, from which `python -m lab replay` repeats the step.
"""

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.cli import RunError, UserError, listed, wrap
from lab.data.tokenizers import get_tokenizer
from lab.distributed import AsyncCopy
from lab.files import atomic_write, finite_json
from lab.registry import tokenizer_name
from lab.tools.verdict import lower_lr_hint
from lab.trainer.checkpoint import step_of, write_checkpoint
from lab.trainer.run_dir import config_dict
from lab.trainer.signals import GracefulStop

WINDOW = 50  # number of norms in the median; 100 would include too many of the noisy first steps
MIN_HISTORY = 20  # number of norms before the first z-score
MIN_SIGMA = 0.1  # lower bound of sigma: in a very calm run, twice the median is not a spike
Z_THRESHOLD = 10.0  # a norm with a higher z-score is a spike; calm runs stay below 7 (docs/RUNS.md)
PREVIEW_TOKENS = 64  # tokens of each sequence that are written to spike_<step>.json
COOLDOWN_STEPS = 10  # a spike within this many steps of another one writes no files


def robust_zscore(norm: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(z, median norm) of a gradient norm, as tensors on its device.

    history (k,): logarithms of the previous norms. z is the distance of ln(norm) above their median, in
    units of their standard deviation, estimated as 1.4826 times the median absolute deviation, which is
    robust to outliers (Iglewicz and Hoaglin 1993). z is 0 if k < MIN_HISTORY, and infinite for a
    norm that is not finite.
    """
    z = torch.zeros_like(norm)
    median = history.median() if len(history) else z
    if len(history) >= MIN_HISTORY:
        sigma = 1.4826 * (history - median).abs().median()
        z = (norm.log() - median) / sigma.clamp(min=MIN_SIGMA)
    return torch.where(norm.isfinite(), z, math.inf), median.exp()


def foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor, computed in few kernels."""
    return list(torch._foreach_norm(tensors)) if tensors else []  # pyright: ignore  # no public name


class HealthMonitor:
    """Watches a trainer. Each train_step calls record_gradients() and observe(); the loop calls
    record() after a step and check() before the next one. All ranks call each method together."""

    def __init__(self, trainer):
        """Raises UserError if --on_spike skip cannot work with this optimizer or precision."""
        self.trainer, self.world, self.policy = trainer, trainer.world, trainer.cfg.on_spike
        self.scaler, optimizer = trainer.precision.scaler, trainer.optimizer
        if self.policy == "skip" and not all(g.get("fused") for g in optimizer.param_groups):
            raise UserError(
                "on_spike=skip needs a fused AdamW, which this device does not have; pass --on_spike stop"
            )
        if self.policy == "skip" and self.scaler.is_enabled():
            raise UserError(
                "on_spike=skip does not work with precision=fp16; change one of the two"
            )
        self.sharded = hasattr(optimizer, "clip_grad_norm")  # ZeRO-1, FSDP2: ranks have only shards
        self.named_params = list(trainer.raw_model.named_parameters())
        fsdp2 = any(hasattr(p, "to_local") for p in trainer.raw_model.parameters())
        snapshots = self.policy != "continue" and self.world.is_main and not fsdp2
        self.snapshotter = StepSnapshotter(trainer) if snapshots else None
        self.history = torch.zeros(0, device=self.world.device)  # ln of the last norms
        self.last_spike = -math.inf  # step
        self.consecutive_nonfinite = 0  # steps
        self.param_names: list[str] = []
        self.param_norms: list[torch.Tensor] = []
        self.stats = torch.zeros(3)  # of the newest step: norm, z, median norm, param_norms
        # steps not checked yet: (step, losses, stats, numbers of its sequences)
        self.pending: deque[tuple[int, AsyncCopy, AsyncCopy, range]] = deque()

    def state_dict(self) -> dict[str, Any]:
        return {
            "grad_norm_history": self.history, "last_spike": self.last_spike,
            "consecutive_nonfinite": self.consecutive_nonfinite,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if the run had not been interrupted. Older checkpoints lack some entries."""
        self.history = state.get("grad_norm_history", torch.zeros(0)).to(self.world.device)
        self.last_spike = state.get("last_spike", -math.inf)
        self.consecutive_nonfinite = state.get("consecutive_nonfinite", 0)

    @torch.no_grad()
    def record_gradients(self) -> None:
        """Compute the norm of each parameter's gradient before clipping, except with ZeRO-1 and FSDP2."""
        grads = {name: p.grad for name, p in self.named_params if p.grad is not None}
        if not self.param_names:
            self.check_all_have_gradients(grads)
        if self.sharded:
            return
        self.param_names = list(grads)
        self.param_norms = foreach_norm(list(grads.values()))
        if self.scaler.is_enabled():  # fp16: gradients are still scaled here
            scale = self.scaler.scale(torch.ones(1, device=self.world.device))[0]
            self.param_norms = [norm / scale for norm in self.param_norms]

    def check_all_have_gradients(self, grads: dict[str, Any]) -> None:
        """Warn if some parameters have no gradient. ZeRO-1 and FSDP2 need all: raises UserError."""
        without = [name for name, p in self.named_params if p.requires_grad and name not in grads]
        if not without:
            return
        said = (
            "the loss does not depend on some parameters, so they are not trained: "
            f"{listed(without, 1)}; are they unused, or is there a detach() or no_grad()?"
        )
        if self.sharded:
            raise UserError(said)
        self.world.print0(wrap(f"warning: {said}"))

    @torch.no_grad()
    def observe(self, norm: torch.Tensor) -> None:
        """Compute the z-score of the gradient norm; with --on_spike skip, skip the update of a spike."""
        z, median = robust_zscore(norm, self.history)
        log_norm = torch.where(norm.log().isfinite(), norm, median).log()
        self.history = torch.cat([self.history, log_norm[None]])[-WINDOW:]
        if self.scaler.is_enabled():  # fp16: infinite norms are normal until the scale is found
            z = torch.where(norm.isfinite(), z, 0.0)
        if self.policy == "skip":
            # as torch's GradScaler does: a fused AdamW skips its update if found_inf is 1
            self.trainer.optimizer.found_inf = (z > Z_THRESHOLD).float()
        self.stats = torch.stack([norm, z, median, *self.param_norms])
        if self.snapshotter:
            self.snapshotter.wait()

    def record(self, losses: torch.Tensor) -> None:
        """Queue the losses (micro_steps,) and the norms of the update that was just launched."""
        loader = self.trainer.loader
        end = loader.next_sequence
        sequences = range(end - loader.step_sequences, end)
        copies = AsyncCopy(losses), AsyncCopy(self.stats)
        self.pending.append((self.trainer.step, *copies, sequences))

    def check(self, stop, log, include_latest: bool, raise_on_stop: bool = True) -> None:
        """Check the queued steps; the latest one only if include_latest, as it may still be running.

        Raises RunError for a loss or norm that is not finite (unless its update was skipped), for a
        spike with --on_spike stop, and, if the latest step was checked, for weights that are not
        finite. Raises GracefulStop if any rank received a signal, unless raise_on_stop is False.
        """
        self.trainer.checkpointer.check()
        ready = [self.pending.popleft() for _ in range(len(self.pending) - (not include_latest))]
        steps = [(step, a.wait(), b.wait(), sequences) for step, a, b, sequences in ready]
        # one small all-reduce on the CPU for the losses, and for whether a signal arrived
        flags = [(losses.sum().item(), self.is_spike(stats)) for _, losses, stats, _ in steps]
        flags = torch.tensor([*flags, (bool(stop.name), 0)], dtype=torch.float64)
        *flags, (stops, _) = self.world.all_reduce(flags).tolist()
        for step, (loss, spike) in zip(steps, flags):
            self.check_step(log, *step, loss / self.world.world_size, bool(spike))
        if include_latest and steps:
            self.check_weights()
        if stops and raise_on_stop:
            raise GracefulStop(stop.name or "signal on another rank")
        if self.snapshotter:
            self.snapshotter.capture()

    def is_spike(self, stats: torch.Tensor) -> bool:
        return stats[1].item() > Z_THRESHOLD

    def check_step(self, log, step, losses, stats, sequences, loss, spike) -> None:
        """Report a spike; raise RunError if the run must stop after this step."""
        norm = stats[0].item()
        if spike:
            with log.best_effort(f"spike_{step:06d}.json"):
                log.event("spike", step, self.report_spike(step, stats, losses, sequences))
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.consecutive_nonfinite = 0 if finite else self.consecutive_nonfinite + 1
        if spike and self.policy == "skip" and self.consecutive_nonfinite <= COOLDOWN_STEPS:
            return
        if not math.isfinite(loss):
            self.raise_nonfinite(step, f"the loss is {loss}", losses, sequences)
        if spike and (self.policy == "stop" or not math.isfinite(norm)):
            self.raise_nonfinite(step, f"the gradient norm is {norm:.4g}", losses, sequences, spike)

    def raise_nonfinite(self, step, problem, losses, sequences, spike=False) -> None:
        """Raise RunError, naming the sequences of the micro-steps whose loss is not finite."""
        loader = self.trainer.loader
        bad = [i for i, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        mine = [name for i in bad for name in loader.sequence_names(sequences.start, i)]
        names = [name for part in self.world.gather(mine) for name in part]
        where = f" (sequences at {listed(names, 3)})" if names else ""
        raise RunError(f"{problem} at step {step}{where}; {self.recovery_hint(spike)}", step)

    def recovery_hint(self, spike: bool = False) -> str:
        """The end of an error message: which checkpoints exist, and what to try."""
        run_dir, cfg = self.trainer.run_dir, self.trainer.cfg
        kept = ", ".join(sorted(path.name for path in run_dir.glob("model_*.pt")))
        lower_lr = lower_lr_hint(vars(cfg))
        if not kept:
            return f"{run_dir} has no checkpoint yet; {lower_lr}, or more --warmup_steps"
        can_skip = cfg.optimizer == "adamw" and not self.scaler.is_enabled()
        skip = " (--on_spike skip skips such an update)" if spike and can_skip else ""
        return (
            f"{run_dir} keeps {kept}; {lower_lr}, or resume to see whether it happens again{skip}"
        )

    def check_weights(self) -> None:
        """Raise RunError if weights are not finite, which can happen after a finite loss."""
        parameters = self.trainer.raw_model.parameters()
        params = [getattr(p, "_local_tensor", p) for p in parameters]  # FSDP2: the local shard
        norms = torch.stack(foreach_norm(params))
        if not self.world.all_true(bool(norms.isfinite().all().item())):
            raise RunError(
                f"the weights are not finite after step {self.trainer.step} and are not saved; "
                f"{self.recovery_hint()}"
            )

    def report_spike(self, step, stats, losses, sequences) -> dict[str, Any]:
        """Write the files of a spike, and return its log record. All ranks call it together, with
        their own losses and the numbers of the sequences that the step read."""
        world, trainer = self.world, self.trainer
        norm, z, median, *param_norms = stats.tolist()
        values = dict(norm=norm, usual=median, z=z, skipped=self.policy == "skip")
        parts = world.gather((losses / world.world_size).tolist())
        cooling_down, self.last_spike = step - self.last_spike <= COOLDOWN_STEPS, step
        if cooling_down:
            return values
        path = trainer.run_dir / f"spike_{step:06d}.json"
        if world.is_main:
            report = values | {
                "step": step, "losses": [loss for micro_step in zip(*parts) for loss in micro_step],
                "norms": dict(zip(self.param_names, param_norms)),
                "sequences": self.describe_sequences(sequences),
                "weights": path.with_suffix(".pt").name if self.snapshotter else None,
                "batch_size": trainer.loader.batch_size, "world_size": world.world_size,
            }  # fmt: skip
            if self.snapshotter:
                self.snapshotter.save(step, path.with_suffix(".pt"))
            text = json.dumps(finite_json(report | config_dict(trainer)), indent=1)
            atomic_write(path, text.encode() + b"\n")
        return values | {"file": path.name}

    def describe_sequences(self, numbers: range) -> list[dict[str, str]]:
        """For each sequence of a step, its place in the shards and its first tokens as text."""
        trainer, loader = self.trainer, self.trainer.loader
        try:
            tokenizer = get_tokenizer(tokenizer_name(trainer.raw_model.config, trainer.run_dir))
        except UserError:  # shards with an unknown vocabulary
            tokenizer = None
        found = []
        for position in loader.sequence_offsets(np.array(numbers)).tolist():
            found.append({"at": loader.shards.where(position)})
            if tokenizer:
                ids = loader.shards.read(position, min(loader.seq_len, PREVIEW_TOKENS))
                found[-1]["text"] = tokenizer.decode(ids.tolist())
        return found


class StepSnapshotter:
    """Keeps copies of the weights before each of the last two steps in CPU memory: two, because the norm
    of a step is checked while the next step runs. On a GPU, copying overlaps with forward and backward."""

    def __init__(self, trainer):
        self.trainer, cuda = trainer, trainer.world.device.type == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        params = list(trainer.raw_model.named_parameters())
        self.snapshots: list[dict[str, Any]] = [
            {"model": {n: torch.empty_like(p, device="cpu", pin_memory=cuda) for n, p in params}}
            for _ in range(2)
        ]

    @torch.no_grad()
    def capture(self) -> None:
        """Record the state before the next step; start copying the weights."""
        snapshot = self.snapshots[self.trainer.step % 2]
        snapshot["loader"] = {"position": self.trainer.loader.position}
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # after the previous update
        with torch.cuda.stream(self.stream):
            for name, p in self.trainer.raw_model.named_parameters():
                snapshot["model"][name].copy_(p, non_blocking=self.stream is not None)

    def wait(self) -> None:
        """Make the GPU work launched from now on (the update) wait for the copy, without blocking the CPU."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def save(self, step: int, path: Path) -> None:
        """Write the state before `step`. The norm of that step is on the CPU, so the copy is complete."""
        snapshot = self.snapshots[(step - 1) % 2]
        snapshot["loader"] = self.trainer.loader.state_dict() | snapshot["loader"]
        write_checkpoint(path, snapshot)
        old = sorted(path.parent.glob("spike_*.pt"), key=step_of)[: -self.trainer.cfg.keep_last]
        for file in old:
            file.unlink(missing_ok=True)
