"""Check that torch.compile does not change the losses and gradients of a model.

    python bench/compiled.py --preset gpt2-large --n_layer 12     # defaults except for the depth
    python bench/compiled.py --preset gpt2-large --n_layer 12 --no_bf16_residual --kernels plain
    python bench/compiled.py --preset laptop --device cpu         # dry run without a GPU, one minute

Before version 2.14, torch.compile creates a race condition in wide models with a float32 residual stream
(triton-lang/triton#10924), as the second command shows: the first loss of GPT-2 774M over 16,384
targets was 0.03 too small, and training failed, without any error message. This program compares losses
and gradients of a micro-batch of random tokens: compiled, uncompiled, and in float32. Losses are
computed for the initial weights and after one update, gradients after the update. The distance of two
gradients is the norm of their difference divided by the norm of the second one. Uncompiled and float32
results are computed row by row to save memory. The exit status is 1 if compilation changes the first
loss by more than rounding.
"""

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from typing import Literal

import torch
from records import gpu_name, random_shards
from torch.nn.utils import parameters_to_vector

from lab.cli import UserError, parse_args, run_main
from lab.distributed import World
from lab.hardware import compile_unsupported_reason
from lab.precision import Precision
from train_gpt2 import PRESETS, GPTConfig, build_trainer, get_lr

KINDS = ("compiled", "uncompiled", "float32")


@dataclass
class Config:
    preset: Literal[tuple(PRESETS)] = "gpt2"  # shape and learning rate
    n_layer: int = 0  # number of blocks; 0: the preset's
    batch_size: int = 16  # sequences per micro-step; a step is one micro-step
    bf16_residual: bool = True  # residual stream in 16 bits
    kernels: Literal["fused", "plain"] = "fused"  # as in train_gpt2.py
    device: str = "auto"  # cuda, cuda:N or cpu


def parts(trainer, kind):
    """Yield parts of the mean loss of the next micro-batch: one if compiled, otherwise one per row."""
    x, y, _ = trainer.loader.micro_batch(trainer.loader.next_sequence, trainer.loader.micro_step)
    x, y = x.to(trainer.world.device), y.to(trainer.world.device)
    rows = [(x, y)] if kind == "compiled" else list(zip(x.split(1), y.split(1)))
    model = trainer.model if kind == "compiled" else trainer.raw_model
    for x_part, y_part in rows:
        with contextlib.nullcontext() if kind == "float32" else trainer.precision.autocast():
            part = model(x_part, y_part, reduction="sum")[1]
        yield part / max(1, (y >= 0).sum().item())


def loss(trainer, kind):
    # without gradients torch would recompile, and fused modules would use their plain versions
    with torch.set_grad_enabled(kind == "compiled"):
        return sum(part.item() for part in parts(trainer, kind))


def compile_error(trainer):
    """Compare the loss of the next micro-batch, compiled and uncompiled. Returns "" if the difference can be
    due to rounding, otherwise a sentence with both losses. Rounding to 16 and 8 bits may change the loss
    by 0.01 nats, and by more if there are few targets."""
    if trainer.model is trainer.raw_model:
        return ""
    compiled, plain = loss(trainer, "compiled"), loss(trainer, "uncompiled")
    targets = trainer.loader.batch_size * trainer.loader.seq_len
    if not math.isfinite(plain) or abs(compiled - plain) <= 0.01 + 0.5 / math.sqrt(targets):
        return ""
    return f"the loss is {compiled:.4f} compiled, but {plain:.4f} uncompiled"


def gradient(trainer, kind):
    """Gradient of the loss, as one vector of all parameters."""
    trainer.raw_model.zero_grad()
    for part in parts(trainer, kind):
        part.backward()
    found = parameters_to_vector([p.grad for p in trainer.raw_model.parameters()])
    trainer.raw_model.zero_grad()
    return found


def compare(trainer):
    """Print and return the losses of each kind before and after an update, and gradient distances."""
    print("{:20} {:>10} {:>10} {:>10} {:>12}".format("weights", *KINDS, "millinats"))
    rows = []
    for weights in ("initial", "after an update"):
        if rows:
            trainer.train_step()
        rows.append([loss(trainer, kind) for kind in KINDS])
        apart = 1000 * (rows[-1][0] - rows[-1][1])
        print("{:20} {:10.5f} {:10.5f} {:10.5f} {:+12.2f}".format(weights, *rows[-1], apart))
    compiled, plain, exact = (gradient(trainer, kind) for kind in KINDS)
    pairs = (compiled, exact), (plain, exact), (compiled, plain)
    found = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    line = "distances of gradients: compiled to float32 {:.4f}, uncompiled to float32 {:.4f}, compiled to "
    line += "uncompiled {:.4f}"
    print(line.format(*found))
    return rows, found


def build(cfg, world, folder):
    """The trainer of these settings, compiled even if can_compile returns False."""
    model, train = PRESETS[cfg.preset]
    shape = dict(n_layer=cfg.n_layer or model.n_layer, bf16_residual=cfg.bf16_residual)
    model = replace(model, **shape)
    train = replace(
        train,
        data=random_shards(folder, model.vocab_size),
        batch_size=cfg.batch_size,
        total_batch_size=cfg.batch_size * train.seq_len,
        precision="bf16",
        device=cfg.device,
        kernels=cfg.kernels,
        compile=False,
    )
    train.validate(model)
    trainer = build_trainer(model, train, world)
    trainer.model = torch.compile(trainer.raw_model, dynamic=False)
    return trainer


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    world = World(cfg.device)
    if reason := compile_unsupported_reason(
        world.device, GPTConfig(), Precision("fp32", world.device)
    ):
        raise UserError(f"device={cfg.device} cannot compile: {reason}; pass another --device")
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(cfg, world, folder)
        torch.set_float32_matmul_precision("highest")  # no TF32 in the float32 results
        blocks = trainer.raw_model.config.n_layer
        tokens = f"{cfg.batch_size} x {trainer.cfg.seq_len} tokens"
        where = f"{gpu_name(world.device)}, torch {torch.__version__}"
        lr = f"first learning rate {get_lr(0, trainer.cfg):.1e}"
        print(f"{cfg.preset}, {blocks} blocks, {tokens}, {where}, {lr}")
        wrong = compile_error(trainer)
        compare(trainer)
    print(f"WRONG: {wrong}" if wrong else "the losses agree within 16-bit rounding")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
