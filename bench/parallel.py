"""Ways to train one GPT-2 on several GPUs, side by side: same model, optimizer, tokens and loss, 64 x 1024 tokens per GPU
and update, no accumulation unless --grad_accum_steps says so. What the processes tell each other, and when, is all that
differs.

    python bench/parallel.py --nproc_per_node 4 --out parallel.jsonl      # every mode in a torchrun of its own
    torchrun --standalone --nproc_per_node=4 bench/parallel.py --modes ddp flat --out parallel.jsonl
    python bench/parallel.py --table --out parallel.jsonl                 # the table once more; needs no GPU
    python bench/parallel.py --picture traces/ddp.kernels.json ddp.png    # who computes and who communicates when

{modes}

All modes start from the same weights and read the same tokens, so those that exchange gradients must have the same loss
while few updates are done (the table shows the fifth). The last one differs more: the order of a GPU's sums is not fixed,
and updates at a high rate carry such differences far. alone and alone_one, which read the same tokens, show it too.
Finished measurements are found in --out and left alone, failed ones are tried again. Without --data the tokens are
drawn at random, as often as 1 / (10 + rank).
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import gc
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.func import functional_call

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "readme.assets" / "runs" / "parallel.jsonl"
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from kernels import kind_of  # noqa: E402
from records import append_record, card_name, finished, keep_tries_apart, origin, random_shards, read_records  # noqa: E402

from lab.device import find_device  # noqa: E402
from lab.kernels.fused_mlp import MIN_POSITIONS  # noqa: E402
from lab.optim.zero import ZeroAdamW  # noqa: E402
from lab.run.locks import check_writable  # noqa: E402
from lab.run.log import PhaseClock  # noqa: E402
from lab.run.stop import running  # noqa: E402
from train_gpt2 import PRESETS, Underway, World, get_lr, make_optimizer, prepare, share_out, train_step  # noqa: E402

MODES = {
    "alone_one": "the first card trains by itself, the others idle: what is called the rate of one GPU",
    "alone": "every card trains by itself, all at once: cards differ and share power, so this is what there is to win",
    "ddp": "the trainer's way: DistributedDataParallel, compiled with the graph cut where a bucket of gradients is full",
    "ddp_inside": "DistributedDataParallel around the compiled model: one graph, so all gradients come at its end",
    "ddp_blocks": "DistributedDataParallel around a model whose blocks are compiled one by one",
    "ddp_bf16": "ddp with gradients rounded to bf16 for the exchange",
    "flat": "no DistributedDataParallel: one all-reduce of all gradients when the backward pass is over",
    "in_graph": "no DistributedDataParallel: the graph stays whole, and in it each block sends its gradients once it has them",
    "zero1": "each process keeps AdamW's state of its share of the weights alone, and updates that (ZeRO, stage 1)",
    "zero1_16bit": "the trainer's --zero1: zero1, and what 16 bits hold travels in 16 bits, matrices and their gradients",
    "fsdp2": "each process keeps its share of weights, gradients and state alone (fully_shard, ZeRO stage 3)",
    "loop": "the whole trainer with log, validation, HellaSwag, samples and checkpoints as often as in a full run",
    "loop_zero1": "loop, with --zero1",
}
__doc__ = __doc__.format(modes="\n".join(f"{name:<14}  {text}" for name, text in MODES.items()))
ALONE, LOOPS = ("alone_one", "alone"), ("loop", "loop_zero1")

# ------------------------------------------------------------------------------------------------------- 1. modes


def lone(world):
    """A World of this process alone, on the same device."""
    one = copy.copy(world)
    one.rank, one.world_size, one.distributed = 0, 1, False
    return one


class AfterBackward:
    """Stands in for World.wrap and World.exchange: all gradients in one piece and one all-reduce, after the backward pass.

    Nothing is hidden under computation, and nothing disturbs it: the graph stays whole, no kernel shares the card with
    the exchange. A large all-reduce is also the most efficient one.
    """

    def __init__(self, world):
        self.world = world

    def __getattr__(self, name):
        return getattr(self.world, name)

    @contextlib.contextmanager
    def exchange(self, model, last):
        yield
        if last:
            grads = [p.grad for p in model.parameters()]
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat)
            flat /= self.world.world_size
            parts = flat.split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])


STARTED = []  # (Work, gradients) of each exchange that nobody has waited for yet; an op has no object to keep them in


@torch.library.custom_op("gpt2::start_exchange", mutates_args=("grads",))  # opaque, so that torch.compile keeps one graph
def start_exchange(grads: torch.Tensor) -> None:
    """Begin to sum `grads` over the processes, in place, and return at once."""
    STARTED.append((dist.all_reduce(grads, async_op=True), grads))


class Exchanged(torch.autograd.Function):
    """Parameters as they are. On the way back their gradients, times `factor`, are laid one after the other and exchanged.
    That is only started here: it is over when it has been waited for."""

    @staticmethod
    def forward(ctx, factor, *params):
        ctx.factor = factor
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx, *grads):
        # torch.compile has the kernel that takes a gradient from autocast's 16 bits back to 32 multiply it as well, and
        # write it to its place in `flat`: neither is a pass of its own
        flat = torch.cat([g.reshape(-1) * ctx.factor for g in grads])
        start_exchange(flat)
        return None, *(part.view_as(g) for part, g in zip(flat.split([g.numel() for g in grads]), grads))


def exchange_together(module, names, factor):
    """From now on the gradients of these parameters of `module` are exchanged as one, when the last of them is there.

    Exchanged is applied in the module's forward pass, not once for the whole model: autograd goes through the functions
    in reverse order, so those applied before the first block would all come after it, at the end of the backward pass.
    """
    params = [module.get_parameter(name) for name in names]
    inner = copy.copy(module)  # the same parameters and parts, and the forward that is replaced here

    def forward(*args, **kwargs):
        return functional_call(inner, dict(zip(names, Exchanged.apply(factor, *params))), args, kwargs)

    module.forward = forward


class DuringBackward(AfterBackward):
    """Stands in for World.wrap and World.exchange: a block's gradients leave as soon as its backward pass is over, and
    travel while that of the block before computes. The step of the compiled graph that starts them is an op like any
    other, so nothing has to be cut.

    Last come the embeddings, which are the head too, and the last norm: nothing is left to hide those under. All
    processes start the exchanges in the same order, as they compile the same graph.
    """

    def wrap(self, model):
        factor = 1 / self.world.world_size
        for block in model.transformer.h:
            exchange_together(block, [name for name, _ in block.named_parameters()], factor)
        exchange_together(model, [name for name, _ in model.named_parameters() if ".h." not in name], factor)
        return model

    @contextlib.contextmanager
    def exchange(self, model, last):
        yield
        # A gradient becomes p.grad as it is where there was none before: that is why this mode cannot accumulate. A copy or
        # a sum of it would be made in the middle of the exchange, of numbers that are neither the old ones nor the new
        ours = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert ours == {g.untyped_storage().data_ptr() for _, g in STARTED}, "a gradient was copied on its way"
        # NCCL has a stream of its own. It waits there for what the backward pass had launched before the exchange, and wait()
        # lets the stream of the optimizer wait for it in turn; the host goes on at once
        for work, _ in STARTED:
            work.wait()
        STARTED.clear()


def shard_fully(model, precision):
    """Each block a unit that is gathered in bf16 before its forward and before its backward pass and dropped after both;
    embeddings and last norm are one more. The shares themselves stay float32, gradients are summed in it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def compile_blocks(model):
    """One small graph, used by every block: compiled in a few seconds, and no hook of DDP or FSDP has to go into it."""
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, dynamic=False)


def build(mode, model_config, cfg, world, how):
    """(step, raw_model, optimizer): step(clock) makes one update in a mode's way and returns its loss and the norm of its
    gradient as tensors.

    how: what is compiled, the whole "model", its "blocks" (always so in fsdp2 and ddp_blocks), or "off".
    """
    if mode in ALONE:
        world, cfg = lone(world), dataclasses.replace(cfg, total_batch_size=cfg.total_batch_size // world.world_size)
    elif mode in ("flat", "in_graph"):
        world = AfterBackward(world) if mode == "flat" else DuringBackward(world)
    precision, raw_model, optimizer, loader, _ = prepare(model_config, cfg, world)
    if mode == "in_graph" and loader.grad_accum_steps > 1:
        raise ValueError(f"{mode} cannot accumulate, and total_batch_size={cfg.total_batch_size} takes "
                         f"{loader.grad_accum_steps} micro-steps; {cfg.total_batch_size // loader.grad_accum_steps} takes one")
    if how != "off" and mode in ("fsdp2", "ddp_blocks"):
        how = "blocks"
    if how == "blocks":
        compile_blocks(raw_model)

    def compiled(model):
        return torch.compile(model, dynamic=False) if how == "model" else model

    if mode.startswith("ddp"):
        model = world.wrap(compiled(raw_model) if mode == "ddp_inside" else raw_model)
        if mode == "ddp_bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            model.register_comm_hook(None, bf16_compress_hook)
        model = compiled(model) if mode != "ddp_inside" else model
    elif mode == "fsdp2":
        model = shard_fully(raw_model, precision)
        optimizer = make_optimizer(model, cfg, world.device)  # of the shares
    else:
        if mode == "zero1":
            optimizer = ZeroAdamW(optimizer, [], None, world)
        elif mode == "zero1_16bit":
            optimizer = share_out(optimizer, raw_model, precision, world)
        model = compiled(world.wrap(raw_model) if mode == "in_graph" else raw_model)
    done = 0

    def step(clock):
        nonlocal done
        loss, norm, _ = train_step(model, optimizer, loader, get_lr(done, cfg), cfg, world, precision, clock)
        done += 1
        return loss, norm

    return step, raw_model, optimizer


# ----------------------------------------------------------------------------------------------- 2. measurements


def timed_steps(step, count, world, clock, halfway=lambda: None):
    """Milliseconds of each of `count` updates, and the last (loss, norm).

    On CUDA the ends are events in the stream, and the host looks at each loss one step late, as train() does: waiting for
    the device after every step would add the time to get it going again, which no real run pays.
    """

    def now():
        if world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    world.synchronize()
    marks, before, result = [now()], None, None
    for i in range(count):
        result = step(clock)
        marks.append(now())
        if i == count // 3:
            halfway()
        if before is not None:
            before.arrive()
        before = Underway(result[0])
    world.synchronize()
    if world.device.type == "cuda":
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])], result
    return [1000 * (b - a) for a, b in zip(marks, marks[1:])], result


class Cards:
    """Clock, power and temperature of all cards while they work, from nvidia-smi, which needs a second to say it."""

    def __init__(self):
        self.process = None

    def ask(self):
        command = "nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader,nounits".split()
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def answer(self):
        """[(MHz, watts, degrees C) of each card], or None where the answer did not come before the work was done."""
        if self.process is None or self.process.poll() is None:
            return None
        with contextlib.suppress(ValueError):
            return [[float(v) for v in line.split(",")] for line in self.process.stdout.read().splitlines()] or None


def median(values):
    return float(np.median(values))


def measure(mode, model_config, cfg, world, how, warmup, steps, trace):
    """What a record says of a mode, measured by all processes together; the same on each of them."""
    works = world.is_main or mode != "alone_one"
    cuda, mine = world.device.type == "cuda", None
    if works:
        cards, clock = Cards(), PhaseClock(False, world.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        t0 = time.perf_counter()
        update, *_ = build(mode, model_config, cfg, world, how)
        losses = []

        def step(clock):
            loss, norm = update(clock)
            losses.append(loss)
            return loss, norm

        world.synchronize()
        t1 = time.perf_counter()
        step(clock)
        world.synchronize()
        t2 = time.perf_counter()
        for _ in range(warmup):
            step(clock)
    if mode != "alone_one":
        world.smallest(0)  # start together
    if works:
        clock = PhaseClock(True, world.device)
        ms, (_, norm) = timed_steps(step, steps, world, clock, cards.ask if world.is_main else lambda: None)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shares
        mine = {"build_s": t1 - t0, "first_step_s": t2 - t1, "ms": [round(t, 3) for t in ms],
                "losses": [loss.item() for loss in losses], "grad_norm": norm.item(),
                "phases": clock.read(), "cards": cards.answer(),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None}  # fmt: skip
        if trace and cuda and mode != "alone_one":
            write_trace(step, world, Path(trace), mode)
    world.smallest(0)  # over the CPU: those that idle must not wait in a kernel
    ranks = [r for r in world.gather(mine) if r is not None]
    tokens = cfg.total_batch_size // world.world_size  # of a step, on one card
    each = [tokens / median(r["ms"]) * 1000 for r in ranks]  # tokens/s by each card's own clock
    slowest = np.max([r["ms"] for r in ranks], axis=0)  # of the cards, step by step
    together = len(ranks) * tokens / median(slowest) * 1000
    losses = np.mean([r["losses"] for r in ranks[: 1 if mode in ALONE else None]], axis=0)  # each has its part of a step's
    return {
        "step_ms": median(slowest), "step_ms_min": float(slowest.min()), "step_ms_max": float(slowest.max()),
        "tok_per_s": sum(each) if mode in ALONE else together, "rank_tok_per_s": each,
        "build_s": max(r["build_s"] for r in ranks), "first_step_s": max(r["first_step_s"] for r in ranks),
        "peak_gib": max(r["peak_gib"] for r in ranks) if cuda else None, "loss": float(losses[-1]),
        "losses": losses.round(6).tolist(), "grad_norm": ranks[0]["grad_norm"], "phases": ranks[0]["phases"],
        "cards": ranks[0]["cards"], "rank_step_ms": [r["ms"] for r in ranks],
    }  # fmt: skip


# The full run of 19,073 steps validates every 250 steps and does the other three every 1000. Here they all come twice, at
# their full size: the first time compiles, reads and fills caches, so the second half of the run is what is measured. Each
# then costs a step 1/250 or 1/1000 of its seconds. (Shrinking intervals and amounts together would not do: a checkpoint
# has no smaller size, and every evaluation has a start of its own.)
FULL_RUN = {"val": 250, "hella": 1000, "sample": 1000, "checkpoint": 1000}


def read_loop(events, half, total_batch_size, val_tokens):
    """What a record says of the events of a log.jsonl: a run of 2 * half steps with everything due at both halves.

    val_tokens: how many the full run validates on. If the data have fewer, the seconds are scaled up to it.
    """
    last, seconds, before = {}, {}, None
    for event in events:
        if before is not None and event["kind"] in FULL_RUN and event["step"] == 2 * half:
            seconds[event["kind"]] = event["time"] - before
        before = event["time"]
        last[event["kind"] if event["kind"] in ("train", "start") else "other", event["step"]] = event["time"]
    training = (last["train", 2 * half] - last["other", half]) / half  # seconds a step
    raw = half * total_batch_size / (last["other", 2 * half] - last["other", half])
    if "val" in seconds:
        seconds["val"] *= val_tokens / min(val_tokens, events[0]["val_tokens"] - 1)
    per_step = training + sum(s / FULL_RUN[kind] for kind, s in seconds.items())
    return {
        "step_ms": 1000 * per_step, "tok_per_s": total_batch_size / per_step, "train_ms": 1000 * training,
        "seconds": seconds, "not_measured": sorted(FULL_RUN.keys() - seconds.keys()), "raw_tok_per_s": raw,
        "loss": [e["loss"] for e in events if e["kind"] == "train"][-1],
    }  # fmt: skip


def measure_loop(mode, args, data, half):
    """read_loop of a real run of train_gpt2.py under torchrun, in a folder that is deleted afterwards."""
    model_config, cfg = PRESETS[args.preset]
    update = args.batch_size * args.seq_len * args.nproc_per_node
    total = update * max(1, round(cfg.total_batch_size / update))
    hellaswag = (ROOT / "data/hellaswag/hellaswag_val.jsonl").exists() and cfg.hella_every  # nobody waits for a network here
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(preset=args.preset, data=data, batch_size=args.batch_size, seq_len=args.seq_len, total_batch_size=total,
                     device=args.device, precision=args.precision, max_steps=2 * half, val_every=half, sample_every=half,
                     hella_every=half if hellaswag else 0, ckpt_every=half, log_every=math.gcd(half, 10), log_dir=folder,
                     run_name="loop")  # fmt: skip
        command = torchrun(args.nproc_per_node, "train_gpt2.py", *[f"--{k}={v}" for k, v in flags.items()])
        command += ["--no_compile"] if args.compile == "off" else []
        command += ["--activation_checkpointing"] if args.activation_checkpointing else []
        command += ["--zero1"] if mode == "loop_zero1" else []
        command += ["--cross_entropy=fp8", "--fp8_mlp"] if args.eight_bits else []
        run_limited(command, args.limit, cwd=ROOT, stdout=subprocess.DEVNULL)  # ROOT: where data/hellaswag is
        events = [json.loads(line) for line in (Path(folder) / "loop" / "log.jsonl").read_text().splitlines()]
    return {"total_batch_size": total, "half": half} | read_loop(events, half, total, cfg.val_tokens)


# ------------------------------------------------------------------------------------------- 3. traces, a picture


def extract_kernels(trace):
    """[class, name, stream, start_us, dur_us] of all that ran on the device, from a chrome trace, as of its first."""
    found = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    t0 = min((e["ts"] for e in found), default=0)
    rows = [[kind_of(e["name"]), e["name"][:60], e["args"].get("stream"), round(e["ts"] - t0, 2), e["dur"]] for e in found]
    return sorted(rows, key=lambda row: row[3])


def write_trace(step, world, folder, mode):
    """Chrome trace and extract of one more update of rank 0: folder/<mode>.trace.json.gz and <mode>.kernels.json."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profiler if world.is_main else contextlib.nullcontext():
        step(PhaseClock(False, world.device))
        world.synchronize()
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{mode}.trace.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path) as f:
            kernels = extract_kernels(json.load(f))
        about = {"mode": mode, "world_size": world.world_size, "device": card_name(world.device), "torch": torch.__version__}
        about["columns"] = ["class", "name", "stream", "start_us", "dur_us"]
        (folder / f"{mode}.kernels.json").write_text(json.dumps(about | {"kernels": kernels}))


def union(intervals):
    """The same points of time as intervals (start, end) that neither touch nor overlap, in order."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def length(intervals):
    return sum(end - start for start, end in union(intervals))


def overlap(kernels):
    """Microseconds of a step, of it with communication, of that hidden under computation, and with neither.

    A kernel of NCCL that waits for a slower card counts as communication: to this card it is no different.
    """
    spans = {True: [], False: []}
    for kind, _, _, start, dur in kernels:
        spans[kind == "communication"].append((start, start + dur))
    if not kernels:
        raise ValueError("there is no kernel in this extract; --trace needs a GPU")
    both = length(spans[True] + spans[False])
    ends = [end for span in spans.values() for _, end in span]
    step = max(ends) - min(start for span in spans.values() for start, _ in span)
    hidden = length(spans[True]) + length(spans[False]) - both
    return {"step_us": step, "nccl_us": length(spans[True]), "hidden_us": hidden, "idle_us": step - both}


def overlap_picture(extract_file, out_png, dark=False):
    """Two lanes over the time of one step: what computes, by class, and what communicates.

    extract_file is a .kernels.json of --trace. The title says how much of the communication is hidden. Raises OSError or
    ValueError for a file that is none.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from lab.tools.plot import SERIES, style

    try:
        extract = json.loads(Path(extract_file).read_text())
        kernels, cards = extract["kernels"], f"{extract['world_size']} x {extract['device']}"
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{extract_file} is no extract of a trace; --trace FOLDER writes <mode>.kernels.json") from None
    times = overlap(kernels)
    order = ["matmul", "attention", "elementwise", "loss", "optimizer", "copy"]
    colors = dict(zip(order, [*SERIES[dark], "0.75"]))
    with matplotlib.rc_context(style(dark)):
        figure = Figure(figsize=(8, 2.6))
        ax = figure.subplots()
        ax.grid(False)
        for kind in order:
            bars = [(start / 1000, dur / 1000) for k, _, _, start, dur in kernels if k == kind]
            if bars:
                ax.broken_barh(bars, (1.1, 0.8), color=colors[kind], linewidth=0, label=kind)
        bars = [(start / 1000, dur / 1000) for k, _, _, start, dur in kernels if k == "communication"]
        ax.broken_barh(bars, (0.1, 0.8), color="white" if dark else "black", linewidth=0)
        ax.set_yticks([0.5, 1.5], ["NCCL", "compute"])
        ax.set_ylim(0, 2)
        ax.set_xlim(0, times["step_us"] / 1000)
        ax.set_xlabel(f"ms of one step of rank 0, {cards}")
        share = f"{times['hidden_us'] / times['nccl_us']:.0%} of" if times["nccl_us"] else "no communication in"
        much = f" {times['nccl_us'] / 1000:.1f} ms of communication hidden under computation" if times["nccl_us"] else ""
        ax.set_title(f"{extract['mode']}: {share}{much or ' this step'}")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=6, fontsize=9, handlelength=1)
        figure.savefig(out_png)


# ------------------------------------------------------------------------------------------------- 4. the table


def alike(record, other):
    """True if two records of different modes may be compared."""
    same = ("preset", "world_size", "batch_size", "seq_len", "compile", "activation_checkpointing", "precision", "data",
            "device", "torch", "eight_bits", "grad_accum_steps")  # fmt: skip
    return all(record.get(k) == other.get(k) for k in same)


def references(record, records):
    """Tokens/s that a mode is held against: world_size times one card alone, the sum of the cards, world_size times the
    slowest; of the same commit and round where they were measured, else the last ones before it. One that was not is None,
    and so is one of another commit, as of other cards, where this commit has measured one of them."""
    records = list(records)
    here = records.index(record) if record in records else len(records)
    there = [(i, r) for i, r in enumerate(records) if r["mode"] in ALONE and "error" not in r and alike(r, record)]

    def nearness(item):  # those that are likeliest to have been measured on the same cards come last
        i, r = item
        return (r.get("commit") == record.get("commit"), r.get("round") == record.get("round") is not None, i < here)

    there.sort(key=nearness)
    if there and nearness(there[-1])[0]:
        there = [item for item in there if nearness(item)[0]]
    found = {r["mode"]: r for _, r in there}
    n, one, every = record["world_size"], found.get("alone_one"), found.get("alone")
    rates = every["rank_tok_per_s"] if every else None
    return (n * one["tok_per_s"] if one else None, sum(rates) if rates else None, n * min(rates) if rates else None)


def particulars(record):
    """What may differ between two records of one mode that stand in one block of the table."""
    wanted = ("bucket_mb", "round") if record["mode"] in LOOPS else ("bucket_mb", "steps", "warmup", "round")
    return record["env"] | {k: record[k] for k in wanted if record.get(k)}


def table(records):
    """Lines of text: a block for each setting, a row for each mode, newest record first to count."""
    records = [r for r in records if r.get("bench") == "parallel"]
    newest = {json.dumps({k: r.get(k) for k in KEY}): r for r in records}
    blocks, lines = [], []
    for record in newest.values():
        block = next((b for b in blocks if alike(b[0], record)), None)
        block.append(record) if block else blocks.append([record])
    for block in blocks:
        r = block[0]
        cut = f" in {r['grad_accum_steps']} micro-steps each" if r.get("grad_accum_steps") else " each"
        lines += [f"{r['preset']}, {r['world_size']} x {r['device']}, {r['batch_size']} x {r['seq_len']} tokens{cut}, "
                  f"{r['precision']}{', head and MLP in 8 bits' if r.get('eight_bits') else ''}, compile {r['compile']}"
                  f"{', activation checkpointing' if r['activation_checkpointing'] else ''}, torch {r['torch']}, {r['date']}",
                  f"{'mode':<14} {'step ms (min to max)':>24} {'tokens/s':>10} {'% of n x one':>12} {'sum alone':>9} "
                  f"{'n x slowest':>11} {'GiB':>6} {'first step s':>12} {'fifth and':>9} {'last loss':>9}"]  # fmt: skip
        times = collections.Counter(item for r in block for item in particulars(r).items())
        order = [*MODES, *(r["mode"] for r in block)]  # records outlive the modes that were given up
        for r in sorted(block, key=lambda r: order.index(r["mode"])):
            env = " ".join(f"{k}={v}" for k, v in particulars(r).items()
                           if k == "round" or 2 * times[k, v] < len(block))  # fmt: skip
            if "error" in r:
                lines.append(f"{r['mode']:<14} {env} failed: {r['error']}")
                continue
            spread = f" ({r['step_ms_min']:.1f} to {r['step_ms_max']:.1f})" if "step_ms_min" in r else ""
            step = f"{r['step_ms']:.1f}{spread}"
            percent = [f"{r['tok_per_s'] / ref:.1%}" if ref else "-" for ref in references(r, newest.values())]
            percent = ["-"] * 3 if r["mode"] == "alone_one" else percent
            peak, first = (f"{r[k]:.1f}" if r.get(k) else "-" for k in ("peak_gib", "first_step_s"))
            fifth = f"{r['losses'][4]:.4f}" if len(r.get("losses", [])) > 4 else "-"
            lines.append(f"{r['mode']:<14} {step:>24} {r['tok_per_s']:>10,.0f} {percent[0]:>12} {percent[1]:>9} "
                         f"{percent[2]:>11} {peak:>6} {first:>12} {fifth:>9} {r['loss']:>9.4f} {env}".rstrip())  # fmt: skip
            if r["mode"] == "alone":
                cards = r.get("cards") or []
                rates = ", ".join(f"{rate:,.0f}" + (f" ({cards[i][0]:.0f} MHz, {cards[i][1]:.0f} W, {cards[i][2]:.0f} C)"
                                  if len(cards) == len(r["rank_tok_per_s"]) else "")
                                  for i, rate in enumerate(r["rank_tok_per_s"]))  # fmt: skip
                tokens = r["world_size"] * r["batch_size"] * r["seq_len"] * (r.get("grad_accum_steps") or 1)
                bound = tokens / r["step_ms"] * 1000
                lines += [f"            each card: {rates}", f"            if all waited for the slowest card of each step: "
                          f"{bound:,.0f}"]  # fmt: skip
            if r["mode"] in LOOPS:
                events = ", ".join(f"{kind} {s:.2f} s every {FULL_RUN[kind]} steps" for kind, s in r["seconds"].items())
                missing = f"; not measured: {', '.join(r['not_measured'])}" if r["not_measured"] else ""
                lines.append(f"            {r['total_batch_size']} tokens in {r['train_ms']:.1f} ms; {events}{missing}")
        lines.append("")
    return lines


# ------------------------------------------------------------------------------------------- 5. command line, processes

KEY = ("bench", "mode", "bucket_mb", "preset", "world_size", "batch_size", "seq_len", "compile",
       "activation_checkpointing", "precision", "data", "warmup", "steps", "round", "device", "torch", "env",
       "eight_bits", "grad_accum_steps")  # fmt: skip


def key_of(mode, args, world_size):
    """What makes a measurement this one and no other."""
    values = {k: getattr(args, k) for k in KEY if hasattr(args, k)}
    # older records have no such fields
    values["eight_bits"] = args.eight_bits or None
    values["grad_accum_steps"] = args.grad_accum_steps if args.grad_accum_steps > 1 and mode not in LOOPS else None
    values["bucket_mb"] = World.bucket_mb if mode == "loop" else args.bucket_mb if mode.startswith("ddp") else None
    env = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    steps = args.loop_steps if mode in LOOPS else args.steps
    return values | {"bench": "parallel", "mode": mode, "world_size": world_size, "steps": steps, "torch": torch.__version__,
                     "device": card_name(args.device), "env": env}  # fmt: skip


def torchrun(processes, script, *words):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", str(ROOT / script),
            *map(str, words)]  # fmt: skip


def run_limited(command, seconds, **where):
    """Run a command. Raises RuntimeError with what it said last if it fails, or is not done after so many seconds."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=said, **where)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes when it is asked to, not when it is killed
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            raise RuntimeError(f"not done after {seconds} s") from None
        if status:
            said.seek(0)
            lines = said.read().splitlines()
            print("\n".join(lines[-60:]), file=sys.stderr)
            errors = [line for line in lines if ": error: " in line] or [f"exit status {status}"]
            raise RuntimeError(errors[0].split(": error: ")[-1][:300])


def done_before(args, key):
    """True if --out holds this measurement, and --trace its trace where one is asked for and can be had."""
    cuda = torch.cuda.is_available() and args.device.startswith(("auto", "cuda"))
    traced = args.trace and cuda and key["mode"] not in ("alone_one", *LOOPS)
    return bool(finished(args.out, key)) and (not traced or (Path(args.trace) / f"{key['mode']}.kernels.json").exists())


def drive(args, argv):
    """Each mode in processes of its own: one that fails or hangs leaves the others alone. Returns how many failed."""
    own = argparse.ArgumentParser(allow_abbrev=False)
    own.add_argument("--nproc_per_node"), own.add_argument("--limit"), own.add_argument("--modes", nargs="+")
    _, rest = own.parse_known_args(argv)
    failures = 0
    for mode in args.modes:
        key = key_of(mode, args, args.nproc_per_node)
        if done_before(args, key):
            print(f"{mode}: already in {args.out}", flush=True)
            continue
        try:
            if mode not in LOOPS:
                run_limited(torchrun(args.nproc_per_node, "bench/parallel.py", "--modes", mode, *rest), args.limit)
                continue
            with tempfile.TemporaryDirectory() as folder:
                model_config, cfg = PRESETS[args.preset]
                n = 4 * args.batch_size * args.seq_len * args.nproc_per_node
                data = args.data or random_shards(folder, model_config.vocab_size, n, cfg.val_tokens + 1)
                record = measure_loop(mode, args, data, args.loop_steps)
            append_record(args.out, key | record | origin(commit=args.commit))
        except (RuntimeError, OSError, KeyError) as error:
            if finished(args.out, key):  # it was measured, and went wrong in taking its leave
                continue
            failures += 1
            append_record(args.out, key | {"error": str(error)} | origin(commit=args.commit))
            print(f"{mode}: failed: {error}", flush=True)
    print("\n".join(table(read_records(args.out))))
    return failures


def work(args):
    """One process of those that measure args.modes one after the other; rank 0 writes the records."""
    world = World(args.device)
    world.bucket_mb = args.bucket_mb
    with tempfile.TemporaryDirectory() if world.is_main and not args.data else contextlib.nullcontext() as folder:
        model_config, cfg = PRESETS[args.preset]
        manifest = Path(args.data) / "manifest.json"
        if args.data and manifest.exists():
            model_config = dataclasses.replace(model_config, vocab_size=json.loads(manifest.read_text())["vocab_size"])
        model_config = dataclasses.replace(model_config, activation_checkpointing=args.activation_checkpointing)
        if args.eight_bits:
            model_config = dataclasses.replace(model_config, cross_entropy="fp8", fp8_mlp=True)
        update = args.batch_size * args.seq_len * world.world_size * args.grad_accum_steps
        if folder:
            random_shards(folder, model_config.vocab_size, 8 * update + 1, 2 * args.seq_len)
        cfg = dataclasses.replace(
            cfg, data=args.data or world.from_main(folder), optimizer="adamw", batch_size=args.batch_size,
            seq_len=args.seq_len, total_batch_size=update, precision=args.precision,
            warmup_steps=10,  # the loss of the last step is to say whether the modes agree, so it has to move
        )  # fmt: skip
        for mode in args.modes:
            key = key_of(mode, args, world.world_size)
            if world.from_main(done_before(args, key)):
                continue
            record = measure(mode, model_config, cfg, world, args.compile, args.warmup, args.steps, args.trace)
            if world.is_main:
                append_record(args.out, key | record | origin(commit=args.commit))
                print(f"{mode}: {record['tok_per_s']:,.0f} tokens/s, {record['step_ms']:.1f} ms, first step "
                      f"{record['first_step_s']:.1f} s, loss {record['loss']:.4f}", flush=True)  # fmt: skip
            torch.compiler.reset()
            gc.collect()  # DDP and the compiled model hold themselves, and the next mode's peak would count what they hold
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        world.smallest(0)  # nobody leaves while others read the shards
    world.exit()


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--out", default=str(OUT), help="records go here, one line each (default %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help="default: all (without torchrun: alone_one)")
    parser.add_argument("--nproc_per_node", type=int, default=0, help="start so many processes (0: none, as under torchrun)")
    parser.add_argument("--limit", type=int, default=150, help="seconds for a mode (default %(default)s)")
    parser.add_argument("--preset", default="gpt2", choices=PRESETS)
    parser.add_argument("--batch_size", type=int, default=64, help="sequences per process and micro-step (default %(default)s)")
    parser.add_argument("--grad_accum_steps", type=int, default=1, metavar="N",
                        help="micro-steps of an update (default %(default)s); loop has as many as its preset")  # fmt: skip
    parser.add_argument("--seq_len", type=int, default=0, help="default: the preset's")
    parser.add_argument("--steps", type=int, default=40, help="updates that are timed (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="updates before those, after the first (default %(default)s)")
    parser.add_argument("--round", type=int, help="a number, to measure again what --out holds: cards differ from run to run")
    parser.add_argument("--loop_steps", type=int, default=100, help="half the steps of the mode loop (default %(default)s)")
    parser.add_argument("--compile", default="model", choices=("model", "blocks", "off"))
    parser.add_argument("--bucket_mb", type=int, default=World.bucket_mb, metavar="MB",
                        help="DDP exchanges gradients in pieces of so many MB (default %(default)s)")  # fmt: skip
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "tf32", "fp32"))
    parser.add_argument("--eight_bits", action="store_true", help="the products of the head and the MLP in 8 bits")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", default="", help="folder of token shards; random tokens if empty")
    parser.add_argument("--trace", default="", help="folder for a trace of one step of each mode, and an extract of it")
    parser.add_argument("--commit", default="", help="noted in the records where git is not at hand")
    parser.add_argument("--table", action="store_true", help="print the table of --out and end")
    parser.add_argument("--picture", nargs=2, metavar=("EXTRACT", "PNG"), help="draw an extract, light and dark, and end")
    args = parser.parse_args(argv)
    args.seq_len = args.seq_len or PRESETS[args.preset][1].seq_len
    processes = args.nproc_per_node or int(os.environ.get("WORLD_SIZE", 1))
    default = [m for m in MODES if m not in LOOPS or args.nproc_per_node] if processes > 1 else ["alone_one"]
    cpu = args.device == "cpu" or not torch.cuda.is_available()
    if cpu:
        default = [m for m in default if m != "ddp_bf16"]  # its exchange in 16 bits is NCCL's
    args.modes = args.modes or default
    for name, least in (("batch_size", 1), ("seq_len", 1), ("steps", 1), ("warmup", 0), ("loop_steps", 1), ("limit", 1),
                        ("bucket_mb", 1), ("nproc_per_node", 0), ("grad_accum_steps", 1)):  # fmt: skip
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be {least} or more")
    if args.eight_bits and args.batch_size * args.seq_len < MIN_POSITIONS:
        parser.error(f"--eight_bits takes {MIN_POSITIONS} tokens or more a micro-step, not {args.batch_size} x {args.seq_len}: "
                     "in smaller ones the MLP stays in 16 bits")  # fmt: skip
    if args.data and not Path(args.data).is_dir():
        parser.error(f"there is no folder {args.data}; name one with token shards, or leave --data out")
    if processes < 2 and set(args.modes) - {*ALONE, *LOOPS}:
        parser.error(f"{', '.join(sorted(set(args.modes) - {*ALONE}))} need two processes or more: --nproc_per_node 2")
    if set(LOOPS) & set(args.modes) and not args.nproc_per_node:
        parser.error("loop and loop_zero1 start processes of their own: pass --nproc_per_node and no torchrun")
    here = args.table or args.picture or args.preset == "laptop" or args.device != "auto" or torch.cuda.is_available()
    if not here:
        parser.error(f"torch sees no GPU, and {args.preset} is too large for a CPU; a try: --preset laptop --out try.jsonl")
    most = PRESETS[args.preset][0].block_size
    if args.seq_len > most:
        parser.error(f"--seq_len {args.seq_len} must be at most {most}, the context of {args.preset}")
    if not (args.table or args.picture):
        try:
            find_device(args.device, 0)
            keep_tries_apart(args.out, OUT, cpu)
            check_writable(args.out, "out")
        except ValueError as error:
            parser.error(str(error))
    args.data = str(Path(args.data).resolve()) if args.data else ""
    args.out, args.trace = str(Path(args.out).resolve()), str(Path(args.trace).resolve()) if args.trace else ""
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    # NVLink's multicast stays off unless the environment says otherwise: if it fails, it fails for all who share the host
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if args.table or args.picture or args.nproc_per_node:
        try:
            if args.table:
                lines = table(read_records(args.out))
                if not lines:
                    raise FileNotFoundError(f"no measurements in {args.out}; without --table they are made")
                print("\n".join(lines))
            elif args.picture:
                from lab.tools.plot import outputs

                for dark, path in outputs(args.picture[1], dark=True):
                    overlap_picture(args.picture[0], path, dark)
            elif drive(args, argv):
                return 1
        except (OSError, ValueError) as error:
            print(f"bench/parallel.py: error: {error}", file=sys.stderr)
            return 2
    else:
        status = 0
        try:
            work(args)
        except Exception as error:
            traceback.print_exc()
            print(f"bench/parallel.py: error: [rank {os.environ.get('RANK', 0)}] {type(error).__name__}: "
                  f"{(str(error) or '-').splitlines()[0]}", file=sys.stderr)  # fmt: skip
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)  # no farewell: the others may wait for a process that failed; torchrun ends them
    return 0


if __name__ == "__main__":
    with running("parallel.py"):
        sys.exit(main())
