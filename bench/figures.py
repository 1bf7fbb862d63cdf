"""Draw the figures of readme.assets/, light and dark, from the records in readme.assets/runs/.

    python bench/figures.py                      # all figures
    python bench/figures.py ladder shapes        # some of them

If records are missing, the error names the command that creates them. Style and colors are those of
lab.tools.plot_style.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import curves  # noqa: F401 (registers its figures)
import matplotlib
from drawing import (
    DASHED,
    FIGURES,
    bars,
    blank,
    cell,
    cells_of,
    made_by,
    measured,
    newest,
    records,
    rows_of,
    shorten,
    where_and_when,
    words,
    write,
)
from kernels import CLASSES, communication, read_extract
from records import ROOT, RUNS, grouped
from rungs import raced
from tyro.conf import Positional

from lab.cli import UserError, parse_args, run_main
from lab.files import check_writable
from lab.tools.plot_style import PAPER, color_of, style
from lab.tools.read_log import short

LLM_C = 538_485  # its tokens/s for the same work on an H200, measured outside this repository


# ------------------------------------------------------------------------------------ the ladder


@made_by("python bench/ladder.py")
def ladder(runs, out_path, dark):
    """tokens/s of each rung for GPT-2 124M, with the part that it adds in a paler color, and of other
    programs (median of the last race of bench/peers.py)."""
    _, rungs = newest(runs, "rungs", "tok_per_s")
    speeds = {rung: row["tok_per_s"] for rung, row in rungs.items()}
    first, *_, last = speeds.values()
    title = f"GPT-2 124M, tokens/s on an H200: {short(first)} to {short(last)}"
    figure, ax = blank(1.5 + 0.34 * len(speeds), title, where_and_when(rungs.values()))
    parts, texts, before = {}, [], first
    for rung, now in speeds.items():
        parts[rung] = {"kept": min(before, now), "added": max(0, now - before)}
        texts.append(f"{short(now)}  x{now / before:.2f}" if texts else short(now))
        before = now
    blue = color_of("speed", dark)
    looks = {"kept": dict(color=blue), "added": dict(color=blue, alpha=0.5)}
    # so that no line runs through a text
    box = dict(facecolor=PAPER[dark]["paper"], edgecolor="none", pad=1)
    bars(ax, parts, looks, texts, room=1.2, bbox=box)
    _, race = grouped(records(runs, "peers", "tok_per_s"), "race").popitem()
    rates = grouped(race, "program")
    peers = {"llm.c": LLM_C}
    for name, program in {"nanoGPT": "nanogpt", "build-nanogpt": "build_nanogpt"}.items():
        peers[name] = statistics.median(r["tok_per_s"] for r in rates[program])
    # a dashed line from the program's name downwards, interrupted behind the texts of rungs
    for top, (name, rate) in enumerate(peers.items()):
        ys = []
        for y, now in list(enumerate(speeds.values()))[top:]:
            hidden = now < rate < now + 0.14 * max(speeds.values())
            ys += [math.nan, math.nan] if hidden else [y - 0.5, y + 0.5]
        ax.plot([rate] * len(ys), ys, zorder=0, **DASHED)
        write(ax, f"{name} {short(rate)}", rate, top, dx=-4, ha="right", color="0.5", bbox=box)
    colors = "full blue: the rungs before it, pale: what this rung adds"
    ax.set(xlabel=f"tokens/s ({colors})\ndashed: others' programs, measured apart")
    ax.xaxis.set_major_formatter(shorten)
    figure.savefig(out_path)


@made_by("python bench/ladder.py --shapes 4x256 12x768 gpt2-medium")
def shapes(runs, out_path, dark):
    """tokens/s of each rung for all shapes except the first; blue: faster than the last, gray: slower."""
    _, *others = measured(runs, "rungs", "tok_per_s").items()
    if not others:
        raise UserError("ladder.jsonl has rungs of only one shape")
    rungs = list(max((by_rung for _, by_rung in others), key=len))
    rows = [row for _, by_rung in others for same in by_rung.values() for row in same]
    everything = records(runs, "ladder", "tok_per_s", group="rungs")
    note = where_and_when(rows)
    if any(map(raced, rows)):
        star = "*: compiled with a race, results are wrong (docs/LOG.md)"
        note = f"{star}; below: without one, torch 2.14\n{note}"
    title = f"What a rung brings on {len(others)} other shapes: tokens/s, and times the rung before"
    figure, ax = blank(1.4 + 0.36 * len(rungs), title, note)
    names = []
    for x, (shape, by_rung) in enumerate(others):
        tokens_per_step = by_rung[rungs[0]][0]["tokens_per_step"]
        names.append(f"{shape.removeprefix('gpt2-')}, {tokens_per_step:,}")
        before = None
        for y, rung in enumerate(rungs):
            if rung not in by_rung:
                write(ax, "not used", x, y, dx=0, ha="center", color="0.5")
                before = None
                continue
            row = by_rung[rung][0]
            now = row["tok_per_s"]
            factor = now / before if before else 1
            text = short(now) + (f"  x{factor:.2f}" if before else "")
            if raced(row):
                same = dict(shape=shape, variant=rung, tokens_per_step=tokens_per_step)
                again = [r for r in everything if same.items() <= r.items() and not raced(r)]
                text += "*" + (f"\n{short(again[-1]['tok_per_s'])}" if again else "")
            color = color_of("speed", dark) if factor >= 1 else "0.5"
            strength = 0.75 * min(1, abs(math.log2(factor)) / 1.7)
            cell(ax, x, y, text, color, strength, linespacing=1)
            before = now
    cells_of(ax, names, rungs)
    ax.set(xlabel="shape, and tokens of a step")
    figure.savefig(out_path)


@made_by("python bench/ladder.py")
def kernels(runs, out_path, dark):
    """Kernel time of a micro-step by class: all rungs, then the fast ones on a larger scale. Times of rungs
    with a smaller micro-batch are scaled to the same number of tokens."""
    shape, rows = newest(runs, "rungs", "kernel_ms", "micro_steps", "tokens_per_step")
    tokens = {v: row["tokens_per_step"] / row["micro_steps"] for v, row in rows.items()}
    size = max(tokens.values())
    times = {
        v: {kind: ms * size / tokens[v] for kind, ms in row["kernel_ms"].items()}
        for v, row in rows.items()
    }
    total = {v: sum(kinds.values()) for v, kinds in times.items()}
    panels = [list(times), [v for v in times if total[v] < 2 * min(total.values())]]
    last = panels[0][-1]
    biggest = max(times[last], key=times[last].get)
    share = f"{times[last][biggest] / total[last]:.0%}"
    title = f"{shape}: {biggest} is {share} of the last rung's {total[last]:.0f} ms"
    heights, note = list(map(len, panels)), where_and_when(rows.values())
    figure, *axes = blank(1.6 + 0.3 * sum(heights), title, note, "A;B", height_ratios=heights)
    looks = {kind: dict(color=color_of(kind, dark), label=kind) for kind in CLASSES}
    for ax, panel in zip(axes, panels):
        texts = [f"{total[v]:.0f}" for v in panel]
        bars(ax, {v: times[v] for v in panel}, looks, texts, room=1.08, height=0.75)
    axes[-1].set_xlabel(f"ms for {size:,.0f} tokens: forward, backward, their share of the update")
    axes[0].legend(loc="lower right", ncol=2)
    figure.savefig(out_path)


@made_by("python bench/ladder.py --groups loss --data edu_fineweb10B")
def ladder_loss(runs, out_path, dark):
    """Effect of the rungs on the loss: validation loss of each seed after equal tokens, and training loss
    against seconds. If there are runs of several lengths, those with the most rungs are used."""
    shape, found = next(iter(measured(runs, "loss", "val_loss", "curve").items()))
    rows = [row for seeds in found.values() for row in seeds]
    val = {v: [r["val_loss"] for r in seeds] for v, seeds in found.items()}
    means = {v: statistics.mean(losses) for v, losses in val.items()}
    rungs = [mean for v, mean in means.items() if v != "muon"]
    apart, spread = max(rungs) - min(rungs), max(max(v) - min(v) for v in val.values())
    title = f"{shape}: rungs' means lie within {apart:.3f} nats, seeds of a rung differ by up to {spread:.3f}"
    note = where_and_when(rows)
    figure, left, right = blank(1.8 + 0.3 * len(found), title, note, "AB", width_ratios=[1.2, 1])
    for y, (variant, losses) in enumerate(val.items()):
        how = dict(color=color_of("loss", dark), markersize=5, alpha=0.7)
        left.plot(losses, [y] * len(losses), "o", **how)
        mean = means[variant]
        left.plot([mean, mean], [y - 0.3, y + 0.3], color=PAPER[dark]["ink"], linewidth=1.2)
    rows_of(left, list(found))
    left.set_xlabel("validation loss after equal tokens\n(a dot: a seed; a line: their mean)")
    # more curves would overlap
    chosen = [v for v in found if v in ("fp32", "bf16", "compile", "fp8_mlp", "muon")]
    sides = {"fp8_mlp": (-4, 0, "right"), "muon": (-4, 0, "right"), "compile": (0, 7, "left")}
    for variant in chosen:
        points = zip(*(r["curve"] for r in found[variant]))  # all seeds at one step
        middle = [[statistics.median(point[i] for point in p) for i in (1, 2)] for p in points]
        color = color_of("orange" if variant == "muon" else "blue", dark)
        right.plot(*zip(*middle), color=color, linewidth=1.4)
        dx, dy, ha = sides.get(variant, (3, -5, "left"))
        write(right, words(variant), *middle[0], dx, dy, ha=ha, color=color)
    right.set(xscale="log", xlabel="seconds of training", ylabel="training loss (nats)")
    right.set(xlim=(0.06, 100))
    figure.savefig(out_path)


# ---------------------------------------------------------------------------------- several GPUs

TRACE = (
    "torchrun --standalone --nproc_per_node=4 bench/parallel.py --trace readme.assets/runs --modes"
)


@made_by(f"{TRACE} ddp", mode="ddp")
@made_by(f"{TRACE} zero1_16bit", "overlap_zero1", mode="zero1_16bit")
@made_by("a3954dc's parallel.py --modes in_graph --trace", "overlap_in_graph", mode="in_graph")
def overlap(runs, out_path, dark, mode):
    """Computation by class and communication over time, in one step of one GPU."""
    extract = read_extract(runs / f"{mode}.kernels.json")
    times, lanes = communication(extract["kernels"]), {}
    for kind, _, _, start, us in extract["kernels"]:
        lanes.setdefault(kind, []).append((start / 1000, us / 1000))
    share, ms = times["hidden_us"] / times["nccl_us"], times["nccl_us"] / 1000
    title = f"{share:.0%} of {ms:.1f} ms of communication hidden under computation"
    figure, ax = blank(2.6, f"{extract['mode']}: {title}")
    for kind in (kind for kind in CLASSES if kind in lanes):
        lane = (0.1 if kind == "communication" else 1.1, 0.8)
        ax.broken_barh(lanes[kind], lane, color=color_of(kind, dark), linewidth=0, label=kind)
    ax.set_yticks([0.5, 1.5], ["NCCL", "compute"])
    ax.set(ylim=(0, 2), xlim=(0, times["step_us"] / 1000))
    gpus = f"{extract['world_size']} x {extract['device']}, torch {extract['torch']}"
    ax.set_xlabel(f"ms of one step of rank 0, {gpus}")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=7, handlelength=1)
    ax.grid(False)
    figure.savefig(out_path)


# ------------------------------------------------------------------------------------ command line


@dataclass
class Config:
    names: Positional[tuple[Literal[tuple(FIGURES)], ...]] = ()  # figures to draw; default: all
    runs: str = str(RUNS)  # folder with the records
    out: str = str(ROOT / "readme.assets")  # folder for the figures


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    runs, out = Path(cfg.runs), Path(cfg.out)
    check_writable(out / "ladder.png", "out")
    for name in cfg.names or FIGURES:
        picture, program = FIGURES[name]
        for dark in (False, True):
            path = out / f"{name}{'_dark' if dark else ''}.png"
            try:
                with matplotlib.rc_context(style(dark)):
                    picture(runs, path, dark)
            except UserError as missing:
                raise UserError(f"{name}: {missing}; create it with `{program}`") from missing
            print(path)


if __name__ == "__main__":
    run_main(main)
