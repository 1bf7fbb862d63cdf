"""Runs on 16,384 bytes for the notebook's chapter on little text: passes, dropout, weight decay,
averaged weights, ensembles and a distilled model, on a CPU.

    python bench/little_text.py                                # all runs, to little_text.jsonl
    python bench/little_text.py --variants passes_8 --groups 1 --out try.jsonl

The model is speedrun.py's with two blocks of 48 channels, without the embedding of pairs. The text is
the beginning of the built-in one; losses are on 65,536 bytes of its validation split. A group is four
seeds: the variant `ensemble` averages the probabilities of a group's passes_8, `weights` averages
their weights, and `distilled` learns the ensemble's probabilities. The other variants use each
group's first seed. Every finished run is a line in --out and is not repeated.
"""

import copy
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from records import append_record, gpu_name, grouped, origin, print_rows, read_records

import speedrun
from lab.cli import UserError, parse_args, run_main
from lab.data.python_docs import build_python_docs
from lab.data.shards import TokenShards, write_npy
from lab.distributed import World
from lab.files import check_writable

TEXT, VAL, BATCH, SEQ_LEN = 16_384, 65_536, 512, 64  # tokens
SHAPE = dict(n_layer=2, n_head=2, n_embd=48, block_size=SEQ_LEN, vocab_size=257, vocab_multiple=1)
SHAPE |= dict(value_tables=0, smear=False)
HOW = dict(
    data="data/little", device="cpu", compile=False, seq_len=SEQ_LEN, total_batch_size=BATCH,
    batch_size=BATCH // SEQ_LEN, lr=1e-2, muon_lr=0.05, beta2=0.99, decay_steps=0.7,
    momentum_warmup=0.1,
)  # fmt: skip
SINGLE = {  # one run per group
    "passes_2": dict(passes=2), "passes_4": dict(passes=4), "passes_8": dict(passes=8),
    "passes_16": dict(passes=16), "dropout": dict(dropout=0.1), "decay": dict(decay=0.3),
    "both": dict(dropout=0.1, decay=0.3),
}  # fmt: skip
OF_GROUP = ("average", "weights", "ensemble", "distilled")  # made from a group's passes_8
VARIANTS = (*SINGLE, *OF_GROUP)


@dataclass
class Config:
    variants: tuple[str, ...] = VARIANTS  # which results
    groups: tuple[int, ...] = (1, 2, 3)  # each has four seeds: group 1 has seeds 1 to 4
    threads: int = 1  # CPU threads
    out: str = "little_text.jsonl"  # file of measurements, a line per result


def write_text():
    """Write data/little: the beginning of the built-in text."""
    build_python_docs("data/builtin")
    ids = TokenShards("data/builtin", "train", 257).read(0, TEXT)
    Path("data/little").mkdir(parents=True, exist_ok=True)
    write_npy(Path("data/little/little_train_000001.npy"), ids)  # atomic: other runs may read it


def soft_targets(teachers):
    """A model to train: its loss is the cross-entropy with the mean probability of the teachers."""

    def wrap(student):
        def forward(x, y, reduction):
            with torch.no_grad():
                p = mean_log_probs(teachers, x).exp()
            return None, F.cross_entropy(
                student(x)[0].flatten(0, 1), p.flatten(0, 1), reduction="sum"
            )

        return forward

    return wrap


def train(seed, passes=8, dropout=0.0, decay=0.0, wrap=None):
    """(model, the same with its weights averaged over the last half of the steps, CPU seconds)."""
    cfg = speedrun.TrainConfig(
        "laptop", max_steps=passes * TEXT // BATCH, seed=seed, weight_decay=decay, **HOW
    )
    trainer = speedrun.build_trainer(speedrun.GPTConfig(**SHAPE), cfg, World("cpu"))
    model = trainer.raw_model
    for block in model.transformer.h if dropout else ():
        for part in (block.attn, block.mlp):
            part.c_proj = torch.nn.Sequential(part.c_proj, torch.nn.Dropout(dropout))
    average = torch.optim.swa_utils.AveragedModel(model)
    trainer.model = wrap(model) if wrap else model
    t0 = time.process_time()
    for step in range(cfg.max_steps):
        trainer.train_step()
        if step >= cfg.max_steps // 2:
            average.update_parameters(model)
    return model.eval(), average.module.eval(), time.process_time() - t0


def mean_log_probs(models, x):
    """ln of the mean probability that the models give to each token: (B, T, V)."""
    logs = torch.stack([model(x)[0].log_softmax(-1) for model in models])
    return logs.logsumexp(0) - math.log(len(models))


@torch.no_grad()
def loss(models, split):
    """Mean loss in nats per byte of models averaged as one, on the validation or training text."""
    folder, tokens = ("data/builtin", VAL) if split == "val" else ("data/little", TEXT - SEQ_LEN)
    shards, sums = TokenShards(folder, split, 257), 0.0
    offsets = np.arange(0, tokens - SEQ_LEN + 1, SEQ_LEN)
    for part in np.array_split(offsets, max(1, len(offsets) // 64)):
        x, y = map(torch.from_numpy, shards.batch(part, SEQ_LEN))
        sums += F.nll_loss(mean_log_probs(models, x).flatten(0, 1), y.flatten(), reduction="sum")
    return float(sums) / (len(offsets) * SEQ_LEN)


def mean_weights(models):
    """A model with the mean weights of models of one shape."""
    result, states = copy.deepcopy(models[0]), [model.state_dict() for model in models]
    result.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in states[0]})
    return result


def results(group, wanted):
    """Yield (variant, models averaged as one, CPU seconds of training) for one group."""
    seeds = range(4 * group - 3, 4 * group + 1)
    for name in wanted:
        if name in SINGLE and name != "passes_8":
            model, _, seconds = train(seeds[0], **SINGLE[name])
            yield name, [model], seconds
    if not set(wanted) & {"passes_8", *OF_GROUP}:
        return
    of_group = set(wanted) & {"weights", "ensemble", "distilled"}
    runs = [train(seed) for seed in (seeds if of_group else seeds[:1])]
    models, seconds = [run[0] for run in runs], sum(run[2] for run in runs)
    yield "passes_8", models[:1], runs[0][2]
    yield "average", [runs[0][1]], runs[0][2]
    if of_group:
        yield "weights", [mean_weights(models)], seconds
        yield "ensemble", models, seconds
    if "distilled" in wanted:
        student, _, more = train(seeds[0] + 100, wrap=soft_targets(models))
        yield "distilled", [student], seconds + more


def table(records):
    """Print the mean and the range of each variant."""
    rows, by_name = [], grouped(records, "variant")
    for name in [name for name in VARIANTS if name in by_name]:
        runs = by_name[name]
        val, train = ([r[k] for r in runs] for k in ("loss", "train_loss"))
        rows.append([
            name, len(runs), f"{sum(val) / len(val):.4f}", f"{max(val) - min(val):.4f}",
            f"{sum(train) / len(train):.4f}", f"{sum(r['cpu_seconds'] for r in runs) / len(runs):.1f}",
        ])  # fmt: skip
    print_rows("variant,groups,validation,spread,training text,CPU seconds".split(","), rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if unknown := set(cfg.variants) - set(VARIANTS):
        raise UserError(f"variants={unknown.pop()} is not one of {', '.join(VARIANTS)}")
    check_writable(cfg.out, "out")
    torch.set_num_threads(cfg.threads)
    write_text()
    finished = {(r["variant"], r["group"]): r for r in read_records(cfg.out)}
    for group in cfg.groups:
        missing = [name for name in cfg.variants if (name, group) not in finished]
        for name, models, seconds in results(group, missing):
            if (name, group) in finished:
                continue
            record = dict(bench="little_text", variant=name, group=group, cpu_seconds=seconds)
            record |= dict(loss=loss(models, "val"), train_loss=loss(models, "train"))
            record |= dict(cpu=gpu_name("cpu"), python=platform.python_version())
            print(name, group, f"{record['loss']:.4f}", file=sys.stderr, flush=True)
            append_record(cfg.out, record | origin())
            finished[name, group] = record
    table(finished.values())


if __name__ == "__main__":
    run_main(main)
