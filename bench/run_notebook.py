"""Run play.ipynb from top to bottom in a fresh kernel, and save it with its outputs.

    python bench/run_notebook.py    # six minutes on two idle cores; needs requirements-notebook.txt

Its pictures are saved with 128 colours, in which lines and text look the same at a third of the
bytes. A cell that fails leaves the file as it was. Two cells of chapter 2 are about GPT-2's
tokenizer, whose files TIKTOKEN_CACHE_DIR may name.
"""

import base64
import io
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.cli import RunError, UserError, command, parse  # noqa: E402

NOTEBOOK = ROOT / "play.ipynb"


@dataclass
class Config:
    out: Path = NOTEBOOK  # where to save it


def executed():
    """The notebook with the outputs of a fresh kernel. Raises RunError where a cell fails."""
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
    except ModuleNotFoundError as missing:
        way_out = "python -m pip install -r requirements-notebook.txt"
        raise UserError(f"{missing.name} is not here: {way_out}") from None
    os.environ["TQDM_DISABLE"] = "1"  # no bars among the outputs
    notebook, where = nbformat.read(NOTEBOOK, 4), {"metadata": {"path": str(ROOT)}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources=where, record_timing=False
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RunError(f"{NOTEBOOK} stays as it was, as a cell failed:\n{error}") from None
    return notebook


def shrink(png):
    """A picture (base64 of a PNG) with 128 colours."""
    from PIL import Image

    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main(argv):
    cfg, t0 = parse(Config, argv, prog="bench/run_notebook.py", description=__doc__), time.time()
    notebook = executed()
    import nbformat

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink(output.data["image/png"])
    part = cfg.out.with_suffix(".part")
    nbformat.write(notebook, part)
    os.replace(part, cfg.out)
    print(f"{cfg.out}: {cfg.out.stat().st_size / 1e6:.2f} MB in {time.time() - t0:.0f} s")


if __name__ == "__main__":
    command(main)
