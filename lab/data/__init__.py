"""Tokens: shards on disk, the order in which training reads them, tokenizers, the built-in text."""

from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer, name_of_size


def build_builtin(folder):
    import fineweb
    fineweb.build_builtin(folder)


from lab.data.documents import hide_other_documents
