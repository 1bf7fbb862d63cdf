"""Shapes, rungs and other variants for bench/ladder.py. A Case is one measurement."""

import operator
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace

import torch
from records import ROOT  # noqa: F401 - puts the project on the path
from torch.torch_version import TorchVersion

from bert import BertConfig, BertTrainConfig
from lab.cli import UserError
from lab.config import OPTIMIZATIONS
from lab.kernels import replace_modules
from train_gpt2 import MLP, PRESETS, GPTConfig, TrainConfig

TINY = dict(batch_size=4, seq_len=16, total_batch_size=128)
ONE = dict(total_batch_size=0)  # a step is a single micro-step
PLAIN = dict(optimizer="adamw", lr=4e-4, schedule="linear")
SHAPES = {  # name: (model config, run config with the first micro-batch to try)
    "tiny": (GPTConfig(2, 2, 32, 32, vocab_size=257), TrainConfig("laptop", **TINY)),
    "4x256": (GPTConfig(4, 4, 256, 512), TrainConfig(batch_size=4, seq_len=512, **ONE)),
    "12x768": (GPTConfig(12, 12, 768, 512), TrainConfig(batch_size=8, seq_len=512, **ONE)),
    "masked-tiny": (BertConfig(2, 2, 32, 32, vocab_size=4096), BertTrainConfig(**TINY, **PLAIN)),
    "masked-4x256": (BertConfig(4, 4, 256), BertTrainConfig(batch_size=4, **ONE, **PLAIN)),
    "bert-base": (BertConfig(), BertTrainConfig(batch_size=8, **ONE, **PLAIN)),
} | {
    name: (PRESETS[name][0], replace(PRESETS[name][1], batch_size=batch_size))
    for name, batch_size in {"gpt2": 64, "gpt2-medium": 64, "gpt2-large": 64, "gpt2-xl": 32}.items()
}

# Settings of a variant for which the trainer has no flags, with the values that the trainer uses.
BENCH = {
    "head": "fused",  # the head and its loss: plain, fused or fp8
    "mlp": "fused",  # plain, fused or fp8
    "compile_mode": "default",  # none or default
    "adamw": "fused",  # fused, or loop (several kernels per tensor)
    "read_ahead": True,  # the loader reads a micro-batch in advance
}

START = dict(
    precision="fp32",
    attention="math",
    compile_mode="none",
    vocab_multiple=1,
    adamw="loop",
    head="plain",
    mlp="plain",
    bf16_residual=False,
)
RUNGS = {  # each is added to all previous ones
    "fp32": START,
    "tf32": dict(precision="tf32"),
    "bf16": dict(precision="bf16"),
    "compile": dict(compile_mode="default"),
    "flash": dict(attention="sdpa"),
    "vocab_50304": dict(vocab_multiple=128),
    "fused_adamw": dict(adamw="fused"),
    "fused_loss": dict(head="fused"),
    "bf16_residual": dict(bf16_residual=True),
    "fused_mlp": dict(mlp="fused"),
    "fp8_head": dict(head="fp8"),
    "fp8_mlp": dict(mlp="fp8"),
}
SUMS = dict(zip(RUNGS, accumulate(RUNGS.values(), operator.or_)))
EAGER, ODD, BASE = dict(compile_mode="none"), dict(vocab_multiple=1), OPTIMIZATIONS["baseline"]
VARIANTS = {  # group: {variant: settings that differ from the trainer's defaults}
    "rungs": SUMS,
    "vocabulary": {
        "50257_eager": ODD | EAGER,
        "50304_eager": EAGER,
        "50257_compiled": ODD,
        "50304_compiled": {},
    },
    "loss": SUMS | {"muon": dict(optimizer="muon")},
    "speed": {  # --optimizations, and single flags added to them
        "baseline": BASE,
        "bf16": OPTIMIZATIONS["bf16"],
        "compile": BASE | dict(compile=True),
        "flash": BASE | dict(attention="sdpa"),
        "checkpointing": BASE | dict(activation_checkpointing=True),
        "muon": BASE | dict(optimizer="muon"),
        "recommended_eager": dict(compile=False),
        "recommended": OPTIMIZATIONS["recommended"],
        "recommended_no_read_ahead": dict(read_ahead=False),
        "recommended_muon": dict(optimizer="muon"),
        "recommended_fp8_head": dict(fp8="head"),
        "full": OPTIMIZATIONS["full"],
    },
}
UNCOMPILED = {"compile": "baseline", "recommended": "recommended_eager"}
TRAINED = ("loss", "speed")  # groups that train, from several seeds, on text
# fields that identify a measurement
KEY = "group shape variant seed gpu torch max_steps tokens_per_step".split()


class NoModule:
    """A class without instances, with which replace_modules replaces no MLP."""


def replace_head_and_mlp(model, own, precision):
    """Replace the head and the MLPs of a plain model with those of a variant."""
    mlp_class = NoModule if own.mlp == "plain" else MLP
    plain = model.head_loss
    fp8 = "all" if own.mlp == "fp8" else "head" if own.head == "fp8" else "off"
    replace_modules(model, mlp_class, precision, fp8)
    if own.head == "plain":
        model.head_loss = plain


@dataclass
class Case:
    """One measurement."""

    group: str
    shape: str
    variant: str
    settings: dict
    seed: int

    def configs(self, args):
        """(model config, run config, settings of BENCH). Raises UserError if they are invalid."""

        def changed(names):
            return {k: v for k, v in self.settings.items() if k in names}

        model, cfg = SHAPES[self.shape]
        model = replace(model, **changed(vars(model)))
        cfg = replace(cfg, data=str(args.data), device=args.device, seed=self.seed)
        cfg.batch_size = args.batch_size or cfg.batch_size
        cfg.total_batch_size = args.tokens_per_step or cfg.total_batch_size
        if self.group in TRAINED:
            tokens = args.loss_tokens if self.group == "loss" else args.tokens_per_step
            cfg.max_steps, cfg.total_batch_size = args.loss_steps, tokens
            cfg.warmup_steps, cfg.schedule = max(1, cfg.max_steps // 10), "cosine"
        cfg = replace(cfg, **changed(vars(cfg)))
        cfg.total_batch_size = cfg.total_batch_size or cfg.batch_size * cfg.seq_len
        cfg.batch_size = min(cfg.batch_size, cfg.total_batch_size // cfg.seq_len)
        cfg.validate(model)
        return model, cfg, SimpleNamespace(**BENCH | changed(BENCH))

    def about(self, args, gpu):
        """The fields of a record that identify this measurement."""
        _, cfg, _ = self.configs(args)
        found = vars(self) | dict(gpu=gpu, torch=str(torch.__version__))
        found |= dict(max_steps=cfg.max_steps if self.group in TRAINED else None)
        return found | dict(tokens_per_step=cfg.total_batch_size)


def key_of(record):
    return tuple(record.get(k) for k in KEY)


def raced(record):
    """Whether a record's results are wrong because of a race condition. torch.compile before 2.14 creates it
    in models wider than 1,024 channels if matmuls are in 16 bits and the residual stream is in float32
    (pytorch/pytorch#190517, docs/LOG.md; not seen with the fused MLP). The ladder now compares losses
    first and records a failure."""
    settings = dict(bf16_residual=True, mlp="fused", precision="bf16", compile_mode="default")
    settings |= record.get("settings", {})
    wide = record["shape"] in SHAPES and SHAPES[record["shape"]][0].n_embd > 1024
    exposed = settings["precision"] in ("bf16", "fp16") and settings["compile_mode"] != "none"
    old = TorchVersion(record["torch"]) < (2, 14)
    return wide and exposed and not settings["bf16_residual"] and settings["mlp"] == "plain" and old


def cases(args):
    """All measurements selected by the flags, in order. Raises UserError for unknown variants."""
    found = []
    for group in args.groups:
        seeds = range(args.seed, args.seed + (args.seeds if group in TRAINED else 1))
        for shape in args.shapes:
            for name, settings in VARIANTS[group].items():
                if not args.variants or name in args.variants:
                    found += [Case(group, shape, name, settings, seed) for seed in seeds]
    if missing := set(args.variants) - {case.variant for case in found}:
        there = ", ".join(sorted({v for g in args.groups for v in VARIANTS[g]}))
        raise UserError(f"variants={' '.join(sorted(missing))} must be one of {there}")
    return found
