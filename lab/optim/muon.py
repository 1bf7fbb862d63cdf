"""Muon: momentum, made orthogonal, for the matrices inside the blocks; AdamW for everything else.

A gradient step of a matrix is dominated by a few directions. Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon) replaces the momentum matrix U S V^T by U V^T, so that every
direction is moved by the same amount: the steepest descent step where length is the largest
singular value. Embeddings (whose rows are vectors, not a map), biases and gains stay with AdamW.
"""

import torch

# quintic a x + b x^3 + c x^5 that drives singular values towards 1 fast rather than exactly (Jordan
# 2024): after five rounds those that began above 0.0015 lie between 0.65 and 1.21
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(g, steps=5):
    """U V^T of each matrix U S V^T in g (..., m, n), approximately, by Newton-Schulz iteration:
    products only.

    In bf16 where the device multiplies it fast: the result is rough by design, and its error is far
    below the step.
    """
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16() if g.is_cuda else g
    wide = x.size(-2) <= x.size(-1)
    x = x if wide else x.mT  # the smaller Gram matrix
    # Frobenius norm 1: no singular value above 1
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum and orthogonal steps. Matrices of one shape are stacked, so that a model
    needs few launches."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads = [p.grad for p in params]
                for p in params:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                momenta = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                update = orthogonalize(
                    torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))
                )
                # a tall matrix writes each input into more outputs; sqrt(m / n) keeps the size of
                # what it writes
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)


class MuonAdamW:
    """Both, behind the interface of one torch optimizer."""

    def __init__(self, model, muon_lr, momentum=0.95, weight_decay=0.0, **adamw):
        blocks = model.block_matrices()
        inside = {id(p) for p in blocks}
        others = [p for p in model.parameters() if id(p) not in inside]
        self.parts = [
            Muon(blocks, muon_lr, momentum, weight_decay),
            torch.optim.AdamW(others, weight_decay=0.0, **adamw),
        ]

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
