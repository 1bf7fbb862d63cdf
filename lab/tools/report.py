"""Make one HTML page of a training run, or of two side by side, from log.jsonl and config.json.

    python -m lab report log/RUN                # default: the newest run
    python -m lab report log/RUN log/OTHER      # side by side

plotly draws the curves; the page's template is report.html.j2. The page is self-contained: it includes
plotly's JavaScript, compressed, and its Content-Security-Policy forbids the browser to fetch or run
anything else. Text from a log, such as a sample, is escaped by jinja2.
"""

import html
import json
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any, NamedTuple

from lab.cli import UserError, counted, parse_args, shell_quote
from lab.data.tokenizers import printable
from lab.eval import blimp_published
from lab.files import atomic_write, read_json, write_errors
from lab.templates import load_template
from lab.tools import read_log
from lab.tools.plot import (
    blimp_levels,
    caption,
    headline,
    hellaswag_levels,
    last_common,
    loss_levels,
    phenomena,
)
from lab.tools.plot_style import color_index
from lab.tools.read_log import Record, RunLog, by_tokens, column, comparable
from lab.tools.verdict import loss_verdict

RENEW_SECONDS = 10  # interval at which --watch updates the page
MISSING = "–"  # printed for a value that was not logged
SPIKES = 5  # largest number of gradient spikes that are listed, the newest ones
# names of values of the log's start record
LABELS = {"log_v": "uniform guess (nats)", "unigram": "unigram baseline (nats)"}

# ------------------------------------------------------------------------------------------ 1. runs


class RunReport:
    """The data of a run for the page.

    folder: the run directory, or that of a copied log. config: {"model": {field: value}, "train": {field:
    value}}, or empty without a config.json.
    """

    def __init__(self, name: str, folder: Path, log: RunLog, config: dict[str, dict]):
        self.name, self.folder, self.log, self.config = name, folder, log, config
        self.all = [record for kind in log.values() for record in kind]
        self.start, self.train = log.get("start", [{}])[-1], config.get("train", {})
        self.tokens = tokens = read_log.tokens_at(log)  # training tokens up to a step, or None
        self.failed = read_log.failed_step(log)
        self.last = self.failed or max(record["step"] for record in self.all)
        self.minutes = clock(self.all)
        self.axes = {  # {axis: a record's position on it}
            "step": lambda record: record["step"],
            "time": lambda record: round(self.minutes[record["time"]], 4),
        }
        if tokens:
            self.axes["tokens"] = lambda record: tokens(record["step"])


def clock(records: list[Record]) -> dict[float, float]:
    """{time of a record: minutes since the run started}, including evaluation and saving, but not the
    time between a stop and --resume."""
    in_order, minutes, total = sorted(records, key=lambda r: r["time"]), {}, 0.0
    for before, record in zip([in_order[0], *in_order], in_order):
        if record["kind"] != "start":
            total += (record["time"] - before["time"]) / 60
        minutes[record["time"]] = total
    return minutes


def read_run(path: Path, name: str) -> RunReport:
    """Read a run directory or a log file. Raises UserError if there is no log, if it has no
    measurement yet, or if config.json is damaged."""
    log, config = read_log.read_log(path), {}
    folder = path if path.is_dir() else path.parent
    beside = folder / "config.json"
    if beside.exists() and (path.is_dir() or path.name == "log.jsonl"):  # not for a copied log
        hint = "delete it to get a page without the configuration"
        config = read_json(beside, hint, model=dict, train=dict)
    config = {part: config[part] for part in ("model", "train") if config}
    return RunReport(name, folder, log, config)


def mismatch(runs: Sequence[RunReport]) -> str:
    """The difference between runs because of which their losses cannot be compared: "objectives",
    "tokenizers" or "data"; "" if there is none."""
    logs = [run.log for run in runs]
    if len({"accuracy" in row for log in logs for row in log.get("val", [])}) == 2:
        return "objectives"
    if not comparable(logs):
        return "tokenizers"
    data = [(run.start.get("val_tokens"), run.train.get("data")) for run in runs]
    return "data" if any(a != b for a, b in zip(data[0], data[-1]) if a and b) else ""


def warnings(runs: Sequence[RunReport]) -> list[str]:
    """Warnings about invalid comparisons."""
    if len(runs) == 1:
        return []
    ids = " and ".join(f"{size:,}" for size in read_log.vocab_sizes([run.log for run in runs]))
    texts = {
        "objectives": "One run predicts masked words, the other the next token: their losses cannot "
        "be compared.",
        "tokenizers": f"These runs have different tokenizers ({ids} ids), so their losses in nats per "
        "token cannot be compared. Bits per byte can be, on the same text.",
        "data": "These runs were validated on different tokens or data (see below), so their losses "
        "may not be comparable.",
    }
    found = [texts[differs]] if (differs := mismatch(runs)) else []
    (steps, losses), (others, other_losses) = (column(run.log, "val", "loss") for run in runs)
    _, common = last_common([run.log for run in runs]) or ("", 0)
    if not differs and common and steps and others and steps[-1] != others[-1]:
        found.append(
            "The headline compares them as far as both went. At their ends, the validation losses are "
            f"{losses[-1]:.4f} after step {steps[-1]:,} and {other_losses[-1]:.4f} after step {others[-1]:,}."
        )
    seed = "Each configuration was run only once, so differences may be due to the random seed."
    return [*found, seed]


# --------------------------------------------------------------------------------------- 2. figures


def figures_of(runs: Sequence[RunReport]) -> dict[str, dict]:
    """{id: {"curves": [...], "levels": {label: height of a dashed line}, ...}} of the figures that
    have a curve; report.html.j2 has their titles, units and style."""
    logs = [run.log for run in runs]
    alone = len(runs) == 1
    training = trace_per_run(
        runs, "train", "loss", "loss", "training", width=1.3, smooth=True, showlegend=alone
    )
    validation = trace_per_run(runs, "val", "loss", "loss", "validation", width=3, showlegend=alone)
    losses = training + validation
    norms = trace_per_run(runs, "train", "grad_norm", "gradient norm", smooth=True)
    highest = max((v for curve in norms for v in curve["y"]), default=0)
    clips = [run.train.get("grad_clip") for run in runs]
    clips = [c for c in clips if isinstance(c, (int, float)) and 0 < c < 2 * highest]
    window = read_log.loss_window(logs)
    low, high = window or (-math.inf, math.inf)
    heights = [y for curve in losses for y in curve["y"]] or [0.0]
    cut_off = ["high"] * (max(heights) > high) + ["low"] * (min(heights) < low)
    note = lines_drawn(training, validation)
    found: dict[str, dict] = {
        "loss": dict(
            curves=losses, levels=loss_levels(logs), range=window, cut_off=cut_off, note=note
        )
    }
    if not comparable(logs):
        found["bits"] = dict(curves=trace_per_run(runs, "val", "bits_per_byte", "loss", width=3))
    elif not alone and not mismatch(runs):
        found["difference"] = difference(*runs)
    scores = trace_per_run(runs, "hella", "acc_norm", "accuracy", width=3)
    found["hellaswag"] = dict(curves=scores, levels=hellaswag_levels(logs))
    scores = trace_per_run(runs, "blimp", "acc", "accuracy", width=3)
    found["blimp"] = dict(curves=scores, levels=blimp_levels(logs))
    found["phenomena"] = dict(curves=phenomenon_curves(runs[0]) if alone else [], levels={"": 0.5})
    found["lr"] = dict(
        curves=trace_per_run(runs, "train", "lr", "learning rate"), note=lr_note(runs)
    )
    found["grad_norm"] = dict(curves=norms, levels={f"clipped at {c:g}": c for c in clips})
    found["tok_per_s"] = dict(curves=trace_per_run(runs, "train", "tok_per_s", "speed"))
    return {id: {"levels": {}} | figure for id, figure in found.items() if figure["curves"]}


def lines_drawn(training: list[dict], validation: list[dict]) -> str:
    """Sentences that say which lines and dots of the loss figure are training and validation losses."""

    def single(curves: list[dict]) -> bool:
        return all(len(curve["y"]) == 1 for curve in curves)

    dots = [curve["dots"] for curve in validation]
    faint = [curve for curve in training if curve.get("faint")]
    parts = []
    if validation and single(validation):
        parts.append("Large dot: validation." if training else "Dot: validation.")
    elif validation and all(dots):
        parts.append("Dots: validation; the dotted line only connects them.")
    elif validation:
        parts.append("Thick line, or dots: validation." if any(dots) else "Thick line: validation.")
    if not training:
        parts.append("No training loss was logged.")
    elif single(training):
        parts.append("Small dot: training.")
    elif not faint:
        parts.append("Thin line: training.")
    elif 2 * len(faint) == len(training):  # each run has both
        parts.append("Thin line: training, smoothed; the faint line shows the raw values.")
    else:
        parts.append("Thin line: training, smoothed where a faint line shows the raw values.")
    return " ".join(parts)


def lr_note(runs: Sequence[RunReport]) -> str:
    """Sentences that say which learning rate is drawn, and how the others are related to it."""
    notes = {}
    for run in runs:
        train, muon = run.train, run.train.get("optimizer") in ("muon", "normuon")
        shown = "AdamW's learning rate" if muon else "The learning rate"
        shown += " of the output layer" * ("embed_lr" in train)
        note = f"{shown}, determined by the settings lr, warmup_steps and schedule."
        if muon:
            peak = setting_text(train.get("muon_lr"))
            note += " The matrices of the blocks, which are most of the weights, are trained by Muon, whose "
            note += f"learning rate follows the same curve up to muon_lr = {peak}."
        if "embed_lr" in train:
            note += (
                f" That of the embeddings goes up to embed_lr = {setting_text(train['embed_lr'])}."
            )
        notes[run.name] = note
    if len({*notes.values()}) == 1:
        return next(iter(notes.values()))
    return " ".join(f"{name}: {note}" for name, note in notes.items())


def trace_per_run(
    runs: Sequence[RunReport], kind: str, field: str, what: str, label: str = "", **style: Any
) -> list[dict]:
    """The curves of a field in the records of a kind, one per run, with the run's name and color. A single
    run's curve has the name and color of the quantity `what`. label: added to the name. style: see curve."""
    curves = []
    for i, run in enumerate(runs):
        name, color = ", ".join(filter(None, [run.name, label])), i
        if len(runs) == 1:
            name, color = label or what, color_index(what)
        if kind in read_log.ACCURACY:
            style["errors"] = [round(e, 5) for e in read_log.accuracy(run.log, kind)[2]]
        steps, values = column(run.log, kind, field)
        curves += curve(run, kind, steps, values, name, color, run=i, **style)
    return curves


def curve(
    report: RunReport, kind: str, steps: Sequence[int], values: Sequence[float], name: str, color: int,
    width: float = 2, smooth: bool = False, **more: Any,
) -> list[dict]:  # fmt: skip
    """[a curve for report.html.j2], or [] without points. A wide curve of few points has dots and a dotted
    line. smooth: draw many points faintly, and their moving average as a second curve."""
    at = {record["step"]: record for record in report.log.get(kind, [])}
    dots = width > 2 and len(steps) <= 60 or len(steps) == 1
    whole: dict[str, Any] = {
        "name": html.escape(name, quote=False),  # plotly interprets <b> and <a> in it
        "y": [float(f"{v:.6g}") for v in values],
        "positions": {
            axis: [position(at[s]) for s in steps] for axis, position in report.axes.items()
        },
        "dots": dots,
        "dash": "dot" if dots else "solid",
        "color": color,
        "width": width,
        "showlegend": False,
    } | more
    if smooth and len(values) >= 80:
        mean = [float(f"{v:.6g}") for v in read_log.smooth(values)]
        faint = {"width": 1, "faint": True, "showlegend": False}
        return [whole | faint, whole | {"y": mean}]
    return [whole] if steps else []


def phenomenon_curves(run: RunReport) -> list[dict]:
    """The accuracy of each BLiMP phenomenon. Each curve has its own combination of color and dash."""
    curves = []
    for i, (name, (steps, values)) in enumerate(phenomena(run.log).items()):
        name, dash = blimp_published.label(name), ("solid", "dash", "dot")[i // 4]
        curves += curve(run, "blimp", steps, values, name, i % 4, dash=dash, showlegend=True)
    return curves


def difference(first: RunReport, second: RunReport) -> dict[str, Any]:
    """The figure of the second run's losses minus the first's."""
    curves, logs = [], [first.log, second.log]
    for kind, label, width in (("train", "training", 1.3), ("val", "validation", 3)):
        a, b = read_log.values_by_position(logs, kind, "loss")
        common = [position for position in a if position in b]
        steps = [a[position][0] for position in common]
        gaps = [b[position][1] - a[position][1] for position in common]
        curves += curve(
            first,
            kind,
            steps,
            gaps,
            label,
            color_index("loss"),
            width,
            smooth=True,
            showlegend=True,
        )
    equal = "tokens" if by_tokens(logs) else "steps"
    note = f"{second.name} minus {first.name}, at equal {equal}. "
    note += f"Below zero, {second.name} is better. "
    note += f"With time on the x axis, each point is at the time of {first.name}."
    return dict(curves=curves, levels={"no difference": 0}, note=note)


# --------------------------------------------------------------------------------------- 3. numbers


class Number(NamedTuple):
    """A value of the table of numbers."""

    value: float
    form: str = "{:,.4f}"  # its format
    note: str = ""  # text after it
    at: int = 0  # tokens (or step) at which it was measured; 0: a value of the whole run

    def text(self) -> str:
        """The formatted value."""
        return self.form.format(self.value)


def numbers(run: RunReport) -> dict[str, Number]:
    """{label: Number} that summarize a run."""
    found, at = {}, run.tokens or int
    rows = [("val", "loss", "validation loss"), ("val", "bits_per_byte", "bits per byte")]
    rows += [("train", "loss", "training loss"), ("hella", "acc_norm", "HellaSwag acc_norm")]
    rows += [("blimp", "acc", "BLiMP accuracy")]
    for kind, name, what in rows:
        steps, values = column(run.log, kind, name)
        note = [f"± {1.96 * v:.4f}" for v in column(run.log, kind, f"{name}_stderr")[1][-1:]]
        if values:
            note = ", ".join([*note, f"step {steps[-1]:,}"])
            found[what] = Number(values[-1], note=note, at=at(steps[-1]))
        if what == "validation loss" and values and min(values) < values[-1]:
            step = steps[values.index(min(values))]
            found["best validation loss"] = Number(min(values), note=f"step {step:,}", at=at(step))
    found["steps"] = Number(run.last, "{:,.0f}")
    if run.tokens:
        tokens, known = run.tokens(run.last), run.start.get("train_tokens")
        found["tokens"] = Number(tokens, "{:,.0f}", f"{tokens / known:.2f} epochs" if known else "")
    minutes = max(run.minutes.values())
    found["total minutes"] = Number(minutes, "{:,.2f}", "with evaluation and saving")
    names = dict.fromkeys(name for record in run.log.get("train", []) for name in record)
    phases = [name for name in names if name.endswith("_ms") and name != "dt_ms"]
    rows = [("tok_per_s", "tokens/s, median", "{:,.0f}"), ("mfu", "MFU, median", "{:.3f}")]
    rows += [
        ("dt_ms", "ms per step, median", "{:,.1f}"),
        ("peak_gib", "peak memory, GiB", "{:,.2f}"),
    ]
    rows += [(phase, f"{phase[:-3]}, ms per step, median", "{:,.1f}") for phase in phases]
    for name, what, form in rows:
        if values := column(run.log, "train", name)[1]:
            found[what] = Number((max if "peak" in what else median_high)(values), form)
    return found


def number_rows(runs: Sequence[RunReport]) -> list[tuple[str, list[Number | None], str]]:
    """[(label, the Number of each run or None, the second minus the first as text)]."""
    columns = [numbers(run) for run in runs]
    rows = {what: [c.get(what) for c in columns] for c in columns for what in c}
    differs = mismatch(runs)  # bits per byte can be compared between tokenizers
    unfair = ["loss"] * bool(differs) + ["bits"] * (differs in ("objectives", "data"))
    return [
        (what, pair, "" if len(pair) < 2 or any(x in what for x in unfair) else format_delta(*pair))
        for what, pair in rows.items()
    ]


def format_delta(a: Number | None, b: Number | None) -> str:
    """The second number minus the first, as text; "" if they cannot be compared."""
    if not a or not b:
        return ""
    if a.at != b.at:
        return "at other steps"
    relative = f" ({b.value / a.value - 1:+.1%})" if a.value and not a.at else ""
    return a.form.replace("{:", "{:+").format(b.value - a.value) + relative


# ------------------------------------------------------------------------------------------ 4. text


def title(runs: Sequence[RunReport]) -> str:
    """The main result, as a sentence: the error that stopped a run, if there was one, and the losses."""
    stopped = {run.name: short_error(run) for run in runs if short_error(run)}
    if stopped and len(runs) == 1:
        return f"Stopped: {stopped[runs[0].name]}"
    parts = [f"{name} stopped: {error}" for name, error in stopped.items()]
    return "; ".join([*parts, losses_title(runs)])


def short_error(run: RunReport) -> str:
    """The problem in the message of the error that stopped the run, without details and advice; "" without
    an error."""
    return re.split(r";| \(|\n", read_log.run_error(run.log))[0]


def losses_title(runs: Sequence[RunReport]) -> str:
    """A sentence about the losses. Those that cannot be compared are only listed."""
    differ = {"objectives": "with different objectives", "data": "on different data"}
    if (differs := mismatch(runs)) not in differ:
        return headline({run.name: run.log for run in runs})
    losses = [f"{v:.2f}" for run in runs for v in column(run.log, "val", "loss")[1][-1:]]
    shown = f": validation loss {' and '.join(losses)}" if len(losses) == len(runs) else ""
    return f"Two runs {differ[differs]}{shown}"


def facts(run: RunReport) -> str:
    """One line: model, device, time of the start, and how the run ended."""
    started = time.gmtime(min(run.minutes))
    parts = [caption(run.log), time.strftime("%Y-%m-%d %H:%M UTC", started)]
    parts += [f"resumed at step {r['step']:,}" for r in run.log.get("start", []) if r["step"]]
    reason = read_log.end_reason(run.log)
    running = f"at step {run.last:,}, still running or killed"
    known = {
        None: running,
        "done": "finished",
        "error": f"stopped by an error {'at' if run.failed else 'after'} step {run.last:,}",
    }
    parts += [known.get(reason, f"stopped by {reason}")]
    return ", ".join(filter(None, parts))


def remarks(run: RunReport) -> list[tuple[str, str]]:
    """[(class of the style sheet, sentences with commands in backticks)] on the error that stopped the run,
    its gradient spikes, and its validation loss."""
    found = []
    if error := read_log.run_error(run.log):
        found.append(("error", f"Error: {error}."))
    spikes = [record for record in run.log.get("spike", []) if "file" in record]
    for spike in spikes[-SPIKES:]:
        norms = [format(spike[n], ".4g") if n in spike else "not finite" for n in ("norm", "usual")]
        text = f"Gradient spike at step {spike['step']:,}: norm {norms[0]}, "
        text += f"median of the steps before {norms[1]}"
        text += ", update skipped" * bool(spike.get("skipped"))
        file = run.folder / Path(spike["file"]).name
        if file.is_file():  # not beside a copied log
            text += f". To repeat that step: `python -m lab replay {shell_quote(file)}`"
        found.append(("spike", text))
    if more := len(spikes) - SPIKES if len(spikes) > SPIKES else 0:
        found.append(("spike", f"{counted(more, 'earlier gradient spike')}: see log.jsonl"))
    found.append(("verdict", loss_verdict(run.log, run.train)))
    return [(style, flags_as_code(text)) for style, text in found if text]


def flags_as_code(text: str) -> str:
    """The text with backticks around its flags, except in commands that have them already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"--\w+", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def commands(run: RunReport) -> list[tuple[int, str]]:
    """[(step, the command that started or resumed the run there)], without those that were not logged, as
    by older versions."""
    starts = run.log.get("start", [])
    return [(r["step"], r["command"]) for r in starts if r.get("command")]


def changes(run: RunReport) -> list[str]:
    """A sentence for each resume, on the settings that it changed."""
    found = []
    for record in run.log.get("start", []):
        rows = record.get("changed", {} if record["step"] == 0 else None)
        texts = [
            f"{name} from {setting_text(a)} to {setting_text(b)}"
            for name, (a, b) in (rows or {}).items()
        ]
        text = ", ".join(texts) or ("not logged" if rows is None else "no setting")
        if record["step"]:
            found.append(f"Changed when the run was resumed at step {record['step']:,}: {text}.")
    return found


def settings(runs: Sequence[RunReport]) -> list[tuple[str, list[tuple[str, list[str], bool]]]]:
    """[(part, [(field, each run's value as text, whether they differ)])] of config.json and of the
    log's start record."""
    shown_above = ("kind", "step", "time", "tokens", "command", "changed")
    machines = [
        {LABELS.get(k, k): v for k, v in run.start.items() if k not in shown_above} for run in runs
    ]
    sides = [run.config | {"machine and data": values} for run, values in zip(runs, machines)]
    parts = []
    for part in dict.fromkeys(part for side in sides for part in side):
        found, rows = [side.get(part, {}) for side in sides], []
        for field in dict.fromkeys(field for values in found for field in values):
            values = [values.get(field) for values in found]
            texts = [setting_text(value) for value in values]
            rows.append((field, texts, all(found) and field != "run_name" and len({*texts}) > 1))
        parts.append((part, rows))
    return parts


def setting_text(value: Any) -> str:
    """A setting as text: JSON, except that strings have no quotes, floats at most six digits, and missing
    values are a dash, also in lists."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, list):
        return ", ".join(map(setting_text, value)) or MISSING
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.6g}")
    return value if isinstance(value, str) else json.dumps(value)


class Samples(NamedTuple):
    """The texts that a run generated at `step`; `shaded` has the tokens of the first, if they were logged;
    `note` is a remark on them. step: -1 if it generated none yet."""

    step: int = -1
    texts: list[str] = []
    shaded: list | None = None
    note: str = ""


def samples(runs: Sequence[RunReport]) -> list[tuple[int, list[Samples]]]:
    """[(step, [each run's last Samples up to it])], earliest first, without control characters, which
    untrained models may generate and HTML does not allow."""
    found: dict[int, dict[int, Samples]] = {}  # {step: {number of a run: its Samples}}
    for i, run in enumerate(runs):
        for record in run.log.get("sample", []):
            texts = [printable(str(text)) for text in record.get("texts", [])]
            random = record["step"] == 0 and starts_random(run)
            note = "The weights are random before the first step, so this text is too." * random
            if random and "\ufffd" in "".join(texts):
                note += " � stands for bytes that are not valid UTF-8, and symbols such as ␀ for "
                note += "control characters."
            side = Samples(record["step"], texts, record.get("shaded"), note)
            found.setdefault(record["step"], {})[i] = side
    rows, latest = [], dict.fromkeys(range(len(runs)), Samples())
    for step in sorted(found):
        latest |= found[step]
        rows.append((step, list(latest.values())))
    return rows


def starts_random(run: RunReport) -> bool:
    """Whether the weights were random at step 0: by the configuration, or by the loss, which is then that
    of a uniform guess."""
    if run.train:
        return not run.train.get("init_from")
    first = dict(zip(*column(run.log, "val", "loss"))).get(0, 0)
    return first > run.start.get("log_v", math.inf) - 0.5


# ------------------------------------------------------------------------------------------ 5. page


def page(runs: Sequence[RunReport], live: bool = False) -> str:
    """The HTML of the page for one or two runs. live: the page reloads itself every RENEW_SECONDS."""
    written = samples(runs)
    shared = [axis for axis in ("step", "tokens", "time") if all(axis in run.axes for run in runs)]
    common = [
        i for i, (step, sides) in enumerate(written) if step and all(x.step == step for x in sides)
    ]
    opens = common[-1] if common else len(written) - 1  # the slider's initial position
    return load_template("report.html.j2").render(
        runs=[
            dict(name=run.name, facts=facts(run), remarks=remarks(run), commands=commands(run))
            for run in runs
        ],
        headline=title(runs),
        warnings=warnings(runs),
        numbers=number_rows(runs),
        figures=figures_of(runs),
        axis="tokens" if by_tokens([run.log for run in runs]) else "step",
        axes={axis: max(run.axes[axis](r) for run in runs for r in run.all) for axis in shared},
        samples=written,
        opens=opens,
        shaded=any(side.shaded for _, sides in written for side in sides),
        settings=settings(runs),
        changes=[(run.name, changes(run)) for run in runs],
        without_config=[run.name for run in runs if not run.config],
        nonce=secrets.token_urlsafe(16),  # scripts without it, such as one from a log, don't run
        missing=MISSING,
        renew=RENEW_SECONDS if live else 0,
    )


def write_page(paths: Sequence[Path], out: Path, watch: bool = False) -> bool:
    """Write the page. Returns whether to update it: with `watch`, until all runs are finished."""
    runs = list(map(read_run, paths, read_log.run_names(paths)))
    live = watch and any(read_log.end_reason(run.log) is None for run in runs)
    with write_errors(out, "choose another place with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        text = page(runs, live)
        atomic_write(out, text.encode(errors="replace"))  # a sample may contain a lone surrogate
    return live


def main(argv: list[str]) -> None:
    """Run `python -m lab report` with these arguments."""
    from tyro.conf import Positional, arg  # slow to import

    @dataclass
    class Config:
        """Make one HTML page of a run, or of two side by side."""

        # one or two run directories; default: the newest run
        runs: Annotated[tuple[Path, ...], Positional, arg(metavar="[RUN ...]")] = ()
        out: str = ""  # .html file; default: report.html in the first run's directory
        watch: bool = False  # update the page until the run ends; the browser reloads it

    cfg = parse_args(Config, argv)
    paths = read_log.find_runs(cfg.runs)
    if len(paths) > 2:
        raise UserError(f"{len(paths)} runs are too many: a page shows at most 2; use `lab plot`")
    out = read_log.output_path(paths, cfg.out, "report.html", ".html")
    live = write_page(paths, out, cfg.watch)
    updating = "; it is updated until the run ends; press Ctrl-C to stop" * live
    print(f"wrote {out}; open it in a browser{updating}", flush=True)
    while live:
        time.sleep(RENEW_SECONDS)
        live = write_page(paths, out, cfg.watch)
