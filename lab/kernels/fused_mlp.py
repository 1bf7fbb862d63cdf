"""MLP whose matmul kernels also apply GELU and its derivative. Used by replace_modules.

PyTorch computes c_fc, GELU and c_proj in separate kernels. GELU's kernels read and write the widest
tensor of the model (4 C numbers per position) again: one read and one write in the forward pass, two
reads and one write in the backward pass. NVIDIA's matmul library, cuBLASLt, can apply GELU or its
derivative to each tile of a result before writing it (an "epilogue"). PyTorch has no function for that
in training, so this file calls the library that comes with PyTorch, in bf16 and on NVIDIA GPUs only.

Shape letters: N positions, C channels, F hidden width (4 C).
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# constants of cublasLt.h, the same from CUDA 11.8 to 13
# cudaDataType_t, cublasComputeType_t: bf16 factors, float32 sums
BF16, FP32, COMPUTE_32F = (14, 0, 68)
# cublasLtMatmulDescAttributes_t
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = (3, 7, 8, 11, 12)
# cublasLtEpilogue_t; "aux" is GELU's input, written in the forward and read in the backward pass
GELU_AUX_BIAS, DGELU = (164, 192)
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 * 2**20  # bytes; NVIDIA's recommendation for Hopper
# with fewer, the GPU waits for the Python code that launches kernels (bench/ladder.py, shape 12x768)
MIN_POSITIONS = 16384


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm that the library recommends for a matmul."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library() -> Callable[..., None]:
    """A function that calls a cuBLASLt function by name. Raises OSError if the library is missing."""
    major = (torch.version.cuda or "").split(".")[0]
    lib = ctypes.CDLL(f"libcublasLt.so.{major}")

    def call(name: str, *args: Any) -> None:
        if status := getattr(lib, f"cublasLt{name}")(*args):
            raise RuntimeError(f"cublasLt{name} failed with status {status}")

    return call


@functools.cache
def handle_and_workspace(device: torch.device) -> tuple[ctypes.c_void_p, Tensor]:
    handle = ctypes.c_void_p()
    library()("Create", ctypes.byref(handle))
    return handle, torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def set_desc_attribute(desc: ctypes.c_void_p, attribute: int, value: Any) -> None:
    library()("MatmulDescSetAttribute", desc, attribute, ctypes.byref(value), ctypes.sizeof(value))


@functools.cache
def matmul_plan(
    device: torch.device, rows: int, inner: int, columns: int, b_transposed: bool, epilogue: int
) -> tuple[ctypes.c_void_p, list[ctypes.c_void_p], Any]:
    """(matmul descriptor, layouts of b, a and out, algorithm) for out (rows, columns) = a (rows, inner) @
    b, all in bf16.

    The library's matrices are column-major, so our out = a @ b is its out.T = b.T @ a.T. Therefore b
    comes first, and TRANSA is set if our b is transposed.
    """
    call, (handle, _) = library(), handle_and_workspace(device)
    desc, preference = ctypes.c_void_p(), ctypes.c_void_p()
    call("MatmulDescCreate", ctypes.byref(desc), COMPUTE_32F, FP32)
    set_desc_attribute(desc, TRANSA, ctypes.c_int32(b_transposed))
    set_desc_attribute(desc, EPILOGUE, ctypes.c_int32(epilogue))
    set_desc_attribute(desc, AUX_LD, ctypes.c_int64(columns))
    set_desc_attribute(desc, AUX_POINTER, ctypes.c_void_p(256))  # only its alignment matters here
    layouts = []
    of_b = (inner, columns) if b_transposed else (columns, inner)
    for high, wide in (of_b, (inner, rows), (columns, rows)):
        layout = ctypes.c_void_p()
        size = (ctypes.c_uint64(high), ctypes.c_uint64(wide), ctypes.c_int64(high))
        call("MatrixLayoutCreate", ctypes.byref(layout), BF16, *size)
        layouts.append(layout)
    call("MatmulPreferenceCreate", ctypes.byref(preference))
    limit, found, best = ctypes.c_size_t(WORKSPACE), ctypes.c_int(), Heuristic()
    most = MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.sizeof(limit)
    call("MatmulPreferenceSetAttribute", preference, *most)
    operands = *layouts, layouts[-1]  # b, a, the addend (unused), out
    wanted = preference, 1, ctypes.byref(best), ctypes.byref(found)
    call("MatmulAlgoGetHeuristic", handle, desc, *operands, *wanted)
    if not found.value:
        raise RuntimeError("cuBLASLt has no algorithm for this matmul")
    return desc, layouts, best.algo


def cublaslt_matmul(
    a: Tensor, b: Tensor, epilogue: int, aux: Tensor, bias: Tensor | None = None,
    b_transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return epilogue(a @ b), or epilogue(a @ b.T) if b_transposed. aux (rows, columns) is written by
    GELU_AUX_BIAS and read by DGELU. All tensors are contiguous and in bf16."""
    rows, columns = aux.shape
    out = torch.empty_like(aux)
    handle, workspace = handle_and_workspace(a.device)
    desc, (layout_b, layout_a, layout_out), algo = matmul_plan(
        a.device, rows, a.size(1), columns, b_transposed, epilogue
    )
    set_desc_attribute(desc, AUX_POINTER, ctypes.c_void_p(aux.data_ptr()))
    if bias is not None:
        set_desc_attribute(desc, BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
    one, zero, pointer = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_void_p
    factors = pointer(b.data_ptr()), layout_b, pointer(a.data_ptr()), layout_a
    result = pointer(out.data_ptr()), layout_out
    stream = pointer(torch.cuda.current_stream(a.device).cuda_stream)
    room = pointer(workspace.data_ptr()), ctypes.c_size_t(WORKSPACE), stream
    scaled = ctypes.byref(one), *factors, ctypes.byref(zero), *result, *result
    library()("Matmul", handle, desc, *scaled, algo, *room)
    return out


# a custom op, because torch.compile cannot trace calls to a C library
@torch.library.custom_op("gpt2::mlp_products", mutates_args=())
def mlp_products(
    x: Tensor, w_fc: Tensor, b_fc: Tensor, w_proj: Tensor, b_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return GELU(x @ w_fc.T + b_fc) @ w_proj.T + b_proj (N, C), and for the backward pass GELU's
    output and input (N, F).

    addmm adds b_proj before the result is rounded. torch.compile would fuse a separate addition with
    that to the 16-bit residual stream. A bias far smaller than the rounding error would then decide how
    ties are rounded, and its effect would be hundreds of times too large (docs/LOG.md).
    """
    before = x.new_empty(x.size(0), w_fc.size(0))
    after = cublaslt_matmul(x, w_fc, GELU_AUX_BIAS, aux=before, bias=b_fc, b_transposed=True)
    return torch.addmm(b_proj, after, w_proj.t()), after, before


@mlp_products.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj):
    hidden = x.new_empty(x.size(0), w_fc.size(0))
    return torch.empty_like(x), hidden, torch.empty_like(hidden)


@torch.library.custom_op("gpt2::product_dgelu", mutates_args=())
def product_dgelu(dy: Tensor, w_proj: Tensor, before: Tensor) -> Tensor:
    """(dy @ w_proj) * GELU'(before), (N, F)."""
    return cublaslt_matmul(dy, w_proj, DGELU, aux=before)


@product_dgelu.register_fake
def _(dy, w_proj, before):
    return torch.empty_like(before)


def setup_context(ctx, inputs, output):
    # without this, autograd allocates zero gradients for the two outputs that only backward() needs
    ctx.set_materialize_grads(False)
    x, w_fc, _, w_proj, _ = inputs
    ctx.save_for_backward(x, w_fc, w_proj, *output[1:])


def backward(ctx, dy, *_):
    x, w_fc, w_proj, after, before = ctx.saved_tensors
    dy = dy.contiguous()
    dbefore = product_dgelu(dy, w_proj, before)
    return dbefore @ w_fc, dbefore.t() @ x, dbefore.sum(0), dy.t() @ after, dy.sum(0)


mlp_products.register_autograd(backward, setup_context=setup_context)


class FusedMLP(nn.Module):
    """Replaces an MLP that computes c_proj(GELU(c_fc(x))), with the tanh GELU, and shares its layers.

    plain: that MLP, used in evaluation and for micro-batches too small to gain from the kernel.
    function: "gelu", or another one of `functions`.
    """

    functions: tuple[str, ...] = ("gelu",)
    # dtype of the matrices under bf16 autocast, in matmuls and when ZeRO-1 and FSDP2 communicate them
    param_dtype = torch.bfloat16

    plain: nn.Module

    def __init__(self, plain: Any, function: str = "gelu"):
        super().__init__()
        self.function = function
        self.c_fc, self.c_proj = plain.c_fc, plain.c_proj
        # not a registered submodule, which would give each parameter a second name in checkpoints
        self.__dict__["plain"] = plain

    def forward(self, x: Tensor) -> Tensor:
        if not should_fuse(x):
            return self.plain(x)
        weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        weights = [w for w in weights if w is not None]  # no biases with "relu2"
        return self.products(x.bfloat16().flatten(0, -2), *weights).view_as(x)

    def products(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Apply the MLP to x (N, C) in bf16, with the kernel."""
        return mlp_products(x, *(w.bfloat16() for w in weights))[0]


def should_fuse(x: Tensor) -> bool:
    """Whether to use the kernel for x (..., C): enough positions, in training, on a GPU under bf16
    autocast."""
    bf16 = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    enough = x.numel() >= MIN_POSITIONS * x.size(-1)
    return x.is_cuda and bf16 and torch.is_grad_enabled() and enough


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Whether cuBLASLt's GELU epilogues work on a device, found by trying, because a table of GPUs and
    versions would soon be outdated."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    try:
        x = torch.ones(16, 64, device=device, dtype=torch.bfloat16)
        w = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        mlp_products(x, w, w[0], w, w[0])
        product_dgelu(x, w, x)
        torch.cuda.synchronize(device)
        return True
    except (OSError, AttributeError, RuntimeError):
        return False
