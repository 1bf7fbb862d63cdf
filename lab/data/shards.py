"""Token shards on disk: opening them, checking them, reading them as one endless stream.

A shard is a row of uint16 token ids, as .npy (fineweb.py, build-nanogpt) or .bin (llm.c,
modded-nanogpt), named <data>_<split>_<number>. Beside it may lie a .mask of the same name, one byte
a token: 1 where the token is to be learnt, else 0. manifest.json says what was made.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.cli import UserError, program, progress, quoted
from lab.files import check_keys, read_json, reading

# what manifest.json says
MANIFEST = dict.fromkeys(("vocab_size", "eot", "shard_tokens", "val_tokens"), int)
MANIFEST |= dict(complete=bool, data=str, tokenizer=str, source=dict, shards=list)
AGAIN = "put the right one back, or delete the folder with the shards and make them again"


@dataclass
class Row:
    """A file that holds one row of numbers: `length` of `dtype` from byte `offset` on.

    It is opened for each read: memory maps of thousands of shards would exhaust the file
    descriptors, and in a map of a file that is cut short a read ends the process.
    """

    path: Path
    dtype: str
    offset: int
    length: int

    def read(self, start, count):
        with reading(self.path, "shard", AGAIN):
            offset = self.offset + start * np.dtype(self.dtype).itemsize
            found = np.fromfile(self.path, self.dtype, count, offset=offset)
            if len(found) < count:
                raise EOFError("it was cut short after it was opened")
        return found


def open_shard(path, dtype="<u2"):
    """The Row of a shard (or, u1, a mask): .npy, or llm.c's .bin. Raises UserError if it is
    broken."""
    with reading(path, "shard", AGAIN):
        if path.suffix == ".bin":  # 256 int32: magic, version, tokens, zeros; then the tokens
            header = np.fromfile(path, "<i4", 256)
            if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
                raise ValueError("a .bin of llm.c begins with 20240520, 1")
            row, size = Row(path, "<u2", 1024, int(header[2])), path.stat().st_size
            if size != 1024 + 2 * row.length:
                raise EOFError(f"truncated: {row.length:,} tokens in {size:,} bytes")
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype != dtype or array.ndim != 1:
                wanted = f"wanted is one row of {np.dtype(dtype)}"
                raise TypeError(f"it holds {array.dtype} of shape {array.shape}, {wanted}")
            row = Row(path, dtype, array.offset, len(array))
        if not row.length:
            raise ValueError("it is empty")
    return row


def read_manifest(folder):
    """What manifest.json in `folder` says, or None where there is none."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    manifest = read_json(path, AGAIN, **MANIFEST)
    with reading(path, "file", AGAIN):
        if not 0 < manifest["vocab_size"] <= 2**16:
            raise ValueError(f"vocab_size is {manifest['vocab_size']}")
        manifest["tokenizer"] = Path(manifest["tokenizer"]).name  # older ones have its folder too
        for entry in manifest["shards"]:
            check_keys(entry, split=str, tokens=int, documents=int)
            for file in (entry, entry["mask"]) if "mask" in entry else (entry,):
                check_keys(file, name=str, bytes=int, sha256=str)
            end = entry.get("end") or [0, 0, 0]
            if len(end) != 3 or not all(type(n) is int and n >= 0 for n in end):
                raise TypeError(f"end is {end}")
    return manifest


def files_of(manifest, *splits):
    """The manifest's entries of the shards of these splits, and of their masks."""
    shards = [entry for entry in manifest["shards"] if entry["split"] in splits]
    return [file for entry in shards for file in (entry, entry.get("mask")) if file]


def check_file(path, entry, content=False):
    """UserError where a file has not the size that its entry in the manifest says or, with
    `content`, not its SHA-256, which takes as long as reading it."""
    with reading(path, "shard", AGAIN):
        same = path.stat().st_size == entry["bytes"]
    if not same or (content and sha256_of(path) != entry["sha256"]):
        raise UserError(f"shard {path} has changed since manifest.json was written; {AGAIN}")


def sha256_of(path):
    with reading(path, "file", AGAIN), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenShards:
    """All shards of a split as one endless stream: position p is token p modulo their number."""

    def __init__(self, folder, split, vocab_size):
        """vocab_size: ids are below it."""
        self.folder = folder = Path(folder)
        self.vocab_size = vocab_size
        files = sorted(p for p in folder.glob("*_*_*") if p.suffix in (".npy", ".bin"))
        self.paths = [p for p in files if p.name.split("_")[-2] == split]
        if not self.paths:
            fineweb, own = program("fineweb.py"), quoted(folder) if folder.is_dir() else "FOLDER"
            gone = "" if folder.is_dir() else ", which is no folder"
            raise UserError(
                f"no {split} shards in {folder}{gone}: `{fineweb}` makes some of FineWeb-Edu in "
                f"edu_fineweb10B, `{fineweb} --source {own} --out data/mine` of your own text (without "
                "a GPU add --tokenizer bytes); the preset laptop without --data has a text"
            )
        self.manifest = read_manifest(folder) or {"shards": []}
        for entry in files_of(self.manifest, split):  # by fineweb.py, when they were whole
            check_file(folder / entry["name"], entry)
        self.shards = [open_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [row.length for row in self.shards])
        masks = [path.with_suffix(".mask") for path in self.paths]
        self.masks = None  # of data for fine-tuning: which tokens are to be learnt
        if any(mask.exists() for mask in masks):
            self.masks = [open_shard(mask, "u1") for mask in masks]
            if [mask.length for mask in self.masks] != [row.length for row in self.shards]:
                raise UserError(f"a mask in {folder} is not as long as its shard; {AGAIN}")
        self.left_out = 0  # tokens, see shorten
        # a sample now, before a run is opened; every batch is checked when it is read
        self.check_ids(self.read(0, min(self.shards[0].length, 1_000_000)), 0)

    def __len__(self):
        return int(self.starts[-1])

    def shorten(self, tokens):
        """Be the first `tokens` tokens alone, as before more were added."""
        self.left_out, self.starts = len(self) - tokens, np.minimum(self.starts, tokens)

    def locate(self, position):
        """The number of the shard that holds a position of the stream, and the place in it."""
        position %= len(self)
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return shard, int(position - self.starts[shard])

    def where(self, position):
        """Shard name and place in it of a position of the stream, for messages."""
        shard, place = self.locate(position)
        return f"{self.paths[shard].name}:{place}"

    def check_ids(self, ids, position):
        """Raise UserError where one of these ids, read from a position on, is no token's."""
        if ids.max() >= self.vocab_size:
            raise UserError(
                f"token id {ids.max()} near {self.where(position)} is outside the vocabulary of "
                f"{self.vocab_size}: these shards are of another tokenizer, or broken, which "
                "`fineweb.py --verify --out FOLDER` would show"
            )

    def read(self, position, length, rows=None):
        """`length` tokens from a position on, over shard edges and the end of the data."""
        parts = []
        while length > 0:
            shard, place = self.locate(position)
            count = min(length, int(self.starts[shard + 1] - self.starts[shard]) - place)
            parts.append((rows or self.shards)[shard].read(place, count))
            position, length = position + count, length - count
        return np.concatenate(parts)

    def learnt(self, position, length):
        """Which of so many tokens are to be learnt."""
        mask = self.read(position, length, self.masks)
        if mask.max() > 1:
            raise UserError(
                f"the mask of {self.where(position)} or after it holds the byte {mask.max()}, "
                f"wanted is 1 for a token to be learnt, else 0; {AGAIN}"
            )
        return mask == 1

    def batch(self, positions, seq_len):
        """x and y (len(positions), seq_len), int64: y is x one token later, -1 where masked."""
        rows = np.stack([self.read(p, seq_len + 1) for p in positions]).astype(np.int64)
        self.check_ids(rows, positions[int(rows.max(axis=1).argmax())])
        x, y = rows[:, :-1], rows[:, 1:].copy()
        if self.masks:
            y[~np.stack([self.learnt(p + 1, seq_len) for p in positions])] = -1
        return x, y

    def document_starts(self, seq_len):
        """Positions of sequences that begin at an end-of-text, as many as do not overlap."""
        eot, found = self.manifest.get("eot", self.vocab_size - 1), []
        shards = progress(self.shards, "looking for documents")
        for row, start, end in zip(shards, self.starts, self.starts[1:]):
            found.append(start + np.flatnonzero(row.read(0, int(end - start)) == eot))
        found, starts, i = np.concatenate(found), [], 0
        while i < len(found) and found[i] + seq_len <= len(self):
            starts.append(int(found[i]))
            i = int(np.searchsorted(found, found[i] + seq_len))
        if not starts:
            raise UserError(f"align_documents finds no end-of-text in {self.folder}; leave it out")
        return np.array(starts)
