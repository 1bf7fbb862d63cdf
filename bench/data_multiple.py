"""How much text does a recipe save? The lowest loss that it reaches with each amount of text.

    python bench/data_multiple.py --data data/mine --tokens 6900000 13800000 --passes 8 16
    python bench/data_multiple.py --data data/mine --recipe gpt2 --tokens 110600000 --passes 4
    python bench/data_multiple.py --table             # print the recorded results; needs no GPU

A run trains on --tokens tokens, evenly spread over the training split, --passes times. Validation is
on the same text for all. A line below the table gives the fraction of the text with which small-data
reaches the loss of GPT-2's recipe on its largest amount. It is interpolated between small-data's runs,
linearly in the logarithm of tokens (nan outside of them). Each finished run is a line in --out and is
not repeated.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from records import (  # isort: skip
    ROOT, RUNS, append_record, check_out, gpu_name, grouped, origin, print_rows, read_records, recorded,
    run_program,
)  # fmt: skip

from lab.cli import UserError, parse_args, run_main
from lab.data.shards import TokenShards, write_npy

BLOCK = 65536  # tokens
RUN = "--val_tokens 1048576 --hellaswag_every 0 --sample_every 0 --run_name run"
RECIPES = {  # {recipe: (flags, mean size of a batch; small-data begins with half of total_batch_size)}
    "small-data": (
        "speedrun.py --preset small-data --fp8 all --block_size 1024 --seq_len 1024",
        0.875,
    ),
    "gpt2": ("train_gpt2.py --preset gpt2 --lr 1.2e-3 --min_lr 1.2e-4 --fp8 all", 1.0),
}


@dataclass
class Config:
    data: str = ""  # folder of token shards of the GPT-2 tokenizer
    recipe: Literal[tuple(RECIPES)] = "small-data"
    tokens: tuple[int, ...] = (
        6_900_000,
        13_800_000,
        27_600_000,
        55_300_000,
    )  # of the training split
    passes: tuple[int, ...] = (8,)  # numbers of passes to try with each
    total_batch_size: int = 131072  # tokens per update
    seed: int = 1
    gpus: int = 1  # one process each
    also: str = ""  # more flags of the program
    blimp: str = ""  # BLiMP.zip or a .jsonl file of pairs, to score each model at its end
    out: str = str(RUNS / "data_multiple.jsonl")  # file of measurements
    table: bool = False  # only print the table of --out


def link_part(data, tokens, folder):
    """Make a data folder with `tokens` training tokens and the whole validation split. The tokens are
    blocks of about BLOCK, evenly spread over the training split, because its texts may come from one
    source after another."""
    train, folder = TokenShards(data, "train", 50257), Path(folder)
    if not 0 < tokens <= len(train):
        raise UserError(
            f"tokens={tokens} must be from 1 to the {len(train)} training tokens of {data}"
        )
    cuts = np.linspace(0, tokens, -(-tokens // BLOCK) + 1).astype(int)
    starts = cuts[:-1] + np.linspace(0, len(train) - tokens, len(cuts) - 1).astype(int)
    blocks = [train.read(start, size) for start, size in zip(starts, np.diff(cuts))]
    write_npy(folder / "text_train_000001.npy", np.concatenate(blocks).astype(np.uint16))
    val = TokenShards(data, "val", 50257)
    write_npy(folder / "text_val_000000.npy", val.read(0, len(val)).astype(np.uint16))


def measure(cfg, tokens, passes):
    """Train once and return the record."""
    command, mean_batches = RECIPES[cfg.recipe]
    steps = round(tokens * passes / (cfg.total_batch_size * mean_batches))
    script, *flags = command.split() + RUN.split()
    flags += [
        "--total_batch_size",
        cfg.total_batch_size,
        "--max_steps",
        steps,
        "--val_every",
        max(1, steps // 8),
        "--checkpoint_every",
        steps if cfg.blimp else 0,
        "--seed",
        cfg.seed,
    ]
    with tempfile.TemporaryDirectory() as folder:
        link_part(cfg.data, tokens, folder)
        words = [ROOT / script, *flags, "--data", folder, *cfg.also.split()]
        run_program(words, folder, cfg.gpus)
        events = read_records(Path(folder, "log", "run", "log.jsonl"))
        if cfg.blimp:
            words = [ROOT / "blimp.py", "--data", Path(cfg.blimp).resolve(), "--json", "blimp.json"]
            run_program(words, folder)
            accuracy = json.loads(Path(folder, "blimp.json").read_text())["acc"]
    curve = [(e["step"], e["loss"]) for e in events if e["kind"] == "val"]
    timed = [(e["step"], e["dt_ms"]) for e in events if "dt_ms" in e]
    seconds = sum((b[0] - a[0]) * b[1] for a, b in zip([(0, 0), *timed], timed)) / 1000
    record = dict(
        bench="data_multiple", recipe=cfg.recipe, tokens=tokens, passes=passes, seed=cfg.seed,
        steps=steps, total_batch_size=cfg.total_batch_size, also=cfg.also, val_loss=curve[-1][1], curve=curve,
        gpu_seconds=round(seconds * cfg.gpus, 3), gpus=cfg.gpus, device=gpu_name(), **origin(),
    )  # fmt: skip
    return record | ({"blimp": accuracy} if cfg.blimp else {})


def best_losses(records):
    """{tokens: lowest loss} of records, ascending."""
    best = {t: min(r["val_loss"] for r in of) for t, of in grouped(records, "tokens").items()}
    return dict(sorted(best.items()))


def tokens_needed(best, loss):
    """Number of tokens with which `best` reaches a loss, interpolated; nan outside of its runs."""
    tokens, losses = map(np.array, zip(*best.items()))
    falling = -losses  # np.interp needs increasing values
    return float(np.exp(np.interp(-loss, falling, np.log(tokens), np.nan, np.nan)))


def show(records):
    rows = []
    for r in sorted(records, key=lambda r: (r["recipe"], r["tokens"], r["passes"])):
        rows.append((r["recipe"], f"{r['tokens']:,}", r["passes"], r["seed"]))
        blimp = f"{r['blimp']:.1%}" if "blimp" in r else ""
        rows[-1] += (f"{r['val_loss']:.4f}", blimp, round(r["gpu_seconds"]), r["also"])
    head = "recipe,tokens,passes,seed,validation loss,BLiMP,GPU-seconds,other flags"
    print_rows(head.split(","), rows)
    of = grouped(records, "recipe")
    if {"small-data", "gpt2"} <= of.keys():
        ours = best_losses(of["small-data"])
        (tokens, loss), *_ = reversed(best_losses(of["gpt2"]).items())
        # two seeds of a recipe differ by about 0.005 nats at this size (docs/LOG.md#passes)
        low, middle, high = (tokens / tokens_needed(ours, loss + d) for d in (-0.01, 0.0, 0.01))
        print(
            f"GPT-2's recipe with {tokens:,} tokens: {loss:.3f} nats. small-data needs 1/{middle:.1f}"
        )
        print(f"of them (1/{low:.1f} to 1/{high:.1f} if that loss is 0.01 lower or higher).")


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.data:
            raise UserError("data is empty; pass a folder of token shards with --data")
        check_out(cfg.out, cpu=gpu_name() == gpu_name("cpu"))
        key = "recipe", "tokens", "passes", "seed", "also", "total_batch_size"
        done = {tuple(r[k] for k in key) for r in read_records(cfg.out)}
        for tokens in cfg.tokens:
            for passes in cfg.passes:
                run = cfg.recipe, tokens, passes, cfg.seed, cfg.also, cfg.total_batch_size
                if run not in done:
                    append_record(cfg.out, measure(cfg, tokens, passes))
    show(recorded(cfg.out, "data_multiple"))


if __name__ == "__main__":
    run_main(main)
