"""A source of text, or a data set of ready-made shards, becomes a folder of shards.

The work goes shard by shard. The manifest says of each where in the source it ends, so whatever
stops the work costs one shard at most, and the result is the same bytes.
"""

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path

from lab.cli import UserError
from lab.data import sources
from lab.data.engines import ENGINES
from lab.data.shards import check_file
from lab.data.sources import File, hub_files, local_files, open_parquet, units_of
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import (
    begin,
    begun,
    check_same,
    new_manifest,
    save_shard,
    shard_entry,
    write_manifest,
)
from lab.files import writing

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
BYTES_PER_TOKEN = {"gpt2": 4.4, "bytes": 1.0}  # of English; for guesses before the start
UNPACKED = 3.5  # how much larger text is than its .gz or .zst, roughly
SPLIT_NAME = re.compile(r"(.+)_(train|val)_\d+\.bin")


def find_source(cfg) -> tuple[dict, list[File]]:
    """What the manifest says about the source, and its files. What was begun keeps its revision."""
    if cfg.source != "hub":
        files = local_files(cfg.source)
        about = [[f.name, f.size] for f in files]
        return {"kind": "local", "text_column": cfg.text_column, "files": about}, files
    name = cfg.name or ("sample-10BT" if cfg.dataset == FINEWEB_EDU else "")
    before = (begun(cfg.out) or {"source": {}})["source"]
    revision = before["revision"] if before.get("dataset") == cfg.dataset else cfg.revision
    revision, files = hub_files(cfg.dataset, name, cfg.split, revision)
    source = {"kind": "hub", "text_column": cfg.text_column, "dataset": cfg.dataset, "name": name}
    return source | {"split": cfg.split, "revision": revision, "files": len(files)}, files


def guess_tokens(files: list[File], tokenizer: str, column: str) -> int:
    """How many tokens the files hold, roughly: for the bar, the disk and the validation shard."""
    size = sum(f.size * (UNPACKED if f.packing else 1) for f in files)
    if files[0].kind == "parquet" and files[0].size:
        parquet = open_parquet(files[0], column)
        groups = range(parquet.num_row_groups)
        text = sum(sources.column_bytes(parquet, column, group) for group in groups)
        size *= text / files[0].size
    return max(int(size / BYTES_PER_TOKEN[tokenizer]), 1)


def check_disk(out_dir: Path, needed: float, say):
    """Say how much is needed and there is; UserError where it is too little."""
    there = next(p for p in [out_dir.absolute(), *out_dir.absolute().parents] if p.exists())
    free = shutil.disk_usage(there).free
    needs = f"{out_dir} needs about {needed / 1e9:,.2f} GB more, {free / 1e9:,.1f} GB are free"
    say(f"disk: {needs}")
    if needed > free:
        raise UserError(f"{needs}: choose an --out on a larger disk, or fewer --tokens")


def build_corpus(cfg, source: dict, files: list[File], data: str, say) -> dict:
    """The source as shards in cfg.out, from where its manifest is; returns the complete manifest.

    cfg: fineweb.py's, its counts as numbers. say: takes the lines for people.
    """
    out_dir, manifest = Path(cfg.out), begun(cfg.out)
    if manifest:
        check_same(out_dir, manifest, data=data, tokenizer=cfg.tokenizer, source=source)
    if files[0].kind == "bin":
        return download_shards(cfg, manifest, source, files, data, say)
    guess = guess_tokens(files, cfg.tokenizer, cfg.text_column)
    expected = min(cfg.tokens or guess, guess)
    if manifest:
        go_on(cfg, out_dir, manifest)
        if manifest["complete"]:
            say(f"{out_dir} is already there: {manifest['tokens']:,} tokens")
            return manifest
    else:
        # Validation is the first shard, or a tenth of a corpus too small to give it a whole one
        val_tokens = cfg.val_tokens or min(cfg.shard_tokens, max(expected // 10, 1))
        sizes = dict(shard_tokens=cfg.shard_tokens, val_tokens=val_tokens)
        manifest = new_manifest(data, get_tokenizer(cfg.tokenizer), source=source, **sizes)
    there = sum(entry["tokens"] for entry in manifest["shards"])
    check_disk(out_dir, 2 * max(expected - there, 0), say)
    if there:
        say(f"going on after {there:,} tokens")
    begin(out_dir, manifest)
    file, unit, skip = manifest["shards"][-1]["end"] if there else (0, 0, 0)
    firsts = ((i, unit if i == file else 0) for i in range(file, len(files)))
    units = (u for i, first in firsts for u in units_of(files[i], i, cfg.text_column, first))
    workers = os.cpu_count() if cfg.workers < 0 else cfg.workers
    engine = ENGINES[cfg.engine](units, cfg.tokenizer, cfg.text_column, workers)
    with contextlib.closing(engine) as results, progress_bar(expected, there) as bar:
        fill_shards(out_dir, manifest, results, skip, cfg.tokens or sys.maxsize, bar)
    for key in ("text_bytes", "empty"):
        manifest[key] = sum(entry[key] for entry in manifest["shards"])
    manifest["complete"] = True
    write_manifest(out_dir, manifest)
    return manifest


def go_on(cfg, out_dir: Path, manifest: dict):
    """Make a manifest ready to go on from, or leave it complete where there is nothing to do.

    A last shard that is shorter than it was to be is left out: it is made again, longer.
    """
    check_same(out_dir, manifest, shard_tokens=cfg.shard_tokens)
    check_same(out_dir, manifest, **({"val_tokens": cfg.val_tokens} if cfg.val_tokens else {}))
    shards = manifest["shards"]
    exhausted = manifest.get("exhausted") or manifest.get("resume", {}).get("exhausted")
    manifest["complete"] &= bool(exhausted or 0 < cfg.tokens <= manifest["tokens"])
    if not manifest["complete"] and manifest["format"] == 1:
        raise UserError(
            f"{out_dir} was begun by an older fineweb.py: what is there can be trained on, but not "
            "gone on with; choose another --out"
        )
    size = manifest["shard_tokens" if shards[1:] else "val_tokens"]
    if not manifest["complete"] and shards[-1]["tokens"] < size:
        shards.pop()
    for entry in shards:
        check_file(out_dir / entry["name"], entry)
    there = sum(entry["tokens"] for entry in shards)
    if not manifest["complete"] and 0 < cfg.tokens < there:
        raise UserError(
            f"--tokens {cfg.tokens:,} is less than the {there:,} that {out_dir} holds already: ask "
            "for at least so many, or choose another --out"
        )


def fill_shards(out_dir: Path, manifest: dict, results, skip: int, limit: int, bar):
    """Cut the tokens of the units in `results` into shards, up to `limit` tokens in all.

    skip: so many tokens of the first unit are in shards already.
    """
    done = sum(entry["tokens"] for entry in manifest["shards"])
    parts, held, text_bytes, empty = [], 0, 0.0, 0

    def save(end):
        nonlocal parts, held, text_bytes, empty, done
        about = {"end": end, "text_bytes": round(text_bytes), "empty": empty}
        save_shard(out_dir, manifest, parts, **about)
        parts, done, held, text_bytes, empty = [], done + held, 0, 0.0, 0

    for unit, new in results:
        while skip < len(new.ids) and done + held < limit:
            size = manifest["shard_tokens" if manifest["shards"] else "val_tokens"]
            part = new.ids[skip : skip + min(size - held, limit - done - held)]
            parts.append(part)
            held, skip = held + len(part), skip + len(part)
            text_bytes += new.text_bytes * len(part) / len(new.ids)
            bar.update(len(part))
            if held == size or done + held == limit:
                save([unit.file_index, unit.index, skip])
        if done + held >= limit:
            return
        empty, skip = empty + new.empty, 0
    if not done + held:
        raise UserError(f"the source holds no text: {empty:,} documents, all of them empty")
    if held:
        save(None)
    else:
        manifest["shards"][-1]["empty"] += empty
    manifest["exhausted"] = True


def progress_bar(total: int, initial: int):
    from tqdm import tqdm

    return tqdm(total=total, initial=initial, unit="tok", unit_scale=True, smoothing=0.1)


def download_shards(cfg, manifest, source: dict, files: list[File], data: str, say) -> dict:
    """Ready-made llm.c shards from the hub: validation and as many others as --tokens asks for."""
    from huggingface_hub import hf_hub_download

    out_dir, limit = Path(cfg.out), cfg.tokens or sys.maxsize
    if cfg.tokenizer != "gpt2":
        raise UserError(f"--dataset {cfg.dataset} holds GPT-2 tokens: leave out --tokenizer")
    chosen, tokens = [], 0
    for file in sorted(files, key=lambda f: ("_val_" not in f.name, f.name)):
        if SPLIT_NAME.fullmatch(Path(file.name).name) and tokens < limit:
            chosen.append(file)
            tokens += (file.size - 1024) // 2
    if not chosen:
        raise UserError(f"--dataset {cfg.dataset} has no <data>_<train|val>_<number>.bin")
    if manifest is None:
        settings = dict(source=source, shard_tokens=0, val_tokens=0)
        manifest = new_manifest(data, get_tokenizer("gpt2"), **settings)
    for entry in manifest["shards"]:
        check_file(out_dir / entry["name"], entry)
    here = {entry["name"] for entry in manifest["shards"]}
    missing = [f for f in chosen if Path(f.name).name not in here]
    check_disk(out_dir, sum(f.size for f in missing), say)
    begin(out_dir, manifest, SPLIT_NAME.fullmatch(Path(chosen[0].name).name)[1])
    parts = out_dir / ".download"  # the library goes on with what is half here
    where = dict(repo_type="dataset", revision=source["revision"])
    for file in missing:
        path = out_dir / Path(file.name).name
        with sources.asking_hub(cfg.dataset, source["revision"]), writing(path):
            part = hf_hub_download(cfg.dataset, file.name, local_dir=parts, **where)
            os.replace(part, path)
        manifest["shards"].append(shard_entry(path, manifest["eot"]))
        manifest["shards"].sort(key=lambda e: ("_val_" not in e["name"], e["name"]))
        write_manifest(out_dir, manifest)
    shutil.rmtree(parts, ignore_errors=True)
    manifest["complete"] = True
    write_manifest(out_dir, manifest)
    return manifest
