"""The six products of attention's linear layers in 8 bits: q, k and v of all heads in one, the projection after
them, and their gradients.

The same formats, scales and cast as the MLP's (fp8_mlp.py); softmax(QK^T)V itself stays in 16 bits. An experiment: its
products are on average half as wide as the MLP's, so the casts around them weigh twice as much.

    python bench/ladder.py --groups attention_8_bits        # what it brings on top of the 8-bit head and MLP

It brought 1.7 %, and with packed gradients (packed_attention.py) 3.3 %: 3.0 ms of a micro-step's 94 at 64 x 1024 positions of
124M (one H200, 2026-11-22). The products got 8.7 ms shorter, the casts around them took 4.6 longer.
"""

import sys

if __name__ == "__main__":  # before the imports, which only who measures it finds
    print("fp8_attention.py: error: no command of its own; `python bench/ladder.py --groups attention_8_bits` measures it",
          file=sys.stderr)  # fmt: skip
    sys.exit(2)

import torch
from torch import Tensor

from lab.kernels.fp8_mlp import ACTIVATION, E4M3, E5M2, WEIGHT, cast, constant


@torch.library.custom_op("gpt2_bench::linear_fp8", mutates_args=())
def linear(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x @ w.T + b (N, F), and for the backward pass, in 8 bits and transposed, x (C, N) and w (C, F)). x (N, C) is bf16, the
    weight is float32."""
    weight, activation = constant(WEIGHT, x.device), constant(ACTIVATION, x.device)
    x8, x8_t, _ = cast(x, activation, E4M3)
    w8, w8_t, _ = cast(w, weight, E4M3)
    y = torch._scaled_mm(x8, w8.t(), activation, weight, bias=b.to(x.dtype), out_dtype=x.dtype)
    return y, x8_t, w8_t


@linear.register_fake
def _(x, w, b):
    (N, C), F = x.shape, w.size(0)
    return x.new_empty(N, F), x.new_empty(C, N, dtype=E4M3), x.new_empty(C, F, dtype=E4M3)


@torch.library.custom_op("gpt2_bench::linear_gradients_fp8", mutates_args=())
def linear_gradients(dy: Tensor, largest: Tensor, x8_t: Tensor, w8_t: Tensor) -> tuple[Tensor, Tensor]:
    """dx (N, C) bf16, dw (F, C) float32. largest: a bound of |dy|, which becomes the largest number of e5m2."""
    weight, activation = constant(WEIGHT, dy.device), constant(ACTIVATION, dy.device)
    scale = (largest.float() / 57344).clamp(min=1e-30)
    dy8, dy8_t, _ = cast(dy, scale, E5M2)
    dx = torch._scaled_mm(dy8, w8_t.t(), scale, weight, out_dtype=dy.dtype)
    return dx, torch._scaled_mm(dy8_t, x8_t.t(), scale, activation, out_dtype=torch.float32)


@linear_gradients.register_fake
def _(dy, largest, x8_t, w8_t):
    (C, N), F = x8_t.shape, w8_t.size(1)
    return dy.new_empty(N, C), dy.new_empty(F, C, dtype=torch.float32)


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no gradients of zeros for the two results that are for the backward pass alone
    ctx.save_for_backward(*output[1:])


def _backward(ctx, dy, *_):
    dy = dy.contiguous()
    return *linear_gradients(dy, dy.abs().amax(), *ctx.saved_tensors), dy.sum(0)


linear.register_autograd(_backward, setup_context=_setup)


class Linear(torch.nn.Linear):
    """A linear layer of a model, in 8 bits while it trains."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x)
        return linear(x.bfloat16().flatten(0, -2), self.weight, self.bias)[0].unflatten(0, x.shape[:-1])


def in_8_bits(model):
    """Let the attention of every block of a GPT multiply in 8 bits."""
    for block in model.transformer.h:
        block.attn.c_attn.__class__ = block.attn.c_proj.__class__ = Linear
