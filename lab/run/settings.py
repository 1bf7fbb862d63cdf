"""The settings of a run: a preset's or a resumed run's, what is typed, what the data decides."""

import argparse
import dataclasses
import importlib.util
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lab.cli import UserError, parse
from lab.cli import program as command_of
from lab.data import build_builtin, name_of_size
from lab.data.chat import ROLES, build_chats
from lab.data.shards import read_manifest
from lab.data.tokenizers import WORD_PIECE_FILE, WordPiece
from lab.files import check_keys, reading
from lab.models import check_same, find, shape_of
from lab.run.checkpoints import read_checkpoint, read_newest
from lab.run.folder import (
    PROGRAMS,
    is_finished,
    largest,
    program_of,
    read_config,
    run_to_resume,
    smallest,
)

PLAIN = dict(attention="math", bf16_residual=False, compile=False, kernels="plain")
SPEEDS = {  # --speed: what is set before the flags that are typed; sizes and results stay
    "baseline": PLAIN | dict(precision="fp32"),
    "bf16": PLAIN | dict(precision="bf16"),
    "recommended": {},  # what the preset has: all that pays and gives the same results
    "full": dict(fp8="all"),  # a GPU with 8 bits
}
ON_SPIKE = ("continue", "record", "skip", "stop")


@dataclass
class RunConfig:
    """What every program that trains has: data, what is measured and kept, and how often. A program's
    own TrainConfig adds what decides the result."""

    preset: str = "gpt2"  # where the other defaults come from: gpt2 ... gpt2-2.7b, laptop, or sft
    # data
    data: str = "edu_fineweb10B"  # folder of token shards (made by fineweb.py), or chats.jsonl
    shuffle: bool = True  # seeded order of sequences; off is the order on disk
    align_documents: bool = False  # sequences start at an end-of-text; what is between is dropped
    # place and speed
    device: str = "auto"  # cuda, mps or cpu
    timeout: int = 600  # seconds until another process that does not answer is taken for lost
    seed: int = 1337  # of the weights, the shuffling and the samples
    speed: Literal[tuple(SPEEDS)] = "recommended"  # baseline, bf16: all plain; full: 8 bits too
    # watching; every interval is in steps
    log_every: int = 10  # a line in log.jsonl
    val_every: int = 250  # validation loss; 0 is never
    val_tokens: int = 10485760  # tokens of the validation split to use; 0 is all of them
    hella_every: int = 1000  # HellaSwag accuracy; 0 is never
    hella_examples: int = 10042  # how many of its 10042 examples
    sample_every: int = 1000  # a few samples; 0 is never
    sample_tokens: int = 64  # length of each
    sample_prompt: str = "Hello, I'm a language model,"  # what they begin with
    timing: bool = False  # log milliseconds of data, forward, backward, optimizer
    wandb: bool = False  # Weights & Biases as well as log.jsonl and TensorBoard
    on_spike: Literal[ON_SPIKE] = "continue"  # at a gradient far longer than those before it
    # keeping
    log_dir: str = "log"  # runs lie in log_dir/run_name
    run_name: str = ""  # name of the run; made from preset and time when empty
    ckpt_every: int = 1000  # a checkpoint; 0 is only if a signal stops the run
    async_save: bool = True  # by a thread, of a copy: 12 bytes a weight (GPU: up to 20)
    keep_last: int = 2  # how many checkpoints stay, besides the best
    resume: bool = False  # go on with the newest run (or --run_name NAME) and its settings
    init_from: str = ""  # begin with the weights and shape of a run, a file, gpt2 ... gpt2-xl


# what programs' presets of these names have in common: the data, and how a small run is watched
LAPTOP = dict(
    preset="laptop", data="data/builtin", log_every=20, val_every=200, val_tokens=131072, hella_every=0,
    sample_every=200, sample_tokens=200, sample_prompt="The ", ckpt_every=500,
)  # fmt: skip
SFT = dict(
    preset="sft", data="lab/data/chats.jsonl", val_every=20, val_tokens=0, hella_every=0,
    sample_every=50, sample_prompt="{user} What is a token?\n\n{assistant}".format(**ROLES), ckpt_every=20,
)  # fmt: skip


def parse_flags(argv, presets, description, program="gpt2"):
    """(in words where the defaults come from and what was changed, model config, run config).

    presets: {name: (model config, run config)}, the first the main one. One flag for each field of
    the two dataclasses. The defaults come from a preset, which --preset names or the machine
    decides, or from the run that --resume goes on with.
    """
    reason, *defaults = choose_defaults(argv, presets, program)
    model_class, train_class = map(type, defaults)

    def flags(model: model_class = defaults[0], train: train_class = defaults[1]):
        return model, train

    text = f"{description.split('One step in words')[0]}The defaults shown are those of {reason}."
    model_config, cfg = parse(flags, argv, description=text)
    before, now = (vars(a) | vars(b) for a, b in (defaults, (model_config, cfg)))
    was = " (was {})" if cfg.resume else ""
    changed = [f"{k}={v}{was.format(before[k])}" for k, v in now.items() if before[k] != v]
    check(model_config, cfg)
    return reason + (f"; set by hand: {', '.join(changed)}" if changed else ""), model_config, cfg


def choose_defaults(argv, presets, program):
    """(in words why, model config, run config) that the flags in argv then change."""
    main = next(iter(presets))
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", action="store_true")
    for name in ("preset", "speed", "data", "run_name", "log_dir", "init_from"):
        default = getattr(presets[main][1], name) if name in ("data", "log_dir") else ""
        early.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default=default)
    given, _ = early.parse_known_args(argv)
    if given.resume:
        reason, *configs = defaults_of_run(given, program, *map(type, presets[main]))
    else:
        reason, *configs = defaults_of_preset(given, program, presets, main)
    if given.speed in SPEEDS:  # another word is refused with all the flags
        new = SPEEDS[given.speed] | {"speed": given.speed}
        configs = [
            dataclasses.replace(c, **{k: new[k] for k in new if hasattr(c, k)}) for c in configs
        ]
        reason += f", speed={given.speed}"
    return reason, *configs


def defaults_of_run(given, program, model_class, train_class):
    """The settings of the run that --resume goes on with."""
    if given.init_from:
        raise UserError(
            f"init_from={given.init_from} is for a new run; a resumed one goes on with its own "
            "weights: leave one out"
        )
    run_dir = run_to_resume(given.log_dir, given.run_name, program)
    made_by = program_of(run_dir)
    if made_by != program:
        file = f"{PROGRAMS.get(made_by, made_by)}.py"
        raise UserError(
            f"{run_dir} is a run of {file}: `{command_of(file)} --resume` with the same flags"
        )
    model_config, cfg, unknown = read_config(run_dir, model_class, train_class)
    if given.preset not in ("", cfg.preset):
        raise UserError(
            f"preset={given.preset} is for a new run; {run_dir} goes on as {cfg.preset}: leave it out"
        )
    passed_over = f" (passed over, as this version has no such settings: {', '.join(unknown)})"
    cfg = dataclasses.replace(cfg, resume=True, run_name=run_dir.name, log_dir=given.log_dir)
    return f"{run_dir}{passed_over * bool(unknown)}", model_config, cfg


def defaults_of_preset(given, program, presets, main):
    """The settings of --preset, or of the preset that suits the machine; for --init_from with the
    shape of that model, and with it the rate and the longest sequence."""
    preset, why = given.preset, "as asked for"
    if not preset:
        preset, why = best_preset(main, Path(given.data))
    if preset not in presets:
        raise UserError(f"preset={preset} is not one of {', '.join(presets)}")
    model_config, cfg = presets[preset]
    if given.init_from:
        shape = shape_of(given.init_from, given.log_dir, program)
        # Adam's best rate falls with the width and with the root of the depth (Yang et al. 2022 and
        # 2023, Tensor Programs V and VI)
        wider, deeper = (shape[k] / getattr(model_config, k) for k in ("n_embd", "n_layer"))
        lr = round(cfg.lr / wider / deeper**0.5, 6)
        same = {name: value for name, value in shape.items() if hasattr(model_config, name)}
        if preset == "sft":  # each turn ends in end-of-text, and is to see the earlier ones
            same.pop("document_mask", None)
        model_config = dataclasses.replace(model_config, **same)
        cfg = dataclasses.replace(cfg, lr=lr, seq_len=min(cfg.seq_len, shape["block_size"]))
        why += f", with the shape of {given.init_from} and lr={lr} for its size"
    model_config = dataclasses.replace(model_config, vocab_size=0)  # 0: the data decides
    return f"preset {preset} ({why})", model_config, cfg


def best_preset(main, data):
    """(preset, in words why) that this machine and the data there are suggest."""
    shards, gpu = any(data.glob("*_train_*")), torch.cuda.is_available()
    if gpu and "WORLD_SIZE" in os.environ:
        return main, "what torchrun gets on GPUs unless --preset says otherwise"
    if shards and gpu:
        return main, f"there is a GPU, and {data} has shards"
    missing = ["there is no GPU"] * (not gpu) + [f"no shards are in {data}"] * (not shards)
    return "laptop", " and ".join(missing)


def check(model_config, cfg):
    """Raise UserError for settings that cannot work, whatever the data and the machine."""
    for name, value in (vars(model_config) | vars(cfg)).items():
        if not isinstance(value, (bool, str)) and not smallest(name) <= value < math.inf:
            kind = "whole" if isinstance(value, int) else "finite"
            raise UserError(f"{name}={value} must be a {kind} number, {smallest(name)} or more")
        if type(value) is int and value > largest(name):
            raise UserError(f"{name}={value} must be at most {largest(name)}")
    m, more = model_config, -(-model_config.n_embd // model_config.n_head) * model_config.n_head
    halves = 2 * max(1, cfg.batch_size) * cfg.seq_len * int(os.environ.get("WORLD_SIZE", 1))
    rules = (  # (what is wrong, in one sentence: the value, the rule and the way out)
        (cfg.beta1 >= 1, f"beta1={cfg.beta1} must be less than 1"),
        (getattr(cfg, "momentum", 0) >= 1, f"momentum={getattr(cfg, 'momentum', 0)} must be less than 1"),
        (cfg.beta2 >= 1, f"beta2={cfg.beta2} must be less than 1"),
        (m.n_embd % m.n_head,
         f"n_embd={m.n_embd} must be divisible by n_head={m.n_head}; n_embd={more} would be"),
        (getattr(m, "rotary", False) and (m.n_embd // m.n_head % 2 or m.n_embd // m.n_head < 4),
         f"n_embd={m.n_embd} of n_head={m.n_head} gives heads of {m.n_embd // m.n_head} channels, and "
         "rotary turns half of their pairs; take an even number from 4 on, or pass --no_rotary"),
        (getattr(m, "value_tables", 0) > m.n_layer,
         f"value_tables={getattr(m, 'value_tables', 0)} must be at most n_layer={m.n_layer}"),
        (getattr(cfg, "small_steps", 0) and cfg.total_batch_size % halves,
         f"total_batch_size={cfg.total_batch_size} must be a multiple of 2 * batch_size * seq_len * "
         f"processes = {halves}, as the first steps have half of it; the next one up is "
         f"{-(-cfg.total_batch_size // halves) * halves}, or pass --small_steps 0"),
        (cfg.seq_len > m.block_size,
         f"seq_len={cfg.seq_len} must be between 1 and block_size={m.block_size}; shorten it or pass "
         f"--block_size {cfg.seq_len}"),
        (not cfg.eps, "eps=0 divides 0 by 0 where a gradient is 0; the usual value is 1e-8"),
        (not cfg.lr, f"lr={cfg.lr} learns nothing: other rates are shares of it; pass a small one, as 1e-9"),
        (cfg.min_lr > cfg.lr and cfg.schedule != "constant",
         f"min_lr={cfg.min_lr} must not be above lr={cfg.lr}; pass a smaller --min_lr"),
        (cfg.kernels == "plain" and cfg.fp8 != "off",
         f"fp8={cfg.fp8} is no plain kernel; pass --fp8 off, or --kernels fused"),
        (cfg.parallel != "ddp" and cfg.optimizer != "adamw",
         f"parallel={cfg.parallel} shares out AdamW's state, and optimizer={cfg.optimizer} has another; "
         "pass --optimizer adamw, or leave --parallel out"),
        (cfg.resume and not cfg.run_name, "run_name is empty; without --run_name the newest run goes on"),
        (cfg.on_spike == "skip" and cfg.optimizer != "adamw",
         f"on_spike=skip leaves AdamW's updates out alone, and optimizer={cfg.optimizer} makes others; "
         "leave one out, or pass --on_spike stop"),
        (Path(cfg.run_name).name != cfg.run_name or cfg.run_name == "..",
         f"run_name={cfg.run_name} must be a plain name, without folders; --log_dir says where runs lie"),
        (cfg.preset == "sft" and not cfg.init_from,
         "preset=sft tunes a model that there is; pass --init_from with a run (train_gpt2.py: or gpt2)"),
        (cfg.wandb and importlib.util.find_spec("wandb") is None,
         "--wandb needs `pip install wandb`; log.jsonl and TensorBoard are written without it"),
    )  # fmt: skip
    for wrong, sentence in rules:
        if wrong:
            raise UserError(sentence)


def resolve(model_config, cfg, world, presets, program="gpt2"):
    """(model config, run config, checkpoint or None), the same on all processes: names and the
    vocabulary settled, the built-in text made, the checkpoint of a resumed run read and compared
    with the settings."""
    model_config, cfg = world.on_main(lambda: settle(model_config, cfg, presets, program))
    if not cfg.resume:
        return model_config, cfg, None
    run_dir = Path(cfg.log_dir) / cfg.run_name
    path = world.on_main(lambda: read_newest(run_dir)[0])
    state = read_checkpoint(path)
    check_fits(path, state, model_config, cfg)
    if state["step"] > cfg.max_steps or (state["step"] == cfg.max_steps and is_finished(run_dir)):
        raise UserError(
            f"{run_dir} has done {state['step']} steps, max_steps={cfg.max_steps}; "
            "a larger --max_steps goes on"
        )
    return model_config, cfg, state


def settle(model_config, cfg, presets, program):
    """What one process decides for all: others may see an older folder, or a newer one."""
    if cfg.init_from and not cfg.resume:
        cfg = dataclasses.replace(cfg, init_from=find(cfg.init_from, cfg.log_dir))
    builtin = {"data/builtin": "bytes", "data/builtin_wordpiece": "wordpiece"}
    if tokenizer := builtin.get(Path(cfg.data).as_posix()):  # these need nothing but Python
        build_builtin(cfg.data, tokenizer)
    ids = vocab_size(model_config, cfg, presets)
    model_config = dataclasses.replace(model_config, vocab_size=ids)
    if cfg.data.endswith(".jsonl"):  # conversations: a row of them is a sequence
        cfg = dataclasses.replace(cfg, data=build_chats(cfg.data, name_of_size(ids), cfg.seq_len))
    beside = "" if program == "gpt2" else f"{program}_"
    name = cfg.run_name or f"{beside}{cfg.preset}_{time.strftime('%Y%m%d-%H%M%S')}"
    return model_config, dataclasses.replace(cfg, run_name=name)


def vocab_size(model_config, cfg, presets):
    """That of the data; without a manifest as asked for, else that of init_from, or of the preset."""
    asked, manifest = model_config.vocab_size, read_manifest(cfg.data)
    if manifest and asked not in (0, manifest["vocab_size"]) and not cfg.resume:
        raise UserError(
            f"vocab_size={asked} is not the {manifest['vocab_size']} of {cfg.data}; leave it out"
        )
    if asked or manifest:
        return asked or manifest["vocab_size"]
    if cfg.init_from:
        return shape_of(cfg.init_from, cfg.log_dir)["vocab_size"]
    return presets[cfg.preset][0].vocab_size


def check_fits(path, state, model_config, cfg):
    """Raise UserError where a checkpoint is not this run's."""
    parts = "model", "optimizer", "loader", "scaler", "rng", "model_config", "train_config"
    wanted = dict.fromkeys(parts, dict) | dict(step=int, batch_size=int, best_val=(int, float))
    with reading(path, "checkpoint", f"start from its weights with --init_from {path}"):
        check_keys(state, **wanted)
    check_same(path, state["model_config"], model_config)
    made_by = state["train_config"].get("optimizer")
    if made_by != cfg.optimizer:
        raise UserError(
            f"optimizer={cfg.optimizer} cannot go on from {path}, which {made_by} made; "
            f"leave --optimizer out, or begin a new run with --init_from {path}"
        )


def check_words(run, tokenizer):
    """Raise UserError where the settings of a run of bert.py do not fit its tokenizer."""
    cfg, rows, pieces = run.cfg, run.raw_model.config.vocab_size, tokenizer.vocab_size
    if rows != pieces:
        raise UserError(f"vocab_size={rows} is not the {pieces} of {tokenizer.name}; leave it out")
    if cfg.seq_len < 3:
        raise UserError(f"seq_len={cfg.seq_len} leaves none beside [CLS] and [SEP]; pass 3 or more")
    if cfg.sample_every and "[MASK]" not in cfg.sample_prompt:
        raise UserError(f"sample_prompt={cfg.sample_prompt!r} has no [MASK] to be filled in")
    if cfg.init_from and not run.step:
        path = Path(find(cfg.init_from, cfg.log_dir))
        theirs = (path.parent if path.suffix == ".pt" else path) / WORD_PIECE_FILE
        if theirs.exists() and WordPiece(theirs).pieces != tokenizer.pieces:
            raise UserError(
                f"{cfg.init_from} has another vocabulary; copy {theirs} into an empty folder and pass "
                f"it to `{command_of('fineweb.py')} --tokenizer wordpiece --out`, which then uses it"
            )
