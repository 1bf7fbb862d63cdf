"""Draw the curves of training runs from their log.jsonl: loss, HellaSwag, learning rate.

python -m lab plot log/RUN log/OTHER --out both.png     # without names of runs, the newest one
"""

import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

from lab.cli import UserError, parse, say
from lab.files import writing
from lab.tools import run_logs
from lab.tools.plot_style import SERIES, color_of, reference, style
from lab.tools.run_logs import by_tokens, column, hellaswag, read_log, short, tokens_at

# acc_norm of the published models on HellaSwag's 10042 validation examples
PUBLISHED_HELLASWAG = {"GPT-2 124M": 0.2955, "GPT-2 1558M": 0.4893}


def finding(logs):
    """What the curves of {name: log} show, as a sentence. Several runs compare where all were measured."""
    runs = list(logs.values())
    if len(runs) > 1:
        return comparison(list(logs), runs)
    steps, losses = column(runs[0], "val", "loss")
    later, training = column(runs[0], "train", "loss")
    said = [f"validation loss {losses[-1]:.2f} at step {steps[-1]:,}"] if steps else []
    if later and later[-1] > (steps or [-1])[-1]:
        said.append(f"training loss {training[-1]:.2f} at step {later[-1]:,}")
    elif said and (unigram := column(runs[0], "start", "unigram")[1][-1:]):
        gap = unigram[0] - losses[-1]
        side = "under" if gap > 0 else "above"
        said[0] += f": {abs(gap):.2f} nats {side} the unigram baseline"
    return ", ".join(said or ["no loss was logged"]).capitalize()


def comparison(names, runs):
    """How the losses of several runs lie, at the last place that all have."""
    if not run_logs.comparable(runs):
        return "different tokenizers: nats per token do not compare"
    for kind, name in (("validation", "val"), ("training", "train")):
        found = run_logs.places(runs, name, "loss")
        place = max(set.intersection(*map(set, found)), default=0)
        if not place:  # before training all are alike
            continue
        losses = [rows[place][1] for rows in found]
        (best, first), (other, second) = sorted(zip(losses, names))[:2]
        where = f"{short(place)} tokens" if by_tokens(runs) else f"step {place:,}"
        if f"{best:.2f}" == f"{other:.2f}":
            return f"{first} and {second} have the same {kind} loss at {where}, {best:.2f}"
        gap = f"{other - best:.2f} nats under {second}"
        return f"{first} has {kind} loss {best:.2f} at {where}, {gap}"
    return "there is no step of training at which the loss of all was measured"


def caption(log):
    """What ran where, and how fast: one line."""
    start = (log.get("start") or [{}])[-1]
    parts = [f"{short(start['num_params'])} parameters"] if start.get("num_params") else []
    several = f"{start['world_size']} x " if start.get("world_size", 1) > 1 else ""
    parts += [f"{several}{start['device']}"] if start.get("device") else []
    parts += [start["precision"]] if start.get("precision") else []
    parts += [f"{short(n)} tokens" for n in column(log, "train", "tokens")[1][-1:]]
    speeds = column(log, "train", "tok_per_s")[1]
    parts += [f"median {short(median_high(speeds))} tokens/s"] if speeds else []
    return ", ".join(parts)


def loss_levels(logs):
    """{text: nats} of what no model needs to learn, one line for runs between whose levels two
    labels would be unreadable."""
    found = {}
    for name, text in (("log_v", "uniform guess"), ("unigram", "unigram baseline")):
        values = sorted(v for log in logs for v in column(log, "start", name)[1][-1:])
        if values and values[-1] - values[0] < 0.3:
            values = values[:1]
        found |= {f"{text} {v:.2f}": v for v in values}
    return found


def hellaswag_levels(logs):
    """{text: acc_norm} of chance and of the published models, the large one where it would not
    press small curves flat."""
    best = max((v for log in logs for v in hellaswag(log)[1]), default=0)
    found = {f"{k} {v:.4f}": v for k, v in PUBLISHED_HELLASWAG.items() if v < 0.3 or best > 0.36}
    return {"chance 0.25": 0.25} | found


def colors(logs, what, dark):
    """(name, log, colour): that of what is measured for a run alone; of several, each has its own."""
    series = [color_of(what, dark)] if len(logs) == 1 else SERIES[dark]
    return zip(logs, logs.values(), itertools.cycle(series))


def draw_loss(ax, logs, dark, x):
    """Training loss thin, smoothed where there are points enough; validation loss thick, with dots."""
    alone = len(logs) == 1
    for name, log, color in colors(logs, "loss", dark):
        steps, losses = column(log, "train", "loss")
        if len(losses) >= 80:
            ax.plot(x(log, steps), losses, color=color, linewidth=0.7, alpha=0.35)
            losses = run_logs.smooth(losses)
        look = dict(color=color, linewidth=1, alpha=0.9, marker="." if len(steps) == 1 else None)
        ax.plot(x(log, steps), losses, **look, label="training (thin)" if alone else None)
        steps, losses = column(log, "val", "loss")
        look = dict(color=color, linewidth=2.4, markersize=5, marker="o" * (len(steps) <= 60))
        ax.plot(x(log, steps), losses, **look, label="validation (thick)" if alone else name)
        if alone and steps:
            how = dict(xytext=(0, 8), textcoords="offset points", ha="right", fontweight="bold")
            ax.annotate(f"{losses[-1]:.2f}", (x(log, steps)[-1], losses[-1]), color=color, **how)
    if window := run_logs.loss_window(logs.values()):
        ax.set_ylim(*window)
    for text, level in loss_levels(logs.values()).items():
        if ax.get_ylim()[0] < level < ax.get_ylim()[1]:
            reference(ax, level, text)
    ax.set_ylabel("loss (nats per token)")
    kinds = None if alone else "training (thin)\nvalidation (thick)"
    ax.legend(title=kinds, title_fontsize=9)


def draw_hellaswag(ax, logs, dark, x):
    """acc_norm with 95 % intervals, between chance and the published models."""
    for _, log, color in colors(logs, "accuracy", dark):
        steps, values, errors = hellaswag(log)
        look = dict(color=color, marker="o", markersize=4, capsize=2, elinewidth=1)
        ax.errorbar(x(log, steps), values, yerr=errors, **look)
    for text, value in hellaswag_levels(logs.values()).items():
        reference(ax, value, text, left=value != 0.25)
    ax.set_ylabel("HellaSwag\nacc_norm")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))


def draw_lr(ax, logs, dark, x):
    for _, log, color in colors(logs, "learning rate", dark):
        steps, rates = column(log, "train", "lr")
        ax.plot(x(log, steps), rates, color=color, linewidth=1.3)
    ax.set_ylabel("learning\nrate")
    ax.set_ylim(bottom=0)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))


def draw(runs, out_path, dark=False):
    """Write the figure of one or several runs to out_path (.png, .svg or .pdf)."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    names = [name.replace("$", r"\$") for name in run_logs.run_names(runs)]  # else a formula
    logs = dict(zip(names, map(read_log, runs)))
    found = list(logs.values())
    in_tokens = by_tokens(found)
    panels = {draw_loss: 3.6}  # and its height
    if any(column(log, "hella", "acc_norm")[0] for log in found):
        panels[draw_hellaswag] = 1.7
    if any(len(column(log, "train", "lr")[0]) > 1 for log in found):
        panels[draw_lr] = 0.8

    def x(log, steps):
        return list(map(tokens_at(log), steps)) if in_tokens else steps

    with matplotlib.rc_context(style(dark)):
        figure = Figure(figsize=(8, 1.2 + sum(panels.values())))
        heights = list(panels.values())
        axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for panel, ax in zip(panels, axes):
            panel(ax, logs, dark, x)
        figure.suptitle("\n".join(textwrap.wrap(finding(logs), 78)), x=0.01, ha="left")
        axes[-1].set_xlabel("tokens" if in_tokens else "step")
        number = (lambda value, _: short(value)) if in_tokens else (lambda value, _: f"{value:,g}")
        axes[-1].xaxis.set_major_formatter(number)
        if len(logs) == 1:
            figure.supxlabel(caption(found[0]), x=0.99, ha="right", fontsize=9, color="0.5")
        Path(out_path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_path)


def loss_curve(run_dirs, out_path):
    """As draw. A picture is not worth a run: what goes wrong is said, never raised."""
    try:
        draw(run_dirs, out_path)
    except UserError:  # nothing is measured yet
        pass
    except Exception as error:  # also matplotlib's own: not installed, no fonts, a full disk
        say(f"no loss curve: {type(error).__name__}: {error}")


def main(argv):
    from tyro.conf import Positional

    @dataclass
    class Config:
        """Draw the curves of one or several runs."""

        runs: Positional[tuple[Path, ...]] = ()  # run folders; the newest run if none is named
        out: str = ""  # .png, .svg or .pdf; in the first run's folder if empty
        dark: bool = False  # in dark colours

    cfg = parse(Config, argv)
    runs = run_logs.find_runs(cfg.runs)
    out = run_logs.output(runs, cfg.out, "loss.png", ".png", ".svg", ".pdf")
    with writing(out, "name another place with --out"):
        draw(runs, out, cfg.dark)
    print(f"wrote {out}")
