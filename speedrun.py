"""The task of train_gpt2.py as it would be done today: the same loss in a fraction of the time.

    python speedrun.py                                         # two minutes on a laptop's CPU
    python speedrun.py --preset speedrun --fp8 head    # GPT-2 124M's blocks, one GPU, a minute (H200)
    torchrun --standalone --nproc_per_node=4 speedrun.py --preset speedrun --fp8 head    # on four

One step in words is train_gpt2.py's, and so are loader, update, loop, log and checkpoints. What is
here is what seven years have changed since: the model, the optimizers, the schedule and the size of
a step. Most differences have a flag that takes them back, to be measured alone (bench/speedrun.py;
results: docs/LOG.md#speedrun-parts, #speedrun-laptop), and a comment that says why. Sections are
those of train_gpt2.py, which is to be read first; the shape letters too.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lab import cli

if __name__ == "__main__":
    cli.before_torch()  # how Ctrl-C ends the import, and how a CPU's threads wait

import torch
import torch.nn as nn
import torch.nn.functional as F

import train_gpt2
from lab.data.document_mask import before_in_mask
from lab.device import in_bf16
from lab.optim import Muon, Together
from lab.run import settings
from train_gpt2 import HeadLoss, in_steps

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class GPTConfig:
    """Shape of the model, then its differences to GPT-2, most of which can be switched off."""

    n_layer: int = 12  # transformer blocks
    n_head: int = 6  # attention heads per block: fewer and wider ones are faster on a GPU
    n_embd: int = 768  # channels of the residual stream
    block_size: int = 1024  # longest context
    vocab_size: int = 50257  # token ids in use; on the command line 0 lets the data decide
    vocab_multiple: int = 128  # rows are padded to a multiple of this: 50257 -> 50304; 1 is off
    bf16_residual: bool = True  # under bf16 autocast the residual stream is bf16 too
    document_mask: bool = False  # attention does not cross end-of-text (id vocab_size - 1)
    rotary: bool = True  # queries and keys turn with their position; off: positions are embedded
    qk_norm: bool = True  # queries and keys are normalised before they meet
    mlp: Literal["relu2", "gelu"] = "relu2"  # gelu: GPT-2's MLP, with its biases and 8-bit kernels
    tied: bool = False  # one matrix for embedding and head, as in GPT-2
    value_tables: int = 1  # token embeddings for attention's values; from 4 epochs on 0 is better
    smear: bool = True  # each embedding has a share of the one before it
    bigram_rows: int = 0  # rows of an embedding of pairs of tokens; 0 is off

    padded_vocab_size = train_gpt2.GPTConfig.padded_vocab_size

    def value_table(self, layer):
        """Which of the value_tables a block reads, or None: the first blocks have one each, and the
        last ones, which choose the next token, the same once more (as modded-nanogpt has it)."""
        n = self.value_tables
        table = layer if layer < n else layer - (self.n_layer - n)
        return table if 0 <= table < n else None


@dataclass
class TrainConfig(train_gpt2.TrainConfig):
    """As train_gpt2.py's, but for defaults, and rates for each kind of parameter. lr is that of the
    head; those of the others follow the same schedule."""

    preset: str = "speedrun"
    total_batch_size: int = 131072  # tokens per update over all processes
    max_steps: int = 290
    parallel: ClassVar = "ddp"  # no flag: ZeRO-1 and FSDP2 know AdamW alone
    optimizer: Literal["adamw", "muon", "normuon"] = "normuon"  # of the matrices in the blocks
    lr: float = 3e-3  # peak learning rate of the head (AdamW)
    embed_lr: float = 0.3  # of embeddings: their weights begin at about 1, a head at 0
    scalar_lr: float = 0.015  # of learnt scalars, gates and biases
    muon_lr: float = 0.03  # of Muon; AdamW in its place gets the rate whose step is as long
    min_lr: float = 0.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"
    warmup_steps: float = 0.0  # steps, or below 1 their share; matrices that begin as 0 need none
    decay_steps: float = 0.65  # steps, or below 1 their share, in which the rates fall at the end
    weight_decay: float = 0.0  # of the matrices in the blocks
    beta1: float = 0.8  # AdamW: short memories, as a run is short
    eps: float = 1e-10
    grad_clip: float = 0.0  # off: an orthogonal step is as long for any gradient
    momentum: float = 0.95  # Muon's
    momentum_warmup: float = 0.33  # steps, or below 1 their share, in which it rises from 0.85
    small_steps: float = 0.0  # steps, below 1 a share, of half the tokens: early gradients agree


PRESETS = {
    "speedrun": (
        GPTConfig(),
        TrainConfig(
            weight_decay=0.1, small_steps=0.25, val_every=50, val_tokens=1048576, hella_every=0,
            sample_every=0,
        ),
    ),
    "laptop": (  # two minutes on two laptop cores, on the text inside Python, read as bytes; what
        # does not pay there (docs/LOG.md#speedrun-laptop) is left out
        GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=257, vocab_multiple=1,
                  value_tables=0, smear=False, bigram_rows=4096),
        TrainConfig(
            **settings.LAPTOP, total_batch_size=4096, seq_len=128, max_steps=700, lr=1e-2, muon_lr=0.05,
            decay_steps=0.7, momentum_warmup=0.1, beta2=0.99, compile=False,
        ),
    ),
    "sft": (  # to answer, as train_gpt2.py's: a tenth of the preset speedrun's rates
        GPTConfig(),
        TrainConfig(
            **settings.SFT, total_batch_size=4096, max_steps=200, lr=3e-4, embed_lr=0.03,
            scalar_lr=1.5e-3, muon_lr=3e-3, schedule="linear", compile=False,
        ),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model


def norm(x):
    """RMSNorm (Zhang and Sennrich 2019) without a gain: what reads x has a matrix, which learns it.
    Unlike LayerNorm it leaves the mean in."""
    return F.rms_norm(x, (x.size(-1),))


def one_back(x, position, mask, cache, name):
    """The x (B, T, C) of the token before each one: 0 where there is none that may be seen."""
    T = x.size(1)
    if cache is not None:  # which keeps pairs, as of keys and values
        x = cache.append(name, x[:, None], x[:, None])[0][:, 0]  # (B, S, C)
    if mask is not None:
        return before_in_mask(x, position, mask)
    return F.pad(x, (0, 0, 1, 0))[:, x.size(1) - T : x.size(1)]


def rotation(position, D):
    """(cos, sin) by which rotary embedding (Su et al. 2021) turns pairs of channels: (T, D / 2), or
    (B, 1, T, D / 2). Half of the pairs do not turn: they can tell what, whatever the distance."""
    speed = 1024 ** -torch.linspace(0, 1, D // 4, device=position.device)  # radians a token
    speed = torch.cat([speed, torch.zeros(D // 2 - D // 4, device=position.device)])
    angle = position[..., None].float() * speed
    angle = angle if position.dim() == 1 else angle[:, None]
    return angle.cos(), angle.sin()


def rotate(x, turn):
    """x (B, H, T, D), of which channels i and i + D / 2 are a pair."""
    cos, sin = (t.to(x.dtype) for t in turn)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


class CausalSelfAttention(nn.Module):
    """Scores depend on directions and distance alone, not on length or place."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        # three matrices: Muon makes each orthogonal by itself
        self.qkv = nn.Parameter(torch.empty(3, config.n_embd, config.n_embd))
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        if config.value_table(layer) is not None:
            self.mix_values = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x, turn, value, mask=None, cache=None):
        """value (B, T, C): what the token itself hands over, or None."""
        B, T, C = x.size()
        q, k, v = F.linear(x, self.qkv.flatten(0, 1)).split(C, dim=2)
        if value is not None:  # value embeddings (Zhou et al. 2024; modded-nanogpt)
            v = self.mix_values[0] * v + self.mix_values[1] * value.to(v.dtype)
        q, k, v = (t.view(B, T, self.config.n_head, -1).transpose(1, 2) for t in (q, k, v))
        if self.config.qk_norm:  # Henry et al. 2020: scores cannot grow, so rates can be high
            q, k = norm(q), norm(k)
        if self.config.rotary:
            q, k = rotate(q, turn), rotate(k, turn)
        causal = mask is None and T > 1
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D), turned already
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """ReLU squared (So et al. 2021, Primer): few neurons are active at a time."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config) if config.mlp == "relu2" else train_gpt2.MLP(config)

    def forward(self, x, turn, value, mask=None, cache=None):
        x = x + self.attn(norm(x), turn, value, mask, cache)
        return x + self.mlp(norm(x))


class Smear(nn.Module):
    """Adds to each embedding a share of the one before, which a gate chooses: pairs of tokens are
    seen before the first attention layer has found them."""

    channels = 16  # that the gate reads

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(min(self.channels, config.n_embd), 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x, before):
        return x + self.scale * torch.sigmoid(self.gate(x[..., : self.channels])) * before


class GPT(nn.Module):
    """The interface of train_gpt2.GPT, with the blocks above."""

    def __init__(self, config):
        super().__init__()
        self.config, rows = config, config.padded_vocab_size
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(rows, config.n_embd)
        tables = range(config.value_tables)
        parts.vte = nn.ModuleList(nn.Embedding(rows, config.n_embd) for _ in tables)
        parts.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if not config.rotary:
            parts.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.bigram_rows:
            parts.bigrams = nn.Embedding(config.bigram_rows, config.n_embd)
        self.smear = Smear(config) if config.smear else None
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.head_loss = HeadLoss(config.vocab_size)
        self.init_weights()

    def init_weights(self):
        """Matrices keep half the size of what they read. Those that write to the residual stream
        begin as 0, so blocks come in as they learn; so does a head of its own: the first guess is
        uniform."""
        zero = ("c_proj.weight", "lm_head.weight", "gate.weight", "bigrams.weight", "bias")
        for name, p in self.named_parameters():
            if name.endswith(zero):
                nn.init.zeros_(p)
            elif ".vte." in name or ".wte." in name or ".wpe." in name:  # embeddings
                small = self.config.tied and ".vte." not in name  # GPT-2's size
                nn.init.normal_(p, std=0.02 if small else 1.0)
            elif p.dim() >= 2:
                nn.init.normal_(p, std=0.5 * p.size(-1) ** -0.5)
        with torch.no_grad():  # the pad rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[self.config.vocab_size :] = 0

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def block_matrices(self):
        """What Muon updates: the matrices inside the blocks, also stacks of them."""
        return [p for p in self.transformer.h.parameters() if p.dim() >= 2]

    def flops_per_token(self, seq_len):
        """As train_gpt2.GPT's; embeddings are looked up, not multiplied."""
        multiply = sum(p.numel() for p in self.block_matrices()) + self.lm_head.weight.numel()
        return 6 * multiply + 12 * self.config.n_layer * self.config.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, cache=None):
        """idx (B, T) -> what the head sees of it (B, T, C); as train_gpt2.GPT's."""
        c, t = self.config, self.transformer
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        x = t.wte(idx)
        if not c.rotary:
            x = x + t.wpe(position)
        if c.bigram_rows:  # a hash gives each pair a row; frequent pairs seldom share one
            before = one_back(idx[..., None], position, mask, cache, "idx")[..., 0]
            x = x + t.bigrams((before * 36313 + idx * 27191) % c.bigram_rows)
        x = norm(x)
        if c.bf16_residual and in_bf16(x):
            x = x.bfloat16()
        if self.smear is not None:
            x = self.smear(x, one_back(x, position, mask, cache, "smear"))
        turn = rotation(position, c.n_embd // c.n_head) if c.rotary else None
        for i, block in enumerate(t.h):
            table = c.value_table(i)
            value = None if table is None else t.vte[table](idx)
            x = block(x, turn, value, mask, cache)
        return norm(x)

    # what is done with `hidden` has not changed
    forward, generate = train_gpt2.GPT.forward, train_gpt2.GPT.generate


# ----------------------------------------------------------------------- 3. optimizer and schedule


def make_optimizer(model, cfg, world):
    """Muon for the matrices in the blocks, AdamW for the rest in groups with a rate each. A group's
    "scale" is its peak rate over cfg.lr; the log shows that of the last one, the head."""
    blocks, head = model.block_matrices(), [model.lm_head.weight]
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    taken = {id(p) for p in (*blocks, *head, *embeddings)}
    tied = model.config.tied
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in taken], "lr": cfg.scalar_lr},
        {"params": [p for p in embeddings if not tied or p is not head[0]], "lr": cfg.embed_lr},
        {"params": head, "lr": cfg.lr},
    ]
    fused = world.device.type in ("cuda", "cpu")
    adamw = dict(betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=fused, weight_decay=0.0)
    groups = [group for group in groups if group["params"]]
    if cfg.optimizer == "adamw":
        lr = cfg.muon_lr * model.config.n_embd**-0.5  # the size of an orthogonal matrix's entries
        groups.insert(0, {"params": blocks, "lr": lr, "weight_decay": cfg.weight_decay})
        optimizer = torch.optim.AdamW(groups, **adamw)
    else:
        row_beta = 0.95 if cfg.optimizer == "normuon" else 0.0  # memory of its rows' sizes
        muon = Muon(blocks, cfg.muon_lr, cfg.momentum, cfg.weight_decay, row_beta, world)
        optimizer = Together(muon, torch.optim.AdamW(groups, **adamw))
    for group in optimizer.param_groups:
        group["scale"] = group["lr"] / cfg.lr
    return optimizer


def momentum(step, cfg):
    """Muon's, for the update after `step` finished ones. It rises, as early gradients age fast."""
    rise = in_steps(cfg.momentum_warmup, cfg)
    done = min(1.0, step / rise) if rise else 1.0
    return cfg.momentum - (1 - done) * max(0.0, cfg.momentum - 0.85)


def step_tokens(step, cfg):
    """Tokens of the update after `step` finished ones."""
    return cfg.total_batch_size // (2 if step < in_steps(cfg.small_steps, cfg) else 1)


# ----------------------------------------------------------------------------------- 4. one update


class Run(train_gpt2.Run):
    program, model_class = "speedrun", GPT
    make_optimizer = staticmethod(make_optimizer)

    def step_tokens(self, step):  # Log sums them up
        return step_tokens(step, self.cfg)

    def update(self):
        self.loader.set_total_batch_size(self.step_tokens(self.step))
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = momentum(self.step, self.cfg)
        return super().update()


# -------------------------------------------------------------------------------------- 5. the run


def set_up(model_config, cfg, world, state=None):
    """As train_gpt2.py's. The micro-batch is cut to fit the smallest step."""
    first = replace(cfg, total_batch_size=step_tokens(0, cfg))
    run = train_gpt2.set_up(model_config, first, world, state, Run)
    run.cfg = cfg
    return run


# ---------------------------------------- 6. the loop, and 7. command line: those of train_gpt2.py


def main(argv):
    return train_gpt2.main(argv, PRESETS, __doc__, set_up, Run.program)


if __name__ == "__main__":
    cli.command(main)
