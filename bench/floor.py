"""How fast one training step could be on the card in hand: its parts measured one by one, added up, against our step.

    python bench/floor.py                            # GPT-2 124M, 64 x 1024, about two minutes; then steps of our own
    python bench/floor.py --step_ms 938 --step_ms_8 744     # steps that were timed before, instead of 20 in 16 and 20 in 8 bits
    python bench/floor.py --batch_size 8             # a card with less memory
    python bench/floor.py --preset gpt2-xl --tokens_per_step 131072     # a larger model, in shorter steps
    python bench/floor.py --sums                     # add up again what the file holds; needs no GPU
    python bench/floor.py --preset tiny --device cpu --out try.jsonl     # a try without a GPU; its times mean nothing

The floor of a step of 524,288 tokens is

    micro-steps x [products + attention + (elementwise traffic + logits) at copy speed] + optimizer

products are the layers' and the head's, forward, gradient of the input (dgrad), gradient of the weight (wgrad), in bf16.
Attention is that of the fastest kernel. Elementwise work counts as memory traffic, each tensor once where one kernel could
do it (PASSES says which). The logits are read and written once, by the loss. The optimizer is clipping and fused AdamW.
Not in it, as they could be hidden or avoided: casts of the weights, bias gradients, sums of gradients over micro-steps,
gaps between kernels. On a card that has them, the head's and the MLP's products are also taken in 8 bits, with the traffic of
the casts that this needs. The sum is made twice: from each part's own median time, and from all products and attentions run
back to back for some seconds, in which a card that is limited by its power lowers its clock. Operands are random numbers
(zeros cost less power) and change from call to call. Each part is one line of the file, with its FLOPs, the bytes that
must move, and what bounds it: whichever takes longer, the bytes at copy speed or the FLOPs at the rate of the 8192^3 product.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import ladder  # noqa: E402
import rungs  # noqa: E402
from records import append_record, card_name, keep_tries_apart, one_sentence, origin, random_shards, read_records  # noqa: E402

from lab.kernels.fused_mlp import MIN_POSITIONS  # noqa: E402
from lab.run.locks import check_writable  # noqa: E402
from lab.run.stop import running  # noqa: E402
from train_gpt2 import GPT, World, make_optimizer  # noqa: E402

OUT = str(ROOT / "readme.assets" / "runs" / "floor.jsonl")
WAYS = ("forward", "dgrad", "wgrad")  # of a linear layer's product: output, gradient of the input, of the weight
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}

# Elementwise traffic of a layer, in passes over one (N, C) tensor of 2 bytes a number; the residual stream is bf16.
PASSES = {
    # twice a layer: x and what is added to it are read, the new x and its norm are written
    "residual and norm, forward": 2 * 4,
    # twice a layer: the norm's gradient, x and the stream's gradient are read, the stream's new gradient is written
    "residual and norm, backward": 2 * 4,
}
# GELU is 4 C wide. In kernels of its own: in and out; then the output's gradient and the input in, the gradient out.
GELU_APART = {"GELU forward": 2 * 4, "GELU backward": 3 * 4}
# Inside the products around it: its input is written for the backward pass, and read there.
GELU_INSIDE = {"GELU's input": 2 * 4}
# In the kernels that cast for 8-bit products, each of which reads 16 bits and writes 8 twice, as it is and transposed.
GELU_CASTING = {"x": 1 + 1, "GELU": 4 + 4, "the output's gradient": 1 + 1, "the hidden gradient, with GELU's input": 2 * 4 + 4}
GELU = {"inside the products": GELU_INSIDE, "in its own kernels": GELU_APART, "in the casts to 8 bits": GELU_CASTING}
IN_8_BITS = ("fc", "fc2", "head")
BACK_TO_BACK = {(): "micro-step's products and", IN_8_BITS: "micro-step's products, fc, fc2 and head in 8 bits, and"}
ONCE = 7  # a micro-step: embedding out, and its gradient in; last norm in and out, and back two in, one out

# -------------------------------------------------------------------------------------------------- arithmetic


def products(config):
    """{name: (inputs, outputs, how many of them in a model)} of its linear layers."""
    C, L = config.n_embd, config.n_layer
    return {
        "qkv": (C, 3 * C, L), "proj": (C, C, L), "fc": (C, 4 * C, L), "fc2": (4 * C, C, L),
        "head": (C, config.padded_vocab_size, 1),
    }  # fmt: skip


def traffic(config, positions, gelu):
    """(bytes of elementwise work, bytes of the loss on its logits) of a micro-step of so many positions; gelu: one of GELU."""
    passes = config.n_layer * sum((PASSES | GELU[gelu]).values()) + ONCE
    return passes * positions * config.n_embd * 2, 2 * positions * config.padded_vocab_size * 2


def floor_ms(products_and_attention_ms, moved_bytes, bytes_per_s, optimizer_ms, micro_steps):
    """Milliseconds of a step: see the head of this file."""
    return micro_steps * (products_and_attention_ms + 1000 * moved_bytes / bytes_per_s) + optimizer_ms


def isolated_ms(ms, config, in_8_bits=()):
    """(products and attention of a micro-step from their own times {op: ms}, the fastest attention); in_8_bits names products.
    KeyError if a part was not measured."""
    sizes = {f"fp8 {name}" if name in in_8_bits else name: n for name, (_, _, n) in products(config).items()}
    total = sum(n * ms[f"{name} {way}"] for name, n in sizes.items() for way in WAYS)
    pairs = {b: (f"attention {b} forward", f"attention {b} backward") for b in BACKENDS}
    sums = {b: ms[f] + ms[w] for b, (f, w) in pairs.items() if f in ms and w in ms}
    if not sums:
        raise KeyError("attention")
    best = min(sums, key=sums.get)
    return total + config.n_layer * sums[best], best


def bound_of(flops, moved, bytes_per_s, flop_per_s):
    """What takes longer: moving the bytes, or computing."""
    return "memory" if moved / bytes_per_s >= flops / flop_per_s else "compute"


# --------------------------------------------------------------------------------------------------- measuring


def median_ms(calls, device, repeats=30):
    """Median milliseconds of a call; the calls, which differ in their operands, take turns. A tenth of a second warms up."""
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
    """Mean milliseconds of one round of all calls, in the last third of so many seconds of nothing else."""
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
    """Everything that is measured: each method makes the operands of an operation and returns its calls.

    Two sets of operands of each, more than 100 MB at 64 x 1024: what a call leaves in the L2 cache does not help the next.
    """

    def __init__(self, config, batch_size, seq_len, device):
        self.config, self.device, self.B, self.T = config, device, batch_size, seq_len
        self.N = batch_size * seq_len

    def random(self, *shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def product(self, name, way):
        """(calls, flops, bytes) of a linear layer's product."""
        inputs, outputs, _ = products(self.config)[name]
        calls = []
        for _ in range(2):
            x, w, y = self.random(self.N, inputs), self.random(outputs, inputs), self.random(self.N, outputs)  # or gradients
            a, b, out = {"forward": (x, w.t(), y), "dgrad": (y, w, x), "wgrad": (y.t(), x, w)}[way]
            calls.append(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        return calls, 2 * self.N * inputs * outputs, 2 * (self.N * inputs + inputs * outputs + self.N * outputs)

    def fp8(self, name, way):
        """The same with both operands in 8 bits (4 of exponent), already scaled and in the layout that the product wants,
        summed the fast way and written in 16 bits, which makes it a ceiling. The trainer's gradients have 5 bits of exponent,
        its sums are full ones, and its gradients of weights are written in 32 bits."""
        inputs, outputs, _ = products(self.config)[name]
        rows, inner, columns = {
            "forward": (self.N, inputs, outputs), "dgrad": (self.N, outputs, inputs), "wgrad": (outputs, self.N, inputs),
        }[way]  # fmt: skip
        scale, calls = torch.ones((), device=self.device), []
        for _ in range(2):
            a, b = (self.random(n, inner).to(torch.float8_e4m3fn) for n in (rows, columns))
            calls.append(
                lambda a=a, b=b: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
            )
        return calls, 2 * rows * inner * columns, (rows + columns) * inner + 2 * rows * columns

    def attention(self, backend, way):
        """Causal attention as the model calls it, on views of one (B, T, 3 C) tensor; half of the T x T scores count."""
        C, H = self.config.n_embd, self.config.n_head
        calls = []
        for _ in range(2):
            qkv = self.random(self.B, self.T, 3 * C)
            q, k, v = (t.view(self.B, self.T, H, C // H).transpose(1, 2).requires_grad_() for t in qkv.split(C, dim=2))

            def forward(q=q, k=k, v=v):
                with ladder.attention_kernel(BACKENDS[backend]):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            if way == "forward":
                calls.append(forward)
            else:
                y = forward()
                dy = torch.randn_like(y)
                calls.append(lambda y=y, dy=dy, qkv=(q, k, v): torch.autograd.grad(y, qkv, dy, retain_graph=True))
        flops, tensor = 2 * self.N * self.T * C, 2 * self.N * C
        # two products forward; five backward, as the scores are computed again
        return (calls, flops, 4 * tensor) if way == "forward" else (calls, 5 * flops // 2, 8 * tensor)

    def cube(self, n=8192):
        calls = []
        for _ in range(2):
            a, b, out = self.random(n, n), self.random(n, n), self.random(n, n)
            calls.append(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        return calls, 2 * n**3, 3 * 2 * n * n

    def copy(self, size):
        a, b = (torch.randint(256, (size,), dtype=torch.uint8, device=self.device) for _ in range(2))
        return [lambda: a.copy_(b), lambda: b.copy_(a)], 0, 2 * size

    def optimizer(self, cfg, what):
        """AdamW: 14 operations a parameter, of which weight and both moments are read and written, the gradient read.
        Clipping: the gradient is read for its norm, then read and written to be scaled."""
        model = GPT(self.config).to(self.device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        n = sum(p.numel() for p in model.parameters())
        if what == "AdamW":
            return [make_optimizer(model, cfg, self.device).step], 14 * n, 7 * 4 * n
        return [lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)], 3 * n, 3 * 4 * n

    def micro_step(self, backend, in_8_bits=()):
        """Calls of all products and attentions of a micro-step, layer by layer, forward and then backward."""
        parts = {}
        for name in products(self.config):
            product = self.fp8 if name in in_8_bits else self.product
            parts |= {(name, way): product(name, way)[0] for way in WAYS}
        parts |= {("attention", way): self.attention(backend, way)[0] for way in ("forward", "backward")}
        order = []
        for layer in range(self.config.n_layer):
            order += [(parts[key], layer) for key in [("qkv", "forward"), ("attention", "forward"), ("proj", "forward"),
                                                      ("fc", "forward"), ("fc2", "forward")]]  # fmt: skip
        order += [(parts["head", way], 0) for way in WAYS]
        for layer in range(self.config.n_layer):
            for name in ("fc2", "fc", "proj", "attention", "qkv"):
                ways = ("backward",) if name == "attention" else ("dgrad", "wgrad")
                order += [(parts[name, way], layer) for way in ways]
        return [calls[layer % 2] for calls, layer in order]


def measure(parts, args, write):
    """Measure every part and give it to write(op, ms, flops, bytes, ...) at once. Returns ({op: ms} of those that
    worked, bytes per second of a copy)."""
    device, config, ms = parts.device, parts.config, {}
    rates = {"bytes_per_s": None, "flop_per_s": None}

    def one(op, make, seconds=0):
        ladder.forget(device)
        try:
            calls, flops, moved = make()
            took = sustained_ms(calls, device, seconds) / len(calls) if seconds else median_ms(calls, device)
        except Exception as error:  # whatever this card or this torch does not have
            write(op, error=one_sentence(error))
            if ladder.card_lost(device):
                raise RuntimeError(f"{op} has left the card unusable for this process") from error
            return
        ms[op] = took
        if op.startswith("copy"):
            rates["bytes_per_s"] = 1000 * moved / took
        if op == cube:
            rates["flop_per_s"] = 1000 * flops / took
        known = all(rates.values())
        write(op, took, flops, moved, bound_of(flops, moved, **rates) if known else None)

    size = 8192 if device.type == "cuda" else 256
    cube = f"{size}^3"
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**28
    gib = 2 ** int(math.log2(min(2**32, memory / 8)))
    one(f"copy {gib / 2**30:g} GiB", lambda: parts.copy(gib))
    time.sleep(args.pause)  # a rested card: what a short benchmark would show
    one(cube, lambda: parts.cube(size))
    one(f"{cube} for {args.seconds:g} s", lambda: parts.cube(size), args.seconds)
    time.sleep(args.pause)
    for name in products(config):
        for way in WAYS:
            one(f"{name} {way}", lambda name=name, way=way: parts.product(name, way))
    for backend in BACKENDS:
        for way in ("forward", "backward"):
            one(f"attention {backend} {way}", lambda backend=backend, way=way: parts.attention(backend, way))
    for what in ("AdamW", "clip"):
        one(what, lambda what=what: parts.optimizer(args.cfg, what))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        for name in IN_8_BITS:
            for way in WAYS:
                one(f"fp8 {name} {way}", lambda name=name, way=way: parts.fp8(name, way))
    return ms, rates["bytes_per_s"]


def back_to_back(parts, backend, seconds, write, in_8_bits=()):
    """Milliseconds of a micro-step's products and attentions, run for so long without a pause; None if that fails."""
    what, took = f"{BACK_TO_BACK[in_8_bits]} {backend} attention, {seconds:g} s", None
    try:
        ladder.forget(parts.device)
        calls = parts.micro_step(backend, in_8_bits)
        with ladder.CardWatch(parts.device) as watch:
            took = sustained_ms(calls, parts.device, seconds)
        write(what, took, **watch.values)
    except RuntimeError as error:  # memory: its operands are all there at once
        write(what, error=one_sentence(error))
    return took


def own_step_ms(args, world, eight_bits):
    """Median milliseconds of twenty of our own steps, timed as bench/ladder.py times them."""
    settings = dict(batch_size=args.batch_size) | ({} if world.device.type == "cuda" else dict(compile_mode="none"))
    settings |= dict(cross_entropy="fp8", fp8_mlp=True) if eight_bits else {}
    case = rungs.Case("floor", args.preset, "best", settings, 1337)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, rungs.SHAPES[args.preset][0].vocab_size)
        flags = ["--shapes", args.preset, "--data", folder, "--device", args.device, "--tokens_per_step", str(args.tokens)]
        theirs = ladder.parse_args(flags)
        return ladder.measure(case, theirs, world)["median_ms"]


# ------------------------------------------------------------------------------------------------------- results


def floors(config, positions, ms, round_ms, bytes_per_s, micro_steps, in_8_bits=()):
    """{what: milliseconds of a step} for each way of adding up; without those of round_ms, back to back, if it is None."""
    found, (alone, best) = {}, isolated_ms(ms, config, in_8_bits)
    if not bytes_per_s:
        raise KeyError("copy")
    for source, parts_ms in (("parts alone", alone), ("back to back", round_ms)):
        for gelu in GELU:
            if parts_ms is None or bool(in_8_bits) != (gelu == "in the casts to 8 bits"):
                continue
            moved, optimizer_ms = sum(traffic(config, positions, gelu)), ms["AdamW"] + ms["clip"]
            value = floor_ms(parts_ms, moved, bytes_per_s, optimizer_ms, micro_steps)
            found[f"floor: {source}, {best} attention, GELU {gelu}"] = value
    return found


def sums(args):
    """The floors that the newest parts in the file add up to, for people."""
    rows = [r for r in read_records(args.out) if r.get("preset") == args.preset and r["batch_size"] == args.batch_size]
    rows = [r for r in rows if r["card"] == rows[-1]["card"] and r.get("ms")]
    ms, copies = {r["op"]: r["ms"] for r in rows}, [r for r in rows if r["op"].startswith("copy")]
    if not copies:
        raise ValueError(f"{args.out} has no parts of {args.preset} with micro-batches of {args.batch_size} to add up")
    positions = args.batch_size * args.cfg.seq_len
    print(f"{rows[-1]['card']}, torch {rows[-1]['torch']}, {rows[-1]['date']}, {args.preset}, a step of {args.tokens:,} tokens")
    for in_8_bits in ((), IN_8_BITS):
        round_ms = next((ms[op] for op in ms if op.startswith(BACK_TO_BACK[in_8_bits])), None)
        try:
            rate = 1000 * copies[-1]["bytes"] / copies[-1]["ms"]
            found = floors(args.model, positions, ms, round_ms, rate, args.tokens // positions, in_8_bits)
        except KeyError as error:
            print(f"no floor without {error}")
            continue
        for what, value in found.items():
            print(f"{what:75} {value:8.1f} ms {1000 * args.tokens / value:10,.0f} tokens/s")


class File:
    """The lines of this card, preset and micro-batch, which take the place of earlier ones."""

    def __init__(self, path, **common):
        self.path, self.common = Path(path), common
        keep = [r for r in read_records(path) if any(r.get(k) != common[k] for k in ("card", "preset", "batch_size"))]
        if self.path.exists():
            part = self.path.with_suffix(".part")
            part.write_text("".join(json.dumps(r) + "\n" for r in keep))
            os.replace(part, self.path)

    def write(self, op, ms=None, flops=None, bytes=None, bound=None, error=None, **more):
        values = dict(op=op, ms=ms and round(ms, 4), flops=flops, bytes=bytes, bound=bound, error=error)
        values["tflops"] = round(flops / ms / 1e9, 2) if flops and ms else None
        values["tb_per_s"] = round(bytes / ms / 1e9, 3) if bytes and ms else None
        values["flop_per_byte"] = round(flops / bytes, 2) if flops and bytes else None
        append_record(self.path, {"bench": "floor"} | self.common | values | more)
        rate = f"{values['tflops'] or 0:9.1f} TFLOP/s {values['tb_per_s'] or 0:7.2f} TB/s  {bound or ''}" if bytes else ""
        print(f"{op:60} {ms:10.3f} ms {rate}" if ms else f"{op:60} {error}", flush=True)


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog="bench/floor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", default=OUT, help="file of measurements (%(default)s)")
    parser.add_argument("--preset", default="gpt2", choices=rungs.SHAPES, help="shape of the model (gpt2)")
    parser.add_argument("--batch_size", type=int, default=0, help="sequences per micro-step (the preset's: 64 for gpt2)")
    parser.add_argument("--tokens_per_step", type=int, default=0, help="of a step (the preset's: 524,288 for gpt2)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the runs without a pause (3)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds of rest before and after the first of those (2)")
    parser.add_argument("--step_ms", type=float, default=0.0, help="our own step, already timed; 0 times it now")
    parser.add_argument("--step_ms_8", type=float, default=0.0, help="the same with the head and the MLP in 8 bits")
    parser.add_argument("--sums", action="store_true", help="add up what the file holds, measure nothing")
    parser.add_argument("--device", default="auto", help="cuda, cuda:N or cpu (auto)")
    args = parser.parse_args(argv)
    for name, value, fits in (("seconds", args.seconds, args.seconds > 0), ("pause", args.pause, args.pause >= 0)):
        if not fits or value == math.inf:
            raise ValueError(f"{name}={value} must be a finite number, {'0 or more' if name == 'pause' else 'above 0'}")
    if args.device == "auto" and not args.sums and not torch.cuda.is_available() and args.preset != "tiny":
        raise ValueError("floor.py needs a CUDA GPU; `--preset tiny --device cpu --out try.jsonl` tries it without one")
    model, cfg = rungs.SHAPES[args.preset]
    args.batch_size = args.batch_size or cfg.batch_size
    tokens = args.tokens_per_step or cfg.total_batch_size or args.batch_size * cfg.seq_len
    if args.batch_size < 1 or tokens < 1 or tokens % (args.batch_size * cfg.seq_len):
        raise ValueError(f"a step of {tokens} tokens must be a multiple of a micro-step, batch_size={args.batch_size} x "
                         f"{cfg.seq_len}; choose another --tokens_per_step or --batch_size")  # fmt: skip
    args.model, args.cfg, args.tokens = model, cfg, tokens
    return args


def run(argv):
    args = parse_args(argv)
    if args.sums:
        return sums(args)
    world, config = World(args.device), args.model
    device, T = world.device, args.cfg.seq_len
    keep_tries_apart(args.out, OUT, device.type == "cpu")
    check_writable(args.out, "out")
    card, positions = card_name(device), args.batch_size * T
    print(f"{card}, torch {torch.__version__}, {args.preset}, micro-batch {args.batch_size} x {T}")
    command = f"python bench/floor.py --preset {args.preset} --batch_size {args.batch_size}"
    command += f" --tokens_per_step {args.tokens_per_step}" if args.tokens_per_step else ""
    file = File(args.out, preset=args.preset, batch_size=args.batch_size, seq_len=T, card=card, **origin(command))
    parts = Parts(config, args.batch_size, T, device)
    ms, bytes_per_s = measure(parts, args, file.write)
    for gelu in GELU:
        layers, logits = (n / 1e9 for n in traffic(config, positions, gelu))
        print(f"traffic of a micro-step, GELU {gelu}: {layers:.2f} GB elementwise, {logits:.2f} GB of logits")
    small = positions < MIN_POSITIONS  # there our MLP stays in 16 bits, and its step would be held against another floor
    for in_8_bits in ((), IN_8_BITS) if any(op.startswith("fp8") for op in ms) and not small else ((),):
        try:
            _, best = isolated_ms(ms, config, in_8_bits)
            round_ms = back_to_back(parts, best, args.seconds, file.write, in_8_bits)
            results = floors(config, positions, ms, round_ms, bytes_per_s, args.tokens // positions, in_8_bits)
        except KeyError as error:
            raise ValueError(f"no floor without {error}; {args.out} says why it has no time; "
                             "try a smaller --batch_size") from error  # fmt: skip
        step_ms = (args.step_ms_8 if in_8_bits else args.step_ms) or own_step_ms(args, world, bool(in_8_bits))
        how = ", head and MLP in 8 bits," if in_8_bits else ""
        speed = 1000 * args.tokens / step_ms
        print(f"\na step of {args.tokens:,} tokens{how} takes us {step_ms:.1f} ms, {speed:,.0f} tokens/s")
        for what, value in results.items():
            rate, ratio = 1000 * args.tokens / value, step_ms / value
            file.write(what, value, tok_per_s=round(rate), step_ms=round(step_ms, 2), over_floor=round(ratio, 4))
            print(f"{'':60} {rate:10,.0f} tokens/s; ours takes {ratio:.3f} times as long")


def main():
    try:
        run(sys.argv[1:])
    except (ValueError, OSError, RuntimeError) as error:
        print(f"floor.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with running("floor.py"):
        main()
