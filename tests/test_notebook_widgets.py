"""lab/notebook: the numbers of the interactive views, escaping, the diagram, the exercise checker.

The tests with a browser need Chromium and requirements-browser.txt; run them with -m slow.
"""

import math
import re

import pytest
import torch
from browser import Tab
from conftest import add_noise
from torch import nn

from lab.cli import UserError
from lab.inference.generate import sample_token
from lab.notebook import (
    attention_view,
    check,
    mask_view,
    model_diagram,
    next_token_bars,
    plot_setup,
)
from train_gpt2 import GPT

EVIL = "</script><script>document.title = 'run'</script><img src=x onerror=alert(1)>`${alert(2)}"
TOKENS = [" the", " a", "\n", EVIL, "\u202e\x1b[2J"] + [f"w{i}" for i in range(45)]
TEXT = ["a", " b", "\n", EVIL, "c", " d"]


@pytest.fixture
def logits():
    return torch.randn(50) * 2 + torch.linspace(8, -8, 50)


@pytest.fixture
def weights():
    scores = torch.randn(2, 3, 6, 6) * 2
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    return scores.masked_fill(~causal, float("-inf")).softmax(-1)


@pytest.fixture
def masks():
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    document = causal & (torch.arange(6)[:, None] // 3 == torch.arange(6) // 3)
    return {"causal": causal, "bidirectional": torch.ones_like(causal), EVIL: document}


class SmallGPT(nn.Module):
    """A GPT as a reader of the notebook may write it, with other names and a dropout."""

    class Block(nn.Module):
        def __init__(self, C):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
            self.attention = nn.MultiheadAttention(C, 2, batch_first=True)
            self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

        def forward(self, x):
            y = self.norm1(x)
            mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
            x = x + self.attention(y, y, y, attn_mask=mask)[0]
            return x + self.feed_forward(self.norm2(x))

    def __init__(self, vocab=11, block_size=5, C=12, layers=3):
        super().__init__()
        self.position_embedding = nn.Embedding(block_size, C)
        self.token_embedding = nn.Embedding(vocab, C)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.Sequential(*(self.Block(C) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(C)
        self.head = nn.Linear(C, vocab, bias=False)

    def forward(self, idx):
        x = self.token_embedding(idx) + self.position_embedding(torch.arange(idx.size(1)))
        return self.head(self.ln_f(self.blocks(self.drop(x))))


def boxes(widget):
    return [*widget.data["sources"], *widget.data["column"]]


def test_views_are_small_and_no_text_is_code(logits, weights, masks):
    views = [
        next_token_bars(TOKENS, logits), attention_view(TEXT, weights, title=EVIL),
        mask_view(TEXT, masks, title=EVIL), model_diagram(SmallGPT(), seq_len=4),
        attention_view("x" * 90, torch.zeros(2, 4, 90, 90)),
        attention_view("x" * 22, torch.ones(12, 12, 22, 22).tril()),
        mask_view("x" * 61, dict.fromkeys("abcd", torch.ones(61, 61))),
    ]  # fmt: skip
    for view in views:
        html = view._repr_html_()
        assert len(html.encode()) < 60_000 and html == view._repr_html_()
        tags = re.findall(
            "<(?:/?[a-z]+|!--)[^>]*>", html
        )  # of code, only "<" of a comparison is left
        assert [
            tag.split(" ")[0].strip("<>") for tag in tags
        ] == "div pre /pre script /script /div".split()
        assert " id=" not in tags[0] and len(tags[3]) == len("<script>")


def test_bad_input_is_a_sentence(logits, weights, masks):
    with pytest.raises(UserError, match="50 values and tokens has 49; pass one logit per token"):
        next_token_bars(TOKENS[:-1], logits)
    with pytest.raises(UserError, match="finite"):
        next_token_bars(["a", "b"], [0.0, math.nan])
    with pytest.raises(UserError, match="6 positions and tokens has 5"):
        attention_view(TEXT[:-1], weights)
    with pytest.raises(UserError, match="pass fewer tokens"):
        attention_view("x" * 64, torch.zeros(12, 12, 64, 64))
    with pytest.raises(UserError, match=r"mask 'causal' must have the shape \(5, 5\)"):
        mask_view(TEXT[:-1], masks)
    with pytest.raises(UserError, match="2 masks of 101 tokens have 20,402 pairs"):
        mask_view("x" * 101, dict.fromkeys("ab", torch.ones(101, 101)))
    with pytest.raises(UserError, match=r"shape \(1, 6\).*pass another batch or seq_len"):
        model_diagram(SmallGPT(), seq_len=6)


def test_diagram_of_gpt2(tiny_config):
    model = add_noise(GPT(tiny_config)).train()
    view = model_diagram(model, batch=2, seq_len=7)
    assert model.training and all(m.training for m in model.modules())
    names = [box["path"].split(".")[-1] for box in boxes(view)]
    assert names == "wte wpe ln_1 attn ln_2 mlp ln_f lm_head".split()
    assert [b["kind"] for b in boxes(view)][3:6] == ["CausalSelfAttention", "LayerNorm", "MLP"]
    assert [b["gives"] for b in boxes(view)][:3] == ["(2, 7, 32)", "(7, 32)", "(2, 7, 32)"]
    assert view.data["sources_added"] and view.data["takes"] == "(2, 7)"
    assert view.data["gives"] == "(2, 7, 257)"
    assert [b["add_from"] for b in view.data["column"]] == [None, 0, None, 2, None, None]
    assert [b["mixes"] for b in view.data["column"]] == [False, True, False, False, False, False]
    assert {b["group"] for b in view.data["column"]} == {"h: 2 × Block", ""}
    counted = sum(b["params"] * (2 if b["group"] else 1) for b in boxes(view))
    assert counted == sum(p.numel() for p in model.parameters()) == view.data["total"]
    assert boxes(view)[-1]["params"] == 0
    assert "the same tensor as transformer.wte.weight" in boxes(view)[-1]["details"][0]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_diagram_of_a_model_with_other_names():
    view = model_diagram(SmallGPT(), seq_len=5)
    names = [box["path"].split(".")[-1] for box in boxes(view)]
    assert (
        names
        == (
            "token_embedding position_embedding drop norm1 attention norm2 feed_forward ln_f head"
        ).split()
    )
    column = {b["path"].split(".")[-1]: b for b in view.data["column"]}
    assert column["attention"]["mixes"] and not column["feed_forward"]["mixes"]
    assert column["attention"]["add_from"] == 1 and column["feed_forward"]["add_from"] == 3
    assert column["norm1"]["group"] == "blocks: 3 × Block" and view.data["sources_added"]


def test_diagram_does_not_draw_an_addition_that_is_not_there():
    class NoResidual(SmallGPT.Block):
        def forward(self, x):
            y = self.norm1(x)
            return self.feed_forward(self.norm2(self.attention(y, y, y)[0]))

    model = SmallGPT()
    model.blocks = nn.Sequential(NoResidual(12), NoResidual(12))
    assert [b["add_from"] for b in model_diagram(model, seq_len=5).data["column"]] == [None] * 7


def said(capsys):
    return capsys.readouterr().out.strip()


def no_sum(x):
    return "each row must sum to 1" if x.sum() != 1 else True


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (3, 3), (0.1 + 0.2, 0.3), ("abc", "abc"), ((2, 3), [2, 3]),
        (torch.eye(2), torch.eye(2, dtype=torch.float64)), ([[1, 0], [0, 1]], torch.eye(2)),
        (torch.tensor(3.0), 3), (torch.Size([2, 3]), (2, 3)), (math.nan, math.nan), (None, None),
        (torch.tensor([1.0]), no_sum), (float("inf"), float("inf")),
        (torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan])),
    ],
)  # fmt: skip
def test_check_accepts(capsys, got, want):
    assert check("x", got, want, hint="a hint") is None
    assert said(capsys) == "✓ right: x"


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_check_tolerates_an_absolute_difference(capsys, kind):
    for got, want, tol, mark in (
        (54.0, math.exp(4), 1, "✓"), (7.4, math.exp(4), 1, "✗"), (9600.005, 9600.0, 1e-6, "✓"),
        (9600.05, 9600.0, 1e-6, "✗"), (3.0, math.inf, 1, "✗"),
    ):  # fmt: skip
        check("x", kind(got), kind(want), tol=tol)
        assert said(capsys).startswith(mark), (got, want)


@pytest.mark.parametrize(
    ("got", "want", "sentence"),
    [
        (3, 41, "got 3; that is not the number"),
        ("three", 41, "got 'three'; expected a number"),
        (None, 41, "got None; expected a number"),
        ("abd", "secret", "got 'abd'; that is not the str"),
        ([1, 2], [1, 41], "got [1, 2]; at index 1: that is not the number"),
        ([1], [1, 41], "got [1]; expected 2 elements"),
        (torch.zeros(2, 3), torch.full((3, 2), 41.0),
         "got a tensor of shape (2, 3); expected a tensor of shape (3, 2)"),
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]),
         "got a tensor of shape (2,); the shape is right, but 1 of 2 values are off, by up to 0.5"),
        ("x", torch.full((2,), 41.0), "got 'x'; expected a tensor of shape (2,)"),
        (2.0, torch.tensor(41.0), "got 2.0; that is not the number"),
        (torch.tensor([0.2]), no_sum, "got a tensor of shape (1,); each row must sum to 1"),
        (5, lambda x: x == 41, "got 5; that is not it"),
        (5, lambda x: x.secret, "the check raised AttributeError"),
        (lambda x: x, 41, "expected a number"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong_without_the_answer(capsys, got, want, sentence):
    check("x", got, want, hint="count the heads")
    text = said(capsys)
    assert (
        text.startswith("✗ not yet: x: ")
        and sentence in text
        and text.endswith("; count the heads")
    )
    # A whole word: the address of a printed function may hold the digits by chance.
    assert not re.search(r"\b41\b", text) and ("secret" not in text or "AttributeError" in text)


def test_check_of_an_empty_exercise_and_of_broken_objects(capsys):
    class Broken:
        def __repr__(self):
            raise RuntimeError("no text")

    check("shapes", ..., 3, hint="h")
    check("shapes", (..., 4), (3, 4))
    assert said(capsys).split("\n") == ["○ your turn: shapes"] * 2
    check("shapes", Broken(), 3)
    assert "not yet" in said(capsys)


def test_plot_setup_sets_the_size_and_a_light_face():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        plot_setup()
        assert list(matplotlib.rcParams["figure.figsize"]) == [9.5, 3.6]
        assert matplotlib.rcParams["figure.facecolor"] == "#ffffff"


# --------------------------------------------------------------------------- in a browser

slow = pytest.mark.slow


class Page(Tab):
    """A page with several widgets, as nbconvert would write it."""

    def __init__(self, browser, folder, *widgets, css="", **how):
        body = "<hr>".join(w._repr_html_() for w in widgets)
        head = f"<!doctype html><meta charset=utf-8><title>page</title><style>{css}</style>"
        (folder / "page.html").write_text(head + body, encoding="utf-8")
        super().__init__(browser, (folder / "page.html").as_uri(), **how)
        self.views = self.page.locator("[data-lab-widget]")

    def slide(self, view, name, value):
        code = "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')) }"
        view.locator(f"input[name={name}]").evaluate(code, value)

    def probs(self, view):
        numbers = view.locator(".number").evaluate_all("all => all.map(one => +one.dataset.p)")
        return torch.tensor(numbers, dtype=torch.float64)

    def selected(self, view):
        spans = view.locator(".tokens span")
        return spans.evaluate_all("all => all.findIndex(one => one.tabIndex == 0)")


def sampled_probs(logits, temperature, top_k, top_p):
    """Probabilities after temperature, top-k, top-p, in descending order, computed with torch."""
    probs = (logits.double() / temperature).softmax(0).sort(descending=True).values
    probs[top_k:] = 0
    probs /= probs.sum()
    probs[probs.cumsum(0) - probs >= top_p] = 0
    return probs / probs.sum()


@slow
def test_sliders_change_the_bars_as_torch_says(tmp_path, chromium, logits):
    page = Page(chromium, tmp_path, *[next_token_bars(TOKENS, logits)] * 2)
    view, other = page.views.nth(0), page.views.nth(1)
    for temperature, k, p in (
        (1.0, 50, 1),
        (0.3, 50, 1),
        (2.5, 20, 1),
        (1.5, 50, 0.8),
        (2.0, 9, 0.6),
    ):
        page.slide(view, "temperature", math.log(temperature))
        page.slide(view, "top_k", math.log(k) / math.log(50))
        page.slide(view, "top_p", p)
        shown_t = float(view.locator("output").first.inner_text())
        assert shown_t == pytest.approx(temperature, abs=0.03)
        exact = float(view.locator("input").first.input_value())  # the slider's steps are finite
        exact = temperature if temperature == 1 else math.exp(exact)
        want = sampled_probs(logits, exact, k, p)
        got = page.probs(view)
        assert got[:12] == pytest.approx(want[:12], abs=2e-5)
        assert got[12] == pytest.approx(want[12:].sum().item(), abs=1e-4)
        entropy = float(view.locator("p").get_attribute("data-entropy"))
        want_h = -(want[want > 0] * want[want > 0].log()).sum().item()
        assert entropy == pytest.approx(want_h, abs=1e-4)
        cut = view.locator(".name.cut").count()
        assert cut == int((want[:12] == 0).sum()) + int(want[12:].sum() == 0)
    # the order of the filters is sample_token's own: no token that the view cuts off is sampled
    possible = set(
        torch.cat([sample_token(logits[None], exact, 9, 0.6) for _ in range(300)]).tolist()
    )
    assert possible <= set(logits.topk(int((want > 0).sum())).indices.tolist())
    assert page.probs(other)[:12] == pytest.approx(sampled_probs(logits, 1, 50, 1)[:12], abs=2e-5)
    slider = view.locator("input").first
    slider.focus()
    before = page.probs(view)[0]
    slider.press("ArrowLeft")
    assert page.probs(view)[0] > before
    names = view.locator(".name").all_inner_texts()
    assert "␣the" in names and "↵" in names
    assert page.wrong == [] and page.page.title() == "page"


@slow
def test_arrow_keys_move_the_attention(tmp_path, chromium, weights):
    two = [attention_view(TEXT, weights, layer=1, head=2), attention_view(TEXT, weights)]
    page = Page(chromium, tmp_path, *two)
    view, other = page.views.nth(0), page.views.nth(1)

    def shaded():
        tokens = view.locator(".tokens span")
        return torch.tensor(tokens.evaluate_all("all => all.map(one => +one.dataset.p)"))

    assert page.selected(view) == 5 and shaded() == pytest.approx(weights[1, 2, 5], abs=1e-3)
    view.locator(".tokens span").nth(5).focus()
    for key, t in (
        ("ArrowLeft", 4),
        ("ArrowLeft", 3),
        ("Home", 0),
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
    ):
        page.page.keyboard.press(key)
        assert page.selected(view) == t and shaded() == pytest.approx(weights[1, 2, t], abs=1e-3)
    page.page.keyboard.press("End")
    view.locator(".layer select").select_option("0")
    assert shaded() == pytest.approx(weights[0, 2, 5], abs=1e-3)
    view.locator(".heads button").nth(4).click()
    assert view.locator(".head select").input_value() == "1"
    assert shaded() == pytest.approx(weights[1, 1, 5], abs=1e-3)
    view.locator(".tokens span").nth(1).hover()
    assert page.selected(view) == 1
    box = view.locator("canvas.matrix").bounding_box()
    page.page.mouse.move(box["x"] + 5, box["y"] + 2.5 * box["height"] / 6)
    assert page.selected(view) == 2 and view.locator("p").inner_text().startswith("Position 2, “↵”")
    assert page.selected(other) == 5 and other.locator(".layer select").input_value() == "0"
    assert page.wrong == [] and page.page.title() == "page"


@slow
def test_radio_buttons_change_the_mask(tmp_path, chromium, masks):
    page = Page(chromium, tmp_path, *[mask_view(TEXT, masks, row=1)] * 2)
    view, other = page.views.nth(0), page.views.nth(1)

    def seen(view):
        classes = view.locator(".tokens span").evaluate_all("all => all.map(one => one.className)")
        return [i for i, name in enumerate(classes) if name == "seen"]

    assert seen(view) == [0, 1] and "36 pairs" in view.locator(".count").inner_text()
    view.locator("fieldset label").nth(1).click()
    assert seen(view) == [0, 1, 2, 3, 4, 5]
    view.locator("fieldset input").nth(1).press("ArrowRight")
    assert seen(view) == [0, 1]
    view.locator(".tokens span").nth(4).click()
    assert (
        seen(view) == [3, 4] and "2 of 6 positions: 3 to 4" in view.locator("p").first.inner_text()
    )
    assert view.locator("fieldset label").nth(2).inner_text() == EVIL
    assert seen(other) == [0, 1] and other.locator("input").first.is_checked()
    assert page.wrong == [] and page.page.title() == "page"


@slow
def test_boxes_of_the_diagram_show_their_parameters(tmp_path, chromium, tiny_config):
    view = model_diagram(GPT(tiny_config), seq_len=7)
    page = Page(chromium, tmp_path, view, view)
    first, other = page.views.nth(0), page.views.nth(1)
    first.locator(".box", has_text="attn").hover()
    text = first.locator(".side").inner_text()
    assert "transformer.h.0.attn" in text and "c_attn.weight (96, 32): 3,072" in text
    assert "4,224 parameters, 2 times" in text and "depends on other positions" in text
    first.locator(".box").first.focus()
    page.page.keyboard.press("ArrowDown")
    assert "transformer.wpe" in first.locator(".side").inner_text()
    assert "transformer.wte" in other.locator(".side").inner_text()
    assert first.locator(".plus").count() == 3 and first.locator(".frame").count() == 1
    assert page.wrong == []


# contrast of each text with what is behind it, as WCAG 2 defines it: [[ratio, text], ...]
CONTRAST = """host => {
  const root = host.shadowRoot, found = [];
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const c = text.startsWith("color(") ? n.map((v, i) => i < 3 ? 255 * v : v) : n;
    return c.length < 4 ? [...c, 1] : c;
  };
  const over = (a, b) => [0, 1, 2].map(i => a[3] * a[i] + (1 - a[3]) * b[i]).concat(1);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => [.2126, .7152, .0722].reduce((sum, w, i) => sum + w * linear(c[i] / 255), 0);
  for (const one of root.querySelectorAll("*")) {
    const text = [...one.childNodes].filter(n => n.nodeType == 3).map(n => n.data).join("").trim();
    if (!text || !one.getClientRects().length || ["STYLE", "OPTION"].includes(one.tagName)) continue;
    const svg = one.namespaceURI.endsWith("svg"), css = getComputedStyle(one), chain = [];
    let back = [0, 0, 0, 0];
    for (let up = one; up; up = up.parentElement) chain.unshift(getComputedStyle(up).backgroundColor);
    for (const color of chain) back = over(parse(color), back);
    const box = svg && one.closest(".box");
    if (box) back = over(parse(getComputedStyle(box.querySelector("rect")).fill), back);
    const ink = over(parse(svg ? css.fill : css.color), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), text]);
  }
  return found;
}"""


@slow
@pytest.mark.parametrize("theme", ["light", "dark", "jupyter dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_text_is_readable_in_both_themes(
    tmp_path, chromium, logits, weights, masks, tiny_config, theme, width
):
    views = [
        next_token_bars(TOKENS, logits), attention_view(TEXT, weights), mask_view(TEXT, masks),
        model_diagram(GPT(tiny_config)),
    ]  # fmt: skip
    css = "body { background: #111; color: #eee }" if "jupyter" in theme else ""
    css = css or ":root { color-scheme: light dark }"
    how = dict(viewport=dict(width=width, height=800))
    page = Page(chromium, tmp_path, *views, css=css, color_scheme=theme.split()[-1], **how)
    page.slide(page.views.nth(0), "top_k", 0.4)
    found = [pair for i in range(4) for pair in page.views.nth(i).evaluate(CONTRAST)]
    assert len(found) > 60
    assert min(found)[0] >= 4.5, min(found)
    card = "getComputedStyle(document.querySelector('[data-lab-widget]').shadowRoot.querySelector('.view'))"
    assert page.page.evaluate(card + ".backgroundColor") == (
        "rgb(255, 255, 255)" if theme == "light" else "rgb(13, 17, 23)"
    )
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.page.evaluate("document.body.style.color = '#eee'")  # the theme changes later
    assert page.page.evaluate(card + ".backgroundColor") == "rgb(13, 17, 23)"
    assert page.wrong == []


@slow
def test_works_where_scripts_run_after_the_html_is_inserted(tmp_path, chromium, masks):
    """JupyterLab sets innerHTML, then replaces the scripts by copies, which run."""
    page = Page(chromium, tmp_path)
    page.page.evaluate(
        """html => {
          const box = document.createElement("div");
          box.innerHTML = html;
          document.body.append(box);
          for (const old of box.querySelectorAll("script")) {
            const script = document.createElement("script");
            script.textContent = old.textContent;
            old.replaceWith(script);
          }
        }""",
        mask_view(TEXT, masks)._repr_html_() + mask_view(TEXT, masks)._repr_html_(),
    )
    assert page.page.locator("[data-lab-widget] fieldset label").count() == 6 and page.wrong == []
