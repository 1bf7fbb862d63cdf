"""lab.kernels: losses and gradients of the fused cross-entropy, of 8-bit matmuls and of the fused MLP.

GPU kernels need -m gpu; the fused cross-entropy also runs on a CPU. When a kernel is used is tested in
test_replace_modules.py.
"""

import copy
import importlib.util
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODEL, VOCAB
from test_model import noisy

from lab.hardware import can_run_triton
from lab.kernels import MLP_FUNCTIONS, cross_entropy, fp8_mlp, fused_mlp, replace_modules
from lab.kernels.cross_entropy import FusedHeadLoss
from lab.kernels.fused_mlp import FusedMLP
from lab.precision import Precision
from train_gpt2 import MLP, GPTConfig, HeadLoss

N, C, V, PADDED = 37, 24, 50, 64  # 37 positions in chunks of 8: the last one is not full
has_gpu = torch.cuda.is_available()
has_fp8 = has_gpu and torch.cuda.get_device_capability() >= (8, 9)


def on_gpu(eight_bits=False):
    """Marks for a test that needs a GPU; eight_bits: one with 8-bit matmuls."""
    skip = pytest.mark.skipif(not (has_fp8 if eight_bits else has_gpu), reason="needs such a GPU")
    return lambda test: pytest.mark.gpu(skip(test))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lower the limits, so that small tests use all kernels and several chunks."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 8)
    monkeypatch.setattr(cross_entropy, "SMALL", 0)
    monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 1)


def put_in(model, precision="fp32", fp8="off"):
    """A copy of a model with kernels in it."""
    model = copy.deepcopy(model)
    replace_modules(model, MLP, Precision(precision, model.lm_head.weight.device), fp8)
    return model


# ----------------------------------------------------------------------------- the loss of the head


def problem(dtype=torch.float32, padded=PADDED, device="cpu"):
    """x, weight with padding rows that would change the result, and targets of which some are ignored."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, C, generator=g).to(dtype).float()
    weight = (torch.randn(padded, C, generator=g) * 0.5).to(dtype).float()
    targets = torch.randint(V, (N,), generator=g)
    targets[[0, 9, 10, 36]] = -1
    targets[16:24] = -1  # a whole chunk without a target
    return x.to(device), weight.to(device), targets.to(device)


def expected(x, weight, targets, reduction="sum"):
    logits = (x @ weight.T)[:, :V]
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)


def fused(x, weight, targets, reduction="sum"):
    return FusedHeadLoss(HeadLoss(V))(x, weight, targets, reduction)


def with_gradients(loss_of, x, weight, targets, factor=0.37, dtype=torch.float32):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype, dtype != torch.float32):
        loss = loss_of(x, weight, targets)
    (loss * factor).sum().backward()
    return loss.detach(), x.grad, weight.grad


def agree(ours, theirs, bound):
    pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True)]
    return all((a - b).abs().max() <= bound * b.abs().max().clamp(min=1) for a, b in pairs)


# on a CPU, on a GPU
BOUNDS = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (2e-2, 3e-2), torch.float16: (2e-3, 3e-3)}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu, reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("padded", [PADDED, V])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_fused_loss_and_gradients_equal_the_plain_ones(dtype, padded, device):
    bound = BOUNDS[dtype][device == "cuda"]
    x, weight, targets = problem(dtype, padded, device)
    for reduction in ("sum", "none"):
        ours = with_gradients(lambda *a: fused(*a, reduction), x, weight, targets, dtype=dtype)  # noqa: B023
        theirs = with_gradients(lambda *a: expected(*a, reduction), x, weight, targets)  # noqa: B023
        assert agree(ours, theirs, bound) and {t.dtype for t in ours} == {torch.float32}
        if device == "cpu":  # on a GPU, float32 may be TF32, as imprecise as 16 bits
            assert agree(ours, theirs, 1e-5) == (dtype == torch.float32), "computed in this dtype"
        assert not ours[1][targets == -1].any() and not ours[2][V:].any()


def test_fp16_keeps_gradients_below_its_smallest_number():
    """That number is 6e-8, and most of a softmax over 50,000 ids is near it. Without the loss scale,
    rounding changes this result by 7 %."""
    x, weight, targets = torch.zeros(8, C), torch.zeros(60_000, C), torch.zeros(8).long()
    x[:, 1], weight[0, 1] = 1.0, 16.0
    head = FusedHeadLoss(HeadLoss(60_000))
    ours = with_gradients(lambda *a: head(*a, "sum"), x, weight, targets, 1.0, torch.float16)
    right = 8 / (math.exp(16) + 59_999)
    assert ours[2][1:, 1].mean().item() == pytest.approx(right, rel=0.01)


def test_fused_loss_is_a_valid_operator_and_compiles_to_one_graph():
    x, weight, targets = problem()
    inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_(), targets, V)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cross_entropy.fused_loss, inputs, test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    ours = with_gradients(compiled, x, weight, targets)
    assert agree(ours, with_gradients(expected, x, weight, targets), 1e-5)


# ------------------------------------------------------------------------------------------- 8 bits


def test_scaling_to_8_bits_and_back_has_no_bias():
    """If the scale were rounded in only one direction, all numbers would share an error of up to 0.0033
    of their size. (Rounding to nearest alone gives up to 0.002, because in a normal distribution more
    numbers lie below the value that they are rounded to than above it.)"""
    for seed in range(20):
        x = torch.randn(2**18, generator=torch.Generator().manual_seed(seed)).bfloat16()
        q, scale = cross_entropy.to_e4m3(x)
        slope = ((q.double() * scale) @ x.double() / (x.double() @ x.double())).item()
        assert abs(slope - 1) < 0.0025
        top = x.abs().argmax()
        largest = pytest.approx(x[top].float().item(), rel=0.01)
        assert q[top].float() * scale == largest, "not saturated"


tanh_gelu = partial(F.gelu, approximate="tanh")


def error(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@on_gpu(eight_bits=True)
@pytest.mark.parametrize("n", [16, 16 * 75])  # one chunk; several, with tiles over both edges
def test_fp8_head_gradients_have_a_few_percent_of_random_error(n, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 512)
    # Triton 3.7 wrote some transposed 8-bit numbers in wrong places
    logits = torch.arange(128 * 192, device="cuda").sin().view(128, 192).bfloat16()
    first = torch.arange(128, device="cuda")
    _, grad, grad_t = cross_entropy.triton_loss_and_grad_e5m2(logits, first, 192)
    assert torch.equal(grad.float().t(), grad_t.float())
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(n, 64, generator=g).bfloat16(), torch.randn(400, 64, generator=g) * 0.3
    targets = torch.randint(390, (n,), generator=g)
    targets[::5] = -1
    data = x.cuda(), weight.cuda(), targets.cuda()
    ours = with_gradients(lambda *a: FusedHeadLoss(HeadLoss(390), fp8=True)(*a, "sum"), *data)
    theirs = with_gradients(lambda x, w, t: HeadLoss(390)(x.float(), w, t, "sum"), *data)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=0.01)
    for a, b in zip(ours[1:], theirs[1:]):
        a, b = a.float(), b.float()
        assert 1e-3 < error(a, b) < 0.06
        length = ((a * b).sum() / (b * b).sum()).item()
        assert length == pytest.approx(1, abs=0.01), "no bias"
    assert not ours[1][data[2] == -1].any() and not ours[2][390:].any()


@on_gpu(eight_bits=True)
@pytest.mark.parametrize("mode", ["plain", "gelu", "dgelu", "relu2", "drelu2"])
@pytest.mark.parametrize("shape", [(96, 48), (768, 3072), (4096, 1600)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_rounds_saturates_and_transposes(mode, shape, dtype):
    x = (3 * torch.randn(shape, device="cuda")).to(dtype)
    x[0, :2] = torch.tensor([1e4, -1e4])
    before = torch.randn(shape, device="cuda").to(dtype)
    scale = torch.tensor(0.25, device="cuda")
    for form in (fp8_mlp.E4M3, fp8_mlp.E5M2):
        q, q_t, sums = fp8_mlp.quantize(x, scale, form, mode, before)
        z = before.double().requires_grad_()
        function = (lambda x: F.relu(x).square()) if "relu2" in mode else tanh_gelu
        exact = x.double() if mode == "plain" else function(x.double())
        if mode.startswith("d"):
            (exact,) = torch.autograd.grad(function(z), z, x.double())
        if mode == "dgelu":
            assert error(sums.sum(0), exact.sum(0)) < 1e-3
        numbers = torch.finfo(form)  # eps: gap after 1; rounding errors are at most half of it
        limit = numbers.max * 0.25
        allowed = 0.505 * (exact.abs() * numbers.eps + 0.25 * numbers.smallest_normal * numbers.eps)
        assert ((q.double() * 0.25 - exact.clamp(-limit, limit)).abs() <= allowed).all()
        assert torch.equal(q.float().t(), q_t.float())


@on_gpu(eight_bits=True)
@pytest.mark.parametrize("size", [1e-9, 1.0])  # the scale of gradients follows them
# with 8, squared ReLU reaches about 1,000, as in training
@pytest.mark.parametrize("function, spread", [("gelu", 1), ("relu2", 8)])
def test_fp8_mlp_gradients_have_only_rounding_error(size, function, spread):
    shapes = (384, 96), (384,), (96, 384), (96,)
    x = (spread * torch.randn(512, 96, device="cuda")).bfloat16()
    weights = [0.1 * torch.randn(shape, device="cuda") for shape in shapes]
    weights = weights[::2] if function == "relu2" else weights  # no biases
    dy = (size * torch.randn(512, 96, device="cuda")).bfloat16()
    inputs = [t.double().requires_grad_() for t in (x, *weights)]
    y = MLP_FUNCTIONS[function](*inputs)
    wanted = [y, *torch.autograd.grad(y, inputs, dy.double())]
    inputs = [t.clone().requires_grad_() for t in (x, *weights)]
    y = fp8_mlp.Fp8MLP(SimpleNamespace(c_fc=None, c_proj=None), function).products(*inputs)
    found = [y, *torch.autograd.grad(y, inputs, dy)]
    if function == "gelu":
        assert error(found.pop(), wanted.pop()) < 1e-3  # db_proj, a sum of the unrounded dy
    for a, b in zip(found, wanted, strict=True):
        assert 0.01 < error(a, b) < 0.12  # 16 bits would be below 0.01


# ---------------------------------------------------------------------------------------- fused MLP


def on_the_gpu():
    """A model without zero weights, and tokens: 96 positions, not a power of two."""
    model = noisy(GPTConfig(**TINY_MODEL | dict(n_head=4, n_embd=64))).cuda()
    return model, torch.randint(VOCAB, (3, 32), device="cuda")


@on_gpu()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("fp8", ["off", "all"])
def test_fused_model_has_the_gradients_of_the_plain_model(
    compiled, checkpointing, fp8, monkeypatch
):
    """In bf16 the errors against float32 are those of the plain model; with an 8-bit MLP they are
    larger."""
    if fp8 == "all" and not has_fp8:
        pytest.skip("needs a GPU with 8-bit matmuls")
    monkeypatch.setattr(cross_entropy, "CHUNK", 64)  # 96 positions: a whole chunk and a part
    exact, idx = on_the_gpu()
    models = dict(exact=exact, plain=copy.deepcopy(exact), fused=put_in(exact, "bf16", fp8))
    found = {}
    for name, model in models.items():
        model.config.activation_checkpointing = checkpointing
        run = torch.compile(model, dynamic=False) if compiled and name == "fused" else model
        with torch.autocast("cuda", torch.bfloat16, name != "exact"):
            loss = run(idx, idx)[1]
        loss.backward()
        found[name] = {n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()}
    wanted = fp8_mlp.Fp8MLP if fp8 == "all" else FusedMLP
    assert type(models["fused"].transformer.h[0].mlp) is wanted
    for name, reference in found["exact"].items():
        plain, ours = (error(found[model][name], reference) for model in ("plain", "fused"))
        assert ours < max(1.5 * plain, 5e-3) if fp8 == "off" else ours < 0.25, name
    name = "transformer.h.0.mlp.c_fc.weight"
    assert (error(found["fused"][name], found["plain"][name]) > 0.02) == (fp8 == "all")


@on_gpu()
def test_mlp_kernel_needs_bf16_gradients_and_enough_positions(monkeypatch):
    model, idx = on_the_gpu()
    mlp, x = FusedMLP(model.transformer.h[0].mlp), torch.randn(2, 16, 64, device="cuda")
    monkeypatch.setattr(FusedMLP, "products", lambda *_: pytest.fail("fused"))
    assert mlp(x).dtype == torch.float32
    with torch.autocast("cuda", torch.float16):
        assert mlp(x).dtype == torch.float16
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            assert torch.equal(mlp(x), model.transformer.h[0].mlp(x))
        with pytest.raises(pytest.fail.Exception):
            mlp(x)
        monkeypatch.setattr(fused_mlp, "MIN_POSITIONS", 33)
        assert torch.equal(mlp(x), model.transformer.h[0].mlp(x))


@on_gpu()
def test_bias_far_below_the_rounding_has_its_exact_effect():
    """Added after rounding, it would vanish, or decide ties in the addition to the residual stream."""
    mlp = MLP(GPTConfig(1, 2, 128, 16, vocab_size=50)).cuda()
    with torch.no_grad():
        mlp.c_fc.weight.normal_(std=0.1)
        mlp.c_proj.weight.normal_(std=0.02)
    mlp = FusedMLP(mlp)
    stream = (0.05 * torch.randn(65536, 128, device="cuda")).bfloat16()
    add = torch.compile(lambda x: x + mlp(F.layer_norm(x, (128,))), dynamic=False)

    def mean(bias):
        with torch.no_grad():
            mlp.c_proj.bias.fill_(bias)
        with torch.autocast("cuda", torch.bfloat16):
            return add(stream).double().mean().item()

    assert (mean(3e-6) - mean(-3e-6)) / 6e-6 == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("capability, precision, triton", [
    ((7, 0), "fp16", False), ((7, 5), "fp16", False), ((8, 0), "bf16", True), ((6, 1), "fp32", False)
])  # fmt: skip
def test_older_gpus_take_fp16_and_none_of_our_triton_kernels(
    monkeypatch, capability, precision, triton
):
    """V100 (7.0) and T4 (7.5) have no bf16, and Triton supports 8.0 and newer. No such GPU is needed: only
    what torch and Python report is replaced."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    bf16 = lambda including_emulation=True: including_emulation or capability >= (8, 0)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", bf16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    device = torch.device("cuda")
    assert Precision("auto", device).name == precision
    assert can_run_triton(device) == triton
