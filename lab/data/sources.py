"""Read text files, on this machine or on the Hugging Face hub. Used by build.py and chat.py.

Files are cut into units that can be tokenized independently: row groups of parquet files, blocks of
lines of other files, always in the same order. Files on the hub are streamed, not stored, and only the
text column of a parquet file is transferred.
"""

import codecs
import contextlib
import fnmatch
import functools
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cli import UserError, eprint, listed, require
from lab.data.manifest import SHARD_NAME
from lab.data.tokenizers import TOKENIZER_FILE, to_arrow
from lab.files import first_line, read_errors

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".md": "text"}
KINDS |= {".bin": "bin"}  # ready-made shards, only on the hub
KIND_ORDER = ("parquet", "jsonl", "text")  # the first is preferred on the hub
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
HUB = "hf://"
BLOCK = 4 * 2**20  # bytes of text in a block of lines


@dataclass(frozen=True)
class File:
    name: str  # relative to the source, as in the manifest and in messages
    path: str  # local, or hf://datasets/NAME@COMMIT/...
    size: int  # bytes

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(Path(self.name).suffix.lower())

    @property
    def kind(self) -> str | None:
        """parquet, jsonl, text, bin, or None if it cannot be read."""
        name = Path(self.name).stem if self.compression else self.name
        return KINDS.get(Path(name).suffix.lower())


def local_files(source: str, strict: bool = False) -> list[File]:
    """The files to read for a file or folder: those of the kind with the most bytes. Hidden files and our
    own output are ignored.

    Raises UserError if there is nothing to read or, with `strict`, if anything is skipped.
    """
    root = Path(source)
    if not source or not root.exists():  # Path("") is the current folder
        raise UserError(f"--source {source} does not exist; pass a file, a folder, hub or builtin")
    paths, base = [root], root.parent
    if root.is_dir():  # the folder may also contain shards of these texts
        ours = ("manifest.json", TOKENIZER_FILE)
        found = (p for p in root.rglob("*") if p.name not in ours)
        paths, base = [p for p in found if not SHARD_NAME.fullmatch(p.name)], root
    visible = [p for p in paths if not any(n[0] == "." for n in p.relative_to(base).parts)]
    for path in dict.fromkeys([root, *visible]):
        if path != root and path.is_symlink() and path.is_dir():
            note = f"{path} is a link to a folder and is not followed"
            require(not strict, f"{note}; remove it, or leave out --strict")
            eprint(f"{note}; pass that folder itself")
        elif path.is_dir() and not os.access(path, os.R_OK | os.X_OK):  # rglob skips its files
            raise UserError(f"{path} cannot be read: permission denied; change the permissions")
        elif not path.is_dir() and not path.is_file():
            note = "is a dangling link, FIFO, socket or device"
            require(not strict, f"{path} {note}; remove it, or leave out --strict")
            eprint(f"{path} is skipped: it {note}")
    files = [p for p in visible if p.is_file()]
    files = [File(p.relative_to(base).as_posix(), str(p), p.stat().st_size) for p in files]
    size = {kind: sum(f.size for f in files if f.kind == kind) for kind in KIND_ORDER}
    chosen = one_kind(files, source, sorted(size, key=lambda kind: -size[kind]), strict)
    others = sum(f.kind in size for f in files) - len(chosen)
    if others:
        eprint(
            f"{others} of the skipped file(s) could be read, but only one kind of file is read from a "
            f"folder, here {chosen[0].kind}, which has the most bytes; move the others to another folder, "
            "or pass one of them as --source"
        )
    return chosen


def one_kind(
    files: list[File], place: str, kinds: Sequence[str], strict: bool = False
) -> list[File]:  # fmt: skip
    """The files of the first of `kinds` that occurs, sorted by name. Prints the others on stderr.

    Raises UserError if there are none to read or, with `strict`, if there are others.
    """
    kind = min((f.kind for f in files if f.kind in kinds), key=kinds.index, default=None)
    chosen = sorted((f for f in files if f.kind == kind), key=lambda f: f.name)
    if not kind:
        raise UserError(
            f"{place} contains nothing to read; supported are *.parquet, *.jsonl, *.json, *.txt and "
            "*.md, the last four also with .gz or .zst; convert others, such as .pdf and .docx, to .txt"
        )
    skipped = sorted(f.name for f in files if f.kind != kind)
    if skipped and strict:
        raise UserError(
            f"{place} has {len(skipped)} file(s) besides the {len(chosen)} {kind} file(s) to read: "
            f"{listed(skipped, 3)}; convert or remove them, or leave out --strict"
        )
    if skipped:
        eprint(
            f"{place}: reading {len(chosen)} {kind} file(s), skipping {len(skipped)} other(s): "
            f"{listed(skipped, 20)}"
        )
    return chosen


@contextlib.contextmanager
def hub_errors(dataset: str) -> Iterator[None]:
    """Convert errors of the hub to UserError, after the five retries of huggingface_hub."""
    from huggingface_hub import errors  # slow: only for the hub

    # the HTTP library's class, which huggingface_hub imports but does not export
    http_error = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    except (http_error, errors.HFValidationError, ConnectionError) as error:
        raise UserError(
            f"the hub did not send {dataset} ({type(error).__name__}: {first_line(error)}): without a "
            "network, --source FOLDER reads a copy of the files, and --source builtin the built-in text; "
            "if the hub does not answer, the same command continues later; otherwise check --dataset and "
            "--revision, and for a private data set log in with `hf auth login`"
        ) from error


def hub_files(dataset: str, name: str, split: str, revision: str) -> tuple[str, list[File]]:
    """The commit of `revision`, and the files of one configuration of a data set.

    Token shards (.bin) are used only if there are no texts. If the data set's card lists no
    configurations, `name` is a folder, or empty for all files. If it lists no splits, all files are read,
    with a message.
    """
    from huggingface_hub import HfApi  # slow: only for the hub

    with hub_errors(dataset):
        info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True, timeout=30)
    root = f"{HUB}datasets/{dataset}@{info.sha}/"
    found = [s for s in info.siblings or [] if s.rfilename != "README.md"]
    configs = {c["config_name"]: c for c in (info.card_data or {}).get("configs") or []}
    folder, data_files = name, None
    if configs:
        first = [n for n, c in configs.items() if c.get("default") or n == "default"]
        if (name := name or [*first, *configs][0]) not in configs:
            names = ", ".join(configs)
            raise UserError(
                f"{dataset} has no configuration {name!r}; --name must be one of {names}"
            )
        folder, data_files = (configs[name].get(key) for key in ("data_dir", "data_files"))
    everything = f"{folder}/*" if folder else "*"
    patterns = split_patterns(data_files, split) if data_files else [everything]
    chosen = [s for s in found if any(fnmatch.fnmatch(s.rfilename, p) for p in patterns)]
    visible = [s for s in chosen if not s.rfilename.startswith(".")]  # .gitattributes
    files = [File(s.rfilename, root + s.rfilename, s.size or 0) for s in visible]
    place = f"{dataset} (--name {name or 'not given'}, --split {split})"
    files = one_kind(files, place, [*KIND_ORDER, "bin"])
    if not data_files and files[0].kind != "bin":
        eprint(f"{dataset} lists no splits: reading all {len(files)} files, regardless of --split")
    return str(info.sha), files


def split_patterns(data_files: Any, split: str) -> list[str]:
    """File name patterns of one split, from any form that a data set's card may use."""
    patterns = []
    for item in [data_files] if isinstance(data_files, str) else data_files:
        item = {"split": split, "path": item} if isinstance(item, str) else item
        paths = [item["path"]] if isinstance(item["path"], str) else item["path"]
        patterns += paths if item["split"] == split else []
    return patterns


@contextlib.contextmanager
def source_errors(file: File, place: str = "") -> Iterator[None]:
    """Convert exceptions raised by the hub, or while parsing the file, to UserError."""
    hub, hint = contextlib.nullcontext(), "download it again, repair it or remove it"
    if file.path.startswith(HUB):
        hub = hub_errors(file.path.removeprefix(f"{HUB}datasets/").split("@")[0])
    with read_errors(f"{file.path}{place}", f"{file.kind} file", hint), hub:
        yield


def open_file(file: File) -> Any:
    """A readable, seekable binary file."""
    if not file.path.startswith(HUB):
        return open(file.path, "rb")
    from huggingface_hub import HfFileSystem  # slow: only for the hub

    # of parquet files only the requested ranges are transferred; others are read from start to end
    cache = "none" if file.kind == "parquet" else "readahead"
    return HfFileSystem().open(file.path, block_size=BLOCK, cache_type=cache, size=file.size)


@dataclass(frozen=True)
class Unit:
    """A part of a file that can be tokenized independently."""

    file: File
    file_index: int
    index: int  # within the file
    block: bytes = b""  # its lines; empty for parquet, where the unit is row group `index`
    first_line: int = 1


def units_of(file: File, file_index: int, column: str) -> Iterator[Unit]:
    """The units of a file, in order. The same file always gives the same units. column: name of the
    text column, or "" for whole records."""
    if file.kind == "parquet":
        count = open_parquet(file, column).num_row_groups
        yield from (Unit(file, file_index, i) for i in range(count))
        return
    line = 1
    for index, block in enumerate(blocks_of(file)):
        if index == 0 and re.match(rb"%PDF-\d\.\d[\r\n]", block):
            raise UserError(
                f"{file.path}: is a PDF; convert it to text, for example with pdftotext"
            )
        if b"\0" in block:
            number = line + block.count(b"\n", 0, block.index(b"\0"))
            raise UserError(
                f"{file.path}, line {number}: contains NUL bytes, as UTF-16 and files that are not text "
                "do, but text must be UTF-8; convert UTF-16 with `iconv -f UTF-16 -t UTF-8`, or remove "
                r"single ones with `tr -d '\0'`"
            )
        yield Unit(file, file_index, index, block, line)
        line += block.count(b"\n")


def all_units(files: list[File], column: str, file: int = 0, unit: int = 0) -> Iterator[Unit]:
    """The units of all files in order, starting at unit `unit` of files[file]."""
    for i in range(file, len(files)):
        yield from itertools.islice(units_of(files[i], i, column), unit if i == file else 0, None)


def blocks_of(file: File) -> Iterator[bytes]:
    """Blocks of whole lines of a JSONL or text file, or of whole words if a text has no lines. The
    items of a JSON array count as lines."""
    import pyarrow as pa  # slow, and not needed for training

    rest = b""
    with source_errors(file), open_file(file) as raw:
        data = pa.input_stream(raw, compression=file.compression)
        head = data.read(BLOCK)
        if file.kind == "jsonl" and head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            items = json.loads(head + data.read())
            data, head = io.BytesIO("\n".join(map(json.dumps, items)).encode()), b""
        for more in itertools.chain([head], iter(lambda: data.read(BLOCK), b"")):
            rest += more
            cut = rest.rfind(b"\n") + 1
            if not cut and file.kind == "text" and len(rest) >= BLOCK:
                cut = rest.rfind(b" ")
            # no blank units: tokenize drops them, and with the first unit of a text file it would drop
            # the document's end-of-text
            if cut > 0 and rest[:cut].strip():
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


@functools.lru_cache(maxsize=1)  # keeps the file's index, which all row groups use
def open_parquet(file: File, column: str) -> Any:
    """The ParquetFile of pyarrow. Raises UserError unless it has a text column of this name; "" skips
    this check."""
    import pyarrow as pa  # slow, and not needed for training
    import pyarrow.parquet as pq

    with source_errors(file):
        # pre_buffer joins neighboring requests; page checksums, if there are any, reveal damage
        parquet = pq.ParquetFile(open_file(file), pre_buffer=True, page_checksum_verification=True)
    if not column:
        return parquet
    if column not in parquet.schema_arrow.names:
        names = ", ".join(parquet.schema_arrow.names)
        raise UserError(
            f"{file.path} has no column {column!r}; --text_column must be one of {names}"
        )
    kind = parquet.schema_arrow.field(column).type
    if pa.types.is_primitive(kind) or pa.types.is_nested(kind):
        raise UserError(
            f"{file.path}: column {column!r} has type {str(kind):.80}; pass one that contains text as "
            "--text_column (conversations are read from local files, in the forms that docs/DATA.md "
            "lists)"
        )
    return parquet


def row_batches(unit: Unit, column: str = "") -> Iterator[Any]:
    """pyarrow record batches of a parquet unit: this column, or all. Call it in source_errors."""
    return open_parquet(unit.file, column).iter_batches(
        1024, row_groups=[unit.index], columns=[column] if column else None, use_threads=False
    )


def documents_of(unit: Unit, column: str) -> Iterator[Any]:
    """The texts of a unit as pyarrow arrays; a missing text is an empty string."""
    import pyarrow as pa  # slow, and not needed for training
    import pyarrow.compute as pc

    if unit.file.kind == "jsonl":
        yield to_arrow([text_of(record, column, where) for where, record in records_of(unit)])
    elif unit.file.kind == "text":
        try:
            text = unit.block.decode()
        except UnicodeDecodeError as error:
            line = unit.first_line + unit.block.count(b"\n", 0, error.start)
            raise UserError(
                f"{unit.file.path}, line {line}: byte {unit.block[error.start]:#04x} is not UTF-8, "
                "which text must be; convert it, for example with `iconv -f WINDOWS-1252 -t UTF-8`"
            ) from error
        yield to_arrow([text if unit.index else text.removeprefix("\ufeff")])  # byte order mark
    else:
        with source_errors(unit.file, f", row group {unit.index}"):
            compute: Any = pc  # its functions are generated on import: unknown to type checkers
            row = 1
            for batch in row_batches(unit, column):
                texts = batch.column(0).cast(pa.large_string())
                texts.validate(full=True)  # checks that it is UTF-8
                if (i := compute.index(compute.match_substring(texts, "\0"), True).as_py()) >= 0:
                    raise nul_error(f"{unit.file.path}, row group {unit.index}, row {row + i}")
                row += len(texts)
                yield texts.fill_null("")


def records_of(unit: Unit) -> Iterator[tuple[str, dict]]:
    """("<file>, line <number>", object) for each line of JSONL that is not blank, or for each row of
    parquet."""
    if unit.file.kind == "parquet":
        place, row = f"{unit.file.path}, row group {unit.index}", itertools.count(1)
        with source_errors(unit.file, f", row group {unit.index}"):
            for batch in row_batches(unit):
                yield from ((f"{place}, row {next(row)}", record) for record in batch.to_pylist())
        return
    for number, line in enumerate(unit.block.split(b"\n"), unit.first_line):
        where = f"{unit.file.path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also if it is not UTF-8
            raise UserError(
                f"{where}: not JSON ({error}); each line must be one object, in UTF-8"
            ) from error
        if not isinstance(record, dict):
            raise UserError(
                f"{where}: a JSON {type(record).__name__}, but each line must be an object"
            )
        yield where, record


def text_of(record: dict, column: str, where: str) -> str:
    """The text of a JSONL record; null is an empty text. Raises UserError if it is missing or has NUL."""
    if column not in record or not isinstance(record[column], str | None):
        found = f", but {record[column]!r:.60}" if column in record else ""
        raise UserError(
            f"{where}: no text under {column!r}{found}; --text_column must be one of its keys, "
            f"{', '.join(record)} (docs/DATA.md lists the forms of conversations)"
        )
    text = record[column] or ""
    if "\0" in text:
        raise nul_error(where)
    return text


def nul_error(where: str) -> UserError:
    """The error for a record whose text contains NUL, which is refused as it is in plain text files."""
    return UserError(
        f"{where}: the text contains NUL characters (\\u0000 in JSON), which text must not have; "
        "remove them or this record"
    )
