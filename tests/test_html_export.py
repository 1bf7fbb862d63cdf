"""The page of `lab export --html`: its JavaScript computes the same as PyTorch.

The tests with a browser need Chromium and requirements-browser.txt; run them with -m slow.
"""

import random
import re

import pytest
import torch
from browser import LAPTOP, ModelPage
from conftest import ROOT, fail, succeed
from models import noisy_gpt, saved, tiny_gpt

from lab.cli import UserError
from lab.data.tokenizers import get_tokenizer
from lab.hf.export import export
from lab.hf.export import main as export_command
from lab.inference.generate import generate
from lab.registry import load_model

PROMPTS = "The ", "class Parser(object", "Größe: 1 €, "


def bytes_gpt(**changes):
    """A model with random weights and a context that is full after a few tokens."""
    return noisy_gpt(**dict(n_layer=3, n_head=4, block_size=24) | changes)


def rounded(model):
    """The model with its weights rounded to 16 bits, as they are in the page."""
    return model.half().float().eval()


# -------------------------------------------------------------------------- without a browser


def test_the_command_writes_the_page_of_a_run(tmp_path):
    saved(bytes_gpt(), tmp_path / "log/r/model_000010.pt")
    said = succeed("lab", "export", "log/r/model_000010.pt", "--html", "my/page.html", cwd=tmp_path)
    assert "wrote my/page.html" in said
    html = (tmp_path / "my/page.html").read_text()
    title = "r/model_000010, a GPT-2 with 47.2k parameters"
    assert f"<h1>{title}</h1>" in html and f"<title>{title}</title>" in html
    assert str(tmp_path) not in html and "trained on" not in html, "it is not recorded"
    for file in ("gpt.js", "tokenizers.js"):
        text = (ROOT / "lab/tools" / file).read_text(encoding="utf-8")
        assert text in html and "</" not in text, "the page has it unchanged"
    assert not re.search(r"(src|href)=|https?:|url\(|@import|fetch\(", html), "loads nothing"
    assert ">The </textarea>" in html
    (tmp_path / "log/r/config.json").write_text('{"train": {"preset": "sft"}}')
    export(str(tmp_path / "log/r/model_000010.pt"), html=tmp_path / "chat.html")
    assert (
        ">User: What is a token?\n\nAssistant:</textarea>" in (tmp_path / "chat.html").read_text()
    )
    (tmp_path / "log/r/config.json").unlink()
    export(str(tmp_path / "log/r/model_000010.pt"), html=tmp_path / "again.html")
    title = re.compile("nonce.*|<title>.*")
    assert title.sub("", (tmp_path / "again.html").read_text()) == title.sub("", html)


def test_the_current_folder_as_a_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(LAPTOP)
    export(".", html=tmp_path / "page.html")
    assert "<title>laptop_model, a GPT-2 with 446k" in (tmp_path / "page.html").read_text()


def test_models_that_a_page_cannot_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    large = dict(n_layer=1, n_head=1, block_size=8)
    saved(bytes_gpt(**large, n_embd=1152), tmp_path / "large.pt")
    saved(tiny_gpt(257, tokenizer="tokenizer.json", eot_id=3), tmp_path / "pieces.pt")
    saved(tiny_gpt(300, tokenizer="bytes"), tmp_path / "vocabulary.pt")
    huge = bytes_gpt()
    with torch.no_grad():
        huge.transformer.wpe.weight[-1, 0] = 1e5
    saved(huge, tmp_path / "huge.pt")
    saved(bytes_gpt(), tmp_path / "ok.pt")
    for words, message in {
        "large.pt --html x.html": r"large.pt has 3\d\.\d MB of 16-bit weights, and a page holds at most 30",
        "pieces.pt --html x.html": "tokenizer.json must be gpt2 or bytes",
        "vocabulary.pt --html x.html": "vocab_size=300 must be 257 for the tokenizer bytes",
        "huge.pt --html x.html": r"wpe.weight of huge.pt has a weight of 1e\+05, above 65504",
        "ok.pt": "out='' and html='': one of them must be given",
        "ok.pt --out a --html x.html": "out='a' and html='x.html': one of them must be given",
        "ok.pt --html x": "html=x must end in .html; try --html x.html",
    }.items():
        with pytest.raises(UserError, match=message):
            export_command(words.split())
    assert not list(tmp_path.glob("*.html"))


def test_an_edited_model_is_refused(tmp_path):
    """An edited train_gpt2.py: gpt.js would compute other probabilities."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    (tmp_path / "edited.py").write_text(source.replace('approximate="tanh"', 'approximate="none"'))
    program = dict(model=f"{tmp_path}/edited.py:GPT", config=f"{tmp_path}/edited.py:GPTConfig")
    saved(bytes_gpt(), tmp_path / "r/model.pt", program=program | {"trainer": "x.py:Trainer"})
    said = fail("lab", "export", "r/model.pt", "--html", "x.html", cwd=tmp_path)
    assert "r/model.pt does not compute GPT-2" in said


def test_the_page_in_examples_is_up_to_date(laptop):
    page = ROOT / "examples/laptop_model.html"
    assert page.stat().st_size < 1_500_000
    weights = re.compile(r'<script type="text/plain" id="weights">([^<]*)<')
    found, wanted = (weights.search(file.read_text())[1] for file in (page, laptop))
    assert found == wanted
    js = (ROOT / "lab/tools/gpt.js").read_text(encoding="utf-8")
    assert js in page.read_text(), "export it again: README.md has the command"
    title = "<h1>laptop_model, a GPT-2 with 446k parameters</h1>"
    trained = "trained on the documentation inside Python 3.11."
    assert title in page.read_text() and trained in page.read_text()


def test_the_page_of_an_export_says_what_the_run_was_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(bytes_gpt(), tmp_path / "log/r/model_000010.pt")
    (tmp_path / "log/r/config.json").write_text('{"train": {"data": "data/<my> texts"}}')
    export_command(["log/r/model_000010.pt", "--out", "folder"])
    for source in ("log/r/model_000010.pt", "folder"):
        export_command([source, "--html", "page.html"])
        html = (tmp_path / "page.html").read_text()
        assert "It was trained on &lt;my&gt; texts." in html, source


# ------------------------------------------------------------------------------ in a browser


@pytest.mark.slow
def test_greedy_tokens_and_logits_of_the_laptop_model_equal_torchs(chromium, laptop):
    model, tokenizer = rounded(load_model(str(LAPTOP))), get_tokenizer("bytes")
    tab = ModelPage(chromium, laptop)
    for prompt in PROMPTS:
        ids = [tokenizer.eot, *tokenizer.encode(prompt)]
        assert tab.js("tokenizer.encode(value)", prompt) == ids[1:]
        greedy = generate(model, torch.tensor([ids]), 200, temperature=0)
        ours, logits = zip(*((int(token), row[0]) for token, row in greedy))
        found = tab.js(
            "Array.from(generate(model, value, 200, { temperature: 0 }), ([t, l]) => [t, Array.from(l)])",
            ids,
        )
        theirs, their_logits = zip(*found)
        assert list(ours) == list(theirs) and len(set(ours)) > 5
        assert (torch.stack(logits) - torch.tensor(their_logits)).abs().max() < 1e-4
    assert tab.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, dict(document_mask=True), dict(n_head=1, n_embd=33)])
def test_logits_attention_and_residual_stream_equal_torchs(tmp_path, chromium, changes):
    """With large random weights, an odd number of channels, end-of-text inside, and a window that slides."""
    model = bytes_gpt(**changes)
    export(saved(model, tmp_path / "m.pt"), html=tmp_path / "m.html")
    model, tab = rounded(model), ModelPage(chromium, tmp_path / "m.html")
    idx = torch.randint(256, (1, 24))
    idx[0, [5, 9]] = 256
    weights, residual = [], []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda module, args: residual.append(args[0][0, -1]))
        block.attn.c_attn.register_forward_hook(lambda module, args, y: weights.append(y[0]))
    model.transformer.ln_f.register_forward_pre_hook(
        lambda _, args: residual.append(args[0][0, -1])
    )
    with torch.no_grad():
        logits = model(idx)[0][0, -1]
    found = tab.js(
        "{ const trace = { attention: [], residual: [] }, logits = model.forward(value, undefined, trace);"
        " const plain = x => ArrayBuffer.isView(x) ? Array.from(x) : x.map(plain);"
        " return plain([logits, trace.residual, trace.attention]); }",
        idx[0].tolist(),
    )
    assert (torch.tensor(found[0]) - logits).abs().max() < 1e-4
    assert (torch.tensor(found[1]) - torch.stack(residual)).abs().max() < 1e-4
    H, first = model.config.n_head, 9 if model.config.document_mask else 0
    for qkv, rows in zip(weights, found[2]):
        q, k, _ = (part.unflatten(1, (H, -1)) for part in qkv.chunk(3, dim=1))  # (S, H, D)
        scores = torch.einsum("hd,shd->hs", q[-1], k) * q.size(-1) ** -0.5
        scores[:, :first] = -torch.inf
        assert (scores.softmax(1) - torch.tensor(rows)).abs().max() < 1e-5
    ids = idx[0, :7].tolist()
    greedy = [int(t) for t, _ in generate(model, torch.tensor([ids]), 60, temperature=0)]
    js = "Array.from(generate(model, value, 60, { temperature: 0 }), ([t]) => t)"
    assert tab.js(js, ids) == greedy
    # one cache for many texts: each prefix has the logits that it has with a new cache
    js = "{ const c = new KVCache(model.config); return value.map(t => Array.from(model.forward(t, c))); }"
    texts = [ids, ids[:3], [*ids[:2], 1, 2], ids, ids[:1]]
    for text, row in zip(texts, tab.js(js, texts)):
        with torch.no_grad():
            assert (model(torch.tensor([text]))[0][0, -1] - torch.tensor(row)).abs().max() < 1e-4


@pytest.mark.slow
def test_sampling_has_the_probabilities_of_sample_token(chromium, laptop):
    tab = ModelPage(chromium, laptop)
    logits = torch.randn(40).double()
    logits[7] = logits[8] = logits.topk(5).values[-1]  # ties at the last of top_k
    settings = (1, 0, 1), (0.5, 5, 1), (1, 0, 0.6), (2, 9, 0.5), (0, 0, 1), (1, 0, 0)
    for temperature, top_k, top_p in settings:
        kept = logits / temperature if temperature else logits.clone()
        if top_k:
            kept[kept < kept.topk(top_k).values[-1]] = -torch.inf
        order = kept.argsort(descending=True)
        before = kept.softmax(0)[order].cumsum(0) - kept.softmax(0)[order]
        if top_p < 1:
            kept[order[(before >= top_p) & (before > 0)]] = -torch.inf
        wanted = kept.softmax(0) if temperature else torch.eye(40)[logits.argmax()]
        sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        js = "Array.from(sampling_probs(Float64Array.from(value[0]), value[1]))"
        found = torch.tensor(tab.js(js, [logits.tolist(), sampling]))
        assert (found - wanted).abs().max() < 1e-6, sampling
        js = (
            "{ const random = seeded_random(1), counts = new Array(40).fill(0);"
            " const draw = () => sample_token(Float64Array.from(value[0]), value[1], random);"
            " for (let i = 0; i < 20000; i++) counts[draw()]++; return counts; }"
        )
        drawn = torch.tensor(tab.js(js, [logits.tolist(), sampling])) / 20000
        assert (drawn - wanted).abs().max() < 0.015 and not drawn[wanted == 0].any(), sampling


@pytest.mark.slow
def test_gpt2_tokens_are_tiktokens(tmp_path, chromium, gpt2_files):
    model = bytes_gpt(vocab_size=50257, n_embd=16, n_layer=1, n_head=2)
    export(saved(model, tmp_path / "m.pt"), html=tmp_path / "m.html")
    tab, tokenizer = ModelPage(chromium, tmp_path / "m.html"), get_tokenizer("gpt2")
    draw = random.Random(0)
    parts = (
        "the", " The", "'ll", "'S", " 12", "\n\n", "  ", "\t", "é", "\xa0", "\ufeff", "\x85", "\u3000",
        "日本", "🙂", "!?", "_x",
    )  # fmt: skip
    texts = ["".join(draw.choices(parts, k=9)) for _ in range(300)]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    for text, ids in zip(texts, tab.js("value.map(text => tokenizer.encode(text))", texts)):
        assert ids == tokenizer.encode(text), text
    assert tab.js("decode(tokenizer.encode(value))", texts[-1]) == texts[-1]
    ids = tab.write("Hello, I'm a")
    greedy = tab.js("Array.from(model.forward([50256, 15496, 11]))")
    with torch.no_grad():
        logits = rounded(model)(torch.tensor([[50256, 15496, 11]]))[0][0, -1]
    assert (torch.tensor(greedy) - logits).abs().max() < 1e-4
    assert ids[:6] == [50256, 15496, 11, 314, 1101, 257] and tab.wrong == []
