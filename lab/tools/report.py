"""Make one HTML page of a training run, or of two beside each other, from their log.jsonl and config.json.

    python report.py log/RUN                      # log/RUN/report.html
    python report.py log/RUN log/OTHER --open     # their curves, the difference of the two, what was set differently

The page needs nothing but itself: plotly's JavaScript (4.8 MB) stands inside, and its own rules forbid the browser to fetch
or to run anything else. Text from a log, samples above all, is escaped.
"""

import base64
import contextlib
import datetime
import hashlib
import html
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.tools.plot import PUBLISHED_HELLASWAG, SERIES, caption, column, finding, read_log, smooth, step_sizes, tokens_at

ORANGE, GREEN, PURPLE = 1, 2, 3  # places in plot.SERIES; the first run is 0, the second 1

# ------------------------------------------------------------------------------------------------------ 1. runs


@dataclass
class Run:
    name: str
    log: dict  # {kind: records}, from plot.read_log
    config: dict  # {"model": {field: value}, "train": ...}; empty where there is no config.json
    start: dict  # the newest start record
    tokens: Callable | None  # tokens of training until a step; None if unknown
    sizes: list  # tokens of a step; several where a resumed run has changed it
    begun: list  # [(when a start was logged, seconds of the run before it)]


def read_run(path):
    """Raises FileNotFoundError or ValueError where there is no log, or nothing in it yet."""
    path = Path(path)
    log = read_log(path)
    folder = path if path.is_dir() else path.parent
    alone = path.is_file() and path.name != "log.jsonl"  # a log that was copied out of its folder
    try:
        config = json.loads((folder / "config.json").read_text()) if not alone else {}
        config = {part: dict(config[part]) for part in ("model", "train")} if config else {}
    except (OSError, ValueError, KeyError, TypeError):
        config = {}
    start = (log.get("start") or [{}])[-1]
    tokens, sizes = tokens_at(log), step_sizes(log)
    if not tokens and (size := config.get("train", {}).get("total_batch_size")):
        tokens, sizes = (lambda step: step * size), [size]
    return Run(path.stem if alone else folder.resolve().name, log, config, start, tokens, sizes, sessions(log))


def sessions(log):
    """[(time of a start, seconds that the run had taken before)]: the time between a stop and --resume is none of the
    run's."""
    times = sorted(r["time"] for records in log.values() for r in records if isinstance(r.get("time"), (int, float)))
    starts = sorted({r["time"] for r in log.get("start", []) if r.get("time") in times} | set(times[:1]))
    begun, before = [], 0.0
    for t0, t1 in zip(starts, [*starts[1:], math.inf]):
        begun.append((t0, before))
        before += max(t for t in times if t0 <= t < t1) - t0
    return begun


def seconds(run, record):
    """Of wall clock since the start, evaluation and saving included; None where the log has no times."""
    now = record.get("time")
    past = [now - t0 + before for t0, before in run.begun if isinstance(now, (int, float)) and t0 <= now]
    return past[-1] if past else None


def points(run, kind, name):
    """{"step", "seconds", "y"} of the finite values called `name`, each a list."""
    steps, values = column(run.log, kind, name)
    at = {r["step"]: seconds(run, r) for r in run.log.get(kind, [])}
    return {"step": steps, "seconds": [at[s] for s in steps], "y": values}


def axes(runs):
    """({axis: its label}, {"seconds": how many of them the unit of time has}) for the axes that all the runs have."""
    found = {"step": "steps"}
    if all(run.tokens for run in runs):
        found["tokens"] = "tokens"
    times = [[seconds(run, r) for records in run.log.values() for r in records] for run in runs]
    unit = 1
    if all(None not in t and max(t) for t in times):
        longest = max(map(max, times))
        fits = [(1, "seconds", 900), (60, "minutes", 3 * 3600), (3600, "hours", math.inf)]
        unit, found["seconds"] = next((size, name) for size, name, most in fits if longest <= most)
    return found, {"seconds": unit}


def phases(run):
    """Names of the milliseconds that --timing logged, in the order of a step."""
    return list(dict.fromkeys(k for r in run.log.get("train", []) for k in r if k.endswith("_ms") and k != "dt_ms"))


def vocabulary(run):
    """How many token ids there are, which tells the tokenizers apart; None if unknown."""
    known = run.config.get("model", {}).get("vocab_size")
    levels = column(run.log, "start", "log_v")[1]
    return known or (round(math.exp(levels[-1])) if levels else None)


def comparable(runs):
    """Whether nats per token mean the same in all the runs."""
    return len({vocabulary(run) for run in runs} - {None}) < 2


def by_tokens(runs):
    """Whether tokens are what counts, and not steps, those being of different size."""
    return len({size for run in runs for size in run.sizes}) > 1 and all(run.tokens for run in runs)


def position(run, runs):
    """A function from a step of one of these runs to where they compare: that step, or its tokens."""
    return run.tokens if by_tokens(runs) else lambda step: step


def apart(runs):
    """Whether the last validations of two runs lie at different steps (or tokens)."""
    steps = [column(run.log, "val", "loss")[0] for run in runs]
    ends = {position(run, runs)(s[-1]) for s, run in zip(steps, runs) if s}
    return len(ends) > 1


def difference(runs, kind, name):
    """points() of the second run minus the first, wherever both have a value: at equal steps (or tokens); the places are
    those of the first run."""
    a, b = (points(run, kind, name) for run in runs)
    ours, theirs = (position(run, runs) for run in runs)
    other = {theirs(step): y for step, y in zip(b["step"], b["y"])}
    rows = [(s, t, other[ours(s)] - y) for s, t, y in zip(a["step"], a["seconds"], a["y"]) if ours(s) in other]
    return dict(zip(("step", "seconds", "y"), map(list, zip(*rows)))) if rows else None


# ---------------------------------------------------------------------------------------------------- 2. panels


def trace(run, number, data, name, look, color, **more):
    """One curve. look: faint, thin, line, dots or area; legend=True gives it an entry in the plot's legend."""
    data = data | {"y": [float(f"{y:.6g}") for y in data["y"]]}
    data["seconds"] = [t if t is None else round(t, 2) for t in data["seconds"]]
    data |= {"tokens": list(map(run.tokens, data["step"]))} if run.tokens else {}
    return {"run": number, "name": html.escape(name, quote=False), "look": look, "color": color} | data | more


def with_smoothed(run, number, data, name, look, color, **more):
    """The curve alone, or faint under its smoothed one where there are points enough."""
    if len(data["y"]) < 80:
        return [trace(run, number, data, name, look, color, **more)] if data["y"] else []
    smoothed = data | {"y": smooth(data["y"])}
    return [trace(run, number, data, name, "faint", color), trace(run, number, smoothed, name, look, color, **more)]


def curves(runs, kind, name, smoothed=False, look="line"):
    """A curve for each run that has such values. Which run is which colour stands above the plots, not in them."""
    traces = []
    for i, run in enumerate(runs):
        data = points(run, kind, name)
        if smoothed:
            traces += with_smoothed(run, i, data, run.name, look, i)
        elif data["y"]:
            traces.append(trace(run, i, data, run.name, look, i))
    return traces


def panel(id, title, note, unit, digits, traces, levels=None):
    """A plot of the page: title, one sentence, the axis label, d3's number format, curves, {text: height} of lines."""
    return {"id": id, "title": title, "note": note, "unit": unit, "digits": digits, "traces": traces, "levels": levels or {}}


def loss_panel(runs):
    alone = len(runs) == 1
    traces = []
    for i, run in enumerate(runs):
        look = "thin" if column(run.log, "val", "loss")[0] else "line"
        traces += with_smoothed(run, i, points(run, "train", "loss"), "training", look, i, legend=alone)
    for i, run in enumerate(runs):
        data = points(run, "val", "loss")
        traces += [trace(run, i, data, "validation", "dots", ORANGE if alone else i, legend=alone)] if data["y"] else []
    levels = {}
    for name, text in (("log_v", "uniform guess, log V = {:.2f}"), ("unigram", "unigram entropy, {:.2f}")):
        values = [v for run in runs for v in column(run.log, "start", name)[1][-1:]]
        if len(values) == 2 and abs(values[0] - values[1]) < 0.3:  # two lines this near would be unreadable
            values = values[:1]
        levels |= {text.format(v): v for v in values}
    return panel("loss", "Loss", "Thick: validation. Thin: training, smoothed where it was logged often.",
                 "nats per token", ".4f", traces, levels)  # fmt: skip


def difference_panel(runs):
    """Of the losses, or where those do not compare, of bits per byte."""
    name, unit = ("loss", "nats per token") if comparable(runs) else ("bits_per_byte", "bits per byte")
    first, second = (run.name for run in runs)
    traces = []
    for kind, look, label, color in (("train", "thin", "training", GREEN), ("val", "dots", "validation", PURPLE)):
        data = difference(runs, kind, name)
        traces += with_smoothed(runs[0], 0, data, label, look, color, legend=True) if data else []
    where = "tokens, their steps being of different size" if by_tokens(runs) else "steps"
    note = f"{second} minus {first}, at equal {where}. Below zero, {second} is better."
    note += f" Against time, each point stands where {first} was." if "seconds" in axes(runs)[0] else ""
    return panel("difference", "Difference of the losses", note, unit, "+.4f", traces, {"no difference": 0})


def hellaswag_panel(runs):
    traces = curves(runs, "hella", "acc_norm", look="dots")
    for t in traces:
        errors = {r["step"]: 1.96 * (r.get("acc_norm_stderr") or 0) for r in runs[t["run"]].log["hella"]}
        t["error"] = [round(errors[s], 5) for s in t["step"]]
    best = max((y for t in traces for y in t["y"]), default=0)
    levels = {"chance 0.25": 0.25}  # the large model's mark would only press a small one's curve flat
    levels |= {f"{k} {v:.4f}": v for k, v in PUBLISHED_HELLASWAG.items() if v < 0.3 or best > 0.36}
    return panel("hellaswag", "HellaSwag", "Normalised accuracy with 95 % intervals.", "acc_norm", ".4f", traces, levels)


def phase_panels(runs):
    """What the steps are made of (--timing): a stacked panel for each run that measured it, all of one height."""
    panels = []
    for i, run in enumerate(runs):
        names = enumerate(phases(run))
        traces = [trace(run, i, points(run, "train", n), n[:-3], "area", c % 5, legend=True) for c, n in names]
        title = "Phases of a step" + (f": {run.name}" if len(runs) > 1 else "")
        note = "Mean milliseconds, as --timing measured them."
        panels.append(panel(f"phases{i}", title, note, "ms", ".1f", traces) | {"zero": True})
    top = max((sum(column) for p in panels for column in zip(*(t["y"] for t in p["traces"]))), default=0)
    return [p | {"top": 1.05 * top} for p in panels]


def panels(runs):
    """All plots for which the logs hold something."""
    def plain(id, title, note, unit, digits, name, **more):
        return panel(id, title, note, unit, digits, curves(runs, "train", name, **more))

    clips = {run.config.get("train", {}).get("grad_clip") for run in runs} - {None, 0}
    norm = plain("grad_norm", "Gradient norm", "Of all parameters together, before clipping.", "norm", ".3f", "grad_norm",
                 smoothed=True)  # fmt: skip
    if max((y for t in norm["traces"] for y in t["y"]), default=0) > 0.5 * max(clips, default=math.inf):
        norm["levels"] = {f"clipped at {clip:g}": clip for clip in sorted(clips)}
    bits = panel("bits", "Bits per byte", "Validation loss in a unit that does not depend on the tokenizer.", "bits per byte",
                 ".4f", [] if comparable(runs) else curves(runs, "val", "bits_per_byte", look="dots"))  # fmt: skip
    found = [
        loss_panel(runs), bits, *([difference_panel(runs)] if len(runs) > 1 else []), hellaswag_panel(runs),
        plain("lr", "Learning rate", "The schedule, warm-up first.", "rate", ".3e", "lr") | {"zero": True}, norm,
        plain("speed", "Speed", "Training alone: evaluation and saving do not count.", "tokens/s", ",.0f", "tok_per_s")
        | {"zero": True},
        plain("mfu", "Model FLOPS utilisation", "Share of the datasheet's dense peak.", "MFU", ".1%", "mfu") | {"zero": True},
        *phase_panels(runs),
        plain("memory", "Memory", "Most that was allocated on the device so far.", "GiB", ".2f", "peak_gib") | {"zero": True},
    ]  # fmt: skip
    return [p for p in found if p["traces"]]


# --------------------------------------------------------------------------------------------------- 3. numbers


@dataclass
class Number:
    value: float
    write: str = "{:,.4f}"  # how it is written
    note: str = ""  # what stands beside it
    relative: bool = False  # whether a difference is also given in per cent


def median(values):
    return sorted(values)[len(values) // 2]


def numbers(run):
    """{what: Number} that a run comes down to."""
    found = {}
    for kind, name, what, write in (
        ("val", "loss", "validation loss", "{:,.4f}"), ("val", "bits_per_byte", "bits per byte", "{:,.4f}"),
        ("train", "loss", "training loss, last logged", "{:,.4f}"), ("hella", "acc_norm", "HellaSwag acc_norm", "{:,.4f}"),
    ):  # fmt: skip
        steps, values = column(run.log, kind, name)
        if values:
            found[what] = Number(values[-1], write, f"step {steps[-1]:,}")
        if what == "validation loss" and values and min(values) < values[-1]:
            found["best validation loss"] = Number(min(values), write, f"step {steps[values.index(min(values))]:,}")
    errors = column(run.log, "hella", "acc_norm_stderr")[1]
    if errors and "HellaSwag acc_norm" in found:
        found["HellaSwag acc_norm"].note = f"± {1.96 * errors[-1]:.4f}, {found['HellaSwag acc_norm'].note}"
    last = max(r["step"] for records in run.log.values() for r in records)
    found["steps"] = Number(last, "{:,.0f}")
    if run.tokens:
        known = run.start.get("train_tokens")
        epochs = f"{run.tokens(last) / known:.2f} epochs" if known else ""
        found["tokens"] = Number(run.tokens(last), "{:,.0f}", epochs)
    wall = [t for records in run.log.values() for r in records if (t := seconds(run, r)) is not None]
    if wall and max(wall):
        clock = f"{datetime.timedelta(seconds=round(max(wall)))}, " if max(wall) >= 60 else ""
        found["seconds in all"] = Number(max(wall), "{:,.1f}", f"{clock}with evaluation and saving", True)
    for name, what, write in (
        ("tok_per_s", "tokens/s, median", "{:,.0f}"), ("mfu", "MFU, median", "{:.1%}"),
        ("dt_ms", "ms a step, median", "{:,.1f}"),
        *((name, f"{name[:-3]}, ms a step, median", "{:,.1f}") for name in phases(run)),
    ):  # fmt: skip
        values = column(run.log, "train", name)[1]
        if values:
            found[what] = Number(median(values), write, relative=name != "mfu")
    memory = column(run.log, "train", "peak_gib")[1]
    if memory:
        found["peak memory, GiB"] = Number(max(memory), "{:,.2f}", relative=True)
    return found


def ending(run):
    ends = run.log.get("end") or [{}]
    if "reason" not in ends[-1]:
        return "no end was logged: still running, or killed"
    return "finished" if ends[-1]["reason"] == "done" else f"stopped by {ends[-1]['reason']}"


def facts(run):
    """One line: what ran where, when, and how it ended."""
    when = [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.begun[0][0]))] if run.begun else []
    resumed = [f"{r['step']:,}" for r in run.log.get("start", []) if r["step"]]
    again = [f"resumed at step {', '.join(resumed)}"] if resumed else []
    return ", ".join(p for p in [caption(run.log), *when, *again, ending(run)] if p)


def cautions(runs):
    """Sentences on what the page must not be read as saying."""
    bare = [run.name for run in runs if not run.config]
    found = [f"Beside the log of {' and '.join(bare)} lies no config.json that can be read."] if bare else []
    sizes = [" then ".join(f"{size:,}" for size in run.sizes) for run in runs]
    found += [f"{run.name} was resumed with steps of another size: {text} tokens." for run, text in zip(runs, sizes)
              if len(run.sizes) > 1]  # fmt: skip
    if len(runs) == 1:
        return found
    a, b = runs
    asked = [(run.start.get("val_tokens"), run.config.get("train", {}).get("val_tokens")) for run in runs]
    data = [run.config.get("train", {}).get("data") for run in runs]
    if not comparable(runs):
        found.append(f"These runs have different tokenizers ({vocabulary(a):,} and {vocabulary(b):,} ids): their losses in "
                     "nats per token do not compare. Bits per byte do, on the same text.")  # fmt: skip
    elif any(x != y for x, y in (*zip(*asked), data) if x and y):
        found.append("They were validated on different tokens, or on data of different names (see data and val_tokens below): "
                     "their losses need not compare.")  # fmt: skip
    if by_tokens(runs):
        found.append(f"Their steps are of different size, {sizes[0]} and {sizes[1]} tokens: they compare against tokens, or "
                     "time.")  # fmt: skip
    if comparable(runs) and apart(runs):
        found.append("Their last validations lie at different places; Numbers begins with the last place that both measured.")
    return [*found, "This is one run each: what another seed alone would change is not seen here."]


def gap(a, b):
    """The second number minus the first, as text."""
    change = b.value - a.value
    if a.write.format(abs(change)) == a.write.format(0.0):
        return "0"
    if "%" in a.write:
        return f"{100 * change:+.1f} points"
    share = f" <small>{change / a.value:+.1%}</small>" if a.relative and a.value else ""
    return a.write.replace("{:", "{:+").format(change) + share


def number_columns(runs):
    """numbers() of each run; of two that end apart, first the loss at the last place where both measured it."""
    columns = [numbers(run) for run in runs]
    both = difference(runs, "val", "loss") if apart(runs) and comparable(runs) else None
    if both:
        step, change = both["step"][-1], both["y"][-1]
        where = f"{runs[0].tokens(step):,} tokens" if by_tokens(runs) else f"step {step:,}"
        value = dict(zip(*column(runs[0].log, "val", "loss")))[step]
        for number, c in ((Number(value), 0), (Number(value + change), 1)):
            columns[c] = {f"validation loss at {where}, the last place measured in both": number} | columns[c]
    return columns


def number_table(runs):
    """The final numbers: of one run as tiles, of two side by side, with the second minus the first."""
    def shown(number):
        if number is None:
            return "-"
        return number.write.format(number.value) + (f" <small>{html.escape(number.note)}</small>" if number.note else "")

    columns = number_columns(runs)
    if len(runs) == 1:
        tiles = "".join(f"<div><dt>{what}</dt><dd>{shown(number)}</dd></div>" for what, number in columns[0].items())
        return f"<dl class='tiles'>{tiles}</dl>"
    rows = {}
    for what in dict.fromkeys([*columns[0], *columns[1]]):
        a, b = (c.get(what) for c in columns)
        fair = a and b and (comparable(runs) or "loss" not in what)
        rows[html.escape(what)] = [shown(a), shown(b), gap(a, b) if fair else ""]
    return f"<section><h2>Numbers</h2>{table([*[run.name for run in runs], 'difference'], rows)}</section>"


def table(heads, rows, differ=()):
    """rows: {HTML of the row's name: [HTML of its cells]}. On a narrow screen the names of rows with several
    cells stand on lines of their own."""
    heads = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in heads)
    body = ""
    for name, cells in rows.items():
        mark = " class='differs'" if name in differ else ""
        body += f"<tr{mark}><th scope='row'>{name}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>"
        columns = len(cells)
    fold = f" class='fold' style='--columns: {columns}'" if columns > 1 else ""
    return f"<table{fold}><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table>"


def settings(run):
    """{part: {field: value}} of the configuration, and of what the log says of machine and data."""
    said = {k: v for k, v in run.start.items() if k not in ("kind", "step", "time", "tokens")}
    return {part: fields for part, fields in (run.config | {"machine and data": said}).items() if fields}


def config_tables(runs):
    """Of one run everything; of two what differs, and everything folded away."""
    sides = [settings(run) for run in runs]
    everything, different = "", ""
    for part in dict.fromkeys(part for side in sides for part in side):
        rows, differ = {}, []
        for field in dict.fromkeys(field for side in sides for field in side.get(part, {})):
            cells = [side[part][field] if field in side.get(part, {}) else None for side in sides]
            cells = [v if isinstance(v, str) and v else "-" if v is None else json.dumps(v) for v in cells]
            differ += [html.escape(field)] if len(set(cells)) > 1 and field != "run_name" else []
            rows[html.escape(field)] = [f"<code>{html.escape(v)}</code>" for v in cells]
        heads = [part] if len(runs) == 1 else [run.name for run in runs]
        title = f"<h3>{html.escape(part)}</h3>" if len(runs) > 1 else ""
        everything += f"<div>{title}{table(heads, rows, differ)}</div>"
        if differ and all(part in side for side in sides):
            different += f"<div>{title}{table(heads, {field: rows[field] for field in differ})}</div>"
    grid = "parts" if len(runs) == 1 else "parts pairs"
    everything = f"<div class='{grid}'>{everything}</div>" if everything else "<p>Nothing is known of it.</p>"
    if len(runs) == 1:
        return f"<section><h2>Configuration</h2>{everything}</section>"
    different = f"<div class='{grid}'>{different}</div>" if different else "<p>Nothing that is known of both.</p>"
    return (f"<section><h2>What was set differently</h2>{different}"
            f"<details><summary>everything</summary>{everything}</details></section>")  # fmt: skip


def samples(runs):
    """What the runs wrote, over time; the newest stand open."""
    found = [{r["step"]: r["texts"] for r in run.log.get("sample", []) if isinstance(r.get("texts"), list)} for run in runs]
    steps = sorted({step for texts in found for step in texts})
    blocks = []
    for step in steps:
        sides = []
        for run, texts in zip(runs, found):
            prompt = run.config.get("train", {}).get("sample_prompt", "")
            head = f"<h3>{html.escape(run.name)}</h3>" if len(runs) > 1 else ""
            pres = "".join(f"<pre>{marked(str(text), prompt)}</pre>" for text in texts.get(step, []))
            pres = pres or "<p class='soft'>none at this step</p>"
            sides.append(f"<div>{head}{pres}</div>" if head else pres)
        opened = " open" if step in [max(texts) for texts in found if texts] else ""
        body = f"<div class='sides'>{''.join(sides)}</div>"
        blocks.append(f"<details{opened}><summary>after {step:,} steps</summary>{body}</details>")
    return f"<section><h2>Samples</h2>{''.join(blocks)}</section>" if blocks else ""


def marked(text, prompt):
    """A sample as HTML, the prompt that it goes on from made faint. A young model writes control characters, which HTML
    cannot hold: they show as the symbols that Unicode has for them."""
    text = text.translate({c: 0x2400 + c for c in range(32) if c not in (9, 10)})  # not tab and newline
    if prompt and text.startswith(prompt):
        return f"<span class='prompt'>{html.escape(prompt)}</span>{html.escape(text[len(prompt) :])}"
    return html.escape(text)


# ------------------------------------------------------------------------------------------------------ 4. page


STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f8fa; --ink: #1f2328; --soft: #59636e; --faint: #d8dee4; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --card: #161b22; --ink: #e6edf3; --soft: #9198a1; --faint: #30363d; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 3rem 0 .75rem; }
h3 { font-size: .85rem; margin: 0; color: var(--soft); overflow-wrap: anywhere; }
header p { margin: .3rem 0 0; overflow-wrap: anywhere; }
.finding { font-size: 1.1rem; }
.soft, small, figcaption p, footer { color: var(--soft); font-size: .85rem; }
.cautions { border-left: 3px solid var(--s1); padding-left: .8rem; margin-top: 1rem; max-width: 55rem; font-size: .9rem; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 1rem 1.5rem; margin: 1.5rem 0 0; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.tiles small { display: block; }
nav { position: sticky; top: 0; z-index: 2; margin: 1.75rem -1.25rem 0; padding: .6rem 1.25rem; background: var(--paper);
  border-bottom: 1px solid var(--faint); }
nav fieldset { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; }
nav legend { float: left; padding: 0; margin-right: .5rem; color: var(--soft); font-size: .85rem; }
nav label { border: 1px solid var(--faint); border-radius: 6px; padding: .15rem .8rem; cursor: pointer; font-size: .9rem; }
nav label:has(:checked) { background: var(--ink); border-color: var(--ink); color: var(--paper); }
nav label:has(:focus-visible) { outline: 2px solid var(--s0); outline-offset: 2px; }
nav input { position: absolute; opacity: 0; }
nav .runs { margin-left: auto; display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .9rem; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2rem 2rem; margin-top: 1.5rem; }
@media (max-width: 800px) { .grid { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; min-width: 0; }
figure.whole { grid-column: 1 / -1; }
figure.first { grid-column-start: 1; }
figcaption b { font-size: 1rem; }
figcaption p { margin: 0; overflow-wrap: anywhere; }
.plot { height: 260px; }
.whole .plot { height: 400px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem 1.5rem .3rem 0; border-bottom: 1px solid var(--faint); vertical-align: baseline; }
th { font-weight: 400; color: var(--soft); }
thead th { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; }
tbody th { max-width: 17rem; }
code { font: .82rem ui-monospace, monospace; overflow-wrap: anywhere; }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.5rem 2.5rem; }
.pairs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.parts table { width: 100%; }
.parts td { min-width: 5rem; }
@media (max-width: 600px) {
  .fold, .fold thead, .fold tbody { display: block; }
  .fold tr { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: 0 1rem; padding: .35rem 0;
    border-bottom: 1px solid var(--faint); }
  .fold th, .fold td { border: 0; padding: 0; }
  .fold thead td { display: none; }
  .fold tbody th { grid-column: 1 / -1; max-width: none; }
  .fold small { display: block; } }
details { margin-top: .6rem; }
details .differs { background: var(--card); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; padding: .2rem 0; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; margin-top: .4rem; }
pre { background: var(--card); border-radius: 6px; padding: .8rem 1rem; margin: .4rem 0 0; white-space: pre-wrap;
  font: .85rem/1.55 ui-monospace, monospace; overflow-wrap: anywhere; }
.prompt { color: var(--soft); }
footer { margin-top: 3.5rem; }
"""

SCRIPT = """
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const touch = matchMedia("(pointer: coarse)").matches;  // there, a finger on a plot scrolls the page
let axis = page.axis, zoom = null, following = false;
const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const place = t => axis == "seconds" ? t.seconds.map(s => s / page.unit.seconds) : t[axis];

function extent() {  // of the whole page, so that the plots stand above each other
  const high = Math.max(...page.panels.flatMap(p => p.traces.map(t => Math.max(...place(t)))));
  return [-0.015 * high, 1.015 * high];
}

const looks = { faint: [1, 0.35], thin: [1.5, 0.8], line: [2, 1], dots: [2, 1], area: [0, 1] };  // width, opacity

function curve(t, p) {
  const c = color("s" + t.color), [width, opacity] = looks[t.look], area = t.look == "area";
  const dots = t.look == "dots" && t.step.length <= 60 || t.step.length == 1;
  const whose = page.runs.length > 1 && !area ? `${page.runs[t.run].name}, ${t.name}` : t.name;
  return {
    x: place(t), y: t.y, name: p.id == "loss" ? whose : t.name, legendgroup: t.name, showlegend: !!t.legend, type: "scatter",
    mode: dots ? "lines+markers" : "lines", marker: { size: 6 }, opacity, line: { color: c, width },
    error_y: t.error && { type: "data", array: t.error, color: c, thickness: 1, width: 3 },
    stackgroup: area ? "one" : undefined, fillcolor: area ? c : undefined,
    hoverinfo: t.look == "faint" ? "skip" : "all", hovertemplate: t.look == "faint" ? undefined : `%{y:${p.digits}}`,
  };
}

function level([text, y]) {
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "below",
           line: { color: color("soft"), width: 1, dash: "dash" },
           label: { text, textposition: "end", yanchor: "bottom", font: { size: 11, color: color("soft") } } };
}

function layout(p) {
  const heights = [...p.traces.flatMap(t => t.y), ...Object.values(p.levels)], lines = Object.values(p.levels);
  const room = 0.09 * (Math.max(...heights) - Math.min(...heights));  // for the label on the highest line
  const line = { gridcolor: color("faint"), linecolor: color("faint"), zeroline: false, exponentformat: "B", automargin: true };
  const labelled = p.traces.some(t => t.legend);
  return {
    paper_bgcolor: color("paper"), plot_bgcolor: color("paper"),
    font: { color: color("ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 60, r: 12, t: labelled ? 32 : 12, b: 40 }, hovermode: "x unified", dragmode: touch ? false : "zoom",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("faint"), font: { color: color("ink") } },
    showlegend: labelled, legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom" },
    xaxis: { ...line, title: { text: page.axes[axis], standoff: 8 }, range: zoom ?? extent(), hoverformat: ",.6~g" },
    yaxis: { ...line, title: { text: p.unit, standoff: 8 }, rangemode: p.zero ? "tozero" : "normal",
             autorangeoptions: { include: lines.map(y => y + room) }, range: p.top ? [0, p.top] : undefined,
             tickformat: p.digits.endsWith("%") ? ".0%" : undefined, exponentformat: p.digits.endsWith("e") ? "power" : "B" },
    shapes: Object.entries(p.levels).map(level),
  };
}

function draw() {
  const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover", doubleClick: "reset",
                   modeBarButtons: [["toImage", "resetScale2d"]] };
  for (const p of page.panels) Plotly.react(p.id, p.traces.map(t => curve(t, p)), layout(p), config);
}

function follow(event) {  // a zoom of one plot is the zoom of all
  const range = event["xaxis.range"] ?? [event["xaxis.range[0]"], event["xaxis.range[1]"]];  // a reset, or a drag
  if (following || range[0] === undefined) return;
  zoom = range;
  following = true;
  Promise.all(page.panels.map(p => Plotly.relayout(p.id, { "xaxis.range": [...zoom] }))).then(() => { following = false; });
}

draw();
for (const p of page.panels) document.getElementById(p.id).on("plotly_relayout", follow);
for (const input of document.querySelectorAll("nav input"))
  input.addEventListener("change", () => { axis = input.value; zoom = null; draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""


def script(text):
    """A <script> element, and the hash by which the page's rules know it."""
    return f"<script>{text}</script>", "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def page(runs):
    """The whole page, as text, for one or two Runs. Raises ModuleNotFoundError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the page is drawn by plotly; `python -m pip install plotly` installs it") from None

    labels, unit = axes(runs)
    found = panels(runs)
    data = {"axis": "tokens" if by_tokens(runs) else "step", "axes": labels, "unit": unit, "panels": found,
            "runs": [{"name": html.escape(run.name, quote=False)} for run in runs]}  # fmt: skip
    library, library_hash = script(get_plotlyjs())
    own, own_hash = script(SCRIPT)
    rules = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {library_hash} {own_hash}"
    style = STYLE
    for mark, dark in (("LIGHT", False), ("DARK", True)):
        style = style.replace(mark, " ".join(f"--s{i}: {c};" for i, c in enumerate(SERIES[dark])))
    title = html.escape(" and ".join(run.name for run in runs))
    radio = "".join(
        f"<label><input type='radio' name='axis' value='{name}'{' checked' if name == data['axis'] else ''}>{label}</label>"
        for name, label in labels.items()
    )
    figures = ""
    for p in found:  # the losses over the whole width; the phases of two runs beside each other
        place = "whole" if p["id"] in ("loss", "bits", "difference") else ""
        place = "first" if p["id"] == "phases0" and len(runs) > 1 else place
        figures += (f"<figure class='{place}'><figcaption><b>{html.escape(p['title'])}</b><p>{html.escape(p['note'])}</p>"
                    f"</figcaption><div class='plot' id='{p['id']}'></div></figure>")  # fmt: skip
    said = finding({run.name: run.log for run in runs}) if comparable(runs) else ""
    said = said[:1].upper() + said[1:] if len(runs) == 1 else said  # that of two begins with a name
    names = [f"<span><span class='dot' style='background: var(--s{i})'></span>{html.escape(run.name)}</span>"
             for i, run in enumerate(runs)] if len(runs) > 1 else [""]  # fmt: skip
    lines = "".join(f"<p class='soft'>{name}{': ' if name else ''}{html.escape(facts(run))}</p>"
                    for name, run in zip(names, runs))  # fmt: skip
    warned = "".join(f"<p>{html.escape(text)}</p>" for text in cautions(runs))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{rules}">
<title>{title}</title><style>{style}</style></head><body>
<header><h1>{title}</h1><p class="finding">{html.escape(said)}</p>{lines}
{f"<div class='cautions'>{warned}</div>" if warned else ""}</header>
{number_table(runs) if len(runs) == 1 else ""}
<nav><fieldset><legend>against</legend>{radio}<span class="runs">{"".join(names)}</span></fieldset></nav>
<noscript><p>The curves need JavaScript; numbers, configuration and samples do not.</p></noscript>
<main><div class="grid">{figures}</div>
{number_table(runs) if len(runs) > 1 else ""}{samples(runs)}{config_tables(runs)}</main>
<footer>Made by report.py from {title}: log.jsonl and config.json.</footer>
<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>
{library}
{own}
</body></html>
"""


# ---------------------------------------------------------------------------------------------- 5. command line


def write(paths, out):
    """Write the page of one or two run folders (or logs) to `out`. Raises ValueError, OSError or ModuleNotFoundError."""
    if not 1 <= len(paths) <= 2:
        raise ValueError(f"name one run folder or two, not {len(paths)}; `ls log` shows those there are, plot.py draws more")
    if len(paths) == 2 and paths[0].resolve() == paths[1].resolve():
        raise ValueError(f"{paths[0]} was named twice; name one run, or two different ones")
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):  # of one name in two places
        for run, path in zip(runs, paths):
            run.name = str(path)
    if out.suffix != ".html":  # also lest a log be overwritten
        raise ValueError(f"--out {out} must end in .html")
    text = page(runs)
    part = out.with_suffix(".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", errors="replace", newline="\n")  # half a character is not worth an error
        os.replace(part, out)
    except OSError as error:
        with contextlib.suppress(OSError):  # not there, or not to be changed either
            part.unlink()
        raise OSError(f"{out} cannot be written ({error.strerror}); name another place with --out") from error


def main():
    import tyro

    def settings(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None, open: bool = False):
        """Make one HTML page of a run, or of two beside each other.

        Args:
            runs: One or two run folders, such as log/laptop_20260101-120000, or logs.
            out: Page to write (.html); if not given report.html in the run's folder (or beside the log), and of two runs
                report_with_<second>.html in the first one's.
            open: Show it in the browser.
        """
        return runs, out, open

    runs, out, show = tyro.cli(settings, prog="report.py", config=(tyro.conf.FlagCreatePairsOff,), use_underscores=True)
    try:
        if runs and out is None:
            out = runs[0] / "report.html" if runs[0].is_dir() else runs[0].with_suffix(".html")
            out = out.with_stem("_with_".join([out.stem, *(run.resolve().stem for run in runs[1:])]))
        write(runs, out)
        print(out)
        if show:
            import webbrowser

            webbrowser.open(out.resolve().as_uri())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        sys.exit(2)

