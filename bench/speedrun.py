"""Compare training recipes: loss after equal seconds or steps, and seconds to a target loss.

    python bench/speedrun.py --seconds 60 --target 3.6        # on a GPU, on FineWeb-Edu's tokens
    python bench/speedrun.py --data data/mine --seconds 60 --gpus 4 --recipes muon speedrun
    python bench/speedrun.py --scale laptop --seconds 110     # two cores, the built-in text
    python bench/speedrun.py --scale laptop --steps 100       # equal tokens; works on a busy machine

The recipes (RECIPES): gpt2 (GPT-2's), muon (train_gpt2.py with Muon), readable (only common techniques),
speedrun (speedrun.py), no_X (speedrun.py without the difference X) and +X (with the addition X).

Each run is the real program in its own process. With --seconds, a short run first measures how many steps
fit, so that the schedule of every run ends in time. Seconds are those of training, without evaluation and
the first update, which compiles. Each finished run is a line in --out and is not repeated; the table
shows all runs in --out with these settings. If this program is killed, the current run continues; stop it
before starting again.
"""

import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import ROOT, append_record, origin, print_rows, read_records, run_program

from lab.cli import RunError, UserError, parse_args, run_main
from lab.files import check_writable

READABLE = """--no_smear --value_tables 0 --optimizer muon --momentum_warmup 0
    --weight_decay 0.01 --batch_warmup_steps 0"""
RATES = "--muon_lr 0.02 --lr 0.003125 --embed_lr 0.3 --scalar_lr 0.01"  # usual for this size
MARK = "--total_batch_size 65536 --val_tokens 1048576 --fp8 all"
GPU, LAPTOP = f"--preset speedrun {MARK}", "--preset laptop"
OFF = {
    "rotary": "--no_rotary", "qk_norm": "--no_qk_norm", "relu2": "--mlp gelu",
    "untied": "--tied",
    "values": "--value_tables 0", "smear": "--no_smear",
    "normuon": "--optimizer muon", "momentum": "--momentum_warmup 0",
}  # fmt: skip
LESS = {  # differences that the laptop recipe does not have, or has with other values
    "small_start": "--batch_warmup_steps 0", "decay": "--weight_decay 0", "rows": "--no_equilibrate_rows",
    "rates": "--embed_lr 0.003 --scalar_lr 0.003",
}  # fmt: skip
SMALL = {"values": "--value_tables 1", "smear": "--smear"}
RECIPES = {
    "gpu": {
        "gpt2": f"train_gpt2.py --preset gpt2 {MARK}",
        "muon": f"""train_gpt2.py --preset gpt2 {MARK} --optimizer muon --muon_lr 0.04 --lr 1.8e-3
            --min_lr 0 --schedule wsd --warmup_steps 0.025 --decay_steps 0.625""",
        "readable": f"speedrun.py {GPU} {READABLE} {RATES} --no_equilibrate_rows --beta2 0.95",
        "speedrun": f"speedrun.py {GPU}",
        **{f"no_{name}": f"speedrun.py {GPU} {flags}" for name, flags in (OFF | LESS).items()},
        "+bigrams": f"speedrun.py {GPU} --bigram_rows 250000",
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
    scale: Literal["gpu", "laptop"] = "gpu"  # model and recipes
    data: str = ""  # folder of token shards; default: the program's
    recipes: tuple[str, ...] = ()  # default: all recipes of the scale
    seeds: tuple[int, ...] = (1, 2, 3)  # one run of each recipe per seed
    seconds: float = 0  # training time per run; pass this or --steps
    steps: int = 0  # updates per run
    target: float = 0  # print the seconds to this loss; 0: don't
    more: str = ""  # more flags for every run: --more="--no_compile"
    gpus: int = 1  # GPUs per run, one process each
    out: str = "speedrun.jsonl"  # file of measurements, one line per finished run


def train(recipe, seed, steps, cfg, folder, measured=True):
    """Run the program and return the records of its log. Raises UserError if it fails."""
    program, *flags = RECIPES[cfg.scale][recipe].split()
    every = max(1, steps // 10)
    flags += f"--val_every {every} --sample_every 0 --hellaswag_every 0".split() + cfg.more.split()
    flags += f"--max_steps {steps} --seed {seed} --log_every {every} --checkpoint_every 0".split()
    flags += ["--run_name", "run", "--log_dir", folder, *(["--data", cfg.data] if cfg.data else [])]
    flags += [] if measured else ["--val_every", "0"]
    run_program([ROOT / program, *flags], ROOT, cfg.gpus)
    return read_records(Path(folder, "run", "log.jsonl"))


def timed(log):
    """[(seconds of training, step, validation loss)]. The time of the first update counts as the average."""
    seconds, before, curve = 0.0, 0, []
    for e in log:
        if e["kind"] == "train" and "dt_ms" in e:
            seconds, before = seconds + (e["step"] - before) * e["dt_ms"] / 1000, e["step"]
        elif e["kind"] == "val":
            curve.append((round(seconds, 3), e["step"], e["loss"]))
    return curve


def measure(recipe, seed, cfg):
    """Make one run and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        steps = cfg.steps
        if not steps:
            probe = train(recipe, seed, 30, cfg, str(Path(folder, "probe")), measured=False)
            # without the first update; the mean, because a recipe may start with smaller steps
            times = [e["dt_ms"] for e in probe if e["kind"] == "train" and "dt_ms" in e]
            steps = max(10, round(1000 * cfg.seconds / statistics.fmean(times)))
        log = train(recipe, seed, steps, cfg, str(Path(folder, "whole")))
    newest = {e["kind"]: e for e in log}
    if not {"train", "val"} <= newest.keys():
        raise UserError(
            f"more={cfg.more} leaves {recipe} without training or validation records; change --more"
        )
    start, first, last = (newest[kind] for kind in ("start", "first_step", "train"))
    return dict(
        curve=timed(log), run_steps=steps, tokens=last["tokens"], device=start["device"],
        num_params=start["num_params"], first_step_seconds=first["seconds"],
    )  # fmt: skip


def seconds_to(curve, target):
    """Seconds at which a curve reaches a loss, with linear interpolation; None if it does not."""
    if curve[0][2] <= target:
        return curve[0][0]
    for (t0, _, a), (t1, _, b) in zip(curve, curve[1:]):
        if b <= target:
            return t0 + (t1 - t0) * (a - target) / (a - b)
    return None


STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # {number of runs: 97.5 % quantile}


def interval(differences):
    """Mean and 95 % confidence interval of differences between runs with the same seeds, as text."""
    n, mean = len(differences), statistics.mean(differences)
    if n < 2:
        return f"{mean:+.4f}"
    error = STUDENT_T.get(n, 2.57) * statistics.stdev(differences) / n**0.5
    return f"{mean:+.4f} +- {error:.4f}"


def table(found, target):
    """Print the table of {recipe: {seed: record}}."""
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
        print(f"seconds of {' and '.join(sorted(devices))} cannot be compared", file=sys.stderr)
    head = "recipe,seeds,steps,seconds,median loss,spread,minus speedrun's (95 %)".split(",")
    print_rows([*head, f"s to {target}" if target else "", "first step, s"], rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    known = RECIPES[cfg.scale]
    if unknown := set(cfg.recipes) - set(known):
        raise UserError(f"recipes={unknown.pop()} is not one of {', '.join(known)}")
    if cfg.gpus < 1:
        raise UserError(f"gpus={cfg.gpus} must be 1 or more")
    if not (0 < cfg.seconds < math.inf and not cfg.steps or 0 < cfg.steps and not cfg.seconds):
        raise UserError(
            f"exactly one of seconds={cfg.seconds} and steps={cfg.steps} must be above 0; pass one of them"
        )
    cfg.data = cfg.data and str(Path(cfg.data).resolve())
    check_writable(cfg.out, "out")
    same = {k: getattr(cfg, k) for k in "scale data gpus more seconds steps".split()}
    found = {}
    for r in read_records(cfg.out):
        if same.items() <= r.items() and r["flags"] == known.get(r["recipe"]):
            found.setdefault(r["recipe"], {})[r["seed"]] = r
    for seed in cfg.seeds:  # the outer loop, so that a drift of the machine affects all recipes
        for recipe in cfg.recipes or known:
            if old := found.get(recipe, {}).get(seed):
                print(
                    f"{recipe}, seed {seed}: from commit {old['commit']}; to repeat it, pass another --out",
                    file=sys.stderr,
                )
                continue
            print(f"{recipe}, seed {seed} ...", file=sys.stderr, flush=True)
            record = same | dict(recipe=recipe, seed=seed, flags=known[recipe])
            try:
                record |= measure(recipe, seed, cfg) | origin()
            except UserError as error:  # continue with the other runs
                print(error, file=sys.stderr)
                continue
            append_record(cfg.out, record)
            found.setdefault(recipe, {})[seed] = record
    if not found:
        raise RunError("no run has finished; see the errors above")
    table(found, cfg.target)


if __name__ == "__main__":
    run_main(main)
