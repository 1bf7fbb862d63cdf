"""Send signals to the three training programs in each phase of a run and check how they end.

    python bench/signals.py --rounds 200
    python bench/signals.py --phase saving --seed 7 --rounds 1   # repeat one round

The programs take turns. Each round starts one with a tiny run, waits until its files show that the
phase has begun, waits for a random time, and sends SIGINT, SIGTERM or SIGHUP. In three of ten rounds, a
second signal follows. The checks are:

- The exit status is one of those in docs/RUNS.md. It is 75, with a checkpoint, if the run had made an
  update and got one signal.
- There is no traceback and no hang.
- Every checkpoint is complete, and --resume continues the run.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from records import random_shards

import fineweb
from lab.cli import ROOT, UserError, parse_args, require, run_main
from lab.trainer.checkpoint import checkpoint_files, read_checkpoint

PROGRAMS = "train_gpt2.py", "speedrun.py", "bert.py"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# a process counts as hung after IDLE seconds without CPU time, or BUSY seconds of CPU time
IDLE, BUSY = 120, 120
TINY = (
    "--preset laptop --device cpu --run_name r --n_layer 1 --n_head 2 --n_embd 32 "
    "--block_size 32 --seq_len 16 --batch_size 4 --total_batch_size 128 --no_compile"
).split()
NOTHING_ELSE = dict(val_every=0, sample_every=0, checkpoint_every=0)
# flags that make the phase take most of the time, and the longest wait in it (seconds)
PHASES = {
    "import": ({}, 4),
    "setup": ({}, 4),
    "training": (NOTHING_ELSE, 1),
    "validation": (NOTHING_ELSE | dict(val_every=1, val_tokens=40_000), 1),
    "sampling": (NOTHING_ELSE | dict(sample_every=1, sample_tokens=500), 1),
    "saving": (NOTHING_ELSE | dict(checkpoint_every=1, n_embd=512), 0.05),
    "resume": (dict(val_every=2, val_tokens=256, sample_every=3, checkpoint_every=2), 1),
}


@dataclass
class Config:
    """Send signals to the three training programs in each phase and check how they end."""

    rounds: int = 35
    seed: int = 0  # of the first round; each further one adds 1
    phase: Literal[("", *PHASES)] = ""  # all, in turn, if empty


class Process:
    """A training program in `folder`, with its output in files."""

    def __init__(self, folder, program, *flags):
        self.folder = Path(folder)
        command = [sys.executable, ROOT / program, *map(str, flags)]
        env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self.popen = subprocess.Popen(
                command, cwd=folder, env=os.environ | env | {"PYTHONUNBUFFERED": "1"}, stdout=out, stderr=err,
                preexec_fn=receive_signals,
            )  # fmt: skip

    def reached(self, phase, before):
        """Whether the files show that this phase has begun, or that it is over. before: the length of
        the log when the process started."""
        log = self.folder / "log/r/log.jsonl"
        match phase:
            case "import":
                return True
            case "setup":  # torch's libraries are loaded
                with contextlib.suppress(OSError):
                    return "libtorch_python" in Path(f"/proc/{self.popen.pid}/maps").read_text()
                return False
            case "resume":
                return log.stat().st_size > before
            case "saving":
                return has_updated(log, before) and any(log.parent.glob("*.part"))
        return has_updated(log, before)

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self):
        """The exit status, or None if the process hangs (see IDLE, BUSY). A limit on wall-clock time would
        also end processes that only wait for a busy CPU."""
        limit, last = 0.0, -1.0
        while self.popen.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.popen.wait(IDLE)
            now = self.cpu_seconds()
            limit = limit or now + BUSY
            if now == last or now > limit:
                return self.abort()
            last = now
        return self.popen.returncode

    def abort(self):
        """End a process that hangs. PYTHONFAULTHANDLER makes it print the stack of each thread."""
        self.popen.send_signal(signal.SIGABRT)
        self.popen.wait()

    @property
    def errors(self):
        return (self.folder / "err").read_text(errors="replace")


def receive_signals():
    """In a new process: reset the signals that it would otherwise ignore because of nohup or `&`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def make_data(folder):
    """Write shards for the three programs into `folder`/data and, for bert.py, `folder`/bert."""
    random_shards(folder / "data", 257, 2000, 100_000)
    files = dict(source=str(ROOT / "docs"), out=str(folder / "bert"))
    limits = dict(tokenizer="wordpiece", vocab_size=300, val_tokens="85k")
    with contextlib.redirect_stderr(io.StringIO()):
        fineweb.build(fineweb.completed(fineweb.Config(**files, **limits, workers=0)))


def flags_of(program, phase, data):
    """The flags of a tiny run in which this phase takes most of the time."""
    settings = {"data": data / ("bert" if program == "bert.py" else "data")} | PHASES[phase][0]
    return [*TINY, *(word for name, value in settings.items() for word in (f"--{name}", value))]


@functools.cache
def finished_run(program, data):
    """A folder with a run of three steps of this program, to be resumed."""
    folder = data / f"run_of_{program}"
    folder.mkdir()
    process = Process(folder, program, *flags_of(program, "resume", data), "--max_steps", 3)
    require(process.wait() == 0, f"a run without signals failed: {process.errors}")
    return folder


def one_round(phase, seed, data):
    """(program, description, exit status, problem or "") of one round. data: the folder of make_data."""
    rng = random.Random(f"{phase}{seed}")
    program, numbers = PROGRAMS[seed % len(PROGRAMS)], [rng.choice(SIGNALS)]
    if rng.random() < 0.3:
        numbers.append(rng.choice(SIGNALS))
    with tempfile.TemporaryDirectory(prefix="signals") as folder:
        flags = flags_of(program, phase, data)
        if phase == "resume":
            shutil.copytree(finished_run(program, data), folder, dirs_exist_ok=True)
            flags = ["--resume", "--run_name", "r"]
        log = Path(folder, "log/r/log.jsonl")
        before = len(log.read_bytes()) if log.exists() else 0
        process = Process(folder, program, *flags, "--max_steps", 10**6)
        try:
            first = phase if phase != "resume" or rng.random() < 0.7 else "setup"
            while not process.reached(first, before) and process.popen.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, PHASES[phase][1]))
            updated = has_updated(log, before)
            process.popen.send_signal(numbers[0])
            for number in numbers[1:]:
                time.sleep(rng.uniform(0, 0.5))
                process.popen.send_signal(number)
        except KeyboardInterrupt:  # of this program
            process.popen.kill()
            raise
        status = process.wait()
        names = " and ".join(number.name for number in numbers)
        text = f"{program} {names} during {phase}{' after an update' * updated}: status {status}"
        problem = find_problem(process, status, numbers, updated)
        return program, text, status, problem or check_run(folder, program, status)


def has_updated(log, before):
    """Whether the process has made an update, according to the log from byte `before` on."""
    return log.exists() and b'"first_step"' in log.read_bytes()[before:]


def find_problem(process, status, numbers, updated):
    """The problem with the exit status or the messages, or ""."""
    if status is None:
        return f"hang: {process.errors}"
    # Before the run installs its handlers, a signal kills the process, or Python ends it with status 130
    # after a Ctrl-C. No program can catch a Ctrl-C before its first line.
    allowed = {75} if updated else {75, 130, *(-number for number in numbers)}
    if signal.SIGINT in numbers[1:]:
        allowed |= {130, -signal.SIGINT}
    if status not in allowed or ("Traceback" in process.errors and not is_early(process.errors)):
        return process.errors or f"the status must be one of {sorted(allowed)}"
    return ""


def is_early(errors):
    """Whether a traceback is that of a Ctrl-C before the program calls pre_import_setup(), while Python
    starts or imports standard modules. No program can handle that."""
    found = re.search(rf'File ".*({"|".join(map(re.escape, PROGRAMS))})", line ([0-9]+)', errors)
    if found is None:
        return "line 0, in <module>\nKeyboardInterrupt" in errors
    before = (ROOT / found[1]).read_text().partition("    pre_import_setup()")[0]
    return int(found[2]) <= before.count("\n") and errors.endswith("KeyboardInterrupt\n")


def check_run(folder, program, status):
    """The problem with the run directory that a process left, or ""."""
    log = Path(folder, "log/r/log.jsonl")
    try:
        steps = [read_checkpoint(path)["step"] for path in checkpoint_files(log.parent)]
    except UserError as error:
        return str(error)
    if not steps:
        return "it made an update but saved nothing" if status == 75 and has_updated(log, 0) else ""
    if status == 75:
        end = json.loads(log.read_text().splitlines()[-1])
        if end["kind"] != "end" or end["step"] not in steps:
            return f"the log ends with {end}, but the checkpoints are of the steps {steps}"
    again = Process(
        folder, program, "--resume", "--run_name", "r", "--max_steps", steps[-1] + 1,
        "--val_tokens", 256, "--sample_tokens", 8,
    )  # fmt: skip
    return again.errors or "--resume failed" if again.wait() != 0 else ""


def main(argv):
    cfg, counts, problems = parse_args(Config, argv, description=__doc__), Counter(), 0
    phases = [cfg.phase] if cfg.phase else list(PHASES)
    with tempfile.TemporaryDirectory(prefix="signals") as folder:
        make_data(Path(folder))
        for i in range(cfg.rounds):
            phase, seed = phases[i % len(phases)], cfg.seed + i // len(phases)
            program, text, status, problem = one_round(phase, seed, Path(folder))
            problems += bool(problem)
            counts[phase, program, status] += 1
            print(f"--phase {phase} --seed {seed} --rounds 1: {text}", flush=True)
            if problem:
                print(f"PROBLEM: {problem}", flush=True)
    for key in itertools.product(phases, PROGRAMS):
        statuses = {status: n for (*names, status), n in counts.items() if tuple(names) == key}
        print(f"{' of '.join(key)}: {sum(statuses.values())} rounds, exit statuses {statuses}")
    print(f"{sum(counts.values())} rounds, {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    run_main(main)
