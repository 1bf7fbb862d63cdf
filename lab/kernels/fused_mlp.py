"""The MLP's two products with GELU inside them: what a kernel of its own would read and write again
stays in registers.

PyTorch computes c_fc, then GELU, then c_proj, and GELU's kernel carries the widest tensor of the
model (4 C numbers a position) through memory again: once in and out on the way forward, twice in
and once out on the way back. NVIDIA's library of products, cuBLASLt, can apply GELU or its
derivative to a tile of the result before it is first written (an "epilogue"). PyTorch has no call
for that in training, so this file calls the library that came with it. bf16 on NVIDIA GPUs alone;
everywhere else the plain MLP says the same in one line.

Shape letters: N positions, C channels, F hidden width (4 C).
"""

import ctypes
import functools

import torch
from torch import Tensor, nn

# numbers of cublasLt.h, the same from CUDA 11.8 to 13
# cudaDataType_t, cublasComputeType_t: products in 16 bits, sums in 32
BF16, FP32, COMPUTE_32F = (14, 0, 68)
# cublasLtMatmulDescAttributes_t
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = (3, 7, 8, 11, 12)
# cublasLtEpilogue_t; "aux" is GELU's input, written forward and read backward
GELU_AUX_BIAS, DGELU = (164, 192)
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 * 2**20  # bytes; NVIDIA's advice for Hopper
# with fewer, the GPU waits for the Python that calls the library (bench/ladder.py, shape 12x768)
MIN_POSITIONS = 16384


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm that the library recommends for a product."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library():
    """A function that calls cuBLASLt by name. Raises OSError where torch has none."""
    lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")

    def call(name, *args):
        if status := getattr(lib, f"cublasLt{name}")(*args):
            raise RuntimeError(f"cublasLt{name} failed with status {status}")

    return call


@functools.cache
def handle_and_workspace(device):
    handle = ctypes.c_void_p()
    library()("Create", ctypes.byref(handle))
    return handle, torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def describe(desc, attribute, value):
    library()("MatmulDescSetAttribute", desc, attribute, ctypes.byref(value), ctypes.sizeof(value))


@functools.cache
def plan(device, rows, inner, columns, b_transposed, epilogue):
    """(description, layouts of a, b and out, algorithm) for out (rows, columns) = a (rows, inner) @
    b, all bf16.

    The library thinks in columns: its out.T = b.T @ a.T is our out = a @ b, so b comes first and is
    transposed for it where it is not for us.
    """
    call, (handle, _) = library(), handle_and_workspace(device)
    desc, preference = ctypes.c_void_p(), ctypes.c_void_p()
    call("MatmulDescCreate", ctypes.byref(desc), COMPUTE_32F, FP32)
    describe(desc, TRANSA, ctypes.c_int32(b_transposed))
    describe(desc, EPILOGUE, ctypes.c_int32(epilogue))
    describe(desc, AUX_LD, ctypes.c_int64(columns))
    describe(desc, AUX_POINTER, ctypes.c_void_p(256))  # only its alignment matters here
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
    operands = *layouts, layouts[-1]  # b, a, what is added (nothing), out
    wanted = preference, 1, ctypes.byref(best), ctypes.byref(found)
    call("MatmulAlgoGetHeuristic", handle, desc, *operands, *wanted)
    if not found.value:
        raise RuntimeError("cuBLASLt has no algorithm for this product")
    return desc, layouts, best.algo


def product(a, b, epilogue, aux, bias=None, b_transposed=False):
    """epilogue(a @ b), or of a @ b.T if b_transposed. aux (rows, columns) is written by
    GELU_AUX_BIAS, read by DGELU."""
    rows, columns = aux.shape
    out = torch.empty_like(aux)
    handle, workspace = handle_and_workspace(a.device)
    desc, (layout_b, layout_a, layout_out), algo = plan(
        a.device, rows, a.size(1), columns, b_transposed, epilogue
    )
    describe(desc, AUX_POINTER, ctypes.c_void_p(aux.data_ptr()))
    if bias is not None:
        describe(desc, BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
    one, zero, pointer = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_void_p
    factors = pointer(b.data_ptr()), layout_b, pointer(a.data_ptr()), layout_a
    result = pointer(out.data_ptr()), layout_out
    stream = pointer(torch.cuda.current_stream(a.device).cuda_stream)
    room = pointer(workspace.data_ptr()), ctypes.c_size_t(WORKSPACE), stream
    scaled = ctypes.byref(one), *factors, ctypes.byref(zero), *result, *result
    library()("Matmul", handle, desc, *scaled, algo, *room)
    return out


# opaque to torch.compile, which keeps one graph around it
@torch.library.custom_op("gpt2::mlp_products", mutates_args=())
def mlp_products(
    x: Tensor, w_fc: Tensor, b_fc: Tensor, w_proj: Tensor, b_proj: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x @ w_fc.T + b_fc) @ w_proj.T + b_proj (N, C), and for the backward pass GELU's output
    and input (N, F).

    b_proj is added before the product is rounded: to a rounded one, in the compiler's addition to a
    16-bit residual stream, a bias far below the rounding would decide ties, and count for hundreds
    of times its size (docs/LOG.md).
    """
    before = x.new_empty(x.size(0), w_fc.size(0))
    after = product(x, w_fc, GELU_AUX_BIAS, aux=before, bias=b_fc, b_transposed=True)
    return torch.addmm(b_proj, after, w_proj.t()), after, before


@mlp_products.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj):
    hidden = x.new_empty(x.size(0), w_fc.size(0))
    return torch.empty_like(x), hidden, torch.empty_like(hidden)


@torch.library.custom_op("gpt2::product_dgelu", mutates_args=())
def product_dgelu(dy: Tensor, w_proj: Tensor, before: Tensor) -> Tensor:
    """(dy @ w_proj) * GELU'(before), (N, F)."""
    return product(dy, w_proj, DGELU, aux=before)


@product_dgelu.register_fake
def _(dy, w_proj, before):
    return torch.empty_like(before)


def keep(ctx, inputs, output):
    # no gradients of zeros for the two results that are for the backward pass alone
    ctx.set_materialize_grads(False)
    x, w_fc, _, w_proj, _ = inputs
    ctx.save_for_backward(x, w_fc, w_proj, *output[1:])


def backward(ctx, dy, *_):
    x, w_fc, w_proj, after, before = ctx.saved_tensors
    dy = dy.contiguous()
    dbefore = product_dgelu(dy, w_proj, before)
    return dbefore @ w_fc, dbefore.t() @ x, dbefore.sum(0), dy.t() @ after, dy.sum(0)


mlp_products.register_autograd(backward, setup_context=keep)


class FusedMLP(nn.Module):
    """In the place of an MLP with c_fc, GELU (tanh) and c_proj, whose parameters it takes over."""

    reads = torch.bfloat16  # all that it reads of its matrices, under bf16 autocast

    def __init__(self, plain):
        super().__init__()
        self.c_fc, self.c_proj = plain.c_fc, plain.c_proj
        # for micro-steps too small to gain, and for evaluation
        self.plain_forward = type(plain).forward

    def forward(self, x):
        if not pays(x):
            return self.plain_forward(self, x)
        weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
        return self.products(x.bfloat16().flatten(0, -2), *weights).view_as(x)

    def products(self, x, *weights):
        return mlp_products(x, *(w.bfloat16() for w in weights))[0]


def pays(x):
    """Whether x (..., C) is to be fused: enough of it, in training, on a GPU in bf16 autocast."""
    bf16 = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    enough = x.numel() >= MIN_POSITIONS * x.size(-1)
    return x.is_cuda and bf16 and torch.is_grad_enabled() and enough


@functools.cache
def epilogues_work(device):
    """True where bf16 and this library's GELU epilogues are to be had. Tried, as no table of GPUs
    and versions would last."""
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
