"""report.html and the page of lab serve in a real browser.

apt-get install chromium            # or any Chrome or Chromium on the PATH
python -m pip install -r requirements-browser.txt
python -m pytest -m slow tests/test_browser.py
"""

import json

import pytest
from conftest import Tab
from test_plot import RUN
from test_report import EVIL, sample, write_run
from test_sample import noisy_gpt
from test_serve import EVIL as HOSTILE
from test_serve import Server, endless

from lab.tools import report

pytestmark = pytest.mark.slow


class Report(Tab):
    """A report.html file."""

    def __init__(self, browser, path, **how):
        super().__init__(browser, path.as_uri(), **how)
        self.figures = self.page.locator(".plot").evaluate_all("all => all.map(one => one.id)")

    def drawn(self, id):
        """Number of curves and areas drawn in a plot."""
        self.page.wait_for_selector(f"#{id} svg .trace path")
        return self.page.locator(f"#{id} svg .trace path[d]").count()

    def plot(self, id, what):
        return self.page.evaluate(f"document.getElementById({id!r}).{what}")

    def choose(self, value):
        self.page.locator(f"nav label:has(input[value={value}])").click()


def test_report_of_real_runs(tmp_path, run_train, chromium):
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

    shown = tab.page.locator("article:visible h3")  # the newest; the slider shows the others
    steps = tab.page.locator("article").count()
    assert shown.all_text_contents() == ["after 12 steps"] and steps > 1
    tab.page.locator("#step").press("ArrowLeft")
    assert shown.all_text_contents() == ["after 6 steps"]
    tokens = tab.page.locator("#shaded .t")
    assert tokens.count() == 40 and not tab.page.locator("#shaded .box:visible").count()
    tokens.nth(5).hover()
    assert tab.page.locator("#shaded .box:visible").inner_text().count("%") == 6

    report.write_page(runs, tmp_path / "both.html")
    both = Report(chromium, tmp_path / "both.html", color_scheme="dark")
    assert both.figures == ["loss", "difference", "lr", "grad_norm", "tok_per_s"]
    assert all(both.drawn(id) for id in both.figures)
    row = both.page.locator("tr", has_text="lr").first.inner_text()
    assert row.split() == ["lr", "0.001", "0.003"]
    assert tab.wrong == both.wrong == []


def test_report_does_not_run_scripts_from_a_log(tmp_path, chromium):
    write_run(tmp_path / "r", [*RUN, sample(400, EVIL)])
    report.write_page([tmp_path / "r"], tmp_path / "r.html")
    tab = Report(chromium, tmp_path / "r.html")
    assert tab.page.locator("pre").text_content() == EVIL and tab.page.title() == "r"
    evil = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    tab.page.evaluate(evil)
    tab.page.wait_for_timeout(200)  # the policy stops even injected scripts
    assert tab.page.title() == "r" and any("Content Security Policy" in text for text in tab.wrong)


# ------------------------------------------------------------------------------ lab serve


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    server = Server(tmp_path_factory.mktemp("serve"), endless(noisy_gpt(block_size=256)))
    yield server
    server.process.kill()


class Page(Tab):
    """The page of lab serve, in its own tab."""

    def __init__(self, browser, server, **how):
        super().__init__(browser, server.url, may_ask=server.url, **how)

    def set(self, **numbers):
        for id, value in numbers.items():
            self.page.evaluate(f"document.getElementById('{id}').value = '{value}'")

    def write(self, prompt):
        self.page.fill("#prompt", prompt)
        self.page.click("#go")

    def texts(self, where="#out > .t > span:first-child"):
        return self.page.locator(where).all_text_contents()

    def done(self):
        self.page.wait_for_selector("#halt", state="hidden")
        return self.texts()

    def count(self):
        return self.page.locator("#out > .t").count()

    def grows(self, n):
        """Wait until more than n tokens are shown."""
        self.page.wait_for_function(f"() => document.querySelectorAll('#out > .t').length > {n}")


@pytest.fixture
def tab(chromium, server):
    tab = Page(chromium, server, viewport={"width": 1000, "height": 800})
    yield tab
    assert tab.wrong == []
    tab.page.context.close()


def test_typing_streaming_stop_and_continue(tab):
    assert tab.page.title() == tab.page.inner_text("h1") == "r/model_000010"
    tab.set(max_tokens=4000, seed=1)
    tab.page.locator("#prompt").press_sequentially("abc")
    tab.page.locator("#prompt").press("Control+Enter")
    tab.grows(20)
    tab.grows(tab.count())
    tab.page.click("#halt")
    stopped = tab.count()
    tab.page.wait_for_timeout(500)
    assert 20 < stopped == tab.count() < 4000
    assert tab.texts("#out > b .t > span:first-child") == list("abc"), "the prompt is also scored"
    foot = tab.page.inner_text("#foot")
    assert "tok/s" in foot and "seed 1" in foot
    tab.set(max_tokens=30)
    tab.page.click("#on")
    tab.done()
    assert tab.count() == stopped + 30


def test_clicking_an_alternative_token_continues_from_it(tab):
    tab.set(max_tokens=30, seed=2)
    tab.write("abc")
    before = tab.done()
    tab.page.locator("#out > .t").nth(9).click()
    card = tab.page.locator("#card button")
    assert card.count() == 5 and "%" in tab.page.inner_text("#card p")
    other = tab.page.locator("#card button:not(:disabled)").nth(1)
    name = other.locator("span").first.text_content()
    other.click()
    tab.page.wait_for_selector("#out > .t.taken")
    after = tab.done()
    assert after[:9] == before[:9] and len(after) == 10 + 30
    assert tab.page.locator("#out > .t").nth(9).get_attribute("class") == "t taken"
    tab.page.locator("#out > .t").nth(9).click()
    assert tab.page.inner_text("#card p").startswith(name + ":")
    tab.page.keyboard.press("Escape")
    tab.page.click("#view button[data-value=under]")  # the same list below each token
    under = tab.page.locator("#out > .t").nth(3).locator(".alts")
    assert under.is_visible() and "%" in under.locator("strong").inner_text()
    under.locator("button").first.click()
    tab.page.wait_for_function("() => document.querySelectorAll('#out > .t.taken').length == 1")
    assert len(tab.done()) == 4 + 30 and tab.texts()[:3] == before[:3]


def test_hostile_prompt_is_shown_as_text(tab):
    tab.set(max_tokens=3)
    tab.write(HOSTILE)
    tab.done()
    shown = "".join(tab.texts("#out > b .t > span:first-child"))
    assert shown.startswith('<img src=x onerror=alert(1)></script><script>alert("')
    assert "␛[2J␀␇" in shown and "\x1b" not in shown
    assert tab.page.locator("#out img, #out script").count() == 0
    tab.page.click("#mode button[data-value=chat]")
    assert tab.page.is_hidden("#on"), "there is no answer to continue"
    tab.write(HOSTILE)
    tab.done()
    assert "<img src=x" in tab.page.locator(".turn.user").inner_text()
    assert tab.page.locator("#chat img, #chat script").count() == 0
