"""How fast text becomes tokens: fineweb.py's way against the obvious one, same files, equal bytes.

    python bench/tokenizing.py FOLDER_OF_PARQUET        # FineWeb-Edu's layout, GPT-2's tokenizer

The obvious way hands one document a task to pool.imap, encodes it into a Python list and makes an
array of that. Each run reads the files --passes times, so that starting the processes, which both
times include, weighs little. On a busy machine look at the processor time, of all processes
together: others do not take from it. From the rate follow the hours, the disk and the money for
10B, 100B and 1.3T tokens on 64 cores, at an assumed 0.05 dollars a core and hour.
"""

import hashlib
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tyro.conf import Positional

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not by records: workers need no torch

from lab.cli import UserError, command, parse  # noqa: E402
from lab.data import get_tokenizer  # noqa: E402
from lab.data.engines import tokenise_in_processes  # noqa: E402
from lab.data.sources import local_files, open_parquet, units_of  # noqa: E402

COLUMN = "text"


@dataclass
class Config:
    source: Positional[str]  # file or folder of parquet
    workers: int = os.cpu_count() or 1  # processes for both ways
    passes: int = 3  # a run reads the files this often
    rounds: int = 3  # each way runs this often, in turns; the medians count


def set_up():
    global tok
    tok = get_tokenizer("gpt2")


def obvious(text):
    ids = np.array([tok.eot, *tok.encode(text)])
    assert (0 <= ids).all() and (ids < 2**16).all()
    return ids.astype(np.uint16)


def texts_of(files):
    for file in files:
        for batch in open_parquet(file, COLUMN).iter_batches(1024, columns=[COLUMN]):
            yield from (text for text in batch.column(0).to_pylist() if text and text.strip())


def run_obvious(files, workers):
    with multiprocessing.get_context("spawn").Pool(workers, set_up) as pool:
        yield from pool.imap(obvious, texts_of(files), chunksize=1)


def run_ours(files, workers):
    units = (unit for i, file in enumerate(files) for unit in units_of(file, i, COLUMN))
    for _, ids in tokenise_in_processes(units, "gpt2", COLUMN, workers):
        yield ids


def cpu_seconds():
    """Processor time of this process and of those of its children that have ended."""
    both = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(way, files, workers):
    """(tokens, SHA-256 of all ids, seconds, seconds of processor time in all processes)"""
    t0, cpu0, digest, count = time.perf_counter(), cpu_seconds(), hashlib.sha256(), 0
    for ids in way(files, workers):
        digest.update(ids.astype("<u2", copy=False).data)
        count += len(ids)
    seconds = time.perf_counter() - t0
    for process in multiprocessing.active_children():
        process.join()
    return count, digest.hexdigest(), seconds, cpu_seconds() - cpu0


def main(argv):
    cfg = parse(Config, argv, description=__doc__)
    files = local_files(cfg.source) * cfg.passes
    if files[0].kind != "parquet":
        raise UserError(f"{cfg.source} holds {files[0].kind}, wanted are parquet files")
    runs, hashes = {"obvious": [], "ours": []}, set()
    for _ in range(cfg.rounds):
        for name, way in (("obvious", run_obvious), ("ours", run_ours)):
            tokens, digest, *times = measure(way, files, cfg.workers)
            runs[name].append(times)
            hashes.add(digest)
    assert len(hashes) == 1, "the two ways do not give the same bytes"
    medians = {name: np.median(times, axis=0) for name, times in runs.items()}
    rates = {n: tokens / np.array([s * cfg.workers, cpu]) / 1e6 for n, (s, cpu) in medians.items()}
    print(f"{tokens:,} tokens, {cfg.workers} workers, median of {cfg.rounds} rounds, same bytes")
    for name, (per_core, per_cpu_s) in rates.items():
        print(f"{name:8} {per_core:.2f}M tok/s a core, {per_cpu_s:.2f}M a second of processor time")
    print("ratio    {:.2f} and {:.2f}".format(*rates["ours"] / rates["obvious"]))
    for count in (10e9, 100e9, 1.3e12):
        core_hours = count / (1e6 * rates["ours"][0]) / 3600
        print(
            f"{count / 1e9:6,.0f}B tokens {core_hours / 64:6.2f} h on 64 cores "
            f"{2 * count / 1e9:6,.0f} GB of shards {0.05 * core_hours:6.2f} dollars"
        )


if __name__ == "__main__":
    command(main)
