"""The model alone: size, initial values, what each output may depend on. Parity with transformers: test_weights.py."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB

from train_gpt2 import GPT, PRESETS, GPTConfig, KVCache, param_groups


def noisy(config, seed=0):
    """A model with noise on every parameter but the pad rows: fresh weights hide a lost bias or a swapped norm."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        model.transformer.wte.weight[config.vocab_size :] = 0
    return model


def variant(model, **changes):
    """The same weights in a model that computes another way."""
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
    return x[:, :-1], x[:, 1:].clone()


@pytest.mark.parametrize(
    "preset, count", [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)]
)
def test_the_four_sizes_have_the_published_parameter_counts(preset, count):
    with torch.device("meta"):
        model = GPT(PRESETS[preset][0])
    assert model.num_params() == count
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.wte.weight.shape[0] == 50304


def test_each_parameter_is_in_one_group_and_matrices_alone_decay():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    decay, plain = param_groups(model, 0.1)
    assert (len(decay["params"]), len(plain["params"])) == (50, 98)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decay["params"]) and all(p.dim() == 1 for p in plain["params"])
    ids = [id(p) for group in (decay, plain) for p in group["params"]]
    assert len(set(ids)) == len(ids) and set(ids) == {id(p) for p in model.parameters()}
    pad = (50304 - 50257) * 768
    assert sum(p.numel() for group in (decay, plain) for p in group["params"]) - pad == 124439808


def test_initial_values():
    config = GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=VOCAB)
    model = GPT(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        else:
            rows = p[:VOCAB] if "wte" in name else p
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert rows.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(rows.mean().item()) < 5 * std / math.sqrt(rows.numel()), name
    names = [name for name, _ in model.named_parameters() if name.endswith("c_proj.weight")]
    assert len(names) == 2 * 8


def test_the_first_loss_is_that_of_a_uniform_guess(tiny_config):
    x, y = tokens(8, 32)
    assert GPT(tiny_config)(x, y)[1].item() == pytest.approx(math.log(VOCAB), abs=0.3)


def test_one_batch_is_overfitted_in_200_steps(tiny_config):
    model = GPT(tiny_config)
    x, y = tokens(4, 16)
    optimizer = torch.optim.AdamW(param_groups(model, 0.0), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert (model(x)[0].argmax(-1) == y).all()  # and the outputs themselves say so


@pytest.mark.parametrize("document_mask", [False, True])
def test_attention_spelled_out_equals_the_fused_kernel(tiny_config, document_mask):
    config = dataclasses.replace(tiny_config, document_mask=document_mask)
    fused = noisy(config)
    math_ = variant(fused, attention="math")
    x, y = tokens()
    x[:, 7] = VOCAB - 1
    assert (fused(x)[0] - math_(x)[0]).abs().max() < 1e-5
    (loss_a, a), (loss_b, b) = gradients(fused, x, y), gradients(math_, x, y)
    assert abs(loss_a - loss_b) < 1e-5
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-5, name


def test_activation_checkpointing_changes_no_gradient(tiny_config):
    plain = noisy(tiny_config)
    x, y = tokens()
    (loss_a, a), (loss_b, b) = (gradients(m, x, y) for m in (plain, variant(plain, activation_checkpointing=True)))
    assert loss_a == loss_b
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_no_output_sees_a_later_token(tiny_config, attention):
    model = variant(noisy(tiny_config), attention=attention)
    x, _ = tokens(2, 20)
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 200
    before, after = model(x)[0], model(changed)[0]
    assert (before[:, :12] - after[:, :12]).abs().max() < 1e-6
    assert (before[:, 12:] - after[:, 12:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_the_document_mask_separates_documents(tiny_config, attention):
    model = variant(noisy(tiny_config), attention=attention, document_mask=True)
    x, _ = tokens(1, 20)
    x[:, 8] = VOCAB - 1  # the second document is positions 8 to 19
    changed = x.clone()
    changed[:, 2:8] = (changed[:, 2:8] + 1) % 200
    before, after = model(x)[0], model(changed)[0]
    assert (before[:, 8:] - after[:, 8:]).abs().max() < 1e-6
    assert (before[:, 2:8] - after[:, 2:8]).abs().amax(-1).min() > 1e-3
    # the same documents without the mask do see one another, and inside a document there is a past
    unmasked = variant(model, document_mask=False)
    assert (unmasked(x)[0] - unmasked(changed)[0])[:, 8:].abs().amax(-1).min() > 1e-3
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 200
    assert (before - model(changed)[0])[:, 9:].abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("method", ["plain", "chunked"])
def test_pad_rows_are_never_seen_and_never_move(tiny_config, method):
    model = GPT(dataclasses.replace(tiny_config, cross_entropy=method))
    pad = model.transformer.wte.weight[VOCAB:]
    assert model.config.padded_vocab_size == 384 and len(pad) == 384 - VOCAB and (pad == 0).all()
    x, y = tokens()
    assert model(x)[0].shape == (3, 20, VOCAB)
    # with weights of 0 everywhere, each of the VOCAB ids (not of the 384 rows) has the same chance
    flat = variant(model)
    torch.nn.init.zeros_(flat.transformer.wte.weight)
    assert flat(x, y)[1].item() == pytest.approx(math.log(VOCAB), abs=1e-5)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, y)[1].backward()
        assert (model.transformer.wte.weight.grad[VOCAB:] == 0).all()
        optimizer.step()
    assert (model.transformer.wte.weight[VOCAB:] == 0).all()
    assert (model.transformer.wte.weight[:VOCAB] != 0).any(1).all()
    sampled = torch.stack(list(model.generate(x[:, :4], 40, temperature=100.0)))  # all but uniform over the ids
    assert sampled.max() < VOCAB


def test_reductions_agree_and_targets_of_minus_one_are_left_out(tiny_config):
    model = noisy(tiny_config)
    x, y = tokens()
    y[0, :5], y[2, 11] = -1, -1
    each = model(x, y, reduction="none")[1]
    expected = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none").view_as(y)
    assert (each - expected).abs().max() < 1e-5 and (each[y == -1] == 0).all()
    assert model(x, y, reduction="sum")[1].item() == pytest.approx(expected.sum().item(), rel=1e-6)
    assert model(x, y)[1].item() == pytest.approx(expected.sum().item() / (3 * 20 - 6), rel=1e-6)


@pytest.mark.parametrize("method", ["plain", "chunked", "torch"])
def test_a_batch_without_targets_costs_nothing(tiny_config, method):
    if method == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    model = variant(noisy(tiny_config), cross_entropy=method)
    x, y = tokens()
    loss, grads = gradients(model, x, torch.full_like(y, -1))
    assert loss == 0
    assert all((g == 0).all() for g in grads.values())


def test_more_tokens_than_the_context_are_refused(tiny_config):
    model = GPT(tiny_config)
    assert model(torch.zeros(1, 32, dtype=torch.long))[0].shape == (1, 32, VOCAB)
    with pytest.raises(ValueError, match="33.*block_size=32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match="33.*block_size=32"):
        next(model.generate(torch.zeros(1, 33, dtype=torch.long), 1))


def test_bf16_residual_stream_stays_close_to_float32(tiny_config):
    model = noisy(tiny_config)
    x, y = tokens(4, 32)
    exact = model(x, y)[1].item()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x, y)[1].item()
        rounded32 = variant(model, bf16_residual=False)(x, y)[1].item()
    assert rounded == pytest.approx(exact, rel=0.02) and rounded32 == pytest.approx(exact, rel=0.02)
    assert rounded != exact


def test_the_document_mask_holds_with_a_cache(tiny_config):
    model = variant(noisy(tiny_config), document_mask=True)
    x, _ = tokens(2, 16)
    x[:, 5] = VOCAB - 1
    cache = KVCache(model.config, 2, x.device, torch.float32)
    with torch.no_grad():
        whole = model(x)[0]
        steps = [model(x[:, :8], cache=cache)[0][:, -1]] + [model(x[:, t : t + 1], cache=cache)[0][:, -1] for t in range(8, 16)]
    assert (torch.stack(steps, dim=1) - whole[:, 7:]).abs().max() < 1e-5
