"""Fuzz the readers of all kinds of files: a damaged or malicious file must be read or raise UserError.

    python bench/fuzz.py --count 10000                      # number of files of each kind
    python bench/fuzz.py --count 10000 --workers 64 --seconds 1200 --out found.jsonl   # continues later
    python bench/fuzz.py --kind npy --seed 1234 --count 1   # repeat one file and show its traceback

A valid file is randomly mutated (reproducible by seed) and read by the code of the commands, in a child
process that is limited to 2 GiB of additional memory and 20 seconds of CPU time, and that may not start
programs or use the network. The outcomes are counted:

    refused    with a UserError of one sentence
    same       accepted, with the contents of the valid file
    changed    accepted, with other contents
    wrong      accepted, although the format has a checksum of the changed bytes
    traceback  any other exception
    hang       no result after 20 seconds of CPU time or 200 seconds in total
    crash      the process died

An example of each different fault (the last four) is printed, and the exit status is then 1. With --out, the
results are saved after each batch of files, and the same command continues after an interruption.
`--count 0 --out found.jsonl` prints the table again.
"""

import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from fuzz_kinds import KINDS
from fuzz_mutations import mutate_bytes
from records import read_records

from lab.cli import UserError, eprint, format_error, is_oom, parse_args, run_main
from lab.files import atomic_write, check_writable

# seconds of CPU time per file; bytes of memory, and files, per child process
SECONDS, MEMORY, BATCH = 20, 2 * 2**30, 100
FAULTS = "wrong", "traceback", "hang", "crash"
OUTCOMES = "refused", "same", "changed", *FAULTS
FORBIDDEN = "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"

# ------------------------------------------------------------------------------ 1. child processes


def prepare(kind, folder):
    """Write the valid files of this kind into a new folder. Return the result of reading them."""
    folder.mkdir()
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with contextlib.chdir(folder), silent[0], silent[1], tempfile.TemporaryDirectory() as copy:
        KINDS[kind].make()
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with contextlib.chdir(copy):
            return KINDS[kind].read()  # this also imports modules once for all children


def read_batch(task):
    """Read the mutated files of a batch of seeds in a child process; start another if it dies.

    task: (kind, folder of prepare, result of prepare, seeds, deadline by time.monotonic). Returns
    (kind, list of Outcome), with the files that were read before the deadline.
    """
    kind, valid, expected, seeds, deadline = task
    found = []
    while len(found) < len(seeds) and time.monotonic() < deadline:
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            try:
                limit_child()
                for seed in seeds[len(found) :]:
                    try:
                        outcome = try_one(kind, valid, seed, expected)
                    except BaseException:  # a bug of this program, or a full disk
                        outcome = Outcome(seed, "traceback", 0, traceback.format_exc())
                    os.write(writer, json.dumps(dataclasses.astuple(outcome)).encode() + b"\n")
                    if time.monotonic() > deadline:
                        break
                os._exit(0)
            finally:  # for example, no memory is left for the outcome
                os._exit(1)
        os.close(writer)
        with open(reader, encoding="utf-8") as lines:
            found += [Outcome(*json.loads(line)) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status and len(found) < len(seeds):  # negative if a signal ended it
            hang = -status in (signal.SIGALRM, signal.SIGPROF)
            found.append(Outcome(seeds[len(found)], "hang" if hang else "crash", SECONDS * hang))
    return kind, found


@dataclass
class Outcome:
    seed: int
    name: str  # see the module's docstring
    seconds: float  # of CPU time
    text: str = ""  # traceback


def try_one(kind, valid, seed, expected):
    """Read the mutated file of this seed in a copy of the folder `valid`. Returns the Outcome.

    expected: the result of reading the valid file.
    """
    rng, this = random.Random(f"{kind}{seed}"), KINDS[kind]
    with tempfile.TemporaryDirectory() as case:
        shutil.copytree(valid, case, dirs_exist_ok=True)
        os.chdir(case)
        path = rng.choice(sorted(Path().glob(this.files)))
        mutate = rng.choice([mutate_bytes, this.mutate])
        path.write_bytes(mutate(path.read_bytes(), rng))
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # CPU time, because the machine may be busy
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
        forbid.active, text = True, ""
        try:
            name = "same" if this.read() == expected else "changed"
            if name == "changed" and this.checksum and mutate is mutate_bytes:
                name = "wrong"
        except UserError:
            name = "refused"
        except BaseException as error:
            # errors that all commands print as a sentence, and allocations beyond the limit
            refused = isinstance(error, (OSError, RuntimeError)) and (
                is_oom(error) or format_error(error)[0]
            )
            name, text = ("refused", "") if refused else ("traceback", traceback.format_exc())
        finally:
            forbid.active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.chdir(valid)
        return Outcome(seed, name, round(time.process_time() - begin, 3), text)


def forbid(event, args):
    """Audit hook: raise if reading a file starts a program or opens a connection."""
    if forbid.active and event in FORBIDDEN:
        raise AssertionError(f"{event} {args}")


forbid.active = False


def limit_child():
    """Set the limits of a child process and discard its output."""
    sys.addaudithook(forbid)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)


# ------------------------------------------------------------------------------------- 2. results


class Result:
    """What became of the files of one kind, over all runs with the same --out."""

    def __init__(self, kind, record=None):
        record = record or dict(seeds=[], outcomes={}, cpu_seconds=0.0, slowest=[0.0, 0], faults=[])
        self.kind, self.cpu_seconds, self.slowest = kind, record["cpu_seconds"], record["slowest"]
        self.seeds = {seed for first, last in record["seeds"] for seed in range(first, last + 1)}
        self.outcomes, self.faults = Counter(record["outcomes"]), record["faults"]

    def add(self, outcomes):
        """Count these and return the faults that differ from those already known."""
        known, new = {fault["at"] for fault in self.faults}, []
        for outcome in outcomes:
            self.seeds.add(outcome.seed)
            self.outcomes[outcome.name] += 1
            self.cpu_seconds += outcome.seconds
            self.slowest = max(self.slowest, [outcome.seconds, outcome.seed])
            lines = outcome.text.splitlines()
            where = [line.strip() for line in lines if line.startswith("  File")][-1:]
            at = " ".join([outcome.name, *lines[-1:], *where])
            if outcome.name in FAULTS and at not in known:
                known.add(at)
                new.append(dict(seed=outcome.seed, at=at, traceback=outcome.text))
        self.faults += new
        return new

    def line(self):
        """A line of JSON, which __init__ reads. slowest: CPU seconds and seed of one file."""
        ranges = []  # first and last seed of each
        for seed in sorted(self.seeds):
            if ranges and seed == ranges[-1][1] + 1:
                ranges[-1][1] = seed
            else:
                ranges.append([seed, seed])
        return json.dumps(
            dict(
                kind=self.kind, files=len(self.seeds), seeds=ranges, outcomes=self.outcomes,
                cpu_seconds=round(self.cpu_seconds, 2), slowest=self.slowest, faults=self.faults,
            )
        )  # fmt: skip


def read_results(path):
    """{kind: Result} of all kinds, from a file that earlier runs have written if there is one."""
    records = {record["kind"]: record for record in (read_records(path) if path else [])}
    return {kind: Result(kind, records.get(kind)) for kind in KINDS}


def print_table(results):
    """Print a Markdown table of the results and their total, and return the total outcomes."""
    total = sum((result.outcomes for result in results), Counter())
    print("| kind | files |", " | ".join(OUTCOMES), "|\n" + "|---" * (len(OUTCOMES) + 2) + "|")
    for kind, found in [(result.kind, result.outcomes) for result in results] + [("all", total)]:
        numbers = [found.total(), *(found[name] for name in OUTCOMES)]
        print(f"| {kind} |", " | ".join(f"{number:,}" for number in numbers), "|")
    return total


# ------------------------------------------------------------------------------- 3. command line


@dataclass
class Config:
    kind: tuple[Literal[tuple(KINDS)], ...] = ()  # kinds of files; all if empty
    count: int = 200  # number of files of each kind, including those already in --out
    seed: int = 0  # of the first file of each kind; each further file adds 1
    workers: int = 1  # number of files that are read at the same time
    seconds: float = 0  # start no further file after this time; 0: no limit
    out: str = ""  # file for the results, a line of JSON per kind; the same command continues it


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if cfg.out:
        check_writable(cfg.out, "out")
    torch.set_num_threads(1)
    deadline = time.monotonic() + cfg.seconds if cfg.seconds else math.inf
    results, context = read_results(cfg.out), multiprocessing.get_context("fork")
    kinds, seeds = cfg.kind or tuple(KINDS), range(cfg.seed, cfg.seed + cfg.count)
    if "zst" in kinds and not shutil.which("zstd"):
        eprint(
            "zst is skipped, because its files are made by the command zstd, which is not installed"
        )
        kinds = tuple(kind for kind in kinds if kind != "zst")
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        tempfile.tempdir = folder  # also of child processes, which may be killed
        valid = {kind: Path(folder, kind) for kind in kinds}
        todo = {kind: [seed for seed in seeds if seed not in results[kind].seeds] for kind in kinds}
        expected = {kind: prepare(kind, valid[kind]) for kind in kinds if todo[kind]}
        tasks = [
            (kind, valid[kind], expected[kind], todo[kind][i : i + BATCH], deadline)
            for i in range(0, cfg.count, BATCH)  # the kinds in turn, as time may be limited
            for kind in kinds
            if todo[kind][i:]
        ]
        with context.Pool(cfg.workers) as pool:
            for kind, outcomes in pool.imap_unordered(read_batch, tasks):
                for fault in results[kind].add(outcomes):
                    print(f"--kind {kind} --seed {fault['seed']} --count 1: {fault['at']}")
                    print(fault["traceback"], flush=True)
                if cfg.out:
                    lines = [result.line() + "\n" for result in results.values() if result.seeds]
                    atomic_write(cfg.out, "".join(lines).encode())
        tempfile.tempdir = None
    total = print_table([results[kind] for kind in kinds])
    return 1 if any(total[name] for name in FAULTS) else 0


if __name__ == "__main__":
    run_main(main)
