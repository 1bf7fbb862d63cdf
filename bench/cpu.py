"""What a laptop's processor can do, and how much of it training gets: products, then the laptop
preset.

    python bench/cpu.py --out cpu.jsonl                  # about five minutes on two idle cores
    python bench/cpu.py --seconds 0.2 --out try.jsonl    # a try: every number there, none to be trusted

Products are timed at 1024 x 1024 x 1024, which stands for the processor's peak; the best time of
several counts. Of training the median step counts. MFU is the rate of training's floating-point
operations against that of the products, with the same threads and number format. Each row is a
process of its own, as threads and OMP_WAIT_POLICY have to be set before torch starts: with "active"
threads spin while they wait, with "passive" they sleep.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import torch
from records import append_record, card_name, check_out, origin, print_rows, random_shards
from timing import time_updates

from lab.cli import command, parse
from lab.world import World
from train_gpt2 import PRESETS, set_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = (
    "n_embd threads precision compile wait peak_gflops tok_per_s step_ms first_step_s mfu loss"
)


@dataclass
class Config:
    seconds: float = 4.0  # how long each row is measured
    out: str = "cpu.jsonl"  # file of measurements, which are added to it
    job: str = ""  # one row, as JSON: what this program calls itself with


def peak_gflops(dtype, seconds):
    """GFLOP/s of the fastest product, tried for `seconds` and at least three times."""
    a, b, out = (torch.randn(1024, 1024).to(dtype) for _ in range(3))
    times, stop = [], time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < stop:
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - t0)
    return 2 * 1024**3 / min(times) / 1e9


def measure(job):
    """Numbers of the laptop preset, or of one that is wider, with heads of 64 channels."""
    peak = peak_gflops(DTYPES[job["precision"]], job["seconds"] / 10)
    model, cfg = PRESETS["laptop"]
    if job["n_embd"] != model.n_embd:
        model = replace(model, n_embd=job["n_embd"], n_head=job["n_embd"] // 64)
    cfg = replace(cfg, device="cpu", precision=job["precision"], compile=job["compile"])
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, model.vocab_size, 64 * cfg.total_batch_size, 2 * cfg.seq_len)
        batch_size = cfg.total_batch_size // cfg.seq_len
        run = set_up(model, replace(cfg, data=folder, batch_size=batch_size), World("cpu"))
        (first,), _, _ = time_updates(run, 1)
        warm, losses, _ = time_updates(run, 3)  # the fourth loss: every row gets that far
        count = max(3, round(1000 * job["seconds"] / statistics.median(warm)))
        step_ms = statistics.median(time_updates(run, count)[0])
    tok_per_s = 1000 * cfg.total_batch_size / step_ms
    flops = run.raw_model.flops_per_token(cfg.seq_len)
    found = dict(peak_gflops=peak, tok_per_s=tok_per_s, step_ms=step_ms, first_step_s=first / 1000)
    return found | dict(mfu=tok_per_s * flops / peak / 1e9, loss=losses[-1])


def jobs(seconds):
    """What there is to measure: one thing is varied at a time, then the best joined."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    base = dict(n_embd=128, threads=most, precision="fp32", compile=False, wait="passive")
    base["seconds"] = seconds
    yield from (base | dict(threads=2**i) for i in range(most.bit_length()) if 2**i < most)
    yield base | dict(wait="active")
    for n_embd in (128, 512):
        for compile in (False, True):
            yield from (base | dict(n_embd=n_embd, compile=compile, precision=p) for p in DTYPES)


def run_job(job):
    """The record of a job, from a process of its own; with "error" if it failed."""
    env = dict(OMP_NUM_THREADS=str(job["threads"]), OMP_WAIT_POLICY=job["wait"].upper())
    words = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        return job | {"error": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return job | json.loads(done.stdout.splitlines()[-1])


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    if cfg.job:
        print(json.dumps(measure(json.loads(cfg.job))))
        return 0
    check_out(cfg.out, cpu=False)
    records = []
    for job in jobs(cfg.seconds):
        records.append(run_job(job) | dict(bench="cpu", cpu=card_name("cpu")) | origin())
        append_record(cfg.out, records[-1] | {"load": os.getloadavg()[0]})
        print(records[-1].get("error") or f"{records[-1]['tok_per_s']:,.0f} tokens/s", flush=True)
    cells = [[r.get(column, "") for column in COLUMNS.split()] for r in records]
    rows = [[f"{c:,.4g}" if isinstance(c, float) else c for c in row] for row in cells]
    print(f"{card_name('cpu')}, torch {torch.__version__}, {records[0]['date']}")
    print_rows(COLUMNS.split(), rows)
    return 1 if any("error" in r for r in records) else 0


if __name__ == "__main__":
    command(main)
