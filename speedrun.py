"""Train a GPT with today's methods: a loss of 3.48 nats after a minute on one H200, where GPT-2's recipe
has 4.63 (docs/LOG.md#race-rates).

    python speedrun.py                              # two minutes on two cores
    python speedrun.py --preset speedrun --fp8 all  # 43 s on an H200
    torchrun --standalone --nproc_per_node=4 speedrun.py --preset speedrun
    python speedrun.py --preset small-data --fp8 all --data data/mine

Read train_gpt2.py first: its data loader, train_step, loop, logs and checkpoints are used here, and
sections and shape letters are the same. This file has what changed in the seven years since GPT-2.
"Saves 0.29 nats" means: at GPT-2 small's width and depth, the loss after the same 16.6M tokens was
lower by that (docs/LOG.md#speedrun-parts).

The main changes. Rotary embedding: queries and keys are rotated by an angle that grows with their
position, so that only distances affect scores. QK-norm: queries and keys have the same length, which
bounds the scores. Value embeddings: attention also passes on which token each position has. Smear and
bigrams: the previous token is known before attention. Muon: a step is equally large in all directions of
a matrix. Always on: RMSNorm, no biases, a norm of the embedding, other initial weights.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lab.cli import pre_import_setup, require, run_main, torchrun_env

if __name__ == "__main__":
    pre_import_setup()  # SIGINT handling and OpenMP wait policy: must run before `import torch`

import torch
import torch.nn as nn
import torch.nn.functional as F

import train_gpt2
from lab import config as settings
from lab.data.document_mask import document_mask, gather_previous_token
from lab.optim.muon import CombinedOptimizer, Muon
from lab.precision import is_bf16_autocast
from lab.rope_scaling import check_rope_scaling, rope_frequencies
from train_gpt2 import HeadLoss, num_steps

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class GPTConfig(train_gpt2.GPTConfig):
    """Shape of the model, and its differences from GPT-2, most of which can be turned off."""

    n_head: int = 6  # attention heads per block; GPT-2 has 12 (the difference was not measured)
    block_size: int = 1024  # longest context
    attention: ClassVar = "sdpa"  # ClassVar removes an inherited field, and with it the flag
    activation_checkpointing: ClassVar = False
    rotary: bool = True  # rotary position embedding (saves 0.29 nats); off: a learned one
    # how to change the frequencies if block_size is longer than in training (trained_length)
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    trained_length: int = 0  # block_size in training; --rope_scaling needs it
    qk_norm: bool = True  # RMSNorm of queries and keys (saves 0.02 nats)
    mlp: Literal["relu2", "gelu"] = "relu2"  # squared ReLU (saves 0.03 nats), or GPT-2's MLP
    tied: bool = False  # one matrix for embedding and head, as in GPT-2 (costs 0.07 nats)
    value_tables: int = 1  # value embeddings (1 saves 0.055 nats; overfits in four epochs)
    smear: bool = True  # add a gated part of the previous token's embedding (saves 0.02 nats)
    bigram_rows: int = 0  # hashed embedding of token pairs (saves 0.02 nats, but overfits)
    value_projection: bool = False  # computed value embeddings (five epochs: saves 0.04 nats)
    dropout: float = 0.0  # dropout rate of embedding, attention and MLP outputs

    def validate(self):
        """Raise UserError for a shape that cannot work."""
        super().validate()
        check_rope_scaling(self)
        require(
            self.value_tables <= self.n_layer,
            f"value_tables={self.value_tables} must be at most n_layer={self.n_layer}",
        )
        require(self.dropout < 1, f"dropout={self.dropout} must be less than 1")

    def value_table(self, layer):
        """Index of the value embedding that a block uses, or None. The first blocks have one each, and
        the last blocks use them again (as in modded-nanogpt)."""
        n = self.value_tables
        table = layer if layer < n else layer - (self.n_layer - n)
        return table if 0 <= table < n else None

    def projects_values(self, layer):
        """Whether a block has a value projection: every second one, including the last, unless it has a
        value table (as in NanoGPT Slowrun)."""
        every_second = (self.n_layer - layer) % 2 == 1
        return self.value_projection and every_second and self.value_table(layer) is None


@dataclass
class TrainConfig(train_gpt2.TrainConfig):
    """train_gpt2.TrainConfig with other defaults and a peak learning rate for each kind of parameter;
    all follow the same schedule."""

    preset: str = "speedrun"  # model and other defaults: speedrun, small-data, laptop, sft
    total_batch_size: int = 65536  # tokens per update, over all processes
    max_steps: int = 480  # number of updates
    parallel: ClassVar = "ddp"  # not a flag, because ZeRO-1 and FSDP2 shard AdamW only
    # optimizer of matrices in blocks; normuon: Muon with scaled rows (saves 0.02 nats)
    optimizer: Literal["adamw", "muon", "normuon"] = "normuon"
    lr: float = 3e-3  # peak learning rate of the head (AdamW)
    embed_lr: float = 0.3  # peak learning rate of embeddings, whose initial std is 1
    scalar_lr: float = 0.015  # peak learning rate of scalars, gates and biases
    muon_lr: float = 0.03  # peak learning rate of Muon; adamw divides it by sqrt(n_embd)
    min_lr: float = 0.0  # learning rate at the end of the schedule
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"  # wsd: warmup-stable-decay
    warmup_steps: int | float = 0  # steps, or a fraction, of linear warmup; only 0 was tried
    decay_steps: int | float = 0.65  # steps, or a fraction, of decay at the end (wsd only)
    weight_decay: float = 0.0  # weight decay of the matrices in the blocks (0.1 saves 0.02 nats)
    decay_all: bool = False  # decay embeddings and head, too (five epochs: saves 0.09 nats)
    beta1: float = 0.8  # AdamW: decay rate of the mean of gradients (as in modded-nanogpt)
    eps: float = 1e-10  # AdamW: added to the denominator of the update
    grad_clip: float = 0.0  # 0: no clipping
    momentum: float = 0.95  # momentum of Muon
    equilibrate_rows: bool = False  # norm 1 for rows of Muon's momentum (290 steps: saves 0.007)
    momentum_warmup: int | float = 0.33  # rise of Muon's momentum from 0.85 (saves 0.03 nats)
    # first steps, with half the batch (saves 0.01 nats at equal time)
    batch_warmup_steps: int | float = 0
    ema_steps: int | float = 0  # average the last steps' weights (seven epochs: saves 0.008)

    def validate(self, model_config):
        """Raise UserError for settings that cannot work."""
        super().validate(model_config)
        require(self.momentum < 1, f"momentum={self.momentum} must be less than 1")
        for name in ("momentum_warmup", "batch_warmup_steps", "ema_steps"):
            settings.check_length(self, name)
        _, _, world_size = torchrun_env()
        multiple = 2 * max(1, self.batch_size) * self.seq_len * world_size
        more = -(-self.total_batch_size // multiple) * multiple
        require(
            not self.batch_warmup_steps or self.total_batch_size % multiple == 0,
            f"total_batch_size={self.total_batch_size} must be a multiple of {multiple} (2 * batch_size "
            "* seq_len * world_size), because the first steps have half as many tokens; "
            f"try {more}, a smaller --batch_size, or --batch_warmup_steps 0",
        )


PRESETS = {
    "speedrun": (
        GPTConfig(),
        TrainConfig(
            weight_decay=0.1, beta2=0.975, equilibrate_rows=True, batch_warmup_steps=0.25, val_every=50,
            val_tokens=1048576, hellaswag_every=0, sample_every=0,
        ),
    ),
    # for six epochs of 111M tokens: 18 minutes on one H200 (docs/LOG.md#long-context)
    "small-data": (
        GPTConfig(block_size=2048, value_tables=0, value_projection=True),
        TrainConfig(
            "small-data", total_batch_size=131072, seq_len=2048, max_steps=5700, weight_decay=0.1,
            decay_all=True, batch_warmup_steps=0.25, ema_steps=0.02, val_every=250, val_tokens=1048576,
            hellaswag_every=0, sample_every=1000,
        ),
    ),
    # two minutes on two CPU cores, on the bytes of Python's own documentation; without some parts that
    # do not help there (docs/LOG.md#speedrun-laptop)
    "laptop": (
        GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=257, vocab_multiple=1,
                  value_tables=0, smear=False, bigram_rows=4096),
        TrainConfig(
            **settings.LAPTOP, total_batch_size=4096, seq_len=128, max_steps=700, lr=1e-2, muon_lr=0.05,
            decay_steps=0.7, momentum_warmup=0.1, beta2=0.99, compile=False,
        ),
    ),
    "sft": (  # supervised fine-tuning, as in train_gpt2.py: a tenth of speedrun's learning rates
        GPTConfig(),
        TrainConfig(**settings.SFT, lr=3e-4, embed_lr=0.03, scalar_lr=1.5e-3, muon_lr=3e-3),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model


def norm(x):
    """RMSNorm (Zhang and Sennrich 2019), here without a gain: x / sqrt(mean(x^2))."""
    return F.rms_norm(x, (x.size(-1),))


def shift_right(x, position, mask, cache, name):
    """For smear and bigrams, shift x (B, T, C) by one token: each token gets the x of the previous one, or
    0 if there is none or the mask hides it."""
    T = x.size(1)
    if cache is not None:  # it stores keys and values (B, H, S, D): pass x as both, with one head
        x = cache.update(name, x[:, None], x[:, None])[0][:, 0]  # (B, S, C)
    if mask is not None:
        return gather_previous_token(x, position, mask)
    return F.pad(x, (0, 0, 1, -1))[:, -T:]  # zeros in front, the last token dropped


def rotation(position, config):
    """cos and sin of the angles by which rotary embedding (Su et al. 2021) rotates pairs of channels:
    (2, T, 1, D), or (2, B, T, 1, D). Half of the pairs don't rotate, so that they can compare content
    independently of distance (as in modded-nanogpt). A query at position t is rotated by t, a key at s by s
    times the frequency, so that their product depends on the positions only through t - s."""
    D = config.n_embd // config.n_head
    frequency, factor = rope_frequencies(config, position.device)  # (D // 4,)
    frequency = F.pad(frequency, (0, D // 2 - D // 4))
    # rotate() gives x1 cos a + x2 sin a and x2 cos a - x1 sin a: the second half has the angle -a
    angle = position[..., None, None].float() * torch.cat([frequency, -frequency])
    return torch.stack([angle.cos(), angle.sin()]) * factor


def rotate(x, cos_sin):
    """Rotate x (B, T, H, D), in which channels i and i + D / 2 are a pair. Written with roll, because
    torch.compile can fuse that with the norm before it, but not a concatenation of two halves."""
    cos, sin = cos_sin.to(x.dtype)
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


class CausalSelfAttention(nn.Module):
    """Attention with rotary positions, QK-norm and value embeddings."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        # three matrices for q, k and v, because Muon orthogonalizes each separately
        self.qkv = nn.Parameter(torch.empty(3, config.n_embd, config.n_embd))
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        if config.projects_values(layer):
            self.c_value = nn.Linear(config.n_embd, config.n_embd, bias=False)
        if config.value_table(layer) is not None or config.projects_values(layer):
            self.mix_values = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x, cos_sin, value, mask=None, cache=None):
        """value (B, T, C): value embeddings of the tokens, or None. They are mixed into the values, so that
        attention can also pass on which token stood there."""
        B, T, C = x.size()
        q, k, v = F.linear(x, self.qkv.flatten(0, 1)).split(C, dim=2)
        if value is not None:  # the mix: Zhou et al. 2024; the embeddings: modded-nanogpt
            v = self.mix_values[0] * v + self.mix_values[1] * value.to(v.dtype)
        q, k, v = (t.view(B, T, self.config.n_head, -1) for t in (q, k, v))  # (B, T, H, D)
        # QK-norm (Henry et al. 2020), here without a learned gain: scores stay within +-sqrt(D), so a large
        # step cannot make the softmax all-or-nothing, and learning rates can be higher
        if self.config.qk_norm:
            q, k = norm(q), norm(k)
        if self.config.rotary:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D), already rotated
        S = k.size(2)
        causal = mask is None and T > 1
        if causal and S > T:  # query i is at position S - T + i
            mask, causal = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T), False
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(train_gpt2.MLP):  # a subclass, so that --fp8 all replaces it
    """MLP without biases and with squared ReLU, found by architecture search (So et al. 2021, Primer)."""

    def __init__(self, config):
        nn.Module.__init__(self)  # your edits of train_gpt2.MLP do not change this one
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)  # Srivastava et al. 2014
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config) if config.mlp == "relu2" else train_gpt2.MLP(config)

    def forward(self, x, cos_sin, value, mask=None, cache=None):
        x = x + self.dropout(self.attn(norm(x), cos_sin, value, mask, cache))
        return x + self.dropout(self.mlp(norm(x)))


class Smear(nn.Module):
    """Adds a gated part of the previous token's embedding to each embedding, so that token pairs are
    available before the first attention layer has learned to look back (as in modded-nanogpt)."""

    channels = 16  # inputs of the gate

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(min(self.channels, config.n_embd), 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))  # its gradient is not 0: sigmoid(0) = 0.5

    def forward(self, x, before):
        return x + self.scale * torch.sigmoid(self.gate(x[..., : self.channels])) * before


class GPT(nn.Module):
    """A GPT with the blocks above and most of train_gpt2.GPT's interface."""

    def __init__(self, config):
        super().__init__()
        self.config, rows = config, config.padded_vocab_size
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(rows, config.n_embd)
        tables = range(config.value_tables)  # value embeddings
        parts.vte = nn.ModuleList(nn.Embedding(rows, config.n_embd) for _ in tables)
        parts.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if not config.rotary:
            parts.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.bigram_rows:
            parts.bigrams = nn.Embedding(config.bigram_rows, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.smear = Smear(config) if config.smear else None
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.head_loss = HeadLoss(config.vocab_size)
        self.init_weights()

    def init_weights(self):
        """Embeddings have std 1 (wte and wpe if tied, 0.02), matrices 0.5 / sqrt(inputs). Matrices that write
        to the residual stream start at 0, so that each block begins as the identity; an untied head starts
        at 0, so that the first prediction is uniform. Yet all weights learn: the head moves in the first
        update, c_proj in the second, the rest by the third. Biases, smear and the pairs' embedding are 0."""
        zero = ("c_proj.weight", "lm_head.weight", "gate.weight", "bigrams.weight", "bias")
        for name, p in self.named_parameters():
            if name.endswith(zero):
                nn.init.zeros_(p)
            elif ".vte." in name or ".wte." in name or ".wpe." in name:  # embeddings
                small = self.config.tied and ".vte." not in name  # 0.02, as in GPT-2
                nn.init.normal_(p, std=0.02 if small else 1.0)
            elif p.dim() >= 2:
                nn.init.normal_(p, std=0.5 * p.size(-1) ** -0.5)
        with torch.no_grad():  # padding rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[self.config.vocab_size :] = 0

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    @property
    def changeable_fields(self):
        """Config fields that --init_from may change: no weight depends on them."""
        rotary = ("block_size", "rope_scaling", "trained_length") if self.config.rotary else ()
        return ("dropout", *rotary)

    def block_matrices(self):
        """The matrices inside the blocks and stacks of such matrices, which Muon updates."""
        return [p for p in self.transformer.h.parameters() if p.dim() >= 2]

    def flops_per_token(self, seq_len):
        """FLOPs of training per token; embeddings are only looked up, so they don't count."""
        multiply = sum(p.numel() for p in self.block_matrices()) + self.lm_head.weight.numel()
        return 6 * multiply + 12 * self.config.n_layer * self.config.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, cache=None):
        """Token ids idx (B, T) -> final hidden states (B, T, C); see train_gpt2.GPT."""
        c, parts = self.config, self.transformer
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        if c.document_mask and mask is None and cache is None:
            mask = document_mask(idx, c.end_of_text)
        x = parts.wte(idx)
        if not c.rotary:
            x = x + parts.wpe(position)
        if c.bigram_rows:  # each token pair is hashed to a row; frequent pairs rarely collide
            before = shift_right(idx[..., None], position, mask, cache, "idx")[..., 0]
            x = x + parts.bigrams((before * 36313 + idx * 27191) % c.bigram_rows)
        x = self.dropout(norm(x))  # RMS 1 for every token
        if c.bf16_residual and is_bf16_autocast(x):
            x = x.bfloat16()
        if self.smear is not None:
            x = self.smear(x, shift_right(x, position, mask, cache, "smear"))
        cos_sin = rotation(position, c) if c.rotary else None
        embedding = x
        for i, block in enumerate(parts.h):
            table, value = c.value_table(i), None
            if table is not None:
                value = parts.vte[table](idx)
            elif c.projects_values(i):
                value = block.attn.c_value(embedding)
            x = block(x, cos_sin, value, mask, cache)
        return norm(x)

    # head, loss and generation are GPT-2's
    forward, generate = train_gpt2.GPT.forward, train_gpt2.GPT.generate


# ----------------------------------------------------------------------- 3. optimizer and schedule


def make_optimizer(model, cfg, world):
    """Muon for the matrices in the blocks, AdamW for the rest, with one group per learning rate. A
    group's "lr_scale" is its peak learning rate divided by cfg.lr. The head is the last group, whose
    learning rate is logged."""
    blocks, head = model.block_matrices(), [model.lm_head.weight]
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    embeddings = [p for p in embeddings if p is not head[0]]  # a tied one counts as the head
    grouped = {id(p) for p in (*blocks, *head, *embeddings)}
    decay = cfg.weight_decay if cfg.decay_all else 0.0
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in grouped], "lr": cfg.scalar_lr},
        {"params": embeddings, "lr": cfg.embed_lr, "weight_decay": decay},
        {"params": head, "lr": cfg.lr, "weight_decay": decay},
    ]
    fused = world.device.type in ("cuda", "cpu")
    adamw = dict(betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused, weight_decay=0.0)
    groups = [group for group in groups if group["params"]]
    if cfg.optimizer == "adamw":
        # entries of AdamW's step are about 1, those of Muon's about 1 / sqrt(C): make them equally long
        lr = cfg.muon_lr * model.config.n_embd**-0.5
        groups.insert(0, {"params": blocks, "lr": lr, "weight_decay": cfg.weight_decay})
        optimizer = torch.optim.AdamW(groups, **adamw)
    else:
        muon = Muon(
            blocks, cfg.muon_lr, cfg.momentum, cfg.weight_decay, world=world,
            beta2=0.95 if cfg.optimizer == "normuon" else 0.0, equilibrate_rows=cfg.equilibrate_rows,
        )  # fmt: skip
        optimizer = CombinedOptimizer(muon, torch.optim.AdamW(groups, **adamw))
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / cfg.lr
    return optimizer


def momentum(step, cfg):
    """Muon's momentum in update number `step` (from 0). It rises from 0.85, because gradients change
    quickly early in training: 0.85 averages about 7 gradients, 0.95 about 20."""
    warmup = num_steps(cfg.momentum_warmup, cfg)
    progress = min(1.0, step / warmup) if warmup else 1.0
    return cfg.momentum - (1 - progress) * max(0.0, cfg.momentum - 0.85)


def step_tokens(step, cfg):
    """Number of tokens in update number `step` (from 0). At first half as many, which gives more updates for
    the same text: early gradients are less noisy."""
    return cfg.total_batch_size // (2 if step < num_steps(cfg.batch_warmup_steps, cfg) else 1)


# ---------------------------------------------------------------------------- 4. one training step


class Trainer(train_gpt2.Trainer):
    model_class = GPT
    make_optimizer = staticmethod(make_optimizer)

    def __init__(self, *args):
        super().__init__(*args)
        params = self.raw_model.named_parameters() if self.cfg.ema_steps else ()
        self.average = {name: p.detach().clone() for name, p in params}

    def step_tokens(self, step):
        """Number of tokens in a step; lab/ calls it."""
        return step_tokens(step, self.cfg)

    def train_step(self):
        self.loader.set_total_batch_size(self.step_tokens(self.step))
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = momentum(self.step, self.cfg)
        result = super().train_step()
        if self.average:
            self.update_average()
        return result

    @torch.no_grad()
    def update_average(self):
        """Update the moving average of the weights (until update ema_steps, their plain mean). After the last
        update it replaces the weights."""
        weights, average = list(self.raw_model.parameters()), list(self.average.values())
        steps = max(1, min(self.step, num_steps(self.cfg.ema_steps, self.cfg)))
        torch._foreach_lerp_(average, weights, 1 / steps)
        if self.step == self.cfg.max_steps:
            torch._foreach_copy_(weights, average)

    def state_dict(self):
        return super().state_dict() | ({"average": self.average} if self.average else {})

    def load_state_dict(self, state):
        super().load_state_dict(state)
        saved = state.get("average", state["model"])  # the run may have begun without an average
        for name, tensor in self.average.items():
            tensor.copy_(saved[name])


# ------------------------------------------------------------------------- 5. building the trainer


def build_trainer(model_config, cfg, world, state=None, trainer_class=Trainer):
    """Build the trainer. The first step is the smallest; a micro-batch that divides it divides all."""
    first = replace(cfg, total_batch_size=step_tokens(0, cfg))
    trainer = train_gpt2.build_trainer(model_config, first, world, state, trainer_class)
    trainer.cfg = cfg
    return trainer


# ---------------------------------------- 6. the loop, and 7. command line: those of train_gpt2.py


def main(argv):
    return train_gpt2.main(argv, PRESETS, __doc__, build_trainer, Trainer)


if __name__ == "__main__":
    run_main(main)
