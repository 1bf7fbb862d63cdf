"""Training recipes as a race: a page with a slider, and an animated figure for README.

    python bench/race.py                    # writes race.html, and readme.assets/race.svg and race_dark.svg

Both show validation loss against seconds of training, from the records in readme.assets/runs/. The page
(race.html.j2) also has other races, tokens as the x axis, and the last sample before the chosen second.
The figure is an SVG by matplotlib with CSS animations, which also run in an <img>. Where animations are
not supported or switched off (prefers-reduced-motion), it shows the end of the race.
"""

import io
import math
import re
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from drawing import blank, records, training_seconds, where_and_when, write
from records import ROOT, RUNS

from lab.cli import parse_args, run_main
from lab.data.tokenizers import printable
from lab.files import atomic_write, write_errors
from lab.templates import load_template
from lab.tools.plot_style import color_of, style
from lab.tools.read_log import column, read_log

RECIPES = {  # {recipe of bench/speedrun.py: its name and color}
    "gpt2": ("GPT-2's recipe", "orange"),
    "muon": ("train_gpt2.py, Muon", "pink"),
    "readable": ("readable recipe", "green"),
    "speedrun": ("speedrun.py", "blue"),
}
FILM, ROUNDS = 14, 3  # seconds of one round of the animation, and rounds before it stops
TOP = 7  # largest loss in the figure
HOLD = 0.3  # fraction of a round, at its end, that shows the final state


@dataclass
class Runner:
    """A training run: validation losses, with the seconds and tokens of training before each.

    samples: (second, text), oldest first.
    """

    name: str
    color: str
    seconds: list[float]
    tokens: list[int]
    losses: list[float]
    samples: list[tuple[float, str]] = field(default_factory=list)


@dataclass
class Race:
    title: str
    note: str
    runners: list[Runner]
    unit: str = "seconds"  # of Runner.seconds


# ------------------------------------------------------------------------------------------ records


def one_minute(runs):
    """Four recipes on one H200, for about a minute: the newest run of each, or its first seed."""
    rows, runners = [], []
    for recipe, looks in RECIPES.items():
        row = max(records(runs, "race_h200", "curve", recipe=recipe), key=lambda r: r["date"])
        seconds, steps, losses = zip(*row["curve"])
        # the first steps may have half as many tokens
        full, half = 65536, 65536 // 2
        halved = (full * row["run_steps"] - row["tokens"]) // half
        tokens = [full * step - half * min(step, halved) for step in steps]
        assert tokens[-1] == row["tokens"]
        rows.append(row)
        runners.append(Runner(*looks, list(seconds), tokens, list(losses)))
    title = f"A minute on one H200: {runners[-1].losses[-1]:.2f} nats per token with speedrun.py"
    note = f"124M, speedrun.py 201M; books and textbooks; {where_and_when(rows)}"
    return Race(title, note, runners)


def from_log(runs, name, title, shade, gpus=1):
    """A Runner from a run's log. Its time does not include evaluation and compilation; it is multiplied by
    `gpus`."""
    records(runs, name, "kind")
    log = read_log(runs / f"{name}.jsonl")
    clock = lambda step: float(training_seconds(log, step)) * gpus  # noqa: E731
    trained, tokens = column(log, "train", "tokens")
    at, losses = column(log, "val", "loss")
    read = np.interp(at, [0, *trained], [0, *tokens]).round().astype(int).tolist()
    samples = [(clock(r["step"]), printable(r["texts"][0])) for r in log.get("sample", [])]
    return Runner(title, shade, [clock(step) for step in at], read, list(losses), samples)


def six_minutes(runs):
    slow = from_log(runs, "gpt2_124m", "GPT-2's recipe", "orange")
    fast = from_log(runs, "speedrun_124m", "speedrun.py", "blue")
    title = (
        f"Six minutes on one H200: {fast.losses[-1]:.2f} and {slow.losses[-1]:.2f} nats per token"
    )
    note = "124M, speedrun.py 201M; two epochs of 111M tokens of books and textbooks; 2026-11-23"
    return Race(title, note, [slow, fast])


def four_passes(runs):
    names = {
        "both_4_passes_gpt2": ("GPT-2's recipe", "orange"),
        "both_4_passes_readable": ("readable recipe", "green"),
        "both_4_passes": ("speedrun.py", "blue"),
        "both_4_passes_no_table": ("speedrun.py, no value table", "red"),
        "small_data_ema_1": ("small-data, seven epochs", "pink"),
    }
    runners = []
    for file, looks in names.items():
        gpus = records(runs, file, "world_size")[0]["world_size"]
        runners.append(from_log(runs, file, *looks, gpus))
    low, high = runners[3].losses[-1], runners[0].losses[-1]
    title = f"Four epochs: {low:.2f} nats per token without a value table, {high:.2f} with GPT-2's recipe"
    note = (
        "124M, 111M tokens of books and textbooks, on one to four H100s or H200s, whose speeds differ: "
        "compare by tokens; 2026-11-25 to 27"
    )
    return Race(title, note, runners, unit="GPU-seconds")


# --------------------------------------------------------------------------------------------- page


def page(races):
    """The HTML of the page."""
    return load_template("race.html.j2").render(
        races=[asdict(race) for race in races], nonce=secrets.token_urlsafe(16)
    )


# ------------------------------------------------------------------------------------------- figure


def keyframes(name, frames):
    """A CSS animation. frames: {fraction of the race, 0 to 1: declarations}; the last ones are held."""
    rows = "".join(f"{100 * (1 - HOLD) * at:.2f}% {{{css}}} " for at, css in frames.items())
    return f"@keyframes {name} {{ {rows}100% {{{list(frames.values())[-1]}}} }}\n"


def figure(race, dark):
    """The SVG of a race: lines grow, and a dot with the runner's name moves along at the end of each."""
    settings = style(dark) | {"svg.hashsalt": "race", "figure.dpi": 72}
    with matplotlib.rc_context(settings):
        drawn, ax = blank(4.8, race.title, race.note)
        drawn.set_dpi(72)  # of SVG: its units are points
        end = max(runner.seconds[-1] for runner in race.runners)
        ax.set(
            xlabel="seconds of training, compiling left out", xlim=(0, 1.36 * end), ylim=(3.3, TOP)
        )
        ax.set(ylabel="validation loss (nats per token)", xticks=range(0, math.ceil(end), 10))
        lines = []
        for i, runner in enumerate(race.runners):
            shade, losses = color_of(runner.color, dark), runner.losses
            enters = np.interp(-TOP, -np.array(losses), runner.seconds)  # needs increasing values
            seen = [(s, loss) for s, loss in zip(runner.seconds, losses) if loss < TOP]
            x, y = zip((enters, TOP), *seen)
            ax.plot(x, y, color=shade, gid=f"line{i}", solid_capstyle="butt")
            ax.plot(x[-1], y[-1], "o", color=shade, markersize=6, gid=f"dot{i}")
            dy = 4 if runner.color == "green" else -4 if runner.color == "blue" else 0
            write(ax, runner.name, x[-1], y[-1], dx=8, dy=dy, color=shade, gid=f"name{i}")
            right = dict(ha="right", color=shade, gid=f"end{i}")
            write(ax, f"{losses[-1]:.2f}", end * 1.36, y[-1], dx=-6, dy=dy, **right)
            lines.append((x, y))
        drawn.draw_without_rendering()  # computes the layout
        # at first the names are in one place, on top of each other
        css = keyframes("apart", {0: "opacity: 0", 0.03: "opacity: 0", 0.04: "opacity: 1"})
        css += "".join(runner_css(ax, i, x, y, end) for i, (x, y) in enumerate(lines))
        out = io.BytesIO()
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    css += "@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }\n"
    svg = re.sub(r"(?s)<metadata>.*?</metadata>\s*", "", out.getvalue().decode())
    return svg.replace("<defs>", f"<defs>\n<style>\n{css}</style>", 1)


def runner_css(ax, i, x, y, end):
    """The animations of a runner: the drawn part of its line, and the position of its dot and name."""
    # position of the dot in each frame, in points; SVG's y axis points down
    frames = np.unique([*np.linspace(0, 1, 29), *(np.array(x) / end)])
    now = np.minimum(frames * end, x[-1])
    points = ax.transData.transform(np.column_stack([now, np.interp(now, x, y)])) * [1, -1]
    length = np.append(0, np.cumsum(np.hypot(*np.diff(points, axis=0).T)))
    total = length[-1] + 1
    css = keyframes(
        f"draw{i}", {f: f"stroke-dashoffset: {total - done:.1f}" for f, done in zip(frames, length)}
    )
    moves = points - points[-1]
    css += keyframes(
        f"run{i}",
        {f: f"transform: translate({dx:.1f}px, {dy:.1f}px)" for f, (dx, dy) in zip(frames, moves)},
    )
    done = x[-1] / end
    css += keyframes(f"show{i}", {0: "opacity: 0", done - 1e-3: "opacity: 0", done: "opacity: 1"})
    play = f"{FILM}s linear {ROUNDS}"
    dashes = f"{total:.1f} {total + 99:.1f}"  # the gap is longer, so that no second dash shows
    css += f"#line{i} path {{ stroke-dasharray: {dashes}; animation: draw{i} {play}; }}\n"
    css += f"#dot{i} {{ animation: run{i} {play}; }}\n"
    css += f"#name{i} {{ animation: run{i} {play}, apart {play}; }}\n"
    return css + f"#end{i} {{ animation: show{i} {play}; }}\n"


# ------------------------------------------------------------------------------------- command line


@dataclass
class Config:
    """Draw the race of training recipes: a page, and an animated figure."""

    page: Path = Path("race.html")  # the page to write
    runs: Path = RUNS  # folder with the records
    out: Path = ROOT / "readme.assets"  # folder for race.svg and race_dark.svg


def main(argv):
    cfg = parse_args(Config, argv)
    races = [one_minute(cfg.runs), six_minutes(cfg.runs), four_passes(cfg.runs)]
    files = {cfg.page: page(races)}
    for dark in (False, True):
        files[cfg.out / f"race{'_dark' * dark}.svg"] = figure(races[0], dark)
    for path, text in files.items():
        with write_errors(path):
            atomic_write(path, text.encode())
        print(f"wrote {path}, {len(text.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    run_main(main)
