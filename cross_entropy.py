"""Cross-entropy of a linear head without its logits in memory.

linear_cross_entropy(x, weight, targets, vocab_size) is what GPT.forward calls; the rest are its ways of computing it.
Shape letters: N positions, C channels, V rows of the head (padded vocabulary), n positions of a chunk.
"""

import torch
import torch.nn.functional as F


def loss_and_grad(logits, targets, vocab_size, grad_scale):
    """Cross-entropy of each row and its gradient with respect to the logits.

    logits (n, V) in any float type, targets (n,) with -1 for "no target here". Returns losses (n,) in float32, 0 where
    there is no target, and grad_scale * dloss/dlogits (n, V) in the logits' type.
    """
    columns = torch.arange(logits.size(1), device=logits.device)
    scores = logits.float().masked_fill(columns >= vocab_size, float("-inf"))  # pad columns: probability exactly 0
    has_target = targets >= 0
    log_z = scores.logsumexp(dim=1)
    losses = (log_z - scores.gather(1, targets.clamp(min=0)[:, None])[:, 0]) * has_target
    probs = (scores - log_z[:, None]).exp()
    one_hot = columns == targets[:, None]
    grad = (probs - one_hot.float()) * (has_target * grad_scale)[:, None]
    return losses, grad.to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the losses of a linear head, holding the logits of a few thousand positions at a time.

    At 64 x 1024 positions the logits of GPT-2 are 6.6 GB in bf16, and their gradient as much again. The loss is the
    last thing computed, so its gradient is known up to one factor already in the forward pass: each chunk of logits is
    made, turned into its gradient, multiplied into dx and dweight, and dropped. The backward pass only multiplies by
    that factor. (The idea is Liger-Kernel's: Hsu et al. 2024, section 3.2.)
    """

    CHUNK = 16384  # positions; 1.6 GB of bf16 logits at V = 50304, and products still large enough to run at full rate

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        # dlogits lie in [-1, 1]; most are far below fp16's smallest normal number 6e-5, so fp16 shifts them up
        scale = 1024.0 if x.dtype == torch.float16 else 1.0
        w = weight.to(x.dtype)  # (V, C)
        losses, dx = [], []
        dw = torch.zeros_like(weight)  # summed over chunks in float32, whatever the products are computed in
        for i in range(0, x.size(0), ChunkedCrossEntropy.CHUNK):
            rows = slice(i, i + ChunkedCrossEntropy.CHUNK)
            loss, dlogits = loss_and_grad(x[rows] @ w.t(), targets[rows], vocab_size, scale)
            losses.append(loss.sum())
            dx.append(dlogits @ w)
            dw += dlogits.t() @ x[rows]
        ctx.save_for_backward(torch.cat(dx), dw)
        ctx.scale = scale
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad_output):
        dx, dw = ctx.saved_tensors
        factor = grad_output / ctx.scale
        return (dx * factor).to(dx.dtype), dw * factor, None, None


def linear_cross_entropy(x, weight, targets, vocab_size, method="auto"):
    """Sum over the positions of the cross-entropy of softmax(x @ weight.T) against targets.

    x (N, C), weight (V, C) with V >= vocab_size, targets (N,) with -1 for "no target here". Columns from vocab_size on
    have no probability. Every method gives the same loss and gradients; they differ in memory and time.
    """
    if method == "auto":  # under 64 MiB of logits there is nothing to save; torch's kernel is opaque to torch.compile
        if x.size(0) * weight.size(0) * 4 <= 2**26:
            method = "plain"
        else:
            torch_has_it = hasattr(F, "linear_cross_entropy") and not torch.compiler.is_compiling()
            method = "torch" if torch_has_it else "chunked"
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if method == "chunked" and torch.is_grad_enabled():
        return ChunkedCrossEntropy.apply(x, weight, targets, vocab_size)
    if method in ("plain", "chunked"):  # without gradients chunks need no more than a loop
        n = x.size(0) if method == "plain" else ChunkedCrossEntropy.CHUNK
        chunks = zip(x.split(n), targets.split(n), strict=True)
        losses = [
            F.cross_entropy(F.linear(xs, weight)[:, :vocab_size].float(), ts, ignore_index=-1, reduction="sum")
            for xs, ts in chunks
        ]
        return torch.stack(losses).sum()
    weight = weight.to(x.dtype)
    pad_bias = None  # a bias of minus infinity takes the pad columns out of the softmax
    if weight.size(0) > vocab_size:
        pad_bias = torch.zeros(weight.size(0), dtype=x.dtype, device=x.device)
        pad_bias[vocab_size:] = torch.finfo(x.dtype).min / 2
    if method == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            x, weight, targets, linear_bias=pad_bias, reduction="sum", ignore_index=-1, options=options
        )
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # optional

    return LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, targets, pad_bias, None, -1, 0.0, 0.0, "sum", None, False, torch.float32
    )[0]
