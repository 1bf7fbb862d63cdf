"""The next token of one text by GPT-2: five kernels a block, and one launch for all of them.

One new token reads every weight once and multiplies each a single time, so the GPU waits for its
memory, and a kernel that starts or ends is time in which nothing is read. A compiled block has some
fifteen kernels. Here a product takes what stands around it along: the LayerNorm of what it reads,
the GELU or the addition of what it writes. Attention keeps its key and value itself, and reads
the cache as far as it is filled. On Hopper and newer a kernel also loads its weights while the
one before it ends ("programmatic dependent launch", CUDA's programming guide). A CUDA graph
records all kernels once and starts them together.

Shape letters: C channels, H heads, D head size, L tokens that the cache has room for.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F

from lab.generate import KVCache

# what of a block has parameters, by the names that GPT-2 was published with
PARTS = {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"}


class OneTokenStep:
    """A KVCache's `step` for one text, of a model that `knows` says yes to."""

    def __init__(self, model):
        self.model, self.graphs = model, {}

    def __call__(self, token, position, mask, layers):
        """token (1, 1), position (1,), layers {layer: keys, values (1, H, L, D)} -> logits
        (1, 1, V), to be used before the next call. mask is None: all that is cached is seen."""
        place = layers[0][0].data_ptr()  # a graph is for the memory that it was recorded with
        if place not in self.graphs:
            token, position = token.clone(), position.clone()
            self.logits(token, position, layers)  # compiles, which nothing recorded may do
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.logits(token, position, layers)
            self.graphs[place] = graph, token, position, logits
        graph, *inputs, logits = self.graphs[place]
        for kept, new in zip(inputs, (token, position)):
            kept.copy_(new)
        graph.replay()
        return logits

    def stream(self, token, position, layers):
        """The residual stream (C,) of `token` after the last block."""
        parts = self.model.transformer
        x = F.embedding(token[0], parts.wte.weight) + F.embedding(position, parts.wpe.weight)
        for layer, block in enumerate(parts.h):
            qkv = product(x, block.attn.c_attn, norm=block.ln_1)
            y = attend(qkv, *layers[layer], position)
            x = product(y, block.attn.c_proj, add=x)
            wide = product(x, block.mlp.c_fc, norm=block.ln_2, gelu=True)
            x = product(wide, block.mlp.c_proj, add=x)
        return x

    @torch.no_grad()
    def logits(self, token, position, layers):
        x = self.stream(token, position, layers)
        logits = product(x, self.model.lm_head, norm=self.model.transformer.ln_f)
        return logits[None, None, : self.model.config.vocab_size]


@torch.no_grad()
def knows(model):
    """Whether OneTokenStep computes what `model` does. The parts must have GPT-2's names, and for four
    tokens the outcome must be the model's own: a learner may have changed the forward of a block."""
    weight, config = next(model.parameters()), model.config
    block, head_size = model.transformer.h[0], config.n_embd // config.n_head
    with_parameters = {n for n, m in block.named_modules() if list(m.parameters(recurse=False))}
    if with_parameters != PARTS or head_size & (head_size - 1):  # Triton wants powers of 2
        return False
    if not weight.is_cuda or config.document_mask or importlib.util.find_spec("triton") is None:
        return False
    cache, idx = KVCache(4), torch.arange(4, device=weight.device)[None]
    model(idx[:, :3], cache=cache)
    x = OneTokenStep(model).stream(idx[:, 3:], idx[0, 3:], cache.layers)
    expected = model.hidden(idx[:, 3:], position=idx[0, 3:], cache=cache)[0, 0].float()
    error = (model.transformer.ln_f(x).float() - expected).norm() / expected.norm()
    return error.item() < 0.1  # 16 bits, rounded elsewhere


def product(x, linear, norm=None, gelu=False, add=None):
    """linear(x) of one row: x of any shape with C numbers -> (N,), with a LayerNorm before it, GELU or
    an addition after it. Sums are in 32 bits and rounded once."""
    N, C = linear.weight.shape
    y = x.new_empty(N)
    rows = 8 if N > 2 * C else 4 if N >= C else 1  # of the weight in a program: measured on an H200
    of_norm = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    has = norm is not None, linear.bias is not None, gelu, add is not None
    sizes = rows, 1 << (C - 1).bit_length()
    launch = kernels()["product"][(-(-N // rows),)]
    launch(x, linear.weight, linear.bias, *of_norm, add, y, N, C, *has, *sizes, **early(x))
    return y


def attend(qkv, keys, values, position):
    """Attention of one token: qkv (3 C,) -> (C,). Its key and value go to `position` in keys and
    values (1, H, L, D), of which all before it is seen."""
    _, H, L, D = keys.shape
    y = qkv.new_empty(H * D)
    sizes = L, D**-0.5, H * D, D, 256
    kernels()["attend"][(H,)](qkv, keys, values, position, y, *sizes, num_warps=8, **early(qkv))
    return y


def early(x):
    """Launch flags: whether kernels may start before the one that they wait for has ended."""
    hopper = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": hopper} | ({"launch_pdl": True} if hopper else {})


@functools.cache
def kernels():
    """{"product", "attend"}, compiled on first use: importing this file needs no Triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def wait(EARLY: tl.constexpr):
        """Until what the kernel before has written is there; the next one may start already."""
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def product(
        x, weight, bias, gain, shift, eps, add, y, N, C: tl.constexpr,
        NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """ROWS numbers of y, from as many rows of the weight. COLUMNS: C or more, a power of 2."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        there, inside = row < N, column < C
        place = row[:, None].to(tl.int64) * C + column[None, :]
        read = there[:, None] & inside[None, :]
        w = tl.load(weight + place, mask=read, other=0.0, eviction_policy="evict_first")
        if NORM:
            g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            b = tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
        wait(EARLY)  # what is above are weights; what is below, kernels before have written
        v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            a = tl.load(add + row, mask=there, other=0.0).to(tl.float32)
        if NORM:
            v = tl.where(inside, v - tl.sum(v, 0) / C, 0.0)
            v = v / tl.sqrt(tl.sum(v * v, 0) / C + eps) * g + s
        out = tl.sum(w.to(tl.float32) * v[None, :], 1)
        if BIAS:
            out += b
        if GELU:  # tanh's: 0.5 (1 + tanh(z)) is 1 / (1 + exp(-2 z)); sqrt(2 / pi)
            out /= 1 + tl.exp(-2 * 0.7978845608028654 * (out + 0.044715 * out * out * out))
        if ADD:
            out += a
        tl.store(y + row, out.to(y.dtype.element_ty), mask=there)

    @triton.jit
    def attend(
        qkv, keys, values, position, y, L, scale, C: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One head, by online softmax: first the token itself, then BLOCK earlier ones at a time."""
        head, channel, token = tl.program_id(0), tl.arange(0, D), tl.arange(0, BLOCK)
        here = tl.load(position)
        keys += head.to(tl.int64) * L * D
        values += head.to(tl.int64) * L * D
        place = token[:, None] * D + channel[None, :]
        k = tl.load(keys + place, mask=(token < here)[:, None], other=0.0)
        v = tl.load(values + place, mask=(token < here)[:, None], other=0.0)
        wait(EARLY)
        q = tl.load(qkv + head * D + channel).to(tl.float32) * scale
        own_k = tl.load(qkv + C + head * D + channel)
        own_v = tl.load(qkv + 2 * C + head * D + channel)
        tl.store(keys + here * D + channel, own_k)
        tl.store(values + here * D + channel, own_v)
        top, out = tl.sum(q * own_k.to(tl.float32), 0), own_v.to(tl.float32)
        total = tl.exp(top - top)  # 1: its share before it is divided by all
        for start in range(0, here, BLOCK):
            score = tl.sum(k.to(tl.float32) * q[None, :], 1)
            score = tl.where(start + token < here, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 0))
            shrunk, share = tl.exp(top - higher), tl.exp(score - higher)
            total = total * shrunk + tl.sum(share, 0)
            out = out * shrunk + tl.sum(share[:, None] * v.to(tl.float32), 0)
            top = higher
            before = (start + BLOCK + token < here)[:, None]  # the next ones
            k = tl.load(keys + (start + BLOCK) * D + place, mask=before, other=0.0)
            v = tl.load(values + (start + BLOCK) * D + place, mask=before, other=0.0)
        tl.store(y + head * D + channel, (out / total).to(y.dtype.element_ty))

    return {"product": product, "attend": attend}
