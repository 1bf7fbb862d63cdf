"""Write a model as a folder that transformers loads: python -m lab export log/RUN --out my-gpt2."""

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import torch
from safetensors import SafetensorError
from tyro.conf import Positional, arg

from lab import bert_weights, models
from lab.cli import UserError, parse, say
from lab.data.shards import sha256_of
from lab.data.tokenizers import get_tokenizer
from lab.files import read_json, writing
from lab.weights import HEAD, SUMS, TRANSPOSED, WTE

TOKENIZER = {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
OURS = {"config.json", "generation_config.json"} | TOKENIZER


def export(source: Annotated[str, Positional, arg(metavar="SOURCE")], out: Path):
    """Write a model as a folder that transformers and lm-evaluation-harness load as it is.

    sample.py puts end-of-text before a prompt, as every document has it in training; transformers'
    pipeline does not, so there give it "<|endoftext|>" + prompt. For the harness: pip install
    "lm_eval[hf]", then lm_eval --model hf --model_args pretrained=OUT --tasks hellaswag

    Args:
        source: run, checkpoint, .pt file of nanoGPT or build-nanogpt, hub name; "" is the newest run
        out: folder to write; an earlier export there is replaced
    """
    out = Path(out)
    check_replaceable(out)
    out = out.resolve() if out.is_symlink() else out  # what it points to is replaced
    source = models.find(source)  # a later checkpoint may come meanwhile
    model = models.load(source)
    if not hasattr(model, "from_pretrained"):
        raise UserError(f"{source} is no GPT-2: transformers has no model that computes this one")
    say(f"writing {source} to {out}")  # transformers alone takes seconds to come
    # Nothing is touched before all of it is written. What a killed export leaves has a name that
    # the next one to the same place looks for.
    part = out.absolute().with_name(f".{out.absolute().name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with writing(out):
        part.mkdir(parents=True)
        try:
            write_model(part, model)
            note = add_tokenizer(part, model.config, source)
            for file in part.iterdir():
                file.chmod(0o644)  # some are made for us alone
            if out.exists():
                shutil.rmtree(out)
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    print(f"{out}: {', '.join(sorted(p.name for p in out.iterdir()))}, from {source}")
    print(note.format(out=out))


def check_replaceable(out):
    """Raise UserError where there is something else than an earlier export, whole and alone."""
    with writing(out):
        if not out.exists():
            return
        names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    others = {name for name in names - OURS if not name.startswith("model")}  # large ones in parts
    ours = "config.json" in names and not others
    if names and not (ours and "exported_by" in read_json(out / "config.json")):
        raise UserError(f"{out} is not a new folder, nor an earlier export; choose another --out")


def write_model(folder, model):
    from transformers.utils import logging

    logging.disable_progress_bar()  # which counts files
    try:
        in_transformers(model).save_pretrained(folder, max_shard_size="1GB")
    except SafetensorError as error:  # it tells what the system said as a text alone
        said = re.search(r"\(os error (\d+)\)", str(error))
        if not said:
            raise
        raise OSError(int(said[1]), os.strerror(int(said[1]))) from error
    files = sorted(folder.glob("model*.safetensors"))
    (folder / SUMS).write_text("".join(f"{sha256_of(f)}  {f.name}\n" for f in files))


def in_transformers(model):
    """transformers' GPT-2 with this model's weights: matrices turned, pad rows cut. Of a BERT,
    transformers' BERT."""
    if hasattr(model.config, "segments"):
        return bert_weights.in_transformers(model)
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    shape = {name: getattr(c, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    eot = {"bos_token_id": c.vocab_size - 1, "eos_token_id": c.vocab_size - 1}
    own = {"n_positions": c.block_size, "exported_by": "python -m lab export"}
    config = GPT2Config(**shape, **dropout, **eot, **own)
    state = {}
    for name, p in model.named_parameters():
        p = p.detach()[: c.vocab_size] if name in model.vocab_rows else p.detach()
        state[name] = (p.t() if name.endswith(TRANSPOSED) else p).contiguous()
    with torch.device("meta"):  # no random weights
        theirs = GPT2LMHeadModel(config)
    theirs.load_state_dict(state | {HEAD: state[WTE]}, assign=True)
    theirs.tie_weights()
    theirs.generation_config.pad_token_id = c.vocab_size - 1
    return theirs


def add_tokenizer(folder, config, source):
    """The files of the model's tokenizer, as far as there are any. Returns what to know of them."""
    from transformers import PreTrainedTokenizerFast

    folder_of = Path(source) if Path(source).is_dir() else Path(source).parent
    word_piece = folder_of / "tokenizer.json"  # a run of bert.py has one
    if hasattr(config, "segments") and word_piece.exists():
        names = ("pad", "unk", "cls", "sep", "mask")
        special = {f"{name}_token": f"[{name.upper()}]" for name in names}
        how = dict(tokenizer_file=str(word_piece), model_max_length=config.block_size)
        PreTrainedTokenizerFast(**how, **special).save_pretrained(folder)
        return 'in transformers: pipeline("fill-mask", "{out}")("the [MASK] of a list")'
    if config.vocab_size == 50257:
        write_tokenizer(folder, config.block_size)
        return "in transformers put <|endoftext|> before a prompt, as sample.py does by itself"
    way = "they are bytes, and end-of-text is 256" if config.vocab_size == 257 else "add your own"
    return f"no tokenizer files: {config.vocab_size} ids are not GPT-2's vocabulary; {way}"


def write_tokenizer(folder, block_size):
    """GPT-2's vocab.json and merges.txt, byte for byte as published, and tokenizer.json, which
    holds both in one."""
    from tiktoken.load import read_file_cached
    from transformers import GPT2Tokenizer

    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    vocab = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # sha256
    merges = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    get_tokenizer("gpt2")  # downloads both files once, or says what to do
    (folder / "vocab.json").write_bytes(read_file_cached(f"{base}encoder.json", vocab))
    (folder / "merges.txt").write_bytes(read_file_cached(f"{base}vocab.bpe", merges))
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    GPT2Tokenizer(*files, model_max_length=block_size).save_pretrained(folder)


def main(argv):
    parse(export, argv)
