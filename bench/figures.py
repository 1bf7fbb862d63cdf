"""Draw every figure of readme.assets/, light and dark, from the records in readme.assets/runs/
alone.

    python bench/figures.py                      # all of them
    python bench/figures.py ladder roofline      # some

A figure whose records are missing or incomplete is left out, with one sentence that names the
command which makes them. Look and colours are those of lab.tools.style, where a colour has one
meaning.
"""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import curves  # noqa: F401 (its figures enter FIGURES)
import matplotlib
from drawing import (
    DASHED,
    FIGURES,
    SMALL,
    NoData,
    bars,
    blank,
    cell,
    cells_of,
    label_points,
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
from matplotlib.ticker import MultipleLocator, PercentFormatter
from parallel import reference as one_gpu
from records import ROOT, RUNS, grouped
from rungs import VARIANTS, raced
from tyro.conf import Positional

from lab.cli import UserError, command, parse
from lab.files import check_writable
from lab.tools.records import short
from lab.tools.style import PAPER, color_of, style

# tokens/s of the same work by others' published programs on an H200, measured outside this
# repository
PEERS = {"build-nanogpt": 519_244, "nanoGPT": 527_360, "llm.c": 538_485}


# ------------------------------------------------------------------------------------ the ladder


@made_by("python bench/ladder.py")
def ladder(runs, out_path, dark):
    """tokens/s of each rung of the first shape, the part that this rung added paler, and others'
    programs."""
    shape, rungs = newest(runs, "rungs", "tok_per_s")
    speeds = {rung: row["tok_per_s"] for rung, row in rungs.items()}
    first, *_, last = speeds.values()
    name = "GPT-2 124M" if shape == "gpt2" else shape
    title = f"{name}, tokens a second on one H200: {short(first)} to {short(last)}"
    figure, ax = blank(1.5 + 0.34 * len(speeds), title, where_and_when(rungs.values()))
    parts, texts, before = {}, [], first
    for rung, now in speeds.items():
        parts[rung] = {"kept": min(before, now), "added": max(0, now - before)}
        texts.append(f"{short(now)}  x{now / before:.2f}" if texts else short(now))
        before = now
    blue = color_of("speed", dark)
    looks = {"kept": dict(color=blue), "added": dict(color=blue, alpha=0.5)}
    # no line runs through a text
    box = dict(facecolor=PAPER[dark]["paper"], edgecolor="none", pad=1)
    bars(ax, parts, looks, texts, room=1.2, bbox=box)
    peers = sorted(PEERS.items(), key=lambda peer: -peer[1]) if shape == "gpt2" else ()
    for top, (name, rate) in enumerate(peers):  # from its name down, but not behind a rung's text
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
    """tokens/s of each rung and shape but the first as a table, a cell the bluer the more
    the rung brought, grey where it cost."""
    _, *others = measured(runs, "rungs", "tok_per_s").items()
    if not others:
        raise NoData("ladder.jsonl has rungs of one shape alone")
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


def kinds(dark):
    """How each kind of kernel is drawn."""
    return {kind: dict(color=color_of(kind, dark), label=kind) for kind in CLASSES}


@made_by("python bench/ladder.py")
def kernels(runs, out_path, dark):
    """Kernel time of a micro-step, kind by kind: all rungs, and the fast ones again at their own
    scale. Rungs that need a smaller micro-batch are scaled up to the same tokens."""
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
    for ax, panel in zip(axes, panels):
        texts = [f"{total[v]:.0f}" for v in panel]
        bars(ax, {v: times[v] for v in panel}, kinds(dark), texts, room=1.08, height=0.75)
    axes[-1].set_xlabel(f"ms for {size:,.0f} tokens: forward, backward, their share of the update")
    axes[0].legend(loc="lower right", ncol=2)
    figure.savefig(out_path)


@made_by("python bench/ladder.py --groups vocabulary")
def vocabulary(runs, out_path, dark):
    """Kernel time of a micro-step with an odd and with a padded vocabulary, kind by kind."""
    shape, rows = newest(runs, "vocabulary", "kernel_ms", "tok_per_s", "median_ms")
    if missing := VARIANTS["vocabulary"].keys() - rows:
        raise NoData(f"ladder.jsonl has no {', '.join(missing)}")
    ms = {name: row["median_ms"] / row["micro_steps"] for name, row in rows.items()}
    saved = [f"{ms[f'50257_{p}'] - ms[f'50304_{p}']:.0f} ms {p}" for p in ("eager", "compiled")]
    title = f"{shape}: 47 rows of padding save {' and '.join(saved)}"
    figure, ax = blank(1.8 + 0.42 * len(rows), title, where_and_when(rows.values()))
    texts = [f"{short(row['tok_per_s'])} tokens/s" for row in rows.values()]
    times = {name: row["kernel_ms"] for name, row in rows.items()}
    bars(ax, times, kinds(dark), texts, room=1.25, height=0.75)
    ax.set(xlabel="ms of a micro-step of 64 x 1024 tokens")
    how = dict(handlelength=1, columnspacing=1)
    ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.3), ncol=7, **how)
    figure.savefig(out_path)


@made_by("python bench/ladder.py --groups micro_batch")
def micro_batch(runs, out_path, dark):
    """Speed and memory against the sequences of a micro-step."""
    fields = {"tok_per_s": ("tokens/s", "speed"), "peak_gib": ("peak memory (GiB)", "memory")}
    shape, found = newest(runs, "micro_batch", "batch_size", *fields)
    rows = {row["batch_size"]: row for row in found.values()}  # what did not fit was halved
    best = max(rows, key=lambda b: rows[b]["tok_per_s"])
    rate = short(rows[best]["tok_per_s"])
    title = f"{shape}: {best} sequences a micro-step are fastest, {rate} tokens/s"
    note = where_and_when(rows.values())
    figure, top, bottom = blank(4.6, title, note, "A;B", sharex=True, height_ratios=[1.5, 1])
    for ax, (field, (label, meaning)) in zip((top, bottom), fields.items()):
        values = [row[field] for row in rows.values()]
        ax.plot(list(rows), values, "o-", color=color_of(meaning, dark))
        for b, value in zip(rows, values):
            write(ax, short(value), b, value, dx=0, dy=8, ha="center")
        ax.set(ylabel=label, ylim=(0, 1.18 * max(values)))
    top.yaxis.set_major_formatter(shorten)
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(list(rows), list(map(str, rows)))
    bottom.set_xlabel("sequences per micro-step")
    bottom.minorticks_off()
    figure.savefig(out_path)


@made_by("python bench/ladder.py --groups loss --data edu_fineweb10B")
def ladder_loss(runs, out_path, dark):
    """What the rungs do to the loss: each seed's validation loss after equal tokens, training loss
    against seconds. Of runs of several lengths, the one that has the most rungs."""
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
    # all of them would be a bundle
    chosen = [v for v in found if v in ("fp32", "bf16", "compile", "fp8_mlp", "muon")]
    sides = {"fp8_mlp": (-4, 0, "right"), "muon": (-4, 0, "right"), "compile": (0, 7, "left")}
    for variant in chosen:
        points = zip(*(r["curve"] for r in found[variant]))  # of all seeds, at one step
        middle = [[statistics.median(point[i] for point in p) for i in (1, 2)] for p in points]
        color = color_of("orange" if variant == "muon" else "blue", dark)
        right.plot(*zip(*middle), color=color, linewidth=1.4)
        dx, dy, ha = sides.get(variant, (3, -5, "left"))
        write(right, words(variant), *middle[0], dx, dy, ha=ha, color=color)
    right.set(xscale="log", xlabel="seconds of training", ylabel="training loss (nats)")
    right.set(xlim=(0.06, 100))
    figure.savefig(out_path)


# ------------------------------------------------------------------------------------- the floor

WAYS = {"forward": "o", "dgrad": "s", "wgrad": "^", "backward": "D"}  # of an operation: its marker


@made_by("python bench/floor.py")
def roofline(runs, out_path, dark):
    """Achieved TFLOP/s against FLOPs per byte, under what the GPU's own copy and products allow:
    everything, and the corner of the products at a larger scale. Products in 8 bits are hollow."""
    rows = records(runs, "floor", "op", "ms", "bytes")
    rows = next(iter(grouped(rows, "preset", "batch_size").values()))  # of one model
    slope = max(r["bytes"] / r["ms"] / 1e9 for r in rows if r["op"].startswith("copy"))  # TB/s
    ops, roofs = [], {}
    for r in (r for r in rows if r.get("flops")):
        name, _, way = r["op"].rpartition(" ")
        name, way = (name, way) if way in WAYS else (r["op"], "forward")
        kind = {"AdamW": "optimizer", "clip": "optimizer"}.get(name, "matmul")
        color = color_of("attention" if name.startswith("attention") else kind, dark)
        rate, bits = r["flops"] / r["ms"] / 1e9, "fp8" if name.startswith("fp8") else "bf16"
        face = PAPER[dark]["paper"] if bits == "fp8" else color
        text = name.replace("attention", "SDPA"), color
        ops.append((r["flops"] / r["bytes"], rate, text, WAYS[way], face))
        roofs[bits] = max(rate, roofs.get(bits, 0))
    title = f"Memory gives {slope:.2f} TB/s, the best bf16 product {roofs['bf16']:.0f} TFLOP/s"
    title += f", in fp8 {roofs['fp8']:.0f}" if "fp8" in roofs else ""
    figure, left, right = blank(4.9, title, where_and_when(rows), "AB", width_ratios=[1, 1.3])
    edge, highest = roofs["bf16"] / slope, max(roofs.values())  # where memory bounds no longer
    low, high = min(op[0] for op in ops) / 2, max(op[0] for op in ops) * 2.5
    corner = [op for op in ops if op[0] > edge / 2 and op[1] > roofs["bf16"] / 2]
    labels = {left: {}, right: {}}
    for ax, drawn, size in ((left, ops, 4), (right, corner, 5)):
        for roof, line in zip(roofs.values(), ("-", "--")):
            xs, ys = [low, roof / slope, high], [low * slope, roof, roof]
            ax.loglog(xs, ys, line, color="0.5", linewidth=1.2, zorder=1)
        for op in drawn:
            x, y, text, marker, face = op
            ax.plot(x, y, marker, color=text[1], markerfacecolor=face, markersize=size)
            if ax is right or op not in corner:
                labels[ax].setdefault(text, []).append((x, y))
    left.set(ylim=(min(op[1] for op in ops) / 3, 3 * highest), xlim=(low, high))
    left.set(ylabel="achieved TFLOP/s", xlabel="FLOPs per byte that must move")
    right.set(yscale="linear", ylim=(0.87 * min(op[1] for op in corner), 1.06 * highest))
    ticks = [x for x in (200, 500, 1000, 2000, 5000) if edge < x < high]
    right.set_xticks(ticks, map(str, ticks))
    right.minorticks_off()
    right.set(xlim=(edge, high), xlabel="the corner of the products, larger")
    for name, roof in roofs.items():
        write(right, f"{name} {roof:.0f}", high, roof, dx=-2, dy=6, ha="right", color="0.5")
    for way, marker in WAYS.items():
        right.plot([], [], marker, color="0.5", markersize=5, label=way)
    right.legend(loc="lower right", ncol=2)
    along = [low * (high / low) ** (i / 300) for i in range(300)]
    others = [op[:2] for op in ops]
    others += [(x, min(x * slope, roof)) for roof in roofs.values() for x in along]
    for ax, groups in labels.items():  # one text for an operation, at the middle one of its points
        texts = [(*sorted(p)[len(p) // 2], *text) for text, p in groups.items()]
        label_points(ax, texts, others)
    figure.savefig(out_path)


@made_by("python bench/floor.py")
def floor(runs, out_path, dark):
    """The floors that the parts of one model's step add up to, paler, and our own step: tokens/s.
    Beside them, for each model of the same GPU, the floor of parts run back to back as a share of
    our step."""
    rows = records(runs, "floor", "op", "tok_per_s", "step_ms")
    rows = [row for row in rows if row["card"] == rows[-1]["card"]]
    models, speeds, shares = grouped(rows, "preset", "batch_size"), {}, {}
    first = next(iter(models.values()))
    for row in first:
        name = "our step" + ", 8 bits in head and MLP" * ("8 bits" in row["op"])
        speeds.setdefault(name, {"ours": row["tok_per_s"] * row["ms"] / row["step_ms"]})
        what = row["op"].removeprefix("floor: ").replace(", GELU", "\nGELU")
        speeds[what] = {"floor": row["tok_per_s"]}
    for (preset, batch_size), alike in models.items():
        for row in alike:
            if "back to back" in row["op"] and "its own kernels" not in row["op"]:
                bits = "8 bits" if "8 bits" in row["op"] else "16 bits"
                model = f"{preset.removeprefix('gpt2-')}, B = {batch_size}"
                shares.setdefault(model, {})[bits] = row["ms"] / row["step_ms"]
    spread = [row["ms"] / row["step_ms"] for row in first]
    title = f"Our step runs at {min(spread):.0%} to {max(spread):.0%} of what its parts add up to"
    height, note = 1.2 + 0.52 * len(speeds), where_and_when(rows)
    figure, ax, beside = blank(height, title, note, "AB", width_ratios=[1.7, 1])
    blue = color_of("speed", dark)
    looks = {"ours": dict(color=blue), "floor": dict(color=blue, alpha=0.5)}
    texts = [short(value) for speed in speeds.values() for value in speed.values()]
    bars(ax, speeds, looks, texts, room=1.15, height=0.7)
    ax.set(xlabel="tokens/s")
    ax.xaxis.set_major_formatter(shorten)
    for bits, face, dy in (("16 bits", blue, 10), ("8 bits", PAPER[dark]["paper"], -11)):
        points = [(share[bits], y) for y, share in enumerate(shares.values()) if bits in share]
        how = dict(color=blue, markerfacecolor=face, label=bits)
        beside.plot([x for x, _ in points], [y for _, y in points], "o", **how)
        for share, y in points:
            write(beside, f"{share:.0%}", share, y, dx=0, dy=dy, ha="center")
    rows_of(beside, list(shares), room=0.9)
    beside.set(xlim=(0.8, 1), xlabel="back to back,\nof our step's time")
    beside.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    how = dict(handletextpad=0, columnspacing=0.6, borderaxespad=0)
    beside.legend(loc="upper right", ncol=2, **how)
    figure.savefig(out_path)


# ---------------------------------------------------------------------------------- several GPUs

GPUS = "torchrun --standalone --nproc_per_node=4 bench/parallel.py"
TRACE = f"{GPUS} --trace readme.assets/runs --modes"
OURS = ("ddp", "zero1_16bit", "loop", "loop_zero1")  # modes that the trainer has, with 250 MB
LEFT_OUT = ("alone_one", "zero1_in_graph", "zero1_16bit_all")  # what all is held against; dead ends
SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def shares_of_one_gpu(rows):
    """{(preset, GPUs, 8 bits, device, B, compile, torch, micro-steps): {(mode, MB of a piece):
    [speed over GPUs times one alone, of each run]}}, the best first."""
    setting = "preset world_size eight_bits device batch_size compile torch grad_accum_steps"
    panels = {}
    for kind, alike in grouped(rows, *setting.split()).items():
        for row in alike:
            tried = row.get("env", {}).keys() - {"NCCL_VERSION", "NCCL_NVLS_ENABLE"}
            one = one_gpu(row, alike)
            if not tried and row["mode"] not in LEFT_OUT and one:
                modes = panels.setdefault(kind, {})
                shares = modes.setdefault((row["mode"], row.get("bucket_mb")), [])
                shares.append(row["tok_per_s"] / one)
    if not panels:
        raise NoData("parallel.jsonl needs the mode alone_one and another one to hold against it")
    sizes = [*SIZES, *(kind[0] for kind in panels)]
    order = sorted(panels, key=lambda k: (sizes.index(k[0]), -k[1], bool(k[2]), k[4]))

    def best_first(item):
        return item[0][0] != "alone", -statistics.mean(item[1])

    return {kind: dict(sorted(panels[kind].items(), key=best_first)) for kind in order}


@made_by(GPUS)
def parallel(runs, out_path, dark):
    """Tokens/s of N GPUs as a share of N times one alone, by way of telling each other the
    gradients: a dot for each run, held against the one that bench/parallel.py's table holds it
    against, a line at their mean. The first model's ways stand on the left, all others on the
    right."""
    rows = records(runs, "parallel", "mode", "tok_per_s")
    panels = shares_of_one_gpu(rows)
    first, *others = panels
    best = next((m for m in panels[first] if m[0] != "alone"), "alone")
    low, high = min(panels[first][best]), max(panels[first][best])
    title = f"{first[0]}: {words(best[0])} on {first[1]} GPUs reaches {low:.1%} to {high:.1%}"
    title += f" of {first[1]} times one GPU"
    heights = [len(panels[kind]) + 2 for kind in others] or [1]
    height = 1.6 + 0.21 * max(len(panels[first]), sum(heights))
    layout = [[0, i + 1] for i in range(len(others))] or [[0]]
    figure, *axes = blank(height, title, where_and_when(rows), layout, height_ratios=heights)
    shares = [share for modes in panels.values() for values in modes.values() for share in values]
    blue, paper = color_of("speed", dark), PAPER[dark]["paper"]
    for ax, (kind, modes) in zip(axes, panels.items()):
        names = []
        for y, ((mode, bucket_mb), values) in enumerate(modes.items()):
            color = color_of("memory", dark) if mode == "alone" else blue
            mean = statistics.mean(values)
            ours = mode == "alone" or (mode in OURS and bucket_mb in (None, 250))
            how = dict(color=color, markerfacecolor=color if ours else paper, markersize=4.5)
            ax.plot(values, [y] * len(values), "o", **how)
            ax.plot([mean, mean], [y - 0.35, y + 0.35], color=color, linewidth=1.5)
            names.append(f"{words(mode)}{f', {bucket_mb} MB' if bucket_mb else ''}  {mean:.1%}")
        title = f"{kind[0]} on {kind[1]}, B = {kind[4]}{f' x {kind[7]}' if kind[7] else ''}"
        ax.set_title(title + ", 8 bits" * bool(kind[2]), fontsize=9.5, pad=3, loc="right")
        rows_of(ax, names, room=0.6)
        ax.tick_params(labelsize=SMALL, labelbottom=kind in (first, *others[-1:]))
        ax.set_xlim(min(shares) - 0.005, max(1, *shares) + 0.005)
        ax.axvline(1, **DASHED)
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.xaxis.set_major_locator(MultipleLocator(0.02 if kind == first else 0.05))
    axes[0].set_xlabel("share of N times one GPU\nof the same machine", fontsize=SMALL)
    for text, face in (("as the trainer does it", blue), ("tried", paper)):
        axes[0].plot([], [], "o", color=blue, markerfacecolor=face, markersize=4.5, label=text)
    axes[0].legend(loc="lower right", bbox_to_anchor=(0.84, 0))
    figure.savefig(out_path)


@made_by(f"{TRACE} ddp", mode="ddp")
@made_by(f"{TRACE} zero1_16bit", "overlap_zero1", mode="zero1_16bit")
@made_by("a3954dc's parallel.py --modes in_graph --trace", "overlap_in_graph", mode="in_graph")
def overlap(runs, out_path, dark, mode):
    """What computes, by class, and what communicates over the time of one step of one GPU."""
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
    names: Positional[tuple[Literal[tuple(FIGURES)], ...]] = ()  # figures to draw; all if empty
    runs: str = str(RUNS)  # folder of the records
    out: str = str(ROOT / "readme.assets")  # folder of the figures


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    runs, out = Path(cfg.runs), Path(cfg.out)
    if not runs.is_dir():
        raise UserError(f"there is no folder {runs}; --runs names one with records")
    check_writable(out / "ladder.png", "out")
    left_out = 0
    for name in cfg.names or FIGURES:
        picture, program = FIGURES[name]
        try:
            for dark in (False, True):
                path = out / f"{name}{'_dark' if dark else ''}.png"
                with matplotlib.rc_context(style(dark)):
                    picture(runs, path, dark)
                print(path)
        except UserError as missing:
            print(f"{name}: left out, {missing} in {runs}; `{program}` makes it", file=sys.stderr)
            left_out += 1
    return 2 if left_out == len(cfg.names or FIGURES) else 0


if __name__ == "__main__":
    command(main)
