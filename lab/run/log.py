"""What a run says: log.jsonl, the same numbers for TensorBoard, lines for people."""

import contextlib
import json
import math
import textwrap
import threading
import time

import torch

from lab import cli
from lab.cli import UserError, program, quoted
from lab.data.tokenizers import printable
from lab.files import writing
from lab.run.checkpoints import step_of
from lab.run.vitals import LOWER

CPU_FLOPS = 1e11  # a second, of a process on a few cores: to say that a model is too large for it


class Log:
    """One JSON line an event in log.jsonl. Rank 0 alone writes; the others call the same methods.

    A line that cannot be written is said once and ends nothing: whether a run can go on is for its
    next checkpoint to find out."""

    def __init__(self, run):
        self.run, self.cfg, self.folder = run, run.cfg, run.folder
        self.is_main = run.world.is_main
        self.wandb = None
        self.say = run.world.say  # a line for people
        self.silent = set()  # files that cannot be written
        self.unigram, self.worst = math.inf, math.inf  # nats a token: of the baseline, of a bad run

    def __enter__(self):
        if not self.is_main:
            return self
        from torch.utils.tensorboard import SummaryWriter

        with writing(self.folder):
            self.file = (self.folder / "log.jsonl").open("a", buffering=1)  # a resumed run goes on
            self.tensorboard = SummaryWriter(str(self.folder), purge_step=self.run.step + 1)
        self.hook, threading.excepthook = threading.excepthook, self.of_a_thread
        if self.cfg.wandb:
            import wandb

            settings = dict(name=self.folder.name, config=vars(self.cfg), resume="allow")
            self.wandb = wandb.init(project="gpt2", **settings)
            self.wandb.define_metric("*", step_metric="step")  # a spike is told a step late
        return self

    def __exit__(self, *_):
        if not self.is_main:
            return
        for file in (self.tensorboard, self.file):
            with contextlib.suppress(OSError):  # said before
                file.close()
        threading.excepthook = self.hook
        if self.wandb:
            self.wandb.finish()

    def of_a_thread(self, args):
        """TensorBoard's thread would print a traceback where it cannot write; event hears of it."""
        if not isinstance(args.exc_value, OSError):
            self.hook(args)

    @contextlib.contextmanager
    def attempt(self, name):
        """The body writes the file `name` of the folder. If it cannot, that is said once."""
        try:
            with writing(self.folder / name):
                yield
        except UserError as error:
            if name not in self.silent:
                cli.say(f"{error}. The run goes on without it")
            self.silent.add(name)

    def event(self, kind, step, values):
        """Write a record, and say what people want to know of it. values: a dict; None is nothing."""
        if not self.is_main or values is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | values
        with self.attempt("log.jsonl"):
            self.file.write(json.dumps(record) + "\n")
        plain = [(k, v) for k, v in values.items() if type(v) in (int, float) and k != "step"]
        numbers = {f"{kind}/{k}": v for k, v in plain}
        with self.attempt("events.out.tfevents"):
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(numbers | {"step": step})
        line = getattr(self, f"say_{kind}", None)
        if line:
            line(step, values)

    def start(self, reason, run, events):
        """The record and the lines with which a run begins: a reader can check the arithmetic."""
        validation = next(event for event in events if event.name == "val")
        c, cfg, world, loader = run.raw_model.config, run.cfg, run.world, run.loader
        shards, val_shards, unigram = loader.shards, validation.shards, validation.unigram
        cuda = world.device.type == "cuda"
        device = torch.cuda.get_device_name(world.device) if cuda else world.device.type
        self.unigram, self.worst = unigram, math.log(c.vocab_size)
        micro_step = loader.batch_size * cfg.seq_len * world.world_size  # its tokens
        record = dict(
            device=device, world_size=world.world_size, precision=run.precision.name,
            batch_size=loader.batch_size, grad_accum_steps=cfg.total_batch_size // micro_step,
            num_params=run.raw_model.num_params(), tokens=loader.position,
            train_tokens=len(shards), val_tokens=len(val_shards), log_v=self.worst, unigram=unigram,
            torch=torch.__version__,
        )  # fmt: skip
        damaged = self.folder.glob("model_*[0-9].damaged")
        damaged = [path for path in damaged if step_of(path) > run.step]
        if damaged:
            record["passed_over"] = [path.name for path in damaged]
        self.event("start", run.step, record)
        step_tokens = getattr(run, "step_tokens", lambda step: cfg.total_batch_size)
        left = range(run.step, cfg.max_steps)
        tokens = loader.position + sum(map(step_tokens, left))
        threads = "" if cuda else f", {torch.get_num_threads()} threads"
        self.say(f"after step {run.step} of {reason}" if run.step else reason)
        self.say(
            f"model  {run.raw_model.num_params():,} parameters: {c.n_layer} layers, {c.n_head} heads, "
            f"{c.n_embd} channels, vocabulary {c.vocab_size} in {c.padded_vocab_size} rows"
        )
        self.say(
            f"data   {cfg.data}: {len(shards):,} training tokens, {len(val_shards):,} for validation; "
            f"this run uses {tokens / loader.epoch_tokens():.2f} epochs"
        )
        for path in damaged:
            self.say(f"note: {path} was damaged: this goes on after step {run.step}")
        kinds = dict(too_long="too long", no_answer="without an answer")
        chats = [f"{shards.manifest[k]} {kinds[k]}" for k in kinds if shards.manifest.get(k)]
        if chats:
            self.say(f"note: conversations left out: {', '.join(chats)} (docs/DATA.md)")
        if shards.left_out:
            self.say(
                f"note: {shards.folder} has {shards.left_out:,} more tokens than when this run began; they "
                "are not used, as they would change the order. A new run with --init_from uses all"
            )
        flops = run.raw_model.flops_per_token(cfg.seq_len) * cfg.total_batch_size
        minutes = flops / CPU_FLOPS / world.world_size / 60
        if world.device.type == "cpu" and minutes > 1:
            self.say(
                f"note: without a GPU a step of this model takes {minutes:,.0f} minutes or so; "
                "--preset laptop takes two minutes in all"
            )
        small = sum(step_tokens(step) < cfg.total_batch_size for step in left)
        when = "next" if run.step else "first"
        half = f"; half of them in the {when} {small} steps" if small else ""
        self.say(
            f"step   {cfg.total_batch_size:,} tokens = {loader.batch_size} sequences x {cfg.seq_len} x "
            f"{world.world_size} processes x {cfg.total_batch_size // micro_step} micro-steps{half}"
        )
        self.say(f"device {device}{threads}, {run.precision.name}")
        if unigram:
            self.say(
                f"guess  a uniform one costs log V = {self.worst:.3f} nats a token, the best one without "
                f"context {unigram:.3f} (unigram)"
            )

    def say_val(self, step, values):
        loss = values["loss"]
        bits = f", {values['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in values else ""
        if "accuracy" in values:
            bits = f", {values['accuracy']:.1%} of hidden tokens right"
        beside = f", {self.unigram - loss:.3f} under unigram" if loss < self.unigram else ""
        if step and loss > self.worst + 0.1:
            beside = f", worse than a uniform guess: {LOWER}, or more --warmup_steps"
        self.say(f"step {step:5d}: validation loss {loss:.4f}{bits}{beside}")

    def say_hella(self, step, values):
        error = 1.96 * values["acc_norm_stderr"]
        self.say(f"step {step:5d}: HellaSwag {values['acc_norm']:.4f} +- {error:.4f}")

    def say_spike(self, step, values):
        if "file" not in values:  # one of a series: log.jsonl has it
            return
        norms = f"gradient norm {values['norm']:.4g}, usually {values['usual']:.4g}"
        left_out = ", its update is left out" * values["skipped"]
        again = f"{program('lab replay')} {quoted(self.folder / values['file'])}"
        self.say(f"step {step:5d}: spike: {norms}{left_out}; `{again}` makes it again")

    def say_sample(self, step, values):
        """The texts, set off by a bar on their left."""
        for text in values["texts"]:
            lines = textwrap.indent(printable(text), "    | ", lambda line: True)
            self.say(f"    after {step} steps:\n{lines}")

    def train(self, step, loss, lr, grad_norm, seconds_left=None, **speed):
        """The record of a training step, and the line for people."""
        record = dict(loss=loss, lr=lr, grad_norm=grad_norm, tokens=self.run.loader.position)
        self.event("train", step, record | speed)
        shown = f" | {speed['tok_per_s']:,.0f} tok/s" if speed else ""
        shown += f" | MFU {speed['mfu']:.1%}" if speed.get("mfu") else ""
        if seconds_left is not None:
            shown += " | {}:{:02d} left".format(*divmod(int(seconds_left), 60))
        for name, ms in speed.items():  # --timing
            if name.endswith("_ms") and name != "dt_ms":
                shown += f" | {name[:-3]} {ms:.1f} ms"
        line = f"step {step:5d}/{self.cfg.max_steps} | loss {loss:.4f} | lr {lr:.2e}"
        self.say(f"{line} | norm {grad_norm:.2f}{shown}")
