"""A run's folder: opened and locked, resumed, and what is said of it at the beginning and the end.

    run_dir, reason = run_to_resume("log")                            # or run_to_resume("log", "name")
    model_config, cfg = read_config(run_dir, GPTConfig, TrainConfig)  # as the run was begun
    cfg.resume = True                                                 # without this, open_run refuses a run that is there
    step, best_val, measured = restore(run_dir, cfg, model, optimizer, loader, precision)
    open_run(run_dir, model_config, cfg, world, at_end)               # from here on it is this process's alone

LOG_DIR/RUN_NAME holds config.json (this file), model_<step>.pt (checkpoints.py; what is in them, this file), log.jsonl and
TensorBoard's events (metrics.py), loss.png (plot.py). Models, optimizers, loaders and the configurations themselves are
train_gpt2.py's: it imports this file, and hands over what is needed.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch

from lab.data.shards import read_json
from lab.device import quoted, script, this_python
from lab.optim.zero import ZeroAdamW
from lab.run.checkpoints import has_checkpoint, newest_checkpoint, newest_run, newest_step, read_newest
from lab.run.locks import only_writer

LOG_DIR = "log"  # where runs lie unless --log_dir says otherwise

# ----------------------------------------------------------------------------------------------------- 1. the folder


def open_run(run_dir, model_config, cfg, world, at_end):
    """Make the run folder, keep others out of it until at_end, an ExitStack, closes, and note the resolved configuration there.
    Raises OSError, on every process, if it cannot, or if a run is there already and cfg.resume is not set."""
    problem = ""
    if world.is_main:
        try:
            at_end.enter_context(only_writer(run_dir, f"{run_dir} is the folder of a run that is going on; stop that one first "
                                                      "(its processes may outlive a torchrun that was killed)"))  # fmt: skip
            saved = {"model": dataclasses.asdict(model_config), "train": dataclasses.asdict(cfg) | {"resume": False}}
            path = run_dir / "config.json"
            if not cfg.resume and ended_before_first_step(run_dir):
                path.unlink(missing_ok=True)
                for begun in (run_dir / "log.jsonl", *run_dir.glob("events.out.tfevents.*")):
                    begun.unlink()
            part = path.with_suffix(".part") if cfg.resume else path  # a full disk leaves the older one as it was
            with part.open("w" if cfg.resume else "x") as f:  # x: of two runs of one name, one is refused
                f.write(json.dumps(saved, indent=1) + "\n")
            os.replace(part, path)
        except FileExistsError:
            problem = f"{run_dir} is another run's already; pass --resume to continue it, or another --run_name"
            if not has_checkpoint(run_dir):
                problem = (f"{run_dir} is the folder of a run that has ended and saved nothing; delete it, or pass another "
                           "--run_name")  # fmt: skip
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            with contextlib.suppress(OSError):
                (run_dir / "config.part").unlink()
            problem = f"cannot write the run folder {run_dir}: {error.strerror or error}; choose another with --log_dir"
    problem = world.from_main(problem)
    if problem:
        raise OSError(problem)


def ended_before_first_step(run_dir):
    """True for a run, stopped or killed, that the same command may begin again as if it had never been."""
    try:
        kinds = {json.loads(line)["kind"] for line in (run_dir / "log.jsonl").read_text().splitlines()}
    except (OSError, ValueError, KeyError, TypeError):  # no log, or none of ours
        return False
    return "start" in kinds and not kinds & {"first_step", "train"} and not has_checkpoint(run_dir)


def read_config(run_dir, model_class, train_class):
    """The two configurations that open_run noted, as these dataclasses; a setting that is not there has its default. Raises
    ValueError for a file that is broken, or whose settings, or their values, are none of the dataclasses'."""
    path = run_dir / "config.json"
    try:
        saved = read_json(path, "model", "train")
    except ValueError as error:
        raise ValueError(f"{error}; or name another run with --run_name") from None
    fields = [field for config in (model_class, train_class) for field in dataclasses.fields(config)]
    right = {"model": {}, "train": {}} | {f.name: f.default for f in fields}
    choices = {f.name: get_args(f.type) for f in fields if get_origin(f.type) is Literal}
    settings = list(saved.items()) + [item for part in saved.values() if isinstance(part, dict) for item in part.items()]
    for name, value in settings:
        kind = type(right.get(name, value))
        rule = "" if type(value) is kind or (type(value), kind) == (int, float) else f"of type {kind.__name__}"
        if value not in choices.get(name, [value]):
            rule = f"one of {', '.join(choices[name])}"
        if rule:
            raise ValueError(f"{path} has {name}={json.dumps(value)}, which must be {rule}; mend it, or name another run with "
                             "--run_name")  # fmt: skip
    unknown = sorted((saved["model"].keys() | saved["train"].keys()) - right.keys())
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}, which this version does not know; go on with the version that made "
                         "it, or delete that from the file")  # fmt: skip
    return model_class(**saved["model"]), train_class(**saved["train"])


# ---------------------------------------------------------------------------------------------- 2. which run goes on


def run_to_resume(log_dir, run_name=""):
    """(folder, in words that it is resumed): of the run of this name, or without one of the run whose checkpoint was written
    last. Raises FileNotFoundError where there is nothing to resume."""
    run_dir = Path(log_dir) / run_name if run_name else newest_run(log_dir)
    if run_name and Path(run_name).name != run_name:
        raise FileNotFoundError(f"run_name={run_name} must be a plain name, without folders: --run_name {Path(run_name).name}")
    if not (run_dir / "config.json").exists():
        raise FileNotFoundError(f"{run_dir} holds no config.json to resume with; `ls {log_dir}` shows the runs there are")
    if not has_checkpoint(run_dir):
        again = "begin it again without --resume" if ended_before_first_step(run_dir) else (
            "if that run has ended, delete the folder and start again, or pass another --run_name")  # fmt: skip
        raise FileNotFoundError(f"{run_dir} has no checkpoint to resume from; {again}")
    reason = f"resumes {run_dir} after step {newest_step(run_dir)}"
    if not run_name:  # looked for by time alone: a run that was begun later and has saved nothing is passed over
        begun = [d for d in Path(log_dir).glob("*/") if (d / "config.json").exists() and not has_checkpoint(d)]
        since = newest_checkpoint(run_dir).stat().st_mtime
        later = [str(d) for d in begun if (d / "config.json").stat().st_mtime > since]
        reason += f" ({', '.join(later)}, begun later, saved no checkpoint)" * bool(later)
    return run_dir, reason


def say_what_differs(run_dir, model_config, cfg, get_lr):
    """Where a resumed run will not go on as it would have. get_lr(step, cfg): the schedule."""
    saved_model, saved = read_config(run_dir, type(model_config), type(cfg))
    before, now = vars(saved_model) | vars(saved), vars(model_config) | vars(cfg)
    expected = ("resume", "log_dir", "run_name", "max_steps")
    other = [f"{k} {v} -> {now[k]}" for k, v in before.items() if k not in expected and now[k] != v]
    print(f"note: not as this run went on before: {', '.join(other)}") if other else None
    step, then = newest_step(run_dir), dataclasses.replace(cfg, max_steps=saved.max_steps)
    if get_lr(step, cfg) != get_lr(step, then):
        without = f"without that {get_lr(step, then):.2e}"
        if step >= then.max_steps:  # there would have been no next step
            without = f"it had ended with {get_lr(step - 1, then):.2e}"
        print(f"note: max_steps {then.max_steps} -> {cfg.max_steps} gives the {cfg.schedule} schedule another end: the next "
              f"step's lr is {get_lr(step, cfg):.2e}, {without}")  # fmt: skip


# ---------------------------------------------------------------------------------------- 3. what a checkpoint holds


def state_to_save(step, best_val, measured, raw_model, optimizer, loader, precision, model_config, cfg):
    """All that the rest of the run depends on, as tensors and plain values. measured: whether the evaluations that were due at
    this step were made. All processes call it; with a ZeroAdamW, rank 0 has all of it, the others a part."""
    if isinstance(optimizer, ZeroAdamW):
        optimizer.complete_weights()
    return {
        "step": step, "best_val": best_val, "measured": measured,
        "model": raw_model.state_dict(), "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(), "batch_size": loader.batch_size, "scaler": precision.scaler.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None},
        "model_config": dataclasses.asdict(model_config), "train_config": dataclasses.asdict(cfg),
    }  # fmt: skip


def same_shape(source, theirs, ours):
    """Raise ValueError where the shapes of two models (dicts, from GPTConfig.shape) differ. source: whose `theirs` is."""
    different = [k for k in ours if theirs.get(k) != ours[k]]
    if different:
        pairs = ", ".join(f"{k}={theirs[k]} (here {ours[k]})" for k in different)
        ways = [" ".join(f"--{k} {theirs[k]}" for k in different if k != "vocab_size")]
        ways += ["--data with shards of its tokenizer"] * ("vocab_size" in different)  # other ids mean other words
        raise ValueError(f"{source} has another shape: {pairs}; pass {' and '.join(filter(None, ways))}")


def copy_weights(model, state):
    """Load a state dict of the same shape; the pad rows, which may be more or fewer, stay 0."""
    vocab_size = model.config.vocab_size
    with torch.no_grad():
        for name, p in model.state_dict().items():
            rows = vocab_size if name in ("lm_head.weight", "transformer.wte.weight") else p.size(0)
            p[:rows].copy_(state[name][:rows])


def restore(run_dir, cfg, raw_model, optimizer, loader, precision):
    """Put the newest checkpoint of a run back into place. Returns (step, best validation loss, whether that step was measured).
    Raises FileNotFoundError where there is none, ValueError where it does not fit the model, the optimizer or the data."""
    path, data = read_newest(run_dir)
    if not {"step", "model", "optimizer", "loader", "rng", "model_config"} <= data.keys():
        raise ValueError(f"{path} was not written by this trainer; start from its weights with --init_from {path}")
    same_shape(path, data["model_config"], raw_model.config.shape())
    rows, ours = data["model"]["transformer.wte.weight"].size(0), raw_model.config.padded_vocab_size
    if rows != ours:
        raise ValueError(f"vocab_multiple={raw_model.config.vocab_multiple} makes {ours} rows of the vocabulary, and the state "
                         f"of the optimizer in {path} has {rows}; leave --vocab_multiple out")  # fmt: skip
    if data["train_config"]["optimizer"] != cfg.optimizer:
        raise ValueError(f"optimizer={cfg.optimizer} cannot go on from {path}, which {data['train_config']['optimizer']} made; "
                         f"leave --optimizer out, or begin a new run with --init_from {path}")  # fmt: skip
    if Path(data["train_config"]["data"]).resolve() == Path(cfg.data).resolve():
        loader.keep_to(data["loader"])
    copy_weights(raw_model, data["model"])
    parts = data["optimizer"].get("parts", [data["optimizer"]])  # Muon's state has two
    for group, ours in zip((group for part in parts for group in part["param_groups"]), optimizer.param_groups):
        group |= {k: v for k, v in ours.items() if k != "params"}  # the run before may have had other flags, another device
    optimizer.load_state_dict(data["optimizer"])
    loader.load_state_dict(data["loader"])
    before = data.get("batch_size", loader.batch_size)  # not what is found to fit now: other sums round otherwise
    if not cfg.batch_size and before < loader.batch_size and loader.step_sequences % (before * loader.world_size) == 0:
        loader.batch_size, loader.grad_accum_steps = before, loader.step_sequences // (before * loader.world_size)
    precision.scaler.load_state_dict(data["scaler"]) if data["scaler"] and precision.scaler.is_enabled() else None
    torch.set_rng_state(data["rng"]["cpu"])
    if data["rng"]["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(data["rng"]["cuda"])
    return data["step"], data["best_val"], data.get("measured", True)


# ------------------------------------------------------------------------------------------------ 4. what to do next


def resume_command(run_dir):
    """What to type to go on with a run."""
    there = f"--log_dir {quoted(str(run_dir.parent))} " if str(run_dir.parent) != LOG_DIR else ""
    return f"{this_python()} {script('train_gpt2.py')} --resume {there}--run_name {quoted(run_dir.name)}"


def farewell(run_dir, cfg):
    """Draw the curve, and say where everything is and what to do next."""
    from lab.tools import plot

    if not has_checkpoint(run_dir):
        return  # stopped before there was anything to go on from
    plot.loss_curve([run_dir], run_dir / "loss.png")
    python, folder, all_runs = this_python(), quoted(str(run_dir)), quoted(str(run_dir.parent))
    measured = plot.read_log(run_dir)["end"][-1]["reason"] == "done"  # a signal may come after the last step
    done = measured and newest_step(run_dir) >= cfg.max_steps
    kept = " --ckpt_every N" * (not cfg.ckpt_every)  # of what was trained just now, nothing is there
    curve = " loss.png (the curve)," * (run_dir / "loss.png").exists()
    print(f"\n{run_dir}/ holds log.jsonl (every number),{curve} TensorBoard events and the checkpoints. Next:\n"
          f"  ask it for more         {python} {script('sample.py')} --model {folder}\n"
          f"  see all of it, a page   {python} {script('report.py')} {folder}\n"
          f"  compare runs            {python} -m tensorboard.main --logdir {all_runs}\n"
          f"  {'train it further' if done else 'finish it':22}  {resume_command(run_dir)}{' --max_steps N' if done else kept}")
