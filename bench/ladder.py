"""The ladder of speed-ups, rung by rung, and what else decides the speed of a step, measured with the trainer's own parts.

    python bench/ladder.py --list                                      # what there is to measure, and what is done already
    python bench/ladder.py --shapes gpt2 --groups rungs                # GPT-2 124M, from plain float32 to the trainer's best
    python bench/ladder.py --groups loss --data edu_fineweb10B         # what the rungs do to the loss, three seeds each
    python bench/ladder.py --shapes gpt2-large,gpt2-xl --batch_size 16 --tokens_per_step 16384 --cards 4  # on four GPUs at once
    python bench/ladder.py --shapes all --groups all --data edu_fineweb10B --limit 4000  # all that there is to measure
    python bench/ladder.py --table                                     # what the file holds; needs no GPU
    python bench/ladder.py --shapes tiny --device cpu --out try.jsonl  # a try without a GPU; its times mean nothing

Each measurement is one JSON line, written when it is done. Started again, the same command goes on where it stopped, and
leaves out what failed unless --retry is there. A variant that does not fit in memory gets half the micro-batch, with the
same tokens per step; the line says which it got.

A timing is of whole steps: data, forward and backward of all micro-steps, clipping, optimizer. Of 5 + --steps steps the
first 5 are dropped. What the first one, with the check of the compiler before it, takes more than the median is compile_s.
One more step runs under the profiler: kernel_ms is its kernel time by class (kernels.py).

A loss run trains from scratch with the trainer's warm-up (a tenth of the steps) and cosine schedule. Its seconds leave
out the first step, where compilation is, and count an average one for it.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from kernels import CLASSES, profile  # noqa: E402
from records import append_record, card_name, keep_tries_apart, one_sentence, random_shards, read_records  # noqa: E402
from rungs import GROUPS, KEY, SHAPES, cases, raced, variants  # noqa: E402

from lab.data.loader import TokenLoader  # noqa: E402
from lab.device import out_of_memory  # noqa: E402
from lab.evals import eval_val_loss  # noqa: E402
from lab.run.locks import check_writable  # noqa: E402
from lab.run.log import Meter, PhaseClock  # noqa: E402
from lab.run.vitals import check_compiled  # noqa: E402
from train_gpt2 import World, compile_model, get_lr, prepare, train_step  # noqa: E402

OUT = str(ROOT / "readme.assets" / "runs" / "ladder.jsonl")
WARM_UP = 5  # steps dropped before the timed ones, the compiling one included

# ------------------------------------------------------------------------------------------------- one measurement


class ReadWhenAsked:
    """In place of the loader's thread: the batch is read when its result is asked for."""

    def submit(self, function, *args):
        return SimpleNamespace(result=lambda: function(*args))

    def shutdown(self):
        pass


class NotPinned(TokenLoader):
    """The loader with batches in ordinary memory: the host waits for each copy to the device."""

    def __init__(self, shards, cfg, world, batch_size):
        there = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
        super().__init__(shards, cfg, there, batch_size)
        self.target = world.device

    def next_batch(self):
        x, y, num_targets = super().next_batch()
        return x.to(self.target), y.to(self.target), num_targets


def change_loader(loader, kind, cfg, world):
    if kind == "not pinned":
        loader.worker.shutdown()
        loader = NotPinned(loader.shards, cfg, world, loader.batch_size)
    elif kind == "not ahead":
        loader.worker.shutdown()
        loader.worker = ReadWhenAsked()
    return loader


def change_adamw(optimizer, kind):
    """AdamW reads its way of computing from its groups in each step; set before the first, nothing is left of fused."""
    for group in optimizer.param_groups:
        if "fused" in group and kind != "fused":
            group["fused"], group["foreach"] = False, kind == "foreach"


class CudaGraphs(nn.Module):
    """A model that was compiled to CUDA graphs, for a loop that adds up the gradients of several micro-steps.

    Replaying a graph writes its results over those of the last replay. Gradients are such results: autograd gives a parameter
    without one the very tensor that came out of the graph, and the next micro-step is then added to memory that has changed
    meanwhile (torch notices while it records, not later; pytorch/pytorch#169545). To a gradient that is there already it
    adds in place, so each parameter has one from the start, in memory of its own. The loss is copied, as it may be kept.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.params = list(model.parameters())
        self.grads = [torch.zeros_like(p) for p in self.params]

    def forward(self, *args, **kwargs):
        if self.params[0].grad is None:  # the trainer's zero_grad takes all of them away
            torch._foreach_zero_(self.grads)
            for p, grad in zip(self.params, self.grads):
                p.grad = grad
        torch.compiler.cudagraph_mark_step_begin()  # what the last micro-step has left in the graphs may go
        logits, loss = self.model(*args, **kwargs)
        return logits, loss.clone()


def change_forward(raw_model, own):
    """What the bench's own settings change in the model: how attention multiplies and gives its gradients, and, where
    `returns` asks for logits, the plain loss again with its logits beside it."""
    if own.attention_products == "fp8":
        from fp8_attention import in_8_bits

        in_8_bits(raw_model)
    if own.qkv_gradients == "packed":
        from packed_attention import pack_gradients

        pack_gradients(raw_model)
    if own.returns == "loss":
        return

    def forward(idx, targets, reduction="mean"):
        logits = raw_model.lm_head(raw_model.hidden(idx))[..., : raw_model.config.vocab_size]
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)

    raw_model.forward = forward


def compiled(raw_model, mode, cfg, world):
    """The model compiled in one of the ways of BENCH. Raises RuntimeError where torch.compile does not work."""

    def refuse(text):
        raise RuntimeError(text)

    if mode == "none":
        return raw_model
    model = compile_model(raw_model, dataclasses.replace(cfg, compile=True), world, SimpleNamespace(say=refuse))
    if mode == "per block":
        for block in raw_model.transformer.h:
            block.compile(dynamic=False)
        return raw_model
    model = model if mode == "default" else torch.compile(raw_model, dynamic=False, mode=mode)
    return CudaGraphs(model) if mode == "reduce-overhead" else model


def attention_kernel(name):
    """Context in which torch may use this kernel alone."""
    if not name:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, name))


def fresh_compiler(cold):
    """Context whose compilations find no files of earlier ones, if cold."""
    if not cold:
        return contextlib.nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def forget(device):
    """Let go of what the last measurement has compiled and allocated."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TimeoutError in the body after so many seconds. Not on Windows, which has no such signal."""

    def ring(*_):
        raise TimeoutError(f"not done after {seconds} s (--limit)")

    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class CardWatch:
    """Medians of power, clock and temperature while the body runs, from nvidia-smi about once a second, None without it; and
    which card it is, as those of one name differ."""

    fields = {"power_w": "power.draw", "sm_mhz": "clocks.sm", "temperature_c": "temperature.gpu"}

    def __init__(self, device):
        self.device, self.rows, self.done = device, [], threading.Event()
        self.values = dict.fromkeys(self.fields)
        self.uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

    def look(self):
        wanted = f"--query-gpu={','.join(self.fields.values())}"
        command = ["nvidia-smi", "-i", f"GPU-{self.uuid}", wanted, "--format=csv,noheader,nounits"]
        while not self.done.wait(1.0):
            with contextlib.suppress(OSError, ValueError):  # no such program, or [N/A]
                text = subprocess.run(command, capture_output=True, text=True).stdout
                self.rows.append([float(word) for word in text.split(",")])

    def __enter__(self):
        self.thread = threading.Thread(target=self.look, daemon=True)
        if self.device.type == "cuda":
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        if self.device.type == "cuda":
            self.thread.join()
        if self.rows:
            self.values = dict(zip(self.fields, np.median(self.rows, axis=0).round(1).tolist()))
        self.values["uuid"] = self.uuid


def moment(device):
    """A moment in the device's work, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(moments, device):
    """Between each moment and the next; the device must be idle."""
    if device.type != "cuda":
        return [1000 * (b - a) for a, b in zip(moments, moments[1:])]
    return [a.elapsed_time(b) for a, b in zip(moments, moments[1:])]


def spread(ms):
    """What a list of step times comes to."""
    low, middle, high = np.percentile(ms, [25, 50, 75])
    numbers = dict(median_ms=middle, min_ms=min(ms), max_ms=max(ms), iqr_ms=high - low)
    return {k: round(float(v), 2) for k, v in numbers.items()}


class Run:
    """The trainer's parts, put together for one case; `with` lets go of the loader's thread."""

    def __init__(self, case, batch_size, args, world):
        self.model_config, cfg, own = case.configs(args)
        self.cfg, self.world = dataclasses.replace(cfg, batch_size=batch_size), world
        self.precision, self.raw_model, self.optimizer, self.loader, self.val_shards = prepare(
            self.model_config, self.cfg, world
        )
        change_adamw(self.optimizer, own.adamw)
        self.loader = change_loader(self.loader, own.loader, self.cfg, world)
        change_forward(self.raw_model, own)
        self.model = compiled(self.raw_model, own.compile_mode, self.cfg, world)
        self.no_clock, self.steps = PhaseClock(False, world.device), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loader.worker.shutdown()

    def step(self, clock=None):
        """One update as the trainer makes it; its loss stays on the device."""
        lr = get_lr(self.steps, self.cfg)
        self.steps += 1
        return train_step(
            self.model, self.optimizer, self.loader, lr, self.cfg, self.world, self.precision, clock or self.no_clock
        )[0]

    def first_step(self):
        """Seconds of the step that compiles, with the check that comes before it, and its loss. Raises FloatingPointError where
        the compiler erred. The check is about the weights that training starts from: after an update, biases below the
        rounding of a 16-bit residual stream made 0.015 nats of difference at 1558M, in a compiler that did not err (README).
        """
        self.world.synchronize()
        t0, said = time.perf_counter(), []
        log = SimpleNamespace(say=said.append)
        if check_compiled(self.model, self.raw_model, self.loader, self.world, self.precision, log) is not self.model:
            raise FloatingPointError(f"a time of wrong results is none; {said[-1]}")
        loss = self.step().item()
        return time.perf_counter() - t0, loss

    def facts(self):
        device = self.world.device
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        return dict(
            batch_size=self.cfg.batch_size, seq_len=self.cfg.seq_len, micro_steps=self.loader.grad_accum_steps,
            precision=self.precision.name, peak_gib=round(peak, 2) if peak else None,
        )  # fmt: skip


def time_steps(run, case, args):
    """The timing groups' numbers."""
    device, t0 = run.world.device, time.perf_counter()
    first, first_loss = run.first_step()
    for _ in range(WARM_UP - 1):
        run.step()
    run.world.synchronize()
    end = time.perf_counter() + case.sustain
    while time.perf_counter() < end:
        run.step()
        run.world.synchronize()
    with CardWatch(device) as watch:
        moments, losses = [moment(device)], []
        while len(moments) <= args.steps:
            losses.append(run.step())
            moments.append(moment(device))
            if len(moments) > 5 and time.perf_counter() - t0 - case.sustain > 0.7 * args.limit:
                break  # a slow variant: fewer steps are better than none
        run.world.synchronize()
    ms = [round(t, 2) for t in milliseconds(moments, device)]
    numbers = run.facts() | dict(steps=len(ms), step_ms=ms) | spread(ms)
    meter = Meter(run.cfg, run.world, run.raw_model, 0)
    rate = 1000 * run.cfg.total_batch_size / numbers["median_ms"]
    numbers |= dict(
        tok_per_s=round(rate), flops_per_token=meter.flops_per_token,
        mfu=round(rate * meter.flops_per_token / meter.peak, 4) if meter.peak else None,
        compile_s=round(max(0.0, first - numbers["median_ms"] / 1000), 2),
        first_loss=round(first_loss, 4), last_loss=round(losses[-1].item(), 4),
    )  # fmt: skip
    if not np.isfinite(numbers["last_loss"]):
        raise FloatingPointError(f"the loss is {numbers['last_loss']}: a time of wrong results is none")
    numbers |= watch.values | dict(kernel_ms=None, profiled_ms=None, top_kernels=None)
    if device.type == "cuda" and not args.no_profile:
        try:
            kernel_ms, window, top = profile(run.step, run.loader.grad_accum_steps)
            numbers |= dict(kernel_ms=kernel_ms, profiled_ms=window, top_kernels=top)
        except Exception as error:  # the times are there, with or without a profile
            numbers["profile_error"] = one_sentence(error)
    return numbers


def train_from_scratch(run, case, args):
    """The loss group's numbers. The curve's entries are [finished steps, seconds, mean training loss of the last 10]."""
    steps, curve, losses = run.cfg.max_steps, [], []
    first, first_loss = run.first_step()
    t0 = time.perf_counter()
    losses.append(torch.tensor(first_loss, device=run.world.device))
    for step in range(1, steps):
        losses.append(run.step())
        if (step + 1) % 10 == 0 or step + 1 == steps:
            values = torch.stack(losses).tolist()  # waits for the device, as the trainer's log does
            if not np.isfinite(values).all():
                raise FloatingPointError(f"the loss is not finite between steps {step + 1 - len(values)} and {step + 1}")
            seconds = (time.perf_counter() - t0) * (step + 1) / step  # the first step counts as an average one
            curve.append([step + 1, round(seconds, 3), round(float(np.mean(values)), 4)])
            losses = []
    cfg = run.cfg
    val_loss = eval_val_loss(
        run.raw_model.eval(), run.val_shards, args.val_tokens, cfg.seq_len, cfg.batch_size, run.world, run.precision
    )
    seconds = curve[-1][1]
    return run.facts() | dict(
        curve=curve, seconds=seconds, compile_s=round(max(0.0, first - seconds / steps), 2),
        train_tokens=len(run.loader.shards), val_tokens=min(args.val_tokens, len(run.val_shards) - 1),
        first_loss=round(first_loss, 4), val_loss=round(val_loss, 5),
    )  # fmt: skip


def measure(case, args, world):
    """One measurement, with half the micro-batch as often as it takes to fit. Raises whatever else goes wrong."""
    _, cfg, own = case.configs(args)
    batch_size = cfg.batch_size
    cold = case.group == "compile_mode" or (case.group == "rungs" and world.device.type == "cuda")
    function = train_from_scratch if case.group == "loss" else time_steps
    while True:
        forget(world.device)
        try:
            with time_limit(args.limit + case.sustain), attention_kernel(own.kernel), fresh_compiler(cold):
                with Run(case, batch_size, args, world) as run:
                    return function(run, case, args) | dict(cold_cache=cold)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or batch_size == 1:
                raise
        run = None  # noqa: F841 - what did not fit would stay until the next one is built
        batch_size //= 2


def card_lost(device):
    """True if nothing more can run here: an error of a kernel ends the process's use of the card."""
    try:
        torch.ones(1, device=device).add(1).item()
        return False
    except RuntimeError:
        return True


RACED = "*: compiled with a race, so the results are wrong (README's log)"


def in_short(record):
    """What a line of the file says, for people."""
    if record["error"]:
        return record["error"]
    if record["group"] == "loss":
        return f"validation loss {record['val_loss']:.4f}, {record['seconds']:.1f} s"
    return f"{record['median_ms']:.2f} ms, {record['tok_per_s']:,} tokens/s"


def measure_all(todo, args, world):
    """Measure, write, go on. A failure is one line in the file. Returns the number of failures."""
    card, failures = card_name(world.device), 0
    for number, case in enumerate(todo, start=1):
        record = case.record(args, card)
        print(f"[{number}/{len(todo)}] {case.group} {case.shape} {case.variant} seed {case.seed}: ", end="", flush=True)
        try:
            record |= measure(case, args, world)
        except Exception as error:  # whatever a variant throws is its result
            record["error"] = one_sentence(error)
            failures += 1
        print(in_short(record), flush=True)
        append_record(args.out, record)
        if record["error"] and card_lost(world.device):
            raise RuntimeError(f"{case.variant} has left the card unusable for this process; the same command goes on after it")
    forget(world.device)
    return failures


def share(todo, args):
    """measure_all on args.cards GPUs: each measurement in a process of its own, on the next GPU that is free. Returns the
    number of failures.

    The processes write to files of their own and this one writes what they found to --out, as processes may not share it.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.cards)))).split(",")
    free, lock, done = queue.SimpleQueue(), threading.Lock(), []
    for name in names[: args.cards]:
        free.put(name)

    def one(case):
        name = free.get()
        with contextlib.ExitStack() as stack:
            stack.callback(free.put, name)
            part = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "part.jsonl"
            command = [sys.executable, __file__, *case.flags(args), "--seed", case.seed, "--limit", args.limit, "--out", part]
            command += ["--commit", args.commit]
            command += ["--data", args.data] if args.data else []
            command += ["--no_profile"] if args.no_profile else []
            child = subprocess.run(
                list(map(str, command)), env=os.environ | {"CUDA_VISIBLE_DEVICES": name}, capture_output=True, text=True
            )
            found = read_records(part)
        if child.returncode in (130, -signal.SIGINT):  # the Ctrl-C that is about to end this process too
            return
        said = (child.stderr.strip().splitlines() or [f"its process ended with status {child.returncode}"])[-1]
        record = found[-1] if found else case.record(args, card_name(args.device)) | {"error": said}
        with lock:
            append_record(args.out, record)
            done.append(record)
            what = f"[{len(done)}/{len(todo)}] {case.group} {case.shape} {case.variant} seed {case.seed}"
            print(f"{what}, card {name}: {in_short(record)}", flush=True)

    with ThreadPoolExecutor(args.cards) as pool:
        try:
            list(pool.map(one, todo))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sum(bool(record["error"]) for record in done)


# ------------------------------------------------------------------------------------------------------ the table


def print_rows(head, rows):
    """Columns as wide as their widest cell, numbers to the right."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w) in enumerate(zip(row, widths))))


def latest(records):
    """The last line of each measurement, in the order of the first."""
    return list({tuple(r.get(k) for k in KEY): r for r in records}.values())


def timing_table(records):
    kinds = [k for k in CLASSES if any((r.get("kernel_ms") or {}).get(k) for r in records)]
    head = ["variant", "B", "step ms", "iqr", "tokens/s", "x first", "x last", "MFU", "GiB", "compile s", *kinds]
    rows, first, before = [], None, None
    for r in records:
        if r["error"]:
            rows.append([r["variant"], r["error"][:70]] + [""] * (len(head) - 2))
            continue
        rate = r["tok_per_s"]
        first, before = first or rate, before or rate
        kernel = r["kernel_ms"] or {}
        rows.append([
            r["variant"] + "*" * raced(r), r["batch_size"], f"{r['median_ms']:.2f}", f"{r['iqr_ms']:.2f}", f"{rate:,}",
            f"{rate / first:.2f}", f"{rate / before:.2f}", f"{r['mfu']:.1%}" if r["mfu"] else "", r["peak_gib"] or "",
            f"{r['compile_s']:.1f}", *(f"{kernel.get(k, 0):.2f}" for k in kinds),
        ])  # fmt: skip
        before = rate
    failed = [row for row in rows if row[2] == ""]
    print_rows(head, [row for row in rows if row[2] != ""])
    if any(raced(r) and not r["error"] for r in records):
        print(RACED)
    if any(not r["error"] and r["settings"].get("compile_mode") != "none" and not r.get("cold_cache") for r in records):
        print("compile s: with whatever earlier measurements had left in the compiler's cache")
    slow = [f"{r['variant']} {r['profiled_ms']:.1f}" for r in records
            if not r["error"] and (r.get("profiled_ms") or 0) > 1.1 * r["median_ms"]]  # fmt: skip
    if slow:
        print(f"kernel times: of one profiled step, which took longer than the median, with more idling: {', '.join(slow)} ms")
    for name, error, *_ in failed:
        print(f"{name}: {error}")


def loss_at(curve, seconds):
    """Training loss that a curve has reached after so many seconds, between its points by straight lines."""
    return float(np.interp(seconds, [point[1] for point in curve], [point[2] for point in curve]))


def loss_table(records):
    by_variant = {}
    for r in records:
        if not r["error"]:
            by_variant.setdefault(r["variant"], []).append(r)
    if by_variant:
        shortest = min(np.mean([r["seconds"] for r in runs]) for runs in by_variant.values())
        head = ["variant", "seeds", "seconds", "val loss", "lowest", "highest", "train loss", f"after {shortest:.1f} s"]
        rows = []
        for name, runs in by_variant.items():
            val = [r["val_loss"] for r in runs]
            last, equal = [r["curve"][-1][2] for r in runs], [loss_at(r["curve"], shortest) for r in runs]
            rows.append([
                name + "*" * raced(runs[0]), len(runs), f"{np.mean([r['seconds'] for r in runs]):.1f}", f"{np.mean(val):.4f}",
                f"{min(val):.4f}", f"{max(val):.4f}", f"{np.mean(last):.4f}", f"{np.mean(equal):.4f}",
            ])  # fmt: skip
        print_rows(head, rows)
        print("val loss and train loss (of the last ten steps) after equal tokens; the last column after equal seconds, in "
              "which the slower ones are still in the middle of their schedule")  # fmt: skip
        if any(raced(runs[0]) for runs in by_variant.values()):
            print(RACED)
        shared = {name: max(r.get("at_once", 1) for r in runs) for name, runs in by_variant.items()}
        for count in sorted(set(shared.values()) - {1}):
            names = [name for name in shared if shared[name] == count]
            whose = f" of {', '.join(names)}" if len(names) < len(shared) else ""
            apart = "; the last column compares nothing between them and the rest" * bool(whose)
            print(f"the seconds{whose} are those of a card that {count} runs shared{apart}")
    for r in records:
        if r["error"]:
            print(f"{r['variant']}, seed {r['seed']}: {r['error']}")


def print_tables(path):
    """One table for each group, shape, card and tokens per step of the file, its rows in the order of the group. Raises
    FileNotFoundError if there is none."""
    records = latest([r for r in read_records(path) if r.get("bench") == "ladder"])
    if not records:
        raise FileNotFoundError(f"no measurements in {path}; `python bench/ladder.py --out {path}` makes some")
    tables, keys = {}, ("group", "shape", "card", "sustained", "max_steps", "torch", "tokens_per_step")
    for r in records:
        tables.setdefault(tuple(r.get(k) for k in keys), []).append(r)
    for (group, shape, card, sustained, max_steps, version, tokens), members in tables.items():
        order = list(variants(group)) if group in GROUPS else []
        members.sort(key=lambda r: order.index(r["variant"]) if r["variant"] in order else len(order))
        steps = f"{max_steps} steps of " if max_steps else "a step of "
        warm = ", card warmed up" if sustained else ""
        dates = " to ".join(sorted({r["date"] for r in members})[:: max(1, len({r["date"] for r in members}) - 1)])
        print(f"\n{group}, {shape}: {steps}{tokens:,} tokens, {card}{warm}, torch {version}, {dates}")
        loss_table(members) if group == "loss" else timing_table(members)


# --------------------------------------------------------------------------------------------------- command line


def chosen(text, there, what):
    """Names of a comma-separated list; "all" are all but the shape for tries. Raises ValueError for one that is not there."""
    if text.strip() == "all":
        return [name for name in there if name != "tiny"]
    names = [name.strip() for name in text.split(",") if name.strip()]
    names = [f"gpt2-{name}" if f"gpt2-{name}" in there else name for name in names]
    for name in names:
        if name not in there:
            raise ValueError(f"{what}={name} is not one of {', '.join(there)}, and not all")
    return names


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog="bench/ladder.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", default=OUT, help="file of measurements (%(default)s)")
    parser.add_argument("--shapes", default="gpt2", help=f"all, or comma-separated: {', '.join(SHAPES)} (gpt2)")
    parser.add_argument("--groups", default="rungs", help=f"all, or comma-separated: {', '.join(GROUPS)} (rungs)")
    parser.add_argument("--variants", default="", help="comma-separated, as --list shows them (all)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    parser.add_argument("--tokens_per_step", type=int, default=0, help="of the timing groups (the shape's own)")
    parser.add_argument("--batch_size", type=int, default=0, help="micro-batch to begin with (the shape's; gpt2: 64)")
    parser.add_argument("--sustain", type=int, default=0, help="shape gpt2: run so many seconds before the timed steps (0)")
    parser.add_argument("--limit", type=int, default=500, help="seconds after which a measurement counts as failed (500)")
    parser.add_argument("--data", default="", help="folder of token shards; random tokens for timings if empty")
    parser.add_argument("--seed", type=int, default=1337, help="first seed (1337)")
    parser.add_argument("--seeds", type=int, default=3, help="group loss: how many seeds (3)")
    parser.add_argument("--loss_steps", type=int, default=300, help="group loss: steps (300)")
    parser.add_argument("--loss_tokens", type=int, default=65536, help="group loss: tokens per step (65536)")
    parser.add_argument("--val_tokens", type=int, default=1048576, help="group loss: tokens of the final validation (1048576)")
    parser.add_argument("--device", default="auto", help="cuda, cuda:N or cpu (auto)")
    parser.add_argument("--cards", type=int, default=1, help="measure on so many GPUs at once, a process for each (1)")
    parser.add_argument("--at_once", type=int, default=1, help="such processes that share this GPU, noted in the records (1)")
    parser.add_argument("--commit", default="", help="noted in the records where git is not at hand")
    parser.add_argument("--no_profile", action="store_true", help="times alone, no kernel_ms")
    parser.add_argument("--retry", action="store_true", help="try again what has failed before")
    parser.add_argument("--list", action="store_true", help="show what would be measured, and stop")
    parser.add_argument("--table", action="store_true", help="print the tables of --out, and stop")
    args = parser.parse_args(argv)
    args.shapes, args.groups = chosen(args.shapes, SHAPES, "shapes"), chosen(args.groups, GROUPS, "groups")
    if args.data and not Path(args.data).is_dir():
        raise ValueError(f"data={args.data} is no folder; name one with token shards, which fineweb.py makes")
    args.variants = [name.strip() for name in args.variants.split(",") if name.strip()]
    args.data_name = Path(args.data).name if args.data else "random"
    for name in ("steps", "limit", "seeds", "loss_steps", "loss_tokens", "val_tokens", "cards", "at_once"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} must be at least 1")
    for name in ("tokens_per_step", "batch_size", "sustain"):
        if getattr(args, name) < 0:
            raise ValueError(f"{name}={getattr(args, name)} must be 0 (the shape's own, or none) or more")
    return args


def run(argv):
    """Do what the command line says. Returns the number of measurements that failed."""
    args = parse_args(argv)
    if args.table:
        print_tables(args.out)
        return 0
    asked = cases(args)
    if not args.list and "loss" in args.groups and not args.data:
        raise ValueError("group loss learns from text: name a folder of token shards with --data; fineweb.py makes one")
    if not args.list and set(args.shapes) != {"tiny"} and (args.device == "cpu" or not torch.cuda.is_available()):
        raise ValueError("ladder.py needs a CUDA GPU; `--shapes tiny --device cpu --out try.jsonl` tries it without one, "
                         "--table needs none")  # fmt: skip
    if args.cards > max(1, torch.cuda.device_count()) and args.device != "cpu" and not args.list:
        raise ValueError(f"cards={args.cards} is more than the {torch.cuda.device_count()} GPUs of this machine")
    device = torch.device("cpu") if args.list and not torch.cuda.is_available() else World(args.device).device
    if not args.list:
        keep_tries_apart(args.out, OUT, device.type == "cpu")
        check_writable(args.out, "out")
    done = {tuple(r.get(k) for k in KEY): r for r in read_records(args.out)}
    card = card_name(device)

    def state(case):
        record = done.get(case.key(args, card))
        return "to do" if record is None else "failed" if record["error"] else "done"

    if not args.variants and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        in_8_bits = [c for c in asked if c.settings.get("fp8_mlp") or c.settings.get("cross_entropy") == "fp8"]
        asked = [c for c in asked if c not in in_8_bits]
        if in_8_bits:
            print(f"left out, as {card} has no 8-bit products: {', '.join(dict.fromkeys(c.variant for c in in_8_bits))}")
    todo = [case for case in asked if state(case) == "to do" or (args.retry and state(case) == "failed")]
    if args.list:
        for case in asked:
            print(f"{case.group:14} {case.shape:12} {case.variant:28} seed {case.seed}  {state(case)}")
    print(f"{len(todo)} of {len(asked)} measurements to do on {card}, into {args.out}")
    if failed := sum(state(case) == "failed" for case in asked if case not in todo):
        print(f"{failed} failed before and left out; --retry tries again")
    if args.list or not todo:
        return 0
    if args.cards > 1:
        return share(todo, args)
    from torch._functorch import config as functorch

    functorch.enable_autograd_cache = False  # its key does not hold which attention kernels are allowed
    with tempfile.TemporaryDirectory() as folder:
        if not args.data:
            random_shards(folder, min(SHAPES[shape][0].vocab_size for shape in args.shapes))
            args.data = folder
        return measure_all(todo, args, World(args.device))


def main():
    try:
        sys.exit(1 if run(sys.argv[1:]) else 0)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the measurement in hand", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # --list | head
        os._exit(1)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ladder.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
