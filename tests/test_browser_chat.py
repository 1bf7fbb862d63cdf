"""The page of lab serve in a browser: writing texts and chats."""

import pytest
from browser import EVIL, ChatPage, axe_findings
from models import noisy_gpt
from server import Server, endless

pytestmark = pytest.mark.slow


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


def test_a_model_tuned_for_chat_opens_in_chat_mode(tmp_path, chromium):
    (tmp_path / "log/r").mkdir(parents=True)
    (tmp_path / "log/r/config.json").write_text('{"train": {"preset": "sft"}}')
    server = Server(tmp_path, endless(noisy_gpt(block_size=256)))
    try:
        tab = ChatPage(chromium, server)
        mode = tab.page.locator("#mode [aria-pressed=true]")
        assert mode.all_text_contents() == ["Chat"] and tab.page.inner_text("#go") == "Send"
        tab.page.click("text=What is a list?")
        tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
        tab.mode("text")
        tab.page.reload()
        assert mode.all_text_contents() == ["Text"], "the user's choice is kept"
        assert tab.wrong == []
    finally:
        server.process.kill()


def test_a_server_that_ends_during_a_text_is_reported(tmp_path, chromium):
    server = Server(tmp_path, endless(noisy_gpt(block_size=256)))
    tab = ChatPage(chromium, server)
    tab.set(max_tokens=4000)
    tab.write("abc")
    tab.grows(20)
    server.process.kill()
    tab.page.wait_for_selector("#error:text('The server does not respond. Is it still running?')")
    assert tab.count() == 1 and len(tab.done()) > 16


def test_copy_and_new_chat(tab, chat_server):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.set(max_tokens=8, seed=1, temperature=1, top_k=0)
    tab.write("abc")
    tab.done()
    pieces = chat_server.generate(prompt="abc", max_tokens=8, seed=1)[1]
    tab.page.click("text=Copy")
    tab.page.wait_for_selector("text=Copied")
    text = "abc" + "".join(piece["text"] for piece in pieces)
    assert tab.page.evaluate("navigator.clipboard.readText()") == text
    tab.mode("chat")
    untuned = tab.page.inner_text("#untuned")
    assert untuned.endswith(" may not be tuned to answer; then it only continues the text")
    tab.write("one")
    tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
    tab.done()
    tab.page.click("#fresh")
    assert tab.page.locator(".turn").count() == 0 and tab.page.is_visible("#greeting")
    tab.page.reload()
    tab.page.click("#undo")
    assert tab.messages() == ["one"]
    tab.page.click("#fresh")
    tab.page.click("#fresh")
    tab.write("two")
    tab.done()
    for wanted in ([], ["one"], []):
        tab.page.click("#undo")
        assert tab.messages() == wanted
    assert tab.page.is_disabled("#undo")
    tab.page.click("#history summary")
    tab.page.locator("#branches button").first.click()
    assert tab.messages() == ["one"]


def test_refused_request_leaves_no_branch_and_keeps_what_was_typed(tab):
    tab.set(max_tokens=3)
    tab.write("abc")
    before = tab.done()
    tab.page.context.set_offline(True)
    tab.write("xyz")
    tab.page.wait_for_selector("#error:not([hidden])")
    assert tab.texts() == before and tab.count() == 1
    assert tab.page.input_value("#prompt") == "xyz"
    tab.tokens().nth(1).click()
    tab.page.locator("#bars button:not(:disabled)").first.click()
    tab.page.wait_for_selector("#error:not([hidden])")
    tab.page.wait_for_selector("#halt", state="hidden")
    assert tab.texts() == before and tab.count() == 1
    tab.page.context.set_offline(False)
    tab.mode("chat")
    for text in ("one", "two"):
        tab.write(text)
        tab.done()
    tab.page.context.set_offline(True)
    for edit in (False, True):
        tab.page.click("button:text('Edit') >> nth=1" if edit else "#prompt")
        tab.page.keyboard.type("three")
        tab.keys("Enter")
        tab.page.wait_for_selector("#error:not([hidden])")
        assert tab.messages() == ["one", "two"] and tab.count() == 1
    while tab.wrong:
        assert tab.wrong.pop().startswith("Failed to load resource")
    tab.page.context.set_offline(False)


def test_hostile_prompt_is_shown_as_text(tab):
    tab.set(max_tokens=3)
    tab.write(EVIL)
    tab.done()
    shown = "".join(tab.texts("#out b .t > span:first-child"))
    assert shown.startswith('<img src=x onerror=alert(1)></script><script>alert("')
    assert "␛[2J␀␇" in shown and "\x1b" not in shown
    assert tab.page.locator("main img, main script").count() == 0
    assert "<img" in tab.page.locator("#branches").text_content()
    tab.mode("chat")
    assert tab.page.locator("#on").count() == 0, "there is no answer to continue"
    tab.write(EVIL)
    tab.done()
    assert "<img src=x" in tab.page.locator(".turn.user").inner_text()
    assert tab.page.locator("#chat img, #chat script").count() == 0


def test_the_second_click_of_a_double_click_is_ignored(tab):
    """Stop appears where Write was, and the other way round."""
    tab.set(max_tokens=30, seed=1)
    for branches in (1, 2):  # without a text, and with one
        tab.page.fill("#prompt", "abc")
        tab.page.dblclick("#go")
        assert len(tab.done()) == 30 and tab.count() == branches
    tab.set(max_tokens=4000)
    tab.page.click("#go")
    tab.page.wait_for_function("() => document.querySelectorAll('#out .t').length > 50")
    tab.page.dblclick("#halt", force=True)  # without waiting until it is stable
    assert tab.page.is_visible("#go") and tab.count() == 3, "the text is stopped, no other begins"


def test_a_text_that_is_stopped_before_its_first_token_shows_its_prompt(tab):
    tab.page.route("**/generate", lambda route: None)  # the server does not respond yet
    for name, where, start in (("text", "#out", "Write"), ("chat", "#chat", "Send")):
        tab.mode(name)
        tab.write("some words")
        tab.page.click("#halt")
        assert "some words" in tab.page.inner_text(where), name
        assert tab.page.inner_text("#foot") == "Stopped before the next token."
        assert tab.page.inner_text("#go") == start and axe_findings(tab.page) == []
        tab.page.reload()
        assert "some words" in tab.page.inner_text(where), name
        assert tab.page.inner_text("#foot") == "Stopped before the next token."
    tab.page.unroute("**/generate")
    tab.set(max_tokens=3)
    tab.page.click("button:text('Regenerate')")
    tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 3")
    assert tab.page.inner_text("#foot").startswith("3 tokens, ")


def test_a_refused_regenerate_keeps_the_draft(tab):
    tab.mode("chat")
    tab.set(max_tokens=3)
    tab.write("hello")
    tab.done()
    tab.page.fill("#prompt", "a draft")
    tab.page.evaluate("() => { window.fetch = () => Promise.reject(new Error('gone')); }")
    tab.page.click("#chat button:text('Regenerate')")
    tab.page.wait_for_function("() => document.getElementById('error').textContent")
    assert tab.page.input_value("#prompt") == "a draft" and tab.count() == 1


def test_help_can_be_shown_again(tab):
    helper, text = tab.page.get_by_role("button", name="Help"), tab.page.locator("#help")
    tab.set(max_tokens=3)
    assert text.is_visible() and helper.get_attribute("aria-expanded") == "true"
    for sign in ("↵", "■", "boxed ?", "in bold"):
        assert sign in text.inner_text(), f"{sign} is explained"
    tab.write("abc")
    tab.done()
    assert text.is_hidden() and helper.get_attribute("aria-expanded") == "false"
    for name in ("colors", "numbers", "attention"):
        tab.view(name)
        tab.page.focus("#helper")
        tab.keys("Enter")
        assert text.is_visible() and axe_findings(tab.page) == [], name
        tab.keys("Enter")
        assert text.is_hidden()
    tab.keys("Enter")
    tab.write("xyz")
    tab.done()
    assert text.is_visible(), "it stays until it is closed"
    tab.keys("Escape")
    tab.page.click("#helper")
    tab.mode("chat")
    assert text.is_visible(), "as there is no text"


def test_the_space_before_an_answer_does_not_indent_it(tab):
    tab.set(max_tokens=6)
    tab.mode("chat")
    tab.write("2+2?")
    tab.done()
    for text, name in ((" ", "second"), (" A", "letter"), ("B", "none")):
        more = {"text": text, "name": f'"{text}"'}
        set_first = "m => { const [first, second] = turns()[1].pieces; Object.assign(first, m);"
        set_first += """ Object.assign(second, { text: "x", name: '"x"' }); render(); }"""
        tab.page.evaluate(set_first, more)
        left = tab.page.evaluate(
            """text => {
                const list = document.querySelector(".turn.assistant > .tokens");
                const [first, second] = list.querySelectorAll(".t > span");
                const node = (text == " " ? second : first).firstChild;
                const range = document.createRange();
                range.setStart(node, text == " A" ? 1 : 0);
                range.setEnd(node, node.length);
                return range.getBoundingClientRect().left - list.getBoundingClientRect().left;
            }""",
            text,
        )
        assert abs(left) < 1, name


def test_escape_cancels_an_edit_and_empty_messages_are_refused(tab):
    tab.set(max_tokens=4)
    tab.mode("chat")
    for empty in ("", "  "):
        tab.write(empty)
        assert tab.page.inner_text("#notice") == "The message is empty: write one first."
        assert tab.count() == 0
    tab.write("one")
    tab.done()
    assert tab.page.is_hidden("#notice")
    tab.page.click("button:text('Edit')")
    tab.page.fill(".turn.user textarea", "")
    tab.keys("Enter")
    problem = tab.page.locator(".turn.user [role=status]")
    assert problem.inner_text() == "The message is empty: write one, or cancel."
    assert axe_findings(tab.page) == [] and tab.count() == 1
    tab.page.keyboard.type("other")
    assert problem.inner_text() == ""
    tab.keys("Escape")
    assert tab.messages() == ["one"] and tab.focused("textContent") == "Edit"


def test_continue_keeps_a_prompt_that_was_typed(tab):
    tab.set(max_tokens=3)
    tab.write("abc")
    tab.done()
    tab.page.fill("#prompt", "a new text")
    tab.page.click("#on")
    tab.done()
    assert tab.page.input_value("#prompt") == "a new text"


def test_a_chat_is_continued_from_the_tokens_that_are_shown(tab):
    """Even if, with another number of new tokens, older messages would be left out."""
    tab.set(max_tokens=3)
    tab.mode("chat")
    for text in ("x" * 50, "y" * 50):
        tab.write(text)
        tab.done()
    tab.set(max_tokens=200)
    with tab.page.expect_request("**/generate") as sent:
        tab.page.click("#on")
    tab.done()
    shown = tab.page.evaluate("turns().at(-1).prompt.map(piece => piece.id)")
    assert sent.value.post_data_json["prompt"] == shown and shown.count(ord("x")) == 50
    assert tab.page.evaluate("turns().at(-1).prompt.length") == len(shown)
    assert "Left out" not in tab.page.text_content("#notice")


def test_one_token_and_an_empty_prompt_are_named(tab):
    tab.set(max_tokens=1, temperature=0)
    tab.write("")
    tab.done()
    assert tab.page.inner_text("#foot").startswith("1 token, ")
    assert tab.page.inner_text("#live").startswith("1 token: ")
    names = tab.page.locator("#branches button")
    assert names.first.text_content().partition(",")[0] == "empty prompt"
