"""Make one HTML page of a training run, or of two side by side, from log.jsonl and config.json.

    python -m lab report log/RUN                # default: the newest run
    python -m lab report log/RUN log/OTHER      # side by side

The page's template is report.html.j2, its sentences are in report_text.py, and plotly draws the curves. The
page is self-contained: it includes plotly's JavaScript, compressed, and its Content-Security-Policy forbids
the browser to fetch or run anything else. Text from a log, such as a sample, is escaped by jinja2.
"""

import html
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high, median_low
from typing import Annotated, Any, NamedTuple

from lab.cli import UserError, parse_args
from lab.data.tokenizers import printable
from lab.eval import blimp_published
from lab.files import atomic_write, write_errors
from lab.templates import load_template
from lab.tools import read_log, report_text
from lab.tools.plot import blimp_levels, hellaswag_levels, loss_levels, phenomena
from lab.tools.plot_style import color_index
from lab.tools.read_log import by_tokens, column, comparable
from lab.tools.report_runs import RunReport, mismatch, read_run
from lab.tools.report_text import MISSING, setting_text

RENEW_SECONDS = 10  # interval at which --watch updates the page

# --------------------------------------------------------------------------------------- 1. figures


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
    note = report_text.loss_note(training, validation)
    found: dict[str, dict] = {}
    found["loss"] = dict(
        curves=losses, levels=loss_levels(logs), range=window, cut_off=cut_off, note=note
    )
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
        curves=trace_per_run(runs, "train", "lr", "learning rate"), note=report_text.lr_note(runs)
    )
    found["grad_norm"] = dict(curves=norms, levels={f"clipped at {c:g}": c for c in clips})
    found["tok_per_s"] = dict(curves=trace_per_run(runs, "train", "tok_per_s", "speed"))
    return {id: {"levels": {}} | figure for id, figure in found.items() if figure["curves"]}


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
        a, b = read_log.losses_by_position(logs, kind)
        common = [position for position in a if position in b]
        steps = [a[position][0] for position in common]
        gaps = [b[position][1] - a[position][1] for position in common]
        color = color_index("loss")
        curves += curve(first, kind, steps, gaps, label, color, width, smooth=True, showlegend=True)
    note = report_text.difference_note(first, second)
    return dict(curves=curves, levels={"no difference": 0}, note=note)


# ------------------------------------------------------------------- 2. numbers, settings and samples


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
        tokens = run.tokens(run.last)
        known = run.start.get("epoch_tokens") or run.start.get("train_tokens")
        found["tokens"] = Number(tokens, "{:,.0f}", f"{tokens / known:.2f} epochs" if known else "")
    minutes = max(run.minutes.values())
    found["total minutes"] = Number(minutes, "{:,.2f}", "with evaluation and saving")
    # with an even number of values, the slower of both middle ones, so that speed and time agree
    rows = [
        ("tok_per_s", "tokens/s, median", median_low, "{:,.0f}"),
        ("mfu", "MFU, median", median_low, "{:.3f}"),
        ("dt_ms", "ms per step, median", median_high, "{:,.1f}"),
        ("peak_gib", "peak memory, GiB", max, "{:,.2f}"),
    ]
    names = dict.fromkeys(name for record in run.log.get("train", []) for name in record)
    for name in names:
        if name.endswith("_ms") and name != "dt_ms":
            rows.append((name, f"{name[:-3]}, ms per step, median", median_high, "{:,.1f}"))
    for name, what, summary, form in rows:
        if values := column(run.log, "train", name)[1]:
            found[what] = Number(summary(values), form)
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


def settings(runs: Sequence[RunReport]) -> list[tuple[str, list[tuple[str, list[str], bool]]]]:
    """[(part, [(field, each run's value as text, whether they differ)])] of config.json and of the
    log's start record."""
    shown_above = ("kind", "step", "time", "tokens", "command", "changed")
    labels = {"log_v": "uniform guess (nats)", "unigram": "unigram baseline (nats)"}
    sides, parts = [], []
    for run in runs:
        start = {labels.get(k, k): v for k, v in run.start.items() if k not in shown_above}
        sides.append(run.config | {"machine and data": start})
    for part in dict.fromkeys(part for side in sides for part in side):
        found, rows = [side.get(part, {}) for side in sides], []
        for field in dict.fromkeys(field for values in found for field in values):
            texts = [setting_text(values.get(field)) for values in found]
            rows.append((field, texts, all(found) and field != "run_name" and len({*texts}) > 1))
        parts.append((part, rows))
    return parts


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
            step, note = record["step"], report_text.samples_note(run, record["step"], texts)
            found.setdefault(step, {})[i] = Samples(step, texts, record.get("shaded"), note)
    rows, latest = [], dict.fromkeys(range(len(runs)), Samples())
    for step in sorted(found):
        latest |= found[step]
        rows.append((step, list(latest.values())))
    return rows


# ------------------------------------------------------------------------------------------ 3. page


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
            dict(
                name=run.name,
                facts=report_text.facts(run),
                remarks=report_text.remarks(run),
                starts=run.log.get("start", []),
            )
            for run in runs
        ],
        headline=report_text.title(runs),
        warnings=report_text.warnings(runs),
        numbers=number_rows(runs),
        figures=figures_of(runs),
        axis="tokens" if by_tokens([run.log for run in runs]) else "step",
        axes={axis: max(run.axes[axis](r) for run in runs for r in run.all) for axis in shared},
        samples=written,
        opens=opens,
        shaded=any(side.shaded for _, sides in written for side in sides),
        settings=settings(runs),
        changes=[(run.name, report_text.changes(run)) for run in runs],
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
        # .html file; default: report.html, for two runs report_with_OTHER.html, in the first one's directory
        out: str = ""
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
