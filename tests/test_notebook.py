"""play.ipynb as it is saved, and (slow) run from top to bottom in a fresh kernel."""

import ast
import importlib
import json
import re

import pytest
from conftest import ROOT, clean_env

NOTEBOOK = ROOT / "play.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
HEADINGS = "Question|Prediction|Experiment|Check|What we learned|Where it lives|Try it"


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
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "error" not in [output["output_type"] for output in outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= len(chapters()), "each chapter draws what it found"
    assert NOTEBOOK.stat().st_size < 2.5e6, "bench/run_notebook.py saves smaller pictures"
    assert "/work/" not in NOTEBOOK.read_text(), "a path of the machine it was run on"


def test_chapters_are_in_the_contents_and_have_the_same_parts_in_the_same_order():
    assert len(chapters()) >= 19
    contents = "".join(CELLS[0]["source"])
    for title, text in chapters().items():
        assert f"[{title}](#{title.replace(' ', '-')})" in contents
        found = re.findall(f"^### ({HEADINGS})", text, re.MULTILINE)
        assert [*dict.fromkeys(found)] == HEADINGS.split("|"), title
        assert "?" in title + text.partition("### Prediction")[0], title
        assert "assert " in text and "plt.show()" in text and "<summary>Answer" in text, title


def test_the_tests_that_it_names_are_there():
    there = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", text_of(cells("markdown"))))
    assert named and not named - set(re.findall(r"def (test_\w+)", there))


def test_what_it_takes_from_the_project_is_there():
    """A name that is renamed in a module breaks a cell, which only the slow test would see."""
    nodes = list(ast.walk(ast.parse(text_of(cells("code")))))
    modules, used = {}, set()

    def ours(name):
        path = name.replace(".", "/")
        return any((folder / f"{path}.py").exists() or (folder / path / "__init__.py").exists()
                   for folder in (ROOT, ROOT / "bench"))  # fmt: skip

    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if ours(alias.name)]
            modules |= {alias.asname or alias.name: alias.name for alias in names}
        if isinstance(node, ast.ImportFrom) and ours(node.module):
            for alias in node.names:
                if ours(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    used.add((node.module, alias.name))
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                used.add((modules[node.value.id], node.attr))
    missing = [n for n in sorted(used) if not hasattr(importlib.import_module(n[0]), n[1])]
    assert len(used) > 40 and not missing


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails
