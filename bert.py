"""BERT (Devlin et al. 2019): train_gpt2.py with another objective, predicting masked words.

    python bert.py                                # preset for this machine
    python fineweb.py --dataset Salesforce/wikitext --name wikitext-103-raw-v1 \\
        --tokenizer wordpiece --out data/wikitext103   # data for a GPU
    python bert.py --preset bert-base             # BERT-base on one GPU
    torchrun --standalone --nproc_per_node=8 bert.py    # on eight GPUs

One training step in words. 15 % of the tokens are selected. Of these, 80 % are replaced by [MASK], 10 %
by a random token, and 10 % stay, so that the model cannot tell which visible tokens are right and must
encode all of them. It predicts the selected tokens from both sides ("the cat [MASK] on the mat": "sat"):
attention sees the whole sequence, and only selected positions have a loss. (GPT-2 predicts each token
from the ones before it, so attention must not look ahead, and every position has a loss.) BERT cannot
generate text; its hidden states, which depend on both sides, are used to classify and compare texts.
Attention, the loop, the training step, optimizers and checkpoints are train_gpt2.py's. The model has
LayerNorm after each addition, the exact GELU, a segment embedding, and a head with a second layer.

Packing. All documents form one stream of tokens, separated by [SEP]. It is cut into sequences without
gaps or padding; unlike in RoBERTa (Liu et al. 2019, 4.2), a cut may be inside a sentence. [CLS] and
[SEP] replace the first and last token of each sequence, because the model will be used on texts that
begin and end with them (a classifier reads the state at [CLS]). There are no sentence pairs and no
next-sentence prediction, which did not help RoBERTa; the segment embedding exists only because
published weights have one.

Main differences from Devlin et al.: no dropout; weight decay 0.1 instead of 0.01; normal instead of
truncated normal initialization; new masks in each epoch (as in RoBERTa); random replacements are
never special tokens; Muon by default.

Sections: 1 configuration, 2 model, 3 masking, 4 validation, 5 command line. Shape letters are those of
train_gpt2.py, and K is the number of masked tokens in a sequence.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lab.cli import pre_import_setup, require, run_main

if __name__ == "__main__":
    pre_import_setup()  # SIGINT handling and OpenMP wait policy: must run before `import torch`

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import train_gpt2
from lab import config as settings
from lab import registry
from lab.data.tokenizers import TOKENIZER_FILE, WordPiece
from lab.eval.samples import MaskedLMSamples
from lab.eval.validation import Validation, evaluate, num_targets, sequence_starts, target_counts
from lab.precision import is_bf16_autocast
from lab.trainer.callbacks import PeriodicCallback

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class BertConfig(train_gpt2.GPTConfig):
    """Shape of the model."""

    block_size: int = 512  # longest text, in tokens
    vocab_size: int = 30522  # bert-base-uncased's (command line: by default that of the data)
    segments: int = 2  # rows of the segment embedding; training uses only the first
    mlm_probability: float = 0.15  # fraction of the tokens that are selected for prediction
    document_mask: ClassVar = False  # ClassVar removes the flag: GPT's document mask is causal

    def validate(self):
        """Raise UserError for a shape that cannot work."""
        super().validate()
        settings.check_range(self, 1, None, "segments")
        require(
            0 < self.mlm_probability <= 1,
            f"mlm_probability={self.mlm_probability} must be above 0 and at most 1",
        )

    def num_masked(self, seq_len):
        """K, the number of masked tokens, which is the same in every sequence."""
        return max(1, int(self.mlm_probability * seq_len))


@dataclass
class BertTrainConfig(train_gpt2.TrainConfig):
    """Settings of training. Devlin et al. trained for a million steps of 256 sequences (90 % of the steps
    with 128 tokens per sequence), with AdamW at 1e-4 and 10,000 warmup steps, on 3.3B words (A.2). In our
    run with --seq_len 128 and Muon, bert-base's loss falls slowly for the first 2,400 steps, to 5.8 nats
    (unigram baseline: 6.9), and then suddenly (docs/LOG.md#bert-h200)."""

    preset: str = "bert-base"  # model and other defaults: bert-base or laptop
    data: str = "data/wikitext103"  # folder of token shards (fineweb.py --tokenizer wordpiece)
    total_batch_size: int = 16384  # tokens per update, over all processes (32 sequences)
    seq_len: int = 512  # tokens per sequence
    whole_word_masking: bool = False  # mask all pieces of a word or none, as in later BERT models
    max_steps: int = 10000  # number of updates
    optimizer: Literal["adamw", "muon"] = "muon"  # of matrices in blocks; the rest uses adamw
    lr: float = 1e-3  # peak learning rate of AdamW; for --optimizer adamw use 2e-4 (laptop: 2e-3)
    muon_lr: float = 0.005  # peak learning rate of Muon (bert-base: 0.02 was too high; no log kept)
    min_lr: float = 0.0  # learning rate at the end of the schedule
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"  # wsd: warmup-stable-decay
    warmup_steps: int | float = 0.05  # linear warmup: steps, or a fraction of max_steps below 1
    decay_steps: int | float = 0.7  # decay at the end (wsd only): steps, or a fraction of max_steps
    fp8: Literal["off", "head", "all"] = "off"  # all: same as head, for lack of an 8-bit exact GELU
    beta2: float = 0.98  # AdamW: decay rate of the mean of squared gradients (Liu et al. 2019, 3.1)
    eps: float = 1e-6  # AdamW: added to the denominator of the update
    val_tokens: int = 2**18  # tokens of the validation split to use; 0: all
    sample_every: int = 1000  # steps between predictions for masked words; 0: never
    sample_tokens: int = 48  # tokens per text
    sample_prompt: str = "Paris is the [MASK] of France."  # shown with two validation texts
    hellaswag_every: ClassVar = 0  # HellaSwag needs a model that predicts the next token
    hellaswag_examples: ClassVar = 0
    blimp_every: ClassVar = 0


PRESETS = {
    "bert-base": (BertConfig(), BertTrainConfig()),
    # minutes on two laptop cores, on Python's own documentation
    "laptop": (
        BertConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=4096, vocab_multiple=1),
        BertTrainConfig(
            "laptop", data="data/builtin_wordpiece", total_batch_size=4096, seq_len=128,
            max_steps=2000, lr=6e-3, muon_lr=0.02, weight_decay=0.0, warmup_steps=0.03,
            compile=False, log_every=20, val_every=200,
            val_tokens=0, sample_every=1000, sample_prompt="Return the [MASK] of the list.",
            checkpoint_every=500,
        ),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model

EPS = 1e-12  # of BERT's LayerNorms


class ExactMLP(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))  # without GPT-2's tanh approximation


class PostNormBlock(nn.Module):
    """Post-norm (Vaswani et al. 2017): LayerNorm after each residual addition, whereas GPT-2 applies it
    before attention and before the MLP. Therefore no norm follows the last block."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn = train_gpt2.CausalSelfAttention(config, layer, causal=False)
        self.ln_1 = nn.LayerNorm(config.n_embd, EPS)
        self.mlp = ExactMLP(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, EPS)

    def forward(self, x, mask=None):
        # .to(x.dtype), because LayerNorm returns float32 under CUDA autocast
        x = self.ln_1(x + self.attn(x, mask)).to(x.dtype)
        return self.ln_2(x + self.mlp(x)).to(x.dtype)


class Bert(nn.Module):
    """BERT with its masked-language-model head, without pooler and next-sentence head."""

    # parameters with one row per token id, followed by the padding rows
    vocab_rows = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(config.padded_vocab_size, C)
        parts.wpe = nn.Embedding(config.block_size, C)
        parts.wse = nn.Embedding(config.segments, C)  # segment embedding
        parts.ln_e = nn.LayerNorm(C, EPS)  # of the sum of the three
        parts.h = nn.ModuleList(PostNormBlock(config, layer) for layer in range(config.n_layer))
        self.head = nn.ModuleDict(dict(dense=nn.Linear(C, C), ln=nn.LayerNorm(C, EPS)))
        self.lm_head = nn.Linear(C, config.padded_vocab_size)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one matrix for both
        self.head_loss = train_gpt2.HeadLoss(config.vocab_size)
        for name, p in self.named_parameters():  # std 0.02 throughout (Devlin et al.)
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():  # padding rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[config.vocab_size :] = 0

    def num_params(self):
        """Number of parameters, without padding rows and counting the tied matrix once."""
        c = self.config
        padding = (c.padded_vocab_size - c.vocab_size) * (c.n_embd + 1)  # the head's bias, too
        return sum(p.numel() for p in self.parameters()) - padding

    @classmethod
    def from_pretrained(cls, source):
        """See GPT.from_pretrained; also accepts "bert-base-uncased"."""
        return registry.load_model(source, cls)

    # borrowed: both only need self.transformer.h
    blocks, block_matrices = train_gpt2.GPT.blocks, train_gpt2.GPT.block_matrices

    def flops_per_token(self, seq_len):
        """See train_gpt2.GPT. The head runs only at masked positions."""
        c = self.config
        head = (c.padded_vocab_size + c.n_embd) * c.n_embd * c.num_masked(seq_len) / seq_len
        blocks = sum(p.numel() for p in self.block_matrices())
        return 6 * (blocks + head) + 12 * c.n_layer * c.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, segment=None):
        """Token ids idx (B, T) -> final hidden states (B, T, C). segment (B, T): defaults to 0. mask,
        broadcastable to (B, H, T, T): True where a token may attend; by default everywhere."""
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        parts = self.transformer
        of_segment = parts.wse.weight[0] if segment is None else parts.wse(segment)
        x = parts.ln_e(parts.wte(idx) + parts.wpe(position) + of_segment)  # (B, T, C)
        if self.config.bf16_residual and is_bf16_autocast(x):
            x = x.bfloat16()
        for block in parts.h:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return x

    def head_transform(self, x):
        """The first layer of the head, which GPT-2 does not have: (..., C) -> (..., C)."""
        return self.head.ln(F.gelu(self.head.dense(x)))

    def gather_targets(self, x, targets):
        """Select the K positions of each row that have a target. Returns the output of the head's first
        layer there (B * K, C), the targets (B, K) and the positions (B, K). Rows with fewer than K
        targets are filled with other positions, whose target is -1."""
        places = (targets >= 0).float().topk(self.config.num_masked(x.size(1))).indices
        x = x.gather(1, places[..., None].expand(-1, -1, x.size(2)))
        return self.head_transform(x.flatten(0, 1)), targets.gather(1, places), places

    def forward(self, idx, targets=None, reduction="mean", position=None, mask=None, segment=None):
        """As GPT.forward: idx (B, T) -> (logits (B, T, vocab_size), None); with targets -> (None, loss).

        With targets, the head runs only at the K positions of each row that have one; at all positions it
        would cost as much as three of BERT-base's blocks. More than K targets in a row give nan (with
        reduction "none", a loss of 0 for those beyond K)."""
        x = self.hidden(idx, position, mask, segment)
        if targets is None:
            return self.lm_head(self.head_transform(x))[..., : self.config.vocab_size], None
        count = (targets >= 0).sum(1)  # (B,)
        x, targets_there, places = self.gather_targets(x, targets)
        # The fused loss has no bias, so the bias becomes the weight of an extra channel that is always
        # 1. With 15 more channels of 0 the width stays a multiple of 16, which is faster on GPUs.
        x = torch.cat([x, x.new_ones(len(x), 1), x.new_zeros(len(x), 15)], 1)
        w, bias = self.lm_head.weight, self.lm_head.bias[:, None]
        w = torch.cat([w, bias, w.new_zeros(len(w), 15)], 1)
        # the sum, unless reduction is "none"
        loss = self.head_loss(x, w, targets_there.flatten(), reduction)
        if reduction == "none":
            return None, loss.new_zeros(targets.shape).scatter(1, places, loss.view_as(places))
        loss = loss.where((count <= places.size(1)).all(), math.nan)
        return None, loss if reduction == "sum" else loss / count.sum().clamp(min=1)

    def sums(self, idx, targets):
        """Summed loss and number of correct predictions: a `measure` for evaluate()."""
        x, targets, _ = self.gather_targets(self.hidden(idx), targets)
        logits, targets = self.lm_head(x)[:, : self.config.vocab_size].float(), targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).sum()}


# --------------------------------------------------------------------------------------- 3. masking


class Masking:
    """Masks K tokens of each sequence; the transform of a TokenLoader.

    Some stay as they are, because the model will be used on text without [MASK]. The masks depend only on
    (seed, sequence id): they are new in each epoch and the same for any number of processes.
    """

    def __init__(self, tokenizer, config, whole_word_masking=False, always=False):
        """always: replace all masked tokens with [MASK], as in samples."""
        self.tokenizer, self.always = tokenizer, always
        self.config = config
        self.cls, self.sep, self.mask = map(tokenizer.id_of, ("[CLS]", "[SEP]", "[MASK]"))
        self.special = tokenizer.is_special()  # (vocab_size,): never a replacement
        self.ordinary = np.flatnonzero(~self.special)
        # (vocab_size,): pieces that are masked together with the previous one
        self.is_continuation = tokenizer.is_continuation() & whole_word_masking

    def __call__(self, x, y, seed, sequence_ids):
        """Put [CLS] and [SEP] at the ends of each row of x (B, T) and mask K tokens, in place. Set y (B, T)
        to the original tokens there, -1 elsewhere.

        Each row gets exactly K targets, even with whole-word masking: a word with more pieces than are
        still to be masked is skipped. If no word fits any more, part of one is masked."""
        x[:, 0], x[:, -1], y[:] = self.cls, self.sep, -1
        for row, targets, sequence in zip(x, y, sequence_ids):
            rng = np.random.default_rng([seed, int(sequence)])
            masked, draw = self.choose(row, rng)
            targets[masked] = row[masked]
            swapped = masked & (draw >= 0.9) & (not self.always)
            row[masked & ((draw < 0.8) | self.always)] = self.mask
            row[swapped] = self.ordinary[rng.integers(len(self.ordinary), size=swapped.sum())]
        return x, y

    def choose(self, row, rng):
        """Two arrays (T,): whether each token is masked, and a random number from 0 to 1 that decides
        its replacement."""
        begins = ~self.is_continuation[row]
        begins[1:] |= self.special[row[:-1]]  # a word does not continue after [SEP]
        word = begins.cumsum() - 1  # (T,): index of the word that a token belongs to; 0 for [CLS]
        left = self.config.num_masked(len(row))
        sizes = np.bincount(word)
        sizes[word[self.special[row]]] = left + 1  # too large to be chosen
        chosen = np.zeros(len(sizes), dtype=bool)
        order = rng.permutation(len(sizes))
        for w, size in zip(order, sizes[order].tolist()):
            if size <= left:
                chosen[w], left = True, left - size
            if not left:
                break
        masked = chosen[word]
        if left:  # no word fits: mask the first tokens that are left, special ones only at the end
            masked[np.argsort(2 * masked + self.special[row], kind="stable")[:left]] = True
        draw = rng.random(len(sizes))[word]  # the same for all pieces of a word
        return masked, draw


# ------------------------------------------------------------------------------------ 4. validation


class MaskedValidation(Validation):
    """Loss and accuracy of the model and of the unigram baseline, on the first cfg.val_tokens tokens of
    the validation split, with the same masks each time."""

    def __init__(self, trainer, stop):
        self.masking = trainer.loader.transform
        super().__init__(trainer, stop)
        self.tokenizer = self.masking.tokenizer

    def prepare(self, trainer):
        starts, T = sequence_starts(self.shards, trainer.cfg), trainer.cfg.seq_len
        y = self.masking(*self.shards.batch(starts, T), 0, starts)[1]
        end = num_targets(self.shards, trainer.cfg.val_tokens)
        y = y[(y >= 0) & (starts[:, None] + np.arange(T) < end)]
        counts = target_counts(trainer.loader.shards, 20_000_000) * ~self.masking.special + 1
        self.unigram = float(-np.log(counts[y] / counts.sum()).mean())
        self.unigram_accuracy = float((y == counts.argmax()).mean())

    def evaluate_means(self, trainer):
        sums = evaluate(trainer.raw_model, *self.eval_args(trainer), Bert.sums, self.masking)
        means = {name: value / sums["targets"] for name, value in sums.items()}
        return means | {"unigram_accuracy": self.unigram_accuracy}


def sample_texts(trainer, tokenizer, shards):
    """Pairs (ids, targets): two texts of the validation split, and before them cfg.sample_prompt, whose
    targets are [MASK] itself, because its words are unknown. -1: not masked."""
    masking = Masking(tokenizer, trainer.raw_model.config, whole_word_masking=True, always=True)
    # at least one token besides [CLS] and [SEP]
    T = max(3, min(trainer.cfg.sample_tokens, trainer.cfg.seq_len))
    texts = list(zip(*masking(*shards.batch(np.arange(2) * T, T), 0, np.arange(2))))
    parts = (tokenizer.encode(part) for part in trainer.cfg.sample_prompt.split("[MASK]"))
    prompt = [masking.cls, *next(parts)] + [i for part in parts for i in (masking.mask, *part)]
    ids = np.array([*prompt, masking.sep][: trainer.raw_model.config.block_size])
    return [(ids, np.where(ids == masking.mask, ids, -1)), *texts]


# ---------------------------------------------------------------------------------- 5. command line


class Trainer(train_gpt2.Trainer):
    model_class = Bert

    def callbacks(self, stop):
        validation = MaskedValidation(self, stop)
        texts = sample_texts(self, validation.tokenizer, validation.shards)
        save = PeriodicCallback("checkpoint", self.cfg.checkpoint_every, lambda t: t.save())
        return [save, validation, MaskedLMSamples(self, validation.tokenizer, texts)]


def validate_tokenizer(trainer, tokenizer):
    """Raise UserError if the settings of a run do not fit its tokenizer."""
    cfg, vocab_size = trainer.cfg, trainer.raw_model.config.vocab_size
    require(
        vocab_size == tokenizer.vocab_size,
        f"vocab_size={vocab_size} must be {tokenizer.vocab_size}, as in {tokenizer.name}; leave it out",
    )
    require(cfg.seq_len >= 3, f"seq_len={cfg.seq_len} must be at least 3: [CLS], a token and [SEP]")
    require(
        not cfg.sample_every or "[MASK]" in cfg.sample_prompt,
        f"sample_prompt={cfg.sample_prompt!r} must contain [MASK], the word to predict",
    )


def build_trainer(model_config, cfg, world, state=None, trainer_class=Trainer):
    """See train_gpt2.py; here the loader also masks tokens."""
    tokenizer = WordPiece(f"{cfg.data}/{TOKENIZER_FILE}")
    trainer = train_gpt2.build_trainer(model_config, cfg, world, state, trainer_class)
    validate_tokenizer(trainer, tokenizer)
    trainer.loader.transform = Masking(tokenizer, model_config, cfg.whole_word_masking)
    return trainer


def main(argv):
    return train_gpt2.main(argv, PRESETS, __doc__, build_trainer, Trainer)


if __name__ == "__main__":
    run_main(main)
