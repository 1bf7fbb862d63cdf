"""README.md, CONTRIBUTING.md and docs/: links, anchors, pictures, flags and mentioned tests exist."""

import importlib
import json
import re
import shlex
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

from lab.config_file import RENAMED_FIELDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
README = TEXT["README.md"]


def tags(text):
    """[(tag, its attributes)] of the HTML in a piece of Markdown."""
    found, parser = [], HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append((tag, dict(attributes)))
    parser.feed(text)
    return found


def prose(text):
    """The text without fenced code and `code`, where brackets are not links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"\W", "", code[0]), text)


def links(text):
    text, kinds = prose(text), ("href", "src", "srcset")
    found = re.findall(r"\]\(([^()\s]+)\)", text)
    return found + [a[k] for _, a in tags(text) for k in kinds if a.get(k)]


def anchors(path):
    """The anchors of a page: GitHub's of a Markdown text, Jupyter's of a notebook."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        return {title.replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    text = prose(path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return names | {a["id"] for _, a in tags(text) if a.get("id")}


def broken_links(text, page):
    broken = []
    for link in links(text):
        parts = urlsplit(link)
        target = page.parent / parts.path if parts.path else page
        if parts.scheme:
            if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w\-./%~@:+=?&#]*)?", link):
                broken.append(link)
        elif not target.exists():
            broken.append(link)
        elif link.partition("#")[2] and unquote(link.partition("#")[2]) not in anchors(target):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", TEXT)
def test_links_work(name):
    assert broken_links(TEXT[name], ROOT / name) == []


@pytest.mark.parametrize("name", TEXT)
def test_pictures_have_a_description_and_a_dark_variant(name):
    assert "![" not in prose(TEXT[name]), "this form has no dark variant"
    pictures = [a for tag, a in tags(prose(TEXT[name])) if tag in ("source", "img")]
    for dark, light in zip(pictures[::2], pictures[1::2], strict=True):
        assert dark["media"] == "(prefers-color-scheme: dark)" and len(light["alt"]) >= 20
        assert dark["srcset"] == re.sub(r"(\.\w+)$", r"_dark\1", light["src"])


@pytest.mark.parametrize("name", ["DATA", "FAULTS", "RESULTS", "RUNS", "SPEED"])
def test_contents_have_the_headings_of_the_page_in_order(name):
    head, *sections = re.split(r"^##", TEXT[f"docs/{name}.md"], flags=re.MULTILINE)
    contents = re.findall(r"^- \[(.+?)\]\(#[\w-]+\)", head, re.MULTILINE)
    headings = [re.match(r"#* (.+)", section)[1] for section in sections]
    top = [re.match(r" (.+)", section)[1] for section in sections if section[0] == " "]
    assert [title for title in headings if title in contents] == contents
    assert set(top) <= set(contents)


LOG = TEXT["docs/LOG.md"]
ENTRIES = re.split(r'^<a id="([\w-]+)"></a>$', LOG, flags=re.MULTILINE)[1:]
ENTRIES = dict(zip(ENTRIES[::2], ENTRIES[1::2]))


def test_contents_of_the_log_have_the_heading_and_date_of_each_entry():
    lines = re.findall(
        r"^- \[(.+)\]\(#([\w-]+)\) ([\d-]+): \S", LOG.partition("\n## Entries\n")[0], re.M
    )
    heading = re.compile(r"\s+### (.+)\n\n(\d{4}-\d\d-\d\d)")
    there = [(name, *heading.match(text).groups()) for name, text in ENTRIES.items()]
    assert sorted((name, title, date) for title, name, date in lines) == sorted(there)


def test_the_log_has_todays_name_of_every_renamed_flag():
    rows = [row for row in LOG.splitlines() if row.startswith("| `--")]
    for old, new in RENAMED_FIELDS.items():
        assert any(f"`--{old}`" in row and f"`--{new}`" in row for row in rows), old


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_the_log_are_short(name):
    """At most 200 words and one table or figure, without folded parts."""
    text = re.sub(r"<details>.*?</details>", "", ENTRIES[name], flags=re.DOTALL)
    tables = len(re.findall(r"^\|[-| :]+\|$", text, re.MULTILINE))
    figures = text.count("<img ")
    text = re.sub(r"^```.*?^```|^\|[^\n]*$|<picture>.*?</picture>", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    assert len(text.split()) <= 200 and tables + figures <= 1, (len(text.split()), tables, figures)


def test_readme_is_short():
    assert len(README.encode()) <= 14336  # about five screens of 1440 x 900
    code = re.findall(r"^```\w+\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert max(len(line) for block in code for line in block.splitlines()) <= 97  # 830 pixels wide


def commands(text):
    """The commands in fenced sh blocks, in order, as lists of words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [block.replace("\\\n", " ") for block in blocks]
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in blocks for line in block.splitlines()]
    return [shlex.split(line.replace("$'", "'")) for line in lines if line.strip()]


def flags_of(module, argv, capsys):
    """The flags in the --help of a program."""
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main([*argv, "--help"])
    said = capsys.readouterr().out
    assert not end.value.code and "None" not in said, "a default that cannot be typed"
    return set(re.findall(r"--\w+", said))


def test_flags_and_files_exist(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    train, used = flags_of("train_gpt2", [], capsys), {}
    for words in [c for text in TEXT.values() for c in commands(text)]:
        files = [word for word in words if re.fullmatch(r"[\w-]+\.(py|txt|ipynb)", word)]
        assert all((ROOT / file).exists() for file in files), words
        scripts = [word for word in words if word.endswith(".py") and "/" not in word]
        if scripts or "lab" in words:
            start = words.index(scripts[0] if scripts else "lab") + 1
            program = (scripts[0][:-3],) if scripts else ("lab.__main__", words[start])
            flags = {word.partition("=")[0] for word in words[start:] if word[:2] == "--"}
            used[program] = used.get(program, set()) | flags
    there = {program: flags_of(program[0], program[1:], capsys) for program in used}
    for program, flags in used.items():
        more = train if program[-1] == "plan" else set()  # it also accepts the flags of training
        assert flags <= more | there[program], program
    known = {"--help", "--index"}.union(train, *there.values())  # pip's --index-url
    for name in ("README.md", "docs/RUNS.md", "docs/DATA.md"):
        text = re.sub(r"^```.*?^```|ray start[^`]*", "", TEXT[name], flags=re.M | re.S)
        assert set(re.findall(r"(?<=[`\s])--[a-z]\w+", text)) <= known, name


@pytest.mark.parametrize("page", ["docs/FAULTS.md", "docs/SYSTEMS.md"])
def test_mentioned_tests_exist(page):
    file, missing = "", []
    for path, name in re.findall(r"`(tests/\w+\.py)?::(\w+)`", TEXT[page]):
        file = path or file
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        missing += [] if f"\ndef {name}(" in source else [f"{file}::{name}"]
    assert file and not missing


def test_mentioned_files_exist():
    for name, text in TEXT.items():
        for path in re.findall(r"`((?:lab|bench|tests|docs|readme\.assets)/[\w./]+)`", text):
            old = name == "docs/LOG.md"  # an entry's commands are those of its commit
            assert old or (ROOT / path).exists(), f"{name}: {path}"
