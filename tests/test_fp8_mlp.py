"""The MLP in 8 bits: refused where it cannot be, rounded as its formats say where it can."""

import contextlib
import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lab.device import Precision, why_no_fp8
from lab.kernels import fp8_mlp, fused_mlp
from lab.run import vitals as checks
from train_gpt2 import GPT, MLP, GPTConfig, TrainConfig

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit products"
)


def error(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def test_refused_without_such_a_gpu():
    reason = why_no_fp8(Precision("bf16", torch.device("cpu")), GPTConfig(), TrainConfig())
    assert "RTX 40, H100" in reason


def test_on_a_cpu_the_switch_changes_nothing():
    config = GPTConfig(1, 2, 32, 16, vocab_size=50)
    x = torch.randn(2, 16, 32)
    small, plain = MLP(GPTConfig(1, 2, 32, 16, vocab_size=50, fp8_mlp=True)), MLP(config)
    plain.load_state_dict(small.state_dict())
    assert torch.equal(small(x), plain(x))


def test_a_compiler_that_mixes_up_8_bit_numbers_is_refused(monkeypatch):
    device = torch.device("cpu")  # no kernel runs: what they would say is given
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H9")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7"))
    for switch, check in ((dict(cross_entropy="fp8"), "gradient_is_transposed"), (dict(fp8_mlp=True), "casts_are_transposed")):
        for right in (True, False):
            monkeypatch.setattr(checks, check, lambda _, right=right: right)
            checks.check_transposes(GPTConfig(), device)
            with contextlib.nullcontext() if right else pytest.raises(ValueError, match="Triton 3.7 transposes .* on H9"):
                checks.check_transposes(GPTConfig(**switch), device)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("mode", ["plain", "gelu", "dgelu"])
@pytest.mark.parametrize("shape", [(96, 48), (768, 3072), (4096, 1600)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_rounds_saturates_and_transposes(mode, shape, dtype):
    x = (3 * torch.randn(shape, device="cuda")).to(dtype)
    x[0, :2] = torch.tensor([1e4, -1e4])
    before = torch.randn(shape, device="cuda").to(dtype)
    scale = torch.tensor(0.25, device="cuda")
    for form in (fp8_mlp.E4M3, fp8_mlp.E5M2):
        q, q_t, sums = fp8_mlp.cast(x, scale, form, mode, before)
        z = before.double().requires_grad_()
        exact = {"plain": x.double(), "gelu": F.gelu(x.double(), approximate="tanh")}.get(mode)
        if mode == "dgelu":
            (exact,) = torch.autograd.grad(F.gelu(z, approximate="tanh"), z, x.double())
            assert error(sums.sum(0), exact.sum(0)) < 1e-3
        numbers = torch.finfo(form)  # eps: from 1 to the next number; rounding is off by half of it, or of the smallest step
        limit = numbers.max * 0.25
        allowed = 0.505 * (exact.abs() * numbers.eps + 0.25 * numbers.smallest_normal * numbers.eps)
        assert ((q.double() * 0.25 - exact.clamp(-limit, limit)).abs() <= allowed).all()
        assert torch.equal(q.float().t(), q_t.float())


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("size", [1e-9, 1.0])
def test_gradients_are_off_by_the_rounding_alone(size):
    """Gradients of any size: their scale follows them."""
    x = torch.randn(512, 96, device="cuda").bfloat16()
    w_fc, b_fc, w_proj, b_proj = (0.1 * torch.randn(shape, device="cuda") for shape in ((384, 96), (384,), (96, 384), (96,)))
    dy = (size * torch.randn(512, 96, device="cuda")).bfloat16()
    inputs = [t.double().requires_grad_() for t in (x, w_fc, b_fc, w_proj, b_proj)]
    y = F.gelu(inputs[0] @ inputs[1].t() + inputs[2], approximate="tanh") @ inputs[3].t() + inputs[4]
    exact = [y, *torch.autograd.grad(y, inputs, dy.double())]
    inputs = [t.clone().requires_grad_() for t in (x, w_fc, b_fc, w_proj, b_proj)]
    y = fp8_mlp.mlp_products_fp8(*inputs)[0]
    *found, db_proj = [y, *torch.autograd.grad(y, inputs, dy)]
    *wanted, db_wanted = exact
    assert error(db_proj, db_wanted) < 1e-3  # a sum of what came in
    for a, b in zip(found, wanted):
        assert 0.01 < error(a, b) < 0.12  # 16 bits would be below 0.01


@pytest.mark.gpu
@needs_fp8
def test_model_compiled_and_eager_agree(monkeypatch):
    monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 1)
    assert fp8_mlp.casts_are_transposed(torch.device("cuda"))
    eager = GPT(GPTConfig(2, 4, 64, 32, vocab_size=100, fp8_mlp=True)).cuda()
    with torch.no_grad():
        for p in eager.parameters():
            p.add_(0.1 * torch.randn_like(p))
        eager.transformer.wte.weight[100:] = 0
    plain, other = copy.deepcopy(eager), copy.deepcopy(eager)
    for block in plain.transformer.h:
        block.mlp.fp8 = False
    idx = torch.randint(100, (4, 32), device="cuda")
    for run in (plain, eager, torch.compile(other, dynamic=False)):
        with torch.autocast("cuda", torch.bfloat16):
            run(idx, idx)[1].backward()
    for (name, p), q, r in zip(eager.named_parameters(), other.parameters(), plain.parameters()):
        assert error(q.grad, p.grad) < 0.15, name  # another order of sums, and a number rounds the other way
        assert error(p.grad, r.grad) < 0.25, name
    assert error(eager.transformer.h[0].mlp.c_fc.weight.grad, plain.transformer.h[0].mlp.c_fc.weight.grad) > 0.02
