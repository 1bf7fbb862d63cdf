"""What the figures share: finding their records, and parts of drawings, as lab.tools.plot_style looks."""

from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from records import grouped, read_records
from rungs import VARIANTS, key_of

from lab.cli import UserError
from lab.tools.run_logs import short

SMALL = 9  # points, which are 11 pixels where a figure is shown at 720: no text is smaller
DASHED = dict(color="0.5", linewidth=1, linestyle=(0, (5, 3)))
shorten = FuncFormatter(lambda value, _: short(value))

FIGURES = {}  # name: (how it is drawn, the command that makes its records)


def made_by(program, name="", **how):
    """Enter the function below as what draws a figure from records that this command makes. The
    figure has the function's name, or another if its arguments `how` are given."""

    def enter(picture):
        FIGURES[name or picture.__name__] = partial(picture, **how), program
        return picture

    return enter


# ---------------------------------------------------------------------------------------- records


def records(runs, name, *fields, **where):
    """The records of runs/name.jsonl that have all the fields and the values in `where`. Raises
    UserError if there is none."""
    found = [
        r
        for r in read_records(runs / f"{name}.jsonl")
        if all(r.get(field) is not None for field in fields) and where.items() <= r.items()
    ]
    if not found:
        wanted = ", ".join([*(f"{k} {v}" for k, v in where.items()), *fields])
        raise UserError(f"{name}.jsonl has no record with {wanted}")
    return found


def measured(runs, group, *fields):
    """{shape: {variant: its records}} of one group of the ladder, gpt2 first, variants in the
    ladder's order. Of measurements made twice the later one counts; of two GPUs or versions of
    torch the one that has more variants. Raises UserError."""
    rows = records(runs, "ladder", "shape", "variant", *fields, group=group)
    order, last = list(VARIANTS[group]), {key_of(row): row for row in rows}
    shapes, state = {}, ("gpu", "torch", "tokens_per_step", "max_steps")
    for shape, rows in grouped(last.values(), "shape").items():
        best = max(grouped(rows, *state).values(), key=len)
        names = [*order, *(row["variant"] for row in best)]
        shapes[shape] = grouped(sorted(best, key=lambda r: names.index(r["variant"])), "variant")
    return dict(sorted(shapes.items(), key=lambda item: item[0] != "gpt2"))


def newest(runs, group, *fields):
    """(first shape, {variant: its newest record}) of a group of the ladder."""
    shape, found = next(iter(measured(runs, group, *fields).items()))
    return shape, {variant: rows[-1] for variant, rows in found.items()}


def where_and_when(rows):
    """GPU, torch and date of measurements: the line under a figure."""
    rows = [dict(row, gpu=row.get("gpu") or row.get("device")) for row in rows]
    parts = []
    for field in ("gpu", "torch", "date"):
        values = ", ".join(dict.fromkeys(str(row[field]) for row in rows if row.get(field)))
        parts.append(f"torch {values}" if field == "torch" and values else values)
    return ", ".join(filter(None, parts))


# ---------------------------------------------------------------------------------- parts of drawings


def words(variant):
    return variant.replace("_", " ")


def blank(height, title, note="", panels="A", **ratios):
    """A figure 8 inches wide and its axes, laid out as in Figure.subplot_mosaic: "AB" are side by
    side. The title states the finding, the note below where it was measured."""
    figure = Figure(figsize=(8, height))
    figure.suptitle(title, x=0.01, ha="left")
    if note:
        figure.supxlabel(note, x=0.99, ha="right", fontsize=SMALL, color="0.5")
    return figure, *figure.subplot_mosaic(panels, **ratios).values()


def write(ax, text, x, y, dx=4, dy=0, **how):
    """A text so many points beside the place (x, y) of the data."""
    how = dict(va="center", fontsize=SMALL) | how
    ax.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", **how)


def rows_of(ax, names, room=0.5):
    """Make the y axis one of rows with these names, the first on top."""
    ax.set_yticks(range(len(names)), list(map(words, names)))
    ax.set_ylim(len(names) - 0.5, -room)
    ax.grid(axis="y", visible=False)


def bars(ax, parts, looks, texts, room=1.1, height=1, **how):
    """A bar for each of {name: {part: value}}, its parts in turn, each drawn with looks[part], and
    a text at its end. The longest bar leaves room for its text."""
    ends = [0.0] * len(parts)
    for part, look in looks.items():
        values = [row.get(part, 0) for row in parts.values()]
        if any(values):
            ax.barh(range(len(parts)), values, left=ends, height=height, **look)
        ends = [end + value for end, value in zip(ends, values)]
    for y, (end, text) in enumerate(zip(ends, texts)):
        write(ax, text, end, y, **how)
    rows_of(ax, list(parts))
    ax.set_xlim(0, room * max(ends))


def cells_of(ax, columns, rows):
    """Make the axes a table of such columns and rows."""
    rows_of(ax, rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.grid(False)


def cell(ax, x, y, text, fill, strength, **how):
    ax.barh(y, 1, left=x - 0.5, height=1, color=fill, alpha=strength)
    write(ax, text, x, y, dx=0, ha="center", **how)
