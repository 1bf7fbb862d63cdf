"""BLiMP (Warstadt et al. 2020): does a model find the grammatical one of two sentences more likely?

    python blimp.py --model gpt2                  # hub name, folder or run
    torchrun --standalone --nproc_per_node=8 blimp.py --model gpt2-xl
    python blimp.py --model log/RUN --untrained   # control: fresh weights

1,000 pairs of sentences for each of 67 paradigms, which belong to 12 phenomena. A pair is right if
the good sentence has the higher summed log-probability after end-of-text, without length
normalization; a tie counts one half. train_gpt2.py runs the class Blimp as a callback.

Shape letters: N pairs, G groups of pairs (paradigms).
"""

import json
import math
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cli import (  # isort: skip
    RunError, UserError, eprint, parse_args, pre_import_setup, require, run_main, wrap,
)  # fmt: skip

if __name__ == "__main__":
    pre_import_setup()  # exits with one sentence if PyTorch is not installed

import numpy as np
import torch

from lab.data.manifest import sha256_of
from lab.distributed import World
from lab.eval import blimp_published
from lab.eval.multiple_choice import (
    Benchmark,
    ModelConfig,
    continuation_losses,
    download,
    open_model,
    parse_lines,
)
from lab.files import (
    atomic_write,
    check_regular,
    check_writable,
    finite_json,
    read_errors,
    write_errors,
)
from lab.hardware import oom_hint
from lab.registry import load_tokenizer
from lab.tools.plot_style import color_of, style

# ------------------------------------------------------------------------------------------ 1. file

DATA_DIR = Path("data/blimp")  # where the file is downloaded to
NAME = "BLiMP.zip"
BASE_URL = (
    "https://raw.githubusercontent.com/alexwarstadt/blimp/3e56b06fcabca9b30822fc66435fca6b1aa40bb1/"
)
SHA256 = "172a1a714d72e72a89e8384dd531483f3d0f8a9aee3d33dccaf7992d8cecbb73"
PHENOMENA = {"s-selection": "argument_structure"}  # the paper's name for one of the file's 13 terms


def locate(data: str = "") -> Path:
    """Path of the pairs: `data` (BLiMP.zip, a .jsonl file, or a folder with either), or DATA_DIR's
    zip, which is downloaded if it is missing. Raises UserError if the download fails."""
    if not data:
        return download(DATA_DIR / NAME, BASE_URL, SHA256, "blimp.py")
    return next((p for p in (Path(data, NAME), Path(data, "data")) if p.exists()), Path(data))


def read_members(path: Path) -> dict[str, bytes]:
    """{name: contents} of the .jsonl files of a zip or a folder, or of a single file."""
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        for file in files:
            check_regular(file)
        return {str(file): file.read_bytes() for file in files}
    if path.suffix != ".zip":
        return {str(path): path.read_bytes()}
    with zipfile.ZipFile(path) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".jsonl")]
        return {f"{path}/{name}": archive.read(name) for name in names if "__MACOSX" not in name}


def read_pairs(path: str | Path) -> list[dict[str, Any]]:
    """The pairs of `path` (see locate), in the order of their files. Raises UserError that names the
    first invalid line."""
    hint = "name BLiMP.zip with --data, or leave --data out to download it"
    with read_errors(path, "BLiMP file", hint):
        members = read_members(Path(path))
    pairs = []
    for name, raw in members.items():
        pairs += parse_lines(raw, name, "BLiMP pair", check_pair)
    require(pairs, f"{path} contains no pairs, but needs .jsonl files with one per line; {hint}")
    return pairs


def check_pair(pair: Any) -> dict[str, Any]:
    """The pair. Raises TypeError if it is invalid."""
    texts = [dict(pair).get(key) for key in ("sentence_good", "sentence_bad")]
    names = [pair.get(key) for key in ("UID", "linguistics_term")]
    if not all(isinstance(text, str) and text.strip() for text in texts + names):
        raise TypeError(
            "expected a sentence_good, a sentence_bad, a UID and a linguistics_term that are not empty"
        )
    return pair


# ---------------------------------------------------------------------------------------- 2. tokens


@dataclass
class Pairs:
    """Tokenized pairs."""

    tokens: list[list[list[int]]]  # for each pair [shared beginning, rest of good, rest of bad]
    group: np.ndarray  # (N,) index of each pair's paradigm
    paradigms: list[str]  # (G,) their names
    phenomena: list[str]  # (G,) the phenomenon of each paradigm
    num_cut: int = 0  # pairs whose shared beginning was shortened to fit
    num_skipped: int = 0  # pairs that do not fit

    def __len__(self):
        return len(self.tokens)


def first_of_each(pairs: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The first `limit` pairs of each paradigm (0: all)."""
    kept, counts = [], dict.fromkeys((pair["UID"] for pair in pairs), 0)
    for pair in pairs:
        counts[pair["UID"]] += 1
        if not limit or counts[pair["UID"]] <= limit:
            kept.append(pair)
    return kept


def split_pair(good: list[int], bad: list[int], eot: int) -> list[list[int]]:
    """[shared beginning, rest of good, rest of bad]. The beginning starts with end-of-text, and each
    rest keeps at least one token.

    The log-probability of a sentence is that of the shared tokens, which cancels in the comparison,
    plus that of the rest given them. So a model reads the shared tokens only once."""
    n = min(len(good), len(bad)) - 1
    same = next((i for i in range(n) if good[i] != bad[i]), n)
    return [[eot, *good[:same]], good[same:], bad[same:]]


def tokenize_pairs(
    pairs: list[dict[str, Any]], tokenizer: Any, block_size: int, leading_space: bool = True
) -> Pairs:
    """Tokenize pairs. leading_space: put a space before each sentence.

    The last token is never an input, so a sentence may have block_size tokens besides end-of-text. Of
    a longer one, the shared beginning is cut from the left; if that is not enough, the pair is skipped
    (with bytes and block_size=128: 2 of 67,000 pairs). Raises UserError if no pair is left."""
    space, kept, tokens, num_cut = " " * leading_space, [], [], 0
    for pair in pairs:
        good, bad = (tokenizer.encode(space + pair[f"sentence_{k}"]) for k in ("good", "bad"))
        shared, *rests = split_pair(good, bad, tokenizer.eot)
        longest = max(map(len, rests))
        keep = block_size + 1 - longest
        if keep > 0:
            kept.append(pair)
            tokens.append([shared[-keep:], *rests])
            num_cut += len(shared) > keep
    require(
        kept,
        f"all {len(pairs)} pairs differ in more than block_size={block_size} tokens; choose a model with "
        "a longer context",
    )
    terms = {pair["UID"]: pair["linguistics_term"] for pair in kept}
    index = {name: i for i, name in enumerate(terms)}
    group = np.array([index[pair["UID"]] for pair in kept])
    phenomena = [PHENOMENA.get(term, term) for term in terms.values()]
    return Pairs(tokens, group, list(terms), phenomena, num_cut, len(pairs) - len(kept))


def load_pairs(
    model: Any, world: World, source: str, path: str | None = None, limit: int = 0,
    leading_space: bool = True,
) -> Pairs:  # fmt: skip
    """Read and tokenize the pairs of `path` (None: the published file) for a model, on every rank;
    only rank 0 uses the disk and the network. source: where a tokenizer file would be, the model's
    path or the run's data folder."""

    def load():
        tokenizer = load_tokenizer(model.config, source)
        pairs = first_of_each(read_pairs(path or locate()), limit)
        return tokenize_pairs(pairs, tokenizer, model.config.block_size, leading_space)

    return world.run_on_rank0(load)


# ---------------------------------------------------------------------------------------- 3. scores


def pair_scores(
    model: Any, data: Pairs, world: World, check: Callable[[], None] = lambda: None
) -> np.ndarray:
    """1 for each right pair, 0.5 for a tie, 0 for a wrong one (N,), on every rank. check: called
    between batches. Raises RunError if a loss is not finite."""
    good, bad = continuation_losses(model, data.tokens, world, "BLiMP", check).T
    finite = np.isfinite(good - bad)
    if not finite.all():
        name = data.paradigms[data.group[finite.argmin()]]
        raise RunError(
            f"a loss of {name} is not finite; try --precision fp32, or another checkpoint"
        )
    return (good < bad) + 0.5 * (good == bad)


def summarize(scores: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """{"acc", "acc_stderr", "ties", "count"} of pairs. scores, group (N,): each pair's score and
    paradigm.

    acc is the mean over the pairs. Its standard error treats the paradigms as fixed and the pairs
    of each as a random sample: sqrt(sum over paradigms of n s^2) / N, for n pairs with standard
    deviation s. For a single paradigm that is lm-evaluation-harness's s / sqrt(n). If a paradigm has only
    one pair, all pairs count as one paradigm."""
    if (np.bincount(group) == 1).any():
        group = np.zeros_like(group)
    n = np.bincount(group)
    means = np.bincount(group, scores) / np.maximum(1, n)
    squares = np.bincount(group, (scores - means[group]) ** 2)  # sums of squared deviations
    variance = float((squares * n / np.maximum(1, n - 1)).sum())
    return {
        "acc": float(scores.mean()), "acc_stderr": math.sqrt(variance) / len(scores),
        "ties": int((scores == 0.5).sum()), "count": len(scores),
    }  # fmt: skip


def summarize_by(names: list[str], scores: np.ndarray, data: Pairs) -> dict[str, dict[str, Any]]:
    """{name: summary} in alphabetical order. names (G,): the phenomenon of each paradigm, or its own
    name."""
    found = {}
    for name in sorted(set(names)):
        members = np.array([each == name for each in names])[data.group]
        found[name] = summarize(scores[members], data.group[members])
    return found


def measure(
    model: Any, data: Pairs, world: World, check: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], np.ndarray]:
    """(summary, scores (N,)), the same on every rank. Draws no random number."""
    t0 = time.perf_counter()
    scores = pair_scores(model, data, world, check)
    seconds = time.perf_counter() - t0
    counts = {"seconds": seconds, "cut": data.num_cut, "skipped": data.num_skipped}
    return summarize(scores, data.group) | counts, scores


# --------------------------------------------------------------------------------- 4. training runs

EVENT_PAIRS = 20  # pairs of each paradigm that a run scores: 1,340, standard error at most 0.014


class Blimp(Benchmark):
    """BLiMP as a callback of a training run, on EVENT_PAIRS of each paradigm. It scores the untrained
    model of step 0 too, whose accuracy need not be 0.5."""

    title, locate = "BLiMP", staticmethod(locate)

    def __init__(self, trainer, stop):
        super().__init__("blimp", trainer.cfg.blimp_every, trainer, stop)

    def load(self, trainer) -> Pairs:
        return load_pairs(trainer.raw_model, self.world, trainer.cfg.data, limit=EVENT_PAIRS)

    def measure(self, trainer) -> dict[str, Any]:
        """The summary, and the accuracy of each phenomenon by its name."""
        result, scores = measure(trainer.raw_model, self.data, self.world, self.check)
        groups = summarize_by(self.data.phenomena, scores, self.data)
        return result | {name: group["acc"] for name, group in groups.items()}


# ---------------------------------------------------------------------------------------- 5. report


def format_table(groups: dict[str, dict], total: dict[str, Any], published: bool) -> str:
    """A table of summaries, in percent, with the published models' accuracies if asked for. It fits into
    80 columns."""
    width = max(map(len, [*groups, "all"]))
    heads = [f"{name:>5}" for name in blimp_published.SHORT * published]
    lines = ["  ".join([f"{'':{width}}  pairs     acc  stderr", *heads])]
    for name, g in {**groups, "all": total}.items():
        theirs = blimp_published.PUBLISHED.get(name, ()) if name != "all" else blimp_published.TOTAL
        line = f"{name:{width}}  {g['count']:5d}  {g['acc']:6.1%}  {g['acc_stderr']:6.1%}"
        for head, value in zip(heads, theirs):
            line += f"  {value:{len(head)}.1%}"
        lines.append(line)
    return "\n".join(lines)


def draw(
    name: str, groups: dict[str, dict], total: dict[str, Any], out: Path, dark: bool = False
) -> None:
    """Write a figure of the accuracies by phenomenon with 95 % intervals, and the published models'."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would set a backend for the whole process

    rows = {blimp_published.label(key): group for key, group in groups.items()} | {"all": total}
    theirs = [blimp_published.PUBLISHED.get(key) for key in groups] + [blimp_published.TOTAL]
    looks = zip(blimp_published.MODELS, ("x", "^", "s", "D"), ("grey", "blue", "pink", "green"))
    heights = np.arange(len(rows))[::-1]
    with matplotlib.rc_context(style(dark)):
        figure = Figure(figsize=(8, 1.6 + 0.31 * len(rows)))
        ax = figure.subplots()
        ax.axvline(50, color="0.55", linewidth=1, linestyle=(0, (5, 3)), zorder=1, label="guessing")
        for i, (model, marker, color) in enumerate(looks):
            known = [(100 * row[i], y) for row, y in zip(theirs, heights) if row]
            look = dict(marker=marker, markersize=5, linestyle="none", zorder=2)
            ax.plot(*zip(*known), color=color_of(color, dark), label=model, **look)
        acc = [100 * group["acc"] for group in rows.values()]
        errors = [196 * group["acc_stderr"] for group in rows.values()]
        look = dict(color=color_of("accuracy", dark), fmt="o", markersize=8, capsize=3, zorder=3)
        # matplotlib would draw $...$ as a formula
        ax.errorbar(acc, heights, xerr=errors, label=name.replace("$", r"\$"), **look)
        ax.set_yticks(heights, rows)
        ax.set_xlabel("right pairs (%), with the 95 % interval")
        figure.suptitle(f"BLiMP: {total['acc']:.1%} of the pairs are right", x=0.01, ha="left")
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(out)


# ---------------------------------------------------------------------------------- 6. command line

OOM_FIX = "choose a smaller --model, or pass --device cpu"


@dataclass
class Config(ModelConfig):
    """Measure a model on BLiMP: the fraction of pairs in which it prefers the grammatical sentence."""

    data: str = ""  # BLiMP.zip, a .jsonl file, or a folder; empty: downloaded to data/blimp
    pairs: int = 0  # first pairs of each paradigm; 0 is all 1,000
    leading_space: bool = True  # put a space before each sentence, as lm-evaluation-harness does
    untrained: bool = False  # control: give the model fresh random weights
    paradigms: bool = False  # print the table of the 67 paradigms too
    json: str = ""  # write all numbers to this file
    figure: str = ""  # write a figure by phenomenon to this file (.png, .svg or .pdf)
    dark: bool = False  # the figure has a dark background


def report(cfg: Config, path: Path, precision: str, result: dict, data: Pairs, scores) -> None:
    """Print the tables, and write what the flags ask for."""
    published = path.is_file() and sha256_of(path) == SHA256
    groups = summarize_by(data.phenomena, scores, data)
    paradigms = summarize_by(data.paradigms, scores, data)
    if cfg.paradigms:
        print(format_table(paradigms, result, published=False) + "\n")
    print(format_table(groups, result, published=True))
    print(
        wrap(
            "Guessing gives 50 %. Published accuracies: n-gram, LSTM, TXL (Transformer-XL), GPT-2 (large)."
        )
    )
    line = f"{result['count']} pairs of {path} in {result['seconds']:.1f} s, {precision}"
    line += "; fresh random weights" * cfg.untrained
    line += f"; ties, which count one half: {result['ties']}" if result["ties"] else ""
    line += f"; {result['cut']} pairs cut from the left to fit" if result["cut"] else ""
    line += f"; {result['skipped']} pairs skipped as too long" if result["skipped"] else ""
    line += "" if published else f"; not the published {NAME}, so scores are not comparable"
    print(wrap(line))
    if cfg.json:
        about = {"model": cfg.model, "untrained": cfg.untrained, "leading_space": cfg.leading_space}
        about |= {"pairs": cfg.pairs, "published_file": published, "precision": precision}
        record = about | result | {"phenomena": groups, "paradigms": paradigms}
        atomic_write(cfg.json, (json.dumps(finite_json(record), indent=1) + "\n").encode())
    if cfg.figure:
        name = f"{cfg.model}, untrained" if cfg.untrained else cfg.model
        with write_errors(cfg.figure, "choose another place with --figure"):
            draw(name, groups, result, Path(cfg.figure), cfg.dark)


def run(cfg: Config) -> None:
    world, precision, model = open_model(cfg, "BLiMP")
    if cfg.untrained:
        torch.manual_seed(1337)
        model = type(model)(model.config).to(world.device).eval()
    path = world.run_on_rank0(lambda: str(locate(cfg.data)))
    data = load_pairs(model, world, cfg.model, path, cfg.pairs, cfg.leading_space)
    if world.is_main:
        eprint(f"[model: {cfg.model}]")
    with precision.autocast():
        result, scores = measure(model, data, world)
    if world.is_main:
        report(cfg, Path(path), precision.name, result, data, scores)
    world.barrier()  # no rank exits while another may still communicate with it


def main(argv: list[str]) -> None:
    cfg = parse_args(Config, argv)
    require(
        cfg.pairs == 0 or cfg.pairs >= 2,
        f"pairs={cfg.pairs} must be 2 or more, because one pair has no standard error; for all leave "
        "--pairs out",
    )
    require(not cfg.json or cfg.json.endswith(".json"), f"json={cfg.json} must end in .json")
    if cfg.figure and Path(cfg.figure).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"figure={cfg.figure} must end in .png, .svg or .pdf")
    for name in ("json", "figure"):
        if value := getattr(cfg, name):
            check_writable(value, name)
    with oom_hint(OOM_FIX):
        run(cfg)


if __name__ == "__main__":
    run_main(main)
