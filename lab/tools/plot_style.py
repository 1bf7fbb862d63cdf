"""The look of all figures: one palette, light and dark, in which a colour has one meaning.

All pairs of colours stay apart to people who see no red, no green or no blue: tests/test_plot.py
computes it. Of several runs, colours tell the runs apart, in the order of SERIES.
"""

COLORS = {
    False: "#006cae #de5e00 #1aa26b #cc79a7 #8c1c28 #dcb80c #757575 #dddddd".split(),
    True: "#4899d9 #ed9e4e #51d6a3 #fbcbe4 #d7505a #fff479 #959595 #4d4d4d".split(),
}
SERIES = {dark: colors[:5] for dark, colors in COLORS.items()}  # strong enough for lines
MEANS = {
    "blue": ("speed", "matmul", "forward"),
    "orange": ("accuracy", "attention", "backward"),
    "green": ("loss",),
    "pink": ("elementwise",),
    "red": ("optimizer", "learning rate", "gradient norm"),
    "gold": ("communication",),
    "grey": ("copy", "memory", "data"),
    "pale": ("idle",),
}
PAPER = {  # what is around the curves
    False: dict(paper="#ffffff", card="#f6f8fa", ink="#1f2328", soft="#59636e", faint="#d8dee4"),
    True: dict(paper="#0d1117", card="#161b22", ink="#e6edf3", soft="#9198a1", faint="#30363d"),
}


def place_of(what):
    """The place in COLORS of a meaning ("loss", "matmul"), or of a colour's name ("green")."""
    return next(i for i, (name, meanings) in enumerate(MEANS.items()) if what in (name, *meanings))


def color_of(what, dark=False):
    return COLORS[dark][place_of(what)]


def style(dark=False):
    """matplotlib's settings of a figure: `with matplotlib.rc_context(style()): ...`.

    The figures are 8 inches wide: where one is shown at 720 pixels, text of 9 points has 11.
    """
    from cycler import cycler

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
        # 0.001: an exponent over a 10 is too small. (1e-06 wants set_major_formatter("{x:g}"))
        "axes.formatter.min_exponent": 99,
        "font.size": 10,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }


def reference(ax, y, text, left=False):
    """A dashed line over the whole width, with its label on it at the right or left."""
    ax.axhline(y, color="0.55", linewidth=1, linestyle=(0, (5, 3)), zorder=1)
    x, ha = (0.01, "left") if left else (1, "right")
    look = dict(color="0.5", fontsize=9, ha=ha, va="bottom")
    place = dict(xycoords=ax.get_yaxis_transform(), xytext=(0, 3), textcoords="offset points")
    ax.annotate(text, (x, y), **place, **look)
