"""Small GPTs with noise in their weights, and checkpoints of them, for the tests."""

import torch
from conftest import VOCAB, add_noise

from train_gpt2 import GPT, GPTConfig


def tiny_gpt(vocab_size=101, vocab_multiple=8, **changes):
    torch.manual_seed(7)
    shape = dict(n_layer=2, n_head=4, n_embd=32, block_size=16) | changes
    config = GPTConfig(**shape, vocab_size=vocab_size, vocab_multiple=vocab_multiple)
    return add_noise(GPT(config))


def saved(model, path, **more):
    """Save a checkpoint of this model; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "model_config": vars(model.config)} | more, path)
    return str(path)


def noisy_gpt(**changes):
    """A model of bytes."""
    return tiny_gpt(**dict(vocab_size=VOCAB, vocab_multiple=128, n_head=2) | changes)


def always(token, **changes):
    """A model that gives one token almost all the probability, for any context."""
    model = noisy_gpt(**changes)
    with torch.no_grad():
        wte = model.transformer.wte.weight
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * wte[token] / wte[token].norm())
    return model
