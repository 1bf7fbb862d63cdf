"""Check that torch.compile does not change a model's loss. Used by ladder.py.

Before version 2.14, torch.compile creates a race condition in wide models with a float32 residual stream
(triton-lang/triton#10924): the first loss of GPT-2 774M over 16,384 targets was 0.03 too small, and
training failed, without any error message.
"""

import math

import torch


def loss(trainer, compiled):
    """Mean loss of the next micro-batch; uncompiled, it is computed row by row to save memory."""
    x, y, _ = trainer.loader.micro_batch(trainer.loader.next_sequence, trainer.loader.micro_step)
    x, y = x.to(trainer.world.device), y.to(trainer.world.device)
    rows = [(x, y)] if compiled else zip(x.split(1), y.split(1))
    model = trainer.model if compiled else trainer.raw_model
    # without gradients torch would recompile, and fused modules would use their plain versions
    with torch.set_grad_enabled(compiled), trainer.precision.autocast():
        total = sum(model(*row, reduction="sum")[1].item() for row in rows)
    return total / max(1, (y >= 0).sum().item())


def compile_error(trainer):
    """Compare the loss of the next micro-batch, compiled and uncompiled. Returns "" if the difference can be
    due to rounding, otherwise a sentence with both losses. Rounding to 16 and 8 bits may change the loss
    by 0.01 nats, and by more if there are few targets."""
    if trainer.model is trainer.raw_model:
        return ""
    compiled, plain = loss(trainer, True), loss(trainer, False)
    targets = trainer.loader.batch_size * trainer.loader.seq_len
    if not math.isfinite(plain) or abs(compiled - plain) <= 0.01 + 0.5 / math.sqrt(targets):
        return ""
    return f"the loss is {compiled:.4f} compiled, but {plain:.4f} uncompiled"
