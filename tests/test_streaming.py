"""lab/inference: stop strings, reused caches and 8-bit weights; sample.py in a terminal."""

import re
import signal

import pytest
import torch
from conftest import wait_for
from models import always, noisy_gpt, saved

import sample
from lab.cli import parse_args
from lab.data.tokenizers import get_tokenizer
from lab.hf.gguf_file import modelfile
from lab.inference import generate as generating
from lab.inference.generate import KVCache, compile_decode_step, generate
from lab.inference.int8 import Int8Linear, quantize_linears_
from lab.inference.streaming import score_tokens, stream_generate

BYTES = get_tokenizer("bytes")


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


def test_int8_differs_by_rounding_only():
    model, idx = noisy_gpt(n_embd=64, vocab_multiple=8), torch.randint(257, (2, 16))
    plain = model(idx)[0]
    assert isinstance(quantize_linears_(model).lm_head, Int8Linear)
    error = (model(idx)[0] - plain).std() / plain.std()
    assert 0 < error < 0.05
    records = score_tokens(model, BYTES, [256, *b"abc"])
    assert [record["text"] for record in records] == list("abc")


def test_chats_have_one_default_temperature_everywhere():
    for chat, wanted in ((True, 0.5), (False, 0.8)):
        for given in (None, 0.0, 1.5):
            flags = ["--chat"] * chat + [f"--temperature={given}"] * (given is not None)
            cfg = parse_args(sample.Config, flags, "")
            assert cfg.temperature == (wanted if given is None else given)
        assert f"PARAMETER temperature {wanted}\n" in modelfile("m.gguf", 128, chat)


# ------------------------------------------------------------------------------------ in a terminal


@pytest.mark.parametrize("flags, begun", [("--chat", "^zzzzz"), ("--num_samples 1", "hizzzzz")])
def test_ctrl_c_ends_a_text_and_not_the_program(tmp_path, ask_sample, flags, begun):
    """Texts are streamed after their prompt, the answers of a chat without it."""
    saved(always(ord("z"), block_size=30_000), tmp_path / "log/r/model_000010.pt")
    process = ask_sample(*flags.split(), "--max_new_tokens", 100000)
    for turn in (1, 2):
        process.type("hi\n")
        wait_for(lambda: len(re.findall(begun, process.stdout, re.M)) == turn, process)  # noqa: B023
        process.signal(signal.SIGINT)
    process.type("\n")
    assert process.wait() == 0 and process.stderr.count("[stopped]") == 2, process.stderr
    assert {*process.stdout} <= {*begun, "\n"}


def test_chat_reports_what_does_not_fit(tmp_path, ask_sample):
    saved(always(ord("z"), block_size=64), tmp_path / "log/r/model_000010.pt")
    process = ask_sample("--chat")
    process.type("hi\nhi\n" + "a" * 80 + "\n\n")
    assert process.wait() == 0, process.stderr
    assert process.stdout == 2 * ("z" * (64 - len("_User: hi\n\nAssistant:")) + "\n")
    assert process.stderr.count("[cut: the model's context of 64 tokens is full]") == 2
    assert "the newest message takes 99 tokens" in process.stderr
    assert process.stderr.count("because they no longer fit: the oldest 2 messages]") == 1
