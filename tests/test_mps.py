"""Apple GPUs: what is computed there must agree with the CPU.

PyTorch on MPS has returned wrong results without an error, for example of a Linear on an input that is
not contiguous (pytorch/pytorch#162730). The tests at the end run where MPS exists, with the model's
shapes and strides. The others run everywhere, on an emulated MPS: tensors that say they are there, are
computed on the CPU, and refuse what real ones refuse or compute wrongly (the list in docs/SYSTEMS.md).
"""

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODEL, train_here
from test_model import noisy, tokens
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_map_only

import lab.distributed
from lab.cli import UserError
from lab.distributed import World
from lab.eval.multiple_choice import continuation_losses
from lab.hardware import check_mps_sums
from lab.inference.generate import generate, sample_token
from lab.kernels.cross_entropy import fused_loss
from lab.precision import Precision
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


# ------------------------------------------------------------------------------------ emulated MPS

MPS = torch.device("mps", 0)  # without an index, torch would look for the real device
aten = torch.ops.aten
# matmuls: position of the first factor, whose last dimension is summed over
FACTORS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class Refused(Exception):
    """Something that MPS refuses or computes wrongly."""


class MpsTensor(torch.Tensor):
    """A tensor that says it is on MPS. Its numbers are in on_cpu."""

    device = property(lambda self: MPS)  # PyTorch itself takes it for one on the CPU

    @staticmethod
    def __new__(cls, on_cpu):
        layout = dict(strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset())
        return cls._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, **layout)

    def __init__(self, on_cpu):
        if on_cpu.dtype == torch.float64:
            raise Refused("float64")
        self.on_cpu = on_cpu

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return emulate(op, args, kwargs or {})

    def to(self, *args, **kwargs):
        places = [kwargs.get("device"), *(a for a in args if isinstance(a, str | torch.device))]
        if any(place and torch.device(place).type == "cpu" for place in places):
            return self.on_cpu.detach().clone().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def cpu(self):
        return self.to("cpu")

    def tolist(self):
        return self.on_cpu.tolist()

    def data_ptr(self):  # checkpoints save tensors that share memory once
        return self.on_cpu.data_ptr()

    def numpy(self):
        raise Refused("numpy() of a tensor that is not on the CPU")


def emulate(op, args, kwargs):
    """Run an operator on the CPU. Its results are on MPS if its arguments say so."""
    if op.namespace == "gpt2":  # our own operator: what it calls is emulated
        with Emulation():
            return fused_loss._init_fn(*args, **kwargs)
    tensors = [t for t in arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, MpsTensor)]
    to, into_mps = kwargs.get("device"), bool(there)
    if to is not None:
        into_mps, kwargs = to.type == "mps", kwargs | {"device": torch.device("cpu")}
    elif op is aten.copy_.default:
        into_mps = isinstance(args[0], MpsTensor)
    refuse(op, args, kwargs, tensors, there, into_mps)
    args, kwargs = tree_map_only(MpsTensor, lambda t: t.on_cpu, (args, kwargs))
    results = op(*args, **kwargs)
    if not into_mps:
        return args[0] if op is aten.copy_.default else results
    wrappers = {id(t.on_cpu): t for t in there}  # in-place operators return their argument
    wrap = lambda t: wrappers[id(t)] if id(t) in wrappers else MpsTensor(t)  # noqa: E731
    return tree_map_only(torch.Tensor, wrap, results)


def refuse(op, args, kwargs, tensors, there, into_mps):
    """Raise Refused for an operator that would be wrong on MPS."""
    if into_mps and len(there) < len(tensors) or there and not into_mps:  # a copy
        if kwargs.get("non_blocking") or (op is aten.copy_.default and True in args[2:]):
            raise Refused("a copy that does not wait: pytorch/pytorch#189690")
    if not there:
        return
    packet = op.overloadpacket
    if packet in FACTORS and args[FACTORS[packet]].size(-1) >= 32767:
        raise Refused("a sum of 32,767 terms: pytorch/pytorch#195163")
    if packet in FACTORS and "out" in kwargs:
        out = kwargs["out"].on_cpu
        if out.numel() * out.element_size() != out.untyped_storage().nbytes():
            raise Refused("an out that is a slice: pytorch/pytorch#193385")
    if packet is aten.multinomial:
        raise Refused("multinomial: pytorch/pytorch#192577")
    if packet in (aten.sort, aten.argsort) and not args[0].is_contiguous():
        raise Refused("sort of a tensor that is not contiguous: pytorch/pytorch#175187")


class FunctionMode(TorchFunctionMode):
    """torch.tensor does not pass its device through the dispatcher."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.tensor and kwargs.get("device"):
            return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        return function(*args, **kwargs)


class Emulation(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return emulate(op, args, kwargs or {})


@pytest.fixture
def emulated(monkeypatch):
    """Context manager: device "mps" is emulated."""

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls)

    def swap_tensors(
        p, new, swap=torch.utils.swap_tensors
    ):  # keeps attributes, as num_matrices for Muon
        attributes = dict(vars(p))
        swap(p, new)
        vars(p).update(attributes)

    @contextlib.contextmanager
    def emulation():
        torch.__future__.set_swap_module_params_on_conversion(True)  # keeps tied weights tied
        with monkeypatch.context() as patch, FunctionMode(), Emulation():
            patch.setattr(torch.utils, "swap_tensors", swap_tensors)
            patch.setattr(lab.distributed, "resolve_device", lambda *_: MPS)
            patch.setattr(torch.mps, "synchronize", lambda: None)
            patch.setattr(torch, "Generator", Generator)
            yield
        torch.__future__.set_swap_module_params_on_conversion(False)

    return emulation


WRONG = {
    "float64": lambda x: x.double(),
    "a copy that": lambda x: torch.ones(3).to(MPS, non_blocking=True),
    "a copy": lambda x: torch.ones(3, 4).copy_(x, non_blocking=True),
    "a sum": lambda x: torch.ones(2, 40000, device=MPS) @ torch.ones(40000, 2, device=MPS),
    "an out": lambda x: torch.mm(x, x.t(), out=torch.zeros(6, 3, device=MPS)[:3]),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "sort": lambda x: x.t().sort(),
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_emulation_refuses(what, emulated):
    with emulated():
        x = torch.arange(12.0).view(3, 4).to(MPS)
        assert x.device == MPS and (x + 1).device == MPS and x.sum().item() == 66
        with pytest.raises(Refused, match=what):
            WRONG[what](x)


@pytest.mark.parametrize("document_mask", [False, True])
def test_training_on_mps_avoids_its_faults(tmp_path, shards, emulated, document_mask):
    """Updates, validation, samples, snapshots for --on_spike and checkpoints: nothing is refused, and the
    losses are the CPU's. The samples differ, because tokens are drawn in another way."""
    model = dict(document_mask=document_mask)
    settings = dict(optimizer="muon", max_steps=3, val_every=2, sample_every=3, on_spike="stop")
    with emulated():
        found = train_here(tmp_path, shards, "mps", model, device="mps", **settings)
    exact = train_here(tmp_path, shards, "cpu", model, **settings)
    assert found.losses == pytest.approx(exact.losses, rel=1e-6)
    assert found.norms == pytest.approx(exact.norms, rel=1e-5)
    assert found.val == pytest.approx(exact.val, rel=1e-6)
    for name, p in exact.checkpoints[3]["model"].items():
        q = found.checkpoints[3]["model"][name]
        assert type(q) is torch.Tensor and torch.allclose(p, q, atol=1e-6), name


def test_the_fused_loss_writes_no_slices_on_mps(emulated, monkeypatch):
    monkeypatch.setattr("lab.kernels.cross_entropy.CHUNK", 16)
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=draw) for n in (40, 11))
    targets = torch.randint(10, (40,), generator=draw)
    exact = fused_loss(x, weight, targets, 10)
    with emulated():
        found = fused_loss(x.to(MPS), weight.to(MPS), targets.to(MPS), 10)
        for a, b in zip(exact, found, strict=True):
            assert torch.allclose(a, b.cpu(), atol=1e-6)


def test_scores_and_texts_on_mps(emulated):
    """Scores of continuations, as for HellaSwag, equal the CPU's. Texts are generated with each option."""
    model = noisy(GPTConfig(**TINY_MODEL))
    items = [[[1, 2, 3], [4, 5], [6]], [[7], [8, 9], [1, 2, 3]], [[5] * 9, [6, 7], [8] * 5]]
    exact = continuation_losses(model, items, World("cpu"))
    with emulated():
        model.to(MPS)
        assert np.allclose(continuation_losses(model, items, World("mps")), exact, atol=1e-5)
        generator = torch.Generator(device=MPS).manual_seed(0)
        for options in (dict(), dict(top_k=5), dict(top_p=0.5), dict(temperature=0)):
            idx = torch.tensor([[1, 2]], device=MPS)
            made = [int(t) for t, _ in generate(model, idx, 40, generator=generator, **options)]
            assert len(made) == 40 and max(made) < 257


def test_tokens_are_drawn_on_mps_with_the_models_probabilities(emulated):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -200.0]])
    probs, count = logits.softmax(-1)[0], 40_000
    with emulated():
        generator = torch.Generator(device=MPS).manual_seed(0)
        drawn = sample_token(logits.to(MPS).expand(count, -1), generator=generator).cpu()
    share = drawn.bincount(minlength=5) / count
    assert share[4] == 0
    assert ((share - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt() + 1e-9).all()


def test_sums_that_are_wrong_on_mps_are_refused(monkeypatch, emulated, tmp_path, shards):
    for version, wrong in (("2.13.0", (32767, 32768, 50304)), ("2.14.1", (32767, 32768))):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        for terms in (257, 32766, 32767, 32768, 50304):
            check_mps_sums(torch.device("cpu"), terms, terms)
            for sizes, fix in (
                ((terms, 0), "--device cpu"),
                ((257, terms), "smaller --batch_size"),
            ):
                refused = pytest.raises(UserError, match=fix)
                with refused if terms in wrong else contextlib.nullcontext():
                    check_mps_sums(MPS, *sizes)
    sizes = dict(batch_size=2048, seq_len=16, total_batch_size=32768)
    with emulated(), pytest.raises(UserError, match="32,768 terms .the tokens .* pass a smaller"):
        train_here(tmp_path, shards, "r", device="mps", **sizes)


def test_16_bits_on_mps_need_torch_2_14(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert Precision("auto", MPS).name == Precision("tf32", MPS).name == "fp32"
    for name in ("bf16", "fp16"):
        with pytest.raises(UserError, match=f"{name} on MPS needs torch 2.14"):
            Precision(name, MPS)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert Precision("bf16", MPS).dtype == torch.bfloat16


def test_mps_is_refused_under_torchrun(monkeypatch):
    monkeypatch.setattr(lab.distributed, "resolve_device", lambda *_: MPS)
    torchrun = dict(RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="one process only; pass --device cpu"):
        World("mps")


# ------------------------------------------------------------------------------------------ real MPS


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
