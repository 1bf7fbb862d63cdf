"""Checkpoints: a trainer's state, atomic writes, and reading without executing any code in the file.

Saving: Trainer.save -> AsyncCheckpointer.save -> in a thread, save_checkpoint.
Resuming: read_newest -> read_checkpoint -> restore_checkpoint.
"""

import contextlib
import functools
import os
import pickle
import re
import shutil
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lab.cli import eprint, progress, require, torchrun_env
from lab.distributed import AsyncCopy
from lab.files import (
    CorruptFileError,
    atomic_open,
    check_keys,
    first_line,
    read_errors,
    write_errors,
)
from lab.optim.state import check_optimizer_state, check_tensors, load_optimizer_state
from lab.program import LEGACY_PROGRAMS, describe_program, warn_if_edited


def checkpoint_files(run_dir: str | Path) -> list[Path]:
    """The model_<step>.pt files of a run, earliest first; copies with other names are ignored."""
    files: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # the directory was removed while it was listed
        files += Path(run_dir).glob("model_*.pt")
    return sorted((p for p in files if re.fullmatch(r"model_[0-9]+", p.stem)), key=step_of)


def step_of(path: Path) -> int:
    """The number that ends a file's name: 250 for model_000250.pt."""
    return int(path.stem.rpartition("_")[2])


def save_checkpoint(run_dir: Path, step: int, state: dict, keep_last: int) -> Path:
    """Write run_dir/model_<step>.pt and delete all but the newest keep_last checkpoints."""
    path = Path(run_dir) / f"model_{step:06d}.pt"
    write_checkpoint(path, state)
    for old in checkpoint_files(run_dir)[:-keep_last]:
        old.unlink(missing_ok=True)
    return path


def write_checkpoint(path: Path, state: dict) -> None:
    """torch.save to a file, atomically. Raises UserError if the file cannot be written."""
    with atomic_open(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer hides the system's error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def link_best(run_dir: Path, step: int) -> None:
    """Make model_best.pt a hard link to the checkpoint of this step (or a copy)."""
    path, part = Path(run_dir) / f"model_{step:06d}.pt", Path(run_dir) / "model_best.part"
    with write_errors(part):
        part.unlink(missing_ok=True)
        try:
            os.link(path, part)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, part)
        os.replace(part, path.with_name("model_best.pt"))
        part.unlink(missing_ok=True)  # os.replace does nothing if both are links to one file


class AsyncCheckpointer:
    """Writes a run's checkpoints, one at a time, in a thread.

    With cfg.async_save, save() waits for the previous checkpoint, starts to copy the state and returns. An
    error in the thread is raised by the next check(), save() or finish().
    """

    def __init__(self, run_dir: Path, cfg: Any, device: torch.device):
        self.run_dir, self.cfg, self.device = run_dir, cfg, device
        self.thread = ThreadPoolExecutor(1)
        # Start the thread now, with a job that does nothing: if a second Ctrl-C interrupted its start
        # during a save, Python would wait for it at exit, for ever.
        self.thread.submit(int).result()
        self.jobs: list[Future] = []

    def save(self, step: int, state: dict) -> dict | None:
        """Wait for the previous checkpoint, then start this one. Returns what finish() returns."""
        last_result = self.finish()
        state, copies = self.snapshot(state) if self.cfg.async_save else (state, [])
        self.jobs.append(self.thread.submit(self.write, step, state, copies))
        return last_result if self.cfg.async_save else self.finish()

    def link_best(self, step: int) -> None:
        """Link the checkpoint of this step as the best one, once it is on disk."""
        self.jobs.append(self.thread.submit(link_best, self.run_dir, step))

    def check(self) -> None:
        """Raise the error of a job that has failed."""
        for job in self.jobs:
            if job.done():
                job.result()

    def finish(self) -> dict | None:
        """Wait until everything is on disk. Returns the log record of a new checkpoint, or None."""
        wait(self.jobs)
        done, self.jobs = self.jobs, []
        return next(filter(None, [job.result() for job in done]), None)

    def write(self, step: int, state: dict, copies: list[AsyncCopy]) -> dict:
        for copy in copies:
            copy.wait()
        return {
            "step": step,
            "path": save_checkpoint(self.run_dir, step, state, self.cfg.keep_last).name,
        }

    def snapshot(self, state: dict) -> tuple[dict, list[AsyncCopy]]:
        """(a copy of the state in CPU memory, which updates don't change; the copies in progress).
        Tensors that share memory, such as the tied head, are copied once."""
        copies: dict[Any, AsyncCopy] = {}

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            if self.device.type == "cuda" and not tensor.is_cuda and tensor.dim():
                return tensor  # gathered for this checkpoint, so nothing else changes it
            memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            key = memory if tensor.numel() else id(tensor)  # empty tensors have no address
            copies[key] = copies.get(key) or AsyncCopy(tensor)
            return copies[key].copy

        return tree_map_only(torch.Tensor, clone, state), list(copies.values())


class CheckpointMixin:
    """Base class of train_gpt2.Trainer, whose attributes it uses: collects the state, restores it and saves
    it. A trainer with more state, such as averaged weights, extends state_dict and load_state_dict."""

    def state_dict(self: Any) -> dict[str, Any]:
        """All that is needed to resume exactly, as tensors and plain values. Every process must call it."""
        return {
            "program": describe_program(self), "step": self.step, "best_val": self.best_val,
            "model": self.raw_model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(), "batch_size": self.loader.batch_size,
            "scaler": self.precision.scaler.state_dict(), "health": self.health.state_dict(),
            "model_config": asdict(self.raw_model.config), "train_config": asdict(self.cfg),
        }  # fmt: skip

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        self.raw_model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        if state["scaler"]:  # fp16 only
            self.precision.scaler.load_state_dict(state["scaler"])
        self.health.load_state_dict(state["health"])
        self.step = self.saved_step = state["step"]
        same = ("val_tokens", "seq_len", "mlm_probability")  # else losses cannot be compared
        before = state["train_config"]
        if all(before.get(name) == getattr(self.cfg, name, None) for name in same):
            self.best_val = state["best_val"]

    def save(self: Any) -> dict | None:
        """Save a checkpoint, written by a background thread; does nothing at step 0 or if this step is
        saved already. Returns the log record of the last checkpoint written, or None: the previous one, or
        this one with --no_async_save."""
        if self.step == self.saved_step:
            return None
        self.saved_step, state = self.step, self.state_dict()
        return self.checkpointer.save(self.step, state) if self.world.is_main else None


class OpaqueStub:
    """Placeholder for an object of an unknown class in a .pt file, with its saved attributes."""


def read_checkpoint(path: str | Path) -> Any:
    """Read a torch.save file. Objects other than tensors and plain values become OpaqueStubs if possible;
    no code in the file is executed. Raises UserError, or CorruptFileError for a damaged file or objects
    of another kind."""
    with read_errors(path, "checkpoint", "choose another: `ls log` lists the runs"):
        verify_checksums(path, os.stat(path).st_mtime_ns)
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            with torch.serialization.safe_globals([(OpaqueStub, name) for name in names]):
                state = torch.load(path, "cpu", weights_only=True, mmap=os.name == "posix")
        except pickle.UnpicklingError as error:
            raise CorruptFileError(
                f"checkpoint {path} is refused: it contains more than tensors and plain values, or is "
                "older than torch 1.6; no code in it was executed; save only its state dict"
            ) from error
        return upgrade(state)


def upgrade(state: Any) -> Any:
    """Convert a checkpoint of an older version of this project to today's layout, in place."""
    if not (isinstance(state, dict) and "train_config" in state):
        return state
    if isinstance(state.get("program"), str):
        state["program"] = LEGACY_PROGRAMS.get(state["program"], state["program"])
    if "health" not in state:  # gradient norms used to be kept in the optimizer's last group
        optimizer = state.get("optimizer") or {}
        groups = [
            g for part in optimizer.get("parts", [optimizer]) for g in part.get("param_groups", ())
        ]
        norms = [group.pop("norms") for group in groups if "norms" in group]
        state["health"] = {"grad_norm_history": norms[0]} if norms else {}
    return state


@functools.lru_cache
def verify_checksums(path: str | Path, mtime: int) -> None:
    """Raise ValueError or BadZipFile if the table of contents or a checksum is wrong; torch.load does not
    check checksums. Cached by modification time, because a large file takes a while."""
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # as in torch.load; is_zipfile is stricter
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            archive.filelist = list(progress(archive.filelist, f"checking {path}", "tensor"))
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum of {damaged}")


def read_newest(run_dir: str | Path) -> tuple[Path, Any]:
    """(path, contents) of a run's newest checkpoint that is not damaged; rank 0 prints which ones are
    skipped. Raises CorruptFileError if all are damaged."""
    files = checkpoint_files(run_dir)
    require(files, f"{run_dir} has no checkpoint any more; choose another: `ls log` lists the runs")
    while True:
        path = files.pop()
        try:
            return path, read_checkpoint(path)
        except CorruptFileError as error:
            if not files:
                raise
            if torchrun_env()[0] == 0:
                detail = first_line(error.__cause__)
                eprint(f"checkpoint {path} is damaged ({detail}); trying {files[-1].name}")


def restore_checkpoint(trainer, state: dict) -> None:
    """Continue from `state`, as returned by read_checkpoint. Raises UserError if it does not fit."""
    hint = "resume it with the version that made it, or start from its weights with --init_from"
    with read_errors(trainer.run_dir, "checkpoint in", hint):
        check_checkpoint(trainer, state)
    warn_if_edited(state.get("program"), trainer.model_class, trainer.run_dir)
    trainer.load_state_dict(state)


def check_checkpoint(trainer, state: dict) -> None:
    """Raise an exception unless `state`, from a file, has the names, types and shapes that
    load_state_dict expects, so that any later exception is a bug."""
    check_keys(state, step=int, best_val=(int, float), health=dict)
    params = dict(trainer.raw_model.named_parameters(remove_duplicate=False))
    buffers = dict(trainer.raw_model.named_buffers())
    saved = {name: value for name, value in state["model"].items() if name not in buffers}
    check_tensors(saved, {name: p.shape for name, p in params.items()})
    check_optimizer_state(trainer.optimizer, state["optimizer"])
    average = getattr(trainer, "average", {})  # speedrun.py --ema_steps
    if average and "average" in state:
        check_tensors(state["average"], {name: t.shape for name, t in average.items()})
    for name, least in dict(position=0, tokens=1, begin=0).items():
        n = state["loader"][name]
        if type(n) is not int or not least <= n < 2**48:  # sums of positions must fit in int64
            raise TypeError(f"{name} of the loader is {str(n)[:40]}")
    if state["scaler"]:  # fp16 only
        names = trainer.precision.scaler.state_dict()
        check_keys(state["scaler"], **dict.fromkeys(names, (int, float)))
    history = state["health"].get("grad_norm_history", torch.zeros(0))
    # one dimension
    check_tensors({"gradient norms": history}, {"gradient norms": (history.numel(),)})
