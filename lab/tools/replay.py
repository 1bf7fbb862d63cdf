"""Make the step of a spike again: python -m lab replay log/RUN/spike_000123.json."""

import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import Positional, arg

from lab.cli import UserError, parse
from lab.data.tokenizers import printable
from lab.files import read_json, reading
from lab.models import PROGRAMS, config_classes
from lab.run import settings
from lab.run.checkpoints import check_state, checkpoint_files, read_checkpoint, step_of
from lab.run.folder import read_config
from lab.run.spikes import Spikes
from lab.world import World

WAY_OUT = "name a spike_<step>.json in the folder of a run"
SHOWN = 12  # of the parameters, and of the sequences


def replay(
    file: Annotated[Path, Positional, arg(metavar="FILE")], device: str = "auto",
    precision: str = "", compile: bool = False,
):  # fmt: skip
    """Make the step of a spike again, forward and backward, and compare its numbers with those that
    the run noted. On the same CPU, in one process, they are the same.

    Args:
        file: spike_<step>.json, which a run has left in its folder
        device: cuda, mps or cpu; auto is the best there is
        precision: another than the run's: bf16, fp16, tf32 or fp32
        compile: with torch.compile, as the run may have been
    """
    file = file.with_suffix(".json") if file.suffix == ".pt" else file
    spike = read_spike(file)
    program = importlib.import_module(PROGRAMS[spike["program"]])
    model_config, cfg, _ = read_config(file.parent, *config_classes(program), name=file.name)
    settings.check(model_config, cfg)
    if not 1 <= spike["step"] <= cfg.max_steps:
        raise UserError(
            f"{file} is of step {spike['step']}, and the run has {cfg.max_steps}; {WAY_OUT}"
        )
    world = World(device)
    fp8 = cfg.fp8 if world.device.type == "cuda" else "off"
    cfg = dataclasses.replace(
        cfg, fp8=fp8, device=device, precision=precision or cfg.precision, compile=compile, timing=False,
        batch_size=spike["batch_size"],
    )  # fmt: skip
    run, guard, came_from = before(file, spike, program, model_config, cfg, world)
    where = f"{run.world.device.type}, {run.precision.name}"
    print(f"{file.parent} before step {spike['step']}, from {came_from}; on {where}", flush=True)
    show(spike, *step_again(run, guard))


def read_spike(file):
    """The dict that Spikes.report has written, as far as it is used here."""
    types = dict(
        step=int, norm=float, usual=float, losses=list, norms=dict, sequences=list, skipped=bool
    )
    spike = read_json(file, WAY_OUT, program=str, batch_size=int, **types)
    with reading(file, "file", WAY_OUT):
        sequences = [{"at": str(s["at"]), "text": s.get("text", "")} for s in spike["sequences"]]
        spike["sequences"] = [s | {"text": printable(s["text"][:60])} for s in sequences]
        spike["losses"] = list(map(float, spike["losses"]))
        spike["norms"] = {name: float(norm) for name, norm in spike["norms"].items()}
    if spike["program"] not in PROGRAMS:
        raise UserError(f"{file} is of an unknown program, {spike['program']}; {WAY_OUT}")
    return spike


def before(file, spike, program, model_config, cfg, world):
    """(the Run as it was before the step of a spike, its Spikes, in words where it comes from)"""
    recorded, last = file.with_suffix(".pt"), spike["step"] - 1
    if spike.get("weights") and recorded.exists():
        cfg = dataclasses.replace(cfg, on_spike="continue", init_from="")
        run = program.set_up(model_config, cfg, world)
        new = run.state_dict()
        with reading(recorded, "recording", "move it away; a checkpoint is used then"):
            state = read_checkpoint(recorded)
            model = new["model"] | state["model"]  # which has a tied matrix once
            state = new | state | {"model": model, "step": last}
            check_state(run, state)
        run.load_state_dict(state)
        return run, Spikes(run), recorded.name
    files = [path for path in checkpoint_files(file.parent) if step_of(path) <= last]
    # updates that the run has left out before are left out again
    cfg = dataclasses.replace(cfg, on_spike="skip" if spike["skipped"] else "continue")
    state = read_checkpoint(files[-1]) if files else None
    run = program.set_up(model_config, cfg, world, state)
    guard, start = Spikes(run), files[-1].name if files else "the beginning"
    if run.step < last:
        print(f"{last - run.step} updates from {start}", flush=True)
    while run.step < last:
        run.update()
    return run, guard, start


def step_again(run, guard):
    """Make the next update of a run. Returns (loss, gradient norm, {parameter: its norm}, the mean
    loss of each sequence)."""
    each, next_batch = [], run.loader.next_batch

    @torch.no_grad()
    def noting():
        x, y, num_targets = next_batch()
        with run.precision.autocast():
            each.extend(run.raw_model(*row[:, None])[1].item() for row in torch.stack([x, y], 1))
        return x, y, num_targets

    run.loader.next_batch = noting
    losses, norm = run.update()
    return losses.tolist(), norm.item(), dict(zip(guard.names, guard.numbers[3:].tolist())), each


def largest_first(value):
    """A key to sort by; what is not finite comes before all."""
    return -value if math.isfinite(value) else -math.inf


def show(spike, losses, norm, norms, each):
    print(f"\n{'':44}   recorded   replayed")
    print(f"{'loss':44} {sum(spike['losses']):10.6g} {sum(losses):10.6g}")
    print(f"{'gradient norm':44} {spike['norm']:10.6g} {norm:10.6g}")
    largest = sorted(norms, key=lambda name: largest_first((spike["norms"] or norms).get(name, 0)))
    for name in largest[:SHOWN]:
        recorded = f"{spike['norms'][name]:10.6g}" if name in spike["norms"] else f"{'-':>10}"
        print(f"  {name:42} {recorded} {norms[name]:10.6g}")
    if len(largest) > SHOWN:
        print(f"  and {len(largest) - SHOWN} more in the file")
    print("\nloss of each sequence, the largest first")
    worst = sorted(zip(each, spike["sequences"]), key=lambda pair: largest_first(pair[0]))
    for loss, sequence in worst[:SHOWN]:
        text = json.dumps(sequence["text"], ensure_ascii=False)
        print(f"{loss:10.4f}  {sequence['at']:32} {text}")
    again = norm * norm > spike["norm"] * spike["usual"]  # nearer to the spike than to calm
    if not math.isfinite(spike["norm"]):
        again = not math.isfinite(norm)
    says = f"the spike {'comes' if again else 'does not come'} back: usual is {spike['usual']:.4g}"
    print(f"\n{says}" + ("" if again else "; data and weights alone do not make it"))


def main(argv):
    parse(replay, argv)
