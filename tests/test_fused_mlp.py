"""GELU inside the products around it: the same numbers as three operations, on a GPU; left alone everywhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F

from lab.kernels import fused_mlp
from lab.kernels.fused_mlp import epilogues_work
from train_gpt2 import GPT, MLP, GPTConfig

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_without_a_gpu_the_plain_products_are_used():
    assert not epilogues_work(torch.device("cpu"))
    config = GPTConfig(1, 2, 32, 16, vocab_size=50)
    x = torch.randn(2, 16, 32)
    fused, plain = MLP(config), MLP(GPTConfig(1, 2, 32, 16, vocab_size=50, fused_mlp=False))
    plain.load_state_dict(fused.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x), plain(x))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_same_loss_and_gradients_as_three_operations(compiled, monkeypatch):
    monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 1)
    if not epilogues_work(torch.device("cuda")):
        pytest.skip("cuBLASLt has no GELU epilogues here")
    config = GPTConfig(2, 4, 64, 32, vocab_size=100)
    exact = GPT(config).cuda()
    with torch.no_grad():
        for p in exact.parameters():  # no bias is 0: a lost one shows
            p.add_(0.1 * torch.randn_like(p))
        exact.transformer.wte.weight[100:] = 0
    idx = torch.randint(100, (3, 32), device="cuda")  # 96 positions, no power of two
    with torch.autocast("cuda", torch.bfloat16):
        assert fused_mlp.fused_mlp_pays(torch.empty(96, 64, device="cuda")), "or nothing would be compared"
    gradients = {}
    for name, fused in (("exact", False), ("plain", False), ("fused", True)):
        model = copy.deepcopy(exact)
        for block in model.transformer.h:
            block.mlp.fused = fused
        run = torch.compile(model, dynamic=False) if compiled and name != "exact" else model
        with torch.autocast("cuda", torch.bfloat16, enabled=name != "exact"):
            loss = run(idx, idx)[1]
        loss.backward()
        gradients[name] = {n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()}

    def error(name, parameter):  # relative to float32
        reference = gradients["exact"][parameter]
        return ((gradients[name][parameter] - reference).norm() / reference.norm()).item()

    for parameter in gradients["exact"]:
        assert error("fused", parameter) < max(1.5 * error("plain", parameter), 5e-3), parameter


@pytest.mark.gpu
@needs_gpu
def test_nothing_is_fused_in_another_precision(monkeypatch):
    monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 1)
    x, mlp = torch.randn(2, 16, 32, device="cuda"), MLP(GPTConfig(1, 2, 32, 16, vocab_size=50)).cuda()
    assert mlp(x).dtype == torch.float32
    with torch.autocast("cuda", torch.float16):
        assert mlp(x).dtype == torch.float16


@pytest.mark.gpu
@needs_gpu
def test_a_bias_far_below_the_rounding_counts_for_what_it_is(monkeypatch):
    """Added to a rounded product it would vanish, or decide ties in the sum with a 16-bit stream, many times too much."""
    monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 1)
    if not epilogues_work(torch.device("cuda")):
        pytest.skip("cuBLASLt has no GELU epilogues here")
    mlp = MLP(GPTConfig(1, 2, 128, 16, vocab_size=50)).cuda()
    with torch.no_grad():
        mlp.c_fc.weight.normal_(std=0.1)
        mlp.c_proj.weight.normal_(std=0.02)
        mlp.c_proj.bias.zero_()
    stream = (0.05 * torch.randn(65536, 128, device="cuda")).bfloat16()
    add = torch.compile(lambda x: x + mlp(F.layer_norm(x, (128,))), dynamic=False)

    def mean(bias):
        with torch.no_grad():
            mlp.c_proj.bias.fill_(bias)
        with torch.autocast("cuda", torch.bfloat16):
            return add(stream).double().mean().item()

    assert (mean(3e-6) - mean(-3e-6)) / 6e-6 == pytest.approx(1, abs=0.5)
