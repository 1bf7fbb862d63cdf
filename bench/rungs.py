"""What bench/ladder.py measures: shapes, rungs, the groups beside them, and one measurement of all these as a Case."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.torch_version import TorchVersion

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from records import origin  # noqa: E402

from lab.run.vitals import check_config  # noqa: E402
from train_gpt2 import PRESETS, GPTConfig, TrainConfig  # noqa: E402

MICRO_STEP = 0  # tokens per step: whatever one micro-step holds

# name: model, and a run with the micro-batch to begin with and the tokens of a step
SHAPES = {
    "tiny": (GPTConfig(2, 2, 32, 32, vocab_size=257), TrainConfig("laptop", batch_size=4, seq_len=16, total_batch_size=128)),
    "4x256": (GPTConfig(4, 4, 256, 512), TrainConfig(batch_size=4, seq_len=512, total_batch_size=MICRO_STEP)),
    "12x768": (GPTConfig(12, 12, 768, 512), TrainConfig(batch_size=8, seq_len=512, total_batch_size=MICRO_STEP)),
} | {
    name: (PRESETS[name][0], dataclasses.replace(PRESETS[name][1], batch_size=batch_size))
    for name, batch_size in {"gpt2": 64, "gpt2-medium": 64, "gpt2-large": 64, "gpt2-xl": 32}.items()
}

# What a variant can set besides the fields of GPTConfig and TrainConfig. The trainer has no switch for these, as it always
# takes the best; the bench takes the others.
BENCH = {
    "compile_mode": "default",  # none, default, per block, or a mode of torch.compile
    "adamw": "fused",  # fused, foreach (a kernel for many tensors), loop (several kernels for each tensor)
    "kernel": "",  # of attention, instead of torch's choice: a name in SDPBackend
    "qkv_gradients": "three",  # tensors that are packed, or packed: written into one (packed_attention.py)
    "attention_products": "bf16",  # or fp8: of attention's linear layers (fp8_attention.py)
    "returns": "loss",  # loss and logits: what the training step gives back, as build-nanogpt's and nanoGPT's do
    "loader": "as built",  # not pinned: pageable memory, the copy waits. not ahead: read when asked for, no thread
}

START = dict(
    precision="fp32", attention="math", compile_mode="none", vocab_multiple=1, adamw="loop", cross_entropy="plain",
    bf16_residual=False, fused_mlp=False, fp8_mlp=False,
)  # fmt: skip
RUNGS = [  # each on top of all before it
    ("fp32", START),
    ("tf32", dict(precision="tf32")),
    ("bf16", dict(precision="bf16")),
    ("compile", dict(compile_mode="default")),
    ("flash", dict(attention="sdpa")),
    ("vocab_50304", dict(vocab_multiple=128)),
    ("fused_adamw", dict(adamw="fused")),
    ("fused_loss", dict(cross_entropy="chunked")),
    ("bf16_residual", dict(bf16_residual=True)),
    ("fused_mlp", dict(fused_mlp=True)),
    ("fp8_head", dict(cross_entropy="fp8")),
    ("fp8_mlp", dict(fp8_mlp=True)),
]
IN_8_BITS = dict(cross_entropy="fp8", fp8_mlp=True)
# each changes one thing of the trainer's defaults
OTHERS = {
    "checkpointing": [("off", {}), ("on", dict(activation_checkpointing=True))],
    "cross_entropy": [(m, dict(cross_entropy=m)) for m in ("plain", "chunked", "torch", "liger", "fp8")]
    + [(f"{m}_eager", dict(cross_entropy=m, compile_mode="none")) for m in ("plain", "chunked", "torch", "liger")],
    "logits": [("dropped", dict(cross_entropy="plain")),
               ("returned", dict(cross_entropy="plain", returns="loss and logits"))],
    "qkv_gradients": [("three", {}), ("packed", dict(qkv_gradients="packed"))],
    "attention_8_bits": [
        ("three", IN_8_BITS), ("packed", IN_8_BITS | dict(qkv_gradients="packed")),
        ("three_fp8", IN_8_BITS | dict(attention_products="fp8")),
        ("packed_fp8", IN_8_BITS | dict(attention_products="fp8", qkv_gradients="packed")),
    ],
    "micro_batch": [(str(b), dict(batch_size=b)) for b in (4, 8, 16, 32, 64, 128)],
    "loader": [("as_built", {}), ("not_pinned", dict(loader="not pinned")), ("not_ahead", dict(loader="not ahead"))],
    "sdpa": [
        ("flash", dict(kernel="FLASH_ATTENTION")), ("cudnn", dict(kernel="CUDNN_ATTENTION")),
        ("efficient", dict(kernel="EFFICIENT_ATTENTION")), ("math", dict(kernel="MATH")),
    ],
    "compile_mode": [
        (m.replace(" ", "_"), dict(compile_mode=m))
        for m in ("none", "default", "per block", "reduce-overhead", "max-autotune-no-cudagraphs")
    ],
    "optimizer": [
        ("adamw_loop", dict(adamw="loop")), ("adamw_foreach", dict(adamw="foreach")), ("adamw_fused", {}),
        ("muon", dict(optimizer="muon")),
    ],
    "vocabulary": [
        ("50257_eager", dict(vocab_multiple=1, compile_mode="none")), ("50304_eager", dict(compile_mode="none")),
        ("50257_compiled", dict(vocab_multiple=1)), ("50304_compiled", {}),
    ],
    "precision": [(p, dict(precision=p)) for p in ("bf16", "fp16", "tf32", "fp32")],
}  # fmt: skip
GROUPS = ["rungs", *OTHERS, "loss"]
KEY = ("group", "shape", "variant", "seed", "card", "torch", "sustained", "max_steps", "tokens_per_step")  # of one measurement


def known(settings):
    """Without the switches that this version of the trainer does not have."""
    fields = {f.name for config in (GPTConfig, TrainConfig) for f in dataclasses.fields(config)}
    return {k: v for k, v in settings.items() if k in fields or k in BENCH}


def variants(group):
    """{name: settings that differ from the trainer's defaults} of a group, those only that this trainer knows."""
    if group not in ("rungs", "loss"):
        return {name: settings for name, settings in OTHERS[group] if known(settings) == settings}
    found, so_far = {}, known(START)
    for name, settings in RUNGS:
        if name == "fp32" or known(settings) == settings:
            so_far = so_far | known(settings)
            found[name] = so_far
    if group == "loss":
        found["muon"] = dict(optimizer="muon")
        found["fp8_attention"] = so_far | dict(attention_products="fp8")
    return found


@dataclass
class Case:
    """One measurement."""

    group: str
    shape: str
    variant: str
    settings: dict
    seed: int
    sustain: int = 0  # seconds of steps before the timed ones

    def configs(self, args):
        """(GPTConfig, TrainConfig, the bench's own settings) of this measurement. Raises ValueError if they cannot work."""
        model, cfg = SHAPES[self.shape]
        own = BENCH | {k: v for k, v in self.settings.items() if k in BENCH}
        fields = {f.name for f in dataclasses.fields(GPTConfig)}
        model = dataclasses.replace(model, **{k: v for k, v in self.settings.items() if k in fields})
        rest = {k: v for k, v in self.settings.items() if k not in fields and k not in BENCH}
        cfg = dataclasses.replace(cfg, data=str(args.data), device=args.device, seed=self.seed, **rest)
        tokens = args.tokens_per_step or cfg.total_batch_size
        if self.group == "loss":
            tokens, steps = args.loss_tokens, args.loss_steps
            cfg = dataclasses.replace(cfg, max_steps=steps, warmup_steps=max(1, steps // 10), schedule="cosine")
        if args.batch_size and "batch_size" not in self.settings:
            cfg.batch_size = args.batch_size
        cfg.total_batch_size = tokens or cfg.batch_size * cfg.seq_len
        cfg.batch_size = min(cfg.batch_size, cfg.total_batch_size // cfg.seq_len)
        check_config(model, cfg)
        return model, cfg, SimpleNamespace(**own)

    def key(self, args, card):
        _, cfg, _ = self.configs(args)
        record = vars(self) | dict(card=card, torch=str(torch.__version__), sustained=self.sustain > 0)
        record |= dict(tokens_per_step=cfg.total_batch_size, max_steps=cfg.max_steps if self.group == "loss" else None)
        return tuple(record[k] for k in KEY)

    def record(self, args, card):
        """What is known of this measurement before it is made."""
        key = dict(zip(KEY, self.key(args, card)))
        about = dict(settings=self.settings, data=args.data_name, at_once=args.at_once, error=None)
        command = " ".join(["python bench/ladder.py", *self.flags(args)])
        return {"bench": "ladder"} | key | about | origin(command, args.commit)

    def flags(self, args):
        """What the command line says of this measurement alone."""
        words = ["--shapes", self.shape, "--groups", self.group, "--variants", self.variant]
        words += ["--seed", str(self.seed)] if self.group == "loss" or self.seed != 1337 else []
        words += ["--seeds", "1"] if self.group == "loss" else ["--steps", str(args.steps)]
        if self.group == "loss":
            words += ["--loss_steps", str(args.loss_steps), "--loss_tokens", str(args.loss_tokens)]
            words += ["--val_tokens", str(args.val_tokens)]
        words += ["--tokens_per_step", str(args.tokens_per_step)] if args.tokens_per_step and self.group != "loss" else []
        words += ["--batch_size", str(args.batch_size)] if args.batch_size else []
        words += ["--sustain", str(self.sustain)] if self.sustain else []
        words += ["--at_once", str(args.at_once)] if args.at_once > 1 else []
        words += ["--data", Path(args.data).name] if args.data_name != "random" else []
        return words + (["--device", args.device] if args.device != "auto" else [])


def raced(record):
    """True for a rung whose results are wrong: torch before 2.14 compiles models wider than 1,024 with a race where products
    have 16 bits and the residual stream 32 (pytorch/pytorch#190517, README's log; not seen with the fused MLP). The check of
    the compiler now makes a failure of such a rung; older records of it are times of wrong work."""
    on = {"bf16_residual": True, "fused_mlp": True, "precision": "bf16", "compile_mode": "default"} | record.get("settings", {})
    wide = record["shape"] in SHAPES and SHAPES[record["shape"]][0].n_embd > 1024
    exposed = on["precision"] in ("bf16", "fp16") and on["compile_mode"] != "none"
    safe = on["bf16_residual"] or on["fused_mlp"]
    return wide and exposed and not safe and TorchVersion(record["torch"]) < (2, 14)


def cases(args):
    """All measurements that the command line asks for, in order. Raises ValueError for names that do not exist."""
    found = []
    for group in args.groups:
        for shape in args.shapes:
            for variant, settings in variants(group).items():
                if args.variants and variant not in args.variants:
                    continue
                seeds = range(args.seed, args.seed + args.seeds) if group == "loss" else [args.seed]
                sustain = args.sustain if shape == "gpt2" and group != "loss" else 0
                found += [Case(group, shape, variant, settings, seed, sustain) for seed in seeds]
    missing = set(args.variants) - {case.variant for case in found}
    if missing:
        there = ", ".join(sorted({v for g in args.groups for v in variants(g)}))
        raise ValueError(f"variants={','.join(sorted(missing))} is not in {','.join(args.groups)}; there is {there}")
    return found
