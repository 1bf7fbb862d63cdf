"""MLP with 8-bit matmuls, which run at about twice the rate of bf16 on an H100. Used by `--fp8 all`.

The forward pass has two matmuls, GELU(x @ w_fc.T + b_fc) @ w_proj.T, and the backward pass four. One
kernel, cast_tile, does everything between them: it reads a tensor once, applies GELU or its
derivative, and writes the result in 8 bits together with its transpose, because both factors of an
8-bit matmul must be contiguous along the axis that is summed over. The MLP of speedrun.py has squared
ReLU in place of GELU, and no biases.

The formats are those of Micikevicius et al. 2022 (FP8 formats for deep learning, section 3): e4m3 (3
mantissa bits, normal numbers from 2^-6 to 448) for weights and activations, e5m2 (2 mantissa bits, from
2^-14 to 57344) for gradients. Weights, their gradients and the optimizer's state stay in float32.

Hopper's tensor cores accumulate 8-bit products with about 14 bits. With use_fast_accum=False, the
default of torch._scaled_mm, these partial sums are added in float32 at intervals.

Limits: the scale of activations is fixed, and values beyond +-112 saturate. LayerNorm's output cannot
exceed sqrt(C) times its gain, which is 28 at C = 768, so gains up to 4 are safe. GELU's output has no
such bound: values above 112 become 112, without a warning. In 400 steps of GPT-2 124M the largest value was
14.7 (bench/saturation.py; docs/LOG.md#saturation).

Shape letters: N positions, C channels, F hidden width (4 C).
"""

# torch._scaled_mm has no public name
# pyright: reportPrivateImportUsage=false

import functools
from typing import Any

import torch
from torch import Tensor

from lab.kernels.fused_mlp import FusedMLP

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Scales: the value that 1.0 in 8 bits stands for. With 4 or 5 exponent bits the scale need not be
# precise, so weights and activations have fixed ones, which saves a pass over the tensor to find its
# largest value. Weights may be up to 448 / 32 = 14, and lose precision below 2^-6 / 32 = 0.0005 (their
# initial std is 0.02). Activations may be up to 448 / 4 = 112; larger ones saturate.
WEIGHT, ACTIVATION = 1 / 32, 1 / 4
# The size of gradients varies, so in each call the largest |dy| is scaled to 57344. The gradient before
# GELU, a sum of C such values times weights, may be larger, so its scale is 64 times as large. This uses
# up 2^6 of e5m2's range of 2^30. The derivative of squared ReLU has no bound, so its margin is 2^10.
AMAX_MARGIN = {"gelu": 64.0, "relu2": 1024.0}
# The scale of GELU's or squared ReLU's output. Squared ReLU reached 722 in `speedrun.py --preset laptop`
# and 138 at 124M (docs/LOG.md#saturation), so it may be up to 448 * 16 = 7168.
HIDDEN = {"gelu": ACTIVATION, "relu2": 16.0}


@functools.cache
def scalar_tensor(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, mode: str = "plain", before: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast x (R, K) to 8 bits. Returns (x / scale in dtype (R, K), its transpose (K, R), sums).

    mode: "plain"; "gelu" casts GELU(x) instead; "dgelu" casts x * GELU'(before) and also returns its
    float32 sums over blocks of rows (blocks, K). In the other modes, sums is uninitialized. "relu2" and
    "drelu2" do the same for squared ReLU, without the sums.
    """
    import triton  # pyright: ignore[reportMissingImports]  # CUDA builds of torch bring it

    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    q_t = torch.empty(columns, rows, dtype=dtype, device=x.device)
    tile_rows, tile_columns, warps = TILES[mode]
    grid = (triton.cdiv(columns, tile_columns), triton.cdiv(rows, tile_rows))
    blocks = grid[1] if mode == "dgelu" else 1  # unused in the other modes
    sums = torch.empty(blocks, columns, dtype=torch.float32, device=x.device)
    tensors = x, x if before is None else before, scale, q, q_t, sums
    tile = dict(ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    kernel()[grid](*tensors, rows, columns, MODE=mode, **tile)
    return q, q_t, sums


TILES = {  # rows, columns, warps
    "plain": (128, 64, 4), "gelu": (32, 128, 4), "dgelu": (64, 64, 2),
    "relu2": (32, 128, 4), "drelu2": (64, 64, 2),
}  # fmt: skip


@functools.cache
def kernel() -> Any:
    """The Triton kernel cast_tile, defined on first use, so that importing this file needs no Triton."""
    import triton  # pyright: ignore[reportMissingImports]  # CUDA builds of torch bring it
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def sigmoid_of_gelu(x):
        """The sigmoid in the tanh GELU, x * sigmoid(2 (2/pi)^0.5 (x + 0.044715 x^3))."""
        # 2 (2/pi)^0.5 log2(e), and 0.044715 times that
        y = x * (2.302208198 + 0.1029432397 * x * x)
        return 1.0 / (1.0 + tl.exp2(-y))

    @triton.jit
    def cast_tile(
        x,
        before,
        scale,
        q,
        q_t,
        sums,
        rows,
        columns,
        MODE: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        inside_t = (column < columns)[:, None] & (row < rows)[None, :]
        here = row[:, None] * columns + column[None, :]
        value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        if MODE == "gelu":
            value = value * sigmoid_of_gelu(value)
        if MODE == "relu2":
            value = tl.maximum(value, 0.0) * value
        if MODE == "drelu2":
            z = tl.load(before + here, mask=inside, other=0.0).to(tl.float32)
            value = value * 2.0 * tl.maximum(z, 0.0)
        if MODE == "dgelu":
            z = tl.load(before + here, mask=inside, other=0.0).to(tl.float32)
            s = sigmoid_of_gelu(z)
            value = value * (s + z * s * (1.0 - s) * (1.5957691216 + 0.2140644488 * z * z))  # GELU'
            tl.store(
                sums + tl.program_id(1).to(tl.int64) * columns + column,
                tl.sum(value, 0),
                mask=column < columns,
            )
        # the hardware's cast saturates at the format's largest number
        tl.store(q + here, (value * (1.0 / tl.load(scale))).to(q.dtype.element_ty), mask=inside)
        # the multiplication is repeated, because the compiler would otherwise transpose the 8-bit result,
        # which is wrong in Triton 3.6 and 3.7
        value_t = tl.trans(value * (1.0 / tl.load(scale)))
        tl.store(
            q_t + column[:, None] * rows + row[None, :],
            value_t.to(q.dtype.element_ty),
            mask=inside_t,
        )

    return cast_tile


# a custom op, because torch.compile would break the graph at the Triton launch
@torch.library.custom_op("gpt2::mlp_products_fp8", mutates_args=())
def mlp_products_fp8(
    x: Tensor, w_fc: Tensor, b_fc: Tensor | None, w_proj: Tensor, b_proj: Tensor | None,
    function: str,
) -> list[Tensor]:  # fmt: skip
    """Compute GELU(x @ w_fc.T + b_fc) @ w_proj.T + b_proj (N, C), or with function "relu2" the same with
    squared ReLU and without biases, for x (N, C) in bf16 and weights in float32. Also returns, for the
    backward pass, the function's input (N, F) and, in 8 bits and transposed, its output (F, N), x (C, N),
    w_fc (C, F) and w_proj (F, C)."""
    weight, activation = scalar_tensor(WEIGHT, x.device), scalar_tensor(ACTIVATION, x.device)
    hidden = scalar_tensor(HIDDEN[function], x.device)
    b_fc, b_proj = (b if b is None else b.to(x.dtype) for b in (b_fc, b_proj))
    x8, x8_t, _ = quantize(x, activation, E4M3)
    w8, w8_t, _ = quantize(w_fc, weight, E4M3)
    p8, p8_t, _ = quantize(w_proj, weight, E4M3)
    before = torch._scaled_mm(x8, w8.t(), activation, weight, bias=b_fc, out_dtype=x.dtype)
    after8, after8_t, _ = quantize(before, hidden, E4M3, function)
    y = torch._scaled_mm(after8, p8.t(), hidden, weight, bias=b_proj, out_dtype=x.dtype)
    return [y, before, after8_t, x8_t, w8_t, p8_t]


@mlp_products_fp8.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj, function):
    (N, C), F = x.shape, w_fc.size(0)
    small = [x.new_empty(shape, dtype=E4M3) for shape in ((F, N), (C, N), (C, F), (F, C))]
    return [torch.empty_like(x), x.new_empty(N, F), *small]


@torch.library.custom_op("gpt2::mlp_gradients_fp8", mutates_args=())
def mlp_gradients_fp8(
    dy: Tensor,
    largest: Tensor,
    before: Tensor,
    after8_t: Tensor,
    x8_t: Tensor,
    w8_t: Tensor,
    p8_t: Tensor,
    function: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx (N, C) in bf16, and dw_fc (F, C), db_fc (F,), dw_proj (C, F) in float32; db_fc is only
    that of "gelu". largest: the largest |dy|; the other tensors are outputs of mlp_products_fp8."""
    weight, activation = scalar_tensor(WEIGHT, dy.device), scalar_tensor(ACTIVATION, dy.device)
    hidden = scalar_tensor(HIDDEN[function], dy.device)
    scale = (largest.float() / 57344).clamp(min=1e-30)
    dy8, dy8_t, _ = quantize(dy, scale, E5M2)
    dafter = torch._scaled_mm(dy8, p8_t.t(), scale, weight, out_dtype=dy.dtype)
    wide = scale * AMAX_MARGIN[function]
    d8, d8_t, sums = quantize(dafter, wide, E5M2, "d" + function, before)
    dx = torch._scaled_mm(d8, w8_t.t(), wide, weight, out_dtype=dy.dtype)
    dw_fc = torch._scaled_mm(d8_t, x8_t.t(), wide, activation, out_dtype=torch.float32)
    dw_proj = torch._scaled_mm(dy8_t, after8_t.t(), scale, hidden, out_dtype=torch.float32)
    return dx, dw_fc, sums.sum(0), dw_proj


@mlp_gradients_fp8.register_fake
def _(dy, largest, before, after8_t, x8_t, w8_t, p8_t, function):
    C, F = dy.size(1), before.size(1)
    return torch.empty_like(dy), *(
        dy.new_empty(shape, dtype=torch.float32) for shape in ((F, C), (F,), (C, F))
    )


def setup_context(ctx, inputs, output):
    # without this, autograd allocates zero gradients for the outputs that only backward() needs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.function = inputs[-1]


def backward(ctx, grads):
    dy, function = grads[0].contiguous(), ctx.function
    # the maximum and the sum are computed here, where torch.compile can fuse them
    dx, dw_fc, db_fc, dw_proj = mlp_gradients_fp8(dy, dy.abs().amax(), *ctx.saved_tensors, function)
    if function == "relu2":  # no biases
        return dx, dw_fc, None, dw_proj, None, None
    return dx, dw_fc, db_fc, dw_proj, dy.sum(0, dtype=torch.float32), None


mlp_products_fp8.register_autograd(backward, setup_context=setup_context)


class Fp8MLP(FusedMLP):
    """FusedMLP with 8-bit matmuls. It rounds the float32 weights directly, not copies in bf16."""

    functions = "gelu", "relu2"
    param_dtype = torch.float32

    def products(self, x: Tensor, *weights: Tensor) -> Tensor:
        if x.size(0) % 16:  # 8-bit matmuls need rows whose size is a multiple of 16
            return self.plain(x)
        if self.function == "relu2":  # no biases
            return mlp_products_fp8(x, weights[0], None, weights[1], None, "relu2")[0]
        return mlp_products_fp8(x, *weights, "gelu")[0]
