"""Reading and writing files: errors that name the file and the fix, atomic writes, locks."""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lab.cli import UserError

ERRNO_HINTS = {  # the system's errors, which do not mean that the file is damaged
    errno.ENOENT: "its folder does not exist; create it, or choose another",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "your disk quota is used up; free some space",
    errno.EACCES: "permission denied; change the permissions",
    errno.EPERM: "permission denied; change the permissions",
    errno.EROFS: "the disk is read-only; choose another place",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n`",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "part of its path is a file, not a folder; choose another",
    errno.EIO: "the disk reports an error; try a copy on another one",
}


class CorruptFileError(UserError):
    """The file exists and can be read, but its contents are invalid."""


def check_regular(path: str | Path) -> None:
    """Raise UserError for a FIFO, socket or device: opening or reading one may block forever."""
    with contextlib.suppress(OSError, ValueError):  # missing: opening it raises the right error
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UserError(f"{path} is a FIFO, socket or device, not a file; remove or rename it")


@contextlib.contextmanager
def read_errors(path: str | Path, kind: str, hint: str) -> Iterator[None]:
    """Convert exceptions raised while the body parses `path` into a UserError.

    kind: what the file is, such as "checkpoint". hint: what to do if it is missing or damaged. A damaged
    file raises CorruptFileError; a missing, unreadable or special one (FIFO, device) a plain UserError.
    """
    check_regular(path)
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no {kind} {path}; {hint}") from error
    except Exception as error:  # each parser has its own exceptions
        if isinstance(error, OSError) and error.errno in ERRNO_HINTS:
            raise UserError(f"{kind} {path} cannot be read: {ERRNO_HINTS[error.errno]}") from error
        if isinstance(error, (MemoryError, NameError, ImportError)):  # not the file's fault
            raise
        raise CorruptFileError(
            f"{kind} {path} is damaged or of another format ({first_line(error)}); {hint}"
        ) from error


@contextlib.contextmanager
def write_errors(path: str | Path, hint: str = "choose another place") -> Iterator[None]:
    """Convert an OSError raised while the body writes `path` into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = ERRNO_HINTS.get(error.errno, f"{error.strerror}; {hint}")
        raise UserError(f"{path} cannot be written: {reason}") from error


def first_line(error: BaseException | None) -> str:
    """The first sentence of an exception's message, or its class name if it has none."""
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].split(". ")[0]
    return line if len(line) <= 120 else f"{line[:117]}..."


def parse_json(text: str) -> Any:
    """json.loads, but integers of more than 18 digits, which would overflow int64, become floats."""
    return json.loads(text, parse_int=lambda digits: (int if len(digits) < 19 else float)(digits))


def finite_json(value: Any) -> Any:
    """Replace nan and infinities, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {key: finite_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(
    path: str | Path, hint: str = "repair or regenerate it", **types: type | tuple
) -> dict[str, Any]:
    """The dict in a JSON file. types: required keys and the types of their values."""
    with read_errors(path, "file", hint):
        found = parse_json(Path(path).read_text(encoding="utf-8"))
        check_keys(found, **types)
    return found


def read_lenient(path: Path) -> str:
    """The text of a UTF-8 file, with U+FFFD for invalid bytes; "" if it cannot be read."""
    check_regular(path)
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def check_keys(found: Any, **types: type | tuple) -> None:
    """Raise TypeError unless `found`, from a JSON file, is a dict with values of these types."""
    if not isinstance(found, dict):
        raise TypeError(f"it contains a {type(found).__name__}, not an object")
    for key, kind in types.items():
        if not isinstance(found.get(key), kind):
            raise TypeError(f"{key} is {json.dumps(found.get(key), default=repr)[:40]}")


@contextlib.contextmanager
def atomic_open(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a binary file for writing. If the body raises, `path` keeps its old contents: the data goes
    to a file beside it, which is flushed to disk and then renamed."""
    path = Path(path)
    check_regular(path)  # os.replace would put a file in the place of a device
    part = path.with_name(path.name + ".part")
    with write_errors(path):
        try:
            part.unlink(missing_ok=True)  # of a killed process; the target of a link stays
            with part.open("xb") as file:  # x: refuse a link or FIFO that appears meanwhile
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except Exception:
            part.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def atomic_write(path: str | Path, data: bytes | memoryview) -> None:
    """Write these bytes to `path` completely, or leave the file as it was."""
    with atomic_open(path) as file:
        file.write(data)


def fsync_dir(folder: Path) -> None:
    """Make renames in `folder` durable (survive a power failure). Windows needs no such call."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def dir_lock(folder: str | Path, refusal: str, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, which is created if missing.

    Raises UserError(refusal) if another process holds it, or with `wait` blocks until it is released.
    The system releases the lock when the process ends, even if it is killed.
    """
    import filelock  # optional: sampling and evaluation do not need it

    folder = Path(folder)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=-1 if wait else 0)
        try:
            held = lock.acquire()
        except filelock.Timeout:
            raise UserError(refusal) from None
    with held:
        yield


def check_writable(path: str | Path, flag: str) -> None:
    """Raise UserError if the file given as --flag cannot be written; call it before the work starts."""
    path = Path(path)
    check_regular(path)
    with write_errors(path, f"choose another place with --{flag}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink(missing_ok=True)
