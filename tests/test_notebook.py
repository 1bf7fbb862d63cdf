"""play.ipynb as it is saved, and (slow) run from top to bottom in a fresh kernel."""

import ast
import importlib
import json
import re

import pytest
from conftest import ROOT, clean_env, run_python

from lab.tools.inside import Table

NOTEBOOK = ROOT / "play.ipynb"


def cells(kind):
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_saved_with_outputs_in_order_and_without_errors():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= len(chapters()), "each chapter draws what it found"
    assert NOTEBOOK.stat().st_size < 2.5e6, "bench/run_notebook.py saves smaller pictures"
    assert "/work/" not in NOTEBOOK.read_text(), "a path of the machine it was run on"


HEADINGS = "Question Prediction Experiment Check What_we_learned Where_it_lives Try_it".split()


def chapters():
    """{title: its cells}"""
    found, title = {}, None
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and source.startswith("## "):
            title = source.splitlines()[0].removeprefix("## ")
        if title:
            found.setdefault(title, []).append(source)
    return found


def test_chapters_have_the_same_parts_in_the_same_order():
    assert len(chapters()) >= 19
    for title, cells in chapters().items():
        text = "\n".join(cells)
        places = [text.find(f"\n### {name.replace('_', ' ')}") for name in HEADINGS]
        places[3] = max(places[3], text.find("### Check"))
        missing = [name for name, place in zip(HEADINGS, places) if place < 0]
        assert not missing and places == sorted(places), (title, missing, places)
        assert "?" in title + text[: places[1]] and "assert " in text and "plt.show()" in text
        assert "<details><summary>Answer" in text[places[-1] :], f"{title}: no answers"


def test_contents_lead_to_the_chapters():
    contents = "".join(json.loads(NOTEBOOK.read_text())["cells"][0]["source"])
    for title in chapters():
        assert f"[{title}](#{title.replace(' ', '-')})" in contents


def test_no_line_is_cut_and_tests_that_it_names_are_there():
    for cell in cells("code"):
        for line in "".join(cell["source"]).splitlines():
            assert len(line) <= 100, line
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    there = set(re.findall(r"def (test_\w+)", tests))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    assert not set(re.findall(r"`(test_\w+)`", text)) - there


def test_tables():
    table = Table(("name", "n"), [("a <b>", 1), ("c", "-2.5")])
    assert repr(table) == "name      n\na <b>     1\nc      -2.5"
    page = table._repr_html_()
    assert '<td style="text-align: left">a &lt;b&gt;</td>' in page
    assert '<td style="text-align: right">-2.5</td>' in page


def test_what_it_takes_from_the_project_is_there():
    """A name that is renamed in a module breaks a cell, which only the slow test would see."""
    nodes = list(ast.walk(ast.parse("\n".join("".join(cell["source"]) for cell in cells("code")))))
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


def test_help_runs_nothing(tmp_path):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    before = (ROOT / "play.ipynb").read_bytes()
    done = run_python(ROOT / "bench" / "run_notebook.py", "--help", cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "run_notebook.py" in done.stdout
    assert (ROOT / "play.ipynb").read_bytes() == before


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails
