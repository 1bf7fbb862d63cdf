"""GPT-2 weights and config: conversion between transformers' GPT2LMHeadModel and train_gpt2.py's GPT.

Used by load.py and export.py. The parameter names are the same; the layout of four matrices differs.
"""

from typing import Any

import torch
from torch import Tensor

from lab.cli import UserError

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names of OpenAI's weights on the hub
# OpenAI's layer stores its matrix as (in, out), nn.Linear as (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
REQUIRED_CONFIG = {  # values in config.json that our model supports; the first is the default
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "tie_word_embeddings": [True],
    "add_cross_attention": [False],
}
SIZES = {  # our name of a size: (its name in config.json, transformers' default)
    "n_layer": ("n_layer", 12),
    "n_embd": ("n_embd", 768),
    "block_size": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
}
N_HEAD, MLP_WIDTH = ("n_head", 12), "n_inner"  # names in config.json; the weights don't have n_head
# names in our state dict
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of GPT2LMHeadModel, or of GPT2Model (the published ones), to ours."""
    prefixes = ("transformer.", "lm_head.")
    state = {k if k.startswith(prefixes) else f"transformer.{k}": v for k, v in state.items()}
    return {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in state.items()}


def load_exported(exported: Any, state: dict[str, Tensor], name: str, **how: Any) -> None:
    """Load an edited model's state dict into the one of transformers. Raises UserError if it does not fit."""
    try:
        exported.load_state_dict(state, **how)
    except RuntimeError as error:
        raise UserError(
            f"the model has other weights than {name}, so transformers has no model for it; use it with "
            "sample.py"
        ) from error


def to_transformers(model: Any) -> Any:
    """A GPT2LMHeadModel with the weights of `model`, a train_gpt2.py GPT, without padding rows."""
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to import

    c = model.config
    config = GPT2Config(
        n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, vocab_size=c.vocab_size,
        n_positions=c.block_size, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=c.end_of_text, eos_token_id=c.end_of_text,
    )  # fmt: skip
    state = {}
    for name, p in model.named_parameters():
        p = p.detach()[: c.vocab_size] if name in model.vocab_rows else p.detach()
        state[name] = (p.t() if name.endswith(TRANSPOSED) else p).contiguous()
    with torch.device("meta"):  # avoids drawing random weights
        exported = GPT2LMHeadModel(config)
    load_exported(exported, state | {HEAD: state[WTE]}, "GPT-2", assign=True)
    exported.tie_weights()
    exported.generation_config.pad_token_id = c.end_of_text
    return exported
