"""Attention that stays within a document, added to a model from outside.

Rows of training data are packed with documents, each led by end-of-text. Plain causal attention
also looks at the documents before; with this mask it does not.
"""


def document_mask(idx, eot, past=0):
    """Which keys each query may look at: those of its own document that are not later.

    idx (B, S) are all tokens, of which the first `past` are in a cache; the queries are the rest.
    Returns a boolean mask (B, 1, S - past, S) for scaled_dot_product_attention.
    """
    document = (idx == eot).cumsum(1)  # (B, S): each end-of-text leads one, so this numbers them
    same = document[:, past:, None] == document[:, None, :]  # (B, S - past, S)
    return same.tril(past)[:, None]  # query i stands at past + i


def before_in_mask(x, position, mask):
    """The x of the token before each query, of all tokens' x (B, S, C): (B, T, C), 0 where there is none.

    It is the one that the mask, which broadcasts to (B, 1, T, S), shows and whose position is less
    by 1, wherever in the row it stands: HellaSwag's endings share a context. position (T,), or
    (B, T), is of the queries.
    """
    (B, S, C), T = x.shape, position.size(-1)
    at = position if S == T else position.new_ones(S).cumsum(0) - 1  # of the keys
    seen = mask.expand(B, 1, T, S)[:, 0]
    before = seen & (at[..., None, :] == position[..., :, None] - 1)  # (B, T, S)
    where = before.byte().argmax(-1, keepdim=True).expand(B, T, C)
    return x.gather(1, where) * before.any(-1, keepdim=True)


def hide_other_documents(model):
    """Have `model` use document_mask wherever it is called without a mask and without a cache.

    model: has the method `hidden`, which its forward calls, and a config whose vocab_size - 1 is
    end-of-text. Who generates with a cache passes the mask herself: the tokens in it are not known
    here. A subclass copies, compiles and loads like the class before: a hook does not hear of
    hidden(), and a deep copy would go on calling a wrapped method of the original.
    """

    class Masked(type(model)):
        __module__ = type(model).__module__  # for messages that name the program

        def hidden(self, idx, position=None, mask=None, cache=None):
            if mask is None and cache is None:
                mask = document_mask(idx, self.config.vocab_size - 1)
            return super().hidden(idx, position=position, mask=mask, cache=cache)

    model.__class__ = Masked
    return model
