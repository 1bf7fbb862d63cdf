"""bench/figures.py: every figure is made from the records that lie beside them, and can be read."""

import json

import drawing
import figures
import pytest
from conftest import ROOT
from matplotlib.figure import Figure
from matplotlib.text import Text

from lab.cli import UserError


@pytest.fixture
def texts(monkeypatch):
    """{file name: visible texts of the figure} of all that is drawn; the files are small, to be
    quick."""
    found, save = {}, Figure.savefig

    def savefig(figure, path, **how):
        save(figure, path, dpi=40)
        all_texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
        assert min(t.get_fontsize() for t in all_texts) >= drawing.SMALL, path
        assert figure.get_figwidth() == 8, "or points are other pixels"
        assert not any("^{" in t.get_text() for t in all_texts), "exponents are smaller"
        found[path.name] = [t.get_text() for t in all_texts]

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def test_every_figure_is_made_from_the_records(tmp_path, texts, capsys):
    assert not figures.main(["--out", str(tmp_path)]) and not capsys.readouterr().err
    names = {f"{name}{dark}.png" for name in figures.FIGURES for dark in ("", "_dark")}
    assert {path.name for path in tmp_path.iterdir()} == names
    there = {path.name for path in (ROOT / "readme.assets").glob("*.png")}
    assert {name for name in there if not name.startswith("serve")} == names  # a page's pictures
    for name in figures.FIGURES:
        assert texts[f"{name}.png"] == texts[f"{name}_dark.png"]


def test_a_figure_without_records_says_which_command_makes_them(tmp_path):
    (tmp_path / "ladder.jsonl").write_text(json.dumps({"bench": "ladder", "group": "rungs"}) + "\n")
    said = "ladder: ladder.jsonl has no record with .*`python bench/ladder.py` makes it"
    with pytest.raises(UserError, match=said):
        figures.main(["ladder", "--runs", str(tmp_path), "--out", str(tmp_path)])
