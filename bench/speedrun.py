"""Recipes against each other: GPT-2's, the trainer's with Muon, a readable one of the field,
speedrun's, and speedrun's without each of its differences. Loss at equal seconds, seconds to a loss.

    python bench/speedrun.py --seconds 60 --target 3.6        # on a GPU, FineWeb-Edu's tokens
    python bench/speedrun.py --data data/mine --seconds 60 --gpus 4 --recipes muon speedrun
    python bench/speedrun.py --scale laptop --seconds 110     # two cores, the built-in text
    python bench/speedrun.py --scale laptop --steps 100       # equal tokens: on a busy machine too

Each run is the real program in a process of its own. With --seconds a short run first tells how
many steps fit, so that every schedule ends in time. Seconds are those of training: measuring and the
first update, which compiles, are left out. Every finished run is a line in --out, and is not made
again; the table is of all that is there for these settings. If this program is killed, the run that
it times goes on: end that one before you begin again.

RECIPES says what each recipe is; no_X is speedrun without the difference X, +X with one more.
"""

import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import ROOT, append_record, origin, print_rows, read_records, run_program

from lab.cli import RunError, UserError, command, parse
from lab.files import check_writable

READABLE = """--no_smear --value_tables 0 --optimizer muon --momentum_warmup 0
    --weight_decay 0.01 --small_steps 0"""
RATES = "--muon_lr 0.02 --lr 0.003125 --embed_lr 0.3 --scalar_lr 0.01"  # the field's, at this size
MARK = "--total_batch_size 131072 --val_tokens 1048576"
GPU, LAPTOP = f"--preset speedrun {MARK}", "--preset laptop"
OFF = {
    "rotary": "--no_rotary", "qk_norm": "--no_qk_norm", "relu2": "--mlp gelu",
    "untied": "--tied",
    "values": "--value_tables 0", "smear": "--no_smear",
    "normuon": "--optimizer muon", "momentum": "--momentum_warmup 0",
}  # fmt: skip
MORE = {  # what a GPU alone can decide
    "fp8_head": "--fp8 head", "bigrams": "--bigram_rows 250000",
}  # fmt: skip
LESS = {  # a laptop's has them not, or in other sizes
    "small_start": "--small_steps 0", "decay": "--weight_decay 0",
    "rates": "--embed_lr 0.003 --scalar_lr 0.003",
}  # fmt: skip
SMALL = {"values": "--value_tables 1", "smear": "--smear"}
RECIPES = {
    "gpu": {
        "gpt2": f"train_gpt2.py --preset gpt2 {MARK} --lr 1.2e-3 --min_lr 1.2e-4",
        "muon": f"""train_gpt2.py --preset gpt2 {MARK} --optimizer muon --muon_lr 0.02 --lr 1.8e-3
            --min_lr 0 --schedule wsd --warmup_steps 0.025 --decay_steps 0.625 --fp8 all""",
        "readable": f"speedrun.py {GPU} {READABLE} {RATES}",
        "speedrun": f"speedrun.py {GPU}",
        **{f"no_{name}": f"speedrun.py {GPU} {flags}" for name, flags in (OFF | LESS).items()},
        **{f"+{name}": f"speedrun.py {GPU} {flags}" for name, flags in MORE.items()},
    },
    "laptop": {
        "gpt2": "train_gpt2.py --preset laptop --optimizer adamw --weight_decay 0.1 --schedule cosine",
        "muon": "train_gpt2.py --preset laptop",
        "readable": f"speedrun.py {LAPTOP} {READABLE} --bigram_rows 0",
        "speedrun": f"speedrun.py {LAPTOP}",
        **{
            f"no_{k}": f"speedrun.py {LAPTOP} {flags}" for k, flags in OFF.items() if k not in SMALL
        },
        **{f"+{k}": f"speedrun.py {LAPTOP} {flags}" for k, flags in SMALL.items()},
        "no_bigrams": f"speedrun.py {LAPTOP} --bigram_rows 0",
        "no_rates": f"speedrun.py {LAPTOP} --embed_lr 0.01 --scalar_lr 0.01",
        "+decay": f"speedrun.py {LAPTOP} --weight_decay 0.1",
    },
}


@dataclass
class Config:
    scale: Literal["gpu", "laptop"] = "gpu"  # which model, and which recipes
    data: str = ""  # folder of token shards; the program's own if empty
    recipes: tuple[str, ...] = ()  # all of the scale if empty
    seeds: tuple[int, ...] = (1, 2, 3)
    seconds: float = 0  # of training, for each run; or
    steps: int = 0  # updates, for each run
    target: float = 0  # loss whose time the table shows
    more: str = ""  # flags for every run: --more="--no_compile"
    gpus: int = 1  # processes of a run
    out: str = "speedrun.jsonl"  # a line for each finished run


def train(recipe, seed, steps, cfg, folder, measured=True):
    """The log of one run of the real program, as a list of dicts. Raises UserError."""
    program, *flags = RECIPES[cfg.scale][recipe].split()
    every = max(1, steps // 10)
    flags += f"--val_every {every} --sample_every 0 --hella_every 0".split() + cfg.more.split()
    flags += f"--max_steps {steps} --seed {seed} --log_every {every} --ckpt_every 0".split()
    flags += ["--run_name", "run", "--log_dir", folder, *(["--data", cfg.data] if cfg.data else [])]
    flags += [] if measured else ["--val_every", "0"]
    run_program([ROOT / program, *flags], ROOT, cfg.gpus)
    return read_records(Path(folder, "run", "log.jsonl"))


def timed(log):
    """[(seconds of training, step, validation loss)]; the first update counts as the next ones."""
    seconds, before, curve = 0.0, 0, []
    for e in log:
        if e["kind"] == "train" and "dt_ms" in e:
            seconds, before = seconds + (e["step"] - before) * e["dt_ms"] / 1000, e["step"]
        elif e["kind"] == "val":
            curve.append((round(seconds, 3), e["step"], e["loss"]))
    return curve


def measure(recipe, seed, cfg):
    """The record of one run."""
    with tempfile.TemporaryDirectory() as folder:
        steps = cfg.steps
        if not steps:
            probe = train(recipe, seed, 30, cfg, str(Path(folder, "probe")), measured=False)
            # all but the first update, as a recipe may have smaller steps at its beginning
            times = [e["dt_ms"] for e in probe if e["kind"] == "train" and "dt_ms" in e]
            steps = max(10, round(1000 * cfg.seconds / statistics.fmean(times)))
        log = train(recipe, seed, steps, cfg, str(Path(folder, "whole")))
    newest = {e["kind"]: e for e in log}
    if not {"train", "val"} <= newest.keys():
        raise UserError(f"{recipe} measured nothing; take out what of more={cfg.more} forbids it")
    start, first, last = (newest[kind] for kind in ("start", "first_step", "train"))
    return dict(
        curve=timed(log), run_steps=steps, tokens=last["tokens"], device=start["device"],
        num_params=start["num_params"], first_step_seconds=first["seconds"],
    )  # fmt: skip


def seconds_to(curve, target):
    """When a curve comes to a loss, on a line between two measurements; None if never."""
    if curve[0][2] <= target:
        return curve[0][0]
    for (t0, _, a), (t1, _, b) in zip(curve, curve[1:]):
        if b <= target:
            return t0 + (t1 - t0) * (a - target) / (a - b)
    return None


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 97.5 % of Student's t, by the number of runs


def interval(differences):
    """Mean and 95 % interval of differences between runs of the same seeds."""
    n, mean = len(differences), statistics.mean(differences)
    if n < 2:
        return f"{mean:+.4f}"
    error = STUDENT.get(n, 2.57) * statistics.stdev(differences) / n**0.5
    return f"{mean:+.4f} +- {error:.4f}"


def table(found, target):
    """Print {recipe: {seed: record}}."""
    rows, base, middle = [], found.get("speedrun", {}), statistics.median
    for recipe, runs in found.items():
        losses = {seed: r["curve"][-1][2] for seed, r in runs.items()}
        spread = max(losses.values()) - min(losses.values())
        both = [losses[s] - base[s]["curve"][-1][2] for s in losses if s in base]
        to = [t for r in runs.values() if (t := seconds_to(r["curve"], target)) is not None]
        rows.append([
            recipe, len(runs), middle(r["run_steps"] for r in runs.values()),
            f"{middle(r['curve'][-1][0] for r in runs.values()):.1f}",
            f"{middle(losses.values()):.4f}", f"{spread:.4f}",
            interval(both) if both and recipe != "speedrun" else "",
            f"{middle(to):.1f}" if len(to) == len(runs) else "",
            f"{middle(r['first_step_seconds'] for r in runs.values()):.0f}",
        ])  # fmt: skip
    devices = {r["device"] for runs in found.values() for r in runs.values()}
    if len(devices) > 1:
        print(f"seconds are of {' and of '.join(sorted(devices))}: do not compare", file=sys.stderr)
    head = "recipe,seeds,steps,seconds,median loss,spread,to speedrun's (95 %)".split(",")
    print_rows([*head, f"s to {target}" if target else "", "first step, s"], rows)


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    known = RECIPES[cfg.scale]
    if unknown := set(cfg.recipes) - set(known):
        raise UserError(f"recipes={unknown.pop()} is not one of {', '.join(known)}")
    if cfg.gpus < 1:
        raise UserError(f"gpus={cfg.gpus} must be 1 or more")
    if not (0 < cfg.seconds < math.inf and not cfg.steps or 0 < cfg.steps and not cfg.seconds):
        raise UserError("a run has --seconds or --steps, a positive number; pass one of them")
    cfg.data = cfg.data and str(Path(cfg.data).resolve())
    check_writable(cfg.out, "out")
    same = {k: getattr(cfg, k) for k in "scale data gpus more seconds steps".split()}
    found = {}
    for r in read_records(cfg.out):
        if same.items() <= r.items() and r["flags"] == known.get(r["recipe"]):
            found.setdefault(r["recipe"], {})[r["seed"]] = r
    for seed in cfg.seeds:  # seed by seed: what drifts with time hits all recipes
        for recipe in cfg.recipes or known:
            if old := found.get(recipe, {}).get(seed):
                print(
                    f"{recipe}, seed {seed}: as {old['commit']} had it; --out FILE measures anew",
                    file=sys.stderr,
                )
                continue
            print(f"{recipe}, seed {seed} ...", file=sys.stderr, flush=True)
            record = same | dict(recipe=recipe, seed=seed, flags=known[recipe])
            try:
                record |= measure(recipe, seed, cfg) | origin()
            except UserError as error:  # the others go on
                print(error, file=sys.stderr)
                continue
            append_record(cfg.out, record)
            found.setdefault(recipe, {})[seed] = record
    if not found:
        raise RunError("no run has ended well: see above")
    table(found, cfg.target)


if __name__ == "__main__":
    command(main)
