"""README.md keeps its word: its files, anchors, pictures and links are there, its words are spelt right, its commands run."""

import ast
import functools
import io
import json
import re
import shlex
import tokenize
import urllib.request
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from conftest import ROOT, TINY_RUN, run_python, write_shards
from test_hellaswag import made_up, write

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = json.loads((ROOT / "play.ipynb").read_text(encoding="utf-8"))

# ------------------------------------------------------------------------------------------------------- commands

# Every command of README's sh blocks stands in exactly one of these tables. Those of the first two are run, in README's
# order, in a folder that holds a tiny trained run, a few texts and no network.
AS_IT_IS = {
    "python train_gpt2.py --plan --preset gpt2-xl --plan_card 24GB",
    "python report.py log/RUN",
    "python plot.py log/RUN log/OTHER",
    "python fineweb.py --verify --out edu_fineweb10B",
    "python weights.py export log/RUN --out my-gpt2",
}
WITH_SMALLER_FLAGS = {
    "python -m venv .venv": "--without-pip",
    ".venv/bin/python train_gpt2.py": "--max_steps 3 --batch_size 4 --val_tokens 4096 --sample_tokens 8 --run_name r2",
    "torchrun --standalone --nproc_per_node=2 train_gpt2.py --preset laptop":
        "--max_steps 3 --batch_size 4 --val_tokens 4096 --sample_tokens 8 --run_name two",
    "python train_gpt2.py --resume": "--run_name r",  # which was stopped; the newest one is done
    """python sample.py "Hello, I'm a language model,\"""": "--max_new_tokens 8",
    "python hellaswag.py --model my-gpt2": "--data hellaswag.jsonl --skip_long",
    "tensorboard --logdir log": "--inspect",  # reads the events and ends, instead of serving them
    "python fineweb.py --source my_texts/ --out data/mine": "--tokenizer bytes --workers 0",
    "python fineweb.py --source chats.jsonl --out data/chats": "--tokenizer bytes --workers 0",
    "python fineweb.py --source chats.jsonl --out data/laptop_chats --tokenizer bytes --context 128":
        "--workers 0 --context 32",
    "python train_gpt2.py --preset laptop --data data/laptop_chats --init_from log/RUN --run_name chat": " ".join(
        map(str, TINY_RUN)) + " --seq_len 32 --max_steps 2 --run_name chat",
    "python train_gpt2.py --data data/mine": "--max_steps 2 --total_batch_size 128 --seq_len 16 --batch_size 4 --val_tokens 64 \
--sample_tokens 8 --run_name mine",
}
LEFT_OUT = {
    "make train": "installs from the network",
    "make test": "runs this very test",
    ".venv/bin/python -m pip install -r requirements.txt": "network",
    ".venv/bin/python -m pip install -r requirements-test.txt": "network",
    ".venv/bin/python -m pytest": "runs this very test",
    "python -m pip install -r requirements-notebook.txt": "network",
    "python -m pip install -r requirements-browser.txt": "network",
    "python -m pytest -m slow tests/test_browser.py": "runs tests, in a browser",
    "jupyter lab play.ipynb": "a server that waits for a browser; tests/test_notebook.py runs the notebook",
    "python sample.py --model log/chat $'User: Say dog in capitals\\n\\nAssistant:'": "a shell has to read its line breaks",
    "python fineweb.py --tokens 1B": "network",
    "python fineweb.py --dataset kjj0/finewebedu10B-gpt2 --tokens 1B": "network",
    "RAY_ADDRESS=auto python fineweb.py --engine ray --name sample-100BT --out edu_fineweb100B": "a cluster and the network",
    "torchrun --standalone --nproc_per_node=8 train_gpt2.py --preset gpt2-medium --zero1": "needs eight GPUs",
    "lm_eval --model hf --model_args pretrained=my-gpt2 --tasks hellaswag": "the harness fetches its data from the network",
}


def commands(text):
    """The commands of the fenced sh blocks, in order, without comments; continued lines are joined."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            found += [line] if line else []
    return found


def unlisted(text):
    tables = [AS_IT_IS, set(WITH_SMALLER_FLAGS), set(LEFT_OUT)]
    return [c for c in commands(text) if sum(c in table for table in tables) != 1]


def test_every_command_is_in_one_table_and_the_tables_hold_nothing_else():
    assert commands("```sh\npython a.py  # why\n\npython b.py \\\n    --c\n```\n") == ["python a.py", "python b.py --c"]
    assert unlisted("```sh\npython new.py\n```\n") == ["python new.py"]
    assert not unlisted(README), "put these into a table of tests/test_readme.py"
    gone = (AS_IT_IS | set(WITH_SMALLER_FLAGS) | set(LEFT_OUT)) - set(commands(README))
    assert not gone, "README has these commands no more: take them out of the table"


@pytest.fixture
def workplace(tmp_path):
    """What a reader who follows README has by the time: a trained run, texts, conversations, shards, a HellaSwag file."""
    shards = write_shards(tmp_path / "data" / "tiny", sizes=(3001,), val=700)
    flags = [*TINY_RUN, "--data", shards, "--max_steps", "4", "--ckpt_every", "2"]
    done = run_python(ROOT / "train_gpt2.py", *flags, cwd=tmp_path)
    assert not done.returncode, done.stderr
    for checkpoint in (tmp_path / "log" / "r").glob("*4.pt"):  # as if stopped after step 2: there is something to resume
        checkpoint.unlink()
    (tmp_path / "my_texts").mkdir()
    for i in range(9):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"Text number {i}. " * 40)
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    (tmp_path / "chats.jsonl").write_text(9 * (json.dumps({"messages": turns}) + "\n"))
    write(tmp_path / "hellaswag.jsonl", made_up(6, context=(1, 2), ending=(1, 2)))
    made = run_python(ROOT / "fineweb.py", "--source", "my_texts", "--out", "edu_fineweb10B", "--tokenizer", "bytes",
                      "--workers", 0, cwd=tmp_path)  # fmt: skip
    assert not made.returncode, made.stderr
    return tmp_path


def run_command(command, cwd):
    """A command line of README, with this Python and this project's files."""
    words = shlex.split(command.replace("log/RUN", "log/r").replace("log/OTHER", "log/r2"))
    assert words[0] in ("python", ".venv/bin/python", "tensorboard", "torchrun"), command
    if words[0] == "tensorboard":
        return run_python("-m", "tensorboard.main", *words[1:], cwd=cwd)
    words = ["python", "-m", "torch.distributed.run", *words[1:]] if words[0] == "torchrun" else words
    return run_python(*(ROOT / word if word.endswith(".py") else word for word in words[1:]), cwd=cwd)


@pytest.mark.slow
def test_the_commands_run_on_a_cpu_without_network(workplace):
    for command in commands(README):
        if command not in LEFT_OUT:
            done = run_command(f"{command} {WITH_SMALLER_FLAGS.get(command, '')}", workplace)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


# ----------------------------------------------------------------------------------- links, anchors and pictures


class Html(HTMLParser):
    """Tags of a piece of Markdown, with their attributes, in order."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


def prose(text):
    """Without fenced code and `code`, in which a bracket is no link."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def links(text):
    """Where the links and pictures of a Markdown text lead."""
    text = prose(text)
    found = re.findall(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)", text)
    return found + [a[k] for _, a in Html(text).tags for k in ("href", "src", "srcset") if a.get(k)]


def anchors(text):
    """The anchors that GitHub gives the headings: lower case, without punctuation, spaces as hyphens, repeats numbered."""
    names, seen = [], Counter()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link, its text
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.append(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names + [a["id"] for _, a in Html(prose(text)).tags if a.get("id")]


def broken_links(text):
    broken = []
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme or link.startswith("//"):
            # https, a host with a dot in it, no spaces or leftovers of editing
            if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w\-./%~@:+=?&#]*)?", link) or ".." in link:
                broken.append(link)
        elif parts.path and not (ROOT / parts.path).exists():
            broken.append(link)
        elif parts.fragment and parts.path in ("", "README.md") and parts.fragment not in anchors(text):
            broken.append(link)
    return broken


def bad_pictures(text):
    """Pictures without a description, or without a dark variant beside the light one."""
    bad, dark = [], None
    for tag, attributes in Html(prose(text)).tags:
        if tag in ("picture", "/picture"):
            dark = None
        elif tag == "source" and attributes.get("media") == "(prefers-color-scheme: dark)":
            dark = attributes.get("srcset")
        elif tag == "img":
            light = attributes.get("src") or ""
            if len(attributes.get("alt") or "") < 20 or dark != re.sub(r"(\.\w+)$", r"_dark\1", light):
                bad.append(light)
    return bad + re.findall(r"!\[[^\]]*\]\([^)]*\)", prose(text))  # this form knows no dark variant


def test_links_lead_somewhere():
    assert links("[a](b.md) ![c](d.png) <img src='e'> `[f](g)`") == ["b.md", "d.png", "e"]
    assert broken_links("# A b!\n# A b!\n[x](#a-b) [x](#a-b-1) [x](README.md) [x](https://a.org/b?c=d#e)") == []
    wrong = ["#a-c", "nothing.py", "http://a.org", "https://host", "https://a.org/b|c", "readme.assets/none.png"]
    assert broken_links("# A b\n" + " ".join(f"[x]({link})" for link in wrong)) == wrong
    assert not broken_links(README)


def test_pictures_have_a_description_and_a_dark_variant():
    good = """<picture><source media="(prefers-color-scheme: dark)" srcset="a_dark.png">
              <img alt="loss falls from 11 to 5" src="a.png"></picture>"""
    assert bad_pictures(good) == []
    for wrong in (good.replace("a_dark", "b"), good.replace("falls from 11", ""), good + '<img src="a.png">'):
        assert bad_pictures(wrong) == ["a.png"]
    assert bad_pictures("![loss](a.png)") == ["![loss](a.png)"]
    assert not bad_pictures(README)


def external_links():
    return sorted({link for link in links(README) if link.startswith("https://")})


@pytest.mark.network
@pytest.mark.parametrize("link", external_links())
def test_external_links_answer(link):
    request = urllib.request.Request(link, method="HEAD", headers={"User-Agent": "Mozilla/5.0"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status < 400


# -------------------------------------------------------------------------------------------------------- spelling

# Words that are right and in no dictionary. Names in the code, and what the project says four times or more, need no entry.
WORDS = set("""
    capitalised capitalises centred checksum datasheet docstrings exponentials favours initialisation ints logit modded modulo
    neighbouring nostalgebraist overfit overfitting tokenising tooltip tooltips unscales unshuffled
    """.split())  # fmt: skip
SOURCES = [p for folder in (ROOT, ROOT / "bench", ROOT / "tests") for p in sorted(folder.glob("*.py"))]


def own_words():
    """The words that names in the code are made of, and those that stand in the project's files four times or more."""
    names, often = set(), Counter()
    for path in SOURCES:
        if path.name == "test_readme.py":  # it holds wrong ones on purpose
            continue
        text = path.read_text(encoding="utf-8")
        often.update(re.findall(r"[a-z]{4,}", text))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                names |= set(re.split(r"_|\d+", token.string.lower()))
    often.update(re.findall(r"[a-z]{4,}", README + "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"])))
    return names | {word for word, n in often.items() if n >= 4}


def docstrings(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, kinds))))


@functools.cache
def dictionary():
    from spellchecker import SpellChecker

    return SpellChecker()


def misspelt(text, known):
    """Lower-case words of four letters or more that are neither in the dictionary nor known. Code, formulas, addresses,
    paths and tags are no words; names are capitalised, and left alone."""
    text = re.sub(r"\$[^$]*\$", " ", re.sub(r"https?://\S+|<[^>]+>|\]\([^)]*\)", " ", prose(text)))
    text = re.sub(r"\S*[/_=.\\]\w\S*|--\w+", " ", text)  # log/RUN, total_batch_size, plot.py, --flag
    words = set(re.findall(r"(?<![\w'-])[a-z]{4,}(?![\w'])", text))
    return sorted(dictionary().unknown(words - known))


def test_words_are_spelt_right():
    pytest.importorskip("spellchecker", reason="needs requirements-test.txt")
    known = WORDS | own_words()
    assert misspelt("the lerning rate of `lerninng` in log/lerning.txt, recieved", known) == ["lerning", "recieved"]
    texts = {path.name: docstrings(path) for path in SOURCES} | {path.name: path.read_text() for path in ROOT.glob("*.md")}
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]
    texts["play.ipynb"] = "\n".join("".join(cell["source"]) for cell in cells)
    wrong = {name: words for name, text in texts.items() if (words := misspelt(text, known))}
    assert not wrong, f"{wrong}: mend them, or add what is right to WORDS in tests/test_readme.py"
