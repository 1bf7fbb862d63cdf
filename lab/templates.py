"""Load the HTML templates (*.html.j2), which are next to the code that renders them.

lab/tools/page.html.j2 is the base of whole pages, page.js and plotly.js are parts of their scripts.
"""

import base64
import functools
import gzip
import json
import math

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lab.cli import ROOT
from lab.data.tokenizers import printable
from lab.tools.plot_style import COLORS, MEANINGS, PAPER


@functools.cache
def load_template(name: str) -> Template:
    """A template by file name, read once. Values that are rendered into it are escaped."""
    parts = ("lab/inference", "lab/tools", "lab/notebook", "bench")
    folders = [ROOT / part for part in parts]
    environment = Environment(
        loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, auto_reload=False,
    )  # fmt: skip
    environment.globals["palette"] = {d: dict(zip(MEANINGS, COLORS[d])) | PAPER[d] for d in PAPER}
    environment.globals["plotly"] = compressed_plotly
    environment.filters |= {"bits": bits, "token_box": token_box}
    return environment.get_template(name)


# The texts about a token agree with those of lab serve (page.js, serve.html.j2).


def token_box(token: dict) -> str:
    """The text of a token's box, from its token_logprobs: its probability, and the likeliest tokens."""
    name, p = visible(token["name"]), token["p"]
    title = f"“{name}”: model {percent(p)}, {bits(p):.1f} bits of surprise"
    names = [visible(name) + " ✓" * (name == token["name"]) for _, name, _ in token["likeliest"]]
    width = max(map(len, names), default=0)
    rows = [f"{name:{width}} {percent(p):>8}" for name, (_, _, p) in zip(names, token["likeliest"])]
    return "\n".join([title, "", *rows])


def percent(p: float) -> str:
    """A probability in percent with one decimal, or "< 0.1 %"."""
    if p >= 0.9995:
        return "100 %"
    return f"{100 * p:.1f} %" if p >= 0.0005 else "< 0.1 %" if p > 0 else "0 %"


def bits(p: float) -> float:
    """The surprise of a token with probability p: -log2(p) bits, at most 40."""
    return abs(math.log2(min(max(p, 1e-12), 1.0)))


def visible(name: str) -> str:
    """A token's text with spaces and line ends as symbols, from its name in JSON (token_label)."""
    try:
        text = str(json.loads(name))
    except (ValueError, RecursionError):  # in a damaged log
        text = name
    return printable(text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥"))


@functools.cache
def compressed_plotly() -> str:
    """plotly's JavaScript, gzipped, in base 64: 2.0 MB instead of 4.8."""
    from plotly.offline import get_plotlyjs  # slow to import

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
