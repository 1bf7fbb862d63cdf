"""Every way to compute the head's loss gives F.cross_entropy's loss and gradients."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from lab.kernels import cross_entropy
from lab.kernels.cross_entropy import linear_cross_entropy, to_e4m3

N, C, V, PADDED = 37, 24, 50, 64  # 37 positions in chunks of 8: the last one is not full

needs_torch = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason=f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)"
)
METHODS = ["plain", "chunked", pytest.param("torch", marks=needs_torch), "auto"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 8)


def problem(dtype=torch.float32, padded=PADDED):
    """x, weight with pad rows that would matter if they were not cut, and targets with gaps."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, C, generator=g).to(dtype)
    weight = torch.randn(padded, C, generator=g) * 0.5
    targets = torch.randint(V, (N,), generator=g)
    targets[[0, 9, 10, 36]] = -1
    targets[16:24] = -1  # a whole chunk without a target
    return x, weight, targets


def expected(x, weight, targets, reduction="sum"):
    return F.cross_entropy((x.float() @ weight.float().T)[:, :V], targets, ignore_index=-1, reduction=reduction)


def with_gradients(loss_of, x, weight, targets, factor=1.0):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(x, weight, targets)
    (loss * factor).sum().backward()
    return loss.detach(), x.grad, weight.grad


def agree(ours, theirs, bound):
    return all((a.float() - b.float()).abs().max() <= bound * b.float().abs().max().clamp(min=1) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("padded", [PADDED, V])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients(method, dtype, bound, padded):
    x, weight, targets = problem(dtype, padded)
    weight = weight.to(dtype).float()  # so that rounding the weights is not part of the difference
    ours = with_gradients(lambda *a: linear_cross_entropy(*a, V, method), x, weight, targets, factor=0.37)
    theirs = with_gradients(expected, x, weight, targets, factor=0.37)
    assert agree(ours, theirs, bound)
    assert ours[1].dtype == dtype and ours[2].dtype == torch.float32
    assert (ours[1][targets == -1] == 0).all() and (ours[2][V:] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_the_sum_of_a_bf16_problem_has_more_than_three_digits(method):
    x, weight, targets = problem(torch.bfloat16)
    weight = weight.bfloat16().float()
    x, targets = x.repeat(50, 1), targets.repeat(50)  # thousands of positions, as in a real step
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, V, method)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected(x, weight, targets).item(), rel=5e-4)


@pytest.mark.parametrize("method", METHODS)
def test_loss_of_each_position(method):
    problem_ = problem()
    ours = with_gradients(lambda *a: linear_cross_entropy(*a, V, method, reduction="none"), *problem_)
    assert ours[0].shape == (N,)
    assert agree(ours, with_gradients(lambda *a: expected(*a, reduction="none"), *problem_), 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_without_gradients_the_loss_is_the_same(method):
    with torch.no_grad():
        assert agree([linear_cross_entropy(*problem(), V, method)], [expected(*problem())], 1e-5)


def test_auto_keeps_small_logits_and_spares_large_ones(monkeypatch):
    x, weight, targets = problem()
    assert cross_entropy.auto_method(x, weight) == "plain"
    large = torch.empty(2**16, 1, device="meta"), torch.empty(50304, 1, device="meta")
    assert cross_entropy.auto_method(*large) in ("torch", "chunked")
    for method in ("torch", "chunked") if hasattr(F, "linear_cross_entropy") else ("chunked",):
        monkeypatch.setattr(cross_entropy, "auto_method", lambda *_, method=method: method)
        ours = with_gradients(lambda *a: linear_cross_entropy(*a, V), x, weight, targets)
        assert agree(ours, with_gradients(expected, x, weight, targets), 1e-5)


def test_autocast_takes_the_products_in_bf16():
    with torch.autocast("cpu", torch.bfloat16):
        ours = [with_gradients(lambda *a, m=m: linear_cross_entropy(*a, V, m), *problem()) for m in ("plain", "chunked")]
    theirs = with_gradients(expected, *problem())
    for values in ours:
        assert agree(values, theirs, 2e-2) and not agree(values, theirs, 1e-5)
        assert values[1].dtype == torch.float32


def test_inside_a_compiled_function():
    """The graph has to stay whole (fullgraph), the operator's own gradient has to be used."""
    for method in ("plain", "chunked", "auto"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *a, m=method: linear_cross_entropy(*a, V, m), fullgraph=True, backend="aot_eager")
        ours = with_gradients(compiled, *problem(), factor=0.37)
        assert agree(ours, with_gradients(expected, *problem(), factor=0.37), 1e-5), method


def test_the_operator_keeps_torchs_rules():
    x, weight, targets = problem()
    inputs = (x.requires_grad_(), weight.requires_grad_(), targets, V)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(cross_entropy.fused_loss, inputs, test_utils=checks)


def test_scaling_to_8_bits_and_back_has_no_bias():
    """A factor that is rounded on the way there and not on the way back is an error common to all numbers, here up to 0.0033
    of them. (Rounding to nearest leaves up to 0.002 by itself: of a bell, more lies below than above what it is rounded to.)"""
    for seed in range(20):
        x = torch.randn(2**18, generator=torch.Generator().manual_seed(seed)).bfloat16()
        q, scale = to_e4m3(x)
        assert q.float().abs().max() <= 448
        slope = ((q.double() * scale) @ x.double() / (x.double() @ x.double())).item()
        assert abs(slope - 1) < 0.0025


def test_wrong_variants_are_caught():
    """The comparison above has to see pad columns that are not cut, targets of -1 that count, and a lost last chunk."""
    x, weight, targets = problem()
    right = with_gradients(expected, x, weight, targets)

    def unmasked(x, weight, targets):
        return F.cross_entropy(x @ weight.T, targets, ignore_index=-1, reduction="sum")

    def counts_gaps(x, weight, targets):
        return F.cross_entropy((x @ weight.T)[:, :V], targets.clamp(min=0), reduction="sum")

    def loses_the_tail(x, weight, targets):
        return expected(x[:32], weight, targets[:32])

    for wrong in (unmasked, counts_gaps, loses_the_tail):
        assert not agree(with_gradients(wrong, x, weight, targets), right, 1e-3), wrong.__name__


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentence for machines without a GPU")
def test_liger_where_it_is_not_installed_is_one_sentence():
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        x, weight, targets = problem()
        linear_cross_entropy(x.requires_grad_(), weight, targets, V, "liger")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["chunked", "torch", "liger", "auto"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_on_a_gpu(method, dtype, bound):
    if method == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has no linear_cross_entropy before 2.13")
    if method == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    x, weight, targets = (t.cuda() for t in problem(dtype))
    ours = with_gradients(lambda *a: linear_cross_entropy(*a, V, method), x, weight, targets, factor=0.37)
    assert agree(ours, with_gradients(expected, x, weight, targets, factor=0.37), bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("n", [16, 16 * 75])  # one chunk; several, the last not full, and tiles over both edges
def test_8_bit_products_are_off_by_a_few_percent_at_random_and_no_more(n, monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit products")
    monkeypatch.setattr(cross_entropy, "CHUNK", 512)
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(n, 64, generator=g).bfloat16().cuda(), torch.randn(400, 64, generator=g).cuda() * 0.3
    targets = torch.randint(390, (n,), generator=g).cuda()
    targets[::5] = -1
    ours = with_gradients(lambda *a: linear_cross_entropy(*a, 390, "fp8"), x, weight, targets, factor=0.37)
    theirs = with_gradients(lambda x, w, t: F.cross_entropy((x.float() @ w.T)[:, :390], t, ignore_index=-1, reduction="sum"),
                            x, weight, targets, factor=0.37)  # fmt: skip
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=0.01)
    for a, b in zip(ours[1:], theirs[1:]):
        a, b = a.float(), b.float()
        assert 1e-3 < ((a - b).norm() / b.norm()).item() < 0.06
        assert ((a * b).sum() / (b * b).sum()).item() == pytest.approx(1, abs=0.01), "rounding must not shrink the gradient"
    assert (ours[1][targets == -1] == 0).all() and (ours[2][390:] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_both_copies_of_an_8_bit_gradient_agree():
    assert cross_entropy.gradient_is_transposed(torch.device("cuda"))
