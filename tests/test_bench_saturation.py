"""bench/saturation.py: counts of values beyond the range of the 8-bit MLPs."""

import json
import math

import pytest
import saturation
import torch
from conftest import ROOT, run_python
from records import random_shards

from lab.precision import Precision
from speedrun import MLP
from train_gpt2 import GPT, GPTConfig


def model_with_known_activations():
    """Two blocks whose LayerNorm and GELU outputs do not depend on the text."""
    model = GPT(GPTConfig(2, 2, 16, 8, vocab_size=257))
    with torch.no_grad():
        for block, input_3, before_5 in zip(model.blocks, (-113.0, 112.0), (500.0, 0.0)):
            block.ln_2.weight.zero_()
            block.ln_2.bias.zero_()
            block.ln_2.bias[3] = input_3
            block.mlp.c_fc.weight.zero_()
            block.mlp.c_fc.bias[:3] = torch.tensor([112.0, 112.5, -300.0])
            block.mlp.c_fc.bias[5] = before_5
        model.blocks[1].mlp.c_proj.weight[0, :2] = torch.tensor([-14.0, 15.0])
    return model


def test_counts_are_those_of_known_activations():
    model, x = model_with_known_activations(), torch.randint(257, (5, 8))
    layers = saturation.count_model(model, x, Precision("fp32", torch.device("cpu")), batch_size=2)
    N = x.numel()
    # -113 is beyond -112, and 112 is not; GELU(112) = 112, GELU(-300) = 0
    assert layers[0]["layernorm"] == dict(values=16 * N, saturated=N, largest=113.0)
    assert layers[1]["layernorm"] == dict(values=16 * N, saturated=0, largest=112.0)
    assert layers[0]["gelu"] == dict(values=64 * N, saturated=2 * N, largest=500.0)
    assert layers[1]["gelu"] == dict(values=64 * N, saturated=N, largest=112.5)
    assert layers[0]["weight"]["saturated"] == 0 and layers[0]["weight"]["largest"] < 1
    assert layers[1]["weight"] == dict(values=2 * 16 * 64, saturated=1, largest=15.0)


def test_the_largest_value_may_be_in_any_batch():
    model, layer = model_with_known_activations(), {}
    for size in (1.0, 3.0, 2.0):
        saturation.add_counts(layer, model.blocks[0].mlp, (torch.full((2, 16), size),))
    assert layer["layernorm"] == dict(values=3 * 2 * 16, saturated=0, largest=3.0)


def test_squared_relu_saturates_beyond_7168():
    mlp = MLP(GPTConfig(1, 1, 16, 8, vocab_size=257))
    with torch.no_grad():
        mlp.c_fc.weight.zero_()
        mlp.c_fc.weight[:4, 0] = torch.tensor(
            [84.0, 85.0, -90.0, 86.0]
        )  # squares: 7056, 7225, 7396
    counts = saturation.count(mlp, torch.eye(16)[None])  # only the first position has an input of 1
    assert counts["relu2"] == dict(values=16 * 64, saturated=2, largest=7396.0)
    assert counts["layernorm"]["largest"] == 1 and counts["weight"]["saturated"] == 4


def test_program_counts_before_and_after_training(tmp_path):
    random_shards(tmp_path / "data", 257, 20_000, 2_000)
    flags = """--preset laptop --data data --device cpu --tokens 512 --total_batch_size 512 --at 0 2
        --out""".split()
    done = run_python(ROOT / "bench" / "saturation.py", *flags, "out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["step"], last["step"], first["train_loss"]) == (0, 2, None)
    assert last["train_loss"] == pytest.approx(math.log(257), abs=0.5)
    assert [layer["gelu"]["values"] for layer in first["layers"]] == 2 * [512 * 512]
    assert first["layers"][0]["weight"]["largest"] != last["layers"][0]["weight"]["largest"]
    # LayerNorm's output is at most (C - 1)^0.5 times the gain
    assert all(1 < layer["layernorm"]["largest"] < 127**0.5 for layer in first["layers"])
    assert done.stdout.count("saturated of") == 3 and "0 (" in done.stdout
    for wrong, message in (
        (
            ["x.jsonl", "--tokens", "4096"],
            "tokens=4096 must be from seq_len=128 to 1999, all of data",
        ),
        (["x.jsonl", "--at", "-1"], "must be one or more steps"),
        ([str(saturation.RUNS / "saturation.jsonl")], "on a CPU pass --out try.jsonl"),
    ):
        done = run_python(ROOT / "bench" / "saturation.py", *flags, *wrong, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, done.stderr
