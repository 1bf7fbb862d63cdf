"""Tokenising units in worker processes, or on a Ray cluster: the same tokens in the same order."""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lab.cli import UserError
from lab.data.sources import Unit, documents_of
from lab.data.tokenizers import BLANK, get_tokenizer

tokenizer_of = functools.cache(get_tokenizer)  # made once in every process


def tokenise(unit: Unit, tokenizer: str, column: str) -> np.ndarray:
    """The documents of a unit that are more than blanks (uint16), each led by end-of-text."""
    import pyarrow.compute as pc

    parts = [np.zeros(0, np.uint16)]
    for texts in documents_of(unit, column):
        # looks no further than the first letter
        full = texts.filter(pc.match_substring_regex(texts, f"[^{BLANK}]"))
        parts.append(tokenizer_of(tokenizer).encode_documents(full))
    ids = np.concatenate(parts)
    # a text file is one document: its later blocks go on with it
    return ids[1:] if unit.file.kind == "text" and unit.index else ids


def in_order(units, submit, result, depth: int):
    """(unit, result(submit(unit))) in order, at most `depth` under way, which bounds the memory."""
    jobs = ((unit, submit(unit)) for unit in units)
    waiting = deque(itertools.islice(jobs, depth))
    while waiting:
        unit, job = waiting.popleft()
        yield unit, result(job)
        waiting.extend(itertools.islice(jobs, 1))


def submit_deaf(pool, *args, **kwargs):
    """pool.submit; a worker that it starts leaves Ctrl-C to this process, also while it imports."""
    if os.name == "nt":  # there it is start_worker's
        return pool.submit(*args, **kwargs)
    heard = []  # by another thread: raised here, it would leave a worker that is half started
    usual = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a new process inherits
    try:
        job = pool.submit(*args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that waited is heard now
        signal.signal(signal.SIGINT, usual)
    if heard:
        raise KeyboardInterrupt
    return job


def start_worker():
    """A worker ends with the main process, even if that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows it can be interrupted until here
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenise_in_processes(units, tokenizer: str, column: str, workers: int):
    """On this machine; 0 workers: in this process. Spawning is the one way safe on every system."""
    if workers == 0:
        for unit in units:
            yield unit, tokenise(unit, tokenizer, column)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker)
    submit = functools.partial(submit_deaf, pool, tokenise, tokenizer=tokenizer, column=column)
    try:
        yield from in_order(units, submit, lambda job: job.result(), depth=2 * workers)
    except BrokenExecutor as error:
        raise UserError(
            "a worker process was killed, most likely for want of memory: run the same command "
            "with fewer --workers, it goes on where it was"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenise_on_ray(units, tokenizer: str, column: str, workers: int):
    """On the Ray cluster that RAY_ADDRESS names, or on `workers` cores here.

    A task whose worker dies is run again. The code travels with the tasks; local files must lie
    under the same path on every machine.
    """
    if find_spec("ray") is None:
        raise UserError("--engine ray needs Ray: pip install ray, or leave it out")
    import ray

    names = ("TIKTOKEN_CACHE_DIR", "HF_ENDPOINT", "HF_TOKEN")
    env = {"env_vars": {n: os.environ[n] for n in names if n in os.environ}}
    env["py_modules"] = [str(Path(__file__).parents[1])]
    here = {"num_cpus": max(workers, 1), "include_dashboard": False}
    where = {} if os.environ.get("RAY_ADDRESS") else here
    ray.init(log_to_driver=False, logging_level="error", runtime_env=env, **where)
    try:
        task = ray.remote(num_cpus=1, max_retries=10)(tokenise)
        depth = 2 * int(ray.cluster_resources()["CPU"])
        submit = functools.partial(task.remote, tokenizer=tokenizer, column=column)
        yield from in_order(units, submit, ray.get, depth)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()


ENGINES = {"processes": tokenise_in_processes, "ray": tokenise_on_ray}
