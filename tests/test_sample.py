"""Generating text: the cache changes nothing, characters come whole, and the command."""

import html
import io
import os
import re
import sys

import pytest
import torch
from conftest import ROOT, VOCAB, Process, run_python
from test_weights import saved, tiny_gpt

import sample
from lab import text_stream
from lab.cli import UserError
from lab.data.document_mask import hide_other_documents
from lab.data.tokenizers import get_tokenizer
from lab.evals import draw_samples
from lab.generate import KVCache, generate, read_ahead, sample_token
from lab.kernels.decode_step import OneTokenStep, knows
from lab.text_stream import Text
from sample import Config, complete
from train_gpt2 import GPT


def noisy_gpt(**changes):
    return tiny_gpt(**dict(vocab_size=VOCAB, vocab_multiple=128, n_head=2) | changes)


def often_ending():
    """A model that draws end-of-text again and again."""
    model = noisy_gpt()
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(3 * model.transformer.wte.weight[256])
    return model


def always(token, **changes):
    """A model that finds one token by far the likeliest, whatever came before."""
    model = noisy_gpt(**changes)
    with torch.no_grad():
        wte = model.transformer.wte.weight
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * wte[token] / wte[token].norm())
    return model


def draw(model, idx, n, generate=GPT.generate, **how):
    tokens = generate(model, idx, n, generator=torch.Generator().manual_seed(5), **how)
    return torch.stack(list(tokens), dim=1)


def by_definition(model, idx, n, **how):
    """Token after token from the whole text so far; a full window keeps its newer half."""
    most = model.config.block_size
    for _ in range(n):
        idx = idx if idx.size(1) <= most else idx[:, -most // 2 :]
        token = sample_token(model(idx)[0][:, -1], **how)
        yield token
        idx = torch.cat([idx, token[:, None]], dim=1)


HOW = [dict(temperature=0), {}, dict(temperature=0.8, top_k=20), dict(temperature=1.3, top_p=0.7)]


@pytest.mark.parametrize("changes", [{}, {"attention": "math"}, {"document_mask": True}], ids=str)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_cached_and_uncached_give_the_same_tokens(changes, how):
    """For several rows, and over 60 tokens: the window of 16 is full many times."""
    model = noisy_gpt(**changes)
    whole = hide_other_documents(noisy_gpt(**changes)) if "document_mask" in changes else model
    for prompt in (1, 5, 16):
        idx = torch.randint(VOCAB, (3, prompt))
        idx[:, prompt // 2] = 256
        cached, plain = draw(model, idx, 60, **how), draw(whole, idx, 60, by_definition, **how)
        assert cached.shape == (3, 60) and torch.equal(cached, plain)
        if how != dict(temperature=0):
            assert len(cached.unique()) > 10  # not a model that repeats itself whatever it sees


@pytest.mark.gpu
def test_one_token_at_a_time_is_the_models_own():
    """Also in a window that is full, and of two texts by turns; another model is left to others."""
    model = noisy_gpt(block_size=40, n_embd=48, n_head=3).cuda()
    step = text_stream.fast_step(model)
    assert isinstance(step, OneTokenStep)
    idx = torch.randint(257, (2, 1, 7), device="cuda")
    plain = [list(generate(model, ids, 60, temperature=0)) for ids in idx]
    caches = KVCache(40, step), KVCache(40, step)
    pairs = zip(*(read_ahead(generate(model, ids, 60, 0, cache=c)) for ids, c in zip(idx, caches)))
    for i, pair in enumerate(pairs):
        for (token, logits), text in zip(pair, plain):
            assert token.item() == text[i][0].item()
            torch.testing.assert_close(logits, text[i][1], rtol=1e-4, atol=1e-4)
    assert not knows(noisy_gpt(document_mask=True).cuda())
    assert not knows(noisy_gpt(n_embd=48).cuda())  # heads of 24
    model.blocks[0].mlp.forward = lambda x: model.blocks[0].mlp.c_proj(model.blocks[0].mlp.c_fc(x))
    assert not knows(model)


def test_with_a_cache_attention_is_asked_for_one_new_position():
    model, sizes = always(120), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    written(model, "abcd", max_new_tokens=4)
    assert sizes == [5, 1, 1, 1]


def test_sample_token_by_hand():
    many = torch.tensor([[0.4, 0.05, 0.3, 0.25]]).log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    for how, expected in [
        (dict(), [0.4, 0.05, 0.3, 0.25]),
        (dict(top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (dict(top_p=0.69), [4 / 7, 0, 3 / 7, 0]),  # 0.4 does not reach 0.69, 0.4 + 0.3 does
        (dict(top_p=0.71), [0.4 / 0.95, 0, 0.3 / 0.95, 0.25 / 0.95]),
        (dict(top_p=1e-6), [1, 0, 0, 0]),
        (dict(top_p=1e-50), [1, 0, 0, 0]),  # 0 in 32 bits
        (dict(temperature=0), [1, 0, 0, 0]),
        # squares, normalised
        (dict(temperature=0.5), [0.16 / 0.315, 0.0025 / 0.315, 0.09 / 0.315, 0.0625 / 0.315]),
    ]:
        got = sample_token(many, generator=generator, **how).bincount(minlength=4) / len(many)
        expected = torch.tensor(expected).float()
        assert torch.allclose(got, expected, atol=0.015) and not got[expected == 0].any(), how


def written(model, prompt, seed=1, **how):
    """(Texts, the pieces that were written) of a byte model."""
    pieces, cfg = [], Config(**how)
    texts = complete(model, get_tokenizer("bytes"), prompt, cfg, seed, pieces.append)
    return texts, pieces


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_characters_come_whole(name, gpt2_files):
    tokenizer, written = get_tokenizer(name), "naïve café — 日本語 🙂👩‍🚀 end"
    text, ids = Text(tokenizer), tokenizer.encode(written)
    pieces = [text.add(token) for token in ids]
    assert "".join(pieces) == text.text == written
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some tokens end within a character, in both vocabularies
    first = next(text_stream.pieces(always(0xA9), get_tokenizer("bytes"), [256, 0xC3], 1))
    assert first["text"] == "é", "a prompt may end within one"


def test_each_sample_ends_for_itself():
    """A row that has ended is not added to while the others go on; the first is what was
    streamed; half a character at the end becomes U+FFFD."""
    model = often_ending()
    how = dict(max_new_tokens=40, num_samples=6, top_k=0, temperature=1.0)
    texts, pieces = written(model, "abc", seed=5, **how)
    rows = draw(model, torch.tensor([[256, 97, 98, 99]] * 6), 40, temperature=1.0).tolist()
    ends = [row.index(256) if 256 in row else 40 for row in rows]
    assert len(set(ends)) > 2 and max(ends) == 40
    decode = get_tokenizer("bytes").decode
    assert [t.text for t in texts] == [decode(row[:end]) for row, end in zip(rows, ends)]
    assert "".join(pieces) == "abc" + texts[0].text
    assert [t.count for t in texts] == [min(40, end + 1) for end in ends]
    for n in range(1, 17):  # cut within a character of the first, or of another
        texts, pieces = written(model, "abc", seed=5, **how | dict(max_new_tokens=n))
        assert "".join(pieces) == "abc" + texts[0].text


def test_page(tmp_path, monkeypatch):
    """Each token with its probability and the five likeliest; markup in texts stays text."""
    monkeypatch.chdir(tmp_path)
    model = noisy_gpt(block_size=64)
    saved(model, tmp_path / "<model>.pt")
    flags = "--model <model>.pt --html p.html --max_new_tokens 20 --seed 3".split()
    sample.main(["<b>", *flags])
    page = (tmp_path / "p.html").read_text()
    assert "<b>&lt;b&gt;</b>" in page and "<model>" not in page and "http" not in page
    how = dict(temperature=0.8, top_k=50, generator=torch.Generator().manual_seed(3))
    drawn = generate(model, torch.tensor([[256, *b"<b>"]]), 20, **how)
    shares = [100 * logits[0].softmax(-1)[token].item() for token, logits in drawn]
    boxes = re.findall(r'<span class="box">(.*?)</span>', page, re.DOTALL)
    for box, share in zip(boxes, shares, strict=True):
        own, _, *likeliest = html.unescape(box).split("\n")
        assert own.endswith(f"{share:.2f} %")
        found = [float(line.split("%")[0]) for line in likeliest]
        assert found == sorted(found, reverse=True) and len(found) == 5 and found[0] + 0.1 >= share


def test_a_runs_samples_have_its_seed_and_a_line_between_two_texts():
    how = get_tokenizer("bytes"), "ab", 41  # the first then ends within a character
    a, b, c = (draw_samples(often_ending(), *how, seed=seed)[0] for seed in (5, 5, 6))
    assert a == b != c
    rows = draw(often_ending(), torch.tensor([[256, *b"ab"]] * 2), 41, temperature=0.8, top_k=50)
    lines = [[b"\n---\n" if i == 256 else bytes([i]) for i in row] for row in rows.tolist()]
    written = [b"".join(line).decode("utf-8", "replace") for line in lines]
    assert a == ["ab" + text.rstrip("\n-") for text in written]
    assert "\n---\n" in a[0] and a[0][-1] == "\ufffd"
    assert draw_samples(always(256), *how, seed=5)[0] == ["ab", "ab"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The newest run and an older one, which always writes z."""
    monkeypatch.chdir(tmp_path)
    saved(noisy_gpt(block_size=64), tmp_path / "log/new/model_000010.pt")
    os.utime(saved(always(ord("z")), tmp_path / "log/old/model_000010.pt"), (1, 1))


def call(capfd, *args):
    """(stdout, stderr) of main."""
    sample.main(list(map(str, args)))
    return capfd.readouterr()


def test_command_continues_with_the_newest_run(tmp_path, runs):
    command = [ROOT / "sample.py", "Hello", "world", "--max_new_tokens", 90, "--device", "cpu"]
    done = run_python(*command, "--seed", 3, cwd=tmp_path)
    assert done.stdout.startswith("Hello world") and len(done.stdout.encode()) > 60, done.stderr
    assert done.stderr.startswith("[log/new/model_000010.pt: ") and done.stderr.count("\n") == 1
    assert "tok/s on cpu, seed 3]" in done.stderr


def test_samples_prompts_and_seeds(runs, monkeypatch, capfd):
    out, err = call(capfd, "ab", "--model", "old", "--num_samples", 3, "--max_new_tokens", 5)
    assert out == "abzzzzz\n---\nabzzzzz\n---\nabzzzzz\n"
    assert err.startswith("[log/old/model_000010.pt: 15 tokens")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))  # an empty line is passed over
    out, err = call(capfd, "--model", "log/old", "--max_new_tokens", 3)
    assert out == "onezzz\ntwozzz\n" and err.count("tok/s") == 2
    assert call(capfd, "", "--model", "old", "--max_new_tokens", 3)[0] == "zzz\n"  # no prompt
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(UserError, match="prompt from stdin is damaged .*pipe text in UTF-8"):
        sample.main(["--model", "old"])
    first, err = call(capfd, "ab")
    seed = err.split("seed ")[1].split("]")[0]  # shown, though it was drawn
    assert call(capfd, "ab", "--seed", seed)[0] == first != call(capfd, "ab")[0]


def test_a_reader_that_leaves(tmp_path, runs):
    """`sample.py ... | head` ends without a traceback."""
    os.mkfifo(pipe := tmp_path / "pipe")
    flags = "hello --model old --max_new_tokens 99999".split()
    process = Process(ROOT / "sample.py", *flags, cwd=tmp_path, out=pipe)
    with open(pipe) as reader:
        assert reader.read(5) == "hello"
    assert process.wait() == 1 and process.stderr == ""
