"""Token shards on disk: opening them, checking them, and reading them as one endless stream.

A shard is a row of uint16 token ids, as .npy (fineweb.py, build-nanogpt) or .bin (llm.c, modded-nanogpt), named
<data>_<split>_<number>; beside it may lie <data>_<split>_<number>.mask, one byte a token, 1 where it is to be learnt.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np


def read_json(path, *keys):
    """The dict that a JSON file holds. Raises ValueError that names the file if it is broken or lacks one of the keys."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no names")
        if any(found.get(key) is None for key in keys):
            raise ValueError(f"it must hold {' and '.join(keys)}")
        return found
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder where a file should be; move it away") from error
    except ValueError as error:
        raise ValueError(f"{path} is not what this project has written ({error}): it was changed or cut short; mend it, or "
                         "make anew what it is about") from error  # fmt: skip


def open_shard(path):
    """Tokens of one shard as a memory-mapped uint16 array: .npy, or llm.c's .bin. Raises ValueError if it is broken."""
    if path.suffix == ".bin":  # 256 int32: magic, version, tokens, zeros; then the tokens
        header = np.fromfile(path, dtype="<i4", count=256)
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise ValueError(f"shard {path} is no llm.c token file: its header must begin with 20240520, 1; make it again")
        if path.stat().st_size != 1024 + 2 * int(header[2]):
            raise ValueError(
                f"shard {path} is truncated: {path.stat().st_size} bytes, its header promises {1024 + 2 * int(header[2])}; "
                "delete it and make or download it again"
            )
        tokens = np.memmap(path, dtype="<u2", mode="r", offset=1024) if header[2] else np.zeros(0, "<u2")
    else:
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"shard {path} is broken or truncated ({error}); delete it and make it again") from error
        if tokens.dtype != np.uint16 or tokens.ndim != 1:
            raise ValueError(
                f"shard {path} holds {tokens.dtype} of shape {tokens.shape}, wanted is one row of uint16; "
                "make it with fineweb.py"
            )
    if not len(tokens):
        raise ValueError(f"shard {path} is empty; delete it and make it again")
    return tokens


def open_mask(path, tokens):
    """A memory-mapped row of `tokens` uint8, 1 where a token is to be learnt. Raises ValueError if it is none."""
    try:
        mask = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"mask {path} is broken or truncated ({error}); make the data again") from error
    if mask.shape != (tokens,) or mask.dtype != np.uint8:
        raise ValueError(f"mask {path} holds {mask.dtype} of shape {mask.shape}, wanted is a uint8 for each of the {tokens} "
                         "tokens of its shard; make the data again")  # fmt: skip
    return mask


class TokenShards:
    """All shards of a split as one endless stream: position p is token p modulo the number of tokens."""

    def __init__(self, folder, split, vocab_size, verify=False):
        folder = Path(folder)
        files = (p for p in folder.glob(f"*_{split}_*") if p.suffix in (".npy", ".bin"))
        names = sorted(p for p in files if re.findall(r"(?<=_)(train|val)(?=_)", p.name)[-1] == split)  # not my_train_set_val_0
        if not names:
            what = "" if folder.is_dir() else " (it is a file)" if folder.exists() else " (it is not there)"
            raise FileNotFoundError(
                f"no {split} shards in {folder}{what}: `python fineweb.py` makes some of FineWeb-Edu in edu_fineweb10B, "
                "`python fineweb.py --source FOLDER --out data/mine` of your own text; `python train_gpt2.py --preset laptop` "
                "needs none"
            )
        self.paths, self.vocab_size = names, vocab_size
        self.check_manifest(folder, split, verify)
        self.shards = [open_shard(path) for path in names]
        self.starts = np.concatenate([[0], np.cumsum([len(s) for s in self.shards])])
        for i in (0, len(names) - 1):  # a sample now, before a run is opened; every batch is checked when it is read
            self.check_ids(self.shards[i][:1_000_000].max(), int(self.starts[i]))
        masks = [path.with_suffix(".mask") for path in names]  # 1: learn to predict this token (fine-tuning data)
        there = [m.exists() for m in masks]
        if any(there) and not all(there):
            raise ValueError(f"mask {masks[there.index(False)]} is missing, and other shards of {folder} have theirs; "
                             "make the data again")  # fmt: skip
        self.masks = [open_mask(m, len(s)) for m, s in zip(masks, self.shards)] if all(there) else None
        self.left_out = 0  # tokens, see shorten

    def check_manifest(self, folder, split, verify):
        """Compare names, sizes, and with verify=True hashes with what fineweb.py noted when the shards were whole."""
        file = folder / "manifest.json"
        self.manifest = read_json(file) if file.exists() else {}
        entries = {entry["name"]: entry for entry in self.manifest.get("shards") or []}
        if verify and not entries:
            raise FileNotFoundError(f"{file} is missing, so there is nothing to verify the shards against")
        missing = {name for name in entries if re.search(rf"_{split}_\d+\.\w+$", name)} - {path.name for path in self.paths}
        if missing:
            raise FileNotFoundError(f"shard {folder / min(missing)} is missing, manifest.json has it; put it back, or delete "
                                    f"{folder} and make the data again")  # fmt: skip
        files = [(path, entries.get(path.name)) for path in self.paths]
        masks = [(path.with_suffix(".mask"), entry["mask"]) for path, entry in files if entry and "mask" in entry]
        for path, entry in files + [(path, entry) for path, entry in masks if path.exists()]:  # without them all is learnt
            if entry and path.stat().st_size != entry["bytes"]:
                raise ValueError(
                    f"shard {path} has {path.stat().st_size} bytes, manifest.json says {entry['bytes']}: it is truncated "
                    f"or not the one that was made; put the right one back, or delete {folder} and make the data again"
                )
            if entry and verify:
                with path.open("rb") as f:
                    if hashlib.file_digest(f, "sha256").hexdigest() != entry["sha256"]:
                        raise ValueError(f"shard {path} has changed: its SHA-256 is not the one in manifest.json; make it anew")

    def __len__(self):
        return int(self.starts[-1])

    def shorten(self, tokens):
        """Be the first `tokens` tokens alone, as before more were added."""
        self.left_out, self.starts = len(self) - tokens, np.minimum(self.starts, tokens)
        sizes = np.diff(self.starts)
        self.shards = [s[:n] for s, n in zip(self.shards, sizes)]
        self.masks = [m[:n] for m, n in zip(self.masks, sizes)] if self.masks else None

    def where(self, position):
        """Shard name and offset of a stream position, for messages."""
        shard = int(np.searchsorted(self.starts, position % len(self), side="right")) - 1
        return f"{self.paths[shard].name}:{position % len(self) - int(self.starts[shard])}"

    def check_ids(self, highest, position):
        if highest >= self.vocab_size:
            raise ValueError(
                f"token id {highest} near {self.where(position)} is outside the vocabulary of {self.vocab_size}: "
                "these shards are of another tokenizer, or broken, which --verify_data would show"
            )

    def check_first(self, tokens):
        """Raise ValueError where the first `tokens` positions (0: all) or their targets hold what is no token."""
        ids = self.read(0, min(tokens + 1, len(self)) if tokens else len(self))
        self.check_ids(ids.max(), int(ids.argmax()))

    def read(self, position, length, arrays=None):
        """`length` tokens (or mask values) from a stream position on, over shard edges and the end of the data."""
        arrays = arrays or self.shards
        parts, position = [], position % len(self)
        while length > 0:
            shard = int(np.searchsorted(self.starts, position, side="right")) - 1
            offset = position - int(self.starts[shard])
            part = arrays[shard][offset : offset + length]
            parts.append(part)
            length -= len(part)
            position = (position + len(part)) % len(self)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def batch(self, positions, seq_len):
        """x and y (len(positions), seq_len) as int64: y is x one token later, -1 where a mask says not to learn."""
        rows = np.stack([self.read(p, seq_len + 1) for p in positions]).astype(np.int64)
        self.check_ids(rows.max(), positions[int(rows.max(axis=1).argmax())])
        x, y = rows[:, :-1], rows[:, 1:].copy()
        if self.masks:
            y[np.stack([self.read(p + 1, seq_len, self.masks) for p in positions]) == 0] = -1
        return x, y

    def document_starts(self, seq_len):
        """Positions of sequences that begin at an end-of-text, as many as do not overlap."""
        eot = np.concatenate([np.flatnonzero(s == self.vocab_size - 1) + a for s, a in zip(self.shards, self.starts)])
        starts, i = [], 0
        while i < len(eot) and eot[i] + seq_len <= len(self):
            starts.append(int(eot[i]))
            i = int(np.searchsorted(eot, eot[i] + seq_len))
        if not starts:
            raise ValueError(f"align_documents finds no end-of-text (id {self.vocab_size - 1}) in {self.paths[0].parent}")
        return np.array(starts)
