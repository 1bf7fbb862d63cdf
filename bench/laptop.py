"""Measure the seconds until a character-level model of Tiny Shakespeare has a validation loss of 1.88.

    python bench/laptop.py tinyshakespeare.txt                       # only train_gpt2.py
    python bench/laptop.py tinyshakespeare.txt --nanogpt nanoGPT     # and a checkout of nanoGPT

nanoGPT runs its own train.py in a temporary copy of the checkout, with the flags that its README
recommends for a CPU: 4 layers, 128 channels, context 64, batch 12, 2000 steps, AdamW, eager.
train_gpt2.py runs with the flags below. Both read the same characters; the first 90 % are for training
and the rest for validation. Both are timed from the start of the process, including imports and set-up,
to the first validation loss of at most 1.88 nats per character. nanoGPT's losses are those that it
prints: means of 20 random batches, every 250 steps. train_gpt2.py's are means over the whole last tenth. If
nanoGPT does not reach 1.88, the time is that of its last loss. The machine should be idle; its load is
printed and recorded.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from records import PIPED, ROOT, append_record, check_out, gpu_name, origin, print_rows
from tyro.conf import Positional

from lab.cli import UserError, parse_args, run_main
from lab.files import read_errors

TARGET = 1.88
NANOGPT = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
--log_interval=1
    --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000
    --lr_decay_iters=2000 --dropout=0.0""".split()
OURS = """--preset laptop --device cpu --n_layer 1 --n_head 4 --n_embd 128 --block_size 32 --seq_len
32
    --total_batch_size 1024 --batch_size 32 --optimizer muon --muon_lr 0.02 --lr 2e-2 --min_lr 0 --beta1 0.8
    --beta2 0.99 --weight_decay 0 --schedule wsd --warmup_steps 10 --decay_steps 282 --max_steps 470
    --val_every 470 --val_tokens 0 --sample_every 0 --checkpoint_every 0 --log_every 50""".split()


@dataclass
class Config:
    text: Positional[str]  # text file, such as tinyshakespeare.txt
    nanogpt: str = ""  # checkout of github.com/karpathy/nanoGPT to compare with
    out: str = ""  # append the numbers to this file, as a JSON line


def encode(path):
    """(sorted characters of a text, the text as indices of them), as in nanoGPT's prepare.py."""
    with read_errors(path, "text file", "pass one, such as tinyshakespeare.txt"):
        text = Path(path).read_text(encoding="utf-8")
    if len(text) < 10_000:
        raise UserError(
            f"{path} has {len(text):,} characters, but needs 10,000; pass a longer text"
        )
    characters = sorted(set(text))
    number = {c: i for i, c in enumerate(characters)}
    return characters, np.array([number[c] for c in text], dtype=np.uint16)


def timed_lines(words, folder):
    """[(seconds since the start of the process, line)] of a command's output. Raises UserError if
    it fails."""
    t0, lines = time.monotonic(), []
    words = [sys.executable, "-u", *map(str, words)]
    with subprocess.Popen(words, cwd=folder, **PIPED) as process:
        for line in process.stdout:
            lines.append((time.monotonic() - t0, line.rstrip()))
    if process.returncode:
        raise UserError(f"{words[2]} failed:\n" + "\n".join(line for _, line in lines[-15:]))
    return lines


def run_nanogpt(checkout, characters, ids, folder):
    """[(seconds, validation loss)] as nanoGPT's train.py prints them."""
    if not (Path(checkout) / "config" / "train_shakespeare_char.py").is_file():
        raise UserError(f"nanogpt={checkout} is not a checkout of nanoGPT; pass one with --nanogpt")
    copy = folder / "nanoGPT"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "assets", "out*"))
    data, cut = copy / "data" / "shakespeare_char", int(0.9 * len(ids))
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    meta["stoi"] = {c: i for i, c in meta["itos"].items()}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = []
    for seconds, line in timed_lines(["train.py", *NANOGPT], copy):
        if match := re.match(r"step \d+: train loss [\d.]+, val loss ([\d.]+)", line):
            found.append((seconds, float(match[1])))
    return found


def run_ours(characters, ids, folder):
    """[(seconds, validation loss)] of train_gpt2.py, from its log."""
    cut = int(0.9 * len(ids))
    np.save(folder / "text_train_000001.npy", ids[:cut])
    np.save(folder / "text_val_000000.npy", ids[cut:])
    words = [ROOT / "train_gpt2.py", *OURS, "--vocab_size", len(characters), "--data", folder]
    t0 = time.time()
    timed_lines([*words, "--log_dir", folder, "--run_name", "ours"], folder)
    events = map(json.loads, (folder / "ours" / "log.jsonl").read_text().splitlines())
    return [(e["time"] - t0, e["loss"]) for e in events if e["kind"] == "val"]


def first_at_target(curve):
    """(seconds, loss) of the first validation of at most TARGET, or of the last one."""
    return next((point for point in curve if point[1] <= TARGET), curve[-1])


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    characters, ids = encode(cfg.text)
    if cfg.out:
        check_out(cfg.out, cpu=False)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        curves = {"ours": run_ours(characters, ids, Path(folder))}
        if cfg.nanogpt:
            curves["nanoGPT"] = run_nanogpt(cfg.nanogpt, characters, ids, Path(folder))
    ends = {name: first_at_target(curve) for name, curve in curves.items()}
    machine = f"{gpu_name('cpu')}, {os.cpu_count()} cores"
    print(f"{machine}, load before {load:.1f}, {time.strftime('%F')}")
    rows = [[name, f"{t:.1f}", f"{v:.4f}", str(v <= TARGET)] for name, (t, v) in ends.items()]
    print_rows(["program", "seconds", "validation loss", f"reached {TARGET}"], rows)
    if cfg.nanogpt:
        print(f"ours takes {ends['ours'][0] / ends['nanoGPT'][0]:.2f} times as long as nanoGPT")
    if cfg.out:
        record = dict(bench="laptop", cpu=gpu_name("cpu"), cores=os.cpu_count(), load=load)
        record |= dict(curves=curves, flags=dict(ours=" ".join(OURS), nanoGPT=" ".join(NANOGPT)))
        append_record(cfg.out, record | origin())
    return 0 if ends["ours"][1] <= TARGET else 1


if __name__ == "__main__":
    run_main(main)
