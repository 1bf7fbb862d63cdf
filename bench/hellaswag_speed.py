"""Seconds of a HellaSwag evaluation after warm-up: eager and compiled, several batch sizes.

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


def main(argv):
    args = parse(Config, argv, description=__doc__)
    world = World(args.device)
    precision = Precision("auto", world.device)
    precision.prepare()
    torch.manual_seed(0)
    model = GPT(PRESETS[args.preset][0]).to(world.device).eval()
    path = hellaswag.locate(args.data)
    data, _, _ = hellaswag.prepare(model, world, path, limit=args.limit)
    torch._dynamo.config.recompile_limit = 64  # one graph for each of the batch shapes
    ways = {"eager": hellaswag.hidden}
    if args.compile:
        ways["compiled"] = torch.compile(hellaswag.hidden, dynamic=False)
    rows, reference = [], None
    for way, hellaswag.hidden in ways.items():
        for batch_tokens in args.batch_tokens:
            forget(world.device)
            hellaswag.BATCH_TOKENS, seconds = batch_tokens, []
            for _ in range(1 + REPEATS):
                t0 = time.perf_counter()
                with precision.autocast():
                    sums = hellaswag.ending_losses(model, data, world)
                world.synchronize()
                seconds.append(time.perf_counter() - t0)
            median, peak = float(np.median(seconds[1:])), peak_gib(world.device) or 0
            reference = sums if reference is None else reference
            choices = [(s / data.end_len).argmin(1) for s in (sums, reference)]
            apart = np.abs(sums / reference - 1).max(), (choices[0] != choices[1]).mean()
            row = "{:.2f} {:.2f} {:.0f} {:.2f} {:.0e} {:.2%}"
            row = row.format(seconds[0], median, len(data) / median, peak, *apart).split()
            rows.append([way, batch_tokens, *row])
            print(f"{way}, {batch_tokens}: {median:.2f} s", flush=True)
    print(
        f"\n{card_name(world.device)}, torch {torch.__version__}, {precision.name}, {len(data)} "
        f"examples, median of {REPEATS}"
    )
    head = "way,batch_tokens,first s,median s,examples/s,peak GiB,loss,choices"
    print_rows(head.split(","), rows)


if __name__ == "__main__":
    command(main)
