"""Attention's linear layers in 8 bits (bench/fp8_attention.py)."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import fp8_attention  # noqa: E402
from packed_attention import pack_gradients  # noqa: E402

from lab.kernels.fp8_mlp import E4M3, cast  # noqa: E402
from train_gpt2 import GPT, GPTConfig  # noqa: E402


def cpu_multiplies():
    """Whether this CPU's torch has products in 8 bits, which are slow there."""
    one, a = torch.ones(()), torch.ones(16, 16).to(E4M3)
    try:
        return torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16).sum() == 16**3
    except (RuntimeError, NotImplementedError):
        return False


pytestmark = pytest.mark.skipif(not cpu_multiplies(), reason="this CPU's torch has no products in 8 bits")


def rounded(x, scale, dtype, mode="plain", before=None):
    """What the cast's kernel does, without a GPU."""
    q = (x.float() / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return q, q.t().contiguous(), None


def results(function, x, w, b, dy):
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    y = function(x, w, b)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, w.grad, b.grad]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: torch.compile(f, fullgraph=True, dynamic=False)])
def test_off_by_the_rounding_alone(monkeypatch, wrap, device):
    monkeypatch.setattr(fp8_attention, "cast", rounded if device == "cpu" else cast)
    torch.manual_seed(0)
    x, w, b, dy = torch.randn(64, 32), 0.02 * torch.randn(96, 32), torch.randn(96), 1e-6 * torch.randn(64, 96)
    x, w, b, dy = (t.to(device) for t in (x.bfloat16(), w, b, dy.bfloat16()))
    ours = results(wrap(lambda x, w, b: fp8_attention.linear(x, w, b)[0]), x, w, b, dy)
    exact = results(lambda x, w, b: F.linear(x.float(), w, b), x.float(), w, b, dy)
    for a, c, bits in zip(ours, exact, (3, 2, 2, 8)):  # of the coarser factor
        assert (a.float() - c).norm() < 2.0**-bits * 0.6 * c.norm()


def test_a_model_trains_with_it_and_is_evaluated_without(monkeypatch):
    monkeypatch.setattr(fp8_attention, "cast", rounded)
    torch.manual_seed(0)
    model = GPT(GPTConfig(2, 2, 32, 16, vocab_size=64))
    idx = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        before = model(idx, idx)[1].item()
    fp8_attention.in_8_bits(model)
    pack_gradients(model)
    with torch.no_grad():
        assert model(idx, idx)[1].item() == pytest.approx(before, abs=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)[1]
    assert loss.item() == pytest.approx(before, abs=0.01) and loss.item() != before
    loss.backward()
    grads = [block.attn.c_attn.weight.grad for block in model.transformer.h]
    assert all(g.dtype == torch.float32 and g.isfinite().all() and g.abs().max() > 0 for g in grads)
