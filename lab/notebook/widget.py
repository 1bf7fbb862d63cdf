"""Shared by the notebook's interactive views: Widget, visible characters, the style of figures."""

import hashlib
import json
import warnings
from typing import Any

from lab.templates import load_template
from lab.tools.plot_style import COLORS, PAPER, style

# newline, space and other characters that are hard to see; direction marks would reorder the line
SYMBOLS = {i: chr(0x2400 + i) for i in range(32)} | {127: "␡", 32: "␣", 160: "⍽", 10: "↵", 9: "⇥"}
UNSAFE = (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SYMBOLS |= dict.fromkeys(UNSAFE, "\ufffd")


def visible(token: str) -> str:
    """A token as a label: space is ␣, newline is ↵, other control characters have their symbols."""
    return token.encode("utf-8", "replace").decode().translate(SYMBOLS) or "∅"


def readable(token: str) -> str:
    """A token as part of a running text: spaces stay, and ↵ is followed by a new line."""
    symbols = {**SYMBOLS, 32: " ", 9: "\t", 10: "↵\n"}
    return token.encode("utf-8", "replace").decode().translate(symbols)


class Widget:
    """An interactive view: HTML in a browser, `text` in a terminal or where scripts are removed.

    template: a file that extends widget.html.j2. data: passed to its script as JSON. The page is one
    <div> without an id; its script builds the view in a shadow root, so that its styles and
    names do not clash with those of the page or of other widgets. It loads nothing from the network.
    """

    def __init__(self, template: str, text: str, data: dict[str, Any], **values: Any):
        self.template, self.text, self.data, self.values = template, text, data, values

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # "<" is escaped so that no token can end the script; ASCII, because JSON allows line
        # separators that older scripts do not
        data = json.dumps(self.data, separators=(",", ":")).replace("<", "\\u003c")
        # from the contents, so that a notebook that is run again does not change
        key = hashlib.sha256(f"{self.template}{data}{self.values}".encode()).hexdigest()[:12]
        palette = {dark: {**PAPER[dark], **_named(dark)} for dark in (False, True)}
        return load_template(self.template).render(
            key=key, text=self.text, data=data, palette=palette, **self.values
        )


def _named(dark: bool) -> dict[str, str]:
    return dict(zip("blue orange green pink red gold".split(), COLORS[dark]))


def plot_setup() -> None:
    """Set matplotlib's defaults to the style of the project's figures, as wide as a notebook page, and
    hide a warning that tqdm gives without ipywidgets.

    The figure has its own background, so that a light one is also readable on a dark page.
    """
    import matplotlib  # slow, and only figures need it

    size = {"figure.figsize": (9.5, 3.6), "figure.dpi": 110, "savefig.dpi": "figure"}
    settings: dict[Any, Any] = style() | size
    matplotlib.rcParams.update(settings)
    warnings.filterwarnings("ignore", message="IProgress")
