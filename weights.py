"""Weights in and out: Hugging Face folders and hub names, checkpoints of this trainer, nanoGPT and build-nanogpt files.

    python weights.py export log/<run> --out my-gpt2      # a folder that transformers and lm-evaluation-harness load
"""

from pathlib import Path

import torch

from train_gpt2 import GPT, GPTConfig, newest_checkpoint, newest_run, read_checkpoint

# GPT-2 was published with a layer that stores its matrix as (in, out); nn.Linear stores (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def from_pretrained(source):
    """GPT with the weights of a Hugging Face GPT-2: `gpt2` ... `gpt2-xl`, another hub name, or a local folder.

    Raises OSError when they cannot be read, ValueError when they are not a GPT-2 that this model can hold.
    """
    from transformers import AutoConfig, GPT2LMHeadModel

    try:
        hf_config = AutoConfig.from_pretrained(source)
        if hf_config.model_type != "gpt2" or hf_config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"{source} is not a GPT-2 with GELU tanh (model_type={hf_config.model_type})")
        theirs = GPT2LMHeadModel.from_pretrained(source).state_dict()
    except OSError as error:
        raise OSError(
            f"cannot read the weights {source!r} ({str(error).splitlines()[0]}); name a hub model while there is "
            "a network, or a folder that holds config.json and model.safetensors"
        ) from error
    config = GPTConfig(
        n_layer=hf_config.n_layer, n_head=hf_config.n_head, n_embd=hf_config.n_embd,
        block_size=hf_config.n_positions, vocab_size=hf_config.vocab_size,
    )  # fmt: skip
    model = GPT(config)
    load_weights(model, {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in theirs.items()}, source)
    return model


def load_weights(model, state, source):
    """Copy a state dict with GPT-2's names into model; the pad rows become 0. Names may carry the prefixes of
    torch.compile and DDP; biases may be missing (nanoGPT's bias=False), which is the same as 0."""
    state = {k.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod."): v for k, v in state.items()}
    with torch.no_grad():
        for name, p in model.state_dict().items():
            value = state.get(name)
            if value is None and name == "lm_head.weight":
                value = state.get("transformer.wte.weight")
            if value is None and name.endswith(".bias"):
                value = torch.zeros_like(p)
            if value is None:
                raise ValueError(f"{source} has no {name}; it is not a GPT-2 state dict")
            rows = model.config.vocab_size if name in ("lm_head.weight", "transformer.wte.weight") else p.size(0)
            if value.shape[1:] != p.shape[1:] or not rows <= value.size(0) <= max(rows, p.size(0)):
                raise ValueError(f"{source}: {name} has shape {tuple(value.shape)}, the model wants {tuple(p.shape)}")
            p.zero_()
            p[:rows].copy_(value[:rows])


def load_model(source, log_dir="log"):
    """GPT from a checkpoint of ours, a nanoGPT or build-nanogpt .pt file, a run folder, a Hugging Face folder or hub
    name; "" is the newest run in log_dir. Nothing in the file is executed."""
    path = Path(source) if source else newest_run(log_dir)
    if path.is_dir() and not (path / "config.json").exists():
        path = newest_checkpoint(path)
    if path.suffix != ".pt":
        return from_pretrained(source)
    data = read_checkpoint(path)
    state = data.get("model", data)
    return model_from_state(state, data.get("model_config") or data.get("model_args") or data.get("config"), path)


def model_from_state(state, shape, source):
    """GPT whose shape is read off the tensors; the number of heads, which they do not tell, from `shape`, a dict or an
    inert object, or else 64 channels a head as in all GPT-2s."""
    sizes = {k.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod."): v.shape for k, v in state.items()
             if hasattr(v, "shape")}  # fmt: skip
    if "transformer.wte.weight" not in sizes or "transformer.wpe.weight" not in sizes:
        raise ValueError(f"{source} holds no transformer.wte.weight and transformer.wpe.weight; it is not a GPT-2")
    shape = shape if isinstance(shape, dict) else vars(shape) if shape is not None else {}
    rows, n_embd = sizes["transformer.wte.weight"]
    config = GPTConfig(
        n_layer=len({k.split(".")[2] for k in sizes if k.startswith("transformer.h.")}),
        n_head=shape.get("n_head", max(1, n_embd // 64)),
        n_embd=n_embd,
        block_size=sizes["transformer.wpe.weight"][0],
        # a file that says 50304 means GPT-2's vocabulary with the pad rows in it
        vocab_size=50257 if rows == 50304 else min(rows, shape.get("vocab_size", rows)),
        vocab_multiple=shape.get("vocab_multiple", 128),
    )
    model = GPT(config)
    load_weights(model, state, source)
    return model
