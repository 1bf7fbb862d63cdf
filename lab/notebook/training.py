"""Training inside play.ipynb: a Trainer from any model and loader, and two runs at a time."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
