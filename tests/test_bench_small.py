"""bench/: scaling.py, little_text.py and longer.py, whose records the notebook's last chapters show,
data_multiple.py, ensemble.py and spread.py."""

import json
import math
import random
import shutil

import data_multiple
import ensemble
import little_text
import longer
import numpy as np
import pytest
import scaling
import spread
import torch
import torch.nn.functional as F
from conftest import fork_program, succeed
from records import read_records

import speedrun
from lab.cli import UserError
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.precision import Precision


def test_scaling_runs_have_the_flops_and_tokens_they_claim():
    runs = scaling.planned(scaling.Config())
    budget, ladder = ([r for r in runs if r["group"] == g] for g in ("budget", "ladder"))
    assert [r["n_embd"] for r in budget] == 2 * [24, 40, 64, 96, 144]
    for r in budget:  # 512 tokens per step
        assert r["steps"] * 512 * r["flops_per_token"] == pytest.approx(r["budget"], rel=0.02)
    for r in ladder:
        assert r["weights"] == 2 * 12 * r["n_embd"] ** 2
        assert r["steps"] * 512 == pytest.approx(8 * r["weights"], rel=0.01)
        head = 257 * r["n_embd"]
        assert r["flops_per_token"] == 6 * (r["weights"] + head) + 12 * 2 * r["n_embd"] * 64
    only = scaling.planned(scaling.Config(groups=("ladder",), sizes=(24,)))
    assert [r["n_embd"] for r in only] == [24]
    with pytest.raises(UserError, match="groups=x is not one of budget, ladder"):
        scaling.main(["--groups", "x"])


def tiny_models(n, seed=0):
    torch.manual_seed(seed)
    models = [speedrun.GPT(speedrun.GPTConfig(**little_text.SHAPE)) for _ in range(n)]
    for p in (p for model in models for p in model.parameters()):
        p.data += 0.1 * torch.randn_like(p)
    return models


def test_ensemble_averages_probabilities_and_students_learn_them():
    a, b = models = tiny_models(2)
    x = torch.randint(257, (2, 9))
    mean = (a(x)[0].softmax(-1) + b(x)[0].softmax(-1)) / 2  # (B, T, V)
    assert torch.allclose(little_text.mean_log_probs(models, x).exp(), mean, atol=1e-6)
    (student,) = tiny_models(1, seed=1)
    _, loss = little_text.soft_targets(models)(student)(x, x, reduction="sum")
    expected = -(mean * student(x)[0].log_softmax(-1)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    between = little_text.mean_weights(models).state_dict()
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values()):
        assert torch.allclose(between[name], (p + q) / 2)


def test_little_text_trains_with_dropout_and_measures_both_texts(
    tmp_path, monkeypatch, builtin_text
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(builtin_text, "data/builtin")
    little_text.write_text()
    text = TokenShards("data/little", "train", 257)
    assert len(text) == 16_384
    builtin = TokenShards("data/builtin", "train", 257).read(0, 16_384)
    assert (text.read(0, 16_384) == builtin).all()
    model, average, seconds = little_text.train(1, passes=1, dropout=0.5)
    assert any(isinstance(m, torch.nn.Dropout) for m in model.modules()) and seconds > 0
    x = torch.randint(257, (1, 9))
    assert torch.equal(model(x)[0], model(x)[0]), "dropout is off"
    assert not torch.equal(model(x)[0], average(x)[0])
    losses = {split: little_text.loss([model], split) for split in ("val", "train")}
    assert all(2 < loss < math.log(257) for loss in losses.values()) and len(losses) == 2


def test_planted_fact_is_where_it_should_be():
    tokenizer, rng = get_tokenizer("bytes"), random.Random(0)
    words, last = longer.choices(tokenizer)
    assert words == longer.LETTERS and last == [ord(c) for c in words]

    class Text:  # a stream of full stops
        def __len__(self):
            return 10_000

        def read(self, start, length):
            return torch.full((length,), ord("."))

    for distance in (0, 100, 400):
        ids, right = longer.planted(Text(), tokenizer, 512, distance, rng)
        said = tokenizer.decode(ids)
        question = said.index(" The", said.index(" The") + 1)  # the second one
        assert len(ids) == 512 and said.endswith(" is ")
        assert question - said.index(" The") == max(distance, len(said[question:]) + 2)
        assert (
            said[question:] + words[right] + "." == said[said.index(" The") :][: 512 - question + 2]
        )
    ids, _ = longer.planted(Text(), tokenizer, 512, None, rng)
    assert tokenizer.decode(ids).count(" The") == 1


def test_longer_extends_a_run_and_measures_it(tmp_path, monkeypatch, capsys, builtin_text):
    flags = """--preset laptop --device cpu --n_layer 1 --n_head 2 --n_embd 32 --block_size 32 --seq_len
        32 --batch_size 4 --total_batch_size 128 --val_every 0 --sample_every 0 --checkpoint_every 2
        --max_steps 2 --run_name short --data"""
    succeed("speedrun.py", *flags.split(), builtin_text, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(longer, "run_program", fork_program)
    flags = """--model log/short --device cpu --windows 8 --facts 4 --updates 0 1 --tokens_per_update 512
        --scaling none yarn""".split()
    flags += ["--data", str(builtin_text)]
    longer.main(flags)
    found = [json.loads(line) for line in (tmp_path / "longer.jsonl").read_text().splitlines()]
    how = [(r["scaling"], r["updates"], r["trained_length"], r["length"]) for r in found]
    assert how == [(s, u, 32, 128) for u in (0, 1) for s in ("none", "yarn")]
    none, yarn, after, _ = (r["losses"] for r in found)
    assert none[:2] != yarn[:2] and none != after and all(len(r["losses"]) == 8 for r in found)
    assert all(len(r["retrieval"]) == 7 and "none" in r["retrieval"] for r in found)
    assert "facts found by distance" in capsys.readouterr().out
    with pytest.raises(UserError, match="length=20 must be a multiple of 8"):
        longer.main([*flags, "--length", "20"])


def test_ensemble_loss_is_that_of_the_mean_probability(tmp_path):
    tokens = np.arange(900, dtype=np.uint16) % 257
    np.save(tmp_path / "x_val_000000.npy", tokens)
    shards, models = TokenShards(tmp_path, "val", 257), tiny_models(3)
    exact = Precision("fp32", torch.device("cpu"))
    alone, together = ensemble.losses(models, shards, 640, 3, exact)  # the last batch is smaller
    x, y = (torch.as_tensor(t.astype(np.int64)).view(10, 64) for t in (tokens[:640], tokens[1:641]))
    for n in (1, 2, 3):
        logs = little_text.mean_log_probs(models[:n], x).flatten(0, 1)
        assert together[n - 1] == pytest.approx(F.nll_loss(logs, y.flatten()).item(), rel=1e-5)
        assert alone[n - 1] == pytest.approx(models[n - 1](x, y)[1].item(), rel=1e-5)


def test_tokens_needed_is_interpolated_in_the_logarithm_and_never_extrapolated():
    best = {10: 4.0, 1000: 3.0}
    assert data_multiple.tokens_needed(best, 3.5) == pytest.approx(100)
    assert math.isnan(data_multiple.tokens_needed(best, 2.9))
    assert math.isnan(data_multiple.tokens_needed(best, 4.1))
    rows = [dict(tokens=t, val_loss=loss) for t, loss in ((1000, 3.0), (10, 4.0), (10, 4.2))]
    assert list(data_multiple.best_losses(rows).items()) == list(best.items())


def test_a_part_of_the_text_is_evenly_spread_over_it(tmp_path, monkeypatch):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "x_train_000001.npy", tokens)
    np.save(tmp_path / "x_val_000000.npy", tokens[:50])
    monkeypatch.setattr(data_multiple, "BLOCK", 100)
    for wanted, gap in ((250, 375), (999, 0), (1000, 0), (60, None)):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        data_multiple.link_part(tmp_path, wanted, folder)
        part = np.load(folder / "text_train_000001.npy").astype(int)
        assert len(np.unique(part)) == len(part) == wanted
        if gap is not None:  # the first and the last token of the text, and blocks between them
            assert (part[0], part[-1]) == (0, 999) and sorted(np.diff(part))[-2] == gap + 1
    with pytest.raises(UserError, match="tokens=1001 must be from 1 to the 1000 training tokens"):
        data_multiple.link_part(tmp_path, 1001, tmp_path)


def test_data_multiple_and_spread_record_the_runs_that_they_make(tmp_path, monkeypatch):
    for split in ("train", "val"):
        np.save(tmp_path / f"x_{split}_000000.npy", np.arange(5000, dtype=np.uint16) % 257)
    monkeypatch.chdir(tmp_path)
    for module in (data_multiple, spread):
        monkeypatch.setattr(module, "run_program", fork_program)
    also = """--also=--device cpu --n_layer 1 --n_head 2 --n_embd 32 --block_size 64 --seq_len 64
        --vocab_size 257 --batch_size 1 --val_tokens 256 --no_compile"""
    flags = ["--data", ".", "--total_batch_size", "128", "--tokens", "600", "--passes", "1", "2"]
    for _ in range(2):  # finished runs are not repeated
        data_multiple.main([*flags, "--out", "many.jsonl", also + " --fp8 off"])
    one, two = read_records("many.jsonl")
    # 600 and 1,200 tokens in steps of 112 on average
    assert (one["steps"], two["steps"]) == (5, 11)
    assert [r["curve"][-1] for r in (one, two)] == [[5, one["val_loss"]], [11, two["val_loss"]]]
    flags = ["--data", ".", "--same", "2", "--seeds", "2", "--steps", "2", "--out", "spread.jsonl"]
    spread.main([*flags, also + " --total_batch_size 128"])
    losses = [(r["runs"], r["seed"], r["val_loss"]) for r in read_records("spread.jsonl")]
    assert losses[0] == losses[1] and losses[0][2] != losses[2][2] != losses[3][2]
    assert [seed for _, seed, _ in losses] == [1, 1, 2, 3]
