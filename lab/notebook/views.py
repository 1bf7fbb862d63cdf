"""Interactive views of probabilities, attention weights and masks, called from play.ipynb."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lab.cli import require
from lab.notebook.widget import Widget, readable, visible

BARS = 12  # tokens with a bar of their own
MAX_PAIRS = 15_000  # pairs of positions in all masks of a page
MAX_DIGITS = 42_000  # base-64 digits of all attention weights of a page; pages stay below 60 KB
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def next_token_bars(tokens: Sequence[str], logits: Any) -> Widget:
    """Bars of the most probable next tokens, with sliders for temperature, top-k and top-p.

    tokens: the whole vocabulary as text. logits (V,): a tensor or a sequence, of the same length. The
    softmax is over all V, in the order of lab.inference.generate: temperature, then top-k, then top-p
    of the rest.
    """
    values = [float(x) for x in _to_list(logits)]
    require(
        len(values) == len(tokens),
        f"logits has {len(values)} values and tokens has {len(tokens)}; pass one logit per token",
    )
    require(values and all(map(math.isfinite, values)), "logits must be finite and not empty")
    order = sorted(range(len(values)), key=lambda i: -values[i])
    names, top = [visible(tokens[i]) for i in order[:BARS]], values[order[0]]
    total = sum(math.exp(x - top) for x in values)
    lines = [
        f"{name:>12}  {100 * math.exp(values[i] - top) / total:5.1f} %"
        for name, i in zip(names, order)
    ]
    data = dict(names=names, logits=[round(values[i], 5) for i in order])
    return Widget("next_token_bars.html.j2", "\n".join(lines), data)


def attention_view(
    tokens: Sequence[str], weights: Any, layer: int = 0, head: int = 0, title: str = ""
) -> Widget:
    """Attention weights of a text: pick a layer and a head, point at a token to see where it looks.

    tokens: the T tokens as text. weights: (L, H, T, T) or (H, T, T), or a list of L tensors (H, T, T);
    row t has the weights of query t. The page has room for about 20,000 weights with a precision of
    0.1 % (weights above the diagonal do not count if they are 0), or twice as many with 2 %.
    """
    layers = [_to_list(w) for w in weights]
    if layers and not isinstance(layers[0][0][0], list):  # (H, T, T)
        layers = [layers]
    L, H, T = len(layers), len(layers[0]), len(tokens)
    require(
        all(len(m) == T and len(m[0]) == T for heads in layers for m in heads),
        f"weights has {len(layers[0][0])} positions and tokens has {T}; pass one token per position",
    )
    require(0 <= layer < L and 0 <= head < H, f"layer={layer}, head={head} must be below {L}, {H}")
    matrices = [m for heads in layers for m in heads]
    causal = not any(m[t][s] for m in matrices for t in range(T) for s in range(t + 1, T))
    count = sum(t + 1 if causal else T for t in range(T)) * L * H
    require(
        count <= MAX_DIGITS,
        f"weights has {count:,} values, and a page has room for {MAX_DIGITS:,}; pass fewer tokens, "
        "layers or heads",
    )
    digits = 2 if 2 * count <= MAX_DIGITS else 1
    packed = [
        "".join(_base64(p, digits) for t in range(T) for p in m[t][: t + 1 if causal else T])
        for m in matrices
    ]
    text = "".join(map(readable, tokens))
    lines = [f"layer {layer}, head {head}: the largest weight of each position"]
    for t, row in enumerate(layers[layer][head]):
        s = max(range(T), key=lambda s: row[s])
        lines.append(
            f"{t:4} {visible(tokens[t])} -> {s:4} {visible(tokens[s])}  {100 * row[s]:.0f} %"
        )
    data = dict(
        texts=list(map(readable, tokens)), names=list(map(visible, tokens)), layers=L, heads=H,
        layer=layer, head=head, causal=causal, digits=digits, weights=packed,
    )  # fmt: skip
    return Widget("attention.html.j2", "\n".join([text, *lines]), data, title=title)


def _base64(p: float, digits: int) -> str:
    """sqrt(p), p from 0 to 1, as base-64 digits: the root keeps small weights distinct."""
    n = round(math.sqrt(min(max(p, 0.0), 1.0)) * (64**digits - 1))
    return "".join(ALPHABET[n // 64**d % 64] for d in reversed(range(digits)))


def mask_view(
    tokens: Sequence[str], masks: Mapping[str, Any], row: int | None = None, title: str = ""
) -> Widget:
    """Attention masks: pick one, point at a row or a token to see which positions it may look at.

    masks: {name: (T, T)}, True at [t, s] if query t may see key s. row: the query shown first; the
    middle one by default.
    """
    T = len(tokens)
    require(masks and T, "masks and tokens must not be empty")
    require(
        T * T * len(masks) <= MAX_PAIRS,
        f"{len(masks)} masks of {T} tokens have {T * T * len(masks):,} pairs, and a page has room for "
        f"{MAX_PAIRS:,}; pass fewer tokens or masks",
    )
    packed, lines = {}, []
    for name, mask in masks.items():
        rows = _to_list(mask)
        require(
            len(rows) == T and all(len(one) == T for one in rows),
            f"mask {name!r} must have the shape ({T}, {T}), because there are {T} tokens",
        )
        packed[str(name)] = "".join("1" if seen else "0" for one in rows for seen in one)
        lines += [
            str(name),
            *("  " + "".join(" #" if seen else " ." for seen in one) for one in rows),
        ]
    data = dict(
        texts=list(map(readable, tokens)), names=list(map(visible, tokens)), masks=packed,
        row=T // 2 if row is None else row,
    )  # fmt: skip
    return Widget("mask.html.j2", "\n".join(lines), data, title=title)


def _to_list(values: Any) -> list:
    """A tensor, an array or nested sequences as nested lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_to_list(v) if isinstance(v, Sequence) or hasattr(v, "tolist") else v for v in values]
