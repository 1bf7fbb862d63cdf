"""The settings of a run: a preset or a run that is resumed, what is typed, what the data
decides."""

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import time
from pathlib import Path

from lab.cli import UserError, parse
from lab.files import read_json
from lab.run.checkpoints import newest_checkpoint, read_newest, step_of
from lab.run.folder import is_finished, read_config, run_to_resume

AT_LEAST_1 = (
    "n_layer",
    "n_head",
    "n_embd",
    "block_size",
    "vocab_multiple",
    "total_batch_size",
    "seq_len",
    "max_steps",
    "log_every",
    "keep_last",
)
MINUS_1 = ("warmup_steps", "decay_steps")  # -1: a share of max_steps


def parse_flags(argv, presets, description):
    """(in words where the defaults come from and what was changed, model config, run config).

    presets: {name: (model config, run config)}, the first the main one. One flag for each field of
    the two dataclasses. The defaults come from a preset, which --preset names or the machine
    decides, or from the run that --resume goes on with.
    """
    # another name for it
    argv = [re.sub(r"^--learning[_-]rate(?=$|=)", "--lr", word) for word in argv]
    reason, *defaults = choose_defaults(argv, presets)
    model_class, train_class = map(type, defaults)
    defaults[0] = dataclasses.replace(defaults[0], vocab_size=0)  # 0: the data decides

    def flags(model: model_class = defaults[0], train: train_class = defaults[1]):
        return model, train

    text = f"{description.split('One step in words')[0]}The defaults shown are those of {reason}."
    model_config, cfg = parse(flags, argv, description=text)
    before, now = (vars(a) | vars(b) for a, b in (defaults, (model_config, cfg)))
    changed = [f"{k}={v}" for k, v in now.items() if before[k] != v]
    check(model_config, cfg)
    return reason + (f"; set by hand: {', '.join(changed)}" if changed else ""), model_config, cfg


def choose_defaults(argv, presets):
    """(in words why, model config, run config) that the flags in argv then change."""
    main, train = next(iter(presets)), next(iter(presets.values()))[1]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", action="store_true")
    for name in ("preset", "data", "run_name", "log_dir"):
        early.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name)
    given, _ = early.parse_known_args(argv)
    if given.resume:
        log_dir = given.log_dir or train.log_dir
        run_dir = run_to_resume(log_dir, given.run_name or "")
        configs = map(type, presets[main])
        model_config, cfg, unknown = read_config(run_dir, *configs)
        reason = f"{run_dir} after step {step_of(newest_checkpoint(run_dir))}"
        if unknown:
            reason += f" (passed over, as this version has no such settings: {', '.join(unknown)})"
        cfg = dataclasses.replace(cfg, resume=True, run_name=run_dir.name, log_dir=log_dir)
        return reason, model_config, cfg
    preset, why = given.preset, "as asked for"
    if not preset:
        preset, why = best_preset(main, Path(given.data or train.data))
    if preset not in presets:
        raise UserError(f"preset={preset} is not one of {', '.join(presets)}")
    return f"preset {preset} ({why})", *presets[preset]


def best_preset(main, data):
    """(preset, in words why) that this machine and the data there are suggest."""
    import torch

    shards, gpu = any(data.glob("*_train_*")), torch.cuda.is_available()
    if "WORLD_SIZE" in os.environ:
        return main, "what torchrun gets unless --preset says otherwise"
    if shards and gpu:
        return main, f"there is a GPU, and {data} has shards"
    missing = ["there is no GPU"] * (not gpu) + [f"no shards are in {data}"] * (not shards)
    return "laptop", " and ".join(missing)


def check(model_config, cfg):
    """Raise UserError for settings that cannot work, whatever the data and the machine."""
    for name, value in (vars(model_config) | vars(cfg)).items():
        least = 1 if name in AT_LEAST_1 else -1 if name in MINUS_1 else 0
        if not isinstance(value, (bool, str)) and not least <= value < math.inf:
            kind = "whole" if isinstance(value, int) else "finite"
            raise UserError(f"{name}={value} must be a {kind} number, {least} or more")
    for name, value, most in (
        ("beta1", cfg.beta1, 1),
        ("beta2", cfg.beta2, 1),
        ("seed", cfg.seed, 2**32),
    ):
        if value >= most:
            raise UserError(f"{name}={value} must be less than {most}")
    n_embd, n_head = model_config.n_embd, model_config.n_head
    if n_embd % n_head:
        more = -(-n_embd // n_head) * n_head
        raise UserError(
            f"n_embd={n_embd} must be divisible by n_head={n_head}; n_embd={more} would be"
        )
    if cfg.seq_len > model_config.block_size:
        raise UserError(
            f"seq_len={cfg.seq_len} must be between 1 and block_size={model_config.block_size}; "
            f"shorten it or pass --block_size {cfg.seq_len}"
        )
    if not cfg.eps:
        raise UserError("eps=0 divides 0 by 0 where a gradient is 0; the usual value is 1e-8")
    if cfg.min_lr > cfg.lr and cfg.schedule != "constant":
        raise UserError(
            f"min_lr={cfg.min_lr} must not be above lr={cfg.lr}; pass a smaller --min_lr"
        )
    if cfg.kernels == "plain" and cfg.fp8 != "off":
        raise UserError(f"fp8={cfg.fp8} is no plain kernel; leave out --fp8 or --kernels plain")
    if cfg.parallel == "zero1" and cfg.optimizer != "adamw":
        raise UserError(
            f"parallel=zero1 shares out AdamW's state, and optimizer={cfg.optimizer} has another; "
            "leave one out"
        )
    if Path(cfg.run_name).name != cfg.run_name or cfg.run_name == "..":
        raise UserError(
            f"run_name={cfg.run_name} must be a plain name, without folders; --log_dir says where runs lie"
        )
    if cfg.resume and cfg.init_from:
        raise UserError(
            f"init_from={cfg.init_from} is for a new run; a resumed one goes on with its own weights: "
            "leave one out"
        )
    if cfg.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--wandb needs `pip install wandb`; log.jsonl and TensorBoard are written without it"
        )


def resolve(model_config, cfg, world, presets):
    """(model config, run config, checkpoint or None), the same on all processes: names and the
    vocabulary settled, the built-in text made, the checkpoint of a resumed run read and compared
    with the settings."""
    if world.is_main:
        model_config, cfg = settle(model_config, cfg, presets)
    model_config, cfg = world.broadcast((model_config, cfg))
    if not cfg.resume:
        return model_config, cfg, None
    run_dir = Path(cfg.log_dir) / cfg.run_name
    path, state = read_newest(run_dir)
    check_fits(path, state, model_config, cfg)
    if state["step"] > cfg.max_steps or (state["step"] == cfg.max_steps and is_finished(run_dir)):
        raise UserError(
            f"{run_dir} has done {state['step']} steps, max_steps={cfg.max_steps}; "
            "a larger --max_steps goes on"
        )
    return model_config, cfg, state


def settle(model_config, cfg, presets):
    """What one process decides for all."""
    if Path(cfg.data) == Path("data/builtin"):  # the one data set that needs nothing but Python
        from lab.data import build_builtin

        build_builtin(cfg.data)
    model_config = dataclasses.replace(
        model_config, vocab_size=vocab_size(model_config, cfg, presets)
    )
    name = cfg.run_name or f"{cfg.preset}_{time.strftime('%Y%m%d-%H%M%S')}"
    return model_config, dataclasses.replace(cfg, run_name=name)


def vocab_size(model_config, cfg, presets):
    """As asked for; else that of the resumed run, of the data, or of the preset."""
    manifest = Path(cfg.data) / "manifest.json"
    if model_config.vocab_size:
        return model_config.vocab_size
    if cfg.resume:
        configs = type(model_config), type(cfg)
        return read_config(Path(cfg.log_dir) / cfg.run_name, *configs)[0].vocab_size
    if manifest.exists():
        return read_json(manifest, vocab_size=int)["vocab_size"]
    return presets[cfg.preset][0].vocab_size


def check_fits(path, state, model_config, cfg):
    """Raise UserError where a checkpoint is not this run's."""
    wanted = {"step", "model", "optimizer", "loader", "rng", "model_config", "train_config"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        raise UserError(
            f"{path} was not written by this trainer; start from its weights with --init_from {path}"
        )
    same_shape(path, state["model_config"], model_config, also=("vocab_multiple",))
    made_by = state["train_config"]["optimizer"]
    if made_by != cfg.optimizer:
        raise UserError(
            f"optimizer={cfg.optimizer} cannot go on from {path}, which {made_by} made; "
            f"leave --optimizer out, or begin a new run with --init_from {path}"
        )


def same_shape(source, theirs, model_config, also=()):
    """Raise UserError where the shape of a model (a dict) differs from that of a config."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", *also)
    ours = {name: getattr(model_config, name) for name in names}
    different = [k for k in names if theirs.get(k) != ours[k]]
    if different:
        pairs = ", ".join(f"{k}={theirs.get(k)} (here {ours[k]})" for k in different)
        ways = [" ".join(f"--{k} {theirs.get(k)}" for k in different if k != "vocab_size")]
        # other ids, other words
        ways += ["--data with shards of its tokenizer"] * ("vocab_size" in different)
        raise UserError(
            f"{source} has another shape: {pairs}; pass {' and '.join(filter(None, ways))}"
        )
