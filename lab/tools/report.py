"""Make one HTML page of a training run, or of two beside each other, from log.jsonl and config.json.

python -m lab report log/RUN log/OTHER      # without names of runs, the newest one

The curves are plotly's, the page is report.html.j2 beside this file. It needs nothing but itself:
plotly's JavaScript stands inside, and the page's own rules forbid the browser to fetch or to run
anything else. Text from a log, samples above all, is escaped by jinja2.
"""

import html
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

from lab.cli import UserError, parse
from lab.data.tokenizers import printable
from lab.files import read_json, template, write_whole, writing
from lab.tools import run_logs
from lab.tools.plot import caption, finding, hellaswag_levels, loss_levels
from lab.tools.plot_style import COLORS, PAPER, place_of
from lab.tools.run_logs import by_tokens, column, comparable

RENEW = 10  # seconds between two looks at a run that is watched

# ------------------------------------------------------------------------------------------ 1. runs


class Run:
    """A run's name, log ({kind: records}) and configuration ({"model": {field: value}, "train": ...};
    empty where there is no config.json)."""

    def __init__(self, name, log, config):
        self.name, self.log, self.config = name, log, config
        self.all = [record for kind in log.values() for record in kind]
        self.start, self.train = log.get("start", [{}])[-1], config.get("train", {})
        self.tokens = run_logs.tokens_at(log)  # of training until a step; None if unknown
        self.last = max(record["step"] for record in self.all)
        self.minutes = clock(self.all)
        self.axes = {  # a record's place on each
            "step": lambda record: record["step"],
            "time": lambda record: round(self.minutes[record["time"]], 4),
        }
        if self.tokens:
            self.axes["tokens"] = lambda record: self.tokens(record["step"])


def clock(records):
    """{time of a record: minutes of the run until then}, evaluation and saving included; the time
    between a stop and --resume is none of the run's."""
    in_order, minutes, total = sorted(records, key=lambda r: r["time"]), {}, 0.0
    for before, record in zip([in_order[0], *in_order], in_order):
        if record["kind"] != "start":
            total += (record["time"] - before["time"]) / 60
        minutes[record["time"]] = total
    return minutes


def read_run(path, name):
    """Raises UserError where there is no log, nothing in it yet, or a config.json that is damaged."""
    log, config = run_logs.read_log(path), {}
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if beside.exists() and (path.is_dir() or path.name == "log.jsonl"):  # else the log was copied
        way_out = "delete it, and the page leaves the configuration out"
        config = read_json(beside, way_out, model=dict, train=dict)
    return Run(name, log, {part: config[part] for part in ("model", "train") if config})


def cautions(runs):
    """Sentences on what the page must not be read as saying."""
    logs = [run.log for run in runs]
    found = [f"There is no config.json beside the log of {r.name}." for r in runs if not r.config]
    if len(runs) == 1:
        return found
    data = [(run.start.get("val_tokens"), run.train.get("data")) for run in runs]
    if len({"accuracy" in row for log in logs for row in log.get("val", [])}) == 2:
        found.append("One guesses hidden words, the other the next token: losses do not compare.")
    elif not comparable(logs):
        ids = " and ".join(f"{size:,}" for size in run_logs.vocabularies(logs))
        why = f"These runs have different tokenizers ({ids} ids): their losses in nats per token"
        found.append(f"{why} do not compare. Bits per byte do, on the same text.")
    elif any(a != b for a, b in zip(*data) if a and b):
        why = "They were validated on different tokens or data (see below)"
        found.append(f"{why}: their losses need not compare.")
    return [*found, "This is one run each: what another seed alone would change is not seen here."]


# --------------------------------------------------------------------------------------- 2. figures


def figures_of(runs):
    """{id: {"curves": [...], "levels": {text: height of a dashed line}, ...}} of the figures that
    have a curve; report.html.j2 has their titles, units and look."""
    logs = [run.log for run in runs]
    alone, fair = len(runs) == 1, comparable(logs)
    thin = dict(words="training", width=1.3, smooth=True, showlegend=alone)
    thick = dict(words="validation", width=3, showlegend=alone)
    losses = each(runs, "train", "loss", "loss", **thin)
    losses += each(runs, "val", "loss", "loss", **thick)
    norms = each(runs, "train", "grad_norm", "gradient norm", smooth=True)
    highest = max((v for curve in norms for v in curve["y"]), default=0)
    clips = [run.train.get("grad_clip") for run in runs]
    clips = [c for c in clips if isinstance(c, (int, float)) and 0 < c < 2 * highest]
    found = {
        "loss": dict(curves=losses, levels=loss_levels(logs), range=run_logs.loss_window(logs))
    }
    if not fair:
        found["bits"] = dict(curves=each(runs, "val", "bits_per_byte", "loss", width=3))
    elif not alone:
        found["difference"] = difference(*runs)
    scores = each(runs, "hella", "acc_norm", "accuracy", width=3)
    found["hellaswag"] = dict(curves=scores, levels=hellaswag_levels(logs))
    found["lr"] = dict(curves=each(runs, "train", "lr", "learning rate"))
    found["grad_norm"] = dict(curves=norms, levels={f"clipped at {c:g}": c for c in clips})
    found["tok_per_s"] = dict(curves=each(runs, "train", "tok_per_s", "speed"))
    return {id: {"levels": {}} | figure for id, figure in found.items() if figure["curves"]}


def each(runs, kind, field, what, words="", **look):
    """A curve for each run, with name and colour of the run; if it is alone, those of `what`."""
    curves = []
    for i, run in enumerate(runs):
        name, color = ", ".join(filter(None, [run.name, words])), i
        if len(runs) == 1:
            name, color = words or what, place_of(what)
        if kind == "hella":
            look["errors"] = [round(error, 5) for error in run_logs.hellaswag(run.log)[2]]
        curves += curve(run, kind, *column(run.log, kind, field), name, color, **look)
    return curves


def curve(run, kind, steps, values, name, color, width=2, smooth=False, **more):
    """[a curve], with dots where it has few points; nothing where it has none. `smooth`: where
    points are many each of them faint, and their mean."""
    at = {record["step"]: record for record in run.log.get(kind, [])}
    whole = {
        "name": html.escape(name, quote=False),  # plotly reads <b> and <a> in it
        "y": [float(f"{v:.6g}") for v in values],
        "places": {axis: [place(at[s]) for s in steps] for axis, place in run.axes.items()},
        "dots": width > 2 and len(steps) <= 60 or len(steps) == 1,
        "color": color,
        "width": width,
        "showlegend": False,
    } | more
    if smooth and len(values) >= 80:
        mean = [float(f"{v:.6g}") for v in run_logs.smooth(values)]
        faint = {"width": 1, "faint": True, "showlegend": False}
        return [whole | faint, whole | {"y": mean}]
    return [whole] if steps else []


def difference(first, second):
    """The figure of the second run's losses minus the first's."""
    curves, logs = [], [first.log, second.log]
    for kind, words, width in (("train", "training", 1.3), ("val", "validation", 3)):
        a, b = run_logs.places(logs, kind, "loss")
        both = [(step, b[place][1] - value) for place, (step, value) in a.items() if place in b]
        data = list(zip(*both)) or [(), ()]
        look = dict(width=width, smooth=True, showlegend=True)
        curves += curve(first, kind, *data, words, place_of("loss"), **look)
    equal = "tokens" if by_tokens(logs) else "steps"
    note = f"{second.name} minus {first.name}, at equal {equal}. "
    note += f"Below zero, {second.name} is better. "
    note += f"Against time, each point stands where {first.name} was."
    return dict(curves=curves, levels={"no difference": 0}, note=note)


# --------------------------------------------------------------------------------------- 3. numbers


class Number(NamedTuple):
    value: float
    form: str = "{:,.4f}"  # how it is written
    note: str = ""  # what stands beside it
    at: int = 0  # the tokens, or else the step, at which it was measured; 0: of the whole run

    def text(self):
        return self.form.format(self.value)


def numbers(run):
    """{what: Number} that a run comes down to."""
    found, at = {}, run.tokens or int
    rows = [("val", "loss", "validation loss"), ("val", "bits_per_byte", "bits per byte")]
    rows += [("train", "loss", "training loss"), ("hella", "acc_norm", "HellaSwag acc_norm")]
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
    found["minutes in all"] = Number(minutes, "{:,.2f}", "with evaluation and saving")
    names = dict.fromkeys(name for record in run.log.get("train", []) for name in record)
    phases = [name for name in names if name.endswith("_ms") and name != "dt_ms"]
    rows = [("tok_per_s", "tokens/s, median", "{:,.0f}"), ("mfu", "MFU, median", "{:.3f}")]
    rows += [("dt_ms", "ms a step, median", "{:,.1f}"), ("peak_gib", "peak memory, GiB", "{:,.2f}")]
    rows += [(phase, f"{phase[:-3]}, ms a step, median", "{:,.1f}") for phase in phases]
    for name, what, form in rows:
        if values := column(run.log, "train", name)[1]:
            found[what] = Number((max if "peak" in what else median_high)(values), form)
    return found


def number_rows(runs):
    """[(what, [Number of each run, or None], what the second has more)]."""
    columns = [numbers(run) for run in runs]
    rows = {what: [c.get(what) for c in columns] for c in columns for what in c}
    fair = comparable([run.log for run in runs])
    return [
        (what, pair, gap(*pair) if len(pair) == 2 and (fair or "loss" not in what) else "")
        for what, pair in rows.items()
    ]


def gap(a, b):
    """The second number minus the first, as text; empty where they do not compare."""
    if not a or not b or a.at != b.at:
        return ""
    share = f" ({b.value / a.value - 1:+.1%})" if a.value and not a.at else ""
    return a.form.replace("{:", "{:+").format(b.value - a.value) + share


# ----------------------------------------------------------------------------------------- 4. words


def facts(run):
    """One line: what ran where, when, and how it ended."""
    began = time.gmtime(min(run.minutes))
    parts = [caption(run.log), time.strftime("%Y-%m-%d %H:%M UTC", began)]
    parts += [f"resumed at step {r['step']:,}" for r in run.log.get("start", []) if r["step"]]
    reason = run_logs.ended(run.log)
    going = f"at step {run.last:,}, still running or killed"
    parts += [{None: going, "done": "finished"}.get(reason, f"stopped by {reason}")]
    return ", ".join(filter(None, parts))


def settings(runs):
    """[(part, [(field, each run's value as text, whether they differ)])] of all that is known."""
    told = ("kind", "step", "time", "tokens")
    machines = [{k: v for k, v in run.start.items() if k not in told} for run in runs]
    sides = [run.config | {"machine and data": said} for run, said in zip(runs, machines)]
    parts = []
    for part in dict.fromkeys(part for side in sides for part in side):
        found, rows = [side.get(part, {}) for side in sides], []
        for field in dict.fromkeys(field for values in found for field in values):
            values = [values.get(field) for values in found]
            texts = [v if isinstance(v, str) and v else json.dumps(v) for v in values]
            rows.append((field, texts, all(found) and field != "run_name" and len({*texts}) > 1))
        parts.append((part, rows))
    return parts


def samples(runs):
    """[(step, [texts of each run])], earliest first, without control characters: HTML cannot hold
    those that a young model writes."""
    found = {}
    for i, run in enumerate(runs):
        for record in run.log.get("sample", []):
            sides = found.setdefault(record["step"], [[] for _ in runs])
            sides[i] += [printable(str(text)) for text in record.get("texts", [])]
    return sorted(found.items())


# ------------------------------------------------------------------------------------------ 5. page


def page(runs, live=False):
    """The whole page, as text, for one or two Runs. live: it loads itself anew every RENEW seconds."""
    from plotly.offline import get_plotlyjs

    logs, written = {run.name: run.log for run in runs}, samples(runs)
    shared = [axis for axis in ("step", "tokens", "time") if all(axis in run.axes for run in runs)]
    common = [i for i, (_, sides) in enumerate(written) if all(sides)]
    opens = common[-1] if common else len(written) - 1  # the slider, at a step that all have
    return template("report.html.j2").render(
        runs=[(run.name, facts(run)) for run in runs],
        said=finding(logs),
        cautions=cautions(runs),
        numbers=number_rows(runs),
        figures=figures_of(runs),
        axis="tokens" if by_tokens(list(logs.values())) else "step",
        axes={axis: max(run.axes[axis](r) for run in runs for r in run.all) for axis in shared},
        samples=written,
        opens=opens,
        shaded=[(r.name, s) for r in runs for s in r.log.get("sample", [])[-1:] if "shaded" in s],
        settings=settings(runs),
        colors=[PAPER[d] | {f"c{i}": c for i, c in enumerate(COLORS[d])} for d in (False, True)],
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(16),  # a script without it, such as one from a log, never runs
        renew=RENEW if live else 0,
    )


def write_page(paths, out, watch=False):
    """Returns whether a run still goes on, so that the page has to be made again."""
    runs = list(map(read_run, paths, run_logs.run_names(paths)))
    live = watch and any(run_logs.ended(run.log) is None for run in runs)
    with writing(out, "name another place with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        text = page(runs, live)
        write_whole(out, text.encode(errors="replace"))  # a model may write half a character
    return live


def main(argv):
    from tyro.conf import Positional

    @dataclass
    class Config:
        """Make one HTML page of a run, or of two beside each other."""

        runs: Positional[tuple[Path, ...]] = ()  # one or two run folders; the newest run if none
        out: str = ""  # the page; in the first run's folder if empty
        watch: bool = False  # renew it until the run ends; in the browser it loads itself anew

    cfg = parse(Config, argv)
    paths = run_logs.find_runs(cfg.runs)
    if len(paths) > 2:
        raise UserError(f"a page shows two runs at most, not {len(paths)}; `lab plot` draws more")
    out = run_logs.output(paths, cfg.out, "report.html", ".html")
    live = write_page(paths, out, cfg.watch)
    renewed = "; it is renewed until the run ends, and Ctrl-C ends that" * live
    print(f"wrote {out}{renewed}", flush=True)
    while live:
        time.sleep(RENEW)
        live = write_page(paths, out, cfg.watch)
