"""Small runs for the notebook's chapter on scaling: loss by model size and by compute, on a CPU.

    python bench/scaling.py                                       # all runs, to scaling.jsonl
    python bench/scaling.py --groups budget --seeds 1 2 --out more.jsonl

Group budget: five model sizes for each of two FLOP budgets, each trained on as many tokens as the
budget allows. Group ladder: six sizes, each trained on 8 tokens per weight in its blocks. The model and
the recipe are those of speedrun.py's preset laptop with sequences of 64 bytes, without the embedding
of pairs, on the built-in text. Every finished run is a line in --out and is not repeated. Losses
depend on the installed Python, whose documentation is the text.
"""

import platform
import sys
import time
from dataclasses import dataclass

import torch
from records import append_record, gpu_name, grouped, origin, print_rows, read_records

import speedrun
from lab.cli import UserError, parse_args, run_main
from lab.data.python_docs import build_python_docs
from lab.data.shards import TokenShards
from lab.distributed import World
from lab.eval.validation import evaluate
from lab.files import check_writable

BUDGETS, BUDGET_SIZES = (6e10, 2.4e11), (24, 40, 64, 96, 144)  # FLOPs per run; channels
LADDER_SIZES, TOKENS_PER_WEIGHT = (20, 24, 32, 40, 48, 64), 8
SHAPE = dict(n_layer=2, n_head=2, block_size=64, vocab_size=257, vocab_multiple=1)
SHAPE |= dict(value_tables=0, smear=False)
BATCH = 512  # tokens per update
HOW = dict(
    data="data/builtin", device="cpu", compile=False, seq_len=64, total_batch_size=BATCH,
    batch_size=BATCH // 64, lr=1e-2, muon_lr=0.05, beta2=0.99, decay_steps=0.7,
    momentum_warmup=0.1, val_tokens=131072,
)  # fmt: skip


@dataclass
class Config:
    groups: tuple[str, ...] = ("budget", "ladder")  # which runs
    seeds: tuple[int, ...] = (1,)  # one run of each size per seed
    sizes: tuple[int, ...] = ()  # channels; all sizes of a group if empty
    threads: int = 1  # CPU threads
    out: str = "scaling.jsonl"  # file of measurements, a line per finished run


def count(n_embd):
    """(weights in the blocks, FLOPs per token) of a model with this many channels."""
    model = speedrun.GPT(speedrun.GPTConfig(n_embd=n_embd, **SHAPE))
    return sum(p.numel() for p in model.block_matrices()), model.flops_per_token(64)


def planned(cfg):
    """The runs: [{"group", "n_embd", "weights", "flops_per_token", "steps", "budget"}]."""
    runs = []
    for budget in BUDGETS if "budget" in cfg.groups else ():
        runs += [dict(group="budget", n_embd=n, budget=budget) for n in BUDGET_SIZES]
    if "ladder" in cfg.groups:
        runs += [dict(group="ladder", n_embd=n, budget=0.0) for n in LADDER_SIZES]
    for run in runs:
        run["weights"], run["flops_per_token"] = count(run["n_embd"])
        tokens = run["budget"] / run["flops_per_token"] or TOKENS_PER_WEIGHT * run["weights"]
        run["steps"] = round(tokens / BATCH)
    return [run for run in runs if not cfg.sizes or run["n_embd"] in cfg.sizes]


def train(n_embd, steps, seed):
    """(validation loss in nats per byte, CPU seconds of training) of one run."""
    world, cfg = World("cpu"), speedrun.TrainConfig("laptop", max_steps=steps, seed=seed, **HOW)
    trainer = speedrun.build_trainer(speedrun.GPTConfig(n_embd=n_embd, **SHAPE), cfg, world)
    t0 = time.process_time()
    for _ in range(steps):
        trainer.train_step()
    seconds = time.process_time() - t0
    val = TokenShards(cfg.data, "val", 257)
    sums = evaluate(trainer.raw_model, val, cfg, 64, world, trainer.precision)
    return sums["loss"] / sums["targets"], seconds


def table(records):
    """Print the mean loss of each size."""
    rows = []
    for (group, budget, n_embd), runs in grouped(records, "group", "budget", "n_embd").items():
        one, losses = runs[0], [r["loss"] for r in runs]
        rows.append([
            f"{group} {budget:.1e}" if budget else group, n_embd, f"{one['weights']:,}",
            f"{one['tokens']:,}", f"{one['flops']:.2e}", len(runs),
            f"{sum(losses) / len(losses):.4f}", f"{max(losses) - min(losses):.4f}",
        ])  # fmt: skip
    head = "runs,channels,weights in blocks,tokens,FLOPs,seeds,nats per byte,spread"
    print_rows(head.split(","), rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if unknown := set(cfg.groups) - {"budget", "ladder"}:
        raise UserError(f"groups={unknown.pop()} is not one of budget, ladder")
    check_writable(cfg.out, "out")
    torch.set_num_threads(cfg.threads)
    text = build_python_docs("data/builtin")
    key = ("group", "n_embd", "budget", "seed")
    finished = {tuple(r[k] for k in key): r for r in read_records(cfg.out)}
    for seed in cfg.seeds:
        for run in planned(cfg):
            run |= dict(bench="scaling", seed=seed)
            if tuple(run[k] for k in key) in finished:
                continue
            print(f"{run['group']}, {run['n_embd']} channels, seed {seed} ...", file=sys.stderr)
            run["loss"], run["cpu_seconds"] = train(run["n_embd"], run["steps"], seed)
            run["tokens"] = run["steps"] * BATCH
            run["flops"] = run["tokens"] * run["flops_per_token"]
            run |= dict(cpu=gpu_name("cpu"), python=platform.python_version())
            append_record(cfg.out, run | dict(text_tokens=text["tokens"]) | origin())
            finished[tuple(run[k] for k in key)] = run
    table(finished.values())


if __name__ == "__main__":
    run_main(main)
