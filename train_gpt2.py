"""GPT-2, the model and its training, in one file that reads from top to bottom.

    python train_gpt2.py                                       # the best this machine can do
    python train_gpt2.py --preset gpt2 --data edu_fineweb10B   # GPT-2 124M on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py     # the same run on eight GPUs

One step in words. The loader hands out token ids x, and y, the same tokens one place later.
Forward: the model turns x into a guess at each token of y. Loss: the mean of -ln(probability of the
right token). Backward: autograd finds the gradient, by how much the loss changes with each weight.
A step has more tokens than fit into memory, so they come in micro-steps, whose gradients add up.
Exchange: each process has its own share of the tokens, so gradients are averaged over the
processes. Clip: a gradient that is too long is shortened. Update: the optimizer moves each weight
against its gradient.

Sections: 1 configuration, 2 model, 3 optimizer and schedule, 4 one update, 5 the run, 6 the loop, 7
command line. Each uses only those above it. What makes the same things exact, fast and safe stands
in lab/, behind the names imported here; a first reading needs none of it.

Shape letters: B batch, T time (tokens of a sequence), C channels (n_embd), H heads, D head size
(C = H * D), S keys that a query looks at (T, and those in a cache), V vocabulary (padded), L
layers, N = B * T positions.
"""

import contextlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lab import cli

if __name__ == "__main__":
    cli.before_torch()  # how Ctrl-C ends the import, and how a CPU's threads wait

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hellaswag import HellaSwag
from lab import data, device, evals, kernels, models, optim, parallel
from lab.generate import generate
from lab.run import Log, Meter, Stopped, StopSignal, Vitals, checkpoints, folder, settings
from lab.world import World

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class GPTConfig:
    """Shape of the model."""

    n_layer: int = 12  # transformer blocks
    n_head: int = 12  # attention heads per block; must divide n_embd
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest context the position embeddings reach, in tokens
    vocab_size: int = 50257  # token ids in use; on the command line 0 lets the data decide
    vocab_multiple: int = 128  # rows are padded to a multiple of this: 50257 -> 50304; 1 is off
    attention: Literal["sdpa", "math"] = "sdpa"  # fused kernel, or softmax(QK^T)V spelled out
    bf16_residual: bool = True  # under bf16 autocast the residual stream is bf16 too
    activation_checkpointing: bool = False  # compute blocks again in backward, to save memory
    document_mask: bool = False  # attention does not cross end-of-text (id vocab_size - 1)

    @property
    def padded_vocab_size(self):
        """Rows of the embedding. GPUs multiply matrices of round sizes much faster (play.ipynb, 7).
        Ids from vocab_size on are never targets, predicted, sampled or exported."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass
class TrainConfig(settings.RunConfig):
    """One run: what decides its result and its speed. RunConfig adds what every program here has:
    the data, what is measured and kept, and how often. The preset gpt2 is GPT-2 124M for one epoch
    of 10B tokens, with the schedule of GPT-3 (Brown et al. 2020, appendix B)."""

    # batch
    total_batch_size: int = 524288  # tokens per update over all processes (2**19: GPT-3's 0.5M)
    batch_size: int = 0  # sequences per process and micro-step; 0 finds what fits
    seq_len: int = 1024  # tokens per sequence
    # optimizer
    max_steps: int = 19073  # updates (gpt2: 10e9 tokens / 524288)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices in the blocks alone
    lr: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 0.02  # peak learning rate of Muon; follows the same schedule
    min_lr: float = 6e-5  # rate at the end of the schedule
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # wsd: warm up, stay, decay
    warmup_steps: float = 0.0375  # linear rise; below 1: a share of max_steps (gpt2: 375M tokens)
    decay_steps: float = 0.2  # wsd alone: length of the decay at the end, or its share likewise
    weight_decay: float = 0.1  # on matrices and embeddings (muon: its matrices alone)
    beta1: float = 0.9  # AdamW: memory of the mean gradient
    beta2: float = 0.95  # AdamW: memory of the squared gradient
    eps: float = 1e-8  # AdamW: added to the root of the squared gradient
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0 is off
    # speed
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"  # auto: the device's best
    parallel: Literal["ddp", "zero1", "fsdp2"] = "ddp"  # zero1 shares out AdamW's state, fsdp2 all
    compile: bool = True  # torch.compile, where it works
    kernels: Literal["fused", "plain"] = "fused"  # plain: the model as it stands here, to debug it
    fp8: Literal["off", "head", "all"] = "off"  # products in 8 bits: of the head; of the MLPs too


PRESETS = {
    # sizes: Radford et al. 2019, table 2 (its parameter counts are wrong; these are the released
    # models). rates: Brown et al. 2020, table 2.1, for the model of the same size.
    "gpt2": (GPTConfig(), TrainConfig()),
    "gpt2-medium": (GPTConfig(24, 16, 1024), TrainConfig("gpt2-medium", lr=3e-4, min_lr=3e-5)),
    "gpt2-large": (GPTConfig(36, 20, 1280), TrainConfig("gpt2-large", lr=2.5e-4, min_lr=2.5e-5)),
    "gpt2-xl": (GPTConfig(48, 25, 1600), TrainConfig("gpt2-xl", lr=2e-4, min_lr=2e-5)),
    "gpt2-2.7b": (  # never released: GPT-3's 2.7B, whose weights, gradients and moments take 42 GB
        GPTConfig(32, 32, 2560), TrainConfig("gpt2-2.7b", lr=1.6e-4, min_lr=1.6e-5, parallel="fsdp2")
    ),
    "laptop": (  # two minutes on two laptop cores, on the text inside Python, read as bytes
        GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=257, vocab_multiple=1),
        TrainConfig(
            **settings.LAPTOP, total_batch_size=4096, seq_len=128, max_steps=1000, optimizer="muon",
            lr=6e-3, min_lr=0.0, schedule="wsd", warmup_steps=0.03, decay_steps=0.7, weight_decay=0.0,
            beta2=0.99, compile=False,
        ),
    ),
    "sft": (  # to answer: --init_from says which model is tuned, and so the shape
        GPTConfig(),
        TrainConfig(
            **settings.SFT, total_batch_size=4096, max_steps=200, lr=2e-4, min_lr=0.0,
            schedule="linear", warmup_steps=0.05, weight_decay=0.0, compile=False,
        ),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model


def spelled_out_attention(q, k, v, mask, causal):
    """F.scaled_dot_product_attention by its definition (Vaswani et al. 2017, 3.2.1)."""
    T, D = q.size(2), q.size(3)
    scores = q @ k.transpose(-2, -1) * D**-0.5  # (B, H, T, S), of size 1 or so for any D
    if causal:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))  # -inf: a weight of 0 after the softmax
    return F.softmax(scores, dim=-1).to(v.dtype) @ v  # autocast's softmax is in 32 bits


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer, causal=True):
        super().__init__()
        self.n_head, self.layer, self.attention = config.n_head, layer, config.attention
        self.causal = causal  # no token sees a later one; bert.py's see all
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # q, k, v of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, mask=None, cache=None):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, H, T, D)
            for t in self.c_attn(x).split(C, dim=2)
        )
        # a mask says all that is hidden; with a cache, a single new token may look at all before it
        causal = self.causal and mask is None and T > 1
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D): earlier tokens come first
        if self.attention == "math":
            y = spelled_out_attention(q, k, v, mask, causal)
        else:  # flash attention where it can: never all (T, S) scores in memory (Dao et al. 2022)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # GPT-2 was trained with tanh


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
    """Cross-entropy of the head's logits. It has no parameters: it is a module so that a faster one
    can take its place (lab.kernels)."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x, weight, targets, reduction):
        """x (N, C), weight (V, C), targets (N,), of which -1 are left out -> the sum of the losses,
        or with reduction "none" each (N,)."""
        logits = F.linear(x, weight)[:, : self.vocab_size]
        # 16 bits are too few for a softmax
        losses = F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="none")
        return losses if reduction == "none" else losses.sum()


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): pre-norm transformer, learned positions, tied head."""

    vocab_rows = ("transformer.wte.weight", "lm_head.weight")  # a row for each id, and pad rows

    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)  # what a token is
        parts.wpe = nn.Embedding(config.block_size, config.n_embd)  # where it stands
        parts.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        parts.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix, read in both directions
        self.head_loss = HeadLoss(config.vocab_size)
        self.init_weights()

    def init_weights(self):
        """Biases 0, the rest normal with std 0.02 (Radford et al. 2018). What is added to the
        residual stream is scaled by (2 n_layer)^-0.5, so that the stream does not grow with depth
        (Radford et al. 2019, 2.3; two additions a block)."""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith("c_proj.weight")
                scale = (2 * self.config.n_layer) ** -0.5 if residual else 1.0
                nn.init.normal_(p, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():  # the pad rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[self.config.vocab_size :] = 0

    @classmethod
    def from_pretrained(cls, source):
        """GPT with the weights of gpt2 ... gpt2-xl, another hub name, a folder or a run."""
        return models.load(source)

    def num_params(self):
        """Numbers in the published model of this shape: the tied matrix once, no pad rows."""
        pad = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(p.numel() for p in self.parameters()) - pad

    @property
    def blocks(self):
        return self.transformer.h

    def block_matrices(self):
        """The matrices inside the blocks. Muon updates these; nothing but products reads them."""
        return [p for p in self.blocks.parameters() if p.dim() == 2]

    def flops_per_token(self, seq_len):
        """6 FLOPs for each weight that multiplies (2 forward, 4 backward; positions are only
        added), and 12 L C T for attention, counted as if not causal, as is the custom (Chowdhery et
        al. 2022, appendix B)."""
        multiply = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()
        return 6 * multiply + 12 * self.config.n_layer * self.config.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, cache=None):
        """idx (B, T) -> what the head sees of it (B, T, C).

        position (T,) or (B, T): 0, 1, 2 ... if left out. mask, which broadcasts to (B, H, T, S), is
        True where a token may look; left out, it may look at itself and all before it (but of
        several new tokens beside a cache that holds some, a mask must say so).
        """
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(position)  # (B, T, C)
        if self.config.bf16_residual and device.in_bf16(x):
            x = x.bfloat16()  # half the memory traffic of every addition and LayerNorm
        for block in self.transformer.h:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask, cache)
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None, reduction="mean", position=None, mask=None, cache=None):
        """idx (B, T) -> (logits, None); with targets (B, T) -> (None, loss).

        logits: (B, T, vocab_size), or with a cache those of the last position (B, 1, vocab_size).
        Targets of -1 are left out. reduction: "mean" over the targets there are (0 if none), "sum",
        or "none" for each position's loss (B, T). Logits do not come beside a loss: a compiled step
        would have to keep all of them, 6.6 GB at 64 x 1024 positions of GPT-2.
        """
        x = self.hidden(idx, position, mask, cache)
        if targets is None:
            logits = self.lm_head(x if cache is None else x[:, -1:])
            return logits[..., : self.config.vocab_size], None
        loss = self.head_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), reduction)
        if reduction == "none":
            return None, loss.view_as(targets)
        return None, loss if reduction == "sum" else loss / (targets >= 0).sum().clamp(min=1)

    def generate(self, idx, max_new_tokens, **how):
        """Yield the next token (B,) of each row of idx (B, T); see lab.generate for how."""
        for token, _ in generate(self, idx, max_new_tokens, **how):
            yield token


# ----------------------------------------------------------------------- 3. optimizer and schedule


def param_groups(model, weight_decay):
    """Two groups. Decay shrinks matrices and embeddings a little at each update, so that only
    useful ones stay large. Biases and LayerNorm gains are few and set scales: they are left out."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model, cfg, world):
    """The optimizer of cfg. A group's "scale" is its peak rate over cfg.lr, as one schedule drives
    AdamW and Muon, whose peaks differ."""
    fused = world.device.type in ("cuda", "cpu")  # one kernel for all tensors, not several for each
    adamw = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused)
    if cfg.optimizer == "muon":
        optimizer = optim.MuonAdamW(model, cfg.muon_lr, cfg.weight_decay, world, **adamw)
    else:
        optimizer = torch.optim.AdamW(param_groups(model, cfg.weight_decay), **adamw)
    for group in optimizer.param_groups:
        group["scale"] = group["lr"] / cfg.lr
    return optimizer


def in_steps(length, cfg):
    """A length in steps; below 1 it is a share of max_steps."""
    return round(length if length >= 1 else length * cfg.max_steps)


def get_lr(step, cfg):
    """Rate for the update after `step` finished ones: a linear rise, then cosine or linear down to
    min_lr at max_steps. wsd stays at its peak before it falls; constant never falls."""
    warmup, decay = in_steps(cfg.warmup_steps, cfg), in_steps(cfg.decay_steps, cfg)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup  # never 0: a first update with rate 0 is a wasted one
    if cfg.schedule == "constant":
        return cfg.lr
    start = warmup
    if cfg.schedule == "wsd":  # warm-up, stable, decay (Hu et al. 2024, MiniCPM)
        start = max(start, cfg.max_steps - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, cfg.max_steps - start)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


# ----------------------------------------------------------------------------------- 4. one update


class Run:
    """Everything that a checkpoint holds, and the update that moves it on by a step. In speedrun.py
    and bert.py it says what they do in another way.

    raw_model is the bare model, which is saved, sampled and inspected; model is the same one as
    training calls it, wrapped by DDP and compiled. step counts finished updates.
    """

    program = "gpt2"  # what checkpoints call this file: lab.models finds it, and Run in it
    model_class = GPT
    make_optimizer = staticmethod(make_optimizer)

    def __init__(self, raw_model, model, optimizer, loader, precision, world, cfg):
        self.raw_model, self.model, self.optimizer = raw_model, model, optimizer
        self.loader, self.precision, self.world, self.cfg = loader, precision, world, cfg
        self.step, self.best_val = 0, math.inf
        self.saved = 0  # step of the newest checkpoint
        self.folder = Path(cfg.log_dir) / cfg.run_name
        self.writer = checkpoints.Writer(self.folder, cfg.keep_last, cfg.async_save, world.device)

    def update(self):
        """One step. Returns tensors: a loss for each micro-step (summed, then averaged over the
        processes, they are the step's loss), and the gradient's norm before clipping."""
        precision, losses = self.precision, []
        for micro_step in range(self.loader.grad_accum_steps):
            x, y, num_targets = self.loader.next_batch()  # num_targets: of the whole step
            last = micro_step == self.loader.grad_accum_steps - 1
            # Exchange: DDP averages gradients over the processes while backward() computes them.
            # Only their sum over the micro-steps is needed, so no_sync() holds it back until the
            # last one. DDP decides in the forward pass: forward and backward both stand inside.
            waits = hasattr(self.model, "no_sync") and not last  # DDP alone has no_sync
            with self.model.no_sync() if waits else contextlib.nullcontext():
                # products in 16 bits; weights, their gradients and the loss stay in 32
                with torch.autocast(x.device.type, precision.dtype, enabled=precision.is_16_bit):
                    _, loss = self.model(x, y, reduction="sum")
                # The sum over this micro-step's targets, divided by those of the whole step: then
                # backward() adds up to the gradient of the mean. DDP averages over the processes,
                # but their sum is wanted: hence world_size.
                loss = loss * (self.world.world_size / num_targets)
                # fp16: gradients below 6e-8 would be 0, so the loss is scaled up, and they back down
                precision.scaler.scale(loss).backward()
            losses.append(loss.detach())
        # ZeRO-1 and FSDP2 clip what they have shared out; ZeRO-1 exchanges gradients here
        clip = getattr(self.optimizer, "clip_grad_norm", self.clip_grad_norm)
        grad_norm = clip(self.cfg.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = get_lr(self.step, self.cfg) * group["scale"]
        precision.scaler.step(self.optimizer)
        precision.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack(losses), grad_norm

    def clip_grad_norm(self, max_norm):
        """Shorten the whole gradient to max_norm (0: never); returns the norm that it had."""
        self.precision.scaler.unscale_(self.optimizer)  # fp16 alone: first back to their true size
        params = [p for p in self.raw_model.parameters() if p.grad is not None]
        norm = optim.exact_norm([p.grad for p in params])
        if max_norm:
            nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def state_dict(self):
        """Tensors and plain values, enough to go on to the bit. All processes call it together."""
        return {
            "program": self.program, "step": self.step, "best_val": self.best_val,
            "model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(), "batch_size": self.loader.batch_size,
            "scaler": self.precision.scaler.state_dict(),
            "rng": device.random_state(self.world.device),
            "model_config": asdict(self.raw_model.config), "train_config": asdict(self.cfg),
        }  # fmt: skip

    def load_state_dict(self, state):
        self.raw_model.load_state_dict(state["model"])
        optim.load_optimizer(self.optimizer, state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        if state["scaler"]:  # of fp16
            self.precision.scaler.load_state_dict(state["scaler"])
        device.set_random_state(state["rng"], self.world.device)
        self.step = self.saved = state["step"]
        self.best_val = state["best_val"]

    def save(self):
        """Begin a checkpoint, which a thread writes, whole or not at all; none of step 0, and none
        twice. Returns the log's note of a finished one: where a thread writes, of the one before."""
        if self.step == self.saved:
            return None
        self.saved, state = self.step, self.state_dict()
        return self.writer.save(self.step, state) if self.world.is_main else None

    def events(self, stop):
        """What happens beside updates, in the order in which a step makes it."""
        validation = evals.Validation(self, stop)
        save = evals.Every("checkpoint", self.cfg.ckpt_every, lambda run: run.save())
        samples = evals.Samples(self, validation.tokenizer)
        return [save, validation, HellaSwag(self, stop), samples]


# -------------------------------------------------------------------------------------- 5. the run


def set_up(model_config, cfg, world, state=None, run_class=Run):
    """The Run of these settings: at its beginning, or where `state`, a checkpoint's, left it."""
    torch.manual_seed(cfg.seed)
    precision = device.Precision(cfg.precision, world.device)  # bf16 where the GPU has it
    if world.device.type == "cuda" and precision.name != "fp32":
        # TF32, for products that autocast leaves in 32 bits: 10 bits of mantissa enter, not 23
        torch.set_float32_matmul_precision("high")
    shards = data.TokenShards(cfg.data, "train", model_config.vocab_size)
    raw_model = run_class.model_class(model_config)
    if cfg.init_from and not state:
        models.start_from(cfg.init_from, raw_model, cfg.log_dir)
    raw_model.to(world.device)
    if model_config.document_mask:
        data.hide_other_documents(raw_model)
    if cfg.kernels == "fused":  # a HeadLoss without all logits in memory, on a GPU faster MLPs
        kernels.use(raw_model, mlp=MLP, precision=precision, fp8=cfg.fp8)
    batch_size = cfg.batch_size or device.fit_batch_size(raw_model, cfg, world, precision, state)
    loader = data.TokenLoader(shards, cfg, world, batch_size)  # its one cursor knows no processes
    optimizer = run_class.make_optimizer(raw_model, cfg, world)
    model = raw_model
    if world.distributed and cfg.parallel != "ddp":  # ZeRO-1 or FSDP2
        optimizer = parallel.EXCHANGES[cfg.parallel](optimizer, raw_model, loader, precision, world)
    elif world.distributed:
        # backward() sends gradients in pieces while it still computes those of earlier layers. The
        # compiler cuts its graph at each piece, and DDP's own 25 MB would cut it at every block.
        model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True, bucket_cap_mb=250)
        parallel.settle_buckets(model, precision)  # a resumed run then sums in the same order
    if cfg.compile and device.can_compile(world, model_config, precision):
        model = torch.compile(model, dynamic=False)  # fuses what lies between products
    run = run_class(raw_model, model, optimizer, loader, precision, world, cfg)
    if state:
        checkpoints.restore(run, state)
    return run


# ------------------------------------------------------------------------------------- 6. the loop


def train(run, events, cfg, world, log, stop):
    """Run the updates up to cfg.max_steps. Returns the name of the signal that stopped it, or "".

    Each pass makes the events that are due, then one update. After max_steps updates only the
    events are left, so that the last weights are measured and saved too. A checkpoint comes before
    the measurements of its step: if a signal interrupts these, a resumed run makes them again.
    """
    # vitals checks losses, and the norms that clipping finds (--on_spike)
    vitals, meter, stopped = Vitals(run, stop, log), Meter(run, log), ""
    try:
        while True:
            last = run.step == cfg.max_steps
            due = [event for event in events if event.due(run.step, last)]
            # raises, on all processes: Stopped by a signal, RunError where a loss, a norm or a weight
            # is not finite (that update has been made, but will not be saved)
            vitals.read(newest=bool(due) or last)
            with meter.paused(due):
                for event in due:
                    log.event(event.name, run.step, event(run))  # long ones may raise Stopped too
            if last:
                break
            losses, grad_norm = run.update()
            vitals.watch(losses)  # looked at a step later, so that nobody waits for the device
            meter.tick()
            if run.step % cfg.log_every == 0 or run.step == cfg.max_steps:
                loss = world.mean(losses.sum().item())
                lr = run.optimizer.param_groups[-1]["lr"]  # AdamW's, whose scale is 1
                log.train(run.step, loss, lr, grad_norm.item(), **meter.read())
    except Stopped as signal:  # Ctrl-C, or SIGTERM
        stopped = str(signal)
        vitals.read(newest=True, heed=False)  # RunError if the last update must not be saved
        log.event("checkpoint", run.step, run.save())
    log.event("checkpoint", run.step, run.writer.finish())
    log.event("end", run.step, {"reason": stopped or "done"})
    return stopped


# ------------------------------------------------------------------------------- 7. command line


def main(argv, presets=PRESETS, description=__doc__, set_up=set_up, program=Run.program):
    reason, model_config, cfg = settings.parse_flags(argv, presets, description, program)
    world = World(cfg.device, cfg.timeout)
    if world.distributed:  # torchrun has started several processes; NCCL carries what is on GPUs
        dist.init_process_group(world.backend, timeout=world.timeout, device_id=world.device_id)
    model_config, cfg, state = settings.resolve(model_config, cfg, world, presets, program)
    run, stop = set_up(model_config, cfg, world, state), StopSignal(world)
    events = run.events(stop)
    with folder.opened(run), stop, Log(run) as log:
        log.start(reason, run, events)
        stopped = train(run, events, cfg, world, log, stop)
        folder.farewell(run, stopped)  # still heeding signals: torchrun sends them once more
    return 75 if stopped else 0  # 75 tells job scripts: try again


if __name__ == "__main__":
    cli.command(main)
