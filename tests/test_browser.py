"""report.html and the page of lab serve in a real browser.

apt-get install chromium            # or any Chrome or Chromium on the PATH
python -m pip install -r requirements-browser.txt
python -m pytest -m slow tests/test_browser.py
"""

import json
import re

import pytest
import torch
from conftest import ROOT, Tab, succeed
from test_html_export import ModelPage
from test_plot import RUN
from test_report import EVIL, sample, write_run
from test_sample import noisy_gpt
from test_serve import EVIL as HOSTILE
from test_serve import Server, endless

from lab.hf.export import export
from lab.notebook.interp import capture_activations
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


def axe_findings(page):
    """[(rule, element), ...] that axe-core finds in the page as it is now."""
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs requirements-browser.txt"
    )
    found = module.Axe().run(page).response["violations"]
    return [(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]]


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
            change = "one.dispatchEvent(new Event('input', { bubbles: true }))"
            one = self.page.locator(f"#{id}")
            one.evaluate(f"(one, value) => {{ one.value = value; {change}; }}", str(value))

    def write(self, prompt):
        self.page.fill("#prompt", prompt)
        self.page.click("#go")

    def tokens(self):
        return self.page.locator("#out .tokens > .t:not(.next)")

    def texts(self, where="#out .tokens > .t:not(.next) > span:first-child"):
        return self.page.locator(where).all_text_contents()

    def done(self):
        self.page.wait_for_selector("#go", state="visible")
        return self.texts()

    def grows(self, n):
        """Wait until more than n tokens are shown."""
        self.page.wait_for_function(f"() => document.querySelectorAll('#out .t').length > {n}")

    def keys(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self, what="className"):
        return self.page.evaluate(f"document.activeElement.{what}")

    def tab_to(self, selector):
        """Press Tab until an element that matches has the focus. Returns the number of presses."""
        for count in range(1, 30):
            self.keys("Tab")
            if self.focused(f"matches({selector!r})"):
                return count
        raise AssertionError(f"Tab does not lead to {selector}")


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
    tab.keys("Shift+Enter")
    assert tab.page.input_value("#prompt") == "abc\n", "Shift+Enter begins a new line"
    tab.keys("Backspace", "Enter")
    tab.grows(20)
    tab.grows(tab.tokens().count() + 3)
    tab.page.click("#halt")
    stopped = tab.tokens().count()
    tab.page.wait_for_timeout(500)
    assert 20 < stopped == tab.tokens().count() < 4000
    assert tab.texts("#out b .t > span:first-child") == list("abc"), "the prompt is also scored"
    foot = tab.page.inner_text("#foot")
    assert "tokens/s" in foot and "seed 1" in foot
    tab.set(max_tokens=30)
    tab.page.click("#on")
    tab.done()
    assert tab.tokens().count() == stopped + 30


def test_chat_page_and_model_page_follow_the_same_rules(tab, chromium, tmp_path):
    """What Enter does, the settings in their order with their defaults, and what top-k 0 means."""
    export(str(ROOT / "examples/laptop_model"), html=tmp_path / "model.html")
    model = ModelPage(chromium, tmp_path / "model.html")
    settings = "all => all.map(one => [one.textContent, one.firstElementChild.value])"
    for page in (tab.page, model.page):
        page.click("details summary")
        assert page.locator("#settings label").evaluate_all(settings)[:5] == [
            ["temperature (0: greedy)", "0.8"], ["top-k (0: all)", "50"], ["top-p (1: all)", "1"],
            ["seed (empty: random)", ""], ["new tokens", "200"],
        ]  # fmt: skip
        summary = "temperature 0.8, top-k 50, random seed, 200 new tokens"
        assert page.inner_text("#summary") == summary
        assert page.inner_text("#rule") == "Enter writes, Shift+Enter begins a new line."
        page.fill("#temperature", "")
        page.keyboard.press("Tab")
        assert page.inner_text("#summary") == summary, "an empty setting returns to its default"
        for id, value in dict(top_k=0, top_p=0.85, seed=3, max_tokens=7).items():
            page.fill(f"#{id}", str(value))
        wanted = "temperature 0.8, top-p 0.85, seed 3, 7 new tokens"
        assert page.inner_text("#summary") == wanted
        page.fill("#top_p", "1")
        page.fill("#prompt", "ab")
        for key in ("Shift+Enter", "c", "Enter"):
            page.keyboard.press(key)
        assert page.input_value("#prompt") == "ab\nc"
        page.wait_for_function("() => foot.textContent.startsWith('7 tokens, ')")
        assert re.fullmatch(
            r"7 tokens, \d+ tokens/s, \d+\.\d bits of surprise per token, seed 3",
            page.inner_text("#foot"),
        )
        page.fill("#max_tokens", "")
        page.keyboard.press("Enter")  # in a setting, it does not write
        assert page.inner_text("#summary").endswith("200 new tokens")
        page.fill("#max_tokens", "5")
        page.keyboard.press("Enter")
        assert page.inner_text("#summary").endswith("5 new tokens")
        page.wait_for_timeout(300)
        assert page.inner_text("#foot").startswith("7 tokens, ") and page.is_visible("#go")
    tab.done()
    tab.tokens().nth(4).click()
    tab.page.wait_for_function("() => sum.textContent.includes('257 of 257 tokens can be drawn')")
    for scheme in ("light", "dark"):
        model.page.emulate_media(color_scheme=scheme)
        for color in ("attention", "surprise"):
            model.page.click(f"input[value={color}]")
            assert axe_findings(model.page) == [], (scheme, color)
    sampled = "sampling_probs(reading.logits, settings()).filter(q => q > 0).length"
    assert model.js(sampled) == 257 and model.wrong == []


def test_branches_are_listed_with_the_end_of_their_text(tab):
    tab.set(max_tokens=30, seed=2)
    tab.write("abc")
    first = "".join(tab.done())
    tab.page.click("#history summary")
    tab.tokens().nth(3).click()
    tab.page.locator("#bars button:not(:disabled)").nth(1).click()
    tab.page.wait_for_selector("#out .t.taken")
    second = "".join(tab.done())
    names = tab.page.locator("#branches button").all_text_contents()
    ends = [name.partition(", ending “…")[2] for name in names]
    end = "shown(b.turns[0].pieces.map(p => p.text).join('').trim().slice(-40)) + '”'"
    texts = tab.page.evaluate(f"() => state.branches.text.map(b => {end})")
    assert texts == ends and first != second
    assert names[0].startswith("“abc”, ") and " instead of " in names[1]


def test_clicking_an_alternative_token_continues_from_it(tab):
    tab.set(max_tokens=30, seed=2)
    tab.write("abc")
    before = tab.done()
    tab.tokens().nth(9).click()
    other = tab.page.locator("#bars button:not(:disabled)").nth(1)
    assert "%" in tab.page.inner_text("#title")
    name = other.locator("span").first.text_content()
    other.click()
    tab.page.wait_for_selector("#out .t.taken")
    after = tab.done()
    assert after[:9] == before[:9] and len(after) == 10 + 30
    assert tab.tokens().nth(9).get_attribute("class") == "t taken"
    tab.tokens().nth(9).click()
    assert tab.page.inner_text("#title").startswith(f"“{name}”:")
    tab.keys("Escape")
    tab.page.click("#view button[data-value=numbers]")  # the same list below each token
    under = tab.tokens().nth(3).locator(".under")
    assert under.is_visible() and "%" in under.locator("strong").inner_text()
    under.locator("[data-id]").first.click()
    tab.page.wait_for_function("() => document.querySelectorAll('#out .t.taken').length == 1")
    assert len(tab.done()) == 4 + 30 and tab.texts()[:3] == [
        text.replace(" ", "␣").replace("\n", "↵") for text in before[:3]
    ]


def test_a_candidate_for_a_token_of_the_prompt_cuts_the_prompt_there(tab, server):
    tab.set(max_tokens=9, seed=2, top_k=0, temperature=1)
    tab.write("xéyz")  # é has two tokens, and the last cut is between them
    before = tab.done()
    for k, cut in ((4, "xéy"), (3, "xé"), (2, "x")):
        tab.page.locator("#out b .t").nth(k).click()
        assert tab.page.inner_text("#title").endswith(", in the prompt")
        other = tab.page.locator("#bars button:not(:disabled)").nth(1)
        token = int(other.get_attribute("data-id"))
        other.click()
        tab.page.wait_for_function("() => !running && turns()[0].pieces.length == 10")
        prefix = [*"xéyz".encode()][:k]
        assert tab.page.evaluate("idsOf(turns()[0])")[: k + 1] == [*prefix, token]
        assert tab.page.input_value("#prompt") == cut
        assert tab.page.locator("#out .t.taken").get_attribute("data-k") == str(k)
        ask = dict(prompt=[*prefix, token], max_tokens=9, seed=2, top_k=0, temperature=1)
        pieces = server.generate(**ask)[1]
        assert tab.page.evaluate("idsOf(turns()[0])")[k + 1 :] == [one["id"] for one in pieces]
    for _ in range(3):
        tab.page.click("#undo")
    assert tab.texts() == before and tab.page.input_value("#prompt") == "xéyz"
    tab.page.click("#view button[data-value=numbers]")
    tab.page.locator("#out b .under [data-id]").first.click()
    tab.page.wait_for_selector("#out .t.taken")
    tab.done()
    tab.page.click("#mode button[data-value=chat]")
    tab.page.click("#view button[data-value=colors]")
    tab.write("one")
    tab.done()
    tab.page.click("text=prompt sent to the model")
    tab.page.locator(".turn details .t").first.click()
    title = tab.page.inner_text("#title")
    assert title.endswith(", in the prompt: edit a message to change it")
    assert tab.page.locator("#bars button:not(:disabled)").count() == 0
    opacity = "all => all.map(one => [one.ariaCurrent, getComputedStyle(one).opacity])"
    found = tab.page.locator("#bars button").evaluate_all(opacity)
    assert {*map(tuple, found)} == {("true", "1"), ("false", "0.6")}, "they look disabled"


def test_regenerate_writes_again_after_the_last_chosen_token(tab):
    again = tab.page.locator("button:text('Regenerate')")
    ids = "turns().at(-1).pieces.map(piece => piece.id)"
    for mode, where in (("text", "#out"), ("chat", ".turn.assistant")):
        tab.page.click(f"#mode button[data-value={mode}]")
        tab.set(max_tokens=12, seed=2)
        tab.write("abc")
        tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 12")
        assert again.get_attribute("title") == "writes again from the end of the prompt"
        length = tab.page.evaluate("turns().at(-1).prompt.length")
        tab.page.locator(f"{where} .t[data-k='{length + 5}']").click()
        tab.page.locator("#bars button:not(:disabled)").nth(1).click()
        tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 18")
        chosen = tab.page.evaluate(ids)
        tab.set(seed=3)
        assert again.get_attribute("title") == "writes again after the last token that you chose"
        again.click()
        tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 18")
        after = tab.page.evaluate(ids)
        assert after[:6] == chosen[:6] and after[6:] != chosen[6:]
        assert tab.page.locator(".t.taken").get_attribute("data-k") == str(length + 5)
        tab.page.context.set_offline(True)
        again.click()
        tab.page.wait_for_selector("#error:not([hidden])")
        tab.page.context.set_offline(False)
        assert tab.page.evaluate(ids) == after and "Failed to load" in tab.wrong.pop()
        assert tab.page.text_content("#count") == "3", "a refused request leaves no branch"


def test_the_whole_page_by_keyboard(tab):
    """Greeting, a text, a token, its card, another candidate, undo, chat and edit, without a pointer."""
    tab.set(max_tokens=20, seed=3)
    tab.tab_to("#prompts button")
    tab.keys("Enter")
    before = tab.done()
    assert len(before) == 20 and tab.page.is_hidden("#greeting")
    assert tab.page.inner_text("#live").startswith("20 tokens: ")

    tab.page.focus("#prompt")
    assert tab.tab_to(".t") <= 3 and tab.focused("textContent") == "T", "the text is one tab stop"
    tab.tab_to("#on")
    tab.keys("Shift+Tab")
    assert tab.focused("textContent") == "T", "also backwards"
    tab.keys(*["ArrowRight"] * 8)
    assert tab.focused("dataset.k") == "8" and tab.page.locator(".t[tabindex='0']").count() == 1
    name = tab.focused("ariaLabel")
    assert name.startswith("“") and name.endswith(" %") and tab.page.is_hidden("#card")

    tab.keys("Enter")
    dialog = tab.page.get_by_role("dialog")
    assert dialog.is_visible() and tab.focused("closest('#bars') != null")
    tab.page.wait_for_function("() => document.querySelectorAll('#bars button').length >= 8")
    first = tab.page.locator("#card").bounding_box()
    tab.keys("ArrowRight", "ArrowRight", "ArrowRight")  # the card follows
    assert tab.page.locator(".t.open").get_attribute("data-k") == "11"
    assert tab.page.locator("#card").bounding_box()["x"] > first["x"]
    tab.keys("Escape")
    assert dialog.is_hidden() and tab.focused("dataset.k") == "11"
    tab.keys("Enter", "ArrowDown")
    tab.page.wait_for_function("() => document.querySelectorAll('#bars button').length >= 8")
    chosen = tab.focused("dataset.id")
    tab.keys("Enter")
    tab.page.wait_for_selector(".t.taken")
    after = tab.done()
    place = 11 - len("The ")
    assert after[:place] == before[:place] and after[place] != before[place]
    assert tab.focused("dataset.k") == "11" and tab.focused("className") == "t taken" and chosen

    tab.keys("End")
    assert tab.focused("className") == "t next", "the candidates for the next token"
    tab.keys("Enter")
    assert tab.page.inner_text("#title") == "The next token"
    tab.keys("Escape")
    tab.tab_to("#undo")
    tab.keys("Enter")
    assert tab.texts() == before
    tab.tab_to("#history summary")
    tab.keys("Enter", "Tab", "Tab", "Enter")
    assert tab.texts() == after

    tab.page.focus("#mode button")
    tab.keys("Tab", "Enter")
    tab.page.focus("#prompt")
    tab.page.keyboard.type("first")
    tab.keys("Enter")
    tab.done()
    tab.page.locator("body").evaluate("() => document.activeElement.blur()")
    tab.tab_to(".turn.user button")
    assert tab.focused("textContent") == "Edit"
    tab.keys("Enter", "Control+a")
    tab.page.keyboard.type("second")
    tab.keys("Enter")
    tab.done()
    assert tab.page.locator(".turn.user .text").all_text_contents() == ["second"]
    assert tab.page.locator("#branches button").count() == 2


def test_no_button_loses_the_focus_to_the_body(tab):
    tab.set(max_tokens=5, seed=3)

    def press(selector, then="the text box"):
        tab.page.focus(selector)
        tab.keys("Enter")
        for _ in range(2):  # while the model writes, and after it
            tab.page.evaluate(
                "() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
            )
            found = "the text box" if tab.focused("id") == "prompt" else tab.focused("textContent")
            assert found == then, selector
            tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length")

    for mode in ("text", "chat"):
        tab.page.click(f"#mode button[data-value={mode}]")
        press("#prompts button")
        press("#on", "Continue")
        press("button:text('Regenerate')", "Regenerate")
        tab.page.fill("#prompt", "abc")
        press("#go")
    tab.page.click("text=Edit >> nth=0")
    tab.page.keyboard.type("other")
    press("button:text('Send'):not(#go)")
    press(".turn.assistant button:text('Regenerate')", "Regenerate")
    while tab.page.is_enabled("#undo"):
        tab.page.focus("#undo")
        tab.keys("Enter")
    assert tab.focused("id") == "prompt"


def test_the_end_of_writing_is_announced_to_screen_readers(tab):
    live = tab.page.locator("#live")
    for stop in (lambda: tab.keys("Escape"), lambda: tab.page.click("#halt")):
        tab.set(max_tokens=4000)
        tab.write("abc")
        tab.grows(10)
        assert live.text_content() == "Writing."
        stop()
        assert live.text_content() == "Stopped."
        tab.page.context.set_offline(True)
        tab.write("x")
        tab.page.wait_for_selector("#error:not([hidden])")
        tab.page.context.set_offline(False)
        assert live.text_content() == "Stopped." and "Failed to load" in tab.wrong.pop()
        tab.set(max_tokens=3)
        tab.write("abc")
        tab.done()
        assert live.text_content().startswith("3 tokens: ")


def test_temperature_slider_redraws_the_bars(tab, server):
    tab.set(max_tokens=5, seed=2, temperature=1, top_k=0)
    tab.write("abc")
    tab.done()
    logits = server.model(torch.tensor([[256, *b"abc"]]))[0][0, -1]
    for temperature, top_k in ((1, 0), (0.5, 0), (1.5, 3), (0, 0)):
        tab.page.locator(".t").nth(3).click()
        tab.page.wait_for_function(
            "() => document.querySelector('#sum').textContent.includes('can be drawn')"
        )
        tab.set(top_k=top_k)
        tab.set(slider=temperature)
        assert float(tab.page.input_value("#temperature")) == temperature
        order = logits.argsort(descending=True)
        wanted = (logits[order] / max(temperature, 1e-6)).softmax(-1)
        ids = tab.page.locator("#bars button").evaluate_all(
            "all => all.map(one => +one.dataset.id)"
        )
        assert ids[:8] == order[:8].tolist()
        cut = wanted[: top_k or None]
        drawn = tab.page.locator("#bars button").evaluate_all(
            "all => all.map(one => +one.style.getPropertyValue('--now'))"
        )
        for i in range(8):
            expected = (cut[i] / cut.sum()).item() if i < len(cut) else 0
            assert drawn[i] == pytest.approx(expected, abs=2e-4), (temperature, top_k, i)
        assert tab.page.inner_text("#column") == "with settings"
        id = tab.page.evaluate("() => turns()[0].pieces[0].id")
        place = order.tolist().index(id)
        found = re.search(
            r"model (\S+) %, with settings (\S+) %, \S+ bits", tab.page.inner_text("#title")
        )
        expected = (cut[place] / cut.sum()).item() if place < len(cut) else 0
        assert [float(number) / 100 for number in found.groups()] == pytest.approx(
            [logits.softmax(-1)[id].item(), expected], abs=1e-3
        )


def place(back):
    return f"{back} back" if back else "itself"


def test_attention_of_the_pointed_token(tab, server):
    tab.set(max_tokens=5, seed=2)
    tab.page.click("#view button[data-value=attention]")
    tab.write("abc")
    tab.done()
    tab.tokens().nth(2).hover()  # predicted from end-of-text, "abc" and two more
    tab.page.wait_for_function("() => looked.textContent.startsWith('To predict')")
    ids = [256, *b"abc"]
    ids += tab.page.evaluate("() => turns()[0].pieces.slice(0, 2).map(piece => piece.id)")
    _, weights = capture_activations(server.model, torch.tensor([ids]))
    mean = torch.stack(weights)[:, 0, :, -1].mean((0, 1))  # over layers and heads

    def shades():
        tab.page.wait_for_timeout(300)
        shown = "all => all.map(t => (+t.style.getPropertyValue('--a')) ** 2)"
        return tab.page.locator("#out .t:not(.next)").evaluate_all(shown)

    assert shades() == pytest.approx([*mean[1:].tolist(), 0, 0, 0], abs=2e-3)
    tab.page.select_option("#head", "1.0")
    assert shades()[:5] == pytest.approx(weights[1][0, 0, -1, 1:].tolist(), abs=2e-3)
    weights = weights[1][0, 0, -1]  # of head 0 of layer 1, from the last of the six tokens before
    labels = "() => idsOf(turns()[0]).map((_, k) => label(pieceAt(turns()[0], k).name))"
    names = ["the start of the text", *tab.page.evaluate(labels)]
    most = [f"{names[i]} ({place(5 - i)}) " for i in weights.topk(3).indices.tolist()]
    text = tab.page.inner_text("#looked").replace("\xa0", " ")
    assert re.split(r"\d+\.\d %(?:, |\.)", text.partition(" attends to ")[2]) == [*most, ""]
    assert text.startswith(f"To predict “{names[6]}”, the token before it attends to ")
    tab.page.click("#mode button[data-value=chat]")
    assert tab.page.is_hidden("#look"), "there is no text"
    tab.page.click("#mode button[data-value=text]")
    assert tab.page.inner_text("#looked").startswith("Point at a token")


def test_statistics_belong_to_their_branch(tab):
    foot = tab.page.locator("#foot")
    shown = []
    for seed in (4, 5):
        tab.set(max_tokens=12, seed=seed)
        tab.write("abc")
        tab.done()
        shown.append(foot.inner_text())
        assert shown[-1].startswith("12 tokens, ") and shown[-1].endswith(f", seed {seed}")
    tab.page.click("#undo")
    assert foot.inner_text() == shown[0]
    tab.page.click("#history summary")
    tab.page.click("button:text('Regenerate')")
    tab.page.wait_for_selector("#notice")
    tab.page.locator("#branches button").nth(1).click()
    assert foot.inner_text() == shown[1] and tab.page.is_hidden("#notice")
    tab.page.reload()
    assert foot.inner_text() == shown[1]
    tab.page.click("#mode button[data-value=chat]")
    assert foot.inner_text() == ""


def test_everything_survives_a_reload(tab):
    tab.set(max_tokens=12, seed=4, temperature=0.3)
    tab.write(HOSTILE)
    text = tab.done()
    tab.page.click("text=Regenerate")
    tab.done()
    tab.page.click("#view button[data-value=numbers]")
    tab.page.click("#mode button[data-value=chat]")
    tab.write("hello")
    tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
    tab.done()
    tab.page.fill("#prompt", "half a mess")
    tab.page.reload()
    assert tab.page.input_value("#temperature") == "0.3" and tab.page.input_value("#seed") == "4"
    assert tab.page.input_value("#prompt") == "half a mess"
    assert tab.page.locator(".turn.user .text").all_text_contents() == ["hello"]
    assert tab.page.locator("#chat .under strong").count() > 12
    tab.page.click("#mode button[data-value=text]")
    tab.page.click("#view button[data-value=colors]")
    assert tab.texts() == text and tab.page.locator("#branches button").count() == 2
    assert tab.page.input_value("#prompt").replace("\r", "") == HOSTILE.replace("\r", "")
    assert tab.page.locator("main img, main script").count() == 0
    tab.page.evaluate(
        "() => { store(); localStorage.setItem(KEY, '{\"branches\": 3}'); onpagehide = null; }"
    )
    tab.page.evaluate("() => { window.store = () => {}; removeEventListener('pagehide', store); }")
    tab.page.context.new_page().close()


@pytest.mark.parametrize(
    "damage",
    ["{", '{"branches": 3}', '{"branches": {"text": [{"id": 1}], "chat": []}, "at": {"text": 1}}'],
)
def test_damaged_storage_gives_an_empty_page(tab, damage):
    tab.page.context.add_init_script(
        f"localStorage.setItem('lab serve r/model_000010 257', {damage!r})"
    )
    tab.page.reload()
    assert tab.page.is_visible("#greeting") and tab.page.inner_text("#go") == "Write"
    tab.set(max_tokens=3)
    tab.write("abc")
    assert len(tab.done()) == 3


def test_full_storage_loses_the_oldest_branches_only(tab):
    tab.page.evaluate("() => localStorage.setItem('lab serve other', 'x'.repeat(1e6))")
    tab.set(max_tokens=2, seed=1)
    tab.write("abc")
    tab.done()
    long = "[newTurn('text', { ask: { prompt: 'x'.repeat(1.5e6) } })]"
    tab.page.evaluate(
        f"() => {{ for (let i = 0; i < 5; i++) fork('long ' + i, {long}); store(); }}"
    )
    names = tab.page.evaluate(
        "() => JSON.parse(localStorage.getItem(KEY)).branches.text.map(b => b.name)"
    )
    assert 0 < len(names) < 5 and names == [f"long {i}" for i in range(5)][-len(names) :]
    assert tab.page.evaluate("() => localStorage.getItem('lab serve other')") is None
    assert tab.page.locator("#branches button").count() == 6, "this page still has all"


def test_card_of_a_token_at_the_bottom_is_visible(tab):
    tab.set(max_tokens=700, seed=1)
    tab.write("abc")
    tab.done()
    tab.page.mouse.move(0, 0)
    for act in ("hover", "click"):  # hover: above the token, without scrolling
        tab.page.evaluate("() => scrollTo(0, 0)")
        bottoms = tab.page.locator("#out .t").evaluate_all(
            "all => all.map(t => t.getBoundingClientRect().bottom)"
        )
        last = sum(bottom < 800 for bottom in bottoms) - 1
        assert bottoms[last] > 500
        getattr(tab.page.locator("#out .t").nth(last), act)()
        tab.page.wait_for_selector("#bars button >> nth=7")
        assert (tab.page.evaluate("scrollY") == 0) == (act == "hover")
        box = tab.page.locator("#card").bounding_box()
        assert box["y"] > 0 and box["y"] + box["height"] < 801, act
        tab.keys("Escape")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_text_on_attention_covers_no_button_and_no_card_covers_it(tab, width):
    tab.page.set_viewport_size({"width": width, "height": 844})
    tab.page.click("#view button[data-value=attention]")
    tab.page.click("#mode button[data-value=chat]")
    tab.set(max_tokens=200, seed=1)
    for i in range(3):
        tab.write(f"message {i}")
        tab.done()
        box = tab.page.locator("#go").bounding_box()
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        top = tab.page.evaluate("([x, y]) => document.elementFromPoint(x, y)?.id", middle)
        assert top == "go", (i, box)
    tab.page.click("#mode button[data-value=text]")
    tab.set(max_tokens=300)
    tab.write("abc")
    tab.done()
    tab.page.locator("#out .t").last.click()
    tab.page.wait_for_selector("#bars button >> nth=7")
    card, look = (tab.page.locator(name).bounding_box() for name in ("#card", "#look"))
    room_above = width == 1280  # on a phone a second tap opens the card
    assert (card["y"] + card["height"] <= look["y"]) == room_above, (card, look)


def test_taps_on_a_phone(chromium, server):
    """In the view Attention, the first tap on a token shows its attention, the second opens its card."""
    phone = Page(chromium, server, viewport={"width": 390, "height": 844}, has_touch=True)
    phone.set(max_tokens=30, seed=1)
    phone.page.locator("#prompts button").first.tap()
    phone.done()
    phone.tokens().nth(7).tap()
    assert phone.page.is_visible("#card")
    box = phone.page.locator("#card").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    phone.page.locator("h1").tap()
    assert phone.page.is_hidden("#card")
    phone.tokens().last.tap()
    phone.page.wait_for_selector("#bars button >> nth=7")
    box = phone.page.locator("#card").bounding_box()
    assert box["y"] > 0 and box["y"] + box["height"] < 845, "above the fold"
    phone.page.locator("h1").tap()
    phone.page.locator("#view button[data-value=attention]").tap()
    phone.tokens().nth(9).tap()
    phone.page.wait_for_function("() => looked.textContent.startsWith('To predict')")
    assert phone.page.is_hidden("#card")
    phone.tokens().nth(9).tap()
    assert phone.page.is_visible("#card")
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390, (
        "no sideways scrolling"
    )
    assert axe_findings(phone.page) == [] and phone.wrong == []


def test_a_model_tuned_for_chat_opens_in_chat_mode(tmp_path, chromium):
    (tmp_path / "log/r").mkdir(parents=True)
    (tmp_path / "log/r/config.json").write_text('{"train": {"preset": "sft"}}')
    server = Server(tmp_path, endless(noisy_gpt(block_size=256)))
    try:
        tab = Page(chromium, server)
        mode = tab.page.locator("#mode [aria-pressed=true]")
        assert mode.all_text_contents() == ["Chat"] and tab.page.inner_text("#go") == "Send"
        tab.page.click("text=What is a list?")
        tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
        tab.page.click("#mode button[data-value=text]")
        tab.page.reload()
        assert mode.all_text_contents() == ["Text"], "the user's choice is kept"
        assert tab.wrong == []
    finally:
        server.process.kill()


def test_copy_and_new_chat(tab, server):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.set(max_tokens=8, seed=1, temperature=1, top_k=0)
    tab.write("abc")
    tab.done()
    pieces = server.generate(prompt="abc", max_tokens=8, seed=1)[1]
    tab.page.click("text=Copy")
    tab.page.wait_for_selector("text=Copied")
    text = "abc" + "".join(piece["text"] for piece in pieces)
    assert tab.page.evaluate("navigator.clipboard.readText()") == text
    tab.page.click("#mode button[data-value=chat]")
    untuned = tab.page.inner_text("#untuned")
    assert untuned.startswith("This model may not be tuned to answer")
    tab.write("one")
    tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
    tab.done()
    tab.page.click("#fresh")
    assert tab.page.locator(".turn").count() == 0 and tab.page.is_visible("#greeting")
    users = tab.page.locator(".turn.user .text")
    tab.page.reload()
    tab.page.click("#undo")
    assert users.all_text_contents() == ["one"]
    tab.page.click("#fresh")
    tab.page.click("#fresh")
    tab.write("two")
    tab.done()
    for wanted in ([], ["one"], []):
        tab.page.click("#undo")
        assert users.all_text_contents() == wanted
    assert tab.page.is_disabled("#undo")
    tab.page.click("#history summary")
    tab.page.locator("#branches button").first.click()
    assert tab.page.locator(".turn.user .text").all_text_contents() == ["one"]


def test_undo_in_a_chat_takes_back_one_message(tab):
    users = tab.page.locator(".turn.user .text")
    tab.set(max_tokens=4)
    tab.page.click("#mode button[data-value=chat]")
    for text in ("one", "two", "three"):
        tab.write(text)
        tab.done()
    for wanted in (["one", "two"], ["one"], []):
        assert tab.page.is_enabled("#undo")
        tab.page.click("#undo")
        assert users.all_text_contents() == wanted
    assert tab.page.is_disabled("#undo")
    tab.page.click("#history summary")
    tab.page.locator("#branches button").first.click()
    assert users.all_text_contents() == ["one", "two", "three"], "nothing is lost"
    tab.page.click("text=Edit >> nth=1")
    tab.page.keyboard.type("other")
    tab.page.click("button:text('Send'):not(#go)")
    tab.done()
    tab.page.click("#undo")
    assert users.all_text_contents() == ["one", "two", "three"]


def test_axe_finds_nothing_on_the_chat_page(tab):
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        assert axe_findings(tab.page) == [], scheme
        tab.set(max_tokens=40, seed=1)
        tab.write("The function")
        tab.done()
        for view in ("numbers", "attention", "colors"):
            tab.page.click(f"#view button[data-value={view}]")
            tab.tokens().nth(20).locator("span").first.click()
            tab.page.wait_for_selector("#bars button >> nth=7")
            assert axe_findings(tab.page) == [], (scheme, view)
            tab.keys("Escape")
        tab.page.click("#history summary")
        tab.page.context.set_offline(True)
        tab.write("x")
        tab.page.wait_for_selector("#error:not([hidden])")
        tab.page.context.set_offline(False)
        assert axe_findings(tab.page) == [], scheme
        assert "Failed to load" in tab.wrong.pop(), "the browser's own record of the error"
        tab.set(max_tokens=300)
        tab.page.click("#mode button[data-value=chat]")
        tab.write("Hello")
        tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
        tab.done()
        assert "context of 256 tokens is full" in tab.page.inner_text("#notice")
        assert axe_findings(tab.page) == [], (scheme, "chat")
        tab.page.click("#fresh")
        tab.page.click("#mode button[data-value=text]")


def test_refused_request_leaves_no_branch_and_keeps_what_was_typed(tab):
    tab.set(max_tokens=3)
    tab.write("abc")
    before = tab.done()
    tab.page.context.set_offline(True)
    tab.write("xyz")
    tab.page.wait_for_selector("#error:not([hidden])")
    assert tab.texts() == before and tab.page.text_content("#count") == "1"
    assert tab.page.input_value("#prompt") == "xyz"
    tab.tokens().nth(1).click()
    tab.page.locator("#bars button:not(:disabled)").first.click()
    tab.page.wait_for_selector("#error:not([hidden])")
    tab.page.wait_for_selector("#halt", state="hidden")
    assert tab.texts() == before and tab.page.text_content("#count") == "1"
    tab.page.context.set_offline(False)
    tab.page.click("#mode button[data-value=chat]")
    for text in ("one", "two"):
        tab.write(text)
        tab.done()
    tab.page.context.set_offline(True)
    for edit in (False, True):
        tab.page.click("text=Edit >> nth=1" if edit else "#prompt")
        tab.page.keyboard.type("three")
        tab.keys("Enter")
        tab.page.wait_for_selector("#error:not([hidden])")
        users = tab.page.locator(".turn.user .text").all_text_contents()
        assert users == ["one", "two"] and tab.page.text_content("#count") == "1"
    while tab.wrong:
        assert tab.wrong.pop().startswith("Failed to load resource")
    tab.page.context.set_offline(False)


def test_wrong_setting_is_shown_at_its_input_and_changes_nothing(tab):
    tab.set(max_tokens=3)
    tab.write("abc")
    before = tab.done()
    tab.set(temperature=-3)
    tab.write("xyz")
    assert tab.page.evaluate("document.activeElement.id") == "temperature"
    assert tab.page.evaluate("document.getElementById('summary').closest('details').open")
    tab.page.click(".tools >> text=Regenerate")
    assert tab.texts() == before and tab.page.text_content("#count") == "1"
    tab.set(temperature=0.85)  # no multiple of the step, but valid
    tab.write("xyz")
    assert tab.done() != before


def test_hostile_prompt_is_shown_as_text(tab):
    tab.set(max_tokens=3)
    tab.write(HOSTILE)
    tab.done()
    shown = "".join(tab.texts("#out b .t > span:first-child"))
    assert shown.startswith('<img src=x onerror=alert(1)></script><script>alert("')
    assert "␛[2J␀␇" in shown and "\x1b" not in shown
    assert tab.page.locator("main img, main script").count() == 0
    assert "<img" in tab.page.locator("#branches").text_content()
    tab.page.click("#mode button[data-value=chat]")
    assert tab.page.locator("#on").count() == 0, "there is no answer to continue"
    tab.write(HOSTILE)
    tab.done()
    assert "<img src=x" in tab.page.locator(".turn.user").inner_text()
    assert tab.page.locator("#chat img, #chat script").count() == 0
