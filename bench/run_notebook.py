"""Run play.ipynb from top to bottom in a fresh kernel, and save it with its outputs.

    python bench/run_notebook.py    # four to five minutes on two cores; needs requirements-notebook.txt

Its pictures are saved with 128 colours, in which lines and text look the same at a third of the bytes. A cell that fails
leaves the file as it was. Two cells of chapter 2 are about GPT-2's tokenizer, whose files TIKTOKEN_CACHE_DIR may name.
"""

import argparse
import base64
import io
import os
import sys
from pathlib import Path

try:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from PIL import Image
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    way_out = "python -m pip install -r requirements-notebook.txt"
    print(f"run_notebook.py: error: {missing.name} is not here: {way_out}", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.run.stop import running  # noqa: E402

NOTEBOOK = ROOT / "play.ipynb"


def executed():
    """The notebook with the outputs of a fresh kernel. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def shrink(png):
    """A picture (base64 of a PNG) with 128 colours."""
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main():
    argparse.ArgumentParser(
        prog="bench/run_notebook.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        notebook = executed()
    except CellExecutionError as error:
        print(f"run_notebook.py: error: {NOTEBOOK} stays as it was, as a cell failed:\n{error}", file=sys.stderr)
        sys.exit(1)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink(output.data["image/png"])
    part = NOTEBOOK.with_suffix(".part")
    nbformat.write(notebook, part)
    os.replace(part, NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    with running("run_notebook.py"):
        main()
