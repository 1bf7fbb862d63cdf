"""bench/distill.py: the loss against teachers, and whole runs."""

import functools

import distill
import little_text
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, VOCAB, add_noise, differing_parts, fail, read_run, run_two, succeed
from test_bench_small import tiny_models

import lab.hardware
import speedrun
from lab.cli import UserError
from lab.config_file import read_config
from lab.distributed import World
from lab.program import class_path
from lab.registry import load_model
from lab.trainer.checkpoint import write_checkpoint

N, C, D, V, PADDED = 21, 16, 12, 37, 40
FLAGS = (
    "--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --seq_len 16 "
    "--vocab_multiple 128 --total_batch_size 128 --batch_size 4 --val_tokens 256 --val_every 2 "
    "--sample_every 0 --log_every 1 --keep_last 9"
).split()


def plain_loss(x, weight, targets, hidden, heads):
    """The loss in plain PyTorch: all logits at once."""
    p = (hidden @ heads.mT)[..., :V].softmax(-1).mean(0)
    logits = (x @ weight.T)[:, :V]
    return F.cross_entropy(logits, p, reduction="none")[targets >= 0].sum()


def relative_error(found, right):
    return ((found - right).norm() / right.norm()).item()


def test_soft_loss_and_gradients_equal_plain_pytorch(monkeypatch):
    """In three chunks, with targets of -1, padding rows that are not 0, and narrower teachers."""
    monkeypatch.setattr(distill, "CHUNK", 8)
    x, weight = torch.randn(N, C), torch.randn(PADDED, C)
    hidden, heads = torch.randn(2, N, D), torch.randn(2, PADDED, D)
    targets = torch.randint(V, (N,))
    targets[[0, 8, 20]] = -1
    results = []
    for loss_of in (
        lambda x, w: plain_loss(x, w, targets, hidden, heads),
        lambda x, w: distill.soft_loss(x, w, targets, hidden, heads, V)[0],
    ):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(*inputs)
        results.append([loss.detach(), *torch.autograd.grad(0.37 * loss, inputs)])
    for right, found in zip(*results, strict=True):
        assert relative_error(found, right) < 1e-5
    assert not found[V:].any(), "padding rows have no gradient"
    inputs = (*inputs, targets, hidden, heads, V)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(distill.soft_loss, inputs, test_utils=checks)


def test_a_student_equal_to_its_teachers_has_no_gradient():
    student = add_noise(distill.Student(speedrun.GPTConfig(**little_text.SHAPE)))
    x, y = torch.randint(VOCAB, (2, 3, 20))
    hidden = student.hidden(x).flatten(0, 1).detach().expand(2, -1, -1)
    heads = student.lm_head.weight.detach().expand(2, -1, -1)
    norms = []
    for how in ({}, {"teachers": (hidden, heads)}):
        student.zero_grad()
        student(x, y, reduction="sum", **how)[1].backward()
        norms.append(torch.stack([p.grad.norm() for p in student.parameters()]).norm())
    assert norms[1] < 1e-5 * norms[0]


def write_models(folder, models):
    """Write checkpoints of models that load_model reads. Returns their paths."""
    names = dict(model=class_path(speedrun.GPT), config=class_path(speedrun.GPTConfig))
    for i, model in enumerate(models):
        state = dict(model=model.state_dict(), model_config=vars(model.config), program=names)
        write_checkpoint(folder / f"teacher_{i}.pt", state)
    return tuple(str(folder / f"teacher_{i}.pt") for i in range(len(models)))


@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_equal_those_with_all_logits_in_memory(
    tmp_path, shards, monkeypatch, compiled
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(lab.hardware, "compile_unsupported_reason", lambda *_: "")
    torch._dynamo.reset()
    teachers, runs = tiny_models(2), []
    for model in teachers:
        model.config.dropout = 0.5  # of the loaded models, in which it must be off
    names = write_models(tmp_path, teachers)
    for trainer_class in (distill.Trainer, speedrun.Trainer):
        cfg = distill.TrainConfig(
            "laptop", teachers=names, **little_text.HOW | dict(data=str(shards), max_steps=9)
        )
        cfg.compile, cfg.log_dir = compiled and not runs, str(tmp_path / "log")
        shape = speedrun.GPTConfig(**little_text.SHAPE)
        runs.append(speedrun.build_trainer(shape, cfg, World("cpu"), trainer_class=trainer_class))
    runs[1].model = little_text.soft_targets(teachers)(runs[1].raw_model)
    for _ in range(4):
        ours, right = (run.train_step()[0].sum().item() for run in runs)
        assert ours == pytest.approx(right, abs=1e-4)


def test_program_resumes_exactly_and_agrees_with_two_processes(tmp_path, builtin_text):
    base = [*FLAGS, "--data", builtin_text]
    for seed in (1, 2):
        flags = f"--max_steps 3 --checkpoint_every 3 --seed {seed} --run_name t{seed}".split()
        succeed("speedrun.py", *base, *flags, cwd=tmp_path)
    base += "--max_steps 6 --checkpoint_every 2 --batch_warmup_steps 3 --ema_steps 2".split()
    student = [*base, "--teachers", "log/t1", "t2"]
    succeed("bench/distill.py", *student, "--run_name", "a", cwd=tmp_path)
    whole = read_run(tmp_path / "log/a")
    for step in (4, 6):
        (tmp_path / f"log/a/model_{step:06d}.pt").unlink()
    succeed("bench/distill.py", "--resume", cwd=tmp_path)
    again = read_run(tmp_path / "log/a")
    assert again.losses[-4:] == whole.losses[2:] and again.val == whole.val
    assert not differing_parts(whole.checkpoints[6], again.checkpoints[6])

    two = [ROOT / "bench/distill.py", *student, "--run_name", "two", "--batch_size", 2]
    run_two(*two, cwd=tmp_path)
    two = read_run(tmp_path / "log/two")
    assert two.losses[:2] == pytest.approx(whole.losses[:2], abs=1e-5)
    assert two.losses == pytest.approx(whole.losses, abs=1e-3)
    assert two.val == pytest.approx(whole.val, abs=1e-3)

    assert type(load_model(str(tmp_path / "log/a"))) is speedrun.GPT
    flags = "--init_from log/a --run_name more --max_steps 1 --batch_warmup_steps 0".split()
    succeed("speedrun.py", *base, *flags, cwd=tmp_path)
    assert read_run(tmp_path / "log/more").val[0] == whole.val[6], "validation has the usual loss"

    said = fail("bench/distill.py", *base, cwd=tmp_path)
    assert "teachers is empty, but must name runs; pass --teachers" in said
    flags = "--seq_len 64 --block_size 64 --batch_size 1".split()
    said = fail("bench/distill.py", *student, *flags, cwd=tmp_path)
    assert (
        "t1 has vocab_size=257 and block_size=32, but must have 257 and at least seq_len=64" in said
    )
    (tmp_path / "config.json").write_text('{"model": {}, "train": {"teachers": "x"}}')
    with pytest.raises(UserError, match='teachers="x", which must be of type tuple'):
        read_config(tmp_path, speedrun.GPTConfig, distill.TrainConfig)
