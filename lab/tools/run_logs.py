"""What a run has logged, read back: log.jsonl as records, as curves, and the places where two runs compare.

Plots, the report, bench and the notebook read a log through this file alone. It imports nothing slow.
"""

import bisect
import math
from pathlib import Path

from lab.cli import UserError
from lab.files import loads, reading

# of fields; others are numbers
TYPES = dict.fromkeys("texts words passed_over shaded".split(), list)
TYPES |= dict.fromkeys("kind device precision torch reason path file".split(), str)


def find_runs(paths):
    """The runs that were named, by path or by name in log/; the newest one there if none is.

    Raises UserError where there is none.
    """
    if not paths:
        logs = sorted(Path("log").glob("*/log.jsonl"), key=lambda path: path.stat().st_mtime)
        if not logs:
            raise UserError("there is no run in log/ yet; name a run folder")
        return [logs[-1].parent]
    # a checkpoint stands for its run
    paths = [Path(path).parent if Path(path).suffix == ".pt" else path for path in paths]
    places = [(Path(path), Path("log", path)) for path in paths]
    return [there if there.exists() and not path.exists() else path for path, there in places]


def run_names(paths):
    """A name for each run: its folder's, or a copied log's own; the whole path where two are the same."""
    whole = [Path(path).resolve() for path in paths]
    names = [(p.parent if p.name == "log.jsonl" else p).name.removesuffix(".jsonl") for p in whole]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names)]


def output(paths, out, name, *endings):
    """The file `out` to make of these runs; where it is empty, `name` in the first one's folder or
    beside its log, with the others' names added. Raises UserError where it has another ending."""
    first = paths[0] if paths[0].is_dir() else paths[0].parent
    others = "".join(f"_with_{path.resolve().stem}" for path in paths[1:])
    out = Path(out) if out else (first / name).with_stem(Path(name).stem + others)
    if out.suffix not in endings:  # also lest a log be overwritten
        raise UserError(f"out={out} must end in {' or '.join(endings)}")
    return out


def read_log(run):
    """{kind: records in the order of their steps} of a run folder, or of a log.

    A resumed run goes back to its checkpoint: what the log says of later steps from before is dropped,
    and of two records for one step the last counts. A line that is no record, as one cut off by a
    kill, is skipped. Raises UserError where there is no log, or nothing to draw in it.
    """
    path = Path(run) / "log.jsonl" if Path(run).is_dir() else Path(run)
    with reading(path, "log", "name a run folder: `ls log` shows those there are"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = {}  # (kind, step) -> record
    for line in lines:
        try:  # the record after a cut one stands on the same line
            record = checked(loads(line[max(0, line.rfind('{"kind"')) :]))
            kind, step = record["kind"], record["step"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if kind == "start":
            found = {key: r for key, r in found.items() if key[1] <= step}
        found[kind, step] = record
    log = {}
    for (kind, _), record in sorted(found.items(), key=lambda item: item[0][1]):
        log.setdefault(kind, []).append(record)
    if not {"train", "val", "hella"} & log.keys():
        raise UserError(
            f"{path} holds no measurement; wait for the run's first one, or name another log"
        )
    return log


def checked(record):
    """A record without the fields that lab.run.log would not have written. Raises one of Python's
    errors where step or time are none, or where shaded is not what token_colors.shade gives."""
    right = {k: v for k, v in record.items() if isinstance(v, TYPES.get(k, (int, float)))}
    step, time = right["step"], right["time"]
    if type(step) is not int or not (0 <= step < 2**53 and 0 <= time < 2**35):
        raise ValueError("no step, or seconds that no calendar has")
    if "shaded" in right:
        prompt, tokens = right["shaded"]
        right["shaded"] = [str(prompt), list(map(checked_token, tokens))]
    return right


def checked_token(t):
    likeliest = [(i, str(name), float(p)) for i, name, p in t["likeliest"]]
    return dict(text=str(t["text"]), name=str(t["name"]), p=float(t["p"]), likeliest=likeliest)


def ended(log):
    """Why the run ended, "done" or a signal's name; None while it goes on, or where it was killed."""
    end, start = log.get("end", [{}])[-1], log.get("start", [{}])[-1]
    return end.get("reason") if end.get("time", 0) >= start.get("time", 0) else None


# ---------------------------------------------------------------------------------------- curves


def short(number):
    """1.5e9 as 1.5B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def column(log, kind, name):
    """(steps, values) of the numbers `name` in records of a kind, as far as they can be drawn."""
    rows = [(r["step"], r.get(name)) for r in log.get(kind, [])]
    rows = [(step, v) for step, v in rows if isinstance(v, (int, float)) and abs(v) < 1e300]
    return [step for step, _ in rows], [value for _, value in rows]


def smooth(values):
    """Mean over a centred window of about a fortieth of the points.

    It narrows at both ends, so that it neither lags, as a running average does, nor bends there.
    """
    n = len(values)
    reach = [min(n // 80, i, n - 1 - i) for i in range(n)]
    return [sum(values[i - h : i + h + 1]) / (2 * h + 1) for i, h in enumerate(reach)]


def loss_window(logs):
    """(low, high) for an axis of losses that the fall of the first steps does not own.

    It holds all losses after the first twentieth of each run, and the unigram baseline where that
    is near; None where no loss was logged.
    """
    late, levels = [], []
    for log in logs:
        rows = [row for kind in ("train", "val") for row in zip(*column(log, kind, "loss"))]
        edge = 0.05 * max((step for step, _ in rows), default=0)
        late += [loss for step, loss in rows if step > edge or not edge]
        levels += column(log, "start", "unigram")[1][-1:]
    if not late:
        return None
    low, high = min(late), max(late)
    high = max([high, *(level for level in levels if level < low + 2 * (high - low))])
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + 1.5 * margin  # room for the label of a line at the top


def hellaswag(log):
    """(steps, acc_norm, half of its 95 % intervals)."""
    steps, values = column(log, "hella", "acc_norm")
    errors = dict(zip(*column(log, "hella", "acc_norm_stderr")))
    return steps, values, [1.96 * abs(errors.get(step, 0)) for step in steps]


# ----------------------------------------------------------------------- where two runs compare


def tokens_at(log):
    """A function from a step to the tokens of training until then; None where none were logged.

    Between two records, and after the last, the steps are of one size.
    """
    known = {0: 0}
    for kind in ("start", "train"):
        known |= zip(*column(log, kind, "tokens"))
    steps = sorted(known)

    def tokens(step):
        i = min(max(1, bisect.bisect_left(steps, step)), len(steps) - 1)
        a, b = steps[i - 1], steps[i]
        return round(known[a] + (step - a) * (known[b] - known[a]) / (b - a))

    return tokens if len(steps) > 1 else None


def by_tokens(logs):
    """Whether runs compare at equal tokens: their steps may be of different size."""
    return len(logs) > 1 and all(map(tokens_at, logs))


def places(logs, kind, name):
    """For each log {place: (step, value)}; the place is where it compares, a step or tokens."""
    where = [tokens_at(log) if by_tokens(logs) else int for log in logs]
    pairs = zip(where, logs)
    return [{at(s): (s, v) for s, v in zip(*column(log, kind, name))} for at, log in pairs]


def vocabularies(logs):
    """How many token ids each run has, as far as known: they tell the tokenizers apart."""
    found = [v for log in logs for v in column(log, "start", "log_v")[1][-1:]]
    return [round(math.exp(v)) for v in found if v < 99]  # a damaged log may have any number


def comparable(logs):
    """Whether nats per token mean the same in all the runs."""
    return len(set(vocabularies(logs))) < 2
