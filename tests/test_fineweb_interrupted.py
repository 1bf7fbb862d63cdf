"""fineweb.py: a build that is killed, stopped or started twice ends with the same bytes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_RUN, succeed
from test_fineweb import (
    BYTES,
    call,
    command,
    documents,
    hashes,
    make,
    plain_stream,
    stream_of,
    write_parquet,
)  # fmt: skip

from lab.data.manifest import verify_shards

posix = pytest.mark.skipif(os.name != "posix", reason="sends signals")
in_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """(flags for a corpus that takes a while to build, expected tokens)."""
    path, texts = tmp_path_factory.mktemp("long") / "in.parquet", documents(2500, seed=1)
    write_parquet(path, texts, rows=10)
    return ["--source", path, "--shard_tokens", "100k"], plain_stream(texts)


def works(pid, word="spawn_main", file="cmdline"):
    """Whether this worker is still running. (A zombie has no command line.)"""
    with contextlib.suppress(OSError):  # it has exited
        return word in Path(f"/proc/{pid}/{file}").read_text()


def begin(*args, shards=1):
    """Start fineweb.py in its own process; return it when this many shards exist."""
    out = Path(args[-1])
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command(*args, *BYTES), start_new_session=True, **pipes)
    while len(list(out.glob("*.npy"))) < shards and process.poll() is None:
        time.sleep(0.002)
    return process


def children(process):
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@in_proc
def test_kill_9_at_any_moment(tmp_path, long):
    """Killed again and again, a build ends with the same bytes and leaves no orphan processes."""
    args = long[0]
    make(*args, "--out", tmp_path / "whole")
    out, orphans, kills = tmp_path / "killed", [], 0
    for shards, workers, seconds in ((1, 2, 0), (5, 0, 0.011), (9, 2, 0.023), (99, 1, 0)):
        process = begin(*args, "--workers", workers, "--out", out, shards=shards)
        time.sleep(seconds)
        if process.poll() is None:
            orphans += children(process)
            process.kill()
            kills += 1
        process.wait()
        for path in out.glob("*.npy"):  # a shard that has its final name is complete
            assert len(np.load(path)) in (100_000, len(np.load(tmp_path / "whole" / path.name)))
    assert kills == 3 and process.returncode == 0
    assert hashes(out) == hashes(tmp_path / "whole") and len(orphans) > 3
    deadline = time.time() + 10
    while (left := list(filter(works, orphans))) and time.time() < deadline:
        time.sleep(0.05)
    assert not left


@posix
def test_a_second_build_in_the_same_folder_is_refused(tmp_path, long):
    """Even if the first one is stopped; after it has been killed, the next one continues."""
    args = [*long[0], "--workers", 1, "--out", tmp_path / "o"]
    first = begin(*args, shards=3)
    first.send_signal(signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)  # wait until it has stopped
    before, got, after = hashes(tmp_path / "o"), call(*args, *BYTES), hashes(tmp_path / "o")
    first.kill()
    first.communicate()
    said = rf"fineweb.py: error: another fineweb.py is writing {tmp_path / 'o'};.*--out\n"
    assert (got.returncode, got.stdout) == (2, "") and re.fullmatch(said, got.stderr)
    assert before == after and "is not complete" in verify_shards(tmp_path / "o")[0]
    make(*args)
    assert np.array_equal(stream_of(tmp_path / "o"), long[1])


@in_proc
def test_ctrl_c_prints_no_traceback(tmp_path, long, capsys):
    """The signal reaches the workers too, even one that is still importing."""
    args = [*long[0], "--workers", 2, "--out", tmp_path / "o"]
    for shards in (0, 2):
        process = begin(*args, shards=shards)
        while process.poll() is None and not any(
            works(p, "numpy", "maps") for p in children(process)
        ):
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        said = f"the same command continues the build in {tmp_path / 'o'}\nfineweb.py: stopped\n"
        assert (process.returncode, err) == (130, said)
    make(*args)
    assert "continuing after" in capsys.readouterr().out
    assert np.array_equal(stream_of(tmp_path / "o"), long[1])


def test_training_says_that_its_data_is_not_complete(tmp_path):
    write_parquet(tmp_path / "in.parquet", documents(60))
    make("--source", tmp_path / "in.parquet", "--val_tokens", 5000, "--out", tmp_path / "o")
    train = "train_gpt2.py", *TINY_RUN, "--data", tmp_path / "o", "--max_steps", 1, "--run_name"
    file = tmp_path / "o" / "manifest.json"
    assert "not complete" not in succeed(*train, "whole", cwd=tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"complete": False}))
    said = " ".join(succeed(*train, "half", cwd=tmp_path).split())
    assert "o is not complete, because its build was interrupted; run the same" in said


@pytest.mark.slow
def test_ray_replaces_a_killed_worker(tmp_path):
    """On a real cluster of two nodes, one of which is removed: the same bytes."""
    pytest.importorskip("ray", reason="Ray is optional: pip install ray")
    texts = documents(8000, seed=2, longest=2000)
    write_parquet(tmp_path / "in.parquet", texts, rows=10)
    args = ["--source", tmp_path / "in.parquet", "--shard_tokens", "1M"]
    make(*args, "--out", tmp_path / "whole")
    script = """if True:
        import os, pathlib, subprocess, sys, time
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        run = subprocess.Popen(sys.argv[2:], env={**os.environ, "RAY_ADDRESS": cluster.address})
        while run.poll() is None:
            shards = len(list(pathlib.Path(sys.argv[1]).glob("*.npy")))
            if nodes and shards > 1:
                cluster.remove_node(nodes[0], allow_graceful=False)
                nodes = []
                print("killed", shards)
            time.sleep(0.01)
        cluster.shutdown()
        sys.exit(run.returncode)
    """
    words = command(*args, *BYTES, "--engine", "ray", "--out", tmp_path / "ray")
    words = [sys.executable, "-c", script, tmp_path / "ray", *words]
    got = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert got.returncode == 0, got.stderr[-3000:]
    assert int(re.search(r"killed (\d+)", got.stdout)[1]) < len(list(tmp_path.glob("whole/*.npy")))
    assert hashes(tmp_path / "ray") == hashes(tmp_path / "whole")
