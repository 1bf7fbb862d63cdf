"""The MLP's six products in 8 bits: about twice the rate of 16 on an H100 and newer, for numbers
rounded to 3 bits.

Forward GELU(x @ w_fc.T + b_fc) @ w_proj.T, backward four more products; everything between them is
one kernel, cast_tile, which reads a tensor once, applies GELU or its derivative on the way, and
writes it in 8 bits twice: as it is and transposed, as the hardware wants both factors of an 8-bit
product contiguous along the axis that is summed over.

The formats are those of Micikevicius et al. 2022 (FP8 formats for deep learning, section 3): e4m3
(3 bits of mantissa, normal numbers from 2^-6 to 448) for weights and activations, e5m2 (2 bits,
from 2^-14 to 57344) for gradients. Sums are kept in 32 bits. Weights and optimizer stay in float32,
and the gradients of the weights come out in it.

Shape letters: N positions, C channels, F hidden width (4 C).
"""

import functools

import torch
from torch import Tensor

from lab.kernels.fused_mlp import FusedMLP

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What a 1 in 8 bits is worth. Formats with 4 or 5 bits of exponent forgive a rough scale, so weights
# and activations have fixed ones, which cost no pass over the tensor to find its largest value.
# Weights reach 448 / 32 = 14 and lose bits below 2^-6 / 32 = 0.0005 (fresh ones have a std of 0.02);
# activations are cut off at 448 / 4 = 112 (LayerNorm's output is at most C^0.5 = 28 before its gain).
WEIGHT, ACTIVATION = 1 / 32, 1 / 4
# Gradients have no size of their own: the largest |dy| of each call becomes 57344. A gradient
# before GELU is a sum of C of those times weights: 64 times more room, of the 2^30 that e5m2 has
HEADROOM = 64.0


@functools.cache
def constant(value, device):
    return torch.tensor(value, device=device)


def cast(x, scale, dtype, mode="plain", before=None):
    """(x / scale in dtype (R, K), its transpose (K, R), float32 sums over blocks of rows (blocks,
    K) or None).

    mode "gelu" casts GELU(x) instead; "dgelu" x * GELU'(before), and it alone sums.
    """
    import triton

    rows, columns = x.shape
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    q_t = torch.empty(columns, rows, dtype=dtype, device=x.device)
    tile_rows, tile_columns, warps = TILES[mode]
    grid = (triton.cdiv(columns, tile_columns), triton.cdiv(rows, tile_rows))
    sums = None
    if mode == "dgelu":
        sums = torch.empty(grid[1], columns, dtype=torch.float32, device=x.device)
    tensors = x, x if before is None else before, scale, q, q_t, q if sums is None else sums
    tile = dict(ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    kernel()[grid](*tensors, rows, columns, MODE=mode, **tile)
    return q, q_t, sums


TILES = {"plain": (128, 64, 4), "gelu": (32, 128, 4), "dgelu": (64, 64, 2)}  # rows, columns, warps


@functools.cache
def kernel():
    """cast_tile, compiled on first use, so that importing this file needs no Triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def sigmoid_of_gelu(x):
        """GELU in the tanh form is x * sigmoid(2 (2/pi)^0.5 (x + 0.044715 x^3)): that sigmoid."""
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
        if MODE == "dgelu":
            z = tl.load(before + here, mask=inside, other=0.0).to(tl.float32)
            s = sigmoid_of_gelu(z)
            value = value * (s + z * s * (1.0 - s) * (1.5957691216 + 0.2140644488 * z * z))  # GELU'
            tl.store(
                sums + tl.program_id(1).to(tl.int64) * columns + column,
                tl.sum(value, 0),
                mask=column < columns,
            )
        # the hardware's cast ends at the format's largest number
        tl.store(q + here, (value * (1.0 / tl.load(scale))).to(q.dtype.element_ty), mask=inside)
        # the product is written twice, or the compiler would transpose the 8-bit result, which
        # Triton 3.6 and 3.7 do wrongly
        value_t = tl.trans(value * (1.0 / tl.load(scale)))
        tl.store(
            q_t + column[:, None] * rows + row[None, :],
            value_t.to(q.dtype.element_ty),
            mask=inside_t,
        )

    return cast_tile


# opaque to torch.compile, which keeps one graph around it
@torch.library.custom_op("gpt2::mlp_products_fp8", mutates_args=())
def mlp_products_fp8(
    x: Tensor, w_fc: Tensor, b_fc: Tensor, w_proj: Tensor, b_proj: Tensor
) -> list[Tensor]:
    """[GELU(x @ w_fc.T + b_fc) @ w_proj.T + b_proj (N, C)], then for the backward pass GELU's input
    (N, F) and, in 8 bits and transposed, GELU's output (F, N), x (C, N), w_fc (C, F) and w_proj (F,
    C). x (N, C) is bf16, the weights are float32."""
    weight, activation = constant(WEIGHT, x.device), constant(ACTIVATION, x.device)
    x8, x8_t, _ = cast(x, activation, E4M3)
    w8, w8_t, _ = cast(w_fc, weight, E4M3)
    p8, p8_t, _ = cast(w_proj, weight, E4M3)
    before = torch._scaled_mm(
        x8, w8.t(), activation, weight, bias=b_fc.to(x.dtype), out_dtype=x.dtype
    )
    after8, after8_t, _ = cast(before, activation, E4M3, "gelu")
    y = torch._scaled_mm(
        after8, p8.t(), activation, weight, bias=b_proj.to(x.dtype), out_dtype=x.dtype
    )
    return [y, before, after8_t, x8_t, w8_t, p8_t]


@mlp_products_fp8.register_fake
def _(x, w_fc, b_fc, w_proj, b_proj):
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (N, C) bf16, dw_fc (F, C), db_fc (F,), dw_proj (C, F) float32. largest: of all |dy|."""
    weight, activation = constant(WEIGHT, dy.device), constant(ACTIVATION, dy.device)
    scale = (largest.float() / 57344).clamp(min=1e-30)
    dy8, dy8_t, _ = cast(dy, scale, E5M2)
    dafter = torch._scaled_mm(dy8, p8_t.t(), scale, weight, out_dtype=dy.dtype)
    wide = scale * HEADROOM
    d8, d8_t, sums = cast(dafter, wide, E5M2, "dgelu", before)
    dx = torch._scaled_mm(d8, w8_t.t(), wide, weight, out_dtype=dy.dtype)
    dw_fc = torch._scaled_mm(d8_t, x8_t.t(), wide, activation, out_dtype=torch.float32)
    dw_proj = torch._scaled_mm(dy8_t, after8_t.t(), scale, activation, out_dtype=torch.float32)
    return dx, dw_fc, sums.sum(0), dw_proj


@mlp_gradients_fp8.register_fake
def _(dy, largest, before, after8_t, x8_t, w8_t, p8_t):
    C, F = dy.size(1), before.size(1)
    return torch.empty_like(dy), *(
        dy.new_empty(shape, dtype=torch.float32) for shape in ((F, C), (F,), (C, F))
    )


def keep(ctx, inputs, output):
    # no gradients of zeros for the results that are for the backward pass alone
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def backward(ctx, grads):
    dy = grads[0].contiguous()
    # the sum and amax out here, where torch.compile can fuse them
    return *mlp_gradients_fp8(dy, dy.abs().amax(), *ctx.saved_tensors), dy.sum(
        0, dtype=torch.float32
    )


mlp_products_fp8.register_autograd(backward, setup_context=keep)


class Fp8MLP(FusedMLP):
    """The same in 8 bits, rounded from the 32-bit weights themselves."""

    reads = torch.float32

    def products(self, x, *weights):
        if x.size(0) % 16:  # the hardware multiplies 8-bit rows of whole 16 bytes alone
            return super().products(x, *weights)
        return mlp_products_fp8(x, *weights)[0]
