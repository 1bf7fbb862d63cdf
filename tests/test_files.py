"""lab/files.py: errors are one sentence with the file and the fix; writes are atomic."""

import errno
import os

import pytest

from lab.cli import UserError
from lab.files import atomic_write, read_errors, read_json, write_errors


def test_invalid_json_is_reported_with_its_path(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{"number": 3}')
    assert read_json(path, number=int) == {"number": 3}
    for text, said in {
        b'{"a": ': "is damaged or of another format", b"[1]": "contains a list, not an object",
        b"{}": "number is null", b'{"number": "three"}': 'number is "three"',
        b'{"number": 1' + b"0" * 400 + b"}": "number is Infinity",
        b"[" * 100_000: "is damaged", b"\xff": "is damaged",
    }.items():  # fmt: skip
        path.write_bytes(text)
        with pytest.raises(UserError, match=f"notes.json .*{said}.*; delete the notes"):
            read_json(path, hint="delete the notes", number=int)


def test_system_errors_are_distinguished_from_damage():
    for number, said in {
        errno.EACCES: "permission denied", errno.ENOSPC: "the disk is full", errno.EROFS: "read-only",
        errno.EMFILE: "too many open files", errno.ENOENT: "there is no file|its folder does not exist",
    }.items():  # fmt: skip
        said = rf"it.npy.*({said})|({said}).*it.npy"
        for manager in (
            read_errors("it.npy", "file", "way out"),
            write_errors("it.npy", "way out"),
        ):
            with pytest.raises(UserError, match=said) as raised, manager:
                raise OSError(number, os.strerror(number), "it.npy")
            assert "damaged" not in str(raised.value)
    with pytest.raises(ValueError), write_errors("x"):  # a bug is neither
        raise ValueError("a bug")
    for error in (MemoryError, NameError):
        with pytest.raises(error), read_errors("x", "file", ""):
            raise error


def test_writes_are_atomic(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    atomic_write(path, b"one")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="config.json cannot be written: the disk is full"):
        atomic_write(path, b"two")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]
