"""Attention whose backward pass writes the gradients of q, k and v side by side, as the product before it wants them.

One product gives q, k and v in one (B, T, 3 C) tensor, so its backward pass needs their gradients in one as well. PyTorch's
attention returns three, and a kernel packs them: a read and a write of N x 3 C numbers in each layer. cuDNN itself takes any
strides. Here the forward pass is PyTorch's own cuDNN attention; the backward pass asks cuDNN through its Python front end
(nvidia-cudnn-frontend, which only this experiment needs) and gives it places in one tensor.

    python bench/ladder.py --groups qkv_gradients        # what it brings in a step

It brought 1.4 %: 1.6 ms of a micro-step's 112 at 64 x 1024 positions of 124M (H200, 2026-11-22), too little for the trainer.

Without a GPU the same formulas run spelled out, so that what is around them can be tried.
"""

import functools
import sys

if __name__ == "__main__":  # before the imports, which only who measures it finds
    print("packed_attention.py: error: no command of its own; `python bench/ladder.py --groups qkv_gradients` measures it",
          file=sys.stderr)  # fmt: skip
    sys.exit(2)

import torch

from train_gpt2 import CausalSelfAttention


def heads(x, n_head):
    """(B, T, C) as (B, H, T, D), a view."""
    B, T, C = x.shape
    return x.view(B, T, n_head, C // n_head).transpose(1, 2)


@functools.lru_cache(maxsize=4)
def cudnn_backward(B, H, T, D, device):
    """run(qkv, y, dy, stats, dqkv) for tensors of this shape. Raises RuntimeError if the front end or its kernel is missing."""
    try:
        import cudnn
    except ImportError as error:
        raise RuntimeError("packed gradients need `pip install nvidia-cudnn-frontend`") from error
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    C, size = H * D, [B, H, T, D]
    packed, plain = [T * 3 * C, D, 3 * C, 1], [T * C, D, C, 1]
    q, k, v, y, dy = (
        graph.tensor(name=name, dim=size, stride=stride, data_type=bf16)
        for name, stride in (("q", packed), ("k", packed), ("v", packed), ("y", plain), ("dy", plain))
    )
    stats = graph.tensor(name="stats", dim=[B, H, T, 1], stride=[H * T, T, 1, 1], data_type=fp32)
    grads = graph.sdpa_backward(q=q, k=k, v=v, o=y, dO=dy, stats=stats, attn_scale=D**-0.5, use_causal_mask=True)
    for grad in grads:
        grad.set_output(True).set_dim(size).set_stride(packed).set_data_type(bf16)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def run(qkv, y_in, dy_in, stats_in, dqkv):
        parts = {q: qkv[..., :C], k: qkv[..., C : 2 * C], v: qkv[..., 2 * C :], y: y_in, dy: dy_in, stats: stats_in}
        parts |= {grad: dqkv[..., i * C : (i + 1) * C] for i, grad in enumerate(grads)}
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute({tensor: part.data_ptr() for tensor, part in parts.items()}, workspace.data_ptr(), handle=handle)

    return run


@torch.library.custom_op("gpt2_bench::packed_attention", mutates_args=())
def attention(qkv: torch.Tensor, n_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y (B, T, C), each score row's logarithm of the sum of exponentials (B, H, T)) of causal attention on (B, T, 3 C)."""
    B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
    q, k, v = (heads(part, n_head) for part in qkv.split(C, dim=2))
    if qkv.is_cuda:
        y, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    else:
        scores = (q.float() @ k.float().transpose(-2, -1)) * (C // n_head) ** -0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=qkv.device).triu(1), float("-inf"))
        y, stats = (scores.softmax(-1) @ v.float()).to(v.dtype), scores.logsumexp(-1)
    return y.transpose(1, 2).reshape(B, T, C).contiguous(), stats.reshape(B, n_head, T).contiguous()


@attention.register_fake
def _(qkv, n_head):
    B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
    return qkv.new_empty(B, T, C), qkv.new_empty(B, n_head, T, dtype=torch.float32)


@torch.library.custom_op("gpt2_bench::packed_attention_backward", mutates_args=())
def attention_backward(
    dy: torch.Tensor, qkv: torch.Tensor, y: torch.Tensor, stats: torch.Tensor, n_head: int
) -> torch.Tensor:
    """The gradient of qkv, (B, T, 3 C), from that of y; the scores are computed again (Dao et al. 2022, algorithm 4)."""
    B, T, C = y.shape
    dqkv = torch.empty_like(qkv)
    if qkv.is_cuda:
        cudnn_backward(B, n_head, T, C // n_head, qkv.device)(qkv, y, dy, stats, dqkv)
        return dqkv
    q, k, v = (heads(part, n_head).float() for part in qkv.split(C, dim=2))
    y, dy, scale = heads(y, n_head).float(), heads(dy, n_head).float(), (C // n_head) ** -0.5
    p = (q @ k.transpose(-2, -1) * scale - stats.unsqueeze(-1)).exp().tril()
    ds = p * (dy @ v.transpose(-2, -1) - (dy * y).sum(-1, keepdim=True)) * scale
    for part, grad in zip(dqkv.split(C, dim=2), (ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dy)):
        heads(part, n_head).copy_(grad)
    return dqkv


@attention_backward.register_fake
def _(dy, qkv, y, stats, n_head):
    return torch.empty_like(qkv)


def _setup(ctx, inputs, output):
    (qkv, ctx.n_head), (y, stats) = inputs, output
    ctx.save_for_backward(qkv, y, stats)


def _backward(ctx, dy, _):
    return attention_backward(dy.contiguous(), *ctx.saved_tensors, ctx.n_head), None


attention.register_autograd(_backward, setup_context=_setup)


class PackedAttention(CausalSelfAttention):
    """The model's attention for training alone: no masks, no cache, 16 bits."""

    def forward(self, x, mask=None, cache=None):
        if mask is not None or cache is not None:
            raise ValueError("attention with packed gradients has neither masks nor caches")
        return self.c_proj(attention(self.c_attn(x), self.n_head)[0])


def pack_gradients(model):
    """Let every block of a GPT use it."""
    for block in model.transformer.h:
        block.attn.__class__ = PackedAttention
