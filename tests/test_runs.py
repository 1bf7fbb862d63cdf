"""The run directory: its contents; bit-equal resuming; when a run is saved and evaluated."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import (  # isort: skip
    TINY_MODEL, differing_parts, equal_bits, of_kind, read_run, run_code, train_here,
    wait_for_steps,
)  # fmt: skip

import train_gpt2
from lab.cli import UserError
from lab.config_file import build_config, read_config
from lab.distributed import World
from lab.registry import load_model, resolve_source
from lab.trainer import checkpoint
from lab.trainer.checkpoint import checkpoint_files, read_checkpoint, read_newest
from lab.trainer.health import HealthMonitor
from lab.trainer.run_dir import find_run_to_resume, newest_run
from lab.trainer.signals import SignalHandler
from train_gpt2 import GPTConfig, TrainConfig

# made by the trainer and the export of that commit
OLD = Path(__file__).parent / "fixtures" / "a3954dc"
GPT2 = "train_gpt2.py:Trainer"

# --------------------------------------------------------------------------------- bit-equal resuming


def test_resumed_run_equals_an_uninterrupted_one(run_train, tmp_path):
    """With the real command; also checks the files of a run."""
    whole = run_train("--max_steps", 20, "--checkpoint_every", 10, "--run_name", "whole")
    first = run_train("--max_steps", 10, "--checkpoint_every", 10)
    second = run_train("--resume", "--max_steps", 20)
    assert [r.returncode for r in (whole, first, second)] == [0, 0, 0], whole.stderr + second.stderr
    a, b = (read_run(tmp_path / "log" / name) for name in ("whole", "r"))
    assert a.losses == b.losses and len(a.losses) == 20
    assert [e["step"] for e in of_kind(b, "train")] == list(range(1, 21)), (
        "appended, without duplicates"
    )
    assert not differing_parts(a.checkpoints[20], b.checkpoints[20])
    assert not equal_bits(a.checkpoints[10]["model"], a.checkpoints[20]["model"])
    torch.load(a.dir / "model_000020.pt", weights_only=True)  # it contains only plain values
    assert a.events[0]["kind"] == "start" and a.events[-1]["reason"] == "done"
    assert (a.dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"data", "log"}, "it writes only to its folder"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_a_complex_run_is_bit_equal(tmp_path, shards, monkeypatch, optimizer):
    """Aligned and masked documents, a shuffled stream that wraps within a step, a checkpoint that is not at
    the end of an epoch, and dropout."""
    real = train_gpt2.MLP.forward
    monkeypatch.setattr(train_gpt2.MLP, "forward", lambda *a: torch.dropout(real(*a), 0.5, True))
    settings = dict(align_documents=True, total_batch_size=192, schedule="wsd", decay_steps=9,
                    optimizer=optimizer, checkpoint_every=7, model=dict(document_mask=True))  # fmt: skip
    whole = train_here(tmp_path, shards, "r", **settings)
    for step in (14, 20):
        (whole.dir / f"model_{step:06d}.pt").unlink()
    rest = train_here(tmp_path, shards, "r", resume=True, **settings)
    assert rest.losses[20:] == whole.losses[7:]
    assert not differing_parts(whole.checkpoints[20], rest.checkpoints[20])


@pytest.mark.parametrize("every", [7, 0])
def test_resumed_run_validates_its_last_step_again(tmp_path, shards, every):
    """The last checkpoint was saved before the last validation, so its best_val does not include it."""
    how = dict(checkpoint_every=7, val_every=7, total_batch_size=64)
    first = train_here(tmp_path, shards, "r", max_steps=5, **how)
    on = dict(resume=True, lr=1.0, warmup_steps=0, schedule="constant")
    train_here(tmp_path, shards, "r", max_steps=7, **how | on | dict(val_every=every))
    assert not list(first.dir.glob("*.part")), "model_best.pt was linked again"
    rest = train_here(tmp_path, shards, "r", max_steps=8, **how | on)
    assert rest.val[8] > first.val[5], "the high learning rate increased the loss"
    assert read_checkpoint(rest.dir / "model_best.pt")["step"] == 5
    assert rest.checkpoints[8]["best_val"] == first.val[5]


@pytest.mark.parametrize("max_steps", [400, 100])  # with and without a later checkpoint
def test_failed_checkpoint_ends_the_run(tmp_path, shards, monkeypatch, max_steps):
    def full(*_):
        raise UserError("the disk is full")

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    with pytest.raises(UserError, match="the disk is full"):
        train_here(
            tmp_path, shards, "r", max_steps=max_steps, checkpoint_every=100, total_batch_size=64
        )
    assert 100 <= of_kind(read_run(tmp_path / "r"), "train")[-1]["step"] < 200


ONE_MATRIX = """import sys, train_gpt2
class OneMatrix(train_gpt2.CausalSelfAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.c_attn.weight.num_matrices = 1
train_gpt2.CausalSelfAttention = OneMatrix
train_gpt2.run_main(train_gpt2.main)
"""


def test_run_of_commit_a3954dc_can_be_resumed(tmp_path):
    """Its config has fields that no longer exist. Losses agree as far as the order of sums allows, if
    Muon treats c_attn as one matrix, as it did then."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    done = run_code(ONE_MATRIX, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(ignored, unknown to this version: cross_entropy, fused" in done.stdout
    run = read_run(tmp_path / "log" / "old")
    losses = 5.331153869628906, 5.341618537902832, 5.313250541687012, 5.304826736450195
    norms = 0.7903231978416443, 0.8260146379470825, 0.91800457239151, 0.8725777268409729
    assert run.losses[-4:] == pytest.approx(losses, abs=1e-6)
    assert run.norms[-4:] == pytest.approx(norms, rel=1e-6)
    assert run.val[14] == pytest.approx(5.298589706420898, abs=1e-6)
    assert run.checkpoints[14]["program"]["trainer"] == GPT2


# --------------------------------------------------------------------------- saving and evaluation


def test_checkpoint_is_saved_before_its_step_is_evaluated(tmp_path, shards):
    """Step 0 is evaluated but never saved; the best validation is one of a saved step."""
    val = np.load(shards / "x_val_000000.npy")
    unseen = np.where(val < 100, val + 100, val)  # never seen in training, so the loss only rises
    np.save(shards / "x_val_000000.npy", unseen.astype(np.uint16))
    settings = dict(val_every=2, sample_every=4, sample_tokens=3, checkpoint_every=4, keep_last=2)
    run = train_here(tmp_path, shards, "r", max_steps=10, **settings)
    beside = {}
    for event in run.events:
        beside.setdefault(event["step"], []).append(event["kind"])
    assert {step: kinds for step, kinds in beside.items() if kinds != ["train"]} == {
        0: ["start", "val", "sample"], 1: ["first_step", "train"], 2: ["train", "val"],
        4: ["train", "val", "sample", "checkpoint"], 6: ["train", "val"],
        8: ["train", "val", "sample", "checkpoint"],
        10: ["train", "val", "sample", "checkpoint", "end"],
    }  # fmt: skip
    assert run.val[0] < run.val[2] < run.val[4] < run.val[10], (
        "step 0 has the lowest loss, but is not saved"
    )
    names = sorted(p.name for p in run.dir.glob("model_*"))
    assert names == ["model_000008.pt", "model_000010.pt", "model_best.pt"]
    again = train_here(tmp_path, shards, "r", max_steps=12, resume=True, **settings)
    assert read_checkpoint(run.dir / "model_best.pt")["step"] == 4
    assert run.checkpoints[10]["best_val"] == again.checkpoints[12]["best_val"] == run.val[4]


def stopping(monkeypatch, at):
    """Send SIGTERM at the `at`-th check between batches of an evaluation."""
    real, calls = SignalHandler.check, []

    def check(self):
        calls.append(0)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self)

    monkeypatch.setattr(SignalHandler, "check", check)


@pytest.mark.parametrize("every", [3, 1000])
@pytest.mark.parametrize("step, at", [(3, 8), (6, 13)])  # five batches at each of the steps 0, 3, 6
def test_stop_during_validation_saves_and_resuming_validates_again(
    tmp_path, shards, monkeypatch, every, step, at
):
    settings = dict(
        max_steps=6, val_every=3, sample_every=3, sample_tokens=3, checkpoint_every=every
    )
    whole = train_here(tmp_path, shards, "whole", **settings)
    stopping(monkeypatch, at)
    stopped = train_here(tmp_path, shards, "r", **settings)
    monkeypatch.undo()
    assert stopped.status == 75 and stopped.events[-1]["reason"] == "SIGTERM"
    assert list(stopped.val) == list(range(0, step, 3)), "incomplete evaluations are not logged"
    assert stopped.checkpoints[step]["step"] == step == max(stopped.checkpoints)
    run = train_here(tmp_path, shards, "r", resume=True, **settings)
    assert run.status == 0 and run.val == whole.val and run.losses == whole.losses
    samples = [[e["texts"] for e in of_kind(r, "sample")] for r in (run, whole)]
    assert samples[0] == samples[1]
    parts = ["model", "optimizer", "loader"] + ["best_val"] * (every == 3)
    assert not differing_parts(run.checkpoints[6], whole.checkpoints[6], parts)
    assert [read_checkpoint(r.dir / "model_best.pt")["step"] for r in (run, whole)] == [6, 6]
    if step == 3:  # saved by the stop, then evaluated by the resumed run: the best so far
        assert run.checkpoints[6]["best_val"] == run.val[3]


def test_stop_before_the_first_update_saves_nothing(tmp_path, shards, monkeypatch):
    """The same command starts again."""
    settings = dict(max_steps=3, val_every=3)
    whole = train_here(tmp_path, shards, "whole", **settings)
    stopping(monkeypatch, at=2)
    stopped = train_here(tmp_path, shards, "r", **settings)
    assert stopped.status == 75 and not stopped.losses and not stopped.checkpoints
    monkeypatch.undo()
    with pytest.raises(UserError, match="start it again without --resume"):
        find_run_to_resume(tmp_path, "r", GPT2)
    with pytest.raises(UserError, match="r is a run without a checkpoint"):
        resolve_source("r", tmp_path)
    again = train_here(tmp_path, shards, "r", **settings)
    assert again.losses == whole.losses and len(of_kind(again, "start")) == 1
    assert len(list(again.dir.glob("events.out.tfevents.*"))) == 1, (
        "files of the first start are deleted"
    )
    with pytest.raises(UserError, match="r belongs to another run; pass --resume to continue it"):
        train_here(tmp_path, shards, "r", **settings)


@pytest.mark.parametrize("name", ["", "SIGTERM"])
def test_nonfinite_step_is_not_saved_but_an_earlier_checkpoint_is_completed(
    tmp_path, shards, monkeypatch, name
):
    """Even if a signal asks for a checkpoint of that step."""
    save, watch = checkpoint.save_checkpoint, HealthMonitor.record

    def bad(self, losses):
        if self.trainer.step == 3:
            losses = losses * np.nan
            if name:
                os.kill(os.getpid(), getattr(signal, name))
        watch(self, losses)

    monkeypatch.setattr(HealthMonitor, "record", bad)
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *args: time.sleep(0.5) or save(*args))
    with pytest.raises(UserError, match="the loss is nan at step 3"):
        train_here(tmp_path, shards, "r", max_steps=9, checkpoint_every=2)
    assert list(read_run(tmp_path / "r").checkpoints) == [2]


def test_a_run_that_fails_before_its_first_checkpoint_keeps_its_name(tmp_path, shards, monkeypatch):
    """Its log is not overwritten by the same command, and there is nothing to resume."""
    watch = HealthMonitor.record
    bad = lambda self, losses: watch(self, losses * (np.nan if self.trainer.step == 3 else 1))  # noqa: E731
    monkeypatch.setattr(HealthMonitor, "record", bad)
    with pytest.raises(UserError, match="the loss is nan at step 3"):
        train_here(tmp_path, shards, "r", max_steps=9, checkpoint_every=5)
    log = (tmp_path / "r" / "log.jsonl").read_text()
    for again in (
        lambda: find_run_to_resume(tmp_path, "r", GPT2),
        lambda: train_here(tmp_path, shards, "r", max_steps=9, checkpoint_every=5),
    ):
        with pytest.raises(UserError, match="delete the folder or pass another --run_name"):
            again()
    assert (tmp_path / "r" / "log.jsonl").read_text() == log


# ------------------------------------------------------------------------------------ run directory


def test_active_run_is_not_resumed_by_another_process(tmp_path, start_training, run_train):
    """After a kill, the lock is free."""
    process = start_training("--checkpoint_every", 20, "--keep_last", 1000)
    config = tmp_path / "log" / "r" / "config.json"
    wait_for_steps(process, config.parent, 41)
    before, again = config.read_text(), run_train("--resume", "--max_steps", 1000001)
    assert again.returncode == 2 and process.poll() is None and config.read_text() == before
    assert "r is in use by a run that is still running; stop that" in again.stderr
    process.kill()
    process.wait()
    step = max(read_run(config.parent).checkpoints)
    assert run_train("--resume", "--max_steps", step + 1).returncode == 0


def test_missing_fields_get_defaults_and_wrong_types_are_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model": {"n_layer": 9, "depth": 1}, "train": {"lr": 1}}))
    model, train, unknown = read_config(tmp_path, GPTConfig, TrainConfig)
    assert (model, train, unknown) == (GPTConfig(n_layer=9), TrainConfig(lr=1), ["depth"])
    assert type(train.lr) is float
    for text, said in (
        ('{"model": {"n_layer": "two"}, "train": {}}', 'n_layer="two", which must be of type int; repair'),
        ('{"model": {}, "train": {"lr": null}}', "lr=null, .* float"),
        ('{"model": {}, "train": {"schedule": "sine"}}', "one of cosine, linear, constant, wsd"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UserError, match=f"config.json.*{said}"):
            read_config(tmp_path, GPTConfig, TrainConfig)


def test_numbers_too_large_for_their_type_are_refused():
    """Infinity as a number of steps, and in a checkpoint, unlike JSON, an integer of any length."""
    for name, value in itertools.product(("warmup_steps", "lr"), (10**400, math.inf)):
        with pytest.raises(UserError, match=f"{name}="):
            build_config(TrainConfig, {name: value, "run_name": "r"}, "r").validate(GPTConfig())


def test_resume_selects_the_named_run_or_the_programs_newest(tmp_path):
    for age, name in enumerate(("of_bert", "newest", "older", "oldest")):
        (tmp_path / name).mkdir()
        config = tmp_path / name / "config.json"
        config.write_text('{"program": "bert"}' if age == 0 else "{}")
        os.utime(config, (900, 900))
        os.utime(
            checkpoint.save_checkpoint(tmp_path / name, 5 + age, {}, keep_last=1), (1000 - age,) * 2
        )
    assert (
        find_run_to_resume(tmp_path, "", GPT2)
        == newest_run(tmp_path, lambda run: run["generates_text"])
        == tmp_path / "newest"
    )
    assert find_run_to_resume(tmp_path, "", "bert.py:Trainer") == tmp_path / "of_bert"
    assert find_run_to_resume(tmp_path, "oldest", GPT2) == tmp_path / "oldest"
    with pytest.raises(UserError, match="run_name=log/x is a path; .* --run_name x$"):
        find_run_to_resume(tmp_path, "log/x", GPT2)
    with pytest.raises(UserError, match="x has no config.json to resume from"):
        find_run_to_resume(tmp_path, "x", GPT2)
    os.utime(tmp_path / "newest" / "config.json")  # newer than its own checkpoint
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="begun is newer and has no checkpoint.*--run_name newest$"):
        find_run_to_resume(tmp_path, "", GPT2)
    assert find_run_to_resume(tmp_path, "older", GPT2) == tmp_path / "older"
    (tmp_path / "begun" / "log.jsonl").write_text('{"kind": "first_step", "step": 1}\n')
    with pytest.raises(UserError, match="else delete the folder or pass another --run_name, or"):
        find_run_to_resume(tmp_path, "", GPT2)


def test_changes_after_which_numbers_cannot_be_compared(tmp_path, shards):
    """With other validation tokens, the best loss is forgotten. Another order of the text is reported."""
    run = train_here(tmp_path, shards, "r", max_steps=2, val_every=1)
    state = run.checkpoints[2] | {"best_val": 1.5}
    cfg = TrainConfig(**state["train_config"])
    for changes, best in ({}, 1.5), (dict(val_tokens=200), math.inf):
        changed = dataclasses.replace(cfg, **changes)
        build = train_gpt2.build_trainer
        assert build(GPTConfig(**TINY_MODEL), changed, World("cpu"), state).best_val == best
    how = train_gpt2.PRESETS, "", train_gpt2.Trainer
    for flags, reported in (
        ("--lr 1", False),
        ("--seed 7", True),
        ("--no_shuffle", True),
        ("--align_documents", True),
    ):
        argv = ["--resume", "--log_dir", str(tmp_path), "--max_steps", "4", *flags.split()]
        reason = train_gpt2.settings.parse_flags(argv, *how)[0]
        assert ("the text now has another order" in reason) == reported


# -------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_atomic_and_copies_are_kept(tmp_path):
    """Those that are kept are the newest by step, not by name."""
    (tmp_path / "model_000005_keep.pt").write_text("")
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save_checkpoint(tmp_path, step, {"step": step}, keep_last=2)
    assert checkpoint_files(tmp_path)[-1].name == "model_1000000.pt"
    names = {"model_000005_keep.pt", "model_999999.pt", "model_1000000.pt"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_kill_during_a_save_keeps_the_previous_checkpoint_and_best(tmp_path, monkeypatch):
    """Old files are deleted, and new ones get their names, only when the new ones are complete."""

    def killed_at(call, what, *args):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(os, call, lambda *_: sys.exit())
            what(tmp_path, *args)

    checkpoint.save_checkpoint(tmp_path, 1, {"step": 1}, keep_last=1)
    checkpoint.link_best(tmp_path, 1)
    for call in ("fsync", "replace"):
        killed_at(call, checkpoint.save_checkpoint, 2, {"step": 2}, 1)
        assert read_newest(tmp_path)[1] == {"step": 1}
    checkpoint.save_checkpoint(tmp_path, 2, {"step": 2}, keep_last=1)
    for call in ("link", "replace"):
        killed_at(call, checkpoint.link_best, 2)
        assert read_checkpoint(tmp_path / "model_best.pt") == {"step": 1}
    checkpoint.link_best(tmp_path, 2)
    assert read_checkpoint(tmp_path / "model_best.pt") == {"step": 2}


def test_saving_starts_no_thread(tmp_path, monkeypatch):
    """A second Ctrl-C may come then. If it interrupts the start, the program never ends."""
    checkpointer = checkpoint.AsyncCheckpointer(tmp_path, TrainConfig(), torch.device("cpu"))
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    checkpointer.save(1, {})
    assert checkpointer.finish() == {"step": 1, "path": "model_000001.pt"}


@pytest.mark.parametrize("how", ["adamw", "muon"])
def test_async_checkpoint_has_the_state_at_the_time_of_save(tmp_path, shards, monkeypatch, how):
    """Although updates change the weights before it is written. The tied head is saved once."""
    sizes = dict(total_batch_size=128, batch_size=4, seq_len=16, compile=False)
    cfg = TrainConfig(data=str(shards), log_dir=str(tmp_path), optimizer=how, **sizes)
    run = train_gpt2.build_trainer(GPTConfig(**TINY_MODEL), cfg, World("cpu"))
    run.train_step()
    at_once = checkpoint.save_checkpoint(tmp_path, 9, run.state_dict(), keep_last=9)
    real, updated = checkpoint.save_checkpoint, threading.Event()
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda *args: updated.wait(60) and real(*args)
    )
    assert run.save() is None, "nothing is on disk yet"
    run.train_step()
    updated.set()
    assert run.checkpointer.finish() == {"step": 1, "path": "model_000001.pt"}
    by_thread = tmp_path / "model_000001.pt"
    wanted, found = read_checkpoint(at_once), read_checkpoint(by_thread)
    assert not equal_bits(run.state_dict()["model"], wanted["model"])
    assert equal_bits(found, wanted)
    assert by_thread.stat().st_size == pytest.approx(at_once.stat().st_size, abs=2000)


def test_a_checkpoint_saved_between_reading_and_locking_is_not_renamed(
    tmp_path, shards, monkeypatch
):
    """As by the run that is being stopped while the next one starts with --resume."""
    whole = train_here(tmp_path, shards, "r", max_steps=4, checkpoint_every=2)
    newest, away = whole.dir / "model_000004.pt", tmp_path / "away.pt"
    newest.rename(away)
    monkeypatch.setattr(
        train_gpt2.settings, "read_newest", lambda run_dir: restored(read_newest(run_dir))
    )

    def restored(found):
        away.rename(newest)
        return found

    with pytest.raises(UserError, match="has saved .*model_000004.pt meanwhile; start the same"):
        train_here(tmp_path, shards, "r", resume=True, max_steps=6)
    assert newest.exists() and len(list(whole.dir.glob("*.damaged"))) == 0


@pytest.mark.parametrize("cut", [0, 100])
def test_resuming_skips_a_damaged_checkpoint_with_a_message(tmp_path, shards, capsys, cut):
    """A checkpoint with one changed byte, which torch.load reads without an error, or a truncated one. It
    is renamed, because otherwise --keep_last 1 would keep it as the newest one."""
    whole = train_here(tmp_path, shards, "r", max_steps=6, checkpoint_every=2)
    newest = whole.dir / "model_000006.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data[: len(data) - cut])
    capsys.readouterr()
    # as sample.py, export, hellaswag.py and --init_from find it
    model, said = load_model(str(whole.dir)), capsys.readouterr()
    assert equal_bits(model.state_dict(), whole.checkpoints[4]["model"])
    assert "trying model_000004.pt\n" in said.err
    with pytest.raises(UserError, match="model_000006.pt is damaged"):
        load_model(str(newest))  # by the name of the run
    rest = train_here(tmp_path, shards, "r", resume=True, max_steps=5, keep_last=1)
    said = capsys.readouterr()
    assert "model_000006.pt is damaged (" in said.err and "trying model_000004.pt\n" in said.err
    assert said.out.startswith("resuming after step 4 of ")
    assert "model_000006.damaged is damaged; resuming from step 4" in said.out
    assert of_kind(rest, "start")[-1]["passed_over"] == ["model_000006.damaged"]
    assert rest.losses[6:] == whole.losses[4:5] and list(rest.checkpoints) == [5]


def test_checkpoints_without_a_config_belong_to_another_run(tmp_path, shards):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "model_000020.pt").write_bytes(b"theirs")
    with pytest.raises(UserError, match="r belongs to another run"):
        train_here(tmp_path, shards, "r", max_steps=1)
    assert [path.name for path in tmp_path.glob("r/[!.]*")] == ["model_000020.pt"]


def test_checkpoints_of_wrong_structure_are_refused(tmp_path, shards):
    """Their checksums are right. A fused kernel would read beyond the end of a moment that is too small."""
    run = train_here(tmp_path, shards, "r", max_steps=1)
    small = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    for place, value in (
        (("step",), "1"), (("model",), [1]), (("train_config",), 3),
        (("model_config", "n_head"), torch.zeros(3)),
        (("model", "transformer.wte.weight"), 5), (("loader", "position"), {}),
        (("optimizer", "state"), "x"), (("optimizer", "state", 0), small),
        (("optimizer", "param_groups", 0, "params"), [0]), (("optimizer", "param_groups", -1, "norms"), "x"),
        (("model", "transformer.ln_f.bias"), torch.zeros(32, device="meta")),
    ):  # fmt: skip
        changed = at = read_checkpoint(run.dir / "model_000001.pt")
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = value
        (tmp_path / "x").mkdir(exist_ok=True)
        shutil.copy(run.dir / "config.json", tmp_path / "x")
        torch.save(changed, tmp_path / "x" / "model_000001.pt")
        said = "weights with --init_from|different model"
        with pytest.raises(UserError, match=said):
            train_here(tmp_path, shards, "x", resume=True, max_steps=2)


def test_checkpoints_that_do_not_fit_the_run_are_refused(tmp_path, shards):
    train_here(tmp_path, shards, "r", max_steps=1)
    for changed, said in (
        (dict(model=dict(n_layer=1)), r"is a different model: n_layer=2 \(here 1\); pass --n_layer 2"),
        (dict(model=dict(vocab_size=300)), "pass --data with shards of its tokenizer"),
        (dict(model=dict(vocab_multiple=512)), "vocab_multiple=128 .here 512"),
        (dict(optimizer="muon"), "optimizer=muon cannot resume from .*000001.pt, whose optimizer is adamw"),
        (dict(max_steps=1), "already done 1 steps, and max_steps=1; pass a larger --max_steps"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            train_here(tmp_path, shards, "r", resume=True, **dict(max_steps=3) | changed)
