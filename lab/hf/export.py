"""Write a model as a folder for transformers and lm-evaluation-harness.

    python -m lab export log/RUN --out my-gpt2
    python -m lab export log/RUN --html my-model.html    # a page that runs it
    python -m lab export log/RUN --out my-gpt2 --push_to_hub NAME   # and upload

lab/tools/html_export.py writes that page, lab/hf/hub.py uploads.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError
from tyro.conf import Positional, arg

from lab.cli import UserError, eprint, parse_args, require
from lab.data.chat import CHAT_TEMPLATE
from lab.data.manifest import sha256_of
from lab.data.tokenizers import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    byte_bpe,
    byte_names,
    get_tokenizer,
    is_wordpiece,
)
from lab.files import read_json, write_errors
from lab.hf import bert, gpt2
from lab.hf.gguf_file import GgufType, check_gguf, write_gguf
from lab.hf.hub import check_hub_name, model_card, push
from lab.hf.load import CHECKSUM_FILE, read_checksums
from lab.registry import (
    is_tuned,
    load_model,
    load_tokenizer,
    resolve_source,
    tokenizer_name,
    training_data,
)


def export(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[str | Path, arg(metavar="FOLDER")] = "",
    html: Annotated[str | Path, arg(metavar="FILE")] = "",
    dtype: Literal["float32", "float16"] = "float32",
    gguf: GgufType = "off",
    push_to_hub: Annotated[str, arg(metavar="NAME")] = "",
) -> None:
    """Write a model as a folder that transformers and lm-evaluation-harness can load, or as one HTML page
    that runs it in a browser.

    In training, documents begin with end-of-text. sample.py puts it before a prompt; transformers'
    pipeline does not, so pass "<|endoftext|>" + prompt there. For the harness:

        pip install "lm_eval[hf]"
        lm_eval --model hf --model_args pretrained=OUT --tasks hellaswag

    Args:
        source: run, checkpoint, .pt file of nanoGPT or build-nanogpt, hub name; "" is the newest run
        out: folder to write; an earlier export there is replaced
        html: .html file to write instead of a folder: the model with its weights in 16 bits, at most 30 MB
        dtype: of the weights in the folder; float16 halves the file and rounds the weights to 11 bits
        gguf: also write a file of this type for llama.cpp, and a Modelfile for Ollama (pip install gguf)
        push_to_hub: repository on the Hugging Face hub, NAME or USER/NAME, to upload the folder to, with a
            model card; a new one is private
    """
    check_flags(str(out), str(html), gguf, push_to_hub)
    out = Path(out or html)
    if not html:
        check_replaceable(out)
        out = out.resolve() if out.is_symlink() else out  # replace the link's target, not the link
    source = resolve_source(source)  # once, because a run may save another checkpoint meanwhile
    model = load_model(source)
    if not hasattr(model, "from_pretrained"):
        raise UserError(
            f"{source} is not a GPT-2 or BERT, so transformers has no model for it; export a run of "
            "train_gpt2.py or bert.py"
        )
    if gguf != "off":
        check_gguf(gguf, model.config)
    if html and hasattr(model.config, "segments"):
        raise UserError(f"{source} is a BERT, and a page runs only GPT-2; pass --out FOLDER")
    exported = to_transformers(model)
    if data := training_data(source):
        exported.config.trained_on = data  # for a page written from the export
    check_same_logits(model, exported, source)
    if html:
        from lab.tools.html_export import write_html  # only this export needs it

        write_html(model, source, out)
        print(
            f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB, from {source}; open it in a browser"
        )
        return
    note = write_folder(model, exported, source, out, dtype, gguf, bool(push_to_hub))
    print(f"{out}: {', '.join(sorted(p.name for p in out.iterdir()))}, from {source}")
    print(note.replace("{out}", str(out)))
    if push_to_hub:
        print(f"pushed to {push(out, push_to_hub)}; a new repository is private")


def check_flags(out: str, html: str, gguf: str, push_to_hub: str) -> None:
    """Raise UserError for flags of export that cannot work with any model."""
    require(
        bool(out) != bool(html),
        f"{out=} and {html=}: one of them must be given; pass --out FOLDER for transformers, or --html "
        "FILE for a page that runs the model",
    )
    if html:
        instead = "; pass --out FOLDER instead of --html"
        require(
            Path(html).suffix == ".html", f"html={html} must end in .html; try --html {html}.html"
        )
        require(not push_to_hub, f"push_to_hub={push_to_hub} uploads a folder{instead}")
        require(gguf == "off", f"gguf={gguf} adds a file to a folder{instead}")
    if push_to_hub:
        check_hub_name(push_to_hub)


def write_folder(
    model: Any, exported: Any, source: str, out: Path, dtype: str, gguf: GgufType, card: bool
) -> str:
    """Write the export to the folder `out`, with a model card if `card`. Returns a note on how to use it,
    in which {out} stands for the folder. Raises UserError if a weight is too large for `dtype`."""
    exported.to(getattr(torch, dtype))
    for name, p in exported.named_parameters():
        if not p.isfinite().all():
            raise UserError(
                f"{name} of {source} has a weight above {torch.finfo(p.dtype).max:g}, the largest {dtype}; "
                "pass --dtype float32"
            )
    eprint(f"writing {source} to {out}")
    # An earlier export is replaced only when the new one is complete. A killed export leaves this
    # folder, which the next export to the same place removes.
    part = out.absolute().with_name(f".{out.absolute().name}.part")
    remove(part)
    with write_errors(out):
        part.mkdir(parents=True)
        try:
            write_model(part, exported)
            note = add_tokenizer(part, model.config, source)
            if gguf != "off":
                name = write_gguf(part, model, gguf, bool(is_tuned(source)))
                note += f"\nin llama.cpp: llama-cli -m {{out}}/{name}; in Ollama: "
                note += "ollama create NAME -f {out}/Modelfile"
            if card:
                text = model_card(exported, model.config, source)
                (part / "README.md").write_text(text, encoding="utf-8")
            lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(part.iterdir())]
            (part / CHECKSUM_FILE).write_text("".join(lines))
            for file in part.iterdir():
                file.chmod(0o644)  # safetensors files are created readable by their owner only
            check_replaceable(out)  # again, because writing takes a while
            if out.exists():
                shutil.rmtree(out)
            part.rename(out)
        finally:
            remove(part)
    return note


def remove(part: Path) -> None:
    """Remove a folder or, without following it, a link in its place; nothing if it is not there."""
    if part.is_symlink():
        part.unlink()
    shutil.rmtree(part, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raise UserError unless `out` is missing, empty, or contains only unchanged files of an earlier
    export, according to its checksum file."""
    hint = "move it away or choose another --out"
    with write_errors(out):
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        config = out / "config.json"
        if not (config.is_file() and "exported_by" in read_json(config, hint)):
            raise UserError(
                f"out={out} must be a new or empty folder, or an earlier export; choose another --out"
            )
        checksums = read_checksums(out)
        for file in sorted(set(out.iterdir()) - {out / CHECKSUM_FILE}):
            if file.name not in checksums or not file.is_file():
                raise UserError(
                    f"{file} would be deleted, but is not among the exported files that "
                    f"{CHECKSUM_FILE} lists; {hint}"
                )
            if sha256_of(file) != checksums[file.name]:
                raise UserError(
                    f"{file} would be deleted, but was changed since its export; {hint}"
                )


def to_transformers(model: Any) -> Any:
    """The GPT2LMHeadModel or BertForMaskedLM that is equivalent to `model`."""
    exported = (bert if hasattr(model.config, "segments") else gpt2).to_transformers(model)
    exported.config.exported_by = "python -m lab export"  # check_replaceable looks for it
    if getattr(model.config, "tokenizer", "") == TOKENIZER_FILE:
        exported.config.tokenizer = TOKENIZER_FILE  # so that sample.py uses it for the export too
    return exported


@torch.no_grad()
def check_same_logits(model: Any, exported: Any, source: str) -> None:
    """Raise UserError unless both models have the same logits on random tokens that fill the context,
    because an edited train_gpt2.py may compute something else.

    Relative differences due to rounding are below 1e-6, measured with up to 48 layers; an exact GELU
    instead of the tanh approximation gives 1e-4 with 12 layers.
    """
    c, generator = model.config, torch.Generator().manual_seed(0)
    idx = torch.randint(c.vocab_size, (1, c.block_size), generator=generator)
    # without end-of-text, because transformers' models have no document mask
    eot = getattr(c, "end_of_text", -1)
    idx[idx == eot] = (eot + 1) % c.vocab_size
    ours, theirs = model.eval()(idx)[0], exported.eval()(idx).logits
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    if not difference < 2e-5:
        name = "BERT" if hasattr(c, "segments") else "GPT-2"
        raise UserError(
            f"{source} does not compute {name} (the relative difference of logits is {difference:.1g}), "
            "so it cannot be exported"
        )


def write_model(folder: Path, exported: Any) -> None:
    """Save a model of transformers. Raises OSError if a file cannot be written."""
    from transformers.utils import logging  # slow to import

    logging.disable_progress_bar()  # a bar that counts files
    try:
        exported.save_pretrained(folder, max_shard_size="1GB")
    except SafetensorError as error:  # only its text contains the error number
        found = re.search(r"\(os error (\d+)\)", str(error))
        if not found:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def add_tokenizer(folder: Path, config: Any, source: str) -> str:
    """Write the files of the model's tokenizer, if there are any. Returns a sentence that explains how to
    use it, in which {out} stands for the exported folder."""
    if hasattr(config, "segments"):
        path = Path(source)
        word_piece = (path if path.is_dir() else path.parent) / TOKENIZER_FILE
        # missing for a model from the hub, and for a checkpoint outside of its run
        if not (path.exists() and word_piece.exists()):
            return "no tokenizer files: add those of the model's WordPiece"
        special = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
        save_fast_tokenizer(folder, config, tokenizer_file=str(word_piece), **special)
        return 'in transformers: pipeline("fill-mask", "{out}")("the [MASK] of a list")'
    try:
        name = tokenizer_name(config, source)
    except UserError:  # neither recorded nor known from the vocabulary's size
        return (
            f"no tokenizer files: {config.vocab_size} ids are not GPT-2's vocabulary; add your own"
        )
    own = name.endswith(TOKENIZER_FILE)
    if own and not Path(name).exists():  # a checkpoint outside of its run
        return f"no tokenizer files: copy {name}, which belongs to the model"
    if own and is_wordpiece(name):
        return f"no tokenizer files: copy {name}, in which [SEP] serves as end-of-text"
    # transformers puts no end-of-text before it
    chat = {"chat_template": END_OF_TEXT + CHAT_TEMPLATE} if is_tuned(source) else {}
    if name == "gpt2":
        write_gpt2_tokenizer(folder, config.block_size, **chat)
    else:
        vocab = {char: byte for byte, char in enumerate(byte_names())}
        tokenizer: Any = load_tokenizer(config, source)
        tokenizer = byte_bpe(vocab) if name == "bytes" else tokenizer.fast
        tokenizer.encode_special_tokens = False  # transformers parses special tokens in a prompt
        save_fast_tokenizer(
            folder, config, tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
            unk_token=END_OF_TEXT, clean_up_tokenization_spaces=False, **chat,
        )  # fmt: skip
    if chat:
        return (
            "in transformers: tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        )
    return "in transformers put <|endoftext|> before a prompt; sample.py does so automatically"


def save_fast_tokenizer(folder: Path, config: Any, **parts: Any) -> None:
    """Write the files of a tokenizer of the tokenizers package. parts: arguments of transformers' class."""
    from transformers import PreTrainedTokenizerFast  # slow to import

    tokenizer = PreTrainedTokenizerFast(model_max_length=config.block_size, **parts)
    tokenizer.save_pretrained(folder)


def write_gpt2_tokenizer(folder: Path, block_size: int, **more: Any) -> None:
    """Write GPT-2's vocab.json and merges.txt, byte for byte as published, and tokenizer.json, which
    combines them. more: arguments of transformers' class."""
    from tiktoken.load import read_file_cached
    from transformers import GPT2Tokenizer  # slow to import

    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    vocab = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"  # sha256
    merges = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    get_tokenizer("gpt2")  # downloads both files once, or raises UserError
    (folder / "vocab.json").write_bytes(read_file_cached(f"{base}encoder.json", vocab))
    (folder / "merges.txt").write_bytes(read_file_cached(f"{base}vocab.bpe", merges))
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    GPT2Tokenizer(*files, model_max_length=block_size, **more).save_pretrained(folder)


def main(argv: list[str]) -> None:
    """Run `python -m lab export` with these arguments."""
    parse_args(export, argv)
