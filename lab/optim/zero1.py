"""ZeRO-1: each rank keeps AdamW's state for its shard of the weights. Used by `--parallel zero1`.

With DistributedDataParallel, every rank gets the average of all gradients and updates all weights, with
its own copy of AdamW's two moments. With ZeRO-1 (Rajbhandari et al. 2020, section 5.1), each of n ranks
updates only 1 / n of the weights: it receives their gradients (reduce-scatter), updates them, and
sends them to all ranks (all-gather). The moments take 8 / n instead of 8 bytes per weight, and the
update 1 / n of the time.

Matrices that autocast rounds to bf16 anyway are sent in bf16, as are their gradients. This halves the
communication and loses nothing (see bf16_params). Moments and sums over ranks are in float32, and so is
each rank's shard of the weights. The shard is a copy, because the model's own weights are rounded, and takes
4 / n more bytes per weight. Gradients accumulated over micro-steps are sent in float32.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.data.loader import TokenLoader
from lab.distributed import World
from lab.optim.grad_norm import global_grad_norm
from lab.optim.sharded import ShardedOptimizer, bf16_params, refuse_fp16
from lab.precision import Precision


class FlatParamShards:
    """Parameters moved into one flat buffer, which is divided into equal shards, one per rank.

    comm_dtype: the dtype in which parameters and gradients are sent. It must not lose precision: bf16
    only for parameters that autocast rounds to bf16 and whose gradients it computes in bf16.
    weights: the buffer of all parameters, on every rank. local_shard: this rank's part of it, in
    float32. shard_slice: the position of that part in the buffer.
    """

    def __init__(self, params: list[nn.Parameter], world: World, comm_dtype: torch.dtype):
        self.params, self.comm_dtype, self.world = params, comm_dtype, world
        self.starts = [0]
        for p in params:  # aligned to 256 bytes, which is faster
            self.starts.append(self.starts[-1] + -(-p.numel() // 64) * 64)
        size = -(-self.starts[-1] // (64 * world.world_size)) * 64
        self.shard_slice = slice(world.rank * size, (world.rank + 1) * size)
        self.weights = torch.zeros(world.world_size * size, device=params[0].device)
        for p, view in zip(params, self.views(self.weights)):
            view.copy_(p.data)
            p.data = view
        self.local_shard = self.weights[self.shard_slice]
        if comm_dtype != torch.float32:  # a copy, because all_gather_params rounds the buffer
            self.local_shard = self.local_shard.clone()
        self.broadcast_from_rank0()

    def broadcast_from_rank0(self) -> None:
        """Copy the weights of rank 0 to every rank."""
        dist.broadcast(self.weights, src=0)
        self.local_shard.copy_(self.weights[self.shard_slice])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer with the shapes of the parameters."""
        return [
            flat[start : start + p.numel()].view_as(p) for p, start in zip(self.params, self.starts)
        ]

    def flatten(
        self, tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Copy one tensor per parameter into a new flat buffer; the gaps between them are 0."""
        flat = torch.zeros(len(self.weights), dtype=dtype, device=device)
        torch._foreach_copy_(self.views(flat), tensors)  # pyright: ignore  # no public name
        return flat

    def reduce_scatter_grads(self, dtype: torch.dtype) -> Tensor:
        """This shard's gradients in float32, averaged over the ranks; they are sent as dtype. Sets the
        gradients of the parameters to None."""
        flat = self.flatten([p.grad for p in self.params], dtype, self.weights.device)
        for p in self.params:
            p.grad = None
        if dtype == torch.float32:
            # renamed in torch 2.13
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(shard := torch.empty_like(self.local_shard), flat)
        else:  # all-to-all, because a reduce-scatter in bf16 would round partial sums
            dist.all_to_all_single(parts := torch.empty_like(flat), flat)
            shard = parts.view(self.world.world_size, -1).sum(0, dtype=torch.float32)
        return shard.div_(self.world.world_size)

    def all_gather_params(self, dtype: torch.dtype) -> None:
        """Update the whole buffer on every rank from all local shards, sent as dtype."""
        if dtype == torch.float32:
            self.world.all_gather_into(self.weights, self.local_shard)
        else:
            parts = torch.empty_like(self.weights, dtype=dtype)
            self.world.all_gather_into(parts, self.local_shard.to(dtype))
            self.weights.copy_(parts)

    def gather(self, shard: Tensor) -> list[Tensor]:
        """Concatenate the ranks' shards and return tensors with the parameters' shapes, on rank 0's CPU;
        [] on other ranks."""
        self.world.all_gather_into(flat := torch.empty_like(self.weights), shard)
        return [view.cpu() for view in self.views(flat)] if self.world.is_main else []


class Zero1AdamW(ShardedOptimizer):
    """AdamW with sharded state; every rank has all weights.

    adamw: a new AdamW of the model's parameters. loader: its grad_accum_steps decides in which dtype
    gradients are sent. Raises UserError in fp16.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, model: Any, loader: TokenLoader, precision: Precision,
        world: World,
    ):  # fmt: skip
        refuse_fp16("zero1", precision)
        self.full_optimizer, self.loader, self.world = adamw, loader, world
        self.shards: list[FlatParamShards] = []
        groups = []
        rounded = set(bf16_params(model, precision.dtype))
        for group in adamw.param_groups:
            parts = {torch.bfloat16: [], torch.float32: []}
            for p in group["params"]:
                parts[torch.bfloat16 if p in rounded else torch.float32].append(p)
            shards = [
                FlatParamShards(params, world, comm_dtype)
                for comm_dtype, params in parts.items()
                if params
            ]
            groups.append(group | {"params": [s.local_shard for s in shards]})
            self.shards += shards
        self.shard_optimizer = torch.optim.AdamW(groups)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Average the gradients of each rank's shard over the ranks, and scale them so that the norm over
        all shards is at most max_norm (0: no limit). Returns the norm before scaling."""
        accumulated = self.loader.grad_accum_steps > 1  # a sum over micro-steps needs float32
        grads, tensors = [], [s.local_shard for s in self.shards]
        for s in self.shards:
            grads.append(s.reduce_scatter_grads(torch.float32 if accumulated else s.comm_dtype))
            s.local_shard.grad = grads[-1]
        norm = global_grad_norm(grads, self.world.all_reduce)
        torch.nn.utils.clip_grads_with_norm_(tensors, max_norm or math.inf, norm)
        return norm

    def step(self) -> None:
        """Update this rank's shards and send them to all ranks."""
        super().step()
        for s in self.shards:
            s.all_gather_params(s.comm_dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.shard_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 the state of a plain AdamW, on the CPU, so that a run can resume with another number of
        ranks or without sharding; on other ranks no state. Until the next step the model has unrounded
        float32 weights, so that these are saved."""
        states = {}
        for s in self.shards:
            if s.comm_dtype != torch.float32:
                s.all_gather_params(torch.float32)
            state = self.shard_optimizer.state[s.local_shard]
            if state:
                moments = zip(s.params, s.gather(state["exp_avg"]), s.gather(state["exp_avg_sq"]))
                step = state["step"].cpu()
                for p, mean, square in moments:
                    states[p] = dict(step=step.clone(), exp_avg=mean, exp_avg_sq=square)
        params = [p for group in self.param_groups for p in group["params"]]
        numbered = {i: states[p] for i, p in enumerate(params) if p in states}
        return self.full_optimizer.state_dict() | {"state": numbered}

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Load a plain AdamW's state. The model's weights must be loaded before; rank 0's are used."""
        self.full_optimizer.load_state_dict(data | {"state": {}})
        params = [p for group in self.param_groups for p in group["params"]]
        states = {p: data["state"][i] for i, p in enumerate(params) if i in data["state"]}
        for s in self.shards:
            s.broadcast_from_rank0()
            if s.params[0] in states:
                found = [states[p] for p in s.params]
                state = {"step": found[0]["step"].to(s.local_shard, copy=True)}
                for name in ("exp_avg", "exp_avg_sq"):
                    whole = s.flatten([each[name] for each in found], s.local_shard.dtype, "cpu")
                    state[name] = whole[s.shard_slice].to(s.local_shard)
                self.shard_optimizer.state[s.local_shard] = state
