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
from matplotlib.ticker import FuncFormatter, PercentFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot  # noqa: E402

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
        groups.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys), []).append(row)
    return groups


def median(rows, field):
    return statistics.median(row[field] for row in rows)


def where_and_when(rows):
    """Card, torch, date and command of measurements: the line under a picture."""
    parts = [", ".join(dict.fromkeys(str(row[f]) for row in rows if row.get(f))) for f in ("card", "torch", "date")]
    parts[1] = f"torch {parts[1]}" if parts[1] else ""
    return ", ".join(p for p in parts if p)


def new_figure(width, height, title, note="", **grid):
    """(figure, axes) with a title that states the finding and a small line at the bottom that says where it was measured."""
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(**grid) if grid else figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    if note:
        figure.supxlabel(note, x=0.99, ha="right", fontsize=8.5, color="0.5")
    return figure, axes


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
        start, per_step, color = log.get("start", [{}])[-1], plot.tokens_per_step(log), plot.SERIES[dark][i]
        steps, losses = plot.column(log, "train", "loss")
        top.plot([s * per_step for s in steps], losses, color=color, linewidth=0.8, alpha=0.5)
        steps, losses = zip(*((s, v) for s, v in zip(*plot.column(log, "val", "loss")) if s > 0))  # no 0 on a log axis
        cards = f"{start.get('world_size', 1)} x {start.get('device', '?')}"
        top.plot([s * per_step for s in steps], losses, "o-", markersize=4, color=color,
                 label=f"ours: {DATA_OF[name]} ({cards})")  # fmt: skip
        top.annotate(f"{losses[-1]:.2f}", (steps[-1] * per_step, losses[-1]), xytext=(0, -7), color=color, ha="center",
                     va="top", fontweight="bold", textcoords="offset points")  # fmt: skip
        steps, values = plot.column(log, "hella", "acc_norm")
        errors = {r["step"]: 1.96 * (r.get("acc_norm_stderr") or 0) for r in log.get("hella", [])}
        if steps:
            bottom.errorbar([s * per_step for s in steps], values, yerr=[errors[s] for s in steps], color=color, marker="o",
                            markersize=4, capsize=2)  # fmt: skip
    for data, loss in PUBLISHED_LOSS.items():
        plot.reference(top, loss, "", left=True)
        top.annotate(f"OpenAI's GPT-2 124M on {data}, {loss:.2f}", (1.0e6, loss), xytext=(4, 3 if loss > 3.35 else -3),
                     va="bottom" if loss > 3.35 else "top", textcoords="offset points", color="0.5", fontsize=9)  # fmt: skip
    plot.reference(bottom, 0.25, "chance 0.25", left=True)
    plot.reference(bottom, plot.PUBLISHED_HELLASWAG["GPT-2 124M"], "OpenAI's GPT-2 124M, 0.2955", left=True)
    top.set(ylabel="validation loss (nats per token)", ylim=(2.6, 11.4), xscale="log", xlim=(1e6, 1.2e10))
    top.legend(loc="upper right", fontsize=9)
    bottom.set(ylabel="HellaSwag\nacc_norm", xlabel="training tokens (losses on different text do not compare)",
               ylim=(0.225, 0.31))  # fmt: skip
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
    figure.savefig(out_path)


# -------------------------------------------------------------------------------------------------- the ladder


def rungs_of(runs, *fields):
    """{shape: {variant: its records}} of the cumulative rungs, gpt2 first."""
    rows = records(runs, "ladder", "shape", "variant", *fields, group="rungs")
    shapes = {shape: grouped(rows, "variant") for shape, rows in grouped(rows, "shape").items()}
    return dict(sorted(shapes.items(), key=lambda item: item[0] != "gpt2")), rows


def ladder(runs, out_path, dark):
    """A staircase for each shape: tokens/s of every rung, the part that this rung added in the second colour."""
    shapes, rows = rungs_of(runs, "tok_per_s")
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    speeds = {s: {v: median(rungs[v], "tok_per_s") for v in rungs} for s, rungs in shapes.items()}
    first, *_, last = speeds[next(iter(shapes))].values()
    title = f"{next(iter(shapes))}: {plot.short(first)} to {plot.short(last)} tokens/s, {last / first:.0f} times, rung by rung"
    widths = [2.6] + [1] * (len(shapes) - 1)
    figure, axes = new_figure(8, 1.3 + 0.34 * len(variants), title, where_and_when(rows), ncols=len(shapes), squeeze=False,
                              sharey=True, width_ratios=widths)  # fmt: skip
    base, gain, loss = plot.SERIES[dark][0], plot.SERIES[dark][1], plot.SERIES[dark][4]
    for ax, (shape, speed) in zip(axes[0], speeds.items()):
        before, top = None, max(speed.values())
        for variant, now in speed.items():
            y = variants.index(variant)
            kept = now if before is None else min(before, now)
            ax.barh(y, kept, height=1, color=base, alpha=0.8)
            if before is not None:
                ax.barh(y, abs(now - before), left=kept, height=1, color=gain if now >= before else "none",
                        edgecolor="none" if now >= before else loss, hatch="" if now >= before else "////")  # fmt: skip
            factor = "" if before is None else f"x{now / before:.2f}"
            text = f"{plot.short(now)}  {factor}" if ax is axes[0][0] else factor or plot.short(now)
            ax.annotate(text, (max(now, before or 0), y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
            before = now
        ax.set(xlim=(0, top * (1.28 if ax is axes[0][0] else 1.75)), xlabel="tokens/s")
        ax.set_title(shape, fontsize=10)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plot.short(value)))
        ax.locator_params(axis="x", nbins=5 if ax is axes[0][0] else 2)
        ax.grid(axis="y", visible=False)
    axes[0][0].set(yticks=range(len(variants)), yticklabels=variants, ylim=(len(variants) - 0.5, -0.5))
    figure.savefig(out_path)


def kernels(runs, out_path, dark):
    """Kernel time of a micro-step, kind by kind: all rungs, and the fast ones again at their own scale."""
    shapes, rows = rungs_of(runs, "kernel_ms", "batch_size", "seq_len")
    shape, rungs = next(iter(shapes.items()))
    size = max(row["batch_size"] * row["seq_len"] for rows in rungs.values() for row in rows)

    def ms(variant, kind):  # rungs that need a smaller micro-batch are scaled up to the same tokens
        return statistics.median(r["kernel_ms"].get(kind, 0) * size / (r["batch_size"] * r["seq_len"]) for r in rungs[variant])

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
        left = dict.fromkeys(panel, 0.0)
        for kind in KERNELS:
            values = [times[v][kind] for v in panel]
            if max(values) > 0:
                ax.barh(range(len(panel)), values, left=list(left.values()), height=0.75, label=kind,
                        color=KERNEL_COLORS[dark][kind])  # fmt: skip
            left = {v: left[v] + times[v][kind] for v in panel}
        for y, v in enumerate(panel):
            ax.annotate(f"{total[v]:.0f}", (total[v], y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
        ax.set(yticks=range(len(panel)), yticklabels=panel, ylim=(len(panel) - 0.5, -0.5),
               xlim=(0, 1.08 * max(total[v] for v in panel)))  # fmt: skip
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel(f"ms for {size:,} tokens, forward and backward")
    axes[0, 0].legend(loc="lower right", fontsize=8.5, ncol=2)
    figure.savefig(out_path)


def micro_batch(runs, out_path, dark):
    """Speed and memory against the sequences of a micro-step."""
    rows = records(runs, "ladder", "batch_size", "tok_per_s", "peak_gib", group="micro-batch")
    shape = "gpt2" if any(row.get("shape") == "gpt2" for row in rows) else rows[0].get("shape", "?")
    sizes = grouped(sorted((r for r in rows if r.get("shape", "?") == shape), key=lambda r: r["batch_size"]), "batch_size")
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


# -------------------------------------------------------------------------------------------------- the floor


def label_points(ax, points):
    """Write the texts of points [(x, y, text, color)] beside them where neither points nor other texts are: each takes the
    nearest free place around its point, with a thin line if that is not beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw_without_rendering()  # settles the layout, so that places in pixels are final
    dpi = ax.figure.dpi / 72
    where = [ax.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [Bbox.from_extents(px - 4 * dpi, py - 4 * dpi, px + 4 * dpi, py + 4 * dpi) for px, py in where]
    taken += [text.get_window_extent(renderer) for text in ax.texts]
    frame = ax.get_window_extent()
    for (px, py), (x, y, text, color) in sorted(zip(where, points), key=lambda item: tuple(item[0])):
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
                line = dict(arrowstyle="-", color=color, linewidth=0.6, shrinkA=0, shrinkB=2) if r > 12 else None
                ax.annotate(text, (x, y), xytext=((cx - px) / dpi, (cy - py) / dpi), textcoords="offset points", fontsize=8,
                            ha="center", va="center", color=color, arrowprops=line)  # fmt: skip
                taken.append(here)
                break


def roofline(runs, out_path, dark):
    """Achieved TFLOP/s against FLOPs per byte, under what the card's own copy and its own product allow."""
    rows = records(runs, "floor", "op", "ms", "bytes")
    copies = [row["bytes"] / row["ms"] / 1e9 for row in rows if row["op"].startswith("copy")]  # TB/s
    ops = [row for row in rows if row.get("flops")]
    if not copies or not ops:
        raise NoData("floor.jsonl has no copy, or no operation with FLOPs, to draw the roof from")
    fp8 = [row for row in ops if "fp8" in row["op"]]
    bf16 = [row for row in ops if "fp8" not in row["op"]]
    slope = max(copies)
    speed = {id(row): row["flops"] / row["ms"] / 1e9 for row in ops}  # TFLOP/s
    roofs = {"bf16": max(speed[id(row)] for row in bf16)} | ({"fp8": max(speed[id(row)] for row in fp8)} if fp8 else {})
    bound = sum(row["flops"] / row["bytes"] * slope < roofs["bf16"] for row in bf16)
    title = f"{bound} of {len(bf16)} operations wait for memory ({slope:.2f} TB/s); products reach {roofs['bf16']:.0f} TFLOP/s"
    figure, ax = new_figure(8, 5.6, title, where_and_when(rows))
    xs = [row["flops"] / row["bytes"] for row in ops]
    low, high = min(xs) / 2, max(max(xs) * 3, 4 * max(roofs.values()) / slope)
    for (name, top), style in zip(roofs.items(), ("-", "--")):
        ax.plot([low, top / slope, high], [low * slope, top, top], style, color="0.5", linewidth=1.2, zorder=1)
        ax.annotate(f"best {name} product, {top:.0f} TFLOP/s", (high, top), xytext=(-2, 4), textcoords="offset points",
                    ha="right", color="0.5", fontsize=8.5)  # fmt: skip
    blue, orange, green = plot.SERIES[dark][:3]
    points = []
    for row, x in zip(ops, xs):
        color = orange if "fp8" in row["op"] else blue if x * slope >= roofs["bf16"] else green
        ax.plot(x, speed[id(row)], "o", color=color, markersize=5)
        points.append((x, speed[id(row)], row["op"], color))
    floor_y = min(speed.values()) / 3
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor_y, 2.5 * max(roofs.values())),
           xlabel="FLOPs per byte that must move", ylabel="achieved TFLOP/s")  # fmt: skip
    label_points(ax, points)
    figure.savefig(out_path)


# ------------------------------------------------------------------------------------------------ several GPUs


def parallel(runs, out_path, dark):
    """Tokens/s of N GPUs as a fraction of N times one alone, by way of sharing the work."""
    rows = records(runs, "parallel", "mode", "gpus", "tok_per_s")
    alone = [row for row in rows if row["mode"] == "alone"]
    if not alone or len(alone) == len(rows):
        raise NoData("parallel.jsonl needs the mode alone and another one to compare with it")
    one = median(alone, "tok_per_s")
    bars = {key: median(group, "tok_per_s") for key, group in grouped(rows, "mode", "gpus").items() if key[0] != "alone"}
    (mode, n), best = max(bars.items(), key=lambda item: item[1] / item[0][1])
    title = f"{mode} on {n} GPUs reaches {best / n / one:.1%} of {n} times one GPU"
    figure, ax = new_figure(8, 1.5 + 0.42 * len(bars), title, where_and_when(rows))
    for y, ((_, n), speed) in enumerate(bars.items()):
        ax.barh(y, speed / n / one, height=0.7, color=plot.SERIES[dark][sorted({k[1] for k in bars}).index(n)])
        ax.annotate(f"{plot.short(speed)} tokens/s", (speed / n / one, y), xytext=(-6, 0), textcoords="offset points",
                    va="center", ha="right", fontsize=9, color="white" if not dark else "black")  # fmt: skip
    ax.axvline(1, color="0.5", linewidth=1, linestyle=(0, (5, 3)))
    ax.set(yticks=range(len(bars)), yticklabels=[f"{mode}, {n} GPUs" for mode, n in bars], ylim=(len(bars) - 0.5, -0.5),
           xlim=(0, 1.05), xlabel=f"fraction of N times one GPU ({plot.short(one)} tokens/s)")  # fmt: skip
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.grid(axis="y", visible=False)
    figure.savefig(out_path)


def overlap_picture(extract, out_png, dark=False):
    """Two lanes of one step of one GPU: kernels that compute, and kernels that exchange gradients.

    extract is a JSONL file of records with lane ("compute" or "communication"), kind (one of KERNELS), start_ms, ms.
    """
    extract = Path(extract)
    rows = records(extract.parent, extract.stem, "lane", "start_ms", "ms")
    first, last = min(r["start_ms"] for r in rows), max(r["start_ms"] + r["ms"] for r in rows)
    talk = [r for r in rows if r["lane"] == "communication"]
    work = [r for r in rows if r["lane"] != "communication"]
    hidden = sum(covered(r, work) for r in talk)
    total = sum(r["ms"] for r in talk)
    title = f"{hidden:.1f} of {total:.1f} ms of communication run beside computation"
    figure, ax = new_figure(8, 2.5, title, where_and_when(rows))
    for y, lane in enumerate((work, talk)):
        for kind, spans in grouped([{"kind": "matmul"} | r for r in lane], "kind").items():
            color = KERNEL_COLORS[dark]["communication" if y else kind if kind in KERNELS else "copy"]
            ax.broken_barh([(r["start_ms"] - first, r["ms"]) for r in spans], (y - 0.4, 0.8), color=color, linewidth=0,
                           label=None if y else kind)  # fmt: skip
    ax.set(yticks=[0, 1], yticklabels=["computation", "communication"], ylim=(1.5, -0.5), xlim=(0, last - first),
           xlabel="ms")  # fmt: skip
    ax.grid(axis="y", visible=False)
    ax.legend(fontsize=8, ncol=6, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(out_png)


def covered(span, others):
    """Milliseconds of a span during which at least one of the others runs."""
    begin, end, done = span["start_ms"], span["start_ms"] + span["ms"], 0.0
    for other in sorted(others, key=lambda r: r["start_ms"]):
        a, b = max(begin, other["start_ms"]), min(end, other["start_ms"] + other["ms"])
        if b > a:
            done, begin = done + b - a, b  # what is counted once is not counted for the next
    return done


def overlap(runs, out_path, dark):
    overlap_picture(runs / "overlap.jsonl", out_path, dark)


# ------------------------------------------------------------------------------------------------- command line

# name -> (how it is drawn, the command that makes its measurements)
PICTURES = {
    "laptop": (curve("laptop_builtin"), "python train_gpt2.py --preset laptop"),
    "corpus_124m_h200": (curve("corpus_124m_h200"), "python train_gpt2.py --preset gpt2"),
    "tokens": (tokens, "python train_gpt2.py --preset gpt2"),
    "ladder": (ladder, "python bench/ladder.py"),
    "kernels": (kernels, "python bench/ladder.py"),
    "micro_batch": (micro_batch, "python bench/ladder.py"),
    "roofline": (roofline, "python bench/floor.py"),
    "parallel": (parallel, "torchrun --standalone --nproc_per_node=4 bench/parallel.py"),
    "overlap": (overlap, "torchrun --standalone --nproc_per_node=4 bench/parallel.py"),
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
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or PICTURES:
        draw, command = PICTURES[name]
        try:
            for dark in (False, True):
                path = args.out / f"{name}{'_dark' if dark else ''}.png"
                with matplotlib.rc_context(plot.style(dark)):
                    draw(args.runs, path, dark)
                print(path)
        except NoData as missing:
            print(f"{name}: left out, {missing} in {args.runs}; `{command}` makes it", file=sys.stderr)


if __name__ == "__main__":
    main()
