"""Seconds of a laptop until a byte-level model of Tiny Shakespeare has a validation loss of 1.88 nats.

    python bench/laptop.py path/to/tinyshakespeare.txt

Two commands of train_gpt2.py are timed one after the other, from the start of the process, imports and set-up included:
the laptop setting that nanoGPT publishes (4 layers, 128 channels, context 64, batch 12, 2000 steps, AdamW, eager), and
ours. The text's first 90 % train; the loss is that of the whole last tenth. nanoGPT's setting is timed until its 2000
steps are done, whatever loss it has by then (it estimates its own on 20 batches every 250 steps, and so does the copy);
ours until the first validation that is at or under 1.88.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.run.stop import running  # noqa: E402

TARGET = 1.88

COMMON = "--preset laptop --device cpu --sample_every 0 --ckpt_every 0 --log_every 50".split()
NANOGPT = """--n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --seq_len 64 --total_batch_size 768 --batch_size 12
    --optimizer adamw --lr 1e-3 --min_lr 1e-4 --schedule cosine --warmup_steps 100 --weight_decay 0.1 --beta2 0.99
    --max_steps 2000 --val_every 250 --val_tokens 30720""".split()
OURS = """--n_layer 2 --n_head 2 --n_embd 128 --block_size 64 --seq_len 64 --total_batch_size 2048 --batch_size 32
    --optimizer muon --muon_lr 0.02 --lr 6e-3 --min_lr 0 --schedule wsd --warmup_steps 30 --decay_steps 196 --weight_decay 0
    --beta2 0.99 --max_steps 280 --val_every 280 --val_tokens 0""".split()


def write_shards(text, folder):
    data = np.frombuffer(Path(text).read_bytes(), dtype=np.uint8).astype(np.uint16)
    cut = int(0.9 * len(data))
    np.save(folder / "text_train_000001.npy", data[:cut])
    np.save(folder / "text_val_000000.npy", data[cut:])


def timed_run(name, flags, folder):
    """Start the command and return its log's events, each with the seconds since the start of the process."""
    t0 = time.time()
    command = [sys.executable, ROOT / "train_gpt2.py", *COMMON, *flags]
    command += ["--data", folder, "--log_dir", folder, "--run_name", name]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr)
    events = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    return [event | {"seconds": event["time"] - t0} for event in events]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, meant to be Tiny Shakespeare")
    text = parser.parse_args().text
    if not text.is_file():
        parser.error(f"there is no text file {text}; name one, e.g. tinyshakespeare.txt")
    if text.stat().st_size < 10_000:
        parser.error(f"{text} has {text.stat().st_size:,} bytes, too few to train on and hold out a tenth; name a longer text")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_shards(text, folder)
        ours = timed_run("ours", OURS, folder)
        theirs = timed_run("nanogpt", NANOGPT, folder)
    reached = [e for e in ours if e["kind"] == "val" and e["loss"] <= TARGET]
    ours_loss = [e for e in ours if e["kind"] == "val"][-1]["loss"]
    their_end = [e for e in theirs if e["kind"] == "train"][-1]
    their_loss = [e for e in theirs if e["kind"] == "val"][-1]["loss"]
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}")
    print(f"{'setting':<40} {'seconds':>8} {'val loss':>9}")
    print(f"{'nanoGPT, 2000 steps of 12 x 64, AdamW':<40} {their_end['seconds']:8.1f} {their_loss:9.4f}")
    if not reached:
        print(f"{'ours':<40} {'never':>8} {ours_loss:9.4f}")
        sys.exit(1)
    print(f"{'ours, to ' + str(TARGET):<40} {reached[0]['seconds']:8.1f} {reached[0]['loss']:9.4f}")
    print(f"ours needs {reached[0]['seconds'] / their_end['seconds']:.2f} of the time")


if __name__ == "__main__":
    with running("laptop.py"):
        main()
