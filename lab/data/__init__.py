"""Data: text becomes shards of token ids, and shards become micro-batches.

    from lab.data import TokenLoader, TokenShards, build_builtin, get_tokenizer

The names are fetched when they are asked for: a process that tokenises has no use for torch.
"""

import importlib

MODULE_OF = {
    "TokenLoader": "loader",
    "TokenShards": "shards",
    "build_builtin": "builtin",
    "get_tokenizer": "tokenizers",
    "hide_other_documents": "documents",
    "name_of_size": "tokenizers",
}


def __getattr__(name):
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{MODULE_OF[name]}"), name)
