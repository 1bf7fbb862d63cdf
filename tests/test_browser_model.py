"""The controls of the page that `lab export --html` writes, in a real browser.

tests/browser.py says how to run these tests; test_html_export.py compares its numbers with PyTorch's.
"""

import pytest
import torch
from browser import EVIL, LAPTOP, ModelPage
from models import saved
from test_html_export import bytes_gpt, rounded

from lab.hf.export import export
from lab.registry import load_model

pytestmark = pytest.mark.slow


@pytest.fixture
def tab(chromium, laptop):
    """The page of the example model in a new tab; the test fails if its console has an error."""
    tab = ModelPage(chromium, laptop)
    yield tab
    assert tab.wrong == []
    tab.page.context.close()


def probs_after(ids):
    """The probability of each token after these, computed by PyTorch."""
    with torch.no_grad():
        return rounded(load_model(str(LAPTOP)))(torch.tensor([ids]))[0][0, -1].softmax(0)


def candidates(tab):
    """The ids of the candidates for the next token."""
    return [int(row.get_attribute("data-id")) for row in tab.page.locator("#next button").all()]


def test_typing_shows_the_likeliest_next_tokens(tab):
    tab.page.locator("#prompt").fill("")
    tab.page.locator("#prompt").press_sequentially("def ma")
    ids = tab.done()
    assert ids == [256, *b"def ma"] and tab.shown.all_text_contents() == list("▸def ma")
    probs = probs_after(ids)
    assert candidates(tab) == probs.topk(12).indices.tolist()
    first = tab.page.locator("#next button").first.get_attribute("aria-label")
    assert f"probability {100 * probs.max():.1f} %" in first


def test_a_seed_gives_the_same_text_again_and_more_continues_it(tab):
    tab.set(seed=5, max_tokens=40)
    tab.page.fill("#prompt", "def ma")
    tab.page.locator("#prompt").press("Enter")
    ids = tab.done()
    assert len(ids) == tab.shown.count() == 7 + 40
    foot = tab.page.inner_text("#foot")
    assert "40 tokens, " in foot and "seed 5" in foot
    assert tab.write("def ma") == ids
    tab.set(seed=6)
    assert tab.write("def ma")[7:] != ids[7:]
    tab.page.click("#more")
    assert len(tab.done()) == 7 + 80


def test_keys_select_a_token_and_a_candidate_for_it_begins_another_text(tab):
    tab.set(seed=6, max_tokens=40)
    ids = tab.write("def ma")
    tab.shown.nth(20).click()
    selected = "[selected, document.activeElement.getAttribute('aria-selected')]"
    for key, place in dict(ArrowLeft=19, ArrowUp=18, ArrowRight=19, Home=0, End=46).items():
        tab.page.keyboard.press(key)
        assert tab.js(selected) == [place, "true"], key
    tab.shown.nth(20).click()
    top = probs_after(ids[:21]).topk(12).indices.tolist()
    assert candidates(tab)[:12] == top
    current = tab.page.locator("#next [aria-current]")
    assert current.get_attribute("data-id") == str(ids[21])
    tab.page.locator("#next button").nth(2).focus()
    tab.page.keyboard.press("Enter")
    after = tab.done()
    assert after[:22] == [*ids[:21], top[2]] and 22 < len(after) <= 22 + 40
    assert 256 not in after[1:-1] and (after[-1] == 256 or len(after) == 62), "it may end the text"


def test_a_candidate_for_a_token_of_the_prompt_shortens_the_prompt(tab):
    tab.set(max_tokens=20, seed=1)
    tab.write("def ma")
    tab.shown.nth(2).click()
    other = tab.page.locator("#next button:not([aria-current])").first
    token = int(other.get_attribute("data-id"))
    other.click()
    assert tab.done()[:4] == [256, *b"de", token] and tab.page.input_value("#prompt") == "de"


def test_heads_shade_the_tokens_and_each_layer_has_its_prediction(tab):
    tab.set(max_tokens=20, seed=1)
    tab.write("def ma")
    tab.shown.nth(6).click()
    heads = tab.page.locator("#heads [role=radio]")
    assert heads.count() == 4
    heads.nth(0).focus()
    tab.page.keyboard.press("ArrowDown")
    assert heads.nth(1).get_attribute("aria-checked") == "true"
    assert tab.page.is_checked("input[value=attention]")
    shades = tab.shown.evaluate_all("all => all.map(one => +one.style.getPropertyValue('--s'))")
    assert sum(s * s for s in shades) == pytest.approx(1, abs=1e-4) and not any(shades[7:])
    rows = tab.page.locator("#lens tr")
    names = ["embedding", "after layer\xa00", "after layer\xa01"]
    assert rows.locator("th").all_text_contents() == names
    likeliest = tab.page.locator("#next button").first.inner_text().replace("✓", "").split()[:2]
    assert rows.last.locator("td").first.inner_text().split()[:2] == likeliest


def test_escape_stops_a_text(tab):
    tab.set(max_tokens=1000, seed=5)
    whole = tab.write("def ma")
    tab.page.click("#go")  # the same text again
    tab.page.keyboard.press("Escape")
    ids = tab.done()
    assert ids == whole[: len(ids)] and len(ids) < len(whole) and tab.page.is_hidden("#halt")


def test_stop_also_ends_the_scoring_of_a_long_prompt(tab):
    tab.page.fill("#prompt", "def main" * 5000)
    tab.page.click("#go")
    tab.page.wait_for_function("() => p.length > 10")
    tab.page.click("#halt")
    tab.page.wait_for_selector("#go", state="visible", timeout=3000)
    assert 10 < tab.page.evaluate("idx.length") < 10_000


def test_candidates_by_keyboard(tab):
    """Enter on a token, arrow keys in its candidates and Escape work as on the page of lab serve."""
    tab.set(max_tokens=20, seed=1)
    before = tab.write("def ma")
    tab.shown.nth(9).click()
    place = "[...document.activeElement.parentElement.children].indexOf(document.activeElement)"
    last = tab.page.locator("#next button").count() - 1
    for key, box, wanted in (
        ("Enter", "next", 0), ("ArrowUp", "next", last), ("ArrowDown", "next", 0),
        ("ArrowDown", "next", 1), ("Escape", "tokens", 9), (" ", "next", 0), ("ArrowDown", "next", 1),
    ):  # fmt: skip
        tab.page.keyboard.press(key)
        assert tab.js(f"[document.activeElement.parentElement.id, {place}]") == [box, wanted], key
    chosen = int(tab.js("document.activeElement.dataset.id"))
    tab.page.keyboard.press("Enter")
    assert tab.done()[:11] == [*before[:10], chosen]


def test_a_token_selected_while_the_model_writes_stays_and_the_others_are_colored(tab):
    tab.set(max_tokens=300, seed=5, top_k=0)
    tab.page.fill("#prompt", "def ma")
    tab.page.click("#go")
    tab.page.wait_for_function("() => p.length > 30")
    tab.js("select(20)")
    count = len(tab.done())
    assert tab.js("selected") == 20 and count > 40
    shades = "[...$('tokens').children].map(one => +one.style.getPropertyValue('--s'))"
    wanted = "p.map(p => Math.min(1, -Math.log2(p) / 10))"
    assert tab.js(shades) == pytest.approx(tab.js(wanted), abs=1e-3)


def test_undo_leads_back_to_each_text_before(tab):
    tab.set(max_tokens=20, seed=1)
    assert tab.page.is_disabled("#undo")
    texts = []

    def remember():
        state = "[idx.slice(), $('prompt').value, $('foot').textContent]"
        tab.done()
        texts.append(tab.js(state))
        return texts[-1]

    tab.write("def ma")
    remember()
    tab.page.click("#more")
    remember()
    tab.shown.nth(3).click()  # in the prompt, which is shortened
    tab.page.locator("#next button:not([aria-current])").first.click()
    remember()
    tab.page.locator("#prompt").press_sequentially("xy")  # replaces the text that was written
    remember()
    typed = [[256, *b"def ma"], "def ma", ""]
    for before in (*texts[-2::-1], typed):
        tab.page.click("#undo")
        assert remember() == before
    assert tab.page.is_disabled("#undo")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"


def test_ctrl_z_in_the_text_presses_undo(tab):
    """Not the browser's undo, which would take back the typing in the prompt box."""
    tab.set(max_tokens=20, seed=1)
    tab.page.locator("#prompt").fill("")
    tab.page.locator("#prompt").press_sequentially("def ma")
    tab.page.locator("#prompt").press("Enter")
    first = tab.done()
    tab.page.click("#more")
    second = tab.done()
    tab.shown.nth(40).click()
    tab.page.keyboard.press("Control+z")
    assert tab.done() == first != second and tab.page.input_value("#prompt") == "def ma"
    assert tab.js("document.activeElement == document.querySelector('[aria-selected=true]')")
    tab.page.locator("#next button").first.focus()
    tab.page.keyboard.press("Control+z")
    assert len(tab.done()) == 7 and tab.page.input_value("#prompt") == "def ma"
    tab.shown.nth(2).click()
    tab.page.keyboard.press("Control+z")
    assert len(tab.done()) == 7, "there is nothing to undo"
    tab.page.locator("#prompt").press_sequentially("x")
    tab.page.keyboard.press("Control+z")
    assert tab.page.input_value("#prompt") != "def max", "in the box, it is the browser's"


@pytest.mark.parametrize("size", [(390, 800), (1280, 800)])
def test_the_text_is_in_view_beside_the_heads_and_candidates(chromium, laptop, size):
    width, height = size
    tab = ModelPage(chromium, laptop, viewport={"width": width, "height": height})
    tab.set(max_tokens=1000, seed=1)
    tab.write("The ")
    tab.page.click("#more")
    tab.done()
    box = "(({ top, bottom }) => [top, bottom])(document.querySelector(value).getBoundingClientRect())"

    def in_view(selector):
        top, bottom = tab.js(box, selector)
        return top >= 0 and bottom <= height

    def hidden():
        """Whether the text covers the focused element."""
        return (
            tab.js("document.activeElement.getBoundingClientRect().top") < tab.js(box, "#tokens")[1]
        )

    for n in (0, 3):
        tab.page.locator("#heads [role=radio]").nth(n).click()
        assert in_view("#tokens") and in_view("#tokens [aria-selected=true]") and not hidden()
        assert in_view("#heads [aria-checked=true]")
    tab.page.keyboard.press("ArrowDown")  # to the first
    assert in_view("#tokens [aria-selected=true]") and in_view("#heads [aria-checked=true]")
    tab.page.evaluate("scrollTo(0, 0)")
    tab.page.locator("#next button").nth(5).click()
    tab.done()
    assert in_view("#tokens") and in_view("#tokens > span:last-child")
    tab.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    tab.page.locator("#next button").first.focus()
    assert in_view("#next button:focus") and not hidden()
    assert tab.wrong == []


def test_the_place_after_the_end_of_a_text_is_named(tab):
    tab.set(max_tokens=5, seed=1)
    tab.write("def")
    tab.js("write([...idx.slice(0, 4), tokenizer.eot], 4)")
    tab.done()
    tab.shown.nth(4).click()
    named = tab.page.locator("#selected")
    assert named.inner_text() == "After ■, the end of the text (a new text would begin here):"
    tab.page.keyboard.press("ArrowLeft")
    assert named.inner_text() == "After “def”:"
    tab.page.keyboard.press("Home")
    assert named.inner_text() == "At the beginning of a text:"


def test_settings_are_kept_if_the_browser_has_storage(tab):
    tab.page.click("#details summary")
    tab.page.fill("#temperature", "0.3")
    tab.page.fill("#seed", "7")
    summary = "temperature 0.3, top-k 50, seed 7, at most 200 new tokens"
    tab.page.reload()
    assert tab.page.inner_text("#summary") == summary and tab.js("settings().temperature") == 0.3
    tab.page.context.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused'); } })"
    )
    tab.page.reload()
    assert tab.page.inner_text("#summary").startswith("temperature 0.8, ")
    tab.set(max_tokens=3)
    tab.page.click("#details summary")
    tab.page.fill("#temperature", "0.5")
    assert tab.page.inner_text("#summary").startswith("temperature 0.5, ")
    assert len(tab.write("The ")) == 5 + 3


def test_a_wrong_setting_leaves_the_text_as_it_is(tab):
    tab.set(max_tokens=20, seed=1)
    before = tab.write("def ma")
    tab.shown.nth(2).click()  # in the prompt, which a candidate would shorten
    tab.set(temperature=-3)
    for act in (
        lambda: tab.page.press("#temperature", "Enter"),
        lambda: tab.page.press("#prompt", "Enter"),
        lambda: tab.page.click("#more"),
        lambda: tab.page.locator("#next button").last.click(),
    ):
        tab.page.evaluate("() => { details.open = true; }")
        act()
        assert tab.done() == before and tab.shown.count() == len(before) == 27
        assert tab.page.input_value("#prompt") == "def ma"
        assert tab.page.evaluate("document.activeElement.id") == "temperature", "it is named"
    said = tab.page.locator("#summary")
    tab.page.evaluate("() => { details.open = true; }")
    for value, text in (
        ("-3", "temperature (not valid), "),
        ("0", "temperature 0, top-k 50, at most"),
    ):
        tab.page.fill("#temperature", value)
        assert said.text_content().startswith(text)
    tab.set(temperature=0.8)
    assert tab.write("def ma") == before


def test_hostile_names_and_texts_are_shown_as_text(tmp_path, chromium):
    name = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
    saved(bytes_gpt(), tmp_path / name / "model_000010.pt")
    out = tmp_path / "x.html"
    export(str(tmp_path / name / "model_000010.pt"), html=out)
    tab = ModelPage(chromium, out)
    title = f"{name}/model_000010, a GPT-2 with 47.2k parameters"
    assert tab.page.inner_text("h1") == tab.page.title() == title
    tab.set(max_tokens=5)
    tab.write(EVIL)
    shown = "".join(tab.shown.all_text_contents()).replace("·", "")
    assert '<img src=x onerror=alert(1)></script><script>alert("é")' in shown and "␛[2J" in shown
    assert tab.page.locator("main img, #tokens img, #tokens script").count() == 0
    assert tab.wrong == []
    tab.js(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    )
    tab.page.wait_for_timeout(200)
    assert tab.page.title() != "1" and any("Content Security Policy" in text for text in tab.wrong)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_and_text_has_contrast(chromium, laptop, scheme):
    tab = ModelPage(chromium, laptop, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    tab.page.click("#details summary")
    tab.write("The " + 60 * "x")
    assert tab.js("document.documentElement.scrollWidth") == 390
    cells = (
        "[...document.querySelectorAll('#lens th')].filter(th => th.scrollWidth > th.clientWidth)"
    )
    assert tab.js(f"{cells}.map(th => th.textContent)") == []
    tab.page.click("input[value=attention]")
    dark = tab.js("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
    unnamed = tab.js(
        "[...document.querySelectorAll('input, textarea, button, [role]')].filter(one => !one.labels?.length"
        " && !one.textContent.trim() && !one.getAttribute('aria-label') && one.role != 'alert'"
        " && one.role != 'status').length"
    )
    assert unnamed == 0 and tab.wrong == []
