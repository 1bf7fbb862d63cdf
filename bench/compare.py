"""Two versions of this repository by turns on one machine: speed, memory and losses of the same
run.

    git worktree add /tmp/before a3954dc
    python bench/compare.py --before /tmp/before                       # bf16 and 8 bits, one GPU
    python bench/compare.py --before /tmp/before --settings bf16 --hella hellaswag_val.jsonl
    python bench/compare.py --before /tmp/before --nproc 2 --settings bf16 zero1     # bf16 is DDP
    python bench/compare.py --table                                    # what --out holds

GPUs of one kind differ by some percent, and one GPU by a percent from minute to minute. So both
versions take turns, before, after, before, after, and what counts is the median of the pairs'
ratios. What runs is train_gpt2.py itself: GPT-2 124M, 524,288 tokens a step in micro-steps of 64 x
1024, on random tokens unless --data names shards. On one GPU both stay in memory, and the one whose
turn it is not is stopped (SIGSTOP): a turn costs no start and no compilation. Several GPUs, and
HellaSwag, take a whole run for each turn, as a stopped process would leave its exchange waiting on
the GPU. tokens/s is the median of what log.jsonl says every --log_every steps, without the first
step and those that a pause lies in. The peak is that before any HellaSwag, whose seconds are those
of the second of two evaluations. The losses are compared step by step.
"""

import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import ROOT, RUNS, append_record, origin, print_rows, random_shards, read_records

from lab.cli import UserError, command, parse
from lab.files import check_writable

# name: flags of the trainer until a3954dc, and since
SETTINGS = {
    "bf16": ("", ""),
    "fp8_head": ("--cross_entropy fp8", "--fp8 head"),
    "fp8_all": ("--cross_entropy fp8 --fp8_mlp", "--fp8 all"),
    "zero1": ("--zero1", "--parallel zero1"),
    "zero1_fp8_all": ("--zero1 --cross_entropy fp8 --fp8_mlp", "--parallel zero1 --fp8 all"),
}
SIDES = ("before", "after")
RUN = """--preset gpt2 --batch_size 64 --total_batch_size 524288 --val_every 0 --sample_every 0
    --ckpt_every 0 --run_name run"""


@dataclass
class Config:
    before: str = ""  # checkout of the version to compare with
    after: str = str(ROOT)  # checkout of the other one
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("bf16", "fp8_head", "fp8_all")
    pairs: int = 5  # turns of each version in each setting
    steps: int = 10  # updates of a turn
    log_every: int = 2  # a rate is measured over so many
    nproc: int = 1  # GPUs, each with a process of its own
    data: str = ""  # folder of token shards; random tokens if empty
    hella: str = ""  # hellaswag_val.jsonl: measure seconds of HellaSwag too
    also: str = ""  # more flags of both, in quotes: --also="--preset laptop --device cpu"
    out: str = str(RUNS / "compare.jsonl")  # file of measurements
    table: bool = False  # print what the file holds, measure nothing


def flags_of(checkout, setting):
    """What this version of the trainer calls a setting."""
    program = Path(checkout) / "train_gpt2.py"
    if not program.is_file():
        raise UserError(f"{checkout} is no checkout of this repository: it has no train_gpt2.py")
    return SETTINGS[setting]["parallel: Literal" in program.read_text(encoding="utf-8")].split()


def start(side, setting, cfg, folder, data, steps):
    """The trainer of a version, on its way in the empty `folder`."""
    checkout = Path(getattr(cfg, side))
    words = [sys.executable]
    if cfg.nproc > 1:
        words += f"-m torch.distributed.run --standalone --nproc_per_node {cfg.nproc}".split()
    words += [
        checkout.resolve() / "train_gpt2.py",
        *RUN.split(),
        "--data",
        data,
        "--log_dir",
        "log",
    ]
    words += ["--max_steps", steps, "--log_every", cfg.log_every]
    words += ["--hella_every", steps // 2 if cfg.hella else 0]
    words += [*flags_of(checkout, setting), *shlex.split(cfg.also)]
    if cfg.hella:  # both versions look for it below the folder that they run in
        (folder / "data" / "hellaswag").mkdir(parents=True)
        link = folder / "data" / "hellaswag" / "hellaswag_val.jsonl"
        link.symlink_to(Path(cfg.hella).resolve())
    # NVLink's multicast stays off unless the environment says otherwise: its failure would be all
    # users'
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ
    with (folder / "said").open("w") as said:
        how = dict(cwd=folder, env=env, stdout=said, stderr=said, process_group=0)
        return subprocess.Popen(list(map(str, words)), **how)


def events_of(process, folder):
    """The events of a run's log so far. Raises UserError with its last words if it has failed."""
    if process.poll():
        said = "\n".join((folder / "said").read_text().splitlines()[-15:])
        raise UserError(f"{' '.join(map(str, process.args))} failed:\n{said}")
    log = folder / "log" / "run" / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def take_turns(setting, cfg, folder, data):
    """Yield (side, records of its turn), before, after, before, after, of two processes on one
    GPU."""
    running = {}

    def wait(side, count):
        while True:
            timed = [e for e in events_of(*running[side]) if "tok_per_s" in e]
            if len(timed) >= count:
                return timed
            time.sleep(0.02)

    try:
        for side in SIDES:
            (folder / side).mkdir()
            process = start(side, setting, cfg, folder / side, data, 10**6)
            running[side] = process, folder / side
            wait(side, 1)
            os.killpg(process.pid, signal.SIGSTOP)
        for side in SIDES * cfg.pairs:
            before = len(wait(side, 1))
            os.killpg(running[side][0].pid, signal.SIGCONT)
            events = wait(side, before + 1 + cfg.steps // cfg.log_every)
            os.killpg(running[side][0].pid, signal.SIGSTOP)
            yield side, events[before + 1 :]  # the first has the pause in it
    finally:
        for process, _ in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def whole_runs(setting, cfg, folder, data):
    """The same, each turn a run from its start to its end."""
    for i, side in enumerate(SIDES * cfg.pairs):
        (folder / str(i)).mkdir()
        process = start(side, setting, cfg, folder / str(i), data, cfg.steps)
        process.wait()
        yield side, events_of(process, folder / str(i))


def numbers(events):
    """A record's numbers from the events of a turn."""
    timed = [e for e in events if "tok_per_s" in e]
    kinds = [e["kind"] for e in events]
    quiet = events[: kinds.index("hella")] if "hella" in kinds else events
    hella = [b["time"] - a["time"] for a, b in zip(events, events[1:]) if b["kind"] == "hella"]
    peaks = [e["peak_gib"] for e in quiet if "peak_gib" in e]
    return {
        "tok_per_s": round(statistics.median(e["tok_per_s"] for e in timed)),
        "peak_gib": round(max(peaks), 3) if peaks else None,
        "hella_s": round(hella[-1], 2) if len(hella) > 1 else None,
        "losses": {e["step"]: e["loss"] for e in events if e["kind"] == "train"},
        "rates": [round(e["tok_per_s"]) for e in timed],
    }


def measure(cfg, data):
    """All turns, each a line of --out."""
    turns = whole_runs if cfg.nproc > 1 or cfg.hella else take_turns
    for setting in cfg.settings:
        with tempfile.TemporaryDirectory() as folder:
            for side, events in turns(setting, cfg, Path(folder), data):
                found = numbers(events)
                about = dict(
                    bench="compare", setting=setting, nproc=cfg.nproc, side=side, gpu=gpu()
                )
                about |= dict(checkout=Path(getattr(cfg, side)).resolve().name, also=cfg.also)
                append_record(cfg.out, about | found | origin())
                print(f"{setting} {side}: {found['tok_per_s']:,} tokens/s", flush=True)


def gpu():
    """Name and number of the first GPU, as those of one name differ; this process opens none."""
    words = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def pairs_of(records):
    """{(setting, nproc, GPU, also): [(before, after), ...]} of what was measured one after the
    other."""
    found, waiting = {}, {}
    for r in records:
        key = r["setting"], r["nproc"], r["gpu"], r["also"]
        if r["side"] == "before":
            waiting[key] = r
        elif key in waiting:
            found.setdefault(key, []).append((waiting.pop(key), r))
    return found


def ratio(pairs, field):
    """Median of after / before over the pairs, or None where nothing was measured."""
    pairs = [(a[field], b[field]) for a, b in pairs if a[field] and b[field]]
    return statistics.median(b / a for a, b in pairs) if pairs else None


def print_tables(records):
    for (setting, nproc, gpu_name, also), pairs in pairs_of(records).items():
        print(f"\n{setting}, {nproc} x {gpu_name or 'CPU'} {also}".rstrip())
        rows = []
        for number, (a, b) in enumerate(pairs, start=1):
            steps = a["losses"].keys() & b["losses"].keys()
            apart = max((abs(a["losses"][k] - b["losses"][k]) for k in steps), default=math.nan)
            rows.append([number, f"{a['tok_per_s']:,}", f"{b['tok_per_s']:,}"])
            rows[-1] += [f"{b['tok_per_s'] / a['tok_per_s']:.4f}"]
            rows[-1] += [r[k] or "" for k in ("peak_gib", "hella_s") for r in (a, b)]
            rows[-1] += [f"{list(b['losses'].values())[-1]:.4f}", f"{apart:.1e}"]
        head = "pair,before tok/s,after,ratio,before GiB,after,before HellaSwag s,after"
        print_rows([*head.split(","), "loss", "apart at most"], rows)
        for field, bound in (("tok_per_s", 0.01), ("peak_gib", 0.02), ("hella_s", None)):
            value = ratio(pairs, field)
            if value:
                within = f", within {bound:.0%}: {abs(value - 1) <= bound}" if bound else ""
                print(f"{field}: median of after / before {value:.4f}{within}")


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.before:
            raise UserError("name the checkout to compare with: --before FOLDER")
        check_writable(cfg.out, "out")
        with tempfile.TemporaryDirectory() as folder:
            data = (
                str(Path(cfg.data).resolve()) if cfg.data else random_shards(folder, 50257, 2**24)
            )
            measure(cfg, data)
    records = [r for r in read_records(cfg.out) if r.get("bench") == "compare"]
    if not records:
        raise UserError(f"{cfg.out} holds no comparison; without --table one is made")
    print_tables(records)


if __name__ == "__main__":
    command(main)
