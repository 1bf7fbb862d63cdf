"""Optimizers beside torch's own, and what all of them share: the norm of gradients, checking and
loading a state."""

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
    saved = [group for part in state.get("parts", [state]) for group in part["param_groups"]]
    for group, ours in zip(saved, optimizer.param_groups, strict=True):
        group |= {k: v for k, v in ours.items() if k != "params"}
    optimizer.load_state_dict(state)


def check_state(optimizer, state):
    """Raise where a saved state, from a file, is not one of such an optimizer."""
    ours = getattr(optimizer, "parts", [optimizer])  # Muon's state has two
    for part, saved in zip(ours, state["parts"] if len(ours) > 1 else [state], strict=True):
        params = [p for group in part.param_groups for p in group["params"]]
        numbers = iter(range(len(params)))
        groups = [[next(numbers) for _ in group["params"]] for group in part.param_groups]
        if [group["params"] for group in saved["param_groups"]] != groups:
            raise ValueError("its parameters are grouped in another way")
        norms = saved["param_groups"][-1].get("norms", torch.zeros(0))  # see lab.run.spikes
        check_tensors({"norms": norms}, {"norms": (norms.numel(),)})
        for i, found in saved["state"].items():
            shape = params[i].shape
            wanted = dict(step=(), exp_avg=shape, exp_avg_sq=shape)  # AdamW's
            if isinstance(part, Muon):
                wanted = dict(momentum=shape)
                if "rows" in found:  # NorMuon's
                    wanted["rows"] = (*shape[:-1], 1)
            check_tensors(found, wanted)


def check_tensors(found, shapes):
    """Raise where a dict of tensors, from a file, has other names or shapes: a fused kernel would
    read beyond the end of a tensor that is too small."""
    if other := found.keys() ^ shapes.keys():
        raise ValueError(f"{min(map(str, other))} is missing, or too much")
    for name, tensor in found.items():
        plain = tensor.layout == torch.strided and tensor.is_floating_point()
        if not plain or tensor.is_meta or tensor.shape != shapes[name]:
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}")
