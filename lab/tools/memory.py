"""Estimate the GPU memory of a training step of train_gpt2.py, item by item. Used by lab plan.

Sizes are computed from the shapes of the tensors that autograd saves. tests/test_plan.py compares them
with what autograd saves for small models, and with measured peaks. In all functions, s is a MemorySpec.
"""

import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch

from lab.kernels.cross_entropy import CHUNK, SMALL
from lab.kernels.fused_mlp import MIN_POSITIONS
from lab.program import import_file

PROGRAM = import_file("train_gpt2.py", "lab plan")
GIB = 2**30
# assumed memory outside of PyTorch's allocator: CUDA's context and kernels; NCCL's buffers
CONTEXT_GIB, NCCL_GIB = 0.7, 0.5
PHASES = {  # phases of a step in which memory may peak
    "loss": "while the loss is computed",
    "head": "at the start of the backward pass",
    "block": "in the last block's backward pass",
    "end": "at the end of the backward pass",
    "update": "in the optimizer's step",
}
ALL_PHASES = " ".join(PHASES)
KEPT = "loss head block"  # phases in which the saved activations of the forward pass exist

Line = tuple[str, float, str]  # (label, bytes, the phases in which the memory is in use)


@functools.cache
def meta_model(*fields: Any) -> Any:
    """A model with these fields of GPTConfig, on the meta device."""
    with torch.device("meta"):
        return PROGRAM.GPT(PROGRAM.GPTConfig(*fields))


@dataclass
class MemorySpec:
    """The settings that determine the memory of a step."""

    model: Any  # a GPTConfig
    cfg: Any  # a TrainConfig whose batch_size is not 0 and whose precision is not auto
    world_size: int = 1
    device_type: str = "cuda"
    # the kernels of the head's loss and of the MLPs: plain, fused or fp8 (see select_kernels)
    kernels: tuple[str, str] = ("fused", "fused")

    def __post_init__(self):
        c, cfg, self.shapes = self.model, self.cfg, meta_model(*astuple(self.model))
        self.positions = cfg.batch_size * cfg.seq_len  # tokens per process and micro-step
        all_positions = self.positions * self.world_size
        self.grad_accum_steps = max(1, cfg.total_batch_size // all_positions)
        self.parallel = cfg.parallel if self.world_size > 1 else ""
        bf16, cuda = cfg.precision == "bf16", self.device_type == "cuda"
        # bytes per element of a matmul's output, and of the residual stream
        self.bytes = 2 if bf16 or cfg.precision == "fp16" else 4
        self.stream = 2 if bf16 and c.bf16_residual else 4
        # for small micro-steps, lab.kernels uses the plain modules
        small, (head, mlp) = self.positions * c.padded_vocab_size * 4 <= SMALL, self.kernels
        self.head = "plain" if small else head
        self.mlp = mlp if self.positions >= MIN_POSITIONS and bf16 and cuda else "plain"
        self.num_params = sum(p.numel() for p in self.shapes.parameters())
        self.in_matrices = sum(p.numel() for p in self.shapes.block_matrices())
        # GiB that PyTorch's allocator does not count
        self.outside = (CONTEXT_GIB if cuda else 0.5) + NCCL_GIB * (self.world_size > 1)


def select_kernels(kernels: str, fp8: str) -> tuple[str, str]:
    """MemorySpec.kernels for these values of the trainer's --kernels and --fp8."""
    if kernels == "plain":
        return "plain", "plain"
    return "fused" if fp8 == "off" else "fp8", "fp8" if fp8 == "all" else "fused"


def memory_breakdown(s: MemorySpec) -> list[Line]:
    """The memory that PyTorch's allocator holds in one process, item by item."""
    return [*state(s), *activations(s), *head(s)]


def state(s: MemorySpec) -> Iterator[Line]:
    """Memory that does not depend on the micro-batch: parameters, gradients, optimizer state."""
    P, M, n, accumulates = s.num_params, s.in_matrices, s.world_size, s.grad_accum_steps > 1
    V_C = s.model.padded_vocab_size * s.model.n_embd
    # whether gradients exist between steps, for accumulation or in DDP's buckets
    stay = s.parallel != "fsdp2" and (accumulates or s.parallel == "ddp")
    if s.parallel == "fsdp2":
        block = M / s.model.n_layer
        yield "shards of training state", 16 * P / n, ALL_PHASES  # weights, gradients, moments
        # all-gathered: two blocks at a time, and all parameters outside of blocks
        yield "unsharded parameters", 2 * s.bytes * block + 4 * (P - M), ALL_PHASES
        yield "unsharded block gradients", 4 * block, "block"
    else:
        yield "parameters", 4 * P, ALL_PHASES
        yield "gradients", 4 * P, ALL_PHASES if stay else "end update"
        if accumulates and s.parallel == "ddp":  # the last micro-step moves the gradients into them
            yield "DDP buckets", 4 * P, "loss head block end"
        elif accumulates and s.cfg.compile:  # with torch.compile, all gradients exist at once
            yield "gradients of a micro-step", 4 * P, "end"
    # the tied matrix gets two gradients, as head and as token embedding; if gradients exist between
    # steps, their sum is a third buffer
    yield "head's weight gradient", 4 * V_C, "block end"
    yield "token embedding's gradient", (8 if stay else 4) * V_C, "end"
    if s.cfg.optimizer == "muon":
        yield "Muon and AdamW moments", 4 * M + 8 * (P - M), ALL_PHASES
        # matrices of the same shape are stacked: their update, and four times its size for Newton-Schulz
        yield "Newton-Schulz iteration", 64 * s.model.n_layer * s.model.n_embd**2, "update"
    elif s.parallel == "zero1":
        yield "shard of AdamW's moments", 8 * P / n, ALL_PHASES
        # the fp32 shards of matrices that are gathered in 16 bits: all of them or, with fp8 MLPs, only the
        # attention's, which are a third
        if s.bytes == 2:
            read = M / 3 if s.kernels[1] == "fp8" else M
            yield "shard of fp32 matrices", 4 * read / n, ALL_PHASES
        # sent in 16 bits, unless accumulated over micro-steps
        sent = 4 * P if s.bytes == 4 else 4 * M if accumulates else 2 * M
        yield "reduce-scatter input", sent, "update"
    elif s.parallel != "fsdp2":
        yield "AdamW's moments", 8 * P, ALL_PHASES
        # for the gradient norm; the embedding's is the largest
        yield "squared gradient", 4 * V_C, "update"
    if s.device_type == "cuda":  # 32 MiB each for forward, backward, and the fused MLP
        yield "cuBLAS workspaces", (3 if s.mlp == "fused" else 2) * 2**25, ALL_PHASES


def activations(s: MemorySpec) -> Iterator[Line]:
    """Activations of the blocks that are saved for the backward pass (or recomputed there, with
    activation checkpointing), and their gradients."""
    c, cfg, N, e, again = s.model, s.cfg, s.positions, s.bytes, s.model.activation_checkpointing
    L, N_C, N_H = c.n_layer, N * c.n_embd, N * c.n_head
    norm = s.stream if cfg.compile else 4  # eager autocast casts LayerNorm's input to fp32
    in_mlp = 1 if s.mlp == "fp8" else e
    # autocast's 16-bit copies (8-bit in fp8 MLPs, which have two thirds of the weights); none with FSDP2,
    # which gathers in 16 bits
    copies = s.in_matrices * (4 / 3 if s.mlp == "fp8" else 2)
    copies *= e == 2 and s.parallel != "fsdp2"
    each_block = {
        "LayerNorm inputs": 2 * norm * N_C + 16 * N,  # with means and standard deviations
        "LayerNorm outputs": (e + in_mlp) * N_C,
        "queries, keys, values": 3 * e * N_C,
        "attention output": e * N_C + 4 * N_H,  # with log-sum-exps
        "T x T attention scores": 4 * N_H * cfg.seq_len * (c.attention == "math"),
        "MLP before GELU": 4 * e * N_C,
        "MLP after GELU": 4 * in_mlp * N_C,
        "low-precision matrix copies": copies / L,
    }
    for label, size in each_block.items():
        yield (label, size, "block") if again else (label, L * size, KEPT)
    if again:
        yield "block inputs", L * s.stream * N_C, KEPT
        # eager autocast keeps all copies until the loss is computed
        yield "low-precision matrix copies", 0 if cfg.compile else copies, "loss"
    # gradients of the residual stream (with a 16-bit copy for the MLP) and of GELU's input and output;
    # the fused MLP also keeps GELU's output
    residual = s.stream + e * (s.stream != e)
    gelu = {"plain": 4 * e, "fused": 5 * e, "fp8": 5 * e + 10}[s.mlp]
    yield "activation gradients", (residual + gelu) * N_C, "block"
    yield "document mask", N * cfg.seq_len * c.document_mask, KEPT
    if not (cfg.compile and again):  # there it is recomputed with the last block
        yield "last LayerNorm's input", norm * N_C, "loss head"


def head(s: MemorySpec) -> Iterator[Line]:
    """Logits and gradients of the head, as in lab.kernels.cross_entropy."""
    N, V, e = s.positions, s.model.padded_vocab_size, s.bytes
    n, N_C, V_C = min(CHUNK, N), N * s.model.n_embd, V * s.model.n_embd
    # with a 16-bit copy of the weight, or two 8-bit ones
    inputs = e * N_C + 2 * V_C * (e == 2)
    if s.head == "plain":
        yield "head's inputs", inputs, "loss head"
        # with torch.compile the gradient overwrites them; eager mode has log-softmax and two gradients
        yield "logits", (e if s.cfg.compile else 12) * N * V, "loss head"
        return
    yield "head's inputs", inputs, "loss"
    yield "head's gradients", e * N_C + 4 * V_C, "loss head"  # of its weight and its input
    yield "head's gradients, scaled", e * N_C + 4 * V_C, "head"
    if s.head == "fused":
        yield "logits of a chunk", e * n * V, "loss"
    else:  # with two gradients; those of one chunk exist until the next chunk's are computed
        yield "logits of a chunk", (6 if N > n else 4) * n * V, "loss"
        yield "head's 8-bit input", N_C, "loss"
    if s.head == "fp8" or s.cfg.precision != "bf16":  # in bf16 the matmul accumulates in place
        yield "weight gradient of a chunk", 4 * V_C, "loss"


def peak_by_phase(s: MemorySpec) -> dict[str, float]:
    """{phase: bytes in use}."""
    lines = memory_breakdown(s)
    return {phase: sum(size for _, size, when in lines if phase in when) for phase in PHASES}


def peak(s: MemorySpec) -> tuple[float, str]:
    """(bytes, phase) of the peak: an estimate of torch.cuda.max_memory_allocated after some steps."""
    total = peak_by_phase(s)
    phase = max(total, key=lambda phase: total[phase])
    return total[phase], phase
