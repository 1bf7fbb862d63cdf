"""A source of text, or a data set of ready-made shards, becomes a folder of shards.

The work goes shard by shard. The manifest says of each where in the source it ends, so whatever
stops the work costs one shard at most, and the result is the same bytes.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lab.cli import UserError
from lab.data import writer
from lab.data.engines import ENGINES
from lab.data.shards import check_file
from lab.data.sources import File, asking_hub, documents_of, hub_files, local_files, units_of
from lab.data.tokenizers import get_tokenizer
from lab.files import writing

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
BYTES_PER_TOKEN = {"gpt2": 4.4, "bytes": 1.0}  # of English; for guesses before the start
UNPACKED = 3.5  # how much larger text is than its .gz or .zst, roughly


def find_source(cfg) -> tuple[dict, list[File]]:
    """What the manifest says about the source, and its files. What was begun keeps its revision."""
    if cfg.source != "hub":
        files = local_files(cfg.source)
        about = [[f.name, f.size] for f in files]
        return {"kind": "local", "text_column": cfg.text_column, "files": about}, files
    name = cfg.name or ("sample-10BT" if cfg.dataset == FINEWEB_EDU else "")
    before = (writer.begun(cfg.out) or {"source": {}})["source"]
    revision = before["revision"] if before.get("dataset") == cfg.dataset else cfg.revision
    revision, files = hub_files(cfg.dataset, name, cfg.split, revision)
    source = {"kind": "hub", "text_column": cfg.text_column, "dataset": cfg.dataset, "name": name}
    return source | {"split": cfg.split, "revision": revision, "files": len(files)}, files


def guess_tokens(files: list[File], tokenizer: str, column: str) -> int:
    """How many tokens the files hold, roughly: for the bar and the validation shard."""
    size = sum(f.size * (UNPACKED if f.packing else 1) for f in files)
    if files[0].kind == "parquet" and files[0].size:
        size *= sum(unit.size for unit in units_of(files[0], 0, column)) / files[0].size
    return max(int(size / BYTES_PER_TOKEN.get(tokenizer, 4.4)), 1)


def texts_of(files: list[File], column: str):
    """Every text of the files, one after the other."""
    for i, file in enumerate(files):
        for unit in units_of(file, i, column):
            for texts in documents_of(unit, column):
                yield from texts.to_pylist()


def build_corpus(cfg, source: dict, files: list[File], data: str) -> dict:
    """The source as shards in cfg.out, from where its manifest is; returns the complete manifest.

    cfg: fineweb.py's, its counts as numbers.
    """
    out_dir, manifest = Path(cfg.out), writer.begun(cfg.out)
    if manifest:
        about = dict(data=data, tokenizer=cfg.tokenizer, **source)
        writer.check_same(out_dir, manifest | manifest["source"], **about)
        for entry in manifest["shards"]:
            check_file(out_dir / entry["name"], entry)
    if files[0].kind == "bin":
        return download_shards(cfg, manifest, source, files, data)
    guess = guess_tokens(files, cfg.tokenizer, cfg.text_column)
    expected = min(cfg.tokens or guess, guess)
    if manifest:
        go_on(cfg, out_dir, manifest)
        if manifest["complete"]:
            print(f"{out_dir} is already there: {manifest['tokens']:,} tokens")
            return manifest
    else:
        # Validation is the first shard, or a tenth of a corpus too small to give it a whole one
        val_tokens = cfg.val_tokens or min(cfg.shard_tokens, max(expected // 10, 1))
        sizes = dict(shard_tokens=cfg.shard_tokens, val_tokens=val_tokens)
        manifest = writer.new_manifest(data, get_tokenizer(cfg.tokenizer), source=source, **sizes)
    writer.begin(out_dir, manifest)
    file, unit, skip = 0, 0, 0
    if manifest["shards"]:
        print(f"going on after {manifest['tokens']:,} tokens")
        file, unit, skip = manifest["shards"][-1]["end"]
    firsts = ((i, unit if i == file else 0) for i in range(file, len(files)))
    units = (u for i, first in firsts for u in units_of(files[i], i, cfg.text_column, first))
    workers = os.cpu_count() if cfg.workers < 0 else cfg.workers
    engine = ENGINES[cfg.engine](units, cfg.tokenizer, cfg.text_column, workers)
    shown = dict(unit="tok", unit_scale=True, smoothing=0.1)
    with (
        contextlib.closing(engine) as results,
        tqdm(total=expected, initial=manifest["tokens"], **shown) as bar,
    ):
        fill_shards(out_dir, manifest, results, skip, cfg.tokens or sys.maxsize, bar)
    manifest["complete"] = True
    writer.write_manifest(out_dir, manifest)
    return manifest


def go_on(cfg, out_dir: Path, manifest: dict):
    """Make a manifest ready to go on from, or leave it complete where there is nothing to do.

    A last shard that is shorter than it was to be is left out: it is made again, longer.
    """
    val_tokens = cfg.val_tokens or manifest["val_tokens"]
    writer.check_same(out_dir, manifest, shard_tokens=cfg.shard_tokens, val_tokens=val_tokens)
    exhausted = manifest.get("exhausted") or manifest.get("resume", {}).get("exhausted")
    manifest["complete"] &= bool(exhausted or 0 < cfg.tokens <= manifest["tokens"])
    if manifest["complete"]:
        return
    writer.check_same(out_dir, manifest, format=2)  # 1 did not note where in the source shards end
    shards = manifest["shards"]
    if shards[-1]["tokens"] < manifest["shard_tokens" if shards[1:] else "val_tokens"]:
        shards.pop()


def fill_shards(out_dir: Path, manifest: dict, results, skip: int, limit: int, bar):
    """Cut the tokens of the units in `results` into shards, up to `limit` tokens in all.

    skip: so many tokens of the first unit are in shards already.
    """
    done, parts, held = manifest["tokens"], [], 0
    for unit, ids in results:
        while skip < len(ids) and done < limit:
            size = manifest["shard_tokens" if manifest["shards"] else "val_tokens"]
            part = ids[skip : skip + min(size - held, limit - done)]
            parts.append(part)
            done, held, skip = done + len(part), held + len(part), skip + len(part)
            bar.update(len(part))
            if held == size or done == limit:
                end = [unit.file_index, unit.index, skip]
                writer.save_shard(out_dir, manifest, np.concatenate(parts), end=end)
                parts, held = [], 0
        if done >= limit:
            return
        skip = 0
    if not done:
        raise UserError("the source holds no text")
    if parts:
        writer.save_shard(out_dir, manifest, np.concatenate(parts), end=None)
    manifest["exhausted"] = True


def download_shards(cfg, manifest, source: dict, files: list[File], data: str) -> dict:
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
    writer.begin(out_dir, manifest)
    with asking_hub(cfg.dataset), writing(out_dir):
        where = dict(repo_type="dataset", revision=source["revision"], local_dir=out_dir)
        snapshot_download(cfg.dataset, allow_patterns=chosen, **where)  # what is there, it keeps
    here = [entry["name"] for entry in manifest["shards"]]
    new = [name for name in chosen if name not in here]
    manifest["shards"] += [writer.shard_entry(out_dir / name, manifest["eot"]) for name in new]
    manifest["complete"] = True
    writer.write_manifest(out_dir, manifest)
    return manifest
