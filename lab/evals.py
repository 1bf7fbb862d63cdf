"""What a run is measured by: validation loss against two baselines, HellaSwag, samples. Nothing here touches training."""

import math

import numpy as np
import torch

from lab.data.tokenizers import printable
from lab.run.vitals import LOWER

EVALUATIONS = ("val", "hella", "sample")  # in the order in which a step makes them


@torch.no_grad()
def eval_val_loss(model, shards, val_tokens, seq_len, batch_size, world, precision, stopped=lambda: False):
    """Mean loss in nats per token over the first val_tokens of the split (0: all), each process doing its share; None if
    stopped(), which all processes must agree in, is true before one of the batches, of which all have equally many.

    The tokens and their order depend on nothing but the data, and no random number is drawn. The last batch is filled
    up with targets of -1, so that a compiled model sees one shape.
    """
    targets = min(val_tokens or len(shards), len(shards) - 1)
    if targets < 1:
        raise ValueError(f"the validation split in {shards.paths[0].parent} has {len(shards)} token(s); it needs two")
    positions = np.arange(0, targets, seq_len)
    # per = batches * batch_size sequences for each process
    per = -(-len(positions) // (batch_size * world.world_size)) * batch_size
    total = torch.zeros(2, dtype=torch.float64, device="cpu" if world.device.type == "mps" else world.device)
    for i in range(world.rank * per, (world.rank + 1) * per, batch_size):
        if stopped():
            return None
        used = positions[i : i + batch_size]
        x = np.zeros((batch_size, seq_len), dtype=np.int64)
        y = np.full((batch_size, seq_len), -1, dtype=np.int64)
        if len(used):
            x[: len(used)], y[: len(used)] = shards.batch(used, seq_len)
            beyond = used[:, None] + np.arange(seq_len) >= targets
            y[: len(used)][beyond] = -1
        x, y = torch.from_numpy(x).to(world.device), torch.from_numpy(y).to(world.device)
        with precision.autocast():
            _, loss = model(x, y, reduction="sum")
        total += torch.stack([loss.double(), (y >= 0).sum().double()]).to(total.device)
    loss, count = world.sum(total).tolist()
    return loss / max(1, count)


def target_counts(shards, tokens):
    """How often each token (V,) is a target of the first `tokens` positions of a split (0: all); a mask leaves some out."""
    end, counts = 1 + min(tokens or len(shards), len(shards) - 1), np.zeros(shards.vocab_size, np.int64)
    for start in range(1, end, 2**24):
        ids = shards.read(start, min(2**24, end - start))
        ids = ids[shards.read(start, len(ids), shards.masks) == 1] if shards.masks else ids
        counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
    return counts


def unigram_entropy(train_shards, val_shards, val_tokens):
    """Nats per token of a model that only knows how often each token occurs in (the first 20M tokens of) the training
    data: what there is to gain without any context."""
    seen, asked = target_counts(train_shards, 20_000_000) + 1, target_counts(val_shards, val_tokens)
    return float(-(asked / asked.sum() * np.log(seen / seen.sum())).sum())


def bytes_per_token(tokenizer, shards, val_tokens):
    """Mean bytes of text per token that is validated, to turn nats per token into bits per byte; None without any."""
    counts = target_counts(shards, val_tokens)
    return float(counts @ tokenizer.token_bytes()[: len(counts)] / counts.sum()) if counts.any() else None


def eval_hellaswag(model, examples, world, precision, stopped):
    """HellaSwag accuracies of the bare model as a dict (see hellaswag.py), shared among the processes; None if stopped()."""
    import hellaswag  # it imports from this file

    with precision.autocast():
        return hellaswag.evaluate(model, limit=examples, world=world, stopped=stopped)


def draw_samples(model, tokenizer, prompt, tokens, device, precision, count=2, seed=42):
    """`count` texts, from a generator of their own so that training is untouched."""
    ids = [model.config.vocab_size - 1] + tokenizer.encode(prompt)  # end-of-text: a document begins here
    idx = torch.tensor([ids[: model.config.block_size]] * count, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with precision.autocast():
        new = list(model.generate(idx, tokens, temperature=0.8, top_k=50, generator=generator))
    rows = torch.stack(new, dim=1).tolist() if new else [[]] * count
    return [prompt + tokenizer.decode(row[: row.index(ids[0])] if ids[0] in row else row) for row in rows]  # to a text's end


class Reporter:
    """The evaluations of a run: measures, logs and says."""

    def __init__(self, log, cfg, world, precision, raw_model, loader, val_shards, tokenizer):
        self.log, self.cfg, self.world, self.precision, self.raw_model = log, cfg, world, precision, raw_model
        self.batch_size, self.val_shards, self.tokenizer = loader.batch_size, val_shards, tokenizer
        self.unigram = unigram_entropy(loader.shards, val_shards, cfg.val_tokens) if world.is_main else None
        self.bytes = bytes_per_token(tokenizer, val_shards, cfg.val_tokens) if tokenizer and world.is_main else None
        self.no_hellaswag = False
        self.val_loss, self.val_step = math.inf, -1  # the last one made

    def begin(self, first_step, loader):
        """One line each about the model, the step and the device, so that a reader can check the arithmetic."""
        c, cfg, world = self.raw_model.config, self.cfg, self.world
        per_epoch = len(loader.shards) if loader.aligned is None else len(loader.aligned) * cfg.seq_len
        tokens = loader.sequence * cfg.seq_len + (cfg.max_steps - first_step) * cfg.total_batch_size
        card = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else f"{world.device.type}"
        self.log.event(
            "start", first_step, device=card, world_size=world.world_size, precision=self.precision.name,
            batch_size=loader.batch_size, grad_accum_steps=loader.grad_accum_steps, num_params=self.raw_model.num_params(),
            tokens=loader.sequence * cfg.seq_len, train_tokens=len(loader.shards), val_tokens=len(self.val_shards),
            log_v=math.log(c.vocab_size), unigram=self.unigram, torch=torch.__version__,
        )  # fmt: skip
        if not world.is_main:
            return
        threads = "" if world.device.type == "cuda" else f", {torch.get_num_threads()} threads"
        self.log.say(f"model  {self.raw_model.num_params():,} parameters: {c.n_layer} layers, {c.n_head} heads, {c.n_embd} "
                     f"channels, vocabulary {c.vocab_size} in {c.padded_vocab_size} rows")  # fmt: skip
        self.log.say(f"data   {cfg.data}: {len(loader.shards):,} training tokens, {len(self.val_shards):,} for validation; "
                     f"this run uses {tokens / per_epoch:.2f} epochs")  # fmt: skip
        if loader.shards.manifest.get("complete") is False:
            self.log.say(f"note: {cfg.data} is not finished; to finish it, run its fineweb.py command again")
        if loader.shards.left_out:
            self.log.say(f"note: {cfg.data} has {loader.shards.left_out:,} more tokens than when this run began; they are not "
                         "used, as they would change the order. A new run with --init_from uses all")  # fmt: skip
        self.log.say(f"step   {cfg.total_batch_size:,} tokens = {loader.batch_size} sequences x {cfg.seq_len} x "
                     f"{world.world_size} processes x {loader.grad_accum_steps} micro-steps")  # fmt: skip
        if cfg.total_batch_size > per_epoch:
            self.log.say(f"note: each step of total_batch_size={cfg.total_batch_size:,} tokens reads all training data "
                         f"{cfg.total_batch_size / per_epoch:,.1f} times; --total_batch_size makes it smaller")  # fmt: skip
        self.log.say(f"device {card}{threads}, {self.precision.name}")
        self.log.say(f"guess  a uniform one costs log V = {math.log(c.vocab_size):.3f} nats a token, the best one without "
                     f"context {self.unigram:.3f} (unigram)")  # fmt: skip

    def measure(self, name, step, model, stopped):
        """Make one of EVALUATIONS. False, with nothing logged, if stopped() came true meanwhile."""
        if name == "val":
            return self.validate(step, model, stopped)
        return self.hellaswag(step, stopped) if name == "hella" else self.samples(step)

    def validate(self, step, model, stopped):
        self.log.busy("validating")
        loss = eval_val_loss(
            model, self.val_shards, self.cfg.val_tokens, self.cfg.seq_len, self.batch_size, self.world, self.precision, stopped
        )
        if loss is None:
            return False
        values = {"loss": loss} | ({"bits_per_byte": loss / math.log(2) / self.bytes} if self.bytes else {})
        self.log.event("val", step, **values)
        self.log.busy()
        bits = f", {values['bits_per_byte']:.3f} bits per byte" if self.bytes else ""
        beside = f", {self.unigram - loss:.3f} under unigram" if self.world.is_main and loss < self.unigram else ""
        if loss > max(self.val_loss, math.log(self.raw_model.config.vocab_size)):  # risen, and above that
            beside = f", worse than a uniform guess: {LOWER}, or more --warmup_steps"
        self.log.say(f"step {step:5d}: validation loss {loss:.4f}{bits}{beside}")
        self.val_loss, self.val_step = loss, step
        return True

    def hellaswag(self, step, stopped):
        if self.no_hellaswag:
            return True
        try:
            result = eval_hellaswag(self.raw_model, self.cfg.hella_examples, self.world, self.precision, stopped)
        except (OSError, ValueError) as error:  # no network and no file, or too short a context: the run goes on
            self.log.say(f"step {step:5d}: no HellaSwag in this run: {error}")
            self.no_hellaswag = True  # to ask again at each step would cost the minutes that downloads wait for an answer
            return True
        if result is None:
            return False
        self.log.event("hella", step, **result)
        self.log.say(f"step {step:5d}: HellaSwag {result['acc_norm']:.4f} +- {1.96 * result['acc_norm_stderr']:.4f}")
        return True

    def samples(self, step):
        if self.tokenizer is None or not self.world.is_main:
            return True
        texts = draw_samples(
            self.raw_model, self.tokenizer, self.cfg.sample_prompt, self.cfg.sample_tokens, self.world.device, self.precision,
            seed=self.cfg.seed,
        )  # fmt: skip
        self.log.event("sample", step, texts=texts)
        for text in texts:
            self.log.say(f"--- sample after {step} steps\n{printable(text)}")
        return True
