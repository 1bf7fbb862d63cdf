"""How fast one training step could be on this GPU: its parts measured one by one and added up.

    python bench/floor.py                            # GPT-2 124M, 64 x 1024: two minutes, then our own steps
    python bench/floor.py --preset gpt2-xl --tokens_per_step 131072     # a larger model, in shorter steps
    python bench/floor.py --preset tiny --device cpu --out try.jsonl     # a try; its times mean nothing

The floor of a step of 524,288 tokens is

    micro-steps x [products + attention + (elementwise traffic + logits) at copy speed] + optimizer

products are the layers' and the head's, forward, gradient of the input (dgrad), gradient of the
weight (wgrad), in bf16. Attention is that of the fastest kernel. Elementwise work counts as memory
traffic, each tensor once where one kernel could do it (NORMS and GELU say which). The logits are
read and written once, by the loss. The optimizer is clipping and fused AdamW. Not in it, as they
could be hidden or avoided: casts of the weights, bias gradients, sums of gradients over
micro-steps, gaps between kernels. On a GPU that has them, the head's and the MLP's products are
also taken in 8 bits, with the traffic of the casts that this needs. The sum is made twice: from
each part's own median time, and from all products and attentions run back to back for some seconds,
in which a GPU that is limited by its power lowers its clock. Operands are random numbers (zeros
cost less power) and change from call to call. Each part is one line of the file, with its FLOPs and
the bytes that must move.
"""

import itertools
import json
import math
import tempfile
import time
from dataclasses import dataclass
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
from timing import forget, gpu_state, milliseconds, moment
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.cli import UserError, command, parse
from lab.files import write_whole
from lab.kernels.fused_mlp import MIN_POSITIONS
from lab.world import World
from train_gpt2 import GPT, make_optimizer

WAYS = ("forward", "dgrad", "wgrad")  # of a product: output, gradient of the input, of the weight
BACKENDS = {  # attention's kernels
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

# Elementwise traffic of a layer, in passes over one (N, C) tensor of 2 bytes a number. Twice a layer
# residual and norm: forward x and what is added to it are read, the new x and its norm are written;
# backward the norm's gradient, x and the stream's gradient are read, its new one is written.
NORMS = 2 * (4 + 4)
GELU = {  # 4 C wide
    # its input is written for the backward pass, and read there
    "inside the products": 2 * 4,
    # in and out; then the output's gradient and the input in, the gradient out
    "in its own kernels": 2 * 4 + 3 * 4,
    # in the kernels that cast for 8-bit products, each of which reads 16 bits and writes 8 twice: of
    # x, GELU, the output's gradient, and the hidden gradient, with GELU's input
    "in the casts to 8 bits": (1 + 1) + (4 + 4) + (1 + 1) + (2 * 4 + 4),
}
IN_8_BITS = ("fc", "fc2", "head")
ONCE = 7  # a micro-step: embedding out, its gradient in; last norm in and out, back two in, one out


@dataclass
class Config:
    preset: Literal[tuple(rungs.SHAPES)] = "gpt2"  # shape of the model
    batch_size: int = 0  # sequences per micro-step; 0 is the ladder's (64 for gpt2)
    tokens_per_step: int = 0  # 0 is the ladder's (524,288 for gpt2)
    seconds: float = 3.0  # of the runs without a pause
    device: str = "auto"  # cuda, cuda:N or cpu
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
    passes = config.n_layer * (NORMS + GELU[gelu]) + ONCE
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
    moments = [moment(device)]
    for i in range(repeats):
        calls[i % len(calls)]()
        moments.append(moment(device))
    wait(device)
    return float(np.median(milliseconds(moments, device)))


def sustained_ms(calls, device, seconds):
    """(mean milliseconds of a round of all calls, in the last third of so many seconds of nothing
    else; gpu_state)."""
    moments, t0 = [], time.perf_counter()
    while time.perf_counter() - t0 < seconds or len(moments) < 4:
        for call in calls:
            call()
        moments.append(moment(device))
        if device.type == "cuda" and len(moments) > 2:
            moments[-3].synchronize()  # the host stays two rounds ahead, no more
    state = gpu_state(device)  # while it works at what was launched
    wait(device)
    ms = milliseconds(moments, device)
    return float(np.mean(ms[-max(1, len(ms) // 3) :])), state


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Parts:
    """Everything that is measured. time() does it; each other method makes the operands of an
    operation and returns (calls, FLOPs, bytes). Two calls of each, with operands of their own, more
    than 100 MB at 64 x 1024: what one leaves in the L2 cache does not help the next."""

    def __init__(self, config, batch_size, seq_len, device, write=None):
        self.config, self.device, self.B, self.T = config, device, batch_size, seq_len
        self.N, self.write, self.ms = batch_size * seq_len, write, {}  # ms of what worked, by name

    def time(self, op, make, *args, seconds=0):
        """Measure what make(*args) returns, a call, and write it down at once; or all of its calls,
        for so many seconds without a pause, if any are given."""
        forget(self.device)
        try:
            calls, flops, moved = make(*args)
            if seconds:
                took, state = sustained_ms(calls, self.device, seconds)
            else:
                took, state = median_ms(calls, self.device), {}
        except Exception as error:  # whatever this GPU or this torch does not have
            return self.write(op, error=one_sentence(error))
        self.ms[op] = took
        self.write(op, took, flops, moved, **state)

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def sizes(self, name, way):
        """(rows, inner, columns) of a linear layer's product."""
        inputs, outputs, _ = products(self.config)[name]
        return {
            "forward": (self.N, inputs, outputs),
            "dgrad": (self.N, outputs, inputs),
            "wgrad": (outputs, self.N, inputs),
        }[way]

    def product(self, name, way):
        """A linear layer's, its operands lying in memory as the layer has them."""
        rows, inner, columns = self.sizes(name, way)

        def call():
            a = self.random(inner, rows).t() if way == "wgrad" else self.random(rows, inner)
            b = self.random(columns, inner).t() if way == "forward" else self.random(inner, columns)
            out = self.random(rows, columns)
            return lambda: torch.mm(a, b, out=out)

        moved = 2 * (rows * inner + inner * columns + rows * columns)
        return [call(), call()], 2 * rows * inner * columns, moved

    def fp8(self, name, way):
        """The same with both operands in 8 bits (4 of exponent), already scaled and in the layout
        that the product wants, summed the fast way and written in 16 bits, which makes it a
        ceiling. The trainer's gradients have 5 bits of exponent, its sums are full ones, and its
        gradients of weights are written in 32 bits."""
        rows, inner, columns = self.sizes(name, way)
        scale = torch.ones((), device=self.device)
        how = dict(out_dtype=torch.bfloat16, use_fast_accum=True)

        def call():
            a, b = (self.random(n, inner).to(torch.float8_e4m3fn) for n in (rows, columns))
            return lambda: torch._scaled_mm(a, b.t(), scale, scale, **how)

        moved = (rows + columns) * inner + 2 * rows * columns
        return [call(), call()], 2 * rows * inner * columns, moved

    def attention(self, backend, way):
        """Causal, as the model calls it, on views of one (B, T, 3 C) tensor; half of the scores
        count."""
        C, H = self.config.n_embd, self.config.n_head

        def call():
            qkv = self.random(self.B, self.T, 3, H, C // H).unbind(2)
            q, k, v = (t.transpose(1, 2).requires_grad_() for t in qkv)

            def forward():
                with sdpa_kernel(BACKENDS[backend]):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            if way == "forward":
                return forward
            y = forward()
            dy = torch.randn_like(y)
            return lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

        flops, tensor = 2 * self.N * self.T * C, 2 * self.N * C
        if way == "forward":  # two products
            return [call(), call()], flops, 4 * tensor
        return [call(), call()], 5 * flops // 2, 8 * tensor  # five: the scores are computed again

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
            return [make_optimizer(model, cfg, World(str(self.device))).step], 14 * n, 7 * 4 * n
        return [lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)], 3 * n, 3 * 4 * n

    def micro_step(self, backend, in_8_bits=()):
        """All products and attentions of a micro-step, forward and then backward; one layer takes
        the first calls, the next the second."""
        parts = {("attention", w): self.attention(backend, w)[0] for w in ("forward", "backward")}
        for name in products(self.config):
            product = self.fp8 if name in in_8_bits else self.product
            parts |= {(name, way): product(name, way)[0] for way in WAYS}
        names = ("qkv", "attention", "proj", "fc", "fc2")
        ways = dict.fromkeys(names, ("dgrad", "wgrad")) | {"attention": ("backward",)}
        forward = [(name, "forward") for name in names]
        backward = [(name, way) for name in reversed(names) for way in ways[name]]
        layers = range(self.config.n_layer)
        calls = [parts[part][layer % 2] for layer in layers for part in forward]
        calls += [parts["head", way][0] for way in WAYS]
        calls += [parts[part][layer % 2] for layer in layers for part in backward]
        return calls, None, None


def measure(parts, train_config):
    """Measure every part. Returns the bytes per second of a copy. KeyError if that failed."""
    device, cuda = parts.device, parts.device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else 2**28
    copied = 2 ** int(math.log2(min(2**32, memory / 8)))
    copy = f"copy {copied / 2**30:g} GiB"
    parts.time(copy, parts.copy, copied)
    for name, way in itertools.product(products(parts.config), WAYS):
        parts.time(f"{name} {way}", parts.product, name, way)
    for backend, way in itertools.product(BACKENDS, ("forward", "backward")):
        parts.time(f"attention {backend} {way}", parts.attention, backend, way)
    for what in ("AdamW", "clip"):
        parts.time(what, parts.optimizer, train_config, what)
    if cuda and torch.cuda.get_device_capability(device) >= (8, 9):
        for name, way in itertools.product(IN_8_BITS, WAYS):
            parts.time(f"fp8 {name} {way}", parts.fp8, name, way)
    return 1000 * 2 * copied / parts.ms[copy]


def add_up(parts, cfg, bytes_per_s, in_8_bits):
    """The floors of a step, after a run of its products and attentions back to back. KeyError if a
    part was not measured."""
    _, best = isolated_ms(parts.ms, parts.config, in_8_bits)
    how = f", {', '.join(in_8_bits)} in 8 bits," if in_8_bits else ""
    whole = f"micro-step's products{how} and {best} attention, {cfg.seconds:g} s"
    parts.time(whole, parts.micro_step, best, in_8_bits, seconds=cfg.seconds)
    round_ms = parts.ms.get(whole)  # its operands are all there at once, which may not fit
    micro_steps = cfg.tokens_per_step // parts.N
    return floors(parts.config, parts.N, parts.ms, round_ms, bytes_per_s, micro_steps, in_8_bits)


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


def writer(path, **about):
    """write(op, ms, ...) for the lines of this GPU, preset and micro-batch, which take the place of
    earlier ones in the file."""
    same = {k: about[k] for k in ("card", "preset", "batch_size")}
    keep = [json.dumps(r) for r in read_records(path) if not same.items() <= r.items()]
    write_whole(path, "".join(line + "\n" for line in keep).encode())

    def write(op, ms=None, flops=None, bytes=None, error=None, **more):
        values = dict(op=op, ms=ms and round(ms, 4), flops=flops, bytes=bytes, error=error)
        append_record(path, {"bench": "floor"} | about | values | more)
        rate = f"{flops / ms / 1e9:9.1f} TFLOP/s {bytes / ms / 1e9:7.2f} TB/s" if bytes else ""
        print(f"{op:60} {ms:10.3f} ms {rate}" if ms else f"{op:60} {error}", flush=True)

    return write


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    model, train_config = rungs.SHAPES[cfg.preset]
    T = train_config.seq_len
    cfg.batch_size = cfg.batch_size or train_config.batch_size
    positions = cfg.batch_size * T
    cfg.tokens_per_step = cfg.tokens_per_step or train_config.total_batch_size or positions
    if cfg.tokens_per_step % positions:
        step, wanted = f"tokens_per_step={cfg.tokens_per_step}", f"{cfg.batch_size} x {T}"
        raise UserError(f"{step} must be a multiple of {wanted}")
    world = World(cfg.device)
    if world.device.type == "cpu" and cfg.preset != "tiny":
        raise UserError("needs a CUDA GPU; a try: --preset tiny --device cpu --out try.jsonl")
    check_out(cfg.out, world.device.type == "cpu")
    about = dict(preset=cfg.preset, batch_size=cfg.batch_size, seq_len=T)
    write = writer(cfg.out, card=card_name(world.device), **about, **origin())
    parts = Parts(model, cfg.batch_size, T, world.device, write)
    try:
        bytes_per_s = measure(parts, train_config)
        has_fp8 = any(op.startswith("fp8") for op in parts.ms) and positions >= MIN_POSITIONS
        kinds = ((), IN_8_BITS) if has_fp8 else ((),)
        found = {in_8_bits: add_up(parts, cfg, bytes_per_s, in_8_bits) for in_8_bits in kinds}
    except KeyError as error:
        raise UserError(f"no floor without {error}; {cfg.out} says why") from error
    for in_8_bits, sums in found.items():
        step_ms = own_step_ms(cfg, world, bool(in_8_bits))
        how = ", head and MLP in 8 bits," if in_8_bits else ""
        print(f"\na step of {cfg.tokens_per_step:,} tokens{how}: {step_ms:.1f} ms")
        for what, value in sums.items():
            rate, ratio = 1000 * cfg.tokens_per_step / value, step_ms / value
            write(what, value, tok_per_s=round(rate), step_ms=step_ms, over_floor=round(ratio, 4))
            print(f"{'':60} {rate:10,.0f} tokens/s; ours takes {ratio:.3f} times as long")


if __name__ == "__main__":
    command(main)
