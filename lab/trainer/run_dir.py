"""A run's directory, LOG_DIR/RUN_NAME: its lock, its config.json, and finding runs.

It contains config.json (this file), model_<step>.pt (checkpoint.py), log.jsonl and TensorBoard events
(loggers.py), spike_<step>.json (health.py) and loss.png (lab.tools.plot).
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.cli import UserError, command_for, shell_quote
from lab.data.tokenizers import TOKENIZER_FILE
from lab.files import CorruptFileError, atomic_write, dir_lock, read_errors, read_json, read_lenient
from lab.program import LEGACY_PROGRAMS, describe_program
from lab.trainer.checkpoint import checkpoint_files, read_checkpoint, step_of


@contextlib.contextmanager
def lock_run_dir(trainer) -> Iterator[None]:
    """Context manager: lock the run directory, and write the config there.

    Raises UserError if another process uses the directory or it cannot be written.
    """

    def enter():
        in_use = f"{trainer.run_dir} is in use by a run that is still running; stop that one first "
        in_use += (
            "(its processes may outlive a torchrun that was killed), or pass another --run_name"
        )
        stack.enter_context(dir_lock(trainer.run_dir, in_use))
        write_config(trainer)
        for path in trainer.run_dir.glob("*.part"):  # left by a process that was killed
            path.unlink()
        for path in checkpoint_files(trainer.run_dir):
            if step_of(path) > trainer.step:
                set_aside(path)
        stack.callback(trainer.checkpointer.finish)  # even if an error ends the run

    with contextlib.ExitStack() as stack:
        trainer.world.run_on_rank0(enter)
        yield


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, which would count towards keep_last. Raises UserError if it is intact."""
    try:
        read_checkpoint(path)
    except CorruptFileError:
        path.rename(path.with_suffix(".damaged"))
    else:  # saved between reading the newest checkpoint and locking the directory
        raise UserError(f"the run has saved {path} meanwhile; start the same command again")


def write_config(trainer) -> None:
    """Write config.json, and a copy of the data's tokenizer file if it has one."""
    run_dir, path = trainer.run_dir, trainer.run_dir / "config.json"
    if checkpoint_files(run_dir) and not trainer.cfg.resume:
        raise UserError(
            f"{run_dir} belongs to another run; pass --resume to continue it, or another --run_name"
        )
    if path.exists() and not trainer.cfg.resume:
        if has_steps(run_dir):
            require_resumable(run_dir)
        for file in (run_dir / "log.jsonl", *run_dir.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)  # that run ended before its first step
    atomic_write(path, json.dumps(config_dict(trainer), indent=1).encode() + b"\n")
    tokenizer = Path(trainer.cfg.data, TOKENIZER_FILE)
    if tokenizer.exists():  # the model cannot be used without it
        with read_errors(tokenizer, "tokenizer", "build the data again"):
            atomic_write(run_dir / TOKENIZER_FILE, tokenizer.read_bytes())


def config_dict(trainer) -> dict:
    """The contents of config.json: both configs, and the program that made the run."""
    model, train = dataclasses.asdict(trainer.raw_model.config), dataclasses.asdict(trainer.cfg)
    return {
        "program": describe_program(trainer),
        "generates_text": hasattr(trainer.raw_model, "generate"),
        "model": model, "train": train | {"resume": False},
    }  # fmt: skip


def program_of(run_dir: str | Path) -> dict:
    """The program recorded in config.json: {"trainer", "model", "config", "generates_text"}.

    Runs of unknown origin count as train_gpt2.py's.
    """
    found: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        found = read_json(Path(run_dir) / "config.json")
    program = found.get("program", "gpt2")
    if not isinstance(program, dict):
        name = program if program in list(LEGACY_PROGRAMS) else "gpt2"
        return LEGACY_PROGRAMS[name] | {"generates_text": name != "bert"}
    return {
        key: str(program.get(key, "")) for key in ("trainer", "model", "config", "train_config")
    } | {"generates_text": found.get("generates_text", True)}


def has_steps(run_dir: Path) -> bool:
    """Whether the run's log contains at least one update."""
    return '"kind": "first_step"' in read_lenient(run_dir / "log.jsonl")


def last_written(run_dir: Path) -> float:
    """Time of the last write to a run's log or checkpoints, in seconds since the epoch; 0 if there are
    none."""
    times = [0.0]
    for path in (run_dir / "log.jsonl", *checkpoint_files(run_dir)):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def newest_first(log_dir: str | Path) -> list[Path]:
    """The run directories in log_dir, the most recently written first. sample.py uses the first one with
    a checkpoint, lab report the first one with a log."""
    return sorted(Path(log_dir).glob("*/"), key=last_written, reverse=True)


def newest_run(log_dir: str | Path, accept: Callable[[dict], bool], program: str = "") -> Path:
    """The newest run that has a checkpoint and for which accept(program_of(run)) is true. Raises
    UserError if there is none; program: the file that creates such runs."""
    program = program or "train_gpt2.py"
    for run_dir in newest_first(log_dir):
        if checkpoint_files(run_dir) and accept(program_of(run_dir)):
            return run_dir
    raise UserError(
        f"no run of {program} with a checkpoint in {log_dir}/; `{command_for(program)}` creates one"
    )


def find_run_to_resume(log_dir: str | Path, run_name: str, trainer: str) -> Path:
    """The directory of the named run or, without a name, of the newest run made by `trainer` (a
    class_path). Raises UserError if there is nothing to resume."""
    if (name := Path(run_name).name) != run_name:
        folder = Path(run_name).parent
        where = "" if folder == Path(log_dir) else f"--log_dir {shell_quote(folder)} "
        raise UserError(
            f"run_name={run_name} is a path; pass {where}--run_name {shell_quote(name)}"
        )
    ours = lambda program: program["trainer"] == trainer  # noqa: E731
    file = trainer.rpartition(":")[0]
    run_dir = Path(log_dir) / run_name if run_name else newest_run(log_dir, ours, file)
    if not run_name:
        for other in Path(log_dir).glob("*/"):
            started = 0.0
            with contextlib.suppress(OSError):  # no config.json
                started = (other / "config.json").stat().st_mtime
            newer = started > last_written(run_dir)
            if newer and ours(program_of(other)) and not checkpoint_files(other):
                raise UserError(
                    f"{other} is newer and has no checkpoint yet: {no_checkpoint_hint(other)}, or resume "
                    f"the newest run that has one with --run_name {shell_quote(run_dir.name)}"
                )
    require_resumable(run_dir)
    return run_dir


def require_resumable(run_dir: Path) -> None:
    """Raise UserError, which says what to do instead, if a run has nothing to resume from."""
    if not (run_dir / "config.json").exists():
        raise UserError(
            f"{run_dir} has no config.json to resume from; `ls {run_dir.parent}` lists the runs"
        )
    if checkpoint_files(run_dir):
        return
    raise UserError(f"{run_dir} has no checkpoint to resume from; {no_checkpoint_hint(run_dir)}")


def no_checkpoint_hint(run_dir: Path) -> str:
    """What to do with a run that has no checkpoint."""
    best = run_dir / "model_best.pt"
    if best.exists():
        return f"--init_from {best} starts from its best weights"
    if has_steps(run_dir):
        return (
            "wait for one if it is still running; else delete the folder or pass another --run_name"
        )
    return "start it again without --resume"


def is_finished(run_dir: Path) -> bool:
    """Whether the run completed its last step and evaluation, according to its log."""
    try:
        record = json.loads(read_lenient(run_dir / "log.jsonl").splitlines()[-1])
        return record["kind"] == "end" and record["reason"] == "done"
    except (ValueError, LookupError, TypeError, RecursionError):  # no valid log
        return False
