"""Lower bounds on the time of a kernel and of a training step, from a GPU's datasheet.

A kernel takes at least its FLOPs / peak FLOP/s and its bytes / bandwidth (the roofline model, Williams
et al. 2009). play.ipynb compares bound_of with the ladder that bench/ladder.py recorded.
"""

# an H200's datasheet: FLOP/s without sparsity, bytes/s
H200 = dict(fp32=67e12, tf32=495e12, bf16=989e12, fp8=1979e12, bandwidth=4.8e12)


def product(n, k, m, size):
    """FLOPs and bytes of (n, k) @ (k, m): each output is a sum of k products."""
    return 2 * n * k * m, size * (n * k + k * m + n * m)


def elementwise(n, flops_each, passes, size):
    """FLOPs and bytes; a pass reads or writes one tensor."""
    return n * flops_each, n * passes * size


def attention(B, H, T, D, size):
    """Fused and causal: half of two T x T x D matmuls; q, k, v and output are in memory."""
    return 2 * B * H * T * T * D, 4 * B * H * T * D * size


def bound_of(on, B, T, L, C, H, V, micro_steps):
    """Lower bound {part: ms} of a micro-step on an H200 with the rungs `on` (see rungs.RUNGS).

    Eager PyTorch reads or writes memory for every operand of every operation. A fused kernel does so
    only for its inputs and outputs. The passes below are counted from the code of each rung.
    """
    ms = dict.fromkeys(("matmul", "attention", "elementwise", "loss", "optimizer"), 0)
    N, S, P = B * T, B * H * T * T, 12 * L * C * C + V * C  # positions, scores, parameters
    kind = next(kind for kind in ("bf16", "tf32", "fp32") if kind in on)
    e = 2 if kind == "bf16" else 4  # bytes per matmul input and output
    r = e if "bf16_residual" in on else 4  # bytes per number of the residual stream

    def add(part, kind, flops, moved):
        ms[part] += 1000 * max(flops / H200[kind], moved / H200["bandwidth"])

    attn, mlp = [("", C, 3 * C), ("", C, C)], [("fp8_mlp", C, 4 * C), ("fp8_mlp", 4 * C, C)]
    for rung, k, m in (attn + mlp) * L + [("fp8_head", C, V)]:
        flops, moved = product(N, k, m, e)  # forward, input and weight gradients
        add("matmul", "fp8" if rung in on else kind, 3 * flops, 3 * moved)
    if "flash" in on:  # causal, and backward recomputes the scores: half of 2 + 5 matmuls
        add("attention", kind, 7 * S * C // H * L, 12 * N * C * e * L)
    else:  # 2 + 4 matmuls; 13 passes over the scores (scale, mask, softmax, cast), fused 5
        add("matmul", kind, 12 * S * C // H * L, 6 * S * e * L)
        add("attention", "fp32", 0, (5 if "compile" in on else 13) * S * e * L)
    # passes of width C: norms and additions; then GELU
    stream = 16 if "compile" in on else 22
    gelu = 24 if "fp8_mlp" in on else 8 if "fused_mlp" in on else 20
    add("elementwise", "fp32", 0, N * C * L * (stream * r + gelu * e))
    logit = 2 * e if "fused_loss" in on else 4 * e if "compile" in on else 24 + 2 * e  # bytes each
    add("loss", "fp32", 0, N * V * logit)
    # fused AdamW reads weight, gradient and two moments, writes three: 7 x 4 bytes; loop: 21 x 4
    add("optimizer", "fp32", 0, P * (28 if "fused_adamw" in on else 84) / micro_steps)
    return ms
