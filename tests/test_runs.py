"""The run folder: what goes into it, what is read back, what does not fit. The commands that use it: test_train.py."""

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from conftest import ROOT, TINY_MODEL, run_python
from test_train import equal_bits

from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.device import Precision, this_python
from lab.run.checkpoints import newest_run, read_newest, save_checkpoint
from lab.run.folder import (
    copy_weights,
    open_run,
    read_config,
    restore,
    resume_command,
    run_to_resume,
    same_shape,
    state_to_save,
)
from train_gpt2 import GPT, GPTConfig, TrainConfig, World, make_optimizer, train_step

# ------------------------------------------------------------------------------------------------------- folders


@dataclass
class Shape:
    """The two configurations may be any dataclasses."""

    width: int = 3


@dataclass
class Plan:
    resume: bool = False
    rate: float = 0.5
    shape: Literal["up", "down"] = "up"


def test_what_is_opened_is_read_back_and_nobody_else_gets_in(tmp_path):
    run_dir = tmp_path / "r"
    with contextlib.ExitStack() as at_end:
        open_run(run_dir, Shape(4), Plan(rate=0.25), World("cpu"), at_end)
        assert read_config(run_dir, Shape, Plan) == (Shape(4), Plan(rate=0.25))
        if os.name == "posix":
            with contextlib.ExitStack() as other, pytest.raises(OSError, match="r is the folder of a run that is going on"):
                open_run(run_dir, Shape(5), Plan(resume=True), World("cpu"), other)
    with contextlib.ExitStack() as at_end, pytest.raises(OSError, match="ended and saved nothing; delete it"):
        open_run(run_dir, Shape(5), Plan(), World("cpu"), at_end)
    save_checkpoint(run_dir, 1, {}, keep_last=1, best=False)
    with contextlib.ExitStack() as at_end, pytest.raises(OSError, match="r is another run's already; pass --resume"):
        open_run(run_dir, Shape(5), Plan(), World("cpu"), at_end)
    assert read_config(run_dir, Shape, Plan) == (Shape(4), Plan(rate=0.25)), "three that were refused have changed nothing"
    with contextlib.ExitStack() as at_end:
        open_run(run_dir, Shape(4), Plan(resume=True, rate=0.1), World("cpu"), at_end)
    assert read_config(run_dir, Shape, Plan) == (Shape(4), Plan(resume=False, rate=0.1)), "what it goes on with, for the next"


def test_a_setting_that_is_missing_has_its_default_and_an_unknown_one_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model": {"width": 9}, "train": {}}))
    assert read_config(tmp_path, Shape, Plan) == (Shape(9), Plan())
    file.write_text(json.dumps({"model": {"depth": 9}, "train": {"warp": 1}}))
    with pytest.raises(ValueError, match="config.json has depth, warp, which this version does not know"):
        read_config(tmp_path, Shape, Plan)
    for model, train, said in (({"width": "wide"}, {}, 'width="wide", which must be of type int; mend it, or name another run'),
                               ({"width": 1.5}, {}, "width=1.5, .* int"), ({}, {"rate": None}, "rate=null, .* float"),
                               ({}, {"resume": 0}, "resume=0, .* bool"),
                               ({}, {"shape": "flat"}, 'shape="flat", which must be one of up, down;'),
                               (5, {}, "model=5, .* dict")):  # fmt: skip
        file.write_text(json.dumps({"model": model, "train": train}))
        with pytest.raises(ValueError, match=f"config.json has {said}"):
            read_config(tmp_path, Shape, Plan)
    file.write_text(json.dumps({"model": {}, "train": {"rate": 1}}))
    assert read_config(tmp_path, Shape, Plan)[1].rate == 1, "a whole number will do"
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match="config.json is a folder where a file should be; move it away"):
        read_config(tmp_path, Shape, Plan)
    file.rmdir()
    file.write_text("")
    with pytest.raises(ValueError, match="config.json is not what this project has written .* another run with --run_name"):
        read_config(tmp_path, Shape, Plan)


def test_the_run_that_goes_on_is_the_named_one_or_the_one_that_saved_last(tmp_path):
    for age, name in enumerate(("newest", "older", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        path = save_checkpoint(tmp_path / name, 5 + age, {}, keep_last=1, best=False)
        for file in (path, path.parent / "config.json"):
            os.utime(file, (1000 - age,) * 2)
    assert run_to_resume(tmp_path) == (tmp_path / "newest", f"resumes {tmp_path / 'newest'} after step 5")
    assert run_to_resume(str(tmp_path), "oldest") == (tmp_path / "oldest", f"resumes {tmp_path / 'oldest'} after step 7")
    for name, begun in (("before", 999), ("after", 1001)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.utime(tmp_path / name / "config.json", (begun,) * 2)
    run_dir, reason = run_to_resume(tmp_path)
    passed_over = f" ({tmp_path / 'after'}, begun later, saved no checkpoint)"
    assert run_dir.name == "newest" and reason.endswith("newest after step 5" + passed_over)
    assert "later" not in run_to_resume(tmp_path, "newest")[1], "it was asked for"
    with pytest.raises(FileNotFoundError, match="after has no checkpoint to resume from"):
        run_to_resume(tmp_path, "after")
    with pytest.raises(FileNotFoundError, match="log/named must be a plain name, without folders: --run_name named"):
        run_to_resume(tmp_path, "log/named")


def test_another_shape_is_named_by_the_flags_to_type():
    ours = dict(n_layer=2, n_embd=128, vocab_size=257)
    said = r"f has another shape: n_layer=1 \(here 2\), n_embd=32 \(here 128\); pass --n_layer 1 --n_embd 32$"
    with pytest.raises(ValueError, match=said):
        same_shape("f", dict(n_layer=1, n_embd=32, vocab_size=257), ours)
    with pytest.raises(ValueError, match="; pass --n_layer 1 and --data with shards of its tokenizer$"):
        same_shape("f", ours | dict(n_layer=1, vocab_size=50257), ours)
    with pytest.raises(ValueError, match="; pass --data with shards"):
        same_shape("f", ours | dict(vocab_size=50257), ours)


def test_a_checkpoint_with_another_byte_is_refused(tmp_path):
    """torch.load reads it without a word."""
    path = save_checkpoint(tmp_path, 1, {"weights": torch.arange(4096.0), "step": 1}, keep_last=1, best=False)
    whole = path.read_bytes()
    assert read_newest(tmp_path)[1]["weights"].equal(torch.arange(4096.0))
    place = whole.index(torch.arange(1000.0, 1004.0).numpy().tobytes())
    path.write_bytes(whole[:place] + b"\x01" + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"model_000001.pt cannot be read \(.*data/0 in it is damaged: .*move it away"):
        read_newest(tmp_path)


def test_a_checkpoint_that_goes_while_runs_are_looked_at(tmp_path):
    for name in ("goes", "stays"):
        (tmp_path / name).mkdir()
    (tmp_path / "goes" / "model_000001.pt").symlink_to(tmp_path / "nowhere")  # listed, and not there
    save_checkpoint(tmp_path / "stays", 1, {}, keep_last=1, best=False)
    assert newest_run(tmp_path) == tmp_path / "stays"


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_leaves_the_configuration_of_a_run_that_goes_on(tmp_path):
    code = """if True:
        import contextlib, resource, sys
        from pathlib import Path
        from lab.run.folder import open_run
        from train_gpt2 import GPTConfig, TrainConfig, World
        with contextlib.ExitStack() as at_end:
            open_run(Path(sys.argv[1]), GPTConfig(), TrainConfig(), World("cpu"), at_end)
        before = Path(sys.argv[1], "config.json").read_text()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with contextlib.ExitStack() as at_end:
            try:
                open_run(Path(sys.argv[1]), GPTConfig(), TrainConfig(resume=True), World("cpu"), at_end)
            except OSError as error:
                print("refused:", error)
        assert Path(sys.argv[1], "config.json").read_text() == before
    """
    got = run_python("-c", code, tmp_path / "r", cwd=ROOT)
    assert got.returncode == 0 and "refused: cannot write the run folder" in got.stdout, got.stderr


def test_the_command_names_the_folder_where_it_is_not_the_usual_one():
    assert resume_command(Path("log/r")) == f"{this_python()} train_gpt2.py --resume --run_name r"
    assert resume_command(Path("log/my run")).endswith(" --resume --run_name 'my run'"), "as a shell reads it"
    assert resume_command(Path("a/b/r")) == f"{this_python()} train_gpt2.py --resume --log_dir a/b --run_name r"


# -------------------------------------------------------------------------------------------------------- states


def parts(shards, seed, vocab_multiple=128, **settings):
    """What train_gpt2.py works with, on the CPU: all that a checkpoint holds the state of."""
    torch.manual_seed(seed)
    world = World("cpu")
    cfg = TrainConfig(data=str(shards), total_batch_size=128, seq_len=16, batch_size=4, seed=1, **settings)
    model_config = GPTConfig(**TINY_MODEL, vocab_multiple=vocab_multiple)
    model = GPT(model_config)
    optimizer = make_optimizer(model, cfg, world.device)
    loader = TokenLoader(TokenShards(shards, "train", model_config.vocab_size), cfg, world, 4)
    return SimpleNamespace(cfg=cfg, model_config=model_config, model=model, optimizer=optimizer, loader=loader, world=world,
                           precision=Precision("fp32", world.device))  # fmt: skip


def update(p):
    clock = SimpleNamespace(mark=lambda phase: None)
    return train_step(p.model, p.optimizer, p.loader, 1e-3, p.cfg, p.world, p.precision, clock)[0].item()


def state(p, step=1):
    return state_to_save(step, 4.5, True, p.model, p.optimizer, p.loader, p.precision, p.model_config, p.cfg)


def put_back(run_dir, p):
    return restore(run_dir, p.cfg, p.model, p.optimizer, p.loader, p.precision)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_that_is_put_back_goes_on_to_the_same_bits(tmp_path, shards, optimizer):
    ours, theirs = (parts(shards, seed, optimizer=optimizer) for seed in (0, 1))
    update(ours)
    save_checkpoint(tmp_path, 1, state(ours), keep_last=1, best=False)
    expected = update(ours), torch.rand(3)
    assert not equal_bits(state(ours)["model"], state(theirs)["model"])
    assert put_back(tmp_path, theirs) == (1, 4.5, True)
    assert equal_bits((update(theirs), torch.rand(3)), expected)
    assert equal_bits(state(ours), state(theirs))


def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path, shards):
    ours = parts(shards, 0)
    save_checkpoint(tmp_path, 1, state(ours), keep_last=1, best=False)
    rows = parts(shards, 1, vocab_multiple=512)
    with pytest.raises(ValueError, match="vocab_multiple=512 makes 512 rows of the vocabulary, .* has 384; leave"):
        put_back(tmp_path, rows)
    muon = parts(shards, 1, optimizer="muon")
    with pytest.raises(ValueError, match="optimizer=muon cannot go on from .*model_000001.pt, which adamw made"):
        put_back(tmp_path, muon)
    small = parts(shards, 1)
    small.model = GPT(replace(small.model_config, n_layer=1))
    with pytest.raises(ValueError, match=r"model_000001.pt has another shape: n_layer=2 \(here 1\)"):
        put_back(tmp_path, small)
    assert equal_bits(state(muon)["model"], parts(shards, 1).model.state_dict()) and muon.loader.sequence == 0
    assert put_back(tmp_path, parts(shards, 1, vocab_multiple=384)) == (1, 4.5, True), "as many rows as before"
    save_checkpoint(tmp_path, 2, {"model": {}}, keep_last=1, best=False)
    with pytest.raises(ValueError, match="model_000002.pt was not written by this trainer; start from its weights"):
        put_back(tmp_path, ours)


def test_weights_go_into_more_rows_and_fewer_and_the_pad_stays_0(tiny_config):
    few, many = (GPT(replace(tiny_config, vocab_multiple=multiple)) for multiple in (1, 512))
    vocab_size = tiny_config.vocab_size
    assert len(few.transformer.wte.weight) == vocab_size and len(many.transformer.wte.weight) == 512
    copy_weights(many, few.state_dict())
    assert not many.transformer.wte.weight[vocab_size:].any()
    again = GPT(few.config)
    copy_weights(again, many.state_dict())
    assert equal_bits(dict(again.state_dict()), dict(few.state_dict()))


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_that_a_run_replaces_meanwhile_is_not_missed(tmp_path, monkeypatch, late):
    """Before it is looked at, or after that and before it is opened."""
    torch.save({"step": 2}, tmp_path / "model_000002.pt")
    there = Path.exists

    def exists(path):
        found = there(path)
        if path.name == "model_000002.pt" and found:
            torch.save({"step": 4}, tmp_path / "model_000004.pt")
            path.unlink()
            return late
        return found

    monkeypatch.setattr(Path, "exists", exists)
    path, data = read_newest(tmp_path)
    assert (path.name, data) == ("model_000004.pt", {"step": 4})
