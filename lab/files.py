"""Reading and writing files: one reader for each kind, which names a wrong file and a way out."""

import contextlib
import errno
import functools
import json
import os
from pathlib import Path

from lab.cli import ROOT, UserError

SYSTEM = {  # what the system says is no sign of damage
    errno.ENOENT: "its folder is not there; put it back, or choose another",
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "your share of the disk is used up; make room",
    errno.EACCES: "you have no permission; change it",
    errno.EPERM: "you have no permission; change it",
    errno.EROFS: "the disk is read-only; choose another place",
    errno.EMFILE: "too many files are open at once; raise the limit with `ulimit -n`",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of its path is a file, not a folder; name another",
    errno.EIO: "the disk reports an error; try a copy on another one",
}


class Damaged(UserError):
    """A file that is there and may be read, and is not what it should be."""


@contextlib.contextmanager
def reading(path, what, way_out):
    """Whatever a parser raises in the body becomes a UserError that names the file.

    what: the kind of file; way_out: what to do about a damaged one, for which Damaged is raised.
    That the file is missing, may not be read or the like is told apart from it.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}; {way_out}") from error
    except Exception as error:  # each parser has exceptions of its own
        if isinstance(error, OSError) and error.errno in SYSTEM:
            raise UserError(f"{what} {path} cannot be read: {SYSTEM[error.errno]}") from error
        if isinstance(error, (MemoryError, NameError, ImportError)):  # not of the file
            raise
        raise Damaged(
            f"{what} {path} is damaged or of another kind ({first_line(error)}); {way_out}"
        ) from error


@contextlib.contextmanager
def writing(path, way_out="choose another place"):
    """The system's refusal to write, in the body, becomes a UserError with the file and why."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = SYSTEM.get(error.errno, f"{error.strerror}; {way_out}")
        raise UserError(f"{path} cannot be written: {reason}") from error


def first_line(error):
    """The first sentence of what an exception says, or its name where it says nothing."""
    said = str(error).strip() or type(error).__name__
    line = said.splitlines()[0].split(". ")[0]
    return line if len(line) <= 120 else f"{line[:117]}..."


def loads(text):
    """json.loads, but that whole numbers of more than 18 digits, which no file of ours has, are
    floats: they fit no other type."""
    return json.loads(text, parse_int=lambda digits: (int if len(digits) < 19 else float)(digits))


def read_json(path, way_out="mend it, or make anew what it is about", **types):
    """The dict in a JSON file, which has these keys with values of these types (a type or a tuple
    of them)."""
    with reading(path, "file", way_out):
        found = loads(Path(path).read_text(encoding="utf-8"))
        check_keys(found, **types)
    return found


def check_keys(found, **types):
    """Raise TypeError where `found`, from a JSON file, is no dict with values of these types."""
    if not isinstance(found, dict):
        raise TypeError(f"it holds a {type(found).__name__}, wanted is an object")
    for key, kind in types.items():
        if not isinstance(found.get(key), kind):
            raise TypeError(f"{key} is {json.dumps(found.get(key))[:40]}")


@contextlib.contextmanager
def whole_file(path):
    """A binary file for the body to write. Then `path` holds all of it or, if something is raised,
    what it held before: it is written beside it, and renamed when it is on disk."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except Exception:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_whole(path, data):
    """`path` holds all of these bytes or is left as it was."""
    with whole_file(path) as file:
        file.write(data)


def sync_folder(folder):
    """Make renames in `folder` last through a power cut; Windows needs no such call."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@functools.cache
def template(name):
    """One of lab's templates, read once; all that its `render` puts in is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = FileSystemLoader([ROOT / "lab", ROOT / "lab" / "tools"])
    how = dict(autoescape=True, undefined=StrictUndefined, trim_blocks=True, auto_reload=False)
    return Environment(loader=folders, **how).get_template(name)


@contextlib.contextmanager
def only_writer(folder, refusal, wait=False):
    """While this lasts, no other process is an only_writer of `folder`, which is made if missing.

    Raises UserError(refusal) where there is one already, or with `wait` waits for its end. The
    system drops the lock with the process that holds it, however that ends.
    """
    import filelock

    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=-1 if wait else 0)
        try:
            held = lock.acquire()
        except filelock.Timeout:
            raise UserError(refusal) from None
    with held:
        yield


def check_writable(path, flag):
    """Raise UserError, before the work for it is done, where --flag's file cannot be written."""
    path = Path(path)
    with writing(path, f"name another place with --{flag}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)
