"""Tokens per second of sampling, ours beside transformers' generate: the same weights, in one run,
by turns, greedy.

    python bench/sampling.py                              # GPT-2 124M's shape on this machine
    python bench/sampling.py --model log/RUN              # a trained model: do the tokens agree?
    python bench/sampling.py --size gpt2-xl --batch 16    # on a GPU

Each side first writes a few tokens: its warm-up, whose seconds are printed. Then each writes all in
turn, as often as --rounds says, and the best round of each counts: what else runs on the machine
only ever takes time. "first" is the time to the first new token, "same" how many tokens agree with
transformers' in 32 bits before the first that does not. Without --model the weights are random, and
the likeliest tokens so close to each other that fewer bits soon lead to other ones.
"""

import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
from records import append_record, card_name, origin, print_rows

from lab import models
from lab.cli import command, parse
from lab.device import Precision, find_device
from lab.generate import KVCache, compiled, generate
from lab.kernels.int8 import use_int8
from lab.tools.export import in_transformers
from train_gpt2 import GPT, PRESETS


@dataclass
class Config:
    """Tokens per second of sampling, ours beside transformers'."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "laptop"] = (
        "gpt2"  # random weights
    )
    model: str = ""  # a run, checkpoint, folder or hub name instead
    prompt: int = 32  # tokens
    tokens: int = 256  # new ones
    batch: int = 1  # sequences at once
    rounds: int = 3
    device: str = "auto"
    compile: bool = False  # ours and transformers' compiled with a static cache, too
    out: str = ""  # append the numbers to this file, as JSON lines


def sides_of(cfg, device):
    """name: a function of (ids, new tokens) that yields tokens (B,); transformers' yields them all
    at its end. Weights are made anew for each."""

    def model():
        if cfg.model:
            return models.load(cfg.model)
        torch.manual_seed(0)
        return GPT(PRESETS[cfg.size][0])

    def ours(name):
        step = None
        if name == "int8":
            mine = use_int8(model()).eval()
        else:
            mine = model().to(device, Precision(name, device).dtype).eval()
        if cfg.compile and name != "int8":
            step = compiled(mine)
        caches = {"": None, " compiled": KVCache(mine.config.block_size, step)}

        def write(cache, ids, n):
            return (token for token, _ in generate(mine, ids, n, temperature=0, cache=cache))

        kinds = caches if step else [""]
        return {f"ours {name}{kind}": lambda *a, c=caches[kind]: write(c, *a) for kind in kinds}

    def theirs(name):
        other = in_transformers(model()).to(device, Precision(name, device).dtype).eval()

        def write(ids, n, **how):
            how |= dict(max_new_tokens=n, min_new_tokens=n, do_sample=False)
            yield from other.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, -n:].T

        sides = {f"transformers {name}": write}
        if cfg.compile:
            static = dict(cache_implementation="static")
            sides[f"transformers {name} compiled"] = lambda *a: write(*a, **static)
        return sides

    names = ["fp32", "bf16"]
    sides = {}
    for name in names:
        sides |= theirs(name) | ours(name)
    return sides | ours("int8") if device.type == "cpu" else sides


def timed(side, ids, n, device):
    """(tokens (B, n) as lists, seconds to the first of them, seconds in all)."""
    t0, first, tokens = time.perf_counter(), None, []
    for token in side(ids, n):
        tokens.append(token.tolist())  # waits for the device
        first = first or time.perf_counter() - t0
    return tokens, first, time.perf_counter() - t0


def main(argv):
    cfg = parse(Config, argv)
    device = find_device(cfg.device, 0)
    Precision("auto", device).prepare()
    sides = sides_of(cfg, device)
    vocab_size = (
        models.load(cfg.model).config.vocab_size if cfg.model else PRESETS[cfg.size][0].vocab_size
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size - 1, (cfg.batch, cfg.prompt), generator=generator).to(device)
    warm = {name: timed(side, ids, 4, device)[2] for name, side in sides.items()}
    best, written = {}, {}
    for _ in range(cfg.rounds):
        for name, side in sides.items():
            written[name], first, seconds = timed(side, ids, cfg.tokens, device)
            old = best.get(name, (first, seconds))
            best[name] = min(first, old[0]), min(seconds, old[1])
    base, rows = "transformers fp32", []
    for name, (first, seconds) in best.items():
        pairs = list(zip(written[name], written[base]))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        rate, times = cfg.batch * cfg.tokens / seconds, best[base][1] / seconds
        first = None if name.startswith("transformers") else first
        shown = f"{first * 1e3:.0f}" if first else ""
        rows.append((name, f"{rate:.1f}", f"{times:.2f}", shown, f"{warm[name]:.1f}", same))
        if cfg.out:
            record = dict(side=name, tok_per_s=rate, first_s=first, warm_up_s=warm[name], same=same)
            settings = {k: v for k, v in vars(cfg).items() if k != "out"}
            machine = dict(machine=card_name(cfg.device), threads=torch.get_num_threads())
            append_record(cfg.out, record | settings | machine | origin())
    what = cfg.model or cfg.size
    print(
        f"{what} on {card_name(cfg.device)}, batch {cfg.batch}, {cfg.prompt} + {cfg.tokens} tokens"
    )
    print_rows(("", "tok/s", f"x {base}", "first ms", "warm-up s", "same"), rows)


if __name__ == "__main__":
    sys.exit(command(main))
