"""Draw the curves of training runs from their log.jsonl: loss, HellaSwag where it was measured, learning rate.

    python plot.py log/RUN                                # log/RUN/loss.png
    python plot.py log/RUN log/OTHER --out both.png --dark

style() holds the look of all the project's figures, light or dark.
"""

import bisect
import json
import math
import sys
from pathlib import Path

# acc_norm of the published models on HellaSwag's 10042 validation examples
PUBLISHED_HELLASWAG = {"GPT-2 124M": 0.2955, "GPT-2 1558M": 0.4893}
SERIES = {  # blue, orange, green, purple, red: told apart by the colour-blind too (after Okabe and Ito 2008)
    False: ("#0072b2", "#d55e00", "#009e73", "#8f4f9f", "#b3242a"),
    True: ("#56b4e9", "#f0a050", "#4cc9a0", "#cc9ad6", "#f2777a"),
}


def style(dark=False):
    """matplotlib settings of a figure: `with matplotlib.rc_context(style()): ...`. Sized to be read at 800 pixels."""
    from cycler import cycler

    paper, ink, faint = ("#0d1117", "#e6edf3", "#30363d") if dark else ("#ffffff", "#1f2328", "#d8dee4")
    return {
        "figure.facecolor": paper, "savefig.facecolor": paper, "axes.facecolor": paper, "figure.figsize": (8, 5),
        "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink,
        "axes.titlecolor": ink, "axes.prop_cycle": cycler(color=SERIES[dark]), "grid.color": faint, "axes.grid": True,
        "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.spines.right": False, "axes.spines.top": False,
        "font.size": 10, "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "legend.frameon": False, "lines.linewidth": 1.8, "figure.dpi": 150, "savefig.dpi": 150,
        "figure.constrained_layout.use": True,
    }  # fmt: skip


def read_log(run):
    """{kind: records in the order of their steps} of a run folder (or a log.jsonl).

    A resumed run goes back to its checkpoint: what the log says of later steps from before is dropped, and of two
    records for one step the last counts. A line cut off by a kill is skipped. Raises FileNotFoundError or ValueError.
    """
    path = Path(run) / "log.jsonl" if Path(run).is_dir() else Path(run)
    if not path.exists():
        meant = Path("log") / run
        hint = "name a run folder: `ls log` shows those there are"
        raise FileNotFoundError(f"no log {path}; " + (f"did you mean {meant}?" if (meant / "log.jsonl").exists() else hint))
    found, broken = {}, False  # (kind, step) -> record
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:  # the record after a cut one stands on the same line
            record = json.loads(line[max(0, line.rfind('{"kind"')) :])
            kind, step = record["kind"], int(record["step"])
        except (ValueError, KeyError, TypeError):
            broken = True
            continue
        if kind == "start":
            found = {key: r for key, r in found.items() if key[1] <= step}
        found[kind, step] = record
    log = {}
    for (kind, _), record in sorted(found.items(), key=lambda item: item[0][1]):
        log.setdefault(kind, []).append(record)
    if not {"train", "val", "hella"} & log.keys():
        if broken and not found:
            raise ValueError(f"{path} is no log of training: none of its lines is a record; name a run folder or log.jsonl")
        raise ValueError(f"{path} holds no train, val or hella record yet; there is nothing to draw")
    return log


def column(log, kind, name):
    """(steps, values) of the finite numbers called `name` in the records of a kind."""
    rows = [(r["step"], r[name]) for r in log.get(kind, []) if isinstance(r.get(name), (int, float))]
    rows = [row for row in rows if math.isfinite(row[1])]
    return [step for step, _ in rows], [value for _, value in rows]


def smooth(values):
    """Mean over a window of about a fortieth of the points, centred, and narrower at both ends so that it stays so: it
    neither lags behind as a running average does, nor bends at the ends."""
    half = len(values) // 80
    means = []
    for i in range(len(values)):
        h = min(half, i, len(values) - 1 - i)
        means.append(sum(values[i - h : i + h + 1]) / (2 * h + 1))
    return means


def logged_tokens(log):
    """{step: tokens of training until then}, in the order of the steps; {0: 0} where none were logged."""
    known = {0: 0} | dict(zip(*column(log, "start", "tokens"))) | dict(zip(*column(log, "train", "tokens")))
    return dict(sorted(known.items()))


def step_sizes(log):
    """Tokens of a step, in the order of the run: one number, and another wherever a resumed run has changed it."""
    known = list(logged_tokens(log).items())
    return list(dict.fromkeys(round((t1 - t0) / (s1 - s0)) for (s0, t0), (s1, t1) in zip(known, known[1:])))


def tokens_at(log):
    """A function from a step to the tokens of training until then, or None where none were logged. Between two records, and
    after the last, the steps are of one size."""
    known = logged_tokens(log)
    steps = list(known)

    def tokens(step):
        i = min(max(1, bisect.bisect_left(steps, step)), len(steps) - 1)
        a, b = steps[i - 1], steps[i]
        return round(known[a] + (step - a) * (known[b] - known[a]) / (b - a))

    return tokens if len(steps) > 1 else None


def short(number):
    """1.5e9 as 1.5B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def finding(logs):
    """The title: what the curves show."""
    last = {}
    for name, log in logs.items():
        kind = "val" if column(log, "val", "loss")[0] else "train"
        steps, losses = column(log, kind, "loss")
        if steps:
            last[name] = (losses[-1], steps[-1], "validation" if kind == "val" else "training")
    if not last:
        return "no loss was logged"
    if len(last) > 1:
        (first, (best, _, kind)), (second, (other, _, _)) = sorted(last.items(), key=lambda item: item[1])[:2]
        if f"{best:.2f}" == f"{other:.2f}":
            return f"{first} and {second} end at the same {kind} loss, {best:.2f}"
        return f"{first} ends at {kind} loss {best:.2f}, {other - best:.2f} nats under {second}"
    (loss, step, kind) = next(iter(last.values()))
    text = f"{kind} loss {loss:.2f} after {step:,} steps"
    unigram = column(next(iter(logs.values())), "start", "unigram")[1]
    if unigram:
        side = "under" if loss < unigram[-1] else "above"
        text += f": {abs(unigram[-1] - loss):.2f} nats {side} the unigram baseline"
    return text


def reference(ax, y, text, left=False):
    """A dashed line over the whole width, with its label on it at the right or left, where no curve is expected."""
    ax.axhline(y, color="0.55", linewidth=1, linestyle=(0, (5, 3)), zorder=1)
    ax.annotate(text, (0.01 if left else 1, y), xycoords=ax.get_yaxis_transform(), xytext=(0, 3), color="0.5",
                textcoords="offset points", ha="left" if left else "right", va="bottom", fontsize=9)  # fmt: skip


def draw_loss(ax, logs, dark, x):
    """Training loss thin, with its smoothed line where there are points enough; validation loss with dots."""
    alone = len(logs) == 1
    for i, (name, log) in enumerate(logs.items()):
        color = SERIES[dark][i % len(SERIES[dark])]
        val_color = SERIES[dark][1] if alone else color
        steps, losses = column(log, "train", "loss")
        many = len(losses) >= 80
        label = "training" if alone else None if column(log, "val", "loss")[0] else name
        if many:
            ax.plot(x(log, steps), losses, color=color, linewidth=0.7, alpha=0.35)
            ax.plot(x(log, steps), smooth(losses), color=color, linewidth=1.3, label=label)
        elif steps:
            ax.plot(x(log, steps), losses, color=color, linewidth=1.2, alpha=0.7, label=label,
                    marker="." if len(steps) == 1 else None)  # fmt: skip
        steps, losses = column(log, "val", "loss")
        if steps:
            dots = "o" if len(steps) <= 60 else None
            ax.plot(x(log, steps), losses, color=val_color, marker=dots, markersize=4, linewidth=1.6,
                    label="validation" if alone else name)  # fmt: skip
            if alone:
                ax.annotate(f"{losses[-1]:.2f}", (x(log, steps)[-1], losses[-1]), xytext=(0, 7), color=val_color,
                            textcoords="offset points", ha="right", fontweight="bold")  # fmt: skip
    for name, text in (("log_v", "uniform guess, log V = {:.2f}"), ("unigram", "unigram entropy, {:.2f}")):
        levels = {text.format(v): v for log in logs.values() for v in column(log, "start", name)[1]}
        for label, level in levels.items():
            reference(ax, level, label)
    ax.set_ylabel("loss (nats per token)")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.05 * (high - low))  # room for the label of the highest line
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right", bbox_to_anchor=(1, 0.86), fontsize=9)


def draw_hellaswag(ax, logs, dark, x):
    """acc_norm with 95% error bars, between chance and the published models."""
    best = 0
    for i, log in enumerate(logs.values()):
        steps, values = column(log, "hella", "acc_norm")
        errors = {r["step"]: 1.96 * (r.get("acc_norm_stderr") or 0) for r in log.get("hella", [])}
        if steps:
            color = SERIES[dark][i % len(SERIES[dark])]
            ax.errorbar(x(log, steps), values, yerr=[errors[s] for s in steps], color=color, marker="o", markersize=4,
                        capsize=2, elinewidth=1, linewidth=1.6)  # fmt: skip
            best = max(best, *values)
    reference(ax, 0.25, "chance 0.25")
    for name, value in PUBLISHED_HELLASWAG.items():
        if value < 0.3 or best > 0.36:  # the large one would only press a small model's curve flat
            reference(ax, value, f"{name} {value:.4f}", left=True)
    ax.set_ylabel("HellaSwag\nacc_norm")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))


def draw_lr(ax, logs, dark, x):
    for i, log in enumerate(logs.values()):
        steps, rates = column(log, "train", "lr")
        ax.plot(x(log, steps), rates, color=SERIES[dark][i % len(SERIES[dark])], linewidth=1.3)
    ax.set_ylabel("learning\nrate")
    ax.set_ylim(bottom=0)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useMathText=True)


def caption(log):
    """What ran where, and how fast: one line."""
    start = (log.get("start") or [{}])[-1]
    parts = [f"{short(start['num_params'])} parameters"] if start.get("num_params") else []
    several = f"{start['world_size']} x " if start.get("world_size", 1) > 1 else ""
    parts += [f"{several}{start['device']}"] if start.get("device") else []
    parts += [start["precision"]] if start.get("precision") else []
    speeds = sorted(column(log, "train", "tok_per_s")[1])
    return ", ".join(parts + ([f"median {short(speeds[len(speeds) // 2])} tokens/s"] if speeds else []))


def draw(runs, out_path, dark=False):
    """Write the figure of one or several runs to out_path (.png, .svg or .pdf). Raises where loss_curve() shrugs."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: it would choose a backend for the whole process
    from matplotlib.ticker import FuncFormatter

    logs = {}
    for run in map(Path, runs):
        name = run.resolve().name if run.is_dir() else run.resolve().parent.name
        logs[name if name not in logs else str(run)] = read_log(run)
    sizes = {size for log in logs.values() for size in step_sizes(log)}
    by_tokens = len(sizes) > 1 and all(map(tokens_at, logs.values()))  # steps of different size do not compare

    def x(log, steps):
        return list(map(tokens_at(log), steps)) if by_tokens else steps

    panels = [draw_loss]
    panels += [draw_hellaswag] if any(column(log, "hella", "acc_norm")[0] for log in logs.values()) else []
    panels += [draw_lr] if any(len(column(log, "train", "lr")[0]) > 1 for log in logs.values()) else []
    heights = {draw_loss: 3.6, draw_hellaswag: 1.7, draw_lr: 0.8}
    with matplotlib.rc_context(style(dark)):
        figure = Figure(figsize=(8, 1.2 + sum(heights[p] for p in panels)))
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=[heights[p] for p in panels])
        axes = grid[:, 0]
        for panel, ax in zip(panels, axes, strict=True):
            panel(ax, logs, dark, x)
        figure.suptitle(finding(logs), x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        axes[-1].set_xlabel("tokens" if by_tokens else "step")
        tokens = FuncFormatter(lambda value, _: short(value))
        axes[-1].xaxis.set_major_formatter(tokens if by_tokens else FuncFormatter(lambda value, _: f"{value:,g}"))
        if len(sizes) == 1:
            size = sizes.pop()
            top = axes[0].secondary_xaxis("top", functions=(lambda s: s * size, lambda t: t / size))
            top.set_xlabel("tokens")
            top.xaxis.set_major_formatter(tokens)
        if len(logs) == 1:
            axes[-1].annotate(caption(next(iter(logs.values()))), (1, 0), xytext=(0, -32), color="0.5", fontsize=8.5,
                              xycoords="axes fraction", textcoords="offset points", ha="right", va="top")  # fmt: skip
        out_path = Path(out_path)
        out_path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_path)


def loss_curve(run_dirs, out_path, dark=False):
    """The figure of one or several runs at out_path, with dark=True a dark one beside it as <name>_dark. Returns
    out_path, or None where it could not be drawn: a picture is not worth a run, so this says why and never raises."""
    try:
        for is_dark, path in outputs(out_path, dark):
            draw(run_dirs, path, is_dark)
        return Path(out_path)
    except Exception as error:  # also matplotlib's own: not installed, no fonts, a full disk
        print(f"no loss curve: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def outputs(out_path, dark):
    out_path = Path(out_path)
    return [(False, out_path)] + ([(True, out_path.with_stem(out_path.stem + "_dark"))] if dark else [])


def main():
    import tyro

    def settings(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None, dark: bool = False):
        """Draw the curves of one or several runs.

        Args:
            runs: Run folders, such as log/laptop_20260101-120000.
            out: Picture to write (.png, .svg, .pdf); loss.png in the run's folder if not given, and of several runs
                loss_with_<the others>.png in the first one's.
            dark: Also write a dark variant, <name>_dark.
        """
        return runs, out, dark

    runs, out, dark = tyro.cli(settings, prog="plot.py", config=(tyro.conf.FlagCreatePairsOff,), use_underscores=True)
    try:
        if not runs:
            raise ValueError("name at least one run folder; `ls log` shows those there are")
        if len({run.resolve() for run in runs}) < len(runs):
            raise ValueError(f"{', '.join(map(str, runs))}: a run was named twice; name different ones")
        if out is None:
            name = "_with_".join(["loss", *(run.resolve().stem for run in runs[1:])])
            out = (runs[0] if runs[0].is_dir() else runs[0].parent) / f"{name}.png"
        from matplotlib.figure import Figure

        if out.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
            raise ValueError(f"out={out} must end in .png, .svg or .pdf")
        for is_dark, path in outputs(out, dark):
            try:
                draw(runs, path, is_dark)
            except OSError as error:
                if error.errno is None:  # a sentence already: there is no log
                    raise
                raise OSError(f"{path} cannot be written ({error.strerror}); name another place with --out") from error
            print(path)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        sys.exit(2)

