"""report.html and play.ipynb as a person meets them: in a real browser, and in a real JupyterLab.

    apt-get install chromium            # or Chrome, or Chromium from elsewhere: it must be on the PATH
    python -m pip install -r requirements-notebook.txt -r requirements-browser.txt
    python -m pytest -m slow tests/test_browser.py        # GPT2_SCREENSHOTS=shots before it keeps pictures

The notebook runs in a copy of the repository, cleared of its outputs: minutes on two cores.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT, clean_env
from test_plot import RUN, val
from test_report import EVIL, sample, write_run

from lab.tools import report

pytestmark = pytest.mark.slow
CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LEFT_BEHIND = (".*", "log", "data", "edu_fineweb*", "__pycache__")  # what a fresh clone has not


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


# ------------------------------------------------------------------------------------------ report


class Tab:
    """A page in a browser, with all that went wrong in it."""

    def __init__(self, browser, path, **how):
        self.page = browser.new_context(**how).new_page()
        self.wrong = []
        bad = ("error", "warning")
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in bad else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda d: (self.wrong.append(d.message), d.dismiss()))
        asked = ("http", "ws")
        self.page.on(
            "request", lambda r: self.wrong.append(r.url) if r.url.startswith(asked) else None
        )
        self.page.goto(path.as_uri())
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
    tab = Tab(chromium, tmp_path / "one.html", viewport={"width": 1280, "height": 900})
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

    shown = tab.page.locator(
        "article:visible h3"
    )  # the newest text first, the others by the slider
    steps = tab.page.locator("article").count()
    assert shown.all_text_contents() == ["after 12 steps"] and steps > 1
    tab.page.locator("#step").press("ArrowLeft")
    assert shown.all_text_contents() == ["after 6 steps"]
    tokens = tab.page.locator("#shaded .t")
    assert tokens.count() == 40 and not tab.page.locator("#shaded .box:visible").count()
    tokens.nth(5).hover()
    box = tab.page.locator("#shaded .box:visible")
    assert box.count() == 1 and box.inner_text().count("%") == 6
    tab.page.screenshot(path=shots / "report.png", full_page=True)

    report.write_page(runs, tmp_path / "both.html")
    both = Tab(chromium, tmp_path / "both.html", color_scheme="dark")
    assert both.figures == ["loss", "difference", "lr", "grad_norm", "tok_per_s"]
    assert all(both.drawn(id) for id in both.figures)
    row = both.page.locator("tr", has_text="lr").first.inner_text()
    assert row.split() == ["lr", "0.001", "0.003"]
    both.page.screenshot(path=shots / "report_two.png", full_page=True)
    assert tab.wrong == both.wrong == []


def test_report_zooms_all_plots_at_once_and_says_the_step(tmp_path, chromium):
    tab = Tab(chromium, made(tmp_path / "r"), viewport={"width": 1280, "height": 900})
    before = tab.plot("lr", "layout.xaxis.range")
    tab.page.mouse.move(*tab.place("loss", 0.5))
    tab.page.wait_for_selector("#loss .hoverlayer .legend")
    assert "step 200" in tab.page.locator("#loss .hoverlayer").text_content()
    tab.page.mouse.move(*tab.place("loss", 0.25))
    tab.page.mouse.down()
    tab.page.mouse.move(*tab.place("loss", 0.5), steps=5)
    tab.page.mouse.up()
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] > 50")
    low, high = tab.plot("lr", "layout.xaxis.range")
    assert low == pytest.approx(100, abs=10) and high == pytest.approx(200, abs=10)
    assert tab.plot("loss", "layout.xaxis.range") == [low, high]
    tab.page.mouse.dblclick(*tab.place("loss", 0.25))
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] < 50")
    assert tab.plot("lr", "layout.xaxis.range") == tab.plot("loss", "layout.xaxis.range") == before
    assert tab.wrong == []


def test_report_loss_axis(tmp_path, chromium):
    tab = Tab(chromium, made(tmp_path / "r"))
    assert tab.plot("loss", "_fullLayout.yaxis.range")[1] < 5 < 5.6
    tab.choose("all")
    assert tab.plot("loss", "_fullLayout.yaxis.range")[1] > 5.6
    tab.choose("log")
    assert tab.plot("loss", "_fullLayout.yaxis.type") == "log" and tab.wrong == []


def test_report_on_a_phone_and_in_the_dark(tmp_path, chromium, shots):
    how = dict(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    path = made(tmp_path / ("r" * 60), sample(400, "word " * 50 + "w" * 200))
    tab = Tab(chromium, path, color_scheme="dark", **how)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.plot("loss", "_fullLayout.paper_bgcolor") == "#0d1117"
    assert tab.plot("loss", "_fullLayout.dragmode") is False, "a finger scrolls the page"
    green = tab.plot("loss", "data[0].line.color")
    tab.page.screenshot(path=shots / "report_phone.png", full_page=True)
    tab.page.emulate_media(color_scheme="light")
    light = "document.getElementById('loss')._fullLayout.paper_bgcolor == '#ffffff'"
    tab.page.wait_for_function(f"() => {light}")
    assert tab.plot("loss", "data[0].line.color") != green and tab.wrong == []


def test_report_runs_no_text_from_a_log(tmp_path, chromium):
    tab = Tab(chromium, made(tmp_path / "r", sample(400, EVIL)))
    assert tab.page.locator("pre").text_content() == EVIL and tab.page.title() == "r"
    evil = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    tab.page.evaluate(evil)
    tab.page.wait_for_timeout(200)  # had it got in, the page's own rules would not have let it run
    assert tab.page.title() == "r" and any("Content Security Policy" in text for text in tab.wrong)


def test_a_watched_report_loads_itself_anew(tmp_path, chromium, monkeypatch):
    monkeypatch.setattr(report, "RENEW", 1)
    run = write_run(tmp_path / "r", RUN)
    assert report.write_page([run], tmp_path / "r.html", watch=True)
    tab = Tab(chromium, tmp_path / "r.html")
    tab.choose("tokens")
    write_run(run, [*RUN, val(600, 1.5)])
    report.write_page([run], tmp_path / "r.html", watch=True)
    tab.page.wait_for_selector("h1:has-text('1.50 at step 600')")
    assert tab.page.locator("#lr .xtitle").text_content() == "tokens" and tab.wrong == []


# ---------------------------------------------------------------------------------------- notebook


@pytest.fixture
def lab(tmp_path):
    """(address, folder) of a JupyterLab that serves a copy of the repository and leaves nothing at home."""
    pytest.importorskip("jupyterlab", reason="needs requirements-notebook.txt")
    folder, home = tmp_path / "repo", tmp_path / "home"
    top = shutil.ignore_patterns(*LEFT_BEHIND)  # not lab/data
    inside = shutil.ignore_patterns("__pycache__")

    def ignored(at, names):
        return (top if Path(at) == ROOT else inside)(at, names)

    shutil.copytree(ROOT, folder, ignore=ignored)
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are in the page
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, values in settings.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"SETTINGS_DIR": home / "settings", "WORKSPACES_DIR": home / "workspaces"}
    env = clean_env(**{f"JUPYTERLAB_{name}": str(path) for name, path in places.items()})
    env |= dict.fromkeys(("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"), str(home))
    for name in (
        "MPLBACKEND",
        "OMP_NUM_THREADS",
    ):  # the kernel draws into the page, with all threads
        env.pop(name, None)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--expose-app-in-browser", f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--IdentityProvider.token=secret", f"--ServerApp.root_dir={folder}"]
    with (tmp_path / "lab.txt").open("w") as out:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/api?token=secret", server, tmp_path / "lab.txt")
        yield f"http://127.0.0.1:{port}/lab/tree/play.ipynb?token=secret", folder
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_up(address, server, output):
    for _ in range(240):
        try:
            return urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            assert server.poll() is None, output.read_text()
            time.sleep(0.5)
    raise AssertionError(f"JupyterLab did not come up:\n{output.read_text()}")


# what the page knows of the notebook: whether the kernel is idle, each code cell's count, the errors
STATE = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  const code = panel.content.widgets.filter(cell => cell.model.type == "code");
  const outputs = code.flatMap(cell => cell.model.sharedModel.getOutputs());
  const errors = outputs.filter(o => o.output_type == "error").map(o => o.ename + ": " + o.evalue);
  return { status: panel.sessionContext?.session?.kernel?.status, dirty: panel.model?.dirty,
           counts: code.map(cell => cell.model.executionCount), errors };
}"""


def test_notebook_runs_in_jupyterlab(lab, chromium, shots):
    """Run > Run All Cells, wait, save, and look into the file that was saved."""
    address, folder = lab
    notebook = json.loads((folder / "play.ipynb").read_text())
    for cell in notebook["cells"]:
        cell.update({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})
    (folder / "play.ipynb").write_text(json.dumps(notebook))

    page = chromium.new_context(viewport={"width": 1280, "height": 1000}).new_page()
    page.goto(address)
    ready = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'"
    page.wait_for_function(ready, timeout=180_000)
    assert page.evaluate(STATE)["counts"] == [None] * sum(
        cell["cell_type"] == "code" for cell in notebook["cells"]
    )
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    end = time.monotonic() + 1800
    while True:
        time.sleep(2)
        state = page.evaluate(STATE)
        if state["errors"] or state["status"] == "idle" and None not in state["counts"]:
            break
        assert time.monotonic() < end, f"not done: {state}"
    page.keyboard.press("Control+s")
    page.wait_for_function(f"() => !({STATE})().dirty", timeout=60_000)
    photograph(page, shots)

    saved = [
        cell
        for cell in json.loads((folder / "play.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    for cell in saved:
        for output in cell["outputs"]:
            text = "\n".join(output.get("traceback", []))
            assert output["output_type"] != "error", f"{''.join(cell['source'])}\n{text}"
    assert [cell["execution_count"] for cell in saved] == list(range(1, len(saved) + 1))
    pictures = sum(
        "image/png" in output.get("data", {}) for cell in saved for output in cell["outputs"]
    )
    chapters = sum(
        "".join(cell["source"]).startswith("## ")
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
    )
    assert pictures >= chapters, "each chapter draws what it found"
    assert page.locator(".jp-RenderedImage img").count() == pictures


def photograph(page, shots):
    """Pictures of the whole notebook, a window at a time."""
    page.keyboard.press("Control+b")  # closes the side bar
    scroller = page.locator(".jp-WindowedPanel-outer").first
    height = scroller.evaluate("e => e.scrollHeight")
    for i, top in enumerate(range(0, height, 900)):
        scroller.evaluate("(e, top) => { e.scrollTop = top; }", top)
        page.wait_for_timeout(300)
        page.screenshot(path=shots / f"notebook_{i:03d}.png")
