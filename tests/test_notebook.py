"""play.ipynb as saved, and (slow) run from top to bottom in a fresh kernel."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT, clean_env

from lab.notebook.interp import Table
from lab.notebook.training import make_trainer, run_in_parallel, small_speedrun
from train_gpt2 import GPT, GPTConfig, TrainConfig

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
    assert pictures >= len(chapters()), "each chapter draws what it found"
    assert all("assert " in text for text in chapters().values()), "and checks it"
    assert NOTEBOOK.stat().st_size < 3.5e6, "bench/run_notebook.py saves smaller pictures"
    assert "/work/" not in NOTEBOOK.read_text(), "a path of the machine it was run on"


def part_one():
    """The cells of part I."""
    starts = [i for i, cell in enumerate(CELLS) if "".join(cell["source"]).startswith("# Part ")]
    return CELLS[starts[0] : starts[1]]


def test_part_one_builds_the_model_in_short_visible_cells():
    code = [cell for cell in part_one() if cell["cell_type"] == "code"]
    assert not [cell["source"] for cell in code if cell["metadata"].get("jupyter")], "hidden"
    assert sum(len(cell["source"]) <= 15 for cell in code) > 0.8 * len(code)
    for name in ("Attention", "MLP", "Block", "MyGPT"):
        assert f"class {name}(nn.Module)" in text_of(code)
    views = [str(cell["outputs"]) for cell in code if "attachShadow" in str(cell["outputs"])]
    assert len(views) >= 4, "views that react to the mouse"


def test_new_words_of_part_one_are_in_its_glossary():
    text = text_of([cell for cell in part_one() if cell["cell_type"] == "markdown"])
    text, glossary = text.split("### Glossary")
    words = re.findall(r"\*\*([^*.:?]+)\*\*", text)  # a bold sentence is no word
    words = {word.replace("\n", " ").lower().removesuffix("s") for word in words} - {"not"}
    assert len(words) > 30
    assert not [word for word in words if word not in glossary.lower()]


def own_chapters():
    """{title: its cells} from chapter 9 on: parts II and III, whose chapters can be read alone."""
    found, title = {}, None
    for cell in CELLS:
        source = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
        if source.startswith("# ") or "### Solutions" in source:
            title = None  # the heading of a part
        if heading := re.search(r"^## (\d+)\. .+$", source, re.MULTILINE):
            title = heading[0][3:] if int(heading[1]) >= 9 else None
        if title:
            found.setdefault(title, []).append(cell)
    return found


def test_chapters_have_their_parts():
    parts = ["**You need:**", "**You will know:**", "**Guess first", "### Summary", "### Exercises"]
    assert len(own_chapters()) >= 14
    for title, found in own_chapters().items():
        text = text_of(found).replace("**Prediction", "**Guess first")
        places = [text.find(part) for part in parts]
        assert -1 not in places and places == sorted(places), (title, places)
        pictures = [
            o for c in found for o in c.get("outputs", []) if "image/png" in o.get("data", {})
        ]
        assert pictures and "assert " in text, title
        hidden = [c for c in found if c["metadata"].get("jupyter")]
        assert sum(
            text_of([c]).startswith("assert ") or "\nassert " in text_of([c]) for c in hidden
        )


def test_each_exercise_is_an_empty_cell_and_a_check():
    """The reader replaces the dots; a saved answer would give the solution away."""
    sources = ["".join(cell["source"]) for cell in CELLS]
    answers = [i for i, source in enumerate(sources) if re.match(r"answer_\d+_\d+ = ", source)]
    assert len(answers) >= 28
    for i in answers:
        name = sources[i].split(" = ")[0]
        number = ".".join(name.split("_")[1:])
        assert sources[i] == f"{name} = ..."
        assert re.search(rf'check\(\s*"{number}",\s*{name},', sources[i + 1])
        assert f"**{number}** " in sources[i - 1] and f"- **{number}** " in text_of(CELLS)
        assert "your turn" in json.dumps(CELLS[i + 1]["outputs"])


def test_chapters_can_be_run_alone():
    """Each name that a chapter uses is imported or assigned in it."""
    for title, found in own_chapters().items():
        code = text_of([cell for cell in found if cell["cell_type"] == "code"])
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
        checked = subprocess.run(command, input=code, capture_output=True, text=True)
        assert not checked.returncode, (title, checked.stdout)


def test_contents_lists_the_chapters():
    titles = re.findall(r"^## (.+)$", text_of(cells("markdown")), flags=re.MULTILINE)
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|.* \d+ \|$", text_of(CELLS[:1]), re.MULTILINE)
    assert [title for title, _ in rows] == titles
    assert all(anchor == title.replace(" ", "-") for title, anchor in rows)


def test_jupyterlab_saves_it_unchanged():
    kernel = json.loads(NOTEBOOK.read_text())["metadata"]["kernelspec"]
    assert kernel["display_name"] == "Python 3 (ipykernel)"
    text = "".join(str(cell["outputs"]) for cell in cells("code"))
    assert "\\t" not in text, "tabs are not aligned"


def test_the_tests_that_it_names_are_there():
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


@pytest.mark.parametrize("colab", [True, False])
def test_the_first_code_cell_clones_on_colab_only(tmp_path, colab):
    """With a small repository instead of ours, and a pip that writes its arguments to a file."""
    code = "".join(cells("code")[0]["source"])
    assert "google.colab" in code and text_of(CELLS[:2]).count("OWNER/NAME") == 2
    remote, pip = tmp_path / "remote", tmp_path / "bin/pip"
    for folder in (remote, pip, tmp_path / "content"):
        folder.mkdir(parents=True)
    (remote / "train_gpt2.py").write_text("")
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text(
        "import sys\nopen('../pip', 'w').write(' '.join(sys.argv[1:]))"
    )
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=remote, check=True)
    code = code.replace("https://github.com/OWNER/NAME", str(remote))
    before = "import sys, types\nsys.modules['google.colab'] = types.ModuleType('colab')\n" * colab
    after = "\nprint(os.path.basename(os.getcwd()), os.path.exists('train_gpt2.py'))"
    env = clean_env() | {"PYTHONPATH": str(tmp_path / "bin")}
    done = subprocess.run(
        [sys.executable, "-c", before + code + after], cwd=tmp_path / "content", env=env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("gpt2 True\n" if colab else "content False\n", "")
    asked = tmp_path / "content/pip"
    assert asked.exists() == colab and (not colab or "tyro pooch tiktoken" in asked.read_text())


@pytest.mark.slow
def test_runs_in_a_fresh_kernel(monkeypatch):
    pytest.importorskip("nbclient", reason="needs requirements-notebook.txt")
    from run_notebook import executed

    for name, value in clean_env().items():
        monkeypatch.setenv(name, value)
    executed()  # raises where a cell fails


def test_tables_keep_leading_blanks_and_escape():
    table = Table(("text", "n"), [("    return", "1"), ("<b>", "22")])
    assert "white-space: pre" in table._repr_html_() and ">    return<" in table._repr_html_()
    assert "&lt;b&gt;" in table._repr_html_()
    assert repr(table).splitlines()[1:] == ["    return   1", "<b>         22"]


def test_a_trainer_from_parts_makes_the_trainers_steps():
    torch.manual_seed(0)
    model, x = GPT(GPTConfig(1, 2, 16, 8, vocab_size=32)), torch.arange(16).view(2, 8)
    loader = SimpleNamespace(grad_accum_steps=1, next_batch=lambda: (x, x, 16))
    trainer = make_trainer(model, loader, TrainConfig(lr=1e-2, warmup_steps=0, max_steps=9))
    losses = [trainer.train_step()[0].item() for _ in range(9)]
    assert trainer.step == 9 and losses[-1] < losses[0] - 0.1


def test_parallel_runs_have_one_core_each_and_stay_in_order():
    def threads_and_double(n):
        time.sleep(0.01 * (4 - n))  # the first ends last
        return torch.get_num_threads(), 2 * n

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = run_in_parallel(threads_and_double, range(4))
    finally:
        torch.set_num_threads(before)
    assert found == [(1, 2 * n) for n in range(4)]


def test_small_speedrun_changes_fields_of_both_configurations():
    model_config, cfg = small_speedrun(n_embd=24, seed=7, rotary=False)
    assert (model_config.n_embd, model_config.rotary, model_config.bigram_rows) == (24, False, 0)
    assert (cfg.seed, cfg.seq_len, cfg.batch_size, cfg.total_batch_size) == (7, 64, 8, 512)
    assert (cfg.preset, cfg.lr, cfg.muon_lr, cfg.decay_steps) == ("laptop", 1e-2, 0.05, 0.7)
    with pytest.raises(TypeError, match="n_emb"):
        small_speedrun(n_emb=24)
    assert small_speedrun()[0].n_embd == 128, "the preset itself is unchanged"
