"""Cross-entropy of a linear head without holding all logits in memory. Used by replace_modules.

At 64 x 1024 positions the logits of GPT-2 take 6.6 GB in bf16, and their gradient as much again. But
the gradient of the loss with respect to the logits, softmax minus one-hot, is known in the forward
pass. So the forward pass computes one chunk of logits at a time, replaces it by its gradient in place,
adds the chunk's part of dx and dweight, and reuses the memory for the next chunk. The backward pass
only multiplies dx and dweight by the gradient of the loss, a scalar. (The idea is from Liger-Kernel:
Hsu et al. 2024, section 3.2.)

Shape letters: N positions, n positions of a chunk, C channels, V rows of the head (padded vocabulary).
"""

# torch._scaled_mm has no public name
# pyright: reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.hardware import can_run_triton

# positions: 1.6 GB of bf16 logits at V = 50304, and matmuls large enough to run at full speed
CHUNK = 16384
SMALL = 2**26  # bytes of float32 logits; below this the plain head is used
# for fp8: dlogits lie in [-1, 1]; multiplied by this, they use e5m2's range, 2^-16 to 57344
GRAD_SCALE = 2.0**15


class FusedHeadLoss(nn.Module):
    """Replaces a model's head_loss: the same loss and gradients, in less memory.

    plain: the module that it replaces, still used for few positions and without gradients. fp8: compute
    the matmuls in 8 bits, which changes the gradients by a few percent (RTX 40, H100 and newer).
    """

    def __init__(self, plain: Any, fp8: bool = False):
        super().__init__()
        self.plain, self.fp8 = plain, fp8

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """x (N, C), weight (V, C), targets (N,) -> the summed loss, or with reduction "none" the loss of
        each position (N,). Targets of -1 are ignored."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.size(0) * weight.size(0) * 4 <= SMALL:
            return self.plain(x, weight, targets, reduction)
        if reduction == "none" or not torch.is_grad_enabled():
            chunks = zip(x.split(CHUNK // 4), targets.split(CHUNK // 4))
            losses = torch.cat([self.plain(rows, weight, t, "none") for rows, t in chunks])
            return losses if reduction == "none" else losses.sum()
        # 8-bit matmuls need rows whose size is a multiple of 16 bytes
        loss = fused_loss_fp8 if self.fp8 and x.size(0) % 16 == 0 else fused_loss
        return loss(x, weight, targets, self.plain.vocab_size)[0]


# a custom op, so that torch.compile does not break the graph here
@torch.library.custom_op("gpt2::fused_loss", mutates_args=())
def fused_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and its gradients: dx (N, C) in x's type, dweight (V, C) in
    weight's."""

    def chunk_loss_(logits, rows, scale):
        return loss_and_grad_(logits, targets[rows], vocab_size, scale)

    return loss_in_chunks(x, weight, chunk_loss_, CHUNK)


def loss_in_chunks(
    x: Tensor, weight: Tensor, chunk_loss_: Callable[..., Tensor], chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses of x (N, C) with the head weight (V, C), dx and dweight.

    chunk_loss_(logits (n, V), rows, scale) returns the losses (n,) of these rows of x, a slice, and
    replaces the logits by scale * dloss/dlogits."""
    # dlogits lie in [-1, 1], and most of them are far below fp16's smallest normal number, 6e-5
    scale = 1024.0 if x.dtype == torch.float16 else 1.0
    w = weight.to(x.dtype)
    losses = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
    # (n, V), reused by every chunk
    logits = torch.empty(min(chunk_size, x.size(0)), w.size(0), dtype=x.dtype, device=x.device)
    for i in range(0, x.size(0), chunk_size):
        rows = slice(i, i + chunk_size)
        inputs = x[rows]
        chunk = mm_into(logits[: inputs.size(0)], inputs, w.t())
        losses[rows] = chunk_loss_(chunk, rows, scale)
        mm_into(dx[rows], chunk, w)
        if x.is_cuda and x.dtype != weight.dtype:  # a 16-bit matmul, added to a float32 sum
            torch.addmm(dweight, chunk.t(), inputs, out_dtype=weight.dtype, out=dweight)
        else:
            dweight += chunk.t() @ inputs
    if scale != 1:
        dx, dweight = dx / scale, dweight / scale
    return losses.sum(), dx, dweight


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Write a @ b into `out` and return it. On macOS 14, torch.mm leaves an `out` that is a slice as it
    was (pytorch/pytorch#193385, mended in torch 2.14)."""
    return out.copy_(a @ b) if out.device.type == "mps" else torch.mm(a, b, out=out)


@fused_loss.register_fake
def empty_results(x, weight, targets, vocab_size):
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


def save_gradients(ctx, inputs, output):
    # dx and dweight are outputs too; without this, autograd allocates zero gradients for them
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], output[2])


def multiply_gradients(ctx, grad_loss, *_):
    dx, dweight = ctx.saved_tensors
    return (dx * grad_loss).to(dx.dtype), dweight * grad_loss, None, None


fused_loss.register_autograd(multiply_gradients, setup_context=save_gradients)


def loss_and_grad_(logits: Tensor, targets: Tensor, vocab_size: int, scale: float) -> Tensor:
    """Return the losses (n,) of a chunk of logits (n, V), and replace the logits by
    scale * dloss/dlogits."""
    if can_run_triton(logits.device):
        # one kernel reads each row twice, the second time mostly from L2 cache, and writes it once
        losses = torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
        sizes = logits.stride(0), logits.size(1), vocab_size
        launch = kernels()["loss"][(logits.size(0),)]
        launch(logits, targets, losses, *sizes, scale, BLOCK=2048, num_warps=32)
        return losses
    scores = logits.float()
    scores[:, vocab_size:] = float("-inf")
    has_target = targets >= 0
    target = targets.clamp(min=0)[:, None]
    log_z = scores.logsumexp(dim=1)
    losses = (log_z - scores.gather(1, target)[:, 0]) * has_target
    grad = scores.sub_(log_z[:, None]).exp_()  # softmax; minus one-hot:
    grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
    logits.copy_(grad.mul_((has_target * scale)[:, None]))
    return losses


@torch.library.custom_op("gpt2::fused_loss_fp8", mutates_args=())
def fused_loss_fp8(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """fused_loss with its three matmuls in 8 bits, at twice the rate of 16 bits (H100 and newer). Because
    of rounding, dx and dweight differ from those of fused_loss by a random error of a few percent.

    x and weight are in e4m3 (3 mantissa bits), each scaled so that its largest value becomes 448, the
    largest of the format; the gradient of the logits is in e5m2 (2 mantissa bits and a larger range;
    Micikevicius et al. 2022, FP8 formats, section 3). Both factors of an 8-bit matmul must be contiguous
    along the axis that is summed over, so three of them are stored twice. Hopper accumulates 8-bit
    products with about 14 bits. Without fast accumulation, as here, these partial sums are added in
    float32 at intervals; with it, the error of dweight is 5 times as large, and a step is 0.3 % faster.
    """
    x8, x_scale = to_e4m3(x)
    w8, w_scale = to_e4m3(weight)
    w8_t = w8.t().contiguous()  # (C, V)
    grad_scale = torch.full_like(x_scale, 1 / GRAD_SCALE)
    losses = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
    for i in range(0, x.size(0), CHUNK):
        rows = x8[i : i + CHUNK]  # (n, C)
        rows_t = rows.t().contiguous()  # (C, n)
        logits = torch._scaled_mm(rows, w8.t(), x_scale, w_scale, out_dtype=x.dtype)  # (n, V)
        losses[i : i + CHUNK], grad, grad_t = triton_loss_and_grad_e5m2(
            logits, targets[i : i + CHUNK], vocab_size
        )
        dx[i : i + CHUNK] = torch._scaled_mm(grad, w8_t.t(), grad_scale, w_scale, out_dtype=x.dtype)
        dweight += torch._scaled_mm(
            grad_t, rows_t.t(), grad_scale, x_scale, out_dtype=torch.float32
        )
    return losses.sum(), dx, dweight


fused_loss_fp8.register_fake(empty_results)
fused_loss_fp8.register_autograd(multiply_gradients, setup_context=save_gradients)


def to_e4m3(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tensor / scale in e4m3, scale), where scale maps the largest value to 448."""
    largest = torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32)
    scale = (largest / 448).clamp(min=1e-12)
    inverse = (1 / scale).to(tensor.dtype)  # rounded; the returned scale is computed from it
    return (tensor * inverse).to(torch.float8_e4m3fn), 1 / inverse.float()


def triton_loss_and_grad_e5m2(
    logits: Tensor, targets: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (n,), and GRAD_SCALE * dloss/dlogits as (n, V) and transposed as (V, n), both
    contiguous."""
    n, padded = logits.shape
    losses, log2_z = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    grad = torch.empty(n, padded, dtype=torch.float8_e5m2, device=logits.device)
    grad_t = torch.empty(padded, n, dtype=torch.float8_e5m2, device=logits.device)
    kernels()["row"][(n,)](
        logits, targets, losses, log2_z, padded, vocab_size, BLOCK=1024, num_warps=4
    )
    grid = (-(-padded // 128), -(-n // 128))
    kernels()["tile"][grid](
        logits, targets, log2_z, grad, grad_t, n, padded, GRAD_SCALE, TILE=128, num_warps=8
    )
    grad.view(torch.uint8)[:, vocab_size:] = 0
    grad_t.view(torch.uint8)[vocab_size:] = 0
    return losses, grad, grad_t


@functools.cache
def kernels() -> dict[str, Any]:
    """The Triton kernels: "loss", "row" and "tile". Defined on first use, so that importing this file does
    not need Triton."""
    import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def load_log2(logits, column, padded, vocab_size):
        """Logits in base 2, because the hardware has exp2; -inf outside the vocabulary."""
        z = tl.load(logits + column, mask=column < padded, other=0.0).to(tl.float32)
        z *= 1.4426950408889634  # log2(e)
        return tl.where(column < vocab_size, z, float("-inf"))

    @triton.jit
    def log2_sum_exp(logits, padded, vocab_size, BLOCK: tl.constexpr):
        """log2 of the softmax denominator of one row, by online softmax (Milakov and Gimelshein 2018), with
        a running maximum and sum in each lane. Four blocks are processed at a time, which saves
        exponentials."""
        lane = tl.arange(0, BLOCK)
        top = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, padded, 4 * BLOCK):
            z0 = load_log2(logits, start + lane, padded, vocab_size)
            z1 = load_log2(logits, start + BLOCK + lane, padded, vocab_size)
            z2 = load_log2(logits, start + 2 * BLOCK + lane, padded, vocab_size)
            z3 = load_log2(logits, start + 3 * BLOCK + lane, padded, vocab_size)
            higher = tl.maximum(tl.maximum(top, tl.maximum(z0, z1)), tl.maximum(z2, z3))
            total = total * tl.exp2(top - higher)
            total += (tl.exp2(z0 - higher) + tl.exp2(z1 - higher)) + (
                tl.exp2(z2 - higher) + tl.exp2(z3 - higher)
            )
            top = higher
        peak = tl.max(top, 0)
        return peak + tl.log2(tl.sum(total * tl.exp2(top - peak), 0))

    @triton.jit
    def loss(logits, targets, losses, stride, padded, vocab_size, scale, BLOCK: tl.constexpr):
        """Compute the loss of a row, and replace the row by its gradient."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        target = tl.load(targets + row)
        has_target = target >= 0
        log2_z = log2_sum_exp(logits, padded, vocab_size, BLOCK)
        hit = load_log2(logits, tl.maximum(target, 0), padded, vocab_size)
        # ln(2)
        tl.store(losses + row, tl.where(has_target, (log2_z - hit) * 0.6931471805599453, 0.0))
        tl.debug_barrier()  # every lane has read the target's logit before it is overwritten
        factor = tl.where(has_target, scale, 0.0)
        for start in range(0, padded, 4 * BLOCK):
            column = start + tl.arange(0, 4 * BLOCK)
            z = load_log2(logits, column, padded, vocab_size)
            tl.store(logits + column, tl.exp2(z - log2_z) * factor, mask=column < padded)
        tl.debug_barrier()
        if has_target:  # subtract the one-hot vector
            tl.store(logits + target, (tl.exp2(hit - log2_z) - 1.0) * factor)

    @triton.jit
    def row(logits, targets, losses, log2_zs, padded, vocab_size, BLOCK: tl.constexpr):
        """Compute the loss of a row and its softmax denominator."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * padded
        target = tl.load(targets + row)
        log2_z = log2_sum_exp(logits, padded, vocab_size, BLOCK)
        hit = load_log2(logits, tl.maximum(target, 0), padded, vocab_size)
        tl.store(losses + row, tl.where(target >= 0, (log2_z - hit) * 0.6931471805599453, 0.0))
        # without a target, the gradient must be 0
        tl.store(log2_zs + row, tl.where(target >= 0, log2_z, float("inf")))

    @triton.jit
    def scaled_softmax(z, log2_z, scale):
        return (tl.exp2(z.to(tl.float32) * 1.4426950408889634 - log2_z) * scale).to(tl.float8e5)

    @triton.jit
    def tile(logits, targets, log2_zs, grad, grad_t, n, padded, scale, TILE: tl.constexpr):
        """Write a tile of the gradient, and the same tile transposed. The gradient is computed twice, from
        the 16-bit logits and from their transpose, because Triton 3.7 writes transposed 8-bit numbers to
        wrong places. This takes 1 % longer (docs/LOG.md#torch-213)."""
        row = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
        column = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = (row < n)[:, None] & (column < padded)[None, :]
        inside_t = (column < padded)[:, None] & (row < n)[None, :]
        log2_z = tl.load(log2_zs + row, mask=row < n, other=float("inf"))
        z = tl.load(logits + row[:, None] * padded + column[None, :], mask=inside, other=0.0)
        g = scaled_softmax(z, log2_z[:, None], scale)
        g_t = scaled_softmax(tl.trans(z), log2_z[None, :], scale)
        tl.store(grad + row[:, None] * padded + column[None, :], g, mask=inside)
        tl.store(grad_t + column[:, None] * n + row[None, :], g_t, mask=inside_t)
        target = tl.load(targets + row, mask=row < n, other=-1)
        here = (target // TILE == tl.program_id(0)) & (target >= 0)
        tl.debug_barrier()
        hit = tl.load(logits + row * padded + target, mask=here, other=0.0).to(tl.float32)
        # subtract the one-hot vector
        g = ((tl.exp2(hit * 1.4426950408889634 - log2_z) - 1.0) * scale).to(tl.float8e5)
        tl.store(grad + row * padded + target, g, mask=here)
        tl.store(grad_t + target * n + row, g, mask=here)

    return {"loss": loss, "row": row, "tile": tile}
