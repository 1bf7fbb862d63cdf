"""The page of `lab export --html`: its JavaScript computes the same as PyTorch, and its controls work.

The tests with a browser need Chromium and requirements-browser.txt; run them with -m slow.
"""

import random
import re

import pytest
import torch
from browser import EVIL, Tab
from conftest import ROOT, add_noise, fail, succeed
from test_weights import saved, tiny_gpt

from lab.cli import UserError
from lab.data.tokenizers import get_tokenizer
from lab.hf.export import export
from lab.hf.export import main as export_command
from lab.inference.generate import generate
from lab.registry import load_model
from train_gpt2 import GPT, GPTConfig

LAPTOP = ROOT / "examples/laptop_model"
PROMPTS = "The ", "class Parser(object", "Größe: 1 €, "


def bytes_gpt(**changes):
    """A model with random weights and a context that is full after a few tokens."""
    torch.manual_seed(3)
    shape = dict(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=257) | changes
    return add_noise(GPT(GPTConfig(**shape)))


def rounded(model):
    """The model with its weights rounded to 16 bits, as they are in the page."""
    return model.half().float().eval()


class ModelPage(Tab):
    """An exported page. js: evaluate an expression with the page's own functions."""

    def __init__(self, browser, path, **how):
        super().__init__(browser, path.as_uri(), **how)
        self.shown = self.page.locator("#tokens > span")

    def js(self, expression, value=None):
        return self.page.evaluate(f"(value) => {expression}", value)

    def set(self, **numbers):
        for id, value in numbers.items():
            self.js(f"document.getElementById('{id}').value = value", str(value))

    def write(self, prompt):
        self.page.fill("#prompt", prompt)
        self.page.click("#go")
        return self.done()

    def done(self):
        """Wait until all tokens are written; returns their ids."""
        self.page.wait_for_function("() => p.length == idx.length && idx.length >= goal")
        return self.js("idx")


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "laptop.html"
    export(str(LAPTOP), html=out)
    return out


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
    export(str(tmp_path / "log/r/model_000010.pt"), html=tmp_path / "again.html")
    title = re.compile("nonce.*|<title>.*")
    assert title.sub("", (tmp_path / "again.html").read_text()) == title.sub("", html)


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
    saved(bytes_gpt(), tmp_path / "model.pt", program=program | {"trainer": "x.py:Trainer"})
    said = fail("lab", "export", "model.pt", "--html", "x.html", cwd=tmp_path)
    assert "model.pt does not compute GPT-2" in said


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
    for temperature, top_k, top_p in (
        (1, 0, 1),
        (0.5, 5, 1),
        (1, 0, 0.6),
        (2, 9, 0.5),
        (0, 0, 1),
        (1, 0, 0),
    ):
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
    parts = [
        "the",
        " The",
        "'ll",
        "'S",
        " 12",
        "\n\n",
        "  ",
        "\t",
        "é",
        "\xa0",
        "\ufeff",
        "\x85",
        "\u3000",
        "日本",
        "🙂",
        "!?",
        "_x",
    ]
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


@pytest.mark.slow
def test_writing_branching_and_reading_with_mouse_and_keyboard(chromium, laptop):
    tab = ModelPage(chromium, laptop, viewport={"width": 1000, "height": 900})
    model = rounded(load_model(str(LAPTOP)))
    tab.page.locator("#prompt").fill("")
    tab.page.locator("#prompt").press_sequentially("def ma")
    ids = tab.done()
    assert ids == [256, *b"def ma"] and tab.shown.all_text_contents() == list("▸def ma")
    with torch.no_grad():
        probs = model(torch.tensor([ids]))[0][0, -1].softmax(0)
    rows = tab.page.locator("#next button")
    assert [int(row.get_attribute("data-id")) for row in rows.all()] == probs.topk(
        12
    ).indices.tolist()
    first = rows.first.get_attribute("aria-label")
    assert f"probability {100 * probs.max():.1f} %" in first

    tab.set(seed=5, max_tokens=40)
    tab.page.locator("#prompt").press("Enter")
    ids = tab.done()
    assert len(ids) == 7 + 40 and tab.shown.count() == 47
    assert "40 tokens, " in tab.page.inner_text("#foot") and "seed 5" in tab.page.inner_text(
        "#foot"
    )
    assert tab.write("def ma") == ids, "the seed gives the same text again"
    tab.set(seed=6)
    assert tab.write("def ma")[7:] != ids[7:]
    tab.page.click("#more")
    assert len(tab.done()) == 7 + 80

    tab.shown.nth(20).click()
    ids = tab.js("idx")
    for key, place in (
        ("ArrowLeft", 19),
        ("ArrowUp", 18),
        ("ArrowRight", 19),
        ("Home", 0),
        ("End", 86),
    ):
        tab.page.keyboard.press(key)
        assert tab.js("[selected, document.activeElement.getAttribute('aria-selected')]") == [
            place,
            "true",
        ]
    tab.shown.nth(20).click()
    with torch.no_grad():
        probs = model(torch.tensor([ids[:21]]))[0][0, -1].softmax(0)
    top = probs.topk(12).indices.tolist()
    shown = [int(row.get_attribute("data-id")) for row in rows.all()]
    assert shown[:12] == top and tab.page.locator("#next [aria-current]").get_attribute(
        "data-id"
    ) == str(ids[21])
    rows.nth(2).focus()
    tab.page.keyboard.press("Enter")
    after = tab.done()
    assert after[:22] == [*ids[:21], top[2]] and 22 < len(after) <= 22 + 40
    assert 256 not in after[1:-1] and (after[-1] == 256 or len(after) == 62), "it may end the text"

    tab.shown.nth(2).click()  # inside the prompt: it is shortened
    other = tab.page.locator("#next button:not([aria-current])").first
    token = int(other.get_attribute("data-id"))
    other.click()
    assert tab.done()[:4] == [256, *b"de", token] and tab.page.input_value("#prompt") == "de"

    tab.shown.nth(6).click()
    heads = tab.page.locator("#heads [role=radio]")
    assert heads.count() == 4
    heads.nth(0).focus()
    tab.page.keyboard.press("ArrowDown")
    assert heads.nth(1).get_attribute("aria-checked") == "true" and tab.page.is_checked(
        "input[value=attention]"
    )
    shades = tab.shown.evaluate_all("all => all.map(one => +one.style.getPropertyValue('--s'))")
    assert sum(s * s for s in shades) == pytest.approx(1, abs=1e-4) and not any(shades[7:])
    rows = tab.page.locator("#lens tr")
    assert rows.locator("th").all_text_contents() == [
        "embedding",
        "after layer\xa00",
        "after layer\xa01",
    ]
    likeliest = tab.page.locator("#next button").first.inner_text().replace("✓", "").split()[:2]
    assert rows.last.locator("td").first.inner_text().split()[:2] == likeliest

    tab.set(max_tokens=9999)
    tab.page.click("#go")
    tab.page.keyboard.press("Escape")
    assert len(tab.done()) < 9000 and tab.page.is_hidden("#halt")
    assert tab.wrong == []


@pytest.mark.slow
def test_candidates_by_keyboard(chromium, laptop):
    """Enter on a token, arrow keys in its candidates and Escape work as on the page of lab serve."""
    tab = ModelPage(chromium, laptop)
    tab.set(max_tokens=20, seed=1)
    before = tab.write("def ma")
    tab.shown.nth(9).click()
    place = "[...document.activeElement.parentElement.children].indexOf(document.activeElement)"
    last = tab.page.locator("#next button").count() - 1
    for key, box, wanted in (
        ("Enter", "next", 0), ("ArrowUp", "next", last), ("ArrowDown", "next", 0),
        ("ArrowDown", "next", 1), ("Escape", "tokens", 9), (" ", "next", 0), ("ArrowDown", "next", 1),
    ):  # fmt: skip
        tab.page.keyboard.press(key)
        assert tab.js(f"[document.activeElement.parentElement.id, {place}]") == [box, wanted], key
    chosen = int(tab.js("document.activeElement.dataset.id"))
    tab.page.keyboard.press("Enter")
    assert tab.done()[:11] == [*before[:10], chosen] and tab.wrong == []


@pytest.mark.slow
def test_undo_leads_back_to_each_text_before(chromium, laptop):
    tab = ModelPage(chromium, laptop)
    tab.set(max_tokens=20, seed=1)
    assert tab.page.is_disabled("#undo")
    texts = []

    def remember():
        state = "[idx.slice(), $('prompt').value, $('foot').textContent]"
        tab.done()
        texts.append(tab.js(state))
        return texts[-1]

    tab.write("def ma")
    remember()
    tab.page.click("#more")
    remember()
    tab.shown.nth(3).click()  # in the prompt, which is shortened
    tab.page.locator("#next button:not([aria-current])").first.click()
    remember()
    tab.page.locator("#prompt").press_sequentially("xy")  # replaces the text that was written
    remember()
    typed = [[256, *b"def ma"], "def ma", ""]
    for before in (*texts[-2::-1], typed):
        tab.page.click("#undo")
        assert remember() == before
    assert tab.page.is_disabled("#undo")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    assert tab.wrong == []


@pytest.mark.slow
def test_ctrl_z_in_the_text_presses_undo(chromium, laptop):
    """Not the browser's undo, which would take back the typing in the prompt box."""
    tab = ModelPage(chromium, laptop)
    tab.set(max_tokens=20, seed=1)
    tab.page.locator("#prompt").fill("")
    tab.page.locator("#prompt").press_sequentially("def ma")
    tab.page.locator("#prompt").press("Enter")
    first = tab.done()
    tab.page.click("#more")
    second = tab.done()
    tab.shown.nth(40).click()
    tab.page.keyboard.press("Control+z")
    assert tab.done() == first != second and tab.page.input_value("#prompt") == "def ma"
    assert tab.js("document.activeElement == document.querySelector('[aria-selected=true]')")
    tab.page.locator("#next button").first.focus()
    tab.page.keyboard.press("Control+z")
    assert len(tab.done()) == 7 and tab.page.input_value("#prompt") == "def ma"
    tab.shown.nth(2).click()
    tab.page.keyboard.press("Control+z")
    assert len(tab.done()) == 7, "there is nothing to undo"
    tab.page.locator("#prompt").press_sequentially("x")
    tab.page.keyboard.press("Control+z")
    assert tab.page.input_value("#prompt") != "def max", "in the box, it is the browser's"
    assert tab.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [(390, 800), (1280, 800)])
def test_the_text_is_in_view_beside_the_heads_and_candidates(chromium, laptop, size):
    width, height = size
    tab = ModelPage(chromium, laptop, viewport={"width": width, "height": height})
    tab.set(max_tokens=1000, seed=1)
    tab.write("The ")
    tab.page.click("#more")
    tab.done()
    box = "(({ top, bottom }) => [top, bottom])(document.querySelector(value).getBoundingClientRect())"

    def in_view(selector):
        top, bottom = tab.js(box, selector)
        return top >= 0 and bottom <= height

    def hidden():
        """Whether the text covers the focused element."""
        return (
            tab.js("document.activeElement.getBoundingClientRect().top") < tab.js(box, "#tokens")[1]
        )

    for n in (0, 3):
        tab.page.locator("#heads [role=radio]").nth(n).click()
        assert in_view("#tokens") and in_view("#tokens [aria-selected=true]") and not hidden()
        assert in_view("#heads [aria-checked=true]")
    tab.page.keyboard.press("ArrowDown")  # to the first
    assert in_view("#tokens [aria-selected=true]") and in_view("#heads [aria-checked=true]")
    tab.page.evaluate("scrollTo(0, 0)")
    tab.page.locator("#next button").nth(5).click()
    tab.done()
    assert in_view("#tokens") and in_view("#tokens > span:last-child")
    tab.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    tab.page.locator("#next button").first.focus()
    assert in_view("#next button:focus") and not hidden()
    assert tab.wrong == []


@pytest.mark.slow
def test_the_place_after_the_end_of_a_text_is_named(chromium, laptop):
    tab = ModelPage(chromium, laptop)
    tab.set(max_tokens=5, seed=1)
    tab.write("def")
    tab.js("write([...idx.slice(0, 4), tokenizer.eot], 4)")
    tab.done()
    tab.shown.nth(4).click()
    named = tab.page.locator("#selected")
    assert named.inner_text() == "After ■, the end of the text (a new text would begin here):"
    tab.page.keyboard.press("ArrowLeft")
    assert named.inner_text() == "After “def”:"
    tab.page.keyboard.press("Home")
    assert named.inner_text() == "At the beginning of a text:" and tab.wrong == []


@pytest.mark.slow
def test_settings_are_kept_if_the_browser_has_storage(chromium, laptop):
    tab = ModelPage(chromium, laptop)
    tab.page.click("#details summary")
    tab.page.fill("#temperature", "0.3")
    tab.page.fill("#seed", "7")
    summary = "temperature 0.3, top-k 50, seed 7, 200 new tokens"
    tab.page.reload()
    assert tab.page.inner_text("#summary") == summary and tab.js("settings().temperature") == 0.3
    tab.page.context.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused'); } })"
    )
    tab.page.reload()
    assert tab.page.inner_text("#summary").startswith("temperature 0.8, ")
    tab.set(max_tokens=3)
    tab.page.click("#details summary")
    tab.page.fill("#temperature", "0.5")
    assert tab.page.inner_text("#summary").startswith("temperature 0.5, ")
    assert len(tab.write("The ")) == 5 + 3 and tab.wrong == []


@pytest.mark.slow
def test_a_wrong_setting_leaves_the_text_as_it_is(chromium, laptop):
    tab = ModelPage(chromium, laptop)
    tab.set(max_tokens=20, seed=1)
    before = tab.write("def ma")
    tab.shown.nth(2).click()  # in the prompt, which a candidate would shorten
    tab.set(temperature=-3)
    for act in (
        lambda: tab.page.press("#temperature", "Enter"),
        lambda: tab.page.press("#prompt", "Enter"),
        lambda: tab.page.click("#more"),
        lambda: tab.page.locator("#next button").last.click(),
    ):
        tab.page.evaluate("() => { details.open = true; }")
        act()
        assert tab.done() == before and tab.shown.count() == len(before) == 27
        assert tab.page.input_value("#prompt") == "def ma"
        assert tab.page.evaluate("document.activeElement.id") == "temperature", "it is named"
    tab.set(temperature=0.8)
    assert tab.write("def ma") == before and tab.wrong == []


@pytest.mark.slow
def test_hostile_names_and_texts_are_shown_as_text(tmp_path, chromium):
    name = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
    saved(bytes_gpt(), tmp_path / name / "model_000010.pt")
    out = tmp_path / "x.html"
    export(str(tmp_path / name / "model_000010.pt"), html=out)
    tab = ModelPage(chromium, out)
    title = f"{name}/model_000010, a GPT-2 with 47.2k parameters"
    assert tab.page.inner_text("h1") == tab.page.title() == title
    tab.set(max_tokens=5)
    tab.write(EVIL)
    shown = "".join(tab.shown.all_text_contents()).replace("·", "")
    assert '<img src=x onerror=alert(1)></script><script>alert("é")' in shown and "␛[2J" in shown
    assert tab.page.locator("main img, #tokens img, #tokens script").count() == 0
    assert tab.wrong == []
    tab.js(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')"
    )
    tab.page.wait_for_timeout(200)
    assert tab.page.title() != "1" and any("Content Security Policy" in text for text in tab.wrong)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_and_text_has_contrast(chromium, laptop, scheme):
    tab = ModelPage(chromium, laptop, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    tab.page.click("#details summary")
    tab.write("The " + 60 * "x")
    assert tab.js("document.documentElement.scrollWidth") == 390
    cells = (
        "[...document.querySelectorAll('#lens th')].filter(th => th.scrollWidth > th.clientWidth)"
    )
    assert tab.js(f"{cells}.map(th => th.textContent)") == []
    tab.page.click("input[value=attention]")
    dark = tab.js("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
    unnamed = tab.js(
        "[...document.querySelectorAll('input, textarea, button, [role]')].filter(one => !one.labels?.length"
        " && !one.textContent.trim() && !one.getAttribute('aria-label') && one.role != 'alert'"
        " && one.role != 'status').length"
    )
    assert unnamed == 0 and tab.wrong == []
