"""Average the predictions of several models: the loss of each alone and of their mean probability.

    python bench/ensemble.py --models log/seed1 log/seed2 log/seed3 log/seed4 --data data/mine

The loss is on the first --val_tokens targets of the validation split, in sequences as long as the models'
context, as in training. The record has the loss of the mean of the first two models, the first three and
so on. little_text.py does the same, and distills the ensemble, at laptop scale.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from records import RUNS, append_record, check_out, gpu_name, origin, print_rows

from lab.cli import UserError, parse_args, run_main
from lab.data.shards import TokenShards
from lab.distributed import World
from lab.precision import Precision
from lab.registry import load_model


@dataclass
class Config:
    models: tuple[str, ...] = ()  # runs, checkpoints or folders
    data: str = "edu_fineweb10B"  # folder of token shards with the models' tokenizer
    val_tokens: int = 1048576  # tokens to predict
    batch_size: int = 8  # sequences at a time
    device: str = "auto"  # cuda, mps or cpu
    out: str = str(RUNS / "ensemble.jsonl")  # file of measurements


@torch.no_grad()
def losses(models, shards, val_tokens, batch_size, precision):
    """(each model's loss, the loss of the mean of the first 1, 2, ... models), in nats per token."""
    T, device = models[0].config.block_size, precision.device
    alone, together = (torch.zeros(len(models), dtype=torch.float64) for _ in range(2))
    for start in range(0, val_tokens, batch_size * T):
        size = min(batch_size * T, val_tokens - start)
        ids = torch.as_tensor(shards.read(start, size + 1), dtype=torch.int64, device=device)
        with precision.autocast():  # log-probabilities of the right tokens, (models, size)
            logs = torch.stack([target_logs(model, ids, T) for model in models]).double().cpu()
        alone -= logs.sum(1)
        number = torch.arange(1, len(models) + 1)[:, None]
        together -= (logs.logcumsumexp(0) - number.log()).sum(1)
    return (alone / val_tokens).tolist(), (together / val_tokens).tolist()


def target_logs(model, ids, seq_len):
    """ln of the probability of each of ids[1:] (N,), read in sequences of seq_len tokens."""
    logits = model(ids[:-1].view(-1, seq_len))[0][..., : model.config.vocab_size].flatten(0, 1)
    return -F.cross_entropy(logits.float(), ids[1:], reduction="none")


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    world = World(cfg.device)
    check_out(cfg.out, cpu=world.device.type != "cuda")
    if len(cfg.models) < 2:
        raise UserError(f"models={cfg.models} must name at least two models; pass --models RUN RUN")
    models = [load_model(name).to(world.device).eval() for name in cfg.models]
    shards = TokenShards(cfg.data, "val", models[0].config.vocab_size)
    T = models[0].config.block_size
    if cfg.val_tokens < T or cfg.val_tokens % T or cfg.val_tokens >= len(shards):
        raise UserError(
            f"val_tokens={cfg.val_tokens} must be a multiple of the context, {T}, and less than the "
            f"{len(shards)} tokens of the validation split"
        )
    precision = Precision("auto", world.device)
    alone, together = losses(models, shards, cfg.val_tokens, cfg.batch_size, precision)
    rows = [(name, f"{a:.4f}", f"{b:.4f}") for name, a, b in zip(cfg.models, alone, together)]
    print_rows(("model", "alone", "mean with those above"), rows)
    record = dict(
        bench="ensemble", models=[Path(m).name for m in cfg.models], alone=alone, together=together
    )
    append_record(
        cfg.out, record | dict(val_tokens=cfg.val_tokens, device=gpu_name(cfg.device)) | origin()
    )


if __name__ == "__main__":
    run_main(main)
