"""Checkpoint files: written whole or not at all, read without running what is in them, found by their names.

What a checkpoint holds is for runs.py to say (state_to_save, restore); here it is any dict of tensors and plain values.
"""

import contextlib
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import torch


def checkpoint_files(run_dir):
    """The model_<step>.pt of a run, earliest first; copies that somebody has made of them are none."""
    files = [path for path in Path(run_dir).glob("model_*.pt") if re.fullmatch(r"model_[0-9]+", path.stem)]
    return sorted(files, key=step_of)


def step_of(path):
    return int(path.stem.removeprefix("model_"))


def save_checkpoint(run_dir, step, data, keep_last, best):
    """Write run_dir/model_<step>.pt whole or not at all, keep the newest keep_last, and model_best.pt if `best`."""
    path = run_dir / f"model_{step:06d}.pt"
    part, copy = path.with_suffix(".part"), run_dir / "model_best.part"
    for left_over in (part, copy):  # of a kill; what is still another name of model_best.pt must not be written over
        left_over.unlink(missing_ok=True)
    try:
        with part.open("wb") as f:
            torch.save(data, f)
            f.flush()
            os.fsync(f.fileno())
        if best:
            try:
                os.link(part, copy)
            except OSError:  # a file system without links
                shutil.copyfile(part, copy)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # not from torch's writer, which names that file of its source where the disk is full
        raise OSError(f"checkpoint {path} cannot be written ({str(error).splitlines()[0][:80]}); is the disk full? Make room, "
                      "then --resume goes on from the one before, if there is one") from error  # fmt: skip
    if best:  # before the checkpoint, which says that no earlier step was better; after a kill in between, it is found again
        os.replace(copy, run_dir / "model_best.pt")
    os.replace(part, path)  # the name appears when the bytes are on disk; a kill leaves the older files as they were
    for old in checkpoint_files(run_dir)[:-keep_last]:
        old.unlink()
    return path


class Inert:
    """Stands for every foreign class in a .pt file: it holds what the file says of the object and can do nothing."""


def check_sums(path):
    """Raise ValueError if a byte of a .pt file is not what was written. torch.save puts a checksum beside each tensor, and
    torch.load does not look at it."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it is damaged: its checksum is another")


def read_checkpoint(path):
    """What torch.save wrote, with foreign classes as inert objects: tensors and plain values come in, no code runs."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}; `ls log/*/` shows those there are")
    try:
        check_sums(path)
        stubs = [(Inert, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=os.name == "posix")
    except pickle.UnpicklingError as error:
        raise ValueError(f"checkpoint {path} is refused: it holds more than tensors and plain values, or is older than torch "
                         "1.6; nothing in it was executed; save its state dict again with torch.save") from error  # fmt: skip
    except PermissionError as error:
        raise PermissionError(f"checkpoint {path} may not be read by you; change its permissions, or name another") from error
    except Exception as error:  # a broken zip, a truncated file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint {path} cannot be read ({first.partition('. ')[0][:100]}); move it away; then "
                         "the one before it is used, if there is one") from error  # fmt: skip


def has_checkpoint(run_dir):
    return bool(checkpoint_files(run_dir))


def newest_checkpoint(run_dir):
    """The last model_<step>.pt of a run. Raises FileNotFoundError if there is none."""
    files = checkpoint_files(run_dir)
    if not files:
        raise FileNotFoundError(f"no checkpoint in {run_dir}; `ls log/*/` shows all, `python train_gpt2.py` makes one")
    return files[-1]


def read_newest(run_dir):
    """(path, what read_checkpoint gives) of the newest checkpoint. A run that is going on may remove the one that was just
    found, as it has a newer one."""
    while True:
        path = newest_checkpoint(run_dir)
        try:
            return path, read_checkpoint(path)
        except (FileNotFoundError, ValueError):
            if path.exists():
                raise


def newest_step(run_dir):
    """How many steps the last checkpoint of a run has behind it. Raises FileNotFoundError if there is none."""
    return step_of(newest_checkpoint(run_dir))


def newest_run(log_dir):
    """The run folder whose checkpoint was written last."""
    times = {}
    for path in (path for run_dir in Path(log_dir).glob("*/") for path in checkpoint_files(run_dir)):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on has just taken it away
            times[path.parent] = max(times.get(path.parent, 0), path.stat().st_mtime)
    if not times:
        raise FileNotFoundError(f"no run with a checkpoint in {log_dir}/; `python train_gpt2.py` makes one")
    return max(times, key=times.get)
