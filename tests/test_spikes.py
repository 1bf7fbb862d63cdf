"""Gradient spikes: detected at their step only, reported, skipped exactly, replayed."""

import json
import math
from unittest import mock

import numpy as np
import pytest
import torch

from lab.precision import Precision

from conftest import (  # isort: skip
    ROOT, TINY_RUN, differing_parts, driver, equal_bits, finished, of_kind, read_run, run_python,
    succeed, train_here, write_shards,
)  # fmt: skip
from test_bert import TINY_RUN as BERT_RUN
from test_bert import texts  # noqa: F401
from test_speedrun import FLAGS as SPEEDRUN
from test_speedrun import in_process as speedrun_trainer

import train_gpt2
from lab.cli import RunError, UserError
from lab.config_file import read_config
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.tools import replay
from lab.trainer.health import MIN_HISTORY, robust_zscore

STEP = 41  # the step with bad data or a bad gradient
# 8 sequences of 16 tokens a step, in the order on disk
CALM = dict(max_steps=50, total_batch_size=128, shuffle=False, lr=1e-2, checkpoint_every=30)


@pytest.fixture
def bad_shards(tmp_path):
    """Shards that count up, except for 80 random tokens in step STEP."""
    folder = write_shards(tmp_path / "bad", sizes=(9000,))
    path = folder / "x_train_000000.npy"
    tokens, start = np.load(path), (STEP - 1) * 128 + 20
    tokens[start : start + 80] = np.random.default_rng(1).integers(60, 250, 80)
    np.save(path, tokens)
    return folder


def spike_file(run_dir):
    (path,) = run_dir.glob("spike_*.json")
    assert path.stem == f"spike_{STEP:06d}"
    return json.loads(path.read_text())


def spike_steps(run, *fields):
    return [(e["step"], *(e.get(field) for field in fields)) for e in of_kind(run, "spike")]


def plant(monkeypatch, factor, *steps):
    """Multiply the gradients of these steps (default: STEP) by factor."""
    real = train_gpt2.Trainer.clip_grad_norm

    def planted(run, max_norm):
        if run.step + 1 in (steps or (STEP,)):
            torch._foreach_mul_([p.grad for p in run.raw_model.parameters()], factor)
        return real(run, max_norm)

    monkeypatch.setattr(train_gpt2.Trainer, "clip_grad_norm", planted)


def leave_out(monkeypatch, step=STEP):
    """Do not call the optimizer at one step."""
    calls, real = [], torch.optim.AdamW.step

    def some(optimizer, closure=None):
        calls.append(1)
        return None if len(calls) == step else real(optimizer, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", some)


def test_zscore_counts_deviations_from_the_median():
    logs = torch.from_numpy(np.random.default_rng(0).normal(1.0, 0.3, 99))
    logs[:5] = 50.0  # outliers change neither median nor deviation
    z, usual = robust_zscore(torch.tensor(4.0).double().exp(), logs)
    assert usual.log() == pytest.approx(1.0, abs=0.1)
    assert z == pytest.approx((4.0 - 1.0) / 0.3, rel=0.2)
    # equal norms: MIN_SIGMA is used, otherwise rounding errors would be spikes
    assert robust_zscore(torch.tensor(2.0), torch.zeros(MIN_HISTORY))[0] == pytest.approx(
        math.log(2) / 0.1
    )
    assert robust_zscore(torch.tensor(1e9), torch.zeros(MIN_HISTORY - 1))[0] == 0
    for bad in (math.inf, math.nan):
        assert robust_zscore(torch.tensor(bad), torch.zeros(0))[0] == math.inf


@pytest.mark.parametrize("on_spike", ["record", "continue"])
def test_bad_data_is_detected_reported_and_replayed(
    tmp_path, bad_shards, monkeypatch, capsys, on_spike
):
    """The replay starts from a snapshot or a checkpoint, and repeats the step exactly."""
    grads, real = {}, train_gpt2.Trainer.clip_grad_norm

    def noting(run, max_norm):
        if run.step + 1 == STEP and not grads:
            grads.update({n: p.grad.norm().item() for n, p in run.raw_model.named_parameters()})
        return real(run, max_norm)

    monkeypatch.setattr(train_gpt2.Trainer, "clip_grad_norm", noting)
    run = train_here(tmp_path, bad_shards, "r", on_spike=on_spike, **CALM)
    (event,), spike = of_kind(run, "spike"), spike_file(run.dir)
    assert (event["step"], event["norm"]) == (STEP, run.norms[STEP - 1])
    assert event["usual"] == pytest.approx(np.median(run.norms[: STEP - 1]), rel=0.01)
    assert sum(spike["losses"]) == pytest.approx(run.losses[STEP - 1]) and len(spike["losses"]) == 2
    assert spike["norms"] == pytest.approx(grads) and len(grads) == 28
    places = [f"x_train_000000.npy:{(STEP - 1) * 128 + i * 16}" for i in range(8)]
    assert [s["at"] for s in spike["sequences"]] == places
    tokens = np.load(bad_shards / "x_train_000000.npy")[STEP * 128 - 16 : STEP * 128]
    assert spike["sequences"][-1]["text"] == get_tokenizer("bytes").decode(tokens.tolist())
    assert "gradient norm" in capsys.readouterr().out

    show = mock.Mock(side_effect=replay.show)
    monkeypatch.setattr(replay, "show", show)
    replay.main([str(run.dir / "spike_000041.json"), "--device", "cpu"])
    _, losses, norm, norms, each = show.call_args.args
    assert (losses, norm, norms) == (spike["losses"], spike["norm"], spike["norms"])
    assert np.mean(each) == pytest.approx(sum(losses)) and len(each) == 8
    assert {*np.argsort(each)[-5:]} == {1, 2, 3, 4, 5}, "those with the bad tokens"
    said = capsys.readouterr().out
    begun = "spike_000041.pt" if on_spike == "record" else "model_000030.pt"
    assert f"from {begun}; on cpu, fp32" in said and "the spike was reproduced" in said
    worst = said.partition("largest first\n")[2].split()
    assert float(worst[0]) == round(max(each), 4) and worst[1] == places[np.argmax(each)]


def test_skipping_every_update_ends_the_run(tmp_path, shards):
    """Skipping ends if no step has a finite loss any more."""
    how = dict(on_spike="skip", lr=1e12, min_lr=0.0, warmup_steps=0, max_steps=60)
    with pytest.raises(RunError, match="the loss is nan at step 12"):
        train_here(tmp_path, shards, "r", **how)


@pytest.mark.parametrize("factor, step", [(1000.0, STEP), (math.inf, STEP), (math.nan, 1)])
def test_a_skipped_update_changes_nothing(tmp_path, shards, monkeypatch, factor, step):
    """As if the optimizer had not been called: weights, moments, step counts. The data is consumed."""
    with monkeypatch.context() as patched:
        plant(patched, factor, step)
        skipped = train_here(tmp_path, shards, "skip", on_spike="skip", **CALM)
    leave_out(monkeypatch, step)
    left_out = train_here(tmp_path, shards, "out", **CALM)
    assert spike_steps(skipped, "skipped") == [(step, True)] and not spike_steps(left_out)
    ours, theirs = skipped.checkpoints[50], left_out.checkpoints[50]
    assert not differing_parts(ours, theirs, ("step", "model", "loader"))
    assert equal_bits(ours["optimizer"]["state"], theirs["optimizer"]["state"])
    assert ours["optimizer"]["state"][0]["step"] == 49 and ours["step"] == 50
    assert np.array_equal(skipped.losses, left_out.losses)


def test_a_norm_that_is_not_finite_stops_the_run(tmp_path, shards, monkeypatch):
    plant(monkeypatch, math.inf)
    with pytest.raises(
        RunError, match="gradient norm is (inf|nan) at step 41; .* keeps .*model_0000(39|40).pt"
    ):
        train_here(tmp_path, shards, "r", **CALM | dict(checkpoint_every=1, keep_last=1))
    assert [p.name for p in (tmp_path / "r").glob("model_*.pt")] == ["model_000040.pt"]
    assert spike_file(tmp_path / "r")["norm"] is None, "JSON has no inf"


def test_stop_exits_with_status_1_and_the_run_can_be_resumed(tmp_path, bad_shards):
    """A resumed run, which has a short history of its own, also detects the spike."""
    flags = "--max_steps 50 --no_shuffle --lr 1e-2 --checkpoint_every 15 --on_spike stop".split()

    def train(status, *flags):
        done = run_python(ROOT / "train_gpt2.py", *flags, cwd=tmp_path)
        assert done.returncode == status, done.stderr
        return done

    said = train(1, *TINY_RUN, "--data", bad_shards, *flags).stderr
    assert "gradient norm is" in said and "at step 41" in said
    assert "keeps model_000015.pt, model_000030.pt" in said
    assert "at step 41" in train(1, "--resume").stderr
    done = train(0, "--resume", "--on_spike", "skip")
    assert "update skipped; repeat it with `" in done.stdout, done.stderr
    run = read_run(tmp_path / "log" / "r")
    assert run.checkpoints[50]["optimizer"]["state"][0]["step"] == 49


def test_an_overflow_of_the_fp16_scaler_is_no_spike(tmp_path, shards, monkeypatch):
    """The scaler starts with a scale that is too large; logged parameter norms are unscaled."""

    class Scaled(Precision):
        def __init__(self, *args):
            super().__init__(*args)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-30)

    monkeypatch.setattr(train_gpt2, "Precision", Scaled)
    plant(monkeypatch, 1000.0)
    run = train_here(tmp_path, shards, "r", **CALM)
    assert run.norms[0] is None and math.isfinite(run.norms[9])
    assert spike_steps(run) == [(STEP,)]
    # recorded before `plant` changes the gradients
    parts = math.hypot(*spike_file(run.dir)["norms"].values())
    assert 1000 * parts == pytest.approx(run.norms[STEP - 1], rel=1e-4)
    with pytest.raises(UserError, match="on_spike=skip does not work with precision=fp16"):
        train_here(tmp_path, shards, "s", on_spike="skip", **CALM)


def test_a_series_of_spikes_writes_files_for_the_first_only(tmp_path, shards, monkeypatch, capsys):
    """A spike caused by neither data nor weights is not reproduced."""
    with monkeypatch.context() as patched:
        plant(patched, 1000.0, STEP, STEP + 1, STEP + 5, 60)
        how = CALM | dict(max_steps=61, keep_last=1, on_spike="record")
        run = train_here(tmp_path, shards, "r", **how)
    first, last = "spike_000041.json", "spike_000060.json"
    assert spike_steps(run, "file") == [(41, first), (42, None), (46, None), (60, last)]
    left = sorted(p.name for p in run.dir.glob("spike_*"))
    assert left == [first, last, "spike_000060.pt"]
    replay.main([str(run.dir / "spike_000060.pt"), "--device", "cpu"])
    assert "the spike was not reproduced" in capsys.readouterr().out


def test_a_calm_run_has_no_spike(tmp_path):
    """100 steps of the preset laptop, smaller and noisier, with AdamW, whose norms vary the most."""
    flags = "--preset laptop --device cpu --max_steps 100 --total_batch_size 1024 --n_embd 64 "
    flags += "--val_every 0 --sample_every 0 --run_name r --log_every 1 --optimizer adamw --lr 3e-3"
    succeed("train_gpt2.py", *flags.split(), cwd=tmp_path)
    run = read_run(tmp_path / "log" / "r")
    assert len(run.losses) == 100 and run.losses[-1] < 3.4 and not spike_steps(run)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("{", "is damaged"), ("[]", "is damaged"), (dict(step="1"), "is damaged"),
        (dict(program="none"), "unknown program"), (dict(step=10**9), "the run has 19073 steps"),
        (dict(model={"n_layer": 10**6}), "n_layer=1000000 must be from 1 to 4096"),
    ],
)  # fmt: skip
def test_invalid_spike_file_gives_one_sentence(tmp_path, wrong, sentence):
    good = dict(program="gpt2", step=1, batch_size=1, norm=1.0, usual=1.0, skipped=False,
                losses=[1.0], norms={}, sequences=[], model={}, train={})  # fmt: skip
    file = tmp_path / "spike_000001.json"
    file.write_text(json.dumps(good | wrong) if isinstance(wrong, dict) else wrong)
    with pytest.raises(UserError, match=sentence):
        replay.main([str(file), "--device", "cpu"])


# the gradients of the two micro-steps of step 41 are 1000 times as long
PLANTED = """
real, calls = torch.amp.GradScaler.scale, []
def scale(self, loss):
    calls.append(1)
    return real(self, loss * (1000 if len(calls) in (81, 82) else 1))
torch.amp.GradScaler.scale = scale
"""


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp2"])
def test_all_ranks_skip_the_same_update(tmp_path, shards, start_two, monkeypatch, parallel):
    flags = f"--max_steps 50 --no_shuffle --parallel {parallel} --on_spike skip".split()
    finished(start_two(*flags, program=driver(tmp_path, PLANTED)))
    two = read_run(tmp_path / "log" / "r")
    assert spike_steps(two, "skipped") == [(STEP, True)]
    spike = spike_file(two.dir)
    assert sum(spike["losses"]) == pytest.approx(two.losses[STEP - 1]) and len(spike["losses"]) == 4
    assert (len(spike["norms"]), (two.dir / "spike_000041.pt").exists()) == {
        "ddp": (28, True), "zero1": (0, True), "fsdp2": (0, False)}[parallel]  # fmt: skip
    leave_out(monkeypatch)
    same = CALM | dict(lr=1e-3, beta2=0.99, batch_size=8, checkpoint_every=0)
    one = train_here(tmp_path, shards, "one", **same)
    assert one.losses == pytest.approx(two.losses, abs=1e-5)
    losses, *_ = replay.repeat_step(trainer_before(two.dir))
    assert losses == pytest.approx(spike["losses"], abs=1e-5)


def trainer_before(run_dir, device="cpu"):
    """The trainer in its state before the spike."""
    settings = read_config(run_dir, train_gpt2.GPTConfig, train_gpt2.TrainConfig)[:2]
    file = run_dir / "spike_000041.json"
    return replay.trainer_before(file, replay.read_spike(file), *settings, World(device))[0]


def test_a_replay_reads_every_sequence_of_a_step_that_is_larger_than_the_first(tmp_path, shards):
    run = speedrun_trainer(tmp_path, shards, batch_warmup_steps=2)
    for _ in range(2):
        run.train_step()
    losses, _, _, each = replay.repeat_step(run)
    assert (len(losses), len(each)) == (2, 8)


@pytest.mark.parametrize("name", ["bert", "speedrun"])
def test_spikes_of_other_programs_are_replayed(tmp_path, shards, texts, name):  # noqa: F811
    """With random masks and other optimizers, from a snapshot and from the start of the run."""
    base, data = (BERT_RUN, texts / "words") if name == "bert" else (SPEEDRUN, shards)
    program = driver(tmp_path, PLANTED, name)
    flags = [
        *base,
        "--data",
        data,
        "--max_steps",
        43,
        "--checkpoint_every",
        0,
        "--on_spike",
        "record",
    ]
    succeed(program, *flags, cwd=tmp_path)
    run_dir = tmp_path / "log" / "r"
    loss = f"{sum(spike_file(run_dir)['losses']):10.6g}"
    for recorded in (True, False):
        file = run_dir / "spike_000041.json"
        said = succeed("lab", "replay", file, "--device", "cpu", cwd=tmp_path)
        assert f"loss{'':40} {loss} {loss}" in said, said
        assert ("40 updates from the start of the run" in said) != recorded
        file.with_suffix(".pt").unlink(missing_ok=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_the_weights_before_they_change(tmp_path, bad_shards):
    run = train_here(tmp_path, bad_shards, "r", on_spike="record", device="cuda", **CALM)
    spike = spike_file(run.dir)
    losses, norm, *_ = replay.repeat_step(trainer_before(run.dir, "cuda"))
    assert losses == pytest.approx(spike["losses"], rel=1e-4)
    assert norm == pytest.approx(spike["norm"], rel=1e-3)
