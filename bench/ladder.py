"""The speed ladder: measure optimizations of a training step, each added to the ones before it.

    python bench/ladder.py                                     # GPT-2 124M, from float32 to 8 bits
    python bench/ladder.py --groups loss --data edu_fineweb10B # effect of the rungs on the loss, 3 seeds
    python bench/ladder.py --groups speed --shapes 4x256 12x768 --data edu_fineweb10B
    python bench/ladder.py --groups speed --shapes masked-4x256 bert-base --data data/wikitext103
    python bench/ladder.py --shapes gpt2-large gpt2-xl --batch_size 16 --tokens_per_step 16384
    python bench/ladder.py --table                             # print the results in --out; needs no GPU
    python bench/ladder.py --shapes tiny --device cpu --out try.jsonl      # dry run on a CPU

Each measurement is one JSON line. Repeat an interrupted command to continue where it stopped and to
retry failures. A variant that does not fit in memory runs with half the micro-batch and the same tokens
per step; its record has the size used. The first loss of a compiled variant is compared with that of the
uncompiled model (compiled.py), because the time of a wrong computation is worthless.

Timings include everything in a step: data, forward and backward passes of all micro-steps, clipping and
optimizer. Of 5 + --steps steps the first 5 are dropped. compile_s is the difference between the first
and the median step, including the comparison of losses. The first seed of a variant starts with an empty
compiler cache; later seeds use its cache. One more step runs under the profiler: kernel_ms is its kernel
time by class (kernels.py). A loss run trains from scratch with warmup (a tenth of the steps) and cosine
decay. Its seconds count the first step, which compiles, as an average one.
"""

import dataclasses
import math
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from compiled import compile_error
from kernels import CLASSES, profile
from records import (
    RUNS,
    append_record,
    check_out,
    gpu_name,
    grouped,
    one_sentence,
    origin,
    print_rows,
    random_shards,
    read_records,
    recorded,
)
from rungs import SHAPES, TRAINED, UNCOMPILED, VARIANTS, cases, key_of, raced, replace_head_and_mlp
from timing import peak_gib, reset_state, time_updates
from torch._inductor.utils import fresh_cache

import bert
import train_gpt2
from lab.cli import UserError, is_oom, parse_args, run_main
from lab.data.shards import TokenShards
from lab.distributed import World
from lab.eval.validation import evaluate
from lab.hardware import peak_flops

WARMUP_STEPS = 5  # steps dropped before the timed ones, including the one that compiles


@dataclass
class Config:
    shapes: tuple[Literal[tuple(SHAPES)], ...] = ("gpt2",)  # models; tiny is for dry runs
    groups: tuple[Literal[tuple(VARIANTS)], ...] = ("rungs",)  # comparisons, see bench/rungs.py
    variants: tuple[str, ...] = ()  # variants of the groups; default: all
    steps: int = 20  # timed steps
    tokens_per_step: int = 0  # 0: the shape's (group speed: one micro-step); not for group loss
    batch_size: int = 0  # first micro-batch to try; 0: the shape's (gpt2: 64)
    data: str = ""  # folder of token shards; random tokens for timings if empty
    seed: int = 1337  # first seed
    seeds: int = 3  # groups loss and speed: number of seeds
    loss_steps: int = 300  # groups loss and speed: number of steps
    loss_tokens: int = 65536  # group loss: tokens per step
    val_tokens: int = 1048576  # groups loss and speed: tokens of the final validation
    device: str = "auto"  # cuda, cuda:N or cpu
    table: bool = False  # print the tables of --out and exit
    out: str = str(RUNS / "ladder.jsonl")  # file of measurements


# ------------------------------------------------------------------------------- one measurement


class NoPrefetch:
    """Replaces a loader's thread: reads a batch when it is needed, not in advance."""

    def submit(self, function, *args):
        return SimpleNamespace(result=partial(function, *args))


def build(case, batch_size, args, world):
    """The trainer of a case, including settings for which the programs have no flag."""
    model_config, cfg, own = case.configs(args)
    cfg = dataclasses.replace(cfg, batch_size=batch_size)
    program = bert if isinstance(model_config, bert.BertConfig) else train_gpt2
    torch.set_float32_matmul_precision("highest")  # the previous case may have enabled TF32
    if case.group == "speed":
        trainer = program.build_trainer(model_config, cfg, world)
        trainer.loader.worker = trainer.loader.worker if own.read_ahead else NoPrefetch()
        return trainer
    cfg = dataclasses.replace(cfg, kernels="plain", compile=False)
    trainer = program.build_trainer(model_config, cfg, world)
    replace_head_and_mlp(trainer.raw_model, own, trainer.precision)
    if own.adamw == "loop":  # AdamW reads these from its groups in each step
        for group in trainer.optimizer.param_groups:
            group["fused"] = group["foreach"] = False
    if own.compile_mode != "none":
        trainer.model = torch.compile(trainer.raw_model, dynamic=False)
    return trainer


def first_step(trainer):
    """(loss, seconds) of the first step, which compiles, including the comparison with the uncompiled
    model.

    The comparison uses the initial weights. After an update of the 1558M model, the losses differed by
    0.015 nats although the compiled model was correct, because of biases smaller than the rounding error
    of the 16-bit residual stream (docs/LOG.md).
    """
    trainer.world.synchronize()
    t0 = time.perf_counter()
    if wrong := compile_error(trainer):
        raise FloatingPointError(f"wrong results, so the time is meaningless: {wrong}")
    losses, _ = trainer.train_step()
    return losses.sum().item(), time.perf_counter() - t0


def describe(trainer):
    peak, loader = peak_gib(trainer.world.device), trainer.loader
    return dict(
        batch_size=loader.batch_size,
        seq_len=loader.seq_len,
        micro_steps=loader.grad_accum_steps,
        precision=trainer.precision.name,
        peak_gib=round(peak, 2) if peak else None,
    )


def time_steps(trainer, args):
    """The numbers of a timing."""
    device = trainer.world.device
    first_loss, first = first_step(trainer)
    for _ in range(WARMUP_STEPS - 1):
        trainer.train_step()
    ms, losses, state = time_updates(trainer, args.steps)
    if not np.isfinite(losses[-1]):
        raise FloatingPointError(f"the loss is {losses[-1]}, so the time is meaningless")
    low, middle, high = np.percentile(ms, [25, 50, 75])
    flops, peak = trainer.raw_model.flops_per_token(trainer.cfg.seq_len), peak_flops(device)
    rate = 1000 * trainer.cfg.total_batch_size / middle
    numbers = describe(trainer) | dict(
        step_ms=[round(t, 2) for t in ms],
        median_ms=round(float(middle), 2),
        iqr_ms=round(float(high - low), 2),
        tok_per_s=round(rate),
        mfu=round(rate * flops / peak, 4) if peak else None,
        compile_s=round(max(0.0, first - middle / 1000), 2),
        first_loss=round(first_loss, 4),
    )
    numbers |= state | dict(kernel_ms=None, profiled_ms=None)
    if device.type == "cuda":
        numbers["kernel_ms"], numbers["profiled_ms"] = profile(trainer)
    return numbers


def train_from_scratch(trainer, args):
    """The numbers of a training run. Its curve has entries [step, seconds, mean training loss since the
    previous entry], every 10 steps or more often in a short run."""
    steps, curve = trainer.cfg.max_steps, []
    every = min(10, max(1, steps // 20))
    first_loss, first = first_step(trainer)
    t0, losses = time.perf_counter(), [torch.tensor(first_loss, device=trainer.world.device)]
    while trainer.step < steps:
        losses.append(trainer.train_step()[0].sum())
        if trainer.step % every == 0 or trainer.step == steps:
            values = torch.stack(losses).tolist()  # waits for the device, as the trainer's log does
            if not np.isfinite(values).all():
                raise FloatingPointError(f"the loss is not finite before step {trainer.step}")
            # the first step counts as an average one
            seconds = (time.perf_counter() - t0) * trainer.step / max(1, trainer.step - 1)
            curve.append([trainer.step, round(seconds, 3), round(float(np.mean(values)), 4)])
            losses = []
    shards = TokenShards(trainer.cfg.data, "val", trainer.raw_model.config.vocab_size)
    cfg, mask = (
        dataclasses.replace(trainer.cfg, val_tokens=args.val_tokens),
        trainer.loader.transform,
    )
    options = dict(measure=bert.Bert.sums, transform=mask) if mask else {}
    batch_size = trainer.loader.batch_size
    sums = evaluate(
        trainer.raw_model, shards, cfg, batch_size, trainer.world, trainer.precision, **options
    )
    return describe(trainer) | dict(
        curve=curve,
        seconds=seconds,
        compile_s=round(max(0.0, first - seconds / steps), 2),
        val_tokens=sums["targets"],
        first_loss=round(first_loss, 4),
        val_loss=round(sums["loss"] / sums["targets"], 5),
    )


def measure(case, args, world):
    """Do one measurement; halve the micro-batch until it fits in memory."""
    batch_size = case.configs(args)[1].batch_size
    function = train_from_scratch if case.group in TRAINED else time_steps
    while True:
        reset_state(world.device)
        try:
            # no variable for the trainer, so that its memory is freed if it did not fit
            return function(build(case, batch_size, args, world), args)
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error) or batch_size == 1:
                raise
        batch_size //= 2


def one_line(record):
    if record["error"]:
        return record["error"]
    if record["group"] in TRAINED:
        return f"validation loss {record['val_loss']:.4f}, {record['seconds']:.1f} s"
    return f"{record['median_ms']:.2f} ms, {record['tok_per_s']:,} tokens/s"


def measure_all(todo, args, world):
    """Measure and record all cases; an error is recorded too. Returns the number of failures."""
    gpu, failures, number = gpu_name(world.device), 0, 0
    for _, seeds in groupby(todo, key=lambda case: (case.group, case.shape, case.variant)):
        with fresh_cache():  # an empty compiler cache for each variant
            for earlier, case in enumerate(seeds):
                record = {"bench": "ladder"} | case.about(args, gpu) | origin()
                record |= dict(data=args.data_name, error=None, cold_cache=not earlier)
                number += 1
                name = f"{case.group} {case.shape} {case.variant} seed {case.seed}"
                print(f"[{number}/{len(todo)}] {name}: ", end="", flush=True)
                try:
                    record |= measure(case, args, world)
                except Exception as error:  # of any type: it is recorded as the result
                    record["error"] = one_sentence(error)
                    failures += 1
                print(one_line(record), flush=True)
                append_record(args.out, record)
    return failures


# ------------------------------------------------------------------------------------- the tables


def timing_table(records):
    """Print step times of each variant, with the kernel time by class."""
    kinds = [k for k in CLASSES if any((r["kernel_ms"] or {}).get(k) for r in records)]
    rows, first = [], records[:1]
    for r, before in zip(records, [*first, *records]):
        rate, kernel_ms = r["tok_per_s"], r["kernel_ms"] or {}
        rows.append([r["variant"] + "*" * raced(r), r["batch_size"]])
        rows[-1] += [f"{r['median_ms']:.2f}", f"{r['iqr_ms']:.2f}", f"{rate:,}"]
        rows[-1] += [f"{rate / other['tok_per_s']:.2f}" for other in (*first, before)]
        rows[-1] += [f"{r['mfu']:.1%}" if r["mfu"] else "", r["peak_gib"] or ""]
        rows[-1] += [f"{r['compile_s']:.1f}", *(f"{kernel_ms.get(k, 0):.2f}" for k in kinds)]
    head = "variant,B,step ms,iqr,tokens/s,x first,x last,MFU,GiB,compile s"
    print_rows([*head.split(","), *kinds], rows)
    compiled = [r for r in records if r["settings"].get("compile_mode") != "none"]
    if not all(r.get("cold_cache") for r in compiled):
        print("compile s: with the compiler cache of earlier measurements")
    slow = [r for r in records if (r.get("profiled_ms") or 0) > 1.1 * r["median_ms"]]
    if slow:
        names = ", ".join(f"{r['variant']} {r['profiled_ms']:.1f}" for r in slow)
        print(f"kernel times are those of one step, which was slower than the median: {names} ms")


def loss_table(records):
    """Print the losses of each variant over its seeds."""
    rows = []
    for name, runs in grouped(records, "variant").items():
        val, last = [r["val_loss"] for r in runs], [r["curve"][-1][2] for r in runs]
        seconds = f"{np.mean([r['seconds'] for r in runs]):.1f}"
        losses = np.mean(val), min(val), max(val), np.mean(last)
        rows.append([name + "*" * raced(runs[0]), len(runs), seconds])
        rows[-1] += map("{:.4f}".format, losses)
    head = "variant,seeds,seconds,val loss,lowest,highest,train loss (of the last ten steps)"
    print_rows(head.split(","), rows)


def speed_table(records):
    """Print speed, memory and both losses of each variant over its seeds."""
    runs, rows = grouped(records, "variant"), []
    seconds = {name: float(np.mean([r["seconds"] for r in of])) for name, of in runs.items()}
    fastest = min(seconds.values(), default=0.0)
    for name, of in runs.items():
        tokens = of[0]["tokens_per_step"] * of[0]["max_steps"]
        rates = sorted(tokens / r["seconds"] for r in of)
        # nan before a curve's first entry
        then = [np.interp(fastest, *list(zip(*r["curve"]))[1:], left=math.nan) for r in of]
        # compile_s of the first seed, because the others use its cache
        val, compile_s = [r["val_loss"] for r in of], of[0]["compile_s"]
        plain = seconds.get(UNCOMPILED.get(name), 0)
        saved = (plain - seconds[name]) / of[0]["max_steps"]
        paid = f"{compile_s / saved:,.0f}" if saved > 0 else "never" if plain else ""
        ratio = seconds.get("baseline", math.nan) / seconds[name]
        peak = max(r["peak_gib"] or 0 for r in of) or ""
        rows.append([name, of[0]["batch_size"], len(of), f"{tokens / seconds[name]:,.0f}"])
        rows[-1] += [f"{rates[0]:,.0f} to {rates[-1]:,.0f}", f"{ratio:.2f}", peak]
        rows[-1] += [f"{compile_s:.1f}" if name in UNCOMPILED else "", paid]
        rows[-1] += [f"{np.mean(val):.4f}", f"{max(val) - min(val):.4f}", f"{np.mean(then):.3f}"]
    head = "variant,B,seeds,tokens/s,of the seeds,x baseline,GiB,compile s,break-even step"
    print_rows(f"{head},val loss,spread,train loss at {fastest:.1f} s".split(","), rows)


def print_tables(records):
    """Print a table for each group, shape, GPU and number of tokens per step. If something was measured
    twice, the later record counts."""
    keys = ("group", "shape", "gpu", "max_steps", "torch", "tokens_per_step")
    tables = grouped({key_of(r): r for r in records}.values(), *keys)
    for (group, shape, gpu, steps, version, tokens), members in tables.items():
        order = {v: i for i, v in enumerate(VARIANTS.get(group, ()))}
        # variants that no longer exist come last, from the slowest to the fastest
        members.sort(key=lambda r: (order.get(r["variant"], 99), r.get("tok_per_s") or 0))
        dates = sorted({r["date"] for r in members})
        print(
            f"\n{group}, {shape}: {f'{steps} steps' if steps else 'a step'} of {tokens:,} tokens, {gpu}, "
            f"torch {version}, "
            f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}"
        )
        good = [r for r in members if not r["error"]]
        {"loss": loss_table, "speed": speed_table}.get(group, timing_table)(good)
        if any(map(raced, good)):
            print("*: compiled with a race, so the results are wrong (docs/LOG.md)")
        for r in members:
            if r["error"]:
                print(f"{r['variant']}, seed {r['seed']}: {r['error']}")


def main(argv):
    args = parse_args(Config, argv, description=__doc__)
    if args.table:
        return print_tables(recorded(args.out, "ladder"))
    args.data_name = Path(args.data).name or "random"  # for the records
    if not args.data and (trained := set(args.groups) & set(TRAINED)):
        raise UserError(
            f"groups={min(trained)} trains on text; pass a folder of token shards with --data"
        )
    asked, world = cases(args), World(args.device)
    gpu, cpu = gpu_name(world.device), world.device.type == "cpu"
    done = {(key_of(r), r.get("data")) for r in read_records(args.out) if not r.get("error")}
    todo = [c for c in asked if (key_of(c.about(args, gpu)), args.data_name) not in done]
    print(f"{len(todo)} of {len(asked)} to measure on {gpu}, recorded in {args.out}")
    if cpu and not set(args.shapes) <= {"tiny", "masked-tiny"}:
        raise UserError(
            "the ladder needs a CUDA GPU; for a dry run pass --shapes tiny --device cpu --out try.jsonl"
        )
    check_out(args.out, cpu)
    with tempfile.TemporaryDirectory() as folder:
        if not args.data:
            random_shards(folder, min(SHAPES[shape][0].vocab_size for shape in args.shapes))
            args.data = folder
        return 1 if measure_all(todo, args, world) else 0


if __name__ == "__main__":
    run_main(main)
