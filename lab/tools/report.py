"""Make one HTML page of a training run, or of two beside each other, from log.jsonl and config.json.

python -m lab report                              # the newest run: log/RUN/report.html
python -m lab report log/RUN --watch --open       # renewed while the run goes on
python -m lab report log/RUN log/OTHER            # their curves, their difference, what was set differently

The curves are plotly's; the page itself is report.html.j2 beside this file. It needs nothing but itself:
plotly's JavaScript stands inside, and its own rules forbid the browser to fetch or to run anything else.
Text from a log, samples above all, is escaped by jinja2.
"""

import datetime
import html
import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lab.cli import UserError, parse
from lab.files import read_json, write_whole, writing
from lab.run.records import (
    by_tokens,
    column,
    comparable,
    ended,
    find_runs,
    last_common,
    loss_window,
    place_name,
    places,
    read_log,
    run_names,
    smooth,
    step_sizes,
    tokens_at,
    vocabularies,
)
from lab.tools.plot import PUBLISHED_HELLASWAG, caption, finding
from lab.tools.style import COLORS, PAPER, place_of

RENEW = 10  # seconds between two looks at a run that is watched

# ------------------------------------------------------------------------------------------ 1. runs


@dataclass
class Run:
    name: str
    log: dict  # {kind: records}, from read_log
    config: dict  # {"model": {field: value}, "train": ...}; empty where there is no config.json
    tokens: Callable | None  # tokens of training until a step; None if unknown
    begun: list  # [(when a start was logged, seconds of the run before it)]

    @property
    def start(self):
        """The newest start record."""
        return (self.log.get("start") or [{}])[-1]

    def seconds(self, record):
        """Of wall clock since the start, evaluation and saving included; None where none was logged."""
        now = record.get("time")
        past = [
            now - t0 + before
            for t0, before in self.begun
            if isinstance(now, (int, float)) and t0 <= now
        ]
        return past[-1] if past else None

    def records(self):
        return [record for records in self.log.values() for record in records]


def read_run(path, name):
    """Raises UserError where there is no log, nothing in it yet, or a config.json that cannot be read."""
    log = read_log(path)
    config = path / "config.json" if path.is_dir() else path.with_name("config.json")
    there = config.exists() and (path.is_dir() or path.name == "log.jsonl")  # a copied log is alone
    config = read_json(config, model=dict, train=dict) if there else {}
    return Run(name, log, config, tokens_at(log), sessions(log))


def sessions(log):
    """[(time of a start, seconds that the run had taken before)].

    The time between a stop and --resume is none of the run's.
    """
    times = sorted(
        r["time"] for rows in log.values() for r in rows if isinstance(r.get("time"), (int, float))
    )
    starts = sorted(
        {r["time"] for r in log.get("start", []) if r.get("time") in times} | set(times[:1])
    )
    begun, before = [], 0.0
    for t0, t1 in zip(starts, [*starts[1:], math.inf]):
        begun.append((t0, before))
        before += max(t for t in times if t0 <= t < t1) - t0
    return begun


def phases(run):
    """Names of the milliseconds that --timing logged, in the order of a step."""
    names = dict.fromkeys(key for record in run.log.get("train", []) for key in record)
    return [name for name in names if name.endswith("_ms") and name != "dt_ms"]


def cautions(runs):
    """Sentences on what the page must not be read as saying."""
    logs = [run.log for run in runs]
    found = [
        f"There is no config.json beside the log of {run.name}." for run in runs if not run.config
    ]
    sizes = [" then ".join(f"{size:,}" for size in step_sizes(log)) for log in logs]
    for run, text in zip(runs, sizes):
        if "then" in text:
            found.append(f"{run.name} was resumed with steps of another size: {text} tokens.")
    if len(runs) == 1:
        return found
    known = [(run.start.get("val_tokens"), run.config.get("train", {}).get("data")) for run in runs]
    if not comparable(logs):
        ids = " and ".join(f"{size:,}" for size in vocabularies(logs))
        found.append(
            f"These runs have different tokenizers ({ids} ids): their losses in nats per token do not compare. "
            "Bits per byte do, on the same text."
        )
    elif any(a != b for a, b in zip(*known) if a and b):
        found.append(
            "They were validated on different tokens or data (see below): their losses need not compare."
        )
    if by_tokens(logs):
        found.append(
            f"Their steps are of different size, {' and '.join(sizes)} tokens: compare them at equal tokens."
        )
    return [*found, "This is one run each: what another seed alone would change is not seen here."]


# --------------------------------------------------------------------------------------- 2. figures


def axes(runs):
    """{axis: (label, title of the hover box, a run's function from a record to its place)}, where all runs have it."""
    found = {"step": ("step", "step %{x:,}", lambda run, record: record["step"])}
    if all(run.tokens for run in runs):
        found["tokens"] = (
            "tokens",
            "%{x:.4s} tokens",
            lambda run, record: run.tokens(record["step"]),
        )
    times = [run.seconds(record) for run in runs for record in run.records()]
    if None not in times and max(times):
        units = [(1, "seconds", 900), (60, "minutes", 3 * 3600), (3600, "hours", math.inf)]
        size, unit, _ = next(u for u in units if max(times) <= u[2])
        found["time"] = (
            unit,
            f"%{{x:,.2f}} {unit}",
            lambda run, record: round(run.seconds(record) / size, 4),
        )
    return found


class Figures:
    """All figures of the page, in plotly's graph objects; what is not about the data is in report.html.j2.

    found: {id: {title, note, figure}}. A curve's `meta` holds its places on all axes, its colour is
    `var(--c3)`: the page replaces it by that of its light or dark look.
    """

    def __init__(self, runs):
        self.runs, self.logs, self.axes, self.found = (
            runs,
            [run.log for run in runs],
            axes(runs),
            {},
        )
        self.alone = len(runs) == 1
        self.own = [run.name if len(runs) > 1 else "" for run in runs]  # what tells a curve's run
        self.loss()
        if not comparable(self.logs):
            curves = self.each("val", "bits_per_byte", "loss", width=3)
            note = "Validation loss in a unit that does not depend on the tokenizer."
            self.add("bits", "Bits per byte", note, "bits per byte", ".4f", curves)
        if not self.alone:
            self.difference()
        self.hellaswag()
        self.plain(
            "lr", "Learning rate", "The schedule, warm-up first.", "rate", ".3e", "learning rate"
        )
        self.gradient_norm()
        note = "Training alone: evaluation and saving do not count."
        self.plain("tok_per_s", "Speed", note, "tokens/s", ",.0f", "speed")
        note = "Share of the datasheet's dense peak."
        self.plain("mfu", "Model FLOPS utilisation", note, "MFU", ".1%", "speed")
        self.phases()
        note = "Most that was allocated on the device so far."
        self.plain("peak_gib", "Memory", note, "GiB", ".2f", "memory")

    def curve(self, run, steps, values, color, width=2, name="", **more):
        """[a curve], dotted where it has few points; none where it has no point."""
        from plotly.graph_objects import Scatter

        records = {record["step"]: record for record in run.records()}
        meta = {
            axis: [at(run, records[s]) for s in steps] for axis, (_, _, at) in self.axes.items()
        }
        return [
            Scatter(
                **{"showlegend": False, "name": html.escape(name, quote=False)} | more,
                y=[float(f"{v:.6g}") for v in values],
                meta=meta,
                mode="lines+markers"
                if 2 < width and len(steps) <= 60 or len(steps) == 1
                else "lines",
                line={"color": f"var(--c{color})", "width": width},
            )
        ] * bool(steps)

    def smoothed(self, run, steps, values, color, width=2, **more):
        """The curve, or where it has many points each of them faint, and their mean."""
        if len(values) < 80:
            return self.curve(run, steps, values, color, width, **more)
        faint = self.curve(run, steps, values, color, 1, opacity=0.35, hoverinfo="skip")
        return faint + self.curve(run, steps, smooth(values), color, width, **more)

    def each(self, kind, name, what, draw=None, words="", **more):
        """A curve for each run: in the colour of `what` if it is alone, else in the run's."""
        curves = []
        for i, (run, own) in enumerate(zip(self.runs, self.own)):
            label = ", ".join(filter(None, [own, words])) or what
            color = place_of(what) if self.alone else i
            curves += (draw or self.curve)(
                run, *column(run.log, kind, name), color, name=label, **more
            )
        return curves

    def add(self, id, title, note, unit, digits, curves, levels=None, **yaxis):
        """A figure, if there is a curve for it. digits: d3's format; levels: {text: height} of lines."""
        from plotly.graph_objects import Figure

        if not curves:
            return
        for curve in curves:
            curve.hovertemplate = f"%{{y:{digits}}}" if curve.hoverinfo != "skip" else None
        levels = levels or {}
        heights = [*(v for curve in curves for v in curve.y), *levels.values()]
        room = 0.09 * (max(heights) - min(heights))  # for the label on the highest line
        yaxis |= {
            "title": {"text": unit},
            "autorangeoptions": {"include": [v + room for v in levels.values()]},
        }
        yaxis |= {"tickformat": ".0%"} if digits.endswith("%") else {}
        shapes = [{"y0": y, "y1": y, "label": {"text": text}} for text, y in levels.items()]
        layout = {"template": None, "yaxis": yaxis, "shapes": shapes}
        figure = Figure(curves, layout).to_plotly_json()
        self.found[id] = {"title": title, "note": note, "figure": figure}

    def plain(self, name, title, note, unit, digits, what):
        self.add(
            name, title, note, unit, digits, self.each("train", name, what), rangemode="tozero"
        )

    def loss(self):
        legend = {"showlegend": self.alone}
        curves = self.each("train", "loss", "loss", self.smoothed, "training", width=1.3, **legend)
        curves += self.each("val", "loss", "loss", words="validation", width=3, **legend)
        levels = {}
        for name, text in (
            ("log_v", "uniform guess {:.2f}"),
            ("unigram", "unigram baseline {:.2f}"),
        ):
            values = sorted(v for log in self.logs for v in column(log, "start", name)[1][-1:])
            near = (
                len(values) == 2 and values[1] - values[0] < 0.3
            )  # two labels would be unreadable
            levels |= {text.format(v): v for v in (values[:1] if near else values)}
        note = "Thick: validation. Thin: training; where it was logged often, the mean of the faint values."
        self.add(
            "loss",
            "Loss",
            note,
            "nats per token",
            ".4f",
            curves,
            levels,
            range=loss_window(self.logs),
        )

    def difference(self):
        """Of the losses, or where those do not compare, of bits per byte."""
        name, unit = (
            ("loss", "nats per token")
            if comparable(self.logs)
            else ("bits_per_byte", "bits per byte")
        )
        curves = []
        for kind, width, words in (("train", 1.3, "training"), ("val", 3, "validation")):
            a, b = places(self.logs, kind, name)
            both = [(step, b[place][1] - value) for place, (step, value) in a.items() if place in b]
            data = list(map(list, zip(*both))) or ([], [])
            curves += self.smoothed(
                self.runs[0], *data, place_of("loss"), width, name=words, showlegend=True
            )
        where, (first, second) = "tokens" if by_tokens(self.logs) else "steps", self.own
        note = f"{second} minus {first}, at equal {where}. Below zero, {second} is better."
        note += (
            f" Against time, each point stands where {first} was." if "time" in self.axes else ""
        )
        self.add(
            "difference",
            "Difference of the losses",
            note,
            unit,
            "+.4f",
            curves,
            {"no difference": 0},
        )

    def hellaswag(self):
        curves = self.each("hella", "acc_norm", "accuracy", width=3)
        measured = [log for log in self.logs if column(log, "hella", "acc_norm")[0]]
        for curve, log in zip(curves, measured):
            errors = {r["step"]: 1.96 * (r.get("acc_norm_stderr") or 0) for r in log["hella"]}
            curve.error_y = {
                "array": [round(errors[s], 5) for s in curve.meta["step"]],
                "thickness": 1,
                "width": 3,
            }
        best = max((v for curve in curves for v in curve.y), default=0)
        levels = {
            "chance 0.25": 0.25
        }  # the large model's mark would only press a small one's curve flat
        levels |= {
            f"{k} {v:.4f}": v for k, v in PUBLISHED_HELLASWAG.items() if v < 0.3 or best > 0.36
        }
        note = "Normalised accuracy with 95 % intervals."
        self.add("hellaswag", "HellaSwag", note, "acc_norm", ".4f", curves, levels)

    def gradient_norm(self):
        curves = self.each("train", "grad_norm", "gradient norm", self.smoothed)
        clips = {run.config.get("train", {}).get("grad_clip") for run in self.runs} - {None, 0}
        near = max((v for curve in curves for v in curve.y), default=0) > 0.5 * max(
            clips, default=math.inf
        )
        levels = {f"clipped at {clip:g}": clip for clip in clips} if near else {}
        note = "Of all parameters together, before clipping."
        self.add("grad_norm", "Gradient norm", note, "norm", ".3f", curves, levels)

    def phases(self):
        """What the steps are made of (--timing): a stack for each run, all of one height."""
        stacks = []
        for run in self.runs:
            stack, colors = (
                [],
                [place_of(c) for c in ("grey", "blue", "orange", "red", "gold", "green", "pink")],
            )
            for name, color in zip(phases(run), colors):
                more = {"showlegend": True, "stackgroup": "one", "fillcolor": f"var(--c{color})"}
                stack += self.curve(
                    run, *column(run.log, "train", name), color, 0, name[:-3], **more
                )
            stacks.append(stack)
        top = 1.05 * max(
            (sum(at) for stack in stacks for at in zip(*(c.y for c in stack))), default=0
        )
        for i, (stack, own) in enumerate(zip(stacks, self.own)):
            title, note = (
                ": ".join(filter(None, ["Phases of a step", own])),
                "Mean milliseconds of each.",
            )
            self.add(f"phases{i}", title, note, "ms", ".1f", stack, range=[0, top])


# --------------------------------------------------------------------------------------- 3. numbers


class Number(NamedTuple):
    value: float
    form: str = "{:,.4f}"  # how it is written
    note: str = ""  # what stands beside it
    place: int | None = None  # the step at which it was measured; None for those of the whole run

    def text(self):
        return self.form.format(self.value)


def numbers(run):
    """{what: Number} that a run comes down to."""
    found = {}
    rows = [("val", "loss", "validation loss"), ("val", "bits_per_byte", "bits per byte")]
    rows += [("train", "loss", "training loss"), ("hella", "acc_norm", "HellaSwag acc_norm")]
    for kind, name, what in rows:
        steps, values = column(run.log, kind, name)
        errors = column(run.log, kind, f"{name}_stderr")[1]
        sure = f"± {1.96 * errors[-1]:.4f}, " if errors else ""
        if values:
            found[what] = Number(values[-1], note=f"{sure}step {steps[-1]:,}", place=steps[-1])
        if what == "validation loss" and values and min(values) < values[-1]:
            step = steps[values.index(min(values))]
            found["best validation loss"] = Number(min(values), note=f"step {step:,}", place=step)
    last = max(record["step"] for record in run.records())
    found["steps"] = Number(last, "{:,.0f}")
    if run.tokens:
        known = run.start.get("train_tokens")
        epochs = f"{run.tokens(last) / known:.2f} epochs" if known else ""
        found["tokens"] = Number(run.tokens(last), "{:,.0f}", epochs)
    wall = max((run.seconds(record) or 0 for record in run.records()), default=0)
    if wall:
        clock = str(datetime.timedelta(seconds=round(wall)))
        found["seconds in all"] = Number(wall, "{:,.1f}", f"{clock}, with evaluation and saving")
    rows = [("tok_per_s", "tokens/s, median", "{:,.0f}"), ("mfu", "MFU, median", "{:.1%}")]
    rows += [(name, f"{name[:-3]}, ms a step, median", "{:,.1f}") for name in phases(run)]
    rows += [("dt_ms", "ms a step, median", "{:,.1f}"), ("peak_gib", "peak memory, GiB", "{:,.2f}")]
    for name, what, form in rows:
        values = sorted(column(run.log, "train", name)[1])
        if values:
            found[what] = Number(values[-1 if name == "peak_gib" else len(values) // 2], form)
    return found


def number_rows(runs):
    """[(what, [Number of each run, or None], what the second has more)]."""
    logs, columns = [run.log for run in runs], [numbers(run) for run in runs]
    common = last_common(logs, "val", "loss") if len(runs) > 1 and comparable(logs) else None
    rows = {}
    if common and len({c["validation loss"].place for c in columns}) > 1:
        what = f"validation loss at {place_name(common[0], logs)}, the last place measured in both"
        rows[what] = [Number(value, place=0) for value in common[1]]
    for what in dict.fromkeys(what for c in columns for what in c):
        rows[what] = [c.get(what) for c in columns]
    return [(what, pair, gap(what, pair, runs)) for what, pair in rows.items()]


def gap(what, pair, runs):
    """The second number minus the first, as text; empty where they do not compare."""
    if (
        len(pair) < 2
        or None in pair
        or "loss" in what
        and not comparable([run.log for run in runs])
    ):
        return ""
    a, b = pair
    at = [run.tokens(n.place) if n.place and run.tokens else n.place for n, run in zip(pair, runs)]
    if at[0] != at[1]:
        return ""
    if a.text() == b.text():
        return "0"
    if "%" in a.form:
        return f"{100 * (b.value - a.value):+.1f} points"
    share = (
        f" ({b.value / a.value - 1:+.1%})" if a.place is None and a.value and "," in a.form else ""
    )
    return a.form.replace("{:", "{:+").format(b.value - a.value) + share


def facts(run):
    """One line: what ran where, when, and how it ended."""
    parts = [caption(run.log)]
    parts += [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t0)) for t0, _ in run.begun[:1]]
    parts += [f"resumed at step {r['step']:,}" for r in run.log.get("start", []) if r["step"]]
    reason = ended(run.log)
    going = f"at step {max(r['step'] for r in run.records()):,}; still running, or killed"
    parts += [
        going if reason is None else "finished" if reason == "done" else f"stopped by {reason}"
    ]
    return ", ".join(filter(None, parts))


def settings(runs):
    """[(part, [(field, value of each run as text, whether they differ)])]: configuration, machine, data."""
    sides = []
    for run in runs:
        said = {k: v for k, v in run.start.items() if k not in ("kind", "step", "time", "tokens")}
        sides.append(run.config | {"machine and data": said})
    parts = []
    for part in dict.fromkeys(part for side in sides for part in side):
        rows = []
        for field in dict.fromkeys(field for side in sides for field in side.get(part, {})):
            values = [side.get(part, {}).get(field) for side in sides]
            values = [
                v if isinstance(v, str) and v else "-" if v is None else json.dumps(v)
                for v in values
            ]
            known = field != "run_name" and all(side.get(part) for side in sides)
            rows.append((field, values, known and len(set(values)) > 1))
        parts.append((part, rows))
    return parts


def samples(runs):
    """[(step, texts of each run)], earliest first; a text is (the prompt that it goes on from, the rest).

    A young model writes control characters, which HTML cannot hold: they show as Unicode's symbols.
    """
    visible = {c: 0x2400 + c for c in range(32) if c not in (9, 10)}  # not tab and newline
    found = {}
    for i, run in enumerate(runs):
        prompt = run.config.get("train", {}).get("sample_prompt", "")
        for record in run.log.get("sample", []):
            for text in record["texts"] if isinstance(record.get("texts"), list) else []:
                text = str(text).translate(visible)
                cut = len(prompt) if text.startswith(prompt) else 0
                sides = found.setdefault(record["step"], [[] for _ in runs])
                sides[i].append((text[:cut], text[cut:]))
    return sorted(found.items())


# ------------------------------------------------------------------------------------------ 4. page


def page(runs, live=False):
    """The whole page, as text, for one or two Runs. live: it loads itself anew every RENEW seconds."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    found, logs = Figures(runs), [run.log for run in runs]
    shown = {}
    for axis, (label, hover, at) in found.axes.items():
        end = max(at(run, record) for run in runs for record in run.records())
        look = {"title": {"text": label}, "unifiedhovertitle": {"text": hover}}
        shown[axis] = look | {"range": [-0.015 * end, 1.015 * end]}
    said = finding({run.name: run.log for run in runs})
    folder = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return jinja.get_template("report.html.j2").render(
        runs=[(run.name, facts(run)) for run in runs],
        said=said[:1].upper() + said[1:]
        if len(runs) == 1
        else said,  # that of two begins with a name
        cautions=cautions(runs),
        numbers=number_rows(runs),
        figures=found.found,
        axis="tokens" if by_tokens(logs) else "step",
        axes=shown,
        samples=samples(runs),
        settings=settings(runs),
        colors=[
            {**PAPER[dark], **{f"c{i}": c for i, c in enumerate(COLORS[dark])}} for dark in (0, 1)
        ],
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(16),  # scripts without it, such as one from a log, never run
        renew=RENEW if live else 0,
    )


def main(argv):
    import tyro

    def chosen(
        runs: tyro.conf.Positional[tuple[Path, ...]] = (),
        out: Path | None = None,
        open: bool = False,
        watch: bool = False,
    ):
        """Make one HTML page of a run, or of two beside each other.

        Args:
            runs: One or two run folders, such as log/laptop_20260101-120000, or logs; the newest run if
                none is named.
            out: Page to write (.html); if not given report.html in the run's folder (or beside the log),
                and of two runs report_with_<second>.html in the first one's.
            open: Show it in the browser.
            watch: Renew it until the run ends; the page in the browser loads itself anew.
        """
        return find_runs(runs), out, open, watch

    paths, out, show, watch = parse(chosen, argv, prog="python -m lab report")
    if len(paths) > 2:
        raise UserError(
            f"a page shows one run or two, not {len(paths)}; `python -m lab plot` draws more"
        )
    if out is None:
        out = paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")
        out = out.with_stem("_with_".join([out.stem, *(path.resolve().stem for path in paths[1:])]))
    if out.suffix != ".html":  # also lest a log be overwritten
        raise UserError(f"--out {out} must end in .html")
    logs = [path / "log.jsonl" if path.is_dir() else path for path in paths]
    before = None
    while True:
        runs = list(map(read_run, paths, run_names(paths)))
        live = watch and any(ended(run.log) is None for run in runs)
        if (now := [log.stat().st_mtime_ns for log in logs]) != before or not live:
            with writing(out, "name another place with --out"):
                out.parent.mkdir(parents=True, exist_ok=True)
                write_whole(
                    out, page(runs, live).encode(errors="replace")
                )  # a model may write half a character
        if before is None:
            print(
                f"{out} renews itself until the run ends; Ctrl-C stops that" if live else out,
                flush=True,
            )
            if show:
                import webbrowser

                webbrowser.open(out.resolve().as_uri())
        if not live:
            return
        before = now
        time.sleep(RENEW)
