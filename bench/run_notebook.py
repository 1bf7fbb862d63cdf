"""Run play.ipynb from top to bottom in a fresh kernel, and save it with its outputs.

    python bench/run_notebook.py    # four minutes on two idle cores; needs requirements-notebook.txt

The seconds of each chapter go into the table of contents. Pictures are saved with 128 colours, in
which lines and text look the same at a third of the bytes. A cell that fails leaves the file as it
was. Two cells of chapter 2 are about GPT-2's tokenizer, whose files TIKTOKEN_CACHE_DIR may name.
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

from lab.cli import RunError, command, parse

NOTEBOOK = ROOT / "play.ipynb"


def executed():
    """The notebook with the outputs of a fresh kernel. Raises CellExecutionError where a cell
    fails."""
    notebook = nbformat.read(NOTEBOOK, 4)
    how = dict(timeout=1800, kernel_name="python3", record_timing=True)  # seconds for a cell
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, resources=where, **how).execute()
    return notebook


def note_seconds(notebook):
    """Write each chapter's seconds into the last column of the contents, which cell 0 has."""
    chapters = []
    for cell in notebook.cells:
        chapters += [0.0] * cell.source.startswith("## ")
        times = cell.metadata.pop("execution", {})
        if chapters and "iopub.status.idle" in times:
            begin, end = (
                datetime.fromisoformat(times[f"iopub.status.{name}"]) for name in ("busy", "idle")
            )
            chapters[-1] += (end - begin).total_seconds()
    rows = iter(chapters)
    contents = notebook.cells[0]
    contents.source = re.sub(
        r"(?m)^(\| \[.*\| )\d+ \|$",
        lambda row: f"{row[1]}{max(1, round(next(rows)))} |",
        contents.source,
    )


def shrink(png):
    """A picture (base64 of a PNG) with 128 colours."""
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run():
    t0 = time.perf_counter()
    try:
        notebook = executed()
    except CellExecutionError as error:
        raise RunError(f"{NOTEBOOK} stays as it was, as a cell failed:\n{error}") from error
    note_seconds(notebook)
    for cell in notebook.cells:
        if "outputs" in cell:  # without progress bars, which write over themselves
            cell.outputs = [o for o in cell.outputs if "\r" not in o.get("text", "")]
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink(output.data["image/png"])
    part = NOTEBOOK.with_suffix(".part")
    nbformat.write(notebook, part)
    os.replace(part, NOTEBOOK)
    seconds = time.perf_counter() - t0
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1e6:.2f} MB in {seconds:.0f} s")


if __name__ == "__main__":
    command(lambda argv: parse(run, argv, description=__doc__))
