"""Whether a run's validation loss is good: what a run prints at its end and lab report shows."""

import math
from collections.abc import Mapping
from typing import Any

from lab.tools.read_log import RunLog, column, vocab_sizes

GOOD = 2 / 3  # fraction of the unigram loss below which texts begin to have words and grammar
LAPTOP_LOSS = 1.31  # of `make train`, in nats per byte: readme.assets/runs/laptop_builtin.jsonl


def loss_verdict(log: RunLog, settings: Mapping[str, Any]) -> str:
    """Sentences on whether the last validation loss is good; "" without one after step 0, or without
    a loss to compare it with. settings: the fields of the run's TrainConfig."""
    steps, losses = column(log, "val", "loss")
    start = (log.get("start") or [{}])[-1]
    uniform, unigram = start.get("log_v", 0), start.get("unigram", 0)
    if not any(steps) or not 0 < unigram < 99 or not 0 < uniform < 99:
        return ""
    loss, best, init_from = losses[-1], min(losses), settings.get("init_from")
    shown = f"The validation loss after step {steps[-1]}, {loss:.4f}, is"
    recent = column(log, "train", "loss")[1][-5:]
    train_loss = sum(recent) / len(recent) if recent else math.inf
    overfits = train_loss < (loss if loss < uniform else uniform / 2)
    hint = "train for fewer steps or on more data" if overfits else lower_lr_hint(settings)
    if overfits and settings.get("preset") == "sft":
        hint = "this is usual with few conversations, which the model learns by heart"
    if loss >= uniform:
        return f"{shown} bad: a uniform guess has {uniform:.3f}; {hint}."
    if is_worse(log):
        at = steps[losses.index(best)]
        if init_from and at == 0:  # it rose at once
            hint = lower_lr_hint(settings)
        # before the resume, if the best loss is older than it
        rates = column(log, "train", "lr")
        before = [rate for step, rate in zip(*rates) if step <= at <= start.get("step", 0)]
        if before and before[-1] < rates[1][-1]:
            hint = "the learning rate rose again when the run was resumed, so let it finish"
        return f"{shown} above its minimum of {best:.4f} after step {at}; {hint}."
    if init_from and steps[0] == 0 and steps[-1] > 0:
        gain = losses[0] - loss
        if gain <= 0:
            hint = lower_lr_hint(settings)
            return f"{shown} not better than {losses[0]:.4f} at step 0; {hint}."
        return f"{shown} good: {gain:.3f} below {losses[0]:.4f}, the loss before training."
    word = f"not good yet (not below the unigram loss, {unigram:.3f})"
    if loss < GOOD * unigram:
        word = f"good (below two thirds of the unigram loss, {unigram:.3f})"
    elif loss < unigram:
        word = f"a start (below the unigram loss, {unigram:.3f}, but not below two thirds of it)"
    text = (
        f"{shown} {word}. It is like guessing among {perplexity(loss)} equally likely tokens (the "
        f"perplexity); a model without context (unigram) has {perplexity(unigram)}, a uniform guess "
        f"{perplexity(uniform)}"
    )
    same_text = settings.get("data") == "data/builtin" and vocab_sizes([log]) == [257]
    if same_text and "accuracy" not in log["val"][-1] and loss > 1.05 * LAPTOP_LOSS:
        text += f"; `make train` reaches about {LAPTOP_LOSS} nats per byte on this text"
    return text + "."


def is_worse(log: RunLog) -> bool:
    """Whether the last validation loss is above the lowest by more than noise."""
    losses = column(log, "val", "loss")[1]
    return bool(losses) and losses[-1] > 1.02 * min(losses)


def perplexity(loss: float) -> str:
    """e^loss, the number of equally likely tokens with that loss."""
    value = math.exp(loss)
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def lower_lr_hint(settings: Mapping[str, Any]) -> str:
    """Advice that names the learning rates this program has."""
    others = [f"--{name}" for name in ("muon_lr", "embed_lr") if name in settings]
    if settings.get("optimizer") == "adamw" and others == ["--muon_lr"]:
        others = []  # train_gpt2.py's AdamW does not use it
    return "try a lower --lr" + f" (and {' and '.join(others)})" * bool(others)
