"""Text from a model, token by token: a cache of keys and values, and the choice of a token.

What it asks of a model: model(idx, position=, mask=, cache=) gives logits, and model.config has
block_size, vocab_size and document_mask. Shape letters: B rows, T new tokens, S all tokens so far,
H heads, D head size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.cli import UserError
from lab.data.document_mask import document_mask
from lab.device import Underway

# Not cuDNN's, which plans anew for each length of the cache (docs/LOG.md).
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class KVCache:
    """Keys and values of the tokens so far, so that the next one costs one position, not all.

    What keeps something of each token calls append, and nothing else: a cache that keeps it in
    another way fits too.
    A cache may serve one text after another, of as many rows: generate clears it. With a `step`
    (see lab.text_stream.fast_step) single tokens go through that.
    """

    def __init__(self, length, step=None):
        self.length, self.step = length, step  # tokens that there is room for
        self.layers = {}  # layer: keys, values (B, H, length, D)
        self.held = {}  # layer: tokens in it

    def clear(self):
        self.held = {}

    def append(self, layer, k, v):
        """k and v (B, H, T, D) of new tokens -> those of all tokens so far (B, H, S, D)."""
        if layer not in self.layers:  # shape, type and device are those of what comes first
            room = (*k.shape[:2], self.length, k.size(3))
            # zeros, as what a mask hides is still multiplied by 0: a NaN would stay one
            self.layers[layer] = k.new_zeros(room), v.new_zeros(room)
            for memory in self.layers[layer] if self.step else ():
                torch._dynamo.mark_static_address(memory)
        keys, values = self.layers[layer]
        start = self.held.get(layer, 0)
        end = self.held[layer] = start + k.size(2)
        keys[:, :, start:end], values[:, :, start:end] = k, v
        return keys[:, :, :end], values[:, :, :end]


class FixedCache:
    """A KVCache's memory at one place (1,) in it, as a compiled step sees it: no shape ever
    changes. All of the memory is read, and a mask hides what is not yet written."""

    def __init__(self, layers, place):
        self.layers, self.place = layers, place

    def append(self, layer, k, v):
        return [
            kept.index_copy_(2, self.place, new) for kept, new in zip(self.layers[layer], (k, v))
        ]


def compiled(model):
    """model for one more token, compiled: on a GPU it is recorded once as a CUDA graph, and then
    the CPU launches one thing for a token instead of some hundred. The first two tokens of a
    cache take the time for that."""

    def step(token, place, mask, layers):
        if mask is None:  # all that is written is seen
            keys = next(iter(layers.values()))[0]
            mask = torch.arange(keys.size(2), device=keys.device)[None, None, None] <= place
        return model(token, position=place, mask=mask, cache=FixedCache(layers, place))[0]

    return torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)


@torch.no_grad()
def generate(
    model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, cache=None
):
    """Yield the next token (B,) of each row of idx (B, T) and the logits (B, V) that it was drawn
    from, max_new_tokens times. The logits are the model's own, before temperature, top_k and top_p.

    `cache` is one to use again. Raises UserError for a prompt that is longer than the model's context."""
    block_size = model.config.block_size
    if idx.size(1) > block_size:
        raise UserError(
            f"a prompt of {idx.size(1)} tokens is longer than the model's context, "
            f"block_size={block_size}; shorten it"
        )
    cache = cache or KVCache(block_size)
    cache.clear()
    within = model.config.document_mask  # attention does not cross end-of-text, the last id
    new = idx  # tokens that are not in the cache
    for _ in range(max_new_tokens):
        if idx.size(1) > block_size:
            # A full window drops its older half: positions are absolute, so what is left gets new
            # ones, and its keys and values have to be computed again.
            new = idx = idx[:, -max(1, block_size // 2) :]
            cache.clear()
        start = idx.size(1) - new.size(1)
        position = torch.arange(start, idx.size(1), device=idx.device)
        mask = document_mask(idx, model.config.vocab_size - 1, start) if within else None
        if start and cache.step:
            if within:
                mask = F.pad(mask, (0, cache.length - idx.size(1)))  # False: not yet written
            logits = cache.step(new, position, mask, cache.layers)
        else:
            with sdpa_kernel(KERNELS):
                logits, _ = model(new, position=position, mask=mask, cache=cache)
        logits = logits[:, -1].to(torch.float32, copy=True)  # (B, V); a step may reuse its memory
        token = sample_token(logits, temperature, top_k, top_p, generator)
        yield token, logits
        idx = torch.cat([idx, token[:, None]], dim=1)
        new = token[:, None]


def read_ahead(pairs):
    """The pairs of generate, with the tokens of a CUDA device on the CPU, each when the next one is
    begun: else the device would stand still while a token is read and the next step is launched."""
    waiting = []
    for token, logits in pairs:
        if not token.is_cuda:
            yield token, logits
            continue
        waiting.append((Underway(token), logits))
        if len(waiting) == 2:
            copy, its_logits = waiting.pop(0)
            yield copy.arrive(), its_logits
    for copy, its_logits in waiting:
        yield copy.arrive(), its_logits


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token (B,) from logits (B, V).

    temperature 0 takes the likeliest. top_k keeps the k likeliest (0: all), and those that are as
    likely as the last of them; top_p the fewest whose probabilities add up to it (Holtzman et al.
    2020).
    """
    if temperature < 1e-30:  # 0, or so small that the division would overflow
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(descending=True)
        drop = probs.cumsum(dim=-1) - probs >= top_p  # keep a token if those above it miss top_p
        drop[:, 0] = False  # also where top_p is 0 in 32 bits
        logits = logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
