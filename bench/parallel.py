"""Ways to train one GPT-2 on several GPUs, side by side: same model, optimizer, tokens and loss, an
update after 64 x 1024 tokens of each GPU unless --grad_accum_steps says otherwise.

    torchrun --standalone --nproc_per_node=4 bench/parallel.py --round 1
    torchrun --standalone --nproc_per_node=2 bench/parallel.py --modes alone_one zero1_16bit --eight_bits
    python bench/parallel.py --table                      # what the file holds; needs no GPU

{modes}

All modes start from the same weights and read the same tokens, so the losses of those that exchange
gradients must agree while few updates are done (the table shows the fifth); updates at a high rate
carry the last bits of a sum far. A mode is held against one GPU alone: of the same commit and
--round where that was measured, as GPUs of one name differ. A peak of memory may count what the
mode before had left behind; for one that does not, name one mode a command. Ways that are decided
(every GPU alone at once, ZeRO-1 in 32 bits, blocks compiled one by one) are in the log; commit
5d3f79a has their code.
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
from timing import forget, peak_gib, time_updates

from lab.cli import UserError, command, parse
from lab.run.settings import check
from lab.world import World
from train_gpt2 import PRESETS, set_up

MODES = {
    "alone_one": "the first GPU trains by itself, the others idle: the rate of one GPU",
    "ddp": "the trainer's way: DistributedDataParallel, compiled with a cut at each 250 MB of gradients",
    "zero1_16bit": "the trainer's --parallel zero1: what 16 bits hold travels in 16 bits",
    "fsdp2": "the trainer's --parallel fsdp2: a block's weights are sent for each pass (ZeRO-3)",
}
__doc__ = __doc__.format(modes="\n".join(f"{name:<12}  {text}" for name, text in MODES.items()))
# records that agree in these may be held against each other
SAME = "preset world_size batch_size grad_accum_steps compile precision eight_bits data device torch".split()


@dataclass
class Config:
    modes: tuple[Literal[tuple(MODES)], ...] = ()  # all if empty (of one process alone_one)
    preset: Literal[tuple(PRESETS)] = "gpt2"  # the model
    batch_size: int = 64  # sequences per process and micro-step
    grad_accum_steps: int = 1  # micro-steps of an update
    steps: int = 40  # updates that are timed
    warmup: int = 10  # updates before those, after the first
    round: int | None = None  # a number for what is measured on the same GPUs
    compile: Literal["model", "off"] = "model"  # as the trainer does, or not at all
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    eight_bits: bool = False  # the products of the head and the MLP in 8 bits
    device: str = "auto"  # cuda or cpu
    data: str = ""  # folder of token shards; random tokens if empty
    trace: str = ""  # folder for MODE.kernels.json, the kernels of one step of the first GPU
    table: bool = False  # print the table of --out and end
    out: str = str(RUNS / "parallel.jsonl")  # file of measurements

    def tokens(self):
        """Tokens of an update, on one GPU."""
        return self.batch_size * PRESETS[self.preset][1].seq_len * self.grad_accum_steps


# ------------------------------------------------------------------------------------ measurements


def build(mode, args, world, data):
    """The trainer's Run in a mode's way."""
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
        warmup_steps=10,  # the last loss is to say whether the modes agree, so it has to move
        parallel={"zero1_16bit": "zero1"}.get(mode, mode if mode == "fsdp2" else "ddp"),
        compile=args.compile == "model",
        fp8="all" if args.eight_bits else "off",
    )
    check(model_config, cfg)
    return set_up(model_config, cfg, world)


def measure(mode, args, world, data):
    """What a record says of a mode, measured by all processes together; the same on each of
    them."""
    mine = None
    if world.is_main or mode != "alone_one":
        run = build(mode, args, world, data)
        _, losses, _ = time_updates(run, 1 + args.warmup)
        if mode != "alone_one":
            world.barrier()  # start together
        ms, more, state = time_updates(run, args.steps)
        mine = dict(ms=[round(t, 3) for t in ms], losses=losses + more, gpu=state)
        mine["peak_gib"] = peak_gib(world.device)
        if args.trace and world.device.type == "cuda" and mode != "alone_one":
            write_extract(run, mode, world, Path(args.trace))
    world.barrier()  # over the CPU: those that idle must not wait in a kernel
    return summary([r for r in world.gather(mine) if r], args)


def summary(ranks, args):
    """The record of what each process that worked has measured."""
    slowest = [max(ms) for ms in zip(*(r["ms"] for r in ranks))]  # of the GPUs, step by step
    step_ms = statistics.median(slowest)
    # each process has its part of a step's loss
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
    about = dict(mode=mode, world_size=world.world_size, device=gpu_name(world.device))
    about |= dict(torch=torch.__version__, columns="class name stream start_us dur_us".split())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{mode}.kernels.json").write_text(json.dumps(about | {"kernels": rows}))


# --------------------------------------------------------------------------------------- the table


def reference(record, records):
    """world_size times the tokens/s of one GPU alone, which a mode is held against: of the same
    commit and round where that was measured, else the last one before it. None if there is none."""
    here = records.index(record) if record in records else len(records)

    def nearness(i):  # of what is likeliest to have been measured on the same GPUs, it is largest
        same_round = records[i].get("round") == record.get("round") is not None
        return records[i].get("commit") == record.get("commit"), same_round, i < here, i

    alone = [i for i, r in enumerate(records) if r["mode"] == "alone_one"]
    alone = [i for i in alone if all(records[i].get(k) == record.get(k) for k in SAME)]
    best = max(alone, key=nearness, default=None)
    return None if best is None else record["world_size"] * records[best]["tok_per_s"]


def print_table(records):
    """A block for each setting, a row for each mode; of a mode measured twice in a round the later
    one counts."""
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
        head = "mode,round,step ms,min to max,tokens/s,of n x one,GiB,fifth loss,last"
        print_rows(head.split(","), rows)


# ------------------------------------------------------------------------------------ command line


def setting(mode, args, world):
    """What a record says of how it was made."""
    names = (
        "preset batch_size grad_accum_steps compile precision eight_bits warmup steps round data"
    )
    about = {"bench": "parallel", "mode": mode} | {n: getattr(args, n) for n in names.split()}
    about["env"] = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    return about | dict(world_size=world.world_size, device=gpu_name(world.device))


def main(argv):
    args = parse(Config, argv, description=__doc__)
    if args.table:
        return print_table(recorded(args.out, "parallel"))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast: its failure would be all users'
    world = World(args.device)
    args.modes = args.modes or (tuple(MODES) if world.distributed else ("alone_one",))
    if not world.distributed and set(args.modes) - {"alone_one"}:
        raise UserError("modes that exchange need several processes: torchrun --nproc_per_node=2")
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
            forget(world.device)
            record = measure(mode, args, world, data)
            if world.is_main:
                append_record(args.out, setting(mode, args, world) | record | origin())
            world.say(f"{mode}: {record['tok_per_s']:,.0f} tokens/s, loss {record['loss']:.4f}")
        world.barrier()  # nobody leaves while others read the shards


if __name__ == "__main__":
    command(main)
