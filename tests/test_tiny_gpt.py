"""tiny_gpt.py computes what train_gpt2.GPT does, learns, and is short."""

import random

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, add_noise

from tiny_gpt import TinyGPT
from train_gpt2 import GPT, GPTConfig


def name_of(tiny_name, part):
    """The parameter of GPT that a matrix of TinyGPT holds (part: weight or bias)."""
    return f"transformer.{tiny_name}.{part}"


def pack(name, tensors):
    """GPT's weight and bias as TinyGPT keeps them: a column for linear layers, a row for norms."""
    weight = tensors[name_of(name, "weight")]
    if name in ("wte", "wpe"):
        return weight
    bias = tensors[name_of(name, "bias")]
    return (
        torch.stack([weight, bias]) if ".ln_" in f".{name}" else torch.column_stack([weight, bias])
    )


@pytest.fixture
def pair():
    """(tiny, gpt): the same weights, in float64; noise, because fresh biases and gains hide bugs."""
    config = GPTConfig(
        n_layer=2, n_head=3, n_embd=12, block_size=7, vocab_size=11, vocab_multiple=1
    )
    gpt = add_noise(GPT(config)).double()
    tiny = TinyGPT(vocab_size=11, block_size=7, n_layer=2, n_head=3, C=12)
    weights = dict(gpt.named_parameters())
    assert {name_of(name, "weight") for name in tiny.w} <= set(weights)
    for name, old in tiny.w.items():
        new = pack(name, weights).tolist()
        assert [len(row) for row in new] == [len(row) for row in old]
        tiny.w[name] = new
    return tiny, gpt


@pytest.mark.parametrize("length", [1, 5, 7])
def test_probabilities_loss_and_gradients_are_those_of_gpt2(pair, length):
    tiny, gpt = pair
    random.seed(length)
    x, y = ([random.randrange(11) for _ in range(length)] for _ in range(2))
    p, back = tiny.forward(x)
    back(y)
    logits = gpt(torch.tensor([x]))[0][0]
    loss = F.cross_entropy(logits, torch.tensor(y))  # GPT's own loss is computed in float32
    loss.backward()
    p = torch.tensor(p, dtype=torch.float64)
    assert torch.allclose(p.log(), logits.log_softmax(-1), rtol=0, atol=1e-9)
    got = -p[range(length), y].log().mean()
    assert abs(got - loss) < 1e-9
    grads = {name: w.grad for name, w in gpt.named_parameters()}
    for name in tiny.w:
        want = pack(name, grads)
        assert want.abs().max() > 1e-4 or length == 1
        got = torch.tensor(tiny.g[name], dtype=torch.float64)
        assert torch.allclose(got, want, rtol=0, atol=1e-9), name
    before = [row[:] for row in tiny.g["wte"]]
    tiny.forward(x)[1](y)  # gradients add up
    assert torch.allclose(torch.tensor(tiny.g["wte"]), 2 * torch.tensor(before))


def test_updates_are_those_of_adam(pair):
    tiny, gpt = pair
    x, y = [1, 2, 3, 4], [2, 3, 4, 5]
    adam = torch.optim.Adam(gpt.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for step in range(1, 4):
        tiny.forward(x)[1](y)
        tiny.update(step, 0.01)
        adam.zero_grad()
        F.cross_entropy(gpt(torch.tensor([x]))[0][0], torch.tensor(y)).backward()
        gpt.transformer.h[0].attn.c_attn.bias.grad[12:24] = 0  # the keys' bias: 0 up to rounding,
        gpt.transformer.h[1].attn.c_attn.bias.grad[12:24] = 0  # which Adam would enlarge
        adam.step()
        assert not any(map(any, tiny.g["wte"]))
    for name in tiny.w:
        got, want = (
            torch.tensor(tiny.w[name], dtype=torch.float64),
            pack(name, dict(gpt.named_parameters())),
        )
        if name.endswith("c_attn"):
            got, want = got.clone(), want.detach().clone()
            got[12:24, -1] = want[12:24, -1] = 0
        assert torch.allclose(got, want, rtol=0, atol=1e-7), name


def test_initial_weights_have_gpt2s_spread():
    random.seed(0)
    tiny = TinyGPT(vocab_size=200, n_layer=2, C=32)
    spread = {name: torch.tensor(tiny.w[name])[:, :32].std().item() for name in tiny.w}
    assert spread["wte"] == pytest.approx(0.02, rel=0.05)
    assert spread["h.1.mlp.c_fc"] == pytest.approx(0.02, rel=0.05)
    assert spread["h.0.attn.c_proj"] == pytest.approx(0.01, rel=0.1)
    assert {row[-1] for row in tiny.w["h.0.attn.c_attn"]} == {0.0}


def test_it_is_one_page_of_plain_python():
    lines = (ROOT / "tiny_gpt.py").read_text().splitlines()
    assert len(lines) <= 150
    imports = {line.split()[1] for line in lines if line.startswith(("import", "from"))}
    assert imports <= {"math", "random", "pathlib"}
