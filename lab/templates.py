"""Load the HTML templates (*.html.j2), which are next to the code that renders them."""

import functools

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lab.cli import ROOT


@functools.cache
def load_template(name: str) -> Template:
    """A template by file name, read once. Values that are rendered into it are escaped."""
    parts = ("lab/inference", "lab/tools", "lab/notebook", "bench")
    folders = [ROOT / part for part in parts]
    environment = Environment(
        loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, auto_reload=False,
    )  # fmt: skip
    return environment.get_template(name)
