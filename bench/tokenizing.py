"""How fast text becomes tokens: fineweb.py's way against the obvious one, same files, equal bytes.

    python bench/tokenizing.py FOLDER_OF_PARQUET        # FineWeb-Edu's layout, GPT-2's tokenizer
    python bench/tokenizing.py FOLDER --json            # the same as one line for programs

The obvious way hands one document a task to pool.imap, encodes it into a Python list and makes an
array of that. Each run reads the files --passes times, so that starting the processes, which both
times include, weighs little. On a busy machine look at the processor time, of all processes
together: others do not take from it. From the rate follow the hours, the disk and the money for
10B, 100B and 1.3T tokens.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tyro.conf import Positional

sys.path[0] = str(Path(__file__).resolve().parents[1])

from lab.cli import UserError, command, parse  # noqa: E402
from lab.data import get_tokenizer  # noqa: E402
from lab.data.engines import tokenise_in_processes  # noqa: E402
from lab.data.sources import local_files, open_parquet, units_of  # noqa: E402


@dataclass
class Config:
    """Measures tokens per second and core of two ways to tokenise the same parquet files."""

    source: Positional[str]
    """File or folder of parquet."""
    text_column: str = "text"
    """Column that holds the text."""
    workers: int = os.cpu_count() or 1
    """Processes for both ways."""
    passes: int = 3
    """A run reads the files this often."""
    rounds: int = 3
    """Each way runs this often, in turns; the medians count."""
    cores: int = 64
    """Cores of the machine (or cluster) in the table of costs."""
    dollars_per_core_hour: float = 0.05
    """Price of a core in that table: an assumption, put in your own."""
    json: bool = False
    """One line of JSON instead of a table."""


def set_up():
    global tok
    tok = get_tokenizer("gpt2")


def obvious(text: str) -> np.ndarray:
    ids = np.array([tok.eot, *tok.encode(text)])
    assert (0 <= ids).all() and (ids < 2**16).all()
    return ids.astype(np.uint16)


def texts_of(files, column):
    for file in files:
        for batch in open_parquet(file, column).iter_batches(1024, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text and text.strip())


def run_obvious(files, cfg):
    with multiprocessing.get_context("spawn").Pool(cfg.workers, set_up) as pool:
        yield from pool.imap(obvious, texts_of(files, cfg.text_column), chunksize=1)


def run_ours(files, cfg):
    units = (unit for i, file in enumerate(files) for unit in units_of(file, i, cfg.text_column))
    for _, ids in tokenise_in_processes(units, "gpt2", cfg.text_column, cfg.workers):
        yield ids


def measure(way, files, cfg):
    """(tokens, SHA-256 of all ids, seconds, seconds of processor time in all processes)"""

    def cpu_seconds():
        both = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    t0, cpu0, digest, count = time.perf_counter(), cpu_seconds(), hashlib.sha256(), 0
    for ids in way(files, cfg):
        digest.update(ids.astype("<u2", copy=False).data)
        count += len(ids)
    seconds = time.perf_counter() - t0
    for process in multiprocessing.active_children():
        process.join()
    return count, digest.hexdigest(), seconds, cpu_seconds() - cpu0


def cost(tokens, tok_per_s_per_core, cores, dollars_per_core_hour):
    """What `tokens` take: hours, GB of shards (two bytes a token), dollars of computing."""
    hours = tokens / tok_per_s_per_core / 3600 / cores
    dollars = hours * cores * dollars_per_core_hour
    return dict(tokens=tokens, cores=cores, hours=hours, disk_gb=2 * tokens / 1e9, dollars=dollars)


def main(argv=None):
    cfg = parse(Config, argv)
    files = local_files(cfg.source) * cfg.passes
    if files[0].kind != "parquet":
        raise UserError(f"{cfg.source} holds {files[0].kind}, wanted are parquet files")
    runs, hashes = {"obvious": [], "ours": []}, set()
    for _ in range(cfg.rounds):
        for name, way in (("obvious", run_obvious), ("ours", run_ours)):
            tokens, digest, *times = measure(way, files, cfg)
            runs[name].append(times)
            hashes.add(digest)
    assert len(hashes) == 1, "the two ways do not give the same bytes"
    medians = {name: np.median(times, axis=0) for name, times in runs.items()}
    rate = {name: tokens / seconds / cfg.workers for name, (seconds, _) in medians.items()}
    cpu = {name: tokens / seconds for name, (_, seconds) in medians.items()}
    price = (rate["ours"], cfg.cores, cfg.dollars_per_core_hour)
    costs = [cost(n, *price) for n in (10e9, 100e9, 1.3e12)]
    if cfg.json:
        settings = dict(workers=cfg.workers, rounds=cfg.rounds, passes=cfg.passes)
        found = dict(tokens=tokens, sha256=digest, runs=runs, costs=costs)
        print(json.dumps(settings | found | dict(tok_per_s_per_core=rate, tok_per_cpu_s=cpu)))
        return
    print(f"{tokens:,} tokens, {cfg.workers} workers, median of {cfg.rounds} rounds, same bytes")
    for name in runs:
        print(
            f"  {name:8} {rate[name] / 1e6:5.2f}M tok/s per core"
            f"   {cpu[name] / 1e6:5.2f}M tok per second of processor time"
        )
    print(f"  ratio    {rate['ours'] / rate['obvious']:5.2f}  {cpu['ours'] / cpu['obvious']:25.2f}")
    print(
        f"\n  at this rate on {cfg.cores} cores, {cfg.dollars_per_core_hour} dollars a core and hour:"
    )
    for row in costs:
        print(
            f"  {row['tokens'] / 1e9:6,.0f}B tokens  {row['hours']:6.2f} h  {row['disk_gb']:6,.0f} GB of "
            f"shards  {row['dollars']:6.2f} dollars"
        )


if __name__ == "__main__":
    command(main)
