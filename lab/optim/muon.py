"""Muon: momentum, made orthogonal, for the matrices inside the blocks; AdamW for everything else.

**What it does to the singular values.** A matrix's momentum is U S V^T, its SVD. A few of its
singular values S are large, because a few directions dominate every batch, and the rest are small.
A step along it moves a few directions and leaves the others. Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon) steps along U V^T: all singular values become 1, so each
direction moves by the same amount. That is the steepest descent where a step's length is its
largest singular value: the most by which it can change an output (Bernstein and Newhouse 2024).
SVD is slow on a GPU, so U V^T comes from products alone: an odd polynomial of a matrix,
a X + b (X X^T) X + c (X X^T)^2 X, is the same polynomial of its singular values and leaves U and V
as they are. Some rounds of it drive all values that are not tiny towards 1.

**Why hidden matrices only.** The argument needs a map between two spaces of directions. An
embedding is a list of vectors, of which a batch sees some; the head's rows are met as unevenly as
words are; gains and biases have no second side. AdamW, which treats each number alone, fits those.

**Why the scale factor.** An orthogonal step of shape (m, n) turns an input of size 1 for each of
its n numbers into an output of size sqrt(n / m) for each of its m numbers, if m > n. The factor
sqrt(max(1, m / n)) makes up for that: one rate then suits all shapes.
"""

import torch

# quintic a x + b x^3 + c x^5, each round the same (Jordan 2024), as steep at 0 as can be rather than
# exact: after five rounds values that began above 0.0015 lie between 0.65 and 1.21
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Polar Express (Amsel et al. 2025, arXiv 2505.16932, algorithm 1): each round has the polynomial that
# is best for the values that the rounds before leave. The numbers are modded-nanogpt's, made for
# values between 0.001 and 1, which end between 0.84 and 1.15; the first takes values up to 1.02, as
# rounding may exceed 1. No loss here is lower with it (docs/LOG.md#speedrun-parts), so the notebook
# alone uses it.
POLAR_EXPRESS = (
    (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(g, rounds=5, coefficients=(NEWTON_SCHULZ,)):
    """U V^T of each matrix U S V^T in g (..., m, n), approximately. Each round has (a, b, c) of its
    own; the last ones given repeat.

    In bf16 where the device multiplies it fast, and returned so: the result is rough by design, and
    its error is far below the step.
    """
    x = (g.bfloat16() if g.is_cuda else g).reshape(-1, *g.shape[-2:])
    wide = x.size(-2) <= x.size(-1)
    x = x if wide else x.mT  # the smaller Gram matrix
    # Frobenius norm 1: no singular value above 1
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for i in range(rounds):
        a, b, c = coefficients[min(i, len(coefficients) - 1)]
        gram = x @ x.mT
        # a x + (b gram + c gram gram) x, each sum made where its product is
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).view_as(g)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum and orthogonal steps. Matrices of one shape are stacked, so that a model
    needs few launches; a parameter (..., m, n) is a stack itself.

    row_beta: of NorMuon (Li et al. 2025, arXiv 2510.05491; 0 is off), the memory of a running mean
    of each row's size. A row, a neuron's, of the orthogonal step is divided by it, as Adam does with
    numbers, and the whole then has the size it had: rows that were moved much move less.
    world: processes that have the same gradients each make some matrices orthogonal and exchange
    them, as the work is in the products. The state is small work, and the same on all of them, so a
    run goes on with any number.
    """

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0, row_beta=0.0, world=None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.row_beta, self.world = row_beta, world if world and world.distributed else None

    @torch.no_grad()
    def step(self):
        self.finish(self.begin())

    @torch.no_grad()
    def begin(self):
        """Launch all products, and what has to be sent. Returns what finish needs."""
        work = []
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for params in shapes.values():
                grads = [p.grad for p in params]
                momenta = [self.kept(p, "momentum", torch.zeros_like) for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                ahead = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))
                work.append((group, params, *self.orthogonal(ahead.flatten(0, -3))))
        return work

    @torch.no_grad()
    def finish(self, work):
        """Wait for each shape's steps, and make them."""
        for group, params, update, underway in work:
            if underway:
                underway.wait()
            m, n = params[0].shape[-2:]
            # (len(params), ..., m, n); what follows is padding
            update = update.flatten()[: len(params) * params[0].numel()]
            update = update.view(len(params), *params[0].shape).to(params[0].dtype)
            if self.row_beta:
                update = self.normalized(update, params)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            scale = max(1.0, m / n) ** 0.5
            torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)

    def orthogonal(self, stack):
        """(orthogonal matrices of a stack (k, m, n), or those that are still on their way; what to
        wait for, or None)."""
        if not self.world:
            return orthogonalize(stack), None
        rank, processes = self.world.rank, self.world.world_size
        each = -(-len(stack) // processes)  # matrices of a process, the last ones' of 0
        mine = stack[rank * each : (rank + 1) * each]
        share = stack.new_zeros(each, *stack.shape[1:])
        share[: len(mine)] = mine
        share = orthogonalize(share).contiguous()
        every = share.new_empty(processes * each, *stack.shape[1:])
        return every, self.world.all_gather(every, share, async_op=True)

    def normalized(self, update, params):
        """NorMuon: rows of `update` (k, ..., m, n) divided by the root of their mean square."""
        means = [
            self.kept(p, "rows", lambda p: torch.zeros_like(p[..., :1])) for p in params
        ]  # (..., m, 1)
        torch._foreach_lerp_(
            means, list(update.square().mean(-1, keepdim=True).unbind()), 1 - self.row_beta
        )
        rows = update / (torch.stack(means).sqrt() + 1e-10)
        size, new_size = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, rows))
        return rows * (size / (new_size + 1e-10))

    def kept(self, p, name, begin):
        """Part of a parameter's state."""
        if name not in self.state[p]:
            self.state[p][name] = begin(p)
        return self.state[p][name]


class Together:
    """Several optimizers behind the interface of one; the first is a Muon, whose steps are on
    their way while the others make theirs."""

    def __init__(self, *parts):
        self.parts = parts

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def step(self):
        first, *others = self.parts
        work = first.begin()
        for part in others:
            part.step()
        first.finish(work)

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


class MuonAdamW(Together):
    """Muon for the matrices in the blocks of a model, AdamW for its other parameters."""

    def __init__(self, model, muon_lr, weight_decay=0.0, world=None, **adamw):
        blocks = model.block_matrices()
        inside = {id(p) for p in blocks}
        others = [p for p in model.parameters() if id(p) not in inside]
        super().__init__(
            Muon(blocks, muon_lr, weight_decay=weight_decay, world=world),
            torch.optim.AdamW(others, weight_decay=0.0, **adamw),
        )
