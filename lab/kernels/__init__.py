"""Replace a model's modules with faster ones that compute the same. Called by build_trainer.

A module is replaced only if its outputs and gradients on a small random batch equal those of the
replacement. So if you edit HeadLoss or MLP in train_gpt2.py, training uses your version. Forward hooks
of a replaced module do not run.
"""

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.cli import UserError
from lab.kernels.cross_entropy import FusedHeadLoss, fused_loss
from lab.kernels.fp8_mlp import Fp8MLP
from lab.kernels.fused_mlp import FusedMLP, is_supported
from lab.precision import Precision

# largest relative error in float32; exact GELU instead of the tanh approximation gives over 1e-4
TOLERANCE = 3e-5
# largest relative errors of the MLP kernels against float32, due to rounding to bf16 and to 8 bits
MAX_KERNEL_ERROR = {FusedMLP: 0.02, Fp8MLP: 0.15}
Model = Any  # a GPT, with config, head_loss and lm_head; nn.Module does not type its attributes


def replace_modules(
    model: Model, mlp_class: type[nn.Module], precision: Precision, fp8: str = "off",
    report: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Replace model.head_loss and, on a GPU in bf16, every module of `mlp_class` (or a subclass). The
    parameters, their names and their order stay the same, and so does the random state.

    Call it before DDP and torch.compile wrap the model. fp8: "off"; "head" computes the head's matmuls
    in 8 bits; "all" also those of the MLPs. report is called with a sentence for each class that is not
    replaced. Raises UserError if fp8 is not available.
    """
    if fp8 != "off":
        check_fp8(model, precision, fp8)
    if head_is_replaceable(model):
        model.head_loss = FusedHeadLoss(model.head_loss, fp8=fp8 != "off")
    else:
        name = type(model.head_loss).__name__
        report(f"{name} differs from the fused cross-entropy: using your version")
    if precision.name == "bf16" and is_supported(precision.device):
        replace_mlps(model, mlp_class, Fp8MLP if fp8 == "all" else FusedMLP, report)


def replace_mlps(
    model: nn.Module, mlp_class: type[nn.Module], fused: type[FusedMLP],
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Replace every module of mlp_class that computes one of MLP_FUNCTIONS with one of class `fused`, if
    it has a kernel for that function, which is accurate on this GPU; report the other modules."""
    found = [
        (parent, name, child, mlp_function(child))
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, mlp_class)
    ]
    same = [place for place in found if place[3] in fused.functions]
    for name in sorted({type(child).__name__ for *_, child, function in found if not function}):
        report(f"{name} differs from the fused kernel's GELU MLP: using your version")
    if not same:
        return
    try:
        error, limit = kernel_error(fused, *same[0][2:]), MAX_KERNEL_ERROR[fused]
    except RuntimeError as exception:  # such as a width for which cuBLASLt has no algorithm
        report(f"{fused.__name__} fails on this GPU ({exception}): using the plain MLP")
        return
    if not error <= limit:  # NaN, too
        report(
            f"{fused.__name__}'s relative error on this GPU is {error:.2g}, and at most {limit} is "
            "accepted: using the plain MLP"
        )
        return
    for parent, name, child, function in same:
        setattr(parent, name, fused(child, function))


# ------------------------------------------------------------------------------------- comparisons


def head_is_replaceable(model: Model) -> bool:
    """Whether model.head_loss computes the plain cross-entropy of the head's logits."""
    plain = copy.deepcopy(model.head_loss).train()
    if [*plain.parameters(), *plain.buffers()]:  # the fused version would not use them
        return False
    vocab_size, (V, C, N) = model.config.vocab_size, (model.config.padded_vocab_size, 32, 24)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, C, generator=generator) for n in (N, V))
    x *= torch.linspace(0.1, 1, N)[:, None]  # small and large logits
    targets = torch.randint(vocab_size, (N,), generator=generator)
    targets[::2] = (x @ weight[:vocab_size].T).argmax(1)[::2]  # small and large losses
    targets[1], targets[::5] = vocab_size - 1, -1  # the last id, often end-of-text; ignored targets
    x, weight, targets = (t.to(model.lm_head.weight.device) for t in (x, 2 * weight, targets))
    for tensor in (x, weight):
        tensor.requires_grad_()
    with exact_matmuls():
        try:
            loss = plain(x, weight, targets, "sum")
            grads = torch.autograd.grad(loss, (x, weight))
            each = plain(x, weight, targets, "none").sum()
            ours = fused_loss(x.detach(), weight.detach(), targets, plain.vocab_size)
            return all(map(close, (loss, each, *grads), (ours[0], *ours)))
        except Exception:  # another interface
            return False


def mlp_function(module: nn.Module) -> str:
    """The key of the function in MLP_FUNCTIONS that a module computes for random weights, or ""."""
    names = {
        "c_fc.weight c_fc.bias c_proj.weight c_proj.bias": "gelu",
        "c_fc.weight c_proj.weight": "relu2",
    }
    function = names.get(" ".join(name for name, _ in module.named_parameters()), "")
    if not function or list(module.buffers()):
        return ""
    module, x, dy = random_mlp(module)
    # ordinary activations distinguish the forms of GELU, and large ones reveal clipping
    same = all(same_mlp(module, MLP_FUNCTIONS[function], size * x, dy) for size in (1, 10))
    return function if same else ""


def same_mlp(module: nn.Module, function: Callable[..., Tensor], x: Tensor, dy: Tensor) -> bool:
    """Whether an MLP has the same output and gradients as a function for x, given dy."""
    x.requires_grad_()
    with exact_matmuls():
        try:
            theirs, ours = module(x), function(x, *module.parameters())
            inputs = (x, *module.parameters())
            gradients = [torch.autograd.grad(y, inputs, dy) for y in (theirs, ours)]
            return close(theirs, ours) and all(map(close, *gradients))
        except Exception:  # another interface
            return False


def kernel_error(fused: type[FusedMLP], plain: nn.Module, function: str = "gelu") -> float:
    """Largest relative error of a fused MLP's output and gradients against float32."""
    plain, x, dy = random_mlp(plain)
    inputs = [t.detach().requires_grad_() for t in (x.bfloat16(), *plain.parameters())]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    with exact_matmuls():
        y = fused(plain, function).products(inputs[0].flatten(0, -2), *inputs[1:])
        wanted = MLP_FUNCTIONS[function](*exact)
        pairs = [
            (y.view_as(wanted), wanted),
            *zip(
                torch.autograd.grad(y, inputs, dy.to(y.dtype).view_as(y)),
                torch.autograd.grad(wanted, exact, dy.to(y.dtype).float()),
            ),
        ]
    errors = [(found.float() - right).norm() / right.norm() for found, right in pairs]
    return torch.stack(errors).max().item()  # NaN if any is NaN, unlike Python's max()


def random_mlp(module: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a float32 copy of an MLP in training mode, with an input and a gradient of the output, both
    (2, 64, C). The copy has random weights, because initial biases of 0 would hide some differences."""
    module = copy.deepcopy(module).float().train().requires_grad_()
    w_fc, w_proj = (p for p in module.parameters() if p.dim() == 2)
    generator = torch.Generator(w_fc.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=w_fc.device)

    for p in module.parameters():
        p.data = randn(*p.shape) * p.size(-1) ** -0.5
    x, dy = randn(2, 64, w_fc.size(1)), randn(2, 64, w_proj.size(0))
    return module, x, dy


def gelu_mlp(x: Tensor, w_fc: Tensor, b_fc: Tensor, w_proj: Tensor, b_proj: Tensor) -> Tensor:
    """GPT-2's MLP."""
    return F.linear(F.gelu(F.linear(x, w_fc, b_fc), approximate="tanh"), w_proj, b_proj)


def relu2_mlp(x: Tensor, w_fc: Tensor, w_proj: Tensor) -> Tensor:
    """speedrun.py's MLP."""
    return F.linear(F.relu(F.linear(x, w_fc)).square(), w_proj)


MLP_FUNCTIONS = {"gelu": gelu_mlp, "relu2": relu2_mlp}  # those that the MLP kernels compute


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, and equal values up to float32 rounding."""
    return a.shape == b.shape and bool((a - b).norm() <= TOLERANCE * b.norm())


@contextlib.contextmanager
def exact_matmuls() -> Iterator[None]:
    """Context manager: matmuls in full float32, without TF32 and autocast; restores the random state."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), torch.autocast("cpu", enabled=False):
            with torch.autocast("cuda", enabled=False):
                yield
    finally:
        torch.set_float32_matmul_precision(before)


# -------------------------------------------------------------------------------------------- 8 bits


def check_fp8(model: Model, precision: Precision, fp8: str) -> None:
    """Raise UserError, which says what is missing, if 8-bit matmuls are not available."""
    c, reason = model.config, fp8_unsupported_reason(precision.device)
    if not reason and precision.name != "bf16":
        reason = f"needs precision=bf16, not {precision.name}"
    if not reason and (c.n_embd % 16 or c.padded_vocab_size % 16):
        reason = (
            f"needs multiples of 16, not n_embd={c.n_embd} and {c.padded_vocab_size} rows of the "
            "token embedding"
        )
    if reason:
        raise UserError(f"fp8={fp8} {reason}; pass --fp8 off")


def fp8_unsupported_reason(device: torch.device) -> str:
    """Why this device has no 8-bit matmuls; "" if it has them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "needs an NVIDIA GPU with 8-bit matmuls (RTX 40, H100 and newer)"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    return ""
