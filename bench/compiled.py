"""Does the compiled model compute what the model says? Run this before any claim about a new model.

    python bench/compiled.py --preset gpt2-large --n_layer 12     # but for the depth the trainer's defaults
    python bench/compiled.py --preset gpt2-large --n_layer 12 --no_bf16_residual --kernels plain
    python bench/compiled.py --preset laptop --device cpu         # a try without a GPU, in a minute

Torch before 2.14 compiles a race into a wide model whose residual stream has 32 bits, as the second
command shows (triton-lang/triton#10924): GPT-2 774M's first loss of 16,384 targets was 0.03 too
small, and its training worthless, without a word. So: losses of the next micro-batch of random
tokens and their gradients are compared, compiled, uncompiled and in 32 bits, with the weights that
training starts from and after an update. Gradients are those after the update: the length of a
difference from the 32-bit one over the length of that. Uncompiled and in 32 bits all is computed
row by row, which takes little memory. The exit status is 1 where compiling changes the first loss
by more than rounding does.
"""

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from typing import Literal

import torch
from records import gpu_name, random_shards
from torch.nn.utils import parameters_to_vector

from lab.cli import UserError, command, parse
from lab.device import Precision, why_no_compile
from lab.run.settings import check
from lab.world import World
from train_gpt2 import PRESETS, GPTConfig, get_lr, set_up

KINDS = ("compiled", "uncompiled", "32 bits")


@dataclass
class Config:
    preset: Literal[tuple(PRESETS)] = "gpt2"  # shape and learning rate
    n_layer: int = 0  # blocks; 0 is the preset's
    batch_size: int = 16  # sequences of a micro-step; a step has one
    bf16_residual: bool = True  # residual stream in 16 bits
    kernels: Literal["fused", "plain"] = "fused"  # as the trainer's
    device: str = "auto"  # cuda, cuda:N or cpu


def parts(run, kind):
    """What the next micro-batch's mean loss is the sum of: one part if compiled, else one a row."""
    x, y, _ = run.loader.micro_batch(run.loader.sequence, run.loader.micro_step)
    x, y = x.to(run.world.device), y.to(run.world.device)
    rows = [(x, y)] if kind == "compiled" else list(zip(x.split(1), y.split(1)))
    model = run.model if kind == "compiled" else run.raw_model
    for x_part, y_part in rows:
        with contextlib.nullcontext() if kind == "32 bits" else run.precision.autocast():
            part = model(x_part, y_part, reduction="sum")[1]
        yield part / max(1, (y >= 0).sum().item())


def loss(run, kind):
    # without gradients the compiled one would be compiled anew, with the plain modules
    with torch.set_grad_enabled(kind == "compiled"):
        return sum(part.item() for part in parts(run, kind))


def differs(run):
    """ "" if compiling changes the loss of the next micro-batch by no more than rounding, else what
    it is, in a sentence. 16 and 8 bits may cost 0.01 nats a target, and more where few targets do
    not cancel."""
    if run.model is run.raw_model:
        return ""
    compiled, plain = loss(run, "compiled"), loss(run, "uncompiled")
    targets = run.loader.batch_size * run.loader.seq_len
    if not math.isfinite(plain) or abs(compiled - plain) <= 0.01 + 0.5 / math.sqrt(targets):
        return ""
    return f"the compiled model has a loss of {compiled:.4f}, the same uncompiled {plain:.4f}"


def gradient(run, kind):
    """That of this loss, all parameters' in one vector."""
    run.raw_model.zero_grad()
    for part in parts(run, kind):
        part.backward()
    found = parameters_to_vector([p.grad for p in run.raw_model.parameters()])
    run.raw_model.zero_grad()
    return found


def compare(run):
    """Print the losses by kind, before and after an update, and return them, with the gradients'
    distances."""
    print("{:20} {:>10} {:>10} {:>10} {:>12}".format("weights", *KINDS, "millinats"))
    rows = []
    for weights in ("as training starts", "after an update"):
        if rows:
            run.update()
        rows.append([loss(run, kind) for kind in KINDS])
        apart = 1000 * (rows[-1][0] - rows[-1][1])
        print("{:20} {:10.5f} {:10.5f} {:10.5f} {:+12.2f}".format(weights, *rows[-1], apart))
    compiled, plain, exact = (gradient(run, kind) for kind in KINDS)
    pairs = (compiled, exact), (plain, exact), (compiled, plain)
    found = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    how = "gradients: {:.4f} compiled and {:.4f} uncompiled from the 32-bit one, {:.4f} from each other"
    print(how.format(*found))
    return rows, found


def set_up_run(cfg, world, folder):
    """The trainer's Run of these settings, compiled also where the trainer knows better."""
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
    check(model, train)
    run = set_up(model, train, world)
    run.model = torch.compile(run.raw_model, dynamic=False)
    return run


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    world = World(cfg.device)
    if reason := why_no_compile(world.device, GPTConfig(), Precision("fp32", world.device)):
        raise UserError(f"device={cfg.device} compiles nothing, nothing to compare: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        run = set_up_run(cfg, world, folder)
        torch.set_float32_matmul_precision("highest")  # the 32 bits are to have all of their digits
        blocks, tokens = (
            run.raw_model.config.n_layer,
            f"{cfg.batch_size} x {run.cfg.seq_len} tokens",
        )
        where = f"{gpu_name(world.device)}, torch {torch.__version__}"
        print(
            f"{cfg.preset}, {blocks} blocks, {tokens}, {where}, first rate {get_lr(0, run.cfg):.1e}"
        )
        wrong = differs(run)
        compare(run)
    print(f"WRONG: {wrong}" if wrong else "the losses agree, as far as 16 bits tell")
    return 1 if wrong else 0


if __name__ == "__main__":
    command(main)
