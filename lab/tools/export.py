"""Write a model as a folder that transformers loads: python -m lab export log/RUN --out my-gpt2."""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from lab import models, weights
from lab.cli import UserError, parse
from lab.files import read_json, writing

# What an export consists of; --force also takes away other forms of weights that would be read
# first
OURS = {
    "config.json", "generation_config.json", "model.safetensors", "vocab.json", "merges.txt",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
OTHER_WEIGHTS = {"model.safetensors.index.json", "pytorch_model.bin"}


def export(source, out, log_dir="log", force=False):
    """Write the model that `source` names (see lab.models.find) to the folder `out`; returns the
    model.

    Nothing is touched before all of it is written, and never another file than those named above.
    Raises UserError where `out` is neither empty nor an earlier export nor, with force, a Hugging
    Face model's folder."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    out = Path(out)
    beside = out.resolve().parent  # where a link leads
    with writing(out):
        check_replaceable(out, force)
    model = models.load(source, log_dir)
    config, state = weights.to_hugging_face(model)
    size = sum(t.numel() * t.element_size() for t in state.values())
    print(f"writing {model.num_params():,} parameters, {size / 1e6:,.0f} MB", file=sys.stderr)
    with writing(out):
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export", dir=beside) as part:
            part = Path(part)
            try:
                save_file(state, part / "model.safetensors", metadata={"format": "pt"})
            except SafetensorError as error:
                raise UserError(f"{out} cannot be written ({error}); is the disk full?") from error
            (part / "model.safetensors").chmod(0o644)  # as for the others; it is made for us alone
            write_json(part / "config.json", config)
            ids = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
            write_json(part / "generation_config.json", ids | {"pad_token_id": ids["eos_token_id"]})
            if config["vocab_size"] == 50257:
                write_tokenizer(part, config["n_positions"])
            out.mkdir(exist_ok=True)
            for name in OURS | OTHER_WEIGHTS:
                (out / name).unlink(missing_ok=True)
            for file in part.iterdir():
                file.rename(out / file.name)
    return model


def check_replaceable(out, force):
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file, and an export is a folder; choose another --out")
    names = {path.name for path in out.iterdir()}
    config = read_json(out / "config.json") if "config.json" in names else {}
    if not names or (names <= OURS and "exported_by" in config):
        return
    if "model_type" not in config:  # a run's config.json has none
        raise UserError(f"{out} holds something else than a model's files; choose another --out")
    if not force:
        raise UserError(
            f"{out} is not an earlier export; choose another --out, or pass --force, which "
            "replaces the model in it"
        )


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder, block_size):
    """GPT-2's vocab.json and merges.txt, byte for byte as published, and tokenizer.json, which
    holds both in one."""
    from tiktoken.load import read_file_cached

    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    files = {  # tiktoken downloads them once, and checks them
        "vocab.json": (
            "encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        "merges.txt": (
            "vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    }  # fmt: skip
    for ours, (theirs, sha256) in files.items():
        try:
            content = read_file_cached(base + theirs, sha256)
        except Exception as error:  # tiktoken lets out whatever its HTTP library raises
            raise UserError(
                f"GPT-2's tokenizer files could not be downloaded ({type(error).__name__}): go "
                "online once, or point TIKTOKEN_CACHE_DIR at a folder that holds them"
            ) from error
        (folder / ours).write_bytes(content)
    vocab = read_json(folder / "vocab.json")
    merges = (
        (folder / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    )  # after the version
    eot = "<|endoftext|>"
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    bpe = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="",
        end_of_word_suffix="", fuse_unk=False, vocab=vocab, merges=merges,
    )  # fmt: skip
    tokenizer = dict(
        version="1.0", truncation=None, padding=None, normalizer=None, pre_tokenizer=level,
        decoder=level, post_processor=level, model=bpe,
        added_tokens=[{"id": vocab[eot], "content": eot} | flags],
    )  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    settings = dict(
        tokenizer_class="GPT2Tokenizer", model_max_length=block_size, add_prefix_space=False
    )
    write_json(folder / "tokenizer_config.json", settings | dict.fromkeys(
        ("bos_token", "eos_token", "unk_token"), eot))  # fmt: skip


@dataclass
class Config:
    """Write a model as a folder that transformers and lm-evaluation-harness load as it is.

    sample.py puts end-of-text before a prompt, as every document has it in training; transformers'
    pipeline does not, so there give it "<|endoftext|>" + prompt. For the harness: pip install
    "lm_eval[hf]", then lm_eval --model hf --model_args pretrained=OUT --tasks hellaswag
    """

    # run, checkpoint, .pt file of nanoGPT or build-nanogpt, hub name; "" is the newest run
    source: Annotated[str, Positional, arg(metavar="SOURCE")]
    out: Path  # folder to write; an earlier export there is replaced
    force: bool = False  # replace also the model in a Hugging Face folder that is no export
    log_dir: str = "log"  # where the newest run is looked for


def main(argv):
    cfg = parse(Config, argv, prog="python -m lab export")
    source = models.find(
        cfg.source, cfg.log_dir
    )  # a later checkpoint may come while this is written
    vocab_size = export(source, cfg.out, cfg.log_dir, cfg.force).config.vocab_size
    print(f"{cfg.out}: {', '.join(sorted(p.name for p in cfg.out.iterdir()))}, from {source}")
    if vocab_size == 257:
        print("no tokenizer files: the model reads bytes (id = byte, 256 = end-of-text)")
    elif vocab_size != 50257:
        print(
            f"no tokenizer files: {vocab_size} ids are not GPT-2's vocabulary; add your tokenizer's"
        )
    else:
        print("in transformers put <|endoftext|> before a prompt, as sample.py does by itself")
