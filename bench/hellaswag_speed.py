"""Seconds of a HellaSwag evaluation after warm-up: eager and compiled, several batch sizes, and the
context computed once for its four endings against four plain rows.

    python bench/hellaswag_speed.py --data data/hellaswag/hellaswag_val.jsonl
    python bench/hellaswag_speed.py --preset gpt2-medium --batch_tokens 16384 65536

Weights are random. The last two columns are the largest relative difference of a loss, and the
share of other choices, against the first row.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from records import card_name, print_rows
from timing import forget, peak_gib

import hellaswag
from lab.cli import command, parse
from lab.device import Precision
from lab.world import World
from train_gpt2 import GPT, PRESETS

REPEATS = 3  # timed evaluations, after one that is not


@dataclass
class Config:
    data: str = ""  # HellaSwag's file; downloaded if empty
    preset: Literal[tuple(PRESETS)] = "gpt2"  # size of the model
    limit: int = 0  # how many examples; 0 is all
    batch_tokens: tuple[int, ...] = (8192, 16384, 32768, 65536)  # of a batch, padding included
    compile: bool = True  # the compiled way too
    device: str = "auto"  # cuda or cpu


def four_rows(data, rows, B, T):
    """What hellaswag.pack returns, with a row for each ending: the context is computed four
    times."""
    idx, position = np.zeros((4 * B, T), np.int64), np.tile(np.arange(T), (4 * B, 1))
    where, targets = [], []
    for n, i in enumerate(rows):
        context, *endings = data.tokens[i]
        for j, ending in enumerate(endings):
            row = np.concatenate([context, ending[:-1]])
            idx[4 * n + j, : len(row)] = row
            where.append((4 * n + j) * T + np.arange(len(context) - 1, len(row)))
            targets.append(ending)
    part = np.zeros(idx.shape, np.int8)
    where, targets = np.concatenate(where), np.concatenate(targets)
    return idx, position, part, where.astype(np.int64), targets.astype(np.int64)


def causal(model, idx, position, part):
    """hellaswag.hidden of plain rows, with the kernel that needs no mask."""
    return model.hidden(idx, position).flatten(0, 1)


def main(argv):
    args = parse(Config, argv, description=__doc__)
    world = World(args.device)
    precision = Precision("auto", world.device)
    precision.prepare()
    torch.manual_seed(0)
    model = GPT(PRESETS[args.preset][0]).to(world.device).eval()
    path = hellaswag.locate(args.data)
    data, _, _ = hellaswag.prepare(model, world, path, limit=args.limit)
    pack, plan, hidden = hellaswag.pack, hellaswag.plan, hellaswag.hidden
    longest = data.ctx_len + data.end_len.max(1) - 1

    def short_rows(_):
        hellaswag.BATCH_TOKENS //= 4  # which is of one row an example
        return plan(longest)

    ways = {
        "context once, eager": (pack, plan, hidden),
        "four rows, eager": (four_rows, short_rows, causal),
    }
    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # one graph for each of the batch shapes
        ways["context once, compiled"] = pack, plan, torch.compile(hidden, dynamic=False)
    rows, reference = [], None
    for label, functions in ways.items():
        hellaswag.pack, hellaswag.plan, hellaswag.hidden = functions
        for batch_tokens in args.batch_tokens:
            forget(world.device)
            seconds = []
            for _ in range(1 + REPEATS):
                t0, hellaswag.BATCH_TOKENS = time.perf_counter(), batch_tokens
                with precision.autocast():
                    sums = hellaswag.ending_losses(model, data, world)
                world.synchronize()
                seconds.append(time.perf_counter() - t0)
            median, peak = float(np.median(seconds[1:])), peak_gib(world.device) or 0
            reference = sums if reference is None else reference
            choices = [(s / data.end_len).argmin(1) for s in (sums, reference)]
            differ = np.abs(sums / reference - 1).max(), (choices[0] != choices[1]).mean()
            row = batch_tokens, seconds[0], median, len(data) / median, peak, *differ
            rows.append(
                [label, *"{} {:.2f} {:.2f} {:.0f} {:.2f} {:.0e} {:.2%}".format(*row).split()]
            )
            print(f"{label}, {batch_tokens}: {median:.2f} s", flush=True)
    print(
        f"\n{card_name(world.device)}, torch {torch.__version__}, {precision.name}, {len(data)} "
        f"examples, median of {REPEATS}"
    )
    head = "way,batch_tokens,first s,median s,examples/s,peak GiB,loss,choices".split(",")
    print_rows(head, rows)


if __name__ == "__main__":
    command(main)
