"""What hellaswag.py shows of a model's answers: as text, or as one line of JSON."""

import json

import numpy as np

from lab.data.hellaswag import SHA256
from lab.data.shards import sha256_of


def report(cfg, path, precision, result, data, sums, summarise):
    """Print what was asked for. summarise is hellaswag.py's."""
    published = sha256_of(path) == SHA256
    sources = by_source(data, sums, summarise) if cfg.by_source else {}
    worst = most_sure_and_wrong(sums, data, cfg.worst)
    if cfg.json:
        record = {"model": cfg.model, "published_file": published, "precision": precision} | result
        print(json.dumps(record | {"by_source": sources, "worst": worst}), flush=True)
        return
    for name in ("acc", "acc_norm"):
        value, error, low, high = (result[name + k] for k in ("", "_stderr", "_low", "_high"))
        print(f"{name:8}  {value:.4f} +- {error:.4f}  (95 %: {low:.4f} to {high:.4f})")
    line = f"{result['count']} examples of {path} in {result['seconds']:.1f} s, {precision}"
    line += f"; {result['cut']} contexts cut from the left to fit" if result["cut"] else ""
    line += f"; {result['skipped']} left out, too long an ending" if result["skipped"] else ""
    print(line + ("" if published else "; not the published file, nor comparable with it"))
    if sources:
        print("\nsource       count     acc  acc_norm  95 % interval")
    for name, g in sources.items():
        scores = f"{g['count']:5d}  {g['acc']:.4f}    {g['acc_norm']:.4f}"
        print(f"{name:12} {scores}  {g['acc_norm_low']:.3f} to {g['acc_norm_high']:.3f}")
    for example in worst:
        print("\n" + describe(example))


def by_source(data, sums, summarise):
    """{where examples came from, activitynet or wikihow: their summary}."""
    names = np.array([str(row.get("source_id")).split("~")[0] for row in data.rows])
    groups = {name: names == name for name in np.unique(names).tolist()}
    return {k: summarise(sums[i], data.end_len[i], data.label[i]) for k, i in groups.items()}


def most_sure_and_wrong(sums, data, count):
    """The examples whose wrong ending beats the right one by the most nats a token, with that
    margin and the mean losses."""
    means = sums / data.end_len
    margin = means[np.arange(len(data)), data.label] - means.min(1)
    order = [i for i in np.argsort(-margin, kind="stable")[:count] if margin[i] > 0]
    return [
        data.rows[i] | {"margin": float(margin[i]), "mean_losses": means[i].tolist()} for i in order
    ]


def describe(example):
    """A wrong choice as text: the right ending marked =, the chosen one >, with mean losses."""
    losses = example["mean_losses"]
    lines = [
        f"line {example['line']}, {example.get('activity_label')}, surer of the wrong one by "
        f"{example['margin']:.2f} nats a token\n    {example['ctx']}"
    ]
    for j, text in enumerate(example["endings"]):
        mark = "=" if j == example["label"] else ">" if losses[j] == min(losses) else " "
        lines.append(f"  {mark} {losses[j]:5.2f}  {text}")
    return "\n".join(lines)
