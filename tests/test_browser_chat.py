"""The page of lab serve in a browser: texts, chats, branches, storage."""

import pytest
from browser import ChatPage, axe_findings
from test_sample import noisy_gpt
from test_serve import EVIL, Server, endless

pytestmark = pytest.mark.slow


def view(tab, name):
    tab.page.click(f"#view button[data-value={name}]")


def mode(tab, name):
    tab.page.click(f"#mode button[data-value={name}]")


def box(tab, selector):
    return tab.page.locator(selector).bounding_box()


def count(tab):
    return int(tab.page.text_content("#count"))


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
    tab.page.click("button:text('Edit') >> nth=1")
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
        tab.page.click("button:text('Edit') >> nth=1" if edit else "#prompt")
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


# ------------------------------------------- double-clicks, line breaks, help, previews, phones


def test_the_second_click_of_a_double_click_is_ignored(tab):
    """Stop appears where Write was, and the other way round."""
    tab.set(max_tokens=30, seed=1)
    for branches in (1, 2):  # without a text, and with one
        tab.page.fill("#prompt", "abc")
        tab.page.dblclick("#go")
        assert len(tab.done()) == 30 and count(tab) == branches
    tab.set(max_tokens=4000)
    tab.page.click("#go")
    tab.page.wait_for_function("() => document.querySelectorAll('#out .t').length > 50")
    tab.page.dblclick("#halt", force=True)  # without waiting until it is stable
    assert tab.page.is_visible("#go") and count(tab) == 3, "the text is stopped, no other begins"


def test_a_text_that_is_stopped_before_its_first_token_shows_its_prompt(tab):
    tab.page.route("**/generate", lambda route: None)  # the server does not respond yet
    for name, where, start in (("text", "#out", "Write"), ("chat", "#chat", "Send")):
        mode(tab, name)
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


def test_a_line_break_can_be_pointed_at(tab):
    tab.set(max_tokens=3)
    tab.write("a\nb\n\nc")
    tab.done()
    line = "#out b .t >> nth=1"
    shown = "t => [t.textContent, getComputedStyle(t.querySelector('i'), '::before').content]"
    for name in ("colors", "attention"):
        view(tab, name)
        assert tab.page.locator(line).evaluate(shown) == ["\n", '"↵"'], "the text can be copied"
        rects = "t => t.getClientRects()[0].width"
        assert tab.page.locator(line).evaluate(rects) > 6, name
        tops = [box(tab, f"#out b .t >> nth={i}")["y"] for i in (0, 2, 5)]
        assert tops[0] < tops[1] < tops[2], "the lines are broken"
        tab.page.locator(line).click(position={"x": 3, "y": 10})
        if name == "attention":  # the first click shows the attention
            tab.page.locator(line).click(position={"x": 3, "y": 10})
        assert tab.page.inner_text("#title").startswith("“↵”: model "), name
        tab.keys("Escape")
    view(tab, "numbers")
    assert tab.texts("#out b .t > span:first-child") == ["a", "↵", "b", "↵", "↵", "c"]
    tab.page.click("#history summary")
    assert tab.page.locator("#branches button").inner_text().startswith("“a↵b↵↵c”")


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
        view(tab, name)
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
    mode(tab, "chat")
    assert text.is_visible(), "as there is no text"


def test_the_cards_slider_is_a_preview(tab):
    tab.set(max_tokens=5, temperature=0.7)
    tab.write("abc")
    tab.done()
    tab.tokens().nth(3).click()
    tab.page.wait_for_function("() => $('sum').textContent.includes('can be drawn')")
    assert "still written" not in tab.page.inner_text("#sum")
    tab.set(slider=1.6)
    assert "at temperature 1.6" in tab.page.inner_text("#title")
    assert tab.page.inner_text("#sum").endswith(
        "Texts are still written at temperature 0.7, as in Settings."
    )
    with tab.page.expect_request("**/generate") as sent:
        tab.page.locator("#bars button:not(:disabled)").nth(1).click()
    assert sent.value.post_data_json["temperature"] == 0.7
    tab.done()
    tab.tokens().nth(3).click()
    assert tab.page.input_value("#slider") == "0.7", "each card begins with the settings"


def test_a_clicked_card_stays_open_while_the_mouse_moves_on(tab):
    tab.set(max_tokens=5, seed=1)
    tab.write("abc")
    tab.done()
    tab.tokens().nth(3).click()
    tab.page.wait_for_timeout(300)  # longer than a card takes to open where the mouse rests
    assert tab.page.evaluate("card.pinned")
    tab.page.hover("h1")
    tab.page.wait_for_timeout(600)
    assert tab.page.is_visible("#card")


def test_heads_and_legend_of_attention_are_there_before_a_token_is_pointed_at(tab, chat_server):
    view(tab, "attention")
    heads = tab.page.locator("#head option").all_text_contents()
    L, H = chat_server.model.config.n_layer, chat_server.model.config.n_head
    assert heads[1:] == [f"layer {i}, head {h}" for i in range(L) for h in range(H)]
    tab.set(max_tokens=3)
    tab.write("abc")
    tab.done()
    legends = {"colors": "expected", "numbers": "expected", "attention": "little attention"}
    for name, begin in legends.items():
        view(tab, name)
        visible = [one for one in tab.page.locator(".legend").all() if one.is_visible()]
        assert [one.inner_text().split("\n")[0].strip() for one in visible][0].startswith(begin)
        assert len(visible) == 1 and tab.page.is_visible("#rivals") == (name == "numbers")


def test_undo_adds_no_branch(tab):
    users = tab.page.locator(".turn.user .text")
    tab.set(max_tokens=4)
    mode(tab, "chat")
    for text in ("one", "two", "three"):
        tab.write(text)
        tab.done()
    tab.page.click("#history summary")
    for wanted in (["one", "two"], ["one"]):
        tab.page.click("#undo")
        assert users.all_text_contents() == wanted and count(tab) == 1
    tab.page.reload()
    assert users.all_text_contents() == ["one"]
    tab.write("other")
    tab.done()
    assert users.all_text_contents() == ["one", "other"] and count(tab) == 2
    tab.page.click("#undo")
    assert users.all_text_contents() == ["one"] and count(tab) == 2
    answer = "turns().at(-1).pieces.map(piece => piece.id)"
    before = tab.page.evaluate(answer)
    tab.page.click("#on")
    tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 8")
    assert tab.page.evaluate(answer)[:4] == before and count(tab) == 3
    tab.page.click("#undo")
    assert tab.page.evaluate(answer) == before, "the branch with three messages is unchanged"
    tab.page.click("#undo")
    assert users.count() == 0 and tab.page.is_disabled("#undo") and tab.page.is_visible("#greeting")
    tab.page.click("#history summary")
    tab.page.locator("#branches button").first.click()
    assert users.all_text_contents() == ["one", "two", "three"], "nothing is lost"


def test_bubbles_of_a_chat(tab):
    """A short message has a narrow bubble, and the space before an answer does not indent it."""
    tab.set(max_tokens=6)
    mode(tab, "chat")
    tab.write("2+2?")
    tab.done()
    assert box(tab, ".turn.user")["width"] < 200
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
    tab.write("word " * 30)
    tab.done()
    chat, user = box(tab, "#chat"), box(tab, ".turn.user >> nth=1")
    assert user["width"] == pytest.approx(0.85 * chat["width"], abs=2)
    assert user["x"] + user["width"] == pytest.approx(chat["x"] + chat["width"], abs=1)
    tab.page.click("button:text('Edit') >> nth=0")
    assert box(tab, ".turn.user >> nth=0")["width"] > 0.8 * chat["width"], "room to type"
    color = "one => getComputedStyle(one).backgroundColor"
    main = tab.page.locator("#go").evaluate(color)
    for switch in ("#mode", "#view"):
        colors = tab.page.locator(f"{switch} button").evaluate_all(
            f"all => all.map(one => [one.ariaPressed, ({color})(one)])"
        )
        assert [found == main for _, found in colors] == [on == "true" for on, _ in colors]


def test_greedy_texts_have_no_seed_and_settings_stay_open(tab):
    tab.page.click("#options summary")
    tab.page.fill("#temperature", "0")
    tab.page.fill("#max_tokens", "4")
    assert tab.page.inner_text("#summary") == "temperature 0, top-k 50, 4 new tokens"
    tab.write("abc")
    before = tab.done()
    assert tab.page.inner_text("#foot").endswith(" bits of surprise per token, greedy")
    tab.page.click("button:text('Regenerate')")
    tab.page.wait_for_selector("#notice:not([hidden])")
    assert tab.done() == before and "At temperature 0" in tab.page.inner_text("#notice")
    tab.page.reload()
    assert tab.page.is_visible("#settings")
    tab.page.click("#options summary")
    tab.page.wait_for_timeout(100)  # the event that saves the state follows the click
    tab.page.reload()
    assert tab.page.is_hidden("#settings")


def test_chats_and_texts_have_their_own_temperature(tab):
    for name, usual in (("text", "0.8"), ("chat", "0.5")):
        mode(tab, name)
        assert tab.page.input_value("#temperature") == usual
        assert tab.page.inner_text("#summary").startswith(f"temperature {usual}, ")
    tab.page.click("#options summary")
    tab.page.fill("#temperature", "0.3")
    mode(tab, "text")
    assert tab.page.input_value("#temperature") == "0.8"
    mode(tab, "chat")
    tab.page.reload()
    assert tab.page.input_value("#temperature") == "0.3"
    tab.page.fill("#temperature", "")
    tab.keys("Tab")
    assert tab.page.input_value("#temperature") == "0.5", "an empty setting returns to its default"


def test_on_a_phone_the_card_is_a_sheet_below_its_token(chromium, chat_server):
    phone = ChatPage(
        chromium, chat_server, viewport={"width": 390, "height": 844}, has_touch=True,
        is_mobile=True, color_scheme="dark",
    )  # fmt: skip
    phone.set(max_tokens=250, seed=1)
    phone.write("abc")
    phone.done()
    assert phone.tokens().nth(20).bounding_box()["height"] >= 40, "room for a finger"
    for k in (5, 150, 240):
        phone.tokens().nth(k).tap()
        phone.page.wait_for_selector("#bars button >> nth=7")
        sheet = box(phone, "#card")
        assert (sheet["x"], sheet["width"]) == (0, 390) and sheet["height"] <= 0.45 * 844 + 1
        assert sheet["y"] + sheet["height"] == pytest.approx(844, abs=1)
        token = phone.page.locator(".t.open").bounding_box()
        assert 0 <= token["y"] and token["y"] + token["height"] <= sheet["y"], k
        there = int(phone.page.locator(".t.open").get_attribute("data-k"))
        for name, step in (("the token after", 1), ("the token before", 0)):
            phone.page.get_by_role("button", name=name).tap()
            found = phone.page.locator(".t.open").get_attribute("data-k")
            assert int(found) == there + step
            assert phone.focused("ariaLabel") == name
        assert axe_findings(phone.page) == []
        phone.page.locator("#foot").evaluate("() => closeCard()")
    phone.page.locator("#view button[data-value=attention]").tap()
    for _ in range(2):  # the first tap shows the attention
        phone.tokens().nth(5).tap()
    phone.page.get_by_role("button", name="the token after").tap()
    phone.page.wait_for_function("() => looking?.dataset.k == 3 + 6")  # after "abc"
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.wrong == []
    phone.page.context.close()


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
    assert count(tab) == 6, "each of them is among the branches"
    for wanted in texts[-2::-1]:
        tab.page.click("#undo")
        assert tab.page.evaluate(ids) == wanted and tab.page.input_value("#prompt") == "abc"
    tab.page.context.set_offline(True)
    tab.page.click("#on")
    tab.page.wait_for_selector("#error:not([hidden])")
    tab.page.context.set_offline(False)
    assert "Failed to load" in tab.wrong.pop()
    assert tab.page.evaluate(ids) == texts[0] and count(tab) == 6
    assert tab.page.input_value("#prompt") == "abc", "a refused request leaves no branch"
    mode(tab, "chat")
    for text in ("one", "two"):
        tab.write(text)
        tab.done()
    before = tab.page.evaluate(ids)
    tab.page.click("#on")
    tab.page.wait_for_function("() => !running && turns().at(-1).pieces.length == 8")
    tab.page.click("#undo")
    assert tab.page.evaluate(ids) == before
    assert tab.page.locator(".turn.user .text").all_text_contents() == ["one", "two"]


def test_a_text_that_ended_at_the_stop_text_shows_it_and_no_end_of_text_token(tab):
    tab.set(max_tokens=60, seed=1, temperature=1, top_k=0)
    tab.write("abc")
    text = "".join(tab.done())
    for length in (1, 2):  # of one token, and of several
        stop = next(text[i : i + length] for i in range(10, 60) if text[i : i + length].isalnum())
        tab.set(stop=stop)
        tab.write("abc")
        assert "".join(tab.done()) == text[: text.index(stop)]
        for _ in range(2):
            assert tab.page.inner_text("#foot").endswith(f", seed 1. Stopped at “{stop}”.")
            tab.page.reload()
    assert tab.page.locator("#on").is_hidden() and tab.page.locator(".t.next").count() == 0
    mode(tab, "chat")
    tab.set(stop="")
    tab.write("one")
    tab.done()
    assert "Stopped" not in tab.page.inner_text("#foot")
    end = "({ id: 256, text: '', name: '\"<|endoftext|>\"', p: 0.5, likeliest: [], end: 'stop' })"
    tab.page.evaluate(f"() => {{ turns().at(-1).pieces.push{end}; render(); }}")
    assert tab.page.inner_text("#chat .turn > .tokens > .t >> nth=-1") == "■"


def test_a_decimal_comma_and_the_summary_of_values_that_are_not_valid(tab):
    tab.page.click("#options summary")
    summary = tab.page.locator("#summary")
    tab.page.focus("#temperature")
    tab.keys("Control+a")
    tab.page.keyboard.type("0,5")
    assert tab.page.input_value("#temperature") == "0.5"
    assert summary.inner_text().startswith("temperature 0.5, top-k 50, ")
    tab.page.focus("#top_p")
    tab.keys("Control+a")
    tab.page.keyboard.insert_text("0,25")  # as if it was pasted
    assert tab.page.input_value("#top_p") == "0.25"
    with tab.page.expect_request("**/generate") as sent:
        tab.write("abc")
    assert (sent.value.post_data_json["temperature"], sent.value.post_data_json["top_p"]) == (
        0.5, 0.25,
    )  # fmt: skip
    tab.done()
    tab.page.fill("#temperature", "05")
    assert summary.inner_text().startswith("temperature 5, ")
    wrong = dict(temperature=("1e9", "-1"), top_k=("2.5",), top_p=("2",), max_tokens=("0",))
    before = count(tab)
    for id, values in (wrong | {"seed": ("-3",)}).items():
        for value in values:
            good = tab.page.input_value(f"#{id}")
            tab.page.fill(f"#{id}", value)
            names = dict(top_k="top-k", top_p="top-p", max_tokens="new tokens")
            assert f"{names.get(id, id)} (not valid)" in summary.inner_text()
            assert f" {value}," not in summary.inner_text() + ","
            tab.page.click("#go")
            assert tab.focused("id") == id and count(tab) == before, "and it is refused"
            tab.page.fill(f"#{id}", good)
    tab.page.fill("#temperature", "1")
    tab.page.fill("#max_tokens", "1")
    assert summary.inner_text().endswith(", 1 new token")


def test_escape_cancels_an_edit_and_empty_messages_are_refused(tab):
    users = tab.page.locator(".turn.user .text")
    tab.set(max_tokens=4)
    mode(tab, "chat")
    for empty in ("", "  "):
        tab.write(empty)
        assert tab.page.inner_text("#notice") == "The message is empty: write one first."
        assert count(tab) == 0
    tab.write("one")
    tab.done()
    assert tab.page.is_hidden("#notice")
    tab.page.click("button:text('Edit')")
    tab.page.fill(".turn.user textarea", "")
    tab.keys("Enter")
    problem = tab.page.locator(".turn.user [role=status]")
    assert problem.inner_text() == "The message is empty: write one, or cancel."
    assert axe_findings(tab.page) == [] and count(tab) == 1
    tab.page.keyboard.type("other")
    assert problem.inner_text() == ""
    tab.keys("Escape")
    assert users.all_text_contents() == ["one"] and tab.focused("textContent") == "Edit"


def test_a_double_click_on_a_token_selects_no_text(tab):
    selected = "() => getSelection().toString()"
    tab.set(max_tokens=20, seed=1)
    tab.write("some words")
    tab.done()
    tab.page.dblclick("#out b .t >> nth=1")
    assert tab.page.evaluate(selected) == "" and tab.page.is_visible("#card")
    tab.keys("Escape")
    first, last = box(tab, "#out b .t >> nth=0"), box(tab, "#out b .t >> nth=3")
    y = first["y"] + first["height"] / 2
    tab.page.mouse.move(first["x"] + 1, y)
    tab.page.mouse.down()
    tab.page.mouse.move(last["x"] + last["width"] - 1, y, steps=4)
    tab.page.mouse.up()
    assert tab.page.evaluate(selected) == "some", "dragging selects"


def test_one_token_and_an_empty_prompt_are_named(tab):
    tab.set(max_tokens=1, temperature=0)
    tab.write("")
    tab.done()
    assert tab.page.inner_text("#foot").startswith("1 token, ")
    assert tab.page.inner_text("#live").startswith("1 token: ")
    names = tab.page.locator("#branches button")
    assert names.first.text_content().partition(",")[0] == "empty prompt"
    tab.page.click("button:text('Regenerate')")
    tab.page.wait_for_function("() => !running && turns()[0].pieces.length == 1")
    tab.tokens().first.click()
    tab.page.locator("#bars button:not(:disabled)").first.click()
    tab.page.wait_for_function("() => !running && turns()[0].pieces.length == 2")
    assert names.nth(1).text_content().startswith("again: empty prompt")
    assert " at the start" in names.nth(2).text_content()
