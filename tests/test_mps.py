"""Apple GPUs: products, attention and a training step must agree with the CPU. Runs where MPS exists.

PyTorch on MPS has returned wrong results without an error, for example of a Linear on an input that is
not contiguous (pytorch/pytorch#109457). The shapes and strides here are those of the model.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODEL
from test_model import noisy, tokens

from train_gpt2 import GPTConfig

needs_mps = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
B, H, T, D = 2, 3, 17, 8


def products():
    """{name: (function, inputs)}: the products that the model computes, with its strides."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    qkv, w, b = draw(B, T, 3 * H * D), draw(3 * H * D, H * D), draw(3 * H * D)
    heads = [t.view(B, T, H, D).transpose(1, 2) for t in qkv.split(H * D, dim=2)]  # not contiguous
    x, mask = draw(B, T, H * D), torch.ones(T, T, dtype=torch.bool).tril()
    return {
        "linear": (F.linear, (x, w, b)),
        "linear of a transposed input": (F.linear, (draw(H * D, T).t(), w, b)),
        "linear of a slice": (F.linear, (draw(B, T, 2 * H * D)[..., ::2], w, b)),
        "linear of the last position": (F.linear, (x[:, -1:], w, b)),
        "scores of heads": (lambda q, k: q @ k.transpose(-2, -1), heads[:2]),
        "causal attention": (lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), heads),
        "masked attention": (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), (*heads, mask)
        ),
        "one query": (lambda q, k, v: F.scaled_dot_product_attention(q[:, :, -1:], k, v), heads),
        "batch of matrices": (torch.bmm, (draw(5, 7, 9), draw(5, 7, 9).mT)),
    }  # fmt: skip


def check_products(device, compute=lambda function, inputs: function(*inputs)):
    """Compare every product on a device with float64 on the CPU. compute: calls the function there."""
    for name, (function, inputs) in products().items():
        there = [x.to(device) for x in inputs]
        exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
        found = compute(function, there).cpu().double()
        assert (found - exact).abs().max() < 1e-4 * exact.abs().max(), name


def test_the_comparison_accepts_the_cpu_and_finds_a_wrong_product():
    check_products(torch.device("cpu"))

    def ignores_strides(function, inputs):  # as the fault did
        wrong = [torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) for x in inputs]
        return function(*wrong)

    with pytest.raises(AssertionError, match="linear of a transposed input"):
        check_products(torch.device("cpu"), ignores_strides)


@needs_mps
def test_products_on_mps_equal_the_cpus():
    check_products(torch.device("mps"))


@needs_mps
def test_loss_and_gradients_on_mps_equal_the_cpus():
    model, (x, y) = noisy(GPTConfig(**TINY_MODEL)), tokens()
    other = copy.deepcopy(model).to("mps")
    loss, theirs = model(x, y)[1], other(x.to("mps"), y.to("mps"))[1]
    loss.backward(), theirs.backward()
    assert abs(loss.item() - theirs.item()) < 1e-4
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (p.grad - q.grad.cpu()).norm() < 1e-3 * p.grad.norm() + 1e-6, name
