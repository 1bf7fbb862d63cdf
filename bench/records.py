"""What the measurements of this folder share: files of JSON lines that a kill does not spoil, where a record comes from, the
name of the card, and tokens for who has no text."""

import json
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
WRITING = threading.Lock()  # half of another thread's line would look like what a kill has left


def read_records(path):
    """The lines of a file of measurements, oldest first; none if there is no file. A last line that a kill has cut short is
    left out. Raises ValueError for any other line that is no JSON, and for a file in which no line is."""
    records = []
    lines = Path(path).read_bytes().splitlines() if Path(path).exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                way_out = "delete that line" if any(map(is_record, lines)) else "name a file of measurements"
                raise ValueError(f"line {number} of {path} is no JSON ({error}); {way_out}") from error
    return records


def is_record(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def keep_tries_apart(out, default, cpu):
    """Raise ValueError where the measurements of a CPU would go into the file of those that README shows."""
    if cpu and Path(out).resolve() == Path(default).resolve():
        raise ValueError(f"{Path(default).name} is README's, and of GPUs; for a try on a CPU add --out try.jsonl")


def append_record(path, record):
    """Add one line, in one write; what is left of a line cut short goes. Threads may share a file, processes may not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITING, path.open("ab+", buffering=0) as f:
        f.seek(0)
        text = f.read()
        whole = text.rfind(b"\n") + 1
        try:
            json.loads(text[whole:] or b"{}")
            start = b"\n" if text[whole:] else b""
        except ValueError:
            f.truncate(whole)
            start = b""
        f.write(start + json.dumps(record).encode() + b"\n")


def finished(path, key):
    """The newest record of `path` without error whose fields agree with the dict `key`, or None."""
    found = [r for r in read_records(path) if not r.get("error") and all(r.get(k) == v for k, v in key.items())]
    return found[-1] if found else None


def one_sentence(error):
    """An exception as one short line: torch.compile says in its first one only that something below has failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:200]}"


def origin(command="", commit=""):
    """Where a record comes from: date, commit (git's, unless given; "-dirty" where files have changed since), torch, command
    (this process's, unless given)."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        pass
    command = command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit or "unknown", "torch": torch.__version__, "command": command}


def card_name(device="auto"):
    """Name of the GPU, or of the processor where a run uses none. device as World takes it."""
    if str(device).startswith("cuda") or (str(device) == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(None if str(device) == "auto" else device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def random_shards(folder, vocab_size, train_tokens=4_000_000, val_tokens=100_000):
    """Token shards in `folder`, whose name is returned, where id i is as frequent as 1 / (10 + i): uneven like words, which
    embeddings notice, but without an order."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(1 / (10 + np.arange(vocab_size)))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        tokens = np.searchsorted(edges, rng.random(n) * edges[-1], side="right")
        np.save(Path(folder) / f"random_{split}_000000.npy", tokens.clip(max=vocab_size - 1).astype(np.uint16))
    return str(folder)
