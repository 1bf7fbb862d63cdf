"""Would it fit, how long would it take, what would it cost? Asked before a run, on any machine.

    python -m lab plan                                      # this machine, the preset it would take
    python -m lab plan --preset gpt2-xl --gpu "RTX 4090"    # a GPU that is not here; needs no data
    python -m lab plan --preset gpt2-xl --gpu 24GB --batch_size 4 --activation_checkpointing
    python -m lab plan --preset gpt2 --gpu H100 --gpus 8 --price 2.5

The memory is arithmetic on what autograd keeps; the tests hold it against measured peaks. The speed
is measured where the GPU is, by a few real steps; elsewhere it follows from an assumed MFU.
"""

import argparse
import dataclasses
import functools
import importlib
import math
import re
import tempfile
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lab.cli import UserError
from lab.data.loader import grad_accum_steps
from lab.device import GPUS, Precision, memory_of, micro_batches, why_no_compile
from lab.kernels.cross_entropy import CHUNK, SMALL
from lab.kernels.fused_mlp import MIN_POSITIONS, epilogues_work
from lab.models import PROGRAMS
from lab.run.meter import Phases
from lab.run.settings import parse_flags, vocab_size
from lab.world import World

PROGRAM = importlib.import_module(PROGRAMS["gpt2"])
GIB = 2**30
CONTEXT_GIB = 0.7  # assumed: CUDA's context and kernels, which PyTorch's allocator does not see
NCCL_GIB = 0.5  # assumed: NCCL's buffers, where there are several GPUs; not seen either
FRAGMENTS = 0.05  # share of the memory that cannot be handed out; fit_batch_size leaves as much
MFU = 0.4  # assumed of a GPU that is not here, if a micro-step takes a millisecond a layer or more
# several GPUs against as many times one: DDP without accumulation, and what sends less (README)
SCALING = {"ddp": 0.95, "less": 0.97}
WITHOUT_BF16 = ("V100", "T4")
# the chips before Ada and Hopper, whose products have 16 bits at least
WITHOUT_FP8 = (*WITHOUT_BF16, "A100", "A800", "A40", "A30", "A10G", "A10", "RTX A6000", "RTX 3090")
MOMENTS = {  # where the peak of a step can lie
    "loss": "while the loss is computed",
    "head": "at the start of the backward pass",
    "block": "in the last block's backward pass",
    "end": "at the end of the backward pass",
    "update": "in the optimizer's step",
}
KEPT = ("loss", "head", "block")  # how long the results of the forward pass stay
LETTERS = (
    "N positions of a micro-batch, n of a chunk of them, C channels, H heads, L layers, T tokens "
    "of a sequence, V rows of the head, P parameters, M of them in the blocks' matrices, R the rest"
)


# ----------------------------------------------------------------------------------- 1. the ledger


@functools.cache
def without_memory(*fields):
    """The model of these fields of a GPTConfig, as shapes alone."""
    with torch.device("meta"):
        return PROGRAM.GPT(PROGRAM.GPTConfig(*fields))


@dataclass
class Setting:
    """What the memory of a step depends on."""

    model: object  # a GPTConfig
    batch_size: int
    seq_len: int
    grad_accum_steps: int = 2
    world_size: int = 1
    optimizer: str = "adamw"
    precision: str = "bf16"  # bf16, fp16, tf32 or fp32
    compile: bool = True
    device_type: str = "cuda"
    parallel: str = "ddp"  # or zero1, fsdp2: as the trainer's
    head_loss: str = "fused"  # or plain, fp8
    mlp: str = "fused"  # or plain, fp8

    def __post_init__(self):
        c, self.shapes = self.model, without_memory(*dataclasses.astuple(self.model))
        N, P = self.batch_size * self.seq_len, sum(p.numel() for p in self.shapes.parameters())
        M = sum(p.numel() for p in self.shapes.block_matrices())
        cuda, bf16 = self.device_type == "cuda", self.precision == "bf16"
        self.bytes = 2 if bf16 or self.precision == "fp16" else 4  # of what a product returns
        self.stream = 2 if bf16 and c.bf16_residual else 4  # bytes, in the residual stream
        # as lab.kernels does, which leaves small micro-steps to the plain modules
        self.head_used = "plain" if N * c.padded_vocab_size * 4 <= SMALL else self.head_loss
        self.mlp_used = self.mlp if N >= MIN_POSITIONS and bf16 and cuda else "plain"
        self.letters = dict(N=N, n=min(CHUNK, N), C=c.n_embd, H=c.n_head, L=c.n_layer)
        self.letters |= dict(T=self.seq_len, V=c.padded_vocab_size, P=P, M=M, R=P - M)


def replaced(kernels, fp8):
    """(how the head's loss, how the MLPs are computed) with these settings of the trainer."""
    if kernels == "plain":
        return "plain", "plain"
    return "fused" if fp8 == "off" else "fp8", "fp8" if fp8 == "all" else "fused"


def ledger(s):
    """[(label, formula where it is largest, {moment: bytes})]: what PyTorch's allocator holds for a
    process."""
    rows = []
    for label, formulas in (*state(s), *activations(s), *head(s)):
        at = {moment: amount(formulas.get(moment, "0"), s.letters) for moment in MOMENTS}
        rows.append((label, formulas.get(max(at, key=at.get)), at))
    return rows


def row(label, formula, moments=tuple(MOMENTS), **others):
    """A row of the ledger: (label, {moment: formula}); at the `others` it has another formula."""
    return label, dict.fromkeys(moments, formula) | others


def amount(formula, letters):
    """Bytes of a product such as "2 M /L"; a / stands before what divides."""
    product = 1.0
    for word in formula.split():
        factor = letters.get(word.strip("/")) or float(word.strip("/"))
        product = product / factor if word[0] == "/" else product * factor
    return product


def state(s):
    """What does not depend on the micro-batch."""
    n, accumulates, parallel = s.world_size, s.grad_accum_steps > 1, s.parallel
    ddp = n > 1 and parallel == "ddp"
    if parallel == "fsdp2":  # computed; no measurement has tried it yet
        yield row("weights, gradients, moments", f"16 P /{n}")
        yield row("put together: two blocks", f"{2 * s.bytes} M /L")
        yield row("put together: the rest", "4 R")
        yield row("gradients of a block", "4 M /L", ["block"])
        yield row("gradients of embedding", "4 V C", ["block"], end="8 V C")
        yield row("workspace of cuBLAS", f"{3 if s.mlp_used == 'fused' else 2} {2**25}")
        return
    yield row("parameters", "4 P")
    if s.optimizer == "muon":
        yield row("Muon's moment", "4 M")
        yield row("AdamW's two moments", "8 R")
        # matrices of a shape are one stack: the update and, in its iteration, four times its size
        yield row("Muon's work on a stack", "64 L C C", ["update"])
    elif parallel == "zero1":
        yield row("AdamW's moments, a share", f"8 P /{n}")
        # what is read in 16 bits; the MLPs' two thirds are not where they are rounded to 8
        wide = 0 if s.bytes == 4 else 4
        yield row("share's matrices, 32 bits", f"{wide} M /{3 * n if s.mlp == 'fp8' else n}")
        # what is read in 16 bits travels so, unless it was summed over micro-steps
        laid_out = "4 P" if s.bytes == 4 else "4 M" if accumulates else "2 M"
        yield row("gradients laid out to send", laid_out, ["update"])
    else:
        yield row("AdamW's two moments", "8 P")
        yield row("square of a gradient", "4 V C", ["update"])  # for the norm: of the embedding's
    stays = accumulates or ddp  # over micro-steps; in DDP's buckets
    yield row("gradients", "4 P", MOMENTS if stays else ["end", "update"])
    if accumulates and s.compile and not ddp:  # compiled, they come all at once
        yield row("gradients of a micro-step", "4 P", ["end"])
    # of the tied embedding: the head's, the tokens', their sum
    yield row("gradients of embedding", "4 V C", ["block"], end="12 V C" if stays else "8 V C")
    if s.device_type == "cuda":  # 32 MiB forward, backward, and the fused MLP's
        yield row("workspace of cuBLAS", f"{3 if s.mlp_used == 'fused' else 2} {2**25}")


def activations(s):
    """What the forward pass keeps for the backward; if checkpointed, what is computed again."""
    e, again = s.bytes, s.model.activation_checkpointing
    norm = s.stream if s.compile else 4  # eager autocast widens what LayerNorm reads
    mlp = 1 if s.mlp_used == "fp8" else e
    each_block = {
        "LayerNorm inputs": f"{2 * norm} N C",
        "LayerNorm statistics": "16 N",
        "LayerNorm outputs": f"{e + mlp} N C",
        "queries, keys, values": f"{3 * e} N C",
        "attention output": f"{e} N C",
        "attention log-sum-exp": "4 H N",
        "MLP before GELU": f"{4 * e} N C",
        "MLP after GELU": f"{4 * mlp} N C",
    }
    if s.model.attention == "math":
        each_block["attention T x T scores"] = "4 H N T"
    for label, formula in each_block.items():
        if again:  # one block at a time
            yield row(label, formula, ["block"])
        else:
            yield row(label, f"{formula} L", KEPT)
    copies = "2 M" if e == 2 else "0"  # rounded; the MLPs' two thirds in 8 bits, in two layouts
    if s.mlp_used == "fp8":
        copies = "4 M /3"
    if s.parallel == "fsdp2":  # they are put together in 16 bits
        copies = "0"
    if again:
        yield row("inputs of the blocks", f"{s.stream} N C L", KEPT)
        # eager autocast keeps all until the loss is there
        yield row(
            "copies of matrices", f"{copies} /L", ["block"], loss="0" if s.compile else copies
        )
    else:
        yield row("copies of matrices", copies, KEPT)
    # of the stream, with its rounded copy for the MLP; of both sides of GELU, whose output is freed
    # by then, but for the fused MLP's
    residual = s.stream + e * (s.stream != e)
    gelu = {"plain": 4 * e, "fused": 5 * e, "fp8": 5 * e + 10}[s.mlp_used]
    yield row("gradients of activations", f"{residual + gelu} N C", ["block"])
    if s.model.document_mask:
        yield row("document mask", "N T", KEPT)
    if not (s.compile and again):  # which computes it again with the last block
        yield row("input of last LayerNorm", f"{norm} N C", ["loss", "head"])


def head(s):
    """Logits, rounded copy and gradients of the head, as lab.kernels.cross_entropy holds them."""
    e, used = s.bytes, s.head_used
    plain = used == "plain"
    yield row("input of the head", f"{e} N C", ["loss", "head"] if plain else ["loss"])
    if e == 2:  # in 8 bits it is there twice
        yield row("rounded copy of the head", "2 V C", ["loss", "head"] if plain else ["loss"])
    if plain:  # compiled, the gradient is written over them; else log-softmax, two gradients
        yield row("logits", f"{e if s.compile else 12} N V", ["loss", "head"])
        return
    # in 8 bits also two gradients, of which those of a chunk stay while the next are made
    several = s.letters["N"] > s.letters["n"]
    yield row("logits, in chunks", f"{(6 if several else 4) if used == 'fp8' else e} n V", ["loss"])
    # when the backward pass begins, they are scaled
    yield row("gradient of the head's input", f"{e} N C", ["loss"], head=f"{2 * e} N C")
    yield row("gradient of the head", "4 V C", ["loss"], head="8 V C")
    if used == "fp8":
        yield row("8-bit input of the head", "N C", ["loss"])
    if used == "fp8" or s.precision != "bf16":  # a bf16 product is added in place
        yield row("the same, not yet added", "4 V C", ["loss"])


def totals(rows):
    """{moment: bytes}"""
    return {moment: sum(at[moment] for _, _, at in rows) for moment in MOMENTS}


def peak(s):
    """(bytes, moment): what torch.cuda.max_memory_allocated says after some steps, and of when."""
    total = totals(ledger(s))
    moment = max(total, key=total.get)
    return total[moment], moment


# -------------------------------------------------------------------------------------- 2. the GPU


@dataclass
class GPU:
    """What is planned for: a GPU, or the memory of a machine without one."""

    name: str  # one of lab.device.GPUS, or what people call it
    gib: float
    tflops: float | None = None  # dense 16-bit peak of a GPU that is not here, if known
    device: torch.device | None = None  # of one that is


def named_gpu(text):
    """The GPU of "H100", "rtx 4090", "A100 80GB" or "24GB". Raises UserError for unknown ones."""
    name, size = re.fullmatch(r"(.*?)([\d.]+ *GI?B)?", text.strip().upper()).groups()
    known = {re.sub(r"\W|RTX", "", gpu.upper()): gpu for gpu in GPUS}
    short = re.sub(r"\W|RTX|NVIDIA|TESLA|GEFORCE", "", name)
    if short not in known and (name or not size):
        raise UserError(
            f"gpu={text} is not one of {', '.join(GPUS)}; a size will do too: --gpu 24GB"
        )
    tflops, gib = GPUS[known[short]] if short else (None, None)
    return GPU(known.get(short, "a GPU"), float(size.rstrip("GIB ")) if size else gib, tflops)


def this_gpu(wanted):
    """What training would use here."""
    device = World(wanted).device
    memory = torch.mps.recommended_max_memory() if device.type == "mps" else memory_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return GPU(f"this machine's {name}", memory / GIB, device=device)


def outside(s):
    """GiB of the process that the allocator does not see."""
    return (CONTEXT_GIB if s.device_type == "cuda" else 0.5) + NCCL_GIB * (s.world_size > 1)


def room(s, gpu):
    """GiB that would be left; negative where it does not fit."""
    return (1 - FRAGMENTS) * gpu.gib - peak(s)[0] / GIB - outside(s)


def largest(s, gpu, sizes):
    """The Setting with the first of these micro-batches that fits, with as many tokens a step; None
    if none does."""
    tokens = s.grad_accum_steps * s.batch_size
    tried = (replace(s, batch_size=b, grad_accum_steps=tokens // b) for b in sizes)
    return next((setting for setting in tried if room(setting, gpu) >= 0), None)


# --------------------------------------------------------------------------------------- 3. speed


def probe(model_config, cfg, seconds=3.0):
    """Train for about so long on random tokens, after two steps that do not count.

    cfg has a batch_size; of its micro-steps two at most make a step. Returns (ms of a micro-step,
    ms of an update, peak memory in bytes or None without CUDA).
    """
    world, n = World(cfg.device), cfg.batch_size * cfg.seq_len
    cuda = world.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(model_config.vocab_size, size=4 * n)
        np.save(Path(folder) / "random_train_000000.npy", tokens.astype(np.uint16))
        plain = dict(align_documents=False, verify_data=False, init_from="", data=folder)
        cfg = replace(cfg, total_batch_size=min(2 * n, cfg.total_batch_size), **plain)
        run = PROGRAM.set_up(model_config, cfg, world)
        phases = Phases(run)

        def steps(count):
            for _ in range(count):
                run.update()
            world.synchronize()
            return phases.read()

        if cuda:
            torch.cuda.reset_peak_memory_stats(world.device)
        steps(1)
        once = sum(steps(1).values())
        ms = steps(max(1, min(20, int(1000 * seconds / once))))
    micro_ms = (ms["data_ms"] + ms["forward_ms"] + ms["backward_ms"]) / run.loader.grad_accum_steps
    measured = torch.cuda.max_memory_allocated(world.device) if cuda else None
    return micro_ms, ms["optimizer_ms"], measured


def speed_here(s, cfg, gpu):
    """(tokens/s of one process by real steps, or None; where that comes from, or why it is)."""
    most = {"cpu": 2e12, "mps": 2e13}.get(gpu.device.type, math.inf)  # FLOP: 20 seconds of a laptop
    if 4 * s.letters["N"] * s.shapes.flops_per_token(s.seq_len) > most:
        return None, "no forecast: four micro-steps would take too long here; --gpu names a GPU"
    cfg = replace(cfg, batch_size=s.batch_size, device=str(gpu.device))
    micro_ms, update_ms, measured = probe(s.model, cfg)
    why = f"measured now: {micro_ms:,.1f} ms a micro-step, {update_ms:,.1f} ms an update"
    why += f"; peak memory {measured / GIB:.2f} GiB" if measured else ""
    accum = s.grad_accum_steps
    return 1000 * accum * s.letters["N"] / (accum * micro_ms + update_ms), why


def speed_there(s, gpu, asked):
    """The same of a GPU that is not here, by the MFU that is asked for, or the usual one."""
    flops, mfu, L = s.shapes.flops_per_token(s.seq_len), asked or MFU, s.model.n_layer
    if gpu.tflops is None or s.bytes == 4:
        return None, "no forecast: known is only the 16-bit peak of GPUs with a name, as H100"
    if s.model.activation_checkpointing:  # each block's forward pass twice
        flops += 2 * s.letters["M"] + 4 * L * s.model.n_embd * s.seq_len
    micro_ms = 1e-9 * s.letters["N"] * flops / (mfu * gpu.tflops)
    if not asked and micro_ms < L:
        return None, (
            f"no forecast: at {MFU:.0%} MFU a micro-step would take {micro_ms:.2g} ms, and one of "
            "less than 1 ms a layer does not fill a GPU; --mfu assumes another share"
        )
    why = f"assuming {mfu:.0%} (--mfu) of {gpu.tflops} TFLOP/s at {flops / 1e6:,.0f} MFLOP a token"
    why += "; what 8 bits gain is not in it" * ("fp8" in (s.head_loss, s.mlp))
    return 1000 * s.letters["N"] / micro_ms, why


# -------------------------------------------------------------------------------------- 4. report


def table(s):
    """Lines of the ledger, a column for each moment."""
    rows, most = ledger(s), peak(s)[0]
    unit, name = (GIB, "GiB") if most >= GIB else (2**20, "MiB")
    yield f"{name:28}" + "".join(f"{moment:>7}" for moment in MOMENTS) + "  bytes"
    for label, formula, at in [*rows, ("all that the allocator holds", "", totals(rows))]:
        if max(at.values()) >= 0.005 * unit:
            yield f"{label:28}" + "".join(f"{at[m] / unit:7.2f}" for m in MOMENTS) + f"  {formula}"


def verdict(s, gpu, sizes):
    """Does it fit, and what else does? sizes: the micro-batches that training tries."""
    left, (most, moment) = room(s, gpu), peak(s)
    fits = f"fits, with {left:.1f} GiB left"
    if left < 0:
        fits = f"does not fit, {-left:.1f} GiB are missing"
    return (
        f"batch_size={s.batch_size} {fits}. The peak is {most / GIB:.2f} GiB, {MOMENTS[moment]}; "
        f"about {outside(s):.1f} GiB are taken outside of PyTorch, {FRAGMENTS:.0%} of "
        f"{gpu.gib:.1f} by gaps between tensors. {what_fits(s, gpu, sizes)}"
    )


def what_fits(s, gpu, sizes):
    """The largest micro-batches; where none fits, how many GPUs would do."""
    again = s.model.activation_checkpointing
    other = replace(s, model=replace(s.model, activation_checkpointing=not again))
    found = [largest(setting, gpu, sizes) for setting in (s, other)]
    if any(found):
        one, two = (setting.batch_size if setting else "none" for setting in found)
        return (
            f"Of those that training tries, up to {sizes[0]}, the largest that fits is {one}; "
            f"{'without' if again else 'with'} --activation_checkpointing it is {two}."
        )
    none = "None fits, with --activation_checkpointing or without."
    least = replace(s if again else other, batch_size=1)
    for n in (2, 4, 8, 16, 32, 64):
        if room(replace(least, parallel="fsdp2", world_size=n), gpu) >= 0:
            flags = f"--gpus {n} --parallel fsdp2 --activation_checkpointing"
            return f"{none} {n} such GPUs would: {flags}."
    return f"{none} No 64 such GPUs hold it either: take a larger GPU or a smaller --preset."


def report(s, cfg, gpu, reason, args):
    """Print the ledger, and below it what people want to know: does it fit, how long, how much."""

    def say(name, text):
        print(textwrap.fill(text, 100, initial_indent=f"{name:8}", subsequent_indent=" " * 8))

    mode, gpus = "compiled" if s.compile else "eager", args.gpus
    micro = f"micro-steps {s.grad_accum_steps} x sequences {s.batch_size} x tokens {s.seq_len}"
    micro += f" x GPUs {gpus}" * (gpus > 1)
    say("plan", f"{reason}; {s.precision}, {mode}, {s.optimizer}, on {gpu.name}, {gpu.gib:.4g} GiB")
    say("step", f"{cfg.total_batch_size:,} tokens = {micro}")
    print("", *table(s), sep="\n")
    sizes = ", ".join(f"{letter} = {size:,}" for letter, size in s.letters.items())
    say("where", f"{LETTERS}: {sizes}")
    print()
    say("memory", verdict(s, gpu, micro_batches(cfg, gpus, s.device_type)))
    if room(s, gpu) < 0:
        return
    tok_per_s, why = speed_here(s, cfg, gpu) if gpu.device else speed_there(s, gpu, args.mfu)
    if not tok_per_s:
        say("speed", why)
        return
    if gpus > 1:
        many = gpus * SCALING["less" if s.parallel == "zero1" or s.grad_accum_steps > 1 else "ddp"]
        tok_per_s *= many
        why += f"; {gpus} GPUs count as {many:.2f} (as measured on four: README)"
    say("speed", f"{tok_per_s:,.0f} tokens/s, {why}")
    tokens = cfg.max_steps * cfg.total_batch_size
    hours = tokens / tok_per_s / 3600
    took = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    amount = f"{tokens / 1e9:,.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:,.1f}M"
    all_of_it = f"{took} for {cfg.max_steps:,} steps, {amount} tokens"
    say("time", f"{all_of_it}; evaluation and saving come on top")
    if s.device_type == "cuda":
        cost = f"${hours * gpus * args.price:,.2f}"
        say("money", f"{cost}, assuming ${args.price:g} per GPU-hour (--price)")


# -------------------------------------------------------------------------------- 5. command line


def own_flags(argv):
    """(this command's own flags, the rest of argv). Raises UserError for values that cannot be."""
    about = f"{__doc__}\nAll flags of `python train_gpt2.py --help` are understood too."
    parser = argparse.ArgumentParser("python -m lab plan", description=about, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    gpus = f"a GPU that is not here: {', '.join(GPUS)}; a size, 24GB; or both, A100 80GB"
    parser.add_argument("--gpu", help=gpus)
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (1)")
    parser.add_argument("--mfu", type=float, help=f"share of such a GPU's peak to assume ({MFU})")
    parser.add_argument("--price", type=float, default=3.0, help="dollars per GPU-hour (3)")
    args, rest = parser.parse_known_args(argv)
    if args.gpus < 1:
        raise UserError(f"gpus={args.gpus} must be 1 or more")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(f"mfu={args.mfu:g} must be a share, above 0 and up to 1; --mfu 0.4 is 40 %")
    return args, rest


def setting(model_config, cfg, gpu, gpus):
    """The Setting of a run with these flags on this GPU; without --batch_size the largest that
    fits."""
    here, device_type = gpu.device, gpu.device.type if gpu.device else "cuda"
    if device_type != "cuda" and gpus > 1:
        raise UserError(f"gpus={gpus} needs a GPU here, or one that --gpu names")
    if cfg.fp8 != "off" and gpu.name in WITHOUT_FP8:
        raise UserError(
            f"fp8={cfg.fp8} needs an RTX 40, H100 or newer, not {gpu.name}; leave it out"
        )
    if here:
        precision = Precision(cfg.precision, here).name
    else:
        best = "fp16" if gpu.name in WITHOUT_BF16 else "bf16"
        precision = best if cfg.precision == "auto" else cfg.precision
    compiled = cfg.compile and not (here and why_no_compile(here, model_config))
    parallel = cfg.parallel if gpus > 1 else "ddp"
    head, mlp = replaced(cfg.kernels, cfg.fp8)
    if here and not epilogues_work(here):
        mlp = "plain"
    how = cfg.optimizer, precision, compiled, device_type, parallel, head, mlp
    model = replace(model_config, vocab_size=vocab_size(model_config, cfg, PROGRAM.PRESETS))
    b = cfg.batch_size or 1
    s = Setting(model, b, cfg.seq_len, grad_accum_steps(cfg, b, gpus), gpus, *how)
    return s if cfg.batch_size else largest(s, gpu, micro_batches(cfg, gpus, device_type)) or s


def main(argv):
    args, argv = own_flags(argv)
    if args.gpu and not {word.partition("=")[0] for word in argv} & {"--preset", "--resume"}:
        argv = ["--preset", next(iter(PROGRAM.PRESETS)), *argv]  # not what would suit this machine
    reason, model_config, cfg = parse_flags(argv, PROGRAM.PRESETS, __doc__)
    gpu = this_gpu(cfg.device) if args.gpu is None else named_gpu(args.gpu)
    report(setting(model_config, cfg, gpu, args.gpus), cfg, gpu, reason, args)
