"""Muon: orthogonalized momentum for the matrices inside the blocks, AdamW for everything else.

**Singular values.** Let U S V^T be the SVD of a matrix's momentum. A few singular values in S are
large, because a few directions dominate every batch; the rest, of patterns that are rare in a batch, are
small. A step along the momentum itself moves the weights in these few directions and hardly at all in
the others. Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) steps along U V^T instead: all
singular values are 1, so the weights move by the same amount in each direction. This is steepest descent
if the size of a step is measured by its spectral norm, the most by which it can change the output for an
input of norm 1 (Bernstein and Newhouse 2024). An SVD is slow on a GPU, so U V^T is computed by matmuls
alone: an odd polynomial of a matrix, a X + b (X X^T) X + c (X X^T)^2 X, applies the same polynomial to
its singular values and leaves U and V unchanged. A few iterations bring all singular values that are not
tiny close to 1.

**Why hidden matrices only.** The argument holds for matrices that map one activation vector to another.
An embedding is a table of which a batch uses only some rows; a row of the head is a target only as often
as its token occurs; gains and biases are vectors. AdamW, which scales each number separately, suits
those.

**Scale factor.** A matrix (m, n) with m > n and orthonormal columns maps an input with RMS 1 to an output
with RMS sqrt(n / m). The factor sqrt(max(1, m / n)) compensates for that, so that one learning rate
suits all shapes.

**Differences from torch.optim.Muon**, which computes the same step: Newton-Schulz runs on all matrices
of one shape at once; parameters may be stacks of matrices (3-D); the work is divided over ranks;
NorMuon is an option; and on a CPU Newton-Schulz runs in float32 instead of bf16.
"""

# torch's _foreach functions have no public names
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.distributed import World

# a x + b x^3 + c x^5, the same in each iteration (Jordan et al. 2024). It is steep at 0 rather than exact
# at 1: after five iterations, values above 0.0015 are between 0.65 and 1.21.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T for each matrix U S V^T in g (..., m, n).

    On a GPU it computes and returns bf16: the result is approximate by design, and rounding errors of
    bf16 are far smaller than the step.
    """
    x = (g.bfloat16() if g.is_cuda else g).reshape(-1, *g.shape[-2:])
    wide = x.size(-2) <= x.size(-1)
    x = x if wide else x.mT  # the Gram matrix of the shorter side is smaller
    # with a Frobenius norm of 1, no singular value is above 1
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        # a x + (b gram + c gram gram) x, with each addition done by the matmul kernel
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).view_as(g)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalized steps.

    Matrices of one shape are stacked, so that few kernels are launched. A parameter (..., m, n) is
    itself a stack of matrices. One with an attribute num_matrices holds that many matrices one below
    another, such as the queries, keys and values of c_attn, which are orthogonalized separately
    (docs/LOG.md#qkv).

    beta2: decay rate of NorMuon's mean square of each row (Li et al. 2025, arXiv 2510.05491); 0 turns
    NorMuon off. Each row of the orthogonal step, which belongs to one neuron, is divided by the root of
    its mean square over time, as Adam does for single numbers, so that all neurons move at a similar
    rate. Then each matrix is scaled back to the Frobenius norm that it had before the division; the paper
    scales it to a fixed RMS instead.
    equilibrate_rows: scale each row of the momentum to norm 1 before the orthogonalization (MuonEq,
    arXiv 2603.28254), which brings the singular values closer together.
    world: each rank orthogonalizes some of the matrices, and the results are all-gathered; all ranks must
    have the same gradients. All ranks keep the whole state, so a run can resume with another number of
    ranks.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95,
        weight_decay: float = 0.0, beta2: float = 0.0, world: World | None = None,
        equilibrate_rows: bool = False,
    ):  # fmt: skip
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.beta2, self.equilibrate_rows = beta2, equilibrate_rows
        self.world = world if world and world.distributed else None

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no closure
        self.finish_step(self.start_step())

    @torch.no_grad()
    def start_step(self) -> list[tuple]:
        """Launch the matmuls and the communication of a step. Returns the argument of finish_step."""
        work = []
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    key = p.shape, getattr(p, "num_matrices", 1)
                    shapes.setdefault(key, []).append(p)
            for (_, num_matrices), params in shapes.items():
                grads = [p.grad for p in params]
                momenta = [self.get_state(p, "momentum", torch.zeros_like) for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                # Nesterov: the mean, with the newest gradient mixed in once more
                ahead = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))
                # a stack of matrices (k, m, n); c_attn's (layers, 3C, C) become (3 layers, C, C)
                ahead = ahead.unflatten(-2, (num_matrices, -1)).flatten(0, -3)
                if self.equilibrate_rows:
                    ahead = F.normalize(ahead, dim=-1)
                work.append((group, params, *self.orthogonalize(ahead)))
        return work

    @torch.no_grad()
    def finish_step(self, work: list[tuple]) -> None:
        """Wait for the orthogonalized steps of each shape, and update the parameters."""
        for group, params, update, gathering in work:
            if gathering:
                gathering.wait()
            m, n = update.shape[-2:]  # of one matrix
            # remove the padding that orthogonalize adds, and restore the shape of the parameters
            update = update.flatten()[: len(params) * params[0].numel()]
            update = update.view(len(params), *params[0].shape)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            step = -group["lr"] * max(1.0, m / n) ** 0.5
            if self.beta2:  # without a float32 copy of the update
                for p, u, factors in zip(params, update, self.row_factors(update, params)):
                    p.addcmul_(u, factors, value=step)
            else:
                update = update.to(params[0].dtype)
                torch._foreach_add_(params, list(update.unbind()), alpha=step)

    def orthogonalize(self, stack: Tensor) -> tuple[Tensor, Any]:
        """Orthogonalize each matrix of a stack (k, m, n). Returns (the results, followed by padding; a
        handle whose wait() must be called before they are read, or None)."""
        if not self.world:
            return newton_schulz(stack), None
        rank, ranks = self.world.rank, self.world.world_size
        each = -(-len(stack) // ranks)  # matrices per rank; the last ranks may have fewer, or none
        shard = stack.new_zeros(each, *stack.shape[1:])
        mine = stack[rank * each : (rank + 1) * each]
        shard[: len(mine)] = mine
        shard = newton_schulz(shard).contiguous()
        gathered = shard.new_empty(ranks * each, *stack.shape[1:])
        return gathered, self.world.all_gather_into(gathered, shard, async_op=True)

    def row_factors(self, update: Tensor, params: list[Tensor]) -> Tensor:
        """NorMuon's factors (..., m, 1) for the rows of `update` (..., m, n), which has one entry per
        parameter: they divide each row by the root of its mean square over time, then restore each
        matrix's Frobenius norm."""
        # (..., m, 1) each
        means = [self.get_state(p, "rows", lambda p: torch.zeros_like(p[..., :1])) for p in params]
        norms = torch.linalg.vector_norm(update, dim=-1, keepdim=True, dtype=params[0].dtype)
        squares = norms.square() / update.size(-1)
        torch._foreach_lerp_(means, list(squares.unbind()), 1 - self.beta2)
        factors = 1 / (torch.stack(means).sqrt() + 1e-10)
        size, new_size = (t.norm(dim=-2, keepdim=True) for t in (norms, norms * factors))
        return factors * (size / (new_size + 1e-10))

    def get_state(self, p: Tensor, name: str, init: Callable[[Tensor], Tensor]) -> Tensor:
        """The state `name` of a parameter; init(p) creates it on first use."""
        if name not in self.state[p]:
            self.state[p][name] = init(p)
        return self.state[p][name]


class CombinedOptimizer:
    """Several optimizers with the interface of one. The first must be a Muon; the others step while its
    matmuls and communication are running."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        first, *others = self.parts
        assert isinstance(first, Muon)
        work = first.start_step()
        for part in others:
            part.step()
        first.finish_step(work)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


class MuonAdamW(CombinedOptimizer):
    """Muon for the matrices in the blocks of a GPT, AdamW for its other parameters.

    adamw: keyword arguments of torch.optim.AdamW; weight decay is applied to Muon's matrices only.
    """

    def __init__(
        self, model: Any, muon_lr: float, weight_decay: float = 0.0, world: World | None = None,
        **adamw: Any,
    ):  # fmt: skip
        blocks = model.block_matrices()
        inside = {id(p) for p in blocks}
        others = [p for p in model.parameters() if id(p) not in inside]
        super().__init__(
            Muon(blocks, muon_lr, weight_decay=weight_decay, world=world),
            torch.optim.AdamW(others, weight_decay=0.0, **adamw),
        )
