"""The model: size, initial values, and which inputs each output may depend on."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, add_noise

from train_gpt2 import GPT, PRESETS, GPTConfig, param_groups


def noisy(config, seed=0):
    torch.manual_seed(seed)
    return add_noise(GPT(config))


def variant(model, **changes):
    """A model with the same weights and other config fields."""
    other = GPT(dataclasses.replace(model.config, **changes))
    other.load_state_dict(model.state_dict())
    return other


def gradients(model, x, y, **kwargs):
    model.zero_grad()
    loss = model(x, y, **kwargs)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def tokens(B=3, T=20, seed=1):
    x = torch.randint(VOCAB - 1, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1].clone(), x[:, 1:].clone()


@pytest.mark.parametrize(
    "preset, count",
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)  # fmt: skip
def test_the_four_sizes_have_the_published_parameter_counts(preset, count):
    with torch.device("meta"):
        model = GPT(PRESETS[preset][0])
    assert model.num_params() == count
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(model.lm_head.weight) == 50304


def test_each_parameter_is_in_one_group_and_only_matrices_decay():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    decay, plain = param_groups(model, 0.1)
    assert (len(decay["params"]), len(plain["params"])) == (50, 98)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decay["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    params = decay["params"] + plain["params"]
    assert {id(p) for p in params} == {id(p) for p in model.parameters()}
    assert sum(p.numel() for p in params) - (50304 - 50257) * 768 == 124439808
    assert len(model.block_matrices()) == 48


def test_initial_values():
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=VOCAB))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        else:
            rows = p[:VOCAB] if "wte" in name else p
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert rows.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(rows.mean().item()) < 5 * std / math.sqrt(rows.numel()), name


def test_initial_loss_is_uniform_and_200_steps_overfit_one_batch(tiny_config):
    model = GPT(tiny_config)
    x, y = tokens(4, 16)
    assert model(x, y)[1].item() == pytest.approx(math.log(VOCAB), abs=0.3)
    optimizer = torch.optim.AdamW(param_groups(model, 0.0), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 and (model(x)[0].argmax(-1) == y).all()


@pytest.mark.parametrize("mask", [False, True])
def test_manual_attention_equals_the_fused_kernel(tiny_config, mask):
    fused = noisy(tiny_config)
    math_ = variant(fused, attention="math", document_mask=mask)
    fused = variant(fused, document_mask=mask)
    x, y = tokens()
    x[:, 7] = VOCAB - 1
    assert (fused(x)[0] - math_(x)[0]).abs().max() < 1e-5
    (loss_a, a), (loss_b, b) = gradients(fused, x, y), gradients(math_, x, y)
    assert abs(loss_a - loss_b) < 1e-5
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-5


def test_activation_checkpointing_changes_no_gradient(tiny_config):
    plain, other = noisy(tiny_config), variant(noisy(tiny_config), activation_checkpointing=True)
    (loss_a, a), (loss_b, b) = (gradients(model, *tokens()) for model in (plain, other))
    assert loss_a == loss_b and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("mask", [False, True])
def test_no_output_sees_a_later_token_or_another_document(tiny_config, attention, mask):
    model = variant(noisy(tiny_config), attention=attention, document_mask=mask)
    x, _ = tokens(2, 20)
    x[:, 8] = VOCAB - 1  # the second document is positions 8 to 19
    before = model(x)[0]

    def moved(positions):
        """How much the outputs (T,) change if the tokens at `positions` change."""
        changed = x.clone()
        changed[:, positions] = (changed[:, positions] + 1) % 200
        return (before - model(changed)[0]).abs().amax(dim=(0, 2))

    late, early, inside = moved(slice(12, 20)), moved(slice(2, 8)), moved([9])
    assert late[:12].max() < 1e-6 and late[12:].min() > 1e-3
    assert early[:2].max() < 1e-6 and early[2:8].min() > 1e-3 and inside[9:].min() > 1e-3
    assert early[8:].max() < 1e-6 if mask else early[8:].min() > 1e-3


def test_mask_works_in_copied_and_compiled_models(tiny_config):
    model = noisy(dataclasses.replace(tiny_config, document_mask=True)).eval()
    x, _ = tokens(2, 20)
    x[:, 9] = VOCAB - 1
    wanted, causal = model(x)[0], torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    assert (model(x, mask=causal)[0] - wanted).abs().max() > 1e-3, "a mask that is passed is used"
    twin = copy.deepcopy(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for p in model.parameters():
        p.data.zero_()  # copies have weights of their own
    for each in (twin, compiled):
        torch.testing.assert_close(each(x)[0], wanted)
    assert isinstance(twin, GPT) and list(twin.state_dict()) == list(model.state_dict())


def test_padding_rows_are_never_used_and_never_change(tiny_config):
    model = GPT(tiny_config)
    weight = model.transformer.wte.weight
    assert model.config.padded_vocab_size == len(weight) == 384 and (weight[VOCAB:] == 0).all()
    x, y = tokens()
    assert model(x)[0].shape == (3, 20, VOCAB)
    # with weights of 0, the VOCAB ids (without padding rows) are equally probable
    flat = copy.deepcopy(model)
    torch.nn.init.zeros_(flat.transformer.wte.weight)
    assert flat(x, y)[1].item() == pytest.approx(math.log(VOCAB), abs=1e-5)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()
    assert (weight[VOCAB:] == 0).all() and (weight[:VOCAB] != 0).any(1).all()
    sampled = torch.stack(list(model.generate(x[:, :4], 40, temperature=100.0)))  # all but uniform
    assert sampled.max() < VOCAB


def test_reductions_agree_and_targets_of_minus_one_are_ignored(tiny_config):
    model = noisy(tiny_config)
    x, y = tokens()
    y[0, :5], y[2, 11] = -1, -1
    each = model(x, y, reduction="none")[1]
    logits = model(x)[0].flatten(0, 1)
    expected = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="none").view_as(y)
    assert (each - expected).abs().max() < 1e-5 and (each[y == -1] == 0).all()
    assert model(x, y, reduction="sum")[1].item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert model(x, y)[1].item() == pytest.approx(expected.sum().item() / (3 * 20 - 6), rel=1e-6)
    loss, grads = gradients(model, x, torch.full_like(y, -1))
    assert loss == 0 and not any(g.any() for g in grads.values()), "no gradient"


def test_bf16_residual_stream_stays_close_to_float32(tiny_config):
    model = noisy(tiny_config)
    x, y = tokens(4, 32)
    exact = model(x, y)[1].item()
    with torch.autocast("cpu", torch.bfloat16):
        stream = model.hidden(x).dtype, variant(model, bf16_residual=False).hidden(x).dtype
        rounded = model(x, y)[1].item()
        rounded32 = variant(model, bf16_residual=False)(x, y)[1].item()
    assert stream[0] == torch.bfloat16 and rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02) and rounded32 == pytest.approx(exact, rel=0.02)
