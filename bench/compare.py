"""Two versions of this repository by turns on one machine: speed, memory and losses of the same run.

    git worktree add /tmp/before a3954dc
    python bench/compare.py --before /tmp/before                       # bf16 and 8 bits, one GPU
    python bench/compare.py --before /tmp/before --settings bf16 --hella hellaswag_val.jsonl
    python bench/compare.py --before /tmp/before --nproc 2 --settings bf16 zero1     # bf16 is DDP
    python bench/compare.py --table                                    # what --out holds

GPUs of one kind differ by some percent, and one GPU by a percent from minute to minute. So each pair of
runs is made one right after the other, in processes of their own, and what counts is the median of the
pairs' ratios. A run is train_gpt2.py itself: GPT-2 124M, 524,288 tokens a step in micro-steps of 64 x 1024,
on random tokens unless --data names shards. tokens/s is the median of what its log.jsonl says every
--log_every steps (the first step, which compiles, is not among them). HellaSwag's seconds are those of
the second of two evaluations. A bracket after the losses says whether they are equal to the bit.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import ROOT, RUNS, append_record, origin, print_rows, random_shards, read_records

from lab.cli import UserError, command, parse
from lab.files import check_writable

# name: flags of the trainer until a3954dc, and since
SETTINGS = {
    "bf16": ("", ""),
    "fp8_head": ("--cross_entropy fp8", "--fp8 head"),
    "fp8_all": ("--cross_entropy fp8 --fp8_mlp", "--fp8 all"),
    "zero1": ("--zero1", "--parallel zero1"),
    "zero1_fp8_all": ("--zero1 --cross_entropy fp8 --fp8_mlp", "--parallel zero1 --fp8 all"),
}
RUN = """--preset gpt2 --batch_size 64 --total_batch_size 524288 --val_every 0 --sample_every 0
    --ckpt_every 0 --run_name run"""


@dataclass
class Config:
    before: str = ""  # checkout of the version to compare with
    after: str = str(ROOT)  # checkout of the other one
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("bf16", "fp8_head", "fp8_all")
    pairs: int = 5  # runs of each version in each setting, before, after, before, after, ...
    steps: int = 16  # updates of a run
    log_every: int = 2  # a rate is measured over so many
    nproc: int = 1  # GPUs, each with a process of its own
    data: str = ""  # folder of token shards; random tokens if empty
    hella: str = ""  # hellaswag_val.jsonl: measure seconds of HellaSwag too
    also: str = ""  # more flags of both, in quotes: --also="--preset laptop --device cpu"
    limit: int = 570  # seconds: no pair is begun that would not end in them
    out: str = str(RUNS / "compare.jsonl")  # file of measurements
    table: bool = False  # print what the file holds, measure nothing


def flags_of(checkout, setting):
    """What this version of the trainer calls a setting."""
    program = Path(checkout) / "train_gpt2.py"
    if not program.is_file():
        raise UserError(f"{checkout} is no checkout of this repository: it has no train_gpt2.py")
    return SETTINGS[setting]["parallel: Literal" in program.read_text(encoding="utf-8")].split()


def train(checkout, setting, cfg, folder, data):
    """Run the trainer of a checkout in the empty `folder`; what its log says. Raises UserError."""
    start = [sys.executable]
    if cfg.nproc > 1:
        start += f"-m torch.distributed.run --standalone --nproc_per_node {cfg.nproc}".split()
    words = [*start, Path(checkout).resolve() / "train_gpt2.py", *RUN.split()]
    words += ["--data", data, "--max_steps", cfg.steps, "--log_every", cfg.log_every]
    words += ["--log_dir", folder, "--hella_every", cfg.steps // 2 if cfg.hella else 0]
    words += [*flags_of(checkout, setting), *shlex.split(cfg.also)]
    if cfg.hella:  # both look for it below the folder that they run in
        there = folder.parent / "data" / "hellaswag"
        there.mkdir(parents=True, exist_ok=True)
        if not (there / "hellaswag_val.jsonl").exists():
            (there / "hellaswag_val.jsonl").symlink_to(Path(cfg.hella).resolve())
    # NVLink's multicast stays off unless the environment says otherwise: its failure would be all users'
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ
    done = subprocess.run(
        list(map(str, words)), cwd=folder.parent, env=env, capture_output=True, text=True
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise UserError(f"{shlex.join(map(str, words))} failed:\n{tail}")
    return read_log((folder / "run" / "log.jsonl").read_text().splitlines())


def read_log(lines):
    """A record's numbers from the lines of a log.jsonl, of either version."""
    events = [json.loads(line) for line in lines]
    trained = [e for e in events if e["kind"] == "train"]
    timed = [e for e in trained if "tok_per_s" in e]
    hella = [b["time"] - a["time"] for a, b in zip(events, events[1:]) if b["kind"] == "hella"]
    return {
        "tok_per_s": round(statistics.median(e["tok_per_s"] for e in timed)),
        "peak_gib": round(max(e["peak_gib"] for e in timed), 3) if "peak_gib" in timed[0] else None,
        "hella_s": round(hella[-1], 2) if hella else None,
        "first_step_s": next((e["seconds"] for e in events if e["kind"] == "first_step"), None),
        "losses": [e["loss"] for e in trained],
        "rates": [round(e["tok_per_s"]) for e in timed],
    }


def measure(cfg, data):
    """All pairs that --limit leaves time for, each run a line of --out."""
    begun, longest = time.monotonic(), 0.0
    for setting in cfg.settings:
        for pair in range(cfg.pairs):
            t0 = time.monotonic()
            if t0 - begun + longest > cfg.limit:
                print(f"no time left for more: {setting} has {pair} of {cfg.pairs} pairs")
                break
            for side in ("before", "after"):
                with tempfile.TemporaryDirectory() as folder:
                    found = train(getattr(cfg, side), setting, cfg, Path(folder) / "log", data)
                about = dict(
                    bench="compare", setting=setting, nproc=cfg.nproc, side=side, pair=pair
                )
                about |= dict(checkout=Path(getattr(cfg, side)).resolve().name, gpu=gpu())
                append_record(cfg.out, about | found | dict(also=cfg.also) | origin())
                print(f"{setting} {pair + 1} {side}: {found['tok_per_s']:,} tokens/s", flush=True)
            longest = max(longest, time.monotonic() - t0)


def gpu():
    """Name and number of the first GPU, as those of one name differ; this process opens none."""
    words = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def pairs_of(records):
    """{(setting, nproc, GPU, also): [(before, after), ...]} of what was measured one after the other."""
    found, waiting = {}, {}
    for r in records:
        key = r["setting"], r["nproc"], r["gpu"], r["also"]
        if r["side"] == "before":
            waiting[key] = r
        elif key in waiting:
            found.setdefault(key, []).append((waiting.pop(key), r))
    return found


def ratio(pairs, field):
    """Median of after / before over the pairs, or None where nothing was measured."""
    pairs = [(a[field], b[field]) for a, b in pairs if a[field] and b[field]]
    return statistics.median(b / a for a, b in pairs) if pairs else None


def print_tables(records):
    for (setting, nproc, gpu_name, also), pairs in pairs_of(records).items():
        print(f"\n{setting}, {nproc} x {gpu_name or 'CPU'} {also}".rstrip())
        rows = []
        for number, (a, b) in enumerate(pairs, start=1):
            equal = "equal" if a["losses"] == b["losses"] else "differ"
            rows.append([number, f"{a['tok_per_s']:,}", f"{b['tok_per_s']:,}"])
            rows[-1] += [f"{b['tok_per_s'] / a['tok_per_s']:.4f}"]
            rows[-1] += [r[k] or "" for k in ("peak_gib", "hella_s") for r in (a, b)]
            rows[-1] += [f"{a['losses'][-1]:.5f}", f"{b['losses'][-1]:.5f} ({equal})"]
        head = "pair,before tok/s,after,ratio,before GiB,after,before HellaSwag s,after"
        print_rows([*head.split(","), "before loss", "after"], rows)
        for field, bound in (("tok_per_s", 0.01), ("peak_gib", 0.02), ("hella_s", None)):
            value = ratio(pairs, field)
            if value:
                within = f", within {bound:.0%}: {abs(value - 1) <= bound}" if bound else ""
                print(f"{field}: median of after / before {value:.4f}{within}")


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.before:
            raise UserError("name the checkout to compare with: --before FOLDER")
        check_writable(cfg.out, "out")
        with tempfile.TemporaryDirectory() as folder:
            data = (
                str(Path(cfg.data).resolve()) if cfg.data else random_shards(folder, 50257, 2**24)
            )
            measure(cfg, data)
    records = [r for r in read_records(cfg.out) if r.get("bench") == "compare"]
    if not records:
        raise UserError(f"{cfg.out} holds no comparison; without --table one is made")
    print_tables(records)


if __name__ == "__main__":
    command(main)
