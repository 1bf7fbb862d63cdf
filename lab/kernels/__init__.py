"""Faster ways to compute what a model computes, put into it from outside.

use() replaces modules and leaves everything else as it was: names, order and identity of the
parameters, and the random state. Where nothing needs gradients the plain modules compute.
"""

import importlib.util

import torch

from lab.cli import UserError
from lab.kernels.cross_entropy import FusedHeadLoss
from lab.kernels.fp8_mlp import Fp8MLP
from lab.kernels.fused_mlp import FusedMLP, epilogues_work


def use(model, mlp, precision, fp8="off"):
    """Replace model.head_loss, and on a GPU in bf16 every module of the class `mlp`.

    To be called before anything holds on to the modules: DDP, torch.compile. fp8: "off"; "head"
    computes the head's products in 8 bits; "all" the MLPs' too.
    """
    if fp8 != "off":
        check_fp8(model, precision, fp8)
    model.head_loss = FusedHeadLoss(model.head_loss, fp8=fp8 != "off")
    if precision.name != "bf16" or not epilogues_work(precision.device):
        return
    fast = Fp8MLP if fp8 == "all" else FusedMLP
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is mlp:
                setattr(parent, name, fast(child))


def check_fp8(model, precision, fp8):
    """Raise UserError, saying what is missing, where products in 8 bits cannot be had."""
    c, reason = model.config, why_no_fp8(precision.device)
    if not reason and precision.name != "bf16":
        reason = f"go with precision=bf16, not with {precision.name}"
    if not reason and (c.n_embd % 16 or c.padded_vocab_size % 16):
        rows = f"{c.padded_vocab_size} rows of the embedding"
        reason = f"need multiples of 16, not n_embd={c.n_embd} and {rows}"
    if reason:
        raise UserError(f"fp8={fp8}: 8 bits {reason}; pass --fp8 off")


def why_no_fp8(device):
    """Empty if this device multiplies in 8 bits, else what it needs, in a few words."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "need an NVIDIA GPU that multiplies them (RTX 40, H100 and newer)"
    if importlib.util.find_spec("triton") is None:
        return "need Triton, which is not installed"
    return ""
