"""How fast one training step could be on this GPU: its parts measured one by one and added up.

    python bench/floor.py                            # GPT-2 124M, 64 x 1024: two minutes, then our own steps
    python bench/floor.py --step_ms 938 --step_ms_8 744     # steps that were timed before
    python bench/floor.py --preset gpt2-xl --tokens_per_step 131072     # a larger model, in shorter steps
    python bench/floor.py --preset tiny --device cpu --out try.jsonl     # a try; its times mean nothing

The floor of a step of 524,288 tokens is

    micro-steps x [products + attention + (elementwise traffic + logits) at copy speed] + optimizer

products are the layers' and the head's, forward, gradient of the input (dgrad), gradient of the
weight (wgrad), in bf16. Attention is that of the fastest kernel. Elementwise work counts as memory
traffic, each tensor once where one kernel could do it (PASSES says which). The logits are read and
written once, by the loss. The optimizer is clipping and fused AdamW. Not in it, as they could be
hidden or avoided: casts of the weights, bias gradients, sums of gradients over micro-steps, gaps
between kernels. On a GPU that has them, the head's and the MLP's products are also taken in 8 bits,
with the traffic of the casts that this needs. The sum is made twice: from each part's own median
time, and from all products and attentions run back to back for some seconds, in which a GPU that is
limited by its power lowers its clock. Operands are random numbers (zeros cost less power) and
change from call to call. Each part is one line of the file, with its FLOPs, the bytes that must
move, and what bounds it: whichever takes longer, the bytes at copy speed or the FLOPs at the rate
of the 8192^3 product.
"""

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ladder
import numpy as np
import rungs
import torch
import torch.nn as nn
import torch.nn.functional as F
from records import (
    RUNS,
    append_record,
    card_name,
    check_out,
    one_sentence,
    origin,
    random_shards,
    read_records,
)

from lab.cli import UserError, command, parse
from lab.files import check_writable
from lab.kernels.fused_mlp import MIN_POSITIONS
from lab.world import World
from train_gpt2 import GPT, make_optimizer

WAYS = ("forward", "dgrad", "wgrad")  # of a product: output, gradient of the input, of the weight
BACKENDS = ("cudnn", "flash", "efficient", "math")  # attention's kernels

# Elementwise traffic of a layer, in passes over one (N, C) tensor of 2 bytes a number.
PASSES = {
    # twice a layer: x and what is added to it are read, the new x and its norm are written
    "residual and norm, forward": 2 * 4,
    # twice a layer: the norm's gradient, x and the stream's gradient are read, its new one is
    # written
    "residual and norm, backward": 2 * 4,
}
GELU = {  # 4 C wide
    # its input is written for the backward pass, and read there
    "inside the products": {"GELU's input": 2 * 4},
    # in and out; then the output's gradient and the input in, the gradient out
    "in its own kernels": {"forward": 2 * 4, "backward": 3 * 4},
    # in the kernels that cast for 8-bit products, each of which reads 16 bits and writes 8 twice
    "in the casts to 8 bits": {
        "x": 1 + 1,
        "GELU": 4 + 4,
        "the output's gradient": 1 + 1,
        "the hidden gradient, with GELU's input": 2 * 4 + 4,
    },
}
IN_8_BITS = ("fc", "fc2", "head")
BACK_TO_BACK = {
    (): "micro-step's products and",
    IN_8_BITS: "micro-step's products, fc, fc2 and head in 8 bits, and",
}
ONCE = 7  # a micro-step: embedding out, its gradient in; last norm in and out, back two in, one out


@dataclass
class Config:
    preset: Literal[tuple(rungs.SHAPES)] = "gpt2"  # shape of the model
    batch_size: int = 0  # sequences per micro-step; 0 is the ladder's (64 for gpt2)
    tokens_per_step: int = 0  # 0 is the ladder's (524,288 for gpt2)
    seconds: float = 3.0  # of the runs without a pause
    pause: float = 2.0  # seconds of rest before and after the first of those
    step_ms: float = 0.0  # our own step, timed before; 0 times it now
    step_ms_8: float = 0.0  # the same with the head and the MLP in 8 bits
    device: str = "auto"  # cuda, cuda:N or cpu
    commit: str = ""  # noted in the records where git is not at hand
    out: str = str(RUNS / "floor.jsonl")  # file of measurements


# ------------------------------------------------------------------------------------- arithmetic


def products(config):
    """{name: (inputs, outputs, how many of them in a model)} of its linear layers."""
    C, L, V = config.n_embd, config.n_layer, config.padded_vocab_size
    blocks = {"qkv": (C, 3 * C, L), "proj": (C, C, L), "fc": (C, 4 * C, L), "fc2": (4 * C, C, L)}
    return blocks | {"head": (C, V, 1)}


def traffic(config, positions, gelu):
    """(bytes of elementwise work, bytes of the loss on its logits) of a micro-step; gelu: one of
    GELU."""
    passes = config.n_layer * sum((PASSES | GELU[gelu]).values()) + ONCE
    return passes * positions * config.n_embd * 2, 2 * positions * config.padded_vocab_size * 2


def isolated_ms(ms, config, in_8_bits=()):
    """(products and attention of a micro-step from their own times {op: ms}, the fastest
    attention); in_8_bits names products. KeyError if a part was not measured."""
    sizes = {f"fp8 {p}" if p in in_8_bits else p: n for p, (_, _, n) in products(config).items()}
    total = sum(n * ms[f"{name} {way}"] for name, n in sizes.items() for way in WAYS)
    pairs = {b: (f"attention {b} forward", f"attention {b} backward") for b in BACKENDS}
    sums = {b: ms[f] + ms[w] for b, (f, w) in pairs.items() if f in ms and w in ms}
    if not sums:
        raise KeyError("attention")
    best = min(sums, key=sums.get)
    return total + config.n_layer * sums[best], best


def floors(config, positions, ms, round_ms, bytes_per_s, micro_steps, in_8_bits=()):
    """{what: milliseconds of a step} for each way of adding up; without those of round_ms, back to
    back, if it is None. KeyError if a part was not measured."""
    found, (alone, best) = {}, isolated_ms(ms, config, in_8_bits)
    if not bytes_per_s:
        raise KeyError("copy")
    for source, parts_ms in (("parts alone", alone), ("back to back", round_ms)):
        for gelu in GELU:
            if parts_ms is None or bool(in_8_bits) != (gelu == "in the casts to 8 bits"):
                continue
            moving_ms = 1000 * sum(traffic(config, positions, gelu)) / bytes_per_s
            value = micro_steps * (parts_ms + moving_ms) + ms["AdamW"] + ms["clip"]
            found[f"floor: {source}, {best} attention, GELU {gelu}"] = value
    return found


# -------------------------------------------------------------------------------------- measuring


def median_ms(calls, device, repeats=30):
    """Median milliseconds of a call; the calls, which differ in their operands, take turns. A tenth
    of a second warms up."""
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        for call in calls:
            call()
        wait(device)
    moments = [ladder.moment(device)]
    for i in range(repeats):
        calls[i % len(calls)]()
        moments.append(ladder.moment(device))
    wait(device)
    return float(np.median(ladder.milliseconds(moments, device)))


def sustained_ms(calls, device, seconds):
    """Mean milliseconds of a round of all calls, in the last third of so many seconds of nothing
    else."""
    moments, t0 = [], time.perf_counter()
    while time.perf_counter() - t0 < seconds or len(moments) < 4:
        for call in calls:
            call()
        moments.append(ladder.moment(device))
        if device.type == "cuda" and len(moments) > 2:
            moments[-3].synchronize()  # the host stays two rounds ahead, no more
    wait(device)
    ms = ladder.milliseconds(moments, device)
    return float(np.mean(ms[-max(1, len(ms) // 3) :]))


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Parts:
    """Everything that is measured: each method makes the operands of an operation and returns
    (calls, FLOPs, bytes). Two sets of operands of each, more than 100 MB at 64 x 1024: what a call
    leaves in the L2 cache does not help the next."""

    def __init__(self, config, batch_size, seq_len, device):
        self.config, self.device, self.B, self.T = config, device, batch_size, seq_len
        self.N = batch_size * seq_len

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def product(self, name, way):
        """A linear layer's."""
        inputs, outputs, _ = products(self.config)[name]
        calls = []
        for _ in range(2):
            x, w, y = (
                self.random(*s) for s in ((self.N, inputs), (outputs, inputs), (self.N, outputs))
            )
            a, b, out = {"forward": (x, w.t(), y), "dgrad": (y, w, x), "wgrad": (y.t(), x, w)}[way]
            calls.append(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        moved = 2 * (self.N * inputs + inputs * outputs + self.N * outputs)
        return calls, 2 * self.N * inputs * outputs, moved

    def fp8(self, name, way):
        """The same with both operands in 8 bits (4 of exponent), already scaled and in the layout
        that the product wants, summed the fast way and written in 16 bits, which makes it a
        ceiling. The trainer's gradients have 5 bits of exponent, its sums are full ones, and its
        gradients of weights are written in 32 bits."""
        inputs, outputs, _ = products(self.config)[name]
        rows, inner, columns = {
            "forward": (self.N, inputs, outputs),
            "dgrad": (self.N, outputs, inputs),
            "wgrad": (outputs, self.N, inputs),
        }[way]
        scale, calls = torch.ones((), device=self.device), []
        how = dict(out_dtype=torch.bfloat16, use_fast_accum=True)
        for _ in range(2):
            a, b = (self.random(n, inner).to(torch.float8_e4m3fn) for n in (rows, columns))
            calls.append(lambda a=a, b=b: torch._scaled_mm(a, b.t(), scale, scale, **how))
        return calls, 2 * rows * inner * columns, (rows + columns) * inner + 2 * rows * columns

    def attention(self, backend, way):
        """Causal, as the model calls it, on views of one (B, T, 3 C) tensor; half of the scores
        count."""
        C, H = self.config.n_embd, self.config.n_head
        name = "MATH" if backend == "math" else f"{backend}_attention".upper()
        calls = []
        for _ in range(2):
            parts = self.random(self.B, self.T, 3 * C).split(C, dim=2)
            q, k, v = (
                t.view(self.B, self.T, H, C // H).transpose(1, 2).requires_grad_() for t in parts
            )

            def forward(q=q, k=k, v=v):
                with ladder.attention_kernel(name):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            if way == "forward":
                calls.append(forward)
                continue
            y = forward()
            dy = torch.randn_like(y)
            calls.append(
                lambda y=y, dy=dy, at=(q, k, v): torch.autograd.grad(y, at, dy, retain_graph=True)
            )
        flops, tensor = 2 * self.N * self.T * C, 2 * self.N * C
        # two products forward; five backward, as the scores are computed again
        return (
            (calls, flops, 4 * tensor) if way == "forward" else (calls, 5 * flops // 2, 8 * tensor)
        )

    def cube(self, n):
        operands = [[self.random(n, n) for _ in range(3)] for _ in range(2)]
        calls = [lambda a=a, b=b, out=out: torch.mm(a, b, out=out) for a, b, out in operands]
        return calls, 2 * n**3, 3 * 2 * n * n

    def copy(self, size):
        a, b = (torch.randint(256, (size,), dtype=torch.uint8, device=self.device) for _ in "ab")
        return [lambda: a.copy_(b), lambda: b.copy_(a)], 0, 2 * size

    def optimizer(self, cfg, what):
        """AdamW: 14 operations a parameter, of which weight and both moments are read and written,
        the gradient read. Clipping: the gradient is read for its norm, then read and written to be
        scaled."""
        model = GPT(self.config).to(self.device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        n = sum(p.numel() for p in model.parameters())
        if what == "AdamW":
            return [make_optimizer(model, cfg, self.device).step], 14 * n, 7 * 4 * n
        return [lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)], 3 * n, 3 * 4 * n

    def micro_step(self, backend, in_8_bits=()):
        """Calls of all products and attentions of a micro-step, forward and then backward."""
        parts = {("attention", w): self.attention(backend, w)[0] for w in ("forward", "backward")}
        for name in products(self.config):
            product = self.fp8 if name in in_8_bits else self.product
            parts |= {(name, way): product(name, way)[0] for way in WAYS}
        order, layers = [], range(self.config.n_layer)
        for layer in layers:
            names = ("qkv", "attention", "proj", "fc", "fc2")
            order += [(parts[name, "forward"], layer) for name in names]
        order += [(parts["head", way], 0) for way in WAYS]
        for layer in layers:
            for name in ("fc2", "fc", "proj", "attention", "qkv"):
                ways = ("backward",) if name == "attention" else ("dgrad", "wgrad")
                order += [(parts[name, way], layer) for way in ways]
        return [calls[layer % 2] for calls, layer in order]


def measure(parts, cfg, train_config, write):
    """Measure every part and give it to write(op, ms, flops, bytes, ...) at once. Returns ({op: ms}
    of those that worked, bytes per second of a copy)."""
    device, ms, rates = parts.device, {}, {}

    def one(op, make, seconds=0):
        ladder.forget(device)
        try:
            calls, flops, moved = make()
            sustained = sustained_ms(calls, device, seconds) / len(calls) if seconds else None
            took = ms[op] = sustained or median_ms(calls, device)
        except Exception as error:  # whatever this GPU or this torch does not have
            write(op, error=one_sentence(error))
            if ladder.gpu_lost(device):
                raise UserError(f"{op} has left the GPU unusable for this process") from error
            return
        if op.startswith("copy"):
            rates["bytes"] = 1000 * moved / took
        if op == cube:
            rates["flop"] = 1000 * flops / took
        memory = len(rates) == 2 and moved / rates["bytes"] >= flops / rates["flop"]
        write(op, took, flops, moved, ["compute", "memory"][memory] if len(rates) == 2 else None)

    cuda = device.type == "cuda"
    size = 8192 if cuda else 256
    cube = f"{size}^3"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 2**28
    gib = 2 ** int(math.log2(min(2**32, memory / 8)))
    one(f"copy {gib / 2**30:g} GiB", lambda: parts.copy(gib))
    time.sleep(cfg.pause)  # a rested GPU: what a short benchmark would show
    one(cube, lambda: parts.cube(size))
    one(f"{cube} for {cfg.seconds:g} s", lambda: parts.cube(size), cfg.seconds)
    time.sleep(cfg.pause)
    for name in products(parts.config):
        for way in WAYS:
            one(f"{name} {way}", lambda name=name, way=way: parts.product(name, way))
    for backend in BACKENDS:
        for way in ("forward", "backward"):
            one(f"attention {backend} {way}", lambda b=backend, way=way: parts.attention(b, way))
    for what in ("AdamW", "clip"):
        one(what, lambda what=what: parts.optimizer(train_config, what))
    if cuda and torch.cuda.get_device_capability(device) >= (8, 9):
        for name in IN_8_BITS:
            for way in WAYS:
                one(f"fp8 {name} {way}", lambda name=name, way=way: parts.fp8(name, way))
    return ms, rates.get("bytes")


def back_to_back(parts, backend, seconds, write, in_8_bits=()):
    """Milliseconds of a micro-step's products and attentions, run for so long without a pause; None
    if that fails."""
    what, took = f"{BACK_TO_BACK[in_8_bits]} {backend} attention, {seconds:g} s", None
    try:
        ladder.forget(parts.device)
        calls = parts.micro_step(backend, in_8_bits)
        took = sustained_ms(calls, parts.device, seconds)
        for call in calls:  # still warm
            call()
        write(what, took, **ladder.gpu_state(parts.device))
    except RuntimeError as error:  # memory: its operands are all there at once
        write(what, error=one_sentence(error))
    return took


def own_step_ms(cfg, world, eight_bits):
    """Median milliseconds of twenty of our own steps, timed as bench/ladder.py times them."""
    settings = dict(batch_size=cfg.batch_size)
    settings |= {} if world.device.type == "cuda" else dict(compile_mode="none")
    settings |= dict(head="fp8", mlp="fp8") if eight_bits else {}
    case = rungs.Case("floor", cfg.preset, "best", settings, 1337)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, rungs.SHAPES[cfg.preset][0].vocab_size)
        args = ladder.Config(data=folder, device=cfg.device, tokens_per_step=cfg.tokens_per_step)
        return ladder.measure(case, args, world)["median_ms"]


# ---------------------------------------------------------------------------------------- results


def writer(path, **common):
    """write(op, ms, ...) for the lines of this GPU, preset and micro-batch, which take the place of
    earlier ones in the file."""
    same = {k: common[k] for k in ("card", "preset", "batch_size")}
    if Path(path).exists():
        keep = [r for r in read_records(path) if not same.items() <= r.items()]
        part = Path(path).with_suffix(".part")
        part.write_text("".join(json.dumps(r) + "\n" for r in keep))
        os.replace(part, path)

    def write(op, ms=None, flops=None, bytes=None, bound=None, error=None, **more):
        values = dict(
            op=op, ms=ms and round(ms, 4), flops=flops, bytes=bytes, bound=bound, error=error
        )
        values["tflops"] = round(flops / ms / 1e9, 2) if flops and ms else None
        values["tb_per_s"] = round(bytes / ms / 1e9, 3) if bytes and ms else None
        values["flop_per_byte"] = round(flops / bytes, 2) if flops and bytes else None
        append_record(path, {"bench": "floor"} | common | values | more)
        rate = (
            f"{values['tflops'] or 0:9.1f} TFLOP/s {values['tb_per_s'] or 0:7.2f} TB/s"
            if bytes
            else ""
        )
        print(
            f"{op:60} {ms:10.3f} ms {rate}  {bound or ''}" if ms else f"{op:60} {error}", flush=True
        )

    return write


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    model, train_config = rungs.SHAPES[cfg.preset]
    T = train_config.seq_len
    cfg.batch_size = cfg.batch_size or train_config.batch_size
    positions = cfg.batch_size * T
    cfg.tokens_per_step = cfg.tokens_per_step or train_config.total_batch_size or positions
    if cfg.tokens_per_step % positions:
        raise UserError(
            f"tokens_per_step={cfg.tokens_per_step} must be a multiple of {cfg.batch_size} x {T}"
        )
    world = World(cfg.device)
    if world.device.type == "cpu" and cfg.preset != "tiny":
        raise UserError(
            "the floor needs a CUDA GPU; a try: --preset tiny --device cpu --out try.jsonl"
        )
    check_out(cfg.out, world.device.type == "cpu")
    check_writable(cfg.out, "out")
    about = dict(
        preset=cfg.preset, batch_size=cfg.batch_size, seq_len=T, card=card_name(world.device)
    )
    write = writer(cfg.out, **about, **origin("", cfg.commit))
    parts = Parts(model, cfg.batch_size, T, world.device)
    ms, bytes_per_s = measure(parts, cfg, train_config, write)
    has_fp8 = any(op.startswith("fp8") for op in ms) and positions >= MIN_POSITIONS
    for in_8_bits in ((), IN_8_BITS) if has_fp8 else ((),):
        try:
            _, best = isolated_ms(ms, model, in_8_bits)
            round_ms = back_to_back(parts, best, cfg.seconds, write, in_8_bits)
            micro_steps = cfg.tokens_per_step // positions
            found = floors(model, positions, ms, round_ms, bytes_per_s, micro_steps, in_8_bits)
        except KeyError as error:
            raise UserError(
                f"no floor without {error}; {cfg.out} says why it has no time"
            ) from error
        step_ms = cfg.step_ms_8 if in_8_bits else cfg.step_ms
        step_ms = step_ms or own_step_ms(cfg, world, bool(in_8_bits))
        how = ", head and MLP in 8 bits," if in_8_bits else ""
        speed = 1000 * cfg.tokens_per_step / step_ms
        print(
            f"\na step of {cfg.tokens_per_step:,} tokens{how}: {step_ms:.1f} ms, {speed:,.0f} tokens/s"
        )
        for what, value in found.items():
            rate, ratio = 1000 * cfg.tokens_per_step / value, step_ms / value
            more = dict(
                tok_per_s=round(rate), step_ms=round(step_ms, 2), over_floor=round(ratio, 4)
            )
            write(what, value, **more)
            print(f"{'':60} {rate:10,.0f} tokens/s; ours takes {ratio:.3f} times as long")


if __name__ == "__main__":
    command(main)
