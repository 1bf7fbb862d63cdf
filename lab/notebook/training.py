"""Training inside play.ipynb: a Trainer from any model and loader, two runs at a time, small settings."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from lab.distributed import World
from lab.precision import Precision


def make_trainer(model: Any, loader: Any, cfg: Any) -> Any:
    """A train_gpt2.Trainer for a model and a data loader, in float32 on the CPU.

    loader: a TokenLoader, or anything with grad_accum_steps and next_batch() -> (x, y, num_targets).
    """
    from train_gpt2 import Trainer, make_optimizer

    world = World("cpu")
    precision = Precision("fp32", world.device)
    return Trainer(model, model, make_optimizer(model, cfg, world), loader, precision, world, cfg)


def run_in_parallel(f: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """[f(item) for item in items], two at a time, each on one core.

    This is faster than one item after another, each on both cores. f must not use torch's global generator.
    """

    def on_one_core(item: Any) -> Any:
        torch.set_num_threads(1)  # of this Python thread
        return f(item)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(on_one_core, items))


def small_speedrun(**changes: Any) -> tuple[Any, Any]:
    """(GPTConfig, TrainConfig) of speedrun.py's preset laptop, smaller, with fields of either changed.

    Two blocks as in the preset, but no embedding of pairs, sequences of 64 tokens and 512 tokens per step.
    """
    import speedrun

    model_config, cfg = speedrun.PRESETS["laptop"]
    small = dict(block_size=64, bigram_rows=0, seq_len=64, batch_size=8, total_batch_size=512)
    values = small | changes
    shape = {name: values.pop(name) for name in set(values) & set(vars(model_config))}
    return replace(model_config, **shape), replace(cfg, **values)
