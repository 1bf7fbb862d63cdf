"""Several processes with gloo give the same results as one; torchrun or its variables start them."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conftest import (  # isort: skip
    ROOT, TINY_MODEL, TINY_RUN, difference, differing_parts, driver, equal_bits, finished,
    mask_shards, of_kind, read_run, train_here, wait_for, wait_for_steps, write_shards,
)  # fmt: skip
from test_train import raw_gradients

import train_gpt2
from lab.cli import UserError
from lab.distributed import World
from lab.hf.export import export
from lab.optim.fsdp2 import Fsdp2AdamW
from lab.optim.grad_norm import global_grad_norm
from lab.optim.zero1 import Zero1AdamW
from lab.precision import Precision
from lab.registry import load_model
from train_gpt2 import GPTConfig, TrainConfig

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Linux and macOS")


COMPILED = """import functools, lab.hardware
torch.compile = functools.partial(torch.compile, backend="aot_eager")
lab.hardware.compile_unsupported_reason = lambda *_: ''"""

WAYS = ["ddp", "zero1", "fsdp2", "ddp --compile", "fsdp2 --compile"]


@pytest.mark.parametrize("how", [*WAYS, "fsdp2 --activation_checkpointing"])
def test_two_processes_equal_one(tmp_path, shards, start_two, how):
    """Losses, weights, gradients and validation are equal, with gradient accumulation and with loss
    masks that leave the ranks unequal numbers of targets."""
    mask_shards(shards)
    flags = f"--parallel {how} --max_steps 8 --val_every 4 --val_tokens 250 --grad_clip 0"
    flags += " --checkpoint_every 1"
    program, layers = driver(tmp_path, COMPILED), 1 if "compile" in how else 2
    said = finished(
        start_two(*flags.split(), "--keep_last", 100, "--n_layer", layers, program=program)
    )
    two = read_run(tmp_path / "log" / "r")
    one = train_here(
        tmp_path, shards, "one", total_batch_size=128, batch_size=8, max_steps=8, lr=1e-3, beta2=0.99,
        grad_clip=0.0, val_every=4, val_tokens=250, checkpoint_every=1, model=dict(n_layer=layers),
    )  # fmt: skip
    starts = [of_kind(run, "start")[0] for run in (two, one)]
    assert [(s["world_size"], s["grad_accum_steps"]) for s in starts] == [(2, 2), (1, 1)]
    assert len(two.losses) == 8 and np.abs(np.subtract(one.losses, two.losses)).max() < 1e-5
    gradients = raw_gradients(one.checkpoints[1])
    assert max(g.abs().max() for g in gradients.values()) > 1e-2
    assert difference(gradients, raw_gradients(two.checkpoints[1])) < 1e-5
    for step in (1, 8):
        assert difference(one.checkpoints[step]["model"], two.checkpoints[step]["model"]) < 1e-5
    assert difference(one.checkpoints[1]["model"], one.checkpoints[8]["model"]) > 1e-3
    assert one.norms == pytest.approx(two.norms, abs=1e-5)
    assert one.val == pytest.approx(two.val, abs=1e-5) and "compile is off" not in said
    assert one.checkpoints[8]["loader"] == two.checkpoints[8]["loader"]


@pytest.fixture
def run_in_a_group(shards):
    """A Trainer in a process group of one, so that single collectives can be called."""
    sizes = dict(total_batch_size=256, batch_size=4, seq_len=16)
    cfg = TrainConfig(data=str(shards), compile=False, **sizes)
    run = train_gpt2.build_trainer(GPTConfig(**TINY_MODEL), cfg, World("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield run
    dist.destroy_process_group()


def test_ddp_all_reduces_once_per_step(run_in_a_group):
    run, sent = run_in_a_group, []
    run.model = torch.nn.parallel.DistributedDataParallel(run.raw_model)

    def exchange(_, bucket):
        sent.append(run.loader.micro_step)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    run.model.register_comm_hook(None, exchange)
    run.train_step()
    assert run.loader.grad_accum_steps == 4 and sent == [0], "only in the last micro-step"


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp2"])
def test_gradients_are_clipped_only_above_the_limit(run_in_a_group, parallel):
    run, params = run_in_a_group, list(run_in_a_group.raw_model.parameters())
    clip, clipped = run.clip_grad_norm, params
    if parallel == "zero1":
        zero1 = Zero1AdamW(run.optimizer, run.raw_model, run.loader, run.precision, run.world)
        clip, clipped = zero1.clip_grad_norm, [shards.local_shard for shards in zero1.shards]
    if parallel == "fsdp2":
        fsdp2 = Fsdp2AdamW(run.optimizer, run.raw_model, None, run.precision, run.world)
        clip, params = fsdp2.clip_grad_norm, list(run.raw_model.parameters())
        clipped = params
    count = sum(p.numel() for p in params)
    for max_norm, left in ((0, 1), (1.5, 1), (0.5, 0.5)):
        for p in params:
            p.grad = torch.full_like(p, count**-0.5)  # their joint norm is 1
        assert clip(max_norm).item() == pytest.approx(1, rel=1e-5)
        assert global_grad_norm([p.grad for p in clipped]).item() == pytest.approx(left, rel=1e-5)


@pytest.mark.parametrize("name, kind", [("zero1", Zero1AdamW), ("fsdp2", Fsdp2AdamW)])
def test_sharded_optimizers_refuse_fp16(run_in_a_group, name, kind):
    run = run_in_a_group
    run.precision.name = "fp16"  # set here, because real fp16 needs a GPU
    sentence = (
        f"parallel={name} does not support precision=fp16, .*--parallel ddp or --precision fp32"
    )
    with pytest.raises(UserError, match=sentence):
        kind(run.optimizer, run.raw_model, run.loader, run.precision, run.world)


def test_fsdp2_keeps_float32_in_blocks_that_need_it(run_in_a_group):
    run, seen = run_in_a_group, {}
    run.precision = Precision("bf16", torch.device("cpu"))
    run.raw_model.blocks[0].mlp.param_dtype = torch.float32  # like an MLP in 8 bits
    run.optimizer = Fsdp2AdamW(run.optimizer, run.raw_model, None, run.precision, run.world)
    for i, block in enumerate(run.raw_model.blocks):
        block.mlp.c_fc.register_forward_pre_hook(lambda m, _, i=i: seen.update({i: m.weight.dtype}))
    run.train_step()
    assert seen == {0: torch.float32, 1: torch.bfloat16}


def test_fsdp2_has_the_losses_of_ddp_in_bf16(tmp_path, start_two):
    """Layers that autocast leaves in float32 are sent in float32: a gain of 1.003 must not become 1."""
    for parallel in ("ddp", "fsdp2"):
        flags = f"--precision bf16 --parallel {parallel} --run_name {parallel} --max_steps 6"
        finished(start_two(*flags.split()))
    ddp, fsdp2 = (read_run(tmp_path / "log" / name).losses for name in ("ddp", "fsdp2"))
    assert ddp == pytest.approx(fsdp2, abs=5e-6) and len(ddp) == 6


def test_run_resumes_with_other_world_sizes_and_sharding(tmp_path, start_two, run_train):
    """In bf16, where communication is rounded but checkpoints are not, and with gradient clipping."""
    flags = "--parallel zero1 --precision bf16 --batch_size 4 --max_steps 6"
    flags += " --checkpoint_every 3 --keep_last 9"
    finished(start_two(*flags.split(), "--grad_clip", 0.1))
    whole = read_run(tmp_path / "log" / "r")
    (whole.dir / "model_000006.pt").unlink()
    for name in ("one", "ddp"):
        shutil.copytree(whole.dir, tmp_path / "log" / name)
    finished(start_two("--resume", "--run_name", "r"))
    again, parts = read_run(whole.dir).checkpoints[6], ("step", "model", "optimizer", "loader")
    assert not differing_parts(whole.checkpoints[6], again, parts)
    for p in again["model"].values():
        assert p.dim() < 2 or not torch.equal(p, p.bfloat16().float()), "saved in bf16"

    for max_steps, parallel in enumerate(("ddp", "fsdp2", "zero1"), start=4):
        flags = f"--resume --run_name ddp --parallel {parallel} --max_steps {max_steps}"
        finished(start_two(*flags.split()))
    shutil.copytree(tmp_path / "log" / "ddp", alone := tmp_path / "log" / "alone")
    (alone / "model_000006.pt").unlink()
    export(str(alone / "model_000005.pt"), tmp_path / "export")  # a checkpoint of FSDP2
    exported, saved = load_model(str(tmp_path / "export")), read_run(alone).checkpoints[5]
    assert equal_bits(exported.state_dict(), saved["model"])
    for name in ("one", "alone"):
        done = run_train("--resume", "--run_name", name)
        assert done.returncode == 0, done.stderr
    for name in ("one", "ddp", "alone"):
        other = read_run(tmp_path / "log" / name).checkpoints[6]
        near = difference(other["model"], again["model"])
        assert near < 1e-3 < difference(again["model"], whole.checkpoints[3]["model"])
        states = [checkpoint["optimizer"]["state"] for checkpoint in (other, again)]
        for ours, theirs in zip(*(state.values() for state in states), strict=True):
            assert ours["step"] == theirs["step"] == 6
            assert ours["exp_avg"].shape == theirs["exp_avg"].shape
            for name in ("exp_avg", "exp_avg_sq"):
                far = (ours[name] - theirs[name]).abs().max()
                assert far < 0.1 * theirs[name].abs().max()
        both = {"lr": 0}
        groups = [[g | both for g in c["optimizer"]["param_groups"]] for c in (other, again)]
        assert groups[0] == groups[1]


IN_32_BITS = """from lab.optim.zero1 import FlatParamShards
begin = FlatParamShards.__init__
FlatParamShards.__init__ = lambda self, params, world, _: begin(self, params, world, torch.float32)"""
# stands in for the 8-bit MLP on a CPU: it needs float32 weights, as param_dtype declares
READS_ALL = """import lab.kernels
from lab.kernels.fused_mlp import FusedMLP
def forward(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.plain(x.float())
lab.kernels.is_supported = lambda _: True
lab.kernels.kernel_error = lambda *_: 0.0
FusedMLP.forward, FusedMLP.param_dtype = forward, torch.float32"""


@pytest.mark.parametrize("reads_all, batch_size", [(0, 4), (0, 2), (1, 4)])
def test_zero1_communication_in_bf16_changes_no_bit(tmp_path, start_two, reads_all, batch_size):
    """Bit-equal to float32 communication, with and without gradient accumulation, and with float32
    weights saved in each step."""
    flags = f"--parallel zero1 --precision bf16 --max_steps 5 --batch_size {batch_size}".split()
    finished(start_two(*flags, program=driver(tmp_path, READS_ALL * reads_all)))
    wide = driver(tmp_path, f"{READS_ALL * reads_all}\n{IN_32_BITS}")
    finished(start_two(*flags, "--run_name", "wide", "--checkpoint_every", 1, program=wide))
    runs = [read_run(tmp_path / "log" / name) for name in ("r", "wide")]
    assert runs[0].losses == runs[1].losses and runs[0].norms == runs[1].norms
    assert not differing_parts(*(run.checkpoints[5] for run in runs), ("model", "optimizer"))


# rank 1's machine sees an old listing of the run directory
OLD_LISTING = """
import lab.registry, lab.trainer.checkpoint
def older(folder, real=lab.trainer.checkpoint.checkpoint_files):
    return real(folder)[:-1] or real(folder)
if os.environ["RANK"] == "1":
    lab.registry.checkpoint_files = lab.trainer.checkpoint.checkpoint_files = older"""


def test_three_processes_resume_bit_equal(tmp_path, start_two):
    """The order in which three ranks are summed depends on the gradient's bucket in DDP."""
    flags = "--total_batch_size 192 --max_steps 4 --checkpoint_every 2"
    finished(start_two(*flags.split(), count=3))
    whole = read_run(tmp_path / "log" / "r").checkpoints[4]
    (tmp_path / "log" / "r" / "model_000004.pt").unlink()
    finished(start_two("--resume", count=3))
    assert equal_bits(whole["model"], read_run(tmp_path / "log" / "r").checkpoints[4]["model"])


def test_all_ranks_load_the_checkpoint_that_rank_0_finds(tmp_path, start_two):
    finished(start_two("--max_steps", 6, "--checkpoint_every", 2, "--keep_last", 9))
    folder, old = tmp_path / "log" / "r", driver(tmp_path, OLD_LISTING)
    whole = read_run(folder)
    (folder / "model_000006.pt").unlink()
    finished(start_two("--resume", program=old))
    assert read_run(folder).losses[-2:] == whole.losses[-2:]
    more = ("--run_name", "s", "--max_steps", 1, "--init_from", folder)
    finished(start_two(*more, program=old))
    begun = json.loads((tmp_path / "log" / "s" / "config.json").read_text())
    assert begun["train"]["init_from"] == str(folder / "model_000006.pt")


NO_TOKENIZER = """
import lab.eval.validation
from lab.cli import UserError
def refuse(name):
    raise UserError("no network here")
if os.environ["RANK"] == "1":
    lab.eval.validation.get_tokenizer = refuse"""
OTHER_DATA = """
from lab.data.shards import TokenShards
init = TokenShards.__init__
if os.environ["RANK"] == "1":
    TokenShards.__init__ = lambda self, folder, *more: init(self, "more", *more)"""


def test_ranks_agree_on_sampling_and_on_the_data(tmp_path, start_two):
    flags = ("--max_steps", 4, "--sample_every", 3, "--val_every", 2)
    said = finished(start_two(*flags, program=driver(tmp_path, NO_TOKENIZER)))
    assert "no samples and no bits per byte: no network here" in said
    write_shards(tmp_path / "more", sizes=(700, 900))
    two = start_two("--run_name", "s", program=driver(tmp_path, OTHER_DATA))
    assert {process.wait() for process in two} == {2}
    assert "differs between processes" in two[0].stderr


def test_error_on_one_rank_ends_all(tmp_path, start_two):
    data = write_shards(tmp_path / "more", sizes=(700, 801, 997))
    path = data / "x_train_000001.npy"  # the first and the last shard are checked at the start
    tokens = np.load(path)
    tokens[8 * 128 + 100 - 700] = 999  # in the second half of the ninth step, which rank 1 reads
    np.save(path, tokens)
    two = start_two("--max_steps", 1000, "--no_shuffle", "--batch_size", 4, data=data)
    assert two[1].wait(60) == 2 and two[0].wait(60) != 0
    assert "error: [rank 1] token id 999" in two[1].stderr and "x_train_000001.npy" in two[1].stderr
    assert 6 <= len(read_run(tmp_path / "log" / "r").losses) <= 8


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_killed_or_frozen_rank_ends_the_others_with_a_message(tmp_path, start_two, run_train, how):
    """The message contains gloo's reason: a closed connection, or a timeout."""
    two = start_two("--max_steps", 100000, "--checkpoint_every", 3, "--timeout", 4)
    wait_for_steps(two[0], tmp_path / "log" / "r", 7)
    two[1].signal(getattr(signal, how))
    assert two[0].wait(60) == 1 and "Traceback" not in two[0].stderr, two[0].stderr
    said = r"\[rank 0\] lost the connection .*(by peer|waiting 4000ms).*if there is a checkpoint\n"
    assert re.search(f"error: {said}", two[0].stderr)
    two[1].kill()
    step = max(read_run(tmp_path / "log" / "r").checkpoints)
    assert step % 3 == 0 and run_train("--resume", "--max_steps", step + 1).returncode == 0


def catches(process, number):
    """Whether a process has its own handler for a signal; without /proc, True."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return True
    return int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> (number - 1) & 1


def test_signal_to_one_rank_ends_validation_on_all(tmp_path, start_two):
    data = write_shards(tmp_path / "more", val=4_000_000)  # a minute
    two = start_two("--val_every", 5, "--val_tokens", 0, "--max_steps", 100, data=data)
    wait_for(lambda: "guess" in two[0].stdout and catches(two[1], signal.SIGTERM), two[0])
    two[1].signal(signal.SIGTERM)
    assert [process.wait(90) for process in two] == [75, 75], two[0].stderr
    events = read_run(tmp_path / "log" / "r").events
    assert [(e["kind"], e.get("reason")) for e in events[1:]] == [("end", "signal on another rank")]
    assert "run the same command to start again" in two[0].stdout


def left_over(tmp_path):
    """Ids of running processes whose command line contains this test's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has exited
            if str(tmp_path).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
@pytest.mark.parametrize("to", ["all", "rank 1"])
def test_signal_to_torchrun_or_one_rank_saves_a_checkpoint(tmp_path, shards, start, to):
    """Also if a process has already received the SIGTERM that torchrun passes on to it."""
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    flags = [*TINY_RUN, "--data", shards, "--max_steps", 100000]
    process = start(*torchrun, ROOT / "train_gpt2.py", *flags)
    wait_for_steps(process, tmp_path / "log" / "r")
    environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in left_over(tmp_path)}
    rank_1 = next(pid for pid, env in environs.items() if b"\0RANK=1\0" in env)
    for pid in [rank_1] if to == "rank 1" else environs:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(60) != 0
    run = read_run(tmp_path / "log" / "r")
    step, said = of_kind(run, "train")[-1]["step"], process.stdout
    assert list(run.checkpoints) == [step] and run.events[-1]["kind"] == "end", process.stderr
    assert said.count(f"saved after step {step} in log/r") == 1 and not left_over(tmp_path)
    assert (run.dir / "loss.png").exists() and "finish it" in said, (
        "all ranks waited for the closing summary"
    )
