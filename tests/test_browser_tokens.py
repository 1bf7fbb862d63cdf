"""The page of lab serve in a browser: cards of tokens, candidates, settings, attention."""

import re

import pytest
import torch
from browser import ChatPage, axe_findings

from lab.notebook.interp import capture_activations

pytestmark = pytest.mark.slow


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
    tab.view("numbers")  # the same list below each token
    under = tab.tokens().nth(3).locator(".under")
    assert under.is_visible() and "%" in under.locator("strong").inner_text()
    under.locator("[data-id]").first.click()
    tab.page.wait_for_function("() => document.querySelectorAll('#out .t.taken').length == 1")
    assert len(tab.done()) == 4 + 30 and tab.texts()[:3] == [
        text.replace(" ", "␣").replace("\n", "↵") for text in before[:3]
    ]


def test_a_candidate_for_a_token_of_the_prompt_cuts_the_prompt_there(tab, chat_server):
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
        pieces = chat_server.generate(**ask)[1]
        assert tab.page.evaluate("idsOf(turns()[0])")[k + 1 :] == [one["id"] for one in pieces]
    for _ in range(3):
        tab.page.click("#undo")
    assert tab.texts() == before and tab.page.input_value("#prompt") == "xéyz"
    tab.view("numbers")
    tab.page.locator("#out b .under [data-id]").first.click()
    tab.page.wait_for_selector("#out .t.taken")
    tab.done()
    tab.mode("chat")
    tab.view("colors")
    tab.write("one")
    tab.done()
    tab.page.click("text=prompt sent to the model")
    tab.page.locator(".turn details .t").first.click()
    title = tab.page.inner_text("#title")
    assert title.endswith(", in the prompt: edit a message to change it")
    assert tab.page.locator("#bars button:not(:disabled)").count() == 0
    # in one call, because the buttons are made anew when the pointer moves to another token
    opacity = "[...$('bars').children].map(b => [b.ariaCurrent, getComputedStyle(b).opacity])"
    found = tab.page.evaluate(opacity)
    assert {*map(tuple, found)} == {("true", "1"), ("false", "0.6")}, "they look disabled"


def test_regenerate_writes_again_after_the_last_chosen_token(tab):
    again = tab.page.locator("button:text('Regenerate')")
    ids = "turns().at(-1).pieces.map(piece => piece.id)"
    for mode, where in (("text", "#out"), ("chat", ".turn.assistant")):
        tab.mode(mode)
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
        assert tab.count() == 3, "a refused request leaves no branch"


def test_temperature_slider_redraws_the_bars(tab, chat_server):
    tab.set(max_tokens=5, seed=2, temperature=1, top_k=0)
    tab.write("abc")
    tab.done()
    logits = chat_server.model(torch.tensor([[256, *b"abc"]]))[0][0, -1]
    for temperature, top_k in ((1, 0), (0.5, 0), (1.5, 3), (0, 0)):
        tab.page.locator(".t").nth(3).click()
        tab.page.wait_for_function(
            "() => document.querySelector('#sum').textContent.includes('can be drawn')"
        )
        tab.set(top_k=top_k)
        tab.set(slider=temperature)
        assert tab.page.input_value("#temperature") == "1", "the slider is a preview"
        how = "with settings" if temperature == 1 else f"at temperature {temperature}"
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
        assert tab.page.inner_text("#column") == how
        id = tab.page.evaluate("() => turns()[0].pieces[0].id")
        place = order.tolist().index(id)
        title = rf"model (\S+)\xa0%, (\S+)\xa0% {how}, \S+ bits"  # no line break before %
        found = re.search(title, tab.page.inner_text("#title"))
        expected = (cut[place] / cut.sum()).item() if place < len(cut) else 0
        assert [float(number) / 100 for number in found.groups()] == pytest.approx(
            [logits.softmax(-1)[id].item(), expected], abs=1e-3
        )
        struck = """all => all.flatMap(one => [...one.children]).map(span =>
            [span.textContent == "never", getComputedStyle(span).textDecorationLine])"""
        for (_, token), (never, word) in zip(
            *[iter(tab.page.locator("#bars button").evaluate_all(struck))] * 2
        ):
            assert (token, word) == ("line-through" if never else "none", "none")


def place(back):
    return f"{back} back" if back else "itself"


def test_attention_of_the_pointed_token(tab, chat_server):
    tab.set(max_tokens=5, seed=2)
    tab.view("attention")
    tab.write("abc")
    tab.done()
    tab.tokens().nth(2).hover()  # predicted from end-of-text, "abc" and two more
    tab.page.wait_for_function("() => looked.textContent.startsWith('To predict')")
    ids = [256, *b"abc"]
    ids += tab.page.evaluate("() => turns()[0].pieces.slice(0, 2).map(piece => piece.id)")
    _, weights = capture_activations(chat_server.model, torch.tensor([ids]))
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
    tab.mode("chat")
    assert tab.page.is_hidden("#look"), "there is no text"
    tab.mode("text")
    assert tab.page.inner_text("#looked").startswith("Point at a token")


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
    tab.view("attention")
    tab.mode("chat")
    tab.set(max_tokens=200, seed=1)
    for i in range(3):
        tab.write(f"message {i}")
        tab.done()
        box = tab.page.locator("#go").bounding_box()
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        top = tab.page.evaluate("([x, y]) => document.elementFromPoint(x, y)?.id", middle)
        assert top == "go", (i, box)
    tab.mode("text")
    tab.set(max_tokens=300)
    tab.write("abc")
    tab.done()
    tab.page.locator("#out .t").last.click()
    tab.page.wait_for_selector("#bars button >> nth=7")
    card, look = (tab.page.locator(name).bounding_box() for name in ("#card", "#look"))
    room_above = width == 1280  # on a phone a second tap opens the card
    assert (card["y"] + card["height"] <= look["y"]) == room_above, (card, look)


def test_taps_on_a_phone(chromium, chat_server):
    """In the view Attention, the first tap on a token shows its attention, the second opens its card."""
    phone = ChatPage(chromium, chat_server, viewport={"width": 390, "height": 844}, has_touch=True)
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
        sheet = phone.box("#card")
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


def test_heads_and_legend_of_attention_are_there_before_a_token_is_pointed_at(tab, chat_server):
    tab.view("attention")
    heads = tab.page.locator("#head option").all_text_contents()
    L, H = chat_server.model.config.n_layer, chat_server.model.config.n_head
    assert heads[1:] == [f"layer {i}, head {h}" for i in range(L) for h in range(H)]
    tab.set(max_tokens=3)
    tab.write("abc")
    tab.done()
    legends = {"colors": "expected", "numbers": "expected", "attention": "little attention"}
    for name, begin in legends.items():
        tab.view(name)
        visible = [one for one in tab.page.locator(".legend").all() if one.is_visible()]
        assert [one.inner_text().split("\n")[0].strip() for one in visible][0].startswith(begin)
        assert len(visible) == 1 and tab.page.is_visible("#rivals") == (name == "numbers")


def test_a_line_break_can_be_pointed_at(tab):
    tab.set(max_tokens=3)
    tab.write("a\nb\n\nc")
    tab.done()
    line = "#out b .t >> nth=1"
    shown = "t => [t.textContent, getComputedStyle(t.querySelector('i'), '::before').content]"
    for name in ("colors", "attention"):
        tab.view(name)
        assert tab.page.locator(line).evaluate(shown) == ["\n", '"↵"'], "the text can be copied"
        rects = "t => t.getClientRects()[0].width"
        assert tab.page.locator(line).evaluate(rects) > 6, name
        tops = [tab.box(f"#out b .t >> nth={i}")["y"] for i in (0, 2, 5)]
        assert tops[0] < tops[1] < tops[2], "the lines are broken"
        tab.page.locator(line).click(position={"x": 3, "y": 10})
        if name == "attention":  # the first click shows the attention
            tab.page.locator(line).click(position={"x": 3, "y": 10})
        assert tab.page.inner_text("#title").startswith("“↵”: model "), name
        tab.keys("Escape")
    tab.view("numbers")
    assert tab.texts("#out b .t > span:first-child") == ["a", "↵", "b", "↵", "↵", "c"]
    tab.page.click("#history summary")
    assert tab.page.locator("#branches button").inner_text().startswith("“a↵b↵↵c”")


def test_a_double_click_on_a_token_selects_no_text(tab):
    selected = "() => getSelection().toString()"
    tab.set(max_tokens=20, seed=1)
    tab.write("some words")
    tab.done()
    tab.page.dblclick("#out b .t >> nth=1")
    assert tab.page.evaluate(selected) == "" and tab.page.is_visible("#card")
    tab.keys("Escape")
    first, last = tab.box("#out b .t >> nth=0"), tab.box("#out b .t >> nth=3")
    y = first["y"] + first["height"] / 2
    tab.page.mouse.move(first["x"] + 1, y)
    tab.page.mouse.down()
    tab.page.mouse.move(last["x"] + last["width"] - 1, y, steps=4)
    tab.page.mouse.up()
    assert tab.page.evaluate(selected) == "some", "dragging selects"
