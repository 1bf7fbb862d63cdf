"""Shared by the programs of bench/: JSON Lines files of measurements, the origin of a record, names of
GPUs, and random token shards.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.cli import UserError  # noqa: E402
from lab.files import check_writable  # noqa: E402

PIPED = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
RUNS = ROOT / "readme.assets" / "runs"  # records for README, docs/LOG.md and the figures


def read_records(path):
    """The records of a file of measurements, oldest first; [] if there is no file. Incomplete lines of
    killed processes are skipped. Raises UserError if no line is a record."""
    records, lines = [], Path(path).read_bytes().splitlines() if Path(path).exists() else []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    if lines and not any(isinstance(record, dict) for record in records):
        raise UserError(
            f"{path} is not a file of measurements; pass one, or a new file, with --out"
        )
    return [record for record in records if isinstance(record, dict)]


def append_record(path, record):
    """Append a line in a single write; if the last line is incomplete, start a new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        start = b"\n" if end and file.read() != b"\n" else b""
        file.write(start + json.dumps(record).encode() + b"\n")


def recorded(path, bench):
    """The records of one program in a file. Raises UserError if there are none."""
    found = [r for r in read_records(path) if r.get("bench") == bench]
    if not found:
        raise UserError(f"{path} has no measurements of {bench}.py; run it without --table first")
    return found


def grouped(records, *keys):
    """{value of the key(s): records}, in the order of first appearance."""
    groups = {}
    for r in records:
        key = r[keys[0]] if len(keys) == 1 else tuple(r.get(k) for k in keys)
        groups.setdefault(key, []).append(r)
    return groups


def check_out(out, cpu):
    """Raise UserError if `out` cannot be written, or if CPU times would be added to the GPU records on
    which README is based."""
    if cpu and Path(out).resolve().parent == RUNS:
        raise UserError(
            f"out={Path(out).name} has the GPU measurements for README; on a CPU pass --out try.jsonl"
        )
    check_writable(out, "out")


def run_program(words, folder, gpus=1, timeout=None, env=None):
    """Run a Python program with its flags in `folder`, with torchrun if gpus > 1, and return its output.
    Raises UserError if it fails (with the end of its output) or takes longer than `timeout` seconds."""
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={gpus}".split()
    words = [sys.executable, *(torchrun if gpus > 1 else []), *map(str, words)]
    # no NVLink multicast by default, because its failures affect all users of a machine
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ | (env or {})
    try:
        done = subprocess.run(words, cwd=folder, env=env, timeout=timeout, **PIPED)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{' '.join(words)} took longer than timeout={timeout} seconds; pass a longer one"
        ) from error
    if done.returncode:
        raise UserError(f"{' '.join(words)} failed:\n{done.stdout[-1000:]}")
    return done.stdout


def one_sentence(error):
    """An exception as one short line. If its first line ends with a colon, the second one is included."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:200]}"


def origin():
    """Origin of a record: date, commit (from the environment variable COMMIT or from git, with "-dirty" if
    there are uncommitted changes), torch version, command."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    described = subprocess.run(shlex.join(git), shell=True, capture_output=True, text=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or described.strip() or "unknown",
        "torch": torch.__version__,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def gpu_name(device="auto"):
    """Name of the GPU, or of the processor if the device is a CPU. device: as for World."""
    cuda = str(device).startswith("cuda") or (str(device) == "auto" and torch.cuda.is_available())
    if cuda:
        return torch.cuda.get_device_name(None if str(device) == "auto" else device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def random_shards(folder, vocab_size, train_tokens=4_000_000, val_tokens=100_000):
    """Write random token shards to `folder` and return it. The frequency of id i is proportional to
    1 / (10 + i), as uneven as that of words, because this affects the speed of embeddings."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(1 / (10 + np.arange(vocab_size)))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        tokens = np.searchsorted(edges, rng.random(n) * edges[-1], side="right")
        tokens = tokens.clip(max=vocab_size - 1).astype(np.uint16)
        np.save(Path(folder) / f"random_{split}_000000.npy", tokens)
    return str(folder)


def print_rows(head, rows):
    """Print a table: the first column left-aligned, the others right-aligned."""
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        print("  ".join([name.ljust(widths[0]), *cells]).rstrip())
