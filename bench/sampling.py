"""Tokens per second of sampling, ours beside transformers' generate: the same weights, in one run,
by turns, greedy.

    python bench/sampling.py                              # GPT-2 124M's shape on this machine
    python bench/sampling.py --model log/RUN              # a trained model: do the tokens agree?
    python bench/sampling.py --size gpt2-xl --batch 16    # on a GPU

Each side first writes all tokens once: its warm-up, whose seconds are printed. Then each does so in
turn, as often as --rounds says, and the best round of each counts: what else runs on the machine
only ever takes time. "first" is the time to the first new token, "same" how many tokens agree with
those of the first side, the base, before the first that does not. Without --model the weights are
random, and the likeliest tokens so close to each other that fewer bits soon lead to other ones.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from records import append_record, gpu_name, origin, print_rows

from lab import models
from lab.cli import UserError, command, parse, say
from lab.device import Precision, find_device
from lab.generate import KVCache, generate, read_ahead
from lab.kernels.int8_linear import use_int8
from lab.text_stream import fast_step
from lab.tools.export import in_transformers
from train_gpt2 import GPT, PRESETS


@dataclass
class Config:
    size: Literal[tuple(PRESETS)] = "gpt2"  # random weights of this shape
    model: str = ""  # a run, checkpoint, folder or hub name instead
    prompt: int = 32  # tokens
    tokens: int = 256  # new ones
    batch: int = 1  # sequences at once
    rounds: int = 3
    device: str = "auto"
    compile: bool = False  # ours and transformers' compiled with a static cache, too
    sides: tuple[str, ...] = ()  # of the table, as "ours bf16"; all if empty. The first is the base
    out: str = ""  # append the numbers to this file, as JSON lines


def sides_of(cfg, device):
    """{name: a function that makes one of (ids, new tokens), which yields tokens (B,)};
    transformers' yields them all at its end. Each has weights of its own."""

    def model():
        if cfg.model:
            return models.load(cfg.model)
        torch.manual_seed(0)
        return GPT(PRESETS[cfg.size][0])

    def ours(precision, compile=False):
        if precision == "int8":
            mine = use_int8(model()).eval()
        else:
            mine = model().to(device, Precision(precision, device).dtype).eval()
        step = fast_step(mine, cfg.batch, compile)
        cache = KVCache(mine.config.block_size, step) if step else None

        def write(ids, n):
            pairs = generate(mine, ids, n, temperature=0, cache=cache)
            return (token for token, _ in read_ahead(pairs))

        return write

    def theirs(precision, compile=False):
        other = in_transformers(model()).to(device, Precision(precision, device).dtype).eval()
        how = dict(cache_implementation="static") if compile else {}

        def write(ids, n):
            length = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False)
            mask = torch.ones_like(ids)
            yield from other.generate(ids, attention_mask=mask, **length, **how)[:, -n:].T

        return write

    sides = {}
    for name in ("fp32", "bf16"):
        for whose, make in (("transformers", theirs), ("ours", ours)):
            sides[f"{whose} {name}"] = partial(make, name)
            if cfg.compile:
                sides[f"{whose} {name} compiled"] = partial(make, name, compile=True)
    return sides | ({"ours int8": partial(ours, "int8")} if device.type == "cpu" else {})


def timed(name, side, ids, n):
    """(tokens (B, n) as lists, seconds to the first of them, seconds in all), the last also said."""
    t0, first, tokens = time.perf_counter(), None, []
    for token in side(ids, n):
        tokens.append(token.tolist())  # waits for the device
        first = first or time.perf_counter() - t0
    seconds = time.perf_counter() - t0
    say(f"{name}: {seconds:.2f} s")
    return tokens, first, seconds


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    device = find_device(cfg.device, 0)
    Precision("auto", device).prepare()
    makers = sides_of(cfg, device)
    if unknown := [name for name in cfg.sides if name not in makers]:
        raise UserError(f"sides={unknown[0]} is not one of {', '.join(makers)}")
    sides = {name: makers[name]() for name in cfg.sides or makers}
    shape = models.load(cfg.model).config if cfg.model else PRESETS[cfg.size][0]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab_size - 1, (cfg.batch, cfg.prompt), generator=generator)
    ids = ids.to(device)
    warm = {name: timed(name, side, ids, cfg.tokens)[2] for name, side in sides.items()}
    written, firsts, seconds = {}, {}, {}
    for _ in range(cfg.rounds):
        for name, side in sides.items():
            written[name], first, whole = timed(name, side, ids, cfg.tokens)
            firsts[name] = min(first, firsts.get(name, first))
            seconds[name] = min(whole, seconds.get(name, whole))
    base, rows = next(iter(sides)), []
    for name in sides:
        pairs = list(zip(written[name], written[base]))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        rate, times = cfg.batch * cfg.tokens / seconds[name], seconds[base] / seconds[name]
        first = None if name.startswith("transformers") else firsts[name]
        shown = f"{first * 1e3:.0f}" if first else ""
        rows.append((name, f"{rate:.1f}", f"{times:.2f}", shown, f"{warm[name]:.1f}", same))
        if cfg.out:
            record = dict(side=name, tok_per_s=rate, first_s=first, warm_up_s=warm[name], same=same)
            machine = dict(machine=gpu_name(cfg.device), threads=torch.get_num_threads())
            append_record(cfg.out, record | vars(cfg) | machine | origin())
    lengths = f"batch {cfg.batch}, {cfg.prompt} + {cfg.tokens} tokens"
    print(f"{cfg.model or cfg.size} on {gpu_name(cfg.device)}, {lengths}")
    print_rows(("", "tok/s", f"x {base}", "first ms", "warm-up s", "same"), rows)


if __name__ == "__main__":
    command(main)
