"""Training: the schedule, what must not change a run, resuming to the bit, full disks, losses that are not finite."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY_MODEL, TINY_RUN, VOCAB, clean_env, run_python, wait_for_steps, write_shards

import train_gpt2
from lab import device as machine
from lab.data.shards import TokenShards
from lab.data.tokenizers import ByteTokenizer
from lab.evals import bytes_per_token, eval_val_loss
from lab.run.checkpoints import newest_checkpoint, read_checkpoint, save_checkpoint
from lab.run.vitals import LOWER
from lab.tools import plot
from train_gpt2 import GPT, PRESETS, GPTConfig, TrainConfig, Underway, World, get_lr, train

# AdamW divides by the root of the squared gradient, so where the true gradient is 0 (the bias of the keys: a softmax does
# not see it) rounding noise alone would move a weight by the full rate. This eps keeps such weights where they are, and
# leaves the update sensitive to the gradient's scale, which plain AdamW would hide.
EPS = 1e-3


def train_here(folder, data, name, tokenizer=None, model=(), **settings):
    """A run in this process: its losses, its events, its folder, and each checkpoint by step."""
    base = dict(
        data=str(data), log_dir=str(folder), run_name=name, device="cpu", total_batch_size=256, batch_size=4, seq_len=16,
        lr=3e-3, max_steps=20, warmup_steps=2, schedule="constant", eps=EPS, grad_clip=1.0, log_every=1, val_every=0,
        val_tokens=300, ckpt_every=1000, sample_every=0, hella_every=0, compile=False, keep_last=100,
    )  # fmt: skip
    cfg = TrainConfig(**base | settings)
    train(GPTConfig(**TINY_MODEL | dict(model)), cfg, World(cfg.device), folder / name, tokenizer)
    return read_run(folder / name)


def read_run(run_dir):
    events = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        dir=run_dir,
        events=events,
        losses=[e["loss"] for e in events if e["kind"] == "train"],
        checkpoints={int(p.stem[6:]): read_checkpoint(p) for p in run_dir.glob("model_[0-9]*.pt")},
    )


def of_kind(run, kind):
    return [e for e in run.events if e["kind"] == kind]


def difference(a, b):
    """Largest difference of two state dicts with the same names."""
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a)


def raw_gradients(checkpoint, beta1=0.9):
    """The gradients of the first update, out of AdamW's first moment (for a run with grad_clip=0)."""
    return {i: state["exp_avg"] / (1 - beta1) for i, state in checkpoint["optimizer"]["state"].items()}


def equal_bits(a, b):
    """Nested dicts, lists, tensors and plain values."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    return a == b


# ------------------------------------------------------------------------------------------------------- schedule


def test_schedules_meet_their_corners_exactly():
    cfg = TrainConfig(max_steps=1000, warmup_steps=100, decay_steps=200, lr=6e-4, min_lr=6e-5)
    for schedule in ("cosine", "linear", "constant", "wsd"):
        cfg.schedule = schedule
        assert get_lr(0, cfg) == 6e-4 / 100, schedule
        assert get_lr(49, cfg) == 6e-4 / 2
        assert get_lr(99, cfg) == get_lr(100, cfg) == 6e-4
        end = 6e-4 if schedule == "constant" else 6e-5
        assert get_lr(1000, cfg) == get_lr(5000, cfg) == end
        rates = [get_lr(step, cfg) for step in range(1001)]
        assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
        assert min(rates) > 0 and max(rates) == 6e-4
    assert get_lr(550, dataclasses.replace(cfg, schedule="cosine")) == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-12)
    assert get_lr(325, dataclasses.replace(cfg, schedule="cosine")) == pytest.approx(
        6e-5 + 5.4e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-12
    )
    assert get_lr(325, dataclasses.replace(cfg, schedule="linear")) == pytest.approx(6e-5 + 0.75 * 5.4e-4, rel=1e-12)
    wsd = [get_lr(step, cfg) for step in range(1001)]
    assert set(wsd[99:801]) == {6e-4}, "flat until decay_steps before the end"
    assert wsd[900] == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-12) and wsd[801] < 6e-4


def test_schedules_without_warm_up_and_of_nothing_else():
    assert get_lr(0, TrainConfig(max_steps=10, warmup_steps=0, lr=1.0, min_lr=0.0)) == 1.0
    cfg = TrainConfig(max_steps=10, warmup_steps=10, lr=1.0, min_lr=0.0, schedule="wsd", decay_steps=100)
    assert [get_lr(step, cfg) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]


# ----------------------------------------------------------------------------------- what must not change a run


@pytest.mark.parametrize("masked", [False, True])
def test_accumulation_changes_nothing(tmp_path, shards, masked):
    """16 x 1 against 4 x 4; with masks some micro-steps have no target at all, others all of theirs."""
    if masked:
        for path in shards.glob("*_train_*.npy"):
            n = len(np.load(path))
            mask = (np.arange(n) // 50 % 3 == 0).astype(np.uint8)  # stretches of 50 tokens: most sequences all or nothing
            with path.with_suffix(".mask").open("wb") as f:
                np.save(f, mask)
    a, b = (train_here(tmp_path, shards, f"b{size}", batch_size=size) for size in (16, 4))
    assert [len(r.losses) for r in (a, b)] == [20, 20] and a.losses[-1] < a.losses[0] - 0.3
    assert np.abs(np.subtract(a.losses, b.losses)).max() < 1e-5
    assert difference(a.checkpoints[20]["model"], b.checkpoints[20]["model"]) < 1e-5
    assert of_kind(a, "start")[0]["grad_accum_steps"] == 1 and of_kind(b, "start")[0]["grad_accum_steps"] == 4
    one = [train_here(tmp_path, shards, f"g{size}", batch_size=size, max_steps=1, grad_clip=0.0) for size in (16, 4, 1)]
    first, *others = (raw_gradients(r.checkpoints[1]) for r in one)
    assert max(g.abs().max() for g in first.values()) > 1e-2
    for other in others:
        assert difference(first, other) < 1e-5


def test_evaluation_and_samples_change_no_bit(tmp_path, shards):
    quiet = train_here(tmp_path, shards, "quiet", max_steps=8)
    watched = train_here(
        tmp_path, shards, "watched", ByteTokenizer(), max_steps=8, val_every=3, sample_every=2, sample_tokens=5, ckpt_every=2,
        timing=True, seed=1337,
    )  # fmt: skip
    assert [e["step"] for e in of_kind(watched, "val")] == [0, 3, 6, 8]
    assert [e["step"] for e in of_kind(watched, "sample")] == [2, 4, 6, 8]
    assert quiet.losses == watched.losses
    for part in ("model", "optimizer", "loader", "rng"):
        assert equal_bits(quiet.checkpoints[8][part], watched.checkpoints[8][part]), part
    other_seed = train_here(tmp_path, shards, "other", max_steps=1, seed=7)
    assert other_seed.losses[0] != quiet.losses[0]


def test_clipping_bounds_the_update_and_logs_the_norm_before_it(tmp_path, shards):
    kwargs = dict(max_steps=1, warmup_steps=0, beta1=0.0)
    free, clipped = (train_here(tmp_path, shards, f"c{c}", grad_clip=c, **kwargs) for c in (0.0, 0.1))
    norms = [of_kind(r, "train")[0]["grad_norm"] for r in (free, clipped)]
    grads = [raw_gradients(r.checkpoints[1], beta1=0.0) for r in (free, clipped)]
    lengths = [math.sqrt(sum(g.double().square().sum().item() for g in gs.values())) for gs in grads]
    assert norms[0] == norms[1] == pytest.approx(lengths[0], rel=1e-5) and norms[0] > 0.2
    assert lengths[1] == pytest.approx(0.1, rel=1e-4)


def test_a_run_learns(tmp_path, shards):
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), max_steps=200, val_every=200, lr=1e-2, eps=1e-8)
    first, last = of_kind(run, "val")
    start = of_kind(run, "start")[0]
    assert first["loss"] == pytest.approx(math.log(VOCAB), abs=0.3) and start["log_v"] == math.log(VOCAB)
    assert last["loss"] < start["unigram"] - 1.0
    # 40 ids evenly and end-of-text at every 61st place; the 216 ids that never occur are given one count each of 2498
    assert start["unigram"] == pytest.approx(math.log(41), abs=0.15) and start["unigram"] < math.log(VOCAB) - 1
    tokens = np.load(shards / "x_val_000000.npy")[1:301]  # those that are predicted
    bytes_per_token = (tokens != VOCAB - 1).mean()  # all ids are one byte but end-of-text, which is none
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) / bytes_per_token)


def test_baselines_leave_out_what_a_mask_leaves_out(tmp_path, shards):
    """Questions of many letters, answers of one, which alone are learnt: the best guess without context is sure of it."""
    for split, n in (("train_000000", 1501), ("train_000001", 997), ("val_000000", 700)):
        ids, mask = np.arange(n) % 40, (np.arange(n) % 3 == 0).astype(np.uint8)
        ids[mask == 1] = np.where(np.arange(mask.sum()) % 4, 65, VOCAB - 1)  # every fourth is an end-of-text, of no bytes
        np.save(shards / f"x_{split}.npy", ids.astype(np.uint16))
        with (shards / f"x_{split}.mask").open("wb") as f:
            np.save(f, mask)
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), max_steps=1, val_every=1, val_tokens=0)
    last, unigram = of_kind(run, "val")[-1], of_kind(run, "start")[0]["unigram"]
    a, b, total = 624 + 1, 209 + 1, 833 + VOCAB  # counts in the training data, and one for each id
    assert unigram == pytest.approx(-0.75 * math.log(a / total) - 0.25 * math.log(b / total), abs=0.01)
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) / 0.75, rel=0.01)


def test_validation_loss_is_the_mean_over_the_tokens_asked_for(tmp_path, shards, tiny_config):
    model, split = GPT(tiny_config), TokenShards(shards, "val", VOCAB)
    precision = machine.Precision("fp32", torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        stream = torch.from_numpy(split.read(0, 700).astype(np.int64))
        each = []  # of every token after the first, with the context it has in sequences of 16
        for i in range(0, 699, 16):
            x, y = stream[i : i + 16][: 699 - i], stream[i + 1 : i + 17]
            each += F.cross_entropy(model(x[None])[0][0], y, reduction="none").tolist()
    assert len(each) == 699
    for val_tokens, count in ((0, 699), (10**9, 699), (256, 256), (100, 100), (5, 5)):
        for batch_size in (1, 4, 64):
            loss = eval_val_loss(model, split, val_tokens, 16, batch_size, World("cpu"), precision)
            assert loss == pytest.approx(np.mean(each[:count]), rel=1e-5), (val_tokens, batch_size)


def test_compiling_agrees_with_eager_and_compiles_nothing_after_warm_up(tmp_path, shards):
    reason = machine.why_no_compile(torch.device("cpu"))
    if reason:
        pytest.skip(f"torch.compile does not work here: {reason}")
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    seen = []

    class Watcher(ByteTokenizer):
        def decode(self, ids):
            seen.append(counters["stats"]["unique_graphs"])
            return super().decode(ids)

    # three validation batches of which the last is not full; prompts and samples of other lengths than training's
    settings = dict(max_steps=7, val_every=2, sample_every=2, sample_tokens=40, val_tokens=150, model={"n_layer": 1}.items())
    eager = train_here(tmp_path, shards, "eager", **settings)
    compiled = train_here(tmp_path, shards, "compiled", Watcher(), compile=True, **settings)
    assert len(seen) == 4 * 2 and seen[0] >= 2, "after steps 2, 4, 6 and 7, two samples each"
    assert set(seen) == {seen[0]} == {counters["stats"]["unique_graphs"]}, "graphs compiled after warm-up"
    assert np.abs(np.subtract(eager.losses, compiled.losses)).max() < 1e-4
    a, b = ([e["loss"] for e in of_kind(run, "val")] for run in (eager, compiled))
    assert len(a) == 5 and a == pytest.approx(b, abs=1e-4)
    assert difference(eager.checkpoints[7]["model"], compiled.checkpoints[7]["model"]) < 1e-4
    assert not any(k.startswith(("_orig_mod", "module")) for k in compiled.checkpoints[7]["model"])


def compiler_that_errs(monkeypatch, factor):
    """torch.compile gets a backend whose losses are wrong by a factor."""

    def backend(graph, inputs):
        return lambda *args: [x * factor if x.is_floating_point() and x.dim() == 0 else x for x in graph(*args)]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(train_gpt2, "why_no_compile", lambda device: "")  # no C++ compiler is needed
    torch._dynamo.reset()


@pytest.mark.parametrize("factor, off", [(1.0, False), (1.005, False), (1.02, True), (float("nan"), True)])
def test_a_compiler_that_errs_is_not_used(tmp_path, shards, monkeypatch, capsys, factor, off):
    compiler_that_errs(monkeypatch, factor)
    settings = dict(max_steps=3, val_every=0, model={"n_layer": 1}.items())
    eager = train_here(tmp_path, shards, "eager", **settings)
    capsys.readouterr()
    run = train_here(tmp_path, shards, "compiled", compile=True, **settings)
    said = capsys.readouterr().out
    assert ("torch.compile is off: for the first micro-batch" in said) == off
    assert (run.losses == eager.losses) == (off or factor == 1)


@pytest.mark.parametrize("warmup, note", [(2, False), (3, True)])
def test_a_rate_that_is_never_reached_is_said(tmp_path, run_train, warmup, note):
    result = run_train("--max_steps", 2, "--warmup_steps", warmup)
    assert (f"note: warmup_steps={warmup} is not over at max_steps=2" in result.stdout) == note, result.stderr
    reached = max(e["lr"] for e in of_kind(read_run(tmp_path / "log" / "r"), "train")) == 1e-3
    assert reached != note


# ------------------------------------------------------------------------------------- checkpoints and resuming


def test_twenty_steps_are_ten_and_resume_and_ten(run_train, tmp_path):
    """The real command three times; with it what a run leaves behind."""
    whole = run_train("--max_steps", 20, "--ckpt_every", 10, "--run_name", "whole", "--timing")
    first = run_train("--max_steps", 10, "--ckpt_every", 10)
    second = run_train("--resume", "--max_steps", 20)
    assert [r.returncode for r in (whole, first, second)] == [0, 0, 0], whole.stderr + first.stderr + second.stderr
    a, b = (read_run(tmp_path / "log" / name) for name in ("whole", "r"))
    assert a.losses == b.losses and len(a.losses) == 20
    assert [e["step"] for e in of_kind(b, "train")] == list(range(1, 21)), "the second part is appended, nothing twice"
    for part in ("step", "model", "optimizer", "loader", "rng"):
        assert equal_bits(a.checkpoints[20][part], b.checkpoints[20][part]), part
    assert not equal_bits(a.checkpoints[10]["model"], a.checkpoints[20]["model"])

    for event in of_kind(a, "train")[1:]:
        assert {"loss", "lr", "grad_norm", "tok_per_s", "tokens", "dt_ms"} <= event.keys()
        phases = [event[f"{p}_ms"] for p in ("data", "forward", "backward", "optimizer")]
        assert all(0 < p <= event["dt_ms"] for p in phases[1:]) and phases[0] >= 0
        assert sum(phases) <= event["dt_ms"] + 0.01
        assert event["tokens"] == 128 * event["step"] and event["tok_per_s"] == pytest.approx(128e3 / event["dt_ms"])
        assert "mfu" not in event, "a CPU has no entry in the table of peaks"
    assert of_kind(a, "train")[0]["lr"] == 5e-4 and of_kind(a, "train")[5]["lr"] == 1e-3
    assert "forward_ms" not in of_kind(b, "train")[0]
    assert [e["kind"] for e in a.events][0] == "start" and a.events[-1] == a.events[-1] | {"kind": "end", "reason": "done"}
    assert (a.dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(a.dir.relative_to(tmp_path)) in whole.stdout and "sample.py" in whole.stdout
    again = run_train("--resume")
    assert again.returncode == 2 and "has done 20 steps" in again.stderr and "--max_steps" in again.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_changes_nothing_where_documents_are_aligned_and_masked(tmp_path, shards, optimizer):
    """In this process, with a shuffled stream that wraps in mid-step and ends off the checkpoint interval."""
    settings = dict(align_documents=True, total_batch_size=192, schedule="wsd", decay_steps=9, optimizer=optimizer)
    settings["model"] = {"document_mask": True}.items()
    whole = train_here(tmp_path, shards, "whole", ckpt_every=7, **settings)
    cut = tmp_path / "cut"
    shutil.copytree(whole.dir, cut)
    for path in cut.glob("model_*.pt"):
        if path.name != "model_000007.pt":
            path.unlink()
    (cut / "log.jsonl").unlink()
    rest = train_here(tmp_path, shards, "cut", ckpt_every=7, resume=True, **settings)
    assert rest.losses == whole.losses[7:]
    for part in ("model", "optimizer", "loader"):
        assert equal_bits(whole.checkpoints[20][part], rest.checkpoints[20][part]), part


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be locked here")
def test_a_run_that_goes_on_is_not_resumed_by_another_process(tmp_path, start_training, run_train):
    process = start_training("--max_steps", 100000, "--ckpt_every", 2)
    wait_for_steps(process, tmp_path / "log" / "r")
    before = (tmp_path / "log" / "r" / "config.json").read_text()
    again = run_train("--resume", "--max_steps", 100001)
    assert process.poll() is None and "is the folder of a run that is going on; stop that one first" in again.stderr
    assert again.returncode == 2 and (tmp_path / "log" / "r" / "config.json").read_text() == before
    process.kill()
    process.wait()
    step = max(read_run(tmp_path / "log" / "r").checkpoints)
    assert run_train("--resume", "--max_steps", step + 1).returncode == 0, "killed, it holds nothing"


def test_a_later_run_without_a_checkpoint_is_named_when_it_is_passed_over(tmp_path, run_train):
    assert run_train("--max_steps", 2, "--ckpt_every", 1).returncode == 0
    later = tmp_path / "log" / "later"
    shutil.copytree(tmp_path / "log" / "r", later, ignore=shutil.ignore_patterns("*.pt"))
    os.utime(later / "config.json", (time.time() + 10,) * 2)
    again = run_train("--resume", "--max_steps", 3)
    assert "resumes log/r after step 2 (log/later, begun later, saved no checkpoint)" in again.stdout, again.stderr
    named = run_train("--resume", "--run_name", "later")
    assert named.returncode == 2 and "log/later has no checkpoint to resume from; if that run has ended" in named.stderr
    assert "run_name=.. must be a plain name" in run_train("--run_name", "..").stderr


def test_a_resumed_run_keeps_the_micro_batch_that_it_began_with(tmp_path, shards):
    train_here(tmp_path, shards, "r", max_steps=1, batch_size=4)
    for max_steps, asked, size in ((2, 0, 4), (3, 8, 8), (4, 0, 8)):  # 0 alone would be 16 here
        run = train_here(tmp_path, shards, "r", resume=True, batch_size=asked, max_steps=max_steps)
        start = of_kind(run, "start")[-1]
        assert (start["batch_size"], start["grad_accum_steps"]) == (size, 16 // size)


def test_tensorboard_shows_what_the_log_holds_after_resuming_too(tmp_path, shards):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(tmp_path, shards, "r", max_steps=4, val_every=2)
    run = train_here(tmp_path, shards, "r", max_steps=7, val_every=2, resume=True)
    board = EventAccumulator(str(run.dir)).Reload()
    for kind in ("val", "train"):
        events, scalars = of_kind(run, kind), board.Scalars(f"{kind}/loss")
        assert len(scalars) >= 4
        assert [s.step for s in scalars] == [e["step"] for e in events]
        assert [s.value for s in scalars] == pytest.approx([e["loss"] for e in events])


def test_the_last_checkpoints_and_the_best_stay(tmp_path):
    data = write_shards(tmp_path / "data")
    val = np.load(data / "x_val_000000.npy")
    unseen = np.where(val < 100, val + 100, val).astype(np.uint16)  # training never shows these: the loss only rises
    np.save(data / "x_val_000000.npy", unseen)
    run = train_here(tmp_path, data, "r", max_steps=10, val_every=2, ckpt_every=2, keep_last=2)
    losses = {e["step"]: e["loss"] for e in of_kind(run, "val")}
    assert losses[2] < losses[4] < losses[10]
    assert sorted(p.name for p in run.dir.glob("model_*")) == ["model_000008.pt", "model_000010.pt", "model_best.pt"]
    best = read_checkpoint(run.dir / "model_best.pt")
    assert best["step"] == 2 and best["best_val"] == losses[2] == run.checkpoints[10]["best_val"]
    assert [e["step"] for e in of_kind(run, "checkpoint") if e["best"]] == [2]
    assert not list(run.dir.glob("*.part"))


def test_a_kill_while_the_best_is_saved_loses_neither(tmp_path, monkeypatch):
    """The new checkpoint says that nothing before it was better, so the best has to be there first."""
    save_checkpoint(tmp_path, 1, {"step": 1}, keep_last=2, best=True)
    real, calls = os.replace, []

    def replace(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, {"step": 2}, keep_last=2, best=True)
    assert newest_checkpoint(tmp_path).name == "model_000001.pt" and read_checkpoint(tmp_path / "model_best.pt")["step"] == 2
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, {"step": 2}, keep_last=1, best=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model_000002.pt", "model_best.pt"]


def test_the_newest_checkpoint_has_the_highest_number(tmp_path):
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, {"step": step}, keep_last=1, best=False)
    assert [p.name for p in tmp_path.iterdir()] == ["model_1000000.pt"]
    save_checkpoint(tmp_path, 999_999, {}, keep_last=2, best=False)
    assert newest_checkpoint(tmp_path).name == "model_1000000.pt"
    for copy in ("model_2000000_keep.pt", "model_2000000 (copy).pt", "model_best.pt", "model_9_9.pt"):
        shutil.copyfile(tmp_path / "model_1000000.pt", tmp_path / copy)
    save_checkpoint(tmp_path, 1_000_001, {}, keep_last=1, best=False)
    assert newest_checkpoint(tmp_path).name == "model_1000001.pt" and len(list(tmp_path.iterdir())) == 5, "copies stay"


def test_only_weights_that_were_measured_become_the_best(tmp_path, shards):
    run = train_here(tmp_path, shards, "r", max_steps=6, val_every=3, ckpt_every=4)
    measured = {e["step"] for e in of_kind(run, "val")}
    assert measured == {0, 3, 6}
    assert {e["step"] for e in of_kind(run, "checkpoint") if e["best"]} <= measured


# ----------------------------------------------------------------------------------- full disks, losses that are not finite


def test_a_terminal_without_a_sign_gets_a_question_mark(tmp_path, shards):
    flags = [*TINY_RUN, "--data", shards, "--max_steps", 1, "--sample_every", 1, "--sample_prompt", "\x0cab"]
    done = run_python("-m", "train_gpt2", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "--- sample after 1 steps\n?ab" in done.stdout, "the picture of a form feed"


def test_a_full_disk_is_one_sentence_and_older_checkpoints_stay(tmp_path):
    resource = pytest.importorskip("resource")
    data = {"w": torch.ones(100_000)}
    save_checkpoint(tmp_path, 1, data, keep_last=2, best=False)
    before, limits = (tmp_path / "model_000001.pt").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as a disk with so many bytes left
    try:
        with pytest.raises(OSError, match="model_000002.pt cannot be written .* is the disk full"):
            save_checkpoint(tmp_path, 2, data, keep_last=2, best=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["model_000001.pt"] and before == (tmp_path / "model_000001.pt").read_bytes()


def test_an_error_of_the_device_is_not_called_a_full_disk(tmp_path):
    class Lost:
        def __reduce__(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="^CUDA error"):
        save_checkpoint(tmp_path, 1, {"w": Lost()}, keep_last=2, best=False)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, shards, run_train):
    train_here(tmp_path / "log", shards, "r", max_steps=4, total_batch_size=128, lr=1e-3, shuffle=False)
    before = (tmp_path / "log" / "r" / "model_000004.pt").read_bytes()
    result = run_train("--resume", "--max_steps", 30, "--lr", "1e30", "--grad_clip", 0)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("train_gpt2.py: error: the loss is ") and result.stderr.count("\n") == 1
    # update 5 throws the weights away, so the loss of step 6 is the first that shows it: tokens 5 * 128 to 6 * 128 - 1
    assert "at step 6" in result.stderr
    for position in range(5 * 128, 6 * 128, 16):
        assert f"x_train_000000.npy:{position}" in result.stderr
    assert "keeps model_000004.pt" in result.stderr
    assert [p.name for p in (tmp_path / "log" / "r").glob("model_0*.pt")] == ["model_000004.pt"]
    assert (tmp_path / "log" / "r" / "model_000004.pt").read_bytes() == before


def test_weights_that_are_not_finite_are_never_kept(tmp_path, shards):
    """A rate beyond float32 makes all weights infinite in the first update; its loss is that of the weights before."""
    with pytest.raises(FloatingPointError):
        train_here(tmp_path, shards, "r", max_steps=2, lr=1e39, warmup_steps=0, ckpt_every=1)
    for checkpoint in read_run(tmp_path / "r").checkpoints.values():
        assert all(p.isfinite().all() for p in checkpoint["model"].values())


@pytest.mark.parametrize("watching", [{}, {"val_every": 2}, {"sample_every": 2, "val_every": 0}], ids=str)
def test_a_bad_step_is_seen_before_it_is_measured_and_at_the_end(tmp_path, shards, watching):
    """With no checkpoint to come; weights of 1e30 are still finite, what they give is not."""
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2"):
        train_here(tmp_path, shards, "r", ByteTokenizer(), max_steps=2, lr=1e30, warmup_steps=0, ckpt_every=0, **watching)
    with pytest.raises(FloatingPointError, match=re.escape(f"has no checkpoint yet; {LOWER}, or more --warmup_steps") + "$"):
        train_here(tmp_path, shards, "s", max_steps=2, lr=1e30, warmup_steps=0)
    kinds = [e["kind"] for e in map(json.loads, (tmp_path / "r" / "log.jsonl").read_text().splitlines()) if e["step"] == 2]
    assert kinds == ["train"], "nothing was measured after the bad step"


@pytest.mark.parametrize("tokens, times", [(2432, None), (2560, "1.0"), (25600, "10.2")])  # of 2,498
def test_a_step_larger_than_the_data_is_said(tmp_path, shards, capsys, tokens, times):
    train_here(tmp_path, shards, "r", max_steps=1, total_batch_size=tokens)
    notes = [line for line in capsys.readouterr().out.splitlines() if "all training data" in line]
    assert len(notes) == bool(times)
    assert not times or f"each step of total_batch_size={tokens:,} tokens reads all training data {times} times; " in notes[0]


@pytest.mark.parametrize("lr, told", [(10, [False, True, True]), (1e-3, [False] * 3)])
def test_a_validation_that_rises_above_a_uniform_guess_says_what_to_do(tmp_path, shards, capsys, lr, told):
    train_here(tmp_path, shards, "r", max_steps=4, lr=lr, warmup_steps=0, val_every=2, schedule="wsd", decay_steps=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    assert [f"worse than a uniform guess: {LOWER}, or more --warmup_steps" in line for line in lines] == told


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_flags_of_the_optimizer_are_those_of_this_run(tmp_path, shards, optimizer):
    train_here(tmp_path, shards, "r", max_steps=2, optimizer=optimizer)
    changed = dict(weight_decay=0.9, beta1=0.5, lr=2e-3, muon_lr=0.005)
    run = train_here(tmp_path, shards, "r", max_steps=4, optimizer=optimizer, resume=True, **changed)
    saved = run.checkpoints[4]["optimizer"]
    groups = [group for part in saved.get("parts", [saved]) for group in part["param_groups"]]
    assert groups[0]["weight_decay"] == 0.9 and groups[-1]["betas"][0] == 0.5
    assert [group["lr"] for group in groups] == [0.005 if optimizer == "muon" else 2e-3, 2e-3]


def test_timing_leaves_out_the_first_step_as_the_speed_does(tmp_path, shards, monkeypatch):
    real, slow = train_gpt2.TokenLoader.next_batch, [0.5]

    def next_batch(self):
        time.sleep(slow.pop() if slow else 0)
        return real(self)

    monkeypatch.setattr(train_gpt2.TokenLoader, "next_batch", next_batch)
    first, *_ = of_kind(train_here(tmp_path, shards, "r", max_steps=4, log_every=2, timing=True), "train")
    assert first["data_ms"] < 100 and first["dt_ms"] < 200


def test_the_first_step_has_no_speed_as_it_compiles(tmp_path, shards):
    train_here(tmp_path, shards, "r", max_steps=3)
    run = train_here(tmp_path, shards, "r", max_steps=5, resume=True)
    assert [e["step"] for e in of_kind(run, "train")] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in of_kind(run, "train") if "tok_per_s" not in e] == [1, 4]
    assert [e["step"] for e in of_kind(run, "first_step")] == [1, 4]


def test_tokens_are_counted_where_the_step_changes(tmp_path, shards):
    train_here(tmp_path, shards, "r", max_steps=3)
    run = train_here(tmp_path, shards, "r", max_steps=6, resume=True, total_batch_size=512, log_every=4)
    assert [e["tokens"] for e in of_kind(run, "train")] == [256, 512, 768, 1280, 2304]
    log = plot.read_log(run.dir)
    assert list(map(plot.tokens_at(log), range(9))) == [0, 256, 512, 768, 1280, 1792, 2304, 2816, 3328]
    assert plot.step_sizes(log) == [256, 512]


def test_samples_end_where_their_text_does(tmp_path, shards):
    """A model of which end-of-text is the most probable token after any."""
    run = train_here(tmp_path, shards, "start", max_steps=1, ckpt_every=1)
    state = read_checkpoint(run.dir / "model_000001.pt")
    state["model"]["transformer.wte.weight"][VOCAB - 1] = 0.5
    state["model"]["transformer.ln_f.weight"][:], state["model"]["transformer.ln_f.bias"][:] = 0, 1
    save_checkpoint(run.dir, 2, state, keep_last=2, best=False)
    settings = dict(max_steps=1, lr=0.0, min_lr=0.0, sample_every=1, sample_tokens=9, sample_prompt="ab")
    run = train_here(tmp_path, shards, "r", ByteTokenizer(), init_from=str(run.dir / "model_000002.pt"), **settings)
    assert of_kind(run, "sample")[0]["texts"] == ["ab", "ab"]


def test_data_that_is_not_finished_is_named(tmp_path, shards, capsys):
    (shards / "manifest.json").write_text(json.dumps({"complete": False, "shards": [], "vocab_size": VOCAB}))
    train_here(tmp_path, shards, "r", max_steps=1)
    assert "data is not finished; to finish it, run its fineweb.py command again" in capsys.readouterr().out
    (shards / "manifest.json").write_text(json.dumps({"complete": True, "shards": [], "vocab_size": VOCAB}))
    train_here(tmp_path, shards, "r2", max_steps=1)
    assert "not finished" not in capsys.readouterr().out


def test_a_mask_that_leaves_nothing_gives_no_bits(tmp_path, shards, recwarn):
    for split, n in (("train_000000", 1501), ("train_000001", 997), ("val_000000", 700)):
        mask = np.ones(n, np.uint8)
        mask[:10] = split[0] != "v"
        with open(shards / f"x_{split}.mask", "wb") as file:
            np.save(file, mask)
    assert bytes_per_token(ByteTokenizer(), TokenShards(shards, "val", VOCAB), 5) is None and not recwarn.list
    assert 0.9 < bytes_per_token(ByteTokenizer(), TokenShards(shards, "val", VOCAB), 0) <= 1


def test_the_seed_is_that_of_the_samples_too(tmp_path, shards):
    start = train_here(tmp_path, shards, "start", max_steps=1).dir / "model_000001.pt"
    settings = dict(max_steps=1, lr=0.0, min_lr=0.0, init_from=str(start), sample_every=1, sample_tokens=20)
    texts = [
        of_kind(train_here(tmp_path, shards, f"r{i}", ByteTokenizer(), seed=seed, **settings), "sample")[0]["texts"]
        for i, seed in enumerate((5, 5, 6))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_token_that_is_none_in_the_validation_split_opens_no_run(tmp_path, shards):
    tokens = np.zeros(2_300_000, np.uint16)
    tokens[1_500_000] = 999
    np.save(shards / "x_val_000000.npy", tokens)
    with pytest.raises(ValueError, match="token id 999 near x_val_000000.npy:1500000 is outside the vocabulary of 257"):
        train_here(tmp_path, shards, "r", max_steps=1, val_tokens=0)
    assert not (tmp_path / "r").exists()


def test_epochs_are_of_the_tokens_that_are_used(tmp_path, shards, capsys):
    train_here(tmp_path, shards, "r", max_steps=20, align_documents=True, seq_len=32)
    used = 32 * len(TokenShards(shards, "train", VOCAB).document_starts(32))
    assert used < 0.6 * 2498 and f"this run uses {20 * 256 / used:.2f} epochs" in capsys.readouterr().out


def test_epochs_of_a_run_that_goes_on_with_larger_steps(tmp_path, shards, capsys):
    train_here(tmp_path, shards, "r", max_steps=2)
    train_here(tmp_path, shards, "r", max_steps=4, total_batch_size=512, resume=True)
    trained = len(TokenShards(shards, "train", VOCAB))
    first, then = re.findall(r"this run uses ([\d.]+) epochs", capsys.readouterr().out)
    assert (first, then) == (f"{2 * 256 / trained:.2f}", f"{(2 * 256 + 2 * 512) / trained:.2f}")


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
def test_the_bar_moves_at_every_step_and_says_what_it_waits_for(tmp_path, shards):
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    flags = ["--max_steps", 300, "--log_every", 1000, "--val_every", 100, "--val_tokens", 0]
    command = [sys.executable, ROOT / "train_gpt2.py", *TINY_RUN, "--data", shards, *flags]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=clean_env(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end was closed
        while piece := os.read(ours, 4096):
            shown += piece
    assert process.wait(60) == 0
    steps = {int(found) for found in re.findall(rb"(\d+)/300 ", shown)}
    assert {0, 300} < steps and b"validating" in shown, "10 times a second at most"


def test_a_run_keeps_to_its_data(tmp_path, shards, capsys, monkeypatch):
    """More is added between two sittings; then the first shard is another."""
    whole = train_here(tmp_path, shards, "whole", max_steps=12)
    train_here(tmp_path, shards, "r", max_steps=6)
    np.save(shards / "x_train_000002.npy", np.full(900, 7, np.uint16))
    capsys.readouterr()
    grown = train_here(tmp_path, shards, "r", max_steps=12, resume=True)
    assert grown.losses == whole.losses and "has 900 more tokens than when this run began; they" in capsys.readouterr().out
    monkeypatch.chdir(shards.parent)
    train_here(tmp_path, shards.name, "r", max_steps=14, resume=True)  # the same folder by another name
    assert "has 900 more tokens than when this run began" in capsys.readouterr().out
    other = np.load(shards / "x_train_000000.npy")[::-1]
    (shards / "x_train_000000.npy").unlink()  # what is mapped stays as it was
    np.save(shards / "x_train_000000.npy", other)
    with pytest.raises(ValueError, match="begins with other tokens than this run was begun with: put those back"):
        train_here(tmp_path, shards, "r", max_steps=20, resume=True)


def test_a_checkpoint_holds_plain_values_and_both_configurations(tmp_path, shards):
    run = train_here(tmp_path, shards, "r", max_steps=1)
    loaded = torch.load(run.dir / "model_000001.pt", weights_only=True)
    assert loaded["model_config"] == dataclasses.asdict(GPTConfig(**TINY_MODEL))
    assert loaded["train_config"]["total_batch_size"] == 256
    assert loaded["loader"].keys() == {"position", "tokens", "begin"} and loaded["loader"]["position"] == 256
    config = json.loads((run.dir / "config.json").read_text())
    assert config["model"] == loaded["model_config"] and config["train"]["lr"] == 3e-3
    assert set(config["train"]) == {f.name for f in dataclasses.fields(TrainConfig)}


def test_presets_are_runs_that_can_be_done():
    """Each headline preset is the same number of tokens, and a whole number of sequences a step."""
    for name, (model_config, cfg) in PRESETS.items():
        assert cfg.preset == name and cfg.total_batch_size % cfg.seq_len == 0 and cfg.seq_len <= model_config.block_size
        assert model_config.n_embd % model_config.n_head == 0 and 0 <= cfg.min_lr < cfg.lr
        if name != "laptop":
            assert cfg.max_steps * cfg.total_batch_size == pytest.approx(10e9, rel=1e-4)
            assert cfg.warmup_steps * cfg.total_batch_size == pytest.approx(375e6, rel=1e-3)
            assert model_config.padded_vocab_size == 50304


def test_the_environment_of_the_tests_is_one_process():
    assert "RANK" not in os.environ and World("cpu").world_size == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bf16_residual", [True, False])
def test_a_wide_model_trains_compiled_as_it_does_uncompiled(tmp_path, bf16_residual, capsys):
    """With a residual stream in 32 bits, torch before 2.14 compiles a race into the final LayerNorm; with 16 there is none."""
    (tmp_path / "wide").mkdir()
    for split, size in (("train", 200_000), ("val", 5000)):
        tokens = np.random.default_rng(size).integers(0, 50257, size, dtype=np.uint16)
        np.save(tmp_path / "wide" / f"x_{split}_000000.npy", tokens)
    model = dict(n_layer=2, n_head=20, n_embd=1280, block_size=1024, vocab_size=50257, bf16_residual=bf16_residual).items()
    settings = dict(batch_size=16, seq_len=1024, total_batch_size=16384, max_steps=4, precision="bf16", model=model)
    runs = [train_here(tmp_path, tmp_path / "wide", str(c), device="cuda", compile=c, **settings) for c in (False, True)]
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=0.01)
    assert not bf16_residual or "torch.compile is off" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_loss_arrives_before_what_was_launched_after_it():
    losses = Underway(torch.full((3,), 2.0, device="cuda").sum(), torch.zeros(2, device="cuda"))
    torch.cuda._sleep(10**9)  # about half a second
    after = torch.cuda.Event()
    after.record()
    total, parts = losses.arrive()
    assert total.item() == 6 and parts.tolist() == [0, 0] and not after.query()
