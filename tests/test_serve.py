"""lab serve over real HTTP, also with OpenAI's client; and sample.py --chat in a terminal."""

import asyncio
import concurrent.futures
import contextlib
import functools
import html
import http.client
import itertools
import json
import math
import re
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Process, fail, run_python, wait_for
from test_plot import start as start_event
from test_plot import val, write_log
from test_sample import always, noisy_gpt
from test_weights import saved

import sample
import speedrun
from lab.cli import UserError, parse_args
from lab.data.chat import build_chat, truncate_chat
from lab.data.manifest import new_manifest
from lab.data.sources import local_files
from lab.data.tokenizers import get_tokenizer
from lab.hf.gguf_file import modelfile
from lab.inference import generate as generating
from lab.inference.generate import KVCache, compile_decode_step, generate
from lab.inference.int8 import Int8Linear, quantize_linears_
from lab.inference.prediction import group_logits, inspect_prediction
from lab.inference.streaming import make_decode_step, score_tokens, stream_generate
from lab.notebook.interp import capture_activations
from lab.registry import chat_warning, is_tuned, resolve_source, training_data, tuned_on
from lab.tools import serve
from lab.tools.serve_app import MAX_NEW_TOKENS, ChatRequest, GenerateRequest
from train_gpt2 import PRESETS

BYTES = get_tokenizer("bytes")
LAPTOP = vars(PRESETS["laptop"][0])  # 2 layers of 128 channels, 128 bytes of context
EVIL = '<img src=x onerror=alert(1)></script><script>alert("é")</script>\x1b[2J\x00\x07\u202e{{ about }}'


class Server:
    """A running `python -m lab serve` of a model."""

    def __init__(self, folder, model, *flags):
        self.model = model
        path = saved(model, folder / "log/r/model_000010.pt")
        self.process = Process(ROOT / "lab", "serve", path, "--port", 0, *flags, cwd=folder)
        wait_for(lambda: "http://" in self.process.stdout, self.process)
        self.url = re.search(r"http://\S+", self.process.stdout)[0]
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)

    def begin(self, path, body=None, **headers):
        """The response, not read yet. body: bytes, or a value that is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        body = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse()

    def send(self, path, body=None, **headers):
        """(status, text) of the response."""
        with self.begin(path, body, **headers) as answer:
            return answer.status, answer.read().decode()

    def lines(self, **body):
        status, text = self.send("/generate", body)
        assert status == 200, text
        return list(map(json.loads, text.splitlines()))

    def generate(self, **body):
        """(scored, pieces) of /generate."""
        first, *rest = self.lines(**body)
        return first["scored"], [piece for line in rest for piece in line["pieces"]]

    def disconnect(self, answer):
        """Close the connection before the end of the response."""
        answer.fp.raw._sock.close()
        answer.close()

    def quit_while_writing(self, ctrl_c=1):
        """Press Ctrl-C, or several times, while a long text is written; no traceback may be printed."""
        long = dict(prompt=["a"] * 20, max_tokens=MAX_NEW_TOKENS, stream=True)
        with self.begin("/v1/completions", long) as answer:
            assert answer.readline()
            for _ in range(ctrl_c):
                self.process.signal(signal.SIGINT)
                time.sleep(0.5)
            assert self.process.wait(20) in (0, 130), self.process.stderr
        assert "Traceback" not in self.process.stderr, self.process.stderr

    def memory(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024  # MiB


def endless(model):
    """The same model, changed so that it hardly ever samples end-of-text."""
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(-20 * model.transformer.wte.weight[256])
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    server = Server(tmp_path_factory.mktemp("serve"), endless(noisy_gpt(**LAPTOP)))
    yield server
    server.quit_while_writing()


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai", reason="needs requirements-test.txt")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


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
    parts = [part.choices[0] for part in client.completions.create(**ask, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    assert parts[-1].finish_reason == "length"
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset
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


# ---------------------------------------------------------------------------- the page's /generate


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


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention": "math"}, {"document_mask": True}],
    ids=lambda changes: " ".join(changes),
)
def test_a_prediction_is_described_with_its_logits_and_attention(changes):
    """Attention weights equal those of the notebook's hooks, whichever way the model computes them."""
    model = noisy_gpt(n_layer=2, **changes)
    ids = [256, *b"abc", 256, *b"defg"]
    logits = model(torch.tensor([ids]))[0][0, -1]
    _, weights = capture_activations(model, torch.tensor([ids]))
    last = torch.stack(weights)[:, 0, :, -1]  # (L, H, S)
    for layer, head in itertools.product((None, 0, 1), (None, 1)):
        found = inspect_prediction(model, BYTES, ids, layer, head)
        L = slice(None) if layer is None else slice(layer, layer + 1)
        H = slice(None) if head is None else slice(head, head + 1)
        assert found["attention"] == pytest.approx(last[L, H].mean((0, 1)).tolist(), abs=1e-4)
        assert (found["layers"], found["heads"]) == (2, last.size(1))
    assert (sum(found["attention"][:4]) < 1e-4) == ("document_mask" in changes)
    assert inspect_prediction(model, BYTES, ids, 2, None)["attention"] == []
    assert [i for i, *_ in found["next"]] == logits.argsort(descending=True)[:20].tolist()
    everything = [x for *_, x in found["next"]] + [x for x, _ in found["rest"]]
    assert everything == pytest.approx(logits.sort(descending=True).values.tolist(), abs=1e-4)


def test_attention_of_another_model_class():
    model = speedrun.GPT(
        speedrun.GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=257)
    )
    found = inspect_prediction(model.eval(), BYTES, [256, *b"abcd"], None, None)
    assert found["layers"] == 2 and sum(found["attention"]) == pytest.approx(1, abs=1e-3)
    assert len(found["attention"]) == 5


def test_grouped_logits_are_exact_at_temperature_1():
    logits = (torch.randn(50_000) * 3).sort(descending=True).values
    for scale in (1, 100):
        groups = group_logits(logits * scale)
        assert len(groups) <= 700 and sum(n for _, n in groups) == 50_000
        values, counts = torch.tensor(groups, dtype=torch.float64).T
        mine = ((values - values[0]).exp() * counts).sum().item()
        true = ((logits - logits[0]).double() * scale).exp().sum().item()
        assert mine == pytest.approx(true, rel=1e-3) and values.isfinite().all()
    assert group_logits(torch.zeros(0)) == []


def test_page_shows_the_models_loss_and_whether_it_is_tuned(tmp_path):
    run = tmp_path / "r"
    assert serve.validation_loss(str(run / "model_000010.pt")) is None
    write_log(run, [start_event(), val(0, 5.5), val(10, 3.25), val(20, 3.0), val(30, 3.5)])
    # linked at a saved step, which need not have the lowest loss
    torch.save({"step": 12}, run / "model_best.pt")
    found = [
        serve.validation_loss(str(run / f"model_{step}.pt"))
        for step in ("000010", "000025", "best")
    ]
    assert found == [(3.25, 10), (3.0, 20), (3.25, 10)]
    assert serve.validation_loss(str(run / "copy.pt")) is serve.validation_loss("gpt2") is None
    steps = {"000025": 25, "best": 12, "copy": None}
    assert {s: serve.checkpoint_step(str(run / f"model_{s}.pt")) for s in steps} == steps
    assert serve.checkpoint_step("gpt2") is None
    assert is_tuned("gpt2") is False and is_tuned(str(run / "model_000010.pt")) is None
    for text, tuned in (
        ('{"train": {"preset": "sft"}}', True),
        ('{"train": {}}', False),
        ("{", None),
    ):
        (run / "config.json").write_text(text)
        assert is_tuned(str(run / "model_000010.pt")) is tuned
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    from lab.tools.serve_app import model_facts

    engine = serve.Engine(noisy_gpt(block_size=2048), BYTES)
    facts = model_facts(engine, (3.25, 1000), "my texts")
    assert facts["validation loss"] == "3.25 nats per token after 1,000 steps"
    assert facts["context"] == "2,048 tokens" and facts["tokenizer"] == "bytes, 257 tokens"
    assert facts["trained on"] == "my texts"
    assert facts["size"].endswith(" parameters") and "step" not in facts
    assert model_facts(engine, (3.25, 1000), step=1150)["step"] == "1,150"
    assert model_facts(engine, None, step=0)["step"] == "0"
    assert "step" not in model_facts(engine, (3.25, 1000), step=1000), "it is with the loss"
    assert "size" not in model_facts(serve.Engine(quantize_linears_(noisy_gpt()), BYTES), None)


def test_training_data_is_what_the_run_or_export_recorded(tmp_path):
    run, folder = tmp_path / "r", tmp_path / "shards"
    run.mkdir()
    checkpoint, config = str(run / "model_000010.pt"), run / "config.json"
    assert training_data(checkpoint) == training_data("gpt2") == ""
    for text, data in (
        (json.dumps(dict(train=dict(data=str(folder)))), "shards"),
        ('{"train": {}}', ""),
        ('{"train": 3}', ""),
        ("{", ""),
    ):
        config.write_text(text)
        assert training_data(checkpoint) == data, text
    config.write_text(json.dumps(dict(train=dict(data=str(folder)))))
    for source, data in (
        (dict(kind="builtin", revision="Python 3.11.7"), "the documentation inside Python 3.11.7"),
        (dict(kind="hub", dataset="a/b", name="sample"), "a/b sample"),
        (dict(kind="hub", dataset="a/b", name=""), "a/b"),
        (dict(kind="local", files=[]), "shards"),
    ):
        folder.mkdir(exist_ok=True)
        manifest = new_manifest("x", BYTES, source=source, shard_tokens=9, val_tokens=9)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert training_data(checkpoint) == data
    files = local_files(str(ROOT / "examples/chats.jsonl"))
    (folder := tmp_path / "chats_bytes_128_1234abcd").mkdir()
    chat = build_chat(files, folder, "bytes", 128, 10**6)
    config.write_text(json.dumps(dict(train=dict(data=str(folder)))))
    count = sum(s["documents"] for s in chat["shards"] if s["split"] == "train")
    assert training_data(checkpoint) == f"{count} conversations of chats.jsonl" and count > 400
    for wrong in ({}, {"files": [3]}):  # damaged
        source = {"kind": "chat"} | wrong
        manifest = chat | {"source": source}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert training_data(checkpoint) == ""
    config.write_text('{"trained_on": "letters"}')  # of an export, which is a folder
    assert training_data(str(run)) == "letters"


def page_of(process):
    """The page of a started `lab serve --port 0`."""
    wait_for(lambda: "http://" in process.stdout, process)
    address = process.stdout.split("http://")[1].split()[0]
    with urllib.request.urlopen(f"http://{address}") as answer:
        return answer.read().decode()


def test_note_of_an_untuned_model_has_the_command_that_tunes_it(start, tmp_path):
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    model = ROOT / "examples/laptop_model"
    page = page_of(start(ROOT / "lab", "serve", model, "--port", 0, "--device", "cpu"))
    note = re.search('<p id="untuned"[^>]*>(.*?)<code>(.*?)</code></p>', page)
    sentence, command = map(html.unescape, note.groups())
    warning = f"{sentence}`{command}`"
    assert warning.startswith(f"{model} may not be tuned to answer")
    chat = run_python(ROOT / "sample.py", "--chat", "--model", model, cwd=tmp_path)
    assert f"[{warning}]\n" in chat.stderr, "sample.py --chat has the same sentence"
    words = shlex.split(command)[1:] + "--max_steps 1 --device cpu --sample_every 0".split()
    done = run_python(*words, "--val_every", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "log").iterdir()
    assert is_tuned(resolve_source(str(run))) and chat_warning(resolve_source(str(run))) == ""
    assert 'id="untuned"' not in page_of(start(ROOT / "lab", "serve", run, "--port", 0))


def test_warning_on_a_public_address_names_no_path(tmp_path):
    source = str(tmp_path / "model_000010.pt")
    said = "this model may not be tuned to answer; then it only continues the text"
    assert chat_warning(source, public=True) == said
    (tmp_path / "config.json").write_text('{"train": {"preset": "laptop"}, "program": {}}')
    Path(source).touch()
    said = "this model was not tuned to answer, so it only continues the text"
    assert chat_warning(source, public=True) == said
    assert str(tmp_path) in chat_warning(source)


def test_chats_begin_with_questions_of_the_conversations_tuned_on(start, tmp_path):
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    from lab.tools.serve_app import BUILTIN_QUESTIONS, QUESTIONS

    chats = ROOT / "examples/chats.jsonl"
    lines = chats.read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["messages"][0]["content"] for line in lines]
    trained = {question for i, question in enumerate(asked) if i % 10}
    assert trained.issuperset(BUILTIN_QUESTIONS) and trained.isdisjoint(QUESTIONS)
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]))
    for file, questions in ((chats, BUILTIN_QUESTIONS), (tmp_path / "mine.jsonl", QUESTIONS)):
        (folder := tmp_path / f"{file.stem}_shards").mkdir()
        build_chat(local_files(str(file)), folder, "bytes", 128, 10**6)
        path = saved(noisy_gpt(), tmp_path / f"log/{file.stem}/model_000010.pt")
        config = dict(train=dict(preset="sft", data=str(folder)))
        (Path(path).parent / "config.json").write_text(json.dumps(config))
        assert tuned_on(str(path), chats) == (file == chats)
        page = page_of(start(ROOT / "lab", "serve", path, "--port", 0))
        assert json.dumps(list(questions)) in page
    assert not tuned_on("gpt2", chats) and not tuned_on(str(path), tmp_path / "missing")


def test_chats_have_one_default_temperature_everywhere():
    for chat, wanted in ((True, 0.5), (False, 0.8)):
        for given in (None, 0.0, 1.5):
            flags = ["--chat"] * chat + [f"--temperature={given}"] * (given is not None)
            cfg = parse_args(sample.Config, flags, "")
            assert cfg.temperature == (wanted if given is None else given)
        assert f"PARAMETER temperature {wanted}\n" in modelfile("m.gguf", 128, chat)
    assert (generating.CHAT_TEMPERATURE, generating.TEMPERATURE) == (0.5, 0.8)


def test_port_in_use_gives_the_fix(tmp_path):
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    model = ROOT / "examples/laptop_model"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = fail("lab", "serve", model, "--port", port, cwd=tmp_path)
    wanted = f"port {port} is in use, perhaps by another lab serve; pass --port 0 for any free one"
    assert said == f"lab serve: error: {wanted}\n"


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


def test_large_requests_and_file_paths_are_refused(server):
    assert server.send("/generate", dict(prompt="a" * 70_000))[0] == 413
    files = ("etc/passwd", "lab/tools/serve.py", "log/r/model_000010.pt", "docs", "openapi.json")
    prefixes = ("/", "//", "/" + "../" * 9, "/%2e%2e/" * 5, "/generate/../../", "/v1/models/")
    for path in map("".join, itertools.product(prefixes, files)):
        assert server.send(path)[0] in (400, 404, 405), path
    assert server.send("file:///etc/passwd")[0] in (400, 404)
    status, page = server.send("/")
    assert status == 200 and "http" not in page.replace("xmlns='http:", ""), "loads from elsewhere"
    for host in ("evil.example", "127.0.0.1.evil.example"):  # DNS rebinding
        assert server.send("/v1/models", Host=host)[0] == 400
    for path in ("/generate", "/v1/completions"):
        status, text = server.send(path, b'{"prompt": "a"}', **{"Content-Type": "text/plain"})
        assert status == 400 and "sent with Content-Type" in text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have 127.0.0.1 only")
def test_another_loopback_address(tmp_path):
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    server = Server(tmp_path, endless(noisy_gpt(**LAPTOP)), "--host", "127.0.0.2")
    statuses = [
        server.send("/", Host=host)[0] for host in ("127.0.0.2", "localhost", "evil.example")
    ]
    server.quit_while_writing(ctrl_c=2)
    assert statuses == [200, 200, 400]


# --------------------------------------------------------------------------------- hostile clients

NUMBERS = (
    "-1 0 1 2147483648 9223372036854775808 18446744073709551616 -1e308 1e308 1e309 1e-320 0.5 NaN "
    'Infinity -Infinity "1" true [] {} [1] "\\ud800"'
).split() + ["1" + "0" * 400]  # fmt: skip
FIELDS = (
    "max_tokens max_completion_tokens temperature top_k top_p seed stop likeliest answer logprobs "
    "top_logprobs n stream stream_options prompt messages frequency_penalty logit_bias layer head"
).split()


@pytest.mark.parametrize(
    "path", ["/generate", "/inspect", "/v1/completions", "/v1/chat/completions"]
)
def test_extremes_of_every_number_are_answered_or_refused(server, path):
    """In one sentence with status 400; never with 500, and never with a number that is not finite."""
    valid = {"prompt": '"a"', "max_tokens": "1"}
    if "chat" in path:
        valid = {"messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1"}
    for field, number in itertools.product(FIELDS, NUMBERS):
        body = ", ".join(f'"{k}": {v}' for k, v in (valid | {field: number}).items())
        status, text = server.send(path, f"{{{body}}}".encode())
        assert status in (200, 400), (field, number, text)
        assert "NaN" not in text and "Infinity" not in text, (field, number)
        if status == 400:
            message = json.loads(text)["error"]["message"]
            assert "\n" not in message and len(message) < 400, (field, number)


def raw(server, *parts, limit=12):
    """The server's response to these bytes, at most `limit` bytes of it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        # the server may refuse a request before it has read all of it
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while len(answer) < limit and (more := connection.recv(limit)):
                answer += more
        return answer


def test_long_bodies_end_in_a_sentence_and_take_no_memory(server):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.memory()
    block = b"a" * 2**20
    sized = raw(server, head + b"Content-Length: 104857600\r\n\r\n", *[block] * 100)
    chunks = raw(
        server,
        head + b"Transfer-Encoding: chunked\r\n\r\n",
        *[b"100000\r\n" + block + b"\r\n"] * 100,
    )
    for answer in (sized, chunks):
        assert answer in (b"", b"HTTP/1.1 413"), answer
    stop = dict(prompt="a", stop=["x" * 10**6])
    assert server.send("/generate", stop)[0] == 413
    status, text = server.send("/generate", dict(prompt="a", stop=["x" * 101]))
    assert status == 400 and "stop.0" in text
    assert server.memory() < before + 20, "MiB"


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 10_000, b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 10**6 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /\xff%00%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)  # fmt: skip
def test_invalid_http_is_refused(server, sent):
    assert raw(server, sent)[9:12] in (b"400", b"404", b"431", b""), sent[:80]
    assert server.send("/v1/models")[0] == 200


def test_pages_of_other_sites_can_send_nothing(server):
    """They may send requests without a preflight, but not as JSON, and may not read the answers."""
    for path in ("/generate", "/v1/completions", "/v1/models", "/"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        ask = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", path, headers=ask)
        answer = connection.getresponse()
        assert answer.status == 405
        assert not any("access-control" in name.lower() for name in answer.headers)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: http://evil.example\r\n"
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind in (
        b"",
        b"Content-Type: text/plain\r\n",
        b"Content-Type: application/x-www-form-urlencoded\r\n",
    ):
        answer = raw(server, head + kind + b"Content-Length: 32\r\n\r\n" + body, limit=9999)
        assert answer.startswith(b"HTTP/1.1 400") and b"access-control" not in answer.lower(), (
            answer
        )
    kind = b"Content-Type: application/json\r\nContent-Length: 32\r\n\r\n"
    assert raw(server, head + kind + body) == b"HTTP/1.1 200", "only the type was refused"


def test_a_client_that_sends_slowly_times_out_and_frees_its_place(monkeypatch):
    from lab.tools import serve_app

    monkeypatch.setattr(serve_app, "CLIENT_TIMEOUT", 0.2)
    engine = serve.Engine(always(97), BYTES)
    app = serve_app.create_app(engine, "m", ["*"])
    sent, places = [], []

    async def receive():  # a byte at a time, each within the timeout
        await asyncio.sleep(0.05)
        places.append(engine.num_requests)
        return {"type": "http.request", "body": b"a", "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    scope = dict(
        type="http", method="POST", path="/generate", headers=headers, query_string=b"",
        asgi={"version": "3.0", "spec_version": "2.4"},
    )  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    assert sent == [] and {*places} == {0}


@pytest.mark.slow
def test_hostile_clients_change_neither_answers_nor_memory(tmp_path):
    pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")
    done = run_python(ROOT / "bench" / "hostile.py", "--seconds", 20, cwd=tmp_path)
    assert done.returncode == 0 and " 0 wrong answers" in done.stdout, done.stdout + done.stderr


# ------------------------------------------------------------------------------------ many at once


def test_fifty_concurrent_requests(server):
    ask = dict(prompt="abc", max_tokens=20, seed=1, temperature=1.0)
    alone = server.generate(**ask)[1]

    def one(i):
        if i % 10 == 9:
            return server.send("/v1/completions", dict(prompt="a" * 128))[0] == 400
        if i % 10 == 8:
            return server.disconnect(server.begin("/generate", ask | {"max_tokens": 4000})) is None
        return server.generate(**ask)[1] == alone

    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        assert all(threads.map(one, range(50)))
        before = server.memory()
        assert all(threads.map(one, range(50)))
    assert server.memory() < before + 5, "MiB"


def test_turns_are_fair_and_disconnected_clients_are_cancelled(server):
    t0 = time.perf_counter()
    server.generate(prompt="a", max_tokens=300)
    each = (time.perf_counter() - t0) / 300
    answer = server.begin("/generate", dict(prompt="a", max_tokens=2000))
    answer.readline()  # it is active
    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        long = threads.submit(answer.read)
        server.generate(prompt="b", max_tokens=20)
        assert not long.done(), "the short text waited for the long one"
        long.result()
        ask = dict(prompt="a", max_tokens=4000)
        # all at once, in case the check and the count of requests are not atomic
    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        all = list(threads.map(lambda _: server.begin("/generate", ask), range(200)))
    accepted, refused = ([a for a in all if a.status == status] for status in (200, 503))
    assert (len(accepted), len(refused)) == (100, 100)
    assert {answer.getheader("Retry-After") for answer in refused} == {"10"}
    assert b"100 requests are active or waiting" in refused[0].read()
    list(map(server.disconnect, accepted))
    t0 = time.perf_counter()
    server.generate(prompt="b", max_tokens=20)
    assert time.perf_counter() - t0 < 4000 * each, "it waited for the texts of disconnected clients"


# ---------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "text, stops, n, shown, end",
    [
        ("one two", (), 4, "one ", "length"),
        ("one\n\nUs", ("\n\nUser:",), 99, "one\n\nUs", "stop"),
        ("a\n\n\nUser:", ("\n\nUser:", "zz"), 99, "a\n", "stop"),
        ("aé", (), 2, "a\ufffd", "length"),
    ],
)
def test_stop_string_is_cut_off_wherever_tokens_split_it(monkeypatch, text, stops, n, shown, end):
    def fake_generate(model, idx, n, **gen_kwargs):
        for token in [*text.encode(), 256][:n]:
            yield torch.tensor([token]), torch.eye(257)[[token]]

    monkeypatch.setattr("lab.inference.streaming.generate", fake_generate)
    *before, last = stream_generate(always(0), BYTES, [256], n, stop=stops)
    assert not any(piece["end"] for piece in before) and last["end"] == end
    assert "".join(piece["text"] for piece in [*before, last]) == shown
    matched = "\n\nUser:" if "User:" in text else None
    assert last.get("stop_string") == matched


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decode_step_and_reused_cache_change_no_token(monkeypatch, real):
    """Without torch.compile; the slow variant compiles."""
    if not real:
        monkeypatch.setattr(generating.torch, "compile", lambda step, **options: step)
    for changes in [{}] if real else [{}, {"document_mask": True}, {"attention": "math"}]:
        model = noisy_gpt(**changes)
        cache = KVCache(16, compile_decode_step(model))
        for prompt in (5, 5) if real else (1, 5, 16):
            idx = torch.randint(257, (1 if real else 3, prompt))
            plain = [token.tolist() for token, _ in generate(model, idx, 24, temperature=0)]
            cached = generate(model, idx, 24, temperature=0, cache=cache)
            assert [token.tolist() for token, _ in cached] == plain


@pytest.mark.gpu
def test_engine_decodes_interleaved_texts_on_a_gpu():
    """Each cache has its own CUDA graph, so that texts do not mix."""
    model = noisy_gpt().cuda()
    engine = serve.Engine(model, BYTES, make_decode_step(model))
    prompts = [torch.randint(257, (1, n), device="cuda") for n in (3, 5, 8, 11)]
    plain = [[t.item() for t, _ in generate(model, idx, 40, temperature=0)] for idx in prompts]
    cache = engine.caches.get_nowait
    steps = [generate(model, idx, 40, temperature=0, cache=cache()) for idx in prompts]
    written = [[] for _ in prompts]
    for _ in range(40):
        for text, step in zip(written, steps):
            text.append(engine.thread.submit(next, step).result()[0].item())
    assert written == plain


def test_out_of_memory_gives_one_sentence_in_the_response():
    """In all kinds of responses; other errors are not changed."""
    pytest.importorskip("fastapi", reason="needs requirements-serve.txt")
    from lab.tools.serve_app import create_app

    model = noisy_gpt()
    app = create_app(serve.Engine(model, BYTES), "m", ["*"])

    def post(path, **body):
        """The response's text: the app is called as uvicorn calls it."""
        body, sent = json.dumps(body).encode(), []
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return requests.pop() if requests else await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"x")]
        scope = dict(
            type="http", method="POST", path=path, headers=headers, query_string=b"",
            asgi={"version": "3.0", "spec_version": "2.4"},
        )  # fmt: skip
        asyncio.run(app(scope, receive, send))
        return b"".join(message.get("body", b"") for message in sent).decode()

    def fail_with(error):
        def forward(*args, **kwargs):
            raise error

        model.forward = forward

    fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"))
    for path, more in (
        ("/generate", {}),
        ("/v1/completions", {}),
        ("/v1/completions", {"stream": True}),
    ):
        error = json.loads(post(path, prompt="a", **more).removeprefix("data: "))["error"]
        assert error["message"].startswith("out of memory (CUDA out of memory); serve a smaller"), (
            path
        )
    fail_with(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        post("/v1/completions", prompt="a")


def test_each_token_is_sent_before_the_next_ones_are_computed(monkeypatch):
    """Not only at the end of a turn, in which a small model computes many tokens."""
    monkeypatch.setattr(serve, "TURN_SECONDS", 1e9)
    model, calls, sent = always(97), itertools.count(), threading.Event()
    forward = model.forward

    def blocked(*args, **kwargs):
        assert next(calls) < 4 or sent.wait(20), "no token was sent during the turn"
        return forward(*args, **kwargs)

    model.forward = blocked
    engine = serve.Engine(model, BYTES)

    async def stream(whole_turns):
        counts = []
        async with engine.cache() as cache:
            request = GenerateRequest(max_tokens=9)
            async for new in engine.stream(request, [256], cache, whole_turns):
                counts.append(len(new))
                sent.set()
        return counts

    counts = asyncio.run(stream(whole_turns=False))
    assert len(counts) > 1 and sum(counts) == 9
    assert asyncio.run(stream(whole_turns=True)) == [9]  # for answers that are not streamed


def test_int8_differs_by_rounding_only():
    model, idx = noisy_gpt(n_embd=64, vocab_multiple=8), torch.randint(257, (2, 16))
    plain = model(idx)[0]
    assert isinstance(quantize_linears_(model).lm_head, Int8Linear)
    error = (model(idx)[0] - plain).std() / plain.std()
    assert 0 < error < 0.05
    records = score_tokens(model, BYTES, [256, *b"abc"])
    assert [record["text"] for record in records] == list("abc")


# ------------------------------------------------------------------------------------ in a terminal


def test_chat_in_the_terminal(tmp_path, ask_sample):
    """The answer is streamed; Ctrl-C ends the answer, not the program."""
    saved(always(ord("z"), block_size=30_000), tmp_path / "log/r/model_000010.pt")
    process = ask_sample("--chat", "--max_new_tokens", 100000)

    def answer_begins(turn):
        out = process.stdout
        return out.count("\n") == turn and out.endswith("zzzzz")

    for turn in (0, 1):
        process.type("hi\n")
        wait_for(functools.partial(answer_begins, turn), process)
        process.signal(signal.SIGINT)
    process.type("\n")
    assert process.wait() == 0 and {*process.stdout} == {"z", "\n"}, process.stderr
    assert process.stderr.count("[stopped]") == 2


def test_ctrl_c_ends_a_text_and_not_the_program(tmp_path, ask_sample):
    saved(always(ord("z"), block_size=30_000), tmp_path / "log/r/model_000010.pt")
    process = ask_sample("--max_new_tokens", 100000, "--num_samples", 1)
    for turn in (1, 2):
        process.type("hi\n")
        wait_for(lambda: process.stdout.count("hizzzzz") == turn, process)  # noqa: B023
        process.signal(signal.SIGINT)
    process.type("\n")
    assert process.wait() == 0 and process.stderr.count("[stopped]") == 2, process.stderr


def test_chat_reports_what_does_not_fit(tmp_path, ask_sample):
    saved(always(ord("z"), block_size=64), tmp_path / "log/r/model_000010.pt")
    process = ask_sample("--chat")
    process.type("hi\nhi\n" + "a" * 80 + "\n\n")
    assert process.wait() == 0, process.stderr
    assert process.stdout == 2 * ("z" * (64 - len("_User: hi\n\nAssistant:")) + "\n")
    assert process.stderr.count("[cut: the model's context of 64 tokens is full]") == 2
    assert "the newest message takes 99 tokens" in process.stderr
    assert process.stderr.count("because they no longer fit: the oldest 2 messages]") == 1
