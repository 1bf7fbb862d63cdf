"""What bench/ladder.py measures: shapes, rungs, the groups beside them, and one measurement as a
Case."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from records import ROOT  # noqa: F401 - it puts the project on the path
from torch import nn
from torch.torch_version import TorchVersion

from lab import kernels
from lab.cli import UserError
from lab.run.settings import check
from train_gpt2 import MLP, PRESETS, GPTConfig, TrainConfig

MICRO_STEP = 0  # tokens per step: whatever one micro-step holds

# name: model, and a run with the micro-batch to begin with and the tokens of a step
TINY = TrainConfig("laptop", batch_size=4, seq_len=16, total_batch_size=128)
SHAPES = {
    "tiny": (GPTConfig(2, 2, 32, 32, vocab_size=257), TINY),
    "4x256": (
        GPTConfig(4, 4, 256, 512),
        TrainConfig(batch_size=4, seq_len=512, total_batch_size=MICRO_STEP),
    ),
    "12x768": (
        GPTConfig(12, 12, 768, 512),
        TrainConfig(batch_size=8, seq_len=512, total_batch_size=MICRO_STEP),
    ),
} | {
    name: (PRESETS[name][0], dataclasses.replace(PRESETS[name][1], batch_size=batch_size))
    for name, batch_size in {"gpt2": 64, "gpt2-medium": 64, "gpt2-large": 64, "gpt2-xl": 32}.items()
}

# What a variant can set besides the fields of GPTConfig and TrainConfig, with the trainer's choice.
# The trainer has no switch for these.
BENCH = {
    "head": "fused",  # the head and its loss: plain, fused, fp8, torch or liger
    "mlp": "fused",  # plain, fused or fp8
    "compile_mode": "default",  # none, default, per block, or a mode of torch.compile
    "adamw": "fused",  # fused, foreach (a kernel for many tensors), loop (several for each tensor)
    "sdpa": "",  # attention's kernel, instead of torch's choice: a name in SDPBackend
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
RUNGS = [  # each on top of all before it
    ("fp32", START),
    ("tf32", dict(precision="tf32")),
    ("bf16", dict(precision="bf16")),
    ("compile", dict(compile_mode="default")),
    ("flash", dict(attention="sdpa")),
    ("vocab_50304", dict(vocab_multiple=128)),
    ("fused_adamw", dict(adamw="fused")),
    ("fused_loss", dict(head="fused")),
    ("bf16_residual", dict(bf16_residual=True)),
    ("fused_mlp", dict(mlp="fused")),
    ("fp8_head", dict(head="fp8")),
    ("fp8_mlp", dict(mlp="fp8")),
]
EAGER, ODD = dict(compile_mode="none"), dict(vocab_multiple=1)
HEADS, SDPA = ("plain", "fused", "torch", "liger"), ("flash", "cudnn", "efficient")
MODES = ("none", "default", "per block", "max-autotune-no-cudagraphs")
OTHERS = {  # each variant changes one thing of the trainer's defaults
    "checkpointing": {"off": {}, "on": dict(activation_checkpointing=True)},
    "cross_entropy": {name: dict(head=name) for name in (*HEADS, "fp8")}
    | {f"{name}_eager": dict(head=name) | EAGER for name in HEADS},
    "micro_batch": {str(b): dict(batch_size=b) for b in (4, 8, 16, 32, 64, 128)},
    "sdpa": {name: dict(sdpa=f"{name}_attention".upper()) for name in SDPA}
    | {"math": dict(sdpa="MATH")},
    "compile_mode": {mode.replace(" ", "_"): dict(compile_mode=mode) for mode in MODES},
    "optimizer": {
        "adamw_loop": dict(adamw="loop"),
        "adamw_foreach": dict(adamw="foreach"),
        "adamw_fused": {},
        "muon": dict(optimizer="muon"),
    },
    "vocabulary": {
        "50257_eager": ODD | EAGER,
        "50304_eager": EAGER,
        "50257_compiled": ODD,
        "50304_compiled": {},
    },
    "precision": {name: dict(precision=name) for name in ("bf16", "fp16", "tf32", "fp32")},
}
GROUPS = ("rungs", *OTHERS, "loss")
# what makes a measurement this one; older records may be of a GPU that had worked for a minute
# (sustained)
KEY = ("group", "shape", "variant", "seed", "card", "torch", "sustained", "max_steps")
KEY += ("tokens_per_step",)


def variants(group):
    """{name: settings that differ from the trainer's defaults} of a group."""
    if group in OTHERS:
        return OTHERS[group]
    found, so_far = {}, {}
    for name, settings in RUNGS:
        found[name] = so_far = so_far | settings
    return found | ({"muon": dict(optimizer="muon")} if group == "loss" else {})


class OtherHeadLoss(nn.Module):
    """In the place of a model's plain head_loss: torch's (from 2.13 on) or Liger-Kernel's."""

    def __init__(self, plain, method):
        super().__init__()
        if method == "torch" and not hasattr(F, "linear_cross_entropy"):
            raise UserError(f"head=torch needs torch 2.13, this is {torch.__version__}")
        self.plain, self.method = plain, method

    def forward(self, x, weight, targets, reduction):
        if not torch.is_grad_enabled():
            return self.plain(x, weight, targets, reduction)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = weight.to(x.dtype)
        bias = torch.zeros(weight.size(0), dtype=x.dtype, device=x.device)
        bias[self.plain.vocab_size :] = torch.finfo(x.dtype).min / 2  # pad rows: no probability
        if self.method == "torch":  # it sums in x's type, and 8 bits are too few for thousands
            how = dict(options=nn.LinearCrossEntropyOptions(), reduction="none", ignore_index=-1)
            losses = F.linear_cross_entropy(x, weight, targets, linear_bias=bias, **how)
            return losses.float().sum()
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        how = (bias, None, -1, 0.0, 0.0, "sum", None, False, torch.float32)
        return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *how)[0]


def put_in(model, own, precision):
    """Put a variant's head and MLP into a plain model."""
    if own.head in ("torch", "liger"):
        model.head_loss = OtherHeadLoss(model.head_loss, own.head)
    mlp = None if own.mlp == "plain" else MLP  # a class that no module is of: none is replaced
    plain = model.head_loss
    fp8 = "all" if own.mlp == "fp8" else "head" if own.head == "fp8" else "off"
    kernels.use(model, mlp, precision, fp8)
    if own.head not in ("fused", "fp8"):
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
        """(GPTConfig, TrainConfig, the bench's own settings). Raises UserError if they cannot
        work."""
        model, cfg = SHAPES[self.shape]
        own = BENCH | {k: v for k, v in self.settings.items() if k in BENCH}
        fields = {f.name for f in dataclasses.fields(GPTConfig)}
        model = dataclasses.replace(
            model, **{k: v for k, v in self.settings.items() if k in fields}
        )
        rest = {k: v for k, v in self.settings.items() if k not in fields and k not in BENCH}
        rest |= dict(data=str(args.data), device=args.device, seed=self.seed)
        tokens = args.tokens_per_step or cfg.total_batch_size
        if self.group == "loss":
            tokens, steps = args.loss_tokens, args.loss_steps
            rest |= dict(max_steps=steps, warmup_steps=max(1, steps // 10), schedule="cosine")
        cfg = dataclasses.replace(cfg, **rest)
        if args.batch_size and "batch_size" not in self.settings:
            cfg.batch_size = args.batch_size
        cfg.total_batch_size = tokens or cfg.batch_size * cfg.seq_len
        cfg.batch_size = min(cfg.batch_size, cfg.total_batch_size // cfg.seq_len)
        check(model, cfg)
        return model, cfg, SimpleNamespace(**own)

    def about(self, args, card):
        """What makes this measurement this one."""
        _, cfg, _ = self.configs(args)
        found = vars(self) | dict(card=card, torch=str(torch.__version__), sustained=False)
        found |= dict(max_steps=cfg.max_steps if self.group == "loss" else None)
        return found | dict(tokens_per_step=cfg.total_batch_size)


def key_of(record):
    return tuple(record.get(k) for k in KEY)


def raced(record):
    """True for a rung whose results are wrong: torch before 2.14 compiles models wider than 1,024
    with a race where products have 16 bits and the residual stream 32 (pytorch/pytorch#190517,
    docs/LOG.md; not seen with the fused MLP). Newer records of such a rung are failures, as the
    ladder compares first."""
    on = dict(bf16_residual=True, mlp="fused", precision="bf16", compile_mode="default")
    on |= record.get("settings", {})
    fused = on.get("fused_mlp", on["mlp"] != "plain")  # the older name of the same
    wide = record["shape"] in SHAPES and SHAPES[record["shape"]][0].n_embd > 1024
    exposed = on["precision"] in ("bf16", "fp16") and on["compile_mode"] != "none"
    old = TorchVersion(record["torch"]) < (2, 14)
    return wide and exposed and not (on["bf16_residual"] or fused) and old


def cases(args):
    """All measurements that the command line asks for, in order. Raises UserError for unknown
    names."""
    found = []
    for group in args.groups:
        seeds = range(args.seed, args.seed + args.seeds) if group == "loss" else [args.seed]
        for shape in args.shapes:
            for name, settings in variants(group).items():
                if not args.variants or name in args.variants:
                    found += [Case(group, shape, name, settings, seed) for seed in seeds]
    if missing := set(args.variants) - {case.variant for case in found}:
        there = ", ".join(sorted({v for g in args.groups for v in variants(g)}))
        raise UserError(f"variants={' '.join(sorted(missing))} is none; there is {there}")
    return found
