"""Does the compiled model compute what the model says? Its loss and gradients beside the same uncompiled, and in 32 bits.

    python bench/compiled.py --preset gpt2-large --n_layer 12                        # the trainer's defaults, but for the depth
    python bench/compiled.py --preset gpt2-large --n_layer 12 --no_bf16_residual --no_fused_mlp  # wrong with torch before 2.14
    python bench/compiled.py --preset laptop --device cpu                            # a try without a GPU, in a minute

Losses are of the next micro-batch, with the weights that training starts from, then after --updates of the trainer's first
updates, and then with one kind of bias set to 0, which shows through which of them a difference comes. Gradients are those
after the updates: the length of a difference from the 32-bit one, over the length of that. Uncompiled and in 32 bits all is
computed row by row, which takes little memory, and the uncompiled MLP is never the fused one. Without --data the tokens are
drawn at random, id i as often as 1 / (10 + i).
"""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from records import append_record, card_name, one_sentence, origin, random_shards  # noqa: E402

from lab.device import out_of_memory, why_no_compile  # noqa: E402
from lab.run.locks import check_writable  # noqa: E402
from lab.run.log import PhaseClock  # noqa: E402
from lab.run.stop import running  # noqa: E402
from lab.run.vitals import check_config  # noqa: E402
from train_gpt2 import PRESETS, World, compile_model, get_lr, prepare, train_step  # noqa: E402

BIASES = ("mlp.c_proj.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "attn.c_attn.bias")


class Pair:
    """One model, to be called compiled and not. Raises ValueError where torch.compile does not work."""

    def __init__(self, model_config, cfg, world):
        if reason := why_no_compile(world.device):
            raise ValueError(f"device={cfg.device} compiles nothing, so there is nothing to compare: {reason}")
        self.cfg, self.world = cfg, world
        self.precision, self.raw_model, self.optimizer, self.loader, _ = prepare(model_config, cfg, world)
        self.model = compile_model(self.raw_model, cfg, world, SimpleNamespace(say=print))
        self.updates = 0

    def update(self):
        lr = get_lr(self.updates, self.cfg)
        clock = PhaseClock(False, self.world.device)
        train_step(self.model, self.optimizer, self.loader, lr, self.cfg, self.world, self.precision, clock)
        self.updates += 1

    def parts(self, kind):
        """What `kind` of loss is the sum of: one part for the whole micro-batch, or one for each of its rows."""
        x, y, num_targets = self.loader.micro_batch(self.loader.sequence, self.loader.micro_step)
        x, y = x.to(self.world.device), y.to(self.world.device)
        model, pieces = (self.model, [(x, y)]) if kind == "compiled" else (self.raw_model, list(zip(x.split(1), y.split(1))))
        for x_part, y_part in pieces:
            with contextlib.nullcontext() if kind == "32 bits" else self.precision.autocast():
                part = model(x_part, y_part, reduction="sum")[1] / max(1, num_targets)
            yield part

    def loss(self, kind):
        """Mean loss of the next micro-batch in nats; kind is compiled, uncompiled or 32 bits."""
        # without gradients it would be compiled anew, and its MLP not be the fused one
        with torch.set_grad_enabled(kind == "compiled"):
            return sum(part.item() for part in self.parts(kind))

    def gradient(self, kind):
        """{name: gradient} of that loss."""
        self.raw_model.zero_grad()
        for part in self.parts(kind):
            part.backward()
        found = {name: p.grad for name, p in self.raw_model.named_parameters()}
        self.raw_model.zero_grad()
        return found


def distance(a, b):
    """Length of a - b over the length of b, all tensors of the dicts together."""
    return (sum((a[k] - b[k]).square().sum() for k in b) / sum(b[k].square().sum() for k in b)).sqrt().item()


@contextlib.contextmanager
def without(model, ending):
    """Parameters with names of this ending are 0 while the body runs."""
    chosen = [p for name, p in model.named_parameters() if name.endswith(ending)]
    kept = [p.detach().clone() for p in chosen]
    with torch.no_grad():
        torch._foreach_zero_(chosen)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(chosen, kept)


def compare(pair, updates):
    """Rows (weights, compiled, uncompiled, 32 bits) in nats, and the gradients' distances from the 32-bit one. Prints."""
    rows, kinds = [], ("compiled", "uncompiled", "32 bits")

    def look(weights):
        rows.append((weights, *(round(pair.loss(kind), 5) for kind in kinds)))
        difference = 1000 * (rows[-1][1] - rows[-1][2])
        print("{:36} {:10.5f} {:10.5f} {:10.5f} {:+12.2f}".format(*rows[-1], difference), flush=True)

    print(f"{'weights':36} {'compiled':>10} {'uncompiled':>10} {'32 bits':>10} {'millinats':>12}")
    look("as training starts")
    for _ in range(updates):
        pair.update()
    look(f"after {updates} update{'s' * (updates != 1)}")
    for ending in BIASES:
        with without(pair.raw_model, ending):
            look(f"  those with {ending} = 0")
    exact, plain, compiled = (pair.gradient(kind) for kind in reversed(kinds))
    found = {"compiled": distance(compiled, exact), "uncompiled": distance(plain, exact)}
    print("gradient's distance from the 32-bit one: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()))
    found["apart"] = distance(compiled, plain)
    print(f"from each other {found['apart']:.4f}")
    return rows, found


def run(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2", choices=PRESETS, help="shape and learning rate (gpt2)")
    parser.add_argument("--n_layer", type=int, default=0, help="blocks; 0 is the preset's (0)")
    parser.add_argument("--batch_size", type=int, default=16, help="sequences of a micro-step; a step has one (16)")
    parser.add_argument("--updates", type=int, default=1, help="updates before the second look (1)")
    parser.add_argument("--lr", type=float, default=0.0, help="rate of the updates; 0 is the trainer's (0)")
    parser.add_argument("--no_bf16_residual", action="store_true", help="residual stream in 32 bits")
    parser.add_argument("--no_fused_mlp", action="store_true", help="GELU outside of the products")
    parser.add_argument("--data", default="", help="folder of token shards; random tokens if empty")
    parser.add_argument("--device", default="auto", help="cuda, cuda:N or cpu (auto)")
    parser.add_argument("--out", default="", help="append the numbers to this file, as a JSON line")
    parser.add_argument("--commit", default="", help="noted there where git is not at hand")
    args = parser.parse_args(argv)
    for name, least in (("batch_size", 1), ("updates", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}={getattr(args, name)} must be at least {least}")
    if args.out:
        check_writable(args.out, "out")
    model_config, cfg = PRESETS[args.preset]
    changes = dict(bf16_residual=not args.no_bf16_residual, fused_mlp=not args.no_fused_mlp)
    model_config = dataclasses.replace(model_config, n_layer=args.n_layer or model_config.n_layer, **changes)
    world = World(args.device)
    with tempfile.TemporaryDirectory() as folder:
        cfg = dataclasses.replace(
            cfg, data=args.data or random_shards(folder, model_config.vocab_size), batch_size=args.batch_size, precision="bf16",
            total_batch_size=args.batch_size * cfg.seq_len, device=args.device, compile=True,
        )  # fmt: skip
        if args.lr:
            cfg = dataclasses.replace(cfg, lr=args.lr, min_lr=0.0, warmup_steps=0)
        check_config(model_config, cfg)
        pair = Pair(model_config, cfg, world)
        torch.set_float32_matmul_precision("highest")  # the 32 bits are to have all of their digits
        card = card_name(world.device)
        print(f"{args.preset}, {model_config.n_layer} blocks, {args.batch_size} x {cfg.seq_len} tokens, {card}, "
              f"torch {torch.__version__}, first rate {get_lr(0, cfg):.1e}", flush=True)  # fmt: skip
        rows, gradients = compare(pair, args.updates)
        pair.loader.worker.shutdown()
    if args.out:
        about = dict(preset=args.preset, n_layer=model_config.n_layer, batch_size=args.batch_size, card=card) | changes
        record = {"bench": "compiled"} | about | dict(losses=rows, gradients=gradients)
        append_record(args.out, record | origin("", args.commit))


if __name__ == "__main__":
    try:
        with running("compiled.py"):
            run(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"compiled.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:  # the compiler's and the allocator's own words are many lines
        full = "it does not fit in memory; pass a smaller --batch_size or --n_layer"
        print(f"compiled.py: error: {full if out_of_memory(error) else one_sentence(error)}", file=sys.stderr)
        sys.exit(2)
