"""Read a run's log.jsonl: its records, its curves, and the positions at which runs can be compared.

Used by lab report, lab plot, bench and the notebook. It imports nothing slow.
"""

import bisect
import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from lab.cli import UserError, command_for
from lab.files import parse_json, read_errors, read_json

Record = dict[str, Any]  # one line of a log
RunLog = dict[str, list[Record]]  # {kind: records, sorted by step}
# types of the fields that are not numbers
FIELD_TYPES: dict[str, Any] = dict.fromkeys("texts words passed_over shaded".split(), list)
FIELD_TYPES |= dict.fromkeys(
    "kind device precision torch reason error path file command code".split(), str
)
FIELD_TYPES |= {"changed": dict}


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """The runs given by path or by name in log/; by default the newest run there that has a log.

    Raises UserError if there is none.
    """
    if not paths:
        from lab.trainer.run_dir import newest_first  # imports torch, which is slow

        for run_dir in newest_first("log"):
            if (run_dir / "log.jsonl").is_file():
                return [run_dir]
        train = command_for("train_gpt2.py")
        raise UserError(
            f"there is no run with a log in log/; `{train}` creates one, or pass a run directory"
        )
    # a checkpoint or a log stands for its run
    named = [
        path.parent if path.suffix == ".pt" or path.name == "log.jsonl" else path
        for path in map(Path, paths)
    ]
    found = []
    for path in named:
        in_log = Path("log", path)
        found.append(in_log if in_log.exists() and not path.exists() else path)
    return found


def objectives(logs: Collection[RunLog]) -> set[bool]:
    """Whether runs predict masked tokens (then they log an accuracy) or next tokens: one value or both."""
    return {"accuracy" in row for log in logs for row in log.get("val", [])}


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """A name for each run: that of its directory or of its copied log, or the whole path if two names are
    equal."""
    whole = [Path(path).resolve() for path in paths]
    names = [(p.parent if p.name == "log.jsonl" else p).name.removesuffix(".jsonl") for p in whole]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names)]


def output_path(paths: Sequence[Path], out: str | Path, name: str, *suffixes: str) -> Path:
    """The output file for these runs: `out`, or if that is empty `name` in the first run's directory, with
    the names of the other runs added, or their number if there are many. Raises UserError for other
    suffixes than `suffixes`, which also prevents overwriting a log."""
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    names = [path.resolve().name.removesuffix(".jsonl") for path in paths]
    others = "".join(f"_with_{name}" for name in names[1:])
    if len(others) > 150:  # the names of files have at most 255 bytes
        others = f"_with_{len(paths) - 1}_others"
    path = Path(out) if out else (first / name).with_stem(Path(name).stem + others)
    if path.suffix not in suffixes:
        raise UserError(f"out={path} must end in {' or '.join(suffixes)}")
    return path


def read_log(run: str | Path) -> RunLog:
    """The records of a run directory, or of a log file.

    A resumed run starts again from its checkpoint, so older records of later steps are dropped, and so is
    the end of the run before. Of two records of the same kind and step, the later one counts. Lines that
    are not records, such as one cut off when the process was killed, are skipped. Raises UserError if there
    is no log, or if it has neither a measurement nor an error.
    """
    path = Path(run) / "log.jsonl" if Path(run).is_dir() else Path(run)
    with read_errors(path, "run or log", "pass a run directory: `ls log` lists them"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: dict[tuple[str, int], Record] = {}  # by kind and step
    for line in lines:
        try:  # after a cut-off record, the next one is on the same line
            record = clean_record(parse_json(line[max(0, line.rfind('{"kind"')) :]))
            kind, step = record["kind"], record["step"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if kind == "start":
            found = {key: r for key, r in found.items() if key[1] <= step and key[0] != "end"}
        found[kind, step] = record
    log: RunLog = {}
    for (kind, _), record in sorted(found.items(), key=lambda item: item[0][1]):
        log.setdefault(kind, []).append(record)
    if not {"train", "val", "hella"} & log.keys() and not run_error(log):
        if reason := end_reason(log):
            how = "ended" if reason == "done" else f"was stopped by {reason}"
            raise UserError(
                f"{path}: the run {how} before its first measurement; choose another run"
            )
        raise UserError(f"{path} has no measurement; wait for the first one, or choose another run")
    return log


def clean_record(record: Record) -> Record:
    """A record without missing values (null, and in older logs NaN and Infinity) and without fields of
    unexpected types.

    Raises ValueError, KeyError, TypeError or AttributeError if it is not a record of a step.
    """
    clean = {}
    for name, value in record.items():
        if isinstance(value, FIELD_TYPES.get(name, (int, float))):
            if not isinstance(value, float) or math.isfinite(value):
                clean[name] = value
    step, time = clean["step"], clean["time"]
    if type(step) is not int or not (0 <= step < 2**53 and 0 <= time < 2**35):
        raise ValueError(f"step={step} or time={time} is out of range")
    if not 0 <= clean.get("failed_step", step) <= step:
        del clean["failed_step"]
    if "shaded" in clean:
        try:
            prompt, tokens = clean["shaded"]
            clean["shaded"] = [str(prompt), list(map(clean_token, tokens))]
        except (ValueError, KeyError, TypeError):
            del clean["shaded"]
    if not all(isinstance(v, list) and len(v) == 2 for v in clean.get("changed", {}).values()):
        del clean["changed"]
    return clean


def clean_token(token: Record) -> Record:
    """A token as lab.inference.token_logprobs describes it. Raises ValueError, KeyError or TypeError
    for anything else."""
    likeliest = [(i, str(name), float(p)) for i, name, p in token["likeliest"]]
    return {
        "text": str(token["text"]), "name": str(token["name"]), "p": float(token["p"]),
        "likeliest": likeliest,
    }  # fmt: skip


def end_reason(log: RunLog) -> str | None:
    """Why the run ended: "done", "error" or a signal's name; None if it is still running or was killed."""
    return "error" if run_error(log) else log.get("end", [{}])[-1].get("reason")


def run_error(log: RunLog) -> str:
    """The message of the error that ended the run; "" without an error.

    Older logs have no such message, but a spike whose norm is not finite always ends a run, unless its
    update was skipped.
    """
    end, spike = log.get("end", [{}])[-1], log.get("spike", [{"step": 0, "skipped": True}])[-1]
    if end.get("reason") == "error":
        return end.get("error") or "unknown error"
    started = log.get("start", [{}])[-1].get("step", 0)
    if not end and spike["step"] > started and "norm" not in spike and not spike.get("skipped"):
        norm = f"the gradient norm is not finite at step {spike['step']}"
        return f"{norm}; try a lower --lr, or more --warmup_steps"
    return ""


def failed_step(log: RunLog) -> int | None:
    """The step whose loss or gradient norm ended the run, as one that is nan; None if none did. This is
    noticed while the next step runs, so the log's end record has a later step."""
    end = log.get("end", [{}])[-1]
    # older logs have the step only in the message
    old = re.match(r"the (?:loss|gradient norm) is [^;(]* at step (\d{1,15})\b", run_error(log))
    return end.get("failed_step") or (int(old[1]) if old else None)


# ---------------------------------------------------------------------------------------- curves


def short(number: float) -> str:
    """Format 1.5e9 as 1.5B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def column(log: RunLog, kind: str, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the field `name` in the records of a kind that have it. Values above 1e300
    are left out, because matplotlib cannot scale them."""
    rows = [(r["step"], r.get(name)) for r in log.get(kind, [])]
    rows = [(step, v) for step, v in rows if isinstance(v, (int, float)) and abs(v) < 1e300]
    return [step for step, _ in rows], [value for _, value in rows]


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centered window of about a fortieth of the points.

    The window is narrower at both ends, so that it stays centered and the ends are not biased.
    """
    n = len(values)
    reach = [min(n // 80, i, n - 1 - i) for i in range(n)]
    return [sum(values[i - h : i + h + 1]) / (2 * h + 1) for i, h in enumerate(reach)]


def loss_window(logs: Collection[RunLog]) -> tuple[float, float] | None:
    """(low, high) of a loss axis, such that the steep fall of the first steps does not dominate it.

    It includes all losses after the first 5 % of each run, and the unigram baseline if that is near.
    None if these are fewer than ten: then the axis shows all.
    """
    late: list[float] = []
    levels: list[float] = []
    for log in logs:
        rows = [row for kind in ("train", "val") for row in zip(*column(log, kind, "loss"))]
        edge = 0.05 * max((step for step, _ in rows), default=0)
        late += [loss for step, loss in rows if step > edge or not edge]
        levels += column(log, "start", "unigram")[1][-1:]
    if len(late) < 10:
        return None
    low, high = min(late), max(late)
    high = max([high, *(level for level in levels if level < low + 2 * (high - low))])
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + 1.5 * margin  # space for a label above the highest line


ACCURACY = {"hella": "acc_norm", "blimp": "acc"}  # {kind of a benchmark's records: its main score}


def accuracy(log: RunLog, kind: str) -> tuple[list[int], list[float], list[float]]:
    """(steps, main scores, half widths of the 95 % intervals) of a benchmark."""
    steps, values = column(log, kind, ACCURACY[kind])
    errors = dict(zip(*column(log, kind, f"{ACCURACY[kind]}_stderr")))
    return steps, values, [1.96 * abs(errors.get(step, 0)) for step in steps]


# --------------------------------------------------------------------------------- comparing runs


def tokens_at(log: RunLog) -> Callable[[int], int] | None:
    """A function from a step to the training tokens up to it; None if no tokens were logged.

    It interpolates between two records, and extrapolates after the last one.
    """
    known: dict[int, float] = {0: 0}
    for kind in ("start", "train"):
        known.update(zip(*column(log, kind, "tokens")))
    steps = sorted(known)

    def tokens(step: int) -> int:
        i = min(max(1, bisect.bisect_left(steps, step)), len(steps) - 1)
        a, b = steps[i - 1], steps[i]
        return round(known[a] + (step - a) * (known[b] - known[a]) / (b - a))

    return tokens if len(steps) > 1 else None


def by_tokens(logs: Sequence[RunLog]) -> bool:
    """Whether runs are compared at equal tokens, because their steps may differ in size."""
    return len(logs) > 1 and all(map(tokens_at, logs))


def losses_by_position(logs: Sequence[RunLog], kind: str) -> list[dict[int, tuple[int, float]]]:
    """For each log {position: (step, loss)}. Runs are compared at equal positions, which are tokens or
    steps (see by_tokens)."""
    in_tokens, found = by_tokens(logs), []
    for log in logs:
        position = (in_tokens and tokens_at(log)) or int
        found.append({position(s): (s, v) for s, v in zip(*column(log, kind, "loss"))})
    return found


def vocab_sizes(logs: Sequence[RunLog]) -> list[int]:
    """The vocabulary size of each run that logged one; it identifies the tokenizer."""
    found = [v for log in logs for v in column(log, "start", "log_v")[1][-1:]]
    return [round(math.exp(v)) for v in found if v < 99]  # a damaged log may contain any number


def comparable(logs: Sequence[RunLog]) -> bool:
    """Whether losses in nats per token can be compared: whether all runs have the same tokenizer."""
    return len(set(vocab_sizes(logs))) < 2


def data_folder(run: str | Path) -> str:
    """The folder of a run's data, from its config.json; "" if that cannot be read, as for a copied log."""
    path = Path(run)
    folder = path.parent if path.name == "log.jsonl" else path
    with contextlib.suppress(UserError):
        return str(read_json(folder / "config.json", train=dict)["train"].get("data") or "")
    return ""


def same_data(logs: Sequence[RunLog], folders: Sequence[str | None]) -> bool:
    """Whether all runs are validated on the same text, as far as is known. folders: of each run's data,
    empty if unknown."""
    starts = [log.get("start", [{}])[-1] for log in logs]
    found = [{os.path.abspath(str(path)) for path in folders if path}]
    found += [{s.get(name) for s in starts} - {None, 0} for name in ("val_tokens", "val_targets")]
    return max(map(len, found)) < 2
