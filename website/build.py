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
from html import escape
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

from lab.cli import UserError, eprint, parse_args, run_main  # noqa: E402

DOCS = {  # {page: its title in the navigation}
    "docs/RUNS.md": "Runs",
    "docs/DATA.md": "Data",
    "docs/FAULTS.md": "Faults",
    "docs/SYSTEMS.md": "Systems and cards",
    "docs/GLOSSARY.md": "Glossary",
    "CONTRIBUTING.md": "Contributing",
}
RESULTS = {"docs/RESULTS.md": "Results", "docs/SPEED.md": "Speed"}
MODEL, REPORT, RACE = "examples/laptop_model.html", "report.html", "race.html"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # owner/name; set by GitHub's workflows
RECORDED = "readme.assets/runs/gpt2_124m.jsonl"  # the run that report.html shows
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NODE = re.compile(r'(\w+)(?:\["(.+?)"\]|\(\("(.+?)"\)\))?')  # A, A["text"] or A(("text"))
ARROW = re.compile(
    r'\s*(?:--|-\.)(?:\s*"?([^">]+?)"?\s*(?:--|\.-))?>\s*'
)  # -->, -- text -->, -. "text" .->
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
        # a line that begins with <math> would end its paragraph; punctuation stays with its formula
        return mathml if display else f'<span class="formula">{mathml}{found[3]}</span>'

    def outside(part):
        math = r"(?<![\\$])\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$]+?)(?<=\S)\$(?!\w)([,.;:?)]*)"
        return re.sub(math, convert, part, flags=re.DOTALL)

    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [outside(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, outside(text[at:])])


def flowchart(found):
    """HTML of a mermaid flowchart, without a library: a row of boxes and arrows for each of its lines."""
    names = {}

    def box(node):
        name, label, circle = NODE.fullmatch(node).groups()
        number = re.sub(r"\D", "", name) if circle else ""  # tells several + apart
        names.setdefault(name, f"{escape(label or circle or name)}<sub>{number}</sub>")
        return f"<b>{names[name]}</b>"

    rows = []
    for line in found[1].splitlines()[1:]:
        first, *rest = ARROW.split(line.strip())
        arrows = []
        for label, node in zip(rest[::2], rest[1::2]):
            arrows += [f"<span>{escape(label) + ' ' if label else ''}→</span>", box(node)]
        rows.append(f'<div class="flow">{" ".join([box(first), *arrows])}</div>')
    return "\n".join(rows)


def to_markdown(page, metadata, folder):
    """Markdown of a chapter; its pictures are written next to it."""
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = with_math(MERMAID.sub(flowchart, cell.source))
        elif outputs := cell.get("outputs"):
            cell.outputs = []
            for output in outputs:
                if output.output_type == "stream":
                    output.text = strip_ansi(output.text)  # without a terminal's colors
                    if cell.outputs and cell.outputs[-1].get("name") == output.name:
                        cell.outputs[-1].text += output.text  # one block of text
                        continue
                cell.outputs.append(output)
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
    copied to `folder`; links to folders and hidden files become plain text. moved: the result of anchors.
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
        if (ROOT / inside).is_dir() or inside.startswith(
            "."
        ):  # mkdocs and GitHub Pages skip .github
            return words
        copy(inside, folder)
        inside += ".md" * inside.endswith(".py")
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
    """Copy a file that a page links to, except pages and generated files, which `collect` writes.
    Python files become pages."""
    if path.endswith(".md") or path in (REPORT, RACE):
        return
    if not (ROOT / path).is_file():
        raise UserError(f"a page links to {path}, which does not exist; correct the link")
    if path.endswith(".py"):
        head = f"---\ntitle: {path}\nhide: [navigation]\nsearch: {{exclude: true}}\n---\n"
        code = (ROOT / path).read_text(encoding="utf-8")
        return write(folder, f"{path}.md", f"{head}# {path}\n\n~~~~python\n{code}~~~~\n")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, folder / path)


def front_page(readme):
    """README, with home.md in place of its title and of its first section, "Where to begin"."""
    found = re.match(r"# [^\n]*\n(.*?)^## .*?(^## .*)", readme, re.M | re.S)
    if not found:
        raise UserError("README.md must have a title and two sections; correct front_page")
    start, rest = found.groups()
    if REPOSITORY:
        start = re.sub(
            r"(git clone )REPOSITORY( .*?) *#.*", rf"\1https://github.com/{REPOSITORY}\2", start
        )
    return (HERE / "home.md").read_text(encoding="utf-8") + start + rest


def collect(folder):
    """Write all pages and files to `folder`. Returns the navigation."""
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    pages = chapters(notebook)
    moved, nav_parts = anchors(pages), {}
    for page in pages:
        text = to_markdown(page, notebook.metadata, folder)
        write(folder, page.file, adapt(text, page.file, folder, moved))
        title = page.title if page is not pages[0] else "Introduction"
        nav_parts.setdefault(page.part, []).append({title: page.file})
    for page in ["README.md", "docs/LOG.md", *RESULTS, *DOCS]:
        text = (ROOT / page).read_text(encoding="utf-8")
        if page == "README.md":
            text = front_page(text)
        write(folder, page, adapt(text, page, folder, moved))
    shutil.copytree(HERE / "assets", folder / "assets")
    copy(MODEL, folder)
    run("-m", "lab", "report", RECORDED, "--out", folder / REPORT)
    run("bench/race.py", "--page", folder / RACE, "--out", folder)
    for page in (MODEL, REPORT, RACE):  # they have their own layout, so they get a link to the site
        file, home = folder / page, os.path.relpath("index.html", Path(page).parent)
        back = f'<body>\n<p><a href="{home}">GPT-2 from scratch</a></p>'
        text = file.read_text(encoding="utf-8").replace("<body>", back, 1)
        file.write_text(text, encoding="utf-8")
    for picture in folder.glob("race*.svg"):  # README shows those of readme.assets
        picture.unlink()
    titles = lambda pages: [{title: page} for page, title in pages.items()]  # noqa: E731
    # not as mkdocs' repo_url: with it, each page would ask api.github.com for the number of stars
    github = [{"GitHub": f"https://github.com/{REPOSITORY}"}] if REPOSITORY else []
    return [
        {"Home": "README.md"},
        {"Notebook": [*nav_parts.pop(""), *({part: found} for part, found in nav_parts.items())]},
        {"Learning log": "docs/LOG.md"},
        {"Results": [*titles(RESULTS), {"A run's report": REPORT}, {"The race": RACE}]},
        {"Model": MODEL},
        {"Reference": titles(DOCS)},
        *github,
    ]


def write(folder, page, text):
    (folder / page).parent.mkdir(parents=True, exist_ok=True)
    (folder / page).write_text(text, encoding="utf-8")


def run(*args):
    """Run a program of this project."""
    subprocess.run([sys.executable, *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def mend_search(out):
    """Correct a fault of lunr, Material's search library: with digits in words, two states of its
    automaton may get the same key, so that some searches, such as "n", fail. A comma after the id of
    a state tells them apart."""
    (script,) = out.glob("assets/javascripts/workers/search.*.min.js")
    text = script.read_text(encoding="utf-8")
    if text.count("e=e+s+o.id}") != 1:
        raise UserError(
            f"{script.name} has changed; correct mend_search, or remove it if lunr is mended"
        )
    script.write_text(text.replace("e=e+s+o.id}", 'e=e+s+o.id+","}'), encoding="utf-8")


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
        config = Path(temporary, "mkdocs.yml")
        config.write_text(yaml.dump(settings), encoding="utf-8")
        # not with --quiet, which also hides warnings from --strict
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            eprint(done.stderr)
            raise UserError("mkdocs found the errors above; correct the links or pages they name")
    mend_search(out)
    print(f"wrote {out}; open {out / 'index.html'}")


if __name__ == "__main__":
    run_main(main)
