"""A lower bound of the time of a step: matmuls, attention, and elementwise memory traffic at copy speed.

It is added up from the times of the parts in readme.assets/runs/floor.jsonl, which were measured by a
program in commit f21a7f5; docs/LOG.md#floor has the results. Casts of the weights, bias gradients, gradient
accumulation and gaps between kernels are not included, because they could be hidden or avoided.
"""

WAYS = ("forward", "dgrad", "wgrad")  # of a matmul: output, gradient of input, gradient of weight
BACKENDS = ("cudnn", "flash", "efficient", "math")  # attention kernels

# Elementwise memory traffic of a layer, in passes over one (N, C) tensor with 2 bytes per number.
# Residual addition and LayerNorm, twice per layer: the forward pass reads x and the addend, and writes
# the new x and its norm; the backward pass reads the gradients of the norm and of the residual stream
# and x, and writes the new gradient.
NORMS = 2 * (4 + 4)
GELU = {  # width 4 C
    # its input is written in the forward pass and read in the backward pass
    "inside the products": 2 * 4,
    # in the kernels that cast to 8 bits, each of which reads 16 bits and writes 8 bits twice: for x,
    # GELU, the gradient of the output, and the hidden gradient with GELU's input
    "in the casts to 8 bits": (1 + 1) + (4 + 4) + (1 + 1) + (2 * 4 + 4),
}
IN_8_BITS = ("fc", "fc2", "head")
# per micro-step: write the embedding, read its gradient; last norm: read and write, in backward read two
# and write one
ONCE = 7


def matmuls(config):
    """{name: (inputs, outputs, count)} of a model's linear layers."""
    C, L, V = config.n_embd, config.n_layer, config.padded_vocab_size
    blocks = {"qkv": (C, 3 * C, L), "proj": (C, C, L), "fc": (C, 4 * C, L), "fc2": (4 * C, C, L)}
    return blocks | {"head": (C, V, 1)}


def traffic(config, positions, gelu):
    """(bytes of elementwise work, bytes of logits in the loss) of a micro-step. gelu: a key of GELU."""
    passes = config.n_layer * (NORMS + GELU[gelu]) + ONCE
    return passes * positions * config.n_embd * 2, 2 * positions * config.padded_vocab_size * 2


def isolated_ms(ms, config, in_8_bits=()):
    """(ms of matmuls and attention in a micro-step, fastest attention backend). ms: times of single
    operations. in_8_bits: names of the matmuls in 8 bits."""
    sizes = {f"fp8 {p}" if p in in_8_bits else p: n for p, (_, _, n) in matmuls(config).items()}
    total = sum(n * ms[f"{name} {way}"] for name, n in sizes.items() for way in WAYS)
    sums = {b: ms[f"attention {b} forward"] + ms[f"attention {b} backward"] for b in BACKENDS}
    best = min(sums, key=sums.get)
    return total + config.n_layer * sums[best], best
