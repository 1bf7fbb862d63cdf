"""HellaSwag (Zellers et al. 2019): which of four endings is likeliest to a model after a context?

    python hellaswag.py --model gpt2            # hub name, Hugging Face folder, checkpoint or run
    torchrun --standalone --nproc_per_node=8 hellaswag.py --model gpt2-xl

The completion style of the published GPT-2 numbers: the loss of each ending's tokens given the
context, the ending tokenised with a leading space. acc takes the ending with the smallest sum,
acc_norm the one with the smallest mean. lab/data/hellaswag.py downloads and reads the file, and
lab/tools/hellaswag_report.py shows the results.

Shape letters: N examples, B rows of a batch (one example each), T tokens of a row, C channels, M
tokens of endings.
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from lab import models
from lab.cli import RunError, UserError, command, parse, progress
from lab.data.hellaswag import locate, read_examples
from lab.data.tokenizers import get_tokenizer, name_of_size
from lab.device import Precision
from lab.evals import Every
from lab.tools import hellaswag_report
from lab.world import World

# ---------------------------------------------------------------------------------------- 1. tokens


@dataclass
class Examples:
    """Tokenised examples."""

    rows: list  # the dicts of read_examples
    tokens: list  # of each, [context, ending, ending, ending, ending]: lists of ids
    cut: int = 0  # how many contexts were cut to fit
    skipped: int = 0  # how many examples were left out

    def __post_init__(self):
        self.ctx_len = np.array([len(pieces[0]) for pieces in self.tokens])  # (N,)
        self.end_len = np.array([list(map(len, pieces[1:])) for pieces in self.tokens])  # (N, 4)
        self.label = np.array([row["label"] for row in self.rows])  # (N,)

    def __len__(self):
        return len(self.rows)


def choose(examples, tokenizer, block_size, limit=0, skip_long=False):
    """The Examples to score, of the dicts of read_examples.

    `limit` examples (0: all) are spread evenly over the file, whose first third is all ActivityNet.
    A context without tokens becomes end-of-text: something has to come before an ending's first
    token for that to have a loss. The last token of an ending is never an input, so context and
    ending may have block_size + 1 together. A context is cut from the left until the longest of the
    four endings fits: all four see the same. Raises UserError for an ending that leaves no context,
    unless skip_long."""
    n = min(limit or len(examples), len(examples))
    rows, tokens, cut = [], [], 0
    for row in (examples[i] for i in np.arange(n) * len(examples) // n):
        context = tokenizer.encode(row["ctx"]) or [tokenizer.eot]
        endings = [tokenizer.encode(" " + text) for text in row["endings"]]
        longest = max(map(len, endings))
        if longest <= block_size:
            keep = block_size + 1 - longest
            cut += len(context) > keep
            rows.append(row)
            tokens.append([context[-keep:], *endings])
        elif not skip_long:
            raise UserError(
                f"line {row['line']} has an ending of {longest} tokens, the model's "
                f"context holds block_size={block_size}; hellaswag.py --skip_long leaves it out"
            )
    if not rows:
        raise UserError(
            f"all {n} examples have an ending of more than block_size={block_size} tokens; "
            "take a larger model"
        )
    return Examples(rows, tokens, cut, n - len(rows))


# --------------------------------------------------------------------------------------- 2. batches

STEP = 32  # rows are padded to a multiple of this: 10 % of HellaSwag is then padding
BATCH_TOKENS = 16384  # tokens of a batch, padding included


def plan(lengths):
    """Cut rows of these lengths into batches: a list of (row indices, T), longest first.

    Rows of one padded length T make batches of nearly equal size. The plan does not depend on the
    number of processes, hence neither does any score."""
    padded = -(-lengths // STEP) * STEP
    batches = []
    for T in np.unique(padded)[::-1].tolist():
        rows = np.flatnonzero(padded == T)
        count = -(-len(rows) // max(1, BATCH_TOKENS // T))
        batches += [(part, T) for part in np.array_split(rows, count)]
    return batches


def pack(data, rows, T):
    """One row for each example: context, then the inputs of its four endings, so that the context
    is computed once.

    Returns idx, position and part (B, T): part is 0 for the context, 1 to 4 for an ending; position
    goes on from the context in each ending, as if it stood alone. Padding is at the end, where no
    token looks. And where (M,), the places in the flat (B * T) rows whose outputs predict the
    endings' tokens, and targets (M,), those tokens: example after example, ending after ending."""
    idx, position, part = np.zeros((3, len(rows), T), np.int64)
    where, targets = [], []
    for row, i in enumerate(rows):
        context, *endings = data.tokens[i]
        at = c = len(context)
        idx[row, :c], position[row, :c] = context, np.arange(c)
        for j, ending in enumerate(endings, start=1):
            n = len(ending) - 1  # the last token is predicted, and predicts nothing
            here = slice(at, at + n)
            idx[row, here], position[row, here], part[row, here] = ending[:-1], c + np.arange(n), j
            where += [row * T + c - 1, *range(row * T + at, row * T + at + n)]
            targets += ending
            at += n
    return idx, position, part, np.array(where), np.array(targets)


# ---------------------------------------------------------------------------------------- 3. losses


def hidden(model, idx, position, part):
    """The model's last hidden states (B * T, C) of packed rows: a token sees the context and its
    own ending, up to itself."""
    T = idx.size(1)
    same = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    mask = (same & torch.ones(T, T, dtype=torch.bool, device=idx.device).tril())[:, None]
    return model.hidden(idx, position, mask).flatten(0, 1)  # mask (B, 1, T, T)


@torch.no_grad()
def ending_losses(model, data, world, check=lambda: None):
    """Sum of the losses of each ending (N, 4) in float64, on every process; each does its share.

    check() is called between two batches, on all processes equally often. Only the endings'
    positions go through the head, so many at a time that their logits stay under 1 GiB, or 32 MiB
    on CPU, where larger blocks go back to the system after each use and getting them again costs
    more than the products."""
    memory = 2 ** (30 if world.device.type == "cuda" else 25)  # bytes
    head_rows = memory // (4 * model.lm_head.weight.size(0))
    batches = plan(data.ctx_len + (data.end_len - 1).sum(1))
    rounds, found = range(0, len(batches), world.world_size), []
    sums = np.zeros((len(data), 4))

    bar = progress(rounds, "HellaSwag", "batch")
    bar.refresh()  # shows it at once: a CPU may take half a minute for the first batch
    for i in bar:
        check()
        mine = i + world.rank  # the last round may have none for this process, which computes along
        rows, T = batches[min(mine, len(batches) - 1)]
        packed = (torch.from_numpy(a) for a in pack(data, rows, T))
        *inputs, where, targets = (t.to(world.device, non_blocking=True) for t in packed)
        x = hidden(model, *inputs)[where]  # (M, C)
        losses = [
            model.head_loss(x_, model.lm_head.weight, t, "none")
            for x_, t in zip(x.split(head_rows), targets.split(head_rows))
        ]
        if mine < len(batches):
            found.append((rows, torch.cat(losses)))
    for rows, losses in found:  # all at the end: until here nobody has waited for the device
        lengths = data.end_len[rows].ravel()
        starts = np.cumsum(lengths) - lengths
        sums[rows] = np.add.reduceat(losses.cpu().double().numpy(), starts).reshape(-1, 4)
    return world.all_reduce(torch.from_numpy(sums)).numpy()


# ---------------------------------------------------------------------------------------- 4. scores


def interval(p, n, z=1.96):
    """95 % confidence interval of a share p of n (Wilson 1927): right for small n too."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return [max(0.0, low), min(1.0, high)]


def summarise(sums, end_len, label):
    """acc, acc_norm, standard errors (of a mean, as in lm-evaluation-harness), intervals, count."""
    out, n = {}, len(label)
    for name, losses in (("acc", sums), ("acc_norm", sums / end_len)):
        p = float((losses.argmin(1) == label).mean())
        stderr = math.sqrt(p * (1 - p) / max(1, n - 1))
        low, high = interval(p, n)
        out |= {name: p, f"{name}_stderr": stderr, f"{name}_low": low, f"{name}_high": high}
    return out | {"count": n}


def measure(model, data, world, check=lambda: None):
    """(summary, a dict of plain numbers; sums (N, 4)) of these Examples, the same on every process.
    Draws no random number. Raises RunError for losses that are not finite."""
    t0 = time.perf_counter()
    sums = ending_losses(model, data, world, check)
    if not np.isfinite(sums).all():
        line = data.rows[(~np.isfinite(sums)).any(1).argmax()]["line"]
        raise RunError(
            f"the loss of line {line} is not finite: the model's weights or its precision fail"
        )
    about = {"seconds": time.perf_counter() - t0, "cut": data.cut, "skipped": data.skipped}
    return summarise(sums, data.end_len, data.label) | about, sums


def prepare(model, world, path=None, limit=0, skip_long=False):
    """The Examples of this file that choose gives for this model. One process touches disk and
    network, on any number of machines."""

    def chosen():
        tokenizer = get_tokenizer(name_of_size(model.config.vocab_size))
        examples = read_examples(path or locate())
        return choose(examples, tokenizer, model.config.block_size, limit, skip_long)

    return world.on_main(chosen)


# ----------------------------------------------------------------------------- 5. in a training run


class HellaSwag(Every):
    """The score as an event of a training run, never of the untrained model."""

    def __init__(self, run, stop):
        super().__init__("hella", run.cfg.hella_every)
        self.world, self.stop = run.world, stop
        self.data = None  # the Examples, from the first time on
        if self.every:  # now, as hours later there may be nobody to mend it
            self.attempt(lambda: self.world.on_main(lambda: str(locate())))

    def due(self, step, last):
        return step > 0 and super().due(step, last)

    def __call__(self, run):
        """The summary as a dict; None where an ending does not fit into the model's context: the run
        goes on, and does not ask again."""
        if self.data is None:
            limit = run.cfg.hella_examples
            self.data = self.attempt(lambda: prepare(run.raw_model, self.world, limit=limit))
        if self.data is None:
            return None
        with run.precision.autocast():
            result, _ = measure(run.raw_model, self.data, self.world, self.stop.check)
        return result

    def attempt(self, function):
        """What function() returns; None where it raises UserError, which is said."""
        try:
            return function()
        except UserError as error:
            self.world.say(f"no HellaSwag in this run: {error}")
            self.every = 0


# ---------------------------------------------------------------------------------- 6. command line


@dataclass
class Config:
    """Measure a model on HellaSwag: acc and acc_norm with standard errors and 95 % intervals."""

    model: str = ""  # run, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; empty: the newest run
    data: str = ""  # a HellaSwag file, or a folder with one; downloaded to data/hellaswag if empty
    split: Literal["val", "train"] = "val"  # val is the one that is published (test has no labels)
    limit: int = 0  # how many examples, spread evenly over the file; 0 is all
    skip_long: bool = False  # leave out endings longer than the model's context (small byte models)
    device: str = "auto"  # cuda, mps or cpu
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: the device's best
    json: bool = False  # one JSON line instead of text
    worst: int = 0  # show so many examples where the model was most sure and wrong
    by_source: bool = False  # a table of ActivityNet and WikiHow
    by_activity: bool = False  # a table of all activities
    picture: str = ""  # write both tables as a picture to this file: sources, largest activities


def main(argv):
    cfg = parse(Config, argv)
    for name in ("limit", "worst"):
        if getattr(cfg, name) < 0:
            raise UserError(f"{name}={getattr(cfg, name)} must be 0 or more")
    if cfg.picture:
        hellaswag_report.check_picture(cfg.picture)
    world = World(cfg.device)
    if world.distributed:
        dist.init_process_group(world.backend)
    precision = Precision(cfg.precision, world.device)
    precision.prepare()
    # one process looks for files: the newest run may be another one a moment later
    cfg.model = world.on_main(lambda: models.find(cfg.model))
    model = models.load(cfg.model).to(world.device).eval()
    if not hasattr(model, "generate"):
        raise UserError(f"{cfg.model} fills in hidden words: it cannot score how a text goes on")
    path = world.on_main(lambda: str(locate(cfg.data, cfg.split)))
    data = prepare(model, world, path, limit=cfg.limit, skip_long=cfg.skip_long)
    with precision.autocast():
        result, sums = measure(model, data, world)
    if world.is_main:
        hellaswag_report.report(cfg, path, precision.name, result, data, sums, summarise)
    world.barrier()  # nobody leaves while another may still talk to it


if __name__ == "__main__":
    command(main)
