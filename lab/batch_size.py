"""Find the largest micro-batch that fits in memory, by trying (--batch_size 0)."""

from typing import Any

import torch

from lab.cli import UserError, command_for, is_oom
from lab.data.loader import grad_accum_steps


def find_max_batch_size(
    model: Any, cfg: Any, world: Any, precision: Any, state: dict | None
) -> int:
    """Largest micro-batch (at most 64 sequences) that divides the step evenly and fits in memory. When
    resuming from `state`, at most the checkpoint's batch_size, because another one rounds differently.

    On a GPU, candidates are tried, largest first, with the eager model, which needs a little more
    memory than the compiled one. Elsewhere, the largest one of at most 16384 tokens is taken without
    trying. Raises UserError if total_batch_size cannot be divided, if not even one sequence fits, or
    for FSDP2.
    """
    most = state["batch_size"] if state else 64
    sizes = candidate_batch_sizes(cfg, world.world_size, world.device.type, most)
    if world.device.type != "cuda":
        return sizes[0]
    if cfg.parallel == "fsdp2":
        raise UserError(
            "batch_size=0 does not work with parallel=fsdp2, because the unsharded model may not fit; "
            f"pass the --batch_size that `{command_for('lab plan')}` with the same flags suggests"
        )
    for size in sizes:
        if world.all_true(probe_batch_size(model, size, cfg, world, precision)):
            return size
    can_checkpoint = "activation_checkpointing" in vars(model.config)  # not in speedrun.py
    raise UserError(
        f"not even one sequence of seq_len={cfg.seq_len} fits on {torch.cuda.get_device_name(world.device)}; "
        "pass a shorter --seq_len or a smaller --preset"
        + ", or --activation_checkpointing"
        * can_checkpoint
    )


def candidate_batch_sizes(cfg: Any, world_size: int, device_type: str, most: int = 64) -> list[int]:
    """Micro-batches (numbers of sequences) of at most `most` that divide the step evenly, largest first.
    Raises UserError if there are none."""
    each = grad_accum_steps(cfg, 1, world_size)  # sequences per process and step
    if device_type != "cuda":
        most = min(most, max(1, 16384 // cfg.seq_len))
    return [b for b in range(min(most, each), 0, -1) if each % b == 0]


def probe_batch_size(model: Any, size: int, cfg: Any, world: Any, precision: Any) -> bool:
    """Whether a micro-batch of `size` sequences fits alongside optimizer state and DDP buckets."""
    # AdamW's two moments and DDP's buckets, each as large as the weights; with ZeRO-1, shards of the
    # moments and of the weights, and accumulated gradients. 5 % is left for fragmentation
    n = world.world_size
    copies = 1 + 3 / n if cfg.parallel == "zero1" and n > 1 else 3
    reserved = copies * sum(p.numel() * p.element_size() for p in model.parameters())
    idx = loss = None
    try:
        idx = torch.randint(model.config.vocab_size, (size, cfg.seq_len), device=world.device)
        with precision.autocast():
            _, loss = model(idx, idx)
        loss.backward()
        available = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(
            world.device
        )
        return torch.cuda.max_memory_allocated(world.device) + reserved < 0.95 * available
    except RuntimeError as error:
        if not is_oom(error):
            raise
        return False
    finally:
        idx = loss = None  # free memory before the next candidate is tried
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
