"""Two real processes over gloo, started by torchrun, against one."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY_RUN, clean_env, wait_for_steps, write_shards
from test_train import EPS, difference, equal_bits, of_kind, raw_gradients, read_run, train_here

import train_gpt2
from lab import device as machine
from lab.run.vitals import check_zero1
from train_gpt2 import GPT, GPTConfig, TrainConfig

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo"),
    pytest.mark.skipif(sys.platform == "win32", reason="torchrun and signals are for Linux and macOS"),
]


def torchrun(tmp_path, shards, *flags, program=ROOT / "train_gpt2.py"):
    """`torchrun --standalone --nproc_per_node=2 train_gpt2.py` on the tiny shards, running; as run_train."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", program]
    command += flags if "--resume" in flags else [*TINY_RUN, "--data", shards, "--eps", EPS, *flags]
    env = clean_env(PYTHONWARNINGS="default::FutureWarning")
    return subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left_over(tmp_path):
    """Ids of processes that were started with this test's folder on the command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(tmp_path).encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:  # it ended meanwhile
            pass
    return found


def test_torchrun_lets_every_flag_through(capsys):
    from torch.distributed.run import get_args_parser

    refused = []
    for field in dataclasses.fields(GPTConfig) + dataclasses.fields(TrainConfig):
        try:
            words = get_args_parser().parse_args(["--standalone", "train_gpt2.py", f"--{field.name}", "1"]).training_script_args
            assert words == [f"--{field.name}", "1"]
        except SystemExit:
            refused.append(field.name)
    assert not refused


@pytest.mark.parametrize("zero1", [[], ["--zero1"]], ids=["ddp", "zero1"])
def test_two_processes_are_one(tmp_path, shards, zero1):
    """Losses, weights, raw gradients and validation loss, with accumulation and masks that leave ranks uneven."""
    for path in shards.glob("*_train_*.npy"):
        mask = (np.arange(len(np.load(path))) // 50 % 3 == 0).astype(np.uint8)
        with path.with_suffix(".mask").open("wb") as f:
            np.save(f, mask)
    flags = "--max_steps 12 --batch_size 2 --val_every 4 --val_tokens 250 --grad_clip 0 --ckpt_every 1 --keep_last 100"
    process = torchrun(tmp_path, shards, *flags.split(), *zero1)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    two = read_run(tmp_path / "log" / "r")
    one = train_here(
        tmp_path, shards, "one", total_batch_size=128, batch_size=8, max_steps=12, lr=1e-3, beta2=0.99, grad_clip=0.0,
        val_every=4, val_tokens=250, ckpt_every=1,
    )  # fmt: skip
    start = of_kind(two, "start")[0]
    assert (start["world_size"], start["grad_accum_steps"]) == (2, 2) and of_kind(one, "start")[0]["grad_accum_steps"] == 1
    assert len(two.losses) == 12 and np.abs(np.subtract(one.losses, two.losses)).max() < 1e-5
    gradients = raw_gradients(one.checkpoints[1])
    assert max(g.abs().max() for g in gradients.values()) > 1e-2
    assert difference(gradients, raw_gradients(two.checkpoints[1])) < 1e-5
    for step in (1, 12):
        assert difference(one.checkpoints[step]["model"], two.checkpoints[step]["model"]) < 1e-5
    assert difference(one.checkpoints[1]["model"], one.checkpoints[12]["model"]) > 1e-3
    norms = [[e["grad_norm"] for e in of_kind(r, "train")] for r in (one, two)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-5)
    losses = [[e["loss"] for e in of_kind(r, "val")] for r in (one, two)]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert one.checkpoints[12]["loader"] == two.checkpoints[12]["loader"]
    assert not any(k.startswith("module.") for k in two.checkpoints[12]["model"])
    assert out.count("total_batch_size=") == 1, "rank 0 alone speaks"
    assert not left_over(tmp_path)


def test_two_compiled_processes_are_one_uncompiled_and_go_on_to_the_same_bits(tmp_path, shards):
    """And the loss that checks the compiler, of the first micro-batch, is not taken for one of the run's."""
    reason = machine.why_no_compile(torch.device("cpu"))
    if reason:
        pytest.skip(f"torch.compile does not work here: {reason}")
    process = torchrun(tmp_path, shards, *"--max_steps 4 --batch_size 2 --compile --ckpt_every 2 --keep_last 9".split())
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "torch.compile is off" not in out
    run = tmp_path / "log" / "r"
    whole, one = read_run(run), train_here(tmp_path, shards, "one", total_batch_size=128, batch_size=8, max_steps=4, lr=1e-3,
                                           beta2=0.99)  # fmt: skip
    assert np.abs(np.subtract(whole.losses, one.losses)).max() < 1e-4
    (run / "model_000004.pt").unlink()
    process = torchrun(tmp_path, shards, "--resume", "--log_dir", tmp_path / "log")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert equal_bits(read_run(run).checkpoints[4]["model"], whole.checkpoints[4]["model"])


def test_a_compiler_that_errs_on_one_process_is_used_by_none(tmp_path, shards):
    """What is left is two processes that average their gradients."""
    driver = tmp_path / "driver.py"
    driver.write_text(f"""import functools, os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
import train_gpt2

def backend(graph, inputs):
    factor = 1.1 if os.environ["RANK"] == "1" else 1.0
    return lambda *args: [x * factor if x.is_floating_point() and x.dim() == 0 else x for x in graph(*args)]

torch.compile = functools.partial(torch.compile, backend=backend)
train_gpt2.why_no_compile = lambda device: ""
train_gpt2.main()
""")
    process = torchrun(tmp_path, shards, *"--max_steps 3 --batch_size 2 --compile".split(), program=driver)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    said = re.search(r"torch.compile is off: .* a loss of ([\d.]+), the same uncompiled one of ([\d.]+);", out)
    assert float(said[1]) == pytest.approx(1.1 * float(said[2]), rel=1e-3), out
    one = train_here(tmp_path, shards, "one", total_batch_size=128, batch_size=8, max_steps=3, lr=1e-3, beta2=0.99)
    assert np.abs(np.subtract(read_run(tmp_path / "log" / "r").losses, one.losses)).max() < 1e-5


def test_shares_go_on_to_the_same_bits_and_as_one_process(tmp_path, shards, run_train):
    """In bf16, where what travels is rounded and what is kept is not; with clipping."""
    flags = "--zero1 --precision bf16 --max_steps 8 --ckpt_every 4 --keep_last 9 --grad_clip 0.1"
    process = torchrun(tmp_path, shards, *flags.split())
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "FutureWarning" not in err
    whole = read_run(tmp_path / "log" / "r")
    assert of_kind(whole, "start")[0]["grad_accum_steps"] == 1
    for name in ("model_000008.pt", "model_best.pt"):
        (whole.dir / name).unlink(missing_ok=True)
    shutil.copytree(whole.dir, tmp_path / "log" / "one")

    process = torchrun(tmp_path, shards, "--resume", "--run_name", "r")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    again = read_run(whole.dir).checkpoints[8]
    for part in ("step", "model", "optimizer", "loader"):
        assert equal_bits(whole.checkpoints[8][part], again[part]), part

    done = run_train("--resume", "--run_name", "one")
    assert done.returncode == 0, done.stderr
    one = read_run(tmp_path / "log" / "one").checkpoints[8]
    assert difference(one["model"], again["model"]) < 1e-3 < difference(again["model"], whole.checkpoints[4]["model"])
    for ours, theirs in zip(one["optimizer"]["state"].values(), again["optimizer"]["state"].values(), strict=True):
        assert [(k, v.shape, v.dtype) for k, v in ours.items()] == [(k, v.shape, v.dtype) for k, v in theirs.items()]
        assert ours["step"] == theirs["step"] == 8
        assert (ours["exp_avg_sq"] - theirs["exp_avg_sq"]).abs().max() < 0.1 * theirs["exp_avg_sq"].abs().max()
    assert one["optimizer"]["param_groups"] == again["optimizer"]["param_groups"]
    for name, p in again["model"].items():
        if p.dim() == 2:
            assert not torch.equal(p, p.bfloat16().float()), f"{name} was saved as it travels"


def test_what_cannot_be_shared_out_is_refused(tmp_path, shards, run_train):
    alone = run_train("--zero1", "--max_steps", 1, "--precision", "tf32")
    assert alone.returncode == 0 and "note: zero1 does nothing here" in alone.stdout
    assert "note: precision=tf32 is how a GPU multiplies; on this CPU it is fp32" in alone.stdout
    result = run_train("--zero1", "--optimizer", "muon")
    assert result.returncode == 2 and "zero1=True shares out AdamW's state, and optimizer=muon has another" in result.stderr
    with pytest.raises(ValueError, match="precision=fp16 scales them"):
        check_zero1(TrainConfig(zero1=True), "fp16", processes=2)
    check_zero1(TrainConfig(zero1=True), "fp16", processes=1)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_what_travels_in_16_bits_is_read_in_16_bits(monkeypatch, tiny_config, eight_bits):
    """The 8-bit MLP reads its weights in 32 bits, and makes their gradients so."""
    chosen = []
    monkeypatch.setattr(train_gpt2, "ZeroAdamW", lambda adamw, rounded, dtype, world: chosen.extend(rounded))
    model = GPT(dataclasses.replace(tiny_config, fp8_mlp=eight_bits))
    train_gpt2.share_out(None, model, SimpleNamespace(dtype=torch.bfloat16), None)
    names = {name.split(".", 3)[3] for name, p in model.named_parameters() if any(p is c for c in chosen)}
    attention = {"attn.c_attn.weight", "attn.c_proj.weight"}
    assert names == attention | (set() if eight_bits else {"mlp.c_fc.weight", "mlp.c_proj.weight"})


def test_an_error_of_one_process_ends_all(tmp_path):
    shards = write_shards(tmp_path / "data", sizes=(700, 801, 997))
    path = shards / "x_train_000001.npy"  # neither the first nor the last, which are looked at before the run
    tokens = np.load(path)
    tokens[8 * 128 + 100 - 700] = 999  # in the second half of the ninth step, which rank 1 reads
    np.save(path, tokens)
    t0 = time.monotonic()
    process = torchrun(tmp_path, shards, "--max_steps", 1000, "--no-shuffle")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and time.monotonic() - t0 < 60
    assert "error: [rank 1] token id 999" in err and "x_train_000001.npy" in err
    assert not left_over(tmp_path)
    steps = [e["step"] for e in of_kind(read_run(tmp_path / "log" / "r"), "train")]
    assert steps == list(range(1, len(steps) + 1)) and 6 <= len(steps) <= 8


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_a_signal_to_one_process_ends_the_validation_of_all(tmp_path):
    shards = write_shards(tmp_path / "data", val=4_000_000)  # a minute
    process = torchrun(tmp_path, shards, "--val_every", 5, "--val_tokens", 0)
    log, deadline = tmp_path / "log" / "r" / "log.jsonl", time.monotonic() + 60
    while not log.exists() or '"start"' not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    time.sleep(2)  # the validation of step 0 is under way
    second = next(pid for pid in left_over(tmp_path) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(second), signal.SIGTERM)
    out, err = process.communicate(timeout=150)
    events = read_run(tmp_path / "log" / "r").events
    assert process.returncode == 0 and [e["kind"] for e in events] == ["start", "end"], err
    assert events[-1]["reason"] == "signal on another rank" and "signal: nothing new to save" in out


def test_sigterm_to_torchrun_saves_and_one_process_resumes(tmp_path, shards, run_train):
    process = torchrun(tmp_path, shards, "--max_steps", 100000)
    wait_for_steps(process, tmp_path / "log" / "r")
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    run = read_run(tmp_path / "log" / "r")
    step = of_kind(run, "train")[-1]["step"]
    assert list(run.checkpoints) == [step] and run.events[-1]["reason"] == "SIGTERM", err
    assert out.count("SIGTERM: finished step") == 1
    assert not left_over(tmp_path)
    result = run_train("--resume", "--max_steps", step + 2)
    assert result.returncode == 0, result.stderr
    assert [e["step"] for e in of_kind(read_run(run.dir), "train")][-2:] == [step + 1, step + 2]
