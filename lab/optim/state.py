"""Loading and checking the saved state of an optimizer. Used by the trainer when it resumes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.optim.muon import Muon

Optimizer = Any  # torch's, a ShardedOptimizer or a CombinedOptimizer


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state that may have been saved with other flags or on another device. Learning rate, weight
    decay and the other options of each group are not loaded."""
    saved = [group for part in state.get("parts", [state]) for group in part["param_groups"]]
    for group, ours in zip(saved, optimizer.param_groups, strict=True):
        group |= {k: v for k, v in ours.items() if k != "params"}
    optimizer.load_state_dict(state)


def check_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raise ValueError, TypeError, KeyError or AttributeError if a state read from a file does not fit
    the optimizer."""
    ours = getattr(optimizer, "parts", [optimizer])  # a CombinedOptimizer's state has parts
    for part, saved in zip(ours, state["parts"] if len(ours) > 1 else [state], strict=True):
        params = [p for group in part.param_groups for p in group["params"]]
        numbers = iter(range(len(params)))
        groups = [[next(numbers) for _ in group["params"]] for group in part.param_groups]
        if [group["params"] for group in saved["param_groups"]] != groups:
            raise ValueError("its parameters are grouped differently")
        # older versions saved the history of gradient norms here
        norms = saved["param_groups"][-1].get("norms", torch.zeros(0))
        check_tensors({"norms": norms}, {"norms": (norms.numel(),)})
        for i, found in saved["state"].items():
            shape = params[i].shape
            wanted = dict(step=(), exp_avg=shape, exp_avg_sq=shape)  # AdamW's
            if isinstance(part, Muon):
                wanted = dict(momentum=shape)
                if "rows" in found:  # NorMuon's
                    wanted["rows"] = (*shape[:-1], 1)
            elif isinstance(part, torch.optim.Optimizer) and not isinstance(part, torch.optim.Adam):
                found = {name: t for name, t in found.items() if isinstance(t, Tensor)}
                wanted = {name: t.shape for name, t in found.items()}  # not one of ours: unknown
            check_tensors(found, wanted)


def check_tensors(found: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if tensors from a file have unexpected names, shapes or types; a fused kernel
    would read beyond the end of a tensor that is too small."""
    if other := found.keys() ^ shapes.keys():
        raise ValueError(f"tensor {min(map(str, other))} is missing or unexpected")
    for name, tensor in found.items():
        plain = tensor.layout == torch.strided and tensor.is_floating_point()
        if not plain or tensor.is_meta or tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} must be a dense float tensor of shape {tuple(shapes[name])}, not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
