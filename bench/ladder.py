"""The ladder of speed-ups, rung by rung, and what else decides the speed of a step.

    python bench/ladder.py                                     # GPT-2 124M, from plain float32 to 8 bits
    python bench/ladder.py --groups loss --data edu_fineweb10B # what the rungs do to the loss, three seeds
    python bench/ladder.py --groups speed --shapes 4x256 12x768 --data edu_fineweb10B  # --speed, measured
    python bench/ladder.py --groups speed --shapes masked-4x256 bert-base --data data/wikitext103
    python bench/ladder.py --shapes gpt2-large gpt2-xl --batch_size 16 --tokens_per_step 16384
    python bench/ladder.py --table                             # what the file holds; needs no GPU
    python bench/ladder.py --shapes tiny --device cpu --out try.jsonl      # a try; its times mean nothing

Each measurement is one JSON line, written when it is done. Started again, the same command goes on
where it stopped, and tries again what failed. A variant that does not fit in memory gets half the
micro-batch, with the same tokens per step; the line says which it got. Of one that compiles, the
first loss is compared with the uncompiled model's (compiled.py): a time of wrong results is none.

A timing is of the trainer's whole steps: data, forward and backward of all micro-steps, clipping,
optimizer. Of 5 + --steps steps the first 5 are dropped. What the first one, with that comparison,
takes more than the median is compile_s: a variant's first seed finds nothing of earlier
compilations, and the later ones its own. One more step runs under the profiler: kernel_ms is its
kernel time by class (kernels.py). A loss run trains from scratch with warm-up (a tenth of the steps)
and cosine. Its seconds leave out the first step, where compilation is, and count an average one for
it.
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
from compiled import differs
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
from rungs import SHAPES, TRAINED, UNCOMPILED, VARIANTS, cases, key_of, put_in, raced
from timing import forget, peak_gib, time_updates
from torch._inductor.utils import fresh_cache

import bert
import train_gpt2
from lab.cli import UserError, command, out_of_memory, parse
from lab.data import TokenShards
from lab.device import peak_flops
from lab.evals import evaluate
from lab.world import World

WARM_UP = 5  # steps dropped before the timed ones, the compiling one included


@dataclass
class Config:
    shapes: tuple[Literal[tuple(SHAPES)], ...] = ("gpt2",)  # models; tiny is for tries
    groups: tuple[Literal[tuple(VARIANTS)], ...] = ("rungs",)  # what is compared
    variants: tuple[str, ...] = ()  # of the groups; all if empty
    steps: int = 20  # timed steps
    tokens_per_step: int = 0  # not of group loss; 0 is the shape's, in group speed one micro-step
    batch_size: int = 0  # micro-batch to begin with; 0 is the shape's (gpt2: 64)
    data: str = ""  # folder of token shards; random tokens for timings if empty
    seed: int = 1337  # first seed
    seeds: int = 3  # groups loss and speed: how many
    loss_steps: int = 300  # groups loss and speed: steps
    loss_tokens: int = 65536  # group loss: tokens per step
    val_tokens: int = 1048576  # groups loss and speed: tokens of the final validation
    device: str = "auto"  # cuda, cuda:N or cpu
    table: bool = False  # print the tables of --out, and stop
    out: str = str(RUNS / "ladder.jsonl")  # file of measurements


# ------------------------------------------------------------------------------- one measurement


class AtOnce:
    """In place of a loader's thread: a batch is read when it is asked for, and none before."""

    def submit(self, function, *args):
        return SimpleNamespace(result=partial(function, *args))


def build(case, batch_size, args, world):
    """The trainer's Run of a case, with what the trainer has no switch for put in from outside."""
    model_config, cfg, own = case.configs(args)
    cfg = dataclasses.replace(cfg, batch_size=batch_size)
    program = bert if isinstance(model_config, bert.BertConfig) else train_gpt2
    torch.set_float32_matmul_precision("highest")  # the case before may have left TF32 on
    if case.group == "speed":
        run = program.set_up(model_config, cfg, world)
        run.loader.worker = run.loader.worker if own.read_ahead else AtOnce()
        return run
    cfg = dataclasses.replace(cfg, kernels="plain", compile=False)
    run = program.set_up(model_config, cfg, world)
    put_in(run.raw_model, own, run.precision)
    if own.adamw == "loop":  # AdamW reads its way of computing from its groups in each step
        for group in run.optimizer.param_groups:
            group["fused"] = group["foreach"] = False
    if own.compile_mode != "none":
        run.model = torch.compile(run.raw_model, dynamic=False)
    return run


def first_step(run):
    """Seconds of the step that compiles, with the comparison before it, and its loss. The
    comparison is about the weights that training starts from: after an update, biases below the
    rounding of a 16-bit residual stream made 0.015 nats of difference at 1558M, in a compiler that
    did not err (docs/LOG.md).
    """
    run.world.synchronize()
    t0 = time.perf_counter()
    if wrong := differs(run):
        raise FloatingPointError(f"a time of wrong results is none; {wrong}")
    losses, _ = run.update()
    return losses.sum().item(), time.perf_counter() - t0


def facts(run):
    peak, loader = peak_gib(run.world.device), run.loader
    return dict(
        batch_size=loader.batch_size,
        seq_len=loader.seq_len,
        micro_steps=loader.grad_accum_steps,
        precision=run.precision.name,
        peak_gib=round(peak, 2) if peak else None,
    )


def time_steps(run, args):
    """The timing groups' numbers."""
    device = run.world.device
    first_loss, first = first_step(run)
    for _ in range(WARM_UP - 1):
        run.update()
    ms, losses, state = time_updates(run, args.steps)
    if not np.isfinite(losses[-1]):
        raise FloatingPointError(f"the loss is {losses[-1]}: a time of wrong results is none")
    low, middle, high = np.percentile(ms, [25, 50, 75])
    flops, peak = run.raw_model.flops_per_token(run.cfg.seq_len), peak_flops(device)
    rate = 1000 * run.cfg.total_batch_size / middle
    numbers = facts(run) | dict(
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
        numbers["kernel_ms"], numbers["profiled_ms"] = profile(run)
    return numbers


def train_from_scratch(run, args):
    """The numbers of the groups that train. The curve's entries are [finished steps, seconds, mean training
    loss since the entry before]: every 10 steps, in a short run more often."""
    steps, curve = run.cfg.max_steps, []
    every = min(10, max(1, steps // 20))
    first_loss, first = first_step(run)
    t0, losses = time.perf_counter(), [torch.tensor(first_loss, device=run.world.device)]
    while run.step < steps:
        losses.append(run.update()[0].sum())
        if run.step % every == 0 or run.step == steps:
            values = torch.stack(losses).tolist()  # waits for the device, as the trainer's log does
            if not np.isfinite(values).all():
                raise FloatingPointError(f"the loss is not finite before step {run.step}")
            # the first step counts as an average one
            seconds = (time.perf_counter() - t0) * run.step / max(1, run.step - 1)
            curve.append([run.step, round(seconds, 3), round(float(np.mean(values)), 4)])
            losses = []
    shards = TokenShards(run.cfg.data, "val", run.raw_model.config.vocab_size)
    cfg, hide = dataclasses.replace(run.cfg, val_tokens=args.val_tokens), run.loader.transform
    how = dict(measure=bert.Bert.sums, transform=hide) if hide else {}
    batch_size = run.loader.batch_size
    sums = evaluate(run.raw_model, shards, cfg, batch_size, run.world, run.precision, **how)
    return facts(run) | dict(
        curve=curve,
        seconds=seconds,
        compile_s=round(max(0.0, first - seconds / steps), 2),
        val_tokens=sums["targets"],
        first_loss=round(first_loss, 4),
        val_loss=round(sums["loss"] / sums["targets"], 5),
    )


def measure(case, args, world):
    """One measurement, with half the micro-batch as often as it takes to fit."""
    batch_size = case.configs(args)[1].batch_size
    function = train_from_scratch if case.group in TRAINED else time_steps
    while True:
        forget(world.device)
        try:
            # the run has no name here, so that one that did not fit is let go of
            return function(build(case, batch_size, args, world), args)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or batch_size == 1:
                raise
        batch_size //= 2


def in_short(record):
    if record["error"]:
        return record["error"]
    if record["group"] in TRAINED:
        return f"validation loss {record['val_loss']:.4f}, {record['seconds']:.1f} s"
    return f"{record['median_ms']:.2f} ms, {record['tok_per_s']:,} tokens/s"


def measure_all(todo, args, world):
    """Measure, write, go on. A failure is one line in the file. Returns how many failed."""
    gpu, failures, number = gpu_name(world.device), 0, 0
    for _, seeds in groupby(todo, key=lambda case: (case.group, case.shape, case.variant)):
        with fresh_cache():  # its compilations find no files of earlier ones
            for earlier, case in enumerate(seeds):
                record = {"bench": "ladder"} | case.about(args, gpu) | origin()
                record |= dict(data=args.data_name, error=None, cold_cache=not earlier)
                number += 1
                what = f"{case.group} {case.shape} {case.variant} seed {case.seed}"
                print(f"[{number}/{len(todo)}] {what}: ", end="", flush=True)
                try:
                    record |= measure(case, args, world)
                except Exception as error:  # whatever a variant throws is its result
                    record["error"] = one_sentence(error)
                    failures += 1
                print(in_short(record), flush=True)
                append_record(args.out, record)
    return failures


# ------------------------------------------------------------------------------------- the tables


def timing_table(records):
    """Steps of each variant, with the kernel time by class."""
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
        print("compile s: with whatever earlier measurements had left in the compiler's cache")
    slow = [r for r in records if (r.get("profiled_ms") or 0) > 1.1 * r["median_ms"]]
    if slow:
        names = ", ".join(f"{r['variant']} {r['profiled_ms']:.1f}" for r in slow)
        print(f"kernel times are of one step, which took longer than the median: {names} ms")


def loss_table(records):
    """Losses of each variant, over the seeds."""
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
    """Speed, memory and both losses of each variant, over the seeds."""
    runs, rows = grouped(records, "variant"), []
    seconds = {name: float(np.mean([r["seconds"] for r in of])) for name, of in runs.items()}
    fastest = min(seconds.values(), default=0.0)
    for name, of in runs.items():
        tokens = of[0]["tokens_per_step"] * of[0]["max_steps"]
        rates = sorted(tokens / r["seconds"] for r in of)
        # no curve says what it was before its first entry
        then = [np.interp(fastest, *list(zip(*r["curve"]))[1:], left=math.nan) for r in of]
        # of the first seed: the later ones find its files
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
    head = "variant,B,seeds,tokens/s,of the seeds,x baseline,GiB,compile s,paid after step"
    print_rows(f"{head},val loss,spread,train loss at {fastest:.1f} s".split(","), rows)


def print_tables(records):
    """One table for each group, shape, GPU and tokens per step, its rows in the order of the group;
    of measurements made twice the later one counts."""
    keys = ("group", "shape", "gpu", "max_steps", "torch", "tokens_per_step")
    tables = grouped({key_of(r): r for r in records}.values(), *keys)
    for (group, shape, gpu, steps, version, tokens), members in tables.items():
        order = {v: i for i, v in enumerate(VARIANTS.get(group, ()))}
        # records outlive their variants: those go from the slowest to the fastest
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
    args = parse(Config, argv, description=__doc__)
    if args.table:
        return print_tables(recorded(args.out, "ladder"))
    args.data_name = Path(args.data).name or "random"  # what the records say
    if not args.data and (learns := set(args.groups) & set(TRAINED)):
        name = min(learns)
        raise UserError(f"group {name} learns from text: name a folder of token shards with --data")
    asked, world = cases(args), World(args.device)
    gpu, cpu = gpu_name(world.device), world.device.type == "cpu"
    done = {key_of(r) for r in read_records(args.out) if not r.get("error")}
    todo = [case for case in asked if key_of(case.about(args, gpu)) not in done]
    print(f"{len(todo)} of {len(asked)} to do on {gpu}, into {args.out}")
    if cpu and not set(args.shapes) <= {"tiny", "masked-tiny"}:
        raise UserError(
            "the ladder needs a CUDA GPU; a try: --shapes tiny --device cpu --out try.jsonl"
        )
    check_out(args.out, cpu)
    with tempfile.TemporaryDirectory() as folder:
        if not args.data:
            random_shards(folder, min(SHAPES[shape][0].vocab_size for shape in args.shapes))
            args.data = folder
        return 1 if measure_all(todo, args, world) else 0


if __name__ == "__main__":
    command(main)
