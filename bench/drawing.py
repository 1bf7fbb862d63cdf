"""Shared by the figures of bench/: selecting records, and drawing in the style of lab.tools.plot_style."""

from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from records import grouped, read_records
from rungs import VARIANTS, key_of

from lab.cli import UserError
from lab.tools.read_log import column, short

SMALL = 9  # smallest font, in points: 11 pixels in a figure shown 720 pixels wide
DASHED = dict(color="0.5", linewidth=1, linestyle=(0, (5, 3)))
shorten = FuncFormatter(lambda value, _: short(value))

FIGURES = {}  # name: (drawing function, command that creates its records)


def made_by(program, name="", **options):
    """Decorator: register a drawing function in FIGURES, under its own name or `name`.

    program: the command that creates its records. options: arguments for the function.
    """

    def register(function):
        FIGURES[name or function.__name__] = partial(function, **options), program
        return function

    return register


# ---------------------------------------------------------------------------------------- records


def records(runs, name, *fields, **where):
    """The records of runs/name.jsonl that have all these fields and the values in `where`. Raises
    UserError if there are none."""
    found = [
        r
        for r in read_records(runs / f"{name}.jsonl")
        if all(r.get(field) is not None for field in fields) and where.items() <= r.items()
    ]
    if not found:
        expected = ", ".join([*(f"{k} {v}" for k, v in where.items()), *fields])
        raise UserError(f"{name}.jsonl has no record with {expected}")
    return found


def training_seconds(log, at):
    """Seconds of training until each of the steps `at`, without evaluation and without the first update,
    which compiles and has no dt_ms."""
    steps, times = column(log, "train", "dt_ms")
    seconds = np.cumsum(np.diff([0, *steps]) * times) / 1000
    return np.interp(at, [0, *steps], [0, *seconds])


def measured(runs, group, *fields):
    """{shape: {variant: [records]}} of a group of the ladder: gpt2 first, variants in the ladder's order.
    Later records replace earlier ones of the same measurement; of several GPUs or torch versions, the one
    with the most variants is used. Raises UserError if there are no records."""
    rows = records(runs, "ladder", "shape", "variant", *fields, group=group)
    order, last = list(VARIANTS[group]), {key_of(row): row for row in rows}
    shapes, state = {}, ("gpu", "torch", "tokens_per_step", "max_steps")
    for shape, rows in grouped(last.values(), "shape").items():
        best = max(grouped(rows, *state).values(), key=len)
        names = [*order, *(row["variant"] for row in best)]
        shapes[shape] = grouped(sorted(best, key=lambda r: names.index(r["variant"])), "variant")
    return dict(sorted(shapes.items(), key=lambda item: item[0] != "gpt2"))


def newest(runs, group, *fields):
    """(first shape, {variant: newest record}) of a group of the ladder."""
    shape, found = next(iter(measured(runs, group, *fields).items()))
    return shape, {variant: rows[-1] for variant, rows in found.items()}


def where_and_when(rows):
    """GPUs, torch versions and dates of records, as the note below a figure."""
    rows = [dict(row, gpu=row.get("gpu") or row.get("device")) for row in rows]
    parts = []
    for field in ("gpu", "torch", "date"):
        values = ", ".join(sorted({str(row[field]) for row in rows if row.get(field)}))
        parts.append(f"torch {values}" if field == "torch" and values else values)
    return ", ".join(filter(None, parts))


# ---------------------------------------------------------------------------------- parts of drawings


def words(variant):
    return variant.replace("_", " ")


def blank(height, title, note="", panels="A", **ratios):
    """(a figure 8 inches wide, *its axes). panels: the layout for Figure.subplot_mosaic; "AB" is side by
    side. title: the finding. note: where and when it was measured."""
    figure = Figure(figsize=(8, height))
    figure.suptitle(title, x=0.01, ha="left")
    if note:
        figure.supxlabel(note, x=0.99, ha="right", fontsize=SMALL, color="0.5")
    return figure, *figure.subplot_mosaic(panels, **ratios).values()


def write(ax, text, x, y, dx=4, dy=0, **style):
    """Write text at (x, y) in data coordinates, offset by (dx, dy) points."""
    style = dict(va="center", fontsize=SMALL) | style
    ax.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", **style)


def rows_of(ax, names):
    """Label the y axis with these row names, the first at the top."""
    ax.set_yticks(range(len(names)), list(map(words, names)))
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def bars(ax, parts, looks, texts, room=1.1, height=1, **style):
    """Draw a stacked bar for each of {name: {part: value}}, with style looks[part] and a text at its end.
    room: x limit as a multiple of the longest bar, so that the texts fit."""
    ends = [0.0] * len(parts)
    for part, look in looks.items():
        values = [row.get(part, 0) for row in parts.values()]
        if any(values):
            ax.barh(range(len(parts)), values, left=ends, height=height, **look)
        ends = [end + value for end, value in zip(ends, values)]
    for y, (end, text) in enumerate(zip(ends, texts)):
        write(ax, text, end, y, **style)
    rows_of(ax, list(parts))
    ax.set_xlim(0, room * max(ends))


def cells_of(ax, columns, rows):
    """Turn the axes into a table with these column and row names."""
    rows_of(ax, rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.grid(False)


def cell(ax, x, y, text, fill, strength, **style):
    ax.barh(y, 1, left=x - 0.5, height=1, color=fill, alpha=strength)
    write(ax, text, x, y, dx=0, ha="center", **style)
