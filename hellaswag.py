"""HellaSwag (Zellers et al. 2019): which of four endings is likeliest to a model after a context?

    python hellaswag.py --model gpt2            # hub name, Hugging Face folder, checkpoint or run
    python hellaswag.py --model log/RUN --by_source --worst 10
    torchrun --standalone --nproc_per_node=8 hellaswag.py --model gpt2-xl

The completion style of the published GPT-2 numbers: the loss of each ending's tokens given the
context, the ending tokenised with a leading space. acc takes the ending with the smallest sum,
acc_norm the one with the smallest mean. Sections: 1 tokens, 2 batches, 3 scores, 4 results, 5 in a
training run, 6 command line. The file is downloaded and read by lab/data/hellaswag.py.

Shape letters: N examples, B rows of a batch (one example each), T tokens of a row, C channels,
M ending tokens.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from lab import models
from lab.cli import RunError, UserError, command, parse
from lab.data.hellaswag import is_published, locate, read_examples, source_of
from lab.data.tokenizers import get_tokenizer, name_of_size
from lab.device import Precision
from lab.files import check_writable
from lab.world import World

# ---------------------------------------------------------------------------------------- 1. tokens


@dataclass
class Examples:
    """Tokenised examples. The tokens of each lie in a row: its context, then its endings."""

    tokens: np.ndarray  # uint16, of all examples
    start: np.ndarray  # (N,) where each example's context begins
    ctx_len: np.ndarray  # (N,) tokens of the context
    end_start: np.ndarray  # (N,) where its endings begin
    end_len: np.ndarray  # (N, 4) tokens of the endings
    label: np.ndarray  # (N,) the right ending
    line: np.ndarray  # (N,) line of the file, from 1
    source: np.ndarray  # (N,) names
    activity: np.ndarray  # (N,) names

    def __len__(self):
        return len(self.label)

    def __getitem__(self, chosen):
        """The Examples of an array of indices, or of a mask."""
        arrays = {k: v if k == "tokens" else v[chosen] for k, v in vars(self).items()}
        return Examples(**arrays)

    def endings(self, i):
        """The tokens of example i's four endings."""
        stops = self.end_start[i] + np.cumsum(self.end_len[i])
        return [self.tokens[stop - n : stop] for stop, n in zip(stops, self.end_len[i])]


def tokenise(examples, tokenizer):
    """Examples from the dicts of read_examples. A context without tokens becomes end-of-text:
    something has to come before an ending's first token for that to have a loss."""
    pieces = [
        [tokenizer.encode(e["ctx"]) or [tokenizer.eot]]
        + [tokenizer.encode(" " + text) for text in e["endings"]]
        for e in examples
    ]
    lengths = np.array([[len(piece) for piece in row] for row in pieces], dtype=np.int64)  # (N, 5)
    start = np.cumsum(lengths.sum(1)) - lengths.sum(1)
    return Examples(
        tokens=np.array([t for row in pieces for piece in row for t in piece], dtype=np.uint16),
        start=start,
        ctx_len=lengths[:, 0],
        end_start=start + lengths[:, 0],
        end_len=lengths[:, 1:],
        label=np.array([e["label"] for e in examples]),
        line=np.array([e["line"] for e in examples]),
        source=np.array([source_of(e) for e in examples]),
        activity=np.array([str(e.get("activity_label")) for e in examples]),
    )


def choose(data, block_size, limit=0, skip_long=False):
    """(Examples to score, how many of them have a context that was cut, how many were left out).

    `limit` examples (0: all) are spread evenly over the file, whose first third is all ActivityNet.
    The last token of an ending is never an input, so context and ending may have block_size + 1
    together. A context is cut from the left until the longest of the four endings fits: all four
    see the same. Raises UserError for an ending that leaves no context, unless such examples are to
    be skipped."""
    n = min(limit or len(data), len(data))
    chosen = data[np.arange(n) * len(data) // n]
    longest = chosen.end_len.max(1)
    too_long = longest > block_size
    if too_long.any() and (too_long.all() or not skip_long):
        i = too_long.argmax()
        raise UserError(
            f"line {chosen.line[i]} has an ending of {longest[i]} tokens, the model's context "
            f"holds block_size={block_size} ({too_long.sum()} of {n} examples are like this)"
            + (
                "; take a larger model"
                if too_long.all()
                else "; hellaswag.py --skip_long leaves them out"
            )
        )
    chosen = chosen[~too_long]
    keep = np.minimum(chosen.ctx_len, block_size + 1 - longest[~too_long])
    cut = int((keep < chosen.ctx_len).sum())
    chosen.start, chosen.ctx_len = chosen.end_start - keep, keep
    return chosen, cut, int(too_long.sum())


# --------------------------------------------------------------------------------------- 2. batches

STEP = 32  # rows are padded to a multiple of this: ten shapes cover HellaSwag, at 10 % of padding
BATCH_TOKENS = 16384  # tokens of a batch, padding included (others: bench/hellaswag_speed.py)


def plan(lengths):
    """Cut rows of these lengths into batches: a list of (row indices, B, T), longest first.

    Rows of one padded length T make batches of equal B, the last of them filled up by at most one
    row a batch: as many shapes as padded lengths, so that a compiled model is compiled only that
    often. The plan does not depend on the number of processes, hence neither does any score."""
    padded = -(-lengths // STEP) * STEP
    batches = []
    for T in np.unique(padded)[::-1].tolist():
        rows = np.flatnonzero(padded == T)
        count = -(-len(rows) // max(1, BATCH_TOKENS // T))
        B = -(-len(rows) // count)
        batches += [(rows[i : i + B], B, T) for i in range(0, len(rows), B)]
    return batches


def pack(data, rows, B, T):
    """One row for each example: context, then the inputs of its four endings, so that the context
    is computed once.

    Returns idx, position and part (B, T): part is 0 for the context, 1 to 4 for an ending, 5 for
    padding; position goes on from the context in each ending, as if it stood alone. And where (M,),
    the places in the flat (B * T) rows whose outputs predict the endings' tokens, and targets (M,),
    those tokens: example after example, ending after ending."""
    idx, position = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64)
    part = np.full((B, T), 5, np.int8)
    where, targets = [], []
    for row, i in enumerate(rows):
        c = data.ctx_len[i]
        idx[row, :c] = data.tokens[data.start[i] : data.start[i] + c]
        position[row, :c] = np.arange(c)
        part[row, :c] = 0
        at = c
        for j, ending in enumerate(data.endings(i), start=1):
            n = len(ending) - 1  # the last token is predicted, and predicts nothing
            idx[row, at : at + n] = ending[:-1]
            position[row, at : at + n] = np.arange(c, c + n)
            part[row, at : at + n] = j
            where += [[row * T + c - 1], np.arange(row * T + at, row * T + at + n)]
            targets.append(ending)
            at += n
    where, targets = np.concatenate(where), np.concatenate(targets)
    return idx, position, part, where.astype(np.int64), targets.astype(np.int64)


# ---------------------------------------------------------------------------------------- 3. scores


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
    order, losses = [], []  # examples of this process; the losses of their endings' tokens
    bar = Bar(data, world)
    for i in range(0, len(batches), world.world_size):
        check()
        if i + world.rank >= len(batches):  # the last round has none for this process
            continue
        rows, B, T = batches[i + world.rank]
        packed = (torch.from_numpy(a) for a in pack(data, rows, B, T))
        *inputs, where, targets = (t.to(world.device, non_blocking=True) for t in packed)
        x = hidden(model, *inputs)[where]  # (M, C)
        losses += [
            model.head_loss(x_, model.lm_head.weight, t, "none")
            for x_, t in zip(x.split(head_rows), targets.split(head_rows))
        ]
        order.append(rows)
        bar.show(order, losses)
    bar.bar.close()
    sums = np.zeros((len(data), 4))
    if order:
        sums[np.concatenate(order)] = add_up(data, order, losses)
    return world.all_reduce(torch.from_numpy(sums)).numpy()


def add_up(data, order, losses):
    """Sums of the endings' losses (n, 4) of the examples `order`. It waits for the device."""
    lengths = data.end_len[np.concatenate(order)].ravel()
    flat = torch.cat(losses).cpu().double().numpy()
    return np.add.reduceat(flat, np.cumsum(lengths) - lengths).reshape(-1, 4)


class Bar:
    """On a terminal, from the third second on: how far it is, and rank 0's score so far."""

    def __init__(self, data, world):
        off = None if world.is_main else True  # None: off where stderr is no terminal
        self.bar = tqdm(total=len(data), desc="HellaSwag", delay=3, disable=off, leave=False)
        self.data, self.world_size, self.next_score = data, world.world_size, time.monotonic() + 3

    def show(self, order, losses):
        if not self.bar.disable and time.monotonic() > self.next_score:  # it waits for the device
            self.next_score = time.monotonic() + 1
            done = self.data[np.concatenate(order)]
            guess = predictions(add_up(self.data, order, losses), done.end_len)[1]
            self.bar.set_postfix(acc_norm=f"{(guess == done.label).mean():.4f}", refresh=False)
        self.bar.update(len(order[-1]) * self.world_size)


def predictions(sums, end_len):
    """The endings (N,) that acc and acc_norm choose."""
    return sums.argmin(1), (sums / end_len).argmin(1)


# --------------------------------------------------------------------------------------- 4. results


def interval(p, n, z=1.96):
    """95 % confidence interval of a share p of n (Wilson 1927): right for small n too."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def summarise(sums, end_len, label):
    """acc, acc_norm, standard errors (of a mean, as in lm-evaluation-harness), intervals, count."""
    out, n = {}, len(label)
    for name, guess in zip(("acc", "acc_norm"), predictions(sums, end_len)):
        p = float((guess == label).mean())
        stderr = math.sqrt(p * (1 - p) / max(1, n - 1))
        low, high = interval(p, n)
        out |= {name: p, f"{name}_stderr": stderr, f"{name}_low": low, f"{name}_high": high}
    return out | {"count": n}


def measure(model, data, world, check=lambda: None):
    """(summary, a dict of plain numbers; sums (N, 4)) of these Examples, the same on every process.

    Runs in the caller's autocast; draws no random numbers. Raises RunError for losses that are not
    finite.
    """
    t0 = time.perf_counter()
    sums = ending_losses(model, data, world, check)
    if not np.isfinite(sums).all():
        line = data.line[~np.isfinite(sums).all(1)][0]
        raise RunError(
            f"the loss of line {line} is not finite: the model's weights or its precision fail"
        )
    result = summarise(sums, data.end_len, data.label)
    return result | {"seconds": time.perf_counter() - t0}, sums


def prepare(model, world, path=None, split="val", limit=0, skip_long=False):
    """What choose returns for this model and file. One process touches disk and network, on any
    number of machines. Raises UserError on all of them."""
    found = None
    if world.is_main:
        try:
            tokenizer = get_tokenizer(name_of_size(model.config.vocab_size))
            data = tokenise(read_examples(path or locate(split=split)), tokenizer)
            found = choose(data, model.config.block_size, limit, skip_long)
        except UserError as error:
            found = error
    found = world.broadcast(found)
    if isinstance(found, UserError):
        raise found
    return found


def by_group(names, sums, end_len, label):
    """{name: summary} of the examples that share a name, the largest group first."""
    groups = {name: np.flatnonzero(names == name) for name in np.unique(names).tolist()}
    largest = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: summarise(sums[i], end_len[i], label[i]) for name, i in largest}


def most_sure_and_wrong(sums, end_len, label, count):
    """[(index, margin)] of wrong acc_norm choices: the margin is by how many nats a token the
    chosen ending beats the right one."""
    means = sums / end_len
    margin = means[np.arange(len(label)), label] - means.min(1)
    order = np.argsort(-margin, kind="stable")[:count]
    return [(int(i), float(margin[i])) for i in order if margin[i] > 0]


def table(groups):
    width = max(map(len, groups))
    rows = [f"{'':{width}}  count     acc  acc_norm  95 % interval"]
    for name, g in groups.items():
        low, high = g["acc_norm_low"], g["acc_norm_high"]
        scores = f"{g['count']:5d}  {g['acc']:.4f}    {g['acc_norm']:.4f}  {low:.3f} to {high:.3f}"
        rows.append(f"{name:{width}}  {scores}")
    return "\n".join(rows)


def describe(example):
    """A wrong choice as text: the right ending marked =, the chosen one >, with mean losses."""
    losses = example["mean_losses"]
    lines = [
        f"line {example['line']}, {example.get('activity_label')}, surer of the wrong one by "
        f"{example['margin']:.2f} nats a token\n    {example['ctx']}"
    ]
    for j, text in enumerate(example["endings"]):
        mark = "=" if j == example["label"] else ">" if losses[j] == min(losses) else " "
        lines.append(f"  {mark} {losses[j]:5.2f}  {text}")
    return "\n".join(lines)


def draw(groups, result, cfg):
    """Bars of the groups' acc_norm with 95 % intervals, as a picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from lab.tools.plot import style

    labels = [f"{name} ({g['count']})" for name, g in groups.items()]
    values, low, high = (
        np.array([g[f"acc_norm{part}"] for g in groups.values()]) for part in ("", "_low", "_high")
    )
    with rc_context(style() | {"figure.figsize": (8, 1.4 + 0.26 * len(groups))}):
        figure = Figure()
        ax = figure.subplots()
        ax.barh(labels, values, xerr=[values - low, high - values], error_kw={"elinewidth": 1})
        ax.axvline(0.25, ls=":", color="0.5", label="chance")
        ax.axvline(result["acc_norm"], ls="--", color="0.5", label="all")
        ax.margins(y=0.01)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        title = f"{cfg.model}: right in {result['acc_norm']:.1%} of {result['count']} (acc_norm)"
        ax.set(xlim=(0, high.max()), xlabel="acc_norm, with 95 % interval", title=title)
        ax.legend()
        figure.savefig(cfg.picture)


# ----------------------------------------------------------------------------- 5. in a training run


class HellaSwag:
    """The event of a training run: the score every so many steps, never of the untrained model."""

    name = "hella"

    def __init__(self, every, examples, world, precision, stop):
        self.every, self.examples, self.world = every, examples, world
        self.precision, self.stop = precision, stop
        self.prepared = None  # the tokenised examples, from the first time on

    def due(self, step, last):
        return self.every > 0 and step > 0 and (step % self.every == 0 or last)

    def __call__(self, run):
        """The summary as a dict; None where the file cannot be had or an ending does not fit into
        the model's context: the run goes on, and does not ask again. Raises Stopped between two
        batches."""
        if not self.prepared:
            try:
                self.prepared = prepare(run.raw_model, self.world, limit=self.examples)
            except UserError as error:
                self.world.say(f"step {run.step:5d}: no HellaSwag in this run: {error}")
                self.every = 0
                return None
        data, cut, skipped = self.prepared
        with self.precision.autocast():
            result, _ = measure(run.raw_model, data, self.world, self.stop.check)
        return result | {"cut": cut, "skipped": skipped}


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
    picture: str = ""  # write such a table as a picture to this file
    log_dir: str = "log"  # where the newest run is looked for


def main(argv):
    cfg = parse(Config, argv, prog="hellaswag.py")
    for name in ("limit", "worst"):
        if getattr(cfg, name) < 0:
            raise UserError(f"{name}={getattr(cfg, name)} must be 0 or more")
    if cfg.picture:  # before minutes of scores that would be lost with it
        if Path(cfg.picture).suffix not in (".png", ".svg", ".pdf"):
            raise UserError(f"picture={cfg.picture} must end in .png, .svg or .pdf")
        check_writable(cfg.picture, "picture")
    world = World(cfg.device)
    if world.distributed:
        dist.init_process_group(world.backend)
    precision = Precision(cfg.precision, world.device)
    precision.prepare()
    # One process looks for files: the newest run may be another one a moment later. And all of it
    # is found before minutes are spent on weights.
    path = str(locate(cfg.data, cfg.split)) if world.is_main else None
    cfg.model = world.broadcast(models.find(cfg.model, cfg.log_dir) if world.is_main else None)
    model = models.load(cfg.model).to(world.device).eval()
    data, cut, skipped = prepare(model, world, path, limit=cfg.limit, skip_long=cfg.skip_long)
    with precision.autocast():
        result, sums = measure(model, data, world)
    if world.is_main:
        report(cfg, path, result | {"cut": cut, "skipped": skipped}, data, sums, precision.name)
    world.barrier()  # nobody leaves while another may still talk to it


def report(cfg, path, result, data, sums, precision):
    """Print what was asked for, and draw."""
    published = is_published(path)
    names = {"by_source": data.source, "by_activity": data.activity}
    groups = {k: by_group(v, sums, data.end_len, data.label) for k, v in names.items()}
    asked = {k: v for k, v in groups.items() if getattr(cfg, k)}
    worst, means = [], sums / data.end_len
    if cfg.worst:
        examples = {e["line"]: e for e in read_examples(path)}
        for i, margin in most_sure_and_wrong(sums, data.end_len, data.label, cfg.worst):
            scores = {"margin": margin, "mean_losses": means[i].tolist()}
            worst.append(examples[data.line[i]] | scores)
    if cfg.json:
        about = {"model": cfg.model, "split": cfg.split, "published_file": published}
        record = about | {"precision": precision} | result | asked
        print(json.dumps(record | ({"worst": worst} if cfg.worst else {})), flush=True)
    else:
        parts = "", "_stderr", "_low", "_high"
        for name in ("acc", "acc_norm"):
            value, error, low, high = (f"{result[name + part]:.4f}" for part in parts)
            print(f"{name:8}  {value} +- {error}  (95 %: {low} to {high})")
        line = f"{result['count']} examples of {path} in {result['seconds']:.1f} s, {precision}"
        line += f"; {result['cut']} contexts cut from the left to fit" if result["cut"] else ""
        line += f"; {result['skipped']} left out, too long an ending" if result["skipped"] else ""
        print(line + ("" if published else "; not the published file, nor comparable with it"))
        for text in [table(g) for g in asked.values()] + [describe(e) for e in worst]:
            print("\n" + text)
    if cfg.picture:  # last, so that a place that cannot be written costs no results
        many = {k: g for k, g in groups["by_activity"].items() if g["count"] >= 20}
        draw(groups["by_source"] | dict(list(many.items())[:25]), result, cfg)


if __name__ == "__main__":
    command(main)
