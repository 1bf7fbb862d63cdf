"""Multiple-choice benchmarks: files, models, and the loss of each continuation of a context. Used by
hellaswag.py and blimp.py.

An item is a list [context, continuation, continuation, ...] of lists of token ids. The context needs
at least one token, from which the first token of a continuation is predicted: use [tokenizer.eot] if
there is no text. All items have the same number of continuations.

Shape letters: N items, K continuations of an item, B rows of a batch (one item each), T tokens of a
row, C channels, M continuation tokens of a batch.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from lab.cli import UserError, progress, require, wrap
from lab.distributed import World
from lab.files import first_line, read_errors
from lab.precision import Precision
from lab.registry import load_model, resolve_source
from lab.trainer.callbacks import PeriodicCallback

# Rows are padded to a multiple of this. With GPT-2's tokenizer, 2 % of HellaSwag's tokens and 20 % of
# BLiMP's are then padding (with 32: 9 % and 56 %).
PAD_MULTIPLE = 8
BATCH_TOKENS = 16384  # tokens of a batch, padding included


# ------------------------------------------------------------------------------------------- files


def download(path: Path, base_url: str, sha256: str, program: str) -> Path:
    """The published file at `path`; if it is missing, base_url + its name is downloaded and verified.
    Raises UserError if that fails. program: the command whose --data accepts a copy (for the message)."""
    if not path.exists():
        import pooch  # only needed to download; it checks the hash before the file gets its name

        registry = {path.name: sha256}
        files = pooch.create(path.parent, base_url, registry=registry, retry_if_failed=2)
        try:
            files.fetch(path.name, progressbar=sys.stderr.isatty())
        except (OSError, ValueError) as error:  # ValueError: wrong hash
            raise UserError(
                f"cannot download {base_url}{path.name} ({first_line(error)}); download it by hand to "
                f"{path}, or pass a copy to {program} with --data FILE"
            ) from error
    return path


def parse_lines(
    raw: bytes, path: str | Path, kind: str, check: Callable[[Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The records of a JSON Lines file, as check returns them, with the line number as "line". Raises
    UserError for the first invalid line. kind: the name of a record in that message."""
    records = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            with read_errors(f"{path} line {number}", kind, "fix or delete the line"):
                records.append(check(json.loads(line)) | {"line": number})
    return records


# ------------------------------------------------------------------------------------------ models


@dataclass
class ModelConfig:
    """Flags of every program that scores a model."""

    model: str = ""  # run, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; empty: the newest run
    device: str = "auto"  # cuda, mps or cpu
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: best of the device


def open_model(cfg: ModelConfig, benchmark: str) -> tuple[World, Precision, Any]:
    """(world, precision, model on the device) for a command. It resolves cfg.model and, under torchrun,
    starts the process group. Raises UserError for a model that does not predict the next token."""
    world = World(cfg.device)
    if world.distributed:
        dist.init_process_group(world.backend)
    precision = Precision(cfg.precision, world.device)
    precision.set_matmul_precision()
    # rank 0 chooses the files for all ranks: a moment later another run may be the newest
    cfg.model = world.run_on_rank0(lambda: resolve_source(cfg.model))
    model = load_model(cfg.model).to(world.device).eval()
    require(
        hasattr(model, "generate"),
        f"model={cfg.model} is a masked language model, but {benchmark} needs one that predicts the "
        "next token; choose a GPT",
    )
    return world, precision, model


class Benchmark(PeriodicCallback):
    """A benchmark as a callback of a training run, in which all ranks share the work.

    Subclasses define title, locate (find or download the file), load and measure. A UserError, such as
    that of a failed download, is printed and turns the benchmark off instead of ending the run.
    """

    title: str
    locate: Callable[[], Path]

    def __init__(self, name: str, interval: int, trainer, stop):
        super().__init__(name, interval)
        self.world, self.check, self.data = trainer.world, stop.check, None
        if self.interval:  # download now, so that a failure is noticed early
            self.attempt(lambda: self.world.run_on_rank0(lambda: str(self.locate())))

    def load(self, trainer) -> Any:
        """The tokenized items, on every rank."""
        raise NotImplementedError

    def measure(self, trainer) -> dict[str, Any]:
        """Values for the log. self.data holds the items."""
        raise NotImplementedError

    def __call__(self, trainer) -> dict[str, Any] | None:
        """The values of the log record. If load fails: None, and the benchmark is off from then on."""
        if self.data is None:
            self.data = self.attempt(lambda: self.load(trainer))
        if self.data is None:
            return None
        with trainer.precision.autocast():
            return self.measure(trainer)

    def attempt(self, function: Callable[[], Any]) -> Any:
        """function(); if it raises UserError, print it, turn this callback off and return None."""
        try:
            return function()
        except UserError as error:
            self.world.print0(wrap(f"no {self.title} in this run: {error}"))
            self.interval = 0


# ------------------------------------------------------------------------------------------ scores


class Model(Protocol):
    """The interface of a language model that scoring uses; see train_gpt2.GPT."""

    lm_head: torch.nn.Linear

    def hidden(
        self, idx: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor: ...

    def head_loss(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str
    ) -> torch.Tensor: ...


def row_length(item: list[list[int]]) -> int:
    """Number of input tokens of an item; the last token of each continuation is only a target."""
    context, *continuations = item
    return len(context) + sum(len(ids) - 1 for ids in continuations)


def make_batches(lengths: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Divide rows of these lengths (N,) into batches: pairs (row indices, T), longest first.

    Rows of equal padded length T are split into batches of nearly equal size. The batches, and therefore
    the scores, do not depend on the number of processes."""
    padded = -(-lengths // PAD_MULTIPLE) * PAD_MULTIPLE
    batches = []
    for T in np.unique(padded)[::-1].tolist():
        rows = np.flatnonzero(padded == T)
        num_batches = -(-len(rows) // max(1, BATCH_TOKENS // T))
        batches += [(part, T) for part in np.array_split(rows, num_batches)]
    return batches


def collate(items: list[list[list[int]]], T: int) -> tuple[np.ndarray, ...]:
    """Pack each item into one row of T tokens, so that its context is computed only once: first the
    context, then the inputs of its continuations.

    Returns (idx, position, segment, gather_idx, targets). idx, position, segment (B, T): segment is
    0 for the context and padding, k for the k-th continuation. The positions of each continuation
    start after the context, as if it were the only one. gather_idx (M,): indices of the flattened
    outputs (B * T) that predict the continuations' tokens; targets (M,): those tokens, ordered by
    item, then by continuation. Padding is at the end of a row, where causal attention hides it."""
    idx, position, segment = np.zeros((3, len(items), T), np.int64)
    gather_idx, targets = [], []
    for row, (context, *continuations) in enumerate(items):
        start = c = len(context)
        idx[row, :c], position[row, :c] = context, np.arange(c)
        for k, ids in enumerate(continuations, start=1):
            n = len(ids) - 1  # inputs: the last token predicts nothing
            span = slice(start, start + n)
            idx[row, span], position[row, span], segment[row, span] = ids[:-1], c + np.arange(n), k
            first = row * T + start
            gather_idx += [row * T + c - 1, *range(first, first + n)]
            targets += ids
            start += n
    return idx, position, segment, np.array(gather_idx), np.array(targets)


def hidden_states(
    model: Model, idx: torch.Tensor, position: torch.Tensor, segment: torch.Tensor
) -> torch.Tensor:
    """Final hidden states (B * T, C) of packed rows. A token attends to itself and to earlier tokens of
    the context and of its own continuation."""
    T = idx.size(1)
    same = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])
    causal = torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()
    mask = (same & causal)[:, None]  # (B, 1, T, T)
    return model.hidden(idx, position, mask).flatten(0, 1)


@torch.no_grad()
def continuation_losses(
    model: Model,
    items: list[list[list[int]]],
    world: World,
    description: str = "scoring",
    check: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Summed loss in nats of each continuation given its context: (N, K) in float64, on every rank.

    Each rank computes every world_size-th batch. check() is called between batches, equally often
    on all ranks. description: text of the progress bar. For each continuation,
    len(context) + len(continuation) - 1 must not exceed block_size; its last token is not an input."""
    # Only continuation tokens go through the head, in chunks whose float32 logits take at most
    # 1 GiB. On a CPU the limit is 32 MiB, because larger blocks are returned to the system after each
    # use, and allocating them again takes longer than the matmul.
    logits_bytes = 2 ** (30 if world.device.type == "cuda" else 25)
    chunk = max(1, logits_bytes // (4 * model.lm_head.weight.size(0)))
    batches = make_batches(np.array([row_length(item) for item in items]))
    computed = []
    # shown at once, because on a CPU the first batch may take half a minute
    bar = progress(range(0, len(batches), world.world_size), description, "batch", delay=0)
    cuda = world.device.type == "cuda"  # non-blocking copies to MPS may be wrong: see TokenLoader
    for i in bar:
        check()
        # a rank without a batch in the last round repeats the last batch, because FSDP2's all-gathers
        # need all ranks
        mine = i + world.rank
        rows, T = batches[min(mine, len(batches) - 1)]
        arrays = collate([items[row] for row in rows], T)
        *inputs, gather_idx, targets = (
            torch.from_numpy(a).to(world.device, non_blocking=cuda) for a in arrays
        )
        x = hidden_states(model, *inputs)[gather_idx]  # (M, C)
        losses = [
            model.head_loss(x_, model.lm_head.weight, y, "none")
            for x_, y in zip(x.split(chunk), targets.split(chunk))
        ]
        if mine < len(batches):
            computed.append((rows, torch.cat(losses)))
    sums = np.zeros((len(items), len(items[0]) - 1))
    for rows, losses in computed:  # after the loop, so that the CPU does not wait for each batch
        lengths = np.array([len(ids) for row in rows for ids in items[row][1:]])
        starts = np.cumsum(lengths) - lengths
        row_sums = np.add.reduceat(losses.cpu().double().numpy(), starts)
        sums[rows] = row_sums.reshape(len(rows), -1)
    return world.all_reduce(torch.from_numpy(sums)).numpy()
