"""BERT (Devlin et al. 2019): the blocks of train_gpt2.py with another objective, predicting masked words.

    python bert.py                                      # picks a preset for this machine
    python fineweb.py --dataset Salesforce/wikitext --name wikitext-103-raw-v1 \\
        --tokenizer wordpiece --out data/wikitext103    # data for a GPU
    python bert.py --preset bert-base                   # BERT-base on one GPU, on that data
    torchrun --standalone --nproc_per_node=8 bert.py    # the same run on eight

One training step in words. GPT-2 predicts each token from those before it, so attention must hide
what comes after, and every position has a loss. BERT masks 15 % of the tokens and predicts them from
both sides: attention hides nothing, only masked tokens have a loss, and the model can read text but
not generate it. Everything else is the same training: the loop, the step, the optimizers, the
schedule, checkpoints and resuming are those of train_gpt2.py, called from here.

Packing. Text is one stream of tokens with [SEP], the end of a text, between documents. It is cut into
sequences without gaps or padding, as in RoBERTa (Liu et al. 2019, 4.2), but at any token. [CLS] and
[SEP] replace the first and last token of a sequence, because that is where users of the model put
them; this costs two tokens of 512. There is no second text in a sequence (segment) and no
next-sentence prediction, which did not help (same paper, 4.2); segment embeddings are kept because
published weights have them.

Differences from Devlin et al.: no dropout; weight decay 0.1 instead of 0.01; initial weights from a
plain instead of a truncated normal distribution; masks drawn anew in each epoch (as in RoBERTa);
random replacements are never special tokens; Muon by default.

Sections: 1 configuration, 2 model, 3 masking, 4 validation, 5 command line. Shape letters are those of
train_gpt2.py, and K masked tokens in a sequence.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lab.cli import command_for, pre_import_setup, require, run_main

if __name__ == "__main__":
    pre_import_setup()  # SIGINT handling and OpenMP wait policy: must run before `import torch`

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import train_gpt2 as gpt2
from lab import config, registry
from lab.data.tokenizers import TOKENIZER_FILE, WordPiece
from lab.eval.samples import MaskedLMSamples
from lab.eval.validation import Validation, evaluate, num_targets, sequence_starts, target_counts
from lab.precision import is_bf16_autocast
from lab.trainer.callbacks import PeriodicCallback

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class BertConfig(gpt2.GPTConfig):
    """Shape of the model."""

    block_size: int = 512  # longest text, in tokens
    vocab_size: int = 30522  # of bert-base-uncased; 0 on the command line: taken from the data
    segments: int = 2  # rows of the segment embedding; training uses only the first
    mlm_probability: float = 0.15  # fraction of the tokens that is masked; only they reach the head
    document_mask: ClassVar = False  # not a flag here: GPT's mask is causal

    def validate(self):
        """Raise UserError for a shape that cannot work."""
        super().validate()
        config.check_range(self, 1, None, "segments")
        require(
            0 < self.mlm_probability <= 1,
            f"mlm_probability={self.mlm_probability} must be above 0 and at most 1",
        )

    def num_masked(self, seq_len):
        """K: how many tokens of a sequence are masked, always the same number."""
        return max(1, int(self.mlm_probability * seq_len))


@dataclass
class BertTrainConfig(gpt2.TrainConfig):
    """Settings of one run. At 128 tokens per sequence, bert-base's loss stays near that of guessing by
    frequency for the first 2,400 steps with Muon (docs/LOG.md#bert-h200). Devlin et al. trained for a
    million steps of 256 sequences, nine tenths of them 128 tokens long, with AdamW at 1e-4 and 10,000
    warmup steps, on 3.3B words (A.2)."""

    preset: str = "bert-base"  # source of the other defaults: bert-base or laptop
    data: str = "data/wikitext103"  # folder of token shards (fineweb.py --tokenizer wordpiece)
    total_batch_size: int = 16384  # tokens per update over all processes: 32 sequences
    seq_len: int = 512
    whole_word_masking: bool = False  # mask all pieces of a word or none (Devlin's later models)
    max_steps: int = 10000
    optimizer: Literal["adamw", "muon"] = "muon"  # for the matrices in the blocks
    lr: float = 1e-3  # of all other parameters; with --optimizer adamw use 2e-4 (laptop: 2e-3)
    muon_lr: float = 0.005  # of Muon; bert-base diverges at 0.02
    min_lr: float = 0.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"
    warmup_steps: int | float = 0.05  # these two: steps, or a fraction of max_steps below 1
    decay_steps: int | float = 0.7
    fp8: Literal["off", "head", "all"] = "off"  # all is head here: the 8-bit MLP has tanh's GELU
    beta2: float = 0.98  # more stable than 0.999 in large batches (Liu et al. 2019, 3.1)
    eps: float = 1e-6
    val_tokens: int = 2**18
    sample_every: int = 1000  # predictions for masked words; 0 is never
    sample_tokens: int = 48  # tokens per text
    sample_prompt: str = "Paris is the [MASK] of France."  # shown beside two texts of validation
    hellaswag_every: ClassVar = 0  # HellaSwag needs a model that predicts the next token
    hellaswag_examples: ClassVar = 0
    blimp_every: ClassVar = 0


PRESETS = {
    "bert-base": (BertConfig(), BertTrainConfig()),
    # minutes on two laptop cores, on the text that ships inside Python
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


class ExactMLP(gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))  # exact GELU, not GPT-2's tanh approximation


class PostNormBlock(nn.Module):
    """Post-norm: LayerNorm after each residual addition, where GPT-2 has it before attention and MLP
    (Xiong et al. 2020). So no norm is needed after the last block."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn = gpt2.CausalSelfAttention(config, layer, causal=False)
        self.ln_1 = nn.LayerNorm(config.n_embd, EPS)
        self.mlp = ExactMLP(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, EPS)

    def forward(self, x, mask=None):
        x = self.ln_1(x + self.attn(x, mask)).to(
            x.dtype
        )  # under CUDA autocast, LayerNorm returns float32
        return self.ln_2(x + self.mlp(x)).to(x.dtype)


class Bert(nn.Module):
    """BERT with its masked-language-model head, without pooler and next-sentence head."""

    # one row per token id, then padding
    vocab_rows = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(config.padded_vocab_size, C)
        parts.wpe = nn.Embedding(config.block_size, C)
        parts.wse = nn.Embedding(config.segments, C)
        parts.ln_e = nn.LayerNorm(C, EPS)
        parts.h = nn.ModuleList(PostNormBlock(config, layer) for layer in range(config.n_layer))
        self.head = nn.ModuleDict(dict(dense=nn.Linear(C, C), ln=nn.LayerNorm(C, EPS)))
        self.lm_head = nn.Linear(C, config.padded_vocab_size)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one matrix for both
        self.head_loss = gpt2.HeadLoss(config.vocab_size)
        for name, p in self.named_parameters():  # std 0.02 throughout (Devlin et al.)
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():  # padding rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[config.vocab_size :] = 0

    def num_params(self):
        """Parameters of the published model of this shape: the tied matrix once, no padding rows."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * (
            self.config.n_embd + 1
        )
        return sum(p.numel() for p in self.parameters()) - padding

    @classmethod
    def from_pretrained(cls, source):
        """See GPT.from_pretrained; also takes "bert-base-uncased"."""
        return registry.load_model(source, cls)

    blocks, block_matrices = gpt2.GPT.blocks, gpt2.GPT.block_matrices

    def flops_per_token(self, seq_len):
        """See GPT; the head multiplies masked tokens only."""
        c = self.config
        head = (c.padded_vocab_size + c.n_embd) * c.n_embd * c.num_masked(seq_len) / seq_len
        blocks = sum(p.numel() for p in self.block_matrices())
        return 6 * (blocks + head) + 12 * c.n_layer * c.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, segment=None):
        """Token ids idx (B, T) -> final hidden states (B, T, C). segment (B, T): defaults to 0. mask,
        broadcastable to (B, H, T, T), is True where a token may look; by default it sees all."""
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
        """The head's layer before the decoder, on (..., C)."""
        return self.head.ln(F.gelu(self.head.dense(x)))

    def gather_targets(self, x, targets):
        """The K positions of each row that have a target: their hidden states after the head's first
        layer (B * K, C), their targets and their places in the row, both (B, K). Rows with fewer
        targets are filled up with other positions."""
        places = (targets >= 0).float().topk(self.config.num_masked(x.size(1))).indices
        x = x.gather(1, places[..., None].expand(-1, -1, x.size(2)))
        return self.head_transform(x.flatten(0, 1)), targets.gather(1, places), places

    def forward(self, idx, targets=None, reduction="mean", position=None, mask=None, segment=None):
        """As GPT.forward: idx (B, T) -> (logits (B, T, vocab_size), None); with targets -> (None, loss).

        The head computes only the K positions of a row that have targets; all of them would cost as
        much as three of BERT-base's blocks. With more than K targets in a row, the loss is nan."""
        x = self.hidden(idx, position, mask, segment)
        if targets is None:
            return self.lm_head(self.head_transform(x))[..., : self.config.vocab_size], None
        count = (targets >= 0).sum(1)  # (B,)
        x, targets_there, places = self.gather_targets(x, targets)
        # The fused loss has no bias, so the bias becomes the weight of an extra channel that is always
        # 1. 15 zero channels keep the width a multiple of 16, which GPUs multiply fast.
        x = torch.cat([x, x.new_ones(len(x), 1), x.new_zeros(len(x), 15)], 1)
        w, bias = self.lm_head.weight, self.lm_head.bias[:, None]
        w = torch.cat([w, bias, w.new_zeros(len(w), 15)], 1)
        how = "none" if reduction == "none" else "sum"
        loss = self.head_loss(x, w, targets_there.flatten(), how)
        if reduction == "none":
            return None, loss.new_zeros(targets.shape).scatter(1, places, loss.view_as(places))
        loss = loss.where((count <= places.size(1)).all(), math.nan)
        return None, loss if reduction == "sum" else loss / count.sum().clamp(min=1)

    def sums(self, idx, targets):
        """Summed loss, and how many targets were the most probable token; a measure for evaluate()."""
        x, targets, _ = self.gather_targets(self.hidden(idx), targets)
        logits, targets = self.lm_head(x)[:, : self.config.vocab_size].float(), targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).sum()}


# --------------------------------------------------------------------------------------- 3. masking


class Masking:
    """Masks K tokens of each sequence; the transform of a TokenLoader.

    Of the chosen tokens, 80 % become [MASK], 10 % a random other token, and 10 % stay as they are.
    Users of the model give it text without [MASK], so it must learn not to rely on the mark. All
    randomness comes from (seed, number of the sequence): masks are drawn anew in each epoch, and are
    the same for any number of processes.
    """

    def __init__(self, tokenizer, config, whole_word_masking=False, always=False):
        """always: replace all chosen tokens by [MASK], for validation."""
        self.tokenizer, self.always = tokenizer, always
        self.num_masked = config.num_masked
        self.cls, self.sep, self.mask = map(tokenizer.id_of, ("[CLS]", "[SEP]", "[MASK]"))
        self.special = tokenizer.is_special()  # (V,): never masked, never a replacement
        self.ordinary = np.flatnonzero(~self.special)
        # (V,): pieces that are masked together with the piece before
        none = np.zeros_like(self.special)
        self.is_continuation = tokenizer.is_continuation() if whole_word_masking else none

    def __call__(self, x, y, seed, sequence_ids):
        """Change x, y (B, T) in place: x with masked tokens, y with the originals, -1 elsewhere.

        Each row has config.num_masked(T) targets, also with whole words: a word longer than what is
        left to mask is skipped, and one is cut only if no other fits."""
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
        """(which tokens are masked, a number from 0 to 1 that decides what replaces each), (T,) both."""
        begins = ~self.is_continuation[row]
        begins[1:] |= self.special[row[:-1]]  # a word does not continue after [SEP]
        word = begins.cumsum() - 1  # (T,): the number of each token's word; [CLS] is word 0
        left = self.num_masked(len(row))
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
        if left:  # no word fits: cut the first one; [CLS] and [SEP] come last
            masked[np.argsort(2 * masked + self.special[row], kind="stable")[:left]] = True
        draw = rng.random(len(sizes))[word]  # the same for all pieces of a word
        return masked, draw


# ------------------------------------------------------------------------------------ 4. validation


class MaskedValidation(Validation):
    """Loss and accuracy on the first cfg.val_tokens of the validation split, with the same masks each
    time, and those of a guess without context."""

    def __init__(self, trainer, stop, tokenizer, masking):
        self.masking = masking
        super().__init__(trainer, stop)
        self.tokenizer = tokenizer

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
    """(ids, masked tokens) of cfg.sample_prompt and of two texts of the validation split."""
    masking = Masking(tokenizer, trainer.raw_model.config, whole_word_masking=True, always=True)
    # at least one token beside [CLS] and [SEP]
    T = max(3, min(trainer.cfg.sample_tokens, trainer.cfg.seq_len))
    texts = list(zip(*masking(*shards.batch(np.arange(2) * T, T), 0, np.arange(2))))
    parts = (tokenizer.encode(part) for part in trainer.cfg.sample_prompt.split("[MASK]"))
    prompt = [masking.cls, *next(parts)] + [i for part in parts for i in (masking.mask, *part)]
    ids = np.array([*prompt, masking.sep][: trainer.raw_model.config.block_size])
    return [(ids, np.where(ids == masking.mask, ids, -1)), *texts]


# ---------------------------------------------------------------------------------- 5. command line


class Trainer(gpt2.Trainer):
    model_class = Bert

    def callbacks(self, stop):
        masking = self.loader.transform
        validation = MaskedValidation(self, stop, masking.tokenizer, masking)
        texts = sample_texts(self, masking.tokenizer, validation.shards)
        save = PeriodicCallback(
            "checkpoint", self.cfg.checkpoint_every, lambda trainer: trainer.save()
        )
        return [save, validation, MaskedLMSamples(self, masking.tokenizer, texts)]


def validate_tokenizer(trainer, tokenizer):
    """Raise UserError if the settings of a run do not fit its tokenizer."""
    cfg, vocab_size = trainer.cfg, trainer.raw_model.config.vocab_size
    require(
        vocab_size == tokenizer.vocab_size,
        f"vocab_size={vocab_size} is not the {tokenizer.vocab_size} of {tokenizer.name}; leave it out",
    )
    require(
        cfg.seq_len >= 3,
        f"seq_len={cfg.seq_len} must be 3 or more, for [CLS] and [SEP] and a token",
    )
    require(
        not cfg.sample_every or "[MASK]" in cfg.sample_prompt,
        f"sample_prompt={cfg.sample_prompt!r} must contain [MASK], the word to predict",
    )
    if cfg.init_from and not trainer.step:
        path = Path(registry.resolve_source(cfg.init_from, cfg.log_dir))
        theirs = (path.parent if path.suffix == ".pt" else path) / TOKENIZER_FILE
        require(
            not theirs.exists() or WordPiece(theirs).pieces == tokenizer.pieces,
            f"{cfg.init_from} has another vocabulary; copy {theirs} into an empty folder and pass that "
            f"folder to `{command_for('fineweb.py')} --tokenizer wordpiece --out`, which then uses it",
        )


def build_trainer(model_config, cfg, world, state=None):
    """See train_gpt2.py; here the loader masks tokens."""
    tokenizer = WordPiece(f"{cfg.data}/{TOKENIZER_FILE}")
    trainer = gpt2.build_trainer(model_config, cfg, world, state, Trainer)
    validate_tokenizer(trainer, tokenizer)
    trainer.loader.transform = Masking(tokenizer, model_config, cfg.whole_word_masking)
    return trainer


def main(argv):
    return gpt2.main(argv, PRESETS, __doc__, build_trainer, Trainer)


if __name__ == "__main__":
    run_main(main)
