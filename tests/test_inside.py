"""Looking into a model: what is noted is what the model computes, and looking changes nothing."""

import pytest
import torch
from conftest import add_noise

from lab.cli import UserError
from lab.data.document_mask import hide_other_documents
from lab.tools.inside import laptop_run, lens, watch, without_head
from train_gpt2 import GPT


@pytest.fixture
def model(tiny_config):
    return add_noise(GPT(tiny_config))


@pytest.fixture
def idx():
    return torch.randint(256, (3, 20))


@pytest.mark.parametrize("document_mask", [False, True])
@torch.no_grad()
def test_the_weights_that_are_noted_give_the_output_of_each_attention(model, idx, document_mask):
    model = hide_other_documents(model) if document_mask else model
    idx[:, 7] = 256  # a document begins here
    stream, weights = watch(model, idx)
    B, T, C = stream[0].shape
    assert len(stream) == 3 and len(weights) == 2
    for block, x, after, w in zip(model.transformer.h, stream, stream[1:], weights):
        assert w.shape == (B, 2, T, T) and torch.allclose(w.sum(-1), torch.ones(B, 2, T))
        assert not w.triu(1).any() and bool(w[:, :, 7:, :7].any()) != document_mask
        v = block.attn.c_attn(block.ln_1(x))[..., 2 * C :].view(B, T, 2, C // 2).transpose(1, 2)
        x = x + block.attn.c_proj((w @ v).transpose(1, 2).reshape(B, T, C))
        assert torch.allclose(x + block.mlp(block.ln_2(x)), after, atol=1e-5)


@torch.no_grad()
def test_the_lens_reads_the_model_itself_after_the_last_block(model, idx):
    stream, _ = watch(model, idx)
    first = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(20))
    assert torch.equal(stream[0], first)
    assert torch.equal(lens(model, stream[-1]), model(idx)[0])
    assert (lens(model, stream[1]) - model(idx)[0]).abs().max() > 0.1


@torch.no_grad()
def test_a_head_is_switched_off_by_the_rows_that_hold_it(model, idx):
    with without_head(model, 1, 0):
        got = model(idx)[0]
    assert (got - model(idx)[0]).abs().max() > 0.01
    model.transformer.h[1].attn.c_proj.weight[:, :16] = 0  # head 0 of two, in 32 channels
    assert torch.allclose(got, model(idx)[0], atol=1e-6)


def test_a_run_of_the_notebook_that_was_interrupted_is_made_again(tmp_path):
    begun = tmp_path / "notebook_1"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    (begun / "log.jsonl").write_text('{"kind": "first_step"}\n')
    path = laptop_run(tmp_path, steps=1)
    changed = path.stat().st_mtime_ns
    assert laptop_run(tmp_path, steps=1).stat().st_mtime_ns == changed
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file.* cannot be written"):
        laptop_run(tmp_path / "file", steps=1)
