"""Weights of GPT-2 and BERT from elsewhere, as (shape, state dict); knows no model class.

It reads Hugging Face folders and hub names, nanoGPT and build-nanogpt files and our own
checkpoints. No code in a file is run."""

import re
from pathlib import Path

import torch

from lab import bert_weights
from lab.cli import UserError
from lab.data.shards import sha256_of
from lab.files import first_line, read_json, reading
from lab.run.checkpoints import read_checkpoint

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's, as the hub calls them
# GPT-2 was published with a layer that stores its matrix as (in, out); nn.Linear stores (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
WANTED = {  # what a config.json must say, first what it is where nothing is said
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
    "layer_norm_epsilon": [1e-5],
    "scale_attn_weights": [True],
    "scale_attn_by_inverse_layer_idx": [False],
    "tie_word_embeddings": [True],
    "add_cross_attention": [False],
    "model_type": ["gpt2"],
}
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
SUMS = "model.sha256"  # in an export: safetensors have no checksum of their own
WSE = "transformer.wse.weight"  # of segments, which BERT has and GPT-2 has not


def unpack(checkpoint, source):
    """(shape, state) of what a .pt file holds: a checkpoint of this project, of nanoGPT or
    build-nanogpt, or a bare state dict. shape has n_layer, n_head, n_embd, block_size and
    vocab_size."""
    names = ("model_config", "model_args", "config")  # ours, nanoGPT's, build-nanogpt's (an object)
    with reading(source, "checkpoint", "name another"):
        config = next((checkpoint[name] for name in names if checkpoint.get(name) is not None), {})
        config = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        return with_shape(checkpoint.get("model", checkpoint), config, source)


def read_hugging_face(source):
    """unpack, of a Hugging Face folder or of a model on the hub."""
    folder = Path(source) if Path(source).is_dir() else download(source)
    if not (folder / "config.json").exists():
        raise UserError(
            f"{source} is neither a run with a checkpoint nor a Hugging Face model's folder; "
            "`ls log` shows the runs there are"
        )
    config = read_json(folder / "config.json", "export or download that folder again")
    is_bert = config.get("model_type") == "bert"
    check_config(source, config, is_bert)
    state = read_tensors(folder, source)
    with reading(source, "weights of", "download or export it again"):
        if is_bert:
            config["n_head"] = config.get("num_attention_heads", 12)
            return with_shape(bert_weights.from_transformers(state), config, source)
        # Saved from the bare transformer, as the published ones are, names lack their first part.
        prefixes = ("transformer.", "lm_head.")
        state = {k if k.startswith(prefixes) else f"transformer.{k}": v for k, v in state.items()}
        state = {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in state.items()}
        return with_shape(state, config, source)


def check_config(source, config, is_bert):
    """Raise UserError for a Hugging Face model that computes something else than ours does."""
    width, inner = ("hidden_size", "intermediate_size") if is_bert else ("n_embd", "n_inner")
    with reading(f"{source}/config.json", "file", "export or download that folder again"):
        wanted = {inner: [None, 4 * config.get(width, 768)]}
    for key, allowed in (wanted | (bert_weights.WANTED if is_bert else WANTED)).items():
        value = config.get(key, allowed[0] if key != "model_type" else None)
        if value not in allowed:
            raise UserError(
                f"{source} is neither a GPT-2 nor a BERT that our models can hold: {key}={value}, "
                f"wanted is {allowed[0]}"
            )


def read_tensors(folder, source):
    """{name: tensor}, which stay in their files until they are copied."""
    from safetensors.torch import load_file

    state, sums = {}, {}
    if (folder / SUMS).exists():
        with reading(folder / SUMS, "file", "export that folder again"):
            lines = (folder / SUMS).read_text().splitlines()
            sums = {line[66:]: line[:64] for line in lines}  # as `sha256sum -c` reads them, too
    for file in folder.glob("model*.safetensors"):  # large models come in several
        if file.name in sums and sha256_of(file) != sums[file.name]:
            raise UserError(
                f"weights file {file} is another than {SUMS} beside it says; export it again, or "
                f"delete {SUMS} if it was meant to change"
            )
        with reading(file, "weights file", "download or export it again"):
            state |= load_file(file)
    if not state and (folder / "pytorch_model.bin").exists():  # the older format
        state = read_checkpoint(folder / "pytorch_model.bin")
    if not state:
        raise UserError(f"{source} has no model.safetensors; download or export it again")
    return state


def download(name):
    """The folder with a model of the hub, which is asked once."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    if (folder := Path(name).parent).name and folder.is_dir():  # no hub's name
        raise UserError(f"there is no {name}; `ls {folder}` shows what there is")
    patterns = ["config.json", "model*.safetensors", SUMS]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, OSError) as error:
        raise UserError(
            f"{name!r} is no file or folder here, and cannot be fetched from the hub "
            f"({first_line(error)}); is the name right, and is there a network? `ls log` shows the runs"
        ) from error


def with_shape(state, config, source):
    """(shape, state) with bare names. The shape is read off the tensors but for the number of
    heads, which they do not tell: config (a dict) does, or else it is 64 channels a head, as in all
    GPT-2s."""
    tensors = {  # without the prefixes of torch.compile and DDP, and without older files' masks
        re.sub(r"^((_orig_mod|module)\.)+", "", name): value
        for name, value in state.items()
        if torch.is_tensor(value) and not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
    wte, wpe = tensors.get(WTE), tensors.get(WPE)
    if wte is None or wpe is None or wte.dim() != 2 or wpe.dim() != 2:
        raise UserError(
            f"{source} holds no {WTE} and {WPE}, matrices both; it is not a GPT-2. The program that "
            "made it goes on with it"
        )
    rows, n_embd = wte.shape
    n_head = config.get("n_head", max(1, n_embd // 64))
    vocab_size = config.get("vocab_size", rows)
    if not all(type(n) is int and n > 0 for n in (n_embd, n_head, rows, vocab_size)):
        raise UserError(
            f"{source}: n_head={n_head} and vocab_size={vocab_size} must be whole numbers above 0"
        )
    if n_embd % n_head:
        raise UserError(f"{source}: n_head={n_head} does not divide n_embd={n_embd}")
    shape = {
        "n_layer": len({k.split(".")[2] for k in tensors if k.startswith("transformer.h.")}),
        "n_head": n_head,
        "n_embd": n_embd,
        "block_size": wpe.size(0),
        # who says 50304 means GPT-2's vocabulary with the pad rows in it
        "vocab_size": 50257 if rows == vocab_size == 50304 else min(rows, vocab_size),
    }
    if WSE in tensors:
        shape["segments"] = tensors[WSE].size(0)
    return shape, tensors


@torch.no_grad()
def copy_into(model, state, source):
    """Copy a state dict with our names into model, which may lie on torch's meta device.

    The model's pad rows become 0. Biases may be missing (nanoGPT's bias=False): they are 0 then.
    Raises UserError for what does not fit or is not finite, naming `source`."""
    rows = model.config.vocab_size
    for name, value in state.items():
        if value.layout != torch.strided or value.is_meta:
            raise UserError(f"{source}: {name} is sparse or without numbers; save it in full")
    if HEAD in state and not torch.equal(state[HEAD][:rows], state[WTE][:rows]):
        raise UserError(f"{source} has a head of its own; GPT-2's is tied to the token embedding")
    if model.lm_head.weight.is_meta:
        model.to_empty(device="cpu")
        model.lm_head.weight = model.transformer.wte.weight  # to_empty() gave each its own
    ours = dict(model.named_parameters())  # the tied matrix once
    for name in sorted(state.keys() - ours.keys() - {HEAD}):
        raise UserError(f"{source} has {name}, which this model has not; it is another one")
    for name, p in ours.items():
        value = state.get(name)
        if value is None and name.endswith(".bias"):
            p.zero_()
            continue
        if value is None:
            raise UserError(f"{source} has no {name}; it is not a whole GPT-2")
        if name in model.vocab_rows:
            p[rows:] = 0
            p, value = p[:rows], value[:rows]
        if value.shape != p.shape:
            shapes = f"{tuple(value.shape)}, the model wants {tuple(p.shape)}"
            raise UserError(f"{source}: {name} has shape {shapes}")
        check_finite(value, name, source)
        p.copy_(value)


def check_finite(value, name, source):
    if not value.isfinite().all():
        raise UserError(f"{source}: {name} holds numbers that are not finite; take another")
