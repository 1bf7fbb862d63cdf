"""Estimate the memory, time and cost of a run before starting it, on any machine.

    python -m lab plan                  # this machine and its default preset
    python -m lab plan --preset gpt2-xl --gpu "RTX 4090"    # another GPU
    python -m lab plan --preset gpt2-xl --gpu 24GB --activation_checkpointing
    python -m lab plan --preset gpt2 --gpu H100 --gpus 8 --price 2.5

Memory is computed from the shapes of the tensors that autograd saves (lab/tools/memory.py). Speed is
measured in a few real steps on this machine; for another GPU it is computed from an assumed MFU. All
flags of `python train_gpt2.py --help` work here too. Exits with status 3 if the run does not fit.
"""

import argparse
import math
import re
import shutil
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.batch_size import candidate_batch_sizes
from lab.cli import UserError, bold, counted, fill_paragraphs
from lab.config import parse_flags, resolve_vocabulary
from lab.data.loader import grad_accum_steps, step_text
from lab.data.manifest import read_manifest
from lab.distributed import World
from lab.hardware import CPU_FLOPS, GPUS, compile_unsupported_reason, total_memory
from lab.kernels.fused_mlp import is_supported
from lab.precision import Precision
from lab.tools.memory import (
    GIB,
    PHASES,
    PROGRAM,
    MemorySpec,
    memory_breakdown,
    peak,
    peak_by_phase,
    select_kernels,
)
from lab.tools.read_log import short

FRAGMENTATION = 0.05  # fraction of memory lost, the same as in find_max_batch_size
# assumed for a named GPU, if a micro-step takes at least a millisecond per layer
MFU = 0.4
MEASURED_MFU = {"H100": 0.48, "H200": 0.5}  # of 124M in bf16 (docs/SPEED.md#one-gpu)
# scaling efficiency, throughput of n GPUs / (n x throughput of one), from docs/SPEED.md: DDP without
# accumulation; modes that communicate less (ZeRO-1, or DDP with accumulation); FSDP2, which communicates
# in each micro-step even with accumulation
SCALING = {"ddp": 0.95, "less": 0.97, "fsdp2": 0.92}
WITHOUT_BF16 = ("V100", "T4")
# GPUs before Ada and Hopper, which have no 8-bit matmuls
WITHOUT_FP8 = (*WITHOUT_BF16, "A100", "A800", "A40", "A30", "A10G", "A10", "RTX A6000")
WITHOUT_FP8 += tuple(gpu for gpu in GPUS if gpu.startswith("RTX 30"))

# -------------------------------------------------------------------------------------- 1. the GPU


class GPU(NamedTuple):
    """The GPU, or the CPU of this machine, that a plan is for."""

    name: str
    gib: float  # total memory
    tflops: float | None = None  # dense 16-bit peak of another machine's GPU, if known
    device: torch.device | None = None  # the device in this machine


def named_gpu(text: str) -> GPU:
    """The GPU of "H100", "rtx 4090", "A100 80GB" or "24GB". Raises UserError for unknown ones."""
    match = re.fullmatch(r"(.*?) *(?:([0-9]{1,5}(?:\.[0-9]+)?) *GI?B)?", text.strip().upper())
    name, size = match.groups() if match else ("", None)
    name = name.replace(" ", "")
    known = {gpu.upper().replace(" ", ""): gpu for gpu in GPUS}
    if (name not in known if name else not size) or (size and float(size) <= 0):
        near = sorted((gpu for key, gpu in known.items() if name and name in key), key=len)
        text = " ".join(text.split())[:40]
        raise UserError(
            f"gpu={text} is not in the list of `python -m lab plan --help`; a memory size works too: "
            "--gpu 24GB" + (f'; did you mean --gpu "{near[0]}"?' if near else "")
        )
    tflops, gib = GPUS[known[name]] if name else (None, 0.0)
    return GPU(known.get(name, "a GPU"), float(size) if size else gib, tflops)


def this_gpu(wanted: str) -> GPU:
    """The device that training would use on this machine. wanted: the trainer's --device."""
    device = World(wanted).device
    memory = torch.mps.recommended_max_memory() if device.type == "mps" else total_memory(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return GPU(f"this machine's {name}", memory / GIB, device=device)


def free_gib(s: MemorySpec, gpu: GPU) -> float:
    """GiB left at the memory peak; negative if it does not fit."""
    return (1 - FRAGMENTATION) * gpu.gib - peak(s)[0] / GIB - s.outside


def largest(s: MemorySpec, gpu: GPU) -> MemorySpec | None:
    """The spec with the largest micro-batch that fits, among those that training tries; or None."""
    for size in candidate_batch_sizes(s.cfg, s.world_size, s.device_type):
        candidate = replace(s, cfg=replace(s.cfg, batch_size=size))
        if free_gib(candidate, gpu) >= 0:
            return candidate
    return None


def what_fits(s: MemorySpec, gpu: GPU) -> str:
    """A sentence with the largest micro-batches that fit or, if there are none, how many GPUs it takes."""
    both = [replace(s, model=replace(s.model, activation_checkpointing=x)) for x in (False, True)]
    sizes = [found.cfg.batch_size if (found := largest(x, gpu)) else "none" for x in both]
    if sizes != ["none", "none"]:
        usual, checkpointed = sizes
        start = "By default, training uses batch_size="
        if s.cfg.parallel == "fsdp2":
            start = "The largest --batch_size that fits is "
        if usual == "none":
            return f"{start}{checkpointed} with --activation_checkpointing; without it, none fits."
        if usual == checkpointed:
            return f"{start}{usual}; --activation_checkpointing would not make it larger."
        return f"{start}{usual}; with --activation_checkpointing, {checkpointed}."
    if s.cfg.precision == "fp16" or s.cfg.optimizer != "adamw":  # FSDP2 supports neither
        return "No micro-batch fits: choose a larger GPU or a smaller --preset."
    sharded = replace(both[1], cfg=replace(s.cfg, batch_size=1, parallel="fsdp2"))
    for n in (2, 4, 8, 16, 32, 64):
        if free_gib(replace(sharded, world_size=n), gpu) >= 0:
            return (
                f"No micro-batch fits, with or without --activation_checkpointing. {n} GPUs are enough "
                f"with --gpus {n} --parallel fsdp2 --activation_checkpointing."
            )
    return (
        "No micro-batch fits, not even on 64 such GPUs: choose a larger GPU or a smaller --preset."
    )


# --------------------------------------------------------------------------------------- 2. speed


def probe(model_config: Any, cfg: Any) -> tuple[float, int | None]:
    """Train on random tokens for about three seconds, after a first step that is not timed. Returns
    (tokens/s, peak memory in bytes or None without CUDA). cfg.batch_size must not be 0."""
    world, tokens, steps = World(cfg.device), cfg.total_batch_size, 0
    cuda = world.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        text = np.random.default_rng(0).integers(model_config.vocab_size, size=2 * tokens)
        np.save(Path(folder) / "random_train_000000.npy", text.astype(np.uint16))
        cfg = replace(cfg, align_documents=False, init_from="", data=folder)
        trainer = PROGRAM.build_trainer(model_config, cfg, world)
        if cuda:
            torch.cuda.reset_peak_memory_stats(world.device)
        trainer.train_step()  # compiles
        world.synchronize()
        t0 = time.perf_counter()
        while not steps or time.perf_counter() - t0 < 3:
            trainer.train_step()
            world.synchronize()
            steps += 1
        tok_per_s = steps * tokens / (time.perf_counter() - t0)
    return tok_per_s, torch.cuda.max_memory_allocated(world.device) if cuda else None


def measured_throughput(s: MemorySpec, device: torch.device) -> tuple[float, str]:
    """(measured tokens/s of one process, or 0; how it was measured, or why there is no forecast)."""
    tokens = min(8, s.grad_accum_steps) * s.positions  # more micro-steps would not change tokens/s
    limit = {"cpu": 1e12, "mps": 1e13}.get(device.type, math.inf)  # FLOP: 10 seconds of a laptop
    if tokens * s.shapes.flops_per_token(s.cfg.seq_len) > limit:
        return 0, "no forecast: a step would take too long here; name a GPU with --gpu"
    tok_per_s, peak_bytes = probe(
        s.model, replace(s.cfg, total_batch_size=tokens, device=str(device))
    )
    return tok_per_s, "measured now" + (
        f"; peak memory {peak_bytes / GIB:.2f} GiB" if peak_bytes else ""
    )


def estimated_throughput(s: MemorySpec, gpu: GPU, asked_mfu: float | None) -> tuple[float, str]:
    """(tokens/s of one GPU at an MFU of asked_mfu or the default, or 0; how it was computed, or why
    there is no forecast)."""
    flops, L = s.shapes.flops_per_token(s.cfg.seq_len), s.model.n_layer
    mfu = asked_mfu or MEASURED_MFU.get(gpu.name, MFU)
    if gpu.tflops is None or s.bytes == 4:
        return 0, "no forecast: only the 16-bit peaks of named GPUs, such as H100, are known"
    if s.model.activation_checkpointing:  # each block's forward pass runs twice
        flops += 2 * s.in_matrices + 4 * L * s.model.n_embd * s.cfg.seq_len
    tok_per_s = 1e12 * mfu * gpu.tflops / flops
    micro_ms = 1000 * s.positions / tok_per_s
    if not asked_mfu and micro_ms < L:
        return 0, (
            f"no forecast: at {mfu:.0%} MFU a micro-step would take {micro_ms:.2g} ms, but less than "
            "1 ms per layer does not keep a GPU busy; pass the MFU to assume with --mfu"
        )
    why = f"assuming {mfu:.0%} (--mfu"
    why += "; measured at 124M" * (not asked_mfu and gpu.name in MEASURED_MFU)
    why += f") of {gpu.tflops} TFLOP/s at {flops / 1e6:,.0f} MFLOP per token"
    return tok_per_s, why + "; the speedup of 8 bits is not included" * (s.cfg.fp8 != "off")


# -------------------------------------------------------------------------------------- 3. report


def print_row(name: str, text: str) -> None:
    """Print a paragraph of at most 100 columns, with its name in the left margin."""
    width = min(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100
    text = textwrap.fill(text, width, initial_indent=f"{name:8}", subsequent_indent=" " * 8)
    print(text.replace(name, bold(name), 1))


def print_breakdown(s: MemorySpec) -> None:
    """Print the table of memory, with a column for each phase."""
    unit, name = (GIB, "GiB") if peak(s)[0] >= GIB else (2**20, "MiB")
    print(f"\n{name:28}" + "".join(f"{phase:>7}" for phase in PHASES))
    for label, size, when in memory_breakdown(s):
        if size >= 0.005 * unit:
            amounts = (f"{size / unit:.2f}" if phase in when else "" for phase in PHASES)
            print(f"{label:28}" + "".join(f"{amount:>7}" for amount in amounts))
    sums = "".join(f"{size / unit:7.2f}" for size in peak_by_phase(s).values())
    print(f"{'total':28}{sums}\n")


def report(s: MemorySpec, gpu: GPU, reason: str, args: argparse.Namespace) -> bool:
    """Print whether the run fits, how much memory it needs, and its time and cost. Returns whether it
    fits."""
    cfg, left, (peak_bytes, phase) = s.cfg, free_gib(s, gpu), peak(s)
    fits = f"fits, with {left:.1f} GiB left"
    minutes = s.shapes.flops_per_token(cfg.seq_len) * cfg.total_batch_size / CPU_FLOPS / 60
    if s.device_type == "cpu" and minutes > 1:
        fits += f", but is too slow: without a GPU a step takes roughly {counted(round(minutes), 'minute')}"
    if left < 0:
        fits = f"does not fit; it needs {-left:.1f} GiB more"
    print_row("verdict", f"batch_size={cfg.batch_size} {fits}. {what_fits(s, gpu)}")
    mode = f"{cfg.precision}, {'compiled' if cfg.compile else 'eager'}, {cfg.optimizer}"
    print_row("plan", f"{reason}; {mode}, on {gpu.name}, {gpu.gib:.4g} GiB")
    print_row("step", step_text(cfg, cfg.batch_size, s.world_size, "GPUs"))
    print_breakdown(s)
    print_row(
        "memory",
        f"The peak is {peak_bytes / GIB:.2f} GiB, {PHASES[phase]}; about {s.outside:.1f} GiB are used "
        "outside of PyTorch's allocator, and "
        f"{FRAGMENTATION:.0%} of {gpu.gib:.1f} GiB are lost to fragmentation.",
    )
    if left >= 0:
        print_forecast(s, gpu, args)
    return left >= 0


def print_forecast(s: MemorySpec, gpu: GPU, args: argparse.Namespace) -> None:
    """Print tokens/s, time and cost, or why there is no forecast."""
    tok_per_s, why = (
        measured_throughput(s, gpu.device) if gpu.device else estimated_throughput(s, gpu, args.mfu)
    )
    if not tok_per_s:
        return print_row("speed", why)
    if args.gpus > 1:
        sends_less = s.parallel == "zero1" or s.grad_accum_steps > 1
        scaling = SCALING["fsdp2" if s.parallel == "fsdp2" else "less" if sends_less else "ddp"]
        tok_per_s *= args.gpus * scaling
        why += (
            f"; {args.gpus} GPUs count as {args.gpus * scaling:.2f} (from runs on up to four: "
            "docs/SPEED.md)"
        )
    print_row("speed", f"{tok_per_s:,.0f} tokens/s, {why}")
    tokens = s.cfg.max_steps * s.cfg.total_batch_size
    done = " (with those already done)" if s.cfg.resume else ""
    hours = tokens / tok_per_s / 3600
    duration = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    epochs = ""
    if manifest := read_manifest(s.cfg.data):
        train = sum(shard["tokens"] for shard in manifest["shards"] if shard["split"] == "train")
        epochs = f" ({tokens / train:,.1f} epochs of {s.cfg.data})" if train else ""
    print_row(
        "time",
        f"{duration} for {s.cfg.max_steps:,} steps{done}, {short(tokens)} tokens{epochs}; evaluation and "
        "saving are not included",
    )
    price = args.price
    if price is None:  # RTX cards are usually not rented
        price = 3.0 if s.device_type == "cuda" and "RTX" not in gpu.name else 0.0
    if price:
        cost = f"${hours * args.gpus * price:,.2f}"
        print_row("money", f"{cost} at ${price:g} per rented GPU-hour (--price)")


# -------------------------------------------------------------------------------- 4. command line


def overrides(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(lab plan's own flags, the trainer's flags). Raises UserError for values out of range."""
    parser = argparse.ArgumentParser("python -m lab plan", allow_abbrev=False)
    parser.description = fill_paragraphs(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    gpus = f"another GPU: {', '.join(GPUS)}; a memory size, 24GB; or both, A100 80GB"
    parser.add_argument("--gpu", help=gpus)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (1)")
    usual = f"{MFU}; " + ", ".join(f"{name} {mfu}" for name, mfu in MEASURED_MFU.items())
    parser.add_argument("--mfu", type=float, help=f"fraction of its peak to assume ({usual})")
    parser.add_argument("--price", type=float, help="dollars per GPU-hour (3; RTX cards: 0)")
    parser.add_argument("--preset", help=f"one of train_gpt2.py's: {', '.join(PROGRAM.PRESETS)}")
    args, rest = parser.parse_known_args(argv)
    if args.gpus < 1:
        raise UserError(f"gpus={args.gpus} must be at least 1")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise UserError(f"price={args.price:g} must be a finite number of dollars, at least 0")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(
            f"mfu={args.mfu:g} must be a fraction, above 0 and up to 1; --mfu 0.4 is 40 %"
        )
    if args.mfu is not None and not args.gpu:
        raise UserError(
            f"mfu={args.mfu:g} needs --gpu; this machine's speed is measured: leave out --mfu"
        )
    if args.gpu and not args.preset and "--resume" not in rest:
        args.preset = next(iter(PROGRAM.PRESETS))  # instead of the default preset for this machine
    return args, ["--preset", args.preset, *rest] if args.preset else rest


def make_spec(model_config: Any, cfg: Any, gpu: GPU, gpus: int) -> MemorySpec:
    """The MemorySpec of the trainer's settings on this GPU; for batch_size=0 with the largest
    micro-batch that fits. Raises UserError for settings that do not work on it."""
    device_type, (head, mlp) = "cuda", select_kernels(cfg.kernels, cfg.fp8)
    if gpu.device:
        device_type, mlp = gpu.device.type, mlp if is_supported(gpu.device) else "plain"
        precision = Precision(cfg.precision, gpu.device)
        compiled = cfg.compile and not compile_unsupported_reason(
            gpu.device, model_config, precision
        )
        cfg = replace(cfg, precision=precision.name, compile=compiled)
    elif cfg.precision == "auto":
        cfg = replace(cfg, precision="fp16" if gpu.name in WITHOUT_BF16 else "bf16")
    if cfg.parallel != "ddp" and cfg.precision == "fp16":
        raise UserError(
            f"parallel={cfg.parallel} does not work with precision=fp16; leave one of the two out"
        )
    if cfg.fp8 != "off" and gpu.name in WITHOUT_FP8:
        raise UserError(
            f"fp8={cfg.fp8} needs a GPU with 8-bit matmuls, which {gpu.name} lacks; leave it out, or "
            "choose an RTX 40, H100 or newer"
        )
    if device_type != "cuda" and gpus > 1:
        raise UserError(
            f"gpus={gpus} needs a GPU in this machine or the flag --gpu; leave it out, or pass --gpu"
        )
    b = cfg.batch_size or 1
    grad_accum_steps(cfg, b, gpus)  # raises UserError if total_batch_size is not a multiple
    model = resolve_vocabulary(model_config, cfg, PROGRAM.PRESETS)
    s = MemorySpec(model, replace(cfg, batch_size=b), gpus, device_type, (head, mlp))
    return s if cfg.batch_size else largest(s, gpu) or s


def main(argv: list[str]) -> int:
    """Run `python -m lab plan` with these arguments. Returns 0 if the run fits and 3 if it does not."""
    args, argv = overrides(argv)
    gpu = None if args.gpu is None else named_gpu(args.gpu)
    reason, model_config, cfg = parse_flags(argv, PROGRAM.PRESETS, __doc__ or "", PROGRAM.Trainer)
    gpu = gpu or this_gpu(cfg.device)
    return 0 if report(make_spec(model_config, cfg, gpu, args.gpus), gpu, reason, args) else 3
