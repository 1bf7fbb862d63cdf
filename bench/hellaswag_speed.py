"""Seconds of a HellaSwag evaluation after warm-up: eager and compiled, several batch sizes, and the
context computed once for its four endings against four plain rows.

    python bench/hellaswag_speed.py --data data/hellaswag/hellaswag_val.jsonl   # random weights,
    124M python bench/hellaswag_speed.py --data FILE --model gpt2 --batch_tokens 16384 65536
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hellaswag  # noqa: E402
from lab import models  # noqa: E402
from lab.cli import command  # noqa: E402
from lab.device import Precision  # noqa: E402
from lab.world import World  # noqa: E402
from train_gpt2 import GPT, PRESETS  # noqa: E402


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


def timed(function, repeats, world):
    """(seconds of the first call, median seconds of the next ones, what the last one returned)"""
    seconds = []
    for _ in range(1 + repeats):
        t0 = time.perf_counter()
        value = function()
        world.synchronize()
        seconds.append(time.perf_counter() - t0)
    return seconds[0], float(np.median(seconds[1:])), value


def main(argv):
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--data", default="", help="HellaSwag file; downloaded if empty")
    parser.add_argument(
        "--model", default="", help="as hellaswag.py has it; random weights if empty"
    )
    parser.add_argument(
        "--preset", default="gpt2", choices=PRESETS, help="size of the random model"
    )
    parser.add_argument("--limit", type=int, default=0, help="how many examples; 0 is all")
    sizes = [8192, 16384, 32768, 65536]
    parser.add_argument("--batch_tokens", type=int, nargs="+", default=sizes)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--no_compile", action="store_true")
    args = parser.parse_args(argv)

    world = World(args.device)
    precision, cuda = Precision(args.precision, world.device), world.device.type == "cuda"
    precision.prepare()
    torch.manual_seed(0)
    model = models.load(args.model) if args.model else GPT(PRESETS[args.preset][0])
    model = model.to(world.device).eval()
    t0 = time.perf_counter()
    path = hellaswag.locate(args.data)
    data, _, _ = hellaswag.prepare(model, world, path, limit=args.limit)
    print(f"tokenised in {time.perf_counter() - t0:.2f} s")
    endings = (data.end_len - 1).sum(1)
    once, four = data.ctx_len + endings, 4 * data.ctx_len + endings
    print(f"tokens of an example: {once.mean():.0f}; in four rows {four.mean():.0f}")

    pack, plan, hidden = hellaswag.pack, hellaswag.plan, hellaswag.hidden
    longest = data.ctx_len + data.end_len.max(1) - 1

    def short_rows(_):
        hellaswag.BATCH_TOKENS //= 4  # which is of one row an example
        return plan(longest)

    ways = {
        "context once, eager": (pack, plan, hidden),
        "four rows, eager": (four_rows, short_rows, causal),
    }
    if not args.no_compile:
        torch._dynamo.config.recompile_limit = 64  # one graph for each of the batch shapes
        ways["context once, compiled"] = pack, plan, torch.compile(hidden, dynamic=False)
    table, reference = [], None
    for label, functions in ways.items():
        hellaswag.pack, hellaswag.plan, hellaswag.hidden = functions
        for batch_tokens in args.batch_tokens:
            if cuda:
                torch.cuda.reset_peak_memory_stats()

            def score(batch_tokens=batch_tokens):
                hellaswag.BATCH_TOKENS = batch_tokens
                with precision.autocast():
                    return hellaswag.ending_losses(model, data, world)

            first, median, sums = timed(score, args.repeats, world)
            reference = sums if reference is None else reference
            choices = [(s / data.end_len).argmin(1) for s in (sums, reference)]
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
            differ = np.abs(sums / reference - 1).max(), (choices[0] != choices[1]).mean()
            row = (label, batch_tokens, first, median, len(data) / median, peak, *differ)
            table.append(
                "{:24} {:12d} {:9.2f} {:9.2f} {:11.0f} {:9.2f} {:6.0e} {:8.2%}".format(*row)
            )
            print(f"{label}, {batch_tokens}: {median:.2f} s", flush=True)

    device = torch.cuda.get_device_name(world.device) if cuda else world.device.type
    about = f"{device}, torch {torch.__version__}, {precision.name}, {len(data)} examples"
    print(f"\n{about}, median of {args.repeats}. Last: largest relative difference of a loss,")
    print("and share of other choices, against the first row")
    heads = "batch_tokens   first s  median s  examples/s  peak GiB   loss  choices"
    print(f"{'way':24} {heads}")
    print("\n".join(table))


if __name__ == "__main__":
    command(main)
