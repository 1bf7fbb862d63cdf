"""Weights in and out: Hugging Face folders and hub names, checkpoints of this trainer, nanoGPT and build-nanogpt files.

    python weights.py export log/RUN --out my-gpt2      # a folder that transformers and lm-evaluation-harness load
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch

from lab.run.checkpoints import has_checkpoint, newest_checkpoint, newest_run, read_checkpoint


# GPT-2 was published with a layer that stores its matrix as (in, out); nn.Linear stores (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
EXPORTED = {"config.json", "generation_config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer.json",
            "tokenizer_config.json"}  # fmt: skip
VOCAB_ROWS = ("transformer.wte.weight", "lm_head.weight")  # these two have a row for each token id, and pad rows


# ------------------------------------------------------------------------------------------------------------ in


def find_model(source, log_dir="log"):
    """What load_model takes for `source`: the .pt file, or the Hugging Face folder or hub name as it is. "" is the newest run
    in log_dir, and the name of a run there is that run. Raises OSError where a run has no checkpoint, ValueError for a file
    that is none."""
    path = Path(source) if source else newest_run(log_dir)
    if source not in PRESETS and not path.exists() and has_checkpoint(Path(log_dir) / path):  # gpt2 is OpenAI's
        path = Path(log_dir) / path
    if path.is_file() and path.suffix != ".pt":
        raise ValueError(f"{source} is no checkpoint: name a .pt file, the folder of a run, or a Hugging Face folder or model")
    if path.is_dir() and not is_hugging_face(path):
        if not has_checkpoint(path) and any(path.glob("*.safetensors")):
            raise ValueError(f"{source} has weights but no config.json, which says of what shape; copy the whole folder again")
        path = newest_checkpoint(path)
    return str(path) if path.suffix == ".pt" else str(source or path)


def load_model(source, log_dir="log"):
    """GPT from a checkpoint of ours, a nanoGPT or build-nanogpt .pt file, a run folder, a Hugging Face folder or hub
    name; "" is the newest run in log_dir. Nothing in the file is executed.

    Raises OSError where there is nothing to read, ValueError where it is not a GPT-2 that this model can hold.
    """
    path = find_model(source, log_dir)
    if not path.endswith(".pt"):
        return from_pretrained(path)
    data = read_checkpoint(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, wanted is a state dict or a checkpoint with one")
    shape = data.get("model_config") or data.get("model_args") or data.get("config")  # ours, nanoGPT, build-nanogpt
    return model_from_state(data.get("model", data), shape, path)


def is_hugging_face(folder):
    """A run folder holds a config.json too, but not one that names a model type."""
    file = folder / "config.json"
    return file.exists() and not has_checkpoint(folder) and "model_type" in read_json(file)


def read_json(file):
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); export or download that folder again") from error


def from_pretrained(source):
    """GPT with the weights of a Hugging Face GPT-2: `gpt2` ... `gpt2-xl`, another hub name, or a local folder.

    Tensors are mapped from the file and copied into place one after the other: gpt2-xl needs its 6.2 GB once.
    """
    from safetensors import SafetensorError, safe_open

    config = read_json(find_file(source, "config.json"))
    check_config(source, config)
    try:
        index = read_json(find_file(source, "model.safetensors.index.json"))  # large models come in several files
        names = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        names = ["model.safetensors"]
    state = {}
    try:
        for name in names:
            with safe_open(find_file(source, name), framework="pt") as file:
                state |= {key: file.get_tensor(key) for key in file.keys()}
    except FileNotFoundError:  # the older format
        state = read_checkpoint(find_file(source, "pytorch_model.bin"))
    except SafetensorError as error:
        raise ValueError(f"the weights of {source} are broken ({error}); download or export them again") from error
    # saved from the bare transformer, as the published ones are, the names lack their first part
    state = {k if k.startswith(("transformer.", "lm_head.")) else f"transformer.{k}": v for k, v in state.items()}
    state = {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in state.items()}
    return model_from_state(state, config, source)


def find_file(source, name):
    """Local path of a file of a folder or of a model on the hub (downloaded once)."""
    path = Path(source)
    if path.is_dir():
        if not (path / name).exists():
            raise FileNotFoundError(f"{source} holds no {name}; it is not a Hugging Face model folder")
        return path / name
    if path.is_absolute() or source.startswith(".") or (path.parts[1:] and Path(path.parts[0]).exists()):
        raise FileNotFoundError(f"there is no {source}; `ls log` shows the runs there are")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    from lab.data.sources import hub_has_a_name

    try:  # without a network huggingface_hub would try five times, for 23 seconds
        return Path(hf_hub_download(source, name, local_files_only=not hub_has_a_name()))
    except HFValidationError as error:
        raise FileNotFoundError(f"there is no {source}, and it cannot be the name of a model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"{source!r} is neither a file nor a folder here (`ls log` shows the runs), and as the name of a model on the hub "
            "it cannot be fetched: no network, and it was not downloaded before"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"the hub's model {source} has no {name}") from error
    except OSError as error:
        raise OSError(f"cannot fetch the hub's model {source!r} ({first_line(error)}); is the name right?") from error


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_config(source, config):
    """Raise ValueError for a Hugging Face model that computes something else than GPT-2 does."""
    wanted = {
        "model_type": ["gpt2"], "activation_function": ["gelu_new", "gelu_pytorch_tanh"], "layer_norm_epsilon": [1e-5],
        "n_inner": [None, 4 * config.get("n_embd", 768)], "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False], "tie_word_embeddings": [True], "add_cross_attention": [False],
    }  # fmt: skip
    for key, values in wanted.items():
        if config.get(key, None if key == "model_type" else values[0]) not in values:
            raise ValueError(f"{source} is not a GPT-2 that this model can hold: {key}={config.get(key)}, not {values[0]}")


def bare_names(state):
    """Without the prefixes of torch.compile, DDP and DataParallel, and without the causal masks that older files hold."""
    bare = {}
    for name, value in state.items():
        while name.startswith(("_orig_mod.", "module.")):
            name = name.partition(".")[2]
        if torch.is_tensor(value) and not name.endswith((".attn.bias", ".attn.masked_bias")):
            bare[name] = value
    return bare


def model_from_state(state, shape, source):
    """GPT whose shape is read off the tensors; the number of heads, which they do not tell, from `shape`, a dict or an
    inert object, or else 64 channels a head as in all GPT-2s."""
    state = bare_names(state if isinstance(state, dict) else {})
    wte, wpe = state.get("transformer.wte.weight"), state.get("transformer.wpe.weight")
    if wte is None or wpe is None or wte.dim() != 2 or wpe.dim() != 2:
        raise ValueError(f"{source} holds no transformer.wte.weight and transformer.wpe.weight; it is not a GPT-2")
    shape = shape if isinstance(shape, dict) else vars(shape) if shape is not None else {}
    rows, n_embd = wte.shape
    # a file that says 50304 means GPT-2's vocabulary with the pad rows in it
    vocab_size = 50257 if rows == 50304 else min(rows, shape.get("vocab_size") or rows)
    config = GPTConfig(
        n_layer=len({k.split(".")[2] for k in state if k.startswith("transformer.h.")}),
        n_head=shape.get("n_head") or max(1, n_embd // 64), n_embd=n_embd, block_size=wpe.size(0),
        vocab_size=vocab_size, vocab_multiple=shape.get("vocab_multiple", 128),
    )  # fmt: skip
    if n_embd % config.n_head:
        raise ValueError(f"{source}: n_head={config.n_head} does not divide n_embd={n_embd}")
    with torch.device("meta"):  # no random weights: drawing 1.5 billion of them takes longer than reading the file
        model = GPT(config)
    model.to_empty(device="cpu")
    model.lm_head.weight = model.transformer.wte.weight  # to_empty() gave each its own
    load_weights(model, state, source)
    return model


def load_weights(model, state, source):
    """Copy a state dict with GPT-2's names into model; the pad rows become 0. Biases may be missing (nanoGPT's
    bias=False), which is the same as 0. Raises ValueError for what does not fit."""
    state = bare_names(state)
    head = state.get("lm_head.weight")
    rows = model.config.vocab_size
    if head is not None and not torch.equal(head[:rows], state["transformer.wte.weight"][:rows]):
        raise ValueError(f"{source} has a head of its own; GPT-2's is tied to the token embedding")
    ours = dict(model.named_parameters())  # the tied matrix once
    unknown = sorted(state.keys() - ours.keys() - {"lm_head.weight"})
    if unknown:
        raise ValueError(f"{source} has {unknown[0]}, which GPT-2 has not; it is another model")
    with torch.no_grad():
        for name, p in ours.items():
            value = state.get(name)
            if value is None and name.endswith(".bias"):
                p.zero_()
                continue
            if value is None:
                raise ValueError(f"{source} has no {name}; it is not a whole GPT-2")
            if name in VOCAB_ROWS and value.dim() == 2 and value.size(0) >= rows:
                value = value[:rows]
                p[rows:] = 0
            wanted = (rows, *p.shape[1:]) if name in VOCAB_ROWS else tuple(p.shape)
            if tuple(value.shape) != wanted:
                raise ValueError(f"{source}: {name} has shape {tuple(value.shape)}, the model wants {wanted}")
            p[: wanted[0]].copy_(value)


# ----------------------------------------------------------------------------------------------------------- out


def export(source, out, log_dir="log", force=False):
    """Write a model as a Hugging Face folder, whole or not at all. Returns the names of the files.

    Raises FileExistsError where check_replaceable does, OSError where `out` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    out, part = Path(os.path.realpath(out)) if os.path.islink(out) else Path(out), None
    source = find_model(source, log_dir)
    if os.path.exists(out):  # False too for what may not be looked at
        check_replaceable(out, source, force)
    model = load_model(source, log_dir)
    config = hugging_face_config(model.config)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
        part.chmod(0o755)  # mkdtemp keeps others out
        save_file(hugging_face_state(model), part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(0o644)
        write_json(part / "config.json", config)
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
        write_json(part / "generation_config.json", ids | {"pad_token_id": config["eos_token_id"]})
        if model.config.vocab_size == 50257:
            write_tokenizer(part, model.config.block_size)
        if out.exists():
            old = part.with_suffix(".old")
            os.replace(out, old)
            os.replace(part, out)
            shutil.rmtree(old)
        else:
            os.replace(part, out)
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written ({error}); is the disk full?") from error
    except OSError as error:
        if error.errno is None:  # a sentence already: the tokenizer's files
            raise
        raise OSError(f"{out} cannot be written ({error.strerror}); choose another --out") from error
    finally:
        if part:
            shutil.rmtree(part, ignore_errors=True)
    return sorted(p.name for p in out.iterdir())


def check_replaceable(out, source, force):
    """Raise FileExistsError unless `out` may be deleted for an export: an empty folder or an earlier export, with force any
    folder of a Hugging Face model, if it holds no folders; never one that holds the source, or where this process is."""
    if not out.is_dir():
        raise FileExistsError(f"{out} is a file, and an export is a folder; choose another --out")
    for what, path in (("the model to export", source), ("the folder that you are in", ".")):
        if Path(path).resolve().is_relative_to(out.resolve()):
            raise FileExistsError(f"{out} is or holds {what}, and an export replaces its folder; choose another --out")
    if is_export(out):
        return
    if not is_hugging_face(out) or any(p.is_dir() for p in out.iterdir()):  # a run, the folder of all runs, a home
        raise FileExistsError(f"{out} is not the folder of a model alone, and even --force deletes nothing else; choose "
                              "another --out")  # fmt: skip
    if not force:
        raise FileExistsError(f"{out} exists and is not an earlier export; choose another --out, or pass --force, which "
                              "deletes what is there")  # fmt: skip


def is_export(folder):
    """An empty folder, or one with nothing in it but what export() writes."""
    names = {p.name for p in folder.iterdir()}
    return not names or ("config.json" in names and names <= EXPORTED and "exported_by" in read_json(folder / "config.json"))


def hugging_face_state(model):
    """The tensors under transformers' names: matrices turned, pad rows cut, the tied head left out as it is there."""
    state = {}
    for name, p in model.named_parameters():
        p = p.detach()
        p = p[: model.config.vocab_size] if name in VOCAB_ROWS else p.t() if name.endswith(TRANSPOSED) else p
        state[name] = p.contiguous()
    return state


def hugging_face_config(c):
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32",
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_positions": c.block_size, "n_ctx": c.block_size,
        "vocab_size": c.vocab_size, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True,
        "bos_token_id": c.vocab_size - 1, "eos_token_id": c.vocab_size - 1, "use_cache": True,
        "exported_by": "weights.py",
    }  # fmt: skip


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder, block_size):
    """GPT-2's vocab.json and merges.txt, byte for byte as published, and tokenizer.json, which holds both in one."""
    from tiktoken.load import read_file_cached

    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    files = {  # tiktoken downloads them once, and checks them
        "vocab.json": ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        "merges.txt": ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    }
    for ours, (theirs, sha256) in files.items():
        try:
            (folder / ours).write_bytes(read_file_cached(base + theirs, sha256))
        except Exception as error:  # tiktoken lets out whatever its HTTP library raises
            raise OSError(
                f"GPT-2's tokenizer files could not be downloaded ({type(error).__name__}): go online once, or point "
                "TIKTOKEN_CACHE_DIR at a folder that holds them"
            ) from error
    vocab = read_json(folder / "vocab.json")
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]  # the first line is the version
    eot = "<|endoftext|>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
           "fuse_unk": False, "vocab": vocab, "merges": merges}  # fmt: skip
    write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level, "decoder": level,
        "post_processor": level, "added_tokens": [{"id": vocab[eot], "content": eot} | flags], "model": bpe,
    })  # fmt: skip
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size, "add_prefix_space": False,
        "bos_token": eot, "eos_token": eot, "unk_token": eot,
    })  # fmt: skip


# -------------------------------------------------------------------------------------------------- command line


def main():
    import tyro

    Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]

    def export_command(source: Source, out: Path, force: bool = False, log_dir: str = "log"):
        """Write a model as a folder that transformers and lm-evaluation-harness load as it is.

        Args:
            source: Run folder, checkpoint, nanoGPT or build-nanogpt .pt file, or hub name; "" is the newest run.
            out: Folder to write; an earlier export there is replaced.
            force: Replace also a Hugging Face model's folder that is no export, or holds other files too.
            log_dir: Where the newest run is looked for.
        """
        source = find_model(source, log_dir)  # a later checkpoint may come while this one is written
        names = export(source, out, log_dir, force)
        print(f"{out}: {', '.join(names)}, from {source}")
        if "vocab.json" not in names:
            print("no tokenizer files: the model reads bytes (id = byte, 256 = end-of-text), not GPT-2's tokens")

    try:
        tyro.cli(export_command, prog="python -m lab export", use_underscores=True, config=(tyro.conf.FlagCreatePairsOff,))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"weights.py: error: {error}", file=sys.stderr)
        sys.exit(2)

