"""BERT weights and config: conversion between transformers' BertForMaskedLM and bert.py's Bert.

Used by load.py and export.py.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lab.hf.gpt2 import load_exported

# (transformers' name, ours). A block's names begin with bert.encoder.layer.N and transformer.h.N
NAMES = [
    ("bert.embeddings.word_embeddings", "transformer.wte"),
    ("bert.embeddings.position_embeddings", "transformer.wpe"),
    ("bert.embeddings.token_type_embeddings", "transformer.wse"),
    ("bert.embeddings.LayerNorm", "transformer.ln_e"),
    ("bert.encoder.layer", "transformer.h"),
    ("attention.self.query_key_value", "attn.c_attn"),  # three matrices in transformers
    ("attention.output.dense", "attn.c_proj"),
    ("attention.output.LayerNorm", "ln_1"),
    ("intermediate.dense", "mlp.c_fc"),
    ("output.dense", "mlp.c_proj"),
    ("output.LayerNorm", "ln_2"),
    ("cls.predictions.transform.dense", "head.dense"),
    ("cls.predictions.transform.LayerNorm", "head.ln"),
    ("cls.predictions.decoder", "lm_head"),
]
LEGACY_KEYS = [  # (name in older files, current name)
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ("LayerNorm.gamma", "LayerNorm.weight"),  # TensorFlow's names
    ("LayerNorm.beta", "LayerNorm.bias"),
]
# heads that bert.py does not have, and a buffer in older files
IGNORED_KEYS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
REQUIRED_CONFIG = {  # values in config.json that our model supports; the first is the default
    "hidden_act": ["gelu"],
    "layer_norm_eps": [1e-12],
    "position_embedding_type": ["absolute", None],
    "tie_word_embeddings": [True],
    "is_decoder": [False],
    "add_cross_attention": [False],
}
SIZES = {  # our name of a size: (its name in config.json, transformers' default)
    "n_layer": ("num_hidden_layers", 12),
    "n_embd": ("hidden_size", 768),
    "block_size": ("max_position_embeddings", 512),
    "vocab_size": ("vocab_size", 30522),
    "segments": ("type_vocab_size", 2),
}
N_HEAD, MLP_WIDTH = ("num_attention_heads", 12), "intermediate_size"
SEGMENT_EMBEDDING = "transformer.wse.weight"  # in our state dict; GPT-2 has none


def rename_key(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace `old` by `new` in a dotted name, for each pair; only whole components match."""
    for old, new in pairs:
        name = re.sub(rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{new}", name)
    return name


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of BertForMaskedLM or BertForPreTraining to ours."""
    state = {
        rename_key(k, LEGACY_KEYS): v for k, v in state.items() if not k.startswith(IGNORED_KEYS)
    }
    for name in [name for name in state if ".query." in name]:  # c_attn has the rows of all three
        parts = [name.replace("query", part) for part in ("query", "key", "value")]
        rows = [state.pop(part) for part in parts if part in state]
        state[name.replace("query", "query_key_value")] = torch.cat(rows)
    return {rename_key(name, NAMES): value for name, value in state.items()}


def to_transformers(model: Any) -> Any:
    """A BertForMaskedLM with the weights of `model`, a bert.py Bert, without padding rows."""
    from transformers import BertConfig, BertForMaskedLM  # slow to import

    c = model.config
    config = BertConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, intermediate_size=4 * c.n_embd, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=c.block_size,
        type_vocab_size=c.segments,
    )  # fmt: skip
    back, state = [(ours, theirs) for theirs, ours in NAMES], {}
    for name, p in model.named_parameters():
        p = p[: c.vocab_size] if name in model.vocab_rows else p
        name = rename_key(name, back)
        if "query_key_value" in name:
            for part, rows in zip(("query", "key", "value"), p.chunk(3)):
                state[name.replace("query_key_value", part)] = rows
        else:
            state[name] = p
    state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    exported = BertForMaskedLM(config)
    load_exported(exported, state, "BERT")
    return exported
