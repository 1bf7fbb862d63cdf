"""Compare ways to train a GPT-2 on several GPUs, with the same model, optimizer, tokens and loss. An update
has 64 x 1024 tokens per GPU unless --grad_accum_steps is given.

    torchrun --standalone --nproc_per_node=4 bench/parallel.py --round 1
    torchrun --standalone --nproc_per_node=2 bench/parallel.py --modes alone_one zero1_16bit --eight_bits
    python bench/parallel.py --table                      # print the table of --out; needs no GPU

{modes}

All modes start from the same weights and read the same tokens, so the losses of modes with several GPUs
must agree for the first few updates (the table shows the fifth). At a high learning rate, rounding
differences grow with further updates. Modes are compared with a single GPU, measured at the same commit
and in the same --round if possible, because GPUs of the same name differ in speed. The memory peak may
include memory of the previous mode; for an exact one, pass one mode per command. Discarded variants
(all GPUs alone at the same time, ZeRO-1 in float32, blocks compiled separately) are described in
docs/LOG.md; their code is in commit 5d3f79a.
"""

import copy
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from kernels import device_events, kind_of, trace
from records import (
    RUNS,
    append_record,
    check_out,
    gpu_name,
    grouped,
    origin,
    print_rows,
    random_shards,
    recorded,
)
from timing import peak_gib, reset_state, time_updates

from lab.cli import UserError, parse_args, run_main
from lab.distributed import World
from train_gpt2 import PRESETS, build_trainer

MODES = {
    "alone_one": "the first GPU trains alone while the others idle",
    "ddp": "train_gpt2.py's default: DistributedDataParallel with gradient buckets of 250 MB",
    "zero1_16bit": "--parallel zero1: sharded optimizer state, communication in 16 bits",
    "fsdp2": "--parallel fsdp2: sharded weights, gathered block by block in each pass (ZeRO-3)",
}
__doc__ = __doc__.format(modes="\n".join(f"    {name:<12}  {text}" for name, text in MODES.items()))
# fields in which comparable records agree
SAME = "preset world_size batch_size grad_accum_steps compile precision eight_bits data device torch".split()


@dataclass
class Config:
    modes: tuple[Literal[tuple(MODES)], ...] = ()  # default: all, or alone_one with one process
    preset: Literal[tuple(PRESETS)] = "gpt2"  # the model
    batch_size: int = 64  # sequences per process and micro-step
    grad_accum_steps: int = 1  # micro-steps per update
    steps: int = 40  # timed updates
    warmup: int = 10  # untimed updates after the first
    round: int | None = None  # a number, the same for measurements on the same GPUs
    compile: Literal["model", "off"] = "model"  # whether to compile the model
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # as in train_gpt2.py
    eight_bits: bool = False  # 8-bit matmuls in head and MLPs
    device: str = "auto"  # cuda or cpu
    data: str = ""  # folder of token shards; random tokens if empty
    trace: str = ""  # write rank 0's kernels of one step to this folder as MODE.kernels.json
    table: bool = False  # print the table of --out and exit
    out: str = str(RUNS / "parallel.jsonl")  # file of measurements

    def tokens(self):
        """Tokens per update and GPU."""
        return self.batch_size * PRESETS[self.preset][1].seq_len * self.grad_accum_steps


# ------------------------------------------------------------------------------------ measurements


def build(mode, args, world, data):
    """The trainer of a mode."""
    model_config, cfg = PRESETS[args.preset]
    if mode == "alone_one":
        world = copy.copy(world)
        world.world_size, world.distributed = 1, False
    cfg = replace(
        cfg,
        data=data,
        optimizer="adamw",
        batch_size=args.batch_size,
        total_batch_size=args.tokens() * world.world_size,
        precision=args.precision,
        device=args.device,
        warmup_steps=10,  # short, so that the losses change enough to be compared
        parallel={"zero1_16bit": "zero1"}.get(mode, mode if mode == "fsdp2" else "ddp"),
        compile=args.compile == "model",
        fp8="all" if args.eight_bits else "off",
    )
    cfg.validate(model_config)
    return build_trainer(model_config, cfg, world)


def measure(mode, args, world, data):
    """Measure a mode on all ranks together. Returns the numbers of its record, on every rank."""
    mine = None
    if world.is_main or mode != "alone_one":
        trainer = build(mode, args, world, data)
        _, losses, _ = time_updates(trainer, 1 + args.warmup)
        if mode != "alone_one":
            world.barrier()  # start together
        ms, more, state = time_updates(trainer, args.steps)
        mine = dict(ms=[round(t, 3) for t in ms], losses=losses + more, gpu=state)
        mine["peak_gib"] = peak_gib(world.device)
        if args.trace and world.device.type == "cuda" and mode != "alone_one":
            write_extract(trainer, mode, world, Path(args.trace))
    world.barrier()  # on the CPU, so that idle ranks do not wait in a kernel
    return summary([r for r in world.gather(mine) if r], args)


def summary(ranks, args):
    """Combine the measurements of the ranks that trained."""
    slowest = [max(ms) for ms in zip(*(r["ms"] for r in ranks))]  # of all ranks, in each step
    step_ms = statistics.median(slowest)
    # each rank has its part of the loss
    losses = [round(statistics.mean(parts), 6) for parts in zip(*(r["losses"] for r in ranks))]
    return dict(
        step_ms=step_ms,
        step_ms_min=min(slowest),
        step_ms_max=max(slowest),
        tok_per_s=1000 * len(ranks) * args.tokens() / step_ms,
        loss=losses[-1],
        losses=losses,
        peak_gib=max(r["peak_gib"] or 0 for r in ranks) or None,
        gpus=[r["gpu"] for r in ranks],
        rank_step_ms=[r["ms"] for r in ranks],
    )


def write_extract(trainer, mode, world, folder):
    """Write the kernels of one more update on rank 0 to folder/MODE.kernels.json."""
    if not world.is_main:
        trainer.train_step()
        return
    events = device_events(trace(trainer.train_step))
    rows = []
    for e in events:
        start = round(e["ts"] - events[0]["ts"], 2)
        rows.append([kind_of(e["name"]), e["name"][:60], e["args"].get("stream"), start, e["dur"]])
    about = dict(mode=mode, world_size=world.world_size, device=gpu_name(world.device))
    about |= dict(torch=torch.__version__, columns="class name stream start_us dur_us".split())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{mode}.kernels.json").write_text(json.dumps(about | {"kernels": rows}))


# --------------------------------------------------------------------------------------- the table


def reference(record, records):
    """world_size times the tokens/s of a single GPU, measured at the same commit and in the same round if
    possible, otherwise the last one before. None if there is none."""
    here = records.index(record) if record in records else len(records)

    def nearness(i):  # larger if it was more likely measured on the same GPUs
        same_round = records[i].get("round") == record.get("round") is not None
        return records[i].get("commit") == record.get("commit"), same_round, i < here, i

    alone = [i for i, r in enumerate(records) if r["mode"] == "alone_one"]
    alone = [i for i in alone if all(records[i].get(k) == record.get(k) for k in SAME)]
    best = max(alone, key=nearness, default=None)
    return None if best is None else record["world_size"] * records[best]["tok_per_s"]


def print_table(records):
    """Print a table for each setting, with a row per mode. If a mode was measured twice in a round, the
    later record counts."""
    keys = (*SAME, "mode", "round", "env")
    newest = list({tuple(str(r.get(k)) for k in keys): r for r in records}.values())
    for block in grouped(newest, *SAME).values():
        r = block[0]
        print(
            f"\n{r['preset']}, {r['world_size']} x {r['device']}, B = {r['batch_size']} x "
            f"{r['grad_accum_steps']}, {r['precision']}{', 8 bits' * r['eight_bits']}, "
            f"compile {r['compile']}, torch {r['torch']}, {r['date']}"
        )
        rows = []
        for r in sorted(block, key=lambda r: r["mode"]):
            one, fifth = reference(r, newest), r["losses"][4:5]
            low, high = (r.get(f"step_ms_{end}", r["step_ms"]) for end in ("min", "max"))
            rows.append([r["mode"], r["round"] or "", f"{r['step_ms']:.1f}"])
            rows[-1] += [f"{low:.1f} to {high:.1f}", f"{r['tok_per_s']:,.0f}"]
            rows[-1] += [f"{r['tok_per_s'] / one:.1%}" if one and r["mode"] != "alone_one" else ""]
            rows[-1] += [f"{r['peak_gib']:.1f}" if r["peak_gib"] else ""]
            rows[-1] += [f"{fifth[0]:.4f}" if fifth else "", f"{r['loss']:.4f}"]
        head = "mode,round,step ms,min to max,tokens/s,of n x one GPU,GiB,fifth loss,last"
        print_rows(head.split(","), rows)


# ------------------------------------------------------------------------------------ command line


def describe(mode, args, world):
    """The fields of a record that describe how it was measured."""
    names = (
        "preset batch_size grad_accum_steps compile precision eight_bits warmup steps round data"
    )
    about = {"bench": "parallel", "mode": mode} | {n: getattr(args, n) for n in names.split()}
    about["env"] = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    return about | dict(world_size=world.world_size, device=gpu_name(world.device))


def main(argv):
    args = parse_args(Config, argv, description=__doc__)
    if args.table:
        return print_table(recorded(args.out, "parallel"))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast: its failures affect all users
    world = World(args.device)
    args.modes = args.modes or (tuple(MODES) if world.distributed else ("alone_one",))
    if not world.distributed and set(args.modes) - {"alone_one"}:
        raise UserError(
            "modes other than alone_one need several processes; start it with torchrun --nproc_per_node=2"
        )
    check_out(args.out, world.device.type == "cpu")
    if world.distributed:
        dist.init_process_group(world.backend)
    with tempfile.TemporaryDirectory() as folder:
        if world.is_main and not args.data:
            model_config, cfg = PRESETS[args.preset]
            tokens = 8 * args.tokens() * world.world_size + 1
            random_shards(folder, model_config.vocab_size, tokens, 2 * cfg.seq_len)
        data = world.broadcast(args.data or folder)
        for mode in args.modes:
            reset_state(world.device)
            record = measure(mode, args, world, data)
            if world.is_main:
                append_record(args.out, describe(mode, args, world) | record | origin())
            world.print0(f"{mode}: {record['tok_per_s']:,.0f} tokens/s, loss {record['loss']:.4f}")
        world.barrier()  # so that no rank deletes the shards while others read them


if __name__ == "__main__":
    run_main(main)
