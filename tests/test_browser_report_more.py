"""report.html in a browser: pointer, keyboard and touch; the page of a run that failed."""

import pytest
from conftest import Tab
from test_plot import RUN, start, val
from test_report import sample, shaded, write_run

from lab.tools import report

pytestmark = pytest.mark.slow
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SAMPLES = [sample(0, "The �"), shaded(200, *"abcdefgh" * 9), shaded(400, *"ijklmnop" * 9)]


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
    page.locator("h1").hover()
    assert box.count() == 1 and tokens.nth(2).locator(".box").is_visible(), "the focused one again"
    assert box.inner_text().split("\n")[0] == "“k”: model 50.0 %, 1.0 bits of surprise"


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
