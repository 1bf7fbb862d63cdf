"""Linear layers with weights of 8 bits, for sampling on a CPU.

One new token needs every weight once: the memory's speed decides, and a byte comes four times as
fast as a float32. Each row of a matrix has a scale, and so has each token: what LLM.int8() does
(Dettmers et al. 2022, 2.1), without its exception for outliers.
"""

import torch
from torch import nn


def quantized(x):
    """x (N, C) as 8 bits and the scale of each row (N,): x is about the product of both."""
    scale = x.abs().amax(1).clamp(min=1e-8) / 127
    return (x / scale[:, None]).round().to(torch.int8), scale


class Int8Linear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight, self.scale = quantized(linear.weight.detach().float())  # (out, in), (out,)
        self.bias = linear.bias

    def forward(self, x):
        rows, scale = quantized(x.flatten(0, -2))
        y = torch._int_mm(rows, self.weight.t()) * self.scale * scale[:, None]
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def use_int8(model):
    """Put Int8Linear in the place of each nn.Linear in `model`; embeddings stay as they are."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
    return model
