"""What the floor of a step is made of: products, attention, and elementwise traffic at copy speed.

play.ipynb adds it up from the parts' times in readme.assets/runs/floor.jsonl (appendix B); commit
f21a7f5 has the program that measured them. Not in it, as they could be hidden or avoided: casts of
the weights, bias gradients, sums of gradients over micro-steps, gaps between kernels.
"""

WAYS = ("forward", "dgrad", "wgrad")  # of a product: output, gradient of the input, of the weight
BACKENDS = ("cudnn", "flash", "efficient", "math")  # attention's kernels

# Elementwise traffic of a layer, in passes over one (N, C) tensor of 2 bytes a number. Twice a layer
# residual and norm: forward x and what is added to it are read, the new x and its norm are written;
# backward the norm's gradient, x and the stream's gradient are read, its new one is written.
NORMS = 2 * (4 + 4)
GELU = {  # 4 C wide
    # its input is written for the backward pass, and read there
    "inside the products": 2 * 4,
    # in the kernels that cast for 8-bit products, each of which reads 16 bits and writes 8 twice: of
    # x, GELU, the output's gradient, and the hidden gradient, with GELU's input
    "in the casts to 8 bits": (1 + 1) + (4 + 4) + (1 + 1) + (2 * 4 + 4),
}
IN_8_BITS = ("fc", "fc2", "head")
ONCE = 7  # a micro-step: embedding out, its gradient in; last norm in and out, back two in, one out


def products(config):
    """{name: (inputs, outputs, how many of them in a model)} of its linear layers."""
    C, L, V = config.n_embd, config.n_layer, config.padded_vocab_size
    blocks = {"qkv": (C, 3 * C, L), "proj": (C, C, L), "fc": (C, 4 * C, L), "fc2": (4 * C, C, L)}
    return blocks | {"head": (C, V, 1)}


def traffic(config, positions, gelu):
    """(bytes of elementwise work, bytes of the loss on its logits) of a micro-step; gelu: one of
    GELU."""
    passes = config.n_layer * (NORMS + GELU[gelu]) + ONCE
    return passes * positions * config.n_embd * 2, 2 * positions * config.padded_vocab_size * 2


def isolated_ms(ms, config, in_8_bits=()):
    """(products and attention of a micro-step from their own times {op: ms}, the fastest
    attention); in_8_bits names products."""
    sizes = {f"fp8 {p}" if p in in_8_bits else p: n for p, (_, _, n) in products(config).items()}
    total = sum(n * ms[f"{name} {way}"] for name, n in sizes.items() for way in WAYS)
    sums = {b: ms[f"attention {b} forward"] + ms[f"attention {b} backward"] for b in BACKENDS}
    best = min(sums, key=sums.get)
    return total + config.n_layer * sums[best], best
