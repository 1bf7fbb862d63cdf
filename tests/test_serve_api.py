"""lab serve over real HTTP: OpenAI's interface, with its own client, and the page's /generate."""

import json
import math
import sys

import pytest
import torch

from lab.cli import UserError
from lab.data.chat import truncate_chat
from lab.data.tokenizers import get_tokenizer
from lab.inference.generate import generate
from lab.tools.serve_app import MAX_NEW_TOKENS, ChatRequest

BYTES = get_tokenizer("bytes")


def by_hand(model, ids, n, **gen_kwargs):
    """(tokens, their log-probabilities, log-probabilities of all tokens at each step), by generate."""
    tokens, own, rows = [], [], []
    for token, logits in generate(model, torch.tensor([ids]), n, **gen_kwargs):
        rows.append(logits[0].log_softmax(-1))
        tokens.append(token.item())
        own.append(rows[-1][token].item())
    return tokens, own, rows


# ------------------------------------------------------------------------------- OpenAI's interface


def test_completions_with_openais_client(server, client):
    name = client.models.list().data[0].id
    assert name == "r/model_000010"  # not the whole path
    ask = dict(model=name, prompt="abc", max_tokens=12, temperature=0, logprobs=3)
    whole = client.completions.create(**ask)
    tokens, own, rows = by_hand(server.model, [256, *b"abc"], 12, temperature=0)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and whole.usage.completion_tokens == 12
    assert choice.text == BYTES.decode(tokens)
    assert choice.logprobs.token_logprobs == pytest.approx(own, abs=1e-4)
    top = sorted(choice.logprobs.top_logprobs[0].values(), reverse=True)
    assert top == pytest.approx(rows[0].topk(3).values.tolist(), abs=1e-4)
    drawn = dict(model=name, prompt=[256, 97], max_tokens=20, top_p=0.9)
    a, b, c = (client.completions.create(**drawn, seed=s).choices[0].text for s in (3, 3, 4))
    assert a == b != c


def test_a_list_of_prompts_gives_a_choice_for_each(server, client):
    """With the texts, log-probabilities and usage that each prompt has alone."""
    ask = dict(model="any", max_tokens=9, temperature=0, logprobs=1)
    prompts = ["abc", "z", "abcd"]
    alone = [client.completions.create(**ask, prompt=prompt) for prompt in prompts]
    whole = client.completions.create(**ask, prompt=prompts)
    as_ids = client.completions.create(**ask, prompt=[[*prompt.encode()] for prompt in prompts])
    assert [c.index for c in whole.choices] == [0, 1, 2] and as_ids.choices == whole.choices
    for one, choice in zip(alone, whole.choices, strict=True):
        assert choice.model_copy(update={"index": 0}) == one.choices[0]
    assert whole.usage.total_tokens == sum(one.usage.total_tokens for one in alone)
    parts = [
        part.choices[0] for part in client.completions.create(**ask, prompt=prompts, stream=True)
    ]
    for choice in whole.choices:
        mine = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == "length"
        offsets = [offset for part in mine for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
    drawn = client.completions.create(model="any", prompt=["a", "a"], seed=1, max_tokens=20)
    assert drawn.choices[0].text != drawn.choices[1].text
    for wrong in (["a"] * 21, ["a", 1], [1, "a"], [[1, "a"]], [None], {"a": 1}, 3, [1.5], [True]):
        status, text = server.send("/v1/completions", dict(prompt=wrong))
        assert (
            status == 400
            and "must be a string, a list of token ids, or a list of at most 20" in text
        )


def test_a_model_can_be_asked_for_by_name(client, server):
    listed = client.models.list().data[0]
    assert client.models.retrieve(listed.id) == listed
    status, text = server.send("/v1/models/gpt-4")
    assert status == 404 and "there is no model gpt-4; this server has r/model_000010" in text


@pytest.mark.parametrize(
    "path, more",
    [
        ("/v1/completions", dict(prompt="a")),
        ("/v1/chat/completions", dict(messages=[dict(role="user", content="a")])),
    ],
)
def test_fields_that_change_no_text_are_ignored_and_others_are_refused(server, path, more):
    harmless = dict(
        safety_identifier="u", prompt_cache_key="k", service_tier="auto", modalities=["text"],
        parallel_tool_calls=True, user="u", store=True, metadata={"a": "b"}, tools=[], n=1,
        frequency_penalty=0.0, response_format={"type": "text"}, tool_choice="none", echo=False,
    )  # fmt: skip
    status, text = server.send(path, more | harmless | dict(max_tokens=1))
    assert status == 200, text
    for name, value in dict(
        n=2, best_of=2, echo=True, suffix="x", tools=[{"type": "function"}], tool_choice="auto",
        logit_bias={"5": 1}, frequency_penalty=0.5, modalities=["audio"], response_format={"type": "json"},
    ).items():  # fmt: skip
        status, text = server.send(path, more | {name: value})
        assert status == 400 and f"{name} is not supported; leave it out" in text, text
    for name, value in dict(answer=[65], **({} if "prompt" in more else {"prompt": "b"})).items():
        status, text = server.send(path, more | {name: value})  # only the page continues an answer
        assert status == 400 and name in text, text


def test_null_means_absent_and_max_completion_tokens_comes_first():
    nulls = dict.fromkeys(("temperature", "top_p", "max_tokens", "stream", "n", "seed"))
    ask = ChatRequest(messages=[{"role": "user", "content": "a"}], **nulls)
    assert (ask.temperature, ask.max_tokens, ask.stream) == (1.0, 200, False)
    more = dict(max_tokens=5, max_completion_tokens=7)
    assert ChatRequest(messages=[{"role": "user", "content": "a"}], **more).max_tokens == 7
    with pytest.raises(UserError, match="n is not supported"):
        ChatRequest(messages=[{"role": "user", "content": "a"}], n=0)


def test_chat_with_openais_client(server, client):
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}]
    ask = dict(model="any", messages=messages, max_completion_tokens=9, temperature=0)
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    whole, used = whole.choices[0], whole.usage
    ids, _ = truncate_chat(messages, BYTES, 128, 9)
    tokens, own, _ = by_hand(server.model, ids, 9, temperature=0)
    long = client.chat.completions.create(model="any", messages=messages, max_tokens=400)
    assert long.choices[0].finish_reason == "length" and long.usage.total_tokens == 128
    assert whole.message.role == "assistant" and whole.message.content == BYTES.decode(tokens)
    assert [one.logprob for one in whole.logprobs.content] == pytest.approx(own, abs=1e-4)
    assert [len(one.top_logprobs) for one in whole.logprobs.content] == [2] * 9
    ask |= dict(logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True})
    *parts, last = client.chat.completions.create(**ask)
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content for choice in choices) == whole.message.content
    assert [x for c in choices for x in c.logprobs.content] == whole.logprobs.content
    assert last.choices == [] and last.usage == used and used.completion_tokens == 9


def test_message_variants_are_normalized_or_refused(server):
    """Role developer becomes system, text parts are joined; other parts give an error."""
    plain = [dict(role="system", content="S"), dict(role="user", content="a\nb")]
    parts = [dict(type="text", text=text) for text in "ab"]
    other = [dict(role="developer", content="S"), dict(role="user", content=parts)]

    def answer(messages):
        ask = dict(messages=messages, temperature=0, max_tokens=9, logprobs=True)
        return json.loads(server.send("/v1/chat/completions", ask)[1])

    assert answer(other)["choices"] == answer(plain)["choices"]
    image = dict(type="image_url", text="a")
    for content, wrong in (([*parts, image], "image_url"), (["a"], "'a'"), (None, "content None")):
        message = answer([dict(role="user", content=content)])["error"]["message"]
        assert wrong in message and "role 'user'" not in message


# ----------------------------------------------------------------------------- the page's /generate


def test_prompt_is_scored_and_an_alternative_token_can_be_continued(server):
    ask = dict(prompt="abc", temperature=0, max_tokens=10)
    prompt, first = server.generate(**ask)
    assert [piece["text"] for piece in prompt] == ["a", "b", "c"]
    rows = server.model(torch.tensor([[256, *b"ab"]]))[0][0].softmax(-1)
    wanted = [row[token].item() for row, token in zip(rows, b"abc")]
    assert [piece["p"] for piece in prompt] == pytest.approx(wanted, rel=1e-3)
    runner_up = first[4]["likeliest"][1]
    taken, rest = server.generate(
        **ask, answer=[piece["id"] for piece in first[:4]] + [runner_up[0]]
    )
    assert [taken[0]["id"], taken[0]["p"]] == pytest.approx([runner_up[0], runner_up[2]], rel=1e-3)
    ids = [256, *b"abc", *(piece["id"] for piece in first[:4]), runner_up[0]]
    assert [piece["id"] for piece in rest] == by_hand(server.model, ids, 10, temperature=0)[0]


def test_text_beyond_the_context_is_inspected_and_continued_in_its_own_window(server):
    ask = dict(prompt="abc", seed=1, top_k=0)
    prompt, pieces = server.generate(**ask, max_tokens=300)  # the context has 128 tokens
    ids, p = [x["id"] for x in prompt + pieces], [x["p"] for x in prompt + pieces]
    for place in (100, 127, 128, 129, 191, 192, 193, 194, 250, 300):
        found = json.loads(server.send("/inspect", dict(prompt=[], answer=ids[:place]))[1])
        logits = [(x, 1) for *_, x in found["next"]] + found["rest"]
        total = sum(n * math.exp(x) for x, n in logits)
        for token, _, x in found["next"]:
            if token == ids[place]:
                assert math.exp(x) / total == pytest.approx(p[place], rel=1e-3)
    pieces = server.generate(prompt="abc", temperature=0, max_tokens=300)[1]
    ids = [x["id"] for x in pieces]
    rest = server.generate(prompt="abc", temperature=0, max_tokens=130, answer=ids[:170])[1]
    assert [x["id"] for x in rest] == ids[170:]


def test_oldest_messages_are_dropped_and_their_number_is_reported(server, client):
    turns = [dict(role=role, content="word " * 9) for role in ("user", "assistant") * 4]
    last = dict(role="user", content="last")
    first, *_ = server.lines(messages=[*turns, last], max_tokens=2)
    text = "".join(piece["text"] for piece in first["scored"])
    assert first["dropped"] == 8 and text == "User: last\n\nAssistant:"
    ask = dict(model="any", messages=[*turns, last], max_tokens=2)
    parts = client.chat.completions.create(**ask, stream=True)
    whole = client.chat.completions.create(**ask)
    assert {part.dropped_messages for part in [whole, *parts]} == {8}
    whole = client.chat.completions.create(**ask | dict(messages=[last]))
    assert "dropped_messages" not in whole.model_extra
    system = dict(role="system", content="S")
    ids, dropped = truncate_chat([system, *turns, last], BYTES, 160, 0)
    assert BYTES.decode(ids[1:]).startswith("System: S\n\nUser: word word ") and dropped == 6


def test_chat_answer_ends_when_the_context_is_full(server):
    """So that the question stays in the context. Without chat, the window slides instead."""
    hi, how = [dict(role="user", content="hi")], dict(temperature=0, max_tokens=300)
    ids, _ = truncate_chat(hi, BYTES, 128, 300)
    answer = server.generate(messages=hi, **how)[1]
    fits = by_hand(server.model, ids, 128 - len(ids), temperature=0)[0]
    assert [piece["id"] for piece in answer] == fits and answer[-1]["end"] == "window"
    more = server.generate(messages=hi, answer=fits[:9], **how)[1]
    assert [piece["id"] for piece in more] == fits[9:]
    text = server.generate(prompt="hi", **how)[1]
    assert len(text) == 300 and text[-1]["end"] == "length"


def test_a_chat_of_any_length_is_answered(server):
    hi = [dict(role="user", content="hi"), dict(role="assistant", content="a" * 200)]
    start, *_ = server.lines(messages=hi * 200 + hi[:1], max_tokens=2)
    assert start["dropped"] > 390


@pytest.mark.parametrize(
    "body, sentence",
    [
        (dict(prompt="a" * 128), "a prompt of 129 tokens is longer than the model's context of 128"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature=nan must be a finite number"),
        (dict(prompt="a", temperature=-3), "temperature=-3 must be 0 or more"),
        (dict(prompt="a", temperature="no number"), "temperature='no number' must be a number"),
        (dict(prompt="a", top_p=0), "top_p=0 must be greater than 0"),
        (dict(prompt="a", top_k=0.5), "top_k=0.5 must be a whole number"),
        (dict(prompt="a", seed=2**32), "seed=4294967296 must be less than 4294967296"),
        (dict(prompt="a", max_tokens=10**9), f"max_tokens=1000000000 must be {MAX_NEW_TOKENS} or less"),
        (dict(prompt=[300]), "token 300 must be an id of this model, 0 to 256"),
        (dict(messages=[dict(role="user", content="a" * 128)]), "the newest message takes"),
        (dict(messages=[dict(role="user", content="hi")], answer=[97] * 107),
         "the answer fills the model's context of 128 tokens"),
        # Python 3.14 reads such depths
        (b"[" * 60000, "parsing the body" if sys.version_info < (3, 14) else "must be JSON, sent with"),
        (b"\xff", "parsing the body"), (b"{}x", "must be JSON, sent with"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_with_one_sentence(server, body, sentence):
    status, text = server.send("/generate", body)
    message = json.loads(text)["error"]["message"]
    assert status == 400 and sentence in message and "\n" not in message and len(message) < 400
