"""Compare the speed of greedy generation with transformers, in tokens per second.

    python bench/sampling.py                              # GPT-2 124M's shape on this machine
    python bench/sampling.py --model log/RUN              # a trained model, to compare tokens
    python bench/sampling.py --size gpt2-xl --batch 16    # on a GPU

All sides have the same weights. Each generates all tokens once as a warm-up, whose seconds are printed.
Then the sides alternate for --rounds rounds, and the best round of each counts, because other load can
only slow it down. "first" is the time to the first new token, "same" the number of tokens before the
first difference from those of the first side (the base). Without --model the weights are random; the
probabilities of the best tokens are then so similar that lower precision soon changes the choice.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from records import append_record, gpu_name, origin, print_rows

from lab.cli import UserError, eprint, parse_args, run_main
from lab.hardware import resolve_device
from lab.hf.export import to_transformers
from lab.inference.generate import KVCache, generate, prefetch_tokens
from lab.inference.int8 import quantize_linears_
from lab.inference.streaming import make_decode_step
from lab.precision import Precision
from lab.registry import load_model
from train_gpt2 import GPT, PRESETS


@dataclass
class Config:
    size: Literal[tuple(PRESETS)] = "gpt2"  # shape of a model with random weights
    model: str = ""  # run, checkpoint, Hugging Face folder or hub name to use instead
    prompt: int = 32  # tokens of the prompt
    tokens: int = 256  # new tokens
    batch: int = 1  # sequences generated together
    rounds: int = 3  # measurements of each side
    device: str = "auto"  # cuda, mps or cpu
    compile: bool = False  # also measure compiled versions, with a static cache
    # sides to measure, such as "ours bf16"; default: all; the first is the base
    sides: tuple[str, ...] = ()
    out: str = ""  # append the numbers to this file, as JSON lines


def sides_of(cfg, device):
    """{name: function that returns write(ids, n)}. write yields n new tokens (B,), one by one or, with
    transformers, all at the end. Each side has its own copy of the weights."""

    def model():
        if cfg.model:
            return load_model(cfg.model)
        torch.manual_seed(0)
        return GPT(PRESETS[cfg.size][0])

    def ours(precision, compile=False):
        if precision == "int8":
            our_model = quantize_linears_(model()).eval()
        else:
            our_model = model().to(device, Precision(precision, device).dtype).eval()
        step = make_decode_step(our_model, cfg.batch, compile)
        cache = KVCache(our_model.config.block_size, step) if step else None

        def write(ids, n):
            pairs = generate(our_model, ids, n, temperature=0, cache=cache)
            return (token for token, _ in prefetch_tokens(pairs))

        return write

    def theirs(precision, compile=False):
        their_model = to_transformers(model()).to(device, Precision(precision, device).dtype).eval()
        options = dict(cache_implementation="static") if compile else {}

        def write(ids, n):
            length = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False)
            mask = torch.ones_like(ids)
            yield from their_model.generate(ids, attention_mask=mask, **length, **options)[:, -n:].T

        return write

    sides = {}
    for name in ("fp32", "bf16"):
        for whose, make in (("transformers", theirs), ("ours", ours)):
            sides[f"{whose} {name}"] = partial(make, name)
            if cfg.compile:
                sides[f"{whose} {name} compiled"] = partial(make, name, compile=True)
    return sides | ({"ours int8": partial(ours, "int8")} if device.type == "cpu" else {})


def timed(name, side, ids, n):
    """(tokens (n, B) as lists, seconds to the first one, total seconds), and print the total."""
    t0, first, tokens = time.perf_counter(), None, []
    for token in side(ids, n):
        tokens.append(token.tolist())  # waits for the device
        first = first or time.perf_counter() - t0
    seconds = time.perf_counter() - t0
    eprint(f"{name}: {seconds:.2f} s")
    return tokens, first, seconds


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    device = resolve_device(cfg.device, 0)
    Precision("auto", device).set_matmul_precision()
    makers = sides_of(cfg, device)
    if unknown := [name for name in cfg.sides if name not in makers]:
        raise UserError(f"sides={unknown[0]} is not one of {', '.join(makers)}")
    sides = {name: makers[name]() for name in cfg.sides or makers}
    shape = load_model(cfg.model).config if cfg.model else PRESETS[cfg.size][0]
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
    run_main(main)
