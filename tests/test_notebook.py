"""play.ipynb as it is saved, and (slow) run from top to bottom in a fresh kernel."""

import ast
import importlib
import json
import sys

import pytest
from conftest import ROOT, clean_env, run_python

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


def test_what_it_takes_from_the_project_is_there():
    """A name that is renamed in a module breaks a cell, which only the slow test would see."""
    code = "\n".join("".join(cell["source"]) for cell in cells("code"))
    lines = ["pass" if line.lstrip().startswith(("%", "!")) else line for line in code.splitlines()]
    nodes, modules, used = list(ast.walk(ast.parse("\n".join(lines)))), {}, set()
    ours = {path.stem for folder in (ROOT, ROOT / "bench") for path in folder.glob("*.py")}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in ours}
        if isinstance(node, ast.ImportFrom) and node.module in ours:
            used |= {(node.module, alias.name) for alias in node.names}
    used |= {(modules[node.value.id], node.attr) for node in nodes
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules}  # fmt: skip
    assert len(used) > 20
    assert not [name for name in sorted(used) if not hasattr(importlib.import_module(name[0]), name[1])]


def test_help_runs_nothing(tmp_path):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    before = (ROOT / "play.ipynb").read_bytes()
    for flag, status in (("--help", 0), ("--hlp", 2)):
        done = run_python(ROOT / "bench" / "run_notebook.py", flag, cwd=tmp_path, timeout=60)
        assert done.returncode == status and "usage: bench/run_notebook.py [-h]" in done.stdout + done.stderr
    assert (ROOT / "play.ipynb").read_bytes() == before


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails
