"""BERT's weights, between the names of transformers' BertForMaskedLM and those of bert.py."""

import re

import torch

# (theirs, ours); a block's begin with bert.encoder.layer.N. and transformer.h.N.
NAMES = [
    ("bert.embeddings.word_embeddings", "transformer.wte"),
    ("bert.embeddings.position_embeddings", "transformer.wpe"),
    ("bert.embeddings.token_type_embeddings", "transformer.wse"),
    ("bert.embeddings.LayerNorm", "transformer.ln_e"),
    ("bert.encoder.layer", "transformer.h"),
    ("attention.self.query_key_value", "attn.c_attn"),  # theirs has three, see below
    ("attention.output.dense", "attn.c_proj"),
    ("attention.output.LayerNorm", "ln_1"),
    ("intermediate.dense", "mlp.c_fc"),
    ("output.dense", "mlp.c_proj"),
    ("output.LayerNorm", "ln_2"),
    ("cls.predictions.transform.dense", "head.dense"),
    ("cls.predictions.transform.LayerNorm", "head.ln"),
    ("cls.predictions.decoder", "lm_head"),
]
# of a bias with a name of its own, and of files from TensorFlow
OLD = [
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
]
# heads that bert.py has not, and a buffer of older files
LEFT_OUT = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
WANTED = {  # what a config.json must say, first what it is where nothing is said
    "model_type": ["bert"],
    "hidden_act": ["gelu"],
    "layer_norm_eps": [1e-12],
    "position_embedding_type": ["absolute", None],
    "tie_word_embeddings": [True],
    "is_decoder": [False],
    "add_cross_attention": [False],
}


def renamed(name, pairs):
    for old, new in pairs:
        name = re.sub(rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\g<1>{new}", name)
    return name


def from_transformers(state):
    """Their tensors with our names."""
    state = {renamed(k, OLD): v for k, v in state.items() if not k.startswith(LEFT_OUT)}
    for name in [name for name in state if ".query." in name]:  # c_attn has the rows of all three
        three = [name.replace("query", part) for part in ("query", "key", "value")]
        rows = [state.pop(part) for part in three if part in state]
        state[name.replace("query", "query_key_value")] = torch.cat(rows)
    return {renamed(name, NAMES): value for name, value in state.items()}


def in_transformers(model):
    """transformers' BertForMaskedLM with this model's weights, pad rows cut."""
    from transformers import BertConfig, BertForMaskedLM

    c, state = model.config, {}
    config = BertConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, intermediate_size=4 * c.n_embd, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=c.block_size,
        type_vocab_size=c.segments, exported_by="python -m lab export",
    )  # fmt: skip
    back = [(ours, theirs) for theirs, ours in NAMES]
    for name, p in model.named_parameters():
        p = p[: c.vocab_size] if name in model.vocab_rows else p
        name = renamed(name, back)
        if "query_key_value" in name:
            for part, rows in zip(("query", "key", "value"), p.chunk(3)):
                state[name.replace("query_key_value", part)] = rows
        else:
            state[name] = p
    state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    theirs = BertForMaskedLM(config)
    theirs.load_state_dict(state)
    return theirs
