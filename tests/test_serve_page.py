"""The page of lab serve: predictions that it draws, and what it says about the model."""

import html
import itertools
import json
import re
import shlex
import socket
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, fail, run_python, wait_for
from models import noisy_gpt
from test_plot import start as start_event
from test_plot import val, write_log

from lab.data.chat import build_chat
from lab.data.manifest import new_manifest
from lab.data.sources import local_files
from lab.data.tokenizers import get_tokenizer
from lab.inference.int8 import quantize_linears_
from lab.inference.prediction import RecordAttention, group_logits, inspect_prediction
from lab.notebook.interp import capture_activations
from lab.registry import chat_warning, is_tuned, resolve_source, training_data, tuned_on
from lab.tools import serve
from lab.tools.serve_app import BUILTIN_QUESTIONS, QUESTIONS, model_facts

BYTES = get_tokenizer("bytes")


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


def test_attention_of_other_calls_of_the_fused_kernel_is_recorded():
    """A scale, a mask that is added to the scores, and fewer heads of keys than of queries."""
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    bias = torch.randn(1, 4, 6, 6)
    grouped = dict(enable_gqa=True)
    for keys, more in ((k, {"scale": 0.5}), (k, {"attn_mask": bias}), (k[:, :2], grouped)):
        with RecordAttention() as record:
            y = F.scaled_dot_product_attention(
                q, keys, torch.eye(6).expand(1, keys.size(1), 6, 6), **more
            )
        assert torch.allclose(record.rows[0], y[:, :, -1], atol=1e-5)


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


def test_loss_of_a_checkpoint_is_the_last_one_up_to_its_step(tmp_path):
    run = tmp_path / "r"
    assert serve.validation_loss(str(run / "model_000010.pt")) is None
    write_log(run, [start_event(), val(0, 5.5), val(10, 3.25), val(20, 3.0), val(30, 3.5)])
    # linked at a saved step, which need not have the lowest loss
    torch.save({"step": 12}, run / "model_best.pt")
    names = "000010", "000025", "best", "copy"
    paths = [*(str(run / f"model_{name}.pt") for name in names), "gpt2"]
    assert [serve.checkpoint_step(path) for path in paths] == [10, 25, 12, None, None]
    losses = [(3.25, 10), (3.0, 20), (3.25, 10), None, None]
    assert [serve.validation_loss(path) for path in paths] == losses


def test_page_shows_facts_about_the_model():
    engine = serve.Engine(noisy_gpt(block_size=2048), BYTES)
    facts = model_facts(engine, (3.25, 1000), "my texts")
    assert facts.pop("size").endswith(" parameters")
    assert facts == {
        "validation loss": "3.25 nats per token after 1,000 steps", "context": "2,048 tokens",
        "tokenizer": "bytes, 257 tokens", "trained on": "my texts",
    }  # fmt: skip
    assert model_facts(engine, (3.25, 1000), step=1150)["step"] == "1,150"
    assert model_facts(engine, None, step=0)["step"] == "0"
    assert "step" not in model_facts(engine, (3.25, 1000), step=1000), "it is with the loss"
    assert "size" not in model_facts(serve.Engine(quantize_linears_(noisy_gpt()), BYTES), None)


@pytest.mark.parametrize(
    "config, tuned", [('{"train": {"preset": "sft"}}', True), ('{"train": {}}', False), ("{", None)]
)
def test_a_run_is_tuned_if_its_preset_was_sft(tmp_path, config, tuned):
    source = str(tmp_path / "model_000010.pt")
    assert is_tuned("gpt2") is False and is_tuned(source) is None
    (tmp_path / "config.json").write_text(config)
    assert is_tuned(source) is tuned


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
    """The page of the tuned model has no note, and offers questions of its conversations."""
    model = ROOT / "examples/laptop_model"
    page = page_of(start(ROOT / "lab", "serve", model, "--port", 0, "--device", "cpu"))
    note = re.search('<p id="untuned"[^>]*>(.*?)<code>(.*?)</code></p>', page)
    sentence, command = map(html.unescape, note.groups())
    warning = f"{sentence}`{command}`"
    assert json.dumps(list(QUESTIONS)) in page
    assert warning.startswith(f"{model} may not be tuned to answer")
    chat = run_python(ROOT / "sample.py", "--chat", "--model", model, cwd=tmp_path)
    assert f"[{warning}]\n" in chat.stderr, "sample.py --chat has the same sentence"
    words = shlex.split(command)[1:] + "--max_steps 1 --device cpu --sample_every 0".split()
    done = run_python(*words, "--val_every", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "log").iterdir()
    assert is_tuned(resolve_source(str(run))) and chat_warning(resolve_source(str(run))) == ""
    page = page_of(start(ROOT / "lab", "serve", run, "--port", 0))
    assert 'id="untuned"' not in page and json.dumps(list(BUILTIN_QUESTIONS)) in page


def test_warning_on_a_public_address_names_no_path(tmp_path):
    source = str(tmp_path / "model_000010.pt")
    said = "this model may not be tuned to answer; then it only continues the text"
    assert chat_warning(source, public=True) == said
    (tmp_path / "config.json").write_text('{"train": {"preset": "laptop"}, "program": {}}')
    Path(source).touch()
    said = "this model was not tuned to answer, so it only continues the text"
    assert chat_warning(source, public=True) == said
    assert str(tmp_path) in chat_warning(source)


def test_questions_of_the_page_are_those_of_the_conversations_tuned_on(tmp_path):
    chats, source = ROOT / "examples/chats.jsonl", str(tmp_path / "model_000010.pt")
    lines = chats.read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["messages"][0]["content"] for line in lines]
    trained = {question for i, question in enumerate(asked) if i % 10}
    assert trained.issuperset(BUILTIN_QUESTIONS) and trained.isdisjoint(QUESTIONS)
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[:20]))
    for file in (chats, tmp_path / "mine.jsonl"):
        (folder := tmp_path / f"{file.stem}_shards").mkdir()
        build_chat(local_files(str(file)), folder, "bytes", 128, 10**6)
        (tmp_path / "config.json").write_text(json.dumps(dict(train=dict(data=str(folder)))))
        assert tuned_on(source, chats) == (file == chats)
        assert is_tuned(source), "whatever the preset"
    assert not tuned_on("gpt2", chats) and not tuned_on(source, tmp_path / "missing")


def test_port_in_use_gives_the_fix(tmp_path):
    model = ROOT / "examples/laptop_model"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = fail("lab", "serve", model, "--port", port, cwd=tmp_path)
    wanted = f"port {port} is in use, perhaps by another lab serve; pass --port 0 for any free one"
    assert said == f"lab serve: error: {wanted}\n"
