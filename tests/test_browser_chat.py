"""The page of lab serve in a browser: texts, chats, branches, storage."""

import pytest
from browser import ChatPage
from test_sample import noisy_gpt
from test_serve import EVIL, Server, endless

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
    tab.write(EVIL)
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
    assert tab.page.input_value("#temperature") == "0.5" and tab.page.input_value("#seed") == "4"
    assert tab.page.input_value("#prompt") == "half a mess"
    assert tab.page.locator(".turn.user .text").all_text_contents() == ["hello"]
    assert tab.page.locator("#chat .under strong").count() > 12
    tab.page.click("#mode button[data-value=text]")
    assert tab.page.input_value("#temperature") == "0.3", "chats have their own temperature"
    tab.page.click("#view button[data-value=colors]")
    assert tab.texts() == text and tab.page.locator("#branches button").count() == 2
    assert tab.page.input_value("#prompt").replace("\r", "") == EVIL.replace("\r", "")
    assert tab.page.locator("main img, main script").count() == 0


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
        tab.page.click("#mode button[data-value=text]")
        tab.page.reload()
        assert mode.all_text_contents() == ["Text"], "the user's choice is kept"
        assert tab.wrong == []
    finally:
        server.process.kill()


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
    tab.page.click("#mode button[data-value=chat]")
    untuned = tab.page.inner_text("#untuned")
    assert untuned.endswith(" may not be tuned to answer; then it only continues the text")
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
    tab.write(EVIL)
    tab.done()
    shown = "".join(tab.texts("#out b .t > span:first-child"))
    assert shown.startswith('<img src=x onerror=alert(1)></script><script>alert("')
    assert "␛[2J␀␇" in shown and "\x1b" not in shown
    assert tab.page.locator("main img, main script").count() == 0
    assert "<img" in tab.page.locator("#branches").text_content()
    tab.page.click("#mode button[data-value=chat]")
    assert tab.page.locator("#on").count() == 0, "there is no answer to continue"
    tab.write(EVIL)
    tab.done()
    assert "<img src=x" in tab.page.locator(".turn.user").inner_text()
    assert tab.page.locator("#chat img, #chat script").count() == 0
