"""What the tests share: tiny shards, a tiny model, and the real commands in fresh processes."""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # tiny models are fastest on one, and sums come out the same on every machine
VOCAB = 257  # bytes and end-of-text, which has the last id

# a model and a step so small that a run takes a fraction of a second, two micro-steps to an update
TINY_MODEL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=VOCAB)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup: tests of Ctrl-C would send what nobody hears
    signal.signal(signal.SIGINT, signal.default_int_handler)

TINY_RUN = "--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --seq_len 16 --batch_size 4 \
--vocab_multiple 128 --total_batch_size 128 --optimizer adamw --weight_decay 0.1 --warmup_steps 2 --schedule constant \
--lr 1e-3 --val_tokens 256 --val_every 0 --sample_every 0 --ckpt_every 1000 --log_every 1 --run_name r".split()


def write_shards(folder, sizes=(1501, 997), val=700, vocab_size=VOCAB, seed=0):
    """x_train_000000.npy ... and x_val_000000.npy of noisy counting, which a small model learns in a few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    splits = [(f"train_{i:06d}", n) for i, n in enumerate(sizes)] + ([("val_000000", val)] if val else [])
    for name, n in splits:
        tokens = (np.arange(n) + rng.integers(0, 3, n)) % min(vocab_size - 1, 40)
        tokens[::61] = vocab_size - 1  # a document of 60 tokens after each end-of-text
        np.save(folder / f"x_{name}.npy", tokens.astype(np.uint16))
    return folder


def clean_env(**more):
    """This process's environment without what would change a run; one thread, so that runs agree to the bit."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHON", "TORCH", "OMP_", "GPT2_", "COLUMNS")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return env | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MPLBACKEND": "Agg"} | more


# Most of the four seconds of a tiny run are imports of torch and matplotlib. So this process imports them once, and each
# script runs in a fork of it: the real file from its first line, with its own folder, environment, arguments and streams.
FORKS = """
import gc, json, os, runpy, sys, tempfile
import matplotlib.figure, numpy, torch, torch._dynamo, torch.utils.tensorboard, tqdm, tyro
gc.freeze()  # what is imported is never looked through again: forks share its memory and end sooner

def next_job():
    for line in iter(sys.stdin.readline, ""):
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        pid = os.fork()
        if pid == 0:
            return *json.loads(line), out, err
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (out, err)]
        print(json.dumps([status, *texts]), flush=True)
    sys.exit()

args, cwd, env, out, err = next_job()
os.chdir(cwd)
os.environ.clear()
os.environ.update(env)
for number, file in enumerate((open(os.devnull), out, err)):
    os.dup2(file.fileno(), number)
sys.argv, sys.path[0] = args, os.path.dirname(args[0])
runpy.run_path(args[0], run_name="__main__")
"""


@functools.cache
def forks():
    """The process that FORKS is; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_env(),
        start_new_session=True,
    )  # fmt: skip


def run_python(*args, cwd, timeout=300, **env):
    """`python args...` in a process of its own: .returncode, .stdout, .stderr. A script needs no time for its imports."""
    args, env = list(map(str, args)), clean_env(**env)
    if not args[0].endswith(".py") or sys.platform != "linux":  # elsewhere forks are missing, or not safe with these imports
        return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    args[0] = str(Path(cwd, args[0]).resolve())
    print(json.dumps([args, str(cwd), env]), file=forks().stdin, flush=True)
    if not select.select([forks().stdout], [], [], timeout)[0]:
        os.killpg(forks().pid, signal.SIGKILL)
        forks.cache_clear()
        raise subprocess.TimeoutExpired(args, timeout)
    return subprocess.CompletedProcess(args, *json.loads(forks().stdout.readline()))


def wait_for_steps(process, run_dir, steps=3):
    """Until the run in `process` has logged so many; if it ends before, or two minutes pass, the test fails."""
    log, deadline = run_dir / "log.jsonl", time.monotonic() + 120
    while not log.exists() or log.read_text().count('"train"') < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run did not begin: {process.communicate()}")
        time.sleep(0.02)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "data")


@pytest.fixture
def start_training(tmp_path, shards):
    """start_training("--run_name", "x", ...): the real command, running; what still runs after the test is killed."""
    processes = []

    def start(*flags):
        command = [sys.executable, ROOT / "train_gpt2.py", *TINY_RUN, "--data", shards, "--max_steps", 1000000, *flags]
        processes.append(subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=clean_env(), stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True))  # fmt: skip
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def run_train(tmp_path, shards):
    """run_train("--max_steps", 5, ...): the real command on the tiny shards; the run folder is tmp_path/log/r.

    With --resume it gets no other flags than those named: a run is resumed with the settings it was begun with.
    """

    def run(*flags, timeout=300, **env):
        base = [] if "--resume" in flags else [*TINY_RUN, "--data", shards]
        return run_python(ROOT / "train_gpt2.py", *base, *flags, cwd=tmp_path, timeout=timeout, **env)

    return run


@pytest.fixture
def tiny_config():
    from train_gpt2 import GPTConfig

    return GPTConfig(**TINY_MODEL)


@pytest.fixture
def one_process():
    """Rank 0 of 1 on the CPU, for a TokenLoader."""
    return types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def test_data():
    """The folder that GPT2_TEST_DATA names: tinyshakespeare.txt, wikitext-2/, hellaswag/ and the like."""
    folder = Path(os.environ.get("GPT2_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no test data: point GPT2_TEST_DATA at a folder that holds tinyshakespeare.txt and the like")
    return folder


@pytest.fixture(autouse=True)
def no_noise_between_tests():
    """Each test starts from the same random numbers and leaves the signal handlers as they were."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
