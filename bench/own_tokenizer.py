"""Compare byte tokens with byte-level BPE learned from the text: the laptop model at equal time on a CPU.

    python bench/own_tokenizer.py                               # trains; writes own_tokenizer.jsonl
    python bench/own_tokenizer.py --table --out readme.assets/runs/own_tokenizer.jsonl

Each run is `train_gpt2.py --preset laptop` on the built-in text with one thread. --steps is chosen so
that all take the same CPU time, which hardly depends on other programs on the machine. Bits per byte
are those of the whole validation split, which has the same documents for all tokenizers.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from records import (
    ROOT,
    append_record,
    gpu_name,
    grouped,
    origin,
    print_rows,
    read_records,
    recorded,
    run_program,
)

from lab.cli import UserError, parse_args, run_main
from lab.data.python_docs import build_python_docs
from lab.files import check_writable


@dataclass
class Config:
    """Compare tokenizers for the laptop model at equal time. Finished runs in --out are not repeated."""

    tokenizers: tuple[str, ...] = ("bytes", "bpe:1024")  # as for fineweb.py --tokenizer
    steps: tuple[int, ...] = (300, 228)  # of each tokenizer; 300 take about a minute of one core
    seeds: tuple[int, ...] = (0, 1, 2)
    table: bool = False  # only print the table of the measurements in --out
    out: str = "own_tokenizer.jsonl"  # file of measurements, a line per run


def run(tokenizer, steps, seed):
    """Train once in the current folder. Returns the record."""
    data = Path("data", f"builtin_{tokenizer.replace(':', '')}")
    manifest = build_python_docs(data, tokenizer)
    name = f"{data.name}_{steps}_{seed}_{os.getpid()}"
    flags = f"--preset laptop --device cpu --data {data} --max_steps {steps} --seed {seed} --val_tokens 0"
    flags += f" --val_every {steps} --sample_every 0 --checkpoint_every 0 --run_name {name}"
    before = os.times()
    run_program([ROOT / "train_gpt2.py", *flags.split()], ".", env={"OMP_NUM_THREADS": "1"})
    after = os.times()
    seconds = sum(after[2:4]) - sum(before[2:4])  # user and system time of the finished run
    found = [r for r in read_records(f"log/{name}/log.jsonl") if r["kind"] == "val"]
    (last,) = [r for r in found if r["step"] == steps]
    return dict(
        bench="own_tokenizer", tokenizer=tokenizer, steps=steps, seed=seed, loss=last["loss"],
        bits_per_byte=last["bits_per_byte"], cpu_seconds=round(seconds, 1),
        vocab_size=manifest["vocab_size"], tokens=[entry["tokens"] for entry in manifest["shards"]],
        flags=flags, processor=gpu_name("cpu"), **origin(),
    )  # fmt: skip


def show(records):
    rows = []
    for name, of in grouped(records, "tokenizer").items():
        seconds, loss, bits = (
            mean(r[k] for r in of) for k in ("cpu_seconds", "loss", "bits_per_byte")
        )
        each = ", ".join(f"{r['bits_per_byte']:.3f}" for r in of)
        rows.append((name, of[0]["steps"], f"{seconds:.0f}", f"{loss:.3f}", f"{bits:.3f}", each))
    print_rows(("tokenizer", "steps", "CPU s", "nats/token", "bits/byte", "of each seed"), rows)


def main(argv):
    cfg = parse_args(Config, argv)
    if len(cfg.steps) != len(cfg.tokenizers):
        raise UserError(
            f"steps={cfg.steps} must have {len(cfg.tokenizers)} numbers, one for each of --tokenizers; "
            "pass both flags"
        )
    if not cfg.table:
        check_writable(cfg.out, "out")
        done = {(r["tokenizer"], r["steps"], r["seed"]) for r in read_records(cfg.out)}
        for seed in cfg.seeds:
            for tokenizer, steps in zip(cfg.tokenizers, cfg.steps):
                if (tokenizer, steps, seed) not in done:
                    append_record(cfg.out, run(tokenizer, steps, seed))
    show(recorded(cfg.out, "own_tokenizer"))


if __name__ == "__main__":
    run_main(main)
