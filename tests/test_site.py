"""The course as a site: no link is broken, and the pages work in a browser without a network.

Needs requirements-site.txt, and for the test with a browser requirements-browser.txt; run with -m slow.
"""

import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browser import Tab
from conftest import ROOT, run_python

pytestmark = pytest.mark.slow
NOTEBOOK = json.loads((ROOT / "play.ipynb").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs requirements-site.txt")
    pytest.importorskip("latex2mathml", reason="needs requirements-site.txt")
    folder = tmp_path_factory.mktemp("site")
    # no proxy: a download would fail at once
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    nowhere["GITHUB_REPOSITORY"] = "owner/name"
    done = run_python(ROOT / "website/build.py", "--out", "site", cwd=folder, **nowhere)
    assert done.returncode == 0, done.stderr
    return folder / "site"


class Page(HTMLParser):
    """A page's links, its anchors, and its text outside of scripts."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.text, self.hidden = [], {""}, "", 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.hidden += tag in ("script", "style")
        self.anchors |= {attributes.get("id")}
        self.links += [attributes[k] for k in ("href", "src", "srcset") if attributes.get(k)]

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += data * (not self.hidden)


def test_no_link_is_broken(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken, checked = [], 0
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "data"), link
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            checked += 1
            exists = target.is_file() and (
                target not in pages or unquote(parts.fragment) in pages[target].anchors
            )
            broken += [] if exists or parts.fragment == "__skip" else [f"{path.name}: {link}"]
    assert broken == [] and checked > 2000


def test_the_front_page_leads_on_and_code_is_a_page(site):
    page = Page(site / "index.html")
    order = ["Try a model", "Build it yourself", "two minutes of training", "One training step"]
    places = [page.text.rindex(words) for words in order]
    assert places == sorted(places) and "Where to begin" not in page.text
    assert page.links.count("race.html") > 1 and "train_gpt2.py.html" in page.links
    assert "git clone https://github.com/owner/name gpt2" in page.text
    backs = [
        Page(site / f).links[0] for f in ("race.html", "report.html", "examples/laptop_model.html")
    ]
    assert backs == ["index.html", "index.html", "../index.html"]
    code = Page(site / "train_gpt2.py.html").text
    assert (ROOT / "train_gpt2.py").read_text(encoding="utf-8").strip() in code


def test_each_chapter_is_a_page_with_its_outputs_and_formulas(site):
    text = "\n".join(
        "".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "markdown"
    )
    titles = re.findall(r"^#{1,2} (.+)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    files = sorted((site / "play").glob("*.html"))
    pages = {path: Page(path) for path in files}
    found = [re.search(r"<h1[^>]*>(.*?)<a", path.read_text(), re.S)[1] for path in files]
    unescape = [
        title.replace("&amp;", "&").replace("<code>", "`").replace("</code>", "`")
        for title in found
    ]
    assert set(titles) <= set(unescape) and len(files) == len(titles) + 4  # glossary, solutions
    outputs = [o.get("data", {}) for c in NOTEBOOK["cells"] for o in c.get("outputs", [])]
    pictures = sum("image/png" in data and "text/html" not in data for data in outputs)
    shown = [link for page in pages.values() for link in page.links if "_files/" in link]
    assert len(shown) == len(set(shown)) == pictures
    html = "".join(path.read_text() for path in files)
    widgets = len(re.findall("data-lab-widget=", "".join(map(str, outputs))))
    assert html.count("data-lab-widget=") == widgets > 0
    assert html.count("<math") > 200
    flow = (site / "play/12-the-residual-stream-why-do.html").read_text()
    flow = re.sub("<.*?>", "", re.search(r'<div class="flow">.*?</div>', flow)[0])
    assert (
        flow == "wte + wpe → +1 → +2 → 10 more blocks → ln_f, lm_head" and "flowchart" not in html
    )
    # outputs of one cell are one block, though a notebook stores them in pieces
    assert "temperature 0.1: Return the" in html and not re.search(r"\n\n\n+temperature 0.7", html)
    for path in files:
        outside = re.sub(r"<(code|pre|script)\b.*?</\1>", "", path.read_text(), flags=re.S)
        assert not re.search(r"\\(ln|frac|sum|sqrt|cdot|text)\b|\x1b", outside), path.name


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_work_from_disk(site, chromium, width):
    tab = Tab(chromium, (site / "index.html").as_uri(), viewport={"width": width, "height": 900})
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":  # its links begin at the root of a server
            tab.page.goto(path.as_uri())
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path.name
            assert tab.page.locator("article > math[display=inline]").count() == 0, path.name
    assert tab.wrong == []
    tab.page.goto((site / "play/4-attention-by-hand.html").as_uri())
    tab.page.locator(".md-footer__link--next").click()
    assert tab.page.inner_text("h1").startswith("5. The block and the model")
    tab.page.locator(".md-footer__link--prev").click()
    assert tab.page.inner_text("h1").startswith("4. Attention by hand")
    if width == 390:
        tab.page.locator("label[for=__search]").first.click()
    else:
        tab.page.click("[data-md-component=search-query]")
    tab.page.keyboard.type("nanoGPT laptop")
    tab.page.wait_for_function(
        "() => document.querySelector('.md-search-result__meta').innerText.includes('match')"
    )
    found = tab.page.locator(".md-search-result__link").evaluate_all("all => all.map(a => a.href)")
    assert any("/docs/LOG.html" in link for link in found) and tab.wrong == []
