"""Ways to train one GPT-2 on several GPUs, side by side: same model, optimizer, tokens and loss, an
update after 64 x 1024 tokens of each GPU unless --grad_accum_steps says otherwise.

    torchrun --standalone --nproc_per_node=4 bench/parallel.py --round 1
    torchrun --standalone --nproc_per_node=2 bench/parallel.py --modes alone_one zero1_16bit --eight_bits
    python bench/parallel.py --table                      # what the file holds; needs no GPU

{modes}

All modes start from the same weights and read the same tokens, so the losses of those that exchange
gradients must agree while few updates are done (the table shows the fifth); updates at a high rate
carry the last bits of a sum far. A mode is held against one GPU alone: of the same commit and
--round where that was measured, as GPUs of one name differ. Measurements that are in --out already
are left alone. A peak of memory may count what the mode before had left behind; for one that does
not, name one mode a command. Ways that lost (gradients in one piece or sent from within the graph,
buckets of other sizes, FSDP2, the loop with all its events) are in the log; a3954dc has their code.
"""

import contextlib
import copy
import dataclasses
import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from kernels import device_events, kind_of, trace
from ladder import gpu_state, milliseconds, moment
from records import (
    RUNS,
    append_record,
    card_name,
    check_out,
    finished,
    origin,
    print_rows,
    random_shards,
    read_records,
)

from lab import parallel as zero
from lab.cli import UserError, command, parse
from lab.files import check_writable
from lab.run.settings import check
from lab.world import World
from train_gpt2 import PRESETS, set_up

MODES = {
    "alone_one": "the first GPU trains by itself, the others idle: the rate of one GPU",
    "alone": "every GPU trains by itself, all at once: they differ and share power",
    "ddp": "the trainer's way: DistributedDataParallel, compiled with a cut at each 250 MB of gradients",
    "zero1": "each process keeps AdamW's state of its share of the weights alone (ZeRO, stage 1)",
    "zero1_16bit": "the trainer's --parallel zero1: what 16 bits hold travels in 16 bits",
}
__doc__ = __doc__.format(modes="\n".join(f"{name:<12}  {text}" for name, text in MODES.items()))
ALONE = ("alone_one", "alone")
KEY = ("bench", "mode", "preset", "world_size", "batch_size", "seq_len", "compile")
KEY += (
    "activation_checkpointing",
    "precision",
    "data",
    "warmup",
    "steps",
    "round",
    "device",
    "torch",
)
KEY += ("env", "eight_bits", "grad_accum_steps", "bucket_mb")
# records that agree in these may be held against each other
SAME = ("preset", "world_size", "batch_size", "seq_len", "compile", "activation_checkpointing")
SAME += ("precision", "data", "device", "torch", "eight_bits", "grad_accum_steps")


@dataclass
class Config:
    modes: tuple[Literal[tuple(MODES)], ...] = ()  # all if empty (of one process alone_one)
    preset: Literal[tuple(PRESETS)] = "gpt2"  # the model
    batch_size: int = 64  # sequences per process and micro-step
    seq_len: int = 0  # tokens per sequence; 0 is the preset's
    grad_accum_steps: int = 1  # micro-steps of an update
    steps: int = 40  # updates that are timed
    warmup: int = 10  # updates before those, after the first
    round: int | None = None  # a number, to measure again what --out holds
    compile: Literal["model", "blocks", "off"] = "model"  # the whole, each block by itself, nothing
    activation_checkpointing: bool = False  # as the trainer's
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    eight_bits: bool = False  # the products of the head and the MLP in 8 bits
    device: str = "auto"  # cuda or cpu
    data: str = ""  # folder of token shards; random tokens if empty
    trace: str = ""  # folder for MODE.kernels.json, the kernels of one step of the first GPU
    commit: str = ""  # noted in the records where git is not at hand
    table: bool = False  # print the table of --out and end
    out: str = str(RUNS / "parallel.jsonl")  # file of measurements


# ------------------------------------------------------------------------------------ measurements


def build(mode, args, world, data):
    """The trainer's Run in a mode's way."""
    model_config, cfg = PRESETS[args.preset]
    if mode in ALONE:
        world = copy.copy(world)
        world.rank, world.world_size, world.distributed, world.is_main = 0, 1, False, True
    tokens = args.batch_size * args.seq_len * args.grad_accum_steps
    cfg = dataclasses.replace(
        cfg,
        data=data,
        optimizer="adamw",
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        total_batch_size=tokens * world.world_size,
        precision=args.precision,
        device=args.device,
        warmup_steps=10,  # the last loss is to say whether the modes agree, so it has to move
        parallel="zero1" if mode.startswith("zero1") else "ddp",
        compile=args.compile == "model",
        fp8="all" if args.eight_bits else "off",
    )
    model_config = dataclasses.replace(
        model_config, activation_checkpointing=args.activation_checkpointing
    )
    check(model_config, cfg)
    nothing = mock.patch.object(zero, "read_in_16_bits", lambda *_: [])
    with nothing if mode == "zero1" else contextlib.nullcontext():
        run = set_up(model_config, cfg, world)
    for block in run.raw_model.transformer.h if args.compile == "blocks" else []:
        block.compile(dynamic=False)
    return run


def measure(mode, args, world, data):
    """What a record says of a mode, measured by all processes together; the same on each of
    them."""
    mine = None
    if world.is_main or mode != "alone_one":
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run, losses = build(mode, args, world, data), []
        world.synchronize()
        t0 = time.perf_counter()
        losses.append(run.update()[0].sum())
        world.synchronize()
        first = time.perf_counter() - t0
        losses += [run.update()[0].sum() for _ in range(args.warmup)]
    if mode != "alone_one":
        world.barrier()  # start together
    if world.is_main or mode != "alone_one":
        world.synchronize()
        moments = [moment(world.device)]
        for _ in range(args.steps):
            losses.append(run.update()[0].sum())
            moments.append(moment(world.device))
        state = gpu_state(world.device)  # while it works at what was launched
        world.synchronize()
        cuda = world.device.type == "cuda"
        mine = dict(first_step_s=first, losses=[loss.item() for loss in losses], gpu=state)
        mine["ms"] = [round(t, 3) for t in milliseconds(moments, world.device)]
        mine["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        if args.trace and cuda and mode != "alone_one":
            write_extract(run, mode, world, Path(args.trace))
    world.barrier()  # over the CPU: those that idle must not wait in a kernel
    return summary(mode, [r for r in world.gather(mine) if r], args)


def summary(mode, ranks, args):
    """The record of what each process that worked has measured."""
    tokens = args.batch_size * args.seq_len * args.grad_accum_steps  # of a step, on one GPU
    each = [1000 * tokens / statistics.median(r["ms"]) for r in ranks]  # by each GPU's own clock
    slowest = [max(ms) for ms in zip(*(r["ms"] for r in ranks))]  # of the GPUs, step by step
    step_ms = statistics.median(slowest)
    # each process has its part of a step's loss, alone ones have a step of their own
    losses = zip(*(r["losses"] for r in ranks[: 1 if mode in ALONE else None]))
    losses = [round(statistics.mean(parts), 6) for parts in losses]
    return dict(
        step_ms=step_ms,
        step_ms_min=min(slowest),
        step_ms_max=max(slowest),
        rank_tok_per_s=each,
        tok_per_s=sum(each) if mode in ALONE else 1000 * len(ranks) * tokens / step_ms,
        first_step_s=max(r["first_step_s"] for r in ranks),
        loss=losses[-1],
        losses=losses,
        peak_gib=max(r["peak_gib"] or 0 for r in ranks) or None,
        gpus=[r["gpu"] for r in ranks],
        rank_step_ms=[r["ms"] for r in ranks],
    )


def write_extract(run, mode, world, folder):
    """The kernels of one more update on rank 0, as folder/MODE.kernels.json."""
    if not world.is_main:
        run.update()
        return
    events = device_events(trace(run.update))
    rows = []
    for e in events:
        start = round(e["ts"] - events[0]["ts"], 2)
        rows.append([kind_of(e["name"]), e["name"][:60], e["args"].get("stream"), start, e["dur"]])
    about = dict(mode=mode, world_size=world.world_size, device=card_name(world.device))
    about |= dict(torch=torch.__version__, columns="class name stream start_us dur_us".split())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{mode}.kernels.json"
    path.write_text(json.dumps(about | {"kernels": rows}))


def union(intervals):
    """The same points of time as intervals [start, end] that neither touch nor overlap, in
    order."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(kernels):
    """Microseconds of a step, of it with communication, of that hidden under computation, and of
    neither. A kernel of NCCL that waits for a slower GPU counts as communication: it is no
    different here."""
    spans = {True: [], False: []}
    for kind, _, _, start, dur in kernels:
        spans[kind == "communication"].append((start, start + dur))

    def length(intervals):
        return sum(end - start for start, end in union(intervals))

    both = spans[True] + spans[False]
    step = max(end for _, end in both) - min(start for start, _ in both)
    hidden = length(spans[True]) + length(spans[False]) - length(both)
    nccl = length(spans[True])
    return dict(step_us=step, nccl_us=nccl, hidden_us=hidden, idle_us=step - length(both))


# --------------------------------------------------------------------------------------- the table


def alike(record, other):
    """True if two records of different modes may be compared."""
    return all(record.get(k) == other.get(k) for k in SAME)


def references(record, records):
    """Tokens/s that a mode is held against: world_size times one GPU alone, the sum of the GPUs,
    world_size times the slowest; of the same commit and round where they were measured, else the
    last ones before it. One that was not is None, and so is one of another commit, as of other
    GPUs, where this commit has measured one of them."""
    records = list(records)
    here = records.index(record) if record in records else len(records)
    there = [
        (i, r)
        for i, r in enumerate(records)
        if r["mode"] in ALONE and "error" not in r and alike(r, record)
    ]

    def nearness(item):  # those that are likeliest to have been measured on the same GPUs come last
        i, r = item
        same_round = r.get("round") == record.get("round") is not None
        return r.get("commit") == record.get("commit"), same_round, i < here

    there.sort(key=nearness)
    if there and nearness(there[-1])[0]:
        there = [item for item in there if nearness(item)[0]]
    found = {r["mode"]: r for _, r in there}
    n, one, every = record["world_size"], found.get("alone_one"), found.get("alone")
    rates = every["rank_tok_per_s"] if every else None
    of_one = n * one["tok_per_s"] if one else None
    return (of_one, sum(rates), n * min(rates)) if rates else (of_one, None, None)


def print_table(records):
    """A block for each setting, a row for each mode; of measurements made twice the later one
    counts."""
    newest = {json.dumps({k: r.get(k) for k in KEY}): r for r in records}.values()
    blocks = {}
    for r in newest:
        blocks.setdefault(json.dumps([r.get(k) for k in SAME]), []).append(r)
    head = "mode,round,step ms,min to max,tokens/s,of n x one,of sum,of n x slowest,GiB".split(",")
    for block in blocks.values():
        r = block[0]
        cut = f" in {r['grad_accum_steps']} micro-steps" if r.get("grad_accum_steps") else ""
        print(
            f"\n{r['preset']}, {r['world_size']} x {r['device']}, {r['batch_size']} x {r['seq_len']} "
            f"tokens{cut}, {r['precision']}{', 8 bits' * bool(r.get('eight_bits'))}, compile "
            f"{r['compile']}{', checkpointing' * r['activation_checkpointing']}, torch {r['torch']}, "
            f"{r['date']}"
        )
        rows = []
        # records outlive the modes that were given up
        order = [*MODES, *(r["mode"] for r in block)]
        for r in sorted(block, key=lambda r: order.index(r["mode"])):
            mode = r["mode"] + (f" {r['bucket_mb']} MB" if r.get("bucket_mb") else "")
            if "error" in r:
                rows.append([mode, r.get("round") or "", "failed:", r["error"][:60]])
                continue
            span = f"{r['step_ms_min']:.1f} to {r['step_ms_max']:.1f}" if "step_ms_min" in r else ""
            shares = [r["tok_per_s"] / ref if ref else 0 for ref in references(r, newest)]
            shares = [f"{share:.1%}" if share else "" for share in shares]
            rows.append([mode, r.get("round") or "", f"{r['step_ms']:.1f}", span])
            rows[-1] += [f"{r['tok_per_s']:,.0f}", *(shares if mode != "alone_one" else [""] * 3)]
            rows[-1] += [f"{r['peak_gib']:.1f}" if r.get("peak_gib") else ""]
            fifth = r.get("losses", [])[4:5] or [r["loss"]]
            rows[-1] += [f"{fifth[0]:.4f}", f"{r['loss']:.4f}"]
        print_rows([*head, "fifth loss", "last"], rows)


# ------------------------------------------------------------------------------------ command line


def key_of(mode, args, world):
    """What makes a measurement this one and no other."""
    values = {k: getattr(args, k) for k in KEY if hasattr(args, k)}
    # older records have no such fields
    values |= dict(eight_bits=args.eight_bits or None, bucket_mb=250 if mode == "ddp" else None)
    values["grad_accum_steps"] = args.grad_accum_steps if args.grad_accum_steps > 1 else None
    values["env"] = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    values |= dict(bench="parallel", mode=mode, world_size=world.world_size)
    return values | dict(torch=str(torch.__version__), device=card_name(world.device))


def main(argv):
    args = parse(Config, argv, description=__doc__)
    if args.table:
        records = [r for r in read_records(args.out) if r.get("bench") == "parallel"]
        if not records:
            raise UserError(f"no measurements in {args.out}; without --table they are made")
        return print_table(records)
    # NVLink's multicast stays off unless the environment says otherwise: its failure would be all
    # users'
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    world = World(args.device)
    args.seq_len = args.seq_len or PRESETS[args.preset][1].seq_len
    args.modes = args.modes or (tuple(MODES) if world.distributed else ("alone_one",))
    if not world.distributed and set(args.modes) - {*ALONE}:
        raise UserError("modes that exchange need several processes: torchrun --nproc_per_node=2")
    check_out(args.out, world.device.type == "cpu")
    check_writable(args.out, "out")
    if world.distributed:
        dist.init_process_group(world.backend)
    with tempfile.TemporaryDirectory() as folder:
        if world.is_main and not args.data:
            update = args.batch_size * args.seq_len * args.grad_accum_steps * world.world_size
            vocab_size = PRESETS[args.preset][0].vocab_size
            random_shards(folder, vocab_size, 8 * update + 1, 2 * args.seq_len)
        data = world.broadcast(args.data or folder)
        for mode in args.modes:
            key = key_of(mode, args, world)
            if world.broadcast(finished(args.out, key)):
                world.say(f"{mode}: already in {args.out}")
                continue
            record = measure(mode, args, world, data)
            if world.is_main:
                append_record(args.out, key | record | origin("", args.commit))
            world.say(f"{mode}: {record['tok_per_s']:,.0f} tokens/s, loss {record['loss']:.4f}")
            torch.compiler.reset()
            gc.collect()  # DDP and the compiled model hold themselves
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        world.barrier()  # nobody leaves while others read the shards


if __name__ == "__main__":
    command(main)
