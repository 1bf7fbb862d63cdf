"""Attention masks for rows that contain several documents. Used by train_gpt2.py and speedrun.py.

Each document in a row begins with an end-of-text token. With plain causal attention a token can attend
to earlier documents; this mask prevents it.
"""

from torch import Tensor


def document_mask(idx: Tensor, eot: int, past: int = 0) -> Tensor:
    """Mask (B, 1, S - past, S), True where a query may attend: same document, and not a later token.

    idx (B, S): all tokens. The first `past` of them are in a KV cache; the others are the queries.
    """
    document = (idx == eot).cumsum(1)  # (B, S): index of each token's document
    same = document[:, past:, None] == document[:, None, :]  # (B, S - past, S)
    return same.tril(past)[:, None]  # query i is at position past + i


def gather_previous_token(x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
    """For each query, gather x of the previous token: (B, T, C) from all tokens' x (B, S, C).

    The previous token is the one at the query's position - 1 that the mask allows. It need not be next to
    the query, because HellaSwag's four endings follow one shared context in the same row. If there is
    none, the result is 0. mask: broadcastable to (B, 1, T, S). position (T,) or (B, T): the queries'.
    """
    (B, S, C), T = x.shape, position.size(-1)
    key_position = position if S == T else position.new_ones(S).cumsum(0) - 1
    visible = mask.expand(B, 1, T, S)[:, 0]
    previous = visible & (key_position[..., None, :] == position[..., :, None] - 1)  # (B, T, S)
    index = previous.byte().argmax(-1, keepdim=True).expand(B, T, C)
    return x.gather(1, index) * previous.any(-1, keepdim=True)
