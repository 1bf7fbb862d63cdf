"""Read GPT-2 and BERT weights saved by other programs, as (shape, state dict with our names).

Sources are Hugging Face folders, names on the hub, and files of nanoGPT, build-nanogpt and this project.
lab.registry builds the models; nothing here imports a model class or executes code from a file.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.cli import UserError
from lab.data.manifest import sha256_of
from lab.data.tokenizers import TOKENIZER_FILE
from lab.files import check_keys, first_line, read_errors, read_json
from lab.hf import bert, gpt2
from lab.hf.bert import SEGMENT_EMBEDDING
from lab.hf.gpt2 import HEAD, WPE, WTE
from lab.trainer.checkpoint import read_checkpoint

CHECKSUM_FILE = "model.sha256"  # of an export, because safetensors files have no checksum
OLD_VOCABULARY = "vocab.json"
REPAIR_HINT = "download or export it again"
# the files that transformers reads, in this order; .index.json lists the shards of a large model
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


# -------------------------------------------------------------------------- Hugging Face folders


def read_hugging_face(source: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(shape, state dict) of a Hugging Face folder or a model on the hub; see infer_shape. For a GPT-2 with
    its own tokenizer.json, the shape also has "tokenizer".

    Reads the files that transformers would read. Raises UserError for a model that is neither GPT-2
    nor BERT, for damaged files, and for a config.json that does not describe the weights.
    """
    folder = Path(source) if Path(source).is_dir() else download(source)
    if not (folder / "config.json").exists():
        raise UserError(
            f"{source} is neither a run with a checkpoint nor a folder of a Hugging Face model; "
            "`ls log` lists the runs"
        )
    config = read_json(folder / "config.json", REPAIR_HINT)
    family = find_family(source, config)
    state = read_tensors(folder, source)
    with read_errors(source, "weights of", REPAIR_HINT):
        state = family.from_transformers(strip_names(state))
        shape: dict[str, Any] = infer_shape(state, {"n_head": config.get(*family.N_HEAD)}, source)
    for field, (name, default) in family.SIZES.items():
        found = state[WTE].size(0) if field == "vocab_size" else shape.get(field)
        if config.get(name, default) != found:
            raise UserError(
                f"{name}={config.get(name, default)} in {source}/config.json must be {found}, as in the "
                f"weights; {REPAIR_HINT}"
            )
    # an export of a byte model (257 ids) also has a tokenizer.json, for transformers
    other = family is gpt2 and shape["vocab_size"] != 257 and has_other_vocabulary(folder)
    if config.get("tokenizer") == TOKENIZER_FILE or other:
        shape["tokenizer"] = TOKENIZER_FILE
    return shape, state


def has_other_vocabulary(folder: Path) -> bool:
    """Whether a folder has a tokenizer.json, or an older model's vocab.json, that is not OpenAI's."""
    if (folder / TOKENIZER_FILE).exists():
        vocab = read_json(folder / TOKENIZER_FILE, REPAIR_HINT, model=dict)["model"].get("vocab")
    elif (folder / OLD_VOCABULARY).exists():
        vocab = read_json(folder / OLD_VOCABULARY, REPAIR_HINT)
    else:
        return False
    return not isinstance(vocab, dict) or vocab.get("Ġgazed") != 50255  # OpenAI's last merge


def find_family(source: str, config: dict[str, Any]) -> Any:
    """The module (gpt2 or bert) for the model described by a config.json. Raises UserError for a model that
    is not equivalent to ours."""
    kind = config.get("model_type")
    family = bert if kind == "bert" else gpt2
    with read_errors(f"{source}/config.json", "file", REPAIR_HINT):
        mlp_widths = [None, 4 * config.get(*family.SIZES["n_embd"])]
    wanted = {
        "model_type": ["gpt2", "bert"], family.MLP_WIDTH: mlp_widths,
        "transformers_weights": [None],  # if set, the weights are in another file
        **family.REQUIRED_CONFIG,
    }  # fmt: skip
    for key, allowed in wanted.items():
        value = config.get(key, allowed[0] if key != "model_type" else None)
        if value not in allowed:
            raise UserError(
                f"{key}={value} in {source}/config.json must be {allowed[0]}, because our GPT-2 and "
                "BERT support nothing else; choose another model"
            )
    return family


def read_tensors(folder: Path, source: str) -> dict[str, Tensor]:
    """{name: tensor} of the weights files in a folder, in transformers' order of preference. Other
    files, such as the variant model.fp16.safetensors, are ignored."""
    name = next((name for name in SAFETENSORS + PICKLES if (folder / name).is_file()), None)
    if name is None:
        raise UserError(
            f"{source} has no model.safetensors or pytorch_model.bin, nor the index of their shards; "
            f"{REPAIR_HINT}"
        )
    names = indexed_files(folder / name) if name.endswith(".index.json") else [name]
    checksums, state = read_checksums(folder), {}
    for file in map(folder.joinpath, names):
        if file.name in checksums and sha256_of(file) != checksums[file.name]:
            raise UserError(
                f"weights file {file} differs from its checksum in {CHECKSUM_FILE}; export it again, or "
                f"delete {CHECKSUM_FILE} if the file was changed on purpose"
            )
        if file.suffix == ".bin":
            found = read_checkpoint(file)
        else:
            from safetensors.torch import load_file  # optional: checkpoints are read without it

            with read_errors(file, "weights file", REPAIR_HINT):
                found = load_file(file)
        with read_errors(file, "weights file", REPAIR_HINT):
            state |= found
    return state


def indexed_files(index: Path) -> list[str]:
    """The names of the weights files that an .index.json lists."""
    weight_map = read_json(index, REPAIR_HINT, weight_map=dict)["weight_map"]
    with read_errors(index, "file", REPAIR_HINT):
        check_keys(weight_map, **dict.fromkeys(weight_map, str))
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{outside[0]} is not in its folder")
    return names


def read_checksums(folder: Path) -> dict[str, str]:
    """{file name: sha256} that an export recorded; empty without a checksum file."""
    if not (folder / CHECKSUM_FILE).exists():
        return {}
    with read_errors(folder / CHECKSUM_FILE, "file", "export that folder again"):
        lines = (folder / CHECKSUM_FILE).read_text().splitlines()
        return {line[66:]: line[:64] for line in lines}  # the format of `sha256sum -c`


def download(name: str) -> Path:
    """The local folder of a model on the hub, downloaded once. Raises UserError if there is none."""
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HFValidationError

    if (folder := Path(name).parent).name and folder.is_dir():  # a path, not a name on the hub
        raise UserError(f"there is no {name}; `ls {folder}` lists that folder")
    patterns = [
        "config.json",
        TOKENIZER_FILE,
        OLD_VOCABULARY,
        CHECKSUM_FILE,
        *SAFETENSORS,
        "model-*-of-*.safetensors",
    ]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any((folder / file).exists() for file in SAFETENSORS):  # an older model
            pickles = [*PICKLES, "pytorch_model-*-of-*.bin"]
            folder = Path(snapshot_download(name, allow_patterns=pickles))
        return folder
    except (HFValidationError, OSError) as error:
        raise UserError(
            f"{name!r} is not a file or folder, and cannot be downloaded from the hub "
            f"({first_line(error)}); check the name and the network, or choose a run (`ls log` lists "
            "them)"
        ) from error


# -------------------------------------------------------------------- checkpoints and state dicts


def parse_checkpoint(checkpoint: Any, source: str) -> tuple[dict[str, int], dict[str, Tensor]]:
    """(shape, state dict) of a .pt file's contents; see infer_shape. It may be a checkpoint of this
    project, of nanoGPT or of build-nanogpt, or a bare state dict."""
    names = ("model_config", "model_args", "config")  # ours, nanoGPT's, build-nanogpt's (an object)
    with read_errors(source, "checkpoint", "choose another"):
        config = next((checkpoint[name] for name in names if checkpoint.get(name) is not None), {})
        config = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        state = strip_names(checkpoint.get("model", checkpoint))
        return infer_shape(state, config, source), state


def strip_names(state: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict without the prefixes of torch.compile and DDP, and without the attention masks in
    older files."""
    return {
        re.sub(r"^((_orig_mod|module)\.)+", "", name): value
        for name, value in state.items()
        if torch.is_tensor(value) and not name.endswith((".attn.bias", ".attn.masked_bias"))
    }


def infer_shape(state: dict[str, Tensor], config: dict[str, Any], source: str) -> dict[str, int]:
    """{"n_layer", "n_head", "n_embd", "block_size", "vocab_size", and for BERT "segments"} of a state
    dict with our names.

    config: may contain n_head, which cannot be inferred from the tensors (default: 64 channels per head,
    as in all GPT-2 sizes), and vocab_size, because the tensors may have padding rows.
    """
    wte, wpe = state.get(WTE), state.get(WPE)
    if wte is None or wpe is None or wte.dim() != 2 or wpe.dim() != 2:
        raise UserError(
            f"{source} must contain the matrices {WTE} and {WPE}; it is not a GPT-2, so use the program "
            "that made it"
        )
    rows, n_embd = wte.shape
    n_head = config.get("n_head", max(1, n_embd // 64))
    vocab_size = config.get("vocab_size", rows)
    if not all(type(n) is int and n > 0 for n in (n_embd, n_head, rows, vocab_size)):
        raise UserError(
            f"n_head={n_head} and vocab_size={vocab_size} of {source} must be whole numbers above 0; "
            "repair its config"
        )
    if n_embd % n_head:
        raise UserError(
            f"n_head={n_head} of {source} does not divide n_embd={n_embd}; repair its config"
        )
    shape = {
        "n_layer": len({k.split(".")[2] for k in state if k.startswith("transformer.h.")}),
        "n_head": n_head,
        "n_embd": n_embd,
        "block_size": wpe.size(0),
        # 50304 is GPT-2's vocabulary padded to a multiple of 128, as nanoGPT saves it
        "vocab_size": 50257 if rows == vocab_size == 50304 else min(rows, vocab_size),
    }
    if SEGMENT_EMBEDDING in state:
        shape["segments"] = state[SEGMENT_EMBEDDING].size(0)
    return shape


@torch.no_grad()
def copy_into(model: Any, state: dict[str, Tensor], source: str) -> None:
    """Copy a state dict with our names into a model, which may be on torch's meta device.

    Padding rows of the model become 0, as do missing biases (nanoGPT's bias=False). Buffers that are missing
    stay as they are. Raises UserError, which names `source`, for tensors that do not fit or are not finite.
    """
    rows = model.config.vocab_size
    for name, value in state.items():
        if value.layout != torch.strided or value.is_meta:
            raise UserError(f"{name} of {source} must be a dense tensor with data; save it as one")
    tied = model.lm_head.weight is model.transformer.wte.weight  # an edited model may be untied
    head = torch.atleast_1d(state[HEAD]) if tied and HEAD in state else None
    if head is not None and not torch.equal(head[:rows], state[WTE][:rows]):
        raise UserError(
            f"{HEAD} of {source} must equal {WTE}, because GPT-2's head is tied to the token "
            "embedding; choose another model"
        )
    if model.lm_head.weight.is_meta:
        # like Muon's num_matrices
        attributes = {name: vars(p) for name, p in model.named_parameters()}
        model.to_empty(device="cpu")
        if tied:
            model.lm_head.weight = model.transformer.wte.weight  # to_empty() untied them
        for name, p in model.named_parameters():
            vars(p).update(attributes[name])
    params = dict(model.named_parameters())  # the tied matrix once
    buffers = dict(model.named_buffers())  # of an edited model
    for name in buffers.keys() & state.keys():
        buffers[name].copy_(state[name])
    for name in sorted(state.keys() - params.keys() - buffers.keys() - {HEAD}):
        raise UserError(
            f"{source} has {name}, but this model has no such parameter; choose another model"
        )
    for name, p in params.items():
        # files of tied weights may lack the head
        value = state.get(WTE if name == HEAD and HEAD not in state else name)
        if value is None and name.endswith(".bias"):
            p.zero_()
            continue
        if value is None:
            raise UserError(f"{source} has no {name}, so it is not a complete model; {REPAIR_HINT}")
        if name in model.vocab_rows:
            p[rows:] = 0
            p, value = p[:rows], value[:rows]
        if value.shape != p.shape:
            raise UserError(
                f"{name} of {source} has shape {tuple(value.shape)}, but the model needs "
                f"{tuple(p.shape)}; choose another model"
            )
        p.copy_(value)
        check_finite(p, name, source)  # after the conversion, because a float64 may be too large


def check_finite(value: Tensor, name: str, source: Any) -> None:
    """Raise UserError if a tensor contains nan or infinity."""
    if not value.isfinite().all():
        raise UserError(f"{name} of {source} contains nan or infinity; choose another checkpoint")
