"""What a laptop's processor can do, and how much of it training gets: products, then the laptop preset, then a wider model.

    python bench/cpu.py --out cpu.jsonl            # about five minutes on two idle cores
    python bench/cpu.py --table --out cpu.jsonl    # the table once more
    python bench/cpu.py --seconds 0.2 --out try.jsonl    # a try: every number there, none to be trusted

Products are timed at 1024 x 1024 x 1024, which stands for the processor's peak, and at the shapes that the linear layers
of the model have in training; the best time of several counts. For a training rate, of which the median step counts, two
fractions follow, of the same threads and number format:

MFU        floating-point operations of training (metrics.Meter counts them) against the 1024 x 1024 x 1024 product's rate
products   time of the linear layers' products, run by themselves, against the time of the whole step; the rest is
           attention, norms, GELU, loss, optimizer and Python

Each row is one process of its own, as threads and OMP_WAIT_POLICY have to be set before torch starts: with "active"
threads spin while they wait, with "passive" they sleep. Started again, the same command measures what is missing in --out.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import torch
from parallel import median, timed_steps
from records import ROOT, append_record, card_name, finished, origin, random_shards, read_records

from lab.run.locks import check_writable
from lab.run.log import Meter, PhaseClock
from lab.run.stop import running
from train_gpt2 import PRESETS, World, get_lr, prepare, train_step

OUT = ROOT / "readme.assets" / "runs" / "cpu.jsonl"
PEAK = (1024, 1024, 1024)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEY = ("bench", "what", "n_embd", "threads", "precision", "compile", "wait", "cpu", "torch", "seconds")


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def products(config, positions):
    """{(m, k, n): how many times a step} of the products (m, k) @ (k, n) of linear layers: each layer forward, for the
    gradient of its input, and for that of its weight."""
    C, V = config.n_embd, config.padded_vocab_size
    shapes = {}
    for inner, outer, times in ((C, 3 * C, config.n_layer), (C, C, config.n_layer), (C, 4 * C, config.n_layer),
                                (4 * C, C, config.n_layer), (C, V, 1)):  # fmt: skip
        for shape in ((positions, inner, outer), (positions, outer, inner), (outer, positions, inner)):
            shapes[shape] = shapes.get(shape, 0) + times
    return shapes


def product_ms(shape, dtype, seconds):
    """Least milliseconds of a product, tried for `seconds` and at least three times: it is to be what the hardware can do."""
    m, k, n = shape
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.empty(m, n, dtype=dtype)
    torch.mm(a, b, out=out)
    times, stop = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        t0 = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(1000 * (time.perf_counter() - t0))
    return min(times)


def settings(n_embd):
    """The laptop preset, or with another width and heads of 64 channels."""
    model_config, cfg = PRESETS["laptop"]
    if n_embd != model_config.n_embd:
        model_config = dataclasses.replace(model_config, n_embd=n_embd, n_head=max(1, n_embd // 64))
    return model_config, dataclasses.replace(cfg, device="cpu", batch_size=cfg.total_batch_size // cfg.seq_len)


def measure_products(job):
    model_config, cfg = settings(job["n_embd"])
    shapes = products(model_config, cfg.total_batch_size)
    each = job["seconds"] / 10  # ten or so products take as long as a training
    dtype = DTYPES[job["precision"]]
    ms = {shape: product_ms(shape, dtype, each) for shape in shapes}
    rows = [[*shape, count, ms[shape]] for shape, count in shapes.items()]
    flops = sum(2 * m * k * n * count for (m, k, n), count in shapes.items())
    total = sum(ms[shape] * count for shape, count in shapes.items())
    peak = 2 * PEAK[0] * PEAK[1] * PEAK[2] / product_ms(PEAK, dtype, each) / 1e6
    return {"peak_gflops": peak, "shapes_gflops": flops / total / 1e6, "products_ms": total, "rows": rows}


def measure_training(job):
    model_config, cfg = settings(job["n_embd"])
    world = World("cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = random_shards(folder, model_config.vocab_size, 64 * cfg.total_batch_size, 2 * cfg.seq_len)
        cfg = dataclasses.replace(cfg, data=data, precision=job["precision"])
        precision, raw_model, optimizer, loader, _ = prepare(model_config, cfg, world)
        model = torch.compile(raw_model, dynamic=False) if job["compile"] else raw_model
        flops = Meter(cfg, world, raw_model, 0).flops_per_token * cfg.total_batch_size
        done = 0

        def step(clock):
            nonlocal done
            result = train_step(model, optimizer, loader, get_lr(done, cfg), cfg, world, precision, clock)
            done += 1
            return result

        off = PhaseClock(False, world.device)
        (first,), _ = timed_steps(step, 1, world, off)
        warm, (loss, *_) = timed_steps(step, 3, world, off)  # the fourth loss: every row gets that far
        clock = PhaseClock(True, world.device)
        ms, _ = timed_steps(step, max(3, round(1000 * job["seconds"] / median(warm))), world, clock)
        loader.worker.shutdown()
    return {"tok_per_s": 1000 * cfg.total_batch_size / median(ms), "step_ms": median(ms), "step_ms_min": min(ms),
            "step_ms_max": max(ms), "steps": len(ms), "first_step_s": first / 1000, "gflop_per_step": flops / 1e9,
            "loss": loss.item(), "phases": clock.read()}  # fmt: skip


def jobs(widths, seconds):
    """What there is to measure, in this order. Not every combination: one thing is varied at a time, then the best joined."""
    most = cores()
    threads = sorted({1, most} | {2**i for i in range(1, most.bit_length()) if 2**i < most})
    base = dict(bench="cpu", compile=False, wait="passive", cpu=card_name("cpu"), torch=torch.__version__, seconds=seconds)
    for n_embd in widths:
        for t in threads if n_embd == widths[0] else [most]:
            for precision in DTYPES:
                yield base | dict(what="products", n_embd=n_embd, threads=t, precision=precision)
        train = base | dict(what="training", n_embd=n_embd, threads=most, precision="fp32")
        if n_embd == widths[0]:
            yield from (train | dict(threads=t) for t in threads[:-1])
            yield train | dict(wait="active")
        yield from (train | dict(precision=p, compile=c) for c in (False, True) for p in DTYPES)


def run_job(job, limit):
    """The record of a job, from a process of its own; with "error" if it failed or took longer than `limit` seconds."""
    env = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "OMP_WAIT_POLICY": job["wait"].upper()}
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return job | {"error": f"not done after {limit} s"}
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return job | ({"error": lines[-1][:300] if lines else "no word"} if done.returncode else json.loads(lines[-1]))


def table(records):
    """Lines of text: the products, then the trainings with their fractions of them."""
    newest = {json.dumps([r.get(k) for k in KEY]): r for r in records}.values()
    good = [r for r in newest if "error" not in r]
    gemm = {(r["cpu"], r["torch"], r["n_embd"], r["threads"], r["precision"]): r for r in good if r["what"] == "products"}
    lines = sorted({f"{r['cpu']}, torch {r['torch']}, {r['date']}" for r in good})
    lines += ["", f"{'products':<10} {'threads':>7} {'format':>6} {'1024^3 GFLOP/s':>15} {'own shapes GFLOP/s':>19}"]
    for r in gemm.values():
        lines.append(f"{r['n_embd']:>4} wide  {r['threads']:>7} {r['precision']:>6} {r['peak_gflops']:>15,.0f} "
                     f"{r['shapes_gflops']:>19,.0f}")  # fmt: skip
    lines += ["", f"{'training':<10} {'threads':>7} {'format':>6} {'compile':>7} {'wait':>8} {'tokens/s':>9} "
              f"{'step ms (min to max)':>24} {'first step s':>12} {'MFU':>6} {'products':>8} {'loss':>7}"]  # fmt: skip
    for r in newest:
        name = (f"{r['n_embd']:>4} wide  {r['threads']:>7} {r['precision']:>6} {'yes' if r['compile'] else 'no':>7} "
                f"{r['wait']:>8}")  # fmt: skip
        if "error" in r:
            lines.append(f"{name} {r['what']} failed: {r['error']}")
        elif r["what"] == "training":
            of = gemm.get((r["cpu"], r["torch"], r["n_embd"], r["threads"], r["precision"]))
            mfu = f"{r['gflop_per_step'] / r['step_ms'] * 1000 / of['peak_gflops']:.1%}" if of else "-"
            share = f"{of['products_ms'] / r['step_ms']:.1%}" if of else "-"
            spread = f"{r['step_ms']:.1f} ({r['step_ms_min']:.1f} to {r['step_ms_max']:.1f})"
            lines.append(f"{name} {r['tok_per_s']:>9,.0f} {spread:>24} {r['first_step_s']:>12.1f} {mfu:>6} {share:>8} "
                         f"{r['loss']:>7.4f}")  # fmt: skip
    return lines


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--out", default=str(OUT), help="records go here, one line each (default %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512], metavar="N_EMBD",
                        help="widths of the model; the first gets all rows (default: the preset's 128, and 512)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each row is measured (default %(default)s)")
    parser.add_argument("--limit", type=int, default=180, help="seconds for a row, compilation included (default %(default)s)")
    parser.add_argument("--commit", default="", help="noted in the records where git is not at hand")
    parser.add_argument("--table", action="store_true", help="print the table of --out and end")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # one row, in the process that measures it
    args = parser.parse_args(argv)
    for width in args.widths:
        if width < 1 or width > 64 and width % 64:
            parser.error(f"--widths {width} must be a multiple of 64, for heads of 64 channels, or fewer, one head")
    if not 0 < args.seconds < math.inf or args.limit <= 0:
        parser.error(f"--seconds {args.seconds} and --limit {args.limit} must be above 0, and not without end")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.job:
        job = json.loads(args.job)
        found = (measure_products if job["what"] == "products" else measure_training)(job)
        print(json.dumps(found | {"threads": torch.get_num_threads()}))  # those there were, whatever was asked for
        return 0
    if not args.table:
        check_writable(args.out, "out")
    failures = 0
    for job in [] if args.table else jobs(args.widths, args.seconds):
        if finished(args.out, job):
            continue
        record = run_job(job, args.limit) | origin(commit=args.commit) | {"load": os.getloadavg()[0]}
        append_record(args.out, record)
        failures += "error" in record
        rate = f"{record['tok_per_s']:,.0f} tokens/s" if "tok_per_s" in record else record.get("error") or "done"
        print(f"{job['what']}, {job['n_embd']} wide, {job['threads']} threads, {job['precision']}, "
              f"{'compiled' if job['compile'] else 'eager'}, {job['wait']}: {rate}", flush=True)  # fmt: skip
    records = [r for r in read_records(args.out) if r.get("bench") == "cpu"]
    if not records:
        raise FileNotFoundError(f"no measurements in {args.out}; `python bench/cpu.py --out {args.out}` makes some")
    print("\n".join(table(records)))
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        with running("cpu.py"):
            sys.exit(main())
    except (OSError, ValueError) as error:
        print(f"bench/cpu.py: error: {error}", file=sys.stderr)
        sys.exit(2)
