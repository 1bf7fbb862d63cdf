"""What newcomers stumbled over on the page of lab serve: double-clicks, line breaks, help, phones."""

import pytest
from browser import ChatPage, axe_findings

pytestmark = pytest.mark.slow


def view(tab, name):
    tab.page.click(f"#view button[data-value={name}]")


def mode(tab, name):
    tab.page.click(f"#mode button[data-value={name}]")


def box(tab, selector):
    return tab.page.locator(selector).bounding_box()


def count(tab):
    return int(tab.page.text_content("#count"))


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
    tab.page.dblclick("#halt")
    assert tab.page.is_visible("#go") and count(tab) == 3, "the text is stopped, no other begins"


def test_a_text_that_is_stopped_before_its_first_token_shows_its_prompt(tab):
    tab.page.route("**/generate", lambda route: None)  # the server does not respond yet
    for name, where, start in (("text", "#out", "Write"), ("chat", "#chat", "Send")):
        mode(tab, name)
        tab.write("some words")
        tab.page.click("#halt")
        assert "some words" in tab.page.inner_text(where), name
        assert tab.page.inner_text("#foot") == "Stopped before the first token."
        assert tab.page.inner_text("#go") == start and axe_findings(tab.page) == []
        tab.page.reload()
        assert "some words" in tab.page.inner_text(where), name
        assert tab.page.inner_text("#foot") == "Stopped before the first token."
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
        tab.page.evaluate("m => { Object.assign(turns()[1].pieces[0], m); render(); }", more)
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
    tab.page.click("text=Edit >> nth=0")
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
