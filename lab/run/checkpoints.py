"""Checkpoint files: written whole or not at all, read without running what is in them, found by
their names."""

import contextlib
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import torch

from lab.cli import UserError, progress
from lab.files import reading, writing


def checkpoint_files(run_dir):
    """The model_<step>.pt of a run, earliest first; copies that somebody has made of them are
    none."""
    files = [p for p in Path(run_dir).glob("model_*.pt") if re.fullmatch(r"model_[0-9]+", p.stem)]
    return sorted(files, key=step_of)


def step_of(path):
    return int(path.stem.removeprefix("model_"))


def save(run_dir, step, state, keep_last):
    """Write run_dir/model_<step>.pt whole or not at all, keep the newest keep_last; returns the
    path."""
    path = Path(run_dir) / f"model_{step:06d}.pt"
    with writing(path, "--resume then goes on from the checkpoint before, if there is one"):
        write(path, state)
        for old in checkpoint_files(run_dir)[:-keep_last]:
            old.unlink()
    return path


def write(path, state):
    """torch.save, whole or not at all. Raises OSError, and UserError where the disk is full."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        part.unlink(missing_ok=True)
        if "inline_container" not in str(error):
            raise
        # torch's writer names this file of its source where the disk is full
        raise UserError(
            f"checkpoint {path} cannot be written; is the disk full? Make room"
        ) from error
    except OSError:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, path)  # the name appears when the bytes are on disk


def link_best(run_dir, step):
    """Give the checkpoint of this step a second name, model_best.pt."""
    path, copy = Path(run_dir) / f"model_{step:06d}.pt", Path(run_dir) / "model_best.part"
    with writing(copy):
        copy.unlink(missing_ok=True)
        try:
            os.link(path, copy)
        except OSError:  # a file system without links
            shutil.copyfile(path, copy)
        os.replace(copy, path.with_name("model_best.pt"))


class Inert:
    """Stands for every foreign class in a .pt file: it holds what the file says of the object and
    can do nothing."""


def read_checkpoint(path):
    """What torch.save wrote, with foreign classes as inert objects: tensors and plain values come
    in, no code runs. Raises UserError for what cannot be read."""
    way_out = "name another, or move it away; the one before it is used then"
    with reading(path, "checkpoint", way_out):
        if zipfile.is_zipfile(path):  # checksums, which torch.save notes and torch.load ignores
            with zipfile.ZipFile(path) as archive:
                archive.filelist = progress(archive.filelist, f"checking {path}", "tensor")
                if damaged := archive.testzip():
                    raise ValueError(f"the checksum of {damaged} in it is another")
        try:
            stubs = [(Inert, n) for n in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
            with torch.serialization.safe_globals(stubs):
                return torch.load(path, "cpu", weights_only=True, mmap=os.name == "posix")
        except pickle.UnpicklingError as error:
            raise UserError(
                f"checkpoint {path} is refused: it holds more than tensors and plain values, or is "
                "older than torch 1.6; nothing in it was executed; save its state dict alone"
            ) from error


def has_checkpoint(run_dir):
    return bool(checkpoint_files(run_dir))


def newest_checkpoint(run_dir):
    """The last model_<step>.pt of a run. Raises UserError if there is none."""
    files = checkpoint_files(run_dir)
    if not files:
        raise UserError(
            f"no checkpoint in {run_dir}; `ls log/*/` shows all, `python train_gpt2.py` makes one"
        )
    return files[-1]


def read_newest(run_dir):
    """(path, what read_checkpoint gives) of the newest checkpoint. A run that is going on may
    remove the one that was just found, as it has a newer one."""
    while True:
        path = newest_checkpoint(run_dir)
        try:
            return path, read_checkpoint(path)
        except UserError:
            if path.exists():
                raise


def newest_run(log_dir):
    """The run folder whose checkpoint was written last."""
    times = {}
    for run_dir in Path(log_dir).glob("*/"):
        for path in checkpoint_files(run_dir):
            with contextlib.suppress(FileNotFoundError):  # a run that goes on has just removed it
                times[run_dir] = max(times.get(run_dir, 0), path.stat().st_mtime)
    if not times:
        raise UserError(f"no run with a checkpoint in {log_dir}/; `python train_gpt2.py` makes one")
    return max(times, key=times.get)
