"""Validation loss: a callback, and the evaluation loop, which bench/ uses too."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.cli import RunError, UserError, progress, require, wrap
from lab.data.shards import TokenShards
from lab.data.tokenizers import Tokenizer, get_tokenizer
from lab.files import read_lenient
from lab.registry import tokenizer_name
from lab.tools.verdict import lower_lr_hint
from lab.trainer.callbacks import PeriodicCallback


class Validation(PeriodicCallback):
    """Loss on the first cfg.val_tokens tokens of the validation split. Updates trainer.best_val and
    links the checkpoint with the lowest loss as model_best.pt. Raises RunError if the loss is not finite.

    unigram: the loss of the unigram model, which ignores context, in nats per token; set on rank 0 only,
    like bytes_per_token. tokenizer: None unless all ranks can load it."""

    unigram: float | None = None
    bytes_per_token: float | None = None
    tokenizer: Tokenizer | None = None

    def __init__(self, trainer, stop):
        cfg = trainer.cfg
        super().__init__("val", cfg.val_every)
        self.stop = stop
        log = trainer.run_dir / "log.jsonl"
        logged = trainer.world.run_on_rank0(lambda: has_val_record(log, trainer.step))
        self.revalidate_step = trainer.step if logged else 0
        self.shards = TokenShards(cfg.data, "val", trainer.raw_model.config.vocab_size)
        self.targets = num_targets(self.shards, cfg.val_tokens)
        seen = trainer.world.gather([trainer.loader.state_dict(), len(self.shards)])
        if any(other != seen[0] for other in seen):  # files are still being copied or synchronized
            raise UserError(
                f"{cfg.data} differs between processes; wait until all machines see the same files, "
                "then start again"
            )
        self.prepare(trainer)

    def should_run(self, step: int, last: bool) -> bool:
        """Also true at the first step of a resumed run if that step was validated before. Its checkpoint was
        written before that validation, so best_val in the checkpoint does not include its loss."""
        return step == self.revalidate_step > 0 or super().should_run(step, last)

    def prepare(self, trainer) -> None:
        """Load the tokenizer and compute the baselines, once per run."""
        val_tokens = trainer.cfg.val_tokens
        missing = None
        try:
            name = tokenizer_name(trainer.raw_model.config, trainer.cfg.data)
            self.tokenizer = get_tokenizer(name)
            self.tokenizer.token_bytes()
        except UserError as error:
            missing = str(error)
        if missing := next(filter(None, trainer.world.gather(missing)), None):  # on some rank
            self.tokenizer = None
            trainer.world.print0(wrap(f"no samples and no bits per byte: {missing}"))
        if trainer.world.is_main:
            self.unigram = unigram_entropy(trainer.loader.shards, self.shards, val_tokens)
            if self.tokenizer:
                self.bytes_per_token = bytes_per_token(self.tokenizer, self.shards, val_tokens)

    def evaluate_means(self, trainer) -> dict[str, float]:
        """The results of evaluate(), divided by the number of targets."""
        sums = evaluate(trainer.model, *self.eval_args(trainer))
        return {name: value / sums["targets"] for name, value in sums.items()}

    def eval_args(self, trainer) -> tuple:
        """The arguments of evaluate() after the model."""
        world, precision = trainer.world, trainer.precision
        return self.shards, trainer.cfg, trainer.loader.batch_size, world, precision, self.stop

    def __call__(self, trainer) -> dict[str, float]:
        means = self.evaluate_means(trainer)
        loss = means["loss"]
        if not math.isfinite(loss):  # the weights are finite, but an activation overflows
            fix = lower_lr_hint(vars(trainer.cfg))
            raise RunError(
                f"the validation loss is {loss} after step {trainer.step}; {fix}, or more --warmup_steps"
            )
        on_disk = trainer.step and trainer.step == trainer.saved_step
        if on_disk and loss < trainer.best_val:
            trainer.best_val = loss
            if trainer.world.is_main:
                trainer.checkpointer.link_best(trainer.step)
        bits = {}
        if self.bytes_per_token:
            bits = {"bits_per_byte": loss / math.log(2) / self.bytes_per_token}
        return {name: mean for name, mean in means.items() if name != "targets"} | bits


def has_val_record(log: Path, step: int) -> bool:
    """Whether a run's log contains a validation of this step."""
    return f'"kind": "val", "step": {step},' in read_lenient(log)


def summed_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"loss": sum over the targets, in nats}, the default measure of evaluate()."""
    return {"loss": model(x, y, reduction="sum")[1]}


@torch.no_grad()
def evaluate(
    model: Any, shards: TokenShards, cfg: Any, batch_size: int, world: Any, precision: Any,
    stop: Any = None, measure: Callable = summed_loss, transform: Callable | None = None,
) -> dict[str, float]:  # fmt: skip
    """Sums over the first cfg.val_tokens targets of a split (0: all): {"loss": nats, "targets":
    count}.

    Each rank evaluates its part. measure(model, x, y) returns sums by name. transform: as in
    TokenLoader, called with seed 0, so that its result is the same at each step and in all runs. Raises
    GracefulStop between two batches if `stop` has received a signal, and UserError if there is no
    target.

    Tokens and their order depend only on the data; no random number is drawn. The last batch is padded
    with targets of -1, so that a compiled model sees only one shape."""
    targets, T = num_targets(shards, cfg.val_tokens), cfg.seq_len
    positions, totals = sequence_starts(shards, cfg), {}
    # sequences per rank: a multiple of batch_size
    per_rank = -(-len(positions) // (batch_size * world.world_size)) * batch_size
    sum_device = "cpu" if world.device.type == "mps" else world.device  # MPS has no 64-bit floats
    mine = range(world.rank * per_rank, (world.rank + 1) * per_rank, batch_size)
    for i in progress(mine, "validation", "batch"):
        if stop:
            stop.check()
        used = positions[i : i + batch_size]
        x = np.zeros((batch_size, T), dtype=np.int64)
        y = np.full((batch_size, T), -1, dtype=np.int64)
        if len(used):
            rows = shards.batch(used, T)
            x[: len(used)], y[: len(used)] = transform(*rows, 0, used) if transform else rows
            y[: len(used)][used[:, None] + np.arange(T) >= targets] = -1
        x, y = torch.from_numpy(x).to(world.device), torch.from_numpy(y).to(world.device)
        with precision.autocast():
            sums = measure(model, x, y) | {"targets": (y >= 0).sum()}
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.to(sum_device).double()
    sums = dict(zip(totals, world.all_reduce(torch.stack(list(totals.values()))).tolist()))
    check_targets(sums["targets"], shards, cfg.val_tokens)
    return sums


def check_targets(count: float, shards: TokenShards, val_tokens: int) -> None:
    require(
        count,
        f"val_tokens={val_tokens} of {shards.folder} contain no target; pass a larger --val_tokens, or 0 "
        "for all",
    )


def num_targets(shards: TokenShards, tokens: int) -> int:
    """How many of the first `tokens` positions of a split (0: all) have a next token."""
    return min(tokens or len(shards), len(shards) - 1)


def sequence_starts(shards: TokenShards, cfg: Any) -> np.ndarray:
    """Positions at which the sequences of an evaluation start."""
    if len(shards) < 2:
        raise UserError(
            f"the validation split in {cfg.data} has {len(shards)} token(s), but needs at least two; "
            "build it again, or pass another --data"
        )
    return np.arange(0, num_targets(shards, cfg.val_tokens), cfg.seq_len)


def target_counts(shards: TokenShards, tokens: int) -> np.ndarray:
    """How often each token (V,) is a target of the first `tokens` positions of a split (0: all)."""
    end, counts = 1 + num_targets(shards, tokens), np.zeros(shards.vocab_size, np.int64)
    for start in range(1, end, 2**24):
        ids = shards.read(start, min(2**24, end - start))
        ids = ids[shards.loss_mask(start, len(ids))] if shards.masks else ids
        counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
    return counts


def unigram_entropy(train_shards: TokenShards, val_shards: TokenShards, val_tokens: int) -> float:
    """Loss in nats per token of a model that knows only how often each token occurs in the first 20M
    tokens of the training data."""
    train, val = target_counts(train_shards, 20_000_000) + 1, target_counts(val_shards, val_tokens)
    check_targets(val.sum(), val_shards, val_tokens)
    return float(-(val / val.sum() * np.log(train / train.sum())).sum())


def bytes_per_token(tokenizer: Tokenizer, shards: TokenShards, val_tokens: int) -> float | None:
    """Mean number of text bytes per target, which converts nats per token to bits per byte."""
    counts, sizes = target_counts(shards, val_tokens), tokenizer.token_bytes()
    require(
        len(sizes) == len(counts),
        f"vocab_size={len(counts)} must be {len(sizes)}, the size of the tokenizer; leave it out "
        "(--vocab_multiple pads it)",
    )
    total_bytes = float(counts @ sizes)
    return total_bytes / int(counts.sum()) if counts.any() else None
