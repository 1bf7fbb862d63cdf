"""GPT-2, the model and its training, in one file that reads from top to bottom.

    python train_gpt2.py                  # picks a preset for this machine
    python train_gpt2.py --preset gpt2    # GPT-2 124M on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py    # on eight GPUs

One training step in words. The data loader returns token ids x, and y, the same tokens shifted by
one. Forward: the model turns x into a prediction for each token of y. Loss: the mean of
-ln(probability given to the right token). Backward: autograd computes the gradient, which says how
the loss changes with each weight. Memory rarely holds all tokens of a step, so they are processed
in micro-steps whose gradients add up (gradient accumulation). All-reduce: each process works on its
own part of the tokens, and the gradients are averaged over the processes. Clip: gradients whose total
norm exceeds a limit are scaled down. Update: the optimizer moves each weight against its gradient.

Sections: 1 configuration, 2 model, 3 optimizer and schedule, 4 one training step, 5 building the
trainer, 6 the loop, 7 command line. Each uses only the ones above it. Training is in 3, 4 and 6; skim
1, 5 and 7 at first, and look up a setting when you meet it as self.config or cfg. You can change
anything in this file: training, validation and sampling use your version. To compare it with this one,
edit a copy in the same folder. Data loading, checkpoints, logging and faster kernels are in lab/, which
you need not read at first.

Shape letters: B batch, T time (tokens in a sequence), C channels (n_embd), H heads, D head size
(C = H * D), V vocabulary (padded), L layers, N = B * T positions. S is the number of keys: T, or more
when a cache holds those of earlier tokens (generation only).
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab.cli import pre_import_setup, run_main

if __name__ == "__main__":
    pre_import_setup()  # SIGINT handling and OpenMP wait policy: must run before `import torch`

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel

from blimp import Blimp
from hellaswag import HellaSwag
from lab import config as settings
from lab import kernels, registry
from lab.batch_size import find_max_batch_size
from lab.data.document_mask import document_mask
from lab.data.loader import TokenLoader
from lab.data.shards import TokenShards
from lab.distributed import World, warmup_ddp_buckets
from lab.eval.samples import TextSamples
from lab.eval.validation import Validation
from lab.hardware import can_compile, oom_hint, set_deterministic
from lab.inference.generate import generate
from lab.optim.fsdp2 import Fsdp2AdamW
from lab.optim.grad_norm import global_grad_norm
from lab.optim.muon import MuonAdamW
from lab.optim.zero1 import Zero1AdamW
from lab.precision import Precision, is_bf16_autocast
from lab.trainer.callbacks import PeriodicCallback
from lab.trainer.checkpoint import AsyncCheckpointer, CheckpointMixin, restore_checkpoint
from lab.trainer.console import print_summary
from lab.trainer.health import HealthMonitor
from lab.trainer.loggers import RunLogger
from lab.trainer.model_check import check_model
from lab.trainer.run_dir import lock_run_dir
from lab.trainer.signals import GracefulStop, SignalHandler
from lab.trainer.throughput import StepTimer, Throughput

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class GPTConfig:
    """Shape of the model."""

    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block; must divide n_embd
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest context in tokens (rows of the position embedding)
    vocab_size: int = 50257  # number of token ids; by default taken from the data
    vocab_multiple: int = 128  # pad vocab_size to a multiple: 50257 -> 50304; 1: no padding
    tokenizer: str = ""  # gpt2, bytes or path of a tokenizer.json; empty: the data's
    eot_id: int = -1  # id of the end-of-text token; -1: the last id of the vocabulary
    attention: Literal["sdpa", "math"] = "sdpa"  # PyTorch's fused kernel, or written out
    bf16_residual: bool = True  # under bf16 autocast, keep the residual stream in bf16 as well
    activation_checkpointing: bool = False  # recompute blocks in backward to save memory
    document_mask: bool = False  # attention does not cross end-of-text

    @property
    def padded_vocab_size(self):
        """vocab_size rounded up: the number of rows of the token embedding. With 50304 instead of 50257, each
        position's logits start at an aligned address, and training with the fused loss is 1.9 times as fast
        (docs/LOG.md#vocabulary). Padding ids are never targets, and never predicted, sampled or exported."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def end_of_text(self):
        """Id of the end-of-text token."""
        return self.eot_id if self.eot_id >= 0 else self.vocab_size - 1

    def validate(self):
        """Raise UserError for a shape that cannot work."""
        settings.check_shape(self)


@dataclass
class TrainConfig(settings.RunConfig):
    """Settings of training. RunConfig (lab/config.py) adds those of data, speed, evaluation, logging and
    checkpoints, and checks all of them.

    The defaults are the preset gpt2: GPT-2 124M for one epoch of 10B tokens, with the AdamW settings,
    learning rate, schedule shape and batch size (0.5M tokens) of GPT-3 Small (Brown et al. 2020,
    table 2.1 and appendix B). There is no dropout; OpenAI's GPT-2 had 0.1."""

    # batch
    total_batch_size: int = 524288  # tokens per update, over all processes (2**19)
    batch_size: int = 0  # sequences per process and micro-step; 0: as many as fit, up to 64
    seq_len: int = 1024  # tokens per sequence
    # optimizer
    max_steps: int = 19073  # number of updates (gpt2: for 10B tokens)
    # optimizer of the matrices in blocks; other weights use adamw. muon: see lab/optim/muon.py
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon, which follows the same schedule
    min_lr: float = 6e-5  # learning rate at the end of the schedule
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # wsd: warmup-stable-decay
    # linear warmup: a number of steps, or if below 1 a fraction of max_steps (gpt2: 375M tokens)
    warmup_steps: int | float = 0.0375
    decay_steps: int | float = 0.2  # decay at the end (wsd only): steps, or a fraction of max_steps
    weight_decay: float = 0.1  # decay of matrices and embeddings (muon: of matrices in blocks)
    beta1: float = 0.9  # AdamW: decay rate of the running mean of gradients
    beta2: float = 0.95  # AdamW: decay rate of the running mean of squared gradients
    eps: float = 1e-8  # AdamW: added to the denominator of the update
    grad_clip: float = 1.0  # clip the gradient to this norm; 0: no clipping


PRESETS = {
    "gpt2": (GPTConfig(), TrainConfig()),
    "gpt2-mini": (  # 30M weights, for one gaming card and 100M tokens (docs/LOG.md#gpt2-mini)
        GPTConfig(n_layer=6, n_head=6, n_embd=384),
        TrainConfig(
            "gpt2-mini", total_batch_size=65536, max_steps=1525, optimizer="muon", lr=1.8e-3, min_lr=0.0,
            schedule="wsd", warmup_steps=0.025, decay_steps=0.65, val_tokens=1048576, hellaswag_every=0,
        ),
    ),
    # Sizes (n_layer, n_head, n_embd): OpenAI's code, and GPT-3 2.7B, whose weights, gradients and AdamW
    # moments take 42 GB. Learning rates: Brown et al. 2020, table 2.1, for the closest size.
    "gpt2-medium": (GPTConfig(24, 16, 1024), TrainConfig("gpt2-medium", lr=3e-4, min_lr=3e-5)),
    "gpt2-large": (GPTConfig(36, 20, 1280), TrainConfig("gpt2-large", lr=2.5e-4, min_lr=2.5e-5)),
    "gpt2-xl": (GPTConfig(48, 25, 1600), TrainConfig("gpt2-xl", lr=2e-4, min_lr=2e-5)),
    "gpt2-2.7b": (
        GPTConfig(32, 32, 2560), TrainConfig("gpt2-2.7b", lr=1.6e-4, min_lr=1.6e-5, parallel="fsdp2")
    ),
    # supervised fine-tuning on conversations; the model's shape comes from --init_from
    "sft": (GPTConfig(), TrainConfig(**settings.SFT, lr=2e-4, warmup_steps=0.05)),
    "laptop": (  # two minutes on two CPU cores, on the bytes of Python's own documentation
        GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=257, vocab_multiple=1),
        TrainConfig(
            **settings.LAPTOP, total_batch_size=4096, seq_len=128, max_steps=1000, optimizer="muon",
            lr=6e-3, min_lr=0.0, schedule="wsd", warmup_steps=0.03, decay_steps=0.7, weight_decay=0.0,
            beta2=0.99, compile=False,
        ),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model


def manual_attention(q, k, v, mask):
    """softmax(QK^T / sqrt(D)) V (Vaswani et al. 2017, 3.2.1): what F.scaled_dot_product_attention
    computes. mask: True where a query may attend; None: everywhere."""
    # dividing by sqrt(D) makes the variance of the scores independent of D
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))  # exp(-inf) = 0: no weight
    return F.softmax(scores, dim=-1).to(v.dtype) @ v  # under CUDA's autocast, softmax is float32


class CausalSelfAttention(nn.Module):  # names of weights are OpenAI's; c_ is short for their Conv1D
    def __init__(self, config, layer, causal=True):
        super().__init__()
        self.n_head, self.layer, self.attention = config.n_head, layer, config.attention
        self.causal = causal  # True: no attention to later tokens; bert.py passes False
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k, v of all heads at once
        self.c_attn.weight.num_matrices = 3  # Muon orthogonalizes each by itself
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
            for t in self.c_attn(x).split(C, dim=2)
        )
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D): earlier tokens come first
        S = k.size(2)
        # a mask from the caller already hides later tokens, and a single new token may see all others
        hide_later = self.causal and mask is None and T > 1
        if hide_later and (S > T or self.attention == "math"):  # query i is at position S - T + i
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if self.attention == "math":
            y = manual_attention(q, k, v, mask)
        else:  # FlashAttention if possible, which never stores the (T, S) scores (Dao et al. 2022)
            is_causal = hide_later and mask is None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)  # init_weights scales this name

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # tanh, as in OpenAI's code


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


class HeadLoss(nn.Module):
    """Cross-entropy of the head's logits: a module, so that lab.kernels can replace it with one that
    computes the same without holding all logits in memory."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x, weight, targets, reduction):
        """x (N, C), weight (V, C), targets (N,) -> the sum of the losses, or with reduction "none" the
        loss of each position (N,). Positions with target -1 have loss 0."""
        logits = F.linear(x, weight)[:, : self.vocab_size]
        # in float32, because 16 bits are not precise enough for a softmax
        losses = F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="none")
        return losses if reduction == "none" else losses.sum()


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-norm transformer, learned positions, tied head."""

    # names of parameters with one row per token id, followed by the padding rows
    vocab_rows = ("transformer.wte.weight", "lm_head.weight")

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.padded_vocab_size, config.n_embd),  # token embedding
                wpe=nn.Embedding(config.block_size, config.n_embd),  # position embedding
                h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one matrix for both
        self.head_loss = HeadLoss(config.vocab_size)
        self.init_weights()

    def init_weights(self):
        """Biases are 0, LayerNorm's gains 1, all other weights normal with std 0.02 (Radford et al. 2018).
        For wpe that is nanoGPT's choice; OpenAI's GPT-2 code has 0.01. Matrices that write to the residual
        stream are scaled by (2 n_layer)^-0.5 (two additions per block), so that the variance of the stream
        does not grow with depth (Radford et al. 2019, 2.3)."""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith("c_proj.weight")
                scale = (2 * self.config.n_layer) ** -0.5 if residual else 1.0
                nn.init.normal_(p, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():  # padding rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[self.config.vocab_size :] = 0

    def hidden(self, idx, position=None, mask=None, cache=None):
        """Token ids idx (B, T) -> final hidden states (B, T, C), the input of the head.

        position (T,) or (B, T): defaults to 0, 1, 2, ... mask, broadcastable to (B, H, T, S): True
        where a token may attend; by default each token attends to itself and all earlier ones.
        """
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        if self.config.document_mask and mask is None and cache is None:
            # hides later tokens and other documents; with a cache, generate() passes the mask
            mask = document_mask(idx, self.config.end_of_text)
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        if self.config.bf16_residual and is_bf16_autocast(x):
            x = x.bfloat16()  # half the memory traffic of every addition and LayerNorm
        for block in self.transformer.h:
            if self.config.activation_checkpointing and cache is None and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask, cache)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, reduction="mean", position=None, mask=None, cache=None):
        """idx (B, T) -> (logits, None); with targets (B, T) -> (None, loss).

        logits: (B, T, vocab_size), or with a cache only those of the last position (B, 1, vocab_size).
        loss: with reduction "mean" or "sum", that of the positions whose target is not -1 (0 if there are
        none); with "none", the loss of each position (B, T), 0 where the target is -1. Logits are not
        returned together with a loss: all of them take 6.6 GB in bf16 for 64 x 1024 positions, and the
        fused head never stores them.
        """
        x = self.hidden(idx, position, mask, cache)  # (B, T, C)
        if targets is None:
            logits = self.lm_head(x if cache is None else x[:, -1:])
            return logits[..., : self.config.vocab_size], None
        # the sum, unless reduction is "none"
        loss = self.head_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), reduction)
        if reduction == "none":
            return None, loss.view_as(targets)
        if reduction == "mean":
            loss = loss / (targets >= 0).sum().clamp(min=1)
        return None, loss

    def generate(self, idx, max_new_tokens, **gen_kwargs):
        """Yield the next token (B,) of each row of idx (B, T), max_new_tokens times. gen_kwargs: see
        lab.inference.generate."""
        for token, _ in generate(self, idx, max_new_tokens, **gen_kwargs):
            yield token

    # The interface for lab/ and Muon

    @classmethod
    def from_pretrained(cls, source):
        """Load a model of this class. source: gpt2 ... gpt2-xl, another name on the Hugging Face hub, a
        Hugging Face folder, a checkpoint or a run."""
        return registry.load_model(source, cls)

    def num_params(self):
        """Number of parameters, without padding rows and counting the tied matrix once."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - padding

    @property
    def blocks(self):
        return self.transformer.h

    def block_matrices(self):
        """The matrices inside the blocks, which Muon updates. Each is used only in a matmul."""
        return [p for p in self.blocks.parameters() if p.dim() == 2]

    def flops_per_token(self, seq_len):
        """FLOPs of training per token: 6 (2 forward, 4 backward) for each parameter except those of wpe,
        which are only added, and 12 L C T for attention, counted as if it were not causal, by convention
        (Chowdhery et al. 2022, appendix B)."""
        multiply = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()
        return 6 * multiply + 12 * self.config.n_layer * self.config.n_embd * seq_len


# ----------------------------------------------------------------------- 3. optimizer and schedule


def param_groups(model, weight_decay):
    """Two parameter groups: with and without weight decay. Weight decay shrinks matrices and embeddings
    a little at each update, so that only the weights that reduce the loss stay large. Biases and
    LayerNorm gains, which set offsets and scales, are not decayed."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model, cfg, world):
    """Build the optimizer. Each group's "lr_scale" is its peak learning rate divided by cfg.lr, because
    AdamW and Muon follow the same schedule with different peaks."""
    fused = world.device.type in ("cuda", "cpu")  # updates all tensors in a few kernels
    adamw = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused)
    if cfg.optimizer == "muon":
        optimizer = MuonAdamW(model, cfg.muon_lr, cfg.weight_decay, world, **adamw)
    else:
        optimizer = torch.optim.AdamW(param_groups(model, cfg.weight_decay), **adamw)
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / cfg.lr
    return optimizer


def num_steps(length, cfg):
    """Convert a length to steps: an integer is a number of steps, a float a fraction of max_steps."""
    return length if isinstance(length, int) else round(length * cfg.max_steps)


def get_lr(step, cfg):
    """Learning rate of update number `step` (from 0): linear warmup, then cosine or linear decay to
    min_lr at max_steps. wsd stays at the peak before it decays; constant never decays.

    Example: with 100 warmup steps the first update has learning rate lr / 100, not 0, because an
    update with learning rate 0 would be wasted."""
    warmup, decay = num_steps(cfg.warmup_steps, cfg), num_steps(cfg.decay_steps, cfg)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    if cfg.schedule == "constant":
        return cfg.lr
    start = warmup
    if cfg.schedule == "wsd":  # warmup-stable-decay (Hu et al. 2024, MiniCPM)
        start = max(start, cfg.max_steps - decay)
    decay_ratio = min(1.0, max(0.0, (step - start) / max(1, cfg.max_steps - start)))
    cosine = 0.5 * (1 + math.cos(math.pi * decay_ratio))
    coeff = cosine if cfg.schedule == "cosine" else 1 - decay_ratio
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * coeff


# ---------------------------------------------------------------------------- 4. one training step


class Trainer(CheckpointMixin):
    """The training step and all state of a run. speedrun.py and bert.py subclass it. CheckpointMixin adds
    save(), which saves what an exact resume needs: weights, optimizer state, position in the data and loss
    scale.

    raw_model is the bare model, used for saving and sampling. model is the same one, used for training, and
    perhaps wrapped by DDP and torch.compile. step is the number of completed updates.
    """

    model_class = GPT
    make_optimizer = staticmethod(make_optimizer)  # a subclass may have another

    def __init__(self, raw_model, model, optimizer, loader, precision, world, cfg):
        self.raw_model, self.model, self.optimizer = raw_model, model, optimizer
        self.loader, self.precision, self.world, self.cfg = loader, precision, world, cfg
        self.step, self.best_val = 0, math.inf
        self.saved_step = 0  # step of the newest checkpoint
        self.run_dir = Path(cfg.log_dir) / cfg.run_name
        self.checkpointer = AsyncCheckpointer(self.run_dir, cfg, world.device)
        self.timer = StepTimer(world.device, enabled=cfg.timing)
        self.health = HealthMonitor(self)  # non-finite values, gradient spikes

    def train_step(self):
        """Do one update. Returns (losses, grad_norm), both tensors. losses has one number per micro-step;
        their sum, averaged over the processes, is the mean loss of the step's tokens. grad_norm is the
        norm of the gradient before clipping."""
        precision, timer, losses = self.precision, self.timer, []
        # dropout, if you add it, then has different masks in each step and process, also after a resume
        torch.manual_seed(hash((self.cfg.seed, self.step, self.world.rank)))
        timer.mark("start")  # --timing logs the milliseconds between these marks
        # grad_accum_steps = total_batch_size / (batch_size * seq_len * world_size)
        for micro_step in range(self.loader.grad_accum_steps):
            # x, y: (B, T); num_targets: over all micro-steps and processes of this step
            x, y, num_targets = self.loader.next_batch()
            timer.mark("data")
            # DDP averages the gradients over the processes during backward(). Once per update is enough,
            # so no_sync() turns it off in all micro-steps but the last. DDP decides in the forward pass what
            # the following backward() does, so both must be inside the context.
            last = micro_step == self.loader.grad_accum_steps - 1
            sync = last or not hasattr(self.model, "no_sync")  # only DDP has no_sync
            with contextlib.nullcontext() if sync else self.model.no_sync():
                # bf16, fp16: matmuls in 16 bits; weights, their gradients and the loss stay in float32
                with torch.autocast(x.device.type, precision.dtype, enabled=precision.is_16_bit):
                    _, loss = self.model(x, y, reduction="sum")
                # The loss of a step is the mean over all its targets, so divide the sum over this
                # micro-step by the targets of the step. Example: 524,288 targets on 2 processes x 4
                # micro-steps. Each micro-step sums over 65,536 targets and divides by 524,288. The
                # gradients of the 4 micro-steps add up in backward(), but those of the 2 processes are
                # averaged by DDP: the factor 2 turns its mean into the sum.
                loss = loss * (self.world.world_size / num_targets)
                timer.mark("forward")
                # Only fp16 needs the scaler, because fp16 rounds gradients below 3e-8 to 0: the loss is
                # multiplied by a large factor, by which clip_grad_norm divides the gradients. In the other
                # precisions scale(loss) is loss, and scaler.step(optimizer) is optimizer.step().
                precision.scaler.scale(loss).backward()
                timer.mark("backward")
            losses.append(loss.detach())
        self.health.record_gradients()  # norms of the parameters' gradients, to report spikes
        # With ZeRO-1 and FSDP2 each process keeps a part of the gradients: the optimizer clips them, and
        # averages over the processes those that are not averaged yet.
        clip = getattr(self.optimizer, "clip_grad_norm", self.clip_grad_norm)
        grad_norm = clip(self.cfg.grad_clip)
        self.health.observe(grad_norm)  # if it is a spike, --on_spike skip makes step() do nothing
        for group in self.optimizer.param_groups:
            group["lr"] = get_lr(self.step, self.cfg) * group["lr_scale"]
        precision.scaler.step(self.optimizer)
        precision.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        timer.mark("optimizer")
        self.step += 1
        return torch.stack(losses), grad_norm

    def clip_grad_norm(self, max_norm):
        """Scale the gradient to norm max_norm if its norm is larger (0: never). Returns the norm before
        clipping."""
        self.precision.scaler.unscale_(self.optimizer)  # fp16 only: undo the loss scaling first
        params = [p for p in self.raw_model.parameters() if p.grad is not None]
        norm = global_grad_norm([p.grad for p in params])
        if max_norm:
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def callbacks(self, stop):
        """The callbacks that run between updates, in this order."""
        validation = Validation(self, stop)
        save = PeriodicCallback("checkpoint", self.cfg.checkpoint_every, lambda t: t.save())
        samples = TextSamples(self, validation.tokenizer)
        return [save, validation, HellaSwag(self, stop), Blimp(self, stop), samples]


# ------------------------------------------------------------------------- 5. building the trainer


def build_trainer(model_config, cfg, world, state=None, trainer_class=Trainer):
    """The Trainer for these settings, at step 0 or restored from the checkpoint `state`."""
    torch.manual_seed(cfg.seed)
    set_deterministic(cfg.deterministic)
    precision = Precision(cfg.precision, world.device)  # auto: bf16 if the GPU supports it
    precision.set_matmul_precision()  # TF32 for matmuls that autocast leaves in float32
    shards = TokenShards(cfg.data, "train", model_config.vocab_size, model_config.end_of_text)
    raw_model = trainer_class.model_class(model_config)
    if cfg.init_from and not state:
        registry.init_from(cfg.init_from, raw_model, cfg.log_dir)
    raw_model.to(world.device)
    check_model(raw_model, world)  # warns if it sees later tokens, a common mistake in edits
    if cfg.kernels == "fused":  # replace HeadLoss and MLP, if unedited, with faster ones
        kernels.replace_modules(raw_model, MLP, precision, cfg.fp8, world.print0)
    batch_size = cfg.batch_size or find_max_batch_size(raw_model, cfg, world, precision, state)
    loader = TokenLoader(shards, cfg, world, batch_size)  # divides each step among the processes
    optimizer = trainer_class.make_optimizer(raw_model, cfg, world)
    model = raw_model
    if world.distributed and cfg.parallel != "ddp":
        sharded_adamw = {"zero1": Zero1AdamW, "fsdp2": Fsdp2AdamW}[cfg.parallel]
        optimizer = sharded_adamw(optimizer, raw_model, loader, precision, world)
    elif world.distributed:
        # DDP all-reduces gradients in buckets while backward() still computes those of earlier layers.
        # torch.compile, which must come after DDP, splits its graph at each bucket, which limits fusion;
        # DDP's default of 25 MB would split every block.
        model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True, bucket_cap_mb=250)
        # DDP chooses its buckets anew after the first backward(). That happens here, so that a resumed
        # run adds gradients in the same order and ends with the same bits.
        warmup_ddp_buckets(model, precision)
    if cfg.compile and can_compile(world, model_config, precision):
        model = torch.compile(model, dynamic=False)  # fuses the operations between matmuls
    trainer = trainer_class(raw_model, model, optimizer, loader, precision, world, cfg)
    if state:
        restore_checkpoint(trainer, state)
    return trainer


# ------------------------------------------------------------------------------------- 6. the loop


def train(trainer, callbacks, log, stop):
    """Train until cfg.max_steps. Returns the name of the signal that stopped the run, or "".

    Each iteration runs the callbacks that are due, then does one update. After the last update the
    callbacks run once more, to save and evaluate the final weights. Saving is the first callback, so that a
    checkpoint that is due does not wait for a long evaluation.

    log writes log.jsonl and prints; an event whose values are None is not logged. stop remembers whether
    a signal (Ctrl-C or SIGTERM) arrived.
    """
    cfg, world, health = trainer.cfg, trainer.world, trainer.health
    throughput, stopped = Throughput(trainer, log), ""
    try:
        while True:
            last = trainer.step == cfg.max_steps
            due = [callback for callback in callbacks if callback.should_run(trainer.step, last)]
            # Raises RunError if a loss, a gradient or a weight is not finite, so that such weights are
            # never saved; raises GracefulStop on all processes if one of them received a signal. The
            # latest update, which may still be running, is checked only if a callback is due.
            health.check(stop, log, include_latest=bool(due) or last)
            with throughput.paused(due):  # the time of callbacks does not count
                for callback in due:
                    trainer.raw_model.eval()  # turns off dropout
                    log.event(callback.name, trainer.step, callback(trainer))
                    trainer.raw_model.train()
            if last:
                break
            losses, grad_norm = trainer.train_step()
            health.record(losses)  # starts copying them to the CPU; a later check() reads them
            throughput.tick()  # excludes the first update, which compiles
            if trainer.step % cfg.log_every == 0 or trainer.step == cfg.max_steps:
                loss = world.mean(losses.sum().item())  # .item() waits for the GPU
                lr = trainer.optimizer.param_groups[-1]["lr"]  # AdamW's, whose lr_scale is 1
                log.train_step(trainer.step, loss, lr, grad_norm.item(), **throughput.read())
    except GracefulStop as signal:  # raised by check() or by a callback: save and stop
        stopped = str(signal)
        health.check(stop, log, include_latest=True, raise_on_stop=False)
        log.event("checkpoint", trainer.step, trainer.save())  # logs the previous save
    log.event("checkpoint", trainer.step, trainer.checkpointer.finish())  # waits for the last one
    log.event("end", trainer.step, {"reason": stopped or "done"})
    return stopped


# --------------------------------------------------------------------------------- 7. command line


def main(argv, presets=PRESETS, description=__doc__, build=build_trainer, trainer_class=Trainer):
    reason, model_config, cfg = settings.parse_flags(argv, presets, description, trainer_class)
    world = World(cfg.device, cfg.timeout)
    if world.distributed:  # torchrun started several processes; NCCL communicates between GPUs
        dist.init_process_group(world.backend, timeout=world.timeout, device_id=world.device_id)
    model_config, cfg, state = settings.resolve_config(
        model_config, cfg, world, presets, trainer_class
    )
    with oom_hint():
        trainer, stop = build(model_config, cfg, world, state, trainer_class), SignalHandler(world)
    callbacks = trainer.callbacks(stop)
    with lock_run_dir(trainer), stop, RunLogger(trainer) as log, oom_hint():
        log.start(reason, trainer, callbacks, state)
        stopped = train(trainer, callbacks, log, stop)
        stop.ignore()  # everything is saved
        print_summary(trainer, stopped)
    return 75 if stopped else 0  # 75 (EX_TEMPFAIL) tells job scripts to try again


if __name__ == "__main__":
    run_main(main)
