"""Signals: Ctrl-C, SIGTERM, a closed terminal, kill -9, a reader of the output that exits."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import (
    ROOT,
    clean_env,
    driver,
    of_kind,
    read_run,
    run_python,
    wait_for,
    wait_for_steps,
)  # fmt: skip

from lab.distributed import World
from lab.trainer.signals import GracefulStop, SignalHandler

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Linux and macOS")


def assert_saved_and_stopped(process, tmp_path, reason):
    """Assert that the run ended for this reason, with its last step saved."""
    assert process.wait() == 75 and "Traceback" not in process.stderr, process.stderr
    run = read_run(tmp_path / "log" / "r")
    step = of_kind(run, "train")[-1]["step"]
    assert run.checkpoints[step]["step"] == step == max(run.checkpoints)
    assert run.events[-1]["reason"] == reason


@pytest.mark.parametrize("name, times", [("SIGTERM", 2), ("SIGINT", 1)])
def test_signal_saves_and_stops_the_run_after_its_step(tmp_path, start_training, name, times):
    """Even if SIGTERM arrives twice, because torchrun forwards one that its processes already got."""
    process = start_training()
    wait_for_steps(process, tmp_path / "log" / "r")
    for _ in range(times):
        process.signal(getattr(signal, name))
    assert_saved_and_stopped(process, tmp_path, name)
    assert "finishing the current step; press Ctrl-C again to quit without saving" in process.stderr
    said = rf"{name}: saved after step \d+ in log/r; `.*--resume --run_name r` continues it"
    assert re.search(said, process.stdout)


# Short sleeps, because a signal that arrives just before a sleep begins is handled only after it.
NEVER_ENDS = """def train_step(self):
    print("in the step", flush=True)
    while True:
        time.sleep(0.01)

train_gpt2.Trainer.train_step = train_step"""


def test_second_ctrl_c_quits_immediately(tmp_path, start_training):
    process = start_training(program=driver(tmp_path, NEVER_ENDS))
    wait_for(lambda: "in the step" in process.stdout, process)
    process.signal(signal.SIGINT)
    wait_for(lambda: "finishing the current step" in process.stderr, process)
    process.signal(signal.SIGINT)
    assert process.wait(20) == 130, process.stderr
    assert process.stderr.endswith("train_gpt2.py: stopped\n")
    assert not list((tmp_path / "log" / "r").glob("*.pt"))


DURING_SUMMARY = """summary = train_gpt2.print_summary
def print_summary(*args):
    os.kill(os.getpid(), signal.SIGINT)
    summary(*args)

train_gpt2.print_summary = print_summary"""


def test_second_ctrl_c_has_no_effect_once_the_run_is_saved(tmp_path, start_training):
    process = start_training(program=driver(tmp_path, DURING_SUMMARY))
    wait_for_steps(process, tmp_path / "log" / "r")
    process.signal(signal.SIGINT)
    assert_saved_and_stopped(process, tmp_path, "SIGINT")
    assert "SIGINT: saved after step" in process.stdout


@pytest.mark.parametrize("program", ["train_gpt2.py", "speedrun.py", "bert.py", "sample.py"])
def test_ctrl_c_ends_a_program_that_imports_torch(tmp_path, program):
    """Here an import that swallows KeyboardInterrupt, as imports of torch and numpy may."""
    lost = "try:\n    print('now', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n    pass"
    (tmp_path / "torch.py").write_text(f"import time\n{lost}")
    command = [sys.executable, ROOT / program]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=clean_env(PYTHONPATH=str(tmp_path)), **pipes) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_after_the_run_was_saved_does_not_change_the_status(tmp_path, name):
    """Importing torch makes the interpreter's shutdown long enough for a second signal."""
    code = f"import atexit, os, signal, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    code += f"atexit.register(lambda: os.kill(os.getpid(), signal.{name}))\n"
    done = run_python(
        "-c", f"{code}from lab.cli import run_main\nrun_main(lambda argv: 75)", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.slow
def test_signals_in_each_phase_of_a_run(tmp_path):
    done = run_python(ROOT / "bench" / "signals.py", "--rounds", 7, cwd=tmp_path, timeout=3600)
    assert done.returncode == 0 and "7 rounds, 0 problems" in done.stdout, done.stdout + done.stderr


def test_signal_handlers_are_installed_and_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with SignalHandler(World()) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        stop.check()  # no signal yet
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(GracefulStop, match="SIGTERM"):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


HANGS = """real = os.replace
def replace(part, path):
    if "model_000008" in str(path):
        time.sleep(60)
    real(part, path)

os.replace = replace"""


def test_killed_run_has_complete_checkpoints_and_resumes(tmp_path, start_training, run_train):
    """The run is killed while the thread writes checkpoint 8. Training has gone on to step 12, whose
    checkpoint waits for that one. The steps repeated after resuming have the same losses, bit for bit."""
    process = start_training("--checkpoint_every", 4, program=driver(tmp_path, HANGS))
    wait_for_steps(process, tmp_path / "log" / "r", 12)
    time.sleep(0.5)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run = read_run(tmp_path / "log" / "r")
    assert list(run.checkpoints) == [4] and len(run.losses) == 12
    assert [e["path"] for e in of_kind(run, "checkpoint")] == ["model_000004.pt"]
    assert (run.dir / "model_000008.pt.part").exists()
    assert run_train("--resume", "--max_steps", 12).returncode == 0
    again = read_run(run.dir)
    assert sorted(again.checkpoints) == [8, 12] and again.losses[12:] == run.losses[4:]
    assert again.events[: len(run.events)] == run.events, "the first part of the log is kept"
    assert [e["step"] for e in of_kind(again, "start")] == [0, 4]
    assert not list(run.dir.glob("*.part"))


@pytest.mark.skipif(sys.platform != "linux", reason="takes a terminal away as Linux does")
def test_closed_terminal_saves_and_stops_the_run(tmp_path, start_training):
    """As when an ssh connection breaks. SIGHUP is sent by the terminal and again by the shell."""
    import termios

    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 100))
    tty = os.ttyname(end)
    process = start_training("--val_every", 2, out=tty, err=tty)
    wait_for_steps(process, tmp_path / "log" / "r")
    os.close(end)
    assert b"/1000000" in os.read(terminal, 4096)
    os.close(terminal)
    with contextlib.suppress(ProcessLookupError):
        process.signal(signal.SIGHUP)
    assert_saved_and_stopped(process, tmp_path, "SIGHUP")


def test_run_continues_if_the_reader_of_its_output_exits(tmp_path, start_training):
    """As with `| head -1`."""
    os.mkfifo(pipe := tmp_path / "pipe")
    process = start_training("--max_steps", 20, "--val_every", 5, out=pipe)
    with open(pipe) as reader:
        assert reader.readline()
    assert process.wait() == 0 and "Traceback" not in process.stderr, process.stderr
    run = read_run(tmp_path / "log" / "r")
    assert list(run.checkpoints) == [20] and run.events[-1]["reason"] == "done"


def test_ctrl_c_that_also_ends_the_reader_saves_the_run(tmp_path, start_training):
    """As with `2>&1 | tee`, where Ctrl-C goes to the whole group."""
    os.mkfifo(pipe := tmp_path / "pipe")
    process = start_training(out=pipe, err=pipe)
    with open(pipe):
        wait_for_steps(process, tmp_path / "log" / "r")
    process.signal(signal.SIGINT)
    assert_saved_and_stopped(process, tmp_path, "SIGINT")
