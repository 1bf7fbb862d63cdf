"""Optimizers beside torch's own, and what all of them share: the norm of gradients, loading a state."""

import torch

from lab.optim.muon import POLAR_EXPRESS, Muon, MuonAdamW, Together, orthogonalize

__all__ = ["POLAR_EXPRESS", "Muon", "MuonAdamW", "Together", "orthogonalize"]


def exact_norm(grads, all_reduce=lambda squares: squares):
    """The norm of all these tensors together. all_reduce adds up squares over processes that have
    other tensors.

    torch's own norm adds millions of numbers one after the other on a CPU and keeps three digits of
    them; sum() adds in pairs.
    """
    return all_reduce(torch.stack([g.square().sum() for g in grads]).sum()).sqrt()


def load_optimizer(optimizer, state):
    """Load the state of a run that may have had other flags or another device: rates, decay and the
    like stay those of `optimizer`."""
    parts = state.get("parts", [state])  # Muon's state has two
    for part, saved in zip(getattr(optimizer, "parts", [optimizer]), parts, strict=True):
        check_shapes(part, saved["state"])
    saved = [group for part in parts for group in part["param_groups"]]
    for group, ours in zip(saved, optimizer.param_groups, strict=True):
        group |= {k: v for k, v in ours.items() if k != "params"}
    optimizer.load_state_dict(state)


def check_shapes(optimizer, state):
    """Raise ValueError where the saved state of a parameter does not fit it: a fused kernel would
    read beyond the end of a tensor that is too small."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, saved in state.items():
        shape = params[i].shape
        wanted = dict(step=(), exp_avg=shape, exp_avg_sq=shape)  # AdamW's
        if "step" not in saved:
            wanted = dict(momentum=shape, rows=(*shape[:-1], 1))  # Muon's; NorMuon alone has rows
        for name in saved.keys() | (wanted.keys() - {"rows"}):
            value = saved[name]
            plain = value.layout == torch.strided and value.is_floating_point()
            if not plain or value.shape != wanted[name]:
                raise ValueError(f"{name} of parameter {i} is of shape {tuple(value.shape)}")
