"""Is the ledger of `python -m lab plan` right? Some real steps of each setting on a CUDA GPU, the
predicted peak against torch.cuda.max_memory_allocated.

    python bench/memory.py                                    # all settings; some minutes on an H200
    python bench/memory.py --shapes 4x256 gpt2 --modes eager

Each setting is one JSON line, appended to readme.assets/runs/memory.jsonl.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from records import RUNS, append_record, card_name, check_out, one_sentence, origin
from timing import forget

from lab.cli import UserError, command, parse
from lab.tools.ledger import GIB, MOMENTS, Setting, peak, replaced
from lab.tools.plan import probe
from train_gpt2 import PRESETS, GPTConfig, TrainConfig

SHAPES = {  # name: (model, batch_size, seq_len)
    "4x256": (GPTConfig(4, 4, 256), 4, 512),
    "12x768": (GPTConfig(), 8, 512),
    "gpt2": (PRESETS["gpt2"][0], 64, 1024),
    "gpt2-medium": (PRESETS["gpt2-medium"][0], 32, 1024),
    "gpt2-large": (PRESETS["gpt2-large"][0], 16, 1024),
    "gpt2-xl": (PRESETS["gpt2-xl"][0], 8, 1024),
}
AGAIN, HEAD, ALL = dict(activation_checkpointing=True), dict(fp8="head"), dict(fp8="all")
CHANGES = [
    dict(bf16_residual=False),
    dict(kernels="plain"),
    dict(kernels="plain", **AGAIN),
    HEAD,
    dict(attention="math"),
    dict(attention="math", **AGAIN),
    dict(document_mask=True),
    dict(optimizer="muon"),
    dict(grad_accum_steps=1),
    dict(precision="fp16"),
    dict(precision="tf32"),
]
MODES = {  # name: {shape: what is changed, one measurement each}
    "compiled": {
        "gpt2-medium": [{}],
        "gpt2": [{}, AGAIN, HEAD, ALL],
        "12x768": [{}],
        "4x256": [{}, AGAIN],
    },
    "eager": {shape: [{}, AGAIN] for shape in SHAPES},
    "changed": {"gpt2": [ALL], "12x768": CHANGES},
}


@dataclass
class Config:
    shapes: tuple[Literal[tuple(SHAPES)], ...] = tuple(SHAPES)  # models
    modes: tuple[Literal[tuple(MODES)], ...] = tuple(MODES)  # how they run
    out: str = str(RUNS / "memory.jsonl")  # file of measurements


def changed(config, changes):
    """A dataclass with those of the changes that are fields of it."""
    return replace(config, **{k: v for k, v in changes.items() if k in vars(config)})


def setting_of(model_config, batch_size, seq_len, changes, world_size=1, device_type="cuda"):
    """The Setting of a record, whose changes are fields of GPTConfig and TrainConfig, and
    grad_accum_steps (2).

    The first records' cross_entropy, fused_mlp and fp8_mlp are what kernels and fp8 are now."""
    head, mlp = replaced(changes.get("kernels", "fused"), changes.get("fp8", "off"))
    heads = {"plain": "plain", "chunked": "fused", "fp8": "fp8"}
    head = heads.get(changes.get("cross_entropy"), head)
    mlp = "fp8" if changes.get("fp8_mlp") else mlp if changes.get("fused_mlp", True) else "plain"
    tokens = batch_size * seq_len * world_size * changes.get("grad_accum_steps", 2)
    cfg = TrainConfig(
        batch_size=batch_size, seq_len=seq_len, total_batch_size=tokens, precision="bf16"
    )
    configs = changed(model_config, changes), changed(cfg, changes)
    return Setting(*configs, world_size, device_type, (head, mlp))


def measure(shape, changes, compiled):
    """The record of one setting."""
    model_config, batch_size, seq_len = SHAPES[shape]
    s = setting_of(model_config, batch_size, seq_len, changes | dict(compile=compiled))
    record = dict(shape=shape, changed=changes, device=card_name("cuda"), compile=compiled)
    record |= dict(batch_size=batch_size, seq_len=seq_len)
    predicted, record["moment"] = peak(s)
    record["predicted_gib"] = predicted / GIB
    forget(torch.device("cuda"))
    try:
        measured = probe(s.model, replace(s.cfg, device="cuda"), seconds=0)[1]
        record |= dict(measured_gib=measured / GIB, ratio=predicted / measured)
    except Exception as error:  # whatever a GPU or a compiler throws belongs to this setting alone
        record["error"] = one_sentence(error)
    return record


def line(r):
    """A record for people."""
    what = "compiled" if r["compile"] else "eager"
    what += "".join(f" {k}={v}" for k, v in r["changed"].items())
    name = f"{r['shape']:12} {r['batch_size']:3} x {r['seq_len']:4}  {what:46}"
    name += f" predicted {r['predicted_gib']:6.2f} GiB, "
    if "error" in r:
        return name + r["error"]
    return (
        f"{name}measured {r['measured_gib']:6.2f}, ratio {r['ratio']:.3f}, {MOMENTS[r['moment']]}"
    )


def main(argv):
    args = parse(Config, argv, description=__doc__)
    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA GPU here; bench/memory.py measures the memory of one")
    check_out(args.out, cpu=False)
    jobs = [(shape, mode) for mode in args.modes for shape in MODES[mode] if shape in args.shapes]
    found = []
    for shape, mode in jobs:
        for changes in MODES[mode][shape]:
            found.append(measure(shape, changes, mode == "compiled") | origin())
            append_record(args.out, found[-1])
            print(line(found[-1]), flush=True)
    ratios = [r["ratio"] for r in found if "ratio" in r]
    if ratios:
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{len(ratios)} of {len(found)} settings measured; predicted over measured: {spread}")
    return int(len(ratios) < len(found))


if __name__ == "__main__":
    command(main)
