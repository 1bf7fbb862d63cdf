"""Writing shards of tokens: whole or not at all, with a manifest that says what they are.

manifest.json: format, complete, data, tokenizer, vocab_size, eot, source, shard_tokens, val_tokens,
context (tokens in a row of chat data, else null), the totals documents, tokens, text_bytes and
empty, and shards: name, split, tokens, documents, bytes, sha256, of a corpus also end (where in the
source the next one begins: file, unit, tokens of the unit), of chat data also mask.
"""

import io
import json
import re
from pathlib import Path

import numpy as np

from lab.cli import UserError
from lab.data.shards import check_file, open_shard, progress, read_manifest, sha256_of
from lab.files import write_whole


def new_manifest(data, tokenizer, **more) -> dict:
    """Of no shards yet. more: source, shard_tokens, val_tokens and context."""
    manifest = dict(format=2, complete=False, data=data, tokenizer=tokenizer.name)
    manifest |= dict(vocab_size=tokenizer.vocab_size, eot=tokenizer.eot, context=None) | more
    return manifest | dict(documents=0, tokens=0, text_bytes=0, empty=0, shards=[])


def write_manifest(out_dir, manifest):
    for key in ("documents", "tokens"):
        manifest[key] = sum(entry[key] for entry in manifest["shards"])
    write_whole(Path(out_dir) / "manifest.json", json.dumps(manifest, indent=1).encode())


def save_shard(out_dir, manifest, parts, mask=None, **more):
    """Write the next shard, made of arrays of token ids, and then the manifest that lists it.

    The first one is the validation split. mask: uint8, as long. `more` goes into the entry.
    """
    number = len(manifest["shards"])
    split = "train" if number else "val"
    path = Path(out_dir, f"{manifest['data']}_{split}_{number:06d}.npy")
    write_npy(path, "<u2", parts)
    entry = shard_entry(path, manifest["eot"]) | more
    if mask is not None:
        mask_path = path.with_suffix(".mask")
        write_npy(mask_path, "|u1", [mask])
        entry["mask"] = file_entry(mask_path)
    manifest["shards"].append(entry)
    write_manifest(out_dir, manifest)


def write_npy(path, descr, parts):
    """The parts as one row in a .npy file, without a copy of all of them."""
    header, length = io.BytesIO(), sum(len(part) for part in parts)
    about = {"descr": descr, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(header, about)
    write_whole(path, header.getvalue(), *(part.astype(descr, copy=False).data for part in parts))


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


def shard_files(out_dir, prefix):
    """The shards and masks in a folder whose names begin with `prefix`."""
    name = re.compile(rf"{re.escape(prefix)}_(train|val)_\d{{6}}\.(npy|bin|mask)")
    return sorted(path for path in Path(out_dir).glob("*") if name.fullmatch(path.name))


def begin(out_dir, manifest, prefix=""):
    """Take a folder into use: from here on what is named like our shards in it is ours.

    Raises UserError, and changes nothing, where shards named `prefix` (by default `data`) lie in
    it and no manifest of this data: who made them is not known, and they would be overwritten.
    """
    found, before = shard_files(out_dir, prefix or manifest["data"]), read_manifest(out_dir)
    if found and (before is None or before.get("data") != manifest["data"]):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(
            f"{out_dir} holds {found[0].name}{more} but no manifest.json of theirs, so it is not "
            "known who made them; nothing was changed: choose another --out, or move them away"
        )
    write_manifest(out_dir, manifest)


def verify(out_dir) -> list[str]:
    """Everything that is wrong with the shards in out_dir, after reading all of them."""
    out_dir = Path(out_dir)
    manifest = read_manifest(out_dir)
    if manifest is None:
        return [f"{out_dir}/manifest.json is missing: there is nothing to compare the shards with"]
    problems, known = [], {entry["name"] for entry in manifest["shards"]}
    if not manifest["complete"]:
        problems.append(f"{out_dir} is not finished: run the command that began it again")
    files = [file for e in manifest["shards"] for file in (e, e.get("mask")) if file]
    for file in progress(files, "verifying"):
        try:
            check_file(out_dir / file["name"], file, content=True)
        except UserError as error:
            problems.append(str(error))
    if manifest["complete"]:  # the shard in hand is not listed before it is whole
        others = (p for p in out_dir.iterdir() if p.name not in known)
        problems += [
            f"{path} is not in the manifest, and a trainer reads it: move it away if it is not meant"
            for path in sorted(others)
            if re.fullmatch(r".+_(train|val)_\d{6}\.(npy|bin)", path.name)
        ]
    return problems


def check_same(out_dir, manifest, **wanted):
    """UserError where the manifest in out_dir was made with other settings than those wanted."""
    for key, now in wanted.items():
        before = manifest.get(key)
        if before != now:
            before, now = differences(before, now) if key == "source" else (repr(before), repr(now))
            raise UserError(
                f"{out_dir} was made with {key} = {before}, now it is {now}: choose another --out, "
                f"or delete {out_dir}"
            )


def differences(before, now):
    """What two sources differ in, in a few words: of local ones, the names of some files."""
    if not all(isinstance(source.get("files"), list) for source in (before, now)):
        return repr(before), repr(now)
    old, new = ({name: rest for name, *rest in source["files"]} for source in (before, now))
    both = old.keys() & new.keys()
    changes = {"gone": old.keys() - both, "new": new.keys() - both}
    changes["changed"] = {name for name in both if old[name] != new[name]}
    few = {what: ", ".join(sorted(names)[:3]) for what, names in changes.items() if names}
    more = {what: f" and {len(changes[what]) - 3} more" * (len(changes[what]) > 3) for what in few}
    said = "; ".join(f"{what}: {few[what]}{more[what]}" for what in few)
    return f"{len(old):,} files", f"{len(new):,} ({said or 'in another order'})"
