"""play.ipynb as it is saved, and (slow) run from top to bottom in a fresh kernel."""

import json
import sys

import pytest
from conftest import ROOT, clean_env

sys.path.insert(0, str(ROOT / "bench"))

NOTEBOOK = ROOT / "play.ipynb"


def cells(kind):
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_saved_with_outputs_in_order_and_without_errors():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert NOTEBOOK.stat().st_size < 2**20, "save it by bench/run_notebook.py, whose pictures are smaller"
    assert "/work/" not in NOTEBOOK.read_text(), "a path of the machine it was run on"


def test_each_chapter_asks_predicts_checks_and_says_where_it_lives():
    chapters = NOTEBOOK.read_text().split('"## ')[1:]
    assert len(chapters) >= 10
    for chapter in chapters:
        assert "?" in chapter[:3000], f"chapter {chapter[:40]!r} asks nothing"
        for part in ("predict", "assert ", "image/png", "what we learned", "where it lives", "try it"):
            assert part in chapter.lower(), f"chapter {chapter[:40]!r} has no {part}"


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails
