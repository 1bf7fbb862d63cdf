"""Faults of the environment: a full disk, a moved folder, kill -9 at critical moments, closed streams, and
damaged files from bench/fuzz.py. docs/FAULTS.md lists all."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, driver, of_kind, read_run, run_python, succeed, wait_for_steps

from lab.cli import UserError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="faults of Linux and macOS")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 kB; a checkpoint of the tiny run takes 500 kB, a shard 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_ends_a_run_with_one_sentence(small_disk, run_train):
    done = run_train(
        "--log_dir", small_disk, "--checkpoint_every", 2, "--max_steps", 9, "--keep_last", 9
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    said = r"train_gpt2.py: error:.*model_000004.pt cannot be written.*disk.*"
    assert re.fullmatch(said, done.stderr.splitlines()[-1])
    assert [p.name for p in (small_disk / "r").glob("model_*")] == ["model_000002.pt"]


def test_full_disk_ends_a_build_that_continues_when_there_is_space(small_disk, tmp_path):
    """The error is one sentence, all shards are complete, and the final bytes equal an undisturbed build."""
    (tmp_path / "t.txt").write_text("a line of text like those before it\n" * 12_000)  # 864 kB
    flags = ["--source", tmp_path / "t.txt", "--tokenizer", "bytes", "--shard_tokens", "100k"]
    flags += ["--workers", 0, "--out"]
    out, whole = small_disk / "o", tmp_path / "whole"
    full = run_python(ROOT / "fineweb.py", *flags, out, cwd=tmp_path)
    said = r"t_train_000003.npy cannot be written: the disk is full; free some space\n"
    assert full.returncode == 2 and re.fullmatch(rf"fineweb.py: error: .*{said}", full.stderr)
    left = {path.name: path.read_bytes() for path in out.glob("*.npy*")}
    subprocess.run(["mount", "-o", "remount,size=2m", out.parent], check=True)
    for place in (out, whole):
        succeed("fineweb.py", *flags, place, cwd=tmp_path)
    again, undisturbed = ({p.name: p.read_bytes() for p in it.iterdir()} for it in (out, whole))
    assert again == undisturbed and len(left) == 3 and left.items() <= again.items()


def test_read_only_disk_gives_one_sentence(small_disk, run_train):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = run_train("--log_dir", small_disk, "--max_steps", 1)
    said = f"train_gpt2.py: error: {small_disk / 'r'} cannot be written: the disk is read-only; "
    assert done.returncode == 2 and done.stderr == f"{said}choose another place\n"


def test_training_continues_if_the_log_cannot_be_written(small_disk, shards):
    """Neither errors of log.jsonl nor those of TensorBoard stop the run or print a traceback."""
    full, folder = small_disk / "full", small_disk.parent
    full.write_bytes(bytes(590_000))
    patch = "import lab.trainer.checkpoint as c\nreal = c.save_checkpoint\n"
    patch += f"c.save_checkpoint = lambda *a: (os.remove({str(full)!r}), real(*a))[1]"
    args = [*TINY_RUN, "--data", folder / "data", "--log_dir", small_disk, "--max_steps", 100]
    done = run_python(driver(folder, patch), *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ("log.jsonl", "events.out.tfevents"):
        said = f"{name} cannot be written: the disk is full; free some space; training continues without it"
        assert done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr and (small_disk / "r" / "model_000100.pt").exists()


def test_run_directory_moved_during_training(tmp_path, start_training):
    process = start_training("--checkpoint_every", 50)
    wait_for_steps(process, tmp_path / "log" / "r")
    (tmp_path / "log" / "r").rename(tmp_path / "log" / "s")
    assert process.wait() == 2 and "Traceback" not in process.stderr, process.stderr
    assert "its folder does not exist; create it" in process.stderr.splitlines()[-1]
    assert read_run(tmp_path / "log" / "s").losses, "the files are in the new place"


AT_THE_END = """event = Log.event
Log.event = lambda self, kind, *more: kill() if kind == 'end' else event(self, kind, *more)"""


@pytest.mark.parametrize(
    "patch, again",
    [("Log.start = kill", ["--max_steps", 4]), (AT_THE_END, ["--resume"])],
    ids=["before the first line of the log", "after the last checkpoint"],
)
def test_run_continues_after_a_kill_at_a_critical_moment(tmp_path, shards, run_train, patch, again):
    kill = "from lab.trainer.loggers import RunLogger as Log\nkill = lambda *_: os.kill(os.getpid(), 9)\n"
    args = [*TINY_RUN, "--data", shards, "--max_steps", 4]
    killed = run_python(driver(tmp_path, kill + patch), *args, cwd=tmp_path)
    assert killed.returncode == -9 and (tmp_path / "log" / "r" / "config.json").exists()
    (tmp_path / "log" / "r" / "model_000003.pt.part").write_bytes(b"begun")
    again = run_train(*again)
    assert again.returncode == 0, again.stderr
    run = read_run(tmp_path / "log" / "r")
    assert not list(run.dir.glob("*.part"))
    assert of_kind(run, "end")[-1]["reason"] == "done" and list(run.checkpoints) == [4]
    assert "already done 4 steps" in run_train("--resume").stderr, (
        "the run is recognized as finished"
    )


def test_closed_streams_cause_no_traceback(tmp_path, shards):
    words = [sys.executable, ROOT / "train_gpt2.py", *TINY_RUN, "--data", shards, "--max_steps", 2]
    closed = " ".join(map(str, words)) + " <&- >&- 2>&-"
    assert subprocess.run(closed, shell=True, cwd=tmp_path).returncode == 0
    assert list(read_run(tmp_path / "log" / "r").checkpoints) == [2]


@pytest.mark.slow
def test_fuzzing_finds_nothing(capsys):
    fuzz = pytest.importorskip("fuzz")  # needs resource limits of Linux
    assert fuzz.main(["--count", "100"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_fuzzing_in_parts(tmp_path):
    """Several processes read each seed once, and --out keeps the results of an earlier command."""
    command = [
        ROOT / "bench" / "fuzz.py",
        "--kind",
        "npy",
        "bin",
        "--workers",
        "2",
        "--out",
        "found",
    ]
    none = run_python(*command, "--seconds", "1e-9", cwd=tmp_path)
    assert none.returncode == 0 and "| all | 0 | 0 |" in none.stdout, none.stderr
    for seed, count in ((100, 20), (110, 200)):
        done = run_python(*command, "--seed", str(seed), "--count", str(count), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 420 |" in done.stdout
    for line in (tmp_path / "found").read_text().splitlines():
        found = json.loads(line)
        assert found["seeds"] == [[100, 309]] and found["files"] == 210
        assert sum(found["outcomes"].values()) == 210 and found["faults"] == []


def test_fuzzing_detects_faults(tmp_path, monkeypatch):
    """A reader that dies, hangs or raises is reported with the seed, and later files are still read."""
    fuzz = pytest.importorskip("fuzz")  # needs resource limits of Linux
    from fuzz_kinds import KINDS, Kind

    def read():
        number = sum(Path("f").read_bytes()) % 5
        if number == 0:
            os.kill(os.getpid(), 9)
        while number == 1:
            pass
        if number < 4:
            raise (ValueError if number == 2 else UserError)("bad")

    kind = Kind(lambda: Path("f").write_bytes(b"E"), "f", read, lambda data, rng: rng.randbytes(1))
    monkeypatch.setitem(KINDS, "planted", kind)
    monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    folder = tmp_path / "planted"
    assert fuzz.prepare("planted", folder) is None
    _, found = fuzz.read_batch(("planted", folder, None, range(40), math.inf))
    assert [outcome.seed for outcome in found] == list(range(40))
    counts = Counter(outcome.name for outcome in found)
    assert set(counts) == {"crash", "hang", "traceback", "refused", "same"}, counts
    result = fuzz.Result("planted")
    new = result.add(found)
    assert sorted(fault["at"].split()[0] for fault in new) == ["crash", "hang", "traceback"]
    again = fuzz.Result("planted", json.loads(result.line()))
    assert again.line() == result.line() and again.add(found) == []
