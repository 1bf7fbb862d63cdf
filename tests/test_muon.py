"""Muon and NorMuon: Newton-Schulz, one step by the formula, two ranks. See lab/optim/muon.py."""

import math

import pytest
import torch
from conftest import ROOT, run_python, run_two

import train_gpt2
from lab.optim.muon import Muon, newton_schulz


def test_newton_schulz_moves_singular_values_near_1():
    """Singular values above 0.0015 of the norm become about 1; singular vectors do not change."""
    u, v = (torch.linalg.qr(torch.randn(n, 40, dtype=torch.float64))[0] for n in (60, 40))
    s = torch.logspace(math.log10(0.0031), 0, 40, dtype=torch.float64)
    s /= s.norm()
    assert 0.0015 < s.min() < 0.0017
    g = u @ (7 * s).diag() @ v.T
    wide, tall = (newton_schulz(x) for x in (g.T, g))
    values = u.T @ tall @ v
    assert 0.65 < values.diagonal().min() and values.diagonal().max() < 1.21
    assert (values - values.diagonal().diag()).abs().max() < 1e-6
    assert (wide - tall.T).abs().max() < 1e-9


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_step_equals_torchs(monkeypatch, shape, dtype):
    """torch's computes Newton-Schulz in bf16 everywhere, ours on a CPU in float32; patched to float32,
    torch's gives the same step."""
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda grad: grad.clone())
    a, b = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    how = dict(lr=0.1, momentum=0.9, weight_decay=0.1)
    ours, theirs = Muon([a], **how), torch.optim.Muon([b], **how)
    for _ in range(3):
        a.grad = torch.randn(shape)
        b.grad, before = a.grad.clone(), a.detach().clone()
        b.data.copy_(before)
        ours.step(), theirs.step()
        moved = (a - before).norm()
        assert (a - b).norm() < (0.03 if dtype == torch.bfloat16 else 1e-5) * moved
        assert moved > 0.3


def plain_step(p, grad, momentum, rows, equilibrate, lr=0.1, beta=0.9, decay=0.2):
    """NorMuon for one matrix by its formula, row by row."""
    momentum.mul_(beta).add_(grad, alpha=1 - beta)
    ahead = grad * (1 - beta) + momentum * beta
    for row in ahead if equilibrate else ():
        row /= max(row.square().sum().sqrt(), 1e-12)
    o = newton_schulz(ahead)
    new = torch.empty_like(o)
    for i in range(len(o)):
        rows[i] = 0.95 * rows[i] + 0.05 * o[i].square().mean()
        new[i] = o[i] / (rows[i].sqrt() + 1e-10)
    new *= o.norm() / new.norm()
    p -= lr * decay * p
    p -= lr * max(1, p.size(0) / p.size(1)) ** 0.5 * new


SHAPES = [(3, 8, 8), (8, 8), (24, 8), (8, 8), (8, 24)]
HOW = dict(lr=0.1, momentum=0.9, weight_decay=0.2, beta2=0.95)


def stacked(params):
    return [m.clone() for p in params for m in p.detach().view(-1, *p.shape[-2:])]


@pytest.mark.parametrize("equilibrate", [False, True])
def test_batched_muon_step_equals_one_matrix_at_a_time(equilibrate):
    """Also with a row of zeros: the gradient of a neuron that is never active."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    muon = Muon(params, **HOW, equilibrate_rows=equilibrate)
    plain = stacked(params)
    momenta, rows = [torch.zeros_like(m) for m in plain], [torch.zeros(len(m)) for m in plain]
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p) * torch.logspace(-2, 0, p.size(-2))[:, None]
            p.grad[..., 1, :] = 0
        for args in zip(plain, stacked([p.grad for p in params]), momenta, rows):
            plain_step(*args, equilibrate)
        muon.step()
    assert max((a - b).abs().max() for a, b in zip(plain, stacked(params))) < 1e-5


def test_a_parameter_of_three_matrices_moves_as_three_parameters():
    fused = torch.nn.Parameter(torch.randn(24, 8))
    fused.num_matrices = 3
    apart = [torch.nn.Parameter(part.clone()) for part in fused.detach().chunk(3)]
    one, three = Muon([fused], lr=0.1, weight_decay=0.1), Muon(apart, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        fused.grad = torch.randn_like(fused)
        for p, grad in zip(apart, fused.grad.chunk(3)):
            p.grad = grad
        one.step()
        three.step()
    assert (fused - torch.cat(apart)).abs().max() < 1e-6
    block = train_gpt2.Block(train_gpt2.GPTConfig(1, 2, 8, 8, vocab_size=257), layer=0)
    counts = [getattr(p, "num_matrices", 1) for p in block.parameters() if p.dim() == 2]
    assert counts == [3, 1, 1, 1], "c_attn holds q, k and v"
    loaded = train_gpt2.GPT.from_pretrained(str(ROOT / "examples/laptop_model"))
    assert loaded.blocks[0].attn.c_attn.weight.num_matrices == 3


TWO = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist
from lab.optim.muon import Muon
from lab.distributed import World
world = World("cpu")
if world.distributed:
    dist.init_process_group("gloo")
torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(shape)) for shape in {SHAPES + [(8, 8)]}]
muon = Muon(params, world=world, lr=0.1, beta2=0.95)
for _ in range(3):
    for p in params:
        p.grad = torch.randn_like(p)
    muon.step()
torch.save([p.detach() for p in params], f"{{sys.argv[1]}}_{{world.rank}}.pt")
"""


def test_muon_step_divided_over_two_ranks_equals_one(tmp_path):
    """Each rank orthogonalizes half of the matrices; seven of one shape do not divide evenly."""
    script = tmp_path / "two.py"
    script.write_text(TWO)
    run_two(script, "two", cwd=tmp_path)
    assert run_python(script, "one", cwd=tmp_path).returncode == 0
    names = ("one_0", "two_0", "two_1")
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in names)
    assert max((a - b).abs().max() for a, b in zip(one, first)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(first, second))
