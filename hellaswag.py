"""HellaSwag (Zellers et al. 2019): which of four endings of a text is the most likely to a model?

    python hellaswag.py --model gpt2            # hub name, folder or run
    torchrun --standalone --nproc_per_node=8 hellaswag.py --model gpt2-xl

The scores are computed as those published for GPT-2, from the loss of each ending's tokens given the
context; endings are tokenized with a leading space. acc chooses the ending with the smallest summed
loss, acc_norm the one with the smallest mean loss per token. train_gpt2.py uses the class HellaSwag as
a callback.

Shape letters: N examples; 4 is the number of endings.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab.cli import (  # isort: skip
    RunError, UserError, eprint, parse_args, pre_import_setup, require, run_main, wrap,
)  # fmt: skip

if __name__ == "__main__":
    pre_import_setup()  # exits with one sentence if PyTorch is not installed

import numpy as np

from lab.data.manifest import sha256_of
from lab.distributed import World
from lab.eval.multiple_choice import (
    Benchmark,
    ModelConfig,
    continuation_losses,
    download,
    open_model,
    parse_lines,
)
from lab.files import atomic_write, check_writable, finite_json, read_errors
from lab.hardware import oom_hint
from lab.registry import load_tokenizer

# ------------------------------------------------------------------------------------------ 1. file

DATA_DIR = Path("data/hellaswag")  # where files are downloaded to
BASE_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/"
SHA256 = {  # of the published files with labels
    "hellaswag_val.jsonl": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    "hellaswag_train.jsonl": "dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d",
}


def locate(data: str = "", split: str = "val") -> Path:
    """Path of the file of a split: `data` (the file or its folder), or by default the file in DATA_DIR,
    which is downloaded if it is missing. Raises UserError if the download fails."""
    name = f"hellaswag_{split}.jsonl"
    if not data:
        return download(DATA_DIR / name, BASE_URL, SHA256[name], "hellaswag.py")
    return Path(data) / name if Path(data).is_dir() else Path(data)


def read_examples(path: str | Path) -> list[dict[str, Any]]:
    """The examples of a HellaSwag file, each with its line number as "line". Raises UserError, with the
    line number, for the first invalid line."""
    hint = "pass one with --data, or leave --data out to download it"
    with read_errors(path, "HellaSwag file", hint):
        raw = Path(path).read_bytes()
    examples = parse_lines(raw, path, "HellaSwag example", check_example)
    require(examples, f"{path} contains no examples, but needs one per line; pass another --data")
    return examples


def check_example(example: Any) -> dict[str, Any]:
    """Check an example, and convert its label to an integer. Raises TypeError if it is invalid."""
    ctx, endings, label = (dict(example).get(key) for key in ("ctx", "endings", "label"))
    texts = [ctx, *endings] if isinstance(endings, list) else []
    valid = len(texts) == 5 and all(isinstance(text, str) for text in texts)
    valid = valid and all(text.strip() for text in texts[1:])
    # labels are strings in the copy on the Hugging Face hub
    if not valid or str(label) not in ("0", "1", "2", "3"):
        raise TypeError("expected a ctx, 4 endings that are not empty, and a label from 0 to 3")
    return example | {"label": int(str(label))}


def source_of(example: dict[str, Any]) -> str:
    """Source of an example: "activitynet" or "wikihow". In copies of the file without a source_id, a
    ctx_b indicates ActivityNet, whose contexts end in the middle of a sentence."""
    guess = "activitynet" if example.get("ctx_b") else "wikihow"
    return str(example.get("source_id") or guess).split("~")[0]  # as in "wikihow~123"


# ---------------------------------------------------------------------------------------- 2. tokens


@dataclass
class Examples:
    """Tokenized examples."""

    rows: list[dict[str, Any]]  # from read_examples
    tokens: list[list[list[int]]]  # for each example [context, ending, ending, ending, ending]
    num_cut: int = 0  # contexts that were shortened to fit
    num_skipped: int = 0  # examples with an ending that does not fit

    def __post_init__(self):
        self.end_len = np.array([[len(ids) for ids in item[1:]] for item in self.tokens])  # (N, 4)
        self.label = np.array([row["label"] for row in self.rows])  # (N,)

    def __len__(self):
        return len(self.rows)


def tokenize_examples(
    examples: list[dict[str, Any]],
    tokenizer: Any,
    block_size: int,
    limit: int = 0,
    skip_long: bool = False,
) -> Examples:
    """Tokenize `limit` examples (0: all), spread evenly over the file, because its first third is only
    ActivityNet.

    An empty context becomes end-of-text, from which the first token of an ending is predicted. The last
    token of an ending is never an input, so context and ending together may have block_size + 1 tokens.
    A context is cut from the left until the longest of the four endings fits, so that all four get the
    same context. Raises UserError for an ending that leaves no space for a context, unless skip_long."""
    n = min(limit or len(examples), len(examples))
    rows, tokens, num_cut = [], [], 0
    for row in (examples[i] for i in np.arange(n) * len(examples) // n):
        context = tokenizer.encode(row["ctx"]) or [tokenizer.eot]
        endings = [tokenizer.encode(" " + text) for text in row["endings"]]
        longest = max(map(len, endings))
        if longest <= block_size:
            keep = block_size + 1 - longest
            num_cut += len(context) > keep
            rows.append(row)
            tokens.append([context[-keep:], *endings])
        elif not skip_long:
            raise UserError(
                f"line {row['line']} has an ending of {longest} tokens, but the model's context "
                f"has block_size={block_size}; `hellaswag.py --skip_long` skips such examples"
            )
    require(
        rows,
        f"all {n} examples have an ending of more than block_size={block_size} tokens; choose a "
        "model with a longer context",
    )
    return Examples(rows, tokens, num_cut, n - len(rows))


def load_examples(
    model: Any,
    world: World,
    source: str,
    path: str | None = None,
    limit: int = 0,
    skip_long: bool = False,
) -> Examples:
    """Read and tokenize the examples of `path` (None: the validation split) for a model. Every rank gets
    them, but only rank 0 uses the disk and the network. source: the path of the model or of the data, next
    to which there may be a tokenizer file."""

    def load():
        tokenizer = load_tokenizer(model.config, source)
        examples = read_examples(path or locate())
        return tokenize_examples(examples, tokenizer, model.config.block_size, limit, skip_long)

    return world.run_on_rank0(load)


# ---------------------------------------------------------------------------------------- 3. scores


def ending_losses(
    model: Any, data: Examples, world: World, check: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Summed loss in nats of each ending (N, 4), on every rank. check: called between batches."""
    return continuation_losses(model, data.tokens, world, "HellaSwag", check)


def wilson_interval(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a proportion p of n (Wilson 1927), also valid for small n."""
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)
    return max(0.0, low), min(1.0, high)


def summarize(sums: np.ndarray, end_len: np.ndarray, label: np.ndarray) -> dict[str, Any]:
    """acc and acc_norm with standard errors of the mean (as in lm-evaluation-harness) and 95 % intervals,
    and the count. sums, end_len (N, 4): summed loss and number of tokens of each ending; label (N,)."""
    out, n = {}, len(label)
    for name, losses in (("acc", sums), ("acc_norm", sums / end_len)):
        p = float((losses.argmin(1) == label).mean())
        stderr = math.sqrt(p * (1 - p) / max(1, n - 1))
        low, high = wilson_interval(p, n)
        out |= {name: p, f"{name}_stderr": stderr, f"{name}_low": low, f"{name}_high": high}
    return out | {"count": n}


def measure(
    model: Any, data: Examples, world: World, check: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], np.ndarray]:
    """(summary, summed losses (N, 4)), the same on every rank. Uses no random numbers. Raises RunError if
    a loss is not finite."""
    t0 = time.perf_counter()
    sums = ending_losses(model, data, world, check)
    if not np.isfinite(sums).all():
        line = data.rows[(~np.isfinite(sums)).any(1).argmax()]["line"]
        raise RunError(
            f"the loss of line {line} is not finite; try --precision fp32, or another checkpoint"
        )
    seconds = time.perf_counter() - t0
    counts = {"seconds": seconds, "cut": data.num_cut, "skipped": data.num_skipped}
    return summarize(sums, data.end_len, data.label) | counts, sums


# --------------------------------------------------------------------------------- 4. training runs


class HellaSwag(Benchmark):
    """HellaSwag as a callback of a training run. It skips the untrained model of step 0."""

    title, locate = "HellaSwag", staticmethod(locate)

    def __init__(self, trainer, stop):
        super().__init__("hella", trainer.cfg.hellaswag_every, trainer, stop)

    def should_run(self, step: int, last: bool) -> bool:
        return step > 0 and super().should_run(step, last)

    def load(self, trainer) -> Examples:
        cfg = trainer.cfg
        return load_examples(trainer.raw_model, self.world, cfg.data, limit=cfg.hellaswag_examples)

    def measure(self, trainer) -> dict[str, Any]:
        return measure(trainer.raw_model, self.data, self.world, self.check)[0]


# ---------------------------------------------------------------------------------------- 5. report


def summarize_groups(names: list[str], sums: np.ndarray, data: Examples) -> dict[str, dict]:
    """{name: summary} of each group of examples, largest first. names: the group of each example."""
    groups, index, counts = np.unique(names, return_inverse=True, return_counts=True)
    found = {}
    for i in np.argsort(-counts, kind="stable"):
        members = index == i
        found[str(groups[i])] = summarize(sums[members], data.end_len[members], data.label[members])
    return found


def most_confident_errors(sums: np.ndarray, data: Examples, count: int) -> list[dict[str, Any]]:
    """The wrong answers with the largest margin, which is the mean loss per token of the right ending
    minus that of the chosen one. Adds "margin" and "mean_losses" to each example, in nats."""
    means = sums / data.end_len
    margin = means[np.arange(len(data)), data.label] - means.min(1)
    worst = [i for i in np.argsort(-margin, kind="stable")[:count] if margin[i] > 0]
    return [
        data.rows[i] | {"margin": float(margin[i]), "mean_losses": means[i].tolist()} for i in worst
    ]


def format_groups(groups: dict[str, dict]) -> str:
    width = max(map(len, groups))
    lines = [f"{'':{width}}  count     acc  acc_norm  95 % interval"]
    for name, g in groups.items():
        low, high = g["acc_norm_low"], g["acc_norm_high"]
        scores = f"{g['count']:5d}  {g['acc']:.4f}    {g['acc_norm']:.4f}  {low:.3f} to {high:.3f}"
        lines.append(f"{name:{width}}  {scores}")
    return "\n".join(lines)


def format_error(example: dict[str, Any]) -> str:
    """A wrong answer as text, with mean losses. = marks the right ending, > the chosen one."""
    losses = example["mean_losses"]
    lines = [
        f"line {example['line']}, {example.get('activity_label')}: the wrong ending's loss is "
        f"{example['margin']:.2f} nats per token lower\n    {example['ctx']}"
    ]
    for i, text in enumerate(example["endings"]):
        mark = "=" if i == example["label"] else ">" if losses[i] == min(losses) else " "
        lines.append(f"  {mark} {losses[i]:5.2f}  {text}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- 6. command line

OOM_FIX = "choose a smaller --model, or pass --device cpu"


@dataclass
class Config(ModelConfig):
    """Measure a model on HellaSwag: acc and acc_norm with standard errors and 95 % intervals."""

    data: str = ""  # HellaSwag file, or a folder with one; empty: downloaded to data/hellaswag
    split: Literal["val", "train"] = "val"  # published scores are on val; test has no labels
    limit: int = 0  # number of examples, spread evenly over the file; 0: all
    skip_long: bool = False  # skip examples whose endings exceed the model's context
    json: str = ""  # write all numbers to this file
    worst: int = 0  # show this many wrong answers, the most confident first
    by_source: bool = False  # print a table by source: ActivityNet, WikiHow
    by_activity: bool = False  # print a table by activity


def report(
    cfg: Config, path: str, precision: str, result: dict, data: Examples, sums: np.ndarray
) -> None:
    """Print the summary, and the details that flags ask for."""
    published = sha256_of(path) in SHA256.values()
    tables = {}
    if cfg.by_source:
        tables["by_source"] = summarize_groups([source_of(row) for row in data.rows], sums, data)
    if cfg.by_activity:
        activities = [str(row.get("activity_label")) for row in data.rows]
        tables["by_activity"] = summarize_groups(activities, sums, data)
    errors = most_confident_errors(sums, data, cfg.worst)
    for name in ("acc", "acc_norm"):
        value, stderr, low, high = (result[name + end] for end in ("", "_stderr", "_low", "_high"))
        print(f"{name:8}  {value:.4f} +- {stderr:.4f}  (95 %: {low:.4f} to {high:.4f})")
    line = f"{result['count']} examples of {path} in {result['seconds']:.1f} s, {precision}"
    line += "; guessing gives 0.25"
    line += f"; {result['cut']} contexts cut from the left to fit" if result["cut"] else ""
    line += (
        f"; {result['skipped']} examples skipped because they are too long"
        if result["skipped"]
        else ""
    )
    line += "" if published else "; not the published file, so scores are not comparable"
    print(wrap(line))
    for text in [*map(format_groups, tables.values()), *map(format_error, errors)]:
        print("\n" + text)
    if cfg.json:
        about = {"model": cfg.model, "split": cfg.split, "published_file": published}
        record = about | {"precision": precision} | result | tables
        record |= {"worst": errors} if cfg.worst else {}
        atomic_write(cfg.json, (json.dumps(finite_json(record), indent=1) + "\n").encode())


def run(cfg: Config) -> None:
    world, precision, model = open_model(cfg, "HellaSwag")
    path = world.run_on_rank0(lambda: str(locate(cfg.data, cfg.split)))
    data = load_examples(model, world, cfg.model, path, cfg.limit, cfg.skip_long)
    if world.is_main:
        eprint(f"[model: {cfg.model}]")
    with precision.autocast():
        result, sums = measure(model, data, world)
    if world.is_main:
        report(cfg, path, precision.name, result, data, sums)
    world.barrier()  # no rank may exit while another one still communicates with it


def main(argv: list[str]) -> None:
    cfg = parse_args(Config, argv)
    for name in ("limit", "worst"):
        value = getattr(cfg, name)
        require(value >= 0, f"{name}={value} must be 0 or more; leave --{name} out for the default")
    if cfg.json:
        require(cfg.json.endswith(".json"), f"json={cfg.json} must end in .json")
        check_writable(cfg.json, "json")
    with oom_hint(OOM_FIX):
        run(cfg)


if __name__ == "__main__":
    run_main(main)
