"""Train under DDP with the all-reduce flag set before or after the forward pass. play.ipynb runs this file:

torchrun --nproc_per_node=2 lab/notebook/late_flag.py found.pt
"""

import os
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector as flat

from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.distributed import World
from train_gpt2 import GPT, GPTConfig, TrainConfig, make_optimizer

config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257, vocab_multiple=1)
plain: dict[str, Any] = dict(
    schedule="constant", warmup_steps=0, weight_decay=0.0, grad_clip=0.0, lr=3e-3
)
cfg = TrainConfig("laptop", data="data/builtin", total_batch_size=16 * 32, seq_len=32, **plain)


def train(world: World, late: bool) -> dict:
    """Gradients of step 1 on both ranks; the loss and the distance of the ranks' weights at each step."""
    torch.manual_seed(1337)
    model = GPT(config)
    ddp = DistributedDataParallel(model)
    loader = TokenLoader(TokenShards(cfg.data, "train", 257), cfg, world, batch_size=2)
    optimizer = make_optimizer(model, cfg, world)
    gradients, apart, losses = [], [], []
    for step in range(60):
        total = 0.0
        for micro_step in range(4):
            x, y, num_targets = loader.next_batch()
            if not late:
                ddp.require_backward_grad_sync = micro_step == 3
            loss = ddp(x, y, reduction="sum")[1] * world.world_size / num_targets
            if late:
                ddp.require_backward_grad_sync = micro_step == 3
            loss.backward()
            total += loss.item()
        if step == 0:
            whole = flat(p.grad for p in model.parameters() if p.grad is not None)
            gradients = list(world.gather(whole))
        optimizer.step()
        optimizer.zero_grad()
        a, b = world.gather(flat(model.parameters()).detach())
        apart.append(((a - b).norm() / a.norm()).item())
        losses.append(world.mean(total))
    return dict(gradients=gradients, apart=apart, losses=losses)


if __name__ == "__main__":
    world = World("cpu")
    torch.distributed.init_process_group(world.backend)
    found = {"in time": train(world, late=False), "late": train(world, late=True)}
    if world.is_main:
        torch.save(found, sys.argv[1])
    world.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter (pytorch/pytorch#179291)
