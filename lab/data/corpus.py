"""A source of text, or a data set of ready-made shards, becomes a folder of shards.

The work goes shard by shard. The manifest says of each where in the source it ends, so whatever
stops the work costs one shard at most, and the result is the same bytes.
"""

import contextlib
import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.cli import UserError, progress
from lab.data import sources, writer
from lab.data.shards import check_file
from lab.data.sources import text_of
from lab.data.tokenizers import get_tokenizer
from lab.data.workers import ENGINES
from lab.files import writing

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
UNPACKED = 3.5  # how much larger text is than its .gz or .zst, roughly


def find_source(cfg) -> tuple[dict, list[sources.File]]:
    """What the manifest says about the source, and its files. What was begun keeps its revision."""
    if cfg.source != "hub":
        files = sources.local_files(cfg.source)
        about = [[f.name, f.size] for f in files]
        return {"kind": "local", "text_column": cfg.text_column, "files": about}, files
    name = cfg.name or ("sample-10BT" if cfg.dataset == FINEWEB_EDU else "")
    before = (writer.begun(cfg.out) or {"source": {}})["source"]
    revision = before["revision"] if before.get("dataset") == cfg.dataset else cfg.revision
    revision, files = sources.hub_files(cfg.dataset, name, cfg.split, revision)
    source = {"kind": "hub", "text_column": cfg.text_column, "dataset": cfg.dataset, "name": name}
    return source | {"split": cfg.split, "revision": revision, "files": len(files)}, files


def guess_tokens(files: list[sources.File], tokenizer: str, column: str) -> int:
    """How many tokens the files hold, roughly: for the bar and the validation shard."""
    size, first = sum(f.size * (UNPACKED if f.packing else 1) for f in files), files[0]
    if first.kind == "parquet" and first.size:
        parquet = sources.open_parquet(first, column)
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        chunks = (group.column(i) for group in groups for i in range(group.num_columns))
        texts = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
        size *= texts / first.size
    elif first.kind == "jsonl":  # other keys are no text
        for unit in itertools.islice(sources.all_units(files, column), 1):
            found = (text_of(r, column, where) for where, r in sources.records_of(unit))
            size *= sum(len(text.encode("utf-8", "replace")) for text in found) / len(unit.block)
    return max(int(size / (1.0 if tokenizer == "bytes" else 4.4)), 1)  # bytes a token, in English


def texts_of(files: list[sources.File], column: str):
    """Every text of the files, one after the other."""
    for unit in sources.all_units(files, column):
        for texts in sources.documents_of(unit, column):
            yield from texts.to_pylist()


def build_corpus(cfg, source: dict, files: list[sources.File], data: str) -> dict:
    """The source as shards in cfg.out, from where its manifest is; returns the complete manifest.
    cfg: fineweb.py's, its counts as numbers."""
    out_dir, limit, manifest = Path(cfg.out), cfg.tokens or sys.maxsize, writer.begun(cfg.out)
    if manifest:
        # format 1 did not note where in the source a shard ends
        about = dict(format=2, data=data, tokenizer=Path(cfg.tokenizer).name, **source)
        writer.check_same(out_dir, manifest | manifest["source"], **about)
        for entry in manifest["shards"]:
            check_file(out_dir / entry["name"], entry)
    if files[0].kind == "bin":
        return download_shards(cfg, manifest, source, files, data)
    expected = min(limit, guess_tokens(files, cfg.tokenizer, cfg.text_column))
    if not manifest:
        # Validation is the first shard, or a tenth of a corpus too small to give it a whole one
        val_tokens = cfg.val_tokens or min(cfg.shard_tokens, max(expected // 10, 1))
        if val_tokens >= limit:
            raise UserError(
                f"--val_tokens {val_tokens} leaves none of {limit} --tokens to train on; pass fewer"
            )
        more = dict(shard_tokens=cfg.shard_tokens, val_tokens=val_tokens, exhausted=False)
        manifest = writer.new_manifest(data, get_tokenizer(cfg.tokenizer), source=source, **more)
    val_tokens = cfg.val_tokens or manifest["val_tokens"]
    writer.check_same(out_dir, manifest, shard_tokens=cfg.shard_tokens, val_tokens=val_tokens)
    if not manifest.get("exhausted") and manifest["tokens"] < limit:
        go_on(cfg, manifest, files, limit, expected)
    if len(manifest["shards"]) < 2:
        raise UserError(
            f"all {manifest['tokens']:,} tokens of the source are validation, and none is left to "
            f"train on: delete {out_dir} and pass a smaller --val_tokens"
        )
    return writer.write_manifest(out_dir, manifest, complete=True)


def go_on(cfg, manifest: dict, files: list[sources.File], limit: int, expected: int):
    """Write shards from where the manifest is, up to `limit` tokens in all."""
    manifest["complete"] = False
    out_dir, shards = Path(cfg.out), manifest["shards"]
    whole = manifest["shard_tokens" if len(shards) > 1 else "val_tokens"]
    if shards and shards[-1]["tokens"] < whole:
        shards.pop()  # made again, longer
    writer.begin(out_dir, manifest)
    file, unit, skip = shards[-1]["end"] if shards else (0, 0, 0)
    if shards:
        print(f"going on after {manifest['tokens']:,} tokens")
    units = sources.all_units(files, cfg.text_column, file, unit)
    workers = os.cpu_count() if cfg.workers < 0 else cfg.workers
    engine = ENGINES[cfg.engine](units, cfg.tokenizer, cfg.text_column, workers)
    shown = dict(total=expected, unit="tok", unit_scale=True, smoothing=0.1, disable=None)
    with contextlib.closing(engine) as results, tqdm(initial=manifest["tokens"], **shown) as bar:
        manifest["exhausted"] = fill_shards(out_dir, manifest, results, skip, limit, bar)


def fill_shards(out_dir: Path, manifest: dict, results, skip: int, limit: int, bar) -> bool:
    """Cut the tokens of the units in `results` into shards, up to `limit` tokens in all.

    skip: so many tokens of the first unit are in shards already. Returns whether the source ended.
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
                writer.save_shard(out_dir, manifest, np.concatenate(parts), end=end)
                parts, held = [], 0
                if manifest["tokens"] == limit:
                    return False
        skip = 0
    if parts:
        writer.save_shard(out_dir, manifest, np.concatenate(parts), end=None)
    if not manifest["shards"]:
        raise UserError(
            f"there is no text in the source of {manifest['data']}; name another with --source"
        )
    return True


def download_shards(cfg, manifest, source: dict, files: list[sources.File], data: str) -> dict:
    """Ready-made llm.c shards from the hub: validation and as many others as --tokens asks for."""
    from huggingface_hub import snapshot_download

    out_dir, limit = Path(cfg.out), cfg.tokens or sys.maxsize
    if cfg.tokenizer != "gpt2":
        raise UserError(f"--dataset {cfg.dataset} holds GPT-2 tokens: leave out --tokenizer")
    chosen, tokens = [], 0
    for file in sorted(files, key=lambda f: "_val_" not in f.name):
        if re.fullmatch(r"[^/]+_(train|val)_\d{6}\.bin", file.name) and tokens < limit:
            chosen.append(file.name)
            tokens += (file.size - 1024) // 2  # llm.c's header, then two bytes a token
    if not chosen:
        raise UserError(f"--dataset {cfg.dataset} has no <data>_<train|val>_<number>.bin")
    sizes = dict(shard_tokens=0, val_tokens=0)
    manifest = manifest or writer.new_manifest(data, get_tokenizer("gpt2"), source=source, **sizes)
    manifest["complete"] = False
    writer.begin(out_dir, manifest)
    with sources.asking_hub(cfg.dataset), writing(out_dir):
        where = dict(repo_type="dataset", revision=source["revision"], local_dir=out_dir)
        snapshot_download(cfg.dataset, allow_patterns=chosen, **where)  # what is there, it keeps
    here = [entry["name"] for entry in manifest["shards"]]
    for name in progress([name for name in chosen if name not in here], "checking"):
        manifest["shards"].append(writer.shard_entry(out_dir / name, manifest["eot"]))
    return writer.write_manifest(out_dir, manifest, complete=True)
