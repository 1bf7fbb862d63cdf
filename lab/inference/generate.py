"""Generate text token by token: the key-value cache, the decode loop, and sampling from logits.

A model must support model(idx, position=, mask=, cache=) -> (logits, _) and have a config with
block_size, vocab_size, document_mask and end_of_text. Shape letters: B rows, T new tokens, S all
tokens so far, H heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.cli import UserError
from lab.data.document_mask import document_mask
from lab.distributed import AsyncCopy

# without cuDNN's attention, which builds a new plan for each length of the cache (docs/LOG.md)
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# defaults of sample.py and lab serve; chats are less random: a tuned laptop model answers more of the
# questions that it was tuned on correctly (bench/chats.py --tenth 1 --temperature T)
TEMPERATURE, CHAT_TEMPERATURE = 0.8, 0.5

CacheLayers = dict[Any, tuple[Tensor, Tensor]]  # layer: keys, values (B, H, length, D)


class KVCache:
    """Keys and values of the tokens so far, so that a new token needs a forward pass of one position.

    Attention layers only call `update`, so a cache with other storage can be used instead. A cache can be
    used for one text after another, all with the same number of rows; generate clears it. length:
    capacity in tokens. step: computes single tokens if given (see make_decode_step).
    """

    def __init__(self, length: int, step: Callable | None = None):
        self.length, self.step = length, step
        self.layers: CacheLayers = {}
        self.lengths: dict[Any, int] = {}  # layer: number of tokens stored

    def clear(self) -> None:
        self.lengths = {}

    def update(self, layer: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, T, D) of new tokens; return those of all tokens so far (B, H, S, D)."""
        if layer not in self.layers:
            shape = (*k.shape[:2], self.length, k.size(3))
            # zeros instead of empty, because masked values are multiplied by 0, and 0 * NaN is NaN
            self.layers[layer] = k.new_zeros(shape), v.new_zeros(shape)
            if self.step:  # a CUDA graph then reads it in place instead of copying it
                for buffer in self.layers[layer]:
                    torch._dynamo.mark_static_address(buffer)
        keys, values = self.layers[layer]
        start = self.lengths.get(layer, 0)
        end = self.lengths[layer] = start + k.size(2)
        keys[:, :, start:end], values[:, :, start:end] = k, v
        return keys[:, :, :end], values[:, :, :end]


class StaticKVCache:
    """A cache with fixed shapes for a compiled step: one new token at `position` (1,).

    It uses the memory of a KVCache. update returns all of it; the caller masks the unfilled part.
    """

    def __init__(self, layers: CacheLayers, position: Tensor):
        self.layers, self.position = layers, position

    def update(self, layer: Any, k: Tensor, v: Tensor) -> list[Tensor]:
        pairs = zip(self.layers[layer], (k, v))
        return [buffer.index_copy_(2, self.position, new) for buffer, new in pairs]


def compile_decode_step(model: Any) -> Callable:
    """Return a `step` for KVCache: the model for one new token, compiled into a CUDA graph on a GPU.

    The CPU then launches one graph per token instead of hundreds of kernels. The first two tokens of each
    cache take seconds, because the graph is compiled and recorded.
    """

    def step(token, position, mask, layers):
        if mask is None:
            keys = next(iter(layers.values()))[0]
            mask = torch.arange(keys.size(2), device=keys.device)[None, None, None] <= position
        cache = StaticKVCache(layers, position)
        return model(token, position=position, mask=mask, cache=cache)[0]

    return torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)


@torch.no_grad()
def generate(
    model: Any, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int = 0,
    top_p: float = 1.0, generator: torch.Generator | None = None, cache: KVCache | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield the next token (B,) of each row of idx (B, T), and the logits (B, V) it was sampled from (before
    temperature, top_k and top_p), max_new_tokens times.

    It does not stop at end-of-text, because rows end at different times. cache: a KVCache to reuse. Raises
    UserError for a prompt longer than the model's context.
    """
    block_size = model.config.block_size
    if idx.size(1) > block_size:
        raise UserError(
            f"a prompt of {idx.size(1)} tokens is longer than the model's context, "
            f"block_size={block_size}; shorten it"
        )
    cache = cache or KVCache(block_size)
    cache.clear()
    mask, new = None, idx  # new: tokens that are not in the cache yet
    for _ in range(max_new_tokens):
        if idx.size(1) > block_size:
            # Slide the window: drop the older half of the tokens. Positions are absolute, so the other
            # tokens get new positions, and their keys and values are computed again.
            new = idx = idx[:, -max(1, block_size // 2) :]
            cache.clear()
        start = idx.size(1) - new.size(1)
        position = torch.arange(start, idx.size(1), device=idx.device)
        if model.config.document_mask:
            mask = document_mask(idx, model.config.end_of_text, start)  # (B, 1, T, S)
        if start and cache.step:
            if mask is not None:  # step uses the whole cache; False: not filled yet
                mask = F.pad(mask, (0, cache.length - idx.size(1)))
            logits = cache.step(new, position, mask, cache.layers)
        else:
            with sdpa_kernel(SDPA_BACKENDS):
                logits, _ = model(new, position=position, mask=mask, cache=cache)
        logits = logits[:, -1].to(torch.float32, copy=True)  # (B, V); a copy: step overwrites it
        token = sample_token(logits, temperature, top_k, top_p, generator)
        yield token, logits
        idx = torch.cat([idx, token[:, None]], dim=1)
        new = token[:, None]


def window(ids: list[int], block_size: int) -> list[int]:
    """What generate keeps of `ids` as context: each time it is full, the older half is dropped."""
    dropped = block_size + 1 - max(1, block_size // 2)
    return ids[dropped * max(0, -(-(len(ids) - block_size) // dropped)) :]


def prefetch_tokens(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of generate, with tokens copied to the CPU while the GPU computes the next token.

    We wait for a copy only after launching the next step. Otherwise the GPU would idle while the CPU
    reads a token and launches the next step.
    """
    pending = []
    for token, logits in pairs:
        if not token.is_cuda:
            yield token, logits
            continue
        pending.append((AsyncCopy(token), logits))
        if len(pending) == 2:
            copy, its_logits = pending.pop(0)
            yield copy.wait(), its_logits
    for copy, its_logits in pending:
        yield copy.wait(), its_logits


def sample_token(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Sample a token (B,) for each row of logits (B, V).

    temperature 0 is greedy. top_k keeps the k most probable tokens (0: all) and those tied with the
    last of them. top_p keeps the most probable tokens until their probabilities add up to top_p
    (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature < 1e-30:  # 0, or so small that the division would overflow
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(descending=True)
        drop = probs.cumsum(dim=-1) - probs >= top_p  # more probable tokens already add up to top_p
        drop[:, 0] = False  # keep the first one, even if top_p rounds to 0 in float32
        logits = logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    probs = logits.softmax(dim=-1)
    if probs.device.type == "mps":
        # multinomial may return a token of probability 0 there, because the noise that it divides by
        # may be 0 (pytorch/pytorch#192577, torch 2.13). This is the same computation with a lower bound.
        noise = torch.empty_like(probs).exponential_(generator=generator).clamp_(min=1e-30)
        return (probs / noise).argmax(dim=-1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
