"""Does the compiled model compute what the model says? Run this before any claim about a new model.

    python bench/compiled.py --preset gpt2-large --n_layer 12     # but for the depth the trainer's defaults
    python bench/compiled.py --preset gpt2-large --n_layer 12 --no_bf16_residual --kernels plain
    python bench/compiled.py --preset laptop --device cpu         # a try without a GPU, in a minute

Torch before 2.14 compiles a race into a wide model whose residual stream has 32 bits, as the second
command shows (triton-lang/triton#10924): GPT-2 774M's first loss of 16,384 targets was 0.03 too
small, and its training worthless, without a word. So: losses of the next micro-batch and their
gradients are compared, compiled, uncompiled and in 32 bits, with the weights that training starts
from and after --updates updates. Gradients are those after the updates: the length of a difference
from the 32-bit one over the length of that. Uncompiled and in 32 bits all is computed row by row,
which takes little memory. The exit status is 1 where compiling changes the first loss by more than
rounding does. Without --data the tokens are random.
"""

import contextlib
import dataclasses
import math
import tempfile
from dataclasses import dataclass
from typing import Literal

import torch
from records import append_record, card_name, origin, random_shards

from lab.cli import UserError, command, parse
from lab.device import why_no_compile
from lab.files import check_writable
from lab.run.settings import check
from lab.world import World
from train_gpt2 import PRESETS, GPTConfig, get_lr, set_up

KINDS = ("compiled", "uncompiled", "32 bits")


@dataclass
class Config:
    preset: Literal[tuple(PRESETS)] = "gpt2"  # shape and learning rate
    n_layer: int = 0  # blocks; 0 is the preset's
    batch_size: int = 16  # sequences of a micro-step; a step has one
    updates: int = 1  # updates before the second look
    lr: float = 0.0  # rate of the updates; 0 is the trainer's
    bf16_residual: bool = True  # residual stream in 16 bits
    kernels: Literal["fused", "plain"] = "fused"  # as the trainer's
    data: str = ""  # folder of token shards; random tokens if empty
    device: str = "auto"  # cuda, cuda:N or cpu
    out: str = ""  # append the numbers to this file, as a JSON line
    commit: str = ""  # noted there where git is not at hand


def parts(run, kind):
    """What the mean loss of the next micro-batch, in nats, is the sum of: one part for the whole of
    it compiled, one for each row otherwise."""
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
    return (
        f"the compiled model has a loss of {compiled:.4f}, the same uncompiled one of {plain:.4f}"
    )


def gradient(run, kind):
    """{name: gradient} of that loss."""
    run.raw_model.zero_grad()
    for part in parts(run, kind):
        part.backward()
    found = {name: p.grad for name, p in run.raw_model.named_parameters()}
    run.raw_model.zero_grad()
    return found


def distance(a, b):
    """Length of a - b over the length of b, all tensors of the dicts together."""
    apart = sum((a[k] - b[k]).square().sum() for k in b)
    return (apart / sum(b[k].square().sum() for k in b)).sqrt().item()


def compare(run, updates):
    """Rows (weights, compiled, uncompiled, 32 bits) in nats, and the gradients' distances.
    Prints."""
    rows = []

    def look(weights):
        rows.append((weights, *(round(loss(run, kind), 5) for kind in KINDS)))
        difference = 1000 * (rows[-1][1] - rows[-1][2])
        print(
            "{:36} {:10.5f} {:10.5f} {:10.5f} {:+12.2f}".format(*rows[-1], difference), flush=True
        )

    print("{:36} {:>10} {:>10} {:>10} {:>12}".format("weights", *KINDS, "millinats"))
    look("as training starts")
    for _ in range(updates):
        run.update()
    look(f"after {updates} update{'s' * (updates != 1)}")
    exact, plain, compiled = (gradient(run, kind) for kind in reversed(KINDS))
    found = {"compiled": distance(compiled, exact), "uncompiled": distance(plain, exact)}
    found["apart"] = distance(compiled, plain)
    print(
        "gradients: {compiled:.4f} compiled and {uncompiled:.4f} uncompiled from the 32-bit one, "
        "{apart:.4f} from each other".format(**found)
    )
    return rows, found


def set_up_run(cfg, world, data):
    """The trainer's Run of these settings, compiled also where the trainer knows better."""
    model, train = PRESETS[cfg.preset]
    model = dataclasses.replace(
        model, n_layer=cfg.n_layer or model.n_layer, bf16_residual=cfg.bf16_residual
    )
    train = dataclasses.replace(
        train,
        data=data,
        batch_size=cfg.batch_size,
        total_batch_size=cfg.batch_size * train.seq_len,
        precision="bf16",
        device=cfg.device,
        kernels=cfg.kernels,
        compile=False,
    )
    if cfg.lr:
        train = dataclasses.replace(train, lr=cfg.lr, min_lr=0.0, warmup_steps=0)
    check(model, train)
    run = set_up(model, train, world)
    run.model = torch.compile(run.raw_model, dynamic=False)
    return run


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    world = World(cfg.device)
    if cfg.out:
        check_writable(cfg.out, "out")
    if reason := why_no_compile(world.device, GPTConfig()):
        raise UserError(
            f"device={cfg.device} compiles nothing, there is nothing to compare: {reason}"
        )
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = PRESETS[cfg.preset][0].vocab_size
        run = set_up_run(cfg, world, cfg.data or random_shards(folder, vocab_size))
        torch.set_float32_matmul_precision("highest")  # the 32 bits are to have all of their digits
        model, card = run.raw_model.config, card_name(world.device)
        print(
            f"{cfg.preset}, {model.n_layer} blocks, {cfg.batch_size} x {run.cfg.seq_len} tokens, {card}, "
            f"torch {torch.__version__}, first rate {get_lr(0, run.cfg):.1e}",
            flush=True,
        )
        wrong = differs(run)
        rows, gradients = compare(run, cfg.updates)
        print(f"WRONG: {wrong}" if wrong else "the losses agree, as far as 16 bits tell")
    if cfg.out:
        about = dict(preset=cfg.preset, n_layer=model.n_layer, batch_size=cfg.batch_size, card=card)
        about |= dict(bf16_residual=cfg.bf16_residual, kernels=cfg.kernels, wrong=wrong)
        found = dict(losses=rows, gradients=gradients) | origin("", cfg.commit)
        append_record(cfg.out, {"bench": "compiled"} | about | found)
    return 1 if wrong else 0


if __name__ == "__main__":
    command(main)
