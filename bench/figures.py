"""Draw every picture of readme.assets/, light and dark, from the measurements in readme.assets/runs/ and nothing else.

    python bench/figures.py                      # all of them
    python bench/figures.py ladder roofline      # some; --help lists the names

A picture whose measurements are missing or incomplete is left out, with one sentence that names the command which makes
them. The look comes from plot.style().
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.run.locks import check_writable  # noqa: E402
from lab.run.stop import running  # noqa: E402
from lab.tools import plot  # noqa: E402

RUNS, ASSETS = ROOT / "readme.assets" / "runs", ROOT / "readme.assets"

# What each run was trained and measured on. Losses on different text do not compare, so every curve says it.
DATA_OF = {
    "corpus_124m_h200": "books and textbooks, 20M tokens, 6.5 epochs",
    "corpus_124m_4xh200": "books and textbooks, 21M tokens",
}
# OpenAI's 124M on two validation sets: different text, so two lines (llm.c dev/vislog.ipynb; build-nanogpt play.ipynb)
PUBLISHED_LOSS = {"FineWeb": 3.42, "FineWeb-Edu": 3.29}

# kinds of kernel, light and dark: the series colours, then gold, grey and nearly the paper's colour
KERNELS = ("matmul", "attention", "loss", "elementwise", "optimizer", "communication", "copy", "idle")
KERNEL_COLORS = {
    dark: dict(zip(KERNELS, [*plot.SERIES[dark], "#c9a400" if not dark else "#e3cf57", "0.6", "0.85" if not dark else "0.3"]))
    for dark in (False, True)
}


class NoData(Exception):
    """The measurements of a picture are not there: what is missing."""


def records(runs, name, *fields, **where):
    """The records of runs/name.jsonl that have all the fields and the values in `where`. Raises NoData if none has."""
    path = runs / f"{name}.jsonl"
    if not path.exists():
        raise NoData(f"there is no {path.name}")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        if isinstance(record, dict) and all(record.get(f) is not None for f in fields) and where.items() <= record.items():
            found.append(record)
    if not found:
        wanted = ", ".join([*(f"{k} {v}" for k, v in where.items()), *fields])
        raise NoData(f"{path.name} has no record with {wanted}")
    return found


def grouped(rows, *keys):
    """{value of the key(s): rows}, in the order of first appearance."""
    groups = {}
    for row in rows:
        groups.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row.get(k) for k in keys), []).append(row)
    return groups


def median(rows, field):
    return statistics.median(row[field] for row in rows)


def where_and_when(rows):
    """Card, torch and date of measurements: the line under a picture."""
    rows = [dict(row, card=row.get("card") or row.get("device")) for row in rows]
    parts = [", ".join(dict.fromkeys(str(row[f]) for row in rows if row.get(f))) for f in ("card", "torch", "date")]
    parts[1] = f"torch {parts[1]}" if parts[1] else ""
    return ", ".join(p for p in parts if p)


def new_figure(width, height, title, note="", **grid):
    """(figure, axes) with a title that states the finding and a small line at the bottom that says where it was measured."""
    figure = blank(width, height, title, note)
    return figure, figure.subplots(**grid)


def blank(width, height, title, note=""):
    """The same without axes."""
    figure = Figure(figsize=(width, height))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    if note:
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8.5, color="0.5")
    return figure


# ------------------------------------------------------------------------------------------------- training curves


def curve(name):
    """The picture of one training run, as train_gpt2.py itself draws it."""

    def picture(runs, out_path, dark):
        path = runs / f"{name}.jsonl"
        if not path.exists():
            raise NoData(f"there is no {path.name}")
        plot.draw([path], out_path, dark)

    return picture


def tokens(runs, out_path, dark):
    """Validation loss and HellaSwag against tokens, with GPT-2's lines, each named after the text it was measured on."""
    logs = {name: plot.read_log(runs / f"{name}.jsonl") for name in DATA_OF if (runs / f"{name}.jsonl").exists()}
    if not logs:
        raise NoData(f"none of {', '.join(f'{name}.jsonl' for name in DATA_OF)} is there")
    longest = max(logs, key=lambda name: plot.column(logs[name], "train", "tokens")[1][-1])
    loss = plot.column(logs[longest], "val", "loss")[1][-1]
    title = f"GPT-2 124M so far: {loss:.2f} nats per token on {DATA_OF[longest].split(',')[0]}"
    figure, (top, bottom) = new_figure(8, 5.6, title, nrows=2, sharex=True, height_ratios=[2.4, 1])
    for i, (name, log) in enumerate(logs.items()):
        start, tokens_at, color = log.get("start", [{}])[-1], plot.tokens_at(log), plot.SERIES[dark][i]
        steps, losses = plot.column(log, "train", "loss")
        top.plot(list(map(tokens_at, steps)), losses, color=color, linewidth=0.8, alpha=0.5)
        steps, losses = zip(*((s, v) for s, v in zip(*plot.column(log, "val", "loss")) if s > 0))  # no 0 on a log axis
        cards = f"{start.get('world_size', 1)} x {start.get('device', '?')}"
        top.plot(list(map(tokens_at, steps)), losses, "o-", markersize=4, color=color,
                 label=f"ours: {DATA_OF[name]} ({cards})")  # fmt: skip
        top.annotate(f"{losses[-1]:.2f}", (tokens_at(steps[-1]), losses[-1]), xytext=(0, -7), color=color, ha="center",
                     va="top", fontweight="bold", textcoords="offset points")  # fmt: skip
        steps, values = plot.column(log, "hella", "acc_norm")
        errors = {r["step"]: 1.96 * (r.get("acc_norm_stderr") or 0) for r in log.get("hella", [])}
        if steps:
            bottom.errorbar(list(map(tokens_at, steps)), values, yerr=[errors[s] for s in steps], color=color, marker="o",
                            markersize=4, capsize=2)  # fmt: skip
    for data, loss in PUBLISHED_LOSS.items():
        plot.reference(top, loss, "", left=True)
        top.annotate(f"OpenAI's GPT-2 124M on {data}, {loss:.2f}", (1.0e6, loss), xytext=(4, 3 if loss > 3.35 else -3),
                     va="bottom" if loss > 3.35 else "top", textcoords="offset points", color="0.5", fontsize=9)  # fmt: skip
    plot.reference(bottom, 0.25, "chance 0.25", left=True)
    plot.reference(bottom, plot.PUBLISHED_HELLASWAG["GPT-2 124M"], "OpenAI's GPT-2 124M, 0.2955", left=True)
    top.set(ylabel="loss (nats per token)\nthin: training, dots: validation", ylim=(2.6, 11.4), xscale="log",
            xlim=(1e6, 1.2e10))  # fmt: skip
    top.legend(loc="upper right", fontsize=9)
    bottom.set(ylabel="HellaSwag\nacc_norm", xlabel="training tokens (losses on different text do not compare)",
               ylim=(0.225, 0.31))  # fmt: skip
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
    figure.savefig(out_path)


# -------------------------------------------------------------------------------------------------- the ladder


def measured(runs, group, *fields):
    """{shape: {variant: its records}} of one group of the ladder, gpt2 first, variants in the ladder's order. Of measurements
    made twice the later one counts, of a cold and a warmed-up card, or two versions of torch, the one that has more variants.
    Raises NoData."""
    from rungs import KEY, variants  # it imports torch

    order, last = list(variants(group)), {}
    for row in records(runs, "ladder", "shape", "variant", *fields, group=group):
        last[tuple(row.get(k) for k in KEY)] = row
    shapes = {}
    for shape, rows in grouped(last.values(), "shape").items():
        states = grouped(rows, "card", "torch", "sustained", "tokens_per_step", "max_steps").values()
        best = max(states, key=lambda rows: (len(rows), rows[0].get("sustained") or 0))
        best.sort(key=lambda row: order.index(row["variant"]) if row["variant"] in order else len(order))
        shapes[shape] = grouped(best, "variant")
    return dict(sorted(shapes.items(), key=lambda item: item[0] != "gpt2"))


def flat(shapes):
    return [row for variants in shapes.values() for rows in variants.values() for row in rows]


def words(variant):
    return variant.replace("_", " ")


def ladder(runs, out_path, dark):
    """A staircase for each shape: tokens/s of every rung, the part that this rung added in the second colour, a star where its
    results are wrong, and a line across the stair where another version of torch has them right."""
    from rungs import SHAPES, raced  # it imports torch

    from lab.kernels.fused_mlp import MIN_POSITIONS

    shapes = measured(runs, "rungs", "tok_per_s")
    variants = list(max(shapes.values(), key=len))
    if len(variants) < 2:
        raise NoData("no shape in ladder.jsonl has two rungs")
    shapes = {shape: rungs for shape, rungs in shapes.items() if len(variants) < 2 * len(rungs)}  # the others have no stairs
    rows = flat(shapes)
    speeds = {s: {v: median(rungs[v], "tok_per_s") for v in rungs} for s, rungs in shapes.items()}
    first, *_, last = speeds[next(iter(shapes))].values()
    title = f"{next(iter(shapes))}: {plot.short(first)} to {plot.short(last)} tokens/s, {last / first:.0f} times, rung by rung"
    widths = [2.6] + [1] * (len(shapes) - 1)
    wrong = {(r["shape"], r["variant"], r["tokens_per_step"]) for r in rows if raced(r)}
    everything = grouped(records(runs, "ladder", "tok_per_s", group="rungs"), "shape", "variant", "tokens_per_step")
    right = {place[:2]: found for place in wrong if (found := [r for r in everything[place] if not raced(r)])}
    note = "*: compiled with a race, its results are wrong (README's log)" * bool(wrong)
    if right:
        note += f"; line: without one, torch {next(iter(right.values()))[0]['torch'].split('+')[0]}"
    note += "\n" * bool(wrong) + where_and_when(rows)
    figure, axes = new_figure(8, 1.3 + 0.34 * len(variants), title, note, ncols=len(shapes), squeeze=False, sharey=True,
                              width_ratios=widths)  # fmt: skip
    base, gain, loss = plot.SERIES[dark][0], plot.SERIES[dark][1], plot.SERIES[dark][4]
    for ax, (shape, speed) in zip(axes[0], speeds.items()):
        before, top = None, max(speed.values())
        for y, variant in enumerate(variants):
            now = speed.get(variant)
            if now is None:  # what comes after a missing rung is no step up from it
                small = shape in SHAPES and SHAPES[shape][1].batch_size * SHAPES[shape][1].seq_len < MIN_POSITIONS
                ax.annotate("not used" if small else "not measured", (0, y), xytext=(4, 0), textcoords="offset points",
                            va="center", fontsize=6.5, color="0.5")  # fmt: skip
                before = None
                continue
            kept = now if before is None else min(before, now)
            ax.barh(y, kept, height=1, color=base, alpha=0.8)
            if before is not None:
                ax.barh(y, abs(now - before), left=kept, height=1, color=gain if now >= before else "none",
                        edgecolor="none" if now >= before else loss, hatch="" if now >= before else "////")  # fmt: skip
            factor = "" if before is None else f"x{now / before:.2f}"
            text = f"{plot.short(now)}  {factor}" if ax is axes[0][0] else factor or plot.short(now)
            text += "*" * raced(shapes[shape][variant][0])
            if found := right.get((shape, variant)):
                rate = median(found, "tok_per_s")
                ax.plot([rate, rate], [y - 0.42, y + 0.42], color="white" if dark else "black", linewidth=1.2)
            ax.annotate(text, (max(now, before or 0), y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
            before = now
        ax.set(xlim=(0, top * (1.28 if ax is axes[0][0] else 1.75)), xlabel="tokens/s")
        ax.set_title(shape.removeprefix("gpt2-"), fontsize=10)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
        ax.locator_params(axis="x", nbins=5 if ax is axes[0][0] else 2)
        ax.grid(axis="y", visible=False)
    axes[0][0].set(yticks=range(len(variants)), yticklabels=map(words, variants), ylim=(len(variants) - 0.5, -0.5))
    figure.savefig(out_path)


def stacked(ax, times, dark):
    """A bar for each of {name: {kind of kernel: ms}}, its kinds one after the other. Returns where the bars end."""
    left = dict.fromkeys(times, 0.0)
    for kind in KERNELS:
        values = [kinds.get(kind, 0) for kinds in times.values()]
        if max(values) > 0:
            ax.barh(range(len(times)), values, left=list(left.values()), height=0.75, label=kind,
                    color=KERNEL_COLORS[dark][kind])  # fmt: skip
        left = {name: left[name] + value for name, value in zip(times, values)}
    ax.set(yticks=range(len(times)), yticklabels=map(words, times), ylim=(len(times) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    return left


def kernels(runs, out_path, dark):
    """Kernel time of a micro-step, kind by kind: all rungs, and the fast ones again at their own scale."""
    shape, rungs = next(iter(measured(runs, "rungs", "kernel_ms", "micro_steps", "tokens_per_step").items()))
    rows = flat({shape: rungs})
    size = max(row["tokens_per_step"] / row["micro_steps"] for row in rows)

    def ms(variant, kind):  # rungs that need a smaller micro-batch are scaled up to the same tokens
        factors = [(r, size * r["micro_steps"] / r["tokens_per_step"]) for r in rungs[variant]]
        return statistics.median(r["kernel_ms"].get(kind, 0) * factor for r, factor in factors)

    times = {v: {kind: ms(v, kind) for kind in KERNELS} for v in rungs}
    total = {v: sum(kinds.values()) for v, kinds in times.items()}
    fast = [v for v in times if total[v] < 2 * min(total.values())]
    panels = [list(times)] + ([fast] if 1 < len(fast) < len(times) else [])
    v = list(times)[-1]
    biggest = max(times[v], key=times[v].get)
    title = f"{shape}: {biggest} is {times[v][biggest] / total[v]:.0%} of the last rung's {total[v]:.0f} ms"
    figure, axes = new_figure(8, 1.6 + 0.3 * sum(map(len, panels)), title, where_and_when(rows), nrows=len(panels),
                              squeeze=False, height_ratios=[len(p) for p in panels])  # fmt: skip
    for ax, panel in zip(axes[:, 0], panels):
        stacked(ax, {v: times[v] for v in panel}, dark)
        for y, v in enumerate(panel):
            ax.annotate(f"{total[v]:.0f}", (total[v], y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
        ax.set(xlim=(0, 1.08 * max(total[v] for v in panel)))
    axes[-1, 0].set_xlabel(f"ms for {size:,.0f} tokens: forward, backward, and their share of the update")
    axes[0, 0].legend(loc="lower right", fontsize=8.5, ncol=2)
    figure.savefig(out_path)


def vocabulary(runs, out_path, dark):
    """Kernel time of a micro-step with an odd and with a padded vocabulary, kind by kind."""
    shape, variants = next(iter(measured(runs, "vocabulary", "kernel_ms", "tok_per_s", "median_ms").items()))
    rows = {variant: rows[-1] for variant, rows in variants.items()}
    pairs = [name[6:] for name in rows if name.startswith("50257_") and "50304_" + name[6:] in rows]
    if not pairs:
        raise NoData("ladder.jsonl has no pair of 50257 and 50304")
    ms = {name: row["median_ms"] / row["micro_steps"] for name, row in rows.items()}
    saved = {p: ms["50257_" + p] - ms["50304_" + p] for p in pairs}
    title = f"{shape}: 47 rows of padding save " + " and ".join(f"{saved[p]:.0f} ms {p}" for p in pairs)
    figure, ax = new_figure(8, 1.7 + 0.42 * len(rows), title, where_and_when(rows.values()))
    ends = stacked(ax, {name: row["kernel_ms"] for name, row in rows.items()}, dark)
    for y, (name, row) in enumerate(rows.items()):
        ax.annotate(f"{plot.short(row['tok_per_s'])} tokens/s", (ends[name], y), xytext=(4, 0), textcoords="offset points",
                    va="center", fontsize=8.5)  # fmt: skip
    ax.set(xlim=(0, 1.25 * max(ends.values())), xlabel="ms of a micro-step of 64 x 1024 tokens")
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.3), fontsize=8.5, ncol=7, handlelength=1, columnspacing=1)
    figure.savefig(out_path)


def micro_batch(runs, out_path, dark):
    """Speed and memory against the sequences of a micro-step."""
    shape, variants = next(iter(measured(runs, "micro_batch", "batch_size", "tok_per_s", "peak_gib").items()))
    rows = flat({shape: variants})
    sizes = grouped(sorted(rows, key=lambda r: r["batch_size"]), "batch_size")  # what did not fit was halved
    if len(sizes) < 2:
        raise NoData("ladder.jsonl has but one size of the micro-batch")
    best = max(sizes, key=lambda b: median(sizes[b], "tok_per_s"))
    title = f"{shape}: {best} sequences a micro-step are fastest, {plot.short(median(sizes[best], 'tok_per_s'))} tokens/s"
    figure, axes = new_figure(8, 4.6, title, where_and_when(rows), nrows=2, sharex=True, height_ratios=[1.5, 1])
    for ax, field, label, i in zip(axes, ("tok_per_s", "peak_gib"), ("tokens/s", "peak memory (GiB)"), (0, 1)):
        values = [median(rows, field) for rows in sizes.values()]
        ax.plot(list(sizes), values, "o-", color=plot.SERIES[dark][i])
        for b, value in zip(sizes, values):
            ax.annotate(plot.short(value), (b, value), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8.5)
        ax.set(ylabel=label, ylim=(0, 1.18 * max(values)))
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
    axes[1].set_xscale("log", base=2)
    axes[1].set(xticks=list(sizes), xticklabels=[str(b) for b in sizes], xlabel="sequences per micro-step")
    axes[1].minorticks_off()
    figure.savefig(out_path)


def ladder_loss(runs, out_path, dark):
    """What the rungs do to the loss: each seed's validation loss after equal tokens, training loss against seconds. Of runs of
    several lengths, the one that has the most rungs."""
    shape, variants = next(iter(measured(runs, "loss", "val_loss", "curve").items()))
    rows = flat({shape: variants})
    loss = {v: statistics.mean(r["val_loss"] for r in rows) for v, rows in variants.items()}
    spread = max(max(r["val_loss"] for r in rows) - min(r["val_loss"] for r in rows) for rows in variants.values())
    adamw = {v: value for v, value in loss.items() if v != "muon"}
    apart = max(adamw.values()) - min(adamw.values())
    title = f"{shape}: the rungs' means lie within {apart:.3f} nats, seeds of one rung differ by up to {spread:.3f}"
    figure, (left, right) = new_figure(8, 1.8 + 0.3 * len(variants), title, where_and_when(rows), ncols=2,
                                       width_ratios=[1.2, 1])  # fmt: skip
    for y, (variant, rows) in enumerate(variants.items()):
        left.plot([r["val_loss"] for r in rows], [y] * len(rows), "o", color=plot.SERIES[dark][0], markersize=5, alpha=0.7)
        left.plot([loss[variant]] * 2, [y - 0.3, y + 0.3], color=plot.SERIES[dark][1])
    left.set(yticks=range(len(variants)), yticklabels=map(words, variants), ylim=(len(variants) - 0.5, -0.5),
             xlabel="validation loss after equal tokens\n(a dot: a seed; a line: their mean)")  # fmt: skip
    some = ["fp32", "bf16", "compile", "fp8_mlp", "muon"]  # all of them would be a bundle
    chosen = [v for v in variants if v in some or len(variants) < 6]
    for i, variant in enumerate(chosen):
        curves = [r["curve"] for r in variants[variant]]
        seconds, losses = ([statistics.median(c[k][j] for c in curves) for k in range(min(map(len, curves)))] for j in (1, 2))
        right.plot(seconds, losses, color=plot.SERIES[dark][i], label=words(variant), linewidth=1.4)
    right.set(xscale="log", xlabel="seconds of training", ylabel="training loss (nats)")
    right.legend(fontsize=8.5)
    figure.savefig(out_path)


# -------------------------------------------------------------------------------------------------- the floor


def label_points(ax, labels, others):
    """Write the texts of labels [(x, y, text, color)] beside their points, where neither texts nor points nor others [(x, y)]
    are: each takes the nearest free place around its point. Where that is not beside it, or another point is near too, a thin
    line says whose it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw_without_rendering()  # settles the layout, so that places in pixels are final
    dpi = ax.figure.dpi / 72
    points = ax.transData.transform([(x, y) for x, y, *_ in labels] + others)
    taken = [Bbox.from_extents(px - 3 * dpi, py - 3 * dpi, px + 3 * dpi, py + 3 * dpi) for px, py in points]
    taken += [text.get_window_extent(renderer) for text in [*ax.texts, *filter(None, [ax.get_legend()])]]
    frame = ax.get_window_extent()
    for (px, py), (x, y, text, color) in sorted(zip(points, labels), key=lambda item: tuple(item[0])):
        probe = ax.annotate(text, (x, y), fontsize=8)
        box = probe.get_window_extent(renderer)
        probe.remove()
        w, h = box.width / 2 + 2, box.height / 2 + 1
        places = [(r, a) for r in range(6, 150, 6) for a in (0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240)]
        for r, a in places:
            # the text's middle lies outside the point by its own half size and r points
            cx = px + math.cos(math.radians(a)) * (w + r * dpi)
            cy = py + math.sin(math.radians(a)) * (h + r * dpi)
            here = Bbox.from_extents(cx - w, cy - h, cx + w, cy + h)
            inside = frame.x0 < here.x0 and here.x1 < frame.x1 and frame.y0 < here.y0 and here.y1 < frame.y1
            if inside and not any(here.overlaps(other) for other in taken):
                gaps = sorted(math.hypot(max(here.x0 - ox, 0, ox - here.x1), max(here.y0 - oy, 0, oy - here.y1))
                              for ox, oy in points[: len(labels)])  # fmt: skip
                clear = r <= 12 and (len(gaps) < 2 or gaps[1] > 2 * gaps[0])
                line = None if clear else dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=0, shrinkB=2)
                ax.annotate(text, (x, y), xytext=((cx - px) / dpi, (cy - py) / dpi), textcoords="offset points", fontsize=8,
                            ha="center", va="center", color=color, arrowprops=line)  # fmt: skip
                taken.append(here)
                break


WAYS = {"forward": "o", "dgrad": "s", "wgrad": "^", "backward": "D"}  # of an operation: its marker


def roofline(runs, out_path, dark):
    """Achieved TFLOP/s against FLOPs per byte, under what the card's own copy and its own products allow: everything, and
    the corner where the products are at a larger scale."""
    rows = records(runs, "floor", "op", "ms", "bytes")
    rows = next(iter(grouped(rows, "preset", "batch_size").values()))  # of one model: others have other operations
    copies = [row["bytes"] / row["ms"] / 1e9 for row in rows if row["op"].startswith("copy")]  # TB/s
    ops = [dict(row, x=row["flops"] / row["bytes"], y=row["flops"] / row["ms"] / 1e9) for row in rows if row.get("flops")]
    if not copies or not ops:
        raise NoData("floor.jsonl has no copy, or no operation with FLOPs, to draw the roof from")
    slope, fp8 = max(copies), [row for row in ops if row["op"].startswith("fp8")]
    bf16 = [row for row in ops if row not in fp8]
    roofs = {"bf16": max(row["y"] for row in bf16)} | ({"fp8": max(row["y"] for row in fp8)} if fp8 else {})
    title = f"Memory gives {slope:.2f} TB/s, the best bf16 product {roofs['bf16']:.0f} TFLOP/s"
    title += f", in fp8 {roofs['fp8']:.0f}" if fp8 else ""
    figure, (left, right) = new_figure(8, 4.9, title, where_and_when(rows), ncols=2, width_ratios=[1, 1.3])
    edge = roofs["bf16"] / slope  # FLOPs a byte from which on memory is no longer what bounds
    low, high = min(row["x"] for row in ops) / 2, max(row["x"] for row in ops) * 2.5
    blue, orange, green = plot.SERIES[dark][:3]

    def in_corner(row):
        return row["x"] > edge / 2 and row["y"] > roofs["bf16"] / 2

    labels = {left: {}, right: {}}
    for ax in (left, right):
        for roof, line in zip(roofs.values(), ("-", "--")):
            ax.loglog([low, roof / slope, high], [low * slope, roof, roof], line, color="0.5", linewidth=1.2, zorder=1)
        for row in ops if ax is left else filter(in_corner, ops):
            base, _, way = row["op"].rpartition(" ")
            base, marker = (base, WAYS[way]) if way in WAYS else (row["op"], "o")
            base = base.replace("attention ", "SDPA ")
            color = orange if row in fp8 else blue if row["x"] >= edge else green
            ax.plot(row["x"], row["y"], marker, color=color, markersize=5 if ax is right else 3.5)
            if ax is right or not in_corner(row):
                labels[ax].setdefault((base, color), []).append((row["x"], row["y"]))
    left.set(ylim=(min(row["y"] for row in ops) / 3, 3 * max(roofs.values())), xlim=(low, high), ylabel="achieved TFLOP/s")
    lowest = min(row["y"] for row in filter(in_corner, ops))
    right.set(yscale="linear", ylim=(0.87 * lowest, 1.06 * max(roofs.values())))
    ticks = [x for x in (200, 500, 1000, 2000, 5000) if edge < x < high]
    right.set_xticks(ticks, map(str, ticks))
    right.minorticks_off()
    right.set_xlim(edge, high)
    left.set_xlabel("FLOPs per byte that must move")
    right.set_xlabel("the corner of the products, larger")
    for name, roof in roofs.items():
        right.annotate(f"{name} {roof:.0f}", (high, roof), xytext=(-2, 3), textcoords="offset points", ha="right", color="0.5",
                       fontsize=8)  # fmt: skip
    for way in [way for way in WAYS if any(row["op"].endswith(" " + way) for row in ops)]:
        right.plot([], [], WAYS[way], color="0.5", markersize=5, label=way)
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=8, loc="lower right", ncol=2)
    for ax, groups in labels.items():  # one text for an operation, at the middle one of its points
        along = [low * (high / low) ** (i / 300) for i in range(300)]
        roof_at = [(x, min(x * slope, roof)) for roof in roofs.values() for x in along]
        others = [(row["x"], row["y"]) for row in ops] + roof_at
        label_points(ax, [(*sorted(p)[len(p) // 2], base, color) for (base, color), p in groups.items()], others)
    figure.savefig(out_path)


def floor(runs, out_path, dark):
    """The floors that the parts of one model's step add up to, and our own step: tokens/s. Beside them, for each model of the
    same card, the floor of its parts run back to back as a share of our step."""
    rows = [row for row in records(runs, "floor", "op", "tok_per_s", "step_ms") if row["op"].startswith("floor: ")]
    if not rows:
        raise NoData("floor.jsonl has no line that begins with floor:")
    rows = [row for row in rows if row["card"] == rows[-1]["card"]]
    models = grouped(rows, "preset", "batch_size")
    first, bars = next(iter(models.values())), {}
    for row in first:
        name = "our step" + ", 8 bits in head and MLP" * ("8 bits" in row["op"])
        bars.setdefault(name, row["tok_per_s"] * row["ms"] / row["step_ms"])
        bars[row["op"].removeprefix("floor: ").replace(", GELU", "\nGELU")] = row["tok_per_s"]
    shares = {}  # model: {bits: the floor's milliseconds over ours}
    for (preset, batch_size), alike in models.items():
        for row in alike:
            if "back to back" in row["op"] and "its own kernels" not in row["op"]:
                bits = "8 bits" if "8 bits" in row["op"] else "16 bits"
                shares.setdefault(f"{preset}, B = {batch_size}", {})[bits] = row["ms"] / row["step_ms"]
    spread = sorted({f"{row['ms'] / row['step_ms']:.0%}" for row in first}, key=lambda text: (len(text), text))
    title = f"Our step runs at {' to '.join(dict.fromkeys([spread[0], spread[-1]]))} of what its parts add up to"
    both = len(shares) > 1
    grid = dict(ncols=2, width_ratios=[1.7, 1]) if both else {}
    figure, axes = new_figure(8, 1.2 + 0.52 * len(bars), title, where_and_when(rows), **grid)
    ax = axes[0] if both else axes
    for y, (name, speed) in enumerate(bars.items()):
        ax.barh(y, speed, height=0.7, color=plot.SERIES[dark][name.startswith("our step")])
        ax.annotate(plot.short(speed), (speed, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set(yticks=range(len(bars)), yticklabels=bars, ylim=(len(bars) - 0.5, -0.5), xlabel="tokens/s",
           xlim=(0, 1.15 * max(bars.values())))  # fmt: skip
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
    ax.grid(axis="y", visible=False)
    if both:
        for color, bits, dy in ((plot.SERIES[dark][1], "16 bits", 7), (plot.SERIES[dark][2], "8 bits", -15)):
            points = [(share[bits], y) for y, share in enumerate(shares.values()) if bits in share]
            axes[1].plot([x for x, _ in points], [y for _, y in points], "o", color=color, label=bits)
            for share, y in points:
                axes[1].annotate(f"{share:.0%}", (share, y), (0, dy), textcoords="offset points", ha="center", fontsize=9)
        axes[1].set(yticks=range(len(shares)), yticklabels=shares, ylim=(len(shares) - 0.5, -0.9), xlim=(0.8, 1),
                    xlabel="back to back,\nof our step's time")  # fmt: skip
        axes[1].xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes[1].legend(fontsize=8.5, loc="upper right", ncol=2, handletextpad=0, columnspacing=0.6, borderaxespad=0)
    figure.savefig(out_path)


# ------------------------------------------------------------------------------------------------ several GPUs


def parallel(runs, out_path, dark):
    """Tokens/s of N cards as a fraction of N times one card alone, by way of telling each other the gradients: a dot for each
    run of bench/parallel.py, held against the one card that the table there holds it against, and a line at their mean. The
    first model's ways stand on the left, all others on the right; what the trainer does has another colour than what was
    tried in bench/ alone."""
    from parallel import LOOPS, MODES, PRESETS, World, references  # it imports torch

    def named(mode, bucket_mb):
        return words(mode) + (f", {bucket_mb} MB" if bucket_mb else "")

    panels, rows = {}, records(runs, "parallel", "mode", "world_size", "tok_per_s")
    setting = "preset", "world_size", "eight_bits", "device", "batch_size", "compile", "torch", "grad_accum_steps"
    for kind, alike in grouped(rows, *setting).items():
        if any(row["mode"] == "alone_one" for row in alike):
            for row in alike:
                if row.get("env", {}).keys() - {"NCCL_VERSION", "NCCL_NVLS_ENABLE"}:  # an experiment with NCCL's settings
                    continue
                if row["mode"] in MODES and row["mode"] != "alone_one":  # others were given up
                    share = row["tok_per_s"] / references(row, alike)[0]
                    panels.setdefault(kind, {}).setdefault((row["mode"], row.get("bucket_mb")), []).append(share)
    if not panels:
        raise NoData("parallel.jsonl needs the mode alone_one and another one to hold against it")
    for kind, modes in panels.items():
        panels[kind] = dict(sorted(modes.items(), key=lambda item: (item[0][0] != "alone", -statistics.mean(item[1]))))
    order = [*PRESETS, *(kind[0] for kind in panels)]
    first, *others = sorted(panels, key=lambda kind: (order.index(kind[0]), -kind[1], bool(kind[2]), kind[4]))
    tried = {mode: shares for mode, shares in panels[first].items() if mode[0] not in ("alone", *LOOPS)} or panels[first]
    best, shares = max(tried.items(), key=lambda item: statistics.mean(item[1]))
    span = f"{min(shares):.1%} to {max(shares):.1%}" if len(shares) > 1 else f"{shares[0]:.1%}"
    title = f"{first[0]}: {named(*best)} on {first[1]} GPUs reaches {span} of {first[1]} times one GPU"
    left, right = len(panels[first]), sum(len(panels[kind]) + 2 for kind in others)
    figure = blank(8, 1.6 + 0.2 * max(left, right), title, where_and_when(rows))
    halves = figure.add_gridspec(1, 2 if others else 1)
    places = [halves[0, 0]]
    if others:
        places += halves[0, 1].subgridspec(len(others), 1, height_ratios=[len(panels[kind]) + 1 for kind in others])
    everything = [share for modes in panels.values() for shares in modes.values() for share in shares]
    low, high = min(everything), max(1, max(everything))
    several = {kind[0]: {(other[4], other[7]) for other in panels if other[0] == kind[0]} for kind in panels}  # micro-batches
    for place, kind in zip(places, [first, *others]):
        ax = figure.add_subplot(place)
        for y, ((mode, bucket_mb), shares) in enumerate(panels[kind].items()):
            ours = mode in ("ddp", "zero1_16bit", *LOOPS) and bucket_mb in (None, World.bucket_mb)
            color = "0.55" if mode == "alone" else plot.SERIES[dark][0 if ours else 1]
            ax.plot(shares, [y] * len(shares), "o", color=color, alpha=0.75, markersize=4.5, markeredgewidth=0)
            ax.plot([statistics.mean(shares)] * 2, [y - 0.35, y + 0.35], color=color, linewidth=1.5)
        size = f", B = {kind[4]}" * (len(several[kind[0]]) > 1) + (f" x {kind[7]}" if kind[7] else "")
        bits = ", 8 bits" * bool(kind[2])
        ax.set_title(f"{kind[0]} on {kind[1]}{size}{bits}", fontsize=9.5, pad=3)
        ax.set(ylim=(len(panels[kind]) - 0.4, -0.6), xlim=(low - 0.005, high + 0.005))
        names = [f"{named(*mode)}  {statistics.mean(shares):.1%}" for mode, shares in panels[kind].items()]
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.tick_params(axis="x", labelsize=8 if kind == first else 7)
        ax.axvline(1, color="0.5", linewidth=1, linestyle=(0, (5, 3)))
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_locator(MultipleLocator(0.02))
        if kind == first:
            ax.set_xlabel("share of N times one GPU of the same machine", fontsize=8.5)
            for number, text in enumerate(("as the trainer does it", "tried in bench/")):
                ax.plot([], [], "o", color=plot.SERIES[dark][number], markersize=4.5, label=text)
            ax.legend(fontsize=8, loc="lower right", bbox_to_anchor=(0.85, 0))
        elif kind != others[-1]:
            ax.tick_params(labelbottom=False)
    figure.savefig(out_path)


def overlap(mode):
    """The picture of what computes and what communicates in one step of one card, from the extract of a mode's trace."""

    def picture(runs, out_path, dark):
        extract = runs / f"{mode}.kernels.json"
        if not extract.exists():
            raise NoData(f"there is no {extract.name}")
        from parallel import overlap_picture  # it imports torch

        try:
            overlap_picture(extract, out_path, dark)
        except ValueError as error:
            raise NoData(str(error)) from error

    return picture


# ------------------------------------------------------------------------------------------------- command line

# name -> (how it is drawn, the command that makes its measurements)
PICTURES = {
    "laptop": (curve("laptop_builtin"), "python train_gpt2.py --preset laptop"),
    "corpus_124m_h200": (curve("corpus_124m_h200"), "python train_gpt2.py --preset gpt2"),
    "tokens": (tokens, "python train_gpt2.py --preset gpt2"),
    "ladder": (ladder, "python bench/ladder.py"),
    "kernels": (kernels, "python bench/ladder.py"),
    "micro_batch": (micro_batch, "python bench/ladder.py --groups micro_batch"),
    "vocabulary": (vocabulary, "python bench/ladder.py --groups vocabulary"),
    "ladder_loss": (ladder_loss, "python bench/ladder.py --groups loss --data edu_fineweb10B"),
    "roofline": (roofline, "python bench/floor.py"),
    "floor": (floor, "python bench/floor.py"),
    "parallel": (parallel, "python bench/parallel.py --nproc_per_node 4 --out readme.assets/runs/parallel.jsonl"),
    "overlap": (overlap("ddp"), "python bench/parallel.py --nproc_per_node 4 --modes ddp --trace readme.assets/runs"),
    "overlap_zero1": (
        overlap("zero1_16bit"), "python bench/parallel.py --nproc_per_node 4 --modes zero1_16bit --trace readme.assets/runs"
    ),
    "overlap_in_graph": (
        overlap("in_graph"), "python bench/parallel.py --nproc_per_node 4 --modes in_graph --trace readme.assets/runs"
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"pictures to draw: {', '.join(PICTURES)}; none: all")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the measurements (default: readme.assets/runs)")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder of the pictures (default: readme.assets)")
    args = parser.parse_args()
    for name in args.names:
        if name not in PICTURES:
            parser.error(f"{name} is no picture of this project; there are {', '.join(PICTURES)}")
    if not args.runs.is_dir():
        parser.error(f"there is no folder {args.runs}; --runs names one with measurements")
    try:
        check_writable(args.out / "loss.png", "out")  # makes the folder
    except ValueError as error:
        parser.error(str(error))
    names, left_out = args.names or list(PICTURES), 0
    for name in names:
        draw, command = PICTURES[name]
        try:
            for dark in (False, True):
                path = args.out / f"{name}{'_dark' if dark else ''}.png"
                with matplotlib.rc_context(plot.style(dark)):
                    draw(args.runs, path, dark)
                print(path)
        except NoData as missing:
            print(f"{name}: left out, {missing} in {args.runs}; `{command}` makes it", file=sys.stderr)
            left_out += 1
    if left_out == len(names):
        sys.exit(2)


if __name__ == "__main__":
    with running("figures.py"):
        main()
