"""report.html in a browser, by pointer, keyboard and touch, and the pictures of README."""

import json

import pytest
from browser import Tab, axe_findings
from conftest import ROOT, succeed
from test_plot import RUN, start, train, val
from test_report import EVIL, sample, shaded, write_run

from lab.tools import report

pytestmark = pytest.mark.slow
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SAMPLES = [sample(0, "The �"), shaded(200, *"abcdefgh" * 9), shaded(400, *"ijklmnop" * 9)]


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


def test_curves_in_a_frame_without_storage(tmp_path, chromium):
    """As in JupyterLab, which shows a trusted HTML file in a sandboxed frame."""
    write_run(tmp_path / "r", RUN)
    report.write_page([tmp_path / "r"], tmp_path / "r.html")
    (tmp_path / "frame.html").write_text('<iframe sandbox="allow-scripts" src="r.html"></iframe>')
    tab = Tab(chromium, (tmp_path / "frame.html").as_uri())
    frame = tab.page.frame_locator("iframe")
    frame.locator("#loss svg .trace path").first.wait_for(state="attached", timeout=10_000)
    frame.locator("#axes label:has(input[value=time])").click()
    assert frame.locator("#loss .xtitle").text_content() == "minutes" and tab.wrong == []


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


@pytest.fixture
def opened(chromium, tmp_path):
    """opened(lines, ...): the page of a run with these records, in a new tab without errors."""
    tabs = []

    def make(lines, viewport=WIDE, **how):
        report.write_page([write_run(tmp_path / "r", lines)], tmp_path / "r.html")
        tabs.append(Tab(chromium, (tmp_path / "r.html").as_uri(), viewport=viewport, **how))
        tabs[-1].page.wait_for_selector("#loss svg .trace path", state="attached")
        return tabs[-1].page

    yield make
    assert [tab.wrong for tab in tabs] == [[] for _ in tabs]


def scroll_to(page, selector):
    """Scroll an element to the top, and wait until the page has noticed it."""
    page.locator(selector).evaluate("one => one.scrollIntoView()")
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")


def bar_in_view(page):
    box = page.locator("#axes").bounding_box()
    return box["y"] + box["height"] > 0


def test_one_token_box_at_a_time(opened):
    page = opened([*RUN, *SAMPLES])
    tokens, box = map(page.locator, ("article:not([hidden]) .t", ".box:visible"))
    tokens.nth(2).focus()
    assert box.all_inner_texts() == [tokens.nth(2).locator(".box").text_content()]
    tokens.nth(30).hover()
    assert box.all_inner_texts() == [tokens.nth(30).locator(".box").text_content()]
    styles = tokens.evaluate_all("all => all.map(t => getComputedStyle(t).outlineStyle)")
    assert [i for i, style in enumerate(styles) if style != "none"] == [30], "not the focused one"
    page.locator("h1").hover()
    assert box.count() == 1 and tokens.nth(2).locator(".box").is_visible(), "the focused one again"
    assert box.inner_text().split("\n")[0] == "“k”: model 50.0 %, 1.0 bits of surprise"


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_token_box_stays_inside_the_window(opened, viewport):
    """Also that of a token that spans lines, of one at the right edge, and of one with a long name."""
    texts = ["abcdefgh "] * 192 + ["\n<|endoftext|>\n", "abc", "x" * 120]
    page = opened([*RUN, shaded(400, *texts)], viewport)
    tokens, box = map(page.locator, ("article:not([hidden]) .t", ".box:visible"))
    for i in [*range(0, 40), *range(180, 195)]:
        tokens.nth(i).focus()
        place, token = box.bounding_box(), tokens.nth(i).bounding_box()
        assert place["x"] >= 0 and place["x"] + place["width"] <= viewport["width"], i
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"], i
        if viewport == WIDE and i != 192:  # whose last line is empty
            assert -8 < place["y"] - token["y"] - token["height"] < 8, "below its token"
            assert place["x"] <= token["x"] + 1 and place["x"] + place["width"] > token["x"]


def test_escape_closes_the_box_of_a_token(opened):
    page = opened([*RUN, *SAMPLES])
    tokens, box = map(page.locator, ("article:not([hidden]) .t", ".box:visible"))
    for show in (tokens.nth(2).focus, tokens.nth(30).hover):
        show()
        assert box.count() == 1
        page.keyboard.press("Escape")
        assert box.count() == 0, "neither the focused token's nor the one at the pointer"
    tokens.nth(31).hover()
    assert box.all_inner_texts() == [tokens.nth(31).locator(".box").text_content()]
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert box.count() == 1


def test_a_zoom_and_a_click_in_the_legend_show_no_note_of_plotly(opened):
    page = opened(RUN)
    area = page.locator("#loss .nsewdrag").first.bounding_box()
    page.mouse.move(area["x"] + 100, area["y"] + 100)
    page.mouse.down()
    page.mouse.move(area["x"] + 400, area["y"] + 110, steps=5)
    page.mouse.up()
    page.wait_for_function("() => $('loss').layout.xaxis.range[0] > 0")
    page.locator("#loss .legendtoggle").first.click()
    page.wait_for_function("() => $('loss').data.some(curve => curve.visible == 'legendonly')")
    assert page.locator(".plotly-notifier").count() == 0
    page.mouse.dblclick(area["x"] + 100, area["y"] + 100)
    page.wait_for_function("() => $('loss').layout.xaxis.range[0] < 0")


def test_a_click_on_a_runs_name_hides_its_curves(tmp_path, chromium):
    write_run(tmp_path / "a", RUN)
    write_run(tmp_path / "b", [r | {"loss": 1.0 + 9 / (9 + r["step"])} for r in RUN])
    report.write_page([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    tab = Report(chromium, tmp_path / "both.html", viewport=WIDE)

    def shown():
        tab.page.wait_for_selector("#tok_per_s svg .trace path", state="attached")
        return {id: tab.plot(id, "data.filter(one => one.visible).length") for id in tab.figures}

    before, lines = shown(), tab.page.locator("#loss .scatterlayer .trace")
    assert before.keys() == {"loss", "difference", "lr", "tok_per_s"}
    name = tab.page.get_by_role("button", name="b", exact=True)
    assert name.get_attribute("aria-pressed") == "true"
    halves = {id: n if id == "difference" else n // 2 for id, n in before.items()}
    for expected in (halves, before):
        name.click()
        assert shown() == expected
    assert lines.count() == before["loss"]
    name.click()
    tab.page.reload()  # as with --watch
    assert shown() == halves and lines.count() == halves["loss"]
    assert name.get_attribute("aria-pressed") == "false"
    assert axe_findings(tab.page) == tab.wrong == []


def test_the_ticks_of_few_steps_are_whole_numbers(opened):
    loss = "#loss .xtick"
    for last in (1, 2, 3):
        page = opened([start(), val(0, 5.5), *(train(s, 6.0 - s) for s in range(1, last + 1))])
        ticks = page.locator(loss).all_text_contents()
        assert ticks == [f"{step}" for step in range(last + 1)]
    page = opened(RUN)
    zoom = "range => Plotly.relayout('loss', { 'xaxis.range[0]': range[0], 'xaxis.range[1]': range[1] })"
    for span, expected in (((99.5, 102), ["100", "101", "102"]), ((100, 300), 100)):
        page.evaluate(zoom, span)
        page.evaluate("new Promise(done => setTimeout(done, 100))")
        ticks = page.locator(loss).all_text_contents()
        assert ticks == expected or int(ticks[0]) == expected < int(ticks[1]), ticks


def test_the_axis_bar_is_in_view_beside_charts_only(opened):
    page = opened([*RUN, sample(400, "long\n" * 100)], {"width": 1280, "height": 400})
    for target, seen in (("#loss", True), ("article pre", False), ("#lr", True), ("footer", False)):
        scroll_to(page, target)
        assert bar_in_view(page) == seen, target


def test_on_a_phone_no_bar_and_no_box_covers_a_chart(opened):
    page = opened([*RUN, *SAMPLES], PHONE, has_touch=True, is_mobile=True)
    scroll_to(page, "#loss")
    assert not bar_in_view(page)
    readout, area = page.locator("#figure-loss .readout"), page.locator("#loss .nsewdrag").first
    assert readout.inner_text() == "Tap the chart to see the values here."
    before = page.locator("#loss").bounding_box()
    area.tap(position={"x": 1, "y": 50})
    page.wait_for_function("() => document.querySelector('.readout').textContent.includes('step')")
    x, loss = page.evaluate("[$('loss').data[1].customdata, $('loss').data[1].y]")
    step, shown = readout.inner_text().split("; ")[:2]
    assert shown == f"training {loss[x.index(int(step.removeprefix('step ')))]:.4f}"
    page.wait_for_timeout(500)  # two quick taps would be a double-click
    area.tap(position={"x": area.bounding_box()["width"] - 1, "y": 50})
    page.wait_for_function(
        "() => document.querySelector('.readout').textContent.includes('step 400')"
    )
    assert "; validation 1.7149 at step 400" in readout.inner_text()
    assert page.locator("#loss .hoverlayer .legend").evaluate_all(
        "all => all.map(one => getComputedStyle(one).visibility)"
    ) == ["hidden"]
    assert page.locator("#loss").bounding_box() == before, "the chart does not move"
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_slider_names_the_step(opened):
    page = opened([*RUN, *SAMPLES])
    slider, place = page.locator("#step"), page.locator("output")
    assert place.inner_text() == "step 400 (3 of 3)"
    slider.press("Home")
    assert place.inner_text() == "step 0 (1 of 3)" == slider.get_attribute("aria-valuetext")
    assert "The weights are random" in page.locator("article:visible").inner_text()


def test_the_page_of_a_run_that_failed(opened):
    error = "the gradient norm is inf at step 2; log/r has no checkpoint yet; try a lower --lr"
    spike = dict(kind="spike", step=2, time=0.0, norm=None, usual=4.4, skipped=False, file="x")
    end = dict(kind="end", step=3, time=0.0, reason="error", error=error)
    for viewport in (WIDE, PHONE):
        page = opened([start(), val(0, 5.5), spike, end], viewport)
        assert page.inner_text("h1") == "Stopped: the gradient norm is inf at step 2"
        box = page.locator(".error").bounding_box()
        assert page.inner_text(".error") == f"Error: {error}."
        assert box["y"] + box["height"] < viewport["height"] / 2, "at the top of the page"
        assert page.locator("#loss .legendtext").all_text_contents() == ["validation"]
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_a_link_leads_to_open_settings_and_the_legend_has_the_colors_of_the_tokens(opened):
    page = opened([*RUN, *SAMPLES])
    page.locator(".jump a", has_text="Settings").click()
    assert page.locator("#settings th", has_text="uniform guess (nats)").is_visible()
    scale = page.locator(".scale").evaluate("one => getComputedStyle(one).backgroundImage")
    token = page.locator("article:not([hidden]) .t").first
    assert "rgba(213, 94, 0, 0.65)" in scale
    color = token.evaluate(
        "t => getComputedStyle(t).backgroundColor"
    )  # of 1 bit; 10 have the full color
    assert color.startswith("rgba(213, 94, 0, 0.06")
