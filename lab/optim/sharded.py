"""Base class of the sharded optimizers (zero1.py, fsdp2.py), and the choice of parameters sent in bf16."""

from typing import Any

import torch
from torch import nn

from lab.cli import UserError
from lab.precision import Precision


def bf16_params(model: Any, dtype: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters of a GPT that can be communicated in bf16 without loss, as can their gradients.

    These are the matrices in the blocks: under autocast, a matmul rounds its matrix to bf16 and computes
    the matrix's gradient in bf16. All others need float32: biases, gains, the matrices of modules whose
    `param_dtype` is float32, and embeddings, because their rows are added to other vectors and a tied
    embedding's gradient is the sum of two. dtype: autocast's; the list is empty unless it is bf16.
    """
    if dtype != torch.bfloat16:
        return []
    wide = {
        p for m in model.modules() if needs_fp32_params(m, torch.bfloat16) for p in m.parameters()
    }
    return [p for p in model.block_matrices() if p not in wide]


def needs_fp32_params(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module needs its parameters in higher precision than dtype, as Fp8MLP does."""
    return getattr(module, "param_dtype", dtype) != dtype


def refuse_fp16(name: str, precision: Precision) -> None:
    """Raise UserError for fp16, because the loss scaler cannot unscale sharded gradients."""
    if precision.name == "fp16":
        raise UserError(
            f"parallel={name} does not support precision=fp16, which scales gradients; pass "
            "--parallel ddp or --precision fp32"
        )


class ShardedOptimizer:
    """Wraps a new AdamW so that each rank updates only its own shard of the parameters.

    full_optimizer: the AdamW of all parameters. It is never stepped; the trainer sets learning rates in
    its groups. shard_optimizer: an AdamW of this rank's shards, with the same groups. Subclasses
    communicate gradients and parameters themselves, so the model must not be wrapped by DDP, and all
    ranks must call each method together.
    """

    full_optimizer: torch.optim.AdamW
    shard_optimizer: torch.optim.AdamW

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of full_optimizer; step() copies their learning rates."""
        return self.full_optimizer.param_groups

    def step(self) -> None:
        """Update this rank's shards with the gradients averaged by clip_grad_norm."""
        for ours, group in zip(self.shard_optimizer.param_groups, self.param_groups):
            ours.update({k: v for k, v in group.items() if k != "params"})
        # lab.trainer.health sets found_inf to 1 to skip an update, as torch's GradScaler does
        self.shard_optimizer.found_inf = getattr(self, "found_inf", None)  # pyright: ignore
        self.shard_optimizer.step()
