"""Console output of a run: the settings at the start, a line per log record, the summary."""

import inspect
import math
import textwrap
from pathlib import Path

import torch

from lab.cli import command_for, shell_quote
from lab.data.tokenizers import printable
from lab.trainer.checkpoint import checkpoint_files, step_of
from lab.trainer.health import LOWER_LR_HINT

CPU_FLOPS = 1e11  # roughly, per process on a few cores; to warn about models too large for a CPU


class Console:
    """Prints a run's records on rank 0."""

    def __init__(self, trainer):
        self.trainer, self.cfg, self.print = trainer, trainer.cfg, trainer.world.print0
        # loss in nats per token of the unigram baseline and of a uniform guess
        self.unigram, self.uniform = math.inf, math.inf

    def start_record(self, callbacks: list) -> dict:
        """The first log record of a run. The unigram baseline is the validation callback's."""
        trainer, world, loader = self.trainer, self.trainer.world, self.trainer.loader
        validation = next((c for c in callbacks if c.name == "val"), None)
        cuda = world.device.type == "cuda"
        self.uniform = math.log(trainer.raw_model.config.vocab_size)
        self.unigram = getattr(validation, "unigram", None)
        record = dict(
            device=torch.cuda.get_device_name(world.device) if cuda else world.device.type,
            world_size=world.world_size, precision=trainer.precision.name,
            batch_size=loader.batch_size, grad_accum_steps=self.micro_steps(),
            num_params=trainer.raw_model.num_params(), tokens=loader.position,
            train_tokens=len(loader.shards), val_tokens=len(validation.shards) if validation else 0,
            log_v=self.uniform, unigram=self.unigram, torch=torch.__version__,
        )  # fmt: skip
        damaged = trainer.run_dir.glob("model_*[0-9].damaged")
        damaged = [path.name for path in damaged if step_of(path) > trainer.step]
        return record | ({"passed_over": damaged} if damaged else {})

    def micro_steps(self) -> int:
        """Micro-steps of a full-size step."""
        loader, world_size = self.trainer.loader, self.trainer.world.world_size
        return self.cfg.total_batch_size // (loader.batch_size * self.cfg.seq_len * world_size)

    def print_settings(self, reason: str, record: dict) -> None:
        """Print the settings, so that a reader can check the arithmetic."""
        trainer, cfg = self.trainer, self.cfg
        world, loader = trainer.world, trainer.loader
        c, shards = trainer.raw_model.config, loader.shards
        step_tokens = getattr(trainer, "step_tokens", lambda step: cfg.total_batch_size)
        remaining = range(trainer.step, cfg.max_steps)
        tokens = loader.position + sum(map(step_tokens, remaining))
        self.print(f"resuming after step {trainer.step} of {reason}" if trainer.step else reason)
        self.print(
            f"model  {record['num_params']:,} parameters: {c.n_layer} layers, {c.n_head} heads, "
            f"{c.n_embd} channels, vocabulary of {c.vocab_size} padded to {c.padded_vocab_size} rows"
        )
        self.print(
            f"data   {cfg.data}: {len(shards):,} training tokens, {record['val_tokens']:,} for "
            f"validation; this run reads {tokens / loader.epoch_tokens():.2f} epochs"
        )
        for name in record.get("passed_over", ()):
            self.print(
                f"note: {trainer.run_dir / name} is damaged; resuming from step {trainer.step}"
            )
        kinds = dict(too_long="too long", no_answer="without an answer")
        skipped = [f"{shards.manifest[k]} {kinds[k]}" for k in kinds if shards.manifest.get(k)]
        if skipped:
            self.print(f"note: conversations skipped: {', '.join(skipped)} (docs/DATA.md)")
        if shards.ignored_tokens:
            self.print(
                f"note: {shards.folder} has {shards.ignored_tokens:,} more tokens than when this run "
                "started; they are ignored, because they would change the order of the data; a new "
                "run with --init_from uses all of them"
            )
        flops = trainer.raw_model.flops_per_token(cfg.seq_len) * cfg.total_batch_size
        minutes = flops / CPU_FLOPS / world.world_size / 60
        if world.device.type == "cpu" and minutes > 1:
            self.print(
                f"note: without a GPU, one step of this model takes roughly {minutes:,.0f} minutes; "
                "--preset laptop takes two minutes in total"
            )
        small = sum(step_tokens(step) < cfg.total_batch_size for step in remaining)
        when = "next" if trainer.step else "first"
        half = f"; half as many in the {when} {small} steps" if small else ""
        self.print(
            f"step   {cfg.total_batch_size:,} tokens = {loader.batch_size} sequences x {cfg.seq_len} "
            f"tokens x {world.world_size} processes x {self.micro_steps()} micro-steps{half}"
        )
        cuda = world.device.type == "cuda"
        threads = "" if cuda else f", {torch.get_num_threads()} threads"
        self.print(f"device {record['device']}{threads}, {trainer.precision.name}")
        if self.unigram:
            self.print(
                f"loss   starts near ln({c.vocab_size}) = {self.uniform:.3f} nats per token (a uniform "
                f"guess); the best loss without any context is {self.unigram:.3f} (unigram)"
            )

    def event(self, kind: str, step: int, values: dict) -> None:
        """Print a line for a record, for the kinds that have a print_ method below."""
        if line := getattr(self, f"print_{kind}", None):
            line(step, values)

    def print_val(self, step: int, values: dict) -> None:
        loss = values["loss"]
        detail = (
            f", {values['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in values else ""
        )
        if "accuracy" in values:
            detail = f", {values['accuracy']:.1%} of masked tokens right"
        if self.unigram and loss < self.unigram:
            detail += f", {self.unigram - loss:.3f} below unigram"
        if step and loss > self.uniform + 0.1:
            detail += f", worse than a uniform guess: {LOWER_LR_HINT}, or more --warmup_steps"
        self.print(f"step {step:5d}: validation loss {loss:.4f}{detail}")

    def print_hella(self, step: int, values: dict) -> None:
        error = 1.96 * values["acc_norm_stderr"]
        self.print(f"step {step:5d}: HellaSwag {values['acc_norm']:.4f} +- {error:.4f}")

    def print_blimp(self, step: int, values: dict) -> None:
        error = 1.96 * values["acc_stderr"]
        self.print(f"step {step:5d}: BLiMP {values['acc']:.4f} +- {error:.4f}")

    def print_spike(self, step: int, values: dict) -> None:
        if "file" not in values:  # soon after another spike: only in log.jsonl
            return
        norms = f"gradient norm {values['norm']:.4g}, median {values['usual']:.4g}"
        skipped = ", update skipped" * values["skipped"]
        replay = f"{command_for('lab replay')} {shell_quote(self.trainer.run_dir / values['file'])}"
        self.print(f"step {step:5d}: spike: {norms}{skipped}; repeat it with `{replay}`")

    def print_sample(self, step: int, values: dict) -> None:
        """Print the texts, indented, with a bar before each line."""
        for text in values["texts"]:
            lines = textwrap.indent(printable(text), "    | ", lambda line: True)
            self.print(f"    sample after {step} steps:\n{lines}")

    def print_train_step(self, step, loss, lr, grad_norm, seconds_left, speed) -> None:
        shown = f" | {speed['tok_per_s']:,.0f} tok/s" if speed else ""
        shown += f" | MFU {speed['mfu']:.1%}" if speed.get("mfu") else ""
        if seconds_left is not None:
            shown += " | {}:{:02d} left".format(*divmod(int(seconds_left), 60))
        for name, ms in speed.items():  # --timing
            if name.endswith("_ms") and name != "dt_ms":
                shown += f" | {name[:-3]} {ms:.1f} ms"
        line = f"step {step:5d}/{self.cfg.max_steps} | loss {loss:.4f} | lr {lr:.2e}"
        self.print(f"{line} | norm {grad_norm:.2f}{shown}")


def print_summary(trainer, stopped: str) -> None:
    """Draw the loss curve, and print which files there are and what to do next. All ranks wait for it,
    because torchrun kills them as soon as one exits with a nonzero status, such as 75."""
    if trainer.world.is_main:
        summary(trainer, stopped)
    trainer.world.barrier()


def summary(trainer, stopped: str) -> None:
    run_dir, say = trainer.run_dir, trainer.world.print0
    file = Path(inspect.getfile(type(trainer))).name
    log_dir = "" if str(run_dir.parent) == "log" else f"--log_dir {shell_quote(run_dir.parent)} "
    resume = f"{command_for(file)} --resume {log_dir}--run_name {shell_quote(run_dir.name)}"
    if stopped and not trainer.step:
        say(f"{stopped}: stopped before the first update; run the same command to start again")
        return
    if stopped:
        under = ", under torchrun as before," if trainer.world.distributed else ""
        say(
            f"{stopped}: saved after step {trainer.step} in {run_dir}; `{resume}`{under} continues it"
        )
    if trainer.saved_step < trainer.step:
        say(f"{run_dir}: checkpoint_every=0, so the steps after {trainer.saved_step} are not saved")
    if not checkpoint_files(run_dir):
        return
    from lab.tools import plot  # matplotlib is slow to import

    plot.loss_curve([run_dir], run_dir / "loss.png")
    name, curve = shell_quote(run_dir), " loss.png (the curve)," * (run_dir / "loss.png").exists()
    best = f"; model_best.pt has the lowest validation loss, {trainer.best_val:.4f}"
    best *= (run_dir / "model_best.pt").exists()
    continue_, more = ("finish it", "") if stopped else ("train it further", " --max_steps N")
    use = f"generate text           {command_for('sample.py')} --model {name}"
    if not hasattr(trainer.raw_model, "generate"):
        use = f"use it in transformers  {command_for('lab export')} {name} --out FOLDER"
    elif hasattr(trainer.raw_model, "from_pretrained") and trainer.raw_model.num_params() <= 15e6:
        use += (
            f"\n  make it a web page      {command_for('lab export')} {name} --html my-model.html"
        )
    report = command_for("lab report")
    say(
        f"\n{run_dir}/ contains log.jsonl (all numbers),{curve} TensorBoard events and checkpoints{best}. "
        f"Next:\n  {use}\n  see a report page       {report} {name}\n"
        f"  compare with another    {report} {name} {shell_quote(run_dir.parent / 'OTHER')}\n"
        f"  {continue_:22}  {resume}{more}"
    )
