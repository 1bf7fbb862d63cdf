"""Where text comes from: files on this machine or on the Hugging Face hub, cut into units that can
be tokenised alone: a row group of parquet, a block of lines of the rest, always in the same order.

Files on the hub are read where they are, by huggingface_hub: nothing is stored, and of a parquet
file only the text column travels.
"""

import contextlib
import fnmatch
import functools
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cli import UserError, say
from lab.data.tokenizers import as_arrow
from lab.files import first_line, reading

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".md": "text"}
KINDS |= {".bin": "bin"}  # ready-made shards, on the hub alone
PACKED = {".gz": "gzip", ".zst": "zstd"}
HUB = "hf://"
BLOCK = 4 * 2**20  # bytes of text in a unit of lines


@dataclass(frozen=True)
class File:
    name: str  # as people and the manifest call it
    path: str  # local, or hf://datasets/NAME@COMMIT/...
    size: int  # bytes

    @property
    def packing(self) -> str | None:
        return PACKED.get(Path(self.name).suffix.lower())

    @property
    def kind(self) -> str | None:
        """parquet, jsonl, text, bin, or None for what cannot be read."""
        name = Path(self.name).stem if self.packing else self.name
        return KINDS.get(Path(name).suffix.lower())


def local_files(source: str) -> list[File]:
    root = Path(source)
    if not root.exists():
        raise UserError(f"--source {source} does not exist: give a file, a folder, hub or builtin")
    paths, base = [root], root.parent
    if root.is_dir():  # shards made of these texts, and their manifest, may lie beside them
        ours = ("manifest.json", "tokenizer.json")
        paths, base = [p for p in root.rglob("*") if p.name not in ours], root
        for path in paths:
            if path.is_symlink() and path.is_dir():
                say(f"{path} is a link to a folder, which is not followed: name that folder itself")
    shown = (p for p in paths if not any(n[0] == "." for n in p.relative_to(base).parts))
    files = [p for p in shown if p.is_file()]
    about = [File(p.relative_to(base).as_posix(), str(p), p.stat().st_size) for p in files]
    return one_kind(about, source)


def one_kind(files: list[File], place: str, kinds=("parquet", "jsonl", "text")) -> list[File]:
    """The files to read, by name: of several kinds the first."""
    files = sorted((f for f in files if f.kind in kinds), key=lambda f: f.name)
    kind = min((f.kind for f in files), key=kinds.index, default=None)
    chosen = [f for f in files if f.kind == kind]
    if not chosen:
        raise UserError(
            f"{place} holds nothing to read: wanted are files named *.parquet, *.jsonl, *.json, "
            "*.txt or *.md, the last four also with .gz or .zst"
        )
    if len(chosen) < len(files):
        print(f"{place}: only its {len(chosen)} {kind} files are read", file=sys.stderr)
    return chosen


@contextlib.contextmanager
def asking_hub(dataset):
    """The hub's trouble in the body becomes a UserError. Its library has tried five times then."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, ConnectionError) as error:
        raise UserError(
            f"the hub did not give {dataset} ({type(error).__name__}: {first_line(error)}): check "
            "--dataset and --revision, for a private one log in with `hf auth login`; when the hub "
            "answers, the same command goes on where it was; a copy of the files is read with "
            "--source FOLDER, and --source builtin needs no network"
        ) from error


def hub_files(dataset: str, name: str, split: str, revision: str) -> tuple[str, list[File]]:
    """The commit that `revision` is now, and the files of one configuration of a data set.

    Token shards (.bin) count where there is nothing else. A data set without configurations in
    its card is taken as folders: `name` is one of them, or empty for all.
    """
    from huggingface_hub import HfApi

    with asking_hub(dataset):
        info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True, timeout=30)
    root = f"{HUB}datasets/{dataset}@{info.sha}/"
    found = [s for s in info.siblings if s.rfilename != "README.md"]
    configs = {c["config_name"]: c for c in (info.card_data or {}).get("configs") or []}
    patterns = [f"{name}/*" if name else "*"]
    if configs:
        first = [n for n, c in configs.items() if c.get("default") or n == "default"]
        if (name := name or [*first, *configs][0]) not in configs:
            names = ", ".join(configs)
            raise UserError(f"{dataset} has no configuration {name!r}; --name is one of {names}")
        folder = configs[name].get("data_dir")
        whole = f"{folder}/*" if folder else "*"
        patterns = split_patterns(configs[name].get("data_files") or whole, split)
    chosen = [s for s in found if any(fnmatch.fnmatch(s.rfilename, p) for p in patterns)]
    files = [File(s.rfilename, root + s.rfilename, s.size or 0) for s in chosen]
    place = f"{dataset} (--name {name or 'not given'}, --split {split})"
    files = one_kind(files, place, ("parquet", "jsonl", "text", "bin"))
    if not configs and files[0].kind != "bin":
        say(
            f"{dataset} names no splits: all its {len(files)} files are read, whatever --split says"
        )
    return info.sha, files


def split_patterns(data_files: Any, split: str) -> list[str]:
    """File name patterns of one split, from the ways in which a data set's card may write them."""
    patterns = []
    for item in [data_files] if isinstance(data_files, str) else data_files:
        item = {"split": split, "path": item} if isinstance(item, str) else item
        paths = [item["path"]] if isinstance(item["path"], str) else item["path"]
        patterns += paths if item["split"] == split else []
    return patterns


@contextlib.contextmanager
def reading_source(file: File, place=""):
    """Trouble in the body with the hub, or with what is in the file, becomes a UserError."""
    hub, way_out = contextlib.nullcontext(), "download it again, mend it or leave it out"
    if file.path.startswith(HUB):
        hub = asking_hub(file.path.removeprefix(f"{HUB}datasets/").split("@")[0])
    with reading(f"{file.path}{place}", f"{file.kind} file", way_out), hub:
        yield


def open_file(file: File) -> Any:
    """A readable, seekable binary file."""
    if not file.path.startswith(HUB):
        return open(file.path, "rb")
    from huggingface_hub import HfFileSystem

    # Of parquet exactly what is asked for travels; the rest is read from its beginning to its end.
    cache = "none" if file.kind == "parquet" else "readahead"
    return HfFileSystem().open(file.path, block_size=BLOCK, cache_type=cache, size=file.size)


@dataclass(frozen=True)
class Unit:
    file: File
    file_index: int
    index: int  # within the file
    block: bytes | None = None  # the lines; None: row group `index` of the parquet file
    first_line: int = 1


def units_of(file: File, file_index: int, column: str):
    """The units of a file in order, which depend on the file alone."""
    if file.kind == "parquet":
        count = open_parquet(file, column).num_row_groups
        yield from (Unit(file, file_index, i) for i in range(count))
        return
    line = 1
    for index, block in enumerate(blocks_of(file)):
        yield Unit(file, file_index, index, block, line)
        line += block.count(b"\n")


def all_units(files: list[File], column: str, file: int = 0, unit: int = 0):
    """The units of files in order, from that unit of that file on."""
    for i in range(file, len(files)):
        yield from itertools.islice(units_of(files[i], i, column), unit if i == file else 0, None)


def blocks_of(file: File):
    """A JSONL or text file in blocks that end where a line ends (text without lines: a word)."""
    import pyarrow as pa

    rest = b""
    with reading_source(file), open_file(file) as raw:
        data = pa.input_stream(raw, compression=file.packing)
        while more := data.read(BLOCK):
            rest += more
            cut = rest.rfind(b"\n") + 1
            if not cut and file.kind == "text" and len(rest) >= BLOCK:
                cut = rest.rfind(b" ")
            if cut > 0 and rest[:cut].strip():  # else a text's end-of-text would go with the blanks
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


@functools.lru_cache(maxsize=1)  # a file's index is not fetched again for each row group
def open_parquet(file: File, column: str):
    """The pyarrow ParquetFile, which has a column of text with that name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading_source(file):
        # pre_buffer joins what lies together into one request; damage is seen where the writer
        # has left checksums
        parquet = pq.ParquetFile(open_file(file), pre_buffer=True, page_checksum_verification=True)
    if column not in parquet.schema_arrow.names:
        names = ", ".join(parquet.schema_arrow.names)
        raise UserError(f"{file.path} has no column {column!r}; --text_column is one of {names}")
    if pa.types.is_primitive(kind := parquet.schema_arrow.field(column).type):
        raise UserError(
            f"{file.path}: column {column!r} holds {kind}; name one of text, --text_column"
        )
    return parquet


def documents_of(unit: Unit, column: str):
    """Arrow arrays of the texts of a unit, empty ones included as empty."""
    import pyarrow as pa

    if unit.file.kind == "jsonl":
        yield as_arrow([text_of(record, column, where) for where, record in records_of(unit)])
    elif unit.file.kind == "text":
        with reading_source(unit.file, f", from line {unit.first_line} on"):
            text = unit.block.decode()
            yield as_arrow([text if unit.index else text.removeprefix("\ufeff")])  # byte order mark
    else:
        with reading_source(unit.file, f", row group {unit.index}"):
            which = dict(row_groups=[unit.index], columns=[column], use_threads=False)
            for batch in open_parquet(unit.file, column).iter_batches(1024, **which):
                texts = batch.column(0).cast(pa.large_string())
                texts.validate(full=True)  # that it is UTF-8
                yield texts.fill_null("")


def records_of(unit: Unit):
    """(where it is, for messages, and the dict) for every line of JSONL that is not blank."""
    for number, line in enumerate(unit.block.split(b"\n"), unit.first_line):
        where = f"{unit.file.path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also what is not UTF-8
            raise UserError(f"{where}: not JSON ({error}); wanted is one object a line") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: a JSON {type(record).__name__}, wanted is one object a line")
        yield where, record


def text_of(record: dict, column: str, where: str) -> str:
    if column not in record or not isinstance(record[column], str | None):
        raise UserError(
            f"{where}: no text under {column!r}; --text_column is one of its keys, "
            f"{', '.join(record)}; a conversation is under messages"
        )
    return record[column] or ""
