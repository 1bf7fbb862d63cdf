"""speedrun.py --rope_scaling: the frequencies of transformers and of the papers; refused settings."""

import math

import pytest
import torch
from test_speedrun import LONGER, TINY, scores

import speedrun
from lab.cli import UserError
from speedrun import GPTConfig


def yarn_by_the_paper(frequencies, length, scale):
    """Peng et al. 2023: r (eq. 17) is the trained length in wavelengths; gamma is eq. 18, with alpha = 1
    and beta = 32; the new frequency is eq. 19."""
    found = []
    for theta in frequencies:
        r = length / (2 * math.pi / theta)
        gamma = 0 if r < 1 else 1 if r > 32 else (r - 1) / (32 - 1)
        found.append((1 - gamma) * theta / scale + gamma * theta)
    return found


@pytest.mark.parametrize("scale", [1, 1.5, 4, 32])
def test_scaled_rope_frequencies_are_those_of_transformers_and_of_the_papers(scale):
    """Our heads of 128 channels have 32 frequencies, like transformers' heads of 64; the base is chosen so
    that the slowest ones agree. YaRN keeps high frequencies, divides low ones by scale, and interpolates
    between. transformers interpolates differently, so only the two ends, and the factor on queries and
    keys, are compared with it."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = dict(
        n_layer=1, n_head=1, n_embd=128, block_size=round(1024 * scale), trained_length=1024
    )
    base = 1024 ** (32 / 31)
    plain = [base ** (-2 * i / 64) for i in range(32)]
    assert speedrun.rope_frequencies(GPTConfig(**shape))[0].tolist() == pytest.approx(plain)
    for ours, theirs in dict(linear="linear", ntk="dynamic", yarn="yarn").items():
        more = dict(rope_type=theirs, rope_theta=base, factor=1.0 if ours == "ntk" else scale)
        more |= dict(original_max_position_embeddings=1024) if ours == "yarn" else {}
        other = LlamaConfig(
            hidden_size=64, num_attention_heads=1, max_position_embeddings=1024, rope_parameters=more
        )  # fmt: skip
        expected, factor = ROPE_INIT_FUNCTIONS[theirs](other, "cpu", round(1024 * scale))
        config = GPTConfig(**shape, rope_scaling=ours)
        found, our_factor = speedrun.rope_frequencies(config)
        assert our_factor == pytest.approx(factor)
        if ours != "yarn":
            assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
            continue
        paper = yarn_by_the_paper(plain, 1024, scale)
        assert found.tolist() == pytest.approx(paper, rel=1e-5)
        assert found[[0, -1]].tolist() == pytest.approx(expected[[0, -1]].tolist(), rel=1e-5)
        assert our_factor == pytest.approx(1 if scale == 1 else 0.1 * math.log(scale) + 1)


def test_yarn_multiplies_attention_scores_by_the_square_of_its_factor():
    """Of channels that rotate and of those that don't."""
    q, k = torch.randn(2, 1, 9, 2, 16)  # (B, T, H, D)
    found = {}
    for scaling in ("none", "yarn"):
        config = GPTConfig(**TINY | LONGER | dict(rope_scaling=scaling))
        turn = speedrun.rotation(torch.zeros(9), config)  # position 0: no rotation, only the factor
        found[scaling] = scores(speedrun.rotate(q, turn), speedrun.rotate(k, turn))
    temperature = 1 / (0.1 * math.log(32 / 8) + 1) ** 2  # eq. 22: sqrt(1 / t) = 0.1 ln(s) + 1
    assert torch.allclose(found["yarn"], found["none"] / temperature, atol=1e-5)
    turned = speedrun.rotate(q, speedrun.rotation(torch.arange(9) + 20, config))
    assert torch.allclose(turned.norm(dim=-1) * temperature**0.5, q.norm(dim=-1), atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(trained_length=0), "trained_length=0 must be from 1 to block_size=32"),
        (dict(trained_length=33), "trained_length=33 must be from 1 to block_size=32"),
        (dict(trained_length=8, rotary=False), "rope_scaling=ntk needs rotary"),
    ],
)
def test_rope_scaling_that_cannot_work_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**TINY | dict(rope_scaling="ntk") | changes).validate()
