"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest after a context?

    python hellaswag.py --model gpt2                          # hub name, Hugging Face folder, checkpoint or run folder
    python hellaswag.py --model log/RUN --by_source --worst 10
    torchrun --standalone --nproc_per_node=8 hellaswag.py --model gpt2-xl

The completion style of the published GPT-2 numbers: the loss of each ending's tokens given the context, the ending
tokenised with a leading space. acc takes the ending with the smallest sum, acc_norm the one with the smallest mean.
train_gpt2.py calls evaluate() between its steps. Sections: 1 the file, 2 tokens, 3 batches, 4 scores, 5 results,
6 command line.

Shape letters: N examples, B rows of a batch (one example each), T tokens of a row, C channels, M ending tokens.
"""

import contextlib
import hashlib
import http.client
import json
import math
import os
import socket
import sys
import time
import types
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


import numpy as np
import torch

from lab.files import check_writable

# ---------------------------------------------------------------------------------------------------- 1. the file

FOLDER = Path("data/hellaswag")  # what is downloaded, and the tokens made from it
URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{}.jsonl"
PUBLISHED = {  # split: (bytes, sha256); the test split has no labels
    "val": (12_246_618, "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"),
    "train": (47_496_131, "dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d"),
}
MAX_WAIT = 30  # seconds between two tries at most; they wait 1, 2, 4, ...


def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def download(url, path, size, sha256, tries=None):
    """Fetch url to path, which appears whole and checked or not at all. What came is kept beside it as .part, and the
    next try, or the next call, goes on from there. Raises OSError, saying how to do it by hand."""
    tries = tries or int(os.environ.get("HELLASWAG_TRIES", 5))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for failures in range(1, tries + 1):
        try:
            fetch(url, part, size)
            if sha256_of(part) != sha256:
                part.unlink()
                raise OSError("what came has another SHA-256 than the published file")
            os.replace(part, path)
            return
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
            gone = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429)
            # no such name: there is no network. A name server that does not answer says EAI_AGAIN, and may do so later
            gone |= getattr(getattr(error, "reason", None), "errno", None) == socket.EAI_NONAME
            if gone or failures == tries:
                raise OSError(
                    f"cannot download {url} ({reason}), tried {failures} times; download it by hand to {path} (hellaswag.py "
                    "also takes a copy: --data FILE)"
                ) from error
        seconds = min(2 ** (failures - 1), MAX_WAIT)
        print(f"no answer ({reason[:80]}); try {failures + 1} of {tries} in {seconds} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


def fetch(url, part, size):
    """Bring part to `size` bytes, from where it ends."""
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    if have < size:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=30) as response:
            # a server that does not know parts answers 200 and sends all of it
            with part.open("ab" if response.status == 206 else "wb") as f:
                while piece := response.read(2**16):  # written as it comes: what came before a break is kept
                    f.write(piece)
        if part.stat().st_size < size:
            raise OSError(f"the connection was closed after {part.stat().st_size} of {size} bytes")


def locate(data="", split="val"):
    """Path of the split's file: `data` (a file, or a folder that holds it), else FOLDER's, downloaded if missing."""
    name = URL.format(split).rsplit("/", 1)[1]
    path = Path(data or FOLDER)
    if path.is_dir() or not data:
        path = path / name
    if not data and not path.exists():
        download(URL.format(split), path, *PUBLISHED[split])
    if not path.is_file():
        raise FileNotFoundError(f"no HellaSwag file {path}; name one with --data, or leave --data out to download it")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{path} may not be read by you; change its permissions, or name another with --data")
    return path


def read_examples(path):
    """The examples of a HellaSwag file as dicts, `line` added. Raises ValueError naming the first line that is wrong."""
    examples = []
    for number, raw in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if raw.strip():
            examples.append(check_example(raw, f"{path} line {number}") | {"line": number})
    if not examples:
        raise ValueError(f"{path} holds no examples; it should have one JSON object a line. Download it again")
    return examples


def check_example(raw, where):
    """The example that a line of bytes holds, its label an integer from 0 to 3."""
    try:
        example = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}); save the file as UTF-8 "
            "or download it again"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): a HellaSwag file has one object a line; "
            "correct it or download it again"
        ) from error
    if not isinstance(example, dict) or not {"ctx", "endings", "label"} <= example.keys():
        got = ", ".join(map(str, example)) if isinstance(example, dict) else type(example).__name__
        missing = "(the test split has no labels)" if isinstance(example, dict) and "label" not in example else ""
        raise ValueError(f"{where} must hold ctx, endings and label, and holds {got} {missing}".rstrip()
                         + "; use the val or train split")  # fmt: skip
    endings, label = example["endings"], example["label"]
    if not isinstance(endings, list) or len(endings) != 4:
        got = f"{len(endings)} endings" if isinstance(endings, list) else f"endings of type {type(endings).__name__}"
        raise ValueError(f"{where} has {got}, every example needs 4; correct the line or take it out")
    if not all(isinstance(text, str) and text.strip() for text in endings) or not isinstance(example["ctx"], str):
        raise ValueError(f"{where}: ctx must be a text and the 4 endings texts that are not empty; correct the line")
    if str(label) not in ("0", "1", "2", "3"):  # the hub's copy has the label as a text
        raise ValueError(
            f"{where} has the label {label!r}, it must be 0, 1, 2 or 3, the index of the right ending; correct the line "
            "or take it out"
        )
    return example | {"label": int(label)}


def sources(examples):
    """Where each example came from: "activitynet" or "wikihow".

    The published file says so in source_id ("activitynet~v_...", "wikihow~123"). A copy without it tells by its form:
    an ActivityNet example goes on in mid-sentence, so it has a ctx_b; that is decided by the majority of an activity.
    "unknown" where ctx_b is missing too.
    """
    votes = {}
    for e in examples:
        if "ctx_b" in e:
            votes.setdefault(e.get("activity_label"), []).append(bool(e["ctx_b"]))
    guess = {a: "activitynet" if 2 * sum(v) > len(v) else "wikihow" for a, v in votes.items()}
    return [str(e.get("source_id") or guess.get(e.get("activity_label"), "unknown")).split("~")[0] for e in examples]


# ------------------------------------------------------------------------------------------------------ 2. tokens


@dataclass
class Examples:
    """A tokenised file. The tokens of an example lie in a row: its context, then its endings."""

    tokens: np.ndarray  # uint16, of all examples
    start: np.ndarray  # (N,) where each example's tokens begin
    ctx_len: np.ndarray  # (N,) tokens of the context
    end_len: np.ndarray  # (N, 4) tokens of the endings
    label: np.ndarray  # (N,) the right ending
    line: np.ndarray  # (N,) line of the file, from 1
    source: np.ndarray  # (N,) names
    activity: np.ndarray  # (N,) names

    def __len__(self):
        return len(self.label)

    def endings(self, i):
        """The tokens of example i's four endings."""
        stops = self.start[i] + self.ctx_len[i] + np.cumsum(self.end_len[i])
        return [self.tokens[stop - n : stop] for stop, n in zip(stops, self.end_len[i])]


def tokenise(examples, tokenizer):
    """Examples from the dicts of read_examples. A context without tokens becomes end-of-text: something has to come
    before an ending's first token for that to have a loss."""
    pieces = [[tokenizer.encode(e["ctx"]) or [tokenizer.eot], *(tokenizer.encode(" " + t) for t in e["endings"])]
              for e in examples]  # fmt: skip
    lengths = np.array([[len(p) for p in row] for row in pieces], dtype=np.int64)  # (N, 5)
    return Examples(
        tokens=np.array([t for row in pieces for piece in row for t in piece], dtype=np.uint16),
        start=np.cumsum(lengths.sum(1)) - lengths.sum(1), ctx_len=lengths[:, 0], end_len=lengths[:, 1:],
        label=np.array([e["label"] for e in examples]), line=np.array([e["line"] for e in examples]),
        source=np.array(sources(examples)), activity=np.array([str(e.get("activity_label")) for e in examples]),
    )  # fmt: skip


def load(path, tokenizer_name, cache_dir=None):
    """The tokenised file, from cache_dir (FOLDER) if this content was tokenised before. Raises OSError or ValueError."""
    from lab.data.tokenizers import get_tokenizer

    cache = Path(cache_dir or FOLDER) / f"{Path(path).stem}_{tokenizer_name}_v1_{sha256_of(path)[:16]}.npz"
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            return Examples(**arrays)
    except Exception:  # none there, or a broken one, for which zip and numpy have many exceptions: make it again
        data = tokenise(read_examples(path), get_tokenizer(tokenizer_name))
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as f:
            np.savez(f, **vars(data))
        os.replace(part, cache)
    except OSError:  # a folder that may not be written: tokenised again next time, a second lost
        pass
    return data


# ----------------------------------------------------------------------------------------------------- 3. batches

STEP = 32  # rows are padded to a multiple of this: ten shapes cover HellaSwag, at 10 % of padding
BATCH_TOKENS = 16384  # tokens of a batch, padding included (what else was tried: bench/hellaswag_speed.py)


def check_amounts(limit, batch_tokens=BATCH_TOKENS):
    """Raise ValueError for a number of examples or of tokens that cannot be."""
    if limit < 0:
        raise ValueError(f"limit={limit} must be 0 (all examples) or more")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens} must be at least 1")


def choose(data, limit, block_size, skip_long):
    """(examples to score, tokens of context that each keeps, examples left out). limit 0 is all.

    A limited choice is spread evenly over the file, whose first third is all ActivityNet. The last token of an ending
    is never an input, so context and ending may have block_size + 1 together. A context is cut from the left until the
    longest of the four endings fits: all four see the same. Raises ValueError for an ending that leaves no context,
    unless such examples are to be skipped.
    """
    check_amounts(limit)
    n = min(limit or len(data), len(data))
    chosen = np.arange(n) * len(data) // n
    longest = data.end_len[chosen].max(1)
    too_long = longest > block_size
    if too_long.any() and not skip_long:
        i = chosen[too_long.argmax()]
        raise ValueError(
            f"line {data.line[i]} has an ending of {longest[too_long.argmax()]} tokens, the model's context holds "
            f"block_size={block_size} ({too_long.sum()} of {n} examples are like this); --skip_long leaves them out"
        )
    if too_long.all():
        raise ValueError(f"all {n} examples have an ending of more than block_size={block_size} tokens; nothing is left")
    chosen, longest = chosen[~too_long], longest[~too_long]
    return chosen, np.minimum(data.ctx_len[chosen], block_size + 1 - longest), int(too_long.sum())


def plan(lengths, batch_tokens):
    """Cut rows of these lengths into batches: a list of (row indices, B, T), longest first.

    Rows of one padded length T make batches of equal B, the last of them filled up by at most one row a batch: as many
    shapes as padded lengths, so that a compiled model is compiled only that often. The plan does not depend on the
    number of processes, hence neither does any score.
    """
    padded = -(-lengths // STEP) * STEP
    batches = []
    for T in np.unique(padded)[::-1].tolist():
        rows = np.flatnonzero(padded == T)
        count = -(-len(rows) // max(1, batch_tokens // T))
        B = -(-len(rows) // count)
        batches += [(rows[i : i + B], B, T) for i in range(0, len(rows), B)]
    return batches


def pack(data, examples, keep, B, T):
    """One row for each example: context, then the inputs of its four endings, so that the context is computed once.

    Returns idx, position and part (B, T): part is 0 for the context, 1 to 4 for an ending, 5 for padding; position
    goes on from the context in each ending, as if it stood alone. And where (M,), the places in the flat (B * T) rows
    whose outputs predict the endings' tokens, and targets (M,), those tokens: example after example, ending after ending.
    """
    idx, position = np.zeros((B, T), np.int64), np.zeros((B, T), np.int64)
    part = np.full((B, T), 5, np.int8)
    where, targets = [], []
    for row, (i, c) in enumerate(zip(examples, keep)):
        stop = data.start[i] + data.ctx_len[i]
        idx[row, :c] = data.tokens[stop - c : stop]
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
    return idx, position, part, np.concatenate(where).astype(np.int64), np.concatenate(targets).astype(np.int64)


# ------------------------------------------------------------------------------------------------------ 4. scores


def hidden(model, idx, position, part):
    """GPT's last hidden states (B * T, C) of packed rows: a token sees the context and its own ending, up to itself."""
    T = idx.size(1)
    same = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    mask = (same & torch.ones(T, T, dtype=torch.bool, device=idx.device).tril())[:, None]  # (B, 1, T, T)
    return model.hidden(idx, position, mask).flatten(0, 1)


@torch.no_grad()
def ending_losses(model, data, chosen, keep, batch_tokens, world, trunk=hidden, stopped=lambda: False):
    """Sum of the losses of each ending (len(chosen), 4) in float64, on every process; each did its share. None if stopped().

    Only the endings' positions go through the head, so many at a time that their logits stay under 1 GiB, or 32 MiB on
    CPU, where larger blocks go back to the system after each use and getting them again costs more than the products.
    """
    head_rows = 2 ** (30 if world.device.type == "cuda" else 25) // (4 * model.lm_head.weight.size(0))
    rows = keep + (data.end_len[chosen] - 1).sum(1)
    batches = plan(rows, batch_tokens)
    losses, order = [], []
    for i in range(0, len(batches), world.world_size):
        if stopped():
            return None
        if i + world.rank >= len(batches):  # the last round has none for this process
            continue
        examples, B, T = batches[i + world.rank]
        packed = pack(data, chosen[examples], keep[examples], B, T)
        *inputs, where, targets = (torch.from_numpy(a).to(world.device, non_blocking=True) for a in packed)
        x = trunk(model, *inputs)[where]  # (M, C)
        losses += [
            linear_cross_entropy(x_, model.lm_head.weight, t, model.config.vocab_size, "plain", reduction="none")
            for x_, t in zip(x.split(head_rows), targets.split(head_rows))
        ]
        order.append(examples)
    sums = np.zeros((len(chosen), 4))
    if order:
        order = np.concatenate(order)
        lengths = data.end_len[chosen[order]].ravel()
        flat = torch.cat(losses).cpu().double().numpy()  # the one place where the host waits for the device
        sums[order] = np.add.reduceat(flat, np.cumsum(lengths) - lengths).reshape(-1, 4)
    return world.sum(torch.from_numpy(sums)).numpy()


def predictions(sums, end_len):
    """The endings (N,) that acc and acc_norm choose."""
    return sums.argmin(1), (sums / end_len).argmin(1)


# ----------------------------------------------------------------------------------------------------- 5. results


def interval(p, n, z=1.96):
    """95 % confidence interval of a share p of n (Wilson 1927): inside [0, 1] and right for few examples too."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def summarise(sums, end_len, label):
    """acc, acc_norm, standard errors (of a mean, as lm-evaluation-harness has them), intervals, count."""
    out, n = {}, len(label)
    for name, guess in zip(("acc", "acc_norm"), predictions(sums, end_len)):
        p = float((guess == label).mean())
        low, high = interval(p, n)
        out |= {name: p, f"{name}_stderr": math.sqrt(p * (1 - p) / max(1, n - 1)), f"{name}_low": low, f"{name}_high": high}
    return out | {"count": n}


def evaluate(model, limit=0, world=None, **options):
    """HellaSwag accuracies of a bare GPT as a dict of numbers, the same on every process.

    world has rank, world_size, device, sum(tensor) and from_main(value); without one this process is alone. Runs in
    the caller's autocast; draws no random numbers. None if the option stopped, a function that all processes must agree in,
    is true before one of the batches. Raises OSError if the data cannot be had, ValueError if it is wrong.
    """
    return measure(model, limit, world, **options)[0]


def measure(model, limit=0, world=None, data="", split="val", batch_tokens=BATCH_TOKENS, skip_long=False, trunk=hidden,
            stopped=lambda: False):  # fmt: skip
    """(summary, tokenised file, examples scored, their sums (N, 4)). See evaluate."""
    t0 = time.perf_counter()
    check_amounts(limit, batch_tokens)
    if world is None:
        device = model.lm_head.weight.device
        world = types.SimpleNamespace(rank=0, world_size=1, device=device, sum=lambda t: t, from_main=lambda v: v)
    from lab.data.tokenizers import name_of_size

    loaded, error = None, None
    if world.rank == 0:
        try:
            loaded = load(locate(data, split), name_of_size(model.config.vocab_size))
        except (OSError, ValueError) as problem:
            error = problem
    loaded, error = world.from_main((loaded, error))  # one process touches disk and network, on any number of machines
    if error:
        raise error
    chosen, keep, skipped = choose(loaded, limit, model.config.block_size, skip_long)
    sums = ending_losses(model, loaded, chosen, keep, batch_tokens, world, trunk, stopped)
    if sums is None:
        return None, loaded, chosen, None
    if not np.isfinite(sums).all():
        bad = loaded.line[chosen[~np.isfinite(sums).all(1)][0]]
        raise FloatingPointError(f"the loss of line {bad} is not finite: the model's weights or its precision are broken")
    result = summarise(sums, loaded.end_len[chosen], loaded.label[chosen])
    result |= {"cut": int((keep < loaded.ctx_len[chosen]).sum()), "skipped": skipped}
    return result | {"seconds": time.perf_counter() - t0}, loaded, chosen, sums


def by_group(names, sums, end_len, label):
    """{name: summary} of the examples that share a name, the largest group first."""
    groups = {name: np.flatnonzero(names == name) for name in np.unique(names).tolist()}
    return {name: summarise(sums[i], end_len[i], label[i])
            for name, i in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))}  # fmt: skip


def most_sure_and_wrong(sums, end_len, label, count):
    """[(index, margin)] of wrong acc_norm choices: the margin is by how many nats a token the chosen ending beats the
    right one."""
    means = sums / end_len
    margin = means[np.arange(len(label)), label] - means.min(1)
    order = np.argsort(-margin, kind="stable")[:count]
    return [(int(i), float(margin[i])) for i in order if margin[i] > 0]


def table(groups):
    width = max(map(len, groups))
    rows = [f"{'':{width}}  count     acc  acc_norm  95 % interval"]
    rows += [f"{name:{width}}  {g['count']:5d}  {g['acc']:.4f}    {g['acc_norm']:.4f}  {g['acc_norm_low']:.3f} to "
             f"{g['acc_norm_high']:.3f}" for name, g in groups.items()]  # fmt: skip
    return "\n".join(rows)


def describe(example, sums, end_len, margin):
    """An example as text: the right ending marked =, the chosen one >, each with its mean loss."""
    means = sums / end_len
    lines = [f"line {example['line']}, {example.get('activity_label')}, surer of the wrong one by {margin:.2f} nats a token",
             f"    {example['ctx']}"]  # fmt: skip
    for j, text in enumerate(example["endings"]):
        mark = "=" if j == example["label"] else ">" if j == means.argmin() else " "
        lines.append(f"  {mark} {means[j]:5.2f}  {text}")
    return "\n".join(lines)


def draw(result, sources, activities, path, title):
    """Bars of acc_norm with 95 % intervals: sources, then the largest activities, of 20 examples or more."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lab.tools.plot import style

    groups = list(sources.items()) + [item for item in activities.items() if item[1]["count"] >= 20][:25]
    names = [f"{name} ({g['count']})" for name, g in groups]
    values = np.array([g["acc_norm"] for _, g in groups])
    low, high = (np.array([g[f"acc_norm_{side}"] for _, g in groups]) for side in ("low", "high"))
    with matplotlib.rc_context(style() | {"figure.figsize": (8, 1.4 + 0.26 * len(groups))}):
        figure, ax = plt.subplots()
        colours = ["C1"] * len(sources) + ["C0"] * (len(groups) - len(sources))
        ax.barh(names, values, xerr=[values - low, high - values], color=colours, error_kw={"elinewidth": 1})
        ax.axvline(0.25, ls=":", color="0.5", label="chance")
        ax.axvline(result["acc_norm"], ls="--", color="0.5", label=f"all {result['count']}: {result['acc_norm']:.4f}")
        ax.margins(y=0.01)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set(xlim=(0, 1), xlabel="acc_norm (share of examples), with 95 % interval", title=title)
        ax.legend(loc="upper right")
        figure.savefig(path)
        plt.close(figure)


# ------------------------------------------------------------------------------------------------ 6. command line


@dataclass
class HellaSwagConfig:
    """Measure a model on HellaSwag: acc and acc_norm with standard errors and 95 % intervals."""

    model: str = ""  # run folder, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; the newest run if empty
    data: str = ""  # a HellaSwag file, or a folder with hellaswag_val.jsonl; downloaded to data/hellaswag if empty
    split: Literal["val", "train"] = "val"  # val is the one that is published (test has no labels)
    limit: int = 0  # how many examples, spread evenly over the file; 0 is all
    skip_long: bool = False  # leave out examples with an ending longer than the model's context (small byte models)
    batch_tokens: int = BATCH_TOKENS  # tokens of a batch; changes speed and memory, not results
    device: str = "auto"  # cuda, mps or cpu
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: bf16 on a GPU that has it, fp32 on CPU
    compile: bool = False  # torch.compile; for many runs in one process (first shapes take half a minute)
    json: bool = False  # one JSON line instead of text
    worst: int = 0  # show so many examples where the model was most sure and wrong
    by_source: bool = False  # a table of ActivityNet and WikiHow
    by_activity: bool = False  # a table of all activities
    picture: str = ""  # write such a table as a picture to this file
    log_dir: str = "log"  # where the newest run is looked for


def compiled():
    """hidden(), compiled: one graph for each of the batch shapes, so more of them than torch allows by default."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(hidden, dynamic=False)


def run(cfg):
    from lab.device import Precision
    from lab.weights import find_model, load_model
    from train_gpt2 import World

    if cfg.worst < 0:
        raise ValueError(f"worst={cfg.worst} must be 0 (none) or more")
    check_amounts(cfg.limit, cfg.batch_tokens)  # before a download, too
    if cfg.split != "val" and Path(cfg.data).is_file():
        raise ValueError(f"split={cfg.split} does nothing for --data {cfg.data}, which is one file; leave it out")
    if cfg.picture:  # before minutes of scores that would be lost with it
        check_picture(cfg.picture)
    cfg.model = find_model(cfg.model, cfg.log_dir)  # raises where there is none, before anything is downloaded
    world = World(cfg.device)
    precision = Precision(cfg.precision, world.device)
    precision.prepare()
    path = world.from_main(str(locate(cfg.data, cfg.split)) if world.is_main else None)  # before minutes of weights
    model = load_model(cfg.model).to(world.device).eval()
    with precision.autocast():
        result, data, chosen, sums = measure(
            model, cfg.limit, world, path, cfg.split, cfg.batch_tokens, cfg.skip_long, compiled() if cfg.compile else hidden
        )
    if world.is_main:
        report(cfg, path, result, data, chosen, sums, precision.name)
    world.exit()


def check_picture(path):
    """Raise ValueError where this file could not be written, or not by matplotlib."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if not Path(path).parent.is_dir() or Path(path).suffix.lstrip(".").lower() not in kinds:
        raise ValueError(f"picture={path} must lie in a folder that is there and end in .png, .svg or .pdf")
    check_writable(path, "picture")


def report(cfg, path, result, data, chosen, sums, precision):
    """Print what was asked for, and draw."""
    end_len, label = data.end_len[chosen], data.label[chosen]
    published = sha256_of(path) in [sha256 for _, sha256 in PUBLISHED.values()]
    sources, activities = (by_group(names[chosen], sums, end_len, label) for names in (data.source, data.activity))
    worst = []
    if cfg.worst:
        examples = read_examples(path)
        worst = [(examples[chosen[i]], i, margin) for i, margin in most_sure_and_wrong(sums, end_len, label, cfg.worst)]
    title = f"HellaSwag: {cfg.model}"
    if cfg.json:
        record = {"model": cfg.model, "split": cfg.split, "published_file": published, "precision": precision} | result
        record |= {"by_source": sources} if cfg.by_source else {}
        record |= {"by_activity": activities} if cfg.by_activity else {}
        if cfg.worst:
            means = (sums / end_len).tolist()
            record["worst"] = [{"line": e["line"], "margin": margin, "label": e["label"], "mean_losses": means[i],
                                "ctx": e["ctx"], "endings": e["endings"]} for e, i, margin in worst]  # fmt: skip
        print(json.dumps(record), flush=True)
        draw(result, sources, activities, cfg.picture, title) if cfg.picture else None
        return
    for name in ("acc", "acc_norm"):
        print(f"{name:8}  {result[name]:.4f} +- {result[name + '_stderr']:.4f}  (95 %: {result[name + '_low']:.4f} to "
              f"{result[name + '_high']:.4f})")  # fmt: skip
    notes = [f"{result['cut']} contexts cut from the left to fit"] if result["cut"] else []
    notes += [f"{result['skipped']} examples with an ending longer than the context left out"] if result["skipped"] else []
    notes += [] if published else ["not the published file, so not comparable with published numbers"]
    print(f"{result['count']} examples of {path} in {result['seconds']:.1f} s, {precision}" + "".join(f"; {n}" for n in notes))
    if cfg.by_source:
        print("\n" + table(sources))
    if cfg.by_activity:
        print("\n" + table(activities))
    for example, i, margin in worst:
        print("\n" + describe(example, sums[i], end_len[i], margin))
    if cfg.picture:  # last, so that a place that cannot be written costs no results
        draw(result, sources, activities, cfg.picture, title)
        print(f"\nwrote {cfg.picture}")


def main():
    """Run, and turn what a reader can cause into one sentence and exit status 2."""
    import tyro

    from lab.device import out_of_memory

    cfg = tyro.cli(HellaSwagConfig, prog="hellaswag.py", use_underscores=True, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        run(cfg)
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError, RuntimeError, MemoryError) as error:
        full = isinstance(error, (RuntimeError, MemoryError)) and out_of_memory(error)
        if isinstance(error, RuntimeError) and not full:
            raise
        rank = int(os.environ.get("RANK", 0))
        with contextlib.suppress(OSError):  # os._exit would leave what was printed behind
            sys.stdout.flush()
        if rank == 0 or full:  # of bad input all say the same; the memory may be this one's alone
            text = f"the memory is full; pass a --batch_tokens below {cfg.batch_tokens}" if full else error
            print(f"hellaswag.py: error: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr, flush=True)
        os._exit(1 if isinstance(error, FloatingPointError) else 2)  # other processes may wait in an exchange


class HellaSwag:
    name = "hella"

    def __init__(self, every, examples, world, precision, stop):
        self.every = every

    def due(self, step, last):
        return False


if __name__ == "__main__":
    with running("hellaswag.py"):
        main()
