"""Convert texts to shards of token ids: FineWeb-Edu, your own files, Python's documentation.

    python fineweb.py                                     # FineWeb-Edu, 10B
    python fineweb.py --source builtin                    # Python's docs
    python fineweb.py --source my_texts/ --out data/mine  # text, JSONL ...
    python fineweb.py --verify --out edu_fineweb10B       # finds damage

A shard is an array of uint16 tokens in a file named <data>_<split>_<number>.npy. Number 0 is the
validation split. Documents are concatenated, each preceded by end-of-text. manifest.json in the same
folder describes the source. If a build is interrupted, even by kill -9, the same command continues
with the unfinished shard, and the result has the same bytes.
"""

import dataclasses
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab.cli import (  # isort: skip
    UserError, command_for, counted, eprint, parse_args, pre_import_setup, require, run_main, shell_quote,
)  # fmt: skip

if __name__ == "__main__":
    pre_import_setup()  # exits with one sentence if PyTorch is not installed

from lab.data.build import FINEWEB_EDU, CorpusConfig, build_corpus, find_source, texts_of
from lab.data.chat import build_chat, is_chat
from lab.data.manifest import Manifest, check_manifest_matches, load_partial_manifest, verify_shards
from lab.data.python_docs import build_python_docs
from lab.data.tokenizers import TOKENIZER_FILE, get_or_train, is_wordpiece, tokenizer_path
from lab.files import dir_lock


@dataclass
class Config:
    """Convert texts to shards of token ids. The same command continues an interrupted build."""

    # hub, builtin (Python's documentation), or a file or folder of parquet, JSONL, text, .gz, .zst
    source: str = "hub"
    out: str = ""  # folder; empty: edu_fineweb10B for FineWeb-Edu, else data/<name of the source>
    # number of tokens, including validation: 500M, 10B, 1.3T; empty: all. A larger number later
    # continues the build
    tokens: str = ""
    # auto: bytes for the built-in text, else gpt2. gpt2: 50257 tokens; downloads two files once. bytes:
    # 256 bytes and end-of-text; needs no files, and is best without a GPU, because a small model trains
    # on thousands of bytes per second, but only on hundreds of gpt2's tokens. bpe:4096: byte-level BPE
    # with 4096 ids, learned from the texts. For bert.py: wordpiece, learned from the texts, or the
    # published bert-base-uncased. These three are saved as tokenizer.json in --out; the path of such a
    # file uses the same tokenizer again, for more texts or for fine-tuning
    tokenizer: str = "auto"
    vocab_size: int = 30000  # maximum vocabulary size of --tokenizer wordpiece
    # data set on the hub; ready-made shards (kjj0/finewebedu10B-gpt2) are downloaded unchanged
    dataset: str = FINEWEB_EDU
    # configuration of the data set; for FineWeb-Edu sample-10BT, sample-100BT, sample-350BT, default (1.3T)
    name: str = ""
    split: str = "train"  # split of the data set
    # branch, tag or commit of the data set; a continued build keeps its commit
    revision: str = "main"
    # column (parquet) or key (JSONL) of the text. If the first record is a conversation instead
    # (docs/DATA.md lists the forms), the records are packed into rows with masks for fine-tuning
    text_column: str = "text"
    # tokens per row of chat data; longer conversations are skipped and counted
    context: int = 1024
    # tokens per shard, which is kept in memory until it is complete (builtin: always two shards)
    shard_tokens: str = "100M"
    # tokens in the validation shard; empty: as in other shards, but at most a tenth of all
    val_tokens: str = ""
    # number of worker processes; -1: one per core, 0: none; the shards are the same
    workers: int = -1
    # ray: use the Ray cluster at RAY_ADDRESS, or this machine; needs pip install ray
    engine: Literal["processes", "ray"] = "processes"
    # refuse a --source folder with files that would be skipped, such as a.csv or b.txt.bz2 beside texts;
    # without it they are only listed
    strict: bool = False
    # only check all shards in --out against their manifest, and list damaged ones (exit status 1)
    verify: bool = False


def parse_count(flag: str, text: str) -> int:
    """500M, 10B, 1.3T or a plain number as int; 0 for an empty text."""
    if not text and flag != "shard_tokens":
        return 0
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)([kmbt]?)", text.lower())
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    count = float(found[1]) * scale[found[2]] if found else 0
    if not 1 <= count < 1e18:
        raise UserError(f"{flag}={text} must be a number of tokens, such as 500M or 10B")
    return round(count)


def completed(cfg: Config) -> CorpusConfig:
    """The flags, with counts as numbers and defaults filled in."""
    tokenizer = cfg.tokenizer
    if tokenizer == "auto":
        tokenizer = "bytes" if cfg.source == "builtin" else "gpt2"
    out = f"data/{data_name(cfg)}"
    if out == "data/edufineweb":
        out = "edu_fineweb" + (cfg.name or "sample-10BT").removeprefix("sample-").removesuffix("T")
    numbers = "tokens", "shard_tokens", "val_tokens"
    counts = {name: parse_count(name, getattr(cfg, name)) for name in numbers}
    same = {f.name: getattr(cfg, f.name, None) for f in dataclasses.fields(CorpusConfig)}
    filled = dict(data=data_name(cfg), out=Path(cfg.out or out), tokenizer=tokenizer)
    return CorpusConfig(**same | counts | filled)


def data_name(cfg: Config) -> str:
    """The first part of the shards' names."""
    name = Path(cfg.source).resolve().name.split(".")[0]
    if cfg.source == "hub":
        name = "edufineweb" if cfg.dataset == FINEWEB_EDU else cfg.dataset.split("/")[-1]
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "text"


def summary(manifest: Manifest, out: Path, seconds: float) -> str:
    kind, skipped = "document", ""
    if manifest["context"]:
        too_long, no_answer = manifest.get("too_long", 0), manifest.get("no_answer", 0)
        kind = "conversation"
        skipped = f"; skipped: {too_long:,} too long, {no_answer:,} without an answer"
    return (
        f"{out}: {counted(manifest['documents'], kind)}, {manifest['tokens']:,} tokens in "
        f"{len(manifest['shards'])} shards, the first for validation, {seconds:,.0f} s{skipped}"
    )


def main(argv: list[str]) -> int:
    flags = parse_args(Config, argv)
    cfg = completed(flags)
    if flags.verify:
        problems = verify_shards(cfg.out)
        print("\n".join(problems) or f"{cfg.out}: all shards are intact")
        return 1 if problems else 0
    t0 = time.monotonic()
    try:
        manifest = build(cfg)
    except KeyboardInterrupt:
        eprint(f"the same command continues the build in {cfg.out}")
        raise
    print(summary(manifest, cfg.out, time.monotonic() - t0))
    context = manifest["context"]  # None unless these are conversations
    chats = f" --preset sft --init_from RUN --seq_len {context}" if context else ""
    if manifest["tokens"] * (1 if cfg.tokenizer == "bytes" else 4) < 1e6 and not chats:
        print("note: this is less than 1 MB of text, which a model soon learns by heart")
    tokenizer = Path(cfg.out, TOKENIZER_FILE)
    word_piece = tokenizer.exists() and is_wordpiece(tokenizer)
    program = command_for("bert.py" if word_piece else "train_gpt2.py")
    print(f"train on them: {program} --data {shell_quote(cfg.out)}{chats}")
    if context:
        print(
            f"RUN must have a context of at least {context} tokens; for any other, pass the file of "
            "conversations itself as --data"
        )
    if cfg.tokenizer == "gpt2" and not shutil.which("nvidia-smi"):
        print("there is no GPU: a small model trains faster on data with --tokenizer bytes")
    return 0


def build(cfg: CorpusConfig) -> Manifest:
    """Build shards from texts or conversations, or continue a build. Returns the manifest."""
    if cfg.strict and cfg.source in ("hub", "builtin"):
        raise UserError(
            f"--strict checks the files of a folder, but --source is {cfg.source}; leave out --strict"
        )
    if cfg.source == "builtin":
        if cfg.tokens:
            raise UserError(
                f"tokens={cfg.tokens} is not possible with --source builtin, which always builds all of its "
                "2M tokens; leave out --tokens"
            )
        if cfg.val_tokens:
            raise UserError(
                f"val_tokens={cfg.val_tokens} is not possible with --source builtin, which always validates "
                "on a tenth of its documents; leave out --val_tokens"
            )
        return build_python_docs(cfg.out, cfg.tokenizer, cfg.vocab_size)
    source, files = find_source(cfg)
    refusal = (
        f"another fineweb.py is writing {cfg.out}; wait until it ends, or choose another --out"
    )
    with dir_lock(cfg.out, refusal):
        if manifest := load_partial_manifest(cfg.out):  # before a tokenizer file is written there
            path = tokenizer_path(cfg.out, cfg.tokenizer)
            check_manifest_matches(cfg.out, manifest, tokenizer=Path(path).name)
            require(
                path == cfg.tokenizer or Path(path).exists(),
                f"{path} is missing, with which these shards were made; restore it, or delete {cfg.out}",
            )
        chat, texts = is_chat(files, cfg.text_column), texts_of(files, cfg.text_column)
        if chat and cfg.tokenizer.startswith(("bpe:", "wordpiece")):
            raise UserError(
                f"--tokenizer {cfg.tokenizer} learns from texts, but {cfg.source} has conversations; pass "
                "the tokenizer.json of the run that you want to fine-tune"
            )
        tokenizer = get_or_train(cfg.out, cfg.tokenizer, texts, cfg.vocab_size)
        if chat:
            if cfg.tokens or cfg.val_tokens:
                raise UserError(
                    "--tokens and --val_tokens do not work with conversations, which are all used; leave "
                    "them out"
                )
            return build_chat(files, cfg.out, tokenizer, cfg.context, cfg.shard_tokens)
        return build_corpus(dataclasses.replace(cfg, tokenizer=tokenizer), source, files)


if __name__ == "__main__":
    run_main(main)
