"""lab/files.py: errors are one sentence with the file and the fix; writes are atomic."""

import errno
import os

import pytest
from conftest import ROOT, TINY_RUN, run_python, succeed, write_shards

from lab.cli import UserError
from lab.files import atomic_write, check_writable, read_errors, read_json, write_errors


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


@pytest.mark.skipif(os.name != "posix", reason="links and FIFOs")
def test_a_part_that_is_a_link_or_a_fifo_is_replaced_and_not_followed(tmp_path):
    path, part = tmp_path / "config.json", tmp_path / "config.json.part"
    (mine := tmp_path / "mine").write_text("keep")
    part.symlink_to(mine)
    atomic_write(path, b"one")
    assert path.read_bytes() == b"one" and mine.read_text() == "keep" and not path.is_symlink()
    os.mkfifo(part)
    atomic_write(path, b"two")
    assert path.read_bytes() == b"two" and not part.exists()


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
def test_a_fifo_is_neither_opened_nor_replaced(tmp_path):
    os.mkfifo(path := tmp_path / "out.json")
    for write in (lambda: check_writable(path, "json"), lambda: atomic_write(path, b"one")):
        with pytest.raises(UserError, match="out.json is a FIFO, socket or device"):
            write()
    assert path.is_fifo()


@pytest.mark.skipif(os.name != "posix", reason="links and FIFOs")
def test_the_copy_of_a_tokenizer_follows_no_link_and_reads_no_fifo(tmp_path):
    write_shards(tmp_path / "data")
    tokenizer, copy = tmp_path / "data" / "tokenizer.json", tmp_path / "log/r/tokenizer.json"
    tokenizer.write_text("{}")
    (mine := tmp_path / "mine").write_text("keep")
    copy.parent.mkdir(parents=True)
    copy.symlink_to(mine)
    run = ROOT / "train_gpt2.py", *TINY_RUN, "--data", "data", "--max_steps", 1
    assert run_python(*run, cwd=tmp_path).returncode == 0
    assert mine.read_text() == "keep" and copy.read_text() == "{}" and not copy.is_symlink()
    tokenizer.unlink()
    os.mkfifo(tokenizer)
    done = run_python(*run, "--run_name", "again", cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "data/tokenizer.json is a FIFO" in done.stderr, done.stderr


COMMANDS = {
    "sample": ("sample.py", "--model", "log/r", "--max_new_tokens", 1),
    "report": ("lab", "report", "log/r"),
    "plot": ("lab", "plot", "log/r"),
    "export": ("lab", "export", "log/r", "--out", "model"),
    "resume": ("train_gpt2.py", "--resume", "--run_name", "r", "--max_steps", 3),
    "again": ("train_gpt2.py", *TINY_RUN, "--data", "data"),
    "verify": ("fineweb.py", "--verify", "--out", "data"),
}


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
@pytest.mark.parametrize(
    "file, commands",
    [
        ("log/r/config.json", "resume"), ("log/r/log.jsonl", "report plot resume again"),
        ("log/r/model_000002.pt", "sample export resume"),
        ("data/x_train_000000.npy", "resume again"), ("data/manifest.json", "resume again verify"),
    ],
)  # fmt: skip
def test_a_fifo_in_place_of_a_file_is_a_sentence(tmp_path, file, commands):
    write_shards(tmp_path / "data")
    succeed("train_gpt2.py", *TINY_RUN, "--data", "data", "--max_steps", 2, cwd=tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    for program, *args in (COMMANDS[name] for name in commands.split()):
        if args[-1] == "data":  # a new run in the folder of one that was killed early
            (tmp_path / "log/r/model_000002.pt").unlink(missing_ok=True)
        done = run_python(ROOT / program, *args, cwd=tmp_path, timeout=60)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"{file} is a FIFO, socket or device, not a file" in done.stderr, done.stderr
