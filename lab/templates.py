"""Load the HTML templates (*.html.j2), which are next to the code that renders them.

lab/tools/page.html.j2 is the base of whole pages, page.js and plotly.js are parts of their scripts.
"""

import base64
import functools
import gzip

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lab.cli import ROOT
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
    return environment.get_template(name)


@functools.cache
def compressed_plotly() -> str:
    """plotly's JavaScript, gzipped, in base 64: 2.0 MB instead of 4.8."""
    from plotly.offline import get_plotlyjs  # slow to import

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
