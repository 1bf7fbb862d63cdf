"""Compare two versions of this repository on one machine: speed, memory and losses of the same run.

    git worktree add /tmp/before COMMIT
    python bench/compare.py --before /tmp/before                       # bf16 and 8 bits, one GPU
    python bench/compare.py --before /tmp/before --nproc 2 --settings bf16 zero1     # DDP and ZeRO-1
    python bench/compare.py --table                                    # print what --out contains

GPUs of the same type differ by a few percent, and the speed of one GPU varies by a percent within
minutes. Therefore the versions alternate (before, after, before, after, ...), and the result is the
median of the ratios of consecutive runs. Each run is train_gpt2.py itself: GPT-2 124M with 524,288
tokens per step in micro-steps of 64 x 1024, on random tokens unless --data is given. tokens/s is the
median of the values logged every two steps, without the first step, which compiles. Losses are compared
step by step.
"""

import math
import shlex
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import (  # isort: skip
    ROOT, RUNS, append_record, check_out, origin, print_rows, random_shards, read_records,
    recorded, run_program,
)  # fmt: skip

from lab.cli import UserError, parse_args, run_main

SETTINGS = {  # name: flags of train_gpt2.py
    "bf16": "",
    "fp8_head": "--fp8 head",
    "fp8_all": "--fp8 all",
    "zero1": "--parallel zero1",
    "zero1_fp8_all": "--parallel zero1 --fp8 all",
}
SIDES = ("before", "after")
RUN = """--preset gpt2 --batch_size 64 --total_batch_size 524288 --val_every 0 --hellaswag_every 0
    --sample_every 0 --checkpoint_every 0 --log_dir log --run_name run --log_every 2"""


@dataclass
class Config:
    before: str = ""  # checkout of the version to compare with
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("bf16", "fp8_head", "fp8_all")
    pairs: int = 5  # runs of each version per setting
    steps: int = 16  # updates per run
    nproc: int = 1  # number of GPUs, one process each
    data: str = ""  # folder of token shards; random tokens if empty
    also: str = ""  # more flags for both versions: --also="--seed 7 --no_compile"
    out: str = str(RUNS / "compare.jsonl")  # file of measurements
    table: bool = False  # print the table of --out and exit


def take_turn(side, setting, cfg, data):
    """Run one version. Returns the numbers of its record."""
    checkout = Path(cfg.before if side == "before" else ROOT).resolve()
    words = [checkout / "train_gpt2.py", *RUN.split(), "--data", data, "--max_steps", cfg.steps]
    words += [*SETTINGS[setting].split(), *shlex.split(cfg.also)]
    with tempfile.TemporaryDirectory() as folder:
        run_program(words, folder, cfg.nproc)
        return numbers(read_records(Path(folder, "log", "run", "log.jsonl")))


def numbers(events):
    """The numbers of a record, from the log of a run."""
    timed = [e for e in events if "tok_per_s" in e]
    return {
        "tok_per_s": round(statistics.median(e["tok_per_s"] for e in timed)),
        "peak_gib": max((round(e["peak_gib"], 3) for e in timed if "peak_gib" in e), default=None),
        "losses": {e["step"]: e["loss"] for e in events if e["kind"] == "train"},
    }


def measure(cfg, data):
    """Do all runs; each becomes a line of --out."""
    for setting in cfg.settings:
        for side in SIDES * cfg.pairs:
            record = dict(bench="compare", setting=setting, nproc=cfg.nproc, side=side, gpu=gpu())
            record |= dict(also=cfg.also) | take_turn(side, setting, cfg, data) | origin()
            append_record(cfg.out, record)
            print(f"{setting} {side}: {record['tok_per_s']:,} tokens/s", flush=True)


def gpu():
    """Name and UUID of the first GPU (GPUs of the same name differ in speed), without a CUDA context."""
    words = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def pairs_of(records):
    """{(setting, nproc, GPU, also): [(before, after), ...]}, pairs of consecutive runs."""
    found, waiting = {}, {}
    for r in records:
        key = r["setting"], r["nproc"], r["gpu"], r["also"]
        if r["side"] == "before":
            waiting[key] = r
        elif key in waiting:
            found.setdefault(key, []).append((waiting.pop(key), r))
    return found


def ratio(pairs, field):
    """Median of after / before over the pairs, or None if it was not measured."""
    pairs = [(a[field], b[field]) for a, b in pairs if a[field] and b[field]]
    return statistics.median(b / a for a, b in pairs) if pairs else None


def print_table(records):
    """Print a row per setting and GPU: median ratios, and the largest difference of losses."""
    rows = []
    for (setting, nproc, gpu_name, also), pairs in pairs_of(records).items():
        both = [(a["losses"], b["losses"]) for a, b in pairs]
        differences = [abs(a[k] - b[k]) for a, b in both for k in a.keys() & b.keys()]
        rates = [f"{statistics.median(r['tok_per_s'] for r in side):,.0f}" for side in zip(*pairs)]
        ratios = [ratio(pairs, field) for field in ("tok_per_s", "peak_gib")]
        rows.append(
            [f"{setting} {also}".strip(), f"{nproc} x {gpu_name or 'CPU'}", len(pairs), *rates]
        )
        rows[-1] += [f"{value:.4f}" if value else "" for value in ratios]
        rows[-1] += [f"{max(differences, default=math.nan):.1e}"]
    head = "setting,where,pairs,before tok/s,after,ratio,GiB ratio,max loss difference"
    print_rows(head.split(","), rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.before or not Path(cfg.before, "train_gpt2.py").is_file():
            raise UserError(
                f"before={cfg.before} is not a checkout of this repository; pass one with --before"
            )
        check_out(cfg.out, cpu=False)
        with tempfile.TemporaryDirectory() as folder:
            data = cfg.data and str(Path(cfg.data).resolve())
            measure(cfg, data or random_shards(folder, 50257, 2**24))
    print_table(recorded(cfg.out, "compare"))


if __name__ == "__main__":
    run_main(main)
