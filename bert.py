"""BERT (Devlin et al. 2019): the blocks of train_gpt2.py with another objective, guessing words that
were hidden.

    python bert.py                                      # the best this machine can do
    python fineweb.py --dataset Salesforce/wikitext --name wikitext-103-raw-v1 \\
        --tokenizer wordpiece --out data/wikitext103    # data for a GPU
    python bert.py --preset bert-base                   # BERT-base on one GPU, on that data
    torchrun --standalone --nproc_per_node=8 bert.py    # the same run on eight

One step in words. GPT-2 guesses each token from those before it, so attention must hide what comes
after, and every position teaches. BERT hides 15 % of the tokens and guesses them from both sides:
attention hides nothing, only the hidden tokens teach, and what comes out reads text but writes
none. Everything else is one training: the loop, the update, the optimizers, the schedule, what is
kept and how a run goes on are those of train_gpt2.py, called from here.

Packing. Text is one stream of tokens with [SEP], the end of a text, between documents. It is cut into
sequences without gaps or padding, as in RoBERTa (Liu et al. 2019, 4.2), but anywhere. [CLS], which
begins a sequence, and [SEP] take the place of its first and last token, as whoever uses the model
puts them there. That costs two tokens of 512. There is no second text in a sequence (segment) and
no guess at the next sentence, which did not help (there, 4.2); segment embeddings are kept, as
published weights have them.

Sections: 1 configuration, 2 model, 3 hiding words, 4 what is measured, 5 command line. Shape letters
are those of train_gpt2.py, and K hidden tokens of a sequence.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lab import cli

if __name__ == "__main__":
    cli.before_torch()  # how Ctrl-C ends the import, and how a CPU's threads wait

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import train_gpt2 as gpt2
from lab import evals
from lab.cli import UserError
from lab.data.tokenizers import WORD_PIECE_FILE, WordPiece
from lab.device import in_bf16
from lab.files import write_whole
from lab.run.settings import check_words

# --------------------------------------------------------------------------------- 1. configuration


@dataclass
class BertConfig(gpt2.GPTConfig):
    """Shape of the model."""

    block_size: int = 512  # longest text, in tokens
    vocab_size: int = 30522  # of bert-base-uncased; on the command line 0 lets the data decide
    segments: int = 2  # rows of the segment embedding; training uses the first alone
    mask_share: float = 0.15  # share of the tokens that is hidden; the head computes no others
    document_mask: ClassVar = False  # no setting here: GPT's is causal

    def hidden_tokens(self, seq_len):
        """K: how many tokens of a sequence are hidden, always the same number."""
        return max(1, int(self.mask_share * seq_len))


@dataclass
class BertTrainConfig(gpt2.TrainConfig):
    """One run. At 128 tokens a sequence bert-base guesses by frequency alone for 2,400 steps, with
    AdamW for 7,600 (docs/LOG.md). Devlin et al. took a million of 256 sequences, nine tenths of them
    128 long, AdamW at 1e-4, 10,000 steps to warm up, on 3.3B words (A.2)."""

    preset: str = "bert-base"  # where the other defaults come from: bert-base or laptop
    data: str = "data/wikitext103"  # folder of token shards (fineweb.py --tokenizer wordpiece)
    total_batch_size: int = 16384  # tokens per update over all processes: 32 sequences
    seq_len: int = 512
    whole_words: bool = False  # hide all pieces of a word or none (Devlin's "whole word masking")
    max_steps: int = 10000
    optimizer: Literal["adamw", "muon"] = "muon"  # of the matrices in the blocks
    lr: float = 1e-3  # of all else; --optimizer adamw wants 2e-4 (laptop: 2e-3)
    muon_lr: float = 0.005  # of Muon; bert-base unlearns at 0.02
    min_lr: float = 0.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "wsd"  # as train_gpt2.py's
    warmup_steps: float = 0.05  # as train_gpt2.py's
    decay_steps: float = 0.7  # as train_gpt2.py's
    fp8: Literal["off", "head", "all"] = "off"  # all is head: 8-bit MLPs have tanh's GELU
    beta2: float = 0.98  # steadier than 0.999 in large batches (Liu et al. 2019, 3.1)
    eps: float = 1e-6
    val_tokens: int = 2**18
    sample_every: int = 1000  # words filled in; 0 is never
    sample_tokens: int = 48  # length of each text
    sample_prompt: str = "Paris is the [MASK] of France."  # filled in beside texts of validation
    hella_every: ClassVar = 0  # HellaSwag asks for the next words
    hella_examples: ClassVar = 0


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
            ckpt_every=500,
        ),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- 2. model

EPS = 1e-12  # BERT's, of each LayerNorm


class ExactMLP(gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))  # the exact GELU, where GPT-2 has its tanh


class PostNormBlock(nn.Module):
    """LayerNorm follows each sum; GPT-2's precedes attention and MLP (Xiong et al. 2020). So the
    last block needs no norm after it."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn = gpt2.CausalSelfAttention(config, layer, causal=False)
        self.ln_1 = nn.LayerNorm(config.n_embd, EPS)
        self.mlp = ExactMLP(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, EPS)

    def forward(self, x, mask=None):
        x = self.ln_1(x + self.attn(x, mask)).to(x.dtype)  # CUDA's autocast norms in 32 bits
        return self.ln_2(x + self.mlp(x)).to(x.dtype)


class Bert(nn.Module):
    """BERT with its masked-language-model head, without pooler and next-sentence head."""

    # a row for each id, and pad rows
    vocab_rows = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")

    def __init__(self, config):
        super().__init__()
        if not 0 < config.mask_share <= 1:
            raise UserError(f"mask_share={config.mask_share} must be above 0 and at most 1")
        self.config, C = config, config.n_embd
        parts = self.transformer = nn.ModuleDict()
        parts.wte = nn.Embedding(config.padded_vocab_size, C)
        parts.wpe = nn.Embedding(config.block_size, C)
        parts.wse = nn.Embedding(config.segments, C)
        parts.ln_e = nn.LayerNorm(C, EPS)
        parts.h = nn.ModuleList(PostNormBlock(config, layer) for layer in range(config.n_layer))
        self.head = nn.ModuleDict(dict(dense=nn.Linear(C, C), ln=nn.LayerNorm(C, EPS)))
        self.lm_head = nn.Linear(C, config.padded_vocab_size)
        self.lm_head.weight = self.transformer.wte.weight  # one matrix, read in both directions
        self.head_loss = gpt2.HeadLoss(config.vocab_size)
        for name, p in self.named_parameters():  # Devlin et al.: std 0.02 throughout
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        with torch.no_grad():  # the pad rows: their gradient is 0, so they stay 0
            self.transformer.wte.weight[config.vocab_size :] = 0

    def num_params(self):
        """Numbers in the published model of this shape: the tied matrix once, no pad rows."""
        pad = (self.config.padded_vocab_size - self.config.vocab_size) * (self.config.n_embd + 1)
        return sum(p.numel() for p in self.parameters()) - pad

    # as GPT's; from_pretrained("bert-base-uncased") works too
    from_pretrained, blocks = gpt2.GPT.from_pretrained, gpt2.GPT.blocks
    block_matrices = gpt2.GPT.block_matrices

    def flops_per_token(self, seq_len):
        """As GPT's; the head multiplies hidden tokens alone."""
        c = self.config
        head = (c.padded_vocab_size + c.n_embd) * c.n_embd * c.hidden_tokens(seq_len) / seq_len
        blocks = sum(p.numel() for p in self.block_matrices())
        return 6 * (blocks + head) + 12 * c.n_layer * c.n_embd * seq_len

    def hidden(self, idx, position=None, mask=None, segment=None):
        """idx (B, T) -> what the head sees of it (B, T, C). segment (B, T): 0 if left out. mask, which
        broadcasts to (B, H, T, T), is True where a token may look; left out, it may look at all."""
        if position is None:
            position = torch.arange(idx.size(1), device=idx.device)
        parts = self.transformer
        of_segment = parts.wse.weight[0] if segment is None else parts.wse(segment)
        x = parts.ln_e(parts.wte(idx) + parts.wpe(position) + of_segment)  # (B, T, C)
        if self.config.bf16_residual and in_bf16(x):
            x = x.bfloat16()
        for block in parts.h:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return x

    def transformed(self, x):
        """The head before its decoder, of (..., C)."""
        return self.head.ln(F.gelu(self.head.dense(x)))

    def at_targets(self, x, targets):
        """The positions that have a target, K of each row: what the head sees of them (B * K, C), their
        targets and their places in the row (B, K). Rows with fewer are filled up with others."""
        places = (targets >= 0).float().topk(self.config.hidden_tokens(x.size(1))).indices
        x = x.gather(1, places[..., None].expand(-1, -1, x.size(2)))
        return self.transformed(x.flatten(0, 1)), targets.gather(1, places), places

    def forward(self, idx, targets=None, reduction="mean", position=None, mask=None, segment=None):
        """As GPT's: idx (B, T) -> (logits (B, T, vocab_size), None); with targets (B, T) -> (None, loss).

        The head computes the K positions of a row that have targets: all of them would cost as much
        as three of BERT-base's blocks. Of a row with more than K targets the loss is nan."""
        x = self.hidden(idx, position, mask, segment)
        if targets is None:
            return self.lm_head(self.transformed(x))[..., : self.config.vocab_size], None
        count = (targets >= 0).sum(1)  # (B,)
        x, targets_there, places = self.at_targets(x, targets)
        # lab.kernels' fast losses know no bias, so it becomes the weight of a channel that is always
        # 1; 15 of zeros beside it keep the width a multiple of 16, which GPUs multiply fast.
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
        """Summed loss, and how many targets were the likeliest guess, for evaluation."""
        x, targets, _ = self.at_targets(self.hidden(idx), targets)
        logits, targets = self.lm_head(x)[:, : self.config.vocab_size].float(), targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).sum()}


# ---------------------------------------------------------------------------------- 3. hiding words


class Masking:
    """Hides K tokens of each sequence: the transform of a TokenLoader.

    Of the tokens chosen, 80 % become [MASK], 10 % another token at random, and 10 % stay, as whoever
    uses the model shows it no [MASK]: it may trust no token blindly. All randomness comes from
    (seed, number of the sequence), so masks are drawn anew in each pass over the data, and are the
    same on any number of processes.
    """

    def __init__(self, tokenizer, config, whole_words=False, always=False):
        """always: all that is hidden becomes [MASK], as for measuring."""
        self.tokenizer, self.always = tokenizer, always
        self.targets_per_sequence = config.hidden_tokens
        self.cls, self.sep, self.mask = map(tokenizer.id_of, ("[CLS]", "[SEP]", "[MASK]"))
        self.special = tokenizer.is_special()  # (V,): never hidden, never put in
        self.ordinary = np.flatnonzero(~self.special)
        # (V,): pieces that share the fate of the piece before
        self.goes_on = tokenizer.goes_on() if whole_words else np.zeros_like(self.special)

    def __call__(self, x, y, seed, sequence_ids):
        """x, y (B, T), in place: x with words hidden, y what they were, -1 elsewhere.

        Each row has config.hidden_tokens(T) targets, also with whole words: a word that is longer
        than what is left to hide is passed over, and one is cut only where no other fits."""
        x[:, 0], x[:, -1], y[:] = self.cls, self.sep, -1
        for row, targets, sequence in zip(x, y, sequence_ids):
            rng = np.random.default_rng([seed, int(sequence)])
            hidden, fate = self.choose(row, rng)
            targets[hidden] = row[hidden]
            swapped = hidden & (fate >= 0.9) & (not self.always)
            row[hidden & ((fate < 0.8) | self.always)] = self.mask
            row[swapped] = self.ordinary[rng.integers(len(self.ordinary), size=swapped.sum())]
        return x, y

    def choose(self, row, rng):
        """(which of a row are hidden, a number from 0 to 1 that decides what stands there), (T,) both."""
        begins = ~self.goes_on[row]
        begins[1:] |= self.special[row[:-1]]  # nothing goes on with a [SEP]
        word = begins.cumsum() - 1  # (T,): the number of each token's word; [CLS] is word 0
        left = self.targets_per_sequence(len(row))
        sizes = np.bincount(word)
        sizes[word[self.special[row]]] = left + 1  # too large to be chosen
        chosen = np.zeros(len(sizes), dtype=bool)
        order = rng.permutation(len(sizes))
        for w, size in zip(order, sizes[order].tolist()):
            if size <= left:
                chosen[w], left = True, left - size
            if not left:
                break
        hidden = chosen[word]
        if left:  # no word fits: the first one is cut, and last of all [CLS] or [SEP] go
            hidden[np.argsort(2 * hidden + self.special[row], kind="stable")[:left]] = True
        fate = rng.random(len(sizes))[word]  # one for all pieces of a word: none betrays it
        return hidden, fate


# ----------------------------------------------------------------------------- 4. what is measured


class MaskedValidation(evals.Validation):
    """Loss and accuracy on the first cfg.val_tokens of the validation split, with the same masks each
    time, and what a guess without context would reach on them."""

    def __init__(self, run, stop, tokenizer, masking):
        self.tokenizer, self.masking = tokenizer, masking
        super().__init__(run, stop)

    def prepare(self, run):
        starts, T = evals.starts(self.shards, run.cfg), run.cfg.seq_len
        y = self.masking(*self.shards.batch(starts, T), 0, starts)[1]
        end = evals.num_targets(self.shards, run.cfg.val_tokens)
        y = y[(y >= 0) & (starts[:, None] + np.arange(T) < end)]
        seen = evals.target_counts(run.loader.shards, 20_000_000) * ~self.masking.special + 1
        self.unigram = float(-np.log(seen[y] / seen.sum()).mean())
        self.most_frequent = float((y == seen.argmax()).mean())

    def means(self, run):
        sums = evals.evaluate(run.raw_model, *self.where(run), Bert.sums, self.masking)
        means = {name: value / sums["targets"] for name, value in sums.items()}
        return means | {"unigram_accuracy": self.most_frequent}


def texts_to_fill_in(run, tokenizer, shards):
    """(ids, what is hidden in them) of cfg.sample_prompt, and of two texts of validation."""
    always = Masking(tokenizer, run.raw_model.config, whole_words=True, always=True)
    T = max(3, min(run.cfg.sample_tokens, run.cfg.seq_len))  # one beside [CLS] and [SEP]
    texts = list(zip(*always(*shards.batch(np.arange(2) * T, T), 0, np.arange(2))))
    parts = (tokenizer.encode(part) for part in run.cfg.sample_prompt.split("[MASK]"))
    prompt = [always.cls, *next(parts)] + [i for part in parts for i in (always.mask, *part)]
    ids = np.array([*prompt, always.sep][: run.raw_model.config.block_size])
    return [(ids, np.where(ids == always.mask, ids, -1)), *texts]


# ---------------------------------------------------------------------------------- 5. command line


class Run(gpt2.Run):
    program, model_class = "bert", Bert

    def save(self):
        if self.world.is_main:  # the tokenizer, which the weights need
            text = self.loader.transform.tokenizer.fast.to_str(pretty=True)
            write_whole(self.folder / WORD_PIECE_FILE, text.encode())
        return super().save()

    def events(self, stop):
        masking = self.loader.transform
        check_words(self, masking.tokenizer)
        validation = MaskedValidation(self, stop, masking.tokenizer, masking)
        texts = texts_to_fill_in(self, masking.tokenizer, validation.shards)
        save = evals.Every("checkpoint", self.cfg.ckpt_every, lambda run: run.save())
        return [save, validation, evals.FillIn(self, masking.tokenizer, texts)]


def set_up(model_config, cfg, world, state=None):
    """As train_gpt2.py's, of a Run whose loader hides words."""
    tokenizer = WordPiece(f"{cfg.data}/{WORD_PIECE_FILE}")
    run = gpt2.set_up(model_config, cfg, world, state, Run)
    run.loader.transform = Masking(tokenizer, model_config, cfg.whole_words)
    return run


def main(argv):
    return gpt2.main(argv, PRESETS, __doc__, set_up, Run.program)


if __name__ == "__main__":
    cli.command(main)
