"""Data: text becomes shards of token ids, and shards become micro-batches.

Nothing here imports torch: a process that tokenises has no use for it.
"""

from lab.data.builtin import build_builtin
from lab.data.document_mask import hide_other_documents
from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer, name_of_size

__all__ = ["TokenLoader", "TokenShards", "build_builtin", "get_tokenizer"]
__all__ += ["hide_other_documents", "name_of_size"]
