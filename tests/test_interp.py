"""lab/notebook/interp.py: captured activations are the model's own, and heads can be ablated."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import add_noise, driver, run_python

from lab.cli import UserError
from lab.notebook import interp
from lab.notebook.interp import ablate_head, capture_activations, laptop_run, logit_lens
from train_gpt2 import GPT


@pytest.fixture
def model(tiny_config):
    return add_noise(GPT(tiny_config))


@pytest.fixture
def idx():
    return torch.randint(256, (3, 20))


@pytest.mark.parametrize("document_mask", [False, True])
@torch.no_grad()
def test_captured_weights_reproduce_each_attention_output(model, idx, document_mask):
    model.config.document_mask = document_mask
    idx[:, 7] = 256  # end-of-text: a document starts here
    stream, weights = capture_activations(model, idx)
    B, T, C = stream[0].shape
    assert len(stream) == 3 and len(weights) == 2
    for block, x, after, w in zip(model.transformer.h, stream, stream[1:], weights):
        assert w.shape == (B, 2, T, T) and torch.allclose(w.sum(-1), torch.ones(B, 2, T))
        assert not w.triu(1).any() and bool(w[:, :, 7:, :7].any()) != document_mask
        v = block.attn.c_attn(block.ln_1(x))[..., 2 * C :].view(B, T, 2, C // 2).transpose(1, 2)
        x = x + block.attn.c_proj((w @ v).transpose(1, 2).reshape(B, T, C))
        assert torch.allclose(x + block.mlp(block.ln_2(x)), after, atol=1e-5)


@torch.no_grad()
def test_logit_lens_after_the_last_block_gives_the_models_logits(model, idx):
    stream, _ = capture_activations(model, idx)
    first = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(20))
    assert torch.equal(stream[0], first)
    assert torch.equal(logit_lens(model, stream[-1]), model(idx)[0])
    assert (logit_lens(model, stream[1]) - model(idx)[0]).abs().max() > 0.1


@torch.no_grad()
def test_ablating_a_head_equals_zeroing_its_columns_of_c_proj(model, idx):
    with ablate_head(model, 1, 0):
        got = model(idx)[0]
    assert (got - model(idx)[0]).abs().max() > 0.01
    model.transformer.h[1].attn.c_proj.weight[:, :16] = 0  # head 0 of two, in 32 channels
    assert torch.allclose(got, model(idx)[0], atol=1e-6)


def test_laptop_run_replaces_an_interrupted_run(tmp_path, monkeypatch, builtin_text):
    """Here with the text in the temporary folder, and with train_gpt2.py in a fork."""
    driver(tmp_path, "")
    shutil.copytree(builtin_text, tmp_path / "data/builtin")
    run = lambda words, cwd, **_: run_python(*words[1:], cwd=cwd)  # noqa: E731
    monkeypatch.setattr(interp, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(interp, "ROOT", tmp_path)
    run_dir = tmp_path / "notebook_1"
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    (run_dir / "log.jsonl").write_text('{"kind": "first_step"}\n')
    path = laptop_run(tmp_path, steps=1)
    mtime = path.stat().st_mtime_ns
    assert laptop_run(tmp_path, steps=1).stat().st_mtime_ns == mtime
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file.* cannot be written"):
        laptop_run(tmp_path / "file", steps=1)
