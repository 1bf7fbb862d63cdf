"""Optimizer states from checkpoints."""


def load_optimizer(optimizer, state):
    """Load the state of a run that may have had other flags or another device: rates, decay and the
    like stay those of `optimizer`."""
    parts = state.get("parts", [state])  # Muon's state has two
    saved = [group for part in parts for group in part["param_groups"]]
    for group, ours in zip(saved, optimizer.param_groups, strict=True):
        group |= {k: v for k, v in ours.items() if k != "params"}
    optimizer.load_state_dict(state)
