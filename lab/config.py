"""Run configuration: defaults from a preset or a resumed run, then flags, then values from the data.

Each step overrides the one before: the preset's default (or the resumed run's config.json, or the
shape of --init_from's model), --optimizations, the flag on the command line. validate() of the config
dataclasses checks the result, and resolve_config fills in the vocabulary and the names.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch

from lab.cli import UserError, command_for, parse_args, require, shell_quote
from lab.config_file import MAX_INT, RENAMED_FIELDS, read_config
from lab.data.chat import ROLES, build_chats
from lab.data.manifest import read_manifest
from lab.data.python_docs import build_python_docs
from lab.data.sources import File
from lab.data.tokenizers import printable
from lab.files import check_keys, read_errors
from lab.hardware import check_mps_sums
from lab.program import class_path, program_file
from lab.registry import (
    check_program,
    check_same_model,
    check_same_vocabulary,
    config_of,
    resolve_source,
    tokenizer_name,
)
from lab.trainer.checkpoint import read_checkpoint, read_newest
from lab.trainer.run_dir import find_run_to_resume, is_finished

PLAIN_SETTINGS = dict(attention="math", bf16_residual=False, compile=False, kernels="plain")
OPTIMIZATIONS = {  # --optimizations: groups of defaults, which flags override
    "baseline": PLAIN_SETTINGS | dict(precision="fp32"),
    "bf16": PLAIN_SETTINGS | dict(precision="bf16"),
    "recommended": {},  # as in the preset: whatever is faster and gives the same results
    "full": dict(fp8="all"),  # needs a GPU with 8-bit matmuls
}


# fields of the model config that resolve_vocabulary sets, with their values until then
FROM_DATA = dict(vocab_size=0, tokenizer="", eot_id=-1)
COMMON_FLAGS = (  # the first group of --help
    "preset", "data", "init_from", "resume", "run_name", "max_steps", "lr", "batch_size",
    "total_batch_size", "seq_len", "val_every", "sample_prompt",
)  # fmt: skip
FOREIGN_FLAGS = {  # names of flags in nanoGPT, transformers and llm.c, and ours for them
    "learning_rate": "lr", "max_learning_rate": "lr", "max_lr": "lr", "max_iters": "max_steps",
    "num_iterations": "max_steps", "epochs": "max_steps", "num_train_epochs": "max_steps",
    "iterations": "max_steps", "warmup_iters": "warmup_steps", "lr_scheduler_type": "schedule",
    "eval_interval": "val_every", "eval_steps": "val_every", "log_interval": "log_every",
    "logging_steps": "log_every", "save_steps": "checkpoint_every", "out_dir": "log_dir",
    "output_dir": "log_dir", "dataset": "data", "dtype": "precision", "max_grad_norm": "grad_clip",
    "micro_batch_size": "batch_size", "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "total_batch_size", "max_length": "seq_len",
    "gradient_checkpointing": "activation_checkpointing",
}  # fmt: skip


@dataclass
class RunConfig:
    """Settings that all training programs share: data, hardware, speed, evaluation, logging and
    checkpoints. Each program's TrainConfig adds batch, optimizer and schedule."""

    preset: str = "gpt2"  # model and other defaults: gpt2, gpt2-mini ... gpt2-2.7b, laptop, sft
    # data
    data: str = "edu_fineweb10B"  # folder of token shards (made by fineweb.py), or file of chats
    shuffle: bool = True  # read sequences in a random order; off: in the order on disk
    # start each sequence at the beginning of a document, and drop the tokens in between
    align_documents: bool = False
    # hardware
    device: str = "auto"  # cuda, mps or cpu
    timeout: int = 600  # seconds after which a process that does not answer is considered lost
    seed: int = 1337  # random seed of weights, shuffling and samples
    deterministic: bool = False  # on GPUs, identical runs agree bit for bit; 8 % slower
    # baseline: fp32, eager, plain kernels; bf16: baseline in bf16; recommended: as in the preset;
    # full: with 8-bit matmuls
    optimizations: Literal["baseline", "bf16", "recommended", "full"] = "recommended"
    # speed
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: the device's best
    parallel: Literal["ddp", "zero1", "fsdp2"] = "ddp"  # zero1 shards AdamW's state, fsdp2 all
    compile: bool = True  # use torch.compile where it works
    kernels: Literal["fused", "plain"] = "fused"  # plain: use the modules of the program as written
    fp8: Literal["off", "head", "all"] = "off"  # 8-bit matmuls in the head; all: in the MLPs too
    # evaluation and logging
    log_every: int = 10  # steps between log lines of loss and speed
    val_every: int = 250  # steps between validations; 0: never
    val_tokens: int = 10485760  # tokens of the validation split to use; 0: all
    hellaswag_every: int = 1000  # steps between HellaSwag scores; 0: never
    hellaswag_examples: int = 10042  # number of its 10042 examples to use
    blimp_every: int = 0  # steps between BLiMP scores of 20 pairs per paradigm; 0: never
    sample_every: int = 1000  # steps between text samples; 0: never
    sample_tokens: int = 64  # tokens per sample
    sample_prompt: str = "Hello, I'm a language model,"  # beginning of each sample
    timing: bool = False  # log the time of data, forward, backward and optimizer
    wandb: bool = False  # log to Weights & Biases, besides log.jsonl and TensorBoard
    # if the gradient norm jumps. record: save the weights before that step; skip: skip the update
    # too; stop: stop the run
    on_spike: Literal["continue", "record", "skip", "stop"] = "continue"
    # checkpoints
    log_dir: str = "log"  # the run directory is log_dir/run_name
    run_name: str = ""  # name of the run; empty: preset and time
    checkpoint_every: int = 1000  # steps between checkpoints; 0: only if a signal stops the run
    # write checkpoints in a background thread, from a copy in CPU memory of 12 bytes per weight (with a
    # GPU up to 20)
    async_save: bool = True
    keep_last: int = 2  # number of checkpoints to keep, besides the best
    resume: bool = False  # continue this program's newest run, or --run_name, with its settings
    init_from: str = ""  # start from the weights and shape of a run, a file, gpt2 ... gpt2-xl

    def validate(self, model_config: Any) -> None:
        """Raise UserError for settings that cannot work with any data or on any machine."""
        for config in (model_config, self):
            check_numbers(config)
        model_config.validate()
        check_range(self, 1, None, "log_every", "keep_last")
        check_range(self, 1, 2**31, "timeout")
        check_range(self, 0, 2**32 - 1, "seed")
        require(
            not self.resume or self.run_name,
            "run_name is empty; without --run_name the newest run is resumed",
        )
        require(
            Path(self.run_name).name == self.run_name and self.run_name != "..",
            f"run_name={self.run_name} must be a plain name; pass its folder as --log_dir",
        )
        path = str(Path(self.log_dir, self.run_name))
        require(
            printable(path) == path,
            f"the run directory {path!a} must be UTF-8 without control characters, because checkpoints "
            "record its name; choose another --run_name or --log_dir",
        )
        require(
            self.preset != "sft" or self.init_from,
            "preset=sft fine-tunes an existing model; pass its run, for example --init_from log/RUN, or to "
            "train_gpt2.py --init_from gpt2",
        )
        require(
            not self.wandb or importlib.util.find_spec("wandb"),
            "--wandb needs `pip install wandb`; log.jsonl and TensorBoard are written without it",
        )
        check_training(self, model_config)


# settings that the presets "laptop" and "sft" of several programs share
LAPTOP: dict[str, Any] = dict(
    preset="laptop", data="data/builtin", log_every=20, val_every=200, val_tokens=131072,
    hellaswag_every=0, sample_every=200, sample_tokens=200, sample_prompt="The ", checkpoint_every=500,
)  # fmt: skip
SFT: dict[str, Any] = dict(
    preset="sft", data="examples/chats.jsonl", val_every=20, val_tokens=0, hellaswag_every=0,
    sample_every=50, sample_prompt="{user} What is a token?\n\n{assistant}".format(**ROLES),
    checkpoint_every=20, total_batch_size=4096, max_steps=200, schedule="linear", min_lr=0.0,
    weight_decay=0.0, compile=False,
)  # fmt: skip


# --------------------------------------------------------------------------------------- validation


def check_numbers(config: Any) -> None:
    """Raise UserError for a number that is negative, not finite or too large for torch."""
    for name, value in vars(config).items():
        if type(value) is int and (name, value) != ("eot_id", -1):
            require(value >= 0, f"{name}={value} must be at least 0")
            require(value <= MAX_INT, f"{name}={value} must be at most {MAX_INT}")
        if isinstance(value, float):
            require(math.isfinite(value), f"{name}={value} must be a finite number")
            require(value >= 0, f"{name}={value} must be at least 0")


def check_range(config: Any, least: int, most: int | None, *names: str) -> None:
    """Raise UserError unless these fields of a config are from `least` to `most` (None: no limit)."""
    for name in names:
        value = getattr(config, name)
        if value < least or (most is not None and value > most):
            rule = f"at least {least}" if most is None else f"from {least} to {most}"
            raise UserError(f"{name}={value} must be {rule}")


def check_length(config: Any, name: str) -> None:
    """Raise UserError for a length that is neither a number of steps nor a fraction below 1."""
    value = getattr(config, name)
    require(
        isinstance(value, int) or value < 1,
        f"{name}={value} must be a whole number of steps, or a fraction of max_steps below 1; for "
        f"{value:g} steps pass --{name} {round(value)}",
    )


def check_shape(config: Any) -> None:
    """Raise UserError for a model shape (train_gpt2.GPTConfig) that cannot work."""
    check_range(config, 1, 4096, "n_layer", "n_head", "vocab_multiple")
    check_range(config, 1, None, "n_embd")
    check_range(config, 2, None, "block_size")
    multiple = -(-config.n_embd // config.n_head) * config.n_head
    require(
        config.n_embd % config.n_head == 0,
        f"n_embd={config.n_embd} must be divisible by n_head={config.n_head}; try {multiple}",
    )


def check_training(cfg: Any, model_config: Any) -> None:
    """The part of RunConfig.validate that checks the settings of train_gpt2.TrainConfig."""
    check_range(cfg, 1, 2**28, "total_batch_size", "seq_len", "max_steps")
    for name in ("beta1", "beta2"):
        require(getattr(cfg, name) < 1, f"{name}={getattr(cfg, name)} must be less than 1")
    for name in ("warmup_steps", "decay_steps"):
        check_length(cfg, name)
    require(
        cfg.seq_len <= model_config.block_size,
        f"seq_len={cfg.seq_len} must be at most block_size={model_config.block_size}; shorten it"
        + f" or pass --block_size {cfg.seq_len}" * (not cfg.resume and not cfg.init_from),
    )
    require(
        cfg.eps > 0,
        "eps=0 must be above 0, because a gradient of 0 would give 0 / 0; the usual value is 1e-8",
    )
    require(
        cfg.lr > 0,
        f"lr={cfg.lr} must be above 0, because the other learning rates are stored as multiples "
        "of it; to freeze all weights, pass a tiny value such as 1e-9 for each learning rate",
    )
    require(
        cfg.min_lr <= cfg.lr or cfg.schedule == "constant",
        f"min_lr={cfg.min_lr} must not be above lr={cfg.lr}; pass a smaller --min_lr",
    )
    require(
        cfg.kernels == "fused" or cfg.fp8 == "off",
        f"fp8={cfg.fp8} needs the fused kernels; pass --fp8 off or --kernels fused",
    )
    require(
        cfg.parallel == "ddp" or cfg.optimizer == "adamw",
        f"parallel={cfg.parallel} shards AdamW's state and does not work with "
        f"optimizer={cfg.optimizer}; pass --optimizer adamw, or leave --parallel out",
    )
    require(
        cfg.on_spike != "skip" or cfg.optimizer == "adamw",
        f"on_spike=skip works with AdamW only, not with optimizer={cfg.optimizer}; pass --on_spike stop",
    )


# ------------------------------------------------------------------------------------ command line


def parse_flags(
    argv: list[str], presets: dict, description: str, trainer_class: Any
) -> tuple[str, Any, Any]:
    """Parse the flags of a training program: one for each field of the two config dataclasses. Returns
    (where the defaults come from and which flags changed them, model config, run config).

    presets: {name: (model config, run config)}, the main one first. The defaults are those of --preset,
    of the preset for this machine, or of the run to --resume.
    """
    argv = rename_flags(argv)
    reason, *defaults = choose_defaults(argv, presets, trainer_class)
    check_foreign_flags(argv, *defaults)
    text = f"{description.split('One training step in words')[0]}The defaults shown are those of {reason}."
    groups = vars(parse_args(group_flags(*defaults), argv, description=text)).values()
    values = {name: value for group in groups for name, value in vars(group).items()}
    model_config, cfg = (
        dataclasses.replace(config, **{name: values[name] for name in vars(config)})
        for config in defaults
    )
    cfg.validate(model_config)
    before = vars(defaults[0]) | vars(defaults[1])
    was = " (was {})" if cfg.resume else ""
    changed = [f"{k}={values[k]}{was.format(v)}" for k, v in before.items() if values[k] != v]
    for name in FROM_DATA if cfg.resume else ():
        require(
            before[name] in (FROM_DATA[name], values[name]),
            f"{name}={values[name]} must be {before[name]}, as in the resumed {cfg.run_name}; leave it out",
        )
    if changed:
        reason += f"; changed by flags: {', '.join(changed)}"
    if cfg.resume and any(
        before[name] != values[name] for name in ("seed", "shuffle", "seq_len", "align_documents")
    ):
        reason += (
            "; the text now has another order, so this epoch repeats some of it and omits some"
        )
    return reason, model_config, cfg


def group_flags(model_config: Any, cfg: Any) -> type:
    """A dataclass with one field for each group of flags in --help: the common ones, those of the model
    config, of the program's run config, and of RunConfig. The defaults are those of the two configs."""
    from tyro._docstrings import get_field_docstring  # no public name; tyro is slow to import
    from tyro.conf import arg

    groups: dict[str, list] = {"common": [], "model": [], "training": [], "run": []}
    for config, own in ((model_config, "model"), (cfg, "training")):
        hints = get_type_hints(type(config), include_extras=True)
        for name, default in vars(config).items():
            in_run = own == "training" and name in RunConfig.__dataclass_fields__
            group = "common" if name in COMMON_FLAGS else "run" if in_run else own
            help_text = arg(help=get_field_docstring(type(config), name, ()) or "")
            groups[group].append((name, Annotated[hints[name], help_text], default))
    groups["common"].sort(key=lambda flag: COMMON_FLAGS.index(flag[0]))
    classes = [(g, dataclasses.make_dataclass(g, flags)) for g, flags in groups.items()]
    return dataclasses.make_dataclass(
        "flags", [(g, cls, dataclasses.field(default_factory=cls)) for g, cls in classes]
    )


def check_foreign_flags(argv: list[str], *configs: Any) -> None:
    """Raise UserError for another project's name of one of our flags, even mistyped, and for --resume RUN."""
    for flag, value in zip(argv, argv[1:]):
        if flag == "--resume" and not value.startswith("-"):
            folder, run = Path(value).parent, f"--run_name {shell_quote(Path(value).name)}"
            if str(folder) not in (".", "log"):
                run = f"--log_dir {shell_quote(folder)} {run}"
            raise UserError(f"--resume {value}: --resume has no value; pass --resume {run}")
    names = {name for config in configs for name in vars(config)}
    for word in argv:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no_").replace("-", "_")
        if not flag.startswith("--") or name in names:
            continue
        close = difflib.get_close_matches(name, FOREIGN_FLAGS, 1, cutoff=0.85)
        ours = FOREIGN_FLAGS[close[0]] if close else ""
        if ours in names:
            raise UserError(f"{flag} is not a flag of this program; pass --{ours} instead")


def rename_flags(argv: list[str]) -> list[str]:
    """Replace old names of flags in argv by today's names."""
    renamed = []
    for word in argv:
        flag, sign, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        off = "no_" * name.startswith("no_")
        new = RENAMED_FIELDS.get(name.removeprefix("no_"))
        renamed.append(f"--{off}{new}{sign}{value}" if flag.startswith("--") and new else word)
    return renamed


def choose_defaults(argv: list[str], presets: dict, trainer_class: Any) -> tuple[str, Any, Any]:
    """(reason, model config, run config): the defaults, before the other flags in argv are applied."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", action="store_true")
    for name in ("preset", "optimizations", "data", "run_name", "log_dir", "init_from"):
        early.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default="")
    _, main = next(iter(presets.values()))
    early.set_defaults(data=main.data, log_dir=main.log_dir)
    given, _ = early.parse_known_args(argv)
    defaults = defaults_from_run if given.resume else defaults_from_preset
    reason, model, train = defaults(given, presets, trainer_class)
    if given.optimizations in OPTIMIZATIONS:  # parse_args reports an unknown word
        new = OPTIMIZATIONS[given.optimizations] | {"optimizations": given.optimizations}
        model, train = (
            dataclasses.replace(c, **{k: v for k, v in new.items() if k in vars(c)})
            for c in (model, train)
        )
        reason += f", optimizations={given.optimizations}"
    return reason, model, train


def defaults_from_run(given: Any, presets: dict, trainer_class: Any) -> tuple[str, Any, Any]:
    """The settings of the run that --resume continues."""
    if given.init_from:
        raise UserError(
            f"init_from={given.init_from} is for a new run, but --resume continues a run with its own "
            "weights; leave out one of the two flags"
        )
    run_dir = find_run_to_resume(given.log_dir, given.run_name, class_path(trainer_class))
    check_program(run_dir, trainer_class)
    model_class, train_class = map(type, next(iter(presets.values())))
    model_config, cfg, unknown = read_config(run_dir, model_class, train_class)
    if given.preset not in ("", cfg.preset):
        raise UserError(
            f"preset={given.preset} must be that of the resumed {run_dir}, {cfg.preset}; leave it out"
        )
    ignored = f" (ignored, unknown to this version: {', '.join(unknown)})" if unknown else ""
    cfg = dataclasses.replace(cfg, resume=True, run_name=run_dir.name, log_dir=given.log_dir)
    return f"{run_dir}{ignored}", model_config, cfg


def defaults_from_preset(given: Any, presets: dict, trainer_class: Any) -> tuple[str, Any, Any]:
    """The settings of --preset, or of the preset for this machine. --init_from changes the shape to that
    of its model, and adapts the learning rate and the sequence length to it."""
    preset, why = given.preset, "from --preset"
    if not preset:
        preset, why = auto_preset(next(iter(presets)), Path(given.data))
    if preset not in presets:
        raise UserError(f"preset={preset} must be one of {', '.join(presets)}")
    model_config, cfg = presets[preset]
    if given.init_from:
        shape = config_of(given.init_from, given.log_dir, trainer_class)
        # the best learning rate of Adam is proportional to 1 / width and 1 / sqrt(depth) (Yang et al.
        # 2022 and 2023, Tensor Programs V and VI)
        wider, deeper = (shape[k] / getattr(model_config, k) for k in ("n_embd", "n_layer"))
        lr = round(cfg.lr / wider / deeper**0.5, 6)
        same = {name: value for name, value in shape.items() if name in vars(model_config)}
        if preset == "sft":  # each turn ends with end-of-text, and must see the earlier ones
            same.pop("document_mask", None)
        model_config = dataclasses.replace(model_config, **same)
        cfg = dataclasses.replace(cfg, lr=lr, seq_len=min(cfg.seq_len, shape["block_size"]))
        why += f", with the shape of {given.init_from} and lr={lr} for its size"
    model_config = dataclasses.replace(model_config, **FROM_DATA)
    return f"preset {preset} ({why})", model_config, cfg


def auto_preset(main: str, data: Path) -> tuple[str, str]:
    """(preset, reason) for this machine and the data on it."""
    if not torch.cuda.is_available():
        return "laptop", "there is no GPU"
    if os.environ.get("WORLD_SIZE"):
        return main, "the default under torchrun on GPUs"
    if any(data.glob("*_train_*")):
        return main, f"there is a GPU and data in {data}"
    return "laptop", f"no data in {data}; to make some, see `{command_for('fineweb.py')} --help`"


# ----------------------------------------------------------------------------- values from the data


def resolve_config(
    model_config: Any, cfg: Any, world: Any, presets: dict, trainer_class: Any
) -> tuple[Any, Any, dict | None]:
    """Fill in names and vocabulary, create built-in data, and read the checkpoint of a resumed run.
    Returns (model config, run config, checkpoint or None), the same on all ranks."""
    model_config, cfg = world.run_on_rank0(
        lambda: resolve_on_rank0(model_config, cfg, presets, trainer_class)
    )
    check_mps_sums(world.device, model_config.padded_vocab_size, cfg.batch_size * cfg.seq_len)
    if not cfg.resume:
        return model_config, cfg, None
    run_dir = Path(cfg.log_dir) / cfg.run_name
    path = world.run_on_rank0(lambda: read_newest(run_dir)[0])
    state = read_checkpoint(path)
    validate_checkpoint(path, state, model_config, cfg)
    if state["step"] > cfg.max_steps or (state["step"] == cfg.max_steps and is_finished(run_dir)):
        raise UserError(
            f"{run_dir} has already done {state['step']} steps, and max_steps={cfg.max_steps}; "
            "pass a larger --max_steps to continue"
        )
    return model_config, cfg, state


def resolve_on_rank0(
    model_config: Any, cfg: Any, presets: dict, trainer_class: Any
) -> tuple[Any, Any]:
    """Settings that rank 0 chooses for all ranks, which may see different states of a shared folder."""
    if cfg.init_from and not cfg.resume:
        cfg = dataclasses.replace(cfg, init_from=resolve_source(cfg.init_from, cfg.log_dir))
    builtin = {"data/builtin": "bytes", "data/builtin_wordpiece": "wordpiece"}
    tokenizer, manifest = builtin.get(Path(cfg.data).as_posix()), read_manifest(cfg.data)
    if tokenizer and not (manifest and manifest["complete"]):  # data made from Python itself
        build_python_docs(cfg.data, tokenizer)
    model_config = resolve_vocabulary(model_config, cfg, presets)
    if (kind := File(cfg.data, cfg.data, 0).kind) and not Path(cfg.data).is_dir():
        require(
            kind != "text" or not Path(cfg.data).exists(),
            f"data={cfg.data} is plain text, but must be a folder of shards or a file of conversations; "
            f"run `{command_for('fineweb.py')} --source {shell_quote(cfg.data)} --out data/mine` "
            "(docs/DATA.md says with which --tokenizer), then pass --data data/mine",
        )
        require(
            kind != "bin",
            f"data={cfg.data} is a single shard, but must be a folder of shards; pass --data "
            f"{shell_quote(Path(cfg.data).parent)}",
        )
        require(
            hasattr(trainer_class.model_class, "generate"),
            f"data={cfg.data} is a file of conversations, but masked language models train on texts; pass a "
            f"folder that `{command_for('fineweb.py')} --tokenizer wordpiece` made",
        )
        # a file of conversations, packed into rows of one sequence each
        name = tokenizer_name(model_config, cfg.init_from)
        cfg = dataclasses.replace(cfg, data=build_chats(cfg.data, name, cfg.seq_len))
    if cfg.init_from and not cfg.resume:
        check_same_vocabulary(cfg.init_from, cfg.data)
    file = Path(program_file(trainer_class)).stem
    prefix = "" if file == "train_gpt2" else f"{file}_"
    name = cfg.run_name or f"{prefix}{cfg.preset}_{time.strftime('%Y%m%d-%H%M%S')}"
    return model_config, dataclasses.replace(cfg, run_name=name)


def resolve_vocabulary(model_config: Any, cfg: Any, presets: dict) -> Any:
    """Set the vocabulary size, tokenizer and end-of-text of model_config to the data's. For data
    without a manifest, the vocabulary size is that of the flag, of --init_from or of the preset."""
    asked = model_config.vocab_size
    found: dict[str, Any] = dict(vocab_size=asked or presets[cfg.preset][0].vocab_size)
    if manifest := read_manifest(cfg.data):
        found = dict(
            vocab_size=manifest["vocab_size"],
            tokenizer=manifest["tokenizer"],
            eot_id=manifest["eot"],
        )
        for name, value in found.items():
            flag = getattr(model_config, name)
            if flag not in (FROM_DATA[name], value):
                rule = f"{name}={flag} must be {value}, as in {cfg.data}; leave it out"
                require(cfg.resume, rule)
                found[name] = flag  # a resumed run keeps its own
    elif cfg.init_from and not asked:
        theirs = config_of(cfg.init_from, cfg.log_dir)
        found = {name: value for name, value in theirs.items() if name in FROM_DATA}
    model_config = dataclasses.replace(model_config, **found)
    require(
        model_config.eot_id < model_config.vocab_size,
        f"eot_id={model_config.eot_id} must be less than vocab_size={model_config.vocab_size}; leave it out "
        "for the last id",
    )
    return model_config


def validate_checkpoint(path: Path, state: Any, model_config: Any, cfg: Any) -> None:
    """Raise UserError if a checkpoint does not belong to this run."""
    parts = "model", "optimizer", "loader", "scaler", "model_config", "train_config"
    wanted = dict.fromkeys(parts, dict) | dict(step=int, batch_size=int, best_val=(int, float))
    with read_errors(path, "checkpoint", f"start from its weights with --init_from {path}"):
        check_keys(state, **wanted)
    check_same_model(path, state["model_config"], model_config)
    made_by = state["train_config"].get("optimizer")
    if made_by != cfg.optimizer:
        raise UserError(
            f"optimizer={cfg.optimizer} cannot resume from {path}, whose optimizer is {made_by}; "
            f"leave --optimizer out, or start a new run with --init_from {path}"
        )
