"""What a run is measured by: validation loss and samples. Nothing here touches training."""

import contextlib
import math

import numpy as np
import torch

from lab.cli import UserError, progress
from lab.data import TokenShards, get_tokenizer, name_of_size
from lab.data.tokenizers import printable
from lab.generate import generate
from lab.text_stream import Text
from lab.token_colors import shade


class Every:
    """An event of a run: due each `every` steps (0: never) and after the last; `do(run)` returns
    what the log notes of it, or None."""

    def __init__(self, name, every, do=None):
        self.name, self.every, self.do = name, every, do

    def due(self, step, last):
        return self.every > 0 and (step % self.every == 0 or last)

    def __call__(self, run):
        return self.do(run)


class Validation(Every):
    """Loss on the first cfg.val_tokens of the validation split; self.unigram is that of a model
    without context."""

    def __init__(self, run, stop):
        cfg, vocab_size = run.cfg, run.raw_model.config.vocab_size
        super().__init__("val", cfg.val_every)
        self.stop = stop
        again = run.world.on_main(lambda: was_measured(run.folder / "log.jsonl", run.step))
        self.again = run.step if again else 0
        self.shards = TokenShards(cfg.data, "val", vocab_size)
        seen = run.world.gather([run.loader.state_dict(), len(self.shards)])
        if any(others != seen[0] for others in seen):  # an old listing, a copy that is not whole
            raise UserError(
                f"{cfg.data} has not the same tokens for all processes: wait until all machines see "
                "the same files, and start again"
            )
        self.unigram = self.bytes = None
        self.prepare(run)

    def due(self, step, last):
        """Also, even with --val_every 0, where a run goes on after a step that was measured: the
        checkpoint came before, so its best_val is of the one before."""
        return step == self.again > 0 or super().due(step, last)

    def prepare(self, run):
        """What is the same at each step."""
        val_tokens = run.cfg.val_tokens
        try:
            self.tokenizer, missing = get_tokenizer(name_of_size(self.shards.vocab_size)), None
        except UserError as error:
            missing = str(error)
        if missing := next(filter(None, run.world.gather(missing)), None):  # all draw, or none
            self.tokenizer = None
            run.world.say(f"no samples and no bits per byte: {missing}")
        if run.world.is_main:
            self.unigram = unigram_entropy(run.loader.shards, self.shards, val_tokens)
            self.bytes = self.tokenizer and bytes_per_token(self.tokenizer, self.shards, val_tokens)

    def means(self, run):
        """What evaluate sums, for each target."""
        sums = evaluate(run.model, *self.where(run))
        return {name: value / sums["targets"] for name, value in sums.items()}

    def where(self, run):
        """evaluate's arguments but for the model and what is measured."""
        return self.shards, run.cfg, run.loader.batch_size, run.world, run.precision, self.stop

    def __call__(self, run):
        means = self.means(run)
        loss = means["loss"]
        if run.step and run.step == run.saved and loss < run.best_val:  # of the steps on disk
            run.best_val = loss
            if run.world.is_main:
                run.writer.link_best(run.step)
        bits = {"bits_per_byte": loss / math.log(2) / self.bytes} if self.bytes else {}
        return {name: mean for name, mean in means.items() if name != "targets"} | bits


def was_measured(log, step):
    """Whether a run's log has a validation of this step."""
    with contextlib.suppress(OSError):  # there is none: a run that begins
        return f'"kind": "val", "step": {step},' in log.read_text(errors="replace")


def summed_loss(model, x, y):
    return {"loss": model(x, y, reduction="sum")[1]}


@torch.no_grad()
def evaluate(
    model, shards, cfg, batch_size, world, precision, stop=None, measure=summed_loss, transform=None
):
    """Sums over the first cfg.val_tokens targets of a split (0: all): {"loss": in nats, "targets":
    count}, each process doing its share. Raises Stopped between two batches if `stop` was asked to.

    measure(model, x, y) gives sums by name. transform, as a TokenLoader's, gets the seed 0 and the
    positions, so it does the same at each step and in runs of all seeds.

    The tokens and their order depend on nothing but the data, and no random number is drawn. The
    last batch is filled up with targets of -1, so that a compiled model sees one shape.
    """
    targets, T = num_targets(shards, cfg.val_tokens), cfg.seq_len
    positions, totals = starts(shards, cfg), {}
    # per = batches * batch_size sequences for each process
    per = -(-len(positions) // (batch_size * world.world_size)) * batch_size
    place = "cpu" if world.device.type == "mps" else world.device  # MPS has no 64-bit floats
    mine = range(world.rank * per, (world.rank + 1) * per, batch_size)
    for i in progress(mine, "validation", "batch"):
        if stop:
            stop.check()
        used = positions[i : i + batch_size]
        x = np.zeros((batch_size, T), dtype=np.int64)
        y = np.full((batch_size, T), -1, dtype=np.int64)
        if len(used):
            rows = shards.batch(used, T)
            x[: len(used)], y[: len(used)] = transform(*rows, 0, used) if transform else rows
            y[: len(used)][used[:, None] + np.arange(T) >= targets] = -1
        x, y = torch.from_numpy(x).to(world.device), torch.from_numpy(y).to(world.device)
        with precision.autocast():
            sums = measure(model, x, y) | {"targets": (y >= 0).sum()}
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.to(place).double()
    sums = dict(zip(totals, world.all_reduce(torch.stack(list(totals.values()))).tolist()))
    if not sums["targets"]:
        raise UserError(
            f"val_tokens={cfg.val_tokens} of {cfg.data} have nothing to guess; pass more, or 0: all"
        )
    return sums


def num_targets(shards, tokens):
    """How many of the first `tokens` positions of a split (0: all) have a next token."""
    return min(tokens or len(shards), len(shards) - 1)


def starts(shards, cfg):
    """Where the sequences of an evaluation begin."""
    if len(shards) < 2:
        raise UserError(
            f"the validation split in {cfg.data} has {len(shards)} token(s); it needs two"
        )
    return np.arange(0, num_targets(shards, cfg.val_tokens), cfg.seq_len)


def target_counts(shards, tokens):
    """How often each token (V,) is a target of the first `tokens` positions of a split (0: all)."""
    end, counts = 1 + num_targets(shards, tokens), np.zeros(shards.vocab_size, np.int64)
    for start in range(1, end, 2**24):
        ids = shards.read(start, min(2**24, end - start))
        ids = ids[shards.learnt(start, len(ids))] if shards.masks else ids
        counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
    return counts


def unigram_entropy(train_shards, val_shards, val_tokens):
    """Nats per token of a model that only knows how often each token occurs in (the first 20M
    tokens of) the training data."""
    seen, asked = target_counts(train_shards, 20_000_000) + 1, target_counts(val_shards, val_tokens)
    return float(-(asked / asked.sum() * np.log(seen / seen.sum())).sum())


def bytes_per_token(tokenizer, shards, val_tokens):
    """Mean bytes of text per token that is validated, to turn nats per token into bits per byte."""
    counts = target_counts(shards, val_tokens)
    bytes_in_all = float(counts @ tokenizer.token_bytes()[: len(counts)])
    return bytes_in_all / counts.sum() if counts.any() else None


class FillIn(Every):
    """What a model puts in the place of hidden tokens. texts: pairs of arrays (T,), the ids and what
    is hidden in them (-1: nothing)."""

    def __init__(self, run, tokenizer, texts):
        super().__init__("sample", run.cfg.sample_every)
        self.tokenizer, self.texts = tokenizer, texts

    @torch.no_grad()
    def __call__(self, run):
        """{"texts": for people, "words": what each hidden token was, and the three likeliest}"""
        texts, words, pieces = [], [], self.tokenizer.pieces
        for ids, hidden in self.texts:
            with run.precision.autocast():
                logits, _ = run.raw_model(torch.tensor(ids[None], device=run.world.device))
            chances, guesses = logits[0].float().softmax(-1).topk(3)  # (T, 3)
            lines = [self.tokenizer.decode(ids), "    hidden       guesses"]
            for t in np.flatnonzero(hidden >= 0):
                guess = [[pieces[i], p] for i, p in zip(guesses[t].tolist(), chances[t].tolist())]
                words.append({"was": pieces[hidden[t]], "guesses": guess})
                shown = "  ".join(f'"{piece}" {p:.0%}' for piece, p in guess)
                was = "?" if hidden[t] == ids[t] else pieces[hidden[t]]  # a text of no known answer
                lines.append(f"    {was:12} {shown}")
            texts.append("\n".join(lines))
        return {"texts": texts, "words": words}


class Samples(Every):
    """A few texts, from a random generator of their own, so that training is untouched."""

    def __init__(self, run, tokenizer):
        super().__init__("sample", run.cfg.sample_every if tokenizer else 0)
        self.tokenizer = tokenizer

    def __call__(self, run):
        """The texts, and of the first what lab.tools.report shades: the prompt and its tokens. All
        processes draw the same: with FSDP2 each has a share of the weights."""
        cfg = run.cfg
        how = cfg.sample_prompt, cfg.sample_tokens, cfg.seed
        with run.precision.autocast():
            texts, shades = draw_samples(run.raw_model, self.tokenizer, *how)
        return {"texts": texts, "shaded": [cfg.sample_prompt, shades]}


def draw_samples(model, tokenizer, prompt, tokens, seed):
    """Two texts that begin with the prompt, and what token_colors.shade says of the first one's
    tokens. Where the model ends a text and begins another, a line stands between them."""
    device, eot = model.lm_head.weight.device, model.config.vocab_size - 1
    ids = [eot] + tokenizer.encode(prompt)  # end-of-text: a document begins here
    idx = torch.tensor([ids[: model.config.block_size]] * 2, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    how = dict(temperature=0.8, top_k=50, generator=generator)
    texts, written, shades = (Text(tokenizer), Text(tokenizer)), ["", ""], []
    for new, logits in generate(model, idx, tokens, **how):
        for i, token in enumerate(new.tolist()):
            piece = texts[i].add(token) + "\n---\n" * (token == eot)
            written[i] += piece
            if i == 0:
                shades.append(shade(token, logits[0], printable(piece), tokenizer))
    whole = [so_far + text.end() for so_far, text in zip(written, texts)]
    return [prompt + text.rstrip("\n-") for text in whole], shades
