"""report.html and play.ipynb as a person meets them: in a real browser, the notebook in a real JupyterLab.

    apt-get install chromium            # or Chrome, or Chromium from elsewhere: it must be on the PATH
    python -m pip install -r requirements-notebook.txt -r requirements-browser.txt
    python -m pytest -m slow tests/test_browser.py
    GPT2_SCREENSHOTS=shots python -m pytest -m slow tests/test_browser.py     # keeps pictures of everything

The notebook runs in a copy of the repository, cleared of its outputs, and takes as long as it takes: minutes on two cores.
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
from conftest import ROOT, clean_env, run_python
from test_plot import RUN
from test_report import EVIL, sample, write_run

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


# -------------------------------------------------------------------------------------------------------------- report


class Tab:
    """A page in a browser, with all that went wrong in it."""

    def __init__(self, browser, path, **how):
        self.page = browser.new_context(**how).new_page()
        self.wrong = []
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda r: self.wrong.append(r.url) if r.url.startswith(("http", "ws")) else None)
        self.page.goto(path.as_uri())
        self.panels = self.page.evaluate("page.panels.map(p => p.id)")

    def drawn(self, id):
        """How many curves and areas can be seen in a plot."""
        self.page.wait_for_selector(f"#{id} svg .trace path")
        return self.page.locator(f"#{id} svg .trace path[d]").count()

    def plot(self, id, what):
        return self.page.evaluate(f"document.getElementById({id!r}).{what}")


def two_runs(tmp_path, run_train):
    """Two real runs of twelve steps; the pages of the first and of both."""
    flags = ("--max_steps", 12, "--val_every", 4, "--sample_every", 6, "--sample_tokens", 40, "--timing")
    for more in ((), ("--run_name", "other", "--lr", "3e-3")):
        done = run_train(*flags, *more)
        assert done.returncode == 0, done.stderr
    for args in (["log/r"], ["log/r", "log/other", "--out", "both.html"]):
        done = run_python(ROOT / "lab", "report", *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    return tmp_path / "log/r/report.html", tmp_path / "both.html"


def test_report_of_real_runs(tmp_path, run_train, chromium, shots):
    one, both = two_runs(tmp_path, run_train)
    tab = Tab(chromium, one, viewport={"width": 1280, "height": 900})
    assert tab.panels == ["loss", "lr", "grad_norm", "speed", "phases0"]
    assert {id: tab.drawn(id) > 0 for id in tab.panels} == dict.fromkeys(tab.panels, True)
    assert tab.plot("loss", "data.length") == 2 and tab.plot("phases0", "data.length") == 4
    records = [json.loads(line) for line in (tmp_path / "log/r/log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert tab.plot("loss", "data[0].y") == pytest.approx(losses, rel=1e-5) and len(losses) == 12

    texts = [text for r in records if r["kind"] == "sample" for text in r["texts"]]
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in "\0".join(texts))
    assert len(texts) == 4 and "␀".join(tab.page.locator("pre").all_text_contents()) == shown
    assert tab.page.locator("pre").last.is_visible() and not tab.page.locator("pre").first.is_visible()

    for axis, factor in (("tokens", 128), ("steps", 1)):
        tab.page.locator("nav").get_by_text(axis, exact=True).click()
        for id in tab.panels:
            assert tab.plot(id, "data[0].x") == [factor * s for s in range(1, 13)]
            assert tab.page.locator(f"#{id} .xtitle").text_content() == axis
    tab.page.locator("nav").get_by_text("seconds", exact=True).click()
    times = [r["time"] - records[0]["time"] for r in records if r["kind"] == "train"]
    assert tab.plot("speed", "data[0].x") == pytest.approx(times, abs=0.006)
    tab.page.screenshot(path=shots / "report.png", full_page=True)

    tab = Tab(chromium, both)
    assert tab.panels == ["loss", "difference", "lr", "grad_norm", "speed", "phases0", "phases1"]
    assert all(tab.drawn(id) for id in tab.panels) and tab.plot("difference", "data.length") == 2
    assert tab.page.locator("tr", has_text="lr").first.inner_text().split() == ["lr", "0.001", "0.003"]
    tab.page.screenshot(path=shots / "report_two.png", full_page=True)
    assert tab.wrong == []


def test_report_zooms_all_plots_at_once(tmp_path, chromium):
    tab = Tab(chromium, made(tmp_path), viewport={"width": 1280, "height": 900})
    before = tab.plot("lr", "layout.xaxis.range")
    box = tab.page.locator("#loss .nsewdrag").bounding_box()
    at = [(box["x"] + share * box["width"], box["y"] + box["height"] / 2) for share in (0.25, 0.5)]
    tab.page.mouse.move(*at[0])
    tab.page.mouse.down()
    tab.page.mouse.move(*at[1], steps=5)
    tab.page.mouse.up()
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] > 50")
    low, high = tab.plot("lr", "layout.xaxis.range")
    assert low == pytest.approx(100, abs=10) and high == pytest.approx(200, abs=10)
    assert tab.plot("loss", "layout.xaxis.range") == [low, high]
    tab.page.mouse.dblclick(*at[0])
    tab.page.wait_for_function("() => document.getElementById('lr').layout.xaxis.range[0] < 50")
    assert tab.plot("lr", "layout.xaxis.range") == tab.plot("loss", "layout.xaxis.range") == before
    assert tab.wrong == []


def made(tmp_path, *more):
    """The page of a made-up run."""
    folder = write_run(tmp_path / "made", [*RUN, *more])
    done = run_python(ROOT / "lab", "report", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return folder / "report.html"


def test_report_on_a_phone_and_in_the_dark(tmp_path, chromium, shots):
    how = dict(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, color_scheme="dark")
    tab = Tab(chromium, made(tmp_path, sample(400, "word " * 50 + "w" * 200)), **how)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.plot("loss", "layout.paper_bgcolor") == "#0d1117" and tab.plot("loss", "layout.dragmode") is False
    tab.page.screenshot(path=shots / "report_phone.png", full_page=True)
    tab.page.emulate_media(color_scheme="light")
    tab.page.wait_for_function("() => document.getElementById('loss').layout.paper_bgcolor == '#ffffff'")
    assert tab.wrong == []


def test_report_runs_no_text_from_a_log(tmp_path, chromium):
    tab = Tab(chromium, made(tmp_path, sample(400, EVIL)))
    assert tab.page.locator("pre").text_content() == EVIL and tab.page.title() == "made"
    assert tab.page.locator("img").count() == 0
    tab.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    tab.page.wait_for_timeout(200)  # had it got in, the page's own rules would not have let it run
    assert tab.page.title() == "made" and any("Content Security Policy" in text for text in tab.wrong)


# ------------------------------------------------------------------------------------------------------------ notebook


@pytest.fixture
def lab(tmp_path):
    """(address, folder) of a JupyterLab that serves a copy of the repository; nothing of it is left in the home."""
    pytest.importorskip("jupyterlab", reason="needs requirements-notebook.txt")
    folder, home = tmp_path / "repo", tmp_path / "home"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    settings = {"notebook-extension/tracker": {"windowingMode": "none"},  # all cells are in the page, seen or not
                "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}  # fmt: skip
    for name, values in settings.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = clean_env(JUPYTERLAB_SETTINGS_DIR=str(home / "settings"), JUPYTERLAB_WORKSPACES_DIR=str(home / "workspaces"),
                    JUPYTER_CONFIG_DIR=str(home), JUPYTER_RUNTIME_DIR=str(home), IPYTHONDIR=str(home))  # fmt: skip
    for name in ("MPLBACKEND", "OMP_NUM_THREADS"):  # the kernel draws into the page, with all threads
        env.pop(name, None)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", f"--port={port}",
               "--ServerApp.port_retries=0", "--IdentityProvider.token=secret", f"--ServerApp.root_dir={folder}"]  # fmt: skip
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
  const errors = code.flatMap(cell => cell.model.sharedModel.getOutputs().filter(o => o.output_type == "error"));
  return { status: panel.sessionContext?.session?.kernel?.status, dirty: panel.model?.dirty,
           counts: code.map(cell => cell.model.executionCount), errors: errors.map(o => o.ename + ": " + o.evalue) };
}"""


def test_notebook_runs_in_jupyterlab(lab, chromium, shots):
    """Run > Run All Cells, wait, save, and look into the file that was saved."""
    address, folder = lab
    notebook = json.loads((folder / "play.ipynb").read_text())
    for cell in notebook["cells"]:
        cell.update({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})
    (folder / "play.ipynb").write_text(json.dumps(notebook))

    page = chromium.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    page.goto(address)
    ready = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'"
    page.wait_for_function(ready, timeout=180_000)
    assert page.evaluate(STATE)["counts"] == [None] * sum(cell["cell_type"] == "code" for cell in notebook["cells"])
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

    saved = [cell for cell in json.loads((folder / "play.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in saved:
        for output in cell["outputs"]:
            text = "\n".join(output.get("traceback", []))
            assert output["output_type"] != "error", f"{''.join(cell['source'])}\n{text}"
    assert [cell["execution_count"] for cell in saved] == list(range(1, len(saved) + 1))
    pictures = sum("image/png" in output.get("data", {}) for cell in saved for output in cell["outputs"])
    chapters = sum("".join(cell["source"]).startswith("## ") for cell in notebook["cells"] if cell["cell_type"] == "markdown")
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
