"""Repeat the step of a gradient spike, to see whether data and weights alone cause it.

    python -m lab replay log/RUN/spike_000123.json

HealthMonitor (lab/trainer/health.py) writes that file when the gradient norm jumps.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import Positional, arg

from lab.cli import UserError, parse_args
from lab.config_file import read_config
from lab.data.tokenizers import printable
from lab.distributed import World
from lab.files import read_errors, read_json
from lab.hardware import check_mps_sums
from lab.program import LEGACY_PROGRAMS, find_class
from lab.trainer.checkpoint import check_checkpoint, checkpoint_files, read_checkpoint, step_of

REPLAY_HINT = "pass a spike_<step>.json of a run directory"
MAX_ROWS = 12  # printed for parameters, and for sequences


def replay(
    file: Annotated[Path, Positional, arg(metavar="FILE")], device: str = "auto",
    precision: Literal["", "bf16", "fp16", "tf32", "fp32"] = "", compile: bool = False,
) -> None:  # fmt: skip
    """Repeat the step of a gradient spike, and compare the numbers with the recorded ones. On the same
    CPU and in one process they are equal.

    Args:
        file: spike_<step>.json, which a run wrote in its directory
        device: cuda, mps or cpu; auto is the best one available
        precision: bf16, fp16, tf32 or fp32; default: that of the run
        compile: use torch.compile
    """
    file = file.with_suffix(".json") if file.suffix == ".pt" else file
    spike = read_spike(file)
    program = spike["program"]
    classes = find_class(program["config"], file), find_class(program["train_config"], file)
    model_config, cfg, _ = read_config(file.parent, *classes, name=file.name)
    cfg.validate(model_config)
    if not 1 <= spike["step"] <= cfg.max_steps:
        raise UserError(
            f"{file} has step={spike['step']}, but the run has {cfg.max_steps} steps; {REPLAY_HINT}"
        )
    world = World(device)
    fp8 = cfg.fp8 if world.device.type == "cuda" else "off"
    cfg = dataclasses.replace(
        cfg, fp8=fp8, device=device, precision=precision or cfg.precision, compile=compile, timing=False,
        batch_size=spike["batch_size"],
    )  # fmt: skip
    check_mps_sums(world.device, model_config.padded_vocab_size, cfg.batch_size * cfg.seq_len)
    trainer, start = trainer_before(file, spike, model_config, cfg, world)
    where = f"{world.device.type}, {trainer.precision.name}"
    print(f"{file.parent} before step {spike['step']}, from {start}; on {where}", flush=True)
    show(spike, *repeat_step(trainer))


def read_spike(file: Path) -> dict[str, Any]:
    """The dict written by HealthMonitor.report_spike; null stands for a number that is not finite."""
    number = (float, int, type(None))
    types = dict(step=int, norm=number, usual=number, losses=list, norms=dict, sequences=list)
    spike = read_json(file, REPLAY_HINT, batch_size=int, skipped=bool, program=(str, dict), **types)
    with read_errors(file, "file", REPLAY_HINT):
        sequences = [{"at": str(s["at"]), "text": s.get("text", "")} for s in spike["sequences"]]
        spike["sequences"] = [s | {"text": printable(s["text"][:60])} for s in sequences]
        spike["losses"] = list(map(to_float, spike["losses"]))
        spike["norms"] = {name: to_float(norm) for name, norm in spike["norms"].items()}
        spike |= {name: to_float(spike[name]) for name in ("norm", "usual")}
    if isinstance(spike["program"], str):
        if spike["program"] not in LEGACY_PROGRAMS:
            raise UserError(f"{file} has an unknown program, {spike['program']}; {REPLAY_HINT}")
        spike["program"] = LEGACY_PROGRAMS[spike["program"]]
    names = ("trainer", "config", "train_config")
    if not all(isinstance(spike["program"].get(name), str) for name in names):
        raise UserError(f"{file} does not record the classes of its program; {REPLAY_HINT}")
    return spike


def to_float(value: Any) -> float:
    return math.nan if value is None else float(value)


def trainer_before(
    file: Path, spike: dict, model_config: Any, cfg: Any, world: World
) -> tuple[Any, str]:
    """(the trainer in its state before the step of a spike, the source of that state)."""
    trainer_class = find_class(spike["program"]["trainer"], file)
    build = sys.modules[trainer_class.__module__].build_trainer
    # a program that only subclasses Trainer uses build_trainer of train_gpt2.py
    own = build.__module__ == trainer_class.__module__
    kwargs = {} if own else {"trainer_class": trainer_class}
    snapshot, last = file.with_suffix(".pt"), spike["step"] - 1
    if spike.get("weights") and snapshot.exists():
        cfg = dataclasses.replace(cfg, on_spike="continue", init_from="")
        trainer = build(model_config, cfg, world, **kwargs)
        new = trainer.state_dict()
        with read_errors(snapshot, "snapshot", "move it away to start from a checkpoint instead"):
            state = read_checkpoint(snapshot)
            model = new["model"] | state["model"]  # a snapshot contains the tied matrix only once
            state = new | state | {"model": model, "step": last}
            check_checkpoint(trainer, state)
        trainer.load_state_dict(state)
        return trainer, snapshot.name
    files = [path for path in checkpoint_files(file.parent) if step_of(path) <= last]
    # skip the updates that the run skipped
    cfg = dataclasses.replace(cfg, on_spike="skip" if spike["skipped"] else "continue")
    state = read_checkpoint(files[-1]) if files else None
    trainer = build(model_config, cfg, world, state, **kwargs)
    start = files[-1].name if files else "the start of the run"
    if trainer.step < last:
        print(f"repeating {last - trainer.step} updates from {start}", flush=True)
    while trainer.step < last:
        trainer.train_step()
    return trainer, start


def repeat_step(trainer: Any) -> tuple[list[float], float, dict[str, float], list[float]]:
    """Do the next update. Returns (losses of the micro-steps, gradient norm, norm of each
    parameter's gradient, mean loss of each sequence)."""
    loader, each = trainer.loader, []
    if hasattr(trainer, "step_tokens"):  # speedrun.py: the size of a step changes
        loader.set_total_batch_size(trainer.step_tokens(trainer.step))
    with torch.no_grad(), trainer.precision.autocast():
        for micro_step in range(loader.grad_accum_steps):
            x, y, _ = loader.micro_batch(loader.next_sequence, micro_step)
            for row in torch.stack([x, y], 1).to(trainer.world.device):  # (2, T)
                each.append(trainer.raw_model(*row[:, None])[1].item())
    losses, norm = trainer.train_step()
    param_norms = trainer.health.stats[3:].tolist()
    return losses.tolist(), norm.item(), dict(zip(trainer.health.param_names, param_norms)), each


def largest_first(value: float) -> float:
    """A sort key for descending order, with numbers that are not finite first."""
    return -value if math.isfinite(value) else -math.inf


def show(spike: dict, losses: list, norm: float, norms: dict, each: list) -> None:
    """Print the recorded numbers, the replayed ones, and whether the spike was reproduced."""
    print(f"\n{'':44}   recorded   replayed")
    print(f"{'loss':44} {sum(spike['losses']):10.6g} {sum(losses):10.6g}")
    print(f"{'gradient norm':44} {spike['norm']:10.6g} {norm:10.6g}")
    largest = sorted(norms, key=lambda name: largest_first((spike["norms"] or norms).get(name, 0)))
    for name in largest[:MAX_ROWS]:
        recorded = f"{spike['norms'][name]:10.6g}" if name in spike["norms"] else f"{'-':>10}"
        print(f"  {name:42} {recorded} {norms[name]:10.6g}")
    if len(largest) > MAX_ROWS:
        print(f"  and {len(largest) - MAX_ROWS} more in the file")
    print("\nloss of each sequence, largest first")
    worst = sorted(
        zip(each, spike["sequences"], strict=True), key=lambda pair: largest_first(pair[0])
    )
    for loss, sequence in worst[:MAX_ROWS]:
        text = json.dumps(sequence["text"], ensure_ascii=False)
        print(f"{loss:10.4f}  {sequence['at']:32} {text}")
    if math.isfinite(spike["norm"]):
        # on a log scale, closer to the spike than to the median
        reproduced = norm * norm > spike["norm"] * spike["usual"]
    else:
        reproduced = not math.isfinite(norm)
    result = (
        "reproduced" if reproduced else "not reproduced, so data and weights alone don't cause it"
    )
    print(f"\nthe spike was {result}; the median gradient norm is {spike['usual']:.4g}")


def main(argv: list[str]) -> None:
    parse_args(replay, argv)
