"""The page of lab serve in a browser: its settings."""

import pytest

pytestmark = pytest.mark.slow


def test_wrong_setting_is_shown_at_its_input_and_changes_nothing(tab):
    tab.set(max_tokens=3)
    tab.write("abc")
    before = tab.done()
    tab.set(temperature=-3)
    tab.write("xyz")
    assert tab.page.evaluate("document.activeElement.id") == "temperature"
    assert tab.page.evaluate("document.getElementById('summary').closest('details').open")
    tab.page.click(".tools >> text=Regenerate")
    assert tab.texts() == before and tab.count() == 1
    tab.set(temperature=0.85)  # no multiple of the step, but valid
    tab.write("xyz")
    assert tab.done() != before


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
    before = tab.count()
    for id, values in (wrong | {"seed": ("-3",)}).items():
        for value in values:
            good = tab.page.input_value(f"#{id}")
            tab.page.fill(f"#{id}", value)
            names = dict(top_k="top-k", top_p="top-p", max_tokens="new tokens")
            assert f"{names.get(id, id)} (not valid)" in summary.inner_text()
            assert f" {value}," not in summary.inner_text() + ","
            tab.page.click("#go")
            assert tab.focused("id") == id and tab.count() == before, "and it is refused"
            tab.page.fill(f"#{id}", good)
    tab.page.fill("#temperature", "1")
    tab.page.fill("#max_tokens", "1")
    assert summary.inner_text().endswith(", at most 1 new token")


def test_greedy_texts_have_no_seed_and_settings_stay_open(tab):
    tab.page.click("#options summary")
    tab.page.fill("#temperature", "0")
    tab.page.fill("#max_tokens", "4")
    assert tab.page.inner_text("#summary") == "temperature 0, top-k 50, at most 4 new tokens"
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
        tab.mode(name)
        assert tab.page.input_value("#temperature") == usual
        assert tab.page.inner_text("#summary").startswith(f"temperature {usual}, ")
    tab.page.click("#options summary")
    tab.page.fill("#temperature", "0.3")
    tab.mode("text")
    assert tab.page.input_value("#temperature") == "0.8"
    tab.mode("chat")
    tab.page.reload()
    assert tab.page.input_value("#temperature") == "0.3"
    tab.page.fill("#temperature", "")
    tab.keys("Tab")
    assert tab.page.input_value("#temperature") == "0.5", "an empty setting returns to its default"


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
    tab.mode("chat")
    tab.set(stop="")
    tab.write("one")
    tab.done()
    assert "Stopped" not in tab.page.inner_text("#foot")
    end = "({ id: 256, text: '', name: '\"<|endoftext|>\"', p: 0.5, likeliest: [], end: 'stop' })"
    tab.page.evaluate(f"() => {{ turns().at(-1).pieces.push{end}; render(); }}")
    assert tab.page.inner_text("#chat .turn > .tokens > .t >> nth=-1") == "■"
