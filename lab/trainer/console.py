"""Console output of a run: the settings at the start, a line per log record, the summary."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from lab.cli import (
    UserError,
    bold,
    command_for,
    counted,
    dim,
    progress,
    shell_quote,
    terminal_width,
    wrap,
)
from lab.data.loader import grad_accum_steps, step_text
from lab.data.tokenizers import END_OF_TEXT, printable
from lab.hardware import CPU_FLOPS
from lab.program import program_file
from lab.tools.read_log import read_log
from lab.tools.verdict import is_worse, loss_verdict
from lab.trainer.checkpoint import checkpoint_files, step_of
from lab.trainer.throughput import step_tokens_of


class Console:
    """Prints a run's records on rank 0."""

    def __init__(self, trainer):
        self.trainer, self.cfg = trainer, trainer.cfg
        self.bar: Any = None  # progress to the next log line
        self.last_line = time.monotonic()  # when it was printed
        # loss in nats per token of the unigram baseline and of a uniform guess
        self.unigram, self.uniform = math.inf, math.inf
        self.explained = False  # bits per byte

    def print(self, text: str, highlight: str = "", indent: str = " " * 7) -> None:
        """Print a line, wrapped to the terminal's width. On a terminal, the part `highlight` is bold and the
        rest dim. indent: prefix of continuation lines."""
        self.close_bar()
        text = wrap(text, indent)
        if highlight:
            before, part, after = text.partition(highlight)
            text = dim(before) + bold(part) + dim(after)
        self.trainer.world.print0(text)

    def advance_bar(self, step: int) -> None:
        """Call after each step. The bar appears two seconds after the last line."""
        if self.bar is None:
            every = self.cfg.log_every
            end = min(-(-step // every) * every, self.cfg.max_steps)
            total, waited = end - step + 1, time.monotonic() - self.last_line
            self.bar = progress(
                None, f"until step {end}", "step", max(0, 2 - waited), total=total, initial=1
            )
        else:
            self.bar.update()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar, self.last_line = None, time.monotonic()

    def start_record(self, callbacks: list) -> dict:
        """The first log record of a run. The unigram baseline is taken from the validation callback."""
        trainer, world, loader = self.trainer, self.trainer.world, self.trainer.loader
        validation = next((c for c in callbacks if c.name == "val"), None)
        cuda = world.device.type == "cuda"
        self.uniform = math.log(trainer.raw_model.config.vocab_size)
        self.unigram = getattr(validation, "unigram", None)
        record = dict(
            device=torch.cuda.get_device_name(world.device) if cuda else world.device.type,
            world_size=world.world_size, precision=trainer.precision.name,
            batch_size=loader.batch_size,
            grad_accum_steps=grad_accum_steps(self.cfg, loader.batch_size, world.world_size),
            num_params=trainer.raw_model.num_params(), tokens=loader.position,
            train_tokens=len(loader.shards), epoch_tokens=loader.epoch_tokens(),
            val_tokens=len(validation.shards) if validation else 0,
            val_targets=validation.targets if validation else 0,
            log_v=self.uniform, unigram=self.unigram, torch=torch.__version__,
        )  # fmt: skip
        damaged = trainer.run_dir.glob("model_*[0-9].damaged")
        damaged = [path.name for path in damaged if step_of(path) > trainer.step]
        return record | ({"passed_over": damaged} if damaged else {})

    def print_settings(self, reason: str, record: dict) -> None:
        """Print the settings, so that a reader can check the arithmetic."""
        trainer, cfg = self.trainer, self.cfg
        world, loader = trainer.world, trainer.loader
        c, shards = trainer.raw_model.config, loader.shards
        step_tokens = step_tokens_of(trainer)
        remaining = range(trainer.step, cfg.max_steps)
        tokens = loader.position + sum(map(step_tokens, remaining))
        padded = c.padded_vocab_size > c.vocab_size
        padding = f", padded to {c.padded_vocab_size:,} rows" if padded else ""
        self.print(f"resuming after step {trainer.step} of {reason}" if trainer.step else reason)
        self.print(
            f"model  {record['num_params']:,} parameters: {counted(c.n_layer, 'layer')}, "
            f"{counted(c.n_head, 'head')}, {c.n_embd} channels, "
            f"vocabulary of {c.vocab_size:,} tokens{padding}"
        )
        source = shards.manifest.get("source") or {}
        builtin = source.get("kind") == "builtin"
        about = f" (documentation of {source['revision']})" if builtin else ""
        if shards.manifest.get("context"):
            chats = counted(shards.manifest["documents"], "conversation")
            about = f" ({chats}; records 1, 11, 21 ... only for validation)"
        self.print(
            f"data   {cfg.data}{about}: {len(shards):,} training tokens, {record['val_tokens']:,} for "
            f"validation; this run reads {tokens / loader.epoch_tokens():.2f} epochs"
        )
        for note in self.notes(record):
            self.print(f"note: {note}")
        small = sum(step_tokens(step) < cfg.total_batch_size for step in remaining)
        when = "next" if trainer.step else "first"
        few = "step" if small == 1 else f"{small} steps"
        half = f"; half as many in the {when} {few}" if small else ""
        text = step_text(cfg, loader.batch_size, world.world_size, "processes")
        self.print(f"step   {text}{half}")
        cuda = world.device.type == "cuda"
        threads = "" if cuda else f", {counted(torch.get_num_threads(), 'thread')}"
        self.print(f"device {record['device']}{threads}, {trainer.precision.name}")
        if self.unigram:
            uniform = f"ln({c.vocab_size}) = {self.uniform:.3f} nats per token"
            begins = f"starts near {uniform} (a uniform guess)"
            if cfg.init_from or trainer.step:
                begins = f"a uniform guess has {uniform}"
            self.print(
                f"loss   {begins}; a model that knows only how frequent each token is has "
                f"{self.unigram:.3f} (unigram)"
            )

    def notes(self, record: dict) -> Iterator[str]:
        """What a reader of the settings should know besides."""
        trainer, cfg = self.trainer, self.cfg
        world, shards = trainer.world, trainer.loader.shards
        if not shards.manifest.get("complete", True):
            yield (
                f"{shards.folder} is not complete, because its build was interrupted; run the same "
                f"{command_for('fineweb.py')} command again for the rest"
            )
        for name in record.get("passed_over", ()):
            yield f"{trainer.run_dir / name} is damaged; resuming from step {trainer.step}"
        kinds = dict(too_long="too long", no_answer="without an answer")
        skipped = [f"{shards.manifest[k]} {kinds[k]}" for k in kinds if shards.manifest.get(k)]
        if skipped:
            yield f"conversations skipped: {', '.join(skipped)} (docs/DATA.md)"
        if shards.ignored_tokens:
            yield (
                f"{shards.folder} has {shards.ignored_tokens:,} more tokens than when this run "
                "started; they are ignored, because they would change the order of the data; a new "
                "run with --init_from uses all of them"
            )
        context = trainer.raw_model.config.block_size
        learned_positions = "transformer.wpe.weight" in dict(trainer.raw_model.named_parameters())
        if learned_positions and cfg.seq_len < context and not (cfg.init_from or trainer.step):
            yield (
                f"seq_len={cfg.seq_len} is less than block_size={context}: later positions are not "
                f"trained, so longer texts turn into nonsense; start a run with --block_size {cfg.seq_len}"
            )
        flops = trainer.raw_model.flops_per_token(cfg.seq_len) * cfg.total_batch_size
        minutes = flops / CPU_FLOPS / world.world_size / 60
        if world.device.type == "cpu" and minutes > 1:
            yield (
                f"without a GPU, one step of this model takes roughly {counted(round(minutes), 'minute')}; "
                "--preset laptop takes two minutes in total"
            )

    def event(self, kind: str, step: int, values: dict) -> None:
        """Print a line for a record, for the kinds that have a print_ method below."""
        if kind == "end":  # the summary follows
            self.close_bar()
        if line := getattr(self, f"print_{kind}", None):
            line(step, values)

    def print_val(self, step: int, values: dict) -> None:
        loss, detail = values["loss"], ""
        if "bits_per_byte" in values:
            detail = f", {values['bits_per_byte']:.3f} bits per byte"
        if "accuracy" in values:
            detail = f", {values['accuracy']:.1%} of masked tokens right"
        if self.unigram and loss < self.unigram:
            detail += f", {self.unigram - loss:.3f} below unigram"
        if step and loss > self.uniform + 0.1:
            detail += ", worse than a uniform guess"
        shown = f"loss {loss:.4f}"
        self.print(f"step {step:5d}: validation {shown}{detail}", highlight=shown)
        if "bits per byte" in detail and not self.explained:
            self.explained = True
            self.print(
                "       (1 bit = 0.69 nats; losses per byte are comparable between tokenizers)"
            )

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
        """Print the texts, with a bar before each line."""
        if step == 0 and not self.cfg.init_from:
            return self.print("step     0: samples not shown, because the weights are random")
        self.print(f"step {step:5d}: samples")
        for i, text in enumerate(values["texts"], 1):
            self.print(f"    sample {i} of {len(values['texts'])}")
            if self.cfg.preset == "sft":  # as in a chat, the answer ends at end-of-text
                text = text.partition(f"\n{END_OF_TEXT}")[0]
            for line in printable(text).split("\n"):
                self.print(f"    | {line}", indent="    | ")

    def print_train_step(self, step, loss, lr, grad_norm, seconds_left, speed) -> None:
        shown = f"loss {loss:.4f}"
        optional = [f"lr {lr:.2e}", f"grad norm {grad_norm:.2f}"]
        fields = [f"step {step:5d}/{self.cfg.max_steps}", shown, *optional]
        fields += [f"{speed['tok_per_s']:,.0f} tok/s"] if speed else []
        fields += [f"MFU {speed['mfu']:.1%}"] if speed.get("mfu") else []
        if seconds_left is not None:
            fields.append("{}:{:02d} left".format(*divmod(int(seconds_left), 60)))
        for name, ms in speed.items():  # --timing
            if name.endswith("_ms") and name != "dt_ms":
                fields.append(f"{name[:-3]} {ms:.1f} ms")
        for field in optional:  # too long for the terminal: log.jsonl has them
            if "\n" in wrap(" | ".join(fields)):
                fields.remove(field)
        self.print(" | ".join(fields), highlight=shown)


def is_chat(trainer: Any) -> bool:
    """Whether a run trains on conversations."""
    return bool(trainer.loader.shards.manifest.get("context"))


def print_summary(trainer, stopped: str) -> None:
    """Draw the loss curve, and print the run's files and commands to try next. All ranks wait for it,
    because torchrun kills them as soon as one exits with a nonzero status, such as 75."""
    if trainer.world.is_main:
        summary(trainer, stopped)
    trainer.world.barrier()


def summary(trainer, stopped: str) -> None:
    run_dir, say = trainer.run_dir, lambda text: trainer.world.print0(wrap(text))
    resume = resume_command(trainer)
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
    curve = " loss.png (the curve)," * (run_dir / "loss.png").exists()
    model, best = run_dir, ""
    if (run_dir / "model_best.pt").exists():
        best = "; model_best.pt is the saved one with the lowest validation loss"
        if math.isfinite(trainer.best_val):
            best += f", {trainer.best_val:.4f}"
        if is_chat(trainer):
            best += ", but the answers of the last one are usually better"
    worse = False
    with contextlib.suppress(UserError):  # without a log
        log = read_log(run_dir)
        # where the loss of a chat model is lowest, its answers are still nonsense
        worse = is_worse(log) and not is_chat(trainer)
        if not stopped and (verdict := loss_verdict(log, vars(trainer.cfg))):
            say(f"\n{verdict}")
        if best and not stopped and worse:
            model = run_dir / "model_best.pt"
    contents = f"log.jsonl (all numbers),{curve} TensorBoard events and checkpoints{best}"
    say(f"\n{run_dir}/ contains {contents}.\nNext:")
    commands = next_commands(trainer, shell_quote(model))
    if stopped:
        commands = {"finish it": resume} | commands
    elif not worse:
        commands["train it further"] = f"{resume} --max_steps TOTAL"
    lines = [f"  {purpose:23}  {command}" for purpose, command in commands.items()]
    # on a narrow terminal, commands get their own lines, which are not wrapped, so that they can be copied
    if 0 < terminal_width(sys.stdout) < max(map(len, lines)):
        lines = [f"  {purpose}\n    {command}" for purpose, command in commands.items()]
    if not (stopped or worse):
        lines.append(f"TOTAL counts all steps, including the {trainer.step:,} already done.")
    trainer.world.print0("\n".join(lines))


def resume_command(trainer) -> str:
    """The command that continues the run."""
    folder, name = trainer.run_dir.parent, shell_quote(trainer.run_dir.name)
    log_dir = "" if str(folder) == "log" else f"--log_dir {shell_quote(folder)} "
    return f"{command_for(program_file(type(trainer)))} --resume {log_dir}--run_name {name}"


def next_commands(trainer, model: str) -> dict[str, str]:
    """{purpose: command}: what to do with the run besides training. model: its best checkpoint or folder."""
    run, sample = shell_quote(trainer.run_dir), command_for("sample.py")
    if not hasattr(trainer.raw_model, "generate"):
        export = f"{command_for('lab export')} {run} --out FOLDER"
        commands = {"use it in transformers": export}
    else:
        commands = {"generate text": f"{sample} --model {model}"}
        if is_chat(trainer):
            commands = {"chat with it": f"{sample} --chat --model {model}"}
        commands["try it in a browser"] = f"{command_for('lab serve')} {model}"
        gpt2 = program_file(type(trainer)) == "train_gpt2.py"
        small = trainer.raw_model.num_params() <= 15e6
        own_tokenizer = trainer.raw_model.config.tokenizer.endswith(".json")
        if gpt2 and small and not own_tokenizer:
            export = f"{command_for('lab export')} {run} --html my-model.html"
            commands["export it as a web page"] = export
    commands["see curves and samples"] = f"{command_for('lab report')} {run}"
    return commands
