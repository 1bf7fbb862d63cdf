"""What must be true of a run: of its settings and its machine before it begins, of the compiler before the first update, of
the loss and the weights after each. Where it is not, the run ends with one sentence that names the value, the rule and the
way out; where the compiler errs, it goes on without.
"""

import importlib.util
import math
from pathlib import Path

import torch

from lab.kernels.cross_entropy import gradient_is_transposed
from lab.kernels.fp8_mlp import casts_are_transposed

# ------------------------------------------------------------------------------------------- 1. before it begins

AT_LEAST_1 = (
    "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "vocab_multiple", "total_batch_size", "seq_len", "max_steps",
    "log_every", "keep_last",
)  # fmt: skip

WITHOUT_EFFECT = {  # flag: the setting, and its values, with which it does nothing; one with which it does something
    "decay_steps": ("schedule", ("cosine", "linear", "constant"), "wsd"), "min_lr": ("schedule", ("constant",), "cosine"),
    "muon_lr": ("optimizer", ("adamw",), "muon"), "hella_examples": ("hella_every", (0,), 1000),
    "sample_tokens": ("sample_every", (0,), 1000), "sample_prompt": ("sample_every", (0,), 1000),
}  # fmt: skip


def check_typed(flags, cfg):
    """Raise ValueError where one of these flags, those of the command line, does nothing. Presets and resumed runs set such
    fields too, and may."""
    for flag in flags:
        name, values, other = WITHOUT_EFFECT[flag]
        if getattr(cfg, name) in values:
            raise ValueError(f"--{flag} does nothing with {name}={getattr(cfg, name)}; leave it out, or pass --{name} {other}")


def check_config(model_config, cfg):
    """Raise ValueError for settings that cannot work, whatever the data and the machine."""
    for config in (model_config, cfg):
        for name, value in vars(config).items():
            least = 1 if name in AT_LEAST_1 else 0
            if not isinstance(value, (bool, str)) and not least <= value < math.inf:
                kind = "whole" if isinstance(value, int) else "finite"
                raise ValueError(f"{name}={value} must be a {kind} number, {least} or more")
    for name, value, most in (("beta1", cfg.beta1, 1), ("beta2", cfg.beta2, 1), ("seed", cfg.seed, 2**32)):
        if value >= most:
            raise ValueError(f"{name}={value} must be less than {most}")
    if model_config.n_embd % model_config.n_head:
        raise ValueError(
            f"n_embd={model_config.n_embd} must be divisible by n_head={model_config.n_head}; "
            f"n_embd={-(-model_config.n_embd // model_config.n_head) * model_config.n_head} would be"
        )
    if cfg.seq_len > model_config.block_size:
        raise ValueError(
            f"seq_len={cfg.seq_len} must be between 1 and block_size={model_config.block_size}; "
            f"shorten it or pass --block_size {cfg.seq_len}"
        )
    if not cfg.eps:
        raise ValueError("eps=0 divides 0 by 0 where a gradient is 0; the usual value is 1e-8")
    if cfg.min_lr > cfg.lr and cfg.schedule != "constant":
        raise ValueError(f"min_lr={cfg.min_lr} must not be above lr={cfg.lr}; pass a smaller --min_lr")
    if cfg.zero1 and cfg.optimizer != "adamw":
        raise ValueError(f"zero1=True shares out AdamW's state, and optimizer={cfg.optimizer} has another; leave one out")
    if Path(cfg.run_name).name != cfg.run_name or cfg.run_name == "..":
        raise ValueError(f"run_name={cfg.run_name} must be a plain name, without folders; --log_dir says where runs lie")
    if cfg.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb needs `pip install wandb`; log.jsonl and TensorBoard are written without it")


def check_zero1(cfg, precision, processes):
    """Raise ValueError where AdamW cannot be shared out. precision: a name, as bf16."""
    if cfg.zero1 and processes > 1 and precision == "fp16":
        raise ValueError("zero1=True needs gradients that are not scaled, and precision=fp16 scales them; leave zero1 out, or "
                         "pass --precision fp32")  # fmt: skip


def check_8_bits(model_config, reason):
    """Raise ValueError where 8-bit products are asked for and there is a reason why they are not to be had."""
    wanted = ["cross_entropy=fp8"] * (model_config.cross_entropy == "fp8") + ["fp8_mlp=True"] * model_config.fp8_mlp
    if wanted and reason:
        raise ValueError(f"{' and '.join(wanted)}: 8 bits {reason}; leave that out")


def check_transposes(model_config, device):
    """Raise ValueError where this version of Triton mixes up the 8-bit numbers that these settings have it transpose."""
    for name, asked, right in (
        ("cross_entropy=fp8", model_config.cross_entropy == "fp8", gradient_is_transposed),
        ("fp8_mlp=True", model_config.fp8_mlp, casts_are_transposed),
    ):
        if asked and not right(device):
            import triton

            raise ValueError(f"{name} cannot be computed: Triton {triton.__version__} transposes 8-bit numbers wrongly on "
                             f"{torch.cuda.get_device_name(device)}; leave it out, or try another version")  # fmt: skip


# ------------------------------------------------------------------------------------ 2. before the first update


def check_compiled(model, raw_model, loader, world, precision, log):
    """The model to train with: `model`, or, where compiling has changed what it computes, the same uncompiled.

    Compared is the loss of the micro-batch that comes next. Uncompiled it is computed row by row, which takes little memory,
    and in 16 bits where training takes 8. Both round, so they may differ by 0.01 nats a target, and by more where targets are
    so few that their errors do not cancel. A race between warps of a generated kernel (triton-lang/triton#10924) made GPT-2
    774M's first loss of 16,384 targets 0.03 too small, and its training worthless (README).
    """
    if not hasattr(model, "_orig_mod"):  # not compiled
        return model
    log.say("torch.compile is at work, which can take half a minute or more")
    x, y, _ = loader.micro_batch(loader.sequence, loader.micro_step)
    x, y = x.to(world.device), y.to(world.device)
    targets = max(1, (y >= 0).sum().item())
    with precision.autocast():
        with world.exchange(model, last=False):  # DDP must not wait for a backward pass
            compiled = model(x, y, reduction="sum")[1].item() / targets
        with torch.no_grad():
            plain = sum(raw_model(x[i : i + 1], y[i : i + 1], reduction="sum")[1].item() for i in range(x.size(0))) / targets
    wrong = math.isfinite(plain) and not abs(compiled - plain) <= 0.01 + 0.5 / math.sqrt(targets)
    found = [pair for pair in world.gather((compiled, plain) if wrong else None) if pair]
    if not found:
        return model
    log.say("torch.compile is off: for the first micro-batch the compiled model has a loss of {:.4f}, the same uncompiled one "
            "of {:.4f}; another torch than {} may be right, as 2.14 is where 2.11 is not".format(*found[0], torch.__version__))
    return model._orig_mod


# ------------------------------------------------------------------------------------------------- 3. after each

LOWER = "try a lower --lr (Muon: and --muon_lr)"


def check_finite(step, losses, step_end, loader, world, run_dir):
    """Raise FloatingPointError where the loss of a finished step is not finite, naming the shard positions."""
    loss, micro_losses = losses.arrive()
    loss = world.mean(loss.item())
    if math.isfinite(loss):
        return
    bad = [i for i, value in enumerate(micro_losses.tolist()) if not math.isfinite(value)]
    mine = [name for i in bad for name in loader.step_positions(step_end, i)]
    names = [name for part in world.gather(mine) for name in part]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    kept = ", ".join(sorted(p.name for p in run_dir.glob("model_*.pt")))
    again = f"keeps {kept}; {LOWER}, or --resume to see whether it comes back" if kept else (
        f"has no checkpoint yet; {LOWER}, or more --warmup_steps")  # fmt: skip
    raise FloatingPointError(
        f"the loss is {loss} at step {step}, on the sequences at {', '.join(names[:8])}{more}; the run stops and "
        f"{run_dir} {again}"
    )


def check_weights(step, model, run_dir):
    """Raise FloatingPointError where a finite loss has led to weights that are not: they are not worth keeping."""
    if not torch.stack(torch._foreach_norm(list(model.parameters()))).isfinite().all():
        raise FloatingPointError(f"the weights are not finite after step {step}; they are not saved, {run_dir} keeps the "
                                 f"checkpoints before; {LOWER}")  # fmt: skip
