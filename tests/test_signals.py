"""What ends a run early: Ctrl-C, SIGTERM and kill -9, at any moment, and what the resumed run makes of it."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_RUN, clean_env, run_python, wait_for_steps
from test_train import equal_bits, of_kind, read_run, train_here

import train_gpt2
from lab.data.tokenizers import ByteTokenizer
from lab.run.stop import StopSignal


def test_ctrl_c_while_compiling_is_no_broken_compiler(tmp_path, shards, monkeypatch):
    """In a terminal it reaches the C++ compiler too, and torch.compile then says that that has failed."""

    def backend(graph, inputs):
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("the compiler was killed")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(train_gpt2, "why_no_compile", lambda device: "")
    torch._dynamo.reset()
    with pytest.raises(KeyboardInterrupt) as stopped:
        train_here(tmp_path, shards, "r", compile=True)
    assert isinstance(stopped.value.__cause__, torch._dynamo.exc.BackendCompilerFailed)


def test_a_run_that_made_no_step_is_begun_again(tmp_path, shards, monkeypatch, capfd):
    whole = train_here(tmp_path, shards, "whole", max_steps=3)
    with monkeypatch.context() as m:  # a signal just before the first step
        m.setattr(train_gpt2, "check_compiled", lambda model, *_: os.kill(os.getpid(), signal.SIGTERM) or model)
        stopped = train_here(tmp_path, shards, "r", max_steps=3)
    out, err = capfd.readouterr()
    assert not stopped.losses and "SIGTERM: nothing new to save; the same command begins again" in out
    assert "SIGTERM: ends after what is in hand" in err
    with pytest.raises(FileNotFoundError, match="begin it again without --resume"):
        train_gpt2.run_to_resume(tmp_path, "r")
    again = train_here(tmp_path, shards, "r", max_steps=3)
    assert again.losses == whole.losses and [e["kind"] for e in again.events].count("start") == 1
    assert len(list(again.dir.glob("events.out.tfevents.*"))) == 1, "what was begun before has gone"
    for checkpoint in again.dir.glob("*.pt"):
        checkpoint.unlink()
    with pytest.raises(OSError, match="has ended and saved nothing; delete it"):
        train_here(tmp_path, shards, "r", max_steps=3)


def test_a_signal_finishes_the_step_saves_and_says_so(tmp_path, start_training):
    """Two runs side by side, one for each signal."""
    processes = {name: start_training("--run_name", name) for name in ("SIGTERM", "SIGINT")}
    for name, process in processes.items():
        wait_for_steps(process, tmp_path / "log" / name)
        process.send_signal(getattr(signal, name))
    for name, process in processes.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in err, err
        run = read_run(tmp_path / "log" / name)
        step = of_kind(run, "train")[-1]["step"]
        assert list(run.checkpoints) == [step] and run.checkpoints[step]["step"] == step
        assert run.events[-1]["kind"] == "end" and run.events[-1]["reason"] == name
        assert f"{name}: finished step {step} and saved it" in out
        assert re.search(rf"  finish it +\S+ \S*train_gpt2.py --resume --run_name {name}\n", out)
        assert "train it further" not in out


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_ctrl_c_twice_in_one_long_operation_ends_it(tmp_path):
    """Python calls its handlers between operations, and two signals in one operation are one to them."""
    code = """
import hashlib
from lab.run.stop import StopSignal
with StopSignal():
    print("begins", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=clean_env(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n" and "SIGINT: ends after what is in hand" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and "error: stopped at once" in process.stderr.read()
    finally:
        process.kill()


def test_signals_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    threads = threading.active_count()
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM"
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(before[1])) == before
    assert threading.active_count() == threads


def test_signals_go_back_to_who_had_them(tmp_path, shards):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train_here(tmp_path, shards, "r", max_steps=1)
    with pytest.raises(ValueError):
        train_here(tmp_path, shards, "s", max_steps=1, optimizer="adamw", seq_len=17)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_after_training_is_one_line(tmp_path, shards):
    code = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from lab.tools import plot
plot.loss_curve = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = {["train_gpt2.py", *map(str, TINY_RUN), "--data", str(shards), "--max_steps", "3"]!r}
runpy.run_path({str(ROOT / "train_gpt2.py")!r}, run_name="__main__")
"""
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 130 and (tmp_path / "log" / "r" / "model_000003.pt").exists()
    assert done.stderr.strip() == "train_gpt2.py: error: stopped at once; what checkpoints there are stay as they were"


def test_a_killed_run_leaves_whole_checkpoints_and_resumes(tmp_path, start_training, run_train):
    process = start_training("--ckpt_every", 1, "--keep_last", 3)
    wait_for_steps(process, tmp_path / "log" / "r")
    time.sleep(0.1)
    process.kill()  # SIGKILL: nothing can be tidied up; with a checkpoint every step, one is being written most of the time
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    run = read_run(tmp_path / "log" / "r")  # reads every checkpoint
    assert run.checkpoints and all(step == data["step"] for step, data in run.checkpoints.items())
    step = max(run.checkpoints)
    result = run_train("--resume", "--max_steps", step + 4)
    assert result.returncode == 0, result.stderr
    resumed = read_run(run.dir)
    assert max(resumed.checkpoints) == step + 4
    assert [e["step"] for e in of_kind(resumed, "start")] == [0, step]
    assert resumed.events[: len(run.events)] == run.events, "nothing of the first part is lost"


def test_a_run_that_is_stopped_saves_at_once_and_measures_when_it_goes_on(tmp_path, shards, monkeypatch):
    settings = dict(max_steps=9, val_every=3, sample_every=3, sample_tokens=3, ckpt_every=3)
    whole = train_here(tmp_path, shards, "whole", ByteTokenizer(), **settings)
    real, calls = train_gpt2.train_step, []

    def train_step(*args):
        calls.append(0)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(train_gpt2, "train_step", train_step)
    stopped = train_here(tmp_path, shards, "r", ByteTokenizer(), **settings)
    assert [e["step"] for kind in ("val", "sample") for e in of_kind(stopped, kind)] == [0, 3, 3] and 6 in stopped.checkpoints
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), resume=True, **settings)
    for kind in ("val", "sample"):
        ours, theirs = ([{k: v for k, v in e.items() if k != "time"} for e in of_kind(r, kind)] for r in (run, whole))
        assert ours == theirs and len(ours) >= 3
    for step in (6, 9):
        assert run.checkpoints[step]["best_val"] == whole.checkpoints[step]["best_val"]
    assert [e["step"] for e in of_kind(run, "checkpoint") if e["best"]] == [e["step"] for e in of_kind(whole, "checkpoint")
                                                                           if e["best"]]  # fmt: skip


def test_a_signal_while_it_validates_ends_the_measuring(tmp_path, shards, monkeypatch):
    settings = dict(max_steps=9, val_every=3, sample_every=3, sample_tokens=3, ckpt_every=9)
    whole = train_here(tmp_path, shards, "whole", ByteTokenizer(), **settings)
    real, asked = train_gpt2.Reporter.validate, []

    def validate(self, step, model, stopped):
        def before_a_batch():
            asked.append(step)
            if asked.count(6) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return stopped()

        return real(self, step, model, before_a_batch)

    monkeypatch.setattr(train_gpt2.Reporter, "validate", validate)
    stopped = train_here(tmp_path, shards, "r", ByteTokenizer(), **settings)
    assert asked.count(3) == 5 and asked.count(6) == 3, "three of five batches are left out"
    assert list(stopped.checkpoints) == [6] and [e["step"] for e in of_kind(stopped, "sample")] == [3]
    assert [e["step"] for e in of_kind(stopped, "val")] == [0, 3], "nothing half-measured is logged"
    monkeypatch.undo()
    real_step = train_gpt2.Reporter.begin
    monkeypatch.setattr(train_gpt2.Reporter, "begin", lambda *args: (real_step(*args), os.kill(os.getpid(), signal.SIGTERM)))
    before = (stopped.dir / "model_000006.pt").stat().st_mtime_ns
    train_here(tmp_path, shards, "r", ByteTokenizer(), resume=True, **settings)  # stopped at once: what is there stays
    assert (stopped.dir / "model_000006.pt").stat().st_mtime_ns == before
    monkeypatch.undo()
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), resume=True, **settings)
    for kind in ("val", "sample"):
        ours, theirs = ([{k: v for k, v in e.items() if k != "time"} for e in of_kind(r, kind)] for r in (run, whole))
        assert ours == theirs and ours[-1]["step"] == 9
    for part in ("model", "optimizer", "loader", "rng", "best_val", "measured"):
        assert equal_bits(run.checkpoints[9][part], whole.checkpoints[9][part]), part
    assert run.losses == whole.losses


def test_a_signal_after_the_last_step_leaves_the_measuring_to_the_resumed_run(tmp_path, shards, monkeypatch):
    settings = dict(max_steps=3, val_every=3, sample_every=3, sample_tokens=3, ckpt_every=3)
    whole = train_here(tmp_path, shards, "whole", ByteTokenizer(), **settings)
    real = train_gpt2.Reporter.measure

    def measure(self, name, step, model, stopped):
        if (name, step) == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, name, step, model, stopped)

    monkeypatch.setattr(train_gpt2.Reporter, "measure", measure)
    signalled = "val", 3
    stopped = train_here(tmp_path, shards, "r", ByteTokenizer(), **settings)
    assert list(stopped.checkpoints) == [3] and [e["step"] for e in of_kind(stopped, "val")] == [0]
    assert of_kind(stopped, "end")[-1]["reason"] == "SIGTERM" and not of_kind(stopped, "checkpoint")[-1]["best"]
    signalled = "sample", 3  # nothing comes after it: the run is done
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), resume=True, **settings)
    assert of_kind(run, "end")[-1]["reason"] == "done"
    for kind in ("val", "sample"):
        ours, theirs = ([{k: v for k, v in e.items() if k != "time"} for e in of_kind(r, kind)] for r in (run, whole))
        assert ours == theirs and ours[-1]["step"] == 3
    assert equal_bits(run.checkpoints[3]["measured"], True) and of_kind(run, "checkpoint")[-1]["best"]
    for part in ("model", "optimizer", "loader", "rng", "best_val"):
        assert equal_bits(run.checkpoints[3][part], whole.checkpoints[3][part]), part
    with pytest.raises(ValueError, match="has done 3 steps, max_steps=3; a larger --max_steps goes on"):
        train_here(tmp_path, shards, "r", ByteTokenizer(), resume=True, **settings)


def test_a_signal_in_the_last_batch_of_a_validation_does_not_undo_it(tmp_path, shards, monkeypatch):
    settings = dict(max_steps=9, val_every=3, ckpt_every=9)
    real = train_gpt2.Reporter.measure

    def measure(self, name, step, model, stopped):
        done = real(self, name, step, model, stopped)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(train_gpt2.Reporter, "measure", measure)
    stopped = train_here(tmp_path, shards, "r", **settings)
    assert stopped.checkpoints[6]["measured"] and of_kind(stopped, "checkpoint")[-1]["best"]
    run = train_here(tmp_path, shards, "r", resume=True, **settings)
    assert [e["step"] for e in of_kind(run, "val")] == [0, 3, 6, 9]


@pytest.mark.skipif(sys.platform != "linux", reason="takes a terminal away as Linux does")
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_run_as_sigterm_does(tmp_path, shards, nohup):
    """As when ssh breaks off. The process has a terminal of its own, and the bar that goes with it."""
    import fcntl
    import termios

    terminal, end = os.openpty()
    command = [*["nohup"] * nohup, sys.executable, ROOT / "train_gpt2.py", *TINY_RUN, "--data", shards, "--val_every", 2]
    command += ["--max_steps", 60 if nohup else 1000000]

    def begin():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves

    process = subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=clean_env(), stdin=end, stdout=end, stderr=end, start_new_session=True,
        preexec_fn=begin,
    )  # fmt: skip
    os.close(end)

    def watch():
        with contextlib.suppress(OSError):
            while os.read(terminal, 4096):
                pass

    threading.Thread(target=watch, daemon=True).start()
    wait_for_steps(process, tmp_path / "log" / "r")
    os.close(terminal)
    assert process.wait(120) == 0
    run = read_run(tmp_path / "log" / "r")
    last = of_kind(run, "end")[-1]
    assert last["reason"] == ("done" if nohup else "SIGHUP") and list(run.checkpoints) == [last["step"]]
