"""Check a model before training for mistakes of an edit that raise no error."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from lab.cli import UserError, wrap


@torch.no_grad()
def check_model(model: Any, world: Any) -> None:
    """Warn if a position sees later tokens, if predictions for the same text differ, or if forward()'s loss
    is not the cross-entropy of its logits.
    Masked language models, which see later tokens and have no generate(), are not checked. Raises UserError
    if the loss is not finite."""
    if not hasattr(model, "generate"):
        return
    size = model.config.vocab_size
    x = torch.arange(min(16, model.config.block_size), device=world.device)[None] % size  # (1, T)
    other = x.clone()
    other[0, -1] = (x[0, -1] + 1) % size
    # speedrun.py's zero matrices would hide what attention does
    zero = [p for p in model.parameters() if p.dim() > 1 and not p.any()]
    for p in zero:
        p.copy_(0.02 * torch.arange(p.numel(), device=p.device).sin().view_as(p))
    model.eval()  # without dropout
    logits, other_logits, loss = model(x)[0], model(other)[0], model(x, x)[1].item()
    again = model(x)[0]
    model.train()
    for p in zero:
        p.zero_()
    if not math.isfinite(loss):
        raise UserError(
            f"the model's loss is {loss} before training, so the fault is in the model: look for a division "
            "by 0, a logarithm of 0, or a mask that hides all tokens"
        )
    change = (logits - other_logits)[:, :-1].abs().max()
    if not torch.allclose(logits, again):
        message = "predictions for the same text differ, also in model.eval()"
        world.print0(wrap(f"warning: {message}; apply dropout only if self.training"))
    elif change > 1e-3 * logits.std():
        message = "predictions change with later tokens, which includes the token to predict"
        world.print0(wrap(f"warning: {message}; is attention still causal?"))
    expected = F.cross_entropy(logits.float().flatten(0, 1), x.flatten()).item()
    if abs(loss - expected) > 0.01 * expected:
        world.print0(
            wrap(
                f"warning: the model's loss is {loss:.3f}, but the cross-entropy of its logits is "
                f"{expected:.3f}, so validation losses cannot be compared with other runs'; add other terms "
                "of the loss only if self.training"
            )
        )
