"""Count the values that saturate in the 8-bit MLPs of --fp8 all, per block and at several steps.

    python bench/saturation.py --data data/edu_fineweb10B     # trains GPT-2 124M for 1,000 steps on a GPU
    python bench/saturation.py --data data/edu_fineweb10B --preset speedrun --at 0 10 100 290
    python bench/saturation.py --table                        # print the recorded counts; needs no GPU
    python bench/saturation.py --preset laptop --data data/builtin --device cpu --at 0 5 --out try.jsonl

The 8-bit MLPs (lab/kernels/fp8_mlp.py) divide activations by a fixed scale, so values beyond +-112 become
+-112 (squared ReLU of speedrun.py: 7168), and weights beyond +-14 become +-14, without a warning. At each
step in --at, the first --tokens tokens of the validation split go through a copy of the model, in
training mode and in 8 bits. Counted are the values beyond the limits in the MLPs' input, which is the
output of the norm, and in the output of GELU or squared ReLU. The largest absolute values show how far
away the limit is. On a CPU, which has no 8-bit matmuls, the same values of the ordinary MLP are counted,
to try the program.

The run is that of --preset with --fp8 all, and with 131,072 tokens per step and for train_gpt2.py's
presets a peak learning rate of 1.2e-3, as in the runs of docs/RESULTS.md#epochs. Each counted step is one
JSON line in --out.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from records import RUNS, append_record, check_out, gpu_name, grouped, origin, print_rows, recorded

import speedrun
import train_gpt2
from lab.cli import RunError, UserError, parse_args, run_main
from lab.data.shards import TokenShards
from lab.distributed import World
from lab.kernels.fp8_mlp import ACTIVATION, HIDDEN, WEIGHT, Fp8MLP, mlp_products_fp8
from lab.kernels.fused_mlp import MIN_POSITIONS

E4M3_MAX = 448  # largest number of the 8-bit format of weights and activations


@dataclass
class Config:
    data: str = ""  # folder of token shards
    # shape and settings: speedrun is that of speedrun.py, the others are train_gpt2.py's
    preset: Literal["gpt2", "gpt2-medium", "gpt2-large", "laptop", "speedrun"] = "gpt2"
    # steps at which to count; the last one ends the run
    at: tuple[int, ...] = (0, 10, 100, 300, 1000)
    tokens: int = 65536  # of the validation split; a multiple of 16384, unless on a CPU
    total_batch_size: int = 131072  # tokens per step of training
    batch_size: int = 0  # sequences per micro-step; 0: the largest that fits in memory
    lr: float = 1.2e-3  # peak learning rate of train_gpt2.py's presets
    seed: int = 1337
    device: str = "auto"  # cuda or cpu
    table: bool = False  # print the counts in --out and exit
    out: str = str(RUNS / "saturation.jsonl")  # file of measurements


def mlp_values(mlp, x):
    """The MLP's input, and its activation function's name ("gelu" or "relu2") and output, before they are
    cast to 8 bits, in float32."""
    # GPT-2's MLP has biases, speedrun.py's none
    function = "relu2" if mlp.c_fc.bias is None else "gelu"
    if isinstance(mlp, Fp8MLP):
        weights = mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight, mlp.c_proj.bias
        x = x.bfloat16().flatten(0, -2)
        before = mlp_products_fp8(x, *weights, function)[1].float()
    else:
        before = mlp.c_fc(x).float()
    hidden = F.gelu(before, approximate="tanh") if function == "gelu" else F.relu(before).square()
    return x.float(), function, hidden


@torch.no_grad()
def count(mlp, x):
    """Numbers of values, and of saturated ones, of the norm's and the activation function's output in one
    MLP and of its weights, with the largest absolute values."""
    x, function, hidden = mlp_values(mlp, x)
    weights = torch.cat([mlp.c_fc.weight.flatten(), mlp.c_proj.weight.flatten()])
    parts = {
        "layernorm": (x, ACTIVATION), function: (hidden, HIDDEN[function]), "weight": (weights, WEIGHT),
    }  # fmt: skip
    return {
        name: dict(
            values=t.numel(), saturated=int((t.abs() > E4M3_MAX * scale).sum()), largest=t.abs().max().item()
        )
        for name, (t, scale) in parts.items()
    }  # fmt: skip


def count_model(model, x, precision, batch_size):
    """The counts of each block for token ids x (rows, T), summed over batches of batch_size rows."""
    model = copy.deepcopy(model).train()  # a hook on the model itself would make it compile again
    layers = [{} for _ in model.transformer.h]
    for layer, block in zip(layers, model.transformer.h):
        block.mlp.register_forward_pre_hook(partial(add_counts, layer))
    for rows in x.split(batch_size):
        with precision.autocast():
            model.hidden(rows)  # with gradients, because without them the MLPs do not use 8 bits
    return layers


def add_counts(layer, mlp, args):
    """Hook: add the counts of an MLP's input to those of its block."""
    for name, new in count(mlp, *args).items():
        if name in layer and name != "weight":  # the weights are the same in every batch
            old = layer[name]
            new = {key: old[key] + new[key] for key in ("values", "saturated")} | dict(
                largest=max(old["largest"], new["largest"])
            )
        layer[name] = new


def train_and_count(cfg):
    """Train, and append a record to --out at each step of --at. Returns the records."""
    world = World(cfg.device)
    fp8 = "all" if world.device.type == "cuda" else "off"
    program = speedrun if cfg.preset == "speedrun" else train_gpt2
    model_config, train = program.PRESETS[cfg.preset]
    train = replace(
        train, data=cfg.data, device=cfg.device, max_steps=max(1, *cfg.at), fp8=fp8, seed=cfg.seed,
        total_batch_size=cfg.total_batch_size, batch_size=cfg.batch_size,
    )  # fmt: skip
    if program is train_gpt2:
        train = replace(train, lr=cfg.lr, min_lr=cfg.lr / 10)
    train.validate(model_config)
    val = TokenShards(cfg.data, "val", model_config.vocab_size)
    T, rows = train.seq_len, cfg.tokens // train.seq_len
    if not 0 < rows <= (len(val) - 1) // T:
        raise UserError(
            f"tokens={cfg.tokens} must be from seq_len={T} to {len(val) - 1}, all of {cfg.data}"
        )
    if fp8 == "all" and cfg.tokens % MIN_POSITIONS:
        raise UserError(
            f"tokens={cfg.tokens} must be a multiple of {MIN_POSITIONS}, because smaller batches are "
            "computed in bf16"
        )
    x = torch.from_numpy(val.batch(range(0, rows * T, T), T)[0]).to(world.device)
    trainer, records, loss = program.build_trainer(model_config, train, world), [], math.nan
    blocks = trainer.raw_model.transformer.h
    if fp8 == "all" and not all(isinstance(block.mlp, Fp8MLP) for block in blocks):
        raise UserError("the MLPs were not replaced by 8-bit ones; see the message above")
    shared = dict(bench="saturation", device=gpu_name(world.device), fp8=fp8, preset=cfg.preset)
    shared |= dict(data=cfg.data.rstrip("/").rpartition("/")[2], seed=cfg.seed, lr=train.lr)
    shared |= dict(total_batch_size=cfg.total_batch_size, max_steps=train.max_steps)
    for step in sorted(set(cfg.at)):
        while trainer.step < step:
            loss = trainer.train_step()[0].sum().item()
            if not math.isfinite(loss):
                raise RunError(f"the loss is {loss} at step {trainer.step}; pass a smaller --lr")
        layers = count_model(trainer.raw_model, x, trainer.precision, MIN_POSITIONS // T)
        record = dict(step=step, train_loss=round(loss, 4) if step else None)
        records.append(shared | record | dict(tokens=rows * T, layers=layers) | origin())
        append_record(cfg.out, records[-1])
        print(f"step {step}, loss {record['train_loss']}: {total(layers)}", flush=True)
    return records


def total(layers):
    """One line about all blocks."""
    parts = []
    for name in layers[0]:
        saturated, values = (
            sum(layer[name][key] for layer in layers) for key in ("saturated", "values")
        )
        largest = max(layer[name]["largest"] for layer in layers)
        parts.append(f"{name} {saturated:,} of {values:,} saturated, largest {largest:.4g}")
    return "; ".join(parts)


def print_tables(records):
    """For each run: number of saturated values (largest absolute value) of each block at each step."""
    keys = "device", "torch", "fp8", "preset", "data", "seed", "lr", "total_batch_size", "max_steps"
    for about, steps in grouped(records, *keys).items():
        print("\n" + ", ".join(f"{key} {value}" for key, value in zip(keys, about)))
        for name, first in steps[0]["layers"][0].items():
            print(
                f"{name}: saturated of {first['values']:,} values per block (largest absolute value)"
            )
            rows = []
            for i in range(len(steps[0]["layers"])):
                found = [record["layers"][i][name] for record in steps]
                rows.append([i, *(f"{f['saturated']:,} ({f['largest']:.4g})" for f in found)])
            print_rows(["block", *(f"step {r['step']}" for r in steps)], rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if cfg.table:
        return print_tables(recorded(cfg.out, "saturation"))
    if not cfg.data:
        raise UserError("data is empty; pass a folder of token shards, made by fineweb.py")
    if min(cfg.at, default=-1) < 0:
        raise UserError(f"at={cfg.at} must be one or more steps, 0 or above")
    check_out(cfg.out, cpu=World(cfg.device).device.type == "cpu")
    print_tables(train_and_count(cfg))


if __name__ == "__main__":
    run_main(main)
