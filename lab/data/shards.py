"""Token shards on disk: write them, and read all shards of a split as one endless stream.

A shard is a one-dimensional array of uint16 token ids, as .npy (fineweb.py, build-nanogpt) or .bin
(llm.c, modded-nanogpt), named <data>_<split>_<number>. It may have a .mask file of the same name with
one byte per token: 1 if the token contributes to the loss, else 0. fineweb.py writes shards;
train_gpt2.py, speedrun.py, bert.py and lab.eval read them.
"""

import difflib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.cli import UserError, command_for, progress, shell_quote
from lab.data.manifest import (
    REBUILD_HINT,
    Manifest,
    ShardEntry,
    check_file,
    file_entry,
    manifest_files,
    read_manifest,
    write_manifest,
)
from lab.files import atomic_write, read_errors


@dataclass
class ShardFile:
    """An array in a file: `length` numbers of `dtype`, starting at byte `offset`.

    The file is opened for each read, because memory maps of thousands of shards would exhaust the file
    descriptors, and reading from the map of a truncated file kills the process.
    """

    path: Path
    dtype: str
    offset: int
    length: int

    def read(self, start: int, count: int) -> np.ndarray:
        with read_errors(self.path, "shard", REBUILD_HINT):
            offset = self.offset + start * np.dtype(self.dtype).itemsize
            found = np.fromfile(self.path, self.dtype, count, offset=offset)
            if len(found) < count:
                raise EOFError("it was cut short after it was opened")
        return found


def open_shard(path: Path, dtype: str = "<u2") -> ShardFile:
    """Check the header of a shard (.npy or .bin) or of a mask (dtype "u1"), and return its array.

    Raises UserError if the file is damaged.
    """
    with read_errors(path, "shard", REBUILD_HINT):
        if path.suffix == ".bin":  # 256 int32: magic, version, tokens, zeros; then the tokens
            header = np.fromfile(path, "<i4", 256)
            if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
                raise ValueError("llm.c's .bin files begin with 20240520, 1")
            file, size = ShardFile(path, "<u2", 1024, int(header[2])), path.stat().st_size
            if size != 1024 + 2 * file.length:
                raise EOFError(f"truncated: {file.length:,} tokens in {size:,} bytes")
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype != dtype or array.ndim != 1:
                raise TypeError(
                    f"it contains {array.dtype} of shape {array.shape}, "
                    f"but must be one-dimensional {np.dtype(dtype)}"
                )
            file = ShardFile(path, dtype, array.offset, len(array))
        if not file.length:
            raise ValueError("it is empty")
    return file


class TokenShards:
    """All shards of a split as one endless stream: position p is token p modulo their length."""

    def __init__(self, folder: str | Path, split: str, vocab_size: int, eot: int | None = None):
        """split: "train" or "val". vocab_size: ids must be below it. eot: end-of-text; default: the
        manifest's, or else the last id.

        Raises UserError if there are no shards, or if files differ from the manifest.
        """
        self.folder = folder = Path(folder)
        self.vocab_size = vocab_size
        files = sorted(p for p in folder.glob("*_*_*") if p.suffix in (".npy", ".bin"))
        self.paths = [p for p in files if p.name.split("_")[-2] == split]
        if not self.paths:
            raise UserError(no_shards_message(folder, split))
        manifest = read_manifest(folder)
        for entry in manifest_files(manifest, split) if manifest else []:
            check_file(folder / entry["name"], entry)
        self.manifest: Mapping[str, Any] = manifest or {}  # empty if there is no manifest.json
        self.eot = self.manifest.get("eot", vocab_size - 1) if eot is None else eot
        self.shards = [open_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [shard.length for shard in self.shards])
        masks = [path.with_suffix(".mask") for path in self.paths]
        # of chat data: which tokens contribute to the loss
        self.masks: list[ShardFile] | None = None
        if any(mask.exists() for mask in masks):
            self.masks = [open_shard(mask, "u1") for mask in masks]
            if [mask.length for mask in self.masks] != [shard.length for shard in self.shards]:
                raise UserError(
                    f"a mask in {folder} has a different length than its shard; {REBUILD_HINT}"
                )
        self.ignored_tokens = 0  # see truncate
        # check a sample now, before the run directory is created
        self.check_ids(self.read(0, min(self.shards[0].length, 1_000_000)), 0)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def truncate(self, tokens: int) -> None:
        """Use only the first `tokens` tokens, and ignore those added later."""
        self.ignored_tokens, self.starts = len(self) - tokens, np.minimum(self.starts, tokens)

    def locate(self, position: int) -> tuple[int, int]:
        """(index of the shard, index within it) of a position in the stream."""
        position %= len(self)
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return shard, int(position - self.starts[shard])

    def where(self, position: int) -> str:
        """A position in the stream as "<file name>:<index>", for messages."""
        shard, index = self.locate(position)
        return f"{self.paths[shard].name}:{index}"

    def check_ids(self, ids: np.ndarray, position: int) -> None:
        """Raise UserError if one of these ids, read at `position`, is outside the vocabulary."""
        if ids.max() >= self.vocab_size:
            hint = f"check them with `{command_for('fineweb.py')} --verify --out {shell_quote(self.folder)}`"
            if not self.manifest:
                hint = "pass its size as --vocab_size, such as 50257 for GPT-2's"
            raise UserError(
                f"token id {ids.max()} near {self.where(position)} is outside the vocabulary of "
                f"{self.vocab_size}: the shards belong to another tokenizer or are damaged; {hint}"
            )

    def read(
        self, position: int, length: int, files: Sequence[ShardFile] | None = None
    ) -> np.ndarray:
        """`length` tokens from `position` on, wrapping around at the end of the data.

        files: read these instead of the shards (used by loss_mask).
        """
        parts = []
        while length > 0:
            shard, index = self.locate(position)
            count = min(length, int(self.starts[shard + 1] - self.starts[shard]) - index)
            parts.append((files or self.shards)[shard].read(index, count))
            position, length = position + count, length - count
        return np.concatenate(parts)

    def loss_mask(self, position: int, length: int) -> np.ndarray:
        """(length,) bool: which tokens contribute to the loss. Only for data that has masks."""
        mask = self.read(position, length, self.masks)
        if mask.max() > 1:
            raise UserError(
                f"the mask at or after {self.where(position)} contains the byte {mask.max()}, but "
                f"must be 1 for a token that contributes to the loss, else 0; {REBUILD_HINT}"
            )
        return mask == 1

    def batch(self, offsets: Sequence[int] | np.ndarray, seq_len: int):
        """x and y (len(offsets), seq_len), int64 arrays, of the sequences that begin at `offsets`.

        y is x shifted by one token, with -1 where the loss mask is 0.
        """
        rows = np.stack([self.read(p, seq_len + 1) for p in offsets]).astype(np.int64)
        self.check_ids(rows, offsets[int(rows.max(axis=1).argmax())])
        x, y = rows[:, :-1], rows[:, 1:].copy()
        if self.masks:
            y[~np.stack([self.loss_mask(p + 1, seq_len) for p in offsets])] = -1
        return x, y

    def document_starts(self, seq_len: int) -> np.ndarray:
        """Positions of end-of-text at which sequences of seq_len tokens can begin without overlap.

        Raises UserError if there are none.
        """
        found, starts, i = [], [], 0
        shards = progress(self.shards, "looking for documents")
        for shard, start, end in zip(shards, self.starts, self.starts[1:]):
            found.append(start + np.flatnonzero(shard.read(0, int(end - start)) == self.eot))
        found = np.concatenate(found)
        while i < len(found) and found[i] + seq_len <= len(self):
            starts.append(int(found[i]))
            i = int(np.searchsorted(found, found[i] + seq_len))
        if not starts:
            raise UserError(
                f"{self.folder} has no end-of-text, which --align_documents needs; leave it out"
            )
        return np.array(starts)


def no_shards_message(folder: Path, split: str) -> str:
    """Say why a folder has no shards of a split, and what to do."""
    fineweb, message = command_for("fineweb.py"), f"no {split} shards in {folder}"
    manifest = read_manifest(folder)
    if manifest and not manifest["complete"]:
        return f"{message}, whose build is not finished; run its command again"
    own = f"`{fineweb} --source {shell_quote(folder) if folder.is_dir() else 'FOLDER'} --out data/mine`"
    if any(folder.glob("*.jsonl")):
        return f"{message}: pass one of its .jsonl files itself if they are conversations, or run {own}"
    if folder.is_file():
        return (
            f"data={folder} must be a folder of shards or a file of conversations (.jsonl, .json or "
            f".parquet); convert it to one, or convert texts to .txt and run {own}"
        )
    siblings = {path.parent.name for path in folder.parent.glob(f"*/*_{split}_*")}
    close = difflib.get_close_matches(folder.name, siblings, 1)
    if close and not folder.is_dir():
        return f"{message}; did you mean {folder.with_name(close[0])}?"
    missing = "" if folder.is_dir() else ", which is not a folder"
    return (
        f"{message}{missing}: build some from FineWeb-Edu with `{fineweb}` (in edu_fineweb10B) or from your "
        f"own text with {own} (without a GPU add --tokenizer bytes), or use --preset laptop without "
        "--data, which needs no shards"
    )


def shard_entry(path: Path, eot: int) -> ShardEntry:
    """The manifest's entry for a complete shard."""
    shard, split = open_shard(path), path.name.split("_")[-2]
    documents = int((shard.read(0, shard.length) == eot).sum())
    return {**file_entry(path), "split": split, "tokens": shard.length, "documents": documents}


def save_shard(
    out_dir: str | Path, manifest: Manifest, ids: np.ndarray, mask: np.ndarray | None = None,
    documents: int | None = None, end: list[int] | None = None,
) -> None:  # fmt: skip
    """Write token ids (uint16) as the next shard, then the manifest that lists it.

    The first shard is the validation split. mask: uint8, one per id. documents: the number
    to record; by default the number of end-of-text tokens. end: see ShardEntry.
    """
    number = len(manifest["shards"])
    split = "train" if number else "val"
    path = Path(out_dir, f"{manifest['data']}_{split}_{number:06d}.npy")
    write_npy(path, ids)
    entry = shard_entry(path, manifest["eot"])
    if documents is not None:
        entry["documents"] = documents
    entry["end"] = end
    if mask is not None:
        write_npy(path.with_suffix(".mask"), mask)
        entry["mask"] = file_entry(path.with_suffix(".mask"))
    manifest["shards"].append(entry)
    write_manifest(out_dir, manifest)


def write_npy(path: Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()  # np.save to a file would not report a full disk
    np.save(buffer, array)
    atomic_write(path, buffer.getbuffer())
