"""Looking into a model: what is noted is what the model computes, and looking changes nothing."""

import json
import re

import pytest
import torch
from conftest import add_noise

from lab.data.document_mask import hide_other_documents
from lab.tools.inside import attention_page, lens, mass, watch, without_head
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
def test_looking_leaves_nothing_behind(model, idx):
    before = model(idx)[0]
    watch(model, idx)
    with pytest.raises(IndexError):
        watch(model, torch.zeros(1, 40, dtype=torch.long))
    with pytest.raises(KeyError), without_head(model, 0, 0):
        raise KeyError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(idx)[0], before)


def test_mass_by_hand():
    weights = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]]).expand(2, 1, 3, 3)
    previous = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]]).bool()
    # of 0.25 and 0.25; the first row has nobody before it
    assert mass(weights, previous).tolist() == [0.25]
    first = torch.zeros(2, 3, 3, dtype=torch.bool)
    first[1, 2, 0] = True  # chosen in one sequence alone
    assert mass(weights, first).tolist() == [0.5]
    two = torch.cat([weights, weights.flip(2)], dim=1)
    assert mass(two, previous).tolist() == [0.25, 0.125]


@torch.no_grad()
def test_a_head_is_switched_off_by_the_rows_that_hold_it(model, idx):
    with without_head(model, 1, 0):
        got = model(idx)[0]
    assert (got - model(idx)[0]).abs().max() > 0.01
    model.transformer.h[1].attn.c_proj.weight[:, :16] = 0  # head 0 of two, in 32 channels
    assert torch.allclose(got, model(idx)[0], atol=1e-6)


def test_the_page_shows_any_text_and_the_right_numbers(model):
    page = attention_page(["a", "<b>", "\n", "</script>"], [torch.eye(4).expand(1, 2, 4, 4)])
    assert page.count("<script>") == page.count("</script>") == 1 and "<b>" not in page
    assert "&lt;b&gt;" in page and "↵\n" in page and "head 0.0: &#39;a&#39; 0 back, 1.00;" in page
    _, weights = watch(model, torch.tensor([list(b"abcdefgh")]))
    page = attention_page(list("abcdefgh"), weights, title="<script>", head="1.1")
    assert 'choice.value = "1.1"' in page and page.count("<script>") == 1
    percent = json.loads(re.search(r"percent = ({.*?}),", page)[1])
    expected = [row[: t + 1].mul(100).round().tolist() for t, row in enumerate(weights[1][0, 0])]
    assert {*percent} == {"0.0", "0.1", "1.0", "1.1"} and percent["1.0"] == expected
