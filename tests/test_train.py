"""Training: schedule, updates, settings that must not change a run, evaluation, non-finite values."""

import dataclasses
import functools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import (  # isort: skip
    ROOT, TINY_MODEL, VOCAB, difference, differing_parts, driver, equal_bits, mask_shards, of_kind,
    read_run, run_python, train_here,
)  # fmt: skip
from test_model import noisy

import lab.hardware
import train_gpt2
from lab.cli import RunError, UserError
from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.distributed import World
from lab.eval.validation import Validation, evaluate
from lab.hardware import compile_unsupported_reason
from lab.kernels import cross_entropy
from lab.precision import Precision
from train_gpt2 import PRESETS, GPTConfig, TrainConfig, get_lr

CPU = torch.device("cpu")


def raw_gradients(checkpoint, beta1=0.9):
    """Gradients of the first update, from AdamW's first moment (of a run with grad_clip=0)."""
    return {i: s["exp_avg"] / (1 - beta1) for i, s in checkpoint["optimizer"]["state"].items()}


# ----------------------------------------------------------------------------- schedule and optimizer


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_are_exact_at_their_corners(schedule):
    fixed = dict(max_steps=1000, lr=6e-4, min_lr=6e-5, schedule=schedule)
    cfg = TrainConfig(warmup_steps=100, decay_steps=200, **fixed)
    rates = [get_lr(step, cfg) for step in range(1001)]
    assert (rates[0], rates[49], rates[99], rates[100]) == (6e-4 / 100, 6e-4 / 2, 6e-4, 6e-4)
    assert rates[1000] == get_lr(5000, cfg) == (6e-4 if schedule == "constant" else 6e-5)
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
    cosine = (1 + math.sqrt(0.5)) / 2
    middle = dict(cosine=(325, cosine), linear=(325, 0.75), constant=(325, 1), wsd=(900, 0.5))
    step, left = middle[schedule]
    assert rates[step] == pytest.approx(6e-5 + 5.4e-4 * left, rel=1e-12)
    if schedule == "wsd":
        assert set(rates[99:801]) == {6e-4} and rates[801] < 6e-4, (
            "constant until 200 steps before the end"
        )
    shares = TrainConfig(warmup_steps=0.038, decay_steps=0.2, **fixed)  # of max_steps
    asked = dataclasses.replace(shares, warmup_steps=38, decay_steps=200)
    assert [get_lr(s, shares) for s in range(1001)] == [get_lr(s, asked) for s in range(1001)]
    assert get_lr(0, TrainConfig(warmup_steps=0, **fixed)) == 6e-4, "without warm-up"
    odd = TrainConfig(warmup_steps=1.5, **fixed)
    assert max(get_lr(step, odd) for step in range(5)) <= odd.lr


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_update_has_the_first_learning_rate_and_the_log_shows_adamws(
    tmp_path, shards, optimizer
):
    """With 4 warmup steps, lr / 4. AdamW's first update moves each number by the learning rate."""
    settings = dict(lr=3e-3, muon_lr=0.02, warmup_steps=4, eps=1e-12, checkpoint_every=1)
    run = train_here(tmp_path, shards, "r", max_steps=5, optimizer=optimizer, **settings)
    moved = run.checkpoints[1]["model"]["transformer.ln_f.bias"].abs()  # it starts at 0
    assert moved.tolist() == pytest.approx([3e-3 / 4] * len(moved), rel=1e-4)
    rates = [event["lr"] for event in of_kind(run, "train")]
    assert rates == pytest.approx([3e-3 * n / 4 for n in (1, 2, 3, 4, 4)])


def test_presets_are_valid_runs_of_10b_tokens():
    """The GPT-2 presets read 10B tokens in whole sequences, with a warmup of 375M tokens."""
    assert PRESETS["gpt2"] == (GPTConfig(), TrainConfig())
    for name, (model_config, cfg) in PRESETS.items():
        assert cfg.preset == name and cfg.seq_len <= model_config.block_size
        assert 0 <= cfg.min_lr < cfg.lr
        assert cfg.total_batch_size % cfg.seq_len == model_config.n_embd % model_config.n_head == 0
        if name not in ("gpt2-mini", "laptop", "sft"):
            assert cfg.max_steps * cfg.total_batch_size == pytest.approx(10e9, rel=1e-4)
            warm = next(s for s in range(cfg.max_steps) if get_lr(s, cfg) == cfg.lr) + 1
            assert warm * cfg.total_batch_size == pytest.approx(375e6, rel=2e-3)


# -------------------------------------------------------------- settings that must not change a run


@pytest.mark.parametrize("masked", [False, True])
def test_gradient_accumulation_changes_nothing(tmp_path, shards, masked):
    """Losses, weights and gradients; with masks, micro-steps have different numbers of targets."""
    if masked:
        mask_shards(shards)
    runs = [train_here(tmp_path, shards, f"b{size}", batch_size=size) for size in (16, 4)]
    a, b = runs
    assert [of_kind(r, "start")[0]["grad_accum_steps"] for r in runs] == [1, 4]
    assert len(a.losses) == 20 and a.losses[-1] < a.losses[0] - 0.3
    assert a.losses == pytest.approx(b.losses, abs=1e-5)
    assert difference(a.checkpoints[20]["model"], b.checkpoints[20]["model"]) < 1e-5
    first, *others = (
        raw_gradients(train_here(tmp_path, shards, f"g{size}", batch_size=size, max_steps=1, grad_clip=0.0)
                      .checkpoints[1]) for size in (16, 4, 1))  # fmt: skip
    assert max(g.abs().max() for g in first.values()) > 1e-2
    assert max(difference(first, other) for other in others) < 1e-5


def test_callbacks_change_no_bit_of_training(tmp_path, shards):
    quiet = train_here(tmp_path, shards, "quiet", max_steps=8)
    beside = dict(val_every=3, sample_every=2, sample_tokens=5, checkpoint_every=2, timing=True)
    beside |= dict(on_spike="record")
    watched = train_here(tmp_path, shards, "watched", max_steps=8, **beside)
    assert list(watched.val) == [0, 3, 6, 8] and len(watched.checkpoints) > 1
    assert [e["step"] for e in of_kind(watched, "sample")] == [0, 2, 4, 6, 8]
    assert (watched.losses, watched.norms) == (quiet.losses, quiet.norms)
    parts = ("model", "optimizer", "loader")
    assert not differing_parts(quiet.checkpoints[8], watched.checkpoints[8], parts)
    assert train_here(tmp_path, shards, "other", max_steps=1, seed=7).losses[0] != quiet.losses[0]


def test_plain_and_fused_kernels_give_the_same_run(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(cross_entropy, "SMALL", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK", 24)
    how = dict(max_steps=6, checkpoint_every=3, val_every=3)
    plain, fused = (train_here(tmp_path, shards, k, kernels=k, **how) for k in ("plain", "fused"))
    assert plain.losses != fused.losses == pytest.approx(plain.losses, abs=1e-5)
    assert plain.val == pytest.approx(fused.val, abs=1e-5)
    (plain.dir / "model_000006.pt").unlink()
    changed = train_here(tmp_path, shards, "plain", kernels="fused", max_steps=6, resume=True)
    assert changed.losses[-3:] == pytest.approx(plain.losses[3:], abs=1e-5)
    assert difference(changed.checkpoints[6]["model"], fused.checkpoints[6]["model"]) < 1e-5


@pytest.mark.parametrize("backend, checkpointing", [("inductor", False), ("aot_eager", True)])
def test_compiled_equals_eager_without_recompiling_after_warmup(
    tmp_path, shards, monkeypatch, backend, checkpointing
):
    """With all callbacks and the fused loss; the slow variant uses the real compiler and fewer callbacks."""
    from torch._dynamo.utils import counters

    real = backend == "inductor"
    if real and (reason := compile_unsupported_reason(CPU, GPTConfig(), Precision("fp32", CPU))):
        pytest.skip(f"torch.compile does not work here: {reason}")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(lab.hardware, "compile_unsupported_reason", lambda *_: "")
    monkeypatch.setattr(cross_entropy, "SMALL", 2**26 if real else 0)
    torch._dynamo.reset()
    counters.clear()
    graphs, update = [], train_gpt2.Trainer.train_step

    def counted(run):
        graphs.append(counters["stats"]["unique_graphs"])
        return update(run)

    monkeypatch.setattr(train_gpt2.Trainer, "train_step", counted)
    every = 0 if real else 2  # samples have other lengths than training
    eager, compiled = (
        train_here(
            tmp_path, shards, f"c{on}", dict(n_layer=1, activation_checkpointing=checkpointing),
            compile=on, max_steps=4, val_every=every, val_tokens=150, sample_every=every, sample_tokens=40,
        ) for on in (False, True)
    )  # fmt: skip
    last = counters["stats"]["unique_graphs"]
    assert graphs[5] >= 1 and {*graphs[5:]} == {last}, "the compiled run, which is the second"
    assert eager.losses == pytest.approx(compiled.losses, abs=1e-4)
    assert eager.val == pytest.approx(compiled.val, abs=1e-4)
    assert difference(eager.checkpoints[4]["model"], compiled.checkpoints[4]["model"]) < 1e-4


# --------------------------------------------------------------------------------------- one update


def test_clipping_limits_the_update_and_logs_the_norm_before_it(tmp_path, shards):
    once = dict(max_steps=1, warmup_steps=0, beta1=0.0)
    runs = [train_here(tmp_path, shards, f"c{c}", grad_clip=c, **once) for c in (0.0, 0.1)]
    grads = [raw_gradients(r.checkpoints[1], beta1=0.0).values() for r in runs]
    lengths = [math.sqrt(sum(g.double().square().sum().item() for g in gs)) for gs in grads]
    assert runs[0].norms == runs[1].norms == [pytest.approx(lengths[0], rel=1e-5)]
    assert lengths[0] > 0.2 and lengths[1] == pytest.approx(0.1, rel=1e-4)


def test_gradients_of_one_update_are_not_added_to_those_of_the_next(tmp_path, shards):
    """Weights that hardly move have gradients of about the same norm at each step."""
    norms = train_here(tmp_path, shards, "r", max_steps=4, lr=1e-9, min_lr=0.0).norms
    assert len(norms) == 4 and max(norms) < 1.2 * min(norms)


def test_models_that_old_torch_miscompiles_are_not_compiled(monkeypatch):
    monkeypatch.setattr(lab.hardware.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch, "compile", lambda function: torch.ones_like)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "ones", lambda *_, device: torch.zeros(1))

    def refused(wide, name, bf16_residual=True):
        config = GPTConfig(n_embd=wide, bf16_residual=bf16_residual)
        precision = SimpleNamespace(name=name, is_16_bit=name in ("bf16", "fp16"))
        return "miscompiles models with n_embd > 1024" in compile_unsupported_reason(
            gpu, config, precision
        )

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert refused(1280, "fp16") and refused(1152, "bf16", bf16_residual=False)
    assert not any([refused(1024, "fp16"), refused(1280, "bf16"), refused(1280, "tf32")])
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    assert not refused(1280, "fp16")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_scaling_changes_no_update(tmp_path, shards, monkeypatch, optimizer):
    """As in fp16, by a power of two: clipping and updates use exactly unscaled gradients."""
    settings = dict(max_steps=4, grad_clip=0.1, checkpoint_every=2, optimizer=optimizer)
    free = train_here(tmp_path, shards, "free", **settings)

    class Scaled(Precision):
        def __init__(self, *args):
            super().__init__(*args)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    monkeypatch.setattr(train_gpt2, "Precision", Scaled)
    run = train_here(tmp_path, shards, "scaled", **settings)
    assert run.losses == free.losses and run.norms == free.norms
    assert equal_bits(run.checkpoints[4]["model"], free.checkpoints[4]["model"])
    assert run.checkpoints[4]["scaler"]["scale"] == 4096, "it doubles after two finite steps"
    (run.dir / "model_000004.pt").unlink()
    again = train_here(tmp_path, shards, "scaled", resume=True, **settings)
    assert again.checkpoints[4]["scaler"] == run.checkpoints[4]["scaler"]
    with pytest.raises(UserError, match="precision=fp16 needs a GPU"):
        Precision("fp16", CPU)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_uses_the_optimizer_flags_of_the_new_command(tmp_path, shards, optimizer):
    train_here(tmp_path, shards, "r", max_steps=2, optimizer=optimizer)
    changed = dict(weight_decay=0.9, beta1=0.5, lr=2e-3, muon_lr=0.005, optimizer=optimizer)
    run = train_here(tmp_path, shards, "r", max_steps=4, resume=True, **changed)
    saved = run.checkpoints[4]["optimizer"]
    groups = [group for part in saved.get("parts", [saved]) for group in part["param_groups"]]
    assert groups[0]["weight_decay"] == 0.9 and groups[-1]["betas"][0] == 0.5
    assert [g["lr"] for g in groups] == [0.005 if optimizer == "muon" else 2e-3, 2e-3]


def test_a_bug_keeps_its_traceback(tmp_path, start_training):
    """A ValueError inside an update is a bug, not a user error."""
    patch = (
        "def update(run):\n    raise ValueError('a bug')\ntrain_gpt2.Trainer.train_step = update"
    )
    process = start_training(program=driver(tmp_path, patch))
    assert process.wait() == 1 and "Traceback" in process.stderr and "error:" not in process.stderr
    assert process.stderr.rstrip().endswith("ValueError: a bug") and "in update" in process.stderr


# --------------------------------------------------------------------------------------- evaluation


def test_a_run_learns(tmp_path, shards):
    run = train_here(tmp_path, shards, "r", max_steps=200, val_every=200, lr=1e-2, eps=1e-8)
    (first, last), start = of_kind(run, "val"), of_kind(run, "start")[0]
    assert start["log_v"] == math.log(VOCAB) == pytest.approx(first["loss"], abs=0.3)
    assert last["loss"] < start["unigram"] - 1.0
    # 40 equally frequent ids, end-of-text at every 61st position; ids that never occur count as one
    assert start["unigram"] == pytest.approx(math.log(41), abs=0.15)
    tokens = np.load(shards / "x_val_000000.npy")[1:301]  # the targets
    bytes_a_token = (tokens != VOCAB - 1).mean()  # end-of-text has none
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2) / bytes_a_token)


def test_validation_loss_is_the_mean_over_val_tokens(shards, tiny_config):
    model, split = noisy(tiny_config), TokenShards(shards, "val", VOCAB)
    where = World("cpu"), Precision("fp32", CPU)
    with torch.no_grad():
        stream = torch.from_numpy(split.read(0, 700).astype(np.int64))
        each = []  # of each token after the first, with its context in sequences of 16
        for i in range(0, 699, 16):
            x, y = stream[i : i + 16][: 699 - i], stream[i + 1 : i + 17]
            each += F.cross_entropy(model(x[None])[0][0], y, reduction="none").tolist()
    for val_tokens, count in ((0, 699), (10**9, 699), (256, 256), (100, 100), (5, 5)):
        cfg = TrainConfig(val_tokens=val_tokens, seq_len=16)
        for batch_size in (1, 4, 64):
            sums = evaluate(model, split, cfg, batch_size, *where)
            assert sums["targets"] == count
            assert sums["loss"] / count == pytest.approx(np.mean(each[:count]), rel=1e-5)


def test_throughput_excludes_the_first_step_and_evaluation(tmp_path, shards, monkeypatch):
    """With a clock that advances by 1,000 s in the first step and in each validation."""
    real, clock, late = TokenLoader.next_batch, time.perf_counter, [0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    first_batch = [1000]

    def next_batch(self):
        late[0] += first_batch.pop() if first_batch else 0
        return real(self)

    def measure(*args, real=Validation.__call__):
        late[0] += 1000
        return real(*args)

    monkeypatch.setattr(TokenLoader, "next_batch", next_batch)
    monkeypatch.setattr(Validation, "__call__", measure)
    run = train_here(tmp_path, shards, "r", max_steps=4, timing=True, val_every=2)
    first, *others = of_kind(run, "train")
    assert "tok_per_s" not in first and of_kind(run, "first_step")[0]["seconds"] > 1000
    for event in others:
        phases = [event[f"{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer")]
        assert min(phases) >= 0 and 0 < sum(phases) <= event["dt_ms"] + 0.01 < 500e3
        assert event["tok_per_s"] == pytest.approx(256e3 / event["dt_ms"])
        assert event["tokens"] == 256 * event["step"]
        assert "mfu" not in event, "a CPU has no known peak"


def test_tensorboard_equals_the_log_even_after_resuming(tmp_path, shards):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(tmp_path, shards, "r", max_steps=4, val_every=2)
    run = train_here(tmp_path, shards, "r", max_steps=7, val_every=2, resume=True)
    board = EventAccumulator(str(run.dir)).Reload()
    for kind in ("val", "train"):
        shown = {s.step: s.value for s in board.Scalars(f"{kind}/loss")}
        logged = {e["step"]: e["loss"] for e in of_kind(run, kind)}
        assert shown == pytest.approx(logged) and len(shown) > 4
    bits = {e["step"]: e["bits_per_byte"] for e in of_kind(run, "val")}
    assert {s.step: s.value for s in board.Scalars("val/bits_per_byte")} == pytest.approx(bits)


# ------------------------------------------------------------------------ non-finite values, data


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, shards, run_train):
    train_here(tmp_path / "log", shards, "r", max_steps=4, total_batch_size=128, shuffle=False)
    before = (tmp_path / "log" / "r" / "model_000004.pt").read_bytes()
    result = run_train("--resume", "--max_steps", 30, "--lr", "1e30", "--grad_clip", 0)
    assert result.returncode == 1 and result.stderr.startswith("train_gpt2.py: error: the loss is ")
    assert result.stderr.count("\n") == 1
    # update 5 makes the weights useless, so step 6 is the first bad one: tokens 640 to 767
    assert "at step 6" in result.stderr and "keeps model_000004.pt" in result.stderr
    names = ", ".join(f"x_train_000000.npy:{position}" for position in (640, 656, 672))
    assert f"{names} and 5 more" in result.stderr
    (kept,) = (tmp_path / "log" / "r").glob("model_0*.pt")
    assert kept.read_bytes() == before


def test_nonfinite_last_step_is_detected(tmp_path, shards):
    """Even without a checkpoint after it. Weights of 1e30 are finite, but their outputs are not."""
    with pytest.raises(RunError, match="the loss is nan at step 2 .*try a lower --lr"):
        train_here(tmp_path, shards, "r", max_steps=2, lr=1e30, warmup_steps=0, checkpoint_every=0)


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path, shards):
    settings = dict(max_steps=1, lr=1e12, warmup_steps=0, checkpoint_every=0, val_every=1)
    with pytest.raises(RunError, match="the validation loss is nan after step 1; try a lower --lr"):
        train_here(tmp_path, shards, "r", **settings)


def test_nonfinite_weights_are_never_saved(tmp_path, shards):
    """A huge learning rate makes all weights infinite in an update whose loss is finite."""
    with pytest.raises(RunError, match="weights are not finite after step 1 and are not saved"):
        train_here(tmp_path, shards, "r", max_steps=2, lr=1e39, warmup_steps=0, checkpoint_every=1)
    assert not list((tmp_path / "r").glob("*.pt"))


def test_resumed_run_ignores_added_data_and_refuses_changed_data(tmp_path, shards):
    """Added shards are ignored (test_loader.py); a changed first shard is refused."""
    train_here(tmp_path, shards, "r", max_steps=6)
    other = np.load(shards / "x_train_000000.npy")[::-1]
    (shards / "x_train_000000.npy").unlink()  # the run keeps what it has opened
    np.save(shards / "x_train_000000.npy", other)
    with pytest.raises(
        UserError, match="does not begin with the .* tokens that this run started with"
    ):
        train_here(tmp_path, shards, "r", max_steps=20, resume=True)


def test_resumed_run_keeps_its_micro_batch(tmp_path, shards):
    train_here(tmp_path, shards, "r", max_steps=1, batch_size=4)
    for max_steps, asked, size in ((2, 0, 4), (3, 8, 8), (4, 0, 8)):  # a new run would choose 16
        run = train_here(tmp_path, shards, "r", resume=True, batch_size=asked, max_steps=max_steps)
        start = of_kind(run, "start")[-1]
        assert (start["batch_size"], start["grad_accum_steps"]) == (size, 16 // size)


def test_deterministic_applies_to_one_run_only(tmp_path, shards):
    a = train_here(tmp_path, shards, "a", deterministic=True, max_steps=2)
    assert torch.are_deterministic_algorithms_enabled()
    b = train_here(tmp_path, shards, "b", max_steps=2)
    assert not torch.are_deterministic_algorithms_enabled()
    assert a.losses == b.losses  # on a CPU it changes nothing


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("program", ["train_gpt2.py", "speedrun.py"])
def test_deterministic_run_on_gpus_repeats_and_resumes_exactly(tmp_path, program, processes):
    """At a size at which the default settings differ from the second step on."""
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    for split, size in (("train", 300_000), ("val", 20_000)):
        tokens = np.random.default_rng(size).integers(0, 50257, size, dtype=np.uint16)
        np.save(tmp_path / f"x_{split}_000000.npy", tokens)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    flags = "--deterministic --total_batch_size 32768 --batch_size 8 --max_steps 12 --log_every 1 "
    flags += (
        "--val_every 6 --val_tokens 16384 --checkpoint_every 6 --sample_every 0 --hellaswag_every 0"
    )
    command = [*torchrun, ROOT / program, "--data", tmp_path, *flags.split()]
    command += ["--preset", {"train_gpt2.py": "gpt2", "speedrun.py": "speedrun"}[program]]
    for name in ("a", "b"):
        done = run_python(*command, "--run_name", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (read_run(tmp_path / "log" / name) for name in ("a", "b"))
    assert one.losses == two.losses and one.val == two.val
    (tmp_path / "log/b/model_000012.pt").unlink()
    done = run_python(*torchrun, ROOT / program, "--resume", "--run_name", "b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = read_run(tmp_path / "log" / "b")
    assert again.losses[-6:] == one.losses[6:]
    assert not differing_parts(one.checkpoints[12], again.checkpoints[12], ("model", "optimizer"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bf16_residual", [True, False])
def test_compiled_wide_model_trains_like_the_uncompiled_one(tmp_path, bf16_residual, capsys):
    """With a float32 residual stream, torch before 2.14 compiles a race condition into the last LayerNorm."""
    (tmp_path / "wide").mkdir()
    for split, size in (("train", 200_000), ("val", 5000)):
        tokens = np.random.default_rng(size).integers(0, 50257, size, dtype=np.uint16)
        np.save(tmp_path / "wide" / f"x_{split}_000000.npy", tokens)
    model = TINY_MODEL | dict(n_head=20, n_embd=1280, block_size=1024, vocab_size=50257)
    settings = dict(batch_size=16, seq_len=1024, total_batch_size=16384, max_steps=4, precision="bf16",
                    device="cuda", model=model | dict(bf16_residual=bf16_residual))  # fmt: skip
    data = tmp_path / "wide"
    runs = [train_here(tmp_path, data, f"c{c}", compile=c, **settings) for c in (False, True)]
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=0.01)
    off = "torch.compile is off" in capsys.readouterr().out
    assert off == (not bf16_residual and torch.__version__ < "2.14")


def leveldb_records(data, header=7, block=32768):
    """The records of a LevelDB log, after a file header (W&B's has 7 bytes, in the first block). A part of a
    record has 4 bytes of checksum, 2 of length, 1 of type: full, first, middle, last."""
    record, i = b"", header
    while i + 7 <= len(data):
        if block - i % block < 7:  # the rest of a block is padding
            i += block - i % block
            continue
        size, kind = int.from_bytes(data[i + 4 : i + 6], "little"), data[i + 6]
        record += data[i + 7 : i + 7 + size]
        i += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_offline_has_the_numbers_of_the_log(tmp_path, shards, monkeypatch):
    """Its file, read back: every scalar of log.jsonl, at its step."""
    pytest.importorskip("wandb", reason="pip install wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = train_here(tmp_path / "log", shards, "r", max_steps=4, val_every=2, wandb=True)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, settings = [], {}
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.history.item:
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
        for item in record.run.config.update:
            settings[item.key or item.nested_key[0]] = json.loads(item.value_json)
    expected = [
        (e["step"], f"{e['kind']}/{name}", value)
        for e in run.events for name, value in e.items()
        if type(value) in (int, float) and name not in ("step", "time")
    ]  # fmt: skip
    found = [
        (row["step"], name, value) for row in rows for name, value in row.items() if "/" in name
    ]
    assert sorted(found) == sorted(expected) and any("val/loss" == name for _, name, _ in found)
    assert settings["max_steps"] == 4 and settings["lr"] == 3e-3
