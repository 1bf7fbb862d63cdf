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


def hide_other_documents(model):
    """Have `model` use document_mask wherever it is called without a mask and without a cache.

    model: has `hidden(idx, position=None, mask=None, cache=None)`, which its forward calls, and a
    config whose vocab_size - 1 is end-of-text. Who generates with a cache passes the mask herself,
    as the tokens in the cache are not at hand here. Its class is replaced by a subclass, which
    copies, compiles and loads like the one before; a wrapped method or a hook would do less: a
    hook does not hear of hidden(), and a deep copy would go on calling the original's method.
    """

    class Masked(type(model)):
        def hidden(self, idx, position=None, mask=None, cache=None):
            if mask is None and cache is None:
                mask = document_mask(idx, self.config.vocab_size - 1)
            return super().hidden(idx, position=position, mask=mask, cache=cache)

    model.__class__ = Masked
    return model
