"""One reader for each kind of file: what is wrong is one sentence that names the file and the way
out."""

import errno
import io
import os
import sys

import numpy as np
import pytest
from conftest import ROOT, run_python

from lab.cli import UserError
from lab.data.shards import progress
from lab.files import (
    check_writable,
    only_writer,
    read_array,
    read_json,
    reading,
    write_whole,
    writing,
)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is damaged or of another kind"),
        ('{"a": ', "is damaged or of another kind"),
        ("[1]", "holds a list, wanted is an object"),
        ("{}", "number is null"),
        ('{"number": "three"}', 'number is "three"'),
        ('{"number": 1' + "0" * 400 + "}", "number is Infinity"),
        ("[" * 100_000, "is damaged or of another kind"),
        ("\udcff", "is damaged or of another kind"),
    ],
    ids=["empty", "cut", "list", "missing", "type", "huge", "deep", "bytes"],
)
def test_json_that_is_wrong_is_named(tmp_path, text, said):
    path = tmp_path / "notes.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"notes.json .*{said}.*; delete the notes"):
        read_json(path, way_out="delete the notes", number=int)
    path.write_text('{"number": 3}')
    assert read_json(path, number=int) == {"number": 3}


def test_arrays_are_one_row_of_their_type_and_nothing_is_unpickled(tmp_path):
    path = tmp_path / "row.npy"
    np.save(path, np.arange(5, dtype=np.uint16))
    assert read_array(path, np.uint16).tolist() == [0, 1, 2, 3, 4]
    whole = path.read_bytes()
    for wrong in (np.arange(5), np.zeros((2, 2), np.uint16), np.array([{}], dtype=object)):
        np.save(path, wrong, allow_pickle=True)
        with pytest.raises(UserError, match="row.npy"):
            read_array(path, np.uint16)
    for cut in (whole[:-3], whole[:20], b""):
        path.write_bytes(cut)
        with pytest.raises(UserError, match="row.npy is damaged"):
            read_array(path, np.uint16)


@pytest.mark.parametrize(
    "number, said",
    [
        (errno.EACCES, "no permission"),
        (errno.ENOSPC, "the disk is full"),
        (errno.EMFILE, "too many files are open"),
        (errno.EROFS, "read-only"),
        (errno.ENOENT, "there is no file|its folder has gone; put it back"),
    ],
)
def test_the_system_refusing_is_told_apart_from_damage(number, said):
    for manager in (reading("it.npy", "file", "way out"), writing("it.npy", "way out")):
        with (
            pytest.raises(UserError, match=rf"it.npy.*({said})|({said}).*it.npy") as raised,
            manager,
        ):
            raise OSError(number, os.strerror(number), "it.npy")
        assert "damaged" not in str(raised.value)


def test_bugs_are_not_dressed_as_a_users_errors(tmp_path):
    with pytest.raises(ValueError), writing(tmp_path / "x"):
        raise ValueError("a bug")
    with pytest.raises(MemoryError), reading(tmp_path / "x", "file", ""):
        raise MemoryError


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_whole(path, b"one", b"two")
    assert path.read_bytes() == b"onetwo"

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="config.json cannot be written: the disk is full"):
        write_whole(path, b"three")
    assert path.read_bytes() == b"onetwo" and [p.name for p in tmp_path.iterdir()] == [
        "config.json"
    ]


def test_one_process_writes_a_folder_and_a_killed_one_holds_nothing(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[2])\nfrom lab.files import only_writer\n"
    take = code + "with only_writer(sys.argv[1], 'somebody is there'): print('in')"
    with only_writer(tmp_path / "new", "taken"):
        other = run_python("-c", take, tmp_path / "new", ROOT, cwd=tmp_path)
        assert other.returncode == 1 and "UserError: somebody is there" in other.stderr
    killed = code + "import os\nwith only_writer(sys.argv[1], ''): os.kill(os.getpid(), 9)"
    assert run_python("-c", killed, tmp_path / "new", ROOT, cwd=tmp_path).returncode == -9
    assert run_python("-c", take, tmp_path / "new", ROOT, cwd=tmp_path).stdout == "in\n"


def test_a_place_that_cannot_be_written_is_known_before(tmp_path):
    check_writable(tmp_path / "new" / "picture.png", "picture")
    assert not (tmp_path / "new" / "picture.png").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another place with --picture"):
        check_writable(tmp_path / "file" / "picture.png", "picture")


def test_bars_are_for_the_first_process_and_a_terminal_alone(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    for stderr, rank, off in ((terminal, 0, False), (terminal, 1, True), (io.StringIO(), 0, True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("RANK", str(rank))
        bar = progress([1, 2], "reading")
        assert bool(bar.disable) == off and list(bar) == [1, 2]
