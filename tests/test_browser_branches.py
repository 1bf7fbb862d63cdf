"""The page of lab serve in a browser: branches, undo, what a reload keeps."""

import pytest
from browser import EVIL

pytestmark = pytest.mark.slow


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
    tab.mode("chat")
    assert foot.inner_text() == ""


def test_undo_in_a_chat_takes_back_one_message_and_adds_no_branch(tab):
    tab.set(max_tokens=4)
    tab.mode("chat")
    for text in ("one", "two", "three"):
        tab.write(text)
        tab.done()
    tab.page.click("#history summary")
    for wanted in (["one", "two"], ["one"]):
        tab.page.click("#undo")
        assert tab.messages() == wanted and tab.count() == 1
    tab.page.reload()
    assert tab.messages() == ["one"]
    tab.write("other")
    tab.done()
    assert tab.messages() == ["one", "other"] and tab.count() == 2
    tab.page.click("#undo")
    assert tab.messages() == ["one"] and tab.count() == 2
    answer = "turns().at(-1).pieces.map(piece => piece.id)"
    before = tab.page.evaluate(answer)
    tab.page.click("#on")
    tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 8")
    assert tab.page.evaluate(answer)[:4] == before and tab.count() == 3
    tab.page.click("#undo")
    assert tab.page.evaluate(answer) == before, "the branch with three messages is unchanged"
    tab.page.click("#undo")
    assert (
        tab.messages() == [] and tab.page.is_disabled("#undo") and tab.page.is_visible("#greeting")
    )
    tab.page.click("#history summary")
    tab.page.locator("#branches button").first.click()
    assert tab.messages() == ["one", "two", "three"], "nothing is lost"
    tab.page.click("button:text('Edit') >> nth=1")
    tab.page.fill(".turn.user textarea", "other")
    tab.page.click("button:text('Send'):not(#go)")
    tab.done()
    assert tab.messages() == ["one", "other"]
    tab.page.click("#undo")
    assert tab.messages() == ["one", "two", "three"]


def test_undo_after_continue_takes_back_the_continuation_only(tab):
    ids = "turns().at(-1).pieces.map(piece => piece.id)"
    tab.set(max_tokens=4, seed=1)
    tab.write("first")
    tab.done()
    tab.write("abc")
    tab.done()
    texts = [tab.page.evaluate(ids)]
    for act, length in (("#on", 8), ("#on", 12), ("button:text('Regenerate')", 4), ("#on", 8)):
        tab.set(seed=length)
        tab.page.click(act)
        tab.page.wait_for_function(f"() => !running && turns()[0].pieces.length == {length}")
        texts.append(tab.page.evaluate(ids))
    assert tab.count() == 6, "each of them is among the branches"
    for wanted in texts[-2::-1]:
        tab.page.click("#undo")
        assert tab.page.evaluate(ids) == wanted and tab.page.input_value("#prompt") == "abc"
    tab.page.context.set_offline(True)
    tab.page.click("#on")
    tab.page.wait_for_selector("#error:not([hidden])")
    tab.page.context.set_offline(False)
    assert "Failed to load" in tab.wrong.pop()
    assert tab.page.evaluate(ids) == texts[0] and tab.count() == 6
    assert tab.page.input_value("#prompt") == "abc", "a refused request leaves no branch"
    tab.mode("chat")
    for text in ("one", "two"):
        tab.write(text)
        tab.done()
    before = tab.page.evaluate(ids)
    tab.page.click("#on")
    tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 8")
    tab.page.click("#undo")
    assert tab.page.evaluate(ids) == before
    assert tab.messages() == ["one", "two"]


def test_everything_survives_a_reload(tab):
    tab.set(max_tokens=12, seed=4, temperature=0.3)
    tab.write(EVIL)
    text = tab.done()
    tab.page.click("text=Regenerate")
    tab.done()
    tab.view("numbers")
    tab.mode("chat")
    tab.write("hello")
    tab.page.wait_for_selector("#chat .turn.assistant .t:not(.next)")
    tab.done()
    tab.page.fill("#prompt", "half a mess")
    tab.page.reload()
    assert tab.page.input_value("#temperature") == "0.5" and tab.page.input_value("#seed") == "4"
    assert tab.page.input_value("#prompt") == "half a mess"
    assert tab.messages() == ["hello"]
    assert tab.page.locator("#chat .under strong").count() > 12
    tab.mode("text")
    assert tab.page.input_value("#temperature") == "0.3", "chats have their own temperature"
    tab.view("colors")
    assert tab.texts() == text and tab.page.locator("#branches button").count() == 2
    assert tab.page.input_value("#prompt").replace("\r", "") == EVIL.replace("\r", "")
    assert tab.page.locator("main img, main script").count() == 0


def test_an_idle_tab_keeps_what_another_one_has_stored(tab):
    tab.page.wait_for_function("() => localStorage.getItem(KEY)")  # idle from now on
    other = tab.page.context.new_page()
    other.goto(tab.page.url)
    other.fill("#prompt", "abc")
    other.click("#go")
    other.wait_for_selector("#count:text('1')")
    other.close(run_before_unload=True)  # does not wait
    stored = "JSON.parse(localStorage.getItem(KEY)).branches.text.length"
    tab.page.wait_for_function(f"() => {stored} == 1")
    tab.page.reload()
    assert tab.count() == 1


def test_two_tabs_keep_the_branches_of_both(tab):
    tab.set(max_tokens=2)
    tab.page.evaluate("() => store()")
    other = tab.page.context.new_page()
    other.goto(tab.page.url)
    for page, prompt in ((other, "abc"), (tab.page, "xyz"), (other, "uvw")):
        page.fill("#prompt", prompt)
        page.click("#go")
        page.wait_for_selector("#go", state="visible")
        page.evaluate("() => store()")
    other.close()
    tab.page.reload()
    assert tab.count() == 3
    prompts = "() => state.branches.text.map(b => b.turns[0].ask.prompt)"
    assert tab.page.evaluate(prompts) == ["abc", "xyz", "uvw"]
    tab.page.evaluate("() => { removeBranch(); store(); }")
    tab.page.reload()
    assert tab.count() == 2


def test_a_second_tab_changes_no_chat_of_the_first(tab):
    tab.set(max_tokens=2)
    tab.mode("chat")
    tab.write("first")
    tab.done()
    tab.page.evaluate("() => store()")
    other = tab.page.context.new_page()
    other.goto(tab.page.url)  # has the chat with one message
    for text in ("second", "third"):
        tab.write(text)
        tab.done()
    tab.page.evaluate("() => store()")
    other.fill("#prompt", "a draft")
    other.evaluate("() => store()")
    other.close()
    tab.page.reload()
    assert tab.messages() == ["first", "second", "third"] and tab.count() == 1
    tab.write("fourth")
    tab.done()
    assert tab.messages() == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize(
    "damage",
    ["{", '{"branches": 3}', '{"branches": {"text": [{"id": 1}], "chat": []}, "at": {"text": 1}}'],
)
def test_damaged_storage_gives_an_empty_page(tab, damage):
    key = tab.page.evaluate("KEY")
    tab.page.context.add_init_script(f"localStorage.setItem({key!r}, {damage!r})")
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
    assert f"not saved: the oldest {6 - len(names)}" in tab.page.text_content("#unsaved")
