"""Checkpoint files: written whole or not at all, read without running code in them, found by name."""

import functools
import os
import pickle
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from lab import optim
from lab.cli import progress, say
from lab.device import Underway
from lab.files import Damaged, check_keys, first_line, reading, whole_file, writing


def checkpoint_files(run_dir):
    """The model_<step>.pt of a run, earliest first, without copies that somebody has made."""
    files = [p for p in Path(run_dir).glob("model_*.pt") if re.fullmatch(r"model_[0-9]+", p.stem)]
    return sorted(files, key=step_of)


def step_of(path):
    return int(path.stem.removeprefix("model_"))


def save(run_dir, step, state, keep_last):
    """The path of run_dir/model_<step>.pt, written whole or not at all. The newest keep_last stay."""
    path = Path(run_dir) / f"model_{step:06d}.pt"
    write(path, state)
    for old in checkpoint_files(run_dir)[:-keep_last]:
        old.unlink(missing_ok=True)
    return path


def write(path, state):
    """torch.save, whole or not at all. Raises UserError where the system refuses."""
    with whole_file(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer covers up what the system has said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def link_best(run_dir, step):
    """Give the checkpoint of this step a second name, model_best.pt."""
    path, part = Path(run_dir) / f"model_{step:06d}.pt", Path(run_dir) / "model_best.part"
    with writing(part):
        part.unlink(missing_ok=True)
        try:
            os.link(path, part)
        except OSError:  # a file system without links
            shutil.copyfile(path, part)
        os.replace(part, path.with_name("model_best.pt"))
        part.unlink(missing_ok=True)  # it stays where both were names of one file already


class Writer:
    """A thread that writes the checkpoints of a run, one after the other. In the background it
    writes a copy of the state, and training waits for the copy alone. What went wrong is raised at
    the next check(), save() or finish()."""

    def __init__(self, run_dir, keep_last, background, device):
        self.run_dir, self.keep_last = run_dir, keep_last
        self.background, self.device = background, device
        self.thread, self.jobs = ThreadPoolExecutor(1), []

    def save(self, step, state):
        """Begin this checkpoint when the one before is on disk. Returns what finish returns."""
        noted = self.finish()
        state, copies = self.copied(state) if self.background else (state, [])
        self.jobs.append(self.thread.submit(self.write, step, state, copies))
        return noted if self.background else self.finish()

    def link_best(self, step):
        """Link the checkpoint of this step as the best, once it is on disk."""
        self.jobs.append(self.thread.submit(link_best, self.run_dir, step))

    def check(self):
        """Raise what went wrong, if something has by now."""
        for job in self.jobs:
            if job.done():
                job.result()

    def finish(self):
        """Wait until all is on disk. Returns what the log notes of a new checkpoint, or None."""
        wait(self.jobs)
        done, self.jobs = self.jobs, []
        return next(filter(None, [job.result() for job in done]), None)

    def write(self, step, state, copies):
        for each in copies:
            each.arrive()
        return {"step": step, "path": save(self.run_dir, step, state, self.keep_last).name}

    def copied(self, state):
        """The state in host memory that no update writes to, and its tensors as Underway. A tensor
        with two names, such as the tied head, is copied once."""
        copies = {}

        def twin(tensor):
            if self.device.type == "cuda" and not tensor.is_cuda and tensor.dim():
                return tensor  # no update writes here: it was gathered from all processes
            place = tensor.data_ptr(), tensor.shape
            copies[place] = copies.get(place) or Underway(tensor)
            return copies[place].copy

        return tree_map_only(torch.Tensor, twin, state), copies.values()


class Inert:
    """Stands for every foreign class in a .pt file: it holds what the file says of the object."""


def read_checkpoint(path):
    """What torch.save wrote, with foreign classes as inert objects: tensors and plain values come
    in, no code runs. Raises UserError for what cannot be read."""
    with reading(path, "checkpoint", "name another: `ls log` shows the runs"):
        check_sums(path, os.stat(path).st_mtime_ns)
        try:
            stubs = [(Inert, n) for n in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
            with torch.serialization.safe_globals(stubs):
                return torch.load(path, "cpu", weights_only=True, mmap=os.name == "posix")
        except pickle.UnpicklingError as error:
            raise Damaged(
                f"checkpoint {path} is refused: it holds more than tensors and plain values, or is "
                "older than torch 1.6; nothing in it was executed; save its state dict alone"
            ) from error


@functools.lru_cache
def check_sums(path, changed):
    """Raise ValueError where a checksum, which torch.save notes and torch.load ignores, is another:
    once for a file, last changed at `changed`, as several ask for it and 1558M's takes its time."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            archive.filelist = progress(archive.filelist, f"checking {path}", "tensor")
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} in it is another")


def read_newest(run_dir):
    """(path, what read_checkpoint gives) of the newest checkpoint that is whole, in a run that has
    one; rank 0 says which are passed over. Raises Damaged where none is whole."""
    files = checkpoint_files(run_dir)
    while True:
        path = files.pop()
        try:
            return path, read_checkpoint(path)
        except Damaged as error:
            if not files:
                raise
            if os.environ.get("RANK", "0") == "0":
                what = first_line(error.__cause__)
                say(f"checkpoint {path} is damaged ({what}): {files[-1].name} is tried")


def restore(run, state):
    """Have `run` go on from `state`, which read_newest gave. Raises UserError if it does not fit."""
    way_out = "an older version's goes on with that version, another's weights with --init_from"
    with reading(run.folder, "checkpoint in", way_out):
        check_state(run, state)
    run.load_state_dict(state)


def check_state(run, state):
    """Raise where `state`, from a file, has not the names, types and shapes that load_state_dict
    takes: whatever that raises is a bug of ours, then."""
    check_keys(state, step=int, best_val=(int, float))
    params = run.raw_model.named_parameters(remove_duplicate=False)
    optim.check_tensors(state["model"], {name: p.shape for name, p in params})
    optim.check_state(run.optimizer, state["optimizer"])
    for name, least in dict(position=0, tokens=1, begin=0).items():
        n = state["loader"][name]
        if type(n) is not int or not least <= n < 2**48:  # positions are int64
            raise TypeError(f"{name} of the loader is {str(n)[:40]}")
    if state["scaler"]:  # of fp16
        names = run.precision.scaler.state_dict()
        check_keys(state["scaler"], **dict.fromkeys(names, (int, float)))
    torch.Generator().set_state(state["rng"]["cpu"])
    if state["rng"]["cuda"] is not None and run.world.device.type == "cuda":
        torch.Generator("cuda").set_state(state["rng"]["cuda"])
