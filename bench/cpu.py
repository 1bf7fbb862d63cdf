"""What a laptop's processor can do, and how much of it training gets: products, then the laptop
preset.

    python bench/cpu.py --out cpu.jsonl            # about five minutes on two idle cores
    python bench/cpu.py --table --out cpu.jsonl    # the table once more
    python bench/cpu.py --seconds 0.2 --out try.jsonl    # a try: every number there, none to be trusted

Products are timed at 1024 x 1024 x 1024, which stands for the processor's peak, and at the shapes
that the linear layers of the model have in training; the best time of several counts. For a
training rate, of which the median step counts, two fractions follow, of the same threads and number
format:

MFU        floating-point operations of training against the rate of the 1024 x 1024 x 1024 product
products   time of the linear layers' products, run by themselves, against the time of the whole step;
           the rest is attention, norms, GELU, loss, optimizer and Python

Each row is a process of its own, as threads and OMP_WAIT_POLICY have to be set before torch starts:
with "active" threads spin while they wait, with "passive" they sleep. Started again, the same
command measures what is missing in --out.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from floor import products
from ladder import milliseconds, moment
from records import (
    RUNS,
    append_record,
    card_name,
    finished,
    origin,
    print_rows,
    random_shards,
    read_records,
)

from lab.cli import UserError, command, parse
from lab.files import check_writable
from lab.world import World
from train_gpt2 import PRESETS, set_up

PEAK = (1024, 1024, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEY = ("what", "n_embd", "threads", "precision", "compile", "wait", "cpu", "torch", "seconds")
# of a training and the products it is held against
SAME = ("cpu", "torch", "n_embd", "threads", "precision")


@dataclass
class Config:
    widths: tuple[int, ...] = (128, 512)  # of the model, multiples of 64; the first gets all rows
    seconds: float = 4.0  # how long each row is measured
    limit: int = 180  # seconds for a row, compilation included
    commit: str = ""  # noted in the records where git is not at hand
    table: bool = False  # print the table of --out and end
    job: str = ""  # one row, as JSON: what this program calls itself with
    out: str = str(RUNS / "cpu.jsonl")  # file of measurements


def shapes(config, positions):
    """{(m, k, n): how many times a step} of the products (m, k) @ (k, n) of linear layers: each
    layer forward, for the gradient of its input, and for that of its weight."""
    found = {}
    for inner, outer, times in products(config).values():
        ways = (positions, inner, outer), (positions, outer, inner), (outer, positions, inner)
        for shape in ways:
            found[shape] = found.get(shape, 0) + times
    return found


def product_ms(shape, dtype, seconds):
    """Least milliseconds of a product, tried for `seconds` and at least three times."""
    m, k, n = shape
    a, b, out = (
        torch.randn(m, k).to(dtype),
        torch.randn(k, n).to(dtype),
        torch.empty(m, n, dtype=dtype),
    )
    torch.mm(a, b, out=out)
    times, stop = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(1000 * (time.perf_counter() - t0))
    return min(times)


def settings(job, data=""):
    """The laptop preset, or with another width and heads of 64 channels."""
    model, cfg = PRESETS["laptop"]
    if job["n_embd"] != model.n_embd:
        n_head = max(1, job["n_embd"] // 64)
        model = dataclasses.replace(model, n_embd=job["n_embd"], n_head=n_head)
    about = dict(data=data, device="cpu", precision=job["precision"], compile=job["compile"])
    return model, dataclasses.replace(cfg, batch_size=cfg.total_batch_size // cfg.seq_len, **about)


def measure_products(job):
    model, cfg = settings(job)
    # ten or so take as long as a training
    each, dtype = (job["seconds"] / 10, DTYPES[job["precision"]])
    counts = shapes(model, cfg.total_batch_size)
    ms = {shape: product_ms(shape, dtype, each) for shape in counts}
    flops = sum(2 * m * k * n * count for (m, k, n), count in counts.items())
    total = sum(ms[shape] * count for shape, count in counts.items())
    peak = 2 * 1024**3 / product_ms(PEAK, dtype, each) / 1e6
    return dict(peak_gflops=peak, shapes_gflops=flops / total / 1e6, products_ms=total)


def measure_training(job):
    with tempfile.TemporaryDirectory() as folder:
        model, cfg = settings(job, folder)
        random_shards(folder, model.vocab_size, 64 * cfg.total_batch_size, 2 * cfg.seq_len)
        run = set_up(model, cfg, World("cpu"))

        def updates(count):
            moments = [moment(run.world.device)]
            for _ in range(count):
                losses, _ = run.update()
                moments.append(moment(run.world.device))
            return milliseconds(moments, run.world.device), losses.sum().item()

        (first,), _ = updates(1)
        warm, loss = updates(3)  # the fourth loss: every row gets that far
        ms, _ = updates(max(3, round(1000 * job["seconds"] / statistics.median(warm))))
    flops = run.raw_model.flops_per_token(cfg.seq_len) * cfg.total_batch_size
    step_ms = statistics.median(ms)
    return dict(
        tok_per_s=1000 * cfg.total_batch_size / step_ms,
        step_ms=step_ms,
        step_ms_min=min(ms),
        step_ms_max=max(ms),
        steps=len(ms),
        first_step_s=first / 1000,
        gflop_per_step=flops / 1e9,
        loss=loss,
    )


def jobs(widths, seconds):
    """What there is to measure: one thing is varied at a time, then the best joined."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = sorted({1, most} | {2**i for i in range(1, most.bit_length()) if 2**i < most})
    base = dict(bench="cpu", compile=False, wait="passive", cpu=card_name("cpu"), seconds=seconds)
    base["torch"] = torch.__version__
    for n_embd in widths:
        first = n_embd == widths[0]
        for t in threads if first else [most]:
            about = base | dict(what="products", n_embd=n_embd, threads=t)
            yield from (about | dict(precision=precision) for precision in DTYPES)
        train = base | dict(what="training", n_embd=n_embd, threads=most, precision="fp32")
        if first:
            yield from (train | dict(threads=t) for t in threads[:-1])
            yield train | dict(wait="active")
        yield from (train | dict(precision=p, compile=c) for c in (False, True) for p in DTYPES)


def run_job(job, limit):
    """The record of a job, from a process of its own; with "error" if it failed or took too
    long."""
    env = dict(OMP_NUM_THREADS=str(job["threads"]), OMP_WAIT_POLICY=job["wait"].upper())
    words = [sys.executable, __file__, "--job", json.dumps(job)]
    how = dict(env=os.environ | env, capture_output=True, text=True, timeout=limit)
    try:
        done = subprocess.run(words, **how)
    except subprocess.TimeoutExpired:
        return job | {"error": f"not done after {limit} s"}
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["no word"]
    return job | ({"error": lines[-1][:300]} if done.returncode else json.loads(lines[-1]))


def print_tables(records):
    newest = list({json.dumps([r.get(k) for k in KEY]): r for r in records}.values())
    good = [r for r in newest if "error" not in r]
    of = {tuple(r[k] for k in SAME): r for r in good if r["what"] == "products"}
    print(*sorted({f"{r['cpu']}, torch {r['torch']}, {r['date']}" for r in good}), sep="\n")
    rows = [
        [
            r["n_embd"],
            r["threads"],
            r["precision"],
            f"{r['peak_gflops']:,.0f}",
            f"{r['shapes_gflops']:,.0f}",
        ]
        for r in of.values()
    ]
    print_rows(["width", "threads", "products", "1024^3 GFLOP/s", "own shapes GFLOP/s"], rows)
    rows = []
    for r in newest:
        row = [
            r["n_embd"],
            r["threads"],
            r["precision"],
            "yes" if r["compile"] else "no",
            r["wait"],
        ]
        if "error" in r:
            print(*row, r["what"], "failed:", r["error"])
        elif r["what"] == "training":
            peak = of.get(tuple(r[k] for k in SAME))
            rate = 1000 * r["gflop_per_step"] / r["step_ms"]
            row += [f"{r['tok_per_s']:,.0f}", f"{r['step_ms']:.1f}"]
            row += [f"{r['step_ms_min']:.1f} to {r['step_ms_max']:.1f}", f"{r['first_step_s']:.1f}"]
            row += [f"{rate / peak['peak_gflops']:.1%}" if peak else ""]
            row += [f"{peak['products_ms'] / r['step_ms']:.1%}" if peak else "", f"{r['loss']:.4f}"]
            rows.append(row)
    head = "width,threads,training,compiled,wait,tokens/s,step ms,min to max,first step s,MFU,products,loss"
    print_rows(head.split(","), rows)


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    if cfg.job:
        job = json.loads(cfg.job)
        found = (measure_products if job["what"] == "products" else measure_training)(job)
        print(json.dumps(found | {"threads": torch.get_num_threads()}))  # those there were
        return 0
    if wrong := [width for width in cfg.widths if width % 64 or width < 1]:
        raise UserError(f"widths={wrong[0]} must be a multiple of 64, for heads of 64 channels")
    failures = 0
    if not cfg.table:
        check_writable(cfg.out, "out")
        for job in jobs(cfg.widths, cfg.seconds):
            if finished(cfg.out, job):
                continue
            record = run_job(job, cfg.limit) | origin("", cfg.commit) | {"load": os.getloadavg()[0]}
            append_record(cfg.out, record)
            failures += "error" in record
            said = record.get("error") or f"{record.get('tok_per_s', 0):,.0f} tokens/s"
            print(*(job[k] for k in KEY[:6]), said, flush=True)
    records = [r for r in read_records(cfg.out) if r.get("bench") == "cpu"]
    if not records:
        raise UserError(f"no measurements in {cfg.out}; without --table they are made")
    print_tables(records)
    return 1 if failures else 0


if __name__ == "__main__":
    command(main)
