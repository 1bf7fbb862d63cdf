"""Seconds of a HellaSwag evaluation with the tokens cached, after warm-up: eager and compiled, several batch sizes, and
the context computed once for its four endings against four plain rows.

    python bench/hellaswag_speed.py --data data/hellaswag/hellaswag_val.jsonl            # random weights, 124M
    python bench/hellaswag_speed.py --data FILE --checkpoint gpt2 --batch_tokens 16384 65536
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hellaswag  # noqa: E402
from lab.data.tokenizers import name_of_size  # noqa: E402
from lab.device import Precision  # noqa: E402
from lab.run.stop import running  # noqa: E402
from train_gpt2 import GPT, PRESETS, World  # noqa: E402


def four_rows(data, examples, keep, B, T):
    """What hellaswag.pack returns, with a row of its own for each ending: the context is computed four times."""
    idx, position = np.zeros((4 * B, T), np.int64), np.tile(np.arange(T), (4 * B, 1))
    where, targets = [], []
    for n, (i, c) in enumerate(zip(examples, keep)):
        stop = data.start[i] + data.ctx_len[i]
        for j, ending in enumerate(data.endings(i)):
            row = np.concatenate([data.tokens[stop - c : stop], ending[:-1]])
            idx[4 * n + j, : len(row)] = row
            where.append((4 * n + j) * T + np.arange(c - 1, len(row)))
            targets.append(ending)
    part = np.zeros(idx.shape, np.int8)
    return idx, position, part, np.concatenate(where).astype(np.int64), np.concatenate(targets).astype(np.int64)


def causal(model, idx, position, part):
    """hellaswag.hidden of plain rows, with the kernel that needs no mask."""
    return model.hidden(idx, position).flatten(0, 1)


def plain_rows(model, data, limit, batch_tokens, world):
    """hellaswag.evaluate with four rows an example, everything else the same."""
    chosen, keep, _ = hellaswag.choose(data, limit, model.config.block_size, False)
    longest = keep + data.end_len[chosen].max(1) - 1
    pack, plan = hellaswag.pack, hellaswag.plan
    hellaswag.pack, hellaswag.plan = four_rows, lambda *_: plan(longest, batch_tokens // 4)
    try:
        return hellaswag.ending_losses(model, data, chosen, keep, batch_tokens, world, causal)
    finally:
        hellaswag.pack, hellaswag.plan = pack, plan


def timed(function, repeats, device):
    """(seconds of the first call, median seconds of the next ones, what the last one returned)"""
    seconds = []
    for _ in range(1 + repeats):
        t0 = time.perf_counter()
        value = function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - t0)
    return seconds[0], float(np.median(seconds[1:])), value


def main():
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--data", default="", help="HellaSwag file; downloaded if empty")
    parser.add_argument("--checkpoint", default="", help="what hellaswag.py --model takes; random weights if empty")
    parser.add_argument("--preset", default="gpt2", choices=PRESETS, help="size of the random model")
    parser.add_argument("--limit", type=int, default=0, help="how many examples; 0 is all")
    parser.add_argument("--batch_tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--no_compile", action="store_true")
    args = parser.parse_args()

    world = World(args.device)
    precision = Precision(args.precision, world.device)
    precision.prepare()
    torch.manual_seed(0)
    if args.checkpoint:
        from lab.weights import load_model

        model = load_model(args.checkpoint)
    else:
        model = GPT(PRESETS[args.preset][0])
    model = model.to(world.device).eval()
    t0 = time.perf_counter()
    path = hellaswag.locate(args.data)
    name = name_of_size(model.config.vocab_size)
    data = hellaswag.load(path, name)
    print(f"tokenised or read from the cache in {time.perf_counter() - t0:.2f} s")
    t0 = time.perf_counter()
    data = hellaswag.load(path, name)
    print(f"read from the cache in {time.perf_counter() - t0:.2f} s")
    chosen, keep, _ = hellaswag.choose(data, args.limit, model.config.block_size, False)
    rows = keep + (data.end_len[chosen] - 1).sum(1)
    four = 4 * keep + (data.end_len[chosen] - 1).sum(1)
    print(f"tokens of an example: {rows.mean():.0f} with its context once, {four.mean():.0f} in four rows")

    table = []
    ways = [("context once, eager", hellaswag.hidden), ("four rows, eager", None)]
    ways += [] if args.no_compile else [("context once, compiled", hellaswag.compiled())]
    reference = None
    for label, trunk in ways:
        for batch_tokens in args.batch_tokens:
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()

            def once(trunk=trunk, batch_tokens=batch_tokens):
                with precision.autocast(), torch.no_grad():
                    if trunk is None:
                        return plain_rows(model, data, args.limit, batch_tokens, world)
                    return hellaswag.measure(
                        model, args.limit, world, str(path), batch_tokens=batch_tokens, trunk=trunk
                    )[3]  # fmt: skip

            first, median, sums = timed(once, args.repeats, world.device)
            reference = sums if reference is None else reference
            same = (sums / data.end_len[chosen]).argmin(1) == (reference / data.end_len[chosen]).argmin(1)
            peak = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else float("nan")
            shapes = len({(B, T) for _, B, T in hellaswag.plan(rows, batch_tokens)})
            table.append((label, batch_tokens, shapes, first, median, len(chosen) / median, peak,
                          np.abs(sums / reference - 1).max(), 1 - same.mean()))  # fmt: skip
            print(f"{label}, {batch_tokens}: {median:.2f} s", flush=True)

    card = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    print(f"\n{card}, torch {torch.__version__}, {precision.name}, {len(chosen)} examples, median of {args.repeats}; largest "
          "relative difference of a loss, and share of other choices, against the first row")  # fmt: skip
    print("way                      batch_tokens  shapes   first s  median s  examples/s  peak GiB   loss  choices")
    for row in table:
        print("{:24} {:12d} {:7d} {:9.2f} {:9.2f} {:11.0f} {:9.2f} {:6.0e} {:8.2%}".format(*row))
    world.exit()


if __name__ == "__main__":
    try:
        with running("hellaswag_speed.py"):
            main()
    except (ValueError, OSError) as error:
        print(f"hellaswag_speed.py: error: {error}", file=sys.stderr)
        sys.exit(2)
