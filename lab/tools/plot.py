"""Draw the curves of training runs from their log.jsonl: loss, HellaSwag, BLiMP, learning rate.

    python -m lab plot log/RUN log/OTHER --out both.png

The trainer draws loss.png with loss_curve at the end of a run. lab report uses the same sentences.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low
from typing import Annotated, Any

from lab.cli import UserError, eprint, parse_args
from lab.eval import blimp_published
from lab.files import write_errors
from lab.tools.plot_style import PAPER, SERIES, color_of, reference, style
from lab.tools.read_log import (
    RunLog,
    accuracy,
    by_tokens,
    column,
    comparable,
    data_folder,
    find_runs,
    loss_window,
    losses_by_position,
    objectives,
    output_path,
    read_log,
    run_names,
    same_data,
    short,
    smooth,
    tokens_at,
)

# acc_norm of the published models on HellaSwag's 10042 validation examples
PUBLISHED_HELLASWAG = {"GPT-2 124M": 0.2955, "GPT-2 1558M": 0.4893}


def headline(logs: dict[str, RunLog], data: Sequence[str] = ()) -> str:
    """A sentence with the main result of {run name: log}; for several runs see compare_losses."""
    runs = list(logs.values())
    if len(runs) > 1:
        edited = [
            f"; {name} was resumed with other code" for name in logs if was_edited(logs[name])
        ]
        return compare_losses(logs, data) + "".join(edited)
    steps, losses = column(runs[0], "val", "loss")
    train_steps, train_losses = column(runs[0], "train", "loss")
    parts = [f"validation loss {losses[-1]:.2f} at step {steps[-1]:,}"] if steps else []
    if train_steps and train_steps[-1] > (steps or [-1])[-1]:
        parts.append(f"training loss {train_losses[-1]:.2f} at step {train_steps[-1]:,}")
    elif parts and (unigram := column(runs[0], "start", "unigram")[1][-1:]):
        gap = unigram[0] - losses[-1]
        side = "below" if gap > 0 else "above"
        parts[0] += f": {abs(gap):.2f} nats {side} the unigram baseline"
    return ", ".join(parts or ["no loss was logged"]).capitalize()


# 97.5th percentile of Student's t distribution with 1, 2, ... degrees of freedom; for more than eight about
# 1.96 + 2.7 / degrees
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)

SINGLE_RUNS = "; single runs: trust only 0.05 nats or more (docs/RUNS.md#compare-ideas)"


def compare_losses(named: dict[str, RunLog], data: Sequence[str] = ()) -> str:
    """A sentence about the run with the lowest loss, at the last position measured in all runs. Of more than
    two, runs that differ only in their seeds are compared by their mean; ± is then a 95 % interval.
    data: the folder of each run's data, "" if unknown; losses on different data are not compared."""
    logs = list(named.values())
    if len(objectives(logs)) == 2:
        return "different objectives: losses of masked and of next tokens cannot be compared"
    if not comparable(logs):
        return "different tokenizers: losses in nats per token cannot be compared"
    if not same_data(logs, data):
        folders = list(dict.fromkeys(filter(None, data)))
        which = f" ({', '.join(folders)})" * (len(folders) > 1)
        return f"different data{which}: losses can be compared only on the same validation text"
    if not (common := last_common(logs)):
        return "the runs have no measured step in common"
    name, last = common
    if not last:
        return "the runs can only be compared at step 0, before training"
    kind = {"val": "validation", "train": "training"}[name]
    where = f"{short(last)} tokens" if by_tokens(logs) else f"step {last:,}"
    losses = {run: at[last][1] for run, at in zip(named, losses_by_position(logs, name))}
    groups = sorted(seed_groups(named), key=lambda group: fmean(losses[run] for run in group))
    values = [[losses[run] for run in group] for group in groups]
    first, best = mean_of(groups[0]), fmean(values[0])
    if len(groups) == 1:
        return f"{first} has {kind} loss {best:.2f} at {where}"
    second, other = mean_of(groups[1]), fmean(values[1])
    gap, half = other - best, half_width(*values[:2])
    more = len(groups) - 2
    rest = f"; {more} other{'s are' if more > 1 else ' is'} higher" * bool(more)
    if half is None:  # one run each
        rest += SINGLE_RUNS * (round(gap, 2) < 0.05)
        if gap < 0.005:
            return f"{first} and {second} have the same {kind} loss at {where}, {best:.2f}{rest}"
        return f"{first} has {kind} loss {best:.2f} at {where}, {gap:.2f} nats below {second}{rest}"
    size = f"{gap:.3f} ± {half:.3f} nats below {second}"
    if gap < half:
        return f"No clear difference: at {where}, {first} has {kind} loss {best:.3f}, {size}{rest}"
    return f"{first} has {kind} loss {best:.3f} at {where}, {size}{rest}"


def half_width(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the difference between two means, by Student's t test with the pooled
    variance; None for one loss each."""
    degrees = len(a) + len(b) - 2
    if not degrees:
        return None
    t = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.7 / degrees
    squares = sum((v - fmean(group)) ** 2 for group in (a, b) for v in group)
    return t * math.sqrt(squares / degrees * (1 / len(a) + 1 / len(b)))


def was_edited(log: RunLog) -> bool:
    """Whether the program's code differed between two starts of the run, if both logged its hash."""
    return len({start["code"] for start in log.get("start", []) if "code" in start}) > 1


def seed_groups(logs: dict[str, RunLog]) -> list[list[str]]:
    """The names of the runs, with those together that differ only in their seeds (not of only two runs)."""
    groups: dict[str, list[str]] = {}
    for name, log in logs.items():
        groups.setdefault(len(logs) > 2 and without_seed(log) or name, []).append(name)
    return list(groups.values())


def without_seed(log: RunLog) -> str:
    """What runs that differ only in their seeds have in common: the program's code, the command that
    started the run without its seed and name, and what was changed when it was resumed. "" if the command
    did not set a seed."""
    first, *resumed = log.get("start") or [{}]
    command = first.get("command", "")
    changed = [start.get("changed") for start in resumed if start.get("changed")]
    alike = re.sub(r" --(seed|run_name)[ =]('[^']*'|\S+)", "", command)
    return f"{first.get('code')} {alike} {changed}" if " --seed" in command else ""


def mean_of(names: Sequence[str]) -> str:
    """One name, or "the mean of a, b and c"."""
    *others, last = names
    return f"the mean of {', '.join(others)} and {last}" if others else last


def last_common(logs: Sequence[RunLog]) -> tuple[str, int] | None:
    """(kind of record, position) of the last validation loss, or else training loss, that all runs
    measured after step 0; position 0 if they only have step 0 in common, None without a common step."""
    before_training = None
    for kind in ("val", "train"):
        common = set.intersection(*map(set, losses_by_position(logs, kind)))
        if last := max(common, default=0):
            return kind, last
        if common:
            before_training = before_training or (kind, 0)
    return before_training


def caption(log: RunLog) -> str:
    """One line: parameters, device, precision, tokens and speed of a run."""
    start = (log.get("start") or [{}])[-1]
    parts = [f"{short(start['num_params'])} parameters"] if start.get("num_params") else []
    several = f"{start['world_size']} x " if start.get("world_size", 1) > 1 else ""
    parts += [f"{several}{start['device']}"] if start.get("device") else []
    parts += [start["precision"]] if start.get("precision") else []
    parts += [f"{short(n)} tokens" for n in column(log, "train", "tokens")[1][-1:]]
    speeds = column(log, "train", "tok_per_s")[1]
    parts += [f"median {short(median_low(speeds))} tokens/s"] if speeds else []
    return ", ".join(parts)


def loss_levels(logs: Collection[RunLog]) -> dict[str, float]:
    """{label: nats per token} of the uniform guess and the unigram baseline. If the levels of several
    runs are so close that labels would overlap, there is only one line, at the lowest."""
    found = {}
    for name, text in (("log_v", "uniform guess"), ("unigram", "unigram baseline")):
        values = sorted(v for log in logs for v in column(log, "start", name)[1][-1:])
        levels = {f"{text} {v:.2f}": v for v in values}
        if len(levels) > 1 and values[-1] - values[0] < 0.3:
            levels = {f"{text}s {values[0]:.2f} to {values[-1]:.2f}": values[0]}
        found |= levels
    return found


def hellaswag_levels(logs: Collection[RunLog]) -> dict[str, float]:
    """{label: acc_norm} of chance and of the published models. GPT-2 1558M is left out if its level would
    flatten the curves."""
    best = max((v for log in logs for v in accuracy(log, "hella")[1]), default=0)
    found = {f"{k} {v:.4f}": v for k, v in PUBLISHED_HELLASWAG.items() if v < 0.3 or best > 0.36}
    return {"chance 0.25": 0.25} | found


def blimp_levels(logs: Collection[RunLog]) -> dict[str, float]:
    """{label: accuracy} of guessing and of the published models. Models far above the runs are left out, and
    so is Transformer-XL, because its line would coincide with the LSTM's."""
    best = max((v for log in logs for v in accuracy(log, "blimp")[1]), default=0)
    found = dict(zip(blimp_published.MODELS, blimp_published.TOTAL))
    del found["Transformer-XL"]
    return {"guessing 0.5": 0.5} | {f"{k} {v:.3f}": v for k, v in found.items() if v < best + 0.1}


def phenomena(log: RunLog) -> dict[str, tuple[list[int], list[float]]]:
    """{phenomenon: (steps, accuracies)} of the BLiMP phenomena that a run logged."""
    found = {name: column(log, "blimp", name) for name in blimp_published.PUBLISHED}
    return {name: curve for name, curve in found.items() if curve[0]}


def run_looks(
    logs: dict[str, RunLog], what: str, dark: bool
) -> Iterator[tuple[str | None, RunLog, dict]]:
    """(label, log, color and line style) of each run. Seeds of the same settings look alike and have one
    label. A single run has the color of the quantity `what`; the sixth look is the first that is dashed."""
    series = [color_of(what, dark)] if len(logs) == 1 else SERIES[dark]
    looks = itertools.product(("-", "--", ":", "-."), series)
    for group, (linestyle, color) in zip(seed_groups(logs), itertools.cycle(looks)):
        for name in group:
            label = ", ".join(group) if name == group[0] else None
            yield label, logs[name], dict(color=color, linestyle=linestyle)


# The panels: each draws {run name: log} into an Axes. x(log, steps) gives the horizontal positions.


def draw_loss(ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable) -> None:
    """Draw training loss thin, smoothed if there are enough points, and validation loss thick."""
    alone = len(logs) == 1
    for name, log, look in run_looks(logs, "loss", dark):
        steps, losses = column(log, "train", "loss")
        if len(losses) >= 80:
            ax.plot(x(log, steps), losses, **look, linewidth=0.7, alpha=0.35)
            losses = smooth(losses)
        thin = dict(look, linewidth=1, alpha=0.9, marker="." if len(steps) == 1 else None)
        ax.plot(x(log, steps), losses, **thin, label="training (thin)" if alone else None)
        steps, losses = column(log, "val", "loss")
        # compared runs are drawn without the loss before training: the steep line from it hides the rest
        if not alone and len(steps) > 1 and steps[0] == 0:
            steps, losses = steps[1:], losses[1:]
        thick = dict(look, linewidth=2.4, markersize=5, marker="o" * (len(steps) <= 60))
        ax.plot(x(log, steps), losses, **thick, label="validation (thick)" if alone else name)
        if alone and steps:
            how = dict(xytext=(0, 8), textcoords="offset points", ha="right", fontweight="bold")
            ax.annotate(
                f"{losses[-1]:.2f}", (x(log, steps)[-1], losses[-1]), color=look["color"], **how
            )
    if window := loss_window(logs.values()):
        ax.set_ylim(*window)
    for text, level in loss_levels(logs.values()).items():
        if ax.get_ylim()[0] < level < ax.get_ylim()[1]:
            reference(ax, level, text)
    ax.set_ylabel("loss (nats per token)")
    kinds = None if alone else "training (thin)\nvalidation (thick)"
    ax.legend(title=kinds, title_fontsize=9)


def draw_accuracy(
    ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable, kind: str, levels: dict[str, float]
) -> None:
    """Draw a benchmark's main score with 95 % intervals, and the levels of other models."""
    for _, log, look in run_looks(logs, "accuracy", dark):
        steps, values, errors = accuracy(log, kind)
        look |= dict(marker="o", markersize=4, capsize=2, elinewidth=1)
        ax.errorbar(x(log, steps), values, yerr=errors, **look)
    chance = min(levels.values())
    for text, value in levels.items():
        reference(ax, value, text, left=value != chance)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))


def draw_hellaswag(ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable) -> None:
    draw_accuracy(ax, logs, dark, x, "hella", hellaswag_levels(logs.values()))
    ax.set_ylabel("HellaSwag\nacc_norm")


def draw_blimp(ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable) -> None:
    draw_accuracy(ax, logs, dark, x, "blimp", blimp_levels(logs.values()))
    ax.set_ylabel("BLiMP\naccuracy")


def draw_phenomena(ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable) -> None:
    """Draw the accuracy of each BLiMP phenomenon as a row of colored cells, for a single run."""
    from matplotlib.colors import LinearSegmentedColormap  # slow to import

    (log,) = logs.values()
    rows = phenomena(log)
    steps = sorted({step for curve in rows.values() for step in curve[0]})
    values = [[dict(zip(*curve)).get(step, math.nan) for step in steps] for curve in rows.values()]
    at = x(log, steps)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(at)]
    first, last = (middles[0], middles[-1]) if middles else (at[0] - 0.5, at[0] + 0.5)
    edges = [2 * at[0] - first, *middles, 2 * at[-1] - last]
    shades = [color_of("grey", dark), PAPER[dark]["paper"], color_of("accuracy", dark)]
    colors = LinearSegmentedColormap.from_list("accuracy", shades)
    cells = dict(cmap=colors, vmin=0, vmax=1, edgecolors=PAPER[dark]["paper"], linewidth=0.5)
    ax.pcolormesh(edges, range(len(rows) + 1), values, **cells)
    ax.set_yticks([i + 0.5 for i in range(len(rows))], map(blimp_published.label, rows), fontsize=8)
    for i, row in enumerate(values):
        place = dict(xycoords=ax.get_yaxis_transform(), xytext=(3, 0), textcoords="offset points")
        ax.annotate(f"{row[-1]:.2f}", (1, i + 0.5), va="center", fontsize=8, **place)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set_title("orange: right, white: guessing, grey: wrong", fontsize=9, fontweight="normal")


def draw_lr(ax: Any, logs: dict[str, RunLog], dark: bool, x: Callable) -> None:
    """Draw the learning rate."""
    for _, log, look in run_looks(logs, "learning rate", dark):
        steps, rates = column(log, "train", "lr")
        ax.plot(x(log, steps), rates, **look, linewidth=1.3)
    ax.set_ylabel("learning\nrate")
    ax.set_ylim(bottom=0)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))


def draw(runs: Sequence[str | Path], out_path: str | Path, dark: bool = False) -> None:
    """Write the figure of one or several runs to out_path (.png, .svg or .pdf)."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would set a backend for the whole process

    # matplotlib would draw $...$ as a formula
    names = [name.replace("$", r"\$") for name in run_names(runs)]
    data = [data_folder(run).replace("$", r"\$") for run in runs]
    logs = dict(zip(names, map(read_log, runs)))
    found = list(logs.values())
    learnt = len(found) == 1 and phenomena(found[0])
    in_tokens = by_tokens(found) or bool(learnt and tokens_at(found[0]))
    # heights in inches; the legend has a line for each run
    panels: dict[Callable, float] = {draw_loss: max(3.6, 1 + 0.2 * len(found))}
    if any(column(log, "hella", "acc_norm")[0] for log in found):
        panels[draw_hellaswag] = 1.7
    if any(column(log, "blimp", "acc")[0] for log in found):
        panels[draw_blimp] = 1.7
    if learnt:
        panels[draw_phenomena] = 2.4
    if any(len(column(log, "train", "lr")[0]) > 1 for log in found):
        panels[draw_lr] = 0.8

    def x(log, steps):
        tokens = tokens_at(log)
        return list(map(tokens, steps)) if in_tokens and tokens else steps

    with matplotlib.rc_context(style(dark)):
        figure = Figure(figsize=(8, 1.2 + sum(panels.values())))
        heights = list(panels.values())
        axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for panel, ax in zip(panels, axes):
            panel(ax, logs, dark, x)
        figure.suptitle(textwrap.fill(headline(logs, data), 78), x=0.01, ha="left")
        axes[-1].set_xlabel("tokens" if in_tokens else "step")
        number = (lambda value, _: short(value)) if in_tokens else (lambda value, _: f"{value:,g}")
        axes[-1].xaxis.set_major_formatter(number)
        if len(logs) == 1:
            figure.supxlabel(caption(found[0]), x=0.99, ha="right", fontsize=9, color="0.5")
        Path(out_path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_path)


def loss_curve(run_dirs: Sequence[str | Path], out_path: str | Path) -> None:
    """Like draw, but errors are printed instead of raised; used at the end of a run."""
    try:
        draw(run_dirs, out_path)
    except UserError:  # nothing was measured
        pass
    except Exception as error:  # of any type: matplotlib not installed, no fonts, a full disk
        eprint(f"no loss curve: {type(error).__name__}: {error}")


def main(argv: list[str]) -> None:
    """Run `python -m lab plot` with these arguments."""
    from tyro.conf import Positional, arg  # slow to import, and loss_curve does not need it

    @dataclass
    class Config:
        """Draw the curves of one or several runs."""

        # run directories; default: the newest run
        runs: Annotated[tuple[Path, ...], Positional, arg(metavar="[RUN ...]")] = ()
        # .png, .svg or .pdf file; default: loss.png, or loss_with_OTHERS.png, in the first run's directory
        out: str = ""
        dark: bool = False  # light lines on a dark background

    cfg = parse_args(Config, argv)
    runs = find_runs(cfg.runs)
    out = output_path(runs, cfg.out, "loss.png", ".png", ".svg", ".pdf")
    with write_errors(out, "choose another place with --out"):
        draw(runs, out, cfg.dark)
    said = headline(dict(zip(run_names(runs), map(read_log, runs))), [*map(data_folder, runs)])
    print(f"{textwrap.fill(said, 98)}\nwrote {out}" if len(runs) > 1 else f"wrote {out}")
