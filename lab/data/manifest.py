"""manifest.json, which lists the shards in a folder and describes their source.

build.py, chat.py and python_docs.py write it after each shard, so that an interrupted build can
continue. Training, evaluation and `fineweb.py --verify` check the shards against it.
"""

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from lab.cli import UserError, listed, progress
from lab.data.tokenizers import Tokenizer
from lab.files import atomic_write, check_keys, read_errors, read_json

REBUILD_HINT = "restore it, or delete the folder and build the shards again"
SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.(npy|bin|mask)")


class FileEntry(TypedDict):
    """Size and hash of a shard or mask, which check_file compares."""

    name: str
    bytes: int
    sha256: str


class ShardEntry(FileEntry):
    split: str  # "val" or "train"
    tokens: int
    documents: int  # documents (in chat data, conversations) that begin in it
    mask: NotRequired[FileEntry]  # of chat data
    # Where in the source the shard ends: [file, unit of the file, tokens of the unit]; null at the
    # end of the source. Only build_corpus can continue from there.
    end: NotRequired[list[int] | None]


class Manifest(TypedDict):
    """The contents of manifest.json."""

    format: int  # 2; format 1 did not record where in the source a shard ends
    complete: bool
    data: str  # the first part of the shards' names
    tokenizer: str  # a name for get_tokenizer; tokenizer.json is in the manifest's folder
    vocab_size: int
    eot: int  # id of end-of-text
    context: int | None  # tokens per row of chat data
    source: dict[str, Any]  # description of the texts
    shard_tokens: int
    val_tokens: int
    documents: int
    tokens: int  # of all shards
    shards: list[ShardEntry]
    exhausted: NotRequired[bool]  # whether the source has no more text
    too_long: NotRequired[int]  # conversations that were skipped because they exceed the context
    no_answer: NotRequired[int]  # conversations that were skipped because they have no answer


REQUIRED_TYPES: dict[str, type] = dict(
    vocab_size=int, eot=int, shard_tokens=int, val_tokens=int,
    complete=bool, data=str, tokenizer=str, source=dict, shards=list,
)  # fmt: skip


def read_manifest(folder: str | Path) -> Manifest | None:
    """The manifest in `folder`, or None. Raises UserError if its structure is wrong."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    manifest = read_json(path, REBUILD_HINT, **REQUIRED_TYPES)
    with read_errors(path, "file", REBUILD_HINT):
        if not 0 < manifest["vocab_size"] <= 2**16:
            raise ValueError(f"vocab_size is {manifest['vocab_size']}")
        manifest["tokenizer"] = Path(manifest["tokenizer"]).name  # older manifests have a path
        for entry in manifest["shards"]:
            check_keys(entry, split=str, tokens=int, documents=int)
            for file in (entry, entry["mask"]) if "mask" in entry else (entry,):
                check_keys(file, name=str, bytes=int, sha256=str)
            end = entry.get("end") or [0, 0, 0]
            if len(end) != 3 or not all(type(n) is int and n >= 0 for n in end):
                raise TypeError(f"end is {end}")
    return cast(Manifest, manifest)  # checked above


def load_partial_manifest(out_dir: str | Path) -> Manifest | None:
    """The manifest of a build to continue, or None if no shard has been written yet."""
    manifest = read_manifest(out_dir)
    return manifest if manifest and manifest["shards"] else None


def new_manifest(
    data: str, tokenizer: Tokenizer, *, source: dict[str, Any], shard_tokens: int, val_tokens: int,
    context: int | None = None,
) -> Manifest:  # fmt: skip
    """A manifest without shards."""
    return Manifest(
        format=2, complete=False, data=data, tokenizer=Path(tokenizer.name).name,
        vocab_size=tokenizer.vocab_size, eot=tokenizer.eot, context=context, source=source,
        shard_tokens=shard_tokens, val_tokens=val_tokens, documents=0, tokens=0, shards=[],
    )  # fmt: skip


def write_manifest(out_dir: str | Path, manifest: Manifest, complete: bool = False) -> Manifest:
    """Update the totals and `complete`, write the manifest to out_dir and return it."""
    manifest["documents"] = sum(entry["documents"] for entry in manifest["shards"])
    manifest["tokens"] = sum(entry["tokens"] for entry in manifest["shards"])
    manifest["complete"] = complete
    atomic_write(Path(out_dir) / "manifest.json", json.dumps(manifest, indent=1).encode())
    return manifest


def init_output_dir(out_dir: str | Path, manifest: Manifest) -> None:
    """Write the manifest before the first shard: it shows that the build may overwrite the shards here.

    Raises UserError if out_dir has shards without a manifest, or shards of other data.
    """
    found = sorted(p.name for p in Path(out_dir).glob("*") if SHARD_NAME.fullmatch(p.name))
    if found and read_manifest(out_dir) is None:
        raise UserError(
            f"{out_dir} has {found[0]} but no manifest.json, so another program may have written "
            "it; nothing was changed; choose another --out, or move all shards away"
        )
    # downloaded shards keep their names
    known = {file["name"] for file in manifest_files(manifest, "val", "train")}
    others = [n for n in found if not n.startswith(f"{manifest['data']}_") and n not in known]
    if others:
        raise UserError(
            f"{out_dir} has {others[0]}, which is not a shard of {manifest['data']}; nothing was "
            "changed: choose another --out, or move it away"
        )
    write_manifest(out_dir, manifest)


def check_manifest_matches(out_dir: str | Path, manifest: Mapping[str, Any], **wanted: Any) -> None:
    """Raise UserError if the manifest in out_dir has other values than `wanted`."""
    for key, value in wanted.items():
        if (old := manifest.get(key)) != value:
            name = "source" if key == "data" else key  # the shards are named after the source
            changed = f"with {name} = {reprlib.repr(old)}, but now it is {reprlib.repr(value)}"
            if isinstance(value, list):  # of files, each with its name and size
                old = old or []
                names = {file[0] for file in [*old, *value] if file not in old or file not in value}
                changed = f"from other files; new, changed or gone: {listed(sorted(names), 10)}"
            state = "was built" if manifest.get("complete") else "has an unfinished build"
            raise UserError(
                f"{out_dir} {state} {changed}; choose another --out, or delete {out_dir}"
            )


# ------------------------------------------------------------------------------- the files it lists


def manifest_files(manifest: Manifest, *splits: str) -> list[FileEntry]:
    """Entries of the shards of these splits, and of their masks."""
    files: list[FileEntry] = []
    for entry in manifest["shards"]:
        if entry["split"] in splits:
            files += [entry, entry["mask"]] if "mask" in entry else [entry]
    return files


def file_entry(path: Path) -> FileEntry:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: str | Path) -> str:
    with read_errors(path, "file", REBUILD_HINT), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, entry: FileEntry, content: bool = False) -> None:
    """Raise UserError if the size of a file differs from its entry in the manifest.

    content: compare the SHA-256 as well, which reads the whole file.
    """
    with read_errors(path, "shard", REBUILD_HINT):
        same = path.stat().st_size == entry["bytes"]
    if not same or (content and sha256_of(path) != entry["sha256"]):
        raise UserError(f"shard {path} has changed since manifest.json was written; {REBUILD_HINT}")


def verify_shards(out_dir: str | Path) -> list[str]:
    """Read all shards in out_dir and return a sentence for each problem."""
    manifest, problems = read_manifest(out_dir), []
    if manifest is None:
        raise UserError(f"{out_dir} has no manifest.json to compare with; choose another --out")
    if not manifest["complete"]:
        problems.append(f"{out_dir} is not complete; run the command that built it again")
    files = manifest_files(manifest, "val", "train")
    names = {file["name"] for file in files}
    for path in sorted(Path(out_dir).glob("*_*_*")):
        if path.suffix in (".npy", ".bin") and path.name not in names:
            problems.append(
                f"{path} is not in manifest.json, but training would read it; move it away"
            )
    for file in progress(files, "verifying"):
        try:
            check_file(Path(out_dir, file["name"]), file, content=True)
        except UserError as error:
            problems.append(str(error))
    return problems
