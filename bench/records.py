"""What the programs of this folder share: files of JSON lines that a kill does not spoil, where a
record comes from, the name of the GPU, and tokens for who has no text."""

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
RUNS = ROOT / "readme.assets" / "runs"  # the records that README, the log and the figures show


def read_records(path):
    """The JSON lines of a file of measurements, oldest first; none if there is no file. A line that
    a kill has cut short is passed over. Raises UserError where no line is a record."""
    records, lines = [], Path(path).read_bytes().splitlines() if Path(path).exists() else []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    if lines and not any(isinstance(record, dict) for record in records):
        raise UserError(f"{path} is no file of measurements; name one, or a new one, with --out")
    return [record for record in records if isinstance(record, dict)]


def append_record(path, record):
    """Add one line, in one write, after whatever a kill has left."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        start = b"\n" if end and file.read() != b"\n" else b""
        file.write(start + json.dumps(record).encode() + b"\n")


def recorded(path, bench):
    """The records of one program in its file. Raises UserError where there is none."""
    found = [r for r in read_records(path) if r.get("bench") == bench]
    if not found:
        raise UserError(f"no measurements of {bench}.py in {path}; without --table they are made")
    return found


def grouped(records, *keys):
    """{value of the key(s): records}, in the order of first appearance."""
    groups = {}
    for r in records:
        key = r[keys[0]] if len(keys) == 1 else tuple(r.get(k) for k in keys)
        groups.setdefault(key, []).append(r)
    return groups


def check_out(out, cpu):
    """Raise UserError where `out` cannot be written, or a CPU's times would go among the records
    that README shows."""
    if cpu and Path(out).resolve().parent == RUNS:
        raise UserError(f"{Path(out).name} holds README's numbers, of GPUs; add --out try.jsonl")
    check_writable(out, "out")


def run_program(words, folder, gpus=1):
    """Run a Python program with its flags in `folder`, on several GPUs by torchrun. Raises
    UserError with its last words if it fails."""
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={gpus}".split()
    words = [sys.executable, *(torchrun if gpus > 1 else []), *map(str, words)]
    # NVLink's multicast is off unless the environment says otherwise: its failure would be all users'
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ
    done = subprocess.run(words, cwd=folder, env=env, **PIPED)
    if done.returncode:
        raise UserError(f"{' '.join(words)} failed:\n{done.stdout[-1000:]}")


def one_sentence(error):
    """An exception as one short line; torch.compile's first one only says that something has
    failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:200]}"


def origin():
    """Where a record comes from: date, commit (git's, "-dirty" where files have changed since; of
    the environment's COMMIT where git is not at hand), torch, command."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    said = subprocess.run(shlex.join(git), shell=True, capture_output=True, text=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMMIT") or said.strip() or "unknown",
        "torch": torch.__version__,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def gpu_name(device="auto"):
    """Name of the GPU, or of the processor where a run uses none; device as World takes it."""
    cuda = str(device).startswith("cuda") or (str(device) == "auto" and torch.cuda.is_available())
    if cuda:
        return torch.cuda.get_device_name(None if str(device) == "auto" else device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def random_shards(folder, vocab_size, train_tokens=4_000_000, val_tokens=100_000):
    """Token shards in `folder`, whose name is returned, where id i is as frequent as 1 / (10 + i):
    uneven like words, which embeddings notice, but without an order."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(1 / (10 + np.arange(vocab_size)))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        tokens = np.searchsorted(edges, rng.random(n) * edges[-1], side="right")
        tokens = tokens.clip(max=vocab_size - 1).astype(np.uint16)
        np.save(Path(folder) / f"random_{split}_000000.npy", tokens)
    return str(folder)


def print_rows(head, rows):
    """Columns as wide as their widest cell, the first to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        print("  ".join([name.ljust(widths[0]), *cells]).rstrip())
