"""Decode one token of GPT-2 with one CUDA graph launch. Used by make_decode_step for single texts on a GPU.

A decode step uses each weight once, so its time is the time to read the weights from memory, plus the
gaps between kernels. A block compiled by torch.compile runs about fifteen kernels; here it runs five.
Each matrix-vector kernel includes the LayerNorm before it and the GELU or residual addition after it.
The attention kernel writes the new key and value to the cache, and reads only the filled part of the
cache. On Hopper and newer GPUs, a kernel loads its weights while the previous kernel finishes
("programmatic dependent launch" in CUDA's programming guide). A CUDA graph records all kernels, so that
one launch starts them all.

The kernels read the weights and do not call the model's forward methods. Therefore supports() accepts a
model only if its own code computes what GPT-2 computes.

Shape letters: C channels, H heads, D head size, L capacity of the cache in tokens, R rows, T tokens,
V vocabulary.
"""

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.hardware import can_run_triton
from lab.inference.generate import CacheLayers, KVCache
from lab.kernels import TOLERANCE, close, exact_matmuls

NORMS_AND_LINEARS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
BLOCK_PARAMS = [f"{name}.{kind}" for name in NORMS_AND_LINEARS for kind in ("weight", "bias")]


class CUDAGraphDecoder:
    """The `step` of a KVCache (see lab.inference.generate) for one text. Call supports(model) first."""

    def __init__(self, model: Any):
        self.model = model
        self.graphs: dict[int, tuple] = {}  # by address of the recorded cache

    def __call__(self, token: Tensor, position: Tensor, mask: None, layers: CacheLayers) -> Tensor:
        """Logits (1, 1, V) of the token after `token` (1, 1); the next call overwrites them.

        position (1,): the token's position. layers: keys and values (1, H, L, D) of the cache.
        """
        address = layers[0][0].data_ptr()
        if address not in self.graphs:
            token, position = token.clone(), position.clone()
            self.logits(token, position, layers)  # compile the kernels before the graph is recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.logits(token, position, layers)
            self.graphs[address] = graph, token, position, logits
        graph, static_token, static_position, logits = self.graphs[address]
        static_token.copy_(token)
        static_position.copy_(position)
        graph.replay()
        return logits

    def residual_stream(self, token: Tensor, position: Tensor, layers: CacheLayers) -> Tensor:
        """The residual stream (C,) of `token` after the last block."""
        parts = self.model.transformer
        x = F.embedding(token[0], parts.wte.weight) + F.embedding(position, parts.wpe.weight)
        for layer, block in enumerate(parts.h):
            qkv = matvec(x, block.attn.c_attn, norm=block.ln_1)
            keys, values = layers[layer]
            y = attend(qkv, keys, values, position)
            x = matvec(y, block.attn.c_proj, add=x)
            hidden = matvec(x, block.mlp.c_fc, norm=block.ln_2, gelu=True)
            x = matvec(hidden, block.mlp.c_proj, add=x)
        return x

    @torch.no_grad()
    def logits(self, token: Tensor, position: Tensor, layers: CacheLayers) -> Tensor:
        x = self.residual_stream(token, position, layers)
        logits = matvec(x, self.model.lm_head, norm=self.model.transformer.ln_f)
        return logits[None, None, : self.model.config.vocab_size]


# --------------------------------------------------------------------------- which models it decodes


@torch.no_grad()
def supports(model: Any) -> bool:
    """Whether CUDAGraphDecoder works for this model on its device and gives the model's own results.

    Needs a GPU that runs Triton and a head size that is a power of 2 (Triton's block sizes are).
    """
    device = next(model.parameters()).device
    if not can_run_triton(device):
        return False
    if not computes_gpt2(model):
        return False
    head_size = model.config.n_embd // model.config.n_head
    if head_size & (head_size - 1):
        return False
    cache, idx = KVCache(4), torch.arange(4, device=device)[None]
    model(idx[:, :3], cache=cache)  # prefill
    x = CUDAGraphDecoder(model).residual_stream(idx[:, 3:], idx[0, 3:], cache.layers)
    expected = model.hidden(idx[:, 3:], position=idx[0, 3:], cache=cache)[0, 0]
    # the difference is due to 16-bit rounding and to sums in another order
    return relative_error(model.transformer.ln_f(x), expected) < 0.1


@torch.no_grad()
def computes_gpt2(model: Any) -> bool:
    """Whether a model's own code computes GPT-2, on any device.

    The parameters must have exactly GPT-2's names. Each block, and the embeddings with the head, must
    compute the same as plain PyTorch code with random weights; the model's own weights might not reveal
    a difference such as a soft cap on logits. With its own weights, the whole model must compute the
    same as its parts called in GPT-2's order.
    """
    try:
        c = model.config
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with exact_matmuls():  # also restores the random state
            torch.manual_seed(0)
            return (
                names == gpt2_parameter_names(c.n_layer)
                and not list(model.buffers())
                and all(block_is_gpt2(b, c.n_head, c.block_size) for b in model.transformer.h)
                and embeddings_and_head_are_gpt2(model)
                and composes_as_gpt2(model)
            )
    except Exception:  # an edited model can have another interface and raise anything
        return False


def gpt2_parameter_names(n_layer: int) -> set[str]:
    outside = {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}
    blocks = {f"h.{layer}.{name}" for layer in range(n_layer) for name in BLOCK_PARAMS}
    return {"lm_head.weight"} | {f"transformer.{name}" for name in outside | blocks}


def block_is_gpt2(block: Any, n_head: int, context: int) -> bool:
    """Whether block(x) equals plain_block for random weights and `context` tokens. Only a few positions
    are compared, to save memory; local attention would make a difference at the last one."""
    block = randomized(block)
    weight = block.attn.c_proj.weight
    x = 0.1 * torch.randn(1, context, weight.size(0), device=weight.device)
    rows = torch.tensor([0, 1, 2, context // 2, -2, -1], device=x.device) % context
    return close(block(x)[:, rows], plain_block(x, block, n_head, rows))


def plain_block(x: Tensor, block: Any, n_head: int, rows: Tensor) -> Tensor:
    """GPT-2's block (Radford et al. 2019) with the parameters of `block`, written out: x (1, T, C) ->
    its outputs at positions `rows`, (1, R, C)."""
    _, T, C = x.shape
    attn, mlp = block.attn, block.mlp
    qkv = F.linear(plain_norm(x, block.ln_1), attn.c_attn.weight, attn.c_attn.bias)
    q, k, v = (t.view(1, T, n_head, -1).transpose(1, 2) for t in qkv.split(C, dim=2))
    scores = q[:, :, rows] @ k.transpose(-2, -1) * (C // n_head) ** -0.5  # (1, H, R, T)
    future = torch.arange(T, device=x.device) > rows[:, None]
    y = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v  # (1, H, R, D)
    y = y.transpose(1, 2).reshape(1, len(rows), C)
    x = x[:, rows] + F.linear(y, attn.c_proj.weight, attn.c_proj.bias)
    hidden = F.linear(plain_norm(x, block.ln_2), mlp.c_fc.weight, mlp.c_fc.bias)
    hidden = F.gelu(hidden, approximate="tanh")
    return x + F.linear(hidden, mlp.c_proj.weight, mlp.c_proj.bias)


def plain_norm(x: Tensor, norm: Any) -> Tensor:
    return F.layer_norm(x, (x.size(-1),), norm.weight, norm.bias, norm.eps)


def embeddings_and_head_are_gpt2(model: Any) -> bool:
    """Whether a model without blocks computes head(ln_f(wte + wpe)), for random weights."""
    config = model.config
    no_blocks = {id(model.transformer.h): nn.ModuleList()}
    model = randomized(model, gain=config.n_embd**0.5, memo=no_blocks)  # logits of size sqrt(C)
    parts, (idx, position) = model.transformer, random_tokens(model, 6)
    x = F.embedding(idx, parts.wte.weight) + F.embedding(position, parts.wpe.weight)
    logits = F.linear(plain_norm(x, parts.ln_f), model.lm_head.weight)[..., : config.vocab_size]
    return close(model(idx, position=position)[0], logits)


def composes_as_gpt2(model: Any) -> bool:
    """Whether the model, with its own weights, equals its parts composed in GPT-2's order. hidden() is
    compared for a full context, forward() only for a few tokens, because logits need much memory."""
    parts = model.transformer

    def composed(idx: Tensor, position: Tensor) -> Tensor:
        x = parts.wte(idx) + parts.wpe(position)
        for block in parts.h:
            x = block(x)
        return parts.ln_f(x)

    def same(a: Tensor, b: Tensor) -> bool:  # the same operations, so 16-bit rounding is equal
        return relative_error(a, b) <= max(TOLERANCE, torch.finfo(a.dtype).eps)

    idx, position = random_tokens(model, model.config.block_size)
    if not same(model.hidden(idx, position=position), composed(idx, position)):
        return False
    idx, position = random_tokens(model, 6)
    logits = model.lm_head(composed(idx, position))[..., : model.config.vocab_size]
    return same(model(idx, position=position)[0], logits)


def randomized(module: nn.Module, gain: float = 1, memo: dict | None = None) -> Any:
    """A float32 copy with random parameters: vectors of std 1, matrices of std gain / sqrt(inputs).
    memo: replacements for copy.deepcopy, by id."""
    module = copy.deepcopy(module, memo or {}).float()
    for p in module.parameters():
        p.data = torch.randn_like(p) * (gain * p.size(-1) ** -0.5 if p.dim() > 1 else 1)
    return module


def random_tokens(model: Any, T: int) -> tuple[Tensor, Tensor]:
    """(idx (1, T) with end-of-text in the middle, position (T,) from 0 to the end of the context)."""
    config, device = model.config, model.lm_head.weight.device
    idx = torch.randint(config.vocab_size, (1, T))
    idx[0, T // 2] = config.end_of_text
    position = torch.linspace(0, config.block_size - 1, T).round().long()
    return idx.to(device), position.to(device)


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


# ------------------------------------------------------------------------------------------- kernels


def matvec(
    x: Tensor, linear: Any, norm: Any = None, gelu: bool = False, add: Tensor | None = None
) -> Tensor:
    """linear(x) (N,) for one token; x has C elements in any shape. norm: a LayerNorm applied to x
    first; gelu: apply GELU to the result; add (N,): added to the result. Sums are in float32 and
    rounded at the end."""
    N, C = linear.weight.shape
    y = x.new_empty(N)
    rows = 8 if N > 2 * C else 4 if N >= C else 1  # of the weight, per program; fastest on an H200
    norm_args = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    flags = norm is not None, linear.bias is not None, gelu, add is not None
    sizes = rows, 1 << (C - 1).bit_length()
    args = (x, linear.weight, linear.bias, *norm_args, add, y, N, C, *flags, *sizes)
    kernels()["matvec"][(-(-N // rows),)](*args, **pdl_launch_options(x))
    return y


def attend(qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Attention (C,) of one token: qkv (3 C,). Writes its key and value to keys and values
    (1, H, L, D) at `position` (1,), and attends to that position and all before it."""
    _, H, L, D = keys.shape
    y = qkv.new_empty(H * D)
    args = (qkv, keys, values, position, y, L, D**-0.5, H * D, D, 256)
    kernels()["attend"][(H,)](*args, num_warps=8, **pdl_launch_options(qkv))
    return y


def pdl_launch_options(x: Tensor) -> dict[str, bool]:
    """Launch options for programmatic dependent launch, which needs Hopper or newer."""
    hopper = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": hopper} | ({"launch_pdl": True} if hopper else {})


@functools.cache
def kernels() -> dict[str, Any]:
    """{"matvec", "attend"}: the Triton kernels. Triton is optional, so it is imported here."""
    import triton  # pyright: ignore[reportMissingImports] (CUDA builds of torch bring it)
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def wait(PDL: tl.constexpr):
        """Let the next kernel start, then wait until the output of the previous kernel is complete."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def matvec(
        x, weight, bias, gain, shift, eps, add, y, N, C: tl.constexpr,
        NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """ROWS elements of y, from as many rows of the weight. COLUMNS: C, rounded up to a power of 2."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        row_ok, column_ok = row < N, column < C
        offset = row[:, None].to(tl.int64) * C + column[None, :]
        mask = row_ok[:, None] & column_ok[None, :]
        w = tl.load(weight + offset, mask=mask, other=0.0, eviction_policy="evict_first")
        if NORM:
            g = tl.load(gain + column, mask=column_ok, other=0.0).to(tl.float32)
            s = tl.load(shift + column, mask=column_ok, other=0.0).to(tl.float32)
        if BIAS:
            b = tl.load(bias + row, mask=row_ok, other=0.0).to(tl.float32)
        wait(PDL)  # above: parameters are loaded; below: outputs of the previous kernel
        v = tl.load(x + column, mask=column_ok, other=0.0).to(tl.float32)
        if ADD:
            a = tl.load(add + row, mask=row_ok, other=0.0).to(tl.float32)
        if NORM:
            v = tl.where(column_ok, v - tl.sum(v, 0) / C, 0.0)
            v = v / tl.sqrt(tl.sum(v * v, 0) / C + eps) * g + s
        out = tl.sum(w.to(tl.float32) * v[None, :], 1)
        if BIAS:
            out += b
        if GELU:  # tanh GELU: 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)); the constant is sqrt(2 / pi)
            out /= 1 + tl.exp(-2 * 0.7978845608028654 * (out + 0.044715 * out * out * out))
        if ADD:
            out += a
        tl.store(y + row, out.to(y.dtype.element_ty), mask=row_ok)

    @triton.jit
    def attend(
        qkv, keys, values, position, y, L, scale, C: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One head, by online softmax: first the token itself, then BLOCK earlier ones at a time."""
        head, channel, token = tl.program_id(0), tl.arange(0, D), tl.arange(0, BLOCK)
        current = tl.load(position)
        keys += head.to(tl.int64) * L * D
        values += head.to(tl.int64) * L * D
        offset = token[:, None] * D + channel[None, :]
        k = tl.load(keys + offset, mask=(token < current)[:, None], other=0.0)
        v = tl.load(values + offset, mask=(token < current)[:, None], other=0.0)
        wait(PDL)
        q = tl.load(qkv + head * D + channel).to(tl.float32) * scale
        own_k = tl.load(qkv + C + head * D + channel)
        own_v = tl.load(qkv + 2 * C + head * D + channel)
        tl.store(keys + current * D + channel, own_k)
        tl.store(values + current * D + channel, own_v)
        # out / total is the weighted mean so far, with weights exp(score - top)
        top, out = tl.sum(q * own_k.to(tl.float32), 0), own_v.to(tl.float32)
        total = tl.exp(top - top)  # 1, as a tensor
        for start in range(0, current, BLOCK):
            score = tl.sum(k.to(tl.float32) * q[None, :], 1)
            score = tl.where(start + token < current, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 0))
            rescale, weight = tl.exp(top - new_top), tl.exp(score - new_top)
            total = total * rescale + tl.sum(weight, 0)
            out = out * rescale + tl.sum(weight[:, None] * v.to(tl.float32), 0)
            top = new_top
            mask = (start + BLOCK + token < current)[:, None]  # load the next block early
            k = tl.load(keys + (start + BLOCK) * D + offset, mask=mask, other=0.0)
            v = tl.load(values + (start + BLOCK) * D + offset, mask=mask, other=0.0)
        tl.store(y + head * D + channel, (out / total).to(y.dtype.element_ty))

    return {"matvec": matvec, "attend": attend}
