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
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lab.cli import UserError
from lab.data.loader import grad_accum_steps
from lab.device import GPUS, WITHOUT_FP8, Precision, memory_of, micro_batches, why_no_compile
from lab.kernels import why_no_fp8, why_no_fp8_shape
from lab.kernels.cross_entropy import CHUNK, SMALL
from lab.kernels.fused_mlp import MIN_POSITIONS, epilogues_work
from lab.models import PROGRAMS
from lab.run.checkpoints import newest_checkpoint, step_of
from lab.run.meter import Phases
from lab.run.settings import parse_flags, vocab_size
from lab.world import World

PROGRAM = importlib.import_module(PROGRAMS["gpt2"])
GIB = 2**30
CONTEXT_GIB = 0.7  # assumed: CUDA's context and kernels, which PyTorch's allocator does not see
NCCL_GIB = 0.5  # assumed: NCCL's buffers, where there are several GPUs; not seen either
FRAGMENTS = 0.05  # share of the memory that cannot be handed out; fit_batch_size leaves as much
MFU = 0.4  # assumed of a GPU that is not here, if a micro-step takes a millisecond a layer or more
PRICE = 3.0  # assumed: dollars per GPU-hour
# several GPUs against as many times one: DDP without accumulation, and what sends less (README)
SCALING = {"ddp": 0.95, "less": 0.97}
WITHOUT_BF16 = ("V100", "T4")
# channels from which a product with the logits takes longer than copying them: 2 C FLOPs against
# 2 x 2 bytes a number, at an H200's 989 TFLOP/s and 4.8 TB/s
PADDING_PAYS = 2 * 989 / 4.8
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
    zero1: bool = False  # AdamW's state in shares
    head_loss: str = "fused"  # or plain, fp8
    mlp: str = "fused"  # or plain, fp8

    def __post_init__(self):
        c, self.shapes = self.model, without_memory(*dataclasses.astuple(self.model))
        N, P = self.batch_size * self.seq_len, sum(p.numel() for p in self.shapes.parameters())
        M = sum(p.numel() for p in self.shapes.block_matrices())
        self.letters = dict(N=N, n=min(CHUNK, N), C=c.n_embd, H=c.n_head, L=c.n_layer)
        self.letters |= dict(T=self.seq_len, V=c.padded_vocab_size, P=P, M=M, R=P - M)
        cuda, bf16 = self.device_type == "cuda", self.precision == "bf16"
        self.bytes = 2 if bf16 or self.precision == "fp16" else 4  # of what a product returns
        self.stream = 2 if bf16 and c.bf16_residual else 4  # bytes, in the residual stream
        # autocast on CUDA widens LayerNorm and softmax, and eager mode keeps what they worked on
        self.widens = self.bytes == 2 and cuda and not self.compile
        # as lab.kernels does, which leaves small micro-steps to the plain modules
        self.head_used = "plain" if N * c.padded_vocab_size * 4 <= SMALL else self.head_loss
        self.mlp_used = self.mlp if N >= MIN_POSITIONS and bf16 and cuda else "plain"


def replaced(kernels, fp8):
    """(how the head's loss, how the MLPs are computed) with these settings of the trainer."""
    if kernels == "plain":
        return "plain", "plain"
    return "fused" if fp8 == "off" else "fp8", "fp8" if fp8 == "all" else "fused"


def amount(formula, letters):
    """Bytes of a sum of products, as 2 N C + 16 N; a / stands before what divides."""

    def factor(word):
        return letters[word] if word in letters else float(word)

    return sum(
        math.prod(1 / factor(word[1:]) if word[0] == "/" else factor(word) for word in term.split())
        for term in formula.split("+")
    )


def ledger(s, **instead):
    """[(label, formula where it is largest, {moment: bytes})]: what PyTorch's allocator holds for a
    process. instead: other values of letters."""
    letters, rows = s.letters | instead, []

    def row(label, formula, moments=MOMENTS, **others):
        formulas = dict.fromkeys(MOMENTS, "0") | dict.fromkeys(moments, formula) | others
        at = {moment: amount(text, letters) for moment, text in formulas.items()}
        rows.append((label, formulas[max(at, key=at.get)], at))

    state_rows(s, row)
    activation_rows(s, row)
    head_rows(s, row)
    if s.device_type == "cuda":  # 32 MiB forward, backward, and the fused MLP's
        row("workspace of cuBLAS", f"{3 if s.mlp_used == 'fused' else 2} {2**25}")
    return rows


def state_rows(s, row):
    """What does not depend on the micro-batch."""
    n, accumulates = s.world_size, s.grad_accum_steps > 1
    row("parameters", "4 P")
    if s.optimizer == "muon":
        row("Muon's, AdamW's moments", "4 M + 8 R")
        # matrices of a shape are one stack: the update and, in its iteration, four times its size
        row("Muon's work on a stack", f"{64 if s.device_type == 'cuda' else 96} L C C", ["update"])
    elif s.zero1:
        row("AdamW's moments, a share", f"8 P /{n}")
        laid_out = "4 P"
        if s.precision == "bf16":  # what is read in 16 bits travels so, the share has all bits
            in_8_bits = s.mlp == "fp8"  # the MLPs' two thirds of M are read in 32 bits then
            row("share's matrices, 32 bits", f"4 M /{3 * n if in_8_bits else n}")
            laid_out = "4 R + 4 M /3" if in_8_bits else "4 M" if accumulates else "2 M"
        row("gradients laid out to send", laid_out, ["update"])
    else:
        row("AdamW's two moments", "8 P")
        embedding = s.letters["V"] > 4 * s.letters["C"]  # else the MLP's matrices are the largest
        row("square of a gradient", "4 V C" if embedding else "16 C C", ["update"])  # for the norm
    ddp = n > 1 and not s.zero1  # gradients stay in its buckets
    stays = ddp or accumulates
    row("gradients", "4 P", MOMENTS if stays else ["end", "update"])
    if stays and s.compile and not ddp:  # compiled, they come all at once
        row("gradients of a micro-step", "4 P", ["end"])
    # of the tied embedding: the head's, the tokens', their sum
    row("gradients of embedding", "4 V C", ["block"], end="12 V C" if stays else "8 V C")
    if s.bytes == 2:
        # Autograd keeps them until they are used. Eager autocast, also of blocks that are computed
        # again, keeps all until the loss is there; those of a replaced MLP it does not see.
        copies = "4 M /3" if s.mlp_used == "fp8" else "2 M"
        cached = "0" if s.compile else copies if s.mlp_used == "plain" else "2 M /3"
        if s.model.activation_checkpointing:
            row("16-bit copies of matrices", cached, ["loss"], block=f"{copies} /{s.model.n_layer}")
        else:
            row("16-bit copies of matrices", copies, KEPT)


def activation_rows(s, row):
    """What the forward pass keeps for the backward; if checkpointed, what is computed again."""
    again, e = s.model.activation_checkpointing, s.bytes
    for label, formula in block_activations(s):
        if again:  # one block at a time
            row(label, formula, ["block"])
        else:
            row(label, " + ".join(f"{term} L" for term in formula.split(" + ")), KEPT)
    if again:
        row("inputs of the blocks", f"{s.stream} N C L", KEPT)
    row("gradients of activations", gradients_in_flight(s), ["block"])
    if s.model.document_mask:
        row("document mask", "N T", KEPT)
    # compiled and checkpointed, it is computed again with the last block
    each = 4 if s.widens else 0 if s.compile and again else s.stream
    row("input of last LayerNorm", f"{each} N C", ["loss", "head"])
    stays = f"{e} N C" if s.head_used == "plain" else "0"
    row("input of the head", f"{e + 4 * s.widens} N C", ["loss"], head=stays)


def block_activations(s):
    """[(label, formula)] of what one block keeps."""
    e, scores = s.bytes, s.model.attention == "math"
    # compiled: the stream or, of a 32-bit one, what is normalised already
    norm, mlp = 4 if s.widens else s.stream, 1 if s.mlp_used == "fp8" else e
    yield "LayerNorm inputs, statistics", f"{2 * norm} N C + 16 N"
    yield "LayerNorm outputs", f"{e + mlp} N C"
    yield "queries, keys, values", f"{3 * e} N C"
    yield "attention output", f"{e} N C"
    if scores:  # probabilities, and these rounded; compiled, scores and probabilities
        yield "attention T x T scores", f"{6 if s.widens else 2 * e if s.compile else e} H N T"
    else:
        yield "attention log-sum-exp", "4 H N"
    if not scores and s.model.document_mask and not s.compile:
        yield "attention mask, numbers", f"{e} N T"
    yield "MLP before GELU", f"{4 * e} N C"
    yield "MLP after GELU", f"{4 * mlp} N C"


def gradients_in_flight(s):
    """Where a block's backward holds most, beyond what the forward pass kept."""
    e, H, T, C = s.bytes, s.model.n_head, s.seq_len, s.model.n_embd
    residual = s.stream + e * (s.stream != e)  # of the stream, and its rounded copy for the MLP
    if s.mlp_used == "fp8":  # of both sides of GELU, one in 8 bits twice, as is the incoming one
        mlp = 5 * e + 10 + residual
    else:  # of both sides of GELU, whose output is freed by then, but for the fused MLP's
        mlp = 4 * e + residual + e * (s.mlp_used == "fused")
    # in softmax: of both its sides; freed are the MLP's part and the rounded probabilities
    each, freed = 6 if s.widens else 2 * e, 8 * e + (4 if s.widens else s.stream) - residual
    if s.model.attention == "math" and each * H * T - freed * C > mlp * C:
        return f"{each} H N T + {-freed} N C"
    return f"{mlp} N C"


def head_rows(s, row):
    """Logits, rounded copy and gradients of the head, as lab.kernels.cross_entropy holds them."""
    e, used, cuda, V = s.bytes, s.head_used, s.device_type == "cuda", s.model.padded_vocab_size
    if e == 2:  # in 8 bits it is there twice
        row("rounded copy of the head", "2 V C", ["loss"] + ["head"] * (used == "plain"))
    if used == "plain":
        # Compiled, the gradient is written over them. Where products want rows of whole 16 bytes
        # and get others, torch.compile pads on GPUs: a copy of them, or of the head if that costs
        # less.
        unpadded = s.compile and cuda and e * V % 16 > 0
        copied = unpadded and s.model.n_embd > PADDING_PAYS
        if not s.compile:  # and in 32 bits, and log-softmax; then that, its gradient, theirs
            row("logits", "8 N V" if e == 4 else "10 N V", ["loss"], head="12 N V")
        else:
            row("logits", f"{e} N V", ["loss"], head=f"{2 * e if copied else e} N V")
        if unpadded and not copied:
            row("head in padded rows", f"{2 * e} V C", ["loss", "head"])
        return
    if used == "fp8":
        row("8-bit input of the head", "N C", ["loss"])
    # in 8 bits also two gradients, of which those of a chunk stay while the next are made
    several = s.letters["N"] > s.letters["n"]
    row("logits, in chunks", f"{(6 if several else 4) if used == 'fp8' else e} n V", ["loss"])
    # when the backward pass begins, they are scaled
    row("gradient of the head's input", f"{e} N C", ["loss"], head=f"{2 * e} N C")
    row("gradient of the head", "4 V C", ["loss"], head="8 V C")
    if used == "fp8" or s.precision != "bf16" or not cuda:  # a bf16 product is added in place
        row("the same, not yet added", "4 V C", ["loss"])


def totals(rows):
    """{moment: bytes}"""
    return {moment: sum(at[moment] for _, _, at in rows) for moment in MOMENTS}


def peak(s, **instead):
    """(bytes, moment): what torch.cuda.max_memory_allocated says after some steps, and of when."""
    total = totals(ledger(s, **instead))
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

    def short(name):
        return re.sub(r"\W|NVIDIA|TESLA|GEFORCE|RTX", "", name.upper())

    name, size = re.fullmatch(r"(.*?)(\d+(?:\.\d+)? *GI?B)?", text.strip().upper()).groups()
    found = [gpu for gpu in GPUS if short(gpu) == short(name)]
    if not found and (name or not size):
        names = ", ".join(GPUS)
        raise UserError(f"gpu={text} is not one of {names}; a size will do too: --gpu 24GB")
    name = found[0] if found else "a GPU"
    tflops, gib = GPUS.get(name, (None, None))
    return GPU(name, float(re.match(r"[\d.]+", size)[0]) if size else gib, tflops)


def this_gpu(wanted):
    """What training would use here."""
    device = World(wanted).device
    memory = torch.mps.recommended_max_memory() if device.type == "mps" else memory_of(device)[0]
    if memory == math.inf:
        raise UserError("this system does not say how much memory it has; pass --gpu 16GB")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return GPU(f"this machine's {name}", memory / GIB, device=device)


def outside(s):
    """GiB of the process that the allocator does not see."""
    return (CONTEXT_GIB if s.device_type == "cuda" else 0.5) + NCCL_GIB * (s.world_size > 1)


def room(s, gpu):
    """GiB that would be left; negative where it does not fit."""
    return (1 - FRAGMENTS) * gpu.gib - peak(s)[0] / GIB - outside(s)


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
    """speed of one process, by real steps."""
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
        why = f"no forecast: at {MFU:.0%} MFU a micro-step would take {micro_ms:.2g} ms, and one of"
        return (
            None,
            f"{why} less than 1 ms a layer does not fill a GPU; --mfu assumes another share",
        )
    why = f"assuming {mfu:.0%} (--mfu) of {gpu.tflops} TFLOP/s at {flops / 1e6:,.0f} MFLOP a token"
    why += "; what 8 bits gain is not in it" * ("fp8" in (s.head_loss, s.mlp))
    return 1000 * s.letters["N"] / micro_ms, why


def speed(s, cfg, gpu, mfu):
    """(tokens/s of all processes, or None; where that comes from, or why there is none)."""
    n = s.world_size
    many = n * SCALING["less" if s.zero1 or s.grad_accum_steps > 1 else "ddp"] if n > 1 else 1
    found, why = speed_here(s, cfg, gpu) if gpu.device else speed_there(s, gpu, mfu)
    if n == 1 or not found:
        return found, why
    return many * found, f"{why}; {n} GPUs count as {many:.2f} (as measured on four: README)"


# -------------------------------------------------------------------------------------- 4. report


def table(s):
    """Lines of the ledger, a column for each moment."""
    rows, most = ledger(s), peak(s)[0]
    unit, name = (GIB, "GiB") if most >= GIB else (2**20, "MiB")
    yield f"{name:28}" + "".join(f"{moment:>7}" for moment in MOMENTS) + "  bytes"
    for label, formula, at in [*rows, ("all that the allocator holds", "", totals(rows))]:
        if max(at.values()) >= 0.005 * unit:
            yield f"{label:28}" + "".join(f"{at[m] / unit:7.2f}" for m in MOMENTS) + f"  {formula}"


def verdict(s, gpu, cfg):
    """Does it fit, and what else does?"""
    c, sizes = s.model, micro_batches(cfg, s.world_size, s.device_type)
    tokens, left, (most, moment) = s.grad_accum_steps * s.batch_size, room(s, gpu), peak(s)
    other = replace(s, model=replace(c, activation_checkpointing=not c.activation_checkpointing))
    flag = f"{'without' if c.activation_checkpointing else 'with'} --activation_checkpointing"

    def sized(x, b):
        return replace(x, batch_size=b, grad_accum_steps=tokens // b)

    best, also = (next((b for b in sizes if room(sized(x, b), gpu) >= 0), 0) for x in (s, other))
    text = f"batch_size={s.batch_size} " + (
        f"fits, with {left:.1f} GiB left" if left >= 0 else f"does not fit, {-left:.1f} are missing"
    )
    text += (
        f". The peak is {most / GIB:.2f} GiB, {MOMENTS[moment]}; about {outside(s):.1f} GiB are "
    )
    text += f"taken outside of PyTorch, {FRAGMENTS:.0%} of {gpu.gib:.1f} by gaps between tensors. "
    if best == also == 0:
        one, other_one = (peak(sized(x, 1))[0] / GIB for x in (s, other))
        fixed = peak(sized(s, 1), N=0, n=0)[0] / GIB
        need = math.ceil((min(one, other_one) + outside(s)) / (1 - FRAGMENTS))
        text += f"No batch_size does, as {fixed:.2f} GiB do not depend on it. "
        return text + f"A GPU of {need} GiB would do" + f", {flag}" * (other_one < one) + "."
    text += (
        f"Of those that training tries, up to {sizes[0]}, the largest that fits is {best or 'none'}"
    )
    return text + f"; {flag} it is {also or 'none'}{' too' * (also == best)}."


def report(s, cfg, gpu, reason, args, done):
    """Print the ledger, the verdict and the forecast of the steps that are not done."""

    def say(name, text):
        print(textwrap.fill(text, 100, initial_indent=f"{name:8}", subsequent_indent=" " * 8))

    gpus, mode = s.world_size, "compiled" if s.compile else "eager"
    micro = f"micro-steps {s.grad_accum_steps} x sequences {s.batch_size} x tokens {s.seq_len}"
    micro += f" x GPUs {gpus}" * (gpus > 1)
    say("plan", f"{reason}; {s.precision}, {mode}, {s.optimizer}, on {gpu.name}, {gpu.gib:.4g} GiB")
    say("step", f"{cfg.total_batch_size:,} tokens = {micro}")
    if cfg.parallel == "zero1" and gpus == 1:
        say("note", "zero1 does nothing with one process; --gpus says how many there will be")
    print("", *table(s), "", sep="\n")
    sizes = ", ".join(f"{letter} = {size:,}" for letter, size in s.letters.items())
    say("where", f"{LETTERS}: {sizes}")
    say("memory", verdict(s, gpu, cfg))
    if room(s, gpu) < 0:
        return
    tok_per_s, why = speed(s, cfg, gpu, args.mfu)
    say("speed", f"{tok_per_s:,.0f} tokens/s, {why}" if tok_per_s else why)
    if not tok_per_s:
        return
    left = cfg.max_steps - done
    tokens = left * cfg.total_batch_size
    hours = tokens / tok_per_s / 3600
    took = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    amount = f"{tokens / 1e9:,.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:,.1f}M"
    steps = f"the {left:,} steps left of {cfg.max_steps:,}" if done else f"{left:,} steps"
    say("time", f"{took} for {steps}, {amount} tokens; evaluation and saving come on top")
    if s.device_type == "cuda":
        cost = f"${hours * gpus * args.price:,.2f}"
        say("money", f"{cost}, assuming ${args.price:g} per GPU-hour (--price)")


# -------------------------------------------------------------------------------- 5. command line


def own_flags(argv):
    """(this command's own flags, the rest of argv). Raises UserError for values that cannot be."""
    about = f"{__doc__}\nAll flags of `python train_gpt2.py --help` are understood too."
    parser = argparse.ArgumentParser("python -m lab plan", description=about, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    gpu = f"a GPU that is not here: {', '.join(GPUS)}; a size, 24GB; or both, A100 80GB"
    mfu = f"model FLOPs utilisation to assume of a GPU that is not here ({MFU})"
    price = f"dollars per GPU-hour to assume ({PRICE:g})"
    parser.add_argument("--gpu", help=gpu)
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (1)")
    parser.add_argument("--mfu", type=float, help=mfu)
    parser.add_argument("--price", type=float, default=PRICE, help=price)
    args, rest = parser.parse_known_args(argv)
    if args.gpus < 1:
        raise UserError(f"gpus={args.gpus} must be 1 or more")
    if args.mfu is not None and not 0 < args.mfu <= 1:
        raise UserError(f"mfu={args.mfu:g} must be a share, above 0 and up to 1; --mfu 0.4 is 40 %")
    return args, rest


def choose_precision(model_config, cfg, gpu):
    """Its name. Raises UserError where the GPU, or what else is asked for, does not go with it."""
    name, without_bf16 = cfg.precision, gpu.name in WITHOUT_BF16
    if gpu.device:
        name = Precision(name, gpu.device).name
    elif name == "auto":
        name = "fp16" if without_bf16 else "bf16"
    elif name == "bf16" and without_bf16:
        raise UserError(f"gpu={gpu.name} has no bf16; leave out --precision, or make it fp16")
    if cfg.parallel == "zero1" and name == "fp16":
        raise UserError("parallel=zero1 does not go with precision=fp16; leave one of them out")
    if cfg.fp8 != "off":
        reason = why_no_fp8(gpu.device) if gpu.device else ""
        if gpu.name in WITHOUT_FP8:
            reason = f"need a newer GPU than {gpu.name}"
        if reason := reason or why_no_fp8_shape(name, model_config):
            raise UserError(f"fp8={cfg.fp8}: 8 bits {reason}; leave --fp8 out")
    return name


def main(argv):
    args, argv = own_flags(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("a plan takes one process: leave out torchrun, and pass --gpus N")
    gpu = named_gpu(args.gpu) if args.gpu is not None else None
    if gpu and not {word.partition("=")[0] for word in argv} & {"--preset", "--resume"}:
        argv = ["--preset", next(iter(PROGRAM.PRESETS)), *argv]  # not what would suit this machine
    reason, model_config, cfg = parse_flags(argv, PROGRAM.PRESETS, __doc__)
    model_config = replace(model_config, vocab_size=vocab_size(model_config, cfg, PROGRAM.PRESETS))
    run_dir = Path(cfg.log_dir) / cfg.run_name
    done = step_of(newest_checkpoint(run_dir)) if cfg.resume else 0
    if done >= cfg.max_steps:
        has = f"{run_dir} has done {done} steps, max_steps={cfg.max_steps}"
        raise UserError(f"{has}; a larger --max_steps goes on")
    gpu = gpu or this_gpu(cfg.device)
    here, device_type = gpu.device, gpu.device.type if gpu.device else "cuda"
    if device_type != "cuda" and args.gpus > 1:
        raise UserError(f"gpus={args.gpus} needs a GPU here, or one that --gpu names")
    head, mlp = replaced(cfg.kernels, cfg.fp8)
    if here and not epilogues_work(here):
        mlp = "plain"
    compiled = cfg.compile and not (here and why_no_compile(here, model_config))
    precision, zero1 = choose_precision(model_config, cfg, gpu), cfg.parallel == "zero1"
    how = cfg.optimizer, precision, compiled, device_type, zero1 and args.gpus > 1, head, mlp
    grad_accum_steps(cfg, cfg.batch_size or 1, args.gpus)  # raises where no micro-batch divides it
    for b in [cfg.batch_size] if cfg.batch_size else micro_batches(cfg, args.gpus, device_type):
        accum = grad_accum_steps(cfg, b, args.gpus)
        s = Setting(model_config, b, cfg.seq_len, accum, args.gpus, *how)
        if room(s, gpu) >= 0:
            break
    report(s, cfg, gpu, reason, args, done)
