"""Writing shards of tokens: whole or not at all, with a manifest that says what they are.

manifest.json: format, complete, data, tokenizer, vocab_size, eot, source, shard_tokens, val_tokens,
context (tokens in a row of chat data, else null), exhausted (of a corpus: its source has no more),
of chat data too_long and no_answer (left out), the totals documents and tokens, and shards:
name, split, tokens, documents, bytes, sha256, of a corpus also end (where in the source the next
one begins: file, unit, tokens of the unit), of chat data also mask.
"""

import io
import json
import re
import reprlib
from pathlib import Path

import numpy as np

from lab.cli import UserError, progress
from lab.data.shards import check_file, files_of, open_shard, read_manifest, sha256_of
from lab.files import write_whole


def new_manifest(data, tokenizer, **more) -> dict:
    """Of no shards yet. more: source, shard_tokens, val_tokens and context."""
    name = Path(tokenizer.name).name  # a WordPiece is a file beside the manifest
    manifest = dict(format=2, complete=False, data=data, tokenizer=name)
    manifest |= dict(vocab_size=tokenizer.vocab_size, eot=tokenizer.eot, context=None) | more
    return manifest | dict(documents=0, tokens=0, shards=[])


def write_manifest(out_dir, manifest, **more):
    """Write it, with its totals and `more` put in, and return it."""
    for key in ("documents", "tokens"):
        manifest[key] = sum(entry[key] for entry in manifest["shards"])
    manifest |= more
    write_whole(Path(out_dir) / "manifest.json", json.dumps(manifest, indent=1).encode())
    return manifest


def save_shard(out_dir, manifest, ids, mask=None, **more):
    """Write the next shard, token ids (uint16), and then the manifest that lists it.

    The first one is the validation split. mask: uint8, as long. `more` goes into the entry.
    """
    number = len(manifest["shards"])
    split = "train" if number else "val"
    path = Path(out_dir, f"{manifest['data']}_{split}_{number:06d}.npy")
    write_npy(path, ids)
    entry = shard_entry(path, manifest["eot"]) | more
    if mask is not None:
        write_npy(path.with_suffix(".mask"), mask)
        entry["mask"] = file_entry(path.with_suffix(".mask"))
    manifest["shards"].append(entry)
    write_manifest(out_dir, manifest)


def write_npy(path, array):
    whole = io.BytesIO()  # numpy, writing to a file, would not say that the disk is full
    np.save(whole, array)
    write_whole(path, whole.getbuffer())


def file_entry(path):
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def shard_entry(path, eot):
    """What the manifest says about a whole shard; `documents` are those that begin in it."""
    row, split = open_shard(path), path.name.split("_")[-2]
    documents = int((row.read(0, row.length) == eot).sum())
    return file_entry(path) | dict(split=split, tokens=row.length, documents=documents)


def begun(out_dir):
    """The manifest in out_dir if it binds: an attempt that made no shard binds nobody."""
    manifest = read_manifest(out_dir)
    return manifest if manifest and manifest["shards"] else None


def begin(out_dir, manifest):
    """Take a folder into use: from here on what is named like our shards in it is ours. Raises
    UserError where such files lie in it and no manifest: they would be overwritten."""
    name = re.compile(r".+_(train|val)_\d{6}\.(npy|bin|mask)")
    found = sorted(p.name for p in Path(out_dir).glob("*") if name.fullmatch(p.name))
    if found and read_manifest(out_dir) is None:
        raise UserError(
            f"{out_dir} holds {found[0]} but no manifest.json, so it is not known who made it; "
            "nothing was changed: choose another --out, or move all shards away"
        )
    others = [n for n in found if not n.startswith(f"{manifest['data']}_")]
    if others:
        raise UserError(
            f"{out_dir} holds {others[0]}, which is no shard of {manifest['data']}; nothing was "
            "changed: choose another --out, or move it away"
        )
    write_manifest(out_dir, manifest)


def verify(out_dir) -> list[str]:
    """Everything that is wrong with the shards in out_dir, after reading all of them."""
    manifest, problems = read_manifest(out_dir), []
    if manifest is None:
        raise UserError(f"{out_dir} has no manifest.json to compare with; name another --out")
    if not manifest["complete"]:
        problems.append(f"{out_dir} is not finished: run the command that began it again")
    files = files_of(manifest, "val", "train")
    names = {file["name"] for file in files}
    for path in sorted(Path(out_dir).glob("*_*_*")):
        if path.suffix in (".npy", ".bin") and path.name not in names:
            problems.append(
                f"{path} is not in manifest.json, and training would read it: move it away"
            )
    for file in progress(files, "verifying"):
        try:
            check_file(Path(out_dir, file["name"]), file, content=True)
        except UserError as error:
            problems.append(str(error))
    return problems


def check_same(out_dir, manifest, **wanted):
    """UserError where the manifest in out_dir was made with other settings than those wanted."""
    for key, now in wanted.items():
        if manifest.get(key) != now:
            before, now = reprlib.repr(manifest.get(key)), reprlib.repr(now)
            name = "source" if key == "data" else key  # whose name the shards begin with
            raise UserError(
                f"{out_dir} was made with {name} = {before}, now it is {now}: choose another --out, "
                f"or delete {out_dir}"
            )
