"""Inspect one prediction: the logits of the next token, and the attention weights behind them.

Used by lab serve, whose page redraws the probabilities for other sampling settings.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab.data.tokenizers import Tokenizer
from lab.inference.token_logprobs import token_label

NAMED = 20  # most probable tokens, sent with their names
SINGLE = 500  # logits sent one by one; the others are grouped into intervals
INTERVALS = 200


class RecordAttention(TorchFunctionMode):
    """Context manager that records the attention weights of the last query of each layer.

    It observes the calls of scaled_dot_product_attention, or of softmax where attention is written out by
    hand. It works for any model that calls one of the two, and does not change the model. Fused kernels
    never store the weights, so they are recomputed from q and k.

    Attributes: rows, a tensor (B, H, S) for each layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.rows.append(last_weights(args[0], args[1], mask, kwargs.get("scale")))
        elif func is F.softmax and result.dim() == 4:  # (B, H, T, S)
            self.rows.append(result[:, :, -1])
        return result


def last_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention weights (B, H, S) of the last query of q (B, H, T, D), which may attend to all keys k
    (B, H or fewer, S, D). mask, broadcastable to (B, H, T, S): False where it may not or, if it is not
    boolean, added to the scores. scale: of the scores, by default D ** -0.5."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)  # grouped-query attention
    scores = q[:, :, -1:].float() @ k.float().transpose(2, 3)  # (B, H, 1, S)
    scores = scores * (q.size(3) ** -0.5 if scale is None else scale)
    if mask is not None:
        mask = mask[..., -1:, :]
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    return scores.softmax(-1)[:, :, 0]


@torch.no_grad()
def inspect_prediction(
    model: Any, tokenizer: Tokenizer, ids: list[int], layer: int | None, head: int | None
) -> dict:
    """Describe the prediction of the token after `ids`, which must fit into the model's context:

    - next: [(id, token_label, logit), ...] of the most probable tokens;
    - rest: [(logit, count), ...] of all others, in the same order; see group_logits;
    - attention: the attention weights from the last position to all of `ids`, in one head. If `layer` or
      `head` is None, their mean over all layers or heads. Empty if the model has no such head;
    - layers, heads: how many there are; 0 if the model's attention was not found.
    """
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    with RecordAttention() as record:
        logits = model(idx)[0][0, -1].float()
    top, order = logits.sort(descending=True)
    named = [
        (i, token_label(i, tokenizer), round(x, 4))
        for i, x in zip(order[:NAMED].tolist(), top[:NAMED].tolist())
    ]
    weights = torch.empty(0, 0, 0)
    if record.rows and len({row.shape for row in record.rows}) == 1:
        weights = torch.stack([row[0] for row in record.rows]).float()  # (L, H, S)
    L, H, _ = weights.shape
    chosen: list[float] = []
    if L and (layer is None or layer < L) and (head is None or head < H):
        picked = weights if layer is None else weights[layer : layer + 1]
        picked = picked if head is None else picked[:, head : head + 1]
        chosen = [round(w, 4) for w in picked.mean((0, 1)).tolist()]
    return dict(next=named, rest=group_logits(top[NAMED:]), attention=chosen, layers=L, heads=H)


def group_logits(logits: Tensor) -> list[tuple[float, int]]:
    """Shorten logits, sorted in descending order, to (logit, count) pairs: the first SINGLE one by one, the
    others grouped into INTERVALS intervals of equal width.

    The logit of an interval is log(mean(exp(logits))), so that a softmax at temperature 1 is exact.
    """
    single, others = logits[:SINGLE], logits[SINGLE:]
    groups = [(round(x, 4), 1) for x in single.tolist()]
    if others.numel():
        width = ((others[0] - others[-1]) / INTERVALS).clamp(min=1e-6)
        interval = ((others[0] - others) / width).long().clamp(max=INTERVALS - 1)
        largest = others[0] - width * torch.arange(INTERVALS, device=logits.device)
        mass = (
            others - largest[interval]
        ).exp()  # relative to its interval, so that none underflows
        zeros = torch.zeros(INTERVALS, device=logits.device)
        count = zeros.index_add(0, interval, torch.ones_like(others))
        means = (zeros.index_add(0, interval, mass) / count).log() + largest
        groups += [(round(x, 4), int(n)) for x, n in zip(means.tolist(), count.tolist()) if n]
    return groups
