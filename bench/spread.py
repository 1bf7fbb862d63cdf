"""How much do final losses differ between identical runs, and between runs with different seeds?

    python bench/spread.py --data data/mine --same 16 --seeds 16     # one GPU; about a minute per run
    python bench/spread.py --table                                   # print the recorded results

Identical runs differ on a GPU because some kernels add floating-point numbers in a varying order
(docs/LOG.md#deterministic). Each run is `train_gpt2.py --preset gpt2` with a batch of 131,072 tokens
and a peak learning rate of 1.2e-3, in its own process. A seed determines the initial weights and the
order of the sequences. Each finished run is a line in --out. For several GPUs, start a process with its
own --out on each, and concatenate the files.
"""

import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from records import (  # isort: skip
    ROOT, RUNS, append_record, check_out, gpu_name, grouped, origin, print_rows, read_records, recorded,
    run_program,
)  # fmt: skip

from lab.cli import UserError, parse_args, run_main

RUN = """train_gpt2.py --preset gpt2 --total_batch_size 131072 --lr 1.2e-3 --min_lr 1.2e-4
    --warmup_steps 0.1 --val_tokens 1048576 --hellaswag_every 0 --sample_every 0 --checkpoint_every 0
    --run_name run"""


@dataclass
class Config:
    data: str = ""  # folder of token shards of the GPT-2 tokenizer
    same: int = 0  # number of runs with seed 1
    seeds: int = 0  # number of runs with different seeds
    first_seed: int = 2  # of those; the next runs have the seeds after it
    steps: int = 145  # updates per run
    also: str = ""  # more flags of train_gpt2.py: --also="--n_layer 2"
    out: str = str(RUNS / "spread.jsonl")  # file of measurements
    table: bool = False  # only print the table of --out


def measure(cfg, kind, seed):
    """Train once and return the record."""
    script, *flags = RUN.split()
    flags += ["--max_steps", cfg.steps, "--val_every", cfg.steps, "--seed", seed, *cfg.also.split()]
    with tempfile.TemporaryDirectory() as folder:
        run_program([ROOT / script, *flags, "--data", Path(cfg.data).resolve()], folder)
        events = read_records(Path(folder, "log", "run", "log.jsonl"))
    (val,) = [e["loss"] for e in events if e["kind"] == "val" and e["step"] == cfg.steps]
    return dict(
        bench="spread", runs=kind, seed=seed, steps=cfg.steps, also=cfg.also, val_loss=val,
        train_losses={e["step"]: e["loss"] for e in events if e["kind"] == "train"},
        device=gpu_name(), **origin(),
    )  # fmt: skip


def show(records):
    """Print count, mean and standard deviation of each kind, with the deviation's standard error for
    normally distributed losses, s / sqrt(2 (n - 1))."""
    rows = []
    for kind, of in grouped(records, "runs").items():
        losses = [r["val_loss"] for r in of]
        deviation = statistics.stdev(losses) if len(losses) > 1 else math.nan
        error = deviation / math.sqrt(2 * max(1, len(losses) - 1))
        rows.append(
            (
                kind,
                len(losses),
                f"{statistics.mean(losses):.4f}",
                f"{deviation:.5f}",
                f"{error:.5f}",
            )
        )
        rows[-1] += (f"{min(losses):.4f}", f"{max(losses):.4f}")
    print_rows(("runs", "number", "mean loss", "deviation", "its error", "lowest", "highest"), rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.data:
            raise UserError("data is empty; pass a folder of token shards with --data")
        check_out(cfg.out, cpu=gpu_name() == gpu_name("cpu"))
        seeds = range(cfg.first_seed, cfg.first_seed + cfg.seeds)
        for kind, seed in [("same", 1)] * cfg.same + [("seeds", seed) for seed in seeds]:
            append_record(cfg.out, measure(cfg, kind, seed))
    show(recorded(cfg.out, "spread"))


if __name__ == "__main__":
    run_main(main)
