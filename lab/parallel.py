"""What is not plain DDP. ZeRO-1: AdamW's state and work are shared out among the processes, and what
is exchanged has as few bits as lose nothing. FSDP2: the weights and gradients are shared out too.

Under DistributedDataParallel every process receives the sum of all gradients, and then all make the
same update of all weights, each with its own copy of AdamW's two moments. Here each of n processes
looks after 1 / n of the weights (Rajbhandari et al. 2020, section 5.1): it alone has their moments,
receives their gradients, updates them and hands them out. The moments take 8 / n instead of 8 bytes
a weight, and the update 1 / n of the time.

It is also a way to send less. Under autocast a product rounds its matrix to 16 bits, and makes the
matrix's gradient in 16 bits. So that is how they travel. Sums and moments have 32 bits, and so have
the weights that are updated (4 / n bytes more, as everyone else has them rounded). An embedding,
whose rows are added to others and whose gradient is a sum of two, needs 32, as do biases and gains,
and gradients that were summed over micro-steps.

With FSDP2 (Zhao et al. 2023, of PyTorch) a block's weights are put together when it computes and
dropped again, and gradients are exchanged in every micro-step: so that weights, gradients and
moments take 16 / n bytes a weight. It sends as much as DDP for that, in every micro-step: who has
the memory takes ZeRO-1.
"""

import math

import torch
import torch.distributed as dist

from lab.cli import UserError
from lab.optim import exact_norm


def read_in_16_bits(model, dtype):
    """The parameters that only products in bf16 read, which round them, and make their gradients so
    too: the blocks' matrices, but for those of a module that says it `reads` all bits."""
    if dtype != torch.bfloat16:
        return []
    wide = {p for m in model.modules() if reads_all_bits(m, dtype) for p in m.parameters()}
    return [p for p in model.block_matrices() if p not in wide]


def reads_all_bits(module, dtype):
    """Whether a module reads more of its parameters than dtype holds, as those in 8 bits do."""
    return getattr(module, "reads", dtype) != dtype


def refuse_fp16(name, precision):
    if precision.name == "fp16":
        raise UserError(
            f"parallel={name} needs gradients that are not scaled, and precision=fp16 scales them; "
            "leave it out, or pass --precision fp32"
        )


class Shares:
    """Parameters that lie in one buffer, one after the other, cut into as many equal shares as
    there are processes.

    wire: the type in which the parameters lose nothing for who reads them, nor gradients that
    nobody has summed yet.
    """

    def __init__(self, params, world, wire):
        self.params, self.wire, self.world = params, wire, world
        self.starts = [0]
        for p in params:  # views start at 256 bytes, as kernels like it
            self.starts.append(self.starts[-1] + -(-p.numel() // 64) * 64)
        size = -(-self.starts[-1] // (64 * world.world_size)) * 64
        self.here = slice(world.rank * size, (world.rank + 1) * size)  # this process's share
        self.weights = torch.zeros(world.world_size * size, device=params[0].device)  # everyone's
        for p, view in zip(params, self.views(self.weights)):
            view.copy_(p.data)
            p.data = view
        self.mine = self.weights[self.here]  # with all bits
        if wire != torch.float32:
            self.mine = self.mine.clone()
        self.begin()

    def begin(self):
        """Everyone goes on from rank 0's weights."""
        dist.broadcast(self.weights, src=0)
        self.mine.copy_(self.weights[self.here])

    def views(self, flat):
        """The parameters' parts of a buffer."""
        return [
            flat[start : start + p.numel()].view_as(p) for p, start in zip(self.params, self.starts)
        ]

    def laid_out(self, tensors, dtype, device):
        """A buffer with these in the parameters' places, and 0 in between."""
        flat = torch.zeros(len(self.weights), dtype=dtype, device=device)
        torch._foreach_copy_(self.views(flat), tensors)
        return flat

    def take_gradients(self, dtype):
        """The mean over the processes of this share's gradients, which travel as dtype. The
        parameters keep none."""
        flat = self.laid_out([p.grad for p in self.params], dtype, self.weights.device)
        for p in self.params:
            p.grad = None
        if dtype == torch.float32:
            # torch 2.13 has another name for it
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(mine := torch.empty_like(self.mine), flat)
        else:  # sums made on the way would be rounded at every process
            dist.all_to_all_single(parts := torch.empty_like(flat), flat)
            mine = parts.view(self.world.world_size, -1).sum(0, dtype=torch.float32)
        return mine.div_(self.world.world_size)

    def hand_out(self, dtype):
        """Every process's share of the weights to everyone, as dtype."""
        if dtype == torch.float32:
            self.world.all_gather(self.weights, self.mine)
        else:
            parts = torch.empty_like(self.weights, dtype=dtype)
            self.world.all_gather(parts, self.mine.to(dtype))
            self.weights.copy_(parts)

    def gather(self, mine):
        """What each process has as `mine`, put together: tensors like the parameters, on rank 0's
        CPU."""
        self.world.all_gather(flat := torch.empty_like(self.weights), mine)
        return [view.cpu() for view in self.views(flat)] if self.world.is_main else []


class InShares:
    """Makes the updates of `of_wholes`, an AdamW that has made none, by `of_shares`, one of this
    process's shares. It brings an exchange of its own: the model is not wrapped by DDP. All
    processes call each method together."""

    @property
    def param_groups(self):
        """Rates and the like, of whole parameters; step reads them here."""
        return self.of_wholes.param_groups

    def step(self):
        """Update the shares by the gradients that clip_grad_norm has taken."""
        for ours, group in zip(self.of_shares.param_groups, self.param_groups):
            ours.update({k: v for k, v in group.items() if k != "params"})
        self.of_shares.found_inf = getattr(self, "found_inf", None)  # 1: the update is left out
        self.of_shares.step()


class Zero1AdamW(InShares):
    """AdamW's state in shares; every process has all weights."""

    def __init__(self, adamw, model, loader, precision, world):
        refuse_fp16("zero1", precision)
        self.of_wholes, self.loader, self.world = adamw, loader, world
        self.shares, groups_of_shares = [], []
        rounded = set(read_in_16_bits(model, precision.dtype))
        for group in adamw.param_groups:
            parts = {torch.bfloat16: [], torch.float32: []}
            for p in group["params"]:
                parts[torch.bfloat16 if p in rounded else torch.float32].append(p)
            shares = [Shares(params, world, wire) for wire, params in parts.items() if params]
            groups_of_shares.append(group | {"params": [s.mine for s in shares]})
            self.shares += shares
        self.of_shares = torch.optim.AdamW(groups_of_shares)

    def clip_grad_norm(self, max_norm):
        """Take the mean of all processes' gradients, each of its share, and scale it so that the
        norm of all is at most max_norm (0: as it is). Returns the norm before."""
        accumulated = self.loader.grad_accum_steps > 1  # 16 bits do not hold sums of micro-steps
        for s in self.shares:
            s.mine.grad = s.take_gradients(torch.float32 if accumulated else s.wire)
        shares = [s.mine for s in self.shares]
        norm = exact_norm([share.grad for share in shares], self.world.all_reduce)
        torch.nn.utils.clip_grads_with_norm_(shares, max_norm or math.inf, norm)
        return norm

    def step(self):
        super().step()
        for s in self.shares:
            s.hand_out(s.wire)

    def zero_grad(self, set_to_none=True):
        self.of_shares.zero_grad(set_to_none)

    def state_dict(self):
        """On rank 0 what `adamw` would have after the same updates, on the CPU: a run may go on
        with another number of processes, or without shares. Elsewhere it has no state. Until the
        next step the model has all bits of its weights, to be saved beside it."""
        states = {}
        for s in self.shares:
            if s.wire != torch.float32:
                s.hand_out(torch.float32)
            state = self.of_shares.state[s.mine]
            if state:
                moments = zip(s.params, s.gather(state["exp_avg"]), s.gather(state["exp_avg_sq"]))
                step = state["step"].cpu()
                for p, mean, square in moments:
                    states[p] = dict(step=step.clone(), exp_avg=mean, exp_avg_sq=square)
        params = [p for group in self.param_groups for p in group["params"]]
        numbered = {i: states[p] for i, p in enumerate(params) if p in states}
        return self.of_wholes.state_dict() | {"state": numbered}

    def load_state_dict(self, data):
        """Go on from an AdamW's state, and from the weights that the parameters have by now."""
        self.of_wholes.load_state_dict(data | {"state": {}})
        params = [p for group in self.param_groups for p in group["params"]]
        states = {p: data["state"][i] for i, p in enumerate(params) if i in data["state"]}
        for s in self.shares:
            s.begin()
            if s.params[0] in states:
                found = [states[p] for p in s.params]
                state = {"step": found[0]["step"].to(s.mine, copy=True)}
                for name in ("exp_avg", "exp_avg_sq"):
                    whole = s.laid_out([each[name] for each in found], s.mine.dtype, "cpu")
                    state[name] = whole[s.here].to(s.mine)
                self.of_shares.state[s.mine] = state


class Fsdp2AdamW(InShares):
    """Shares out the model's weights, too. Saved states are those of whole tensors."""

    def __init__(self, adamw, model, loader, precision, world):
        refuse_fp16("fsdp2", precision)
        self.of_wholes, self.world = adamw, world
        names = {p: name for name, p in model.named_parameters()}
        shard(model, precision, world)
        shares = dict(model.named_parameters())
        for group in adamw.param_groups:
            group["params"] = [shares[names[p]] for p in group["params"]]
        self.params = [p for group in adamw.param_groups for p in group["params"]]
        self.norms = [p for p in self.params if not is_share(p)]  # whole on every process
        groups = [g | {"params": [local(p.data) for p in g["params"]]} for g in adamw.param_groups]
        self.mine = [p for group in groups for p in group["params"]]
        self.of_shares = torch.optim.AdamW(groups)

    def clip_grad_norm(self, max_norm):
        """As Zero1AdamW's; backward() has made the exchange, but for the gains and biases of norms."""
        whole = [p.grad for p in self.norms]
        mean = self.world.all_reduce(torch.cat([g.flatten() for g in whole]))
        mean /= self.world.world_size
        for grad, part in zip(whole, mean.split([g.numel() for g in whole])):
            grad.copy_(part.view_as(grad))
        grads = [local(p.grad) for p in self.params]
        for mine, grad in zip(self.mine, grads):
            mine.grad = grad
        once = [g for g, p in zip(grads, self.params) if is_share(p) or self.world.is_main]
        norm = exact_norm(once, self.world.all_reduce)
        if max_norm:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def zero_grad(self, set_to_none=True):
        for p in (*self.params, *self.mine):
            p.grad = None

    def state_dict(self):
        """On rank 0 what AdamW would have without shares, on the CPU; elsewhere it has no state."""
        moments = {}
        for i, (mine, p) in enumerate(zip(self.mine, self.params)):
            if state := self.of_shares.state.get(mine):
                shares = {name: share_of(tensor, p) for name, tensor in state.items()}
                moments[i] = gathered(shares, self.world)
        return self.of_wholes.state_dict() | {"state": moments if self.world.is_main else {}}

    def load_state_dict(self, data):
        self.of_wholes.load_state_dict(data | {"state": {}})
        moments = {}
        for i, state in data["state"].items():
            shares = cut(state, dict.fromkeys(state, self.params[i]))
            moments[i] = {name: local(share) for name, share in shares.items()}
        self.of_shares.load_state_dict(self.of_shares.state_dict() | {"state": moments})


def shard(model, precision, world):
    """Every parameter becomes this process's share of it, a DTensor; those of a block are put
    together when it computes, in 16 bits where it would round them anyway. The norms in blocks stay
    whole: autocast reads all bits of their gains, and to put these together by themselves would cut
    the compiled block in pieces."""
    from torch.distributed import fsdp  # not above: every command would wait a second for them
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    dtype = torch.bfloat16 if precision.name == "bf16" else None
    modules = [m for block in model.blocks for m in block.modules()]
    norms = {p for m in modules if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}
    for block in model.blocks:
        rounds = dtype and not any(reads_all_bits(m, dtype) for m in block.modules())
        policy = fsdp.MixedPrecisionPolicy(dtype if rounds else None, torch.float32, None, False)
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=norms)
    # the rest: embeddings and head
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=norms)
    fsdp.register_fsdp_forward_method(model, "hidden")
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(gathered(state, world)))
    shares = dict(model.named_parameters(remove_duplicate=False))
    model.register_load_state_dict_pre_hook(lambda _, state, *__: state.update(cut(state, shares)))


def is_share(tensor):
    return hasattr(tensor, "to_local")


def local(tensor):
    """What this process has of it."""
    return tensor.to_local() if is_share(tensor) else tensor


def settle_buckets(model, precision):
    """Have DDP sort its gradients before the first update.

    It lays them in its buckets as they come in its first backward pass, from the second one on. With
    three processes or more a sum's order depends on the place in the bucket, so a resumed run's first
    update would round in another way than that of a run which was left alone.
    """
    idx = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with precision.autocast():
        _, loss = model(idx, idx)
    loss.backward()
    model.zero_grad(set_to_none=True)


def share_of(tensor, p):
    """What this process has of a tensor like p, as its share."""
    from torch.distributed.tensor import DTensor

    if not (is_share(p) and tensor.dim()):
        return tensor
    like = dict(shape=p.shape, stride=p.stride(), run_check=False)
    return DTensor.from_local(tensor, p.device_mesh, p.placements, **like)


def gathered(tensors, world):
    """{name: tensor} with whole ones instead of shares, on rank 0's CPU."""
    whole = {}
    for name, tensor in tensors.items():
        if is_share(tensor):
            tensor = tensor.full_tensor()
        whole[name] = tensor.cpu() if world.is_main else None
    return whole


def cut(tensors, like):
    """{name: tensor} with this process's share of each, as `like` (also by name) has them."""
    from torch.distributed.tensor import distribute_tensor

    shares = {}
    for name, tensor in tensors.items():
        p = like[name]
        if is_share(p) and tensor.shape == p.shape:
            tensor = distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements)
        shares[name] = tensor
    return shares


EXCHANGES = {"zero1": Zero1AdamW, "fsdp2": Fsdp2AdamW}  # by --parallel
