"""The norm of a gradient."""

import torch


def exact_norm(grads, all_reduce=lambda squares: squares):
    """The norm of all these tensors together. all_reduce adds up squares over processes that have
    other tensors.

    torch's own norm adds millions of numbers one after the other on a CPU and keeps three digits of
    them; sum() adds in pairs.
    """
    return all_reduce(torch.stack([g.square().sum() for g in grads]).sum()).sqrt()
