"""report.html in a browser, and the pictures of README."""

import json

import pytest
from browser import Tab, axe_findings
from conftest import ROOT, succeed
from test_plot import RUN
from test_report import EVIL, sample, write_run

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
        self.page.locator(f"#axes label:has(input[value={value}])").click()


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
    tokens, box = map(tab.page.locator, ("article:not([hidden]) .t", ".box:visible"))
    last = tokens.all_text_contents()
    tab.page.locator("#step").press("ArrowLeft")
    assert shown.all_text_contents() == ["after 6 steps"]
    assert tokens.count() == len(last) == 40 and tokens.all_text_contents() != last
    assert not box.count()
    tokens.nth(5).hover()
    assert box.inner_text().count("%") == 6

    tokens.nth(0).focus()
    tab.page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("t => t == document.activeElement")
    assert tab.page.locator("article:visible [tabindex='0']").count() == 1, "one tab stop"
    command = tab.page.inner_text(".command")
    assert command.startswith("python train_gpt2.py") and "--max_steps 12" in command
    for link in tab.page.locator(".jump a").all():
        link.click()
        tab.page.evaluate("new Promise(requestAnimationFrame)")
        id = tab.page.evaluate("location.hash")
        bar, target = (tab.page.locator(name).bounding_box() for name in ("#axes", id))
        assert target["y"] >= bar["y"] + bar["height"] - 1, f"{id} is behind the bar"

    phone = Report(chromium, tmp_path / "one.html", viewport={"width": 390, "height": 800}).page
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    heights = (
        "all => all.filter(one => one.innerText.startsWith('--')).map(one => one.offsetHeight)"
    )
    flags = phone.locator(".command span").evaluate_all(heights)
    assert len(flags) > 20 and len({*flags}) == 1, "no flag is broken at its hyphens"

    report.write_page(runs, tmp_path / "both.html")
    both = Report(chromium, tmp_path / "both.html", color_scheme="dark")
    assert both.figures == ["loss", "difference", "lr", "grad_norm", "tok_per_s"]
    assert all(both.drawn(id) for id in both.figures)
    row = both.page.locator("tr", has_text="lr").first.inner_text()
    assert row.split() == ["lr", "0.001", "0.003"]
    for one in (tab, both):
        for scheme in ("light", "dark"):
            one.page.emulate_media(color_scheme=scheme)
            assert all(one.drawn(id) for id in one.figures)
            assert axe_findings(one.page) == [], scheme
    assert tab.wrong == both.wrong == []


def test_a_choice_in_the_axis_bar_does_not_scroll_the_page(tmp_path, chromium):
    write_run(tmp_path / "r", RUN)
    report.write_page([tmp_path / "r"], tmp_path / "r.html")
    for size in ({"width": 1280, "height": 800}, {"width": 390, "height": 800}):
        tab = Report(chromium, tmp_path / "r.html", viewport=size)
        assert tab.drawn("loss")
        tab.page.evaluate("scrollTo(0, 600)")
        for value in ("all", "tokens", "log", "step"):
            tab.choose(value)
            tab.page.evaluate("new Promise(requestAnimationFrame)")
            assert tab.page.evaluate("scrollY") == 600, value


def test_report_does_not_run_scripts_from_a_log(tmp_path, chromium):
    write_run(tmp_path / "r", [*RUN, sample(400, EVIL)])
    report.write_page([tmp_path / "r"], tmp_path / "r.html")
    tab = Report(chromium, tmp_path / "r.html")
    assert tab.page.locator("pre").text_content() == EVIL and tab.page.title() == "r"
    evil = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    tab.page.evaluate(evil)
    tab.page.wait_for_timeout(200)  # the policy stops even injected scripts
    assert tab.page.title() == "r" and any("Content Security Policy" in text for text in tab.wrong)


def test_pictures_of_the_readme_can_be_taken_again(tmp_path, chromium):
    succeed("bench/screenshots.py", "--out", "pictures", cwd=tmp_path)
    taken = {path.name: path.stat().st_size for path in (tmp_path / "pictures").iterdir()}
    pictures = (ROOT / "readme.assets").glob("*.png")
    assert {*taken} == {p.name for p in pictures if p.name.startswith(("report", "serve"))}
    assert all(20_000 < size < 200_000 for size in taken.values()), taken
