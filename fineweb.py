"""Text corpora as shards of token ids: FineWeb-Edu from the hub, your own files, Python's own text.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens
    python fineweb.py --source builtin                      # no network: Python's documentation
    python fineweb.py --source my_texts/ --out data/mine    # parquet, JSONL, text, .gz, .zst
    python fineweb.py --verify --out edu_fineweb10B         # read it all, name what is broken

A shard is a row of uint16 tokens in a .npy file, named <data>_<split>_<number>.npy; number 0 is the
validation split. Documents stand one after the other, each led by end-of-text. manifest.json
beside the shards says where they came from: whatever stops the work, even kill -9, the same command
goes on with the shard that was in hand, and ends with the same bytes.
"""

import dataclasses
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab.cli import UserError, command, parse
from lab.data.builtin import build_builtin
from lab.data.chat import build_chat, is_chat
from lab.data.corpus import FINEWEB_EDU, build_corpus, find_source, texts_of
from lab.data.wordpiece import prepare
from lab.data.writer import verify
from lab.files import only_writer


@dataclass
class Config:
    """Turns text into shards of token ids. Stopped at any moment, the same command goes on."""

    # hub, builtin (Python's documentation), or a file or folder: parquet, JSONL, text, .gz, .zst
    source: str = "hub"
    out: str = ""  # folder; empty: edu_fineweb10B for FineWeb-Edu, else data/<name of the source>
    # stop after so many, validation included: 500M, 10B, 1.3T; a larger number later goes on
    tokens: str = ""
    # auto: gpt2, but bytes for the built-in text. gpt2: 50257 tokens, two files are downloaded
    # once. bytes: 256 and end-of-text, needs nothing; the choice for training without a GPU, where
    # a second goes through thousands of bytes and hundreds of gpt2's. For bert.py: wordpiece,
    # learnt from this text, or the published bert-base-uncased; both lie in tokenizer.json
    tokenizer: Literal["auto", "gpt2", "bytes", "wordpiece", "bert-base-uncased"] = "auto"
    vocab_size: int = 30000  # pieces of a wordpiece, at most
    # data set on the hub; one of ready-made shards (kjj0/finewebedu10B-gpt2) is downloaded as it is
    dataset: str = FINEWEB_EDU
    # its configuration; for FineWeb-Edu sample-10BT, sample-100BT, sample-350BT, default (1.3T)
    name: str = ""
    split: str = "train"  # its split
    # its branch, tag or commit; a corpus that was begun stays with the commit, see its manifest
    revision: str = "main"
    # column (parquet) or key (JSONL) that holds the text; where a JSONL file's first line has no
    # text but "messages" with roles, its lines are conversations: rows and masks for fine-tuning
    text_column: str = "text"
    # tokens in a row of chat data; longer conversations are dropped and counted
    context: int = 1024
    shard_tokens: str = "100M"  # tokens in a shard, which is held in memory until it is whole
    # tokens in the validation shard, the first; empty: as in a shard, at most a tenth of all
    val_tokens: str = ""
    # processes that tokenise; -1: one for each core, 0: the main one; the shards stay the same
    workers: int = -1
    # ray: on the Ray cluster that RAY_ADDRESS names, or on this machine; needs pip install ray
    engine: Literal["processes", "ray"] = "processes"
    # compare all shards in --out with their manifest, name what is broken (exit status 1)
    verify: bool = False


def parse_count(flag: str, text: str) -> int:
    """500M, 10B, 1.3T or a plain number as int; 0 for no text."""
    if not text:
        return 0
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)([kmbt]?)", text.lower())
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    count = round(float(found[1]) * scale[found[2]]) if found else 0
    if count < 1:
        raise UserError(f"--{flag} {text}: wanted is a number of tokens, such as 500M or 10B")
    return count


def completed(cfg: Config) -> Config:
    """The settings with counts as numbers and defaults filled in."""
    counts = {f: parse_count(f, getattr(cfg, f)) for f in ("tokens", "shard_tokens", "val_tokens")}
    tokenizer = cfg.tokenizer
    if tokenizer == "auto":
        tokenizer = "bytes" if cfg.source == "builtin" else "gpt2"
    out = f"data/{data_name(cfg)}"
    if out == "data/edufineweb":
        out = "edu_fineweb" + (cfg.name or "sample-10BT").removeprefix("sample-").removesuffix("T")
    return dataclasses.replace(cfg, tokenizer=tokenizer, out=cfg.out or out, **counts)


def data_name(cfg: Config) -> str:
    """The first part of the shards' names."""
    name = Path(cfg.source).resolve().name.split(".")[0]
    if cfg.source == "hub":
        name = "edufineweb" if cfg.dataset == FINEWEB_EDU else cfg.dataset.split("/")[-1]
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "text"


def summary(m: dict, out: str, seconds: float) -> str:
    kind, more = "documents", ""
    if m["context"]:
        kind = "conversations"
        more = f"; left out: {m['too_long']:,} too long, {m['no_answer']:,} without an answer"
    return (
        f"{out}: {m['documents']:,} {kind}, {m['tokens']:,} tokens in {len(m['shards'])} shards, "
        f"the first of them for validation, {seconds:,.0f} s{more}"
    )


def main(argv=None) -> int:
    cfg = completed(parse(Config, argv))
    if cfg.verify:
        problems = verify(cfg.out)
        print("\n".join(problems) or f"{cfg.out}: all shards are whole")
        return 1 if problems else 0
    t0 = time.monotonic()
    manifest = build(cfg)
    print(summary(manifest, cfg.out, time.monotonic() - t0))
    if cfg.tokenizer == "gpt2" and not shutil.which("nvidia-smi"):
        print("there seems to be no GPU here: a small model learns sooner with --tokenizer bytes")
    return 0


def build(cfg: Config) -> dict:
    """Shards of texts or of conversations, from the hub or from here. Returns the manifest."""
    if cfg.source == "builtin":
        if cfg.tokens:
            raise UserError("--source builtin is always whole, 2M tokens or so: leave out --tokens")
        return build_builtin(cfg.out, cfg.tokenizer, cfg.vocab_size)
    source, files = find_source(cfg)
    refusal = (
        f"another fineweb.py is writing {cfg.out}, and only one may at a time: run this again when "
        "it has ended, or choose another --out"
    )
    with only_writer(cfg.out, refusal):
        texts = texts_of(files, cfg.text_column)
        tokenizer = prepare(cfg.out, cfg.tokenizer, texts, cfg.vocab_size)
        if is_chat(files, cfg.text_column):
            if cfg.tokens or cfg.val_tokens:
                raise UserError(
                    "conversations are always whole: leave out --tokens and --val_tokens"
                )
            return build_chat(files, cfg.out, tokenizer, cfg.context, cfg.shard_tokens)
        cfg = dataclasses.replace(cfg, tokenizer=tokenizer)
        return build_corpus(cfg, source, files, data_name(cfg))


if __name__ == "__main__":
    command(main)
