"""Two versions of this repository by turns on one machine: speed, memory and losses of the same
run.

    git worktree add /tmp/before a3954dc
    python bench/compare.py --before /tmp/before                       # bf16 and 8 bits, one GPU
    python bench/compare.py --before /tmp/before --nproc 2 --settings bf16 zero1     # bf16 is DDP
    python bench/compare.py --table                                    # what --out holds

GPUs of one kind differ by some percent, and one GPU by a percent from minute to minute. So both
versions take turns, before, after, before, after, and what counts is the median of the pairs'
ratios. What runs is train_gpt2.py itself: GPT-2 124M, 524,288 tokens a step in micro-steps of 64 x
1024, on random tokens unless --data names shards. On one GPU both stay in memory, and the one whose
turn it is not is stopped (SIGSTOP): a turn costs no start and no compilation. Several GPUs take a
whole run for each turn, as a stopped process would leave its exchange waiting on the GPU. tokens/s
is the median of what log.jsonl says every two steps, without the first step and those that a pause
lies in. The losses are compared step by step.
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

from records import (
    ROOT,
    RUNS,
    append_record,
    check_out,
    origin,
    print_rows,
    random_shards,
    recorded,
)

from lab.cli import UserError, command, parse

# name: flags of the trainer until a3954dc, and since
SETTINGS = {
    "bf16": ("", ""),
    "fp8_head": ("--cross_entropy fp8", "--fp8 head"),
    "fp8_all": ("--cross_entropy fp8 --fp8_mlp", "--fp8 all"),
    "zero1": ("--zero1", "--parallel zero1"),
    "zero1_fp8_all": ("--zero1 --cross_entropy fp8 --fp8_mlp", "--parallel zero1 --fp8 all"),
}
SIDES = ("before", "after")
LOG_EVERY = 2  # a rate is measured over so many steps
RUN = f"""--preset gpt2 --batch_size 64 --total_batch_size 524288 --val_every 0 --hella_every 0
    --sample_every 0 --ckpt_every 0 --log_dir log --run_name run --log_every {LOG_EVERY}"""


@dataclass
class Config:
    before: str = ""  # checkout of the version to compare with
    settings: tuple[Literal[tuple(SETTINGS)], ...] = ("bf16", "fp8_head", "fp8_all")
    pairs: int = 5  # turns of each version in each setting
    steps: int = 10  # updates of a turn
    nproc: int = 1  # GPUs, each with a process of its own
    data: str = ""  # folder of token shards; random tokens if empty
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
    checkout = Path(cfg.before if side == "before" else ROOT).resolve()
    words = [sys.executable]
    if cfg.nproc > 1:
        words += f"-m torch.distributed.run --standalone --nproc_per_node {cfg.nproc}".split()
    words += [str(checkout / "train_gpt2.py"), *RUN.split(), "--data", data]
    words += ["--max_steps", str(steps), *flags_of(checkout, setting), *shlex.split(cfg.also)]
    # NVLink's multicast stays off unless the environment says otherwise: its failure would be all
    # users'
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ
    folder.mkdir()
    with (folder / "said").open("w") as said:
        how = dict(cwd=folder, env=env, stdout=said, stderr=said, process_group=0)
        return subprocess.Popen(words, **how)


def events_of(process, folder):
    """The events of a run's log so far. Raises UserError with its last words if it has failed."""
    if process.poll():
        said = "\n".join((folder / "said").read_text().splitlines()[-15:])
        raise UserError(f"{' '.join(process.args)} failed:\n{said}")
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
            process = start(side, setting, cfg, folder / side, data, 10**6)
            running[side] = process, folder / side
            wait(side, 1)
            os.killpg(process.pid, signal.SIGSTOP)
        for side in SIDES * cfg.pairs:
            before = len(wait(side, 1))
            os.killpg(running[side][0].pid, signal.SIGCONT)
            events = wait(side, before + 1 + cfg.steps // LOG_EVERY)
            os.killpg(running[side][0].pid, signal.SIGSTOP)
            yield side, events[before + 1 :]  # the first has the pause in it
    finally:
        for process, _ in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def whole_runs(setting, cfg, folder, data):
    """The same, each turn a run from its start to its end."""
    for i, side in enumerate(SIDES * cfg.pairs):
        process = start(side, setting, cfg, folder / str(i), data, cfg.steps)
        process.wait()
        yield side, events_of(process, folder / str(i))


def numbers(events):
    """A record's numbers from the events of a turn."""
    timed = [e for e in events if "tok_per_s" in e]
    return {
        "tok_per_s": round(statistics.median(e["tok_per_s"] for e in timed)),
        "peak_gib": max((round(e["peak_gib"], 3) for e in timed if "peak_gib" in e), default=None),
        "losses": {e["step"]: e["loss"] for e in events if e["kind"] == "train"},
    }


def measure(cfg, data):
    """All turns, each a line of --out."""
    turns = whole_runs if cfg.nproc > 1 else take_turns
    for setting in cfg.settings:
        with tempfile.TemporaryDirectory() as folder:
            for side, events in turns(setting, cfg, Path(folder), data):
                about = dict(setting=setting, nproc=cfg.nproc, side=side, gpu=gpu(), also=cfg.also)
                record = {"bench": "compare"} | about | numbers(events) | origin()
                append_record(cfg.out, record)
                print(f"{setting} {side}: {record['tok_per_s']:,} tokens/s", flush=True)


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
            rows[-1] += [a["peak_gib"] or "", b["peak_gib"] or ""]
            rows[-1] += [f"{list(b['losses'].values())[-1]:.4f}", f"{apart:.1e}"]
        head = "pair,before tok/s,after,ratio,before GiB,after,loss,apart at most"
        print_rows(head.split(","), rows)
        for field, bound in (("tok_per_s", 0.01), ("peak_gib", 0.02)):
            if value := ratio(pairs, field):
                within = f"within {bound:.0%}: {abs(value - 1) <= bound}"
                print(f"{field}: median of after / before {value:.4f}, {within}")


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    if not cfg.table:
        if not cfg.before:
            raise UserError("name the checkout to compare with: --before FOLDER")
        check_out(cfg.out, cpu=False)
        with tempfile.TemporaryDirectory() as folder:
            data = cfg.data and str(Path(cfg.data).resolve())
            measure(cfg, data or random_shards(folder, 50257, 2**24))
    print_tables(recorded(cfg.out, "compare"))


if __name__ == "__main__":
    command(main)
