"""FSDP2: weights, gradients and AdamW's state are all sharded. Used by `--parallel fsdp2`.

PyTorch's fully_shard (Zhao et al. 2023) all-gathers the weights of a block before the block computes
and frees them afterwards, and it reduce-scatters gradients in every micro-step. Weights, gradients and
moments take 16 / n bytes per weight on each of n ranks. Each micro-step communicates as much as DDP
does in a whole step, so prefer ZeRO-1 (zero1.py) if the weights fit on each GPU.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from lab.distributed import World
from lab.optim.grad_norm import global_grad_norm
from lab.optim.sharded import ShardedOptimizer, needs_fp32_params, refuse_fp16
from lab.precision import Precision

if TYPE_CHECKING:  # importing it takes about a second, and only --parallel fsdp2 needs it
    from torch.distributed.tensor import DTensor


class Fsdp2AdamW(ShardedOptimizer):
    """Shards a model with FSDP2, and AdamW's state with it.

    adamw: a new AdamW of the model's parameters. loader: unused, but Zero1AdamW has the same arguments.
    State dicts contain whole tensors. Raises UserError in fp16.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, model: Any, loader: Any, precision: Precision, world: World
    ):
        refuse_fp16("fsdp2", precision)
        self.full_optimizer, self.world = adamw, world
        names = {p: name for name, p in model.named_parameters()}
        apply_fsdp(model, precision, world)
        sharded = dict(model.named_parameters())
        for group in adamw.param_groups:
            group["params"] = [sharded[names[p]] for p in group["params"]]
        self.params = [p for group in adamw.param_groups for p in group["params"]]
        self.norm_params = [p for p in self.params if not is_dtensor(p)]  # whole on every rank
        groups = [
            g | {"params": [to_local(p.data) for p in g["params"]]} for g in adamw.param_groups
        ]
        self.local_shards = [p for group in groups for p in group["params"]]
        self.shard_optimizer = torch.optim.AdamW(groups)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most max_norm (0: no limit). Returns
        the norm before scaling. backward() has averaged the gradients over the ranks, except those of
        LayerNorms, which are averaged here."""
        if whole := [p.grad for p in self.norm_params]:
            mean = self.world.all_reduce(torch.cat([g.flatten() for g in whole]))
            mean /= self.world.world_size
            for grad, part in zip(whole, mean.split([g.numel() for g in whole])):
                grad.copy_(part.view_as(grad))
        grads = [to_local(p.grad) for p in self.params]
        for shard, grad in zip(self.local_shards, grads):
            shard.grad = grad
        # gradients that are whole on every rank count only once, on rank 0
        once = [g for g, p in zip(grads, self.params) if is_dtensor(p) or self.world.is_main]
        norm = global_grad_norm(once, self.world.all_reduce)
        if max_norm:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, scale)  # pyright: ignore  # no public name
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (*self.params, *self.local_shards):
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 the state of a plain AdamW, on the CPU; on other ranks no state."""
        moments = {}
        for i, (shard, p) in enumerate(zip(self.local_shards, self.params)):
            if state := self.shard_optimizer.state.get(shard):
                shards = {name: to_dtensor(tensor, p) for name, tensor in state.items()}
                moments[i] = full_state_dict(shards, self.world)
        return self.full_optimizer.state_dict() | {"state": moments if self.world.is_main else {}}

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Load a plain AdamW's state."""
        self.full_optimizer.load_state_dict(data | {"state": {}})
        moments = {}
        for i, state in data["state"].items():
            shards = shard_state_dict(state, {name: self.params[i] for name in state})
            moments[i] = {name: to_local(shard) for name, shard in shards.items()}
        self.shard_optimizer.load_state_dict(self.shard_optimizer.state_dict() | {"state": moments})


def apply_fsdp(model: Any, precision: Precision, world: World) -> None:
    """Shard a GPT's parameters in place: each becomes a DTensor, except those of the blocks' LayerNorms.

    A block's parameters are gathered when it computes, in bf16 if autocast rounds them to it anyway.
    LayerNorm's parameters stay whole on every rank, because autocast uses them in float32, and gathering
    them separately would split the compiled block into several graphs. The model's state dict has whole
    tensors, on rank 0's CPU.
    """
    from torch.distributed import fsdp  # here, because importing it takes about a second
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    dtype = torch.bfloat16 if precision.name == "bf16" else None
    modules = [m for block in model.blocks for m in block.modules()]
    norms = {p for m in modules if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    for block in model.blocks:
        rounds = dtype and not any(needs_fp32_params(m, dtype) for m in block.modules())
        policy = fsdp.MixedPrecisionPolicy(dtype if rounds else None, torch.float32, None, False)
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=norms)
    # the rest: embeddings and head
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=norms)
    fsdp.register_fsdp_forward_method(model, "hidden")
    model.register_state_dict_post_hook(
        lambda _, state, *__: state.update(full_state_dict(state, world))
    )
    sharded = dict(model.named_parameters(remove_duplicate=False))
    model.register_load_state_dict_pre_hook(
        lambda _, state, *__: state.update(shard_state_dict(state, sharded))
    )


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "to_local")


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def to_dtensor(tensor: Tensor, p: Tensor) -> Tensor:
    """Make a DTensor with the layout of the parameter p from this rank's shard. Returns `tensor` itself if
    p is not sharded or if it is a scalar (AdamW's step)."""
    from torch.distributed.tensor import DTensor  # here, because importing it takes about a second

    if not (is_dtensor(p) and tensor.dim()):
        return tensor
    return DTensor.from_local(
        tensor, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def full_state_dict(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor | None]:
    """{name: whole tensor} on rank 0's CPU, and {name: None} on other ranks. All ranks must call it."""
    whole = {}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            tensor = tensor.full_tensor()
        whole[name] = tensor.cpu() if world.is_main else None
    return whole


def shard_state_dict(
    tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Shard each tensor like the parameter of the same name in `like`. Tensors of another shape, buffers, and
    those of parameters that are not sharded are returned unchanged."""
    from torch.distributed.tensor import distribute_tensor  # as above

    sharded = {}
    for name, tensor in tensors.items():
        p = like.get(name, tensor)  # tensor: a buffer
        if is_dtensor(p) and tensor.shape == p.shape:
            tensor = distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements)
        sharded[name] = tensor
    return sharded
