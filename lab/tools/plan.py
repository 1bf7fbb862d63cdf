"""Would it fit, how long would it take, what would it cost? Asked before a run, on any machine.

    python -m lab plan                                      # this machine, the preset it would take
    python -m lab plan --preset gpt2-xl --gpu "RTX 4090"    # a GPU that is not here; needs no data
    python -m lab plan --preset gpt2-xl --gpu 24GB --batch_size 4 --activation_checkpointing
    python -m lab plan --preset gpt2 --gpu H100 --gpus 8 --price 2.5

The memory is arithmetic on what autograd keeps (lab/tools/memory.py). The speed is measured where
the GPU is, by a few real steps; elsewhere it follows from an assumed MFU. All flags of
`python train_gpt2.py --help` are understood too.
"""

import argparse
import math
import re
import tempfile
import textwrap
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lab.cli import UserError
from lab.data.loader import grad_accum_steps
from lab.device import GPUS, Precision, memory_of, micro_batches, why_no_compile
from lab.kernels.fused_mlp import epilogues_work
from lab.run.settings import parse_flags, vocab_size
from lab.tools.memory import GIB, MOMENTS, PROGRAM, Setting, ledger, peak, replaced, totals
from lab.tools.run_logs import short
from lab.world import World

FRAGMENTS = 0.05  # share of the memory that cannot be handed out; fit_batch_size leaves as much
MFU = 0.4  # assumed of a GPU that is not here, if a micro-step takes a millisecond a layer or more
# several GPUs against as many times one (docs/SPEED.md): DDP without accumulation; what sends less;
# FSDP2, which sends in each micro-step, so that accumulating gains nothing
SCALING = {"ddp": 0.95, "less": 0.97, "fsdp2": 0.92}
WITHOUT_BF16 = ("V100", "T4")
# the chips before Ada and Hopper, whose products have 16 bits at least
WITHOUT_FP8 = (*WITHOUT_BF16, "A100", "A800", "A40", "A30", "A10G", "A10", "RTX A6000", "RTX 3090")

# -------------------------------------------------------------------------------------- 1. the GPU

# tflops: dense 16-bit peak of a GPU that is not here, if known; device: of one that is, or a CPU
GPU = namedtuple("GPU", "name gib tflops device", defaults=(None, None))


def named_gpu(text):
    """The GPU of "H100", "rtx 4090", "A100 80GB" or "24GB". Raises UserError for unknown ones."""
    name, size = re.fullmatch(r"(.*?) *(\d+(?:\.\d+)? *GI?B)?", text.strip().upper()).groups()
    known = {gpu.upper(): gpu for gpu in GPUS}
    if name not in known and (name or not size):
        names = ", ".join(GPUS)
        raise UserError(f"gpu={text} is not one of {names}; a size will do too: --gpu 24GB")
    tflops, gib = GPUS[known[name]] if name else (None, None)
    return GPU(known.get(name, "a GPU"), float(size.rstrip("GIB ")) if size else gib, tflops)


def this_gpu(wanted):
    """What training would use here."""
    device = World(wanted).device
    memory = torch.mps.recommended_max_memory() if device.type == "mps" else memory_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return GPU(f"this machine's {name}", memory / GIB, device=device)


def room(s, gpu):
    """GiB that would be left; negative where it does not fit."""
    return (1 - FRAGMENTS) * gpu.gib - peak(s)[0] / GIB - s.outside


def largest(s, gpu):
    """The Setting with the largest micro-batch that training tries and that fits, or None."""
    sizes = micro_batches(s.cfg, s.world_size, s.device_type)
    tried = (replace(s, cfg=replace(s.cfg, batch_size=size)) for size in sizes)
    return next((setting for setting in tried if room(setting, gpu) >= 0), None)


def what_fits(s, gpu):
    """The largest micro-batches, in words; where none fits, how many GPUs would do."""
    both = [replace(s, model=replace(s.model, activation_checkpointing=x)) for x in (False, True)]
    sizes = [found.cfg.batch_size if (found := largest(x, gpu)) else "none" for x in both]
    if sizes != ["none", "none"]:
        usual, saving = sizes
        largest_sizes = f"{usual}, with --activation_checkpointing {saving}."
        if s.cfg.parallel == "fsdp2":
            return f"Pass the largest --batch_size that fits: {largest_sizes}"
        return f"Left alone, training takes batch_size={largest_sizes}"
    if s.cfg.precision == "fp16" or s.cfg.optimizer != "adamw":  # FSDP2 knows neither
        return "None fits: take a larger GPU or a smaller --preset."
    least = replace(both[1], cfg=replace(s.cfg, batch_size=1, parallel="fsdp2"))
    for n in (2, 4, 8, 16, 32, 64):
        if room(replace(least, world_size=n), gpu) >= 0:
            alone = "None fits, with or without --activation_checkpointing."
            return (
                f"{alone} {n} GPUs would: --gpus {n} --parallel fsdp2 --activation_checkpointing."
            )
    return "None fits, nor do 64 such GPUs hold it: take a larger GPU or a smaller --preset."


# --------------------------------------------------------------------------------------- 2. speed


def probe(model_config, cfg, seconds=3.0):
    """Train for about so long on random tokens, after a step that does not count; cfg has a
    batch_size. Returns (tokens/s, peak memory in bytes or None without CUDA)."""
    world, tokens, steps = World(cfg.device), cfg.total_batch_size, 0
    cuda = world.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        text = np.random.default_rng(0).integers(model_config.vocab_size, size=2 * tokens)
        np.save(Path(folder) / "random_train_000000.npy", text.astype(np.uint16))
        plain = dict(align_documents=False, init_from="", data=folder)
        run = PROGRAM.set_up(model_config, replace(cfg, **plain), world)
        if cuda:
            torch.cuda.reset_peak_memory_stats(world.device)
        run.update()  # compiles
        world.synchronize()
        t0 = time.perf_counter()
        while not steps or time.perf_counter() - t0 < seconds:
            run.update()
            world.synchronize()
            steps += 1
        tok_per_s = steps * tokens / (time.perf_counter() - t0)
    return tok_per_s, torch.cuda.max_memory_allocated(world.device) if cuda else None


def speed_here(s, gpu):
    """(tokens/s of one process by real steps, or 0; where that comes from, or why there is none)."""
    tokens = min(8, s.grad_accum_steps) * s.positions  # more micro-steps would only take longer
    most = {"cpu": 1e12, "mps": 1e13, "cuda": 1e99}[gpu.device.type]  # FLOP: 10 seconds of a laptop
    if tokens * s.shapes.flops_per_token(s.cfg.seq_len) > most:
        return 0, "no forecast: a step would take too long here; --gpu names a GPU"
    cfg = replace(s.cfg, total_batch_size=tokens, device=str(gpu.device))
    tok_per_s, measured = probe(s.model, cfg)
    seen = f"; peak memory {measured / GIB:.2f} GiB" if measured else ""
    return tok_per_s, f"measured now{seen}"


def speed_there(s, gpu, asked):
    """The same of a GPU that is not here, by the MFU that is asked for, or the usual one."""
    flops, mfu, L = s.shapes.flops_per_token(s.cfg.seq_len), asked or MFU, s.model.n_layer
    if gpu.tflops is None or s.bytes == 4:
        return 0, "no forecast: known is only the 16-bit peak of GPUs with a name, as H100"
    if s.model.activation_checkpointing:  # each block's forward pass twice
        flops += 2 * s.in_matrices + 4 * L * s.model.n_embd * s.cfg.seq_len
    tok_per_s = 1e12 * mfu * gpu.tflops / flops
    micro_ms = 1000 * s.positions / tok_per_s
    if not asked and micro_ms < L:
        return 0, (
            f"no forecast: at {MFU:.0%} MFU a micro-step would take {micro_ms:.2g} ms, and one of "
            "less than 1 ms a layer does not fill a GPU; --mfu assumes another share"
        )
    why = f"assuming {mfu:.0%} (--mfu) of {gpu.tflops} TFLOP/s at {flops / 1e6:,.0f} MFLOP a token"
    return tok_per_s, why + "; what 8 bits gain is not in it" * (s.cfg.fp8 != "off")


# -------------------------------------------------------------------------------------- 3. report


def say(name, text):
    print(textwrap.fill(text, 100, initial_indent=f"{name:8}", subsequent_indent=" " * 8))


def table(s):
    """Print the ledger, a column for each moment."""
    unit, name = (GIB, "GiB") if peak(s)[0] >= GIB else (2**20, "MiB")
    print(f"\n{name:28}" + "".join(f"{moment:>7}" for moment in MOMENTS))
    for label, size, when in ledger(s):
        if size >= 0.005 * unit:
            amounts = (f"{size / unit:.2f}" if moment in when else "" for moment in MOMENTS)
            print(f"{label:28}" + "".join(f"{amount:>7}" for amount in amounts))
    sums = "".join(f"{size / unit:7.2f}" for size in totals(s).values())
    print(f"{'all that the allocator holds':28}{sums}\n")


def report(s, gpu, reason, args):
    """Print what people want to know: where the memory goes, does it fit, how long, how much."""
    cfg, gpus, left, (most, moment) = s.cfg, s.world_size, room(s, gpu), peak(s)
    how = f"{cfg.precision}, {'compiled' if cfg.compile else 'eager'}, {cfg.optimizer}"
    say("plan", f"{reason}; {how}, on {gpu.name}, {gpu.gib:.4g} GiB")
    micro = f"micro-steps {s.grad_accum_steps} x sequences {cfg.batch_size} x tokens {cfg.seq_len}"
    say("step", f"{cfg.total_batch_size:,} tokens = {micro}" + f" x GPUs {gpus}" * (gpus > 1))
    table(s)
    fits = f"fits, with {left:.1f} GiB left"
    if left < 0:
        fits = f"does not fit, {-left:.1f} GiB are missing"
    text = (
        f"batch_size={cfg.batch_size} {fits}. The peak is {most / GIB:.2f} GiB, {MOMENTS[moment]}; "
        f"about {s.outside:.1f} GiB are taken outside of PyTorch, {FRAGMENTS:.0%} of "
        f"{gpu.gib:.1f} by gaps between tensors. "
    )
    say("memory", text + what_fits(s, gpu))
    if left >= 0:
        forecast(s, gpu, args)


def forecast(s, gpu, args):
    """Print tokens/s, hours and dollars, or why they cannot be told."""
    tok_per_s, why = speed_here(s, gpu) if gpu.device else speed_there(s, gpu, args.mfu)
    if not tok_per_s:
        return say("speed", why)
    if args.gpus > 1:
        sends_less = s.parallel == "zero1" or s.grad_accum_steps > 1
        how = "fsdp2" if s.parallel == "fsdp2" else "less" if sends_less else "ddp"
        many = args.gpus * SCALING[how]
        tok_per_s *= many
        why += f"; {args.gpus} GPUs count as {many:.2f} (from runs on up to four: docs/SPEED.md)"
    say("speed", f"{tok_per_s:,.0f} tokens/s, {why}")
    tokens = s.cfg.max_steps * s.cfg.total_batch_size
    hours = tokens / tok_per_s / 3600
    took = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    all_of_it = f"{took} for {s.cfg.max_steps:,} steps, {short(tokens)} tokens"
    say("time", f"{all_of_it}; evaluation and saving come on top")
    if s.device_type == "cuda":
        cost = f"${hours * args.gpus * args.price:,.2f}"
        say("money", f"{cost}, assuming ${args.price:g} per GPU-hour (--price)")


# -------------------------------------------------------------------------------- 4. command line


def own_flags(argv):
    """(own flags, those of the trainer). Raises UserError for values that cannot be."""
    parser = argparse.ArgumentParser("python -m lab plan", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    gpus = f"a GPU that is not here: {', '.join(GPUS)}; a size, 24GB; or both, A100 80GB"
    parser.add_argument("--gpu", help=gpus)
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (1)")
    parser.add_argument("--mfu", type=float, help=f"share of such a GPU's peak to assume ({MFU})")
    parser.add_argument("--price", type=float, default=3.0, help="dollars per GPU-hour (3)")
    parser.add_argument("--preset", help=f"one of train_gpt2.py's: {', '.join(PROGRAM.PRESETS)}")
    args, rest = parser.parse_known_args(argv)
    if args.gpus < 1:
        raise UserError(f"gpus={args.gpus} must be 1 or more")
    if not 0 <= args.price < math.inf:
        raise UserError(f"price={args.price:g} must be a number of dollars, 0 or more")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(f"mfu={args.mfu:g} must be a share, above 0 and up to 1; --mfu 0.4 is 40 %")
    if args.gpu and not args.preset and "--resume" not in rest:
        args.preset = next(iter(PROGRAM.PRESETS))  # not what would suit this machine
    return args, ["--preset", args.preset, *rest] if args.preset else rest


def setting(model_config, cfg, gpu, gpus):
    """The Setting of these flags on this GPU; without --batch_size the largest that fits."""
    device_type, (head, mlp) = "cuda", replaced(cfg.kernels, cfg.fp8)
    if gpu.device:
        device_type, mlp = gpu.device.type, mlp if epilogues_work(gpu.device) else "plain"
        precision = Precision(cfg.precision, gpu.device)
        compiled = cfg.compile and not why_no_compile(gpu.device, model_config, precision)
        cfg = replace(cfg, precision=precision.name, compile=compiled)
    elif cfg.precision == "auto":
        cfg = replace(cfg, precision="fp16" if gpu.name in WITHOUT_BF16 else "bf16")
    if cfg.parallel != "ddp" and cfg.precision == "fp16":
        raise UserError(f"parallel={cfg.parallel} does not go with precision=fp16; leave one out")
    if cfg.fp8 != "off" and gpu.name in WITHOUT_FP8:
        needed = "an RTX 40, H100 or newer"
        raise UserError(f"fp8={cfg.fp8} needs {needed}, not {gpu.name}; leave it out")
    if device_type != "cuda" and gpus > 1:
        raise UserError(f"gpus={gpus} needs a GPU here, or one that --gpu names")
    b = cfg.batch_size or 1
    grad_accum_steps(cfg, b, gpus)  # raises UserError where the step is no multiple
    model = replace(model_config, vocab_size=vocab_size(model_config, cfg, PROGRAM.PRESETS))
    s = Setting(model, replace(cfg, batch_size=b), gpus, device_type, (head, mlp))
    return s if cfg.batch_size else largest(s, gpu) or s


def main(argv):
    args, argv = own_flags(argv)
    reason, model_config, cfg = parse_flags(argv, PROGRAM.PRESETS, __doc__)
    gpu = this_gpu(cfg.device) if args.gpu is None else named_gpu(args.gpu)
    report(setting(model_config, cfg, gpu, args.gpus), gpu, reason, args)
