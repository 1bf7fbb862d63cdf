"""What a step of training holds in a GPU's memory, line by line: arithmetic on what autograd keeps.

The tests hold it against what autograd keeps of small models, and against measured peaks.
"""

import functools
import importlib
from dataclasses import astuple, dataclass

import torch

from lab.kernels.cross_entropy import CHUNK, SMALL
from lab.kernels.fused_mlp import MIN_POSITIONS
from lab.models import PROGRAMS

PROGRAM = importlib.import_module(PROGRAMS["gpt2"])
GIB = 2**30
CONTEXT_GIB = 0.7  # assumed: CUDA's context and kernels, which PyTorch's allocator does not see
NCCL_GIB = 0.5  # assumed: NCCL's buffers, where there are several GPUs; not seen either
MOMENTS = {  # where the peak of a step can lie
    "loss": "while the loss is computed",
    "head": "at the start of the backward pass",
    "block": "in the last block's backward pass",
    "end": "at the end of the backward pass",
    "update": "in the optimizer's step",
}
ALWAYS, KEPT = " ".join(MOMENTS), "loss head block"  # KEPT: what the forward pass leaves


@functools.cache
def without_memory(*fields):
    """The model of these fields of a GPTConfig, as shapes alone."""
    with torch.device("meta"):
        return PROGRAM.GPT(PROGRAM.GPTConfig(*fields))


@dataclass
class Setting:
    """What the memory of a step depends on."""

    model: object  # a GPTConfig
    cfg: object  # a TrainConfig that has a batch_size, and a precision that is not auto
    world_size: int = 1
    device_type: str = "cuda"
    kernels: tuple = ("fused", "fused")  # of the head's loss, of the MLPs: or plain, fp8

    def __post_init__(self):
        c, cfg, self.shapes = self.model, self.cfg, without_memory(*astuple(self.model))
        self.positions = cfg.batch_size * cfg.seq_len  # of a micro-step
        all_positions = self.positions * self.world_size
        self.grad_accum_steps = max(1, cfg.total_batch_size // all_positions)
        self.parallel = cfg.parallel if self.world_size > 1 else ""
        bf16, cuda = cfg.precision == "bf16", self.device_type == "cuda"
        self.bytes = 2 if bf16 or cfg.precision == "fp16" else 4  # of what a product returns
        self.stream = 2 if bf16 and c.bf16_residual else 4  # bytes, in the residual stream
        # lab.kernels leaves small micro-steps to the plain modules
        small, (head, mlp) = self.positions * c.padded_vocab_size * 4 <= SMALL, self.kernels
        self.head = "plain" if small else head
        self.mlp = mlp if self.positions >= MIN_POSITIONS and bf16 and cuda else "plain"
        self.num_params = sum(p.numel() for p in self.shapes.parameters())
        self.in_matrices = sum(p.numel() for p in self.shapes.block_matrices())
        # GiB of the process that PyTorch's allocator does not see
        self.outside = (CONTEXT_GIB if cuda else 0.5) + NCCL_GIB * (self.world_size > 1)


def replaced(kernels, fp8):
    """(how the head's loss, how the MLPs are computed) with these settings of the trainer."""
    if kernels == "plain":
        return "plain", "plain"
    return "fused" if fp8 == "off" else "fp8", "fp8" if fp8 == "all" else "fused"


def ledger(s):
    """[(label, bytes, moments)]: what PyTorch's allocator holds for a process, and when."""
    return [*state(s), *activations(s), *head(s)]


def state(s):
    """What does not depend on the micro-batch."""
    P, M, n, accumulates = s.num_params, s.in_matrices, s.world_size, s.grad_accum_steps > 1
    V_C = s.model.padded_vocab_size * s.model.n_embd
    # whole gradients: to be added to, or in DDP's buckets
    stay = s.parallel != "fsdp2" and (accumulates or s.parallel == "ddp")
    if s.parallel == "fsdp2":
        block = M / s.model.n_layer
        yield "weights, gradients, moments", 16 * P / n, ALWAYS
        yield "two blocks, and the rest", 2 * s.bytes * block + 4 * (P - M), ALWAYS
        yield "gradients of a block", 4 * block, "block"
    else:
        yield "parameters", 4 * P, ALWAYS
        yield "gradients", 4 * P, ALWAYS if stay else "end update"
        if accumulates and s.parallel == "ddp":  # until the last micro-step moves them there
            yield "DDP's buckets", 4 * P, "loss head block end"
        elif accumulates and s.cfg.compile:  # compiled, they come all at once
            yield "gradients of a micro-step", 4 * P, "end"
    # of the tied embedding: the head's; the tokens', and where others stay the sum of the two
    yield "gradient of the head", 4 * V_C, "block end"
    yield "gradients of the tokens", (8 if stay else 4) * V_C, "end"
    if s.cfg.optimizer == "muon":
        yield "Muon's and AdamW's moments", 4 * M + 8 * (P - M), ALWAYS
        # matrices of a shape are one stack: the update and, in its iteration, four times its size
        yield "Muon's work on a stack", 64 * s.model.n_layer * s.model.n_embd**2, "update"
    elif s.parallel == "zero1":
        yield "AdamW's moments, a share", 8 * P / n, ALWAYS
        if s.bytes == 2:  # what is read in 16 bits: not the MLPs' two thirds if rounded to 8
            read = M / 3 if s.kernels[1] == "fp8" else M
            yield "share's matrices, 32 bits", 4 * read / n, ALWAYS
        # it travels so, unless it was summed over micro-steps
        sent = 4 * P if s.bytes == 4 else 4 * M if accumulates else 2 * M
        yield "gradients laid out to send", sent, "update"
    elif s.parallel != "fsdp2":
        yield "AdamW's two moments", 8 * P, ALWAYS
        yield "square of a gradient", 4 * V_C, "update"  # for the norm: of the embedding's
    if s.device_type == "cuda":  # 32 MiB forward, backward, and the fused MLP's
        yield "workspace of cuBLAS", (3 if s.mlp == "fused" else 2) * 2**25, ALWAYS


def activations(s):
    """What the forward pass keeps for the backward; if checkpointed, what is computed again."""
    c, cfg, N, e, again = s.model, s.cfg, s.positions, s.bytes, s.model.activation_checkpointing
    L, N_C, N_H = c.n_layer, N * c.n_embd, N * c.n_head
    norm = s.stream if cfg.compile else 4  # eager autocast widens what LayerNorm reads
    in_mlp = 1 if s.mlp == "fp8" else e
    # matrices, which FSDP2 puts together in 16 bits; the MLPs' two thirds may be rounded to 8
    copies = s.in_matrices * (4 / 3 if s.mlp == "fp8" else 2)
    copies *= e == 2 and s.parallel != "fsdp2"
    each_block = {
        "inputs of LayerNorm": 2 * norm * N_C + 16 * N,  # with means and deviations
        "outputs of LayerNorm": (e + in_mlp) * N_C,
        "queries, keys, values": 3 * e * N_C,
        "output of attention": e * N_C + 4 * N_H,  # with log-sum-exps
        "T x T scores of attention": 4 * N_H * cfg.seq_len * (c.attention == "math"),
        "MLP before GELU": 4 * e * N_C,
        "MLP after GELU": 4 * in_mlp * N_C,
        "rounded copies of matrices": copies / L,
    }
    for label, size in each_block.items():
        yield (label, size, "block") if again else (label, L * size, KEPT)
    if again:
        yield "inputs of the blocks", L * s.stream * N_C, KEPT
        # eager autocast keeps all until the loss is there
        yield "rounded copies of matrices", 0 if cfg.compile else copies, "loss"
    # of the stream, with its rounded copy for the MLP; of both sides of GELU, whose output is freed
    # by then, but for the fused MLP's
    residual = s.stream + e * (s.stream != e)
    gelu = {"plain": 4 * e, "fused": 5 * e, "fp8": 5 * e + 10}[s.mlp]
    yield "gradients of activations", (residual + gelu) * N_C, "block"
    yield "document mask", N * cfg.seq_len * c.document_mask, KEPT
    if not (cfg.compile and again):  # which computes it again with the last block
        yield "input of last LayerNorm", norm * N_C, "loss head"


def head(s):
    """Logits, rounded copy and gradients of the head, as lab.kernels.cross_entropy holds them."""
    N, V, e = s.positions, s.model.padded_vocab_size, s.bytes
    n, N_C, V_C = min(CHUNK, N), N * s.model.n_embd, V * s.model.n_embd
    inputs = e * N_C + 2 * V_C * (e == 2)  # with a rounded copy; in 8 bits it is there twice
    if s.head == "plain":
        yield "inputs of the head", inputs, "loss head"
        # compiled, the gradient is written over them; else log-softmax, two gradients
        yield "logits", (e if s.cfg.compile else 12) * N * V, "loss head"
        return
    yield "inputs of the head", inputs, "loss"
    yield "gradients of head and input", e * N_C + 4 * V_C, "loss head"
    yield "the same, scaled", e * N_C + 4 * V_C, "head"
    if s.head == "fused":
        yield "logits, in chunks", e * n * V, "loss"
    else:  # also two gradients, of which those of a chunk stay while the next are made
        yield "logits, in chunks", (6 if N > n else 4) * n * V, "loss"
        yield "8-bit input of the head", N_C, "loss"
    if s.head == "fp8" or s.cfg.precision != "bf16":  # a bf16 product is added in place
        yield "gradient of a chunk", 4 * V_C, "loss"


def totals(s):
    """{moment: bytes}"""
    rows = ledger(s)
    return {moment: sum(size for _, size, when in rows if moment in when) for moment in MOMENTS}


def peak(s):
    """(bytes, moment): what torch.cuda.max_memory_allocated says after some steps, and of when."""
    total = totals(s)
    moment = max(total, key=total.get)
    return total[moment], moment
