"""Where text comes from: files on this machine or on the Hugging Face hub, cut into units that can be tokenised alone.

    File    one parquet, JSONL or text file, with a path or an address
    Unit    a piece of a File in a fixed order: a row group of a parquet file, a block of lines of anything else
    tokenise(unit)    its documents as token ids; runs in worker processes, which open parquet files themselves

Files on the hub are read by byte ranges: nothing is stored, and of a parquet file only the text column travels.
"""
import fnmatch
import io
import json
import os
import socket
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.data.tokenizers import BLANK, get_tokenizer

# ---- files -----------------------------------------------------------------------------------------------------------

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "text",
         ".text": "text", ".md": "text", ".bin": "bin"}
PACKED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class File:
    name: str  # as people and the manifest call it
    path: str  # local path or address
    size: int  # bytes
    sha256: str | None = None  # where the hub tells it

    @property
    def packing(self) -> str | None:
        return PACKED.get(Path(self.name).suffix.lower())

    @property
    def kind(self) -> str | None:
        """parquet, jsonl, text, bin, or None for what cannot be read."""
        return KINDS.get(Path(Path(self.name).stem if self.packing else self.name).suffix.lower())


def one_kind(files: list[File], place: str, say: bool = False) -> list[File]:
    """The files to read, by name: of several kinds the first of parquet, JSONL, text (a README beside data is none)."""
    for kind in ("parquet", "jsonl", "text"):
        chosen = sorted((f for f in files if f.kind == kind), key=lambda f: f.name)
        if chosen:
            others = [f.name for f in files if f.kind in ("parquet", "jsonl", "text") and f.kind != kind]
            if others and say:
                print(f"{place}: {len(chosen)} {kind} files are read; of another kind, and left out: {len(others)} "
                      f"({', '.join(sorted(others)[:3])}{', ...' if len(others) > 3 else ''})", file=sys.stderr)  # fmt: skip
            return chosen
    raise ValueError(f"{place} holds nothing to read: wanted are files named *.parquet, *.jsonl, *.json, *.txt or "
                     "*.md, the last four also with .gz or .zst")


def local_files(source: str, say: bool = False) -> list[File]:
    root = Path(source)
    if not root.exists():
        raise ValueError(f"--source {source} does not exist: give a file, a folder, hub or builtin")
    paths = [root]
    if root.is_dir():  # the manifest is that of shards made of these texts, which may lie beside them
        paths = [p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".") and p.name != "manifest.json"]
    base = root if root.is_dir() else root.parent
    return one_kind([File(p.relative_to(base).as_posix(), str(p), p.stat().st_size) for p in paths], source, say)


# ---- the network -----------------------------------------------------------------------------------------------------

MAX_WAIT = 60  # seconds between two tries at most; they wait 1, 2, 4, ...


class NetworkTrouble(OSError):
    """The network failed for longer than we wait."""


def tries() -> int:
    return int(os.environ.get("FINEWEB_TRIES", 8))


def wait(failures: int, whose: str, trouble: str, retry_after: str | None = None):
    """Longer after each failure, and not in silence. whose: the answer that did not come."""
    asked = float(retry_after) if retry_after and retry_after.isdigit() else 0
    seconds = min(max(2 ** (failures - 1), asked), MAX_WAIT)
    said = f"no answer for {whose} ({trouble[:80]}); try {failures + 1} of {tries()} in {seconds:.0f} s"
    print(said, file=sys.stderr, flush=True)
    time.sleep(seconds)


def hub_has_a_name() -> bool:
    """False where the hub's address cannot be looked up: there is no network, and waiting is no use."""
    from huggingface_hub.constants import ENDPOINT
    if urllib.request.getproxies():  # a proxy looks it up for us
        return True
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlparse(ENDPOINT).hostname, 443))
    except OSError:
        return False


def stream(url: str, start: int, stop: int):
    """Bytes start..stop of `url`, in pieces. A connection that breaks is taken up again where it broke."""
    import requests
    import urllib3
    from huggingface_hub.utils import build_hf_headers
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # requests keeps the token off other hosts
    failures, trouble = 0, "the connection was closed early"
    while start < stop:
        retry_after = None
        try:
            with requests.get(url, headers={**headers, "Range": f"bytes={start}-{stop - 1}"}, stream=True,
                              timeout=30) as response:
                if response.status_code in (401, 403, 404, 416):
                    raise ValueError(f"{url} answers {response.status_code} {response.reason}: wrong name, or a data "
                                     "set that wants you to log in (hf auth login) or accept its terms first")
                retry_after = response.headers.get("Retry-After")
                response.raise_for_status()
                if response.status_code != 206 and start:
                    raise ValueError(f"{url} cannot be read in parts: download the file and give it to --source")
                while piece := response.raw.read1(2**20)[:stop - start]:  # what is there: nothing is lost by a break
                    start, failures = start + len(piece), 0
                    yield piece
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            trouble = f"{type(error).__name__}: {error}"[:200]
        if start < stop:
            failures += 1
            if failures >= tries():
                raise NetworkTrouble(f"{url} could not be read ({trouble}), tried {failures} times")
            wait(failures, url.rpartition("/")[2], trouble, retry_after)


class HttpFile(io.RawIOBase):
    """A file on a web server, read by byte ranges; `bytes_read` counts what has travelled."""

    def __init__(self, url: str, size: int):
        self.url, self.size, self.position, self.bytes_read = url, size, 0, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def tell(self):
        return self.position

    def readinto(self, buffer):
        stop, done = min(self.position + len(buffer), self.size), 0
        for piece in stream(self.url, self.position, stop):
            buffer[done:done + len(piece)] = piece
            done += len(piece)
        self.position += done
        self.bytes_read += done
        return done


def hub_files(dataset: str, name: str, split: str, revision: str) -> tuple[str, list[File]]:
    """The commit that `revision` is now, and the files of one configuration of a data set on the hub.

    Token shards (.bin) count where there is nothing else. A data set without configurations in its card is taken as
    folders: `name` is one of them, or empty for all.
    """
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    for failures in range(1, tries() + 1):
        try:
            info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True, timeout=30)
            break
        except Exception as error:  # whatever the HTTP library below raises
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, HfHubHTTPError) and status in (401, 403, 404):
                raise ValueError(f"the hub has no data set {dataset!r} at revision {revision!r} that you may read "
                                 f"({type(error).__name__}): check --dataset, or log in with hf auth login") from error
            nobody = failures >= 3 and not hub_has_a_name()
            if failures == tries() or nobody:
                why = "its address cannot be looked up" if nobody else type(error).__name__
                raise NetworkTrouble(f"the hub did not answer ({why}), tried {failures} times") from error
            wait(failures, dataset, type(error).__name__)
    every = [File(s.rfilename, hf_hub_url(dataset, s.rfilename, repo_type="dataset", revision=info.sha), s.size or 0,
                  s.lfs.sha256 if s.lfs else None) for s in info.siblings]
    configs = (info.card_data or {}).get("configs") or []
    chosen = [c for c in configs if c["config_name"] == name] if name else \
        [c for c in configs if c.get("default") or c["config_name"] == "default"] or configs[:1]
    if configs and not chosen:
        raise ValueError(f"{dataset} has no configuration {name!r}; --name is one of "
                         + ", ".join(c["config_name"] for c in configs))
    patterns = _patterns(chosen[0].get("data_files"), split) if chosen else [f"{name}/*" if name else "*"]
    files = [f for f in every if any(fnmatch.fnmatch(f.name, p) for p in patterns)]
    if not any(f.kind in ("parquet", "jsonl", "text") for f in files if not f.name.lower().endswith(".md")):
        bins = sorted((f for f in files if f.kind == "bin"), key=lambda f: f.name)
        if bins:
            return info.sha, bins
    return info.sha, one_kind(files, f"{dataset} ({name or 'all files'}, split {split})")


def _patterns(data_files: Any, split: str) -> list[str]:
    """File name patterns of one split, from the three ways in which a data set card may write them."""
    if data_files is None:
        return ["*"]
    if isinstance(data_files, str):
        return [data_files]
    patterns = []
    for item in data_files:
        if isinstance(item, str):
            patterns.append(item)
        elif item["split"] == split:
            patterns += [item["path"]] if isinstance(item["path"], str) else item["path"]
    if not patterns:
        raise ValueError(f"there is no split {split!r}; --split is one of "
                         + ", ".join(sorted({item["split"] for item in data_files})))
    return patterns


# ---- units -----------------------------------------------------------------------------------------------------------

BLOCK = 4 * 2**20  # bytes of text in a unit of lines
LONGEST_LINE = 256 * 2**20


@dataclass(frozen=True)
class Unit:
    file: File
    file_index: int
    index: int  # within the file
    size: int  # bytes of text, uncompressed
    block: bytes | None = None  # the lines; None: row group `index` of the parquet file
    first_line: int = 1


def open_file(file: File) -> Any:
    """A readable, seekable binary file."""
    if "://" in file.path:
        return io.BufferedReader(HttpFile(file.path, file.size), 2**16 if file.kind == "parquet" else BLOCK)
    return open(file.path, "rb")


def open_parquet(file: File, column: str):
    """The pyarrow ParquetFile, after a look at whether it has a column of text with that name."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    try:
        parquet = pq.ParquetFile(open_file(file))
    except pa.ArrowException as error:
        raise ValueError(f"{file.path} is no readable parquet file ({str(error)[:120]}): download it again") from error
    schema = parquet.schema_arrow
    if column not in schema.names:
        raise ValueError(f"{file.path} has no column {column!r}; --text_column is one of {', '.join(schema.names)}")
    kind = schema.field(column).type
    if not any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                         pa.types.is_large_binary, pa.types.is_dictionary)):
        raise ValueError(f"{file.path}: column {column!r} holds {kind}, wanted is text; choose another --text_column")
    return parquet


def column_bytes(parquet, column: str, group: int) -> int:
    """Uncompressed size of `column` in a row group."""
    meta = parquet.metadata.row_group(group)
    chunks = [meta.column(i) for i in range(meta.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] == column)


def units_of(file: File, file_index: int, column: str, start: int = 0):
    """The units of a file in order, from number `start` on. They depend on the file alone."""
    if file.kind == "parquet":
        parquet = open_parquet(file, column)
        for group in range(start, parquet.num_row_groups):
            yield Unit(file, file_index, group, column_bytes(parquet, column, group))
        return
    line = 1
    for index, block in enumerate(blocks_of(file)):
        if index >= start:
            yield Unit(file, file_index, index, len(block), block, line)
        line += block.count(b"\n")


def blocks_of(file: File):
    """The content of a JSONL or text file in blocks that end where a line ends (text without lines: a word)."""
    import pyarrow as pa
    rest = b""
    with open_file(file) as raw:
        data = pa.CompressedInputStream(pa.PythonFile(raw), file.packing) if file.packing else raw
        while True:
            try:
                more = data.read(BLOCK)
            except NetworkTrouble:
                raise
            except OSError as error:
                raise ValueError(f"{file.path} cannot be unpacked ({str(error)[:120]}): it is broken or cut short; "
                                 "download it again") from error
            if not more:
                break
            rest += more
            cut = rest.rfind(b"\n") + 1
            if not cut and file.kind == "text" and len(rest) >= BLOCK:
                cut = rest.rfind(b" ")
            if cut <= 0:
                if len(rest) > LONGEST_LINE:
                    raise ValueError(f"{file.path} has a line of over {LONGEST_LINE >> 20} MB: it is not {file.kind}")
                continue
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def records_of(unit: Unit):
    """(line number, object) for every line of a JSONL unit that is not blank."""
    for number, line in enumerate(unit.block.split(b"\n"), unit.first_line):
        if not line.strip():
            continue
        where = f"{unit.file.path}, line {number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); "
                             "convert the file first, for example with iconv") from error
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); wanted is one object a line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON {type(record).__name__}, wanted is one object a line")
        yield number, record


def documents_of(unit: Unit, column: str):
    """Lists (or arrow arrays) of the documents of a unit, empty ones included as empty."""
    if unit.block is None:
        yield from _parquet_documents(unit, column)
    elif unit.file.kind == "jsonl":
        texts = []
        for number, record in records_of(unit):
            text = record.get(column, column)
            if column not in record or not isinstance(text, str | None):
                there = ", ".join(k for k, v in record.items() if isinstance(v, str)) or "none"
                raise ValueError(f"{unit.file.path}, line {number}: no text under {column!r}; --text_column is one of: {there} "
                                 f"(of the keys {', '.join(record)}); a conversation is under messages")
            texts.append(text or "")
        yield texts
    else:
        try:
            yield [unit.block.decode("utf-8")]
        except UnicodeDecodeError as error:
            line = unit.first_line + unit.block[:error.start].count(b"\n")
            raise ValueError(f"{unit.file.path}, line {line}: not UTF-8 ({error.reason}); convert the file first, "
                             "for example with iconv") from error


_parquet: list[tuple[tuple, Any]] = []  # the file that this process read last: its index is not fetched for every group


def _parquet_documents(unit: Unit, column: str):
    import pyarrow as pa
    if not _parquet or _parquet[0][0] != (unit.file, column):
        _parquet[:] = [((unit.file, column), open_parquet(unit.file, column))]
    try:
        for batch in _parquet[0][1].iter_batches(1024, row_groups=[unit.index], columns=[column], use_threads=False):
            texts = batch.column(0).cast(pa.large_string())
            texts.validate(full=True)
            yield texts.fill_null("")
    except pa.ArrowInvalid as error:
        what = "text that is not UTF-8" if "UTF8" in str(error) else f"broken data ({str(error)[:120]})"
        raise ValueError(f"{unit.file.path}, row group {unit.index}: {what} in column {column!r}; mend or leave out "
                         "this file") from error
    except NetworkTrouble:
        raise
    except OSError as error:
        raise ValueError(f"{unit.file.path}, row group {unit.index}: broken data ({str(error)[:120]}); download it "
                         "again") from error


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The documents of a unit, one after the other, each led by end-of-text."""
    ids: np.ndarray  # uint16
    lengths: np.ndarray  # of the documents, end-of-text included
    text_bytes: int
    empty: int  # documents left out because there was nothing in them


_tokenizers: dict = {}  # made once in every process


def tokenise(unit: Unit, tokenizer: str, column: str) -> Tokens:
    import pyarrow as pa
    import pyarrow.compute as pc
    if tokenizer not in _tokenizers:
        _tokenizers[tokenizer] = get_tokenizer(tokenizer)
    tok, ids, lengths, text_bytes, empty = _tokenizers[tokenizer], [], [], 0, 0
    for texts in documents_of(unit, column):
        if isinstance(texts, pa.Array):
            full = pc.match_substring_regex(texts, f"[^{BLANK}]")  # looks no further than the first letter
            empty += len(texts) - pc.sum(full).as_py() if len(texts) else 0
            texts = texts.filter(full)
            text_bytes += pc.sum(pc.binary_length(texts)).as_py() or 0
        else:
            full = [text for text in texts if text.strip()]
            empty, texts = empty + len(texts) - len(full), full
            text_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)
        if len(texts):
            new_ids, new_lengths = tok.encode_documents(texts)
            ids.append(new_ids)
            lengths.append(new_lengths)
    result = Tokens(np.concatenate(ids or [np.zeros(0, np.uint16)]), np.concatenate(lengths or [np.zeros(0, np.int64)]),
                    text_bytes, empty)
    if unit.file.kind == "text" and unit.index and len(result.ids):  # a text file is one document
        return Tokens(result.ids[1:], result.lengths[:0], text_bytes, 0)
    return result
