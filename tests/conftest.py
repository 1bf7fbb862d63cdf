"""Shared by the tests: tiny shards, a tiny model, runs in this process, real commands in others."""

import functools
import http.server
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest_plugins = ["server", "browser"]  # fixtures of tests with lab serve or a browser
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench"))  # after ROOT, because bench/ also has a speedrun.py
inspect.getsource = functools.cache(inspect.getsource)  # tyro calls it for each flag
torch.set_num_threads(1)  # fastest for tiny models, and sums are the same everywhere
VOCAB = 257  # bytes, and end-of-text as the last id
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, where Ctrl-C is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

# so small that a run takes a fraction of a second; an update has two micro-steps
TINY_MODEL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=VOCAB)
TINY_RUN = (
    "--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --seq_len 16 "
    "--batch_size 4 --vocab_multiple 128 --total_batch_size 128 --optimizer adamw --weight_decay 0.1 "
    "--warmup_steps 2 --schedule constant --lr 1e-3 --val_tokens 256 --val_every 0 --sample_every 0 "
    "--checkpoint_every 1000 --log_every 1 --run_name r"
).split()
# AdamW divides by the root of the squared gradient. If the true gradient is 0 (as for the bias of the
# keys, which does not affect a softmax), rounding errors would move a weight by the full learning rate.
# This eps prevents it, and makes updates sensitive to the scale of gradients.
EPS = 1e-3


def write_shards(folder, sizes=(1501, 997), val=700, vocab_size=VOCAB):
    """Write x_train_000000.npy ... and x_val_000000.npy: noisy counting, which is learned quickly."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    splits = [(f"train_{i:06d}", n) for i, n in enumerate(sizes)]
    for name, n in splits + ([("val_000000", val)] if val else []):
        tokens = (np.arange(n) + rng.integers(0, 3, n)) % min(vocab_size - 1, 40)
        tokens[::61] = vocab_size - 1  # a document of 60 tokens after each end-of-text
        np.save(folder / f"x_{name}.npy", tokens.astype(np.uint16))
    return folder


def mask_shards(folder):
    """Write a mask for each training shard: alternating ranges of 50 tokens."""
    for path in folder.glob("*_train_*.npy"):
        mask = (np.arange(len(np.load(path))) // 50 % 3 == 0).astype(np.uint8)
        with path.with_suffix(".mask").open("wb") as file:
            np.save(file, mask)


# -------------------------------------------------------------------------- runs in this process


def train_here(folder, data, name, model=(), **settings):
    """Run train_gpt2.main with these settings in this process. Returns read_run of the run."""
    import train_gpt2

    base = dict(
        data=str(data), log_dir=str(folder), run_name=name, device="cpu", total_batch_size=256,
        batch_size=4, seq_len=16, lr=3e-3, max_steps=20, warmup_steps=2, schedule="constant", eps=EPS,
        log_every=1, val_every=0, val_tokens=300, checkpoint_every=1000, sample_every=0, hellaswag_every=0,
        compile=False, keep_last=100,
    )  # fmt: skip
    cfg = train_gpt2.TrainConfig(**base | settings)
    model_config = train_gpt2.GPTConfig(**TINY_MODEL | dict(model))
    typed = dict(parse_flags=lambda *_: ("a test", model_config, cfg))
    with (
        mock.patch.multiple(train_gpt2.settings, **typed),
        mock.patch.object(train_gpt2, "print_summary"),
    ):
        status = train_gpt2.main([])
    return read_run(folder / name, status)


def read_run(run_dir, status=None):
    from lab.trainer.checkpoint import read_checkpoint

    events = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        dir=run_dir,
        status=status,
        events=events,
        losses=[e["loss"] for e in events if e["kind"] == "train"],
        norms=[e["grad_norm"] for e in events if e["kind"] == "train"],
        val={e["step"]: e["loss"] for e in events if e["kind"] == "val"},
        checkpoints={int(p.stem[6:]): read_checkpoint(p) for p in run_dir.glob("model_[0-9]*.pt")},
    )


def of_kind(run, kind):
    return [e for e in run.events if e["kind"] == kind]


def add_noise(model, std=0.1):
    """Add noise to all weights: initial biases of 0 and gains of 1 hide missing biases or swapped norms."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=std)
            if name in getattr(model, "vocab_rows", ()):
                p[model.config.vocab_size :] = 0
    return model


def difference(a, b):
    """Largest absolute difference of two state dicts with the same names."""
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


def equal_bits(a, b):
    """Whether two nested structures of dicts, lists, tensors and plain values are bit-equal."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    return a == b


def differing_parts(a, b, parts=("step", "model", "optimizer", "loader", "best_val")):
    """The parts of two checkpoints that are not bit-equal."""
    return [part for part in parts if not equal_bits(a[part], b[part])]


# ---------------------------------------------------------------------------------- real commands


def clean_env(**more):
    """The environment without variables that would change a run; one thread, so that runs are bit-equal."""
    drop = "RANK WORLD_SIZE LOCAL_RANK MASTER_ PYTHON TORCH OMP_ GPT2_ COLUMNS"
    env = {k: v for k, v in os.environ.items() if not k.startswith(tuple(drop.split()))}
    fixed = dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MPLBACKEND="Agg")
    fixed["PYTHONWARNINGS"] = "ignore"
    return env | fixed | more


# Most of the four seconds of a tiny run are imports of torch and matplotlib. So one process imports
# them once, and each script runs in a fork of it, in its own session: the real file from its first line,
# with its own folder, environment, arguments and streams. (runpy runs the script, or torchrun, as
# __main__.) It ends as Python does, with a traceback or by waiting for threads and calling atexit's
# functions. Only freeing each object is left out, by the function that atexit calls last: it takes 0.3 s,
# because it copies the memory that is shared with the parent.
FORKS = """
import atexit, gc, io, json, os, runpy, signal, sys
status = None  # of a script that has ended without a traceback

@atexit.register  # first, so it is called last
def leave():
    if status is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

import filelock, matplotlib.figure, numpy, tqdm, tyro
import tensorboard.compat.proto.event_pb2, tensorboard.summary.writer.record_writer
import torch, torch._dynamo, torch.distributed, torch.utils.serialization
def flags(number: int = 1):
    pass

tyro.cli(flags, args=[])  # first calls are slow
matplotlib.figure.Figure().savefig(io.BytesIO())
gc.freeze()  # garbage collection ignores the imported objects: forks share their memory and end sooner

def next_job():
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        if "wait" in job:
            pid, status = os.waitpid(job["wait"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            return job
    sys.exit()

job = next_job()
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["env"])
for number, path in enumerate(job["files"]):
    os.dup2(os.open(path, os.O_RDWR if path.startswith("/dev/") else os.O_WRONLY | os.O_CREAT), number)
sys.argv = job["args"]
if os.path.isfile(sys.argv[0]):
    sys.path[0] = os.path.dirname(sys.argv[0])
try:
    if sys.argv[0] == "-m":
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    status = 0
except SystemExit as error:
    if type(error.code) is not int:
        raise
    status = error.code
"""


@functools.cache
def forks():
    """The process that runs FORKS; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_env(), start_new_session=True,
    )  # fmt: skip


def ask_forks(job):
    print(json.dumps(job), file=forks().stdin, flush=True)
    return json.loads(forks().stdout.readline())


class Process:
    """Runs `python args...`. A script, a folder with a __main__.py, or torchrun is a fork of the process
    `forks`, which has imported the slow modules already.

    out, err: files for its output, such as a FIFO or a terminal; by default files that .stdout and
    .stderr read. inp: the file for stdin.
    """

    def __init__(self, *args, cwd, inp="/dev/null", out=None, err=None, **env):
        self.folder = tempfile.TemporaryDirectory()
        self.out, self.err = (out or f"{self.folder.name}/out"), (err or f"{self.folder.name}/err")
        Path(self.folder.name, "out").touch()
        Path(self.folder.name, "err").touch()
        args, script = list(map(str, args)), Path(cwd, args[0]).resolve()
        env = clean_env(**{k: str(v) for k, v in env.items()})
        self.popen = self.returncode = None
        torchrun = args[:2] == ["-m", "torch.distributed.run"]
        if sys.platform == "linux" and (torchrun or script.exists()):  # elsewhere fork is not safe
            self.args = args if torchrun else [str(script), *args[1:]]
            files = [inp, str(self.out), str(self.err)]
            self.pid = ask_forks(dict(args=self.args, cwd=str(cwd), env=env, files=files))
        else:
            self.args = [sys.executable, *args]
            with open(inp) as inp, open(self.out, "w") as out, open(self.err, "w") as err:
                self.popen = subprocess.Popen(
                    self.args, cwd=cwd, env=env, stdin=inp, stdout=out, stderr=err, start_new_session=True
                )  # fmt: skip
            self.pid = self.popen.pid

    def poll(self):
        """The exit status, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self.popen.poll() if self.popen else ask_forks({"wait": self.pid})
        return self.returncode

    def wait(self, timeout=120):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        """Send SIGKILL to the process and its children."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number):
        os.kill(self.pid, number)

    @property
    def stdout(self):
        return Path(self.folder.name, "out").read_text(errors="replace")

    @property
    def stderr(self):
        return Path(self.folder.name, "err").read_text(errors="replace")


def run_python(*args, cwd, timeout=300, **env):
    """Run `python args...` in its own process and wait for it. Returns the Process."""
    process = Process(*args, cwd=cwd, **env)
    process.wait(timeout)
    return process


def run_code(code, *args, cwd, **env):
    """Run Python code as a script, which finds the modules of this project, in a fork (see FORKS)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.py")
        path.write_text(f"import sys\nsys.path[0] = {str(ROOT)!r}\n{code}")
        return run_python(path, *args, cwd=cwd, **env)


def succeed(program, *args, cwd):
    """Run a program of this project, which must exit with status 0. Returns its stdout."""
    done = run_python(ROOT / program, *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fork_program(words, folder, gpus=1, timeout=300, env=None):
    """run_program of bench/records.py for tests: the same command, but in a fork (see FORKS)."""
    done = run_python(*words, cwd=folder, timeout=timeout, **env or {})
    assert done.returncode == 0 and gpus == 1, done.stderr
    return done.stdout + done.stderr


def fail(program, *args, cwd):
    """Run a program of this project, which must exit with status 2. Returns its error message."""
    done = run_python(ROOT / program, *args, cwd=cwd)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def two_ranks(count=2):
    """The environment variables that torchrun would set for each of `count` processes."""
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    shared = dict(WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [dict(RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(count)]


def finished(two):
    """Wait for processes that must succeed. Returns the stdout of rank 0."""
    assert not any([process.wait() for process in two]), two[0].stderr + two[1].stderr
    assert not two[1].stdout, "only rank 0 prints"
    return two[0].stdout


def run_two(*args, cwd):
    """Run `python args...` in two processes. Returns the stdout of rank 0."""
    return finished([Process(*args, cwd=cwd, **rank) for rank in two_ranks()])


def driver(folder, patch, program="train_gpt2"):
    """Write a train_gpt2.py (bert.py ...) that applies `patch` to the real one and runs it."""
    path = folder / f"{program}.py"
    path.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport torch, {program}\n"
        f"from lab.cli import run_main\n{patch}\nrun_main({program}.main)\n"
    )
    return path


def wait_for(condition, process):
    """Wait until condition() is true. Fails if the process ends before, or after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the condition was not reached: {process.stdout}{process.stderr}")
        time.sleep(0.01)


def wait_for_steps(process, run_dir, steps=3):
    """Wait until the run in `process` has logged this many steps."""
    log = run_dir / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count('"train"') >= steps, process)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "data")


@pytest.fixture
def start(tmp_path):
    """start(program, "--flag", ...): a Process; killed after the test."""
    processes = []

    def start(*args, **how):
        processes.append(Process(*args, cwd=tmp_path, **how))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture
def start_training(start, shards):
    """start_training("--run_name", "x", ...): the real command as a Process."""
    base = [*TINY_RUN, "--data", shards, "--max_steps", 1000000]

    def start_training(*flags, program=ROOT / "train_gpt2.py", **how):
        return start(program, *base, *flags, **how)

    return start_training


@pytest.fixture
def start_two(start, shards):
    """start_two("--max_steps", 4, ...): two processes of a tiny run."""

    def start_two(*flags, program=ROOT / "train_gpt2.py", data=shards, count=2):
        base = [*TINY_RUN, "--data", data, "--eps", EPS, "--batch_size", 2]
        base = [] if "--resume" in flags else base
        return [start(program, *base, *flags, **rank) for rank in two_ranks(count)]

    return start_two


@pytest.fixture
def run_train(tmp_path, shards):
    """run_train("--max_steps", 5, ...): the real command on the tiny shards, with the run directory
    tmp_path/log/r. With --resume, the flags of the tiny run are not passed again."""

    def run(*flags):
        base = [] if "--resume" in flags else [*TINY_RUN, "--data", shards]
        return run_python(ROOT / "train_gpt2.py", *base, *flags, cwd=tmp_path)

    return run


@pytest.fixture
def ask_sample(start):
    """ask_sample("--chat", ...): sample.py in its own terminal, as a Process with .type(text)."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    keyboard, theirs = pty.openpty()

    def ask(*flags):
        process = start(ROOT / "sample.py", *flags, inp=os.ttyname(theirs))
        process.type = lambda text: os.write(keyboard, text.encode())
        return process

    yield ask
    os.close(keyboard), os.close(theirs)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that matplotlib saves during a test."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, out: (figures.append(self), save(self, out))
    )
    return figures


@pytest.fixture
def tiny_config():
    from train_gpt2 import GPTConfig

    return GPTConfig(**TINY_MODEL)


@pytest.fixture(scope="session")
def builtin_text(tmp_path_factory):
    """Folder with the shards of the built-in text, built once for all processes of pytest-xdist."""
    from lab.data.python_docs import build_python_docs

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "builtin"
    build_python_docs(folder)  # waits if another process builds
    return folder


@pytest.fixture(scope="session")
def test_data():
    """The folder GPT2_TEST_DATA: tinyshakespeare.txt, wikitext-2/, hellaswag/ ..."""
    folder = os.environ.get("GPT2_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no test data: set GPT2_TEST_DATA to a folder with tinyshakespeare.txt etc.")
    return Path(folder)


@pytest.fixture
def gpt2_files(request, monkeypatch):
    """The files of GPT-2's tokenizer are in TIKTOKEN_CACHE_DIR or in the test data."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        folder = request.getfixturevalue("test_data") / "tiktoken"
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))


@pytest.fixture
def serve(monkeypatch):
    """serve(folder): start a web server for the files of a folder, and return its URL."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between retries
    servers = []

    def serve(folder):
        folder.mkdir()
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_noise_between_tests():
    """Seed each test, and restore the signal handlers after it."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    torch.manual_seed(0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
