"""Optimizer states from checkpoints."""

import torch


def check(optimizer, state):
    """Raise ValueError where the saved state of a parameter does not fit it: a fused kernel would
    read beyond the end of a tensor that is too small."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, saved in state.items():
        shape = params[i].shape
        shapes = dict(step=(), exp_avg=shape, exp_avg_sq=shape)  # AdamW's; Muon's:
        if "step" not in saved:
            shapes = dict(momentum=shape, rows=(*shape[:-1], 1))
        for name in saved.keys() | ({"exp_avg", "exp_avg_sq"} if "step" in saved else {"momentum"}):
            value = saved[name]
            if (
                value.shape != shapes[name]
                or value.layout != torch.strided
                or not value.is_floating_point()
            ):
                raise ValueError(f"{name} of parameter {i} is of shape {tuple(value.shape)}")


def load_optimizer(optimizer, state):
    """Load the state of a run that may have had other flags or another device: rates, decay and the
    like stay those of `optimizer`."""
    parts = state.get("parts", [state])  # Muon's state has two
    for part, saved in zip(getattr(optimizer, "parts", [optimizer]), parts, strict=True):
        check(part, saved["state"])
    saved = [group for part in parts for group in part["param_groups"]]
    for group, ours in zip(saved, optimizer.param_groups, strict=True):
        group |= {k: v for k, v in ours.items() if k != "params"}
    optimizer.load_state_dict(state)
