"""Train GPT-2, from a laptop to a node of GPUs, in one file that reads from top to bottom.

    python train_gpt2.py                                       # the best this machine can do; says what and why
    python train_gpt2.py --preset gpt2 --data edu_fineweb10B   # GPT-2 124M on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py     # the same run on eight GPUs: same tokens, same steps
    python train_gpt2.py --plan --plan_card "RTX 4090"         # would it fit, how long would it take, what would it cost?

Sections: 1 configuration, 2 model, 3 optimizer and schedule, 4 processes, 5 training, 6 command line. Each uses only those
above it and, from the files beside this one: cross_entropy.py (the loss of the head), fused_mlp.py and fp8_mlp.py (the MLP),
shards.py and loader.py (token files, and who reads what of them when), machine.py (device, precision, memory), checks.py
(what is refused), runs.py (the run folder, resuming), checkpoints.py (their files), stop_signal.py (Ctrl-C), evaluation.py
(what is measured), metrics.py (log, speed), zero.py (AdamW in shares).

Shape letters: B batch, T time (tokens of a sequence), C channels (n_embd), H heads, D head size (C = H * D),
V vocabulary, N = B * T positions.
"""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import sys
import textwrap
import time

from lab.run.stop import STOPPED, StopSignal, importing

if __name__ == "__main__":  # before torch starts its threads: on a CPU that is busy with other things too, threads that
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spin while they wait take the time of those that work (4x, README)
    importing("train_gpt2.py")  # torch takes seconds; Ctrl-C meanwhile is one line

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lab.data.loader import TokenLoader, grad_accum_steps
from lab.data.shards import TokenShards, read_json
from lab.device import Precision, check_size, find_device, fit_batch_size, out_of_memory, why_no_compile, why_no_fp8
from lab.evals import EVALUATIONS, Reporter
from lab.kernels.cross_entropy import check_method, linear_cross_entropy
from lab.kernels.fp8_mlp import mlp_products_fp8
from lab.kernels.fused_mlp import MIN_POSITIONS, epilogues_work, fused_mlp_pays, mlp_products
from lab.optim.zero import ZeroAdamW
from lab.run.checkpoints import save_checkpoint
from lab.run.folder import (
    LOG_DIR,
    copy_weights,
    farewell,
    open_run,
    read_config,
    restore,
    resume_command,
    run_to_resume,
    same_shape,
    say_what_differs,
    state_to_save,
)
from lab.run.log import Logger, Meter, PhaseClock
from lab.run.vitals import (
    WITHOUT_EFFECT,
    check_8_bits,
    check_compiled,
    check_config,
    check_finite,
    check_transposes,
    check_typed,
    check_weights,
    check_zero1,
)

# ---------------------------------------------------------------------------------------------- 1. configuration


@dataclass
class GPTConfig:
    """Shape of the model, and how it is computed."""

    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block; must divide n_embd
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest context the position embeddings reach, in tokens
    vocab_size: int = 50257  # token ids in use; the data decides (50257 for GPT-2's BPE, 257 for bytes)
    vocab_multiple: int = 128  # rows of the embedding are rounded up to this: 50257 -> 50304 = 128 * 393; 1 is off
    attention: Literal["sdpa", "math"] = "sdpa"  # fused kernel, or softmax(QK^T)V spelled out
    cross_entropy: Literal["auto", "plain", "chunked", "torch", "liger", "fp8"] = "auto"  # how head and loss are computed
    fused_mlp: bool = True  # under bf16 autocast on an NVIDIA GPU, GELU is computed inside the products around it
    fp8_mlp: bool = False  # in micro-steps of 16384 tokens or more, the MLP's products in 8 bits (RTX 40, H100 and newer)
    bf16_residual: bool = True  # under bf16 autocast the residual stream is bf16 too: less traffic (4.6 %: README)
    activation_checkpointing: bool = False  # recompute each block in the backward pass: less memory, more time
    document_mask: bool = False  # attention does not cross end-of-text (id vocab_size - 1)

    @property
    def padded_vocab_size(self):
        """Rows of the embedding. Ids from vocab_size on are never targets, never predicted, sampled or exported."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def shape(self):
        """The numbers that a checkpoint must agree in."""
        return {k: getattr(self, k) for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}


@dataclass
class TrainConfig:
    """One run. The preset gpt2 is GPT-2 124M for one epoch of 10B tokens, with the schedule of GPT-3 (Brown 2020, B)."""

    preset: str = "gpt2"  # where the other defaults come from: gpt2, gpt2-medium, gpt2-large, gpt2-xl or laptop
    # data
    data: str = "edu_fineweb10B"  # folder of .npy or llm.c .bin token shards (made by fineweb.py)
    total_batch_size: int = 524288  # tokens per update over all processes (gpt2: 2**19, GPT-3's 0.5M)
    batch_size: int = 0  # sequences per process and micro-step; 0 finds what fits. Results do not depend on it
    seq_len: int = 1024  # tokens per sequence
    shuffle: bool = True  # seeded order of sequences within and across shards; off is the order on disk
    align_documents: bool = False  # start every sequence at an end-of-text token, dropping what is between
    verify_data: bool = False  # re-hash every shard against manifest.json before training
    # optimizer
    max_steps: int = 19073  # updates (gpt2: 10e9 tokens / 524288)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices inside the blocks, AdamW for the rest
    lr: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon; follows the same schedule
    min_lr: float = 6e-5  # rate at the end of the schedule
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # wsd: warm up, stay, decay
    warmup_steps: int = 715  # linear warm-up (gpt2: 375M tokens / 524288)
    decay_steps: int = 3800  # wsd alone: length of the final linear decay
    weight_decay: float = 0.1  # on matrices and embeddings (muon: on its own matrices alone); biases and gains have none
    beta1: float = 0.9  # AdamW: memory of the mean gradient
    beta2: float = 0.95  # AdamW: memory of the squared gradient
    eps: float = 1e-8  # AdamW: added to the root of the squared gradient
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0 is off
    # machine
    device: str = "auto"  # cuda, mps or cpu
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: the best that the device has
    zero1: bool = False  # several processes: each keeps its share of AdamW's state (ZeRO-1); without accumulation less to send
    compile: bool = True  # torch.compile; needs a GPU with Triton, or a C++ compiler on CPU
    seed: int = 1337  # of the weights, the shuffling and the samples
    # watching; every interval is in steps
    log_every: int = 10  # a line in log.jsonl
    val_every: int = 250  # validation loss; 0 is never
    val_tokens: int = 10485760  # tokens of the validation split to use; 0 is all of them
    hella_every: int = 1000  # HellaSwag accuracy; 0 is never
    hella_examples: int = 10042  # how many of its 10042 examples
    sample_every: int = 1000  # a few samples; 0 is never
    sample_tokens: int = 64  # length of each
    sample_prompt: str = "Hello, I'm a language model,"  # what they begin with
    timing: bool = False  # milliseconds of data, forward, backward and optimizer in each logged step
    wandb: bool = False  # Weights & Biases as well as log.jsonl and TensorBoard
    # keeping
    log_dir: str = LOG_DIR  # runs lie in LOG_DIR/RUN_NAME
    run_name: str = ""  # name of the run; made from preset and time when empty (torchrun keeps "run" to itself)
    ckpt_every: int = 1000  # a checkpoint; 0 is only if a signal stops the run; one that ends by itself keeps none
    keep_last: int = 2  # how many checkpoints stay, besides the best
    resume: bool = False  # continue the newest run (or --run_name NAME) from its newest checkpoint, with its settings
    init_from: str = ""  # start from these weights: gpt2 ... gpt2-xl, a Hugging Face folder, or a checkpoint


PRESETS = {
    # sizes: Radford et al. 2019, table 2 (its parameter counts are wrong; these are the released models).
    # rates: Brown et al. 2020, table 2.1, for the model of the same size.
    "gpt2": (GPTConfig(), TrainConfig()),
    "gpt2-medium": (GPTConfig(24, 16, 1024), TrainConfig("gpt2-medium", lr=3e-4, min_lr=3e-5)),
    "gpt2-large": (GPTConfig(36, 20, 1280), TrainConfig("gpt2-large", lr=2.5e-4, min_lr=2.5e-5)),
    "gpt2-xl": (GPTConfig(48, 25, 1600), TrainConfig("gpt2-xl", lr=2e-4, min_lr=2e-5)),
    # about two minutes on two laptop cores, on the text that ships inside Python
    "laptop": (
        GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=257, vocab_multiple=1),
        TrainConfig(
            "laptop", data="data/builtin", total_batch_size=4096, seq_len=128, max_steps=1000, optimizer="muon", lr=6e-3,
            min_lr=0.0, weight_decay=0.0, schedule="wsd", warmup_steps=30, decay_steps=700, beta2=0.99, compile=False,
            log_every=20, val_every=200, val_tokens=131072, hella_every=0, sample_every=1000, sample_tokens=400,
            sample_prompt="The ", ckpt_every=500,
        ),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ 2. model


class KVCache:
    """Keys and values of the tokens seen so far, so that generating the next one costs one position, not all."""

    def __init__(self, config, batch_size, device, dtype):
        shape = (2, config.n_layer, batch_size, config.n_head, config.block_size, config.n_embd // config.n_head)
        self.kv = torch.empty(shape, device=device, dtype=dtype)  # (2, n_layer, B, H, block_size, D)
        self.document = torch.zeros(batch_size, config.block_size, dtype=torch.long, device=device)  # for document_mask
        self.length = 0  # tokens held; GPT.forward moves it on once all layers have appended

    def append(self, layer, k, v):
        end = self.length + k.size(2)
        self.kv[0, layer, :, :, self.length : end] = k
        self.kv[1, layer, :, :, self.length : end] = v
        return self.kv[0, layer, :, :, :end], self.kv[1, layer, :, :, :end]


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.layer, self.attention = config.n_head, layer, config.attention
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k and v of all heads in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
            for t in self.c_attn(x).split(C, dim=2)
        )
        if cache is not None:
            k, v = cache.append(self.layer, k.to(cache.kv.dtype), v.to(cache.kv.dtype))  # (B, H, S, D), S >= T
            q = q.to(cache.kv.dtype)
        S = k.size(2)
        if mask is None and 1 < T < S:  # several new tokens after cached ones: row i sees S - T + i + 1 keys
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        causal = mask is None and T == S  # one new token (T == 1 < S) may look at everything
        if self.attention == "math":
            scores = q @ k.transpose(-2, -1) * (C // self.n_head) ** -0.5  # (B, H, T, S)
            if causal:
                mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril()
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            y = F.softmax(scores, dim=-1).to(v.dtype) @ v  # (B, H, T, D)
        else:  # the same without ever holding the (T, S) scores in memory (Dao et al. 2022)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fused, self.fp8 = config.fused_mlp, config.fp8_mlp
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        if self.fp8 and fused_mlp_pays(x):
            weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
            return mlp_products_fp8(x.bfloat16().flatten(0, -2), *weights)[0].view_as(x)
        if self.fused and fused_mlp_pays(x):  # the same as the last line, with less memory traffic: 3 % of a step on an H200
            weights = (p.bfloat16() for p in (self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias))
            return mlp_products(x.bfloat16().flatten(0, -2), *weights)[0].view_as(x)
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # GPT-2 was trained with the tanh form


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-norm transformer, learned positions, head tied to the token embedding."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """Normal, std 0.02 (Radford 2018); what is added to the residual stream is scaled by (2 n_layer)^-0.5, so that
        the stream does not grow with depth (Radford 2019, 2.3; two additions a block)."""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 * (2 * self.config.n_layer) ** -0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():
            self.transformer.wte.weight[self.config.vocab_size :] = 0  # their gradient is 0, so they stay 0

    def num_params(self):
        """Numbers in the published model of this shape: the tied matrix once, pad rows not counted."""
        pad = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - pad

    def hidden(self, idx, position=None, mask=None, cache=None):
        """idx (B, T) -> what the head sees of it (B, T, C). position (B, T) and mask (B, 1, T, T) are for packed rows; left
        out, they are 0, 1, 2 ... (after what the cache holds) and causal."""
        T, past = idx.size(1), cache.length if cache is not None else 0
        if position is None:
            if past + T > self.config.block_size:
                raise ValueError(f"{past + T} tokens are more than block_size={self.config.block_size}")
            position = torch.arange(past, past + T, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        if self.config.bf16_residual and self.activation_dtype(x.device) == torch.bfloat16:
            x = x.bfloat16()
        if mask is None and self.config.document_mask:
            # Number the documents: each end-of-text leads one, and begins with the last number in the cache plus 1. A query
            # looks at keys of its own number that are not later; query i stands at past + i, hence tril(past).
            doc_of_query = doc_of_key = (idx == self.config.vocab_size - 1).cumsum(1)
            if cache is not None:
                doc_of_query = doc_of_query + (cache.document[:, past - 1 : past] if past else 0)
                cache.document[:, past : past + T] = doc_of_query
                doc_of_key = cache.document[:, : past + T]
            mask = (doc_of_query[:, :, None] == doc_of_key[:, None, :]).tril(past)[:, None]  # (B, 1, T, past + T)
        for block in self.transformer.h:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask, cache)
        if cache is not None:
            cache.length += T
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, reduction="mean", cache=None):
        """idx (B, T) -> (logits, None); with targets (B, T) -> (None, loss).

        logits are (B, T, vocab_size), or (B, 1, vocab_size) with a cache, where only the last position is wanted.
        Targets of -1 are left out. reduction: "mean" over the targets there are (0 if none), "sum", or "none" for the
        loss of each position (B, T). Logits are not returned beside a loss: a compiled step would have to keep all of
        them, 6.6 GB at 64 x 1024 positions of GPT-2.
        """
        x = self.hidden(idx, cache=cache)
        if targets is None:
            return self.lm_head(x if cache is None else x[:, -1:])[..., : self.config.vocab_size], None
        head = (self.lm_head.weight, targets.reshape(-1), self.config.vocab_size, self.config.cross_entropy)
        if reduction == "none":
            return None, linear_cross_entropy(x.flatten(0, 1), *head, reduction="none").view_as(targets)
        loss = linear_cross_entropy(x.flatten(0, 1), *head)
        return None, loss if reduction == "sum" else loss / (targets >= 0).sum().clamp(min=1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, use_cache=True):
        """Yield the next token (B,) of each row of idx (B, T), max_new_tokens times.

        temperature 0 takes the likeliest token. top_k keeps the k likeliest (0: all), top_p the fewest whose
        probabilities add up to it (Holtzman et al. 2020). A window that is full drops its older half, as positions are
        absolute and a cache cannot slide; with and without cache the same tokens come out.
        """
        block_size = self.config.block_size
        if idx.size(1) > block_size:
            raise ValueError(f"a prompt of {idx.size(1)} tokens is longer than the context, block_size={block_size}")
        cache, new, window = None, idx, idx
        for _ in range(max_new_tokens):
            if window.size(1) > block_size:
                window = new = window[:, -max(1, block_size // 2) :]
                cache = None
            if use_cache and cache is None:
                cache = KVCache(self.config, idx.size(0), idx.device, self.activation_dtype(idx.device))
            logits, _ = self(new if use_cache else window, cache=cache)
            token = sample_token(logits[:, -1].float(), temperature, top_k, top_p, generator)  # (B,)
            yield token
            new = token[:, None]
            window = torch.cat([window, new], dim=1)

    def activation_dtype(self, device):
        """The type that the products of this model come out in: autocast's, or that of the weights."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.lm_head.weight.dtype


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """One token (B,) from logits (B, V)."""
    if temperature < 1e-30:  # 0, or so small that the division would overflow
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(descending=True)
        drop = probs.cumsum(dim=-1) - probs >= top_p  # keep a token if those above it do not reach top_p yet
        logits = logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


# ------------------------------------------------------------------------------------ 3. optimizer and schedule


def param_groups(model, weight_decay):
    """Two groups: matrices and embeddings decay, biases and LayerNorm gains do not (they scale, not mix)."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model, cfg, device):
    """The optimizer of cfg. Each group's "scale" is its peak rate over cfg.lr, which the schedule is about."""
    adamw = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)
    adamw["fused"] = device.type in ("cuda", "cpu")  # one kernel for all tensors instead of several for each
    if cfg.optimizer == "muon":
        from lab.optim.muon import MuonAdamW

        optimizer = MuonAdamW(model, cfg.muon_lr, momentum=0.95, weight_decay=cfg.weight_decay, **adamw)
    else:
        optimizer = torch.optim.AdamW(param_groups(model, cfg.weight_decay), **adamw)
    for group in optimizer.param_groups:
        group["scale"] = group["lr"] / cfg.lr if cfg.lr else 1.0
    return optimizer


def get_lr(step, cfg):
    """Rate for the update after `step` finished ones: linear up, then the schedule to min_lr at max_steps, then flat."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps  # never 0: a first update with rate 0 is a wasted one
    if cfg.schedule == "constant":
        return cfg.lr
    start = cfg.warmup_steps
    if cfg.schedule == "wsd":  # warm-up, stable, decay (Hu et al. 2024, MiniCPM)
        start = max(start, cfg.max_steps - cfg.decay_steps)
    done = min(1.0, max(0.0, (step - start) / max(1, cfg.max_steps - start)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


# -------------------------------------------------------------------------------------------------- 4. processes


class World:
    """The processes of this run and the device of this one. A lone process has the same methods, doing nothing."""

    # Gradients are exchanged in pieces of about so many MB, and torch.compile cuts its graph where a piece is full. DDP's own
    # 25 MB cut it at every block, and a cut costs more than an earlier exchange gains (3 % of a step on four H200s, README)
    bucket_mb = 250

    def __init__(self, device="auto"):
        self.rank, self.local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.device = find_device(device, self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # before NCCL starts, or every process opens a context on GPU 0
        self.distributed = self.world_size > 1
        if self.distributed:  # gloo carries what lives on the CPU; on GPUs, NCCL the gradients
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, device_id=self.device if self.device.type == "cuda" else None)

    def wrap(self, model):
        """The model whose backward pass averages gradients over the processes, while it computes the earlier layers'."""
        if not self.distributed:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket_mb)

    def exchange(self, model, last):
        """Context of a micro-step's forward AND backward: gradients are exchanged in the last one only. DDP reads the
        flag in its forward pass, so setting it later would come too late. Without DDP, the optimizer exchanges them."""
        return model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext()

    def sum(self, tensor):
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, number):
        """The mean of every process's number; through the CPU, as smallest."""
        return self.sum(torch.tensor(number, dtype=torch.float64)).item() / self.world_size if self.distributed else number

    def smallest(self, number):
        """The least of every process's number; through the CPU, so that no GPU waits."""
        if self.distributed:
            number = torch.tensor(float(number))
            dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return number if not torch.is_tensor(number) else number.item()

    def gather(self, value):
        values = [None] * self.world_size
        if not self.distributed:
            return [value]
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value):
        """Rank 0's value, on every process."""
        box = [value]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def synchronize(self):
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def exit(self):
        """The end of the program, where there are several processes: gloo's threads may outlive the interpreter and abort a
        process that has done all its work (pytorch/pytorch#179291), so it ends without a farewell."""
        if self.distributed:
            self.synchronize()
            self.smallest(0)  # nobody leaves while another still talks to it
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(0)


# --------------------------------------------------------------------------------------------------- 5. training


def due(step, every, last):
    return every > 0 and (step % every == 0 or last)


def train_step(model, optimizer, loader, lr, cfg, world, precision, clock):
    """One update. Returns the loss, whose mean over the processes is the step's, the gradient's norm before clipping, and the
    micro-steps' losses, as tensors.

    Wanted is the gradient of the mean loss over all targets of the step. Each micro-step's sum is divided by the number of
    targets of the whole step, so any cut into micro-steps adds up to the same gradient, with masked targets too: backward()
    adds the micro-steps. DDP and ZeroAdamW average over the processes where a sum is wanted: hence the factor world_size, and
    for the same reason the mean of the processes' losses is the step's.
    """
    micro_losses = []
    clock.mark("start")
    for micro_step in range(loader.grad_accum_steps):
        x, y, num_targets = loader.next_batch()
        clock.mark("data")
        with world.exchange(model, last=micro_step == loader.grad_accum_steps - 1):
            with precision.autocast():
                _, loss = model(x, y, reduction="sum")
                loss = loss * (world.world_size / num_targets)
            clock.mark("forward")
            precision.scaler.scale(loss).backward()
        clock.mark("backward")
        micro_losses.append(loss.detach())
    if isinstance(optimizer, ZeroAdamW):
        grad_norm = optimizer.exchange(cfg.grad_clip, accumulated=loader.grad_accum_steps > 1)
    else:
        precision.scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    precision.scaler.step(optimizer)
    precision.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")
    micro_losses = torch.stack(micro_losses)
    return micro_losses.sum(), grad_norm, micro_losses


class Underway:
    """Copies of tensors on their way to the CPU. arrive() waits for what was launched before the copies were, and no longer;
    item() would wait for all that was launched since, and the device would then have nothing to do while the host launches
    the next step (2 of 116 ms on an H200: README)."""

    def __init__(self, *tensors):
        cuda = tensors[0].is_cuda
        self.copies = [torch.empty_like(t, device="cpu", pin_memory=cuda).copy_(t, non_blocking=cuda) for t in tensors]
        self.there = torch.cuda.Event() if cuda else None
        if self.there:
            self.there.record()

    def arrive(self):
        if self.there:
            self.there.synchronize()
        return self.copies


def prepare(model_config, cfg, world):
    """What training works with, from a seeded start. Raises ValueError or FileNotFoundError for what cannot work."""
    torch.manual_seed(cfg.seed)
    precision = Precision(cfg.precision, world.device)
    precision.prepare()
    train_shards = TokenShards(cfg.data, "train", model_config.vocab_size, cfg.verify_data)
    val_shards = TokenShards(cfg.data, "val", model_config.vocab_size, cfg.verify_data)
    val_shards.check_first(cfg.val_tokens)
    check_zero1(cfg, precision.name, world.world_size)
    check_method(model_config.cross_entropy)
    check_8_bits(model_config, why_no_fp8(precision, model_config, cfg))
    check_transposes(model_config, world.device)
    check_size(model_config, world.device)
    raw_model = GPT(dataclasses.replace(model_config, fused_mlp=model_config.fused_mlp and epilogues_work(world.device)))
    if cfg.init_from and not cfg.resume:  # a resumed run has weights of its own
        from lab.weights import load_model  # it imports from this file

        loaded = load_model(cfg.init_from, cfg.log_dir)
        same_shape(cfg.init_from, loaded.config.shape(), model_config.shape())
        copy_weights(raw_model, loaded.state_dict())
    raw_model.to(world.device)
    grad_accum_steps(cfg, cfg.batch_size or 1, world.world_size)  # raises where no micro-batch can divide the step
    batch_size = cfg.batch_size or fit_batch_size(raw_model, cfg, world, precision)
    loader = TokenLoader(train_shards, cfg, world, batch_size)
    optimizer = make_optimizer(raw_model, cfg, world.device)
    if cfg.zero1 and world.distributed:
        optimizer = share_out(optimizer, raw_model, precision, world)
    return precision, raw_model, optimizer, loader, val_shards


def share_out(adamw, model, precision, world):
    """The optimizer as ZeroAdamW. Only products in 16 bits read the blocks' matrices, but for the MLP's where that has 8; and
    only those, as the head is the embedding too."""
    rounded = [
        p for name, p in model.transformer.h.named_parameters()
        if precision.dtype == torch.bfloat16 and p.dim() == 2 and not (model.config.fp8_mlp and ".mlp." in name)
    ]  # fmt: skip
    return ZeroAdamW(adamw, rounded, precision.dtype, world)


def compile_model(raw_model, cfg, world, log):
    """The model as training calls it: averaged over processes, compiled. Sampling and saving keep to raw_model."""
    model = raw_model if cfg.zero1 else world.wrap(raw_model)  # a ZeroAdamW averages by itself
    if not cfg.compile:
        return model
    reason = why_no_compile(world.device)
    if reason:
        log.say(f"torch.compile is off: {reason}")
        return model
    return torch.compile(model, dynamic=False)  # DDP inside: the graph is cut at its buckets


def from_compiler(error):
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def train(model_config, cfg, world, run_dir, tokenizer=None):
    """Run the updates of cfg, writing below run_dir. Returns the last validation loss."""
    with StopSignal() as stop, contextlib.ExitStack() as at_end:
        try:
            return train_until(stop, at_end, model_config, cfg, world, run_dir, tokenizer)
        except RuntimeError as error:
            if stop.name and from_compiler(error):  # a terminal's Ctrl-C has ended the C++ compiler too
                raise KeyboardInterrupt from error
            raise


def train_until(stop, at_end, model_config, cfg, world, run_dir, tokenizer):
    """train, or as much of it as is done when a signal comes.

    `step` counts finished updates. The last pass of the loop measures and saves only, so that the weights that were
    measured are the weights on disk. A signal makes it save without measuring any more, as whoever sent it may not wait;
    what is left then is measured when the run goes on, after its last step too.
    """
    precision, raw_model, optimizer, loader, val_shards = prepare(model_config, cfg, world)
    first_step, best_val, measured = 0, math.inf, False
    if cfg.resume:
        first_step, best_val, measured = restore(run_dir, cfg, raw_model, optimizer, loader, precision)
    if first_step > cfg.max_steps or (first_step == cfg.max_steps and measured):
        raise ValueError(f"{run_dir} has done {first_step} steps, max_steps={cfg.max_steps}; a larger --max_steps goes on")
    open_run(run_dir, model_config, cfg, world, at_end)
    log = Logger(run_dir, cfg, world.is_main, first_step)
    report = Reporter(log, cfg, world, precision, raw_model, loader, val_shards, tokenizer)
    report.begin(first_step, loader)
    if model_config.fp8_mlp and loader.batch_size * cfg.seq_len < MIN_POSITIONS:
        log.say(f"note: fp8_mlp takes micro-steps of {MIN_POSITIONS} tokens or more; with batch_size={loader.batch_size} the "
                "MLP stays in 16 bits")  # fmt: skip
    model = compile_model(raw_model, cfg, world, log)
    clock, meter = PhaseClock(cfg.timing, world.device), Meter(cfg, world, raw_model, first_step)
    pending = None  # the last step's loss, not looked at yet
    behind = first_step if measured else first_step - 1  # at this step and before, nothing is left to measure or to save

    def asked_to_stop():  # on any process
        return world.smallest(not stop.name) == 0

    if not asked_to_stop():  # a compiler may err without a word: 774M once trained to a loss of 60 (README)
        model = check_compiled(model, raw_model, loader, world, precision, log)
    for step in range(first_step, cfg.max_steps + 1):
        stopping, last = asked_to_stop(), step == cfg.max_steps
        todo = [name for name in EVALUATIONS if step > behind and (step or name == "val")]
        todo = [name for name in todo if due(step, getattr(cfg, f"{name}_every"), last)]
        saves = due(step, cfg.ckpt_every, last)
        if pending and (todo or saves or last or stopping):  # never measure, sample or keep what a bad step has touched
            with meter.pause():
                check_finite(*pending, loader, world, run_dir)
                check_weights(step, raw_model, run_dir)
                pending = None
        while todo and not stopping:
            with meter.pause():
                if report.measure(todo[0], step, model, asked_to_stop):
                    del todo[0]
            stopping = asked_to_stop()
        stopping = stopping and bool(todo or not last)  # after all is done it is too late to stop
        new = step > (first_step if todo else max(behind, 0))  # since the checkpoint: steps, or what it had left to measure
        if new and (stopping or saves):
            with meter.pause():
                # only weights that were measured can be the best; if the measuring goes on later, it is for then to say
                best = not todo and report.val_step == step and report.val_loss < best_val
                best_val = report.val_loss if best else best_val
                state = state_to_save(step, best_val, not todo, raw_model, optimizer, loader, precision, model_config, cfg)
                if world.is_main:
                    path = save_checkpoint(run_dir, step, state, cfg.keep_last, best)
                    log.event("checkpoint", step, path=path.name, best=best)
                del state  # a ZeroAdamW's are copies
        if last or stopping:
            break
        lr = get_lr(step, cfg)
        loss, grad_norm, micro_losses = train_step(model, optimizer, loader, lr, cfg, world, precision, clock)
        if pending:  # looked at one step late: the device has this one to do meanwhile
            check_finite(*pending, loader, world, run_dir)
        pending = (step + 1, Underway(loss, micro_losses), loader.sequence)
        if step == first_step:  # compilation and first allocations are not speed
            clock.marks.clear()
            log.event("first_step", step + 1, seconds=meter.restart(step + 1))
        log.tick(step + 1)
        if due(step + 1, cfg.log_every, step + 1 == cfg.max_steps):
            speed = meter.read(step + 1) if step > first_step else {}
            shown = dict(loss=world.mean(loss.item()), lr=lr, grad_norm=grad_norm.item(), tokens=loader.sequence * cfg.seq_len)
            log.train(step + 1, cfg.max_steps, **shown, **speed, **clock.read())

    log.event("end", step, reason=(stop.name or "signal on another rank") if stopping else "done")
    log.close()
    if stopping and world.is_main:
        saved = f"finished step {step} and saved it in {run_dir}" if new else "nothing new to save"
        more = f"; `{resume_command(run_dir)}` goes on from there" if step else "; the same command begins again"
        print(f"{stop.name or 'signal'}: {saved}{more}")
    return report.val_loss


# ----------------------------------------------------------------------------------------------- 6. command line


def peek(argv, *flags):
    """Values of a few flags, needed before the command line can be made from the defaults that they choose."""
    found = {}
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if word.startswith("--") and name in flags:
            found[name] = value if equals else argv[i + 1] if i + 1 < len(argv) else ""
    return found


def choose_defaults(argv):
    """(reason, GPTConfig, TrainConfig): what the flags in argv then change."""
    given = peek(argv, "preset", "data", "resume", "run_name", "log_dir", "init_from")
    if "resume" in given:
        if given["resume"] and not given["resume"].startswith("-"):
            raise ValueError(f"resume={given['resume']}: --resume takes no value, it goes on with the newest run; for another "
                             f"one add --run_name {Path(given['resume']).name}")  # fmt: skip
        if "init_from" in given:
            raise ValueError(f"init_from={given['init_from']} is for a new run; a resumed one goes on with its own weights: "
                             "leave out --init_from or --resume")  # fmt: skip
        if given.get("run_name") == "":
            raise ValueError("run_name is empty; name a run, or leave --run_name out and the newest goes on")
        log_dir = given.get("log_dir", LOG_DIR)
        run_dir, reason = run_to_resume(log_dir, given.get("run_name"))
        model_config, cfg = read_config(run_dir, GPTConfig, TrainConfig)
        if given.get("preset", cfg.preset) != cfg.preset:
            raise ValueError(f"preset={given['preset']} is for a new run; {run_dir} goes on with its own settings, those "
                             f"of {cfg.preset}: leave out --preset or --resume")  # fmt: skip
        return reason, model_config, dataclasses.replace(cfg, resume=True, run_name=run_dir.name, log_dir=log_dir)
    preset, reason = given.get("preset"), "as asked for"
    if preset is None:
        data = Path(given.get("data", TrainConfig.data))
        shards, gpu = any(data.glob("*_train_*")), torch.cuda.is_available()
        if "WORLD_SIZE" in os.environ:
            preset, reason = "gpt2", "what torchrun gets unless --preset says otherwise"
        elif shards and gpu:
            preset, reason = "gpt2", f"there is a GPU, and {data} has shards"
        else:
            missing = ([] if gpu else ["there is no GPU"]) + ([] if shards else [f"no shards are in {data}"])
            preset, reason = "laptop", " and ".join(missing)
    if preset not in PRESETS:
        raise ValueError(f"preset={preset} is not one of {', '.join(PRESETS)}")
    return reason, *PRESETS[preset]


def parse_args(argv):
    """(reason of the preset, GPTConfig, TrainConfig) from the command line, one flag per field of the two dataclasses."""
    import tyro

    reason, model_config, cfg = choose_defaults(argv)

    def settings(model: GPTConfig = model_config, train: TrainConfig = cfg):
        return model, train

    model_config, cfg = tyro.cli(
        settings, args=argv, prog="train_gpt2.py", use_underscores=True, config=(tyro.conf.OmitArgPrefixes,),
        description=f"{__doc__.split('Sections:')[0]}The defaults shown are those of --preset {cfg.preset} ({reason}).",
    )  # fmt: skip
    check_typed(peek(argv, *WITHOUT_EFFECT), cfg)
    return reason, model_config, cfg


def load_tokenizer(vocab_size, world):
    """The tokenizer that has this many ids, or None, saying so, where it is not known or not to be had."""
    from lab.data.tokenizers import get_tokenizer, name_of_size

    try:
        return get_tokenizer(name_of_size(vocab_size))
    except (OSError, ValueError) as error:
        if world.is_main:
            print(f"no samples and no bits per byte: {error}")
        return None


def run(argv):
    if any(word.startswith("--plan") for word in argv):  # its flags too: without --plan it refuses them
        from lab.tools import plan  # it imports from this file

        return plan.run(argv)
    reason, model_config, cfg = parse_args(argv)
    check_config(model_config, cfg)
    world = World(cfg.device)
    model_config, cfg = world.from_main((model_config, cfg))  # the newest run may be another one a moment later
    if world.is_main and cfg.data == PRESETS["laptop"][1].data:  # the one data set that needs nothing but Python
        import fineweb

        fineweb.build_builtin(cfg.data)
    manifest = Path(world.from_main(cfg.data)) / "manifest.json"  # the other processes wait here for those shards
    if manifest.exists() and not cfg.resume and not peek(argv, "vocab_size"):
        model_config = dataclasses.replace(model_config, vocab_size=read_json(manifest, "vocab_size")["vocab_size"])
    run_dir = Path(cfg.log_dir) / world.from_main(cfg.run_name or f"{cfg.preset}_{time.strftime('%Y%m%d-%H%M%S')}")
    if world.is_main:
        print(f"preset {cfg.preset}: {reason}; run folder {run_dir}")
        each = (f"{k}={v!r}" for k, v in (vars(model_config) | vars(cfg)).items())
        settings = " ".join(setting.replace(" ", "\0") for setting in each)  # a value is not broken at its spaces
        width = min(120, shutil.get_terminal_size((120, 24)).columns)
        lines = textwrap.fill(settings, width, initial_indent="config ", subsequent_indent=" " * 7, break_on_hyphens=False)
        print(lines.replace("\0", " "))
        if cfg.resume:
            say_what_differs(run_dir, model_config, cfg, get_lr)
        if cfg.zero1 and not world.distributed:
            print("note: zero1 does nothing here: there is one process, whose share is all")
        if cfg.precision == "tf32" and world.device.type == "cpu":
            print("note: precision=tf32 is how a GPU multiplies; on this CPU it is fp32")
        if not cfg.ckpt_every:
            print("note: ckpt_every=0: nothing of this run is kept but its log, unless a signal stops it")
        if cfg.warmup_steps > cfg.max_steps:
            print(f"note: warmup_steps={cfg.warmup_steps} is not over at max_steps={cfg.max_steps}; lr is never reached")
    train(model_config, cfg, world, run_dir, load_tokenizer(model_config.vocab_size, world))
    if world.is_main:
        farewell(run_dir, cfg)
    world.exit()


def main():
    """Run, and turn what a reader can cause into one sentence and an exit status: 2 bad input, 1 a run that went wrong."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the imports are over
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    try:
        return run(sys.argv[1:])
    except BrokenPipeError:  # --help | head
        os._exit(1)
    except KeyboardInterrupt:  # a second Ctrl-C, or one before or after training
        status, text = 130, "stopped" if "--plan" in sys.argv else STOPPED
    except (ValueError, OSError) as error:
        status, text = 2, str(error)
    except FloatingPointError as error:
        status, text = 1, str(error)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            status, text = 2, "the memory is full; leave out --batch_size to have one found, or pass --activation_checkpointing"
        elif from_compiler(error):
            status, text = 1, f"torch.compile fails here ({type(error).__name__}); pass --no_compile"
        elif dist.is_initialized() and any(word in str(error) for word in ("gloo", "NCCL", "Connection", "peer")):
            status, text = 1, f"another process of this run has ended ({str(error).splitlines()[0][:100]})"
        else:
            raise
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank = int(os.environ.get("RANK", 0))
    if rank:  # all ranks meet the same bad input; if it is this one's alone, rank 0 has said nothing by now
        time.sleep(2)
    with contextlib.suppress(OSError):  # os._exit would leave what was printed behind
        sys.stdout.flush()
    print(f"train_gpt2.py: error: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr, flush=True)
    os._exit(status)  # no farewell to the other processes, they may wait for an exchange that never comes; torchrun ends them


if __name__ == "__main__":
    main()
