"""The page of lab serve by keyboard and for screen readers; axe-core; the same rules as the model page."""

import re

import pytest
from browser import ModelPage, axe_findings

pytestmark = pytest.mark.slow


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
    assert tab.messages() == ["second"]
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
        tab.mode(mode)
        press("#prompts button")
        press("#on", "Continue")
        press("button:text('Regenerate')", "Regenerate")
        tab.page.fill("#prompt", "abc")
        press("#go")
    tab.page.click("button:text('Edit') >> nth=0")
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


def test_axe_finds_nothing_on_the_chat_page(tab):
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        assert axe_findings(tab.page) == [], scheme
        tab.set(max_tokens=40, seed=1)
        tab.write("The function")
        tab.done()
        for view in ("numbers", "attention", "colors"):
            tab.view(view)
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
        tab.mode("chat")
        tab.write("Hello")
        tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
        tab.done()
        assert "context of 256 tokens is full" in tab.page.inner_text("#notice")
        assert axe_findings(tab.page) == [], (scheme, "chat")
        tab.page.click("#fresh")
        tab.mode("text")


def test_chat_page_and_model_page_follow_the_same_rules(tab, chromium, laptop):
    """What Enter does, the settings in their order with their defaults, and what top-k 0 means."""
    model = ModelPage(chromium, laptop)
    settings = "all => all.map(one => [one.textContent, one.firstElementChild.value])"
    for page in (tab.page, model.page):
        page.click("details summary")
        assert page.locator("#settings label").evaluate_all(settings)[:5] == [
            ["temperature (0: greedy)", "0.8"], ["top-k (0: all)", "50"], ["top-p (1: all)", "1"],
            ["seed (empty: random)", ""], ["new tokens", "200"],
        ]  # fmt: skip
        summary = "temperature 0.8, top-k 50, random seed, at most 200 new tokens"
        assert page.inner_text("#summary") == summary
        assert page.inner_text("#rule") == "Enter writes, Shift+Enter begins a new line."
        page.fill("#temperature", "")
        page.keyboard.press("Tab")
        assert page.inner_text("#summary") == summary, "an empty setting returns to its default"
        for id, value in dict(top_k=0, top_p=0.85, seed=3, max_tokens=7).items():
            page.fill(f"#{id}", str(value))
        wanted = "temperature 0.8, top-p 0.85, seed 3, at most 7 new tokens"
        assert page.inner_text("#summary") == wanted
        page.focus("#top_p")
        page.keyboard.press("Control+a")
        page.keyboard.type("0,75")  # a decimal comma
        assert page.input_value("#top_p") == "0.75"
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
        page.fill("#max_tokens", "1")
        assert page.inner_text("#summary").endswith(", at most 1 new token")
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
