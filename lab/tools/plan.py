"""Would it fit, how long would it take, what would it cost? Asked before a run, on any machine.

    python train_gpt2.py --plan                                              # this machine, the preset it would take
    python train_gpt2.py --plan --preset gpt2-xl --plan_card "RTX 4090"      # a card that is not here; needs no GPU, no data
    python train_gpt2.py --plan --preset gpt2-xl --plan_card 24GB --batch_size 4 --activation_checkpointing
    python train_gpt2.py --plan --preset gpt2 --plan_card H100 --plan_gpus 8 --plan_price 2.5

The memory is arithmetic on what autograd keeps: tests/test_plan.py counts it, and holds it against the peaks that
bench/memory.py and bench/ladder.py measured on H200s (2026-11-21 and 22): it is 3 % below them to 0.6 % above, for models
of less than 2 GiB from 8 % below. The speed is measured where the card is, by a few real steps on random tokens; elsewhere
it follows from an assumed MFU.

Shape letters: B sequences of T tokens are the N = B T positions of a micro-batch, C channels, H heads, L layers, V rows of
the head, P parameters.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import os
import re
import shutil
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.data.loader import grad_accum_steps
from lab.data.shards import read_json
from lab.device import (
    MEMORY_GIB,
    PEAK_TFLOPS,
    WITHOUT_FP8,
    Precision,
    is_other_chip,
    memory_of,
    num_params,
    out_of_memory,
    why_no_compile,
    why_no_fp8,
    why_no_fp8_anywhere,
)
from lab.kernels import cross_entropy
from lab.kernels.fused_mlp import MIN_POSITIONS, epilogues_work
from lab.run.checkpoints import newest_step
from lab.run.log import PhaseClock
from lab.run.vitals import check_8_bits, check_compiled, check_config, check_zero1
from train_gpt2 import (
    GPT,
    GPTConfig,
    World,
    make_optimizer,
    parse_args,
    peek,
    train_step,
)

GIB = 2**30
CONTEXT_GIB = 0.7  # assumed: CUDA's context and kernels take the card's memory, but PyTorch's allocator does not see them
NCCL_GIB = 0.5  # assumed: NCCL's buffers, where there are several GPUs; not seen either
FRAGMENTS = 0.05  # share of the card that cannot be handed out; machine.fit_batch_size leaves as much
# several GPUs against as many times one: with DDP at every micro-step, and with zero1 or accumulation, which send less; four
# H200s had 94 to 97 % and 96 to 99 % (README)
SCALING = {"ddp": 0.95, "less": 0.97}
# assumed of a card that is not here, if a micro-step then takes a millisecond a layer or more; in less it waits for kernels
# to be launched: an H200 had 3.6 % at 0.13 ms (4 layers of 256), 28 and 33 % at 0.7 (12 of 768, 4,096 tokens), 42 % at 1.5
MFU = 0.4
# channels from which a product with the logits takes longer than copying them: 2 C FLOPs against 2 x 2 bytes a number, at an
# H200's 989 TFLOP/s and 4.8 TB/s
PADDING_PAYS = 2 * 989 / 4.8
PRICE = 3.0  # assumed: dollars per GPU-hour
MOMENTS = {  # where the peak of a step can lie
    "loss": "while the loss is computed",
    "head": "at the start of the backward pass",
    "block": "in the last block's backward pass",
    "end": "at the end of the backward pass",
    "update": "in the optimizer's step",
}


# ------------------------------------------------------------------------------------------------- 1. the ledger


@dataclass
class Setting:
    """What the memory of a step depends on."""

    model: GPTConfig
    batch_size: int
    seq_len: int
    grad_accum_steps: int = 2
    world_size: int = 1
    optimizer: str = "adamw"
    precision: str = "bf16"  # bf16, fp16, tf32 or fp32
    compile: bool = True
    device_type: str = "cuda"
    zero1: bool = False  # AdamW's state in shares

    @property
    def shares(self):
        return self.world_size if self.zero1 else 1

    @property
    def sends_16_bits(self):
        """The blocks' matrices travel rounded; not quite so many with an 8-bit MLP."""
        return self.precision == "bf16"

    @property
    def positions(self):
        return self.batch_size * self.seq_len

    @property
    def bytes(self):
        """Of a number that a product returns."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def stream_bytes(self):
        """Of a number in the residual stream."""
        return 2 if self.precision == "bf16" and self.model.bf16_residual else 4

    @property
    def widens(self):
        """Autocast on CUDA computes LayerNorm and softmax in 32 bits; eager mode keeps 32-bit copies of what they work on."""
        return self.bytes == 2 and self.device_type == "cuda" and not self.compile

    @property
    def fused_mlp(self):
        return self.model.fused_mlp and not self.fp8_mlp and self.enough_for_mlp

    @property
    def fp8_mlp(self):
        return self.model.fp8_mlp and self.enough_for_mlp

    @property
    def enough_for_mlp(self):
        return self.positions >= MIN_POSITIONS and self.precision == "bf16" and self.device_type == "cuda"

    @property
    def loss_method(self):
        """How head and loss are computed; as cross_entropy.auto_method decides."""
        if self.model.cross_entropy != "auto":
            return self.model.cross_entropy
        if self.positions * self.model.padded_vocab_size * 4 <= 2**26:
            return "plain"
        torch_has_it = hasattr(torch.nn.functional, "linear_cross_entropy") and self.bytes == 4
        return "torch" if torch_has_it and not self.compile else "chunked"


def ledger(s):
    """[(label, how it is computed, {moment: bytes})]: what PyTorch's allocator holds for one process in each moment."""
    rows = []

    def row(label, how, always=0, **at):
        rows.append((label, how, dict.fromkeys(MOMENTS, always) | at))

    state_rows(s, row)
    activation_rows(s, row)
    head_rows(s, row)
    if s.device_type == "cuda":
        row("workspace of cuBLAS", "32 MiB forward, backward" + " and fused MLP" * s.fused_mlp, (64 + 32 * s.fused_mlp) * 2**20)
    return rows


def state_rows(s, row):
    """What does not depend on the micro-batch."""
    c = s.model
    P, matrices = num_params(c)
    row("parameters", f"4 bytes x {P:,}", 4 * P)
    if s.optimizer == "muon":
        row("Muon's momentum, AdamW's two moments", f"4 bytes x {matrices:,}, 8 bytes x the rest", 8 * P - 4 * matrices)
        # the matrices of one shape are one stack: the update before it, itself, four of its size in the iteration
        each = 16 if s.device_type == "cuda" else 24
        row("Muon's work on one stack of matrices", f"{each} bytes x 4 L C C", update=each * matrices // 3)
    elif s.shares > 1:
        again = 4 * matrices * s.sends_16_bits
        row("AdamW's moments: a share", f"8 bytes x P / {s.shares}", 8 * P // s.shares)
        if again:
            row("all bits of the share's matrices", f"4 bytes x {matrices:,} / {s.shares}", again // s.shares)
        each = 2 if again and s.grad_accum_steps == 1 else 4
        row("gradients laid out to be sent", f"{each} bytes x {matrices:,}", update=each * matrices)
    else:
        row("AdamW's two moments", "8 bytes x P", 8 * P)
    ddp = s.world_size > 1 and not s.zero1
    kept = 4 * P if ddp or s.grad_accum_steps > 1 else 0
    where = "in DDP's buckets" if ddp else "summed over micro-steps" if kept else "from the backward pass"
    row("gradients", f"4 bytes x P, {where}", loss=kept, head=kept, block=kept, end=4 * P, update=4 * P)
    if kept and s.compile and not ddp:
        row("gradients of one micro-step", "4 bytes x P: compiled, they come all at once", end=4 * P)
    table = 4 * c.padded_vocab_size * c.n_embd
    row("gradients of the tied embedding", "4 bytes x V C: the head's, the tokens', their sum", block=table,
        end=3 * table if kept else 2 * table)  # fmt: skip
    if s.bytes == 2:
        # Until they are used, autograd keeps them; eager autocast, even if blocks are checkpointed, until the loss is there,
        # but for those of the fused MLP, which it does not see
        all_of_them = 2 * matrices if not s.fp8_mlp else 4 * matrices // 3  # two thirds of the matrices are the MLP's
        again = c.activation_checkpointing
        cached = 0 if s.compile else 2 * matrices // 3 if s.fused_mlp or s.fp8_mlp else all_of_them
        later = all_of_them // c.n_layer if again else all_of_them
        how = f"2 bytes x {matrices:,}" if not s.fp8_mlp else f"2 bytes x {matrices // 3:,}, 1 byte x the MLP's"
        row("16-bit copies of the matrices", how + " / L" * again,
            loss=cached if again else all_of_them, head=0 if again else all_of_them, block=later)  # fmt: skip


def activation_rows(s, row):
    """What the forward pass keeps for the backward pass; under activation checkpointing, what it computes again."""
    c, e, stream, N = s.model, s.bytes, s.stream_bytes, s.positions
    for label, how, size in block_activations(s):
        if c.activation_checkpointing:
            row(label, f"{how}, one block at a time", block=size * N)
        else:
            size *= N * c.n_layer
            row(label, f"{how} x L", loss=size, head=size, block=size)
    if c.activation_checkpointing:
        size = stream * N * c.n_embd * c.n_layer
        row("inputs of the blocks", f"{stream} bytes x N C x L", loss=size, head=size, block=size)
    row("gradients of activations", "the widest that meet, less what is freed by then", block=gradients_in_flight(s) * N)
    if c.document_mask:
        row("document mask", "1 byte x N T", loss=N * s.seq_len, head=N * s.seq_len, block=N * s.seq_len)
    # compiled and checkpointed, it is computed again with the last block
    each = 4 if s.widens else 0 if s.compile and c.activation_checkpointing else stream
    row("input of the last LayerNorm", f"{each} bytes x N C", loss=each * N * c.n_embd, head=each * N * c.n_embd)
    each = e + 4 * s.widens
    row("input of the head", f"{each} bytes x N C", loss=each * N * c.n_embd,
        head=e * N * c.n_embd if s.loss_method == "plain" else 0)  # fmt: skip


def block_activations(s):
    """[(label, how, bytes a position)] of what one block keeps."""
    c, e, C = s.model, s.bytes, s.model.n_embd
    norm = 4 if s.widens else s.stream_bytes  # compiled: the stream, or, of a 32-bit one, what is normalised already
    rows = [
        ("LayerNorm: inputs, mean, deviation", f"2 x {norm} bytes x N C + 16 bytes x N", 2 * norm * C + 16),
        ("LayerNorm: outputs", f"{e} and 1 bytes x N C", (e + 1) * C)
        if s.fp8_mlp
        else ("LayerNorm: outputs", f"2 x {e} bytes x N C", 2 * e * C),
        ("queries, keys, values", f"{e} bytes x 3 N C", 3 * e * C),
        ("attention: output", f"{e} bytes x N C", e * C),
    ]
    if c.attention == "math":
        each = 6 if s.widens else 2 * e if s.compile else e  # probabilities, and rounded; compiled, scores and probabilities
        rows.append(("attention: T x T scores", f"{each} bytes x H N T", each * c.n_head * s.seq_len))
    else:
        rows.append(("attention: log-sum-exp", "4 bytes x H N", 4 * c.n_head))
        if c.document_mask and not s.compile:
            rows.append(("attention: mask as numbers", f"{e} bytes x N T", e * s.seq_len))
    rows.append(("MLP: before GELU", f"{e} bytes x 4 N C", 4 * e * C))
    each = 1 if s.fp8_mlp else e
    rows.append(("MLP: after GELU", f"{each} bytes x 4 N C", 4 * each * C))
    return rows


def gradients_in_flight(s):
    """Bytes a position, on top of what the forward pass kept, where the backward pass of a block holds most."""
    c, e, stream, C = s.model, s.bytes, s.stream_bytes, s.model.n_embd
    residual = (stream + e * (stream != e)) * C  # the gradient of the stream, and its rounded copy for the MLP
    # in GELU's backward pass: gradients of both its sides; its output is used and freed by then, but for the fused MLP,
    # which holds all until its end
    mlp = 4 * e * C + residual + e * C * s.fused_mlp
    if s.fp8_mlp:  # both sides' gradients, one of them in 8 bits twice, as is the incoming one; and the outgoing one
        mlp = (4 * e + 8 + 2 + e) * C + residual
    if c.attention == "sdpa":
        return mlp
    # in softmax's backward pass: gradients of both its sides; freed are the MLP's part and the rounded probabilities
    freed = (9 * e + (4 if s.widens else stream)) * C
    each = 6 if s.widens else 2 * e
    return max(mlp, each * c.n_head * s.seq_len - freed + residual + e * C)


def head_rows(s, row):
    """The head's logits, its rounded copy and its gradients, as cross_entropy.py holds them."""
    method, e, N, C, V = s.loss_method, s.bytes, s.positions, s.model.n_embd, s.model.padded_vocab_size
    if e == 2:
        how = "2 bytes x V C" if method != "fp8" else "1 byte x V C, twice"
        row("rounded copy of the head", how, loss=2 * V * C, head=2 * V * C if method == "plain" else 0)
    if method == "plain" and s.compile:
        # The gradient is written over them. Where products want rows of whole 16 bytes and get others, it is copied into padded
        # ones (torch.compile does that for GPUs alone), unless that takes longer than the product: then the head is, as it
        # seems from two measured peaks
        unpadded = s.device_type == "cuda" and e * V % 16 > 0
        copies = 2 if unpadded and C > PADDING_PAYS else 1
        how = f"{e} bytes x N V, " + ("overwritten by their gradient" if copies == 1 else "and their gradient in padded rows")
        row("logits", how, loss=e * N * V, head=copies * e * N * V)
        if unpadded and copies == 1:
            row("head in padded rows", f"{e} bytes x V C, twice", loss=2 * e * V * C, head=2 * e * V * C)
    elif method == "plain":
        row("logits", "4 bytes x N V: log-softmax, its gradient, theirs", loss=8 * N * V, head=12 * N * V)
    else:
        n, each = min(cross_entropy.CHUNK, N), e
        if method in ("liger", "torch"):  # both take so many positions that their logits are about as large as x
            n = min(N, 1 << (-(-N // -(-V // C)) - 1).bit_length())
            n = N if method == "torch" and s.compile else n  # all chunks are in one graph, and all of their logits are held
        elif method == "fp8":  # and two 8-bit gradients; when the next chunk's are made, those of the last are still there
            each = 6 if N > n else 4
            row("8-bit copy of the head's input", "1 byte x N C", loss=N * C)
        row("logits, in chunks", f"{each} bytes x {n:,} V", loss=each * n * V)
        row("gradient of the head's input", f"{e} bytes x N C, then scaled", loss=e * N * C, head=2 * e * N * C)
        row("gradient of the head", "4 bytes x V C, then scaled", loss=4 * V * C, head=8 * V * C)
        # on CUDA a 16-bit product is added in place; in fp16 the sum is then divided by the loss's scale
        if method == "fp8" or method == "chunked" and (s.precision != "bf16" or s.device_type != "cuda"):
            row("the same, not yet added or scaled", "4 bytes x V C", loss=4 * V * C)


def totals(s):
    """{moment: bytes}"""
    rows = ledger(s)
    return {moment: sum(at[moment] for _, _, at in rows) for moment in MOMENTS}


def peak(s):
    """(bytes: what torch.cuda.max_memory_allocated says after some steps, the moment of that peak)"""
    total = totals(s)
    moment = max(total, key=total.get)
    return total[moment], moment


# --------------------------------------------------------------------------------------------------- 2. the card


@dataclass
class Card:
    name: str
    gib: float  # memory
    tflops: float | None = None  # dense 16-bit peak of a card that is not here, if known
    device: torch.device | None = None  # of one that is


def named_card(text):
    """The Card of "H100", "rtx 4090", "A100 80GB" or "24GB". Raises ValueError for one that machine.py does not list."""
    size = re.search(r"((?:(?<!\S)-)?\d+(?:\.\d+)?) ?gi?b\b", text, re.IGNORECASE)
    name = (text.replace(size[0], " ") if size else text).replace("-", " ").upper()
    words = set(re.sub(r"\b(RTX|GTX)(?=\d)", r"\1 ", name).split())
    known = {card: set(card.upper().split()) for card in MEMORY_GIB}
    found = [card for card in known if known[card] <= words] or [card for card in known if words and words <= known[card]]
    other = is_other_chip(words)
    found = [] if other else found
    if not found and (not size or (words and not other)):
        raise ValueError(f"plan_card={text} is not one of {', '.join(known)}; a size will do too: --plan_card 24GB")
    gib = float(size[1]) if size else MEMORY_GIB[found[0]]
    if gib <= 0:
        raise ValueError(f"plan_card={text} must have some memory: --plan_card 24GB")
    name = f"{found[0]}, {gib:g} GiB" if found else f"a card of {gib:g} GiB"
    return Card(name, gib, PEAK_TFLOPS[found[0]] if found else None)


def this_card(wanted):
    """The Card that training would use here: the GPU, or the memory of a machine without one."""
    device = World(wanted).device
    memory = torch.mps.recommended_max_memory() if device.type == "mps" else memory_of(device)[0]
    if memory == math.inf:
        raise ValueError("--plan cannot find out how much memory this machine has; pass --plan_card 16GB")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this machine's {device.type.upper()}"
    return Card(f"{name}, {memory / GIB:.1f} GiB", memory / GIB, device=device)


def micro_batches(cfg, world_size, device_type):
    """Sequences per micro-step, largest first: those that machine.fit_batch_size tries."""
    each = cfg.total_batch_size // (cfg.seq_len * world_size)
    most = 64 if device_type == "cuda" else max(1, 16384 // cfg.seq_len)
    return [b for b in range(min(most, each), 0, -1) if each % b == 0]


def outside(s):
    """GiB of the process that the allocator does not see."""
    return (CONTEXT_GIB if s.device_type == "cuda" else 0.5) + NCCL_GIB * (s.world_size > 1)


def room(s, card):
    """GiB that would be left; negative where it does not fit."""
    return (1 - FRAGMENTS) * card.gib - peak(s)[0] / GIB - outside(s)


# ----------------------------------------------------------------------------------------------------- 3. speed


def probe(s, cfg, device, seconds=3.0):
    """Train on random tokens for about so long with the trainer's own parts, after two steps that do not count.

    Returns (ms of a micro-step, ms of an update, peak memory in bytes or None where there is no CUDA).
    """
    world, precision, clock = World(str(device)), Precision(s.precision, device), PhaseClock(True, device)
    precision.prepare()
    torch.manual_seed(cfg.seed)
    with device:
        raw_model = GPT(s.model)
        x = torch.randint(s.model.vocab_size, (s.batch_size, s.seq_len))
    optimizer = make_optimizer(raw_model, cfg, device)
    model = torch.compile(raw_model, dynamic=False) if s.compile else raw_model
    accum = min(2, s.grad_accum_steps)
    loader = types.SimpleNamespace(grad_accum_steps=accum, sequence=0, micro_step=0, micro_batch=lambda *_: (x, x, x.numel()),
                                   next_batch=lambda: (x, x, accum * x.numel()))  # fmt: skip
    model = check_compiled(model, raw_model, loader, world, precision, types.SimpleNamespace(say=print))

    def steps(count):
        for _ in range(count):
            train_step(model, optimizer, loader, 0.0, cfg, world, precision, clock)
        world.synchronize()
        return clock.read()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps(1)
    once = sum(steps(1).values())
    ms = steps(max(1, min(20, int(1000 * seconds / once))))
    measured = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return (ms["data_ms"] + ms["forward_ms"] + ms["backward_ms"]) / accum, ms["optimizer_ms"], measured


def speed(s, cfg, card, mfu):
    """(tokens/s of all processes, or None; where that number comes from, or why there is none). mfu: as asked for, or None"""
    c = s.model
    # as metrics.Meter counts: 6 for each weight that multiplies, and attention without causality
    flops = 6 * (num_params(c)[0] - c.block_size * c.n_embd) + 12 * c.n_layer * c.n_embd * s.seq_len
    many, scaled = 1, ""
    if s.world_size > 1:
        many = SCALING["less" if s.zero1 or s.grad_accum_steps > 1 else "ddp"]
        scaled = f", and {many} of {s.world_size} times one GPU (as four H200s: README)"
    if card.device is None:
        if card.tflops is None or s.bytes == 4:
            return None, "no forecast: only the 16-bit peak of a card with a name is known, as in --plan_card H100"
        if c.activation_checkpointing:  # each block's forward pass twice
            flops += 2 * num_params(c)[1] + 4 * c.n_layer * c.n_embd * s.seq_len
        asked, mfu = mfu, mfu or MFU
        micro_ms = 1000 * s.positions * flops / (mfu * card.tflops * 1e12)
        if not asked and micro_ms < c.n_layer:
            return None, (f"no forecast: at {mfu:.0%} of {card.tflops} TFLOP/s a micro-step would take {micro_ms:.2g} ms, and "
                          "one of less than 1 ms a layer does not fill a card (4 layers of 256 channels reached 3.6 % of an "
                          "H200); --plan_mfu assumes another share")  # fmt: skip
        why = f"assuming {mfu:.0%} (--plan_mfu) of {card.tflops} TFLOP/s at {flops / 1e6:,.0f} MFLOP a token{scaled}"
        why += "; what 8 bits gain is not in it" * (c.fp8_mlp or c.cross_entropy == "fp8")
        return mfu * card.tflops * 1e12 / flops * s.world_size * many, why
    most = {"cpu": 2e12, "mps": 2e13}.get(card.device.type, math.inf)  # FLOP; some 20 seconds of a laptop
    if 4 * s.positions * flops > most:
        return None, "no forecast: four micro-steps would take too long here; --plan_card names a faster machine"
    try:
        micro_ms, update_ms, measured = probe(s, cfg, card.device)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None, "no forecast: the memory was full when it was tried; something else may be using it"
    why = f"measured now: {micro_ms:,.1f} ms a micro-step, {update_ms:,.1f} ms an update{scaled}"
    why += f"; peak memory {measured / GIB:.2f} GiB" if measured else ""
    return many * 1000 * cfg.total_batch_size / (s.grad_accum_steps * micro_ms + update_ms), why


# ---------------------------------------------------------------------------------------------------- 4. report


def table(s, other, width):
    """Lines of the ledger at its peak; beside it that of the other choice of activation checkpointing, at its own. In less
    than the 108 columns that they take, they leave out how each is computed."""
    (most, moment), (other_most, other_moment) = peak(s), peak(other)
    unit, name = (GIB, "GiB") if most >= GIB else (2**20, "MiB")
    rows = {label: [how, at[moment], 0] for label, how, at in ledger(s)}
    for label, how, at in ledger(other):
        rows.setdefault(label, [how, 0, 0])[2] = at[other_moment]
    rows = {label: row for label, row in rows.items() if max(row[1:]) >= 0.005 * unit}
    rows["peak of PyTorch's allocator"] = [MOMENTS[moment], most, other_most]
    lines = [(f"{'':36}", f"{'computed as':50}", f"{name:>8} {name + ' *':>10}")]
    lines += [(f"{at:36}", f"{how:50}", f"{a / unit:8.2f} {b / unit:10.2f}") for at, (how, a, b) in rows.items()]
    lines = [f"{at}  {how} {sizes}" if width >= 108 else f"{at} {sizes}" for at, how, sizes in lines]
    lines.insert(-1, "-" * len(lines[0]))
    flag = "with" if other.model.activation_checkpointing else "without"
    lines += textwrap.wrap(f"* {flag} --activation_checkpointing; that peak is {MOMENTS[other_moment]}", width)
    rest = ", ".join(f"{value / unit:.2f} {MOMENTS[m]}" for m, value in totals(s).items() if m != moment)
    rest += "; a terminal of 108 columns also shows how each is computed" * (width < 108)
    return [*lines, *textwrap.wrap(f"not the peak: {rest}", width)]


def verdict(s, other, card, cfg):
    """Does it fit, and what else does?"""
    sizes = micro_batches(cfg, s.world_size, s.device_type)
    accum = s.grad_accum_steps * s.batch_size
    best, other_best = (
        next((b for b in sizes if room(dataclasses.replace(x, batch_size=b, grad_accum_steps=accum // b), card) >= 0), 0)
        for x in (s, other)
    )
    unseen = "Python" if s.device_type != "cuda" else "the CUDA context" + " and NCCL" * (s.world_size > 1)
    left = room(s, card)
    answer = f"fits, with {left:.1f} GiB left" if left >= 0 else f"does not fit, {-left:.1f} GiB are missing"
    flag = "with" if other.model.activation_checkpointing else "without"
    text = f"batch_size={s.batch_size} {answer}. Beside the {peak(s)[0] / GIB:.2f} GiB above, about {outside(s):.1f} GiB are "
    text += f"for {unseen}, and {FRAGMENTS:.0%} of {card.gib:.1f} GiB for gaps between tensors. "
    if best == other_best == 0:
        fixed = sum(at["update"] for label, _, at in ledger(s) if not label.startswith("Muon's work")) / GIB
        peaks = [peak(dataclasses.replace(x, batch_size=1, grad_accum_steps=accum))[0] / GIB for x in (s, other)]
        need = math.ceil((min(peaks) + outside(s)) / (1 - FRAGMENTS))
        way = f", {flag} --activation_checkpointing" * (peaks[1] < peaks[0])
        return f"{text}No batch_size does, as {fixed:.1f} GiB do not depend on it. A card of {need} GiB would do{way}."
    largest = f"The largest batch_size that does is {best}" if best else "No batch_size does"
    if s.batch_size > best and left >= 0:  # larger than those that are tried
        return f"{text}With --batch_size left out, {best} is taken."
    also = f"{other_best or 'none'}{' too' * (other_best == best)}"
    return f"{text}{largest}{' (more are not tried)' * (best == sizes[0])}; {flag} --activation_checkpointing it is {also}."


def report(s, cfg, card, reason, mfu, price, done=0):
    """Print the ledger, the verdict and the forecast of the steps that are not done."""
    c, gpus = s.model, s.world_size
    other = dataclasses.replace(s, model=dataclasses.replace(c, activation_checkpointing=not c.activation_checkpointing))
    how = f"{s.precision}, {'compiled' if s.compile else 'eager'}, {s.optimizer}"
    micro = f"micro-steps {s.grad_accum_steps} x sequences {s.batch_size} x tokens {s.seq_len}" + f" x GPUs {gpus}" * (gpus > 1)
    sizes = dict(N=s.positions, C=c.n_embd, H=c.n_head, L=c.n_layer, T=s.seq_len, V=c.padded_vocab_size, P=num_params(c)[0])
    print(f"preset {cfg.preset}: {reason}; {how}, on {card.name}")
    print(f"a step: {cfg.total_batch_size:,} tokens = {micro}")
    print(", ".join(f"{name} = {size:,}" for name, size in sizes.items()) + "\n")
    if cfg.zero1 and gpus == 1:
        print("note: zero1 does nothing with one process; --plan_gpus says how many there will be\n")
    width = min(108, shutil.get_terminal_size((108, 24)).columns)
    print("\n".join(table(s, other, width)) + "\n")

    def say(name, text):
        print(textwrap.fill(text, width, initial_indent=f"{name:8}", subsequent_indent=" " * 8))

    say("memory", verdict(s, other, card, cfg))
    tok_per_s, why = speed(s, cfg, card, mfu) if room(s, card) >= 0 else (None, "")
    if why:
        say("speed", f"{tok_per_s:,.0f} tokens/s, {why}" if tok_per_s else why)
    if tok_per_s:
        left = cfg.max_steps - done
        tokens = left * cfg.total_batch_size
        hours = tokens / tok_per_s / 3600
        took = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
        amount = f"{tokens / 1e9:,.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:,.1f}M"
        steps = f"the {left:,} steps left of {cfg.max_steps:,}" if done else f"{left:,} steps"
        say("time", f"{took} for {steps}, {amount} tokens; evaluation and saving come on top")
        if s.device_type == "cuda":
            dollars = PRICE if price is None else price
            say("money", f"${hours * gpus * dollars:,.2f}, assuming ${dollars:g} per GPU-hour (--plan_price)")
    if mfu and (card.device or not tok_per_s):
        say("note", "--plan_mfu had no effect: " + ("the speed is measured here" if card.device else "there is no forecast"))
    if price is not None and (s.device_type != "cuda" or not tok_per_s):
        say("note", "--plan_price had no effect: " + ("there is no forecast" if s.device_type == "cuda" else "no GPU is used"))


# ----------------------------------------------------------------------------------------------- 5. command line


def parse_plan(argv):
    """(the flags of --plan, the rest of argv). Raises ValueError for bad ones."""

    def number(least, kind):
        def parse(text):
            with contextlib.suppress(ValueError):
                if least <= kind(text) < math.inf:
                    return kind(text)
            raise argparse.ArgumentTypeError(f"{text} must be {'an integer' if kind is int else 'a number'}, {least} or more")

        return parse

    def refuse(message):
        raise ValueError(f"{message}; `python train_gpt2.py --plan --help` lists the flags")

    parser = argparse.ArgumentParser(
        prog="train_gpt2.py --plan", usage="%(prog)s [flags]", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog="All flags of `train_gpt2.py --help` are understood too.",
    )  # fmt: skip
    parser.error = refuse
    parser.add_argument("--plan", action="store_true", help="print memory, time and money of a run instead of beginning it")
    flags = ["--plan"]
    for name, kind, default, text in (
        ("card", str, None, f"a card that is not here: {', '.join(MEMORY_GIB)}; or a size, 24GB; or both, \"A100 80GB\""),
        ("gpus", number(1, int), 1, "how many of them (1)"),
        ("mfu", number(0.01, float), None, f"model FLOPs utilisation to assume where nothing can be measured ({MFU})"),
        ("price", number(0, float), None, f"dollars per GPU-hour to assume ({PRICE:g})"),
    ):
        flags.append(f"--plan_{name}")
        parser.add_argument(f"--plan_{name}", f"--plan-{name}", type=kind, default=default, metavar=name.upper(), help=text)
    args, rest = parser.parse_known_args(argv)
    if not args.plan:
        flag = next(word for word in argv if word.startswith("--plan")).partition("=")[0]
        raise ValueError(f"{flag} belongs to --plan; add --plan")
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--plan")):
        near = difflib.get_close_matches(flag, flags, 1, 0.8)
        refuse(f"{flag} is no flag of --plan" + "".join(f", perhaps {name} is meant" for name in near))
    return args, rest


def run(argv):
    """`train_gpt2.py --plan ...`. Raises ValueError or FileNotFoundError for what cannot be planned."""
    args, argv = parse_plan(argv)
    if args.plan_mfu and args.plan_mfu > 1:
        raise ValueError(f"plan_mfu={args.plan_mfu:g} is a fraction and must not be above 1; pass --plan_mfu 0.4 for 40 %")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--plan takes one process: `python train_gpt2.py --plan --plan_gpus N`, without torchrun")
    if args.plan_card == "":
        raise ValueError("plan_card is empty; name a card, or leave --plan_card out to plan for this machine")
    card = named_card(args.plan_card) if args.plan_card else None
    if card and not peek(argv, "preset", "resume"):
        argv = ["--preset", "gpt2", *argv]  # not what would suit this machine
    reason, model_config, cfg = parse_args(argv)
    check_config(model_config, cfg)
    manifest = Path(cfg.data) / "manifest.json"
    if manifest.exists() and not cfg.resume and not peek(argv, "vocab_size"):
        model_config = dataclasses.replace(model_config, vocab_size=read_json(manifest, "vocab_size")["vocab_size"])
    run_dir = Path(cfg.log_dir) / cfg.run_name
    done = newest_step(run_dir) if cfg.resume else 0
    if done >= cfg.max_steps:
        raise ValueError(f"{run_dir} has done {done} steps, max_steps={cfg.max_steps}; a larger --max_steps goes on")
    grad_accum_steps(cfg, cfg.batch_size or 1, args.plan_gpus)  # raises where no micro-batch divides the step
    if card:
        device_type, compiled = "cuda", cfg.compile
        without_bf16 = card.name.startswith(("V100", "T4"))
        precision = cfg.precision if cfg.precision != "auto" else "fp16" if without_bf16 else "bf16"
        if precision == "bf16" and without_bf16:
            raise ValueError(f"plan_card={args.plan_card} has no bf16; leave out --precision, or pass --precision fp16")
        if card.name.split(",")[0] in WITHOUT_FP8 and (model_config.fp8_mlp or model_config.cross_entropy == "fp8"):
            raise ValueError(f"plan_card={args.plan_card} has no 8-bit products; leave out --fp8_mlp and --cross_entropy fp8")
        check_zero1(cfg, precision, args.plan_gpus)
        check_8_bits(model_config, why_no_fp8_anywhere(precision, model_config, cfg))
    else:
        card = this_card(cfg.device)
        precision = Precision(cfg.precision, card.device)
        check_8_bits(model_config, why_no_fp8(precision, model_config, cfg))
        device_type, precision = card.device.type, precision.name
        if device_type != "cuda" and args.plan_gpus > 1:
            raise ValueError(f"plan_gpus={args.plan_gpus} needs a GPU here, or one that --plan_card names")
        compiled = cfg.compile and not why_no_compile(card.device)
        fused = model_config.fused_mlp and epilogues_work(card.device)  # as train_gpt2.prepare decides
        model_config = dataclasses.replace(model_config, fused_mlp=fused)
    sizes = [cfg.batch_size] if cfg.batch_size else micro_batches(cfg, args.plan_gpus, device_type)
    settings = [
        Setting(
            model_config, b, cfg.seq_len, grad_accum_steps(cfg, b, args.plan_gpus), args.plan_gpus, cfg.optimizer, precision,
            compiled, device_type, cfg.zero1,
        ) for b in sizes
    ]  # fmt: skip
    chosen = next((s for s in settings if room(s, card) >= 0), settings[-1])
    report(chosen, cfg, card, reason, args.plan_mfu, args.plan_price, done)
