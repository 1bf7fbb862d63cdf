"""A run's folder, LOG_DIR/RUN_NAME: who may write it, its settings, what is said at the end.

It holds config.json (here), model_<step>.pt (checkpoints.py), log.jsonl and TensorBoard's events
(log.py), and loss.png (lab.tools.plot).
"""

import contextlib
import dataclasses
import inspect
import json
from pathlib import Path
from typing import get_args

from lab.cli import UserError, program, quoted
from lab.files import only_writer, read_json, write_whole
from lab.run.checkpoints import checkpoint_files, step_of

# what a run and a checkpoint call their program: the file, whose Run says its model, and PRESETS its
# settings
PROGRAMS = {"gpt2": "train_gpt2", "bert": "bert", "speedrun": "speedrun"}

AT_LEAST_1 = (
    "n_layer", "n_head", "n_embd", "block_size", "segments", "vocab_multiple", "total_batch_size",
    "seq_len", "max_steps", "log_every", "keep_last", "timeout",
)  # fmt: skip
# more layers or tokens would take hours, or overflow what takes them
AT_MOST = {"n_layer": 2**12, "total_batch_size": 2**28, "seed": 2**32 - 1, "timeout": 2**31}


@contextlib.contextmanager
def opened(run):
    """While this lasts, the folder of `run` is this run's alone, and its settings are noted in it.
    Raises UserError where another run is there, or where it cannot be written."""

    def take():
        busy = f"{run.folder} is the folder of a run that is going on; stop that one first "
        busy += "(its processes may outlive a torchrun that was killed)"
        at_end.enter_context(only_writer(run.folder, busy))
        note_settings(run)
        for path in run.folder.glob("*.part"):  # a kill while it was written
            path.unlink()
        for path in checkpoint_files(run.folder):
            if step_of(path) > run.step:  # damaged: it would count among the newest, which are kept
                path.rename(path.with_suffix(".damaged"))
        at_end.callback(run.writer.finish)  # also where an error ends the run

    with contextlib.ExitStack() as at_end:
        run.world.on_main(take)
        yield


def note_settings(run):
    path = run.folder / "config.json"
    if checkpoint_files(run.folder) and not run.cfg.resume:
        raise UserError(
            f"{run.folder} is another run's already; pass --resume to continue it, or another --run_name"
        )
    if path.exists() and not run.cfg.resume:
        if has_trained(run.folder):
            run_to_resume(run.folder.parent, run.folder.name)  # raises, with what can be done
        for begun in (run.folder / "log.jsonl", *run.folder.glob("events.out.tfevents.*")):
            begun.unlink(missing_ok=True)  # it ended before its first step: begun again
    write_whole(path, json.dumps(settings_of(run), indent=1).encode() + b"\n")


def settings_of(run):
    """What read_config reads: the program and its two configurations."""
    model, train = dataclasses.asdict(run.raw_model.config), dataclasses.asdict(run.cfg)
    return {"program": run.program, "model": model, "train": train | {"resume": False}}


def has_trained(run_dir):
    """Whether the log of a run has an update."""
    with contextlib.suppress(OSError):
        return '"kind": "first_step"' in (run_dir / "log.jsonl").read_text(errors="replace")
    return False


def read_config(run_dir, model_class, train_class, name="config.json"):
    """(model config, run config, names passed over) of what note_settings wrote.

    A setting that is not there has its default; one that this version does not know is passed over.
    Raises UserError for a file that is broken, or for a value that does not fit.
    """
    path = Path(run_dir) / name
    saved = read_json(path, "mend it, or name another run with --run_name", model=dict, train=dict)
    model, unknown = known_settings(path, saved["model"], model_class)
    train, more_unknown = known_settings(path, saved["train"], train_class)
    return model_class(**model), train_class(**train), unknown + more_unknown


def known_settings(path, saved, config_class):
    """({name: value} of the saved settings that this dataclass has, names of the others)."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    known = {name: value for name, value in saved.items() if name in fields}
    for name, value in known.items():
        check_value(path, fields[name], value)
        if type(fields[name].default) is float:
            known[name] = float(value)  # torch does not take 1 for 1.0 everywhere
    return known, [name for name in saved if name not in fields]


def smallest(name):
    """The smallest value of a setting that is a number."""
    return 1 if name in AT_LEAST_1 else 0


def largest(name):
    """The largest value of a setting that is a number; torch fails at 2**63."""
    return AT_MOST.get(name, 2**48)


def check_value(path, field, value):
    """Raise UserError where a value from a file does not fit this field of a dataclass."""
    kind, choices, least = type(field.default), get_args(field.type), smallest(field.name)
    most = largest(field.name)
    if choices and value not in choices:
        rule = f"one of {', '.join(choices)}"
    elif type(value) is not kind and (type(value), kind) != (int, float):
        rule = f"of type {kind.__name__}"
    elif isinstance(value, int) and not least <= value <= most:
        rule = f"from {least} to {most}"
    else:
        return
    text = json.dumps(value, default=repr)[:80]
    raise UserError(
        f"{path} has {field.name}={text}, which must be {rule}; mend it, or name another run"
    )


def program_of(run_dir):
    """What the config.json of a run calls its program; the oldest and other people's are GPT-2's."""
    with contextlib.suppress(UserError):
        return str(read_json(run_dir / "config.json").get("program", "gpt2"))
    return "gpt2"


def newest_run(log_dir, *programs):
    """The folder of that run of these programs whose checkpoint was written last."""
    runs = [run_dir for run_dir in Path(log_dir).glob("*/") if program_of(run_dir) in programs]
    files = [path for run_dir in runs for path in checkpoint_files(run_dir)]
    if not files:
        file = f"{PROGRAMS[programs[0]]}.py"
        raise UserError(
            f"no run of {file} with a checkpoint in {log_dir}/; `{program(file)}` makes one"
        )
    return max(files, key=lambda path: path.stat().st_mtime).parent


def run_to_resume(log_dir, run_name="", made_by="gpt2"):
    """The folder of the run of this name, or of the program's that saved last. Raises UserError where
    there is nothing to resume."""
    if (name := Path(run_name).name) != run_name:
        raise UserError(f"run_name={run_name} is a path; pass --log_dir FOLDER --run_name {name}")
    run_dir = Path(log_dir) / run_name if run_name else newest_run(log_dir, made_by)
    if not run_name:
        saved = checkpoint_files(run_dir)[-1].stat().st_mtime
        for path in Path(log_dir).glob("*/config.json"):
            begun, there = path.stat().st_mtime > saved, path.parent
            if begun and program_of(there) == made_by and not checkpoint_files(there):
                raise UserError(
                    f"{there} is newer and has no checkpoint yet: begin it again without --resume, "
                    f"or go on with an older one by --run_name {quoted(run_dir.name)}"
                )
    if not (run_dir / "config.json").exists():
        raise UserError(
            f"{run_dir} holds no config.json to resume with; `ls {log_dir}` shows the runs there are"
        )
    if not checkpoint_files(run_dir):
        best, again = run_dir / "model_best.pt", "begin it again without --resume"
        if best.exists():
            again = f"--init_from {best} begins with its best"
        elif has_trained(run_dir):
            again = (
                "wait for one if it is going on; else delete the folder, or pass another --run_name"
            )
        raise UserError(f"{run_dir} has no checkpoint to resume from; {again}")
    return run_dir


def is_finished(run_dir):
    """Whether the log of a run ends with its last measurement."""
    try:
        record = json.loads((run_dir / "log.jsonl").read_text(errors="replace").splitlines()[-1])
        return record["kind"] == "end" and record["reason"] == "done"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # no log, or not ours
        return False


def farewell(run, stopped):
    """Draw the curve, and say where everything is and what to do next. The other processes wait:
    torchrun kills all as soon as one has ended with a status that is not 0, such as 75."""
    if run.world.is_main:
        say_farewell(run, stopped)
    run.world.barrier()


def say_farewell(run, stopped):
    folder, say = run.folder, run.world.say
    file = Path(inspect.getfile(type(run))).name  # where the class of such runs stands
    there = "" if str(folder.parent) == "log" else f"--log_dir {quoted(folder.parent)} "
    again = f"{program(file)} --resume {there}--run_name {quoted(folder.name)}"
    if stopped and not run.step:
        say(f"{stopped}: nothing to save yet; the same command begins again")
        return
    if stopped:
        under = ", under torchrun as before" if run.world.distributed else ""
        say(
            f"{stopped}: saved after step {run.step} in {folder}; `{again}`{under} goes on from there"
        )
    if run.saved < run.step:
        say(f"{folder}: ckpt_every=0, so nothing is saved of the steps after {run.saved}")
    if not checkpoint_files(folder):
        return
    from lab.tools import plot

    plot.loss_curve([folder], folder / "loss.png")
    name, curve = quoted(folder), " loss.png (the curve)," * (folder / "loss.png").exists()
    best = f"; model_best.pt has the lowest validation loss, {run.best_val:.4f}"
    best *= (folder / "model_best.pt").exists()
    further, more = ("finish it", "") if stopped else ("train it further", " --max_steps N")
    asking = f"ask it for more         {program('sample.py')} --model {name}"
    if not hasattr(run.raw_model, "generate"):
        asking = f"use it in transformers  {program('lab export')} {name} --out FOLDER"
    say(
        f"\n{folder}/ holds log.jsonl (every number),{curve} TensorBoard events and the checkpoints"
        f"{best}. Next:\n"
        f"  {asking}\n"
        f"  see all of it, a page   {program('lab report')} {name}\n"
        f"  compare it with another {program('lab report')} {name} {quoted(folder.parent / 'OTHER')}\n"
        f"  {further:22}  {again}{more}"
    )
