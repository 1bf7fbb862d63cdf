"""The style of all figures: a light and a dark palette, in which each color has one meaning.

Used by lab plot, lab report, lab serve, bench and the notebook. Color-blind readers can distinguish all
colors (computed in tests/test_plot.py). In a figure of several runs, each run has one color, in the
order of SERIES.
"""

from typing import Any

COLORS = {  # {dark: the colors, in the order of MEANINGS}
    False: "#006cae #de5e00 #1aa26b #cc79a7 #8c1c28 #dcb80c #757575 #dddddd".split(),
    True: "#4899d9 #ed9e4e #51d6a3 #fbcbe4 #d7505a #fff479 #959595 #4d4d4d".split(),
}
SERIES = {dark: colors[:5] for dark, colors in COLORS.items()}  # with enough contrast for lines
MEANINGS = {
    "blue": ("speed", "matmul", "forward"),
    "orange": ("accuracy", "attention", "backward"),
    "green": ("loss",),
    "pink": ("elementwise",),
    "red": ("optimizer", "learning rate", "gradient norm"),
    "gold": ("communication",),
    "grey": ("copy", "memory", "data"),
    "pale": ("idle",),
}
PAPER = {  # {dark: colors of the page around the curves}
    False: dict(paper="#ffffff", card="#f6f8fa", ink="#1f2328", soft="#59636e", faint="#d8dee4"),
    True: dict(paper="#0d1117", card="#161b22", ink="#e6edf3", soft="#9198a1", faint="#30363d"),
}


def color_index(what: str) -> int:
    """The index in COLORS of a meaning ("loss", "matmul") or of a color name ("green")."""
    return next(
        i for i, (name, meanings) in enumerate(MEANINGS.items()) if what in (name, *meanings)
    )


def color_of(what: str, dark: bool = False) -> str:
    """The color of a meaning ("loss", "matmul") or of a color name ("green")."""
    return COLORS[dark][color_index(what)]


def style(dark: bool = False) -> dict[Any, Any]:
    """matplotlib's settings for a figure: `with matplotlib.rc_context(style()): ...`.

    Figures are 8 inches wide. Shown 720 pixels wide, a 9-point text is 11 pixels high.
    """
    from cycler import cycler  # part of matplotlib, which not every tool needs

    paper, ink = PAPER[dark]["paper"], PAPER[dark]["ink"]
    papered = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor")
    return dict.fromkeys(papered, paper) | {
        **dict.fromkeys((*inked, "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 11.5),
        **dict.fromkeys(("axes.titleweight", "figure.titleweight"), "bold"),
        "figure.figsize": (8, 5),
        "figure.dpi": 150,
        "savefig.dpi": 150,
        "figure.constrained_layout.use": True,
        "axes.prop_cycle": cycler(color=SERIES[dark]),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "grid.color": PAPER[dark]["faint"],
        "grid.linewidth": 0.8,
        # 0.001 instead of 10^-3, whose exponent is too small to read
        "axes.formatter.min_exponent": 99,
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }


def reference(ax: Any, y: float, text: str, left: bool = False) -> None:
    """Draw a dashed line across the axes `ax` at height y, with a label above its right or left end."""
    ax.axhline(y, color="0.55", linewidth=1, linestyle=(0, (5, 3)), zorder=1)
    x, ha = (0.01, "left") if left else (1, "right")
    look = dict(color="0.5", fontsize=9, ha=ha, va="bottom")
    place = dict(xycoords=ax.get_yaxis_transform(), xytext=(0, 3), textcoords="offset points")
    ax.annotate(text, (x, y), **place, **look)
