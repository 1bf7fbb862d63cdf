"""The page of lab serve as a person meets it, in a real Chromium (see test_browser.py for what that needs).

python -m pytest -m slow tests/test_serve_browser.py
"""

import pytest
import test_browser
from test_sample import noisy_gpt
from test_serve import EVIL, Server, endless

pytestmark = pytest.mark.slow
chromium, shots = test_browser.chromium, test_browser.shots


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    server = Server(tmp_path_factory.mktemp("serve"), endless(noisy_gpt(block_size=256)))
    yield server
    server.process.kill()


class Page(test_browser.Tab):
    """The page in a tab of its own, with all that went wrong in it."""

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
        """Until it has more than n tokens."""
        self.page.wait_for_function(f"() => document.querySelectorAll('#out > .t').length > {n}")


@pytest.fixture
def tab(chromium, server):
    tab = Page(chromium, server, viewport={"width": 1000, "height": 800})
    yield tab
    assert tab.wrong == []
    tab.page.context.close()


def test_typing_streaming_and_stop(tab):
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
    assert tab.texts("#out > b .t > span:first-child") == ["a", "b", "c"]  # scored too
    foot = tab.page.inner_text("#foot")
    assert "tok/s" in foot and "seed 1" in foot
    tab.set(max_tokens=30)
    tab.page.click("#on")
    tab.done()
    assert tab.count() == stopped + 30


def test_two_tabs_at_once_and_one_that_is_closed(chromium, server):
    """Both get their turns; what nobody reads is computed no further, the other comes to its end."""
    tabs = closed, other = [Page(chromium, server) for _ in range(2)]
    for tab, n in zip(tabs, (4000, 1000)):
        tab.set(max_tokens=n)
        tab.write("abc")
    for _ in range(2):
        for tab, n in [(tab, tab.count()) for tab in tabs]:
            tab.grows(n)
    assert all(tab.page.is_visible("#halt") for tab in tabs), "neither waits for the other's end"
    closed.page.close()
    assert len(other.done()) == 1000
    before = server.worked()
    other.page.wait_for_timeout(1000)
    assert server.worked() < before + 0.1, "seconds, of one"
    assert closed.wrong == other.wrong == []


def test_a_runner_up_is_taken_and_gone_on_from(tab, shots):
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
    tab.page.click("#view button[data-value=under]")  # the same under each token
    under = tab.page.locator("#out > .t").nth(3).locator(".alts")
    assert under.is_visible() and "%" in under.locator("strong").inner_text()
    under.locator("button").first.click()
    tab.page.wait_for_function("() => document.querySelectorAll('#out > .t.taken').length == 1")
    assert len(tab.done()) == 4 + 30 and tab.texts()[:3] == before[:3]
    tab.page.screenshot(path=shots / "serve_numbers.png")


def test_a_hostile_prompt_is_text(tab):
    tab.set(max_tokens=3)
    tab.write(EVIL)
    tab.done()
    shown = "".join(tab.texts("#out > b .t > span:first-child"))
    assert shown.startswith('<img src=x onerror=alert(1)></script><script>alert("')
    assert "␛[2J␀␇" in shown and "\x1b" not in shown
    assert tab.page.locator("#out img, #out script").count() == 0
    tab.page.click("#mode button[data-value=chat]")
    assert tab.page.is_hidden("#on"), "there is no answer to go on from"
    tab.write(EVIL)
    tab.done()
    assert "<img src=x" in tab.page.locator(".turn.user").inner_text()
    assert tab.page.locator("#chat img, #chat script").count() == 0


def test_a_sentence_for_what_cannot_be(tab):
    tab.write("a" * 300)
    tab.page.wait_for_selector("#error:has-text('301 tokens')")
    tab.wrong[:] = [text for text in tab.wrong if "400 (Bad Request)" not in text]


def test_chat_and_a_phone(chromium, server, shots):
    how = dict(viewport={"width": 400, "height": 740}, has_touch=True, is_mobile=True)
    tab = Page(chromium, server, color_scheme="dark", **how)
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    tab.page.click("#mode button[data-value=chat]")
    for words, n in (("hi", 40), ("and?", 40), ("w" * 60, 4000)):
        tab.set(max_tokens=n)
        tab.page.fill("#prompt", words)
        tab.page.keyboard.press("Enter")
        tab.done()
    for role in ("user", "assistant"):
        assert tab.page.locator(f".turn.{role}").count() == 3
    tab.page.wait_for_selector("#error:has-text('no longer fit')")
    tab.page.wait_for_selector("#error:has-text('context of 256 tokens is full')")
    assert tab.page.locator("#on").is_hidden()
    tab.page.locator(".turn.assistant .t").nth(4).tap()
    box = tab.page.locator("#card").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400
    for view in ("under", "colour"):
        tab.page.click(f"#view button[data-value={view}]")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 400
    tab.page.screenshot(path=shots / "serve_phone.png")
    tab.page.click("#fresh")
    assert not tab.page.locator(".turn").count() and tab.page.is_hidden("#error")
    assert tab.page.evaluate("chat.length") == 0, "else the old messages are sent again"
    assert tab.wrong == []
