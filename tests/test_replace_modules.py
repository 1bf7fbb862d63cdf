"""replace_modules: a module is replaced if the faster one computes the same, and an edited module is kept."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODEL
from test_kernels import put_in, small  # noqa: F401
from test_model import noisy, tokens

import lab.kernels
import speedrun
import train_gpt2
from lab.cli import UserError
from lab.distributed import World
from lab.kernels import MLP_FUNCTIONS, cross_entropy, fp8_mlp, fused_mlp, replace_modules
from lab.kernels.cross_entropy import FusedHeadLoss
from lab.kernels.fused_mlp import FusedMLP
from lab.precision import Precision
from train_gpt2 import GPT, MLP, GPTConfig, HeadLoss, TrainConfig

CPU = torch.device("cpu")


def gelu_kernel(x, w_fc, b_fc, w_proj, b_proj):
    """What mlp_products computes on a GPU."""
    before = F.linear(x, w_fc, b_fc)
    after = F.gelu(before, approximate="tanh")
    return F.linear(after, w_proj, b_proj), after, before


@pytest.fixture
def fused_mlp_everywhere(monkeypatch):
    """replace_modules uses FusedMLP on a CPU too, with a stand-in for its kernel."""
    monkeypatch.setattr(lab.kernels, "is_supported", lambda _: True)
    monkeypatch.setattr(fused_mlp, "mlp_products", gelu_kernel)


def replace_in(model, precision="bf16", fp8="off"):
    """Call replace_modules for a model on a CPU. Returns what it reports."""
    reports = []
    replace_modules(model, MLP, Precision(precision, CPU), fp8, reports.append)
    return reports


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replacing_keeps_parameters_and_random_state(tiny_config, fused_mlp_everywhere, precision):
    """The state of AdamW depends on the order of parameters, checkpoints on their names. A subclass that
    computes the same is replaced too."""
    model = GPT(tiny_config)
    model.head_loss = type("Copy", (HeadLoss,), {})(tiny_config.vocab_size)
    rng = torch.get_rng_state()

    def names():
        return list(model.state_dict()), [(n, id(p)) for n, p in model.named_parameters()]

    before, values = names(), [p.clone() for p in model.parameters()]
    assert replace_in(model, precision) == []
    assert torch.equal(rng, torch.get_rng_state()) and names() == before
    assert all(map(torch.equal, model.parameters(), values))
    assert type(model.head_loss) is FusedHeadLoss
    assert {type(b.mlp) for b in model.transformer.h} == {FusedMLP if precision == "bf16" else MLP}


# ------------------------------------------------------------------------------- an edited HeadLoss


class Temperature(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        return super().forward(x / 1.001, weight, targets, reduction)


class LearnedScale(HeadLoss):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, weight, targets, reduction):
        return super().forward(self.scale * x, weight, targets, reduction)


class NoEndOfText(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        targets = targets.masked_fill(targets == self.vocab_size - 1, -1)
        return super().forward(x, weight, targets, reduction)


class IgnoredCounts(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        return super().forward(x, weight, targets.clamp(min=0), reduction)


class SkipEasy(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        losses = super().forward(x, weight, targets, "none")
        losses = losses * (losses > 0.05)
        return losses if reduction == "none" else losses.sum()


class TrainingOnly(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        return (1 + 0.01 * self.training) * super().forward(x, weight, targets, reduction)


class RoundedEvaluation(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        losses = super().forward(x, weight, targets, reduction)
        return losses.round() if reduction == "none" else losses


class OtherInterface(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        loss = super().forward(x, weight, targets, "sum")
        return loss if reduction == "sum" else (loss, loss)


class HalvedGradient(HeadLoss):
    def forward(self, x, weight, targets, reduction):
        loss = super().forward(x, weight, targets, reduction)
        return 0.5 * loss + 0.5 * loss.detach()


EDITED_LOSSES = [
    Temperature, LearnedScale, NoEndOfText, IgnoredCounts, SkipEasy, TrainingOnly, RoundedEvaluation,
    OtherInterface, HalvedGradient,
]  # fmt: skip


@pytest.mark.parametrize("edited", EDITED_LOSSES)
def test_edited_head_loss_is_kept(tiny_config, edited):
    model = GPT(tiny_config)
    model.head_loss = mine = edited(tiny_config.vocab_size)
    model.eval()  # the comparison uses training mode
    rng = torch.get_rng_state()
    sentence = f"{edited.__name__} differs from the fused cross-entropy: using your version"
    assert replace_in(model, "fp32") == [sentence] and model.head_loss is mine
    assert torch.equal(rng, torch.get_rng_state())


# ------------------------------------------------------------------------------------ an edited MLP


class ExactGELU(MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Dropout(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Clamped(MLP):
    def forward(self, x):
        h = F.gelu(self.c_fc(x), approximate="tanh")
        return self.c_proj(h.clamp(max=15))


class TokenShift(MLP):
    def forward(self, x):
        return super().forward(torch.cat([x[:, :1], x[:, :-1]], dim=1))


class DoubledBias(MLP):
    def forward(self, x):
        return super().forward(x) + self.c_proj.bias.detach()


class DetachedInput(MLP):
    def forward(self, x):
        return super().forward(x + (0.01 * x).detach() - 0.01 * x)


class WithGain(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        return self.gain * super().forward(x)


EDITED_MLPS = [ExactGELU, Dropout, Clamped, TokenShift, DoubledBias, DetachedInput, WithGain]


@pytest.mark.parametrize("edited", EDITED_MLPS)
def test_edited_mlp_is_kept(tiny_config, fused_mlp_everywhere, edited):
    """Only in the edited block, whose biases are 0 as at the start of training."""
    model = GPT(tiny_config)
    model.transformer.h[1].mlp = mine = edited(tiny_config)
    model.eval()
    torch.nn.init.zeros_(mine.c_proj.bias)
    rng = torch.get_rng_state()
    sentence = f"{edited.__name__} differs from the fused kernel's GELU MLP: using your version"
    assert replace_in(model) == [sentence] and model.transformer.h[1].mlp is mine
    assert type(model.transformer.h[0].mlp) is FusedMLP
    assert torch.equal(rng, torch.get_rng_state()) and not mine.training


class Rewritten(MLP):
    """The same function, with a submodule and a method of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.act = torch.nn.GELU("tanh")

    def hidden(self, x):
        return self.act(self.c_fc(x))

    def forward(self, x):
        return self.c_proj(self.hidden(x))


def test_rewritten_mlp_that_computes_the_same_is_replaced(tiny_config, fused_mlp_everywhere):
    """FusedMLP calls it for small micro-batches, also in a copy and in a compiled model."""
    model, x = GPT(tiny_config), torch.randn(2, 5, tiny_config.n_embd)
    for block in model.transformer.h:
        block.mlp = Rewritten(tiny_config)
    plain, keys = copy.deepcopy(model.transformer.h[0].mlp), list(model.state_dict())
    assert replace_in(model) == [] and {type(b.mlp) for b in model.transformer.h} == {FusedMLP}
    assert list(model.state_dict()) == keys
    fused = model.transformer.h[0].mlp
    assert torch.equal(fused(x), plain(x))
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        copied.c_fc.weight.zero_()
    assert torch.equal(fused(x), plain(x)) and not torch.equal(copied(x), plain(x))
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain(x))
    compiled(x).sum().backward()
    assert fused.c_fc.weight.grad.norm() > 0


# ------------------------------------------------------------------------------- when they are used


def test_8_bit_kernel_also_replaces_the_squared_relu_of_speedrun(fused_mlp_everywhere, monkeypatch):
    """Only the 8-bit one: in bf16 torch.compile fuses squared ReLU."""

    def kernel(x, w_fc, b_fc, w_proj, b_proj, function):
        assert (b_fc, b_proj, function) == (None, None, "relu2")
        return [MLP_FUNCTIONS[function](x, w_fc.bfloat16(), w_proj.bfloat16()).mul(factor)]

    monkeypatch.setattr(fp8_mlp, "mlp_products_fp8", kernel)
    monkeypatch.setattr(lab.kernels, "fp8_unsupported_reason", lambda _: "")
    for fp8, factor, wanted in (("head", 1, False), ("all", 1, True), ("all", 1.2, False)):
        model = speedrun.GPT(speedrun.GPTConfig(**TINY_MODEL))
        parameters = list(model.named_parameters())
        reports = replace_in(model, fp8=fp8)
        for block in model.transformer.h:
            assert type(block.mlp) is (fp8_mlp.Fp8MLP if wanted else speedrun.MLP)
        assert len(reports) == (factor != 1)
        assert all(a is b for (_, a), b in zip(parameters, model.parameters(), strict=True))
        assert [name for name, _ in parameters] == [name for name, _ in model.named_parameters()]
    model.transformer.h[1].mlp.forward = lambda x: x
    assert "MLP differs" in replace_in(model, fp8="head")[-1]


def test_inaccurate_mlp_kernel_is_not_used(tiny_config, fused_mlp_everywhere, monkeypatch):
    def reported():
        model = GPT(tiny_config)
        reports = replace_in(model)
        kinds = {type(block.mlp) for block in model.transformer.h}
        assert kinds == ({MLP} if reports else {FusedMLP})
        return reports

    def use_kernel(factor):
        kernel = lambda *inputs: [y * factor for y in gelu_kernel(*inputs)]  # noqa: E731
        monkeypatch.setattr(fused_mlp, "mlp_products", kernel)

    error = lab.kernels.kernel_error(FusedMLP, MLP(tiny_config))
    assert 1e-3 < error < 0.01, "rounding to bf16"
    use_kernel(1.005)
    assert not reported()
    use_kernel(2)
    assert "error on this GPU is 1, and at most 0.02 is accepted" in reported()[0]
    use_kernel(float("nan"))
    assert "error on this GPU is nan" in reported()[0]

    def no_algorithm(*_):
        raise RuntimeError("no algorithm")

    monkeypatch.setattr(fused_mlp, "mlp_products", no_algorithm)
    assert reported() == ["FusedMLP fails on this GPU (no algorithm): using the plain MLP"]


@pytest.mark.parametrize("fp8", ["head", "all"])
def test_unavailable_fp8_is_refused(tiny_config, monkeypatch, fp8):
    model = GPT(tiny_config)

    def refused(match, precision="bf16"):
        with pytest.raises(UserError, match=match):
            replace_in(model, precision, fp8)
        assert type(model.head_loss) is HeadLoss, "no module was replaced"

    refused("RTX 40, H100 and newer")
    monkeypatch.setattr(lab.kernels, "fp8_unsupported_reason", lambda _: "")
    refused("needs precision=bf16, not fp32", "fp32")


def test_modules_are_replaced_before_the_micro_batch_is_chosen(shards, monkeypatch):
    """Plain logits of 64 x 1024 positions take 13 GB, so only a smaller micro-batch would fit."""
    found = []

    def fit(model, *_):
        found.append(type(model.head_loss))
        return 2

    monkeypatch.setattr(train_gpt2, "find_max_batch_size", fit)
    how = dict(data=str(shards), total_batch_size=64, seq_len=16, max_steps=1, device="cpu")
    cfg = TrainConfig("laptop", **how, compile=False)
    train_gpt2.build_trainer(GPTConfig(**TINY_MODEL), cfg, World("cpu"))
    assert found == [FusedHeadLoss]


def test_evaluation_uses_the_plain_modules(tiny_config, fused_mlp_everywhere, monkeypatch):
    """Validation and samples are bit-equal to the plain model, except for the order of a sum, and the
    logits are computed in chunks."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 64)  # matmuls of very few rows round differently
    plain, (x, y) = noisy(tiny_config), tokens()
    y[0, :5] = -1
    for precision, fp8 in itertools.product(("fp32", "bf16"), (False, True)):
        fused, rows = put_in(plain, precision), []
        fused.head_loss.fp8 = fp8  # replace_modules would refuse it here
        watched = fused.head_loss.plain
        watched.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(len(args[0])))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
            assert torch.equal(fused(x)[0], plain(x)[0])
            each, theirs = (m(x, y, reduction="none")[1] for m in (fused, plain))
            assert torch.equal(each, theirs) and max(rows) == cross_entropy.CHUNK // 4
            sums = [m(x, y, reduction="sum")[1].item() for m in (fused, plain)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-6)
