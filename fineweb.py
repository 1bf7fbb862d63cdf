"""Text corpora as shards of token ids: FineWeb-Edu from the hub, your own files, or the text inside Python.

    python fineweb.py                                               # FineWeb-Edu 10B tokens into edu_fineweb10B/
    python fineweb.py --source builtin --tokenizer bytes            # no network: Python's own documentation
    python fineweb.py --source my_texts/ --out data/mine            # parquet, JSONL, plain text, also .gz and .zst
    python fineweb.py --verify --out edu_fineweb10B                 # read everything again, name what is broken

A shard is a row of uint16 tokens in a .npy file, named <data>_<split>_<number>.npy; number 0 is the validation split.
Documents stand one after the other, each led by end-of-text. manifest.json beside the shards says where they came from
and how far the work is: whatever stops it, even kill -9, the same command goes on and ends with the same bytes.
"""
import ast
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from shards import open_shard
from tokenizer import get_tokenizer

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


def shard_entry(path: Path, tokens: int, documents: int) -> dict:
    return {"name": path.name, "split": path.name.split("_")[-2], "tokens": tokens, "documents": documents,
            "bytes": path.stat().st_size, "sha256": sha256_of(path)}


class ShardWriter:
    """Cuts a stream of tokens into shards and notes in the manifest how far it is.

    A shard grows as <name>.part and gets its name when whole. What was appended after the last `note` is forgotten when
    a writer opens the folder again; the caller then appends it once more.
    """

    def __init__(self, out_dir: Path, manifest: dict):
        self.dir, self.manifest = Path(out_dir), manifest
        self.dir.mkdir(parents=True, exist_ok=True)
        resume = manifest["resume"]
        del manifest["shards"][resume["part_index"]:]
        self.index, self.filled = resume["part_index"], resume["part_tokens"]
        keep = [self.path(i) for i in range(self.index)]
        if self.path().exists():  # got its name after the last note: a part again
            os.replace(self.path(), self.part())
        for path in self.dir.glob(f"{manifest['data']}_*.npy*"):
            if path not in keep and path != self.part():
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
        path = self.path()
        os.replace(self.part(), path)
        tokens = np.load(path, mmap_mode="r")
        documents = sum(int(np.count_nonzero(tokens[i:i + 2**24] == self.manifest["eot"]))
                        for i in range(0, len(tokens), 2**24))
        self.manifest["shards"].append(shard_entry(path, self.filled, documents))
        self.index, self.filled = self.index + 1, 0

    def note(self, **resume):
        """From here on nothing that was appended can be lost. `resume` is what the caller needs to go on."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.manifest["resume"] = {"part_index": self.index, "part_tokens": self.filled, **resume}
        write_manifest(self.dir, self.manifest)

    def close(self, complete: bool):
        """The last, shorter shard and the manifest, complete or not (then the part stays a part)."""
        if complete and self.filled:
            self.finish_shard()
        self.file.close()
        if complete:
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
        problems += [problem] if problem else []
    known = {entry["name"] for entry in manifest["shards"]}
    problems += [f"{path} is not in the manifest" for path in sorted(out_dir.iterdir())
                 if re.fullmatch(r".+_(train|val)_\d{6}\.(npy|bin)", path.name) and path.name not in known]
    return problems


def check_same(out_dir: Path, manifest: dict, **wanted):
    """ValueError where the manifest in `out_dir` was made with other settings than the ones wanted now."""
    for key, value in wanted.items():
        if manifest[key] != value:
            raise ValueError(f"{out_dir} was made with {key} = {manifest[key]!r}, now it is {value!r}: choose another "
                             f"--out, or delete {out_dir}")


# ---- the built-in text -----------------------------------------------------------------------------------------------

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}


def builtin_documents() -> list[str]:
    """The language reference and the standard library's docstrings, in an order that is fixed and mixed.

    The files are parsed, never imported. Sorting by hash mixes: the last tenth, which is validation, is like the rest.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    documents = set(topics.values())
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in files:
            if not name.endswith(".py"):
                continue
            try:
                with warnings.catch_warnings():  # about odd escapes in old files
                    warnings.simplefilter("ignore")
                    tree = ast.parse(Path(folder, name).read_text(encoding="utf-8"))
            except (SyntaxError, ValueError, OSError):  # templates, other encodings
                continue
            nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            documents.update(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes))
    documents = [text for text in documents if text.strip()]
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8", "replace")).digest())


def build_builtin(out_dir, tokenizer: str = "bytes", say=None) -> dict:
    """The built-in text as builtin_val_000000.npy and builtin_train_000001.npy; returns the manifest.

    Does nothing where both are there with the sizes in the manifest. `say` takes the lines for people, if given.
    """
    out_dir = Path(out_dir)
    manifest = read_manifest(out_dir)
    if manifest is not None:
        check_same(out_dir, manifest, data="builtin", tokenizer=tokenizer)
        sizes = [(out_dir / e["name"], e["bytes"]) for e in manifest["shards"]]
        if manifest["complete"] and all(p.exists() and p.stat().st_size == n for p, n in sizes):
            return manifest
    tok = get_tokenizer(tokenizer)
    documents = builtin_documents()
    tokens, lengths = tok.encode_documents(documents)
    val_documents = len(documents) // 10
    val_tokens = int(lengths[-val_documents:].sum())
    source = {"kind": "builtin", "revision": f"Python {sys.version.split()[0]}"}
    manifest = new_manifest("builtin", tok, source, max(len(tokens) - val_tokens, 1), val_tokens)
    writer = ShardWriter(out_dir, manifest)
    writer.append(tokens[len(tokens) - val_tokens:])
    writer.append(tokens[:len(tokens) - val_tokens])
    text_bytes = sum(len(text.encode("utf-8", "replace")) for text in documents)
    manifest.update(documents=len(documents), text_bytes=text_bytes, tokens=len(tokens))
    writer.close(complete=True)
    if say:
        say(f"built-in text of {source['revision']}: {len(documents):,} documents, {text_bytes:,} bytes, "
            f"{len(tokens):,} tokens ({val_tokens:,} of them validation) in {out_dir}")
    return manifest


# ---- command line ----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """Turns text into shards of token ids for train_gpt2.py. Stopped at any moment, the same command goes on."""

    source: str = "builtin"
    """Where the text comes from: builtin (the documentation inside Python)."""
    out: str = "data/builtin"
    """Folder for the shards."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """gpt2: 50257 tokens, two files are downloaded once. bytes: 256 and end-of-text, needs nothing."""
    verify: bool = False
    """Read all shards in --out again, compare them with the manifest, name what is broken (exit status 1)."""


def run(cfg: Config):
    if cfg.verify:
        problems = verify(cfg.out)
        print("\n".join(problems) or f"{cfg.out}: all shards are whole")
        return 1 if problems else 0
    build_builtin(cfg.out, cfg.tokenizer, say=print)
    return 0


def main(argv=None) -> int:
    import tyro
    cfg = tyro.cli(Config, args=argv)
    try:
        return run(cfg)
    except (ValueError, OSError) as error:
        print(f"fineweb.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
