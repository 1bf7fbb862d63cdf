"""Norm of all gradients together. Used by the trainer and by the sharded optimizers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def global_grad_norm(
    grads: Sequence[Tensor], all_reduce: Callable[[Tensor], Tensor] = lambda squares: squares
) -> Tensor:
    """The L2 norm of all tensors together, a scalar. all_reduce: sums the squares over ranks, if each
    rank holds a shard.

    It uses square().sum(), which adds pairwise. torch's norm adds millions of numbers one after another
    on a CPU, which leaves about three correct digits.
    """
    return all_reduce(torch.stack([g.square().sum() for g in grads]).sum()).sqrt()
