"""Linear layers with 8-bit weights, for sampling on a CPU (sample.py --weights int8).

Each new token reads every weight once, so memory bandwidth limits the speed, and an int8 weight has a
quarter of the bytes of a float32. Each row of a matrix and each token has its own scale, as in
LLM.int8() (Dettmers et al. 2022, 2.1), but outliers are not treated separately.
"""

from typing import Any

import torch
from torch import Tensor, nn


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, C) -> (int8 (N, C), scale (N,)), where x is approximately int8 * scale[:, None]."""
    scale = x.abs().amax(1).clamp(min=1e-8) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    """nn.Linear with its weight quantized per output and its input quantized per token."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.scale = quantize_rowwise(linear.weight.detach().float())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantize_rowwise(x.flatten(0, -2))
        # private, but torch's only int8 matmul
        product = torch._int_mm(rows, self.weight.t())  # pyright: ignore[reportPrivateImportUsage]
        y = product * self.scale * scale[:, None]
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def quantize_linears_(model: Any) -> Any:
    """Replace each nn.Linear of `model` by an Int8Linear, in place; embeddings stay as they are."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
    return model
