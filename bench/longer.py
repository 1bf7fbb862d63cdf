"""Extend a speedrun.py run to a longer context: loss by position and retrieval of a planted fact.

    python bench/longer.py --model log/RUN --data FOLDER       # four times its block_size
    python bench/longer.py --model log/RUN --data FOLDER --length 8192 --updates 0 100

For each --scaling (see speedrun.py --rope_scaling) and each number of --updates at the new length,
there are two measurements. Loss by position: the mean loss of the tokens of each eighth of the
context, over windows of the validation split. Retrieval: a sentence that tells the secret word of a
name, one of ten, is planted in a text of the new length, some distance before its end, and the end
asks for the word. The answer is the most probable of the ten words, so guessing gives 10 %. With the
distance "none", nothing is planted. The updates are made by speedrun.py --init_from in a process of
its own. Every measurement is a line in --out.
"""

import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from records import ROOT, append_record, gpu_name, origin, print_rows, run_program

from lab.cli import UserError, parse_args, require, run_main
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.files import check_writable
from lab.precision import Precision
from lab.registry import load_model, resolve_source, tokenizer_name

SCALINGS = ("none", "linear", "ntk", "yarn")
PARTS = 8  # of the context, for loss by position
NAMES = """Adams Baker Carter Davis Evans Fisher Graham Harris Irving Johnson Kelly Lewis Mason
Nelson Owens Parker Reed Stewart Turner Walker""".split()
WORDS = "red blue green gold silver wood stone iron glass paper".split()
LETTERS = "abcdefghij"  # instead of WORDS for a tokenizer that has no token for each of them
FACT, QUESTION = " The secret word of Mr. {} is {}.", " The secret word of Mr. {} is"


@dataclass
class Config:
    model: str = ""  # speedrun.py run, trained with its block_size
    data: str = ""  # folder of token shards
    length: int = 0  # new context; 0: four times the model's
    scaling: tuple[str, ...] = SCALINGS  # values of --rope_scaling to compare
    updates: tuple[int, ...] = (0, 50)  # updates at the new length before measuring
    tokens_per_update: int = 131072  # tokens of one update
    windows: int = 128  # windows of the validation split, for loss by position
    facts: int = 200  # planted facts per distance
    batch_size: int = 4  # windows at a time, also in the updates
    muon_lr: float = 0.003  # peak learning rate; like the others, a tenth of speedrun.py's
    device: str = "auto"  # cuda or cpu
    seed: int = 1  # random seed of the planted facts and the updates
    out: str = "longer.jsonl"  # file of measurements


def extended(model, length, scaling, trained_length):
    """The model with another context and rotation, and the same weights."""
    c = model.config
    c.block_size, c.rope_scaling, c.trained_length = length, scaling, trained_length
    c.validate()
    return model


def update(cfg, steps, length, scaling, trained_length, folder):
    """Train at the new length with speedrun.py; returns the model."""
    lrs = {"lr": 3e-4, "embed_lr": 0.03, "scalar_lr": 1.5e-3, "muon_lr": cfg.muon_lr}
    flags = dict(
        init_from=cfg.model, data=cfg.data, device=cfg.device, block_size=length, seq_len=length,
        rope_scaling=scaling, trained_length=trained_length, max_steps=steps, decay_steps=steps,
        batch_size=cfg.batch_size, total_batch_size=cfg.tokens_per_update, batch_warmup_steps=0,
        val_every=0, checkpoint_every=steps, sample_every=0, hellaswag_every=0, seed=cfg.seed,
        log_dir=folder, run_name="run", momentum_warmup=0, **lrs,
    )  # fmt: skip
    words = ["--no_compile", *(w for name, value in flags.items() for w in (f"--{name}", value))]
    run_program([ROOT / "speedrun.py", *words], ROOT)
    return load_model(str(Path(folder, "run")))


@torch.no_grad()
def loss_by_position(model, shards, length, windows, batch_size, precision):
    """Mean loss (PARTS,) of each part of the context, on the first windows of the split."""
    sums, device = torch.zeros(PARTS, dtype=torch.float64), next(model.parameters()).device
    windows = min(windows, (len(shards) - 1) // length)
    require(
        windows > 0,
        f"data={shards.folder} has fewer than length={length} validation tokens; pass another --data",
    )
    for start in range(0, windows, batch_size):
        offsets = [i * length for i in range(start, min(windows, start + batch_size))]
        x, y = (torch.from_numpy(t).to(device) for t in shards.batch(offsets, length))
        with precision.autocast():
            losses = model(x, y, reduction="none")[1]  # (B, T)
        sums += losses.double().view(len(x), PARTS, -1).mean(2).sum(0).cpu()
    return (sums / windows).tolist()


def choices(tokenizer):
    """Ten words, and the one token by which each differs from the others after the question."""
    for words in (WORDS, LETTERS):
        ids = [tokenizer.encode(QUESTION.format("Adams") + " " + word) for word in words]
        last = [row[-1] for row in ids]
        if len(set(map(tuple, (row[:-1] for row in ids)))) == 1 and len(set(last)) == len(words):
            return words, last
    raise UserError(
        "the tokenizer has no ten words or letters of one token each; pass another --model"
    )


def planted(shards, tokenizer, length, distance, rng):
    """(ids (length,), index of the right choice): a window of text with a question at its end and, if
    distance is not None, the fact that answers it `distance` tokens before."""
    words, last = choices(tokenizer)
    name, right = rng.choice(NAMES), rng.randrange(len(words))
    question = tokenizer.encode(QUESTION.format(name) + " " + words[right])[:-1]
    text = shards.read(rng.randrange(len(shards)), length - len(question)).tolist()
    if distance is not None:
        fact = tokenizer.encode(FACT.format(name, words[right]))
        start = max(0, len(text) - max(distance, len(fact)))
        text[start : start + len(fact)] = fact
    return text + question, right


@torch.no_grad()
def retrieval(model, shards, tokenizer, length, distance, cfg, precision):
    """Fraction of planted facts whose word is the most probable of the ten."""
    rng, hits, device = random.Random(cfg.seed), 0, next(model.parameters()).device
    last = torch.tensor(choices(tokenizer)[1], device=device)
    rows = [planted(shards, tokenizer, length, distance, rng) for _ in range(cfg.facts)]
    for start in range(0, len(rows), cfg.batch_size):
        ids, right = zip(*rows[start : start + cfg.batch_size])
        with precision.autocast():
            x = model.hidden(torch.tensor(ids, device=device))[:, -1]
            logits = model.lm_head(x)[:, last]
        hits += int((logits.argmax(-1).cpu() == torch.tensor(right)).sum())
    return hits / len(rows)


def distances(trained_length, length):
    """Distances in tokens: within the trained length, beyond it, and no fact at all (None)."""
    fractions = (0.1, 0.5, 0.95)
    near = [round(f * trained_length) for f in fractions]
    far = [round(trained_length + f * (length - trained_length)) for f in fractions]
    return [*near, *far, None]


def measure(model, cfg, length, trained_length, world):
    precision = Precision("auto", world.device)
    precision.set_matmul_precision()
    model.to(world.device).eval()
    shards = TokenShards(cfg.data, "val", model.config.vocab_size)
    tokenizer = get_tokenizer(tokenizer_name(model.config, cfg.data))
    losses = loss_by_position(model, shards, length, cfg.windows, cfg.batch_size, precision)
    found = {
        str(d).lower(): retrieval(model, shards, tokenizer, length, d, cfg, precision)
        for d in distances(trained_length, length)
    }
    return dict(losses=losses, retrieval=found, chance=1 / len(WORDS))


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    require(cfg.model and cfg.data, "model or data is empty; pass --model RUN and --data FOLDER")
    if unknown := set(cfg.scaling) - set(SCALINGS):
        raise UserError(f"scaling={unknown.pop()} is not one of {', '.join(SCALINGS)}")
    check_writable(cfg.out, "out")
    cfg.model, world = str(Path(resolve_source(cfg.model)).resolve()), World(cfg.device)
    cfg.data, first = str(Path(cfg.data).resolve()), load_model(cfg.model)
    if not getattr(first.config, "rotary", False):
        raise UserError(f"model={cfg.model} has no rotary positions; name a run of speedrun.py")
    trained_length = first.config.block_size
    length = cfg.length or 4 * trained_length
    require(
        length % PARTS == 0 and length > trained_length,
        f"length={length} must be a multiple of {PARTS} above the model's block_size={trained_length}",
    )
    rows = []
    for steps in cfg.updates:
        for scaling in cfg.scaling:
            print(f"{scaling}, {steps} updates ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                how = (length, scaling, trained_length)
                model = update(cfg, steps, *how, folder) if steps else load_model(cfg.model)
                found = measure(extended(model, *how), cfg, length, trained_length, world)
            record = dict(bench="longer", scaling=scaling, updates=steps, length=length)
            record |= dict(
                trained_length=trained_length, device=gpu_name(cfg.device), seed=cfg.seed
            )
            append_record(cfg.out, record | found | origin())
            losses = [f"{loss:.3f}" for loss in found["losses"]]
            shares = [f"{share:.0%}" for share in found["retrieval"].values()]
            rows.append([f"{scaling}, {steps} updates", *losses, *shares])
    ends = [str(length * (i + 1) // PARTS) for i in range(PARTS)]
    at = [f"at {d}" for d in distances(trained_length, length)]
    print("loss of the tokens up to each position, and facts found by distance (chance: 10 %)")
    print_rows(["", *ends, *at[:-1], "no fact"], rows)


if __name__ == "__main__":
    run_main(main)
