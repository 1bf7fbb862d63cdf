"""sample.py and lab/inference: tokens with and without cache, incomplete characters, the command."""

import html
import io
import math
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, VOCAB, Process, add_noise, run_python
from models import always, noisy_gpt, saved

import sample
import speedrun
import train_gpt2
from lab.cli import UserError
from lab.data.tokenizers import SPECIAL_TOKENS, get_tokenizer
from lab.eval.samples import generate_samples
from lab.inference.decode_step import CUDAGraphDecoder, computes_gpt2, supports
from lab.inference.generate import KVCache, generate, prefetch_tokens, sample_token
from lab.inference.streaming import IncrementalDetokenizer, make_decode_step, stream_generate
from lab.registry import resolve_source
from sample import Config, complete
from train_gpt2 import GPT, GPTConfig


def often_ending():
    """A model that often samples end-of-text."""
    model = noisy_gpt()
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(3 * model.transformer.wte.weight[256])
    return model


def draw(model, idx, n, generate=GPT.generate, **gen_kwargs):
    """Tokens (B, n)."""
    tokens = generate(model, idx, n, generator=torch.Generator().manual_seed(5), **gen_kwargs)
    return torch.stack(list(tokens), dim=1)


def by_definition(model, idx, n, **gen_kwargs):
    """generate without a cache; a full window keeps its newer half."""
    block_size = model.config.block_size
    for _ in range(n):
        idx = idx if idx.size(1) <= block_size else idx[:, -block_size // 2 :]
        token = sample_token(model(idx)[0][:, -1], **gen_kwargs)
        yield token
        idx = torch.cat([idx, token[:, None]], dim=1)


SAMPLING = [
    dict(temperature=0), {}, dict(temperature=0.8, top_k=20), dict(temperature=1.3, top_p=0.7)
]  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"attention": "math"}, {"document_mask": True}], ids=str)
@pytest.mark.parametrize("gen_kwargs", SAMPLING, ids=str)
def test_cached_and_uncached_give_the_same_tokens(changes, gen_kwargs):
    """For several rows and 60 tokens, so that the window of 16 slides many times."""
    model = noisy_gpt(**changes)
    for prompt in (1, 5, 16):
        idx = torch.randint(VOCAB, (3, prompt))
        idx[:, prompt // 2] = 256
        cached = draw(model, idx, 60, **gen_kwargs)
        plain = draw(model, idx, 60, by_definition, **gen_kwargs)
        assert cached.shape == (3, 60) and torch.equal(cached, plain)
        if gen_kwargs != dict(temperature=0):
            assert len(cached.unique()) > 10  # the model does not just repeat itself


def noisy_speedrun_gpt():
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=VOCAB)
    return add_noise(speedrun.GPT(speedrun.GPTConfig(**shape, bigram_rows=64)))


@pytest.mark.parametrize(
    "make", [noisy_gpt, lambda: noisy_gpt(attention="math"), noisy_speedrun_gpt,
             lambda: noisy_gpt(activation_checkpointing=True)],
    ids=["sdpa", "math", "speedrun", "checkpointing"],
)  # fmt: skip
def test_several_new_tokens_after_a_filled_cache_match_the_uncached_logits(make):
    """Prefill 5 tokens, then pass 3 at once, without a mask."""
    model = make()
    idx, cache = torch.randint(256, (2, 8)), KVCache(16)
    model.hidden(idx[:, :5], cache=cache)
    x = model.hidden(idx[:, 5:], position=torch.arange(5, 8), cache=cache)
    logits = model.lm_head(x)[..., :VOCAB]
    assert (logits - model(idx)[0][:, 5:]).abs().max() < 1e-5


class ExactGELU(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class SquaredReLU(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ScaledAttention(train_gpt2.CausalSelfAttention):
    def forward(self, x, mask=None, cache=None):
        return 1.001 * super().forward(x, mask, cache)


class LocalAttention(train_gpt2.CausalSelfAttention):
    """A token sees itself and the 9 before it, of a context of 16."""

    def forward(self, x, mask=None, cache=None):
        T = x.size(1)
        mask = torch.ones(T, T, dtype=torch.bool).tril().triu(-9)
        return super().forward(x, mask, cache)


class SoftCap(GPT):
    def forward(self, *args, **kwargs):
        logits, loss = super().forward(*args, **kwargs)
        return 30 * torch.tanh(logits / 30), loss


class ScaledEmbedding(GPT):
    def hidden(self, idx, position=None, mask=None, cache=None):
        x = self.transformer.wte(idx) * 1.01 + self.transformer.wpe(position)
        for block in self.transformer.h:
            x = block(x, mask, cache)
        return self.transformer.ln_f(x)


class SkipConnection(GPT):
    """Adds the embeddings to the input of the last block."""

    def hidden(self, idx, position=None, mask=None, cache=None):
        x = x0 = self.transformer.wte(idx) + self.transformer.wpe(position)
        for i, block in enumerate(self.transformer.h):
            x = block(x + 0.01 * x0 * (i == 1), mask, cache)
        return self.transformer.ln_f(x)


class LocalMask(GPT):
    """A token sees itself and the 9 before it, by the mask that hidden gives to the blocks."""

    def hidden(self, idx, position=None, mask=None, cache=None):
        T = idx.size(1)
        return super().hidden(idx, position, torch.ones(T, T).bool().tril().triu(-9), cache)


class ExtraParameter(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(()))


def with_class(name, cls):
    """A new GPT in which the modules of one class are replaced by a subclass."""
    with mock.patch.object(train_gpt2, name, cls):
        return fresh_gpt()


def fresh_gpt(cls=GPT, **changes):
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=VOCAB)
    return cls(GPTConfig(**shape | changes)).eval()


@pytest.mark.parametrize("make", [fresh_gpt, noisy_gpt, lambda: fresh_gpt(attention="math")])
def test_plain_gpt_is_recognized_as_gpt2(make):
    model, state = make(), torch.get_rng_state()
    assert computes_gpt2(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert computes_gpt2(model.bfloat16())


CHANGED_MODELS = {
    "exact GELU": lambda: with_class("MLP", ExactGELU),
    "ReLU^2": lambda: with_class("MLP", SquaredReLU),
    "scaled attention": lambda: with_class("CausalSelfAttention", ScaledAttention),
    "local attention": lambda: with_class("CausalSelfAttention", LocalAttention),
    "soft-capped head": lambda: fresh_gpt(SoftCap),
    "scaled embedding": lambda: fresh_gpt(ScaledEmbedding),
    "local mask": lambda: fresh_gpt(LocalMask),
    "skip connection": lambda: fresh_gpt(SkipConnection),
    "extra parameter": lambda: fresh_gpt(ExtraParameter),
    "document mask": lambda: fresh_gpt(document_mask=True),
    "speedrun": noisy_speedrun_gpt,
}


@pytest.mark.parametrize("name", CHANGED_MODELS)
def test_changed_model_is_not_recognized_as_gpt2(name):
    """CUDAGraphDecoder would ignore the change. Initial weights hide small changes."""
    assert not computes_gpt2(CHANGED_MODELS[name]())


@pytest.mark.gpu
def test_cuda_graph_decoder_gives_the_models_tokens_and_logits():
    """Also when the window slides, and for two texts in turn. Other models are not supported."""
    model = noisy_gpt(block_size=40, n_embd=48, n_head=3).cuda()
    step = make_decode_step(model)
    assert isinstance(step, CUDAGraphDecoder)
    idx = torch.randint(257, (2, 1, 7), device="cuda")
    plain = [list(generate(model, ids, 60, temperature=0)) for ids in idx]
    caches = KVCache(40, step), KVCache(40, step)
    pairs = zip(
        *(prefetch_tokens(generate(model, ids, 60, 0, cache=c)) for ids, c in zip(idx, caches))
    )
    for i, pair in enumerate(pairs):
        for (token, logits), text in zip(pair, plain):
            assert token.item() == text[i][0].item()
            torch.testing.assert_close(logits, text[i][1], rtol=1e-4, atol=1e-4)
    assert supports(noisy_gpt(block_size=40, n_embd=64).cuda().bfloat16())
    assert not supports(noisy_gpt(document_mask=True).cuda())
    assert not supports(noisy_gpt(n_embd=48).cuda())  # heads of 24
    model.blocks[0].mlp.forward = lambda x: model.blocks[0].mlp.c_proj(model.blocks[0].mlp.c_fc(x))
    assert not supports(model)


def test_with_a_cache_each_step_computes_one_position():
    model, sizes = always(120), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    completions(model, "abcd", max_new_tokens=4)
    assert sizes == [5, 1, 1, 1]


def test_sample_token_by_hand():
    many = torch.tensor([[0.4, 0.05, 0.3, 0.25]]).log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    for gen_kwargs, expected in [
        (dict(), [0.4, 0.05, 0.3, 0.25]),
        (dict(top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (dict(top_p=0.69), [4 / 7, 0, 3 / 7, 0]),  # 0.4 does not reach 0.69, 0.4 + 0.3 does
        (dict(top_p=0.71), [0.4 / 0.95, 0, 0.3 / 0.95, 0.25 / 0.95]),
        (dict(top_p=1e-6), [1, 0, 0, 0]),
        (dict(top_p=1e-50), [1, 0, 0, 0]),  # 0 in float32
        (dict(temperature=0), [1, 0, 0, 0]),
        # squares, normalized
        (dict(temperature=0.5), [0.16 / 0.315, 0.0025 / 0.315, 0.09 / 0.315, 0.0625 / 0.315]),
    ]:
        tokens = sample_token(many, generator=generator, **gen_kwargs)
        got, expected = tokens.bincount(minlength=4) / len(many), torch.tensor(expected).float()
        assert torch.allclose(got, expected, atol=0.015) and not got[expected == 0].any(), (
            gen_kwargs
        )


def completions(model, prompt, seed=1, **settings):
    """(detokenizers, emitted pieces) of sample.complete, for a byte model."""
    pieces, cfg = [], Config(**settings)
    emit = lambda text, is_prompt: pieces.append(text)  # noqa: E731
    texts, _ = complete(model, get_tokenizer("bytes"), prompt, cfg, seed, emit)
    return texts, pieces


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_characters_are_not_split(name, gpt2_files):
    tokenizer, written = get_tokenizer(name), "naïve café — 日本語 🙂👩‍🚀 end"
    text, ids = IncrementalDetokenizer(tokenizer), tokenizer.encode(written)
    pieces = [text.add(token) for token in ids]
    assert "".join(pieces) == text.text == written
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some tokens end within a character, in both vocabularies
    first = next(stream_generate(always(0xA9), get_tokenizer("bytes"), [256, 0xC3], 1))
    assert first["text"] == "é", "a prompt may end within a character"


def test_each_sample_ends_at_its_own_end_of_text():
    """The other rows continue. The first one is emitted as it is generated; an incomplete character
    at the end becomes U+FFFD."""
    model = often_ending()
    settings = dict(max_new_tokens=40, num_samples=6, top_k=0, temperature=1.0)
    texts, pieces = completions(model, "abc", seed=5, **settings)
    rows = draw(model, torch.tensor([[256, 97, 98, 99]] * 6), 40, temperature=1.0).tolist()
    ends = [row.index(256) if 256 in row else 40 for row in rows]
    assert len(set(ends)) > 2 and max(ends) == 40
    decode = get_tokenizer("bytes").decode
    assert [t.text for t in texts] == [decode(row[:end]) for row, end in zip(rows, ends)]
    assert "".join(pieces) == "abc" + texts[0].text
    assert [t.count for t in texts] == [min(40, end + 1) for end in ends]
    for n in range(1, 17):  # cut within a character of the first, or of another
        texts, pieces = completions(model, "abc", seed=5, **settings | dict(max_new_tokens=n))
        assert "".join(pieces) == "abc" + texts[0].text


def test_html_page_shows_probabilities_and_escapes_markup(tmp_path, monkeypatch):
    """Each token has its probability and the five most probable ones; markup in texts stays text."""
    monkeypatch.chdir(tmp_path)
    model = noisy_gpt(block_size=64)
    saved(model, tmp_path / "<model>.pt")
    flags = "--model <model>.pt --html p.html --max_new_tokens 20 --seed 3".split()
    sample.main(["<b>", *flags])
    page = (tmp_path / "p.html").read_text()
    assert "default-src 'none'; style-src" in page and "script-src" not in page, "runs no script"
    assert "<b>&lt;b&gt;</b>" in page and "<model>" not in page and "://" not in page
    gen_kwargs = dict(temperature=0.8, top_k=50, generator=torch.Generator().manual_seed(3))
    pairs = generate(model, torch.tensor([[256, *b"<b>"]]), 20, **gen_kwargs)
    probs = [logits[0].softmax(-1)[token].item() for token, logits in pairs]
    boxes = re.findall(r'<span class="box">(.*?)</span>', page, re.DOTALL)
    for box, p in zip(boxes, probs, strict=True):
        own, _, *likeliest = html.unescape(box).split("\n")
        assert own.endswith(f"”: model {100 * p:.1f} %, {-math.log2(p):.1f} bits of surprise")
        top = [float(line.split()[-2]) for line in likeliest]
        assert top == sorted(top, reverse=True) and len(top) == 5 and top[0] + 0.1 >= 100 * p


def test_samples_of_a_run_use_its_seed_and_mark_end_of_text():
    args = get_tokenizer("bytes"), "ab", 41  # with 41 tokens the first ends within a character
    a, b, c = (generate_samples(often_ending(), *args, seed=seed)[0] for seed in (5, 5, 6))
    assert a == b != c
    rows = draw(often_ending(), torch.tensor([[256, *b"ab"]] * 2), 41, temperature=0.8, top_k=50)
    lines = [
        [b"\n<|endoftext|>\n" if i == 256 else bytes([i]) for i in row] for row in rows.tolist()
    ]
    texts = [b"".join(line).decode("utf-8", "replace") for line in lines]
    assert a == ["ab" + re.sub(r"(\n<\|endoftext\|>\n)+\Z", "", text) for text in texts]
    assert "\n<|endoftext|>\n" in a[0] and a[0][-1] == "\ufffd"
    assert generate_samples(always(256), *args, seed=5)[0] == ["ab", "ab"]


def test_samples_continue_the_end_of_a_prompt_longer_than_the_context():
    model = noisy_gpt(block_size=8)
    ends = {
        generate_samples(model, get_tokenizer("bytes"), 9 * "a" + last, 5, seed=1)[0][0][10:]
        for last in "bcde"
    }
    assert len(ends) > 1


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """log/new, the newest run, and log/old, an older one whose model always generates z."""
    monkeypatch.chdir(tmp_path)
    saved(noisy_gpt(block_size=64), tmp_path / "log/new/model_000010.pt")
    os.utime(saved(always(ord("z")), tmp_path / "log/old/model_000010.pt"), (1, 1))


def call(capfd, *args):
    """(stdout, stderr) of main."""
    sample.main(list(map(str, args)))
    return capfd.readouterr()


def test_command_uses_the_newest_run(tmp_path, runs):
    command = [ROOT / "sample.py", "Hello", "world", "--max_new_tokens", 90, "--device", "cpu"]
    done = run_python(*command, "--seed", 3, cwd=tmp_path)
    assert done.stdout.startswith("Hello world") and len(done.stdout.encode()) > 60, done.stderr
    model, speed = done.stderr.splitlines()
    assert model == "[model: log/new/model_000010.pt, the newest run]"
    assert speed.endswith("tok/s on cpu, seed 3]")


def test_samples_prompts_and_seeds(runs, monkeypatch, capfd):
    out, err = call(capfd, "ab", "--model", "old", "--num_samples", 3, "--max_new_tokens", 5)
    assert out == "abzzzzz\n---\nabzzzzz\n---\nabzzzzz\n"
    assert err.startswith("[model: log/old/model_000010.pt]\n[15 tokens in ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))  # the empty line is skipped
    out, err = call(capfd, "--model", "log/old", "--max_new_tokens", 3)
    assert out == "onezzz\ntwozzz\n" and err.count("tok/s") == 2
    assert call(capfd, "", "--model", "old", "--max_new_tokens", 3)[0] == "zzz\n"  # no prompt
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(UserError, match="prompt from stdin is damaged .*pipe text in UTF-8"):
        sample.main(["--model", "old"])
    first, err = call(capfd, "ab")
    seed = err.split("seed ")[1].split("]")[0]  # printed, although it is random
    assert call(capfd, "ab", "--seed", seed)[0] == first != call(capfd, "ab")[0]
    flags = "--max_new_tokens", 20, "--seed"
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\nab\n"))  # each prompt has its own seed
    out, err = call(capfd, *flags, 3)
    third, fourth = (call(capfd, "ab", *flags, seed)[0] for seed in (3, 4))
    assert out == third + fourth and third != fourth
    assert re.findall(r"seed (\d+)", err) == ["3", "4"]


def test_a_model_in_the_place_of_the_prompt_is_an_error(runs, capfd):
    """`sample.py log/old` would continue these words with another model."""
    (Path("log/old") / "config.json").write_text("{}")
    for name in ("log/old", "old", "log/old/", "log/old/model_000010.pt"):
        with pytest.raises(UserError, match=f"prompt={name} is a run or a .* as --model {name},"):
            sample.main([name])
    assert call(capfd, "old", "--model", "old", "--max_new_tokens", 2)[0] == "oldzz\n"
    Path("config.json").write_text("{}")
    for text in ("olds", "log", ".", "a.pt", "a\nb " * 999):
        assert not sample.is_model(text)


def test_closed_stdout_ends_without_a_traceback(tmp_path, runs):
    """As in `sample.py ... | head`."""
    os.mkfifo(pipe := tmp_path / "pipe")
    flags = "hello --model old --max_new_tokens 99999".split()
    process = Process(ROOT / "sample.py", *flags, cwd=tmp_path, out=pipe)
    with open(pipe) as reader:
        assert reader.read(5) == "hello"
    assert process.wait() == 1 and process.stderr == "[model: log/old/model_000010.pt]\n"


def test_out_of_memory_is_one_sentence_and_other_errors_keep_their_traceback(runs, monkeypatch):
    def fail_with(error):
        def generate(*args, **kwargs):
            raise error
            yield

        monkeypatch.setattr(sample, "generate", generate)

    fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"))
    with pytest.raises(UserError, match="out of memory .*; pass a smaller --num_samples or"):
        sample.main(["ab", "--model", "old"])
    fail_with(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        sample.main(["ab", "--model", "old"])


def test_wordpiece_model_is_refused(runs, tmp_path):
    """Its tokens are not bytes of text, so they cannot be streamed."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {piece: i for i, piece in enumerate((*SPECIAL_TOKENS, "a", "##b"))}
    wordpiece = tokenizers.models.WordPiece(vocab, unk_token="[UNK]")
    model = noisy_gpt(vocab_size=len(vocab), tokenizer="tokenizer.json", eot_id=3)
    path = saved(model, tmp_path / "log/wordpiece/model_000010.pt")
    tokenizers.Tokenizer(wordpiece).save(str(tmp_path / "log/wordpiece/tokenizer.json"))
    with pytest.raises(UserError, match="WordPiece"):
        sample.main(["a", "--model", path])


def test_run_removed_while_runs_are_listed_is_no_traceback(runs, tmp_path, monkeypatch):
    """Its directory or its checkpoint is missing when it is read."""
    real = Path.glob

    def glob(self, pattern):
        found = list(real(self, pattern))
        if self.name == "new":
            raise FileNotFoundError(self)
        return iter(found)

    monkeypatch.setattr(Path, "glob", glob)
    assert resolve_source("") == "log/old/model_000010.pt"
