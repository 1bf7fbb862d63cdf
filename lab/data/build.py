"""Build a folder of shards from texts, or download ready-made shards. Used by fineweb.py.

Shards are written one by one. The manifest records where in the source each shard ends, so an
interrupted build loses at most one shard, and continuing it gives the same bytes.
"""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.cli import UserError, progress
from lab.data import sources
from lab.data.manifest import (
    Manifest,
    check_file,
    check_manifest_matches,
    init_output_dir,
    load_partial_manifest,
    new_manifest,
    write_manifest,
)
from lab.data.shards import save_shard, shard_entry
from lab.data.sources import text_of
from lab.data.tokenizers import get_tokenizer
from lab.data.workers import ENGINES
from lab.files import write_errors

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
COMPRESSION_RATIO = 3.5  # of .gz and .zst text, roughly


@dataclass(frozen=True)
class CorpusConfig:
    """Settings of a build: fineweb.py's flags (explained there), with counts as integers (0: not given)."""

    source: str
    data: str  # the first part of the shards' names
    out: Path
    tokens: int  # validation included; 0: all
    tokenizer: str  # after get_or_train, a name for get_tokenizer
    vocab_size: int
    dataset: str
    name: str
    split: str
    revision: str
    text_column: str
    context: int
    shard_tokens: int
    val_tokens: int  # 0: as many as in a shard, but at most a tenth of all
    workers: int
    engine: str
    strict: bool


def find_source(cfg: CorpusConfig) -> tuple[dict, list[sources.File]]:
    """The manifest's description of the source, and its files.

    A continued build uses the commit of the data set that it began with.
    """
    if cfg.source != "hub":
        files = sources.local_files(cfg.source, cfg.strict)
        listed = [[f.name, f.size] for f in files]
        return {"kind": "local", "text_column": cfg.text_column, "files": listed}, files
    name = cfg.name or ("sample-10BT" if cfg.dataset == FINEWEB_EDU else "")
    previous = load_partial_manifest(cfg.out)
    source = previous["source"] if previous else {}
    revision = source["revision"] if source.get("dataset") == cfg.dataset else cfg.revision
    revision, files = sources.hub_files(cfg.dataset, name, cfg.split, revision)
    source = {"kind": "hub", "text_column": cfg.text_column, "dataset": cfg.dataset, "name": name}
    return source | {"split": cfg.split, "revision": revision, "files": len(files)}, files


def estimate_tokens(files: list[sources.File], tokenizer: str, column: str) -> int:
    """Estimate the number of tokens in the files, for the progress bar and the validation split."""
    size, first = sum(f.size * (COMPRESSION_RATIO if f.compression else 1) for f in files), files[0]
    if first.kind == "parquet" and first.size:
        # Spark also writes files without rows
        first = next((f for f in files if sources.open_parquet(f, column).metadata.num_rows), first)
        parquet = sources.open_parquet(first, column)
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        chunks = (group.column(i) for group in groups for i in range(group.num_columns))
        texts = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
        size *= texts / first.size
    elif first.kind == "jsonl":  # count only the text, not the other keys
        for unit in itertools.islice(sources.all_units(files, column), 1):
            found = (text_of(r, column, where) for where, r in sources.records_of(unit))
            size *= sum(len(text.encode("utf-8", "replace")) for text in found) / len(unit.block)
    bytes_per_token = 1.0 if tokenizer == "bytes" else 4.4  # 4.4 in English
    return max(int(size / bytes_per_token), 1)


def texts_of(files: list[sources.File], column: str) -> Iterator[str]:
    """Every text of the files, in order."""
    for unit in sources.all_units(files, column):
        for texts in sources.documents_of(unit, column):
            yield from texts.to_pylist()


def build_corpus(cfg: CorpusConfig, source: dict, files: list[sources.File]) -> Manifest:
    """Write the shards of `files` to cfg.out, continuing an interrupted build. Return the manifest.

    source: from find_source. Raises UserError if cfg.out was begun with other settings, if its
    shards have changed, or if no tokens are left to train on.
    """
    manifest = load_partial_manifest(cfg.out)
    if manifest and len(manifest["shards"]) == 1 and not manifest["complete"]:
        old = manifest["source"]
        if old != source and old | {"files": source["files"]} == source:
            print("files have changed, and there are no training shards yet: starting again")
            manifest = None
    if manifest:
        wanted = dict(format=2, data=cfg.data, tokenizer=Path(cfg.tokenizer).name, **source)
        check_manifest_matches(cfg.out, {**manifest, **manifest["source"]}, **wanted)
        for entry in manifest["shards"]:
            check_file(cfg.out / entry["name"], entry)
    if files[0].kind == "bin":
        return download_shards(cfg, manifest, source, files)
    limit = cfg.tokens or sys.maxsize
    expected = min(limit, estimate_tokens(files, cfg.tokenizer, cfg.text_column))
    if not manifest:
        # the first shard is the validation split: a full shard, but at most a tenth of all tokens
        val_tokens = cfg.val_tokens or min(cfg.shard_tokens, max(expected // 10, 1))
        if val_tokens >= limit:
            raise UserError(
                f"val_tokens={val_tokens} must be smaller than tokens={limit}, because training uses the "
                "rest; pass a smaller --val_tokens"
            )
        manifest = new_manifest(
            cfg.data, get_tokenizer(cfg.tokenizer), source=source, shard_tokens=cfg.shard_tokens,
            val_tokens=val_tokens,
        )  # fmt: skip
    val_tokens = cfg.val_tokens or manifest["val_tokens"]
    check_manifest_matches(cfg.out, manifest, shard_tokens=cfg.shard_tokens, val_tokens=val_tokens)
    if not manifest.get("exhausted") and manifest["tokens"] < limit:
        resume_build(cfg, manifest, files, limit, expected)
    if len(manifest["shards"]) < 2:
        raise UserError(
            f"all {manifest['tokens']:,} tokens of the source are in the validation split, but "
            f"training needs some: delete {cfg.out} and pass a smaller --val_tokens"
        )
    return write_manifest(cfg.out, manifest, complete=True)


def resume_build(
    cfg: CorpusConfig, manifest: Manifest, files: list[sources.File], limit: int, expected: int
) -> None:
    """Write the shards after the manifest's last one, up to `limit` tokens in total.

    expected: estimated total, for the progress bar.
    """
    shards = manifest["shards"]
    full_size = manifest["shard_tokens" if len(shards) > 1 else "val_tokens"]
    if shards and shards[-1]["tokens"] < full_size:
        shards.pop()  # incomplete: written again, with more tokens
    init_output_dir(cfg.out, manifest)
    start = shards[-1].get("end") if shards else [0, 0, 0]
    assert start, "only the last shard of a source lacks an end, and it was removed above"
    file, unit, skip = start
    if shards:
        print(f"continuing after {manifest['tokens']:,} tokens")
    units = sources.all_units(files, cfg.text_column, file, unit)
    workers = (os.cpu_count() or 1) if cfg.workers < 0 else cfg.workers
    engine = ENGINES[cfg.engine](units, cfg.tokenizer, cfg.text_column, workers)
    bar = tqdm(
        initial=manifest["tokens"], total=expected, unit="tok", unit_scale=True, smoothing=0.1,
        disable=None,
    )  # fmt: skip
    with contextlib.closing(engine) as results, bar:
        manifest["exhausted"] = fill_shards(cfg.out, manifest, results, skip, limit, bar)


def fill_shards(
    out_dir: Path, manifest: Manifest, results: Iterable[tuple[sources.Unit, np.ndarray]],
    skip: int, limit: int, bar: tqdm,
) -> bool:  # fmt: skip
    """Cut the tokens of units into shards, up to `limit` tokens in total.

    skip: number of tokens of the first unit that are already in shards. Returns whether the source
    is exhausted.
    """
    parts, held = [], 0
    for unit, ids in results:
        while skip < len(ids):
            size = manifest["shard_tokens" if manifest["shards"] else "val_tokens"]
            size = min(size, limit - manifest["tokens"])
            parts.append(ids[skip : skip + size - held])
            held, skip = held + len(parts[-1]), skip + len(parts[-1])
            bar.update(len(parts[-1]))
            if held == size:
                end = [unit.file_index, unit.index, skip]
                save_shard(out_dir, manifest, np.concatenate(parts), end=end)
                parts, held = [], 0
                if manifest["tokens"] == limit:
                    return False
        skip = 0
    if parts:
        save_shard(out_dir, manifest, np.concatenate(parts))
    if not manifest["shards"]:
        raise UserError(
            f"the files of {manifest['data']} contain no text; choose others with --source"
        )
    return True


def download_shards(
    cfg: CorpusConfig, manifest: Manifest | None, source: dict, files: list[sources.File]
) -> Manifest:
    """Download llm.c shards from the hub: the validation shard, and enough others for cfg.tokens."""
    from huggingface_hub import snapshot_download  # slow: only for the hub

    limit = cfg.tokens or sys.maxsize
    if cfg.tokenizer != "gpt2":
        raise UserError(
            f"tokenizer={cfg.tokenizer} must be gpt2, because --dataset {cfg.dataset} consists of "
            "shards of GPT-2's tokens; leave out --tokenizer"
        )
    chosen, tokens = [], 0
    for file in sorted(files, key=lambda f: "_val_" not in f.name):
        if re.fullmatch(r"[^/]+_(train|val)_\d{6}\.bin", file.name) and tokens < limit:
            chosen.append(file.name)
            tokens += (file.size - 1024) // 2  # llm.c's header, then two bytes per token
    if not chosen:
        raise UserError(
            f"--dataset {cfg.dataset} has neither texts nor files named "
            "<data>_<train|val>_<number>.bin; choose another"
        )
    manifest = manifest or new_manifest(
        cfg.data, get_tokenizer("gpt2"), source=source, shard_tokens=0, val_tokens=0
    )
    init_output_dir(cfg.out, manifest)
    with sources.hub_errors(cfg.dataset), write_errors(cfg.out):
        snapshot_download(  # skips files that exist already
            cfg.dataset, repo_type="dataset", revision=source["revision"], local_dir=cfg.out,
            allow_patterns=chosen,
        )  # fmt: skip
    listed = [entry["name"] for entry in manifest["shards"]]
    for name in progress([name for name in chosen if name not in listed], "checking"):
        manifest["shards"].append(shard_entry(cfg.out / name, manifest["eot"]))
    return write_manifest(cfg.out, manifest, complete=True)
