"""play.ipynb as saved, and (slow) run from top to bottom in a fresh kernel."""

import ast
import importlib.util
import json
import re
from types import ModuleType

import pytest
from conftest import ROOT, clean_env

NOTEBOOK = ROOT / "play.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
# from requirements-notebook.txt, which is not needed for the tests
THEIRS = ("IPython", "matplotlib_inline")


def cells(kind):
    return [cell for cell in CELLS if cell["cell_type"] == kind]


def text_of(cells):
    return "\n".join("".join(cell["source"]) for cell in cells)


def chapters():
    """{title: its text}"""
    parts = re.split(r"^## (.+)$", text_of(CELLS), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_saved_with_outputs_in_order_and_without_errors():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [cell["source"] for cell in code if not cell["metadata"].get("jupyter")]
    assert max(map(len, shown)) <= 30, "lines of a cell, except collapsed ones"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "error" not in [output["output_type"] for output in outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= len(chapters()), "each chapter has a figure"
    assert all("assert " in text for text in chapters().values()), "and a check"
    assert NOTEBOOK.stat().st_size < 2.5e6, "bench/run_notebook.py saves smaller pictures"
    assert "/work/" not in NOTEBOOK.read_text(), "a path of the machine on which it was run"


def test_mentioned_tests_exist():
    there = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", text_of(cells("markdown"))))
    assert named and not named - set(re.findall(r"def (test_\w+)", there))


def test_imported_names_exist():
    """Renaming something in a module breaks a cell, which otherwise only the slow test would detect."""
    nodes = list(ast.walk(ast.parse(text_of(cells("code")))))
    files = [*ROOT.glob("*.py"), *ROOT.glob("bench/*.py")]
    ours, found, taken = {"lab", *(path.stem for path in files)}, {}, 0
    for node in nodes:
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        root = names[0].split(".")[0] if names else ""
        assert not root or root in THEIRS or importlib.util.find_spec(root), (
            f"{root} is not installed"
        )
        if root in ours:
            exec(ast.unparse(node), found)
            taken += len(node.names)
    uses = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    uses = [n for n in uses if isinstance(found.get(n.value.id), ModuleType)]
    assert taken > 40 and uses
    assert not [ast.unparse(n) for n in uses if not hasattr(found[n.value.id], n.attr)]


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails
