"""Time BLiMP: all pairs with GPT-2 124M's shape, or with a trained model.

    python bench/evaluation.py                     # random weights; data/blimp is made if missing
    python bench/evaluation.py --model log/RUN --rounds 5

"load" is reading and tokenizing the pairs, which a run does once. The first round is the warm-up; the
best of the others counts, because other load can only slow it down.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from records import append_record, gpu_name, origin, print_rows
from timing import peak_gib, reset_state

import blimp
from lab.cli import parse_args, run_main
from lab.distributed import World
from lab.precision import Precision
from lab.registry import load_model, resolve_source
from train_gpt2 import GPT, PRESETS


@dataclass
class Config:
    size: Literal[tuple(PRESETS)] = "gpt2"  # shape of a model with random weights
    model: str = ""  # run, checkpoint, Hugging Face folder or hub name to use instead
    data: str = ""  # the same as --data of blimp.py
    pairs: int = 0  # first pairs of each paradigm; 0 is all 1,000
    rounds: int = 3  # measurements after the warm-up
    device: str = "auto"  # cuda, mps or cpu
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"
    out: str = ""  # append the numbers to this file, as JSON lines


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    world = World(cfg.device)
    precision = Precision(cfg.precision, world.device)
    precision.set_matmul_precision()
    torch.manual_seed(0)
    source = resolve_source(cfg.model) if cfg.model else ""
    model = load_model(source) if cfg.model else GPT(PRESETS[cfg.size][0])
    model = model.to(world.device).eval()
    t0 = time.perf_counter()
    data = blimp.load_pairs(model, world, source, str(blimp.locate(cfg.data)), cfg.pairs)
    load = time.perf_counter() - t0
    reset_state(world.device)
    seconds, cpu = [], []
    for _ in range(1 + cfg.rounds):
        t0 = time.process_time()
        with precision.autocast():
            result, _ = blimp.measure(model, data, world)
        seconds.append(result["seconds"])
        cpu.append(time.process_time() - t0)
    first, best = seconds[0], min(seconds[1:])
    peak = peak_gib(world.device)
    record = dict(bench="evaluation", load_s=load, first_s=first, warm_s=best, cpu_s=min(cpu[1:]))
    record |= dict(peak_gib=peak) | {k: result[k] for k in ("acc", "acc_stderr", "ties", "count")}
    print(f"{cfg.model or cfg.size} on {gpu_name(cfg.device)}, {precision.name}")
    head = ("pairs", "load s", "first s", "warm s", "CPU s", "peak GiB", "accuracy", "ties")
    shown = [f"{v:.2f}" for v in (load, first, best, record["cpu_s"])] + [
        f"{peak:.2f}" if peak else ""
    ]
    print_rows(head, [(len(data), *shown, f"{result['acc']:.4f}", result["ties"])])
    if cfg.out:
        append_record(cfg.out, record | vars(cfg) | origin())


if __name__ == "__main__":
    run_main(main)
