"""Training on two machines, started as docs/RUNS.md describes. The machines are two network namespaces
of this machine, each with a host name, an address and its own torchrun."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, clean_env, of_kind, read_run, run_python

pytestmark = pytest.mark.slow
NAMES = [f"gpt2n{os.getpid()}{i}" for i in "ab"]
LINKS = [f"v{os.getpid()}{i}" for i in "ab"]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def in_namespace(name):
    """Ids of the processes in a namespace."""
    return list(map(int, ip("netns", "pids", name).split()))


@pytest.fixture
def machines():
    """Two network namespaces with the names NAMES and a link between them."""
    if not shutil.which("ip"):
        pytest.skip("no `ip` here: apt-get install iproute2")
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot create network namespaces (needs root): {error.stderr}")
    folders = [Path("/etc/netns", name) for name in NAMES]  # ip netns exec puts them over /etc
    try:
        ip("netns", "add", NAMES[1])
        peer = ["type", "veth", "peer", "name", LINKS[1], "netns", NAMES[1]]
        ip("link", "add", LINKS[0], "netns", NAMES[0], *peer)
        for i, (name, link, folder) in enumerate(zip(NAMES, LINKS, folders)):
            folder.mkdir(parents=True)
            hosts = "".join(f"10.77.0.{n} {NAMES[n - 1]}\n" for n in (1, 2))
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            for each in ("lo", link):
                ip("-n", name, "link", "set", each, "up")
        yield
    finally:
        for name, folder in zip(NAMES, folders):
            if name in ip("netns"):
                for pid in in_namespace(name):
                    os.kill(pid, signal.SIGKILL)
                ip("netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)


def lines_of_the_page(flags):
    """The commands of docs/RUNS.md for each machine, with the flags of this test's run."""
    page = (ROOT / "docs" / "RUNS.md").read_text()
    lines = re.search(r"```sh\n(WHAT=.*?)```", page, re.DOTALL)[1]
    for old, new in (
        ("train_gpt2.py --preset gpt2-xl", " ".join([str(ROOT / "train_gpt2.py"), *flags])),
        ("--nproc_per_node=8", "--nproc_per_node=1"), ("FIRST", NAMES[0]), (" --checkpoint_every 250", ""),
    ):  # fmt: skip
        assert lines.count(old) == 1, old
        lines = lines.replace(old, new)
    return lines


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp2"])
def test_run_recovers_from_a_killed_process_and_a_cut_link(machines, tmp_path, shards, parallel):
    """The losses equal those of an undisturbed run. The only manual step is to repair the link."""
    flags = [*TINY_RUN, "--data", shards, "--parallel", parallel, "--max_steps", 800]
    flags = [str(flag) for flag in [*flags, "--checkpoint_every", 50, "--timeout", 15]]
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    undisturbed = run_python(*torchrun, ROOT / "train_gpt2.py", *flags, cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    log = tmp_path / "log" / "big" / "log.jsonl"
    said = [tmp_path / f"{name}.txt" for name in NAMES]
    environment = clean_env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    loops = []
    for name, link, file in zip(NAMES, LINKS, said):
        inside = f"hostname {name}\n{lines_of_the_page(flags)}\necho all is done"
        loops.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", inside],
                cwd=tmp_path, env=environment | {"GLOO_SOCKET_IFNAME": link},
                stdout=file.open("w"), stderr=subprocess.STDOUT,
            )
        )  # fmt: skip

    def wait_until(condition):
        deadline = time.monotonic() + 240
        while not (log.exists() and condition(log.read_text())):
            texts = "".join(file.read_text() for file in said)
            assert None in [loop.poll() for loop in loops] and time.monotonic() < deadline, texts
            time.sleep(0.1)

    def steps(text, part):
        """Number of steps logged since the last start of the run, if that was start number `part`."""
        *before, last = text.split('"kind": "start"')
        return len(before) == part and last.count('"kind": "train"')

    wait_until(lambda text: steps(text, 1) > 70)
    script = str(ROOT / "train_gpt2.py").encode()
    words = {
        p: Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in in_namespace(NAMES[1])
    }
    worker = next(pid for pid, command in words.items() if command[2:3] == [script])  # python -u it
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda text: steps(text, 2) > 70)
    ip("-n", NAMES[1], "link", "set", LINKS[1], "down")
    wait_until(lambda _: "to another rank (Timed out" in said[0].read_text())
    ip("-n", NAMES[1], "link", "set", LINKS[1], "up")
    wait_until(lambda text: '"done"' in text)
    assert [loop.wait(60) for loop in loops] == [0, 0]
    assert all("all is done" in file.read_text() for file in said)

    run, whole = read_run(log.parent), read_run(tmp_path / "log" / "r")
    starts = [e["step"] for e in of_kind(run, "start")]
    assert len(starts) == 3 and 0 == starts[0] < starts[1] < starts[2], starts
    assert not any(step % 50 for step in starts)
    losses = {e["step"]: e["loss"] for e in of_kind(run, "train")}
    assert len(losses) == 800 and list(losses.values()) == whole.losses
