"""Run play.ipynb from top to bottom in a fresh kernel and save it with its outputs.

    python bench/run_notebook.py    # minutes on two idle cores; needs requirements-notebook.txt

Each chapter's seconds are written to the table of contents. Pictures are saved with 128 colors,
which look the same for lines and text at a third of the size. If a cell fails, the file is left
unchanged. A few cells use GPT-2's tokenizer, whose files may be in the folder TIKTOKEN_CACHE_DIR.
"""

import base64
import io
import os
import re
import time
from datetime import datetime

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image
from records import ROOT

from lab.cli import RunError, parse_args, run_main

NOTEBOOK = ROOT / "play.ipynb"


def executed():
    """Run the notebook in a fresh kernel and return it. Raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(NOTEBOOK, 4)
    # timeout: seconds per cell
    options = dict(timeout=1800, kernel_name="python3", record_timing=True)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, resources=resources, **options).execute()
    return notebook


def write_seconds(notebook):
    """Write each chapter's seconds to the last column of its row in the contents (cell 0)."""
    seconds, chapter = {}, None
    for cell in notebook.cells:
        heading = re.search(r"^## (.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            chapter = heading[1]
            seconds[chapter] = 0.0
        times = cell.metadata.pop("execution", {})
        if chapter and "iopub.status.idle" in times:
            begin, end = (
                datetime.fromisoformat(times[f"iopub.status.{name}"]) for name in ("busy", "idle")
            )
            seconds[chapter] += (end - begin).total_seconds()

    def row(found):
        return f"{found[1]}{max(1, round(seconds[found[2]]))} |"

    contents = notebook.cells[0]
    pattern = r"(?m)^(\| \[(.+)\]\(#.*\| )\d* ?\|$"
    contents.source = re.sub(pattern, row, contents.source)


def shrink(png):
    """Reduce a picture (a PNG in base64) to 128 colors."""
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run():
    t0 = time.perf_counter()
    try:
        notebook = executed()
    except CellExecutionError as error:
        raise RunError(f"{NOTEBOOK} was not changed because a cell failed:\n{error}") from error
    write_seconds(notebook)
    for cell in notebook.cells:
        if "outputs" in cell:  # without progress bars
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink(output.data["image/png"])
    part = NOTEBOOK.with_suffix(".part")
    nbformat.write(notebook, part)
    os.replace(part, NOTEBOOK)
    seconds = time.perf_counter() - t0
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1e6:.2f} MB in {seconds:.0f} s")


if __name__ == "__main__":
    run_main(lambda argv: parse_args(run, argv, description=__doc__))
