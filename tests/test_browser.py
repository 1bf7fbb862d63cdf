"""report.html as a person meets it, in a real browser.

apt-get install chromium            # or Chrome, or Chromium from elsewhere: it must be on the PATH
python -m pip install -r requirements-browser.txt
python -m pytest -m slow tests/test_browser.py        # GPT2_SCREENSHOTS=shots before it keeps pictures
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_plot import RUN, val
from test_report import EVIL, sample, write_run

from lab.tools import report

pytestmark = pytest.mark.slow
CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs requirements-browser.txt")
    path = next(filter(None, map(shutil.which, CHROMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(CHROMES)} is on the PATH")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # whom Chromium's sandbox refuses
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@pytest.fixture
def shots(tmp_path):
    """The folder for pictures."""
    folder = Path(os.environ.get("GPT2_SCREENSHOTS") or tmp_path / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tab:
    """A page in a browser, with all that went wrong in it."""

    def __init__(self, browser, address, may_ask="no server", **how):
        self.page = browser.new_context(**how).new_page()
        self.wrong = wrong = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(m.text))
        self.page.on("pageerror", lambda error: wrong.append(str(error)))
        self.page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
        known = (may_ask, "file:", "data:", "blob:")
        self.page.on("request", lambda r: r.url.startswith(known) or wrong.append(r.url))
        self.page.goto(address)


class Report(Tab):
    """The page of a run, in a file."""

    def __init__(self, browser, path, **how):
        super().__init__(browser, path.as_uri(), **how)
        self.figures = self.page.locator(".plot").evaluate_all("all => all.map(one => one.id)")

    def drawn(self, id):
        """How many curves and areas can be seen in a plot."""
        self.page.wait_for_selector(f"#{id} svg .trace path")
        return self.page.locator(f"#{id} svg .trace path[d]").count()

    def plot(self, id, what):
        return self.page.evaluate(f"document.getElementById({id!r}).{what}")

    def choose(self, value):
        self.page.locator(f"nav label:has(input[value={value}])").click()

    def place(self, id, share):
        """A point of the screen, as a share of a plot's width."""
        box = self.page.locator(f"#{id} .nsewdrag").bounding_box()
        return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def made(folder, *more):
    """The page of a made-up run."""
    write_run(folder, [*RUN, *more])
    report.write_page([folder], folder / "report.html")
    return folder / "report.html"


def test_report_of_real_runs(tmp_path, run_train, chromium, shots):
    flags = ("--max_steps", 12, "--val_every", 4, "--sample_every", 6, "--sample_tokens", 40)
    for more in (("--timing",), ("--run_name", "other", "--lr", "3e-3")):
        done = run_train(*flags, *more)
        assert done.returncode == 0, done.stderr
    runs = [tmp_path / "log/r", tmp_path / "log/other"]
    report.write_page(runs[:1], tmp_path / "one.html")
    tab = Report(chromium, tmp_path / "one.html", viewport={"width": 1280, "height": 900})
    assert tab.figures == ["loss", "lr", "grad_norm", "tok_per_s"]
    assert all(tab.drawn(id) for id in tab.figures)
    records = [json.loads(line) for line in (runs[0] / "log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert tab.plot("loss", "data[0].y") == pytest.approx(losses, rel=1e-5) and len(losses) == 12

    tab.choose("tokens")
    assert tab.plot("lr", "data[0].x") == [128 * step for step in range(1, 13)]
    assert tab.page.locator("#lr .xtitle").text_content() == "tokens"
    tab.choose("time")
    times = [(r["time"] - records[0]["time"]) / 60 for r in records if r["kind"] == "train"]
    assert tab.plot("lr", "data[0].x") == pytest.approx(times, abs=1e-4)

    shown = tab.page.locator("article:visible h3")  # the newest first, the others by the slider
    steps = tab.page.locator("article").count()
    assert shown.all_text_contents() == ["after 12 steps"] and steps > 1
    tab.page.locator("#step").press("ArrowLeft")
    assert shown.all_text_contents() == ["after 6 steps"]
    tokens = tab.page.locator("#shaded .t")
    assert tokens.count() == 40 and not tab.page.locator("#shaded .box:visible").count()
    tokens.nth(5).hover()
    assert tab.page.locator("#shaded .box:visible").inner_text().count("%") == 6
    tab.page.screenshot(path=shots / "report.png", full_page=True)

    report.write_page(runs, tmp_path / "both.html")
    both = Report(chromium, tmp_path / "both.html", color_scheme="dark")
    assert both.figures == ["loss", "difference", "lr", "grad_norm", "tok_per_s"]
    assert all(both.drawn(id) for id in both.figures)
    row = both.page.locator("tr", has_text="lr").first.inner_text()
    assert row.split() == ["lr", "0.001", "0.003"]
    both.page.screenshot(path=shots / "report_two.png", full_page=True)
    assert tab.wrong == both.wrong == []


def test_report_zooms_all_plots_at_once_and_says_the_step(tmp_path, chromium):
    tab = Report(chromium, made(tmp_path / "r"), viewport={"width": 1280, "height": 900})
    before = tab.plot("lr", "layout.xaxis.range")
    tab.page.mouse.move(*tab.place("loss", 0.5))
    tab.page.wait_for_selector("#loss .hoverlayer .legend")
    assert "step 200" in tab.page.locator("#loss .hoverlayer").text_content()
    count = "zooms = 0; document.getElementById('lr').on('plotly_relayout', () => { zooms++; })"
    tab.page.evaluate(count)
    tab.page.mouse.move(*tab.place("loss", 0.25))
    tab.page.mouse.down()
    tab.page.mouse.move(*tab.place("loss", 0.5), steps=5)
    tab.page.mouse.up()
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] > 50")
    low, high = tab.plot("lr", "layout.xaxis.range")
    assert low == pytest.approx(100, abs=10) and high == pytest.approx(200, abs=10)
    assert tab.plot("loss", "layout.xaxis.range") == [low, high]
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("zooms") == 1, "a zoom that follows one begins none"
    tab.page.mouse.dblclick(*tab.place("loss", 0.25))
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] < 50")
    assert tab.plot("lr", "layout.xaxis.range") == tab.plot("loss", "layout.xaxis.range") == before
    assert tab.wrong == []


def test_report_on_a_phone(tmp_path, chromium, shots):
    how = dict(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    path = made(tmp_path / ("r" * 60), sample(400, "word " * 50 + "w" * 200))
    tab = Report(chromium, path, color_scheme="dark", **how)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.plot("loss", "_fullLayout.paper_bgcolor") == "#0d1117"
    assert tab.plot("loss", "_fullLayout.dragmode") is False, "a finger scrolls the page"
    tab.page.screenshot(path=shots / "report_phone.png", full_page=True)
    assert tab.wrong == []


def test_report_runs_no_text_from_a_log(tmp_path, chromium):
    tab = Report(chromium, made(tmp_path / "r", sample(400, EVIL)))
    assert tab.page.locator("pre").text_content() == EVIL and tab.page.title() == "r"
    evil = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    tab.page.evaluate(evil)
    tab.page.wait_for_timeout(200)  # had it got in, the page's own rules would not have let it run
    assert tab.page.title() == "r" and any("Content Security Policy" in text for text in tab.wrong)


def test_a_watched_report_loads_itself_anew(tmp_path, chromium, monkeypatch):
    monkeypatch.setattr(report, "RENEW", 1)
    run = write_run(tmp_path / "r", RUN)
    assert report.write_page([run], tmp_path / "r.html", watch=True)
    tab = Report(chromium, tmp_path / "r.html")
    tab.choose("tokens")
    write_run(run, [*RUN, val(600, 1.5)])
    report.write_page([run], tmp_path / "r.html", watch=True)
    tab.page.wait_for_selector("h1:has-text('1.50 at step 600')")
    assert tab.page.locator("#lr .xtitle").text_content() == "tokens" and tab.wrong == []
