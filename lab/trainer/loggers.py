"""Loggers of a run: log.jsonl, TensorBoard, Weights & Biases, and the console (console.py)."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.cli import RunError, UserError, eprint, format_error, shell_quote
from lab.files import check_regular, finite_json, write_errors
from lab.program import file_hash, program_file
from lab.trainer.console import Console
from lab.trainer.run_dir import config_dict


class RunLogger:
    """Logs each event of a run as one JSON line in log.jsonl, to TensorBoard and to the console. Only
    rank 0 writes; the other ranks call the same methods.

    A file that cannot be written is reported once, and training continues. Only a checkpoint that
    cannot be written stops the run.
    """

    def __init__(self, trainer):
        self.trainer, self.run_dir, self.is_main = trainer, trainer.run_dir, trainer.world.is_main
        self.console = Console(trainer)
        self.advance_bar, self.close_bar = self.console.advance_bar, self.console.close_bar
        self.wandb: Any = None
        self.failed: set[str] = set()  # files that could not be written

    def __enter__(self) -> "RunLogger":
        if not self.is_main:
            return self
        with write_errors(self.run_dir):
            check_regular(path := self.run_dir / "log.jsonl")
            self.file = path.open("a", buffering=1)  # append when resuming
            self.tensorboard = TensorBoardWriter(self.run_dir, self.trainer.step)
        if self.trainer.cfg.wandb:
            import wandb  # pyright: ignore[reportMissingImports]  # optional

            path, cfg = self.run_dir / "wandb_id", self.trainer.cfg
            known = path.read_text() if cfg.resume and path.exists() else None
            settings = dict(name=self.run_dir.name, config=vars(cfg), resume="allow")
            self.wandb = wandb.init(project="gpt2", id=known, **settings)
            path.write_text(self.wandb.id)
            self.wandb.define_metric("*", step_metric="step")  # spikes are logged one step late
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        """Log the error that ends the run, if any, and close the files."""
        self.console.close_bar()
        if not self.is_main:
            return
        if isinstance(error, Exception):
            sentence = format_error(error)[1] or f"{type(error).__name__}: {error}"
            values: dict[str, Any] = {"reason": "error", "error": sentence}
            if isinstance(error, RunError) and error.step:
                values["failed_step"] = error.step
            self.event("end", self.trainer.step, values)
        for file in (self.tensorboard, self.file):
            with contextlib.suppress(OSError):  # reported before
                file.close()
        if self.wandb:
            self.wandb.finish()

    @contextlib.contextmanager
    def best_effort(self, name: str) -> Iterator[None]:
        """Context manager for writing the run directory's file `name`: reports an error once, and goes on."""
        try:
            with write_errors(self.run_dir / name):
                yield
        except UserError as error:
            if name not in self.failed:
                eprint(f"{error}; training continues without it")
            self.failed.add(name)

    def event(self, kind: str, step: int, values: dict | None) -> None:
        """Write a record and print a line. values: JSON-serializable; nothing is logged if it is None."""
        if not self.is_main or values is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | values
        with self.best_effort("log.jsonl"):
            self.file.write(json.dumps(finite_json(record)) + "\n")
        plain = [(k, v) for k, v in values.items() if type(v) in (int, float) and k != "step"]
        numbers = {f"{kind}/{k}": v for k, v in plain}
        with self.best_effort("events.out.tfevents"):
            self.tensorboard.add_scalars(numbers, step)
        if self.wandb:
            self.wandb.log(numbers | {"step": step})
        self.console.event(kind, step, values)

    def start(self, reason: str, trainer, callbacks: list, state: dict | None) -> None:
        """Log and print the settings at the start of a run. state: the checkpoint it continues from."""
        record = self.console.start_record(callbacks) | typed_command(trainer)
        record |= {"changed": changed_settings(trainer, state)} if state else {}
        self.event("start", trainer.step, record)
        self.console.print_settings(reason, record)

    def train_step(
        self, step: int, loss: float, lr: float, grad_norm: float,
        seconds_left: float | None = None, **speed: float,
    ) -> None:  # fmt: skip
        """Log and print a training step. loss in nats per token; speed: the result of Throughput.read."""
        record = dict(loss=loss, lr=lr, grad_norm=grad_norm, tokens=self.trainer.loader.position)
        self.event("train", step, record | speed)
        self.console.print_train_step(step, loss, lr, grad_norm, seconds_left, speed)


def typed_command(trainer: Any) -> dict[str, str]:
    """{"command": the command that started this run, "code": a hash of its program}, for lab report and
    lab plot; empty if another program did, such as a notebook."""
    program = Path(program_file(type(trainer))).name
    if Path(sys.argv[0]).name != program:
        return {}
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    start = f"torchrun --nproc_per_node {processes}" if trainer.world.world_size > 1 else "python"
    command = " ".join([start, program, *map(shell_quote, sys.argv[1:])])
    return {"command": command, "code": file_hash(sys.argv[0])}


def changed_settings(trainer: Any, state: dict) -> dict[str, list]:
    """{setting: [value in the checkpoint `state`, value now]} of those that differ, for lab report."""
    before, config = state["model_config"] | state["train_config"], config_dict(trainer)
    now = config["model"] | config["train"]
    names = [n for n in now if n in before and n not in ("resume", "run_name", "log_dir")]
    return {name: [before[name], now[name]] for name in names if before[name] != now[name]}


class TensorBoardWriter:
    """Writes scalars to a TensorBoard event file in the calling thread, where errors can be handled;
    torch's SummaryWriter uses a thread of its own."""

    def __init__(self, run_dir: Path, step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event_pb2, self.summary_pb2 = event_pb2, summary_pb2
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{step}"
        self.file = open(run_dir / name, "wb")
        self.records = RecordWriter(self.file)
        self.write(file_version="brain.Event:2")
        if step:  # a resumed run: steps after this one are logged again
            self.write(step=step + 1, session_log={"status": "START"})

    def write(self, **fields: Any) -> None:
        event = self.event_pb2.Event(wall_time=time.time(), **fields)
        self.records.write(event.SerializeToString())
        self.file.flush()

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        if values:
            make = self.summary_pb2.Summary.Value
            scalars = [make(tag=tag, simple_value=value) for tag, value in values.items()]
            self.write(step=step, summary=self.summary_pb2.Summary(value=scalars))

    def close(self) -> None:
        self.file.close()
