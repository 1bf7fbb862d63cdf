"""The figures of whole training runs. bench/figures.py draws them."""

import json

import numpy as np
from data_multiple import tokens_needed
from drawing import (
    DASHED,
    blank,
    cell,
    cells_of,
    made_by,
    records,
    shorten,
    training_seconds,
    where_and_when,
    write,
)

from lab.tools.plot import draw
from lab.tools.plot_style import color_of, reference
from lab.tools.read_log import column, read_log


@made_by("python train_gpt2.py --preset laptop")
def laptop(runs, out_path, dark):
    """The figure of a training run, as train_gpt2.py itself draws it."""
    records(runs, "laptop_builtin", "kind")
    draw([runs / "laptop_builtin.jsonl"], out_path, dark)


@made_by("python speedrun.py --fp8 head --max_steps 1688")
def six_minutes(runs, out_path, dark):
    """Validation loss against seconds of training: speedrun.py's recipe and GPT-2's."""
    names = {"speedrun_124m": ("speedrun.py", "blue"), "gpt2_124m": ("GPT-2's recipe", "orange")}
    curves = {}
    for name in names:
        records(runs, name, "kind")
        log = read_log(runs / f"{name}.jsonl")
        at, losses = column(log, "val", "loss")
        curves[name] = training_seconds(log, at[1:]), losses[1:]  # after the first 100 steps
    (fast, slow), (low, high) = zip(*((t[-1], losses[-1]) for t, losses in curves.values()))
    title = f"Six minutes on one H200: {low:.2f} nats a token with today's recipe, "
    note = "124M shape, two epochs of 111M tokens of books and textbooks, NVIDIA H200, 2026-11-23"
    figure, ax = blank(4.6, f"{title}{high:.2f} with GPT-2's", note)
    for name, (seconds, losses) in curves.items():
        color = color_of(names[name][1], dark)
        ax.plot(seconds, losses, "o-", color=color, markersize=3)
        write(ax, f"{names[name][0]} {losses[-1]:.2f}", seconds[-1], losses[-1], dx=6, color=color)
    seconds, losses = curves["speedrun_124m"]
    met = np.interp(-high, -np.array(losses), seconds)
    ax.plot([met, slow], [high, high], ":", color="0.5", linewidth=1)
    text = f"{met:.0f} s: {slow / met:.1f} times sooner"
    write(ax, text, met, high, dy=5, va="bottom", color="0.5")
    ax.set(
        xlabel="seconds of training, compiling left out", ylabel="validation loss (nats per token)"
    )
    ax.set(xlim=(0, 1.28 * fast), xticks=range(0, round(fast) + 1, 60))
    figure.savefig(out_path)


@made_by("python speedrun.py --preset speedrun --data both --fp8 head --max_steps 3858")
def passes(runs, out_path, dark):
    """Validation loss against epochs: three recipes, and speedrun.py without a value table."""
    names = {"_gpt2": "GPT-2's recipe", "_readable": "readable recipe", "": "speedrun.py"}
    names["_no_table"] = "no value table (dashed)"
    note = "124M, 111M tokens of books and textbooks, H100s and H200s, 2026-11-25 and 26"
    curves = {}
    for name in names:
        records(runs, f"both_4_passes{name}", "kind")
        log = read_log(runs / f"both_4_passes{name}.jsonl")
        steps, losses = column(log, "val", "loss")
        read = np.interp(steps, *column(log, "train", "tokens")) / log["start"][0]["train_tokens"]
        curves[name] = read[1:], losses[1:]  # after the first 250 steps
    low, high = (curves[name][1][-1] for name in ("_no_table", "_gpt2"))
    title = f"Four epochs: {low:.2f} nats without a value table, "
    figure, ax = blank(4.6, f"{title}{high:.2f} with GPT-2's recipe", note)
    for (name, (read, losses)), dy in zip(curves.items(), (0, 13, 3, -7)):
        color = color_of("blue" if name in ("", "_no_table") else "orange", dark)
        ax.plot(read, losses, "o--" if name == "_no_table" else "o-", color=color, markersize=3)
        write(ax, f"{names[name]} {losses[-1]:.2f}", read[-1], losses[-1], 6, dy, color=color)
    ax.set(xlabel="epochs", ylabel="validation loss (nats per token)")
    ax.set(xlim=(0, 5.4), xticks=range(5), ylim=(3.2, 4.5))
    figure.savefig(out_path)


@made_by("python bench/slowrun.py --epochs 8 --more='--n_layer=12 --n_embd=768 --n_head=6'")
def small_data(runs, out_path, dark):
    """Validation loss against GPU-minutes of training on the same text: GPT-2's recipe, NanoGPT Slowrun's
    program (with the size of small-data, and with its published 317M weights) and the preset small-data:
    its first seed, and averaged probabilities of two seeds with 6,500 steps and of three; at the end,
    BLiMP (small-data: mean of the seeds)."""
    found = [r for r in records(runs, "data_multiple", "curve") if r["recipe"] == "gpt2"]
    gpt2 = min(found, key=lambda r: r["val_loss"])
    steps, losses = np.array(gpt2["curve"][1:]).T  # the first is before training
    curves = {"GPT-2's recipe": (steps / steps[-1] * gpt2["gpu_seconds"] / 60, losses)}
    scores = {"GPT-2's recipe": gpt2["blimp"]}
    for other in records(runs, "slowrun", "curve"):  # of runs with the same settings, the last one
        seconds, _, losses = zip(*other["curve"][1:])
        minutes = np.array(seconds) / 60 * other["settings"]["gpus"]
        # the last loss is that of the averaged weights
        size = "" if other["settings"]["more"] else " 317M"
        name = f"Slowrun{size},\n{other['settings']['epochs']} epochs"
        curves[name] = np.append(minutes, minutes[-1]), [*losses, other["lowest"]]
        scores[name] = other.get("blimp")
    records(runs, "small_data_2048_1", "kind")
    log = read_log(runs / "small_data_2048_1.jsonl")
    at, losses = column(log, "val", "loss")
    curves["small-data"] = training_seconds(log, at[1:]) / 60, losses[1:]
    files = [runs / f"blimp_small_data_2048_{seed}.json" for seed in (1, 2, 3)]
    scores["small-data"] = np.mean([json.loads(file.read_text())["acc"] for file in files])
    three, two = records(runs, "ensemble_seeds", "together")[-2:]
    longer = read_log(runs / "small_data_6500_1.jsonl")
    took = training_seconds(longer, [6500]) / 60
    curves["2 models, longer"] = 2 * took, two["together"][-1:]
    curves["3 models"] = 3 * curves["small-data"][0][-1:], three["together"][-1:]
    title = "111M tokens of books: small-data, Slowrun's program, GPT-2's recipe"
    note = "2 (6,500 steps), 3 models: mean probabilities; H200s, GPT-2's recipe on an H100; 2026-11-27 to 29"
    figure, ax = blank(4.6, title, note)
    looks = {  # color, offset of the label in points
        "GPT-2's recipe": ("green", -145, -14),
        "Slowrun,\n4 epochs": ("orange", 6, -2),
        "Slowrun,\n8 epochs": ("orange", 6, 0),
        "Slowrun 317M,\n4 epochs": ("orange", -4, 20),
        "small-data": ("blue", 6, -24),
        "2 models, longer": ("blue", -92, -16),
        "3 models": ("blue", -40, -16),
    }
    for label, (minutes, losses) in curves.items():
        name, dx, dy = looks[label]
        blimp = f"\nBLiMP {scores[label]:.1%}" if scores.get(label) else ""
        color = color_of(name, dark)
        line = "o--" if "8 epochs" in label else "o:" if "317M" in label else "o-"
        ax.plot(minutes, losses, line, color=color, markersize=3)
        text = f"{label}: {losses[-1]:.3f}{blimp}"
        write(ax, text, minutes[-1], losses[-1], dx, dy, color=color)
    ax.set(xlabel="GPU-minutes of training", ylabel="validation loss (nats per token)")
    ax.set(xlim=(0, 62), ylim=(2.95, 4.3))
    figure.savefig(out_path)


@made_by("python bench/data_multiple.py --data data/mine --tokens 6900000 --passes 4")
def data_multiple(runs, out_path, dark):
    """Lowest final loss against the amount of text: small-data (the largest amount: mean of its three
    seeds), and GPT-2's recipe on all of it."""
    rows = sorted(records(runs, "data_multiple", "val_loss"), key=lambda r: -r["val_loss"])
    gpt2 = [r for r in rows if r["recipe"] == "gpt2"][-1]
    best = {r["tokens"]: r for r in rows if r["recipe"] == "small-data"}
    logs = [read_log(runs / f"small_data_ema_{seed}.jsonl") for seed in (1, 2, 3)]
    whole = float(np.mean([column(log, "val", "loss")[1][-1] for log in logs]))
    best[gpt2["tokens"]] = {"val_loss": whole, "passes": 7.3}
    tokens = sorted(best)
    losses = [best[n]["val_loss"] for n in tokens]
    enough = tokens_needed(dict(zip(tokens, losses)), gpt2["val_loss"])
    title = f"small-data needs 1/{gpt2['tokens'] / enough:.1f} of the text of GPT-2's recipe"
    note = "parts of 111M tokens of books; " + where_and_when([*best.values(), gpt2])
    figure, ax = blank(4.6, title, note)
    ax.plot(tokens, losses, "o-", color=color_of("blue", dark), markersize=4)
    for n, loss in zip(tokens, losses):
        text = f"{'small-data ' * (n == tokens[0])}{loss:.2f}, {best[n]['passes']:g} epochs"
        write(ax, text, n, loss, -6, -10, ha="right", color=color_of("blue", dark))
    ax.plot([enough, gpt2["tokens"]], [gpt2["val_loss"]] * 2, **DASHED)
    ax.plot(gpt2["tokens"], gpt2["val_loss"], "o", color=color_of("green", dark), markersize=4)
    text = f"GPT-2's recipe\n{gpt2['val_loss']:.2f}, {gpt2['passes']} epochs"
    color = color_of("green", dark)
    write(ax, text, gpt2["tokens"], gpt2["val_loss"], 0, 16, ha="right", color=color)
    ax.set(xlabel="different tokens in the text", ylabel="validation loss (nats per token)")
    ax.set(xscale="log", ylim=(3.1, 4.5), xlim=(2.5e6, 1.3e8))
    ax.set_xticks(tokens, [f"{n / 1e6:.1f}M" for n in tokens])
    ax.minorticks_off()
    figure.savefig(out_path)


@made_by("python speedrun.py --preset small-data --fp8 all --seed 1 --blimp_every 500")
def grammar(runs, out_path, dark):
    """BLiMP against tokens read: four of the twelve phenomena, and all together."""
    records(runs, "small_data_ema_1", "kind")
    log = read_log(runs / "small_data_ema_1.jsonl")
    title = "Agreement of neighbors is learned first, islands last"
    note = "small-data, 111M tokens of books and textbooks, one H200, 2026-11-27; 20 pairs per paradigm"
    figure, ax = blank(4.6, title, note)
    looks = {
        "determiner_noun_agreement": ("“these books”", "blue", 0),
        "subject_verb_agreement": ("“the books are”", "green", 0),
        "acc": ("all 67 paradigms", "", 5),
        "binding": ("binding", "orange", -5),
        "island_effects": ("islands", "red", 0),
    }
    for key, (label, name, dy) in looks.items():
        steps, scores = column(log, "blimp", key)
        tokens = np.interp(steps, *column(log, "train", "tokens")) / 1e6
        tokens[0] = 0
        color = color_of(name, dark) if name else "0.5"
        ax.plot(tokens, 100 * np.array(scores), "o-", color=color, markersize=3)
        write(ax, f"{label} {scores[-1]:.0%}", tokens[-1], 100 * scores[-1], 6, dy, color=color)
    ax.set(xlabel="tokens read, in millions", ylabel="pairs judged right (%)")
    ax.set(xlim=(0, 990), ylim=(45, 100))
    figure.savefig(out_path)


BASE = "python bert.py --preset bert-base --seq_len 128 --max_steps 7000"


@made_by(
    f"{BASE} --whole_word_masking", "bert_base_words", log="bert_h200_whole_7000", what="BERT-base"
)
@made_by("python bert.py", "bert_words", log="bert_laptop_whole", what="the preset laptop")
def bert_words(runs, out_path, dark, log, what):
    """Predictions of a bert.py run for masked words at four steps. Right predictions are orange; the color
    is stronger for higher probabilities."""
    asked = records(runs, log, "words", kind="sample")
    four = np.unique(np.linspace(0, len(asked) - 1, 4).round().astype(int))
    asked = [asked[i] for i in four]
    known = [i for i, word in enumerate(asked[0]["words"]) if word["was"] != "[MASK]"]
    hidden = [asked[0]["words"][i]["was"] for i in known]
    guesses = {f"step {r['step']:,}": [r["words"][i]["guesses"][0] for i in known] for r in asked}
    *_, (step, last) = guesses.items()
    right = sum(guess == was for (guess, _), was in zip(last, hidden))
    title = f"Hidden words: {right} of {len(hidden)} first guesses are right after {step[5:]} steps"
    note = f"bert.py, {what}, two texts of validation"
    figure, ax = blank(1.2 + 0.27 * len(hidden), title, note)
    for x, firsts in enumerate(guesses.values()):
        for y, ((guess, p), was) in enumerate(zip(firsts, hidden)):
            color, strength = color_of("accuracy", dark), p if guess == was else 0
            ink = {"color": "black"} if strength > 0.6 else {}  # white on orange is hard to read
            cell(ax, x, y, f"{guess}  {p:.0%}", color, strength, **ink)
    cells_of(ax, list(guesses), hidden)
    ax.set(ylabel="what was hidden")
    figure.savefig(out_path)


@made_by(BASE)
def bert_break(runs, out_path, dark):
    """Validation loss of BERT-base against steps; it drops when the model starts to predict masked words."""
    names = {"AdamW": "adamw_7666", "Muon": "muon_7000", "Muon, whole words": "whole_7000"}
    curves = {}
    for name, which in names.items():
        rows = records(runs, f"bert_h200_{which}", "accuracy", kind="val")
        curves[name] = [(r["step"], r["loss"], r["accuracy"]) for r in rows]
    title = "BERT-base on one H200: copying, until it suddenly learns to guess"
    note = "25M pieces of books and textbooks, 16,384 an update, NVIDIA H200, 2026-11-24"
    figure, ax = blank(4, title, note)
    for name, curve in curves.items():
        steps, losses, shares = zip(*curve[1:])  # the first is before training
        color = color_of("orange" if name == "AdamW" else "blue", dark)
        ax.plot(steps, losses, "o--" if "whole" in name else "o-", color=color, markersize=3)
        text = f"{name} {losses[-1]:.2f}, {shares[-1]:.0%} right"
        write(ax, text, steps[-1], losses[-1], dx=6, color=color)
    unigram = records(runs, "bert_h200_adamw_7666", "unigram")[0]["unigram"]
    reference(ax, unigram, f"unigram guess {unigram:.2f}", left=True)
    ax.set(xlabel="updates", ylabel="validation loss (nats per hidden piece)", xlim=(0, 9900))
    ax.xaxis.set_major_formatter(shorten)
    figure.savefig(out_path)
