"""Spikes: gradients far longer than those before them. Found without waiting for the device, noted
with the data they came from, left out or recorded where --on_spike asks for it.

A spike leaves LOG_DIR/RUN/spike_<step>.json, and with a recorder spike_<step>.pt, the weights before
that step. `python -m lab replay` makes the step again from them.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

from lab.cli import UserError
from lab.data import get_tokenizer, name_of_size
from lab.data.tokenizers import WORD_PIECE_FILE
from lab.device import random_state
from lab.files import write_whole
from lab.run import checkpoints
from lab.run.folder import settings_of

WINDOW = 50  # norms that a new one is compared with: in 100 the wild first ones would hide much
LEAST = 20  # of fewer norms the deviation is a guess
FLOOR = 0.1  # smallest deviation of ln(norm): in a calm run twice the usual norm is no spike
LIMIT = 10.0  # z beyond which a norm is a spike: calm runs stay below 7 (docs/RUNS.md)
SHOWN = 64  # tokens of each sequence that are written out
SERIES = 10  # a spike that follows another within so many steps has no files of its own


def score(norm, history):
    """(z, usual) of a gradient norm, as tensors on its device, for which nobody waits.

    history (k,): logarithms of the norms before. usual: their median. z: how far ln(norm) lies
    above it, over the deviation that the norms before have; 1.4826 times the median absolute
    deviation is the standard deviation of normal numbers, and outliers do not move it (Iglewicz
    and Hoaglin 1993). z is 0 where k < LEAST, and infinite for a norm that is not finite.
    """
    z = torch.zeros_like(norm)
    usual = history.median() if len(history) else z
    if len(history) >= LEAST:
        deviation = 1.4826 * (history - usual).abs().median()
        z = (norm.log() - usual) / deviation.clamp(min=FLOOR)
    return torch.where(norm.isfinite(), z, math.inf), usual.exp()


class Spikes:
    """Looks at each gradient norm of a run, from outside: it takes the place of what clips.

    The norms before are kept among the optimizer's settings, as these are saved and loaded with it:
    a resumed run finds the spikes that one left alone would have found.
    """

    def __init__(self, run):
        """Raises UserError where updates cannot be left out, and cfg.on_spike asks for it."""
        self.run, self.policy = run, run.cfg.on_spike
        self.scaler = run.precision.scaler
        self.scale = self.scaler.scale  # without the time that Phases has it note later
        self.last = -math.inf  # step of the last spike
        groups = run.optimizer.param_groups
        if self.policy == "skip" and not all(g.get("fused") for g in groups):
            raise UserError("on_spike=skip needs a fused AdamW, which this device lacks")
        if self.policy == "skip" and self.scaler.is_enabled():
            raise UserError("on_spike=skip does not go with precision=fp16; leave one out")
        groups[-1]["norms"] = groups[-1].get("norms", torch.zeros(0)).to(run.world.device)
        shares = hasattr(run.optimizer, "clip_grad_norm")  # ZeRO-1, FSDP2: no gradient is whole
        self.named = [] if shares else list(run.raw_model.named_parameters())
        owner = run.optimizer if shares else run
        self.clip, owner.clip_grad_norm = owner.clip_grad_norm, self.clip_grad_norm
        fsdp2 = any(hasattr(p, "to_local") for p in run.raw_model.parameters())
        records = self.policy != "continue" and run.world.is_main and not fsdp2
        self.recorder = Recorder(run) if records else None
        self.numbers = None  # of the newest step: norm, z, usual norm, then each parameter's

    @torch.no_grad()
    def clip_grad_norm(self, max_norm):
        """Run.clip_grad_norm, and a look at the norm; a spike's update is left out on skip."""
        grads = {name: p.grad for name, p in self.named if p.grad is not None}
        self.names = list(grads)
        norms = torch._foreach_norm(list(grads.values())) if grads else []
        norm = self.clip(max_norm)
        settings = self.run.optimizer.param_groups[-1]
        z, usual = score(norm, settings["norms"])
        log = torch.where(norm.log().isfinite(), norm, usual).log()
        settings["norms"] = torch.cat([settings["norms"], log[None]])[-WINDOW:]
        if self.scaler.is_enabled():  # fp16: it is infinite while the scaler seeks its scale
            z = torch.where(norm.isfinite(), z, 0.0)
        if self.policy == "skip":
            self.run.optimizer.found_inf = (z > LIMIT).float()  # torch's fused AdamW heeds it
        self.numbers = torch.stack([norm, z, usual, *norms])
        if self.scaler.is_enabled():  # fp16: these were taken before clipping, so still scaled
            self.numbers[3:] /= self.scale(torch.ones_like(norm))
        if self.recorder:
            self.recorder.wait()
        return norm

    def is_spike(self, numbers):
        return numbers[1].item() > LIMIT

    def report(self, step, numbers, losses, sequences):
        """Write the files of a spike; returns what the log notes of it. All processes call it
        together, with what they noted of that step, on the CPU. sequences: the range that it read."""
        world = self.run.world
        norm, z, usual, *norms = numbers.tolist()
        values = dict(norm=norm, usual=usual, z=z, skipped=self.policy == "skip")
        parts = world.gather((losses / world.world_size).tolist())
        in_series, self.last = step - self.last <= SERIES, step
        if in_series:
            return values
        path = self.run.folder / f"spike_{step:06d}.json"
        if world.is_main:
            losses = [loss for micro_step in zip(*parts) for loss in micro_step]
            found = values | {"step": step, "losses": losses, "norms": dict(zip(self.names, norms))}
            found["sequences"] = self.sequences(sequences)
            found["weights"] = path.with_suffix(".pt").name if self.recorder else None
            found |= {"batch_size": self.run.loader.batch_size, "world_size": world.world_size}
            if self.recorder:
                self.recorder.save(step, path.with_suffix(".pt"))
            text = json.dumps(found | settings_of(self.run), indent=1)
            write_whole(path, text.encode() + b"\n")
        return values | {"file": path.name}

    def sequences(self, numbers):
        """Where each sequence of a step stands, and how it begins; in order, as many to each loss."""
        loader, own = self.run.loader, Path(self.run.cfg.data, WORD_PIECE_FILE)
        try:
            name = str(own) if own.exists() else name_of_size(loader.shards.vocab_size)
            tokenizer = get_tokenizer(name)
        except UserError:  # a vocabulary of somebody else's
            tokenizer = None
        found = []
        for p in loader.positions(np.array(numbers)).tolist():
            found.append({"at": loader.shards.where(p)})
            if tokenizer:
                ids = loader.shards.read(p, min(loader.seq_len, SHOWN))
                found[-1]["text"] = tokenizer.decode(ids.tolist())
        return found


class Recorder:
    """What was before each of the last two steps, in the memory of the host: a norm is looked at when
    the next step is underway. On a GPU the weights are copied while forward and backward, which only
    read them, compute."""

    def __init__(self, run):
        self.run, cuda = run, run.world.device.type == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        params = list(run.raw_model.named_parameters())
        self.before = [
            {"model": {n: torch.empty_like(p, device="cpu", pin_memory=cuda) for n, p in params}}
            for _ in range(2)
        ]

    @torch.no_grad()
    def begin(self):
        """Note what is before the next step; begin to copy the weights."""
        before = self.before[self.run.step % 2]
        before["rng"] = random_state(self.run.world.device)
        before["loader"] = {"position": self.run.loader.position}
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # for the update before
        with torch.cuda.stream(self.stream):
            for name, p in self.run.raw_model.named_parameters():
                before["model"][name].copy_(p, non_blocking=True)

    def wait(self):
        """What is launched from now on, the update, waits for the copy. The host does not."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def save(self, step, path):
        """Write what was before a step, whose norm has arrived: so the copy has, too."""
        before = self.before[(step - 1) % 2]
        before["loader"] = self.run.loader.state_dict() | before["loader"]
        checkpoints.write(path, before)
        for old in sorted(path.parent.glob("spike_*.pt"))[: -self.run.cfg.keep_last]:
            old.unlink(missing_ok=True)
