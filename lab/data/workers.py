"""Tokenize units in worker processes or on a Ray cluster. Used by build.py."""

import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lab.cli import UserError
from lab.data.sources import Unit, documents_of
from lab.data.tokenizers import BLANK, get_tokenizer

cached_tokenizer = functools.cache(get_tokenizer)  # loaded once per process


def tokenize(unit: Unit, tokenizer: str, column: str) -> np.ndarray:
    """Ids (uint16) of a unit's documents, each preceded by end-of-text; blank documents are dropped."""
    import pyarrow.compute as pc  # slow, and not needed for training

    compute: Any = pc  # its functions are generated on import, so type checkers cannot see them
    parts = [np.zeros(0, np.uint16)]
    for texts in documents_of(unit, column):
        # the search stops at the first character that is not blank
        not_blank = texts.filter(compute.match_substring_regex(texts, f"[^{BLANK}]"))
        parts.append(cached_tokenizer(tokenizer).encode_documents(not_blank))
    ids = np.concatenate(parts)
    # a text file is one document, so its later units don't begin with end-of-text
    return ids[1:] if unit.file.kind == "text" and unit.index else ids


def ordered_map(
    units: Iterable, submit: Callable[[Any], Any], result: Callable[[Any], Any], depth: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (unit, result(submit(unit))) in order.

    At most `depth` jobs are pending, so memory does not grow with the source.
    """
    jobs = ((unit, submit(unit)) for unit in units)
    pending = deque(itertools.islice(jobs, depth))
    while pending:
        unit, job = pending.popleft()
        yield unit, result(job)
        pending.extend(itertools.islice(jobs, 1))


def submit_sigint_masked(pool: ProcessPoolExecutor, *args: Any, **kwargs: Any) -> Future:
    """pool.submit with SIGINT blocked, so that new workers never receive Ctrl-C."""
    if os.name == "nt":  # signals cannot be blocked there; init_worker ignores them later
        return pool.submit(*args, **kwargs)
    # another thread may still get SIGINT; KeyboardInterrupt is raised below, because raising it during
    # submit would leave a half-started worker
    interrupted = []
    handler = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit this
    try:
        job = pool.submit(*args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # delivers a pending SIGINT
        signal.signal(signal.SIGINT, handler)
    if interrupted:
        raise KeyboardInterrupt
    return job


def init_worker() -> None:
    """Ignore Ctrl-C, and exit when the main process ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for Windows, see submit_sigint_masked
    parent = multiprocessing.parent_process()
    assert parent, "runs in worker processes only"
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize_in_processes(
    units: Iterable[Unit], tokenizer: str, column: str, workers: int
) -> Generator[tuple[Unit, np.ndarray], None, None]:
    """(unit, ids) of each unit, on this machine; with 0 workers, in this process."""
    if workers == 0:
        for unit in units:
            yield unit, tokenize(unit, tokenizer, column)
        return
    context = multiprocessing.get_context("spawn")  # the only safe method on all systems
    pool = ProcessPoolExecutor(workers, context, initializer=init_worker)
    submit = functools.partial(
        submit_sigint_masked, pool, tokenize, tokenizer=tokenizer, column=column
    )
    try:
        yield from ordered_map(units, submit, lambda job: job.result(), depth=2 * workers)
    except BrokenExecutor as error:
        raise UserError(
            "a worker process was killed, probably because memory ran out; run the same command "
            "with fewer --workers, and it continues with the unfinished shard"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenize_on_ray(
    units: Iterable[Unit], tokenizer: str, column: str, workers: int
) -> Generator[tuple[Unit, np.ndarray], None, None]:
    """(unit, ids) of each unit, on the Ray cluster at RAY_ADDRESS or on `workers` cores here.

    Tasks of a worker that dies are repeated. The code is sent with the tasks; local files must have the
    same path on every machine.
    """
    if find_spec("ray") is None:
        raise UserError("--engine ray needs Ray; run `pip install ray`, or leave out --engine")
    import ray  # pyright: ignore[reportMissingImports]  # optional

    names = ("TIKTOKEN_CACHE_DIR", "HF_ENDPOINT", "HF_TOKEN")
    env = {
        "env_vars": {name: os.environ[name] for name in names if name in os.environ},
        "py_modules": [str(Path(__file__).parents[1])],
    }
    local = {"num_cpus": max(workers, 1), "include_dashboard": False}
    options = {} if os.environ.get("RAY_ADDRESS") else local
    ray.init(log_to_driver=False, logging_level="error", runtime_env=env, **options)
    try:
        task = ray.remote(num_cpus=1, max_retries=10)(tokenize)
        depth = 2 * int(ray.cluster_resources()["CPU"])
        submit = functools.partial(task.remote, tokenizer=tokenizer, column=column)
        yield from ordered_map(units, submit, ray.get, depth)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        ray.shutdown()


ENGINES = {"processes": tokenize_in_processes, "ray": tokenize_on_ray}
