"""Build the course as a site: README, the notebook's chapters, docs/, a model, a run's report, the race.

    make site                            # or: python website/build.py, with requirements-site.txt
    python website/build.py --out site   # open site/index.html

Material for MkDocs builds the pages (mkdocs.yml). This program first collects them in a temporary folder
at the same paths as in the repository, so that links stay valid. nbconvert turns play.ipynb into
Markdown, one page per chapter. Files that a page links to are copied. A broken link stops the build. It
needs no network.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import nbformat
import yaml
from latex2mathml.converter import convert as to_mathml
from nbconvert import MarkdownExporter
from nbconvert.filters import strip_ansi

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from lab.cli import UserError, parse_args, run_main  # noqa: E402

DOCS = {  # {page: its title in the navigation}
    "docs/RUNS.md": "Runs",
    "docs/DATA.md": "Data",
    "docs/FAULTS.md": "Faults",
    "docs/GLOSSARY.md": "Glossary",
    "CONTRIBUTING.md": "Contributing",
}
RESULTS = {"docs/RESULTS.md": "Results", "docs/SPEED.md": "Speed"}
MODEL, REPORT, RACE = "examples/laptop_model.html", "report.html", "race.html"
RECORDED = "readme.assets/runs/gpt2_124m.jsonl"  # the run that report.html shows
SEE = f"""
- [Notebook](play/index.md): build GPT-2 by hand, chapter by chapter
- [Model]({MODEL}): a small GPT-2 that runs in this browser
- [Race]({RACE}): training recipes against the clock
- [Report]({REPORT}): curves and samples of a recorded run
- [Learning log](docs/LOG.md): all experiments and their results
"""
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")


# ---------------------------------------------------------------------------------- the notebook


@dataclass
class Chapter:
    file: str  # play/*.md
    title: str
    part: str  # the title of its part; "" before the first
    cells: list


def chapters(notebook):
    """The notebook as pages. Each heading of level 1 or 2, Glossary or Solutions begins a page."""
    pages, part = [], ""
    for cell in notebook.cells:
        heading = re.search(
            r"\A(#{1,2}|###(?= Glossary| Solutions)) (.+)$", cell.source, re.MULTILINE
        )
        if cell.cell_type == "markdown" and heading:
            title = heading[2]
            part = title if len(heading[1]) == 1 and pages else part
            name = "-".join(re.findall(r"\w+", title.lower())[:6]) if pages else "index"
            pages.append(Chapter(f"play/{name}.md", title, part, []))
            promoted = len(heading[1]) - 1  # a page's title is its only heading of level 1
        if cell.cell_type == "markdown":
            cell.source = re.sub(rf"^#{{{promoted}}}(#+ )", r"\1", cell.source, flags=re.MULTILINE)
        pages[-1].cells.append(cell)
    return pages


def anchors(pages):
    """{anchor of a heading in Jupyter: link to it, from the root of the site}."""
    found = {}
    for page in pages:
        text = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
        for level, title in re.findall(r"^(#+) (.+)$", CODE.sub(plain, text), re.MULTILINE):
            place = page.file if level == "#" else f"{page.file}#{slug(title)}"
            found.setdefault(title.replace(" ", "-"), place)
    return found


def plain(code):
    """The text of a match of CODE, without lines that look like headings."""
    return code[0].replace("\n#", "\n")


def slug(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def with_math(text):
    """Replace $...$ and $$...$$ outside of code by MathML, which browsers show without a library."""

    def convert(found):
        display = found[1] is not None
        mathml = to_mathml(found[1] or found[2], display="block" if display else "inline")
        # "ln 2" instead of "ln2"
        mathml = re.sub(
            r"(<mi>(?:ln|log|exp)</mi>)(?=<m[in])", r'\1<mspace width="0.17em"/>', mathml
        )
        mathml = mathml.replace("\n", " ").replace("|", "&#124;")  # | would end a table's cell
        # a line that begins with <math> would end its paragraph
        return mathml if display else f"<span>{mathml}</span>"

    def outside(part):
        math = r"(?<![\\$])\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$]+?)(?<=\S)\$(?!\w)"
        return re.sub(math, convert, part, flags=re.DOTALL)

    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [outside(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, outside(text[at:])])


def to_markdown(page, metadata, folder):
    """Markdown of a chapter; its pictures are written next to it."""
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = with_math(cell.source)
        for output in cell.get("outputs", ()):  # colors of a terminal
            if output.output_type == "stream":
                output.text = strip_ansi(output.text)
    notebook = nbformat.v4.new_notebook(cells=page.cells, metadata=metadata)
    exporter = MarkdownExporter()
    stem = Path(page.file).stem
    text, found = exporter.from_notebook_node(
        notebook, {"output_files_dir": f"{stem}_files", "unique_key": stem}
    )
    for name, data in found["outputs"].items():
        path = folder / "play" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return text


# ----------------------------------------------------------------------------------------- pages


def adapt(text, page, folder, moved):
    """Convert a page from GitHub's or Jupyter's Markdown to that of mkdocs. Files that it links to are
    copied to `folder`; links to folders become plain text. moved: the result of anchors.
    """
    text = re.sub(r"^<details>", "<details markdown>", text, flags=re.MULTILINE)
    here = Path(page).parent if not page.startswith("play/") else Path()

    def link(found):
        words, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            return found[0]
        inside = os.path.normpath(here / path) if path else page
        if inside == "play.ipynb" or (not path and page.startswith("play/")):
            place = moved[unquote(anchor)] if anchor else "play/index.md"
            return f"[{words}]({os.path.relpath(place, Path(page).parent)})"
        if (ROOT / inside).is_dir():
            return words
        copy(inside, folder)
        relative = os.path.relpath(inside, Path(page).parent)
        return f"[{words}]({relative}{'#' * bool(anchor)}{anchor})" if path else found[0]

    def convert(part):
        part = re.sub(r"\\$", "<br>", part, flags=re.MULTILINE)  # a forced line break
        return LINK.sub(link, part)

    parts, at = [], 0
    for code in re.finditer(r"^```.*?^```", text, re.MULTILINE | re.DOTALL):
        parts += [convert(text[at : code.start()]), code[0]]
        at = code.end()
    text = "".join([*parts, convert(text[at:])])
    for picture in re.findall(r'(?:src|srcset)="([^":]+)"', text):
        if not page.startswith("play/"):
            copy(os.path.normpath(here / picture), folder)
    return text


def copy(path, folder):
    """Copy a file that a page links to, except pages and generated files, which `collect` writes."""
    if path.endswith(".md") or path in (REPORT, RACE):
        return
    if not (ROOT / path).is_file():
        raise UserError(f"a page links to {path}, which does not exist; correct the link")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, folder / path)


def collect(folder):
    """Write all pages and files to `folder`. Returns the navigation."""
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    pages = chapters(notebook)
    moved, nav_parts = anchors(pages), {}
    for page in pages:
        text = to_markdown(page, notebook.metadata, folder)
        write(folder, page.file, adapt(text, page.file, folder, moved))
        nav_parts.setdefault(page.part, []).append({page.title: page.file})
    for page in ["README.md", "docs/LOG.md", *RESULTS, *DOCS]:
        text = (ROOT / page).read_text(encoding="utf-8")
        if page == "README.md":
            title, _, rest = text.partition("\n")
            text = title + "\n" + SEE + rest
        write(folder, page, adapt(text, page, folder, moved))
    shutil.copytree(HERE / "assets", folder / "assets")
    copy(MODEL, folder)
    run("-m", "lab", "report", RECORDED, "--out", folder / REPORT)
    run("bench/race.py", "--page", folder / RACE, "--out", folder)
    for picture in folder.glob("race*.svg"):  # README shows those of readme.assets
        picture.unlink()
    titles = lambda pages: [{title: page} for page, title in pages.items()]  # noqa: E731
    return [
        {"Home": "README.md"},
        {"Notebook": [*nav_parts.pop(""), *({part: found} for part, found in nav_parts.items())]},
        {"Learning log": "docs/LOG.md"},
        {"Results": [*titles(RESULTS), {"A run's report": REPORT}, {"The race": RACE}]},
        {"Model": MODEL},
        {"Reference": titles(DOCS)},
    ]


def write(folder, page, text):
    (folder / page).parent.mkdir(parents=True, exist_ok=True)
    (folder / page).write_text(text, encoding="utf-8")


def run(*args):
    """Run a program of this project."""
    subprocess.run([sys.executable, *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@dataclass
class Config:
    """Build the course as a site."""

    out: Path = ROOT / "site"  # folder to write; an earlier site there is replaced


def main(argv):
    out = parse_args(Config, argv).out.absolute()
    if out.exists() and any(out.iterdir()) and not (out / "search/search_index.js").exists():
        raise UserError(f"out={out} must be new, empty or an earlier site; choose another --out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pages")
        nav = collect(folder)
        # the unsafe loader, because mkdocs.yml, which is our own file, refers to a Python function
        loader = partial(yaml.load, Loader=yaml.UnsafeLoader)
        settings = loader((HERE / "mkdocs.yml").read_text(encoding="utf-8"))
        settings |= {"docs_dir": str(folder), "site_dir": str(out), "nav": nav}
        repository = os.environ.get("GITHUB_REPOSITORY")  # set by GitHub's workflows
        if repository:
            settings["repo_url"] = f"https://github.com/{repository}"
        config = Path(temporary, "mkdocs.yml")
        config.write_text(yaml.dump(settings), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "-f",
            str(config),
        ]
        done = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
        if done.returncode:
            raise UserError("mkdocs found the errors above; correct the links or pages they name")
    print(f"wrote {out}; open {out / 'index.html'}")


if __name__ == "__main__":
    run_main(main)
