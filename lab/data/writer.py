"""Writing shards of tokens: whole or not at all, with a manifest that says what they are and how far the work is.

manifest.json: format, tokenizer, vocab_size, eot, source, shard_tokens, documents, text_bytes, tokens, complete, context
(tokens in a row of chat data, else null), shards (name, split, tokens, documents, bytes, sha256; for chat data the same
of the mask), and under resume what is needed to go on.
"""
import hashlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np

from lab.data.shards import open_shard

# ---- shards and their manifest ---------------------------------------------------------------------------------------

HEADER_BYTES = 128  # of a one-dimensional .npy, whatever its length: room for the first 19 digits is kept


def npy_header(length: int, descr: str = "<u2") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": (length,)})
    assert buffer.tell() == HEADER_BYTES
    return buffer.getvalue()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_dir(folder: Path):
    """Makes renames in `folder` last through a power cut; Windows has no such call and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, *chunks: bytes):
    """`path` holds all of the chunks or is left as it was."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    fsync_dir(path.parent)


def write_manifest(out_dir: Path, manifest: dict):
    write_whole(out_dir / "manifest.json", json.dumps(manifest, indent=1).encode())


def read_manifest(out_dir: Path) -> dict | None:
    """The manifest in `out_dir`, or None where there is none. Raises ValueError for one that cannot be used."""
    path = Path(out_dir) / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != 1:
            raise KeyError("format")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest of format 1 ({type(error).__name__}: {error}); "
                         "delete it, or choose another --out") from error
    return manifest


def new_manifest(data: str, tokenizer, source: dict, shard_tokens: int, val_tokens: int, context=None) -> dict:
    return {"format": 1, "complete": False, "data": data, "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot, "source": source, "shard_tokens": shard_tokens,
            "val_tokens": val_tokens, "context": context, "documents": 0, "text_bytes": 0, "tokens": 0, "empty": 0,
            "shards": [], "resume": {"part_tokens": 0, "part_index": 0}}


def shard_entry(path: Path, eot: int) -> dict:
    """What the manifest says about a whole shard; `documents` are those that begin in it."""
    tokens = open_shard(path)
    documents = sum(int(np.count_nonzero(tokens[i:i + 2**24] == eot)) for i in range(0, len(tokens), 2**24))
    return {"name": path.name, "split": path.name.split("_")[-2], "tokens": len(tokens), "documents": documents,
            "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def made_nothing(manifest: dict) -> bool:
    """True after an attempt that failed at once: it binds nobody."""
    return not (manifest["shards"] or manifest["resume"].get("tokens") or manifest["tokens"])


def shard_files(out_dir: Path, data: str) -> list[Path]:
    """The shards of this data set in a folder, their masks, and what was not finished of them."""
    name = re.compile(rf"{re.escape(data)}_(train|val)_\d{{6}}\.(npy|mask|bin)(\.part)?")
    return sorted(p for p in Path(out_dir).glob("*") if name.fullmatch(p.name))


def refuse_unknown(out_dir: Path, data: str, prefix: str = ""):
    """ValueError where shards named `prefix` (by default `data`) lie in a folder that has no manifest of `data`: who made
    them is not known, and a writer would delete them."""
    found, manifest = [p for p in shard_files(out_dir, prefix or data) if p.suffix != ".part"], read_manifest(out_dir)
    if found and data != "builtin" and (manifest is None or manifest["data"] != data):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(f"{out_dir} holds {found[0].name}{more} but no manifest.json of theirs, so it is not known who made "
                         "them; nothing was changed: choose another --out, or move them away")


class ShardWriter:
    """Cuts a stream of tokens into shards and notes in the manifest how far it is.

    A shard grows as <name>.part and gets its name when whole. What was appended after the last `note` is forgotten when
    a writer opens the folder again; the caller then appends it once more. A shard that has its name is never changed, as
    a trainer may have mapped it: one that is to grow is copied. Raises ValueError where shards of this name are others'.
    """

    def __init__(self, out_dir: Path, manifest: dict):
        self.dir, self.manifest = Path(out_dir), manifest
        self.dir.mkdir(parents=True, exist_ok=True)
        refuse_unknown(self.dir, manifest["data"])
        self.index, self.filled = manifest["resume"]["part_index"], manifest["resume"]["part_tokens"]
        del manifest["shards"][self.index:]
        manifest["complete"] = False
        write_manifest(self.dir, manifest)  # before a shard that it lists loses its name
        keep = [self.path(i) for i in range(self.index)]
        if self.path().exists():  # got its name after the last note: a part again
            with open(self.path(), "rb") as whole, open(self.part(), "wb") as part:
                left = HEADER_BYTES + 2 * self.filled
                while left > 0 and (piece := whole.read(min(left, 2**24))):
                    left -= part.write(piece)
                part.flush()
                os.fsync(part.fileno())
            fsync_dir(self.dir)  # before the whole shard, which is the only other copy, goes
        for path in shard_files(self.dir, manifest["data"]):
            if path.suffix in (".npy", ".part") and path not in keep and path != self.part():
                path.unlink()
        self.open()

    def path(self, index=None) -> Path:
        index = self.index if index is None else index
        return self.dir / f"{self.manifest['data']}_{'train' if index else 'val'}_{index:06d}.npy"

    def part(self) -> Path:
        return self.path().with_name(self.path().name + ".part")

    def open(self):
        size = HEADER_BYTES + 2 * self.filled
        if self.filled and (not self.part().exists() or self.part().stat().st_size < size):
            raise ValueError(f"{self.part()} is shorter than the {size} bytes that manifest.json promises: it was "
                             f"changed from outside; delete the folder {self.dir} and start again")
        self.file = open(self.part(), "r+b" if self.filled else "wb")
        self.file.truncate(size)
        self.file.seek(size)

    def holds(self, tokens: int) -> bool:
        """True if so many tokens were appended, all of them whole: nothing was interrupted on the way."""
        return not self.file.closed and sum(entry["tokens"] for entry in self.manifest["shards"]) + self.filled == tokens

    def append(self, tokens: np.ndarray):
        """The next tokens of the stream (uint16)."""
        while len(tokens):
            room = self.manifest["shard_tokens" if self.index else "val_tokens"] - self.filled
            self.file.write(tokens[:room].astype("<u2", copy=False).data)
            self.filled += len(tokens[:room])
            tokens = tokens[room:]
            if self.filled == self.manifest["shard_tokens" if self.index else "val_tokens"]:
                self.finish_shard()
                self.open()

    def finish_shard(self):
        self.file.seek(0)
        self.file.write(npy_header(self.filled))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part(), self.path())
        self.manifest["shards"].append(shard_entry(self.path(), self.manifest["eot"]))
        self.index, self.filled = self.index + 1, 0

    def note(self, **resume):
        """From here on nothing that was appended can be lost. `resume` is what the caller needs to go on."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.manifest["resume"] = {"part_index": self.index, "part_tokens": self.filled, **resume}
        write_manifest(self.dir, self.manifest)

    def complete(self):
        """Finishes the last, shorter shard; the manifest is complete."""
        if self.filled:
            self.finish_shard()
        self.file.close()
        self.part().unlink(missing_ok=True)
        self.manifest["complete"] = True
        write_manifest(self.dir, self.manifest)


def check_shard(path: Path, entry: dict) -> str | None:
    """What is wrong with the shard at `path`, read in full and compared with its entry in the manifest; or None."""
    if not path.exists():
        return f"{path} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{path} has {path.stat().st_size:,} bytes where the manifest says {entry['bytes']:,}"
    if sha256_of(path) != entry["sha256"]:
        return f"{path} was changed: its SHA-256 is not the one in the manifest"
    return None


def verify(out_dir) -> list[str]:
    """Everything that is wrong with the shards in `out_dir`, after reading all of them."""
    out_dir = Path(out_dir)
    manifest = read_manifest(out_dir)
    if manifest is None:
        return [f"{out_dir / 'manifest.json'} is missing: there is nothing to compare the shards with"]
    problems = [] if manifest["complete"] else [f"{out_dir} is not finished: run the command that began it again"]
    for entry in manifest["shards"]:
        problem = check_shard(out_dir / entry["name"], entry)
        if problem is None:
            try:
                tokens = open_shard(out_dir / entry["name"])
                top = max(int(tokens[i:i + 2**24].max()) for i in range(0, len(tokens), 2**24))
                if len(tokens) != entry["tokens"] or top >= manifest["vocab_size"]:
                    problem = f"{out_dir / entry['name']} holds {len(tokens):,} tokens with ids up to {top}"
            except ValueError as error:
                problem = str(error)
        if problem is None and "mask" in entry:
            problem = check_shard(out_dir / entry["mask"]["name"], entry["mask"])
        problems += [f"{problem}; put it back from a copy, or delete {out_dir} and make it again"] if problem else []
    if not manifest["complete"]:  # what was made after its last note is not in it
        return problems
    known = {entry["name"] for entry in manifest["shards"]}
    problems += [f"{path} is not in the manifest, and a trainer reads it: move it away if it is not meant"
                 for path in sorted(out_dir.iterdir())
                 if re.fullmatch(r".+_(train|val)_\d{6}\.(npy|bin)", path.name) and path.name not in known]
    return problems


def different_files(before, now):
    """What two local sources differ in, in a few words: (text of the one, of the other). All of them where that is not in
    their files."""
    if any(not isinstance(source.get("files"), list) for source in (before, now)):
        return repr(before), repr(now)
    old, new = ({name: rest for name, *rest in source["files"]} for source in (before, now))
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    texts = []
    for files, only, what in ((old, sorted(old.keys() - new.keys()), "gone"), (new, sorted(new.keys() - old.keys()), "new")):
        names = ", ".join(only[:3]) + (f" and {len(only) - 3} more" if len(only) > 3 else "")
        count = f"{len(files)} file" + "s" * (len(files) != 1)
        texts.append(count + (f" ({what}: {names})" if only else ""))
    if texts[0] == texts[1] and not changed:
        return repr(before), repr(now)
    names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return texts[0], texts[1] + (f", changed: {names}" if changed else "")


def check_same(out_dir: Path, manifest: dict, **wanted):
    """ValueError where the manifest in `out_dir` was made with other settings than the ones wanted now."""
    for key, value in wanted.items():
        if manifest[key] != value:
            before, now = (different_files(manifest[key], value) if key == "source" else (repr(manifest[key]), repr(value)))
            raise ValueError(f"{out_dir} was made with {key} = {before}, now it is {now}: choose another "
                             f"--out, or delete {out_dir}")
