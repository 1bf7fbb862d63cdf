"""Frequencies of rotary embedding (speedrun.py), also for contexts longer than in training
(--rope_scaling; results: docs/LOG.md#longer).

Pair i of channels turns by frequency[i] radians per token. Beyond the trained length, slow pairs reach
angles that never occurred in training. Scaling slows them down.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lab.cli import require

YARN_TURNS = 1, 32  # alpha and beta that Peng et al. 2023 recommend for LLaMA models


def check_rope_scaling(config: Any) -> None:
    """Raise UserError for fields of speedrun.GPTConfig with which rotary embedding cannot work."""
    head_size = config.n_embd // config.n_head
    require(
        not config.rotary or (head_size % 2 == 0 and head_size >= 4),
        f"n_embd={config.n_embd} / n_head={config.n_head} gives heads of {head_size} channels, but "
        "rotary needs an even number of at least 4; change n_head, or pass --no_rotary",
    )
    scaling = config.rope_scaling
    require(
        scaling == "none" or config.rotary,
        f"rope_scaling={scaling} needs rotary; leave out --no_rotary or --rope_scaling",
    )
    require(
        scaling == "none" or 0 < config.trained_length <= config.block_size,
        f"trained_length={config.trained_length} must be from 1 to block_size={config.block_size}; "
        "pass the block_size with which the model was trained",
    )


def rope_frequencies(config: Any, device: torch.device | None = None) -> tuple[Tensor, float]:
    """(frequencies (D // 4,) in radians per token, a factor on queries and keys). Attention's
    scores grow with the factor's square. Without scaling the frequencies are 1 to 1/1024: the base is
    1024, as in modded-nanogpt, instead of 10,000 (Su et al. 2021), because contexts are short."""
    D, factor = config.n_embd // config.n_head, 1.0
    exponent = torch.linspace(0, 1, D // 4, device=device)
    frequency = 1024**-exponent
    if config.rope_scaling == "none":
        return frequency, factor
    scale = config.block_size / config.trained_length
    if config.rope_scaling == "linear":
        # position interpolation (Chen et al. 2023): all angles occurred in training, but neighbors are
        # closer together
        frequency = frequency / scale
    elif config.rope_scaling == "ntk":
        # NTK-aware (Peng et al. 2023, 3.1): the highest frequency stays, the lowest is divided by scale
        frequency = frequency * scale**-exponent
    else:
        # YaRN (Peng et al. 2023, 3.2 to 3.4): frequencies with at least 32 turns within the trained length
        # stay, those with less than one turn are divided by scale, those between by less; the scores are
        # sharpened
        low, high = YARN_TURNS
        turns = config.trained_length * frequency / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scale)
        factor = 0.1 * math.log(scale) + 1
    return frequency, factor
