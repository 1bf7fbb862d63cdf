"""Is the ledger of `python -m lab plan` right? Some real steps of each setting on a CUDA GPU, the
predicted peak against torch.cuda.max_memory_allocated.

    python bench/memory.py                                    # all settings; two minutes on an H200
    python bench/memory.py --shapes 4x256 gpt2 --modes eager --jobs 1
    python bench/memory.py --table                            # what the file of measurements holds

Each setting is one JSON line, appended to readme.assets/runs/memory.jsonl. Shapes run in processes
of their own, several at a time, as memory does not mind company; one that fails spares the others.
"""

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from records import append_record, card_name, one_sentence, origin, read_records  # noqa: E402

from lab.cli import command  # noqa: E402
from lab.files import check_writable  # noqa: E402
from lab.tools.plan import GIB, MOMENTS, Setting, peak, probe, replaced  # noqa: E402
from train_gpt2 import PRESETS, GPTConfig, TrainConfig  # noqa: E402

OUT = ROOT / "readme.assets" / "runs" / "memory.jsonl"
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
FIELDS = {c: {f.name for f in dataclasses.fields(c)} for c in (GPTConfig, TrainConfig, Setting)}


def changed(config, changes):
    """A dataclass with those of the changes that are fields of it."""
    known = {k: v for k, v in changes.items() if k in FIELDS[type(config)]}
    return replace(config, **known)


def setting_of(model_config, batch_size, seq_len, changes, **more):
    """The Setting of a record, whose changes are fields of GPTConfig, TrainConfig and Setting.

    The first records' cross_entropy, fused_mlp and fp8_mlp are what kernels and fp8 are now."""
    head, mlp = replaced(changes.get("kernels", "fused"), changes.get("fp8", "off"))
    heads = {"plain": "plain", "chunked": "fused", "fp8": "fp8"}
    head = heads.get(changes.get("cross_entropy"), head)
    mlp = "fp8" if changes.get("fp8_mlp") else mlp if changes.get("fused_mlp", True) else "plain"
    s = Setting(changed(model_config, changes), batch_size, seq_len, head_loss=head, mlp=mlp)
    return replace(changed(s, changes), **more)


def measure(shape, changes, compiled):
    """The record of one setting."""
    model_config, batch_size, seq_len = SHAPES[shape]
    s = setting_of(model_config, batch_size, seq_len, changes, compile=compiled)
    run = dict(batch_size=batch_size, seq_len=seq_len, compile=compiled, device="cuda")
    run["total_batch_size"] = batch_size * seq_len * s.grad_accum_steps
    cfg = changed(TrainConfig(**run, precision=s.precision), changes)
    predicted, moment = peak(s)
    record = dict(
        shape=shape,
        compile=compiled,
        changed=changes,
        batch_size=batch_size,
        seq_len=seq_len,
        predicted_gib=predicted / GIB,
        moment=moment,
        device=card_name("cuda"),
    )
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # workspaces; more would be a leak of the setting before
    try:
        measured = probe(s.model, cfg, seconds=0)[2]
        ratio = predicted / measured
        record |= dict(measured_gib=measured / GIB, left_before_gib=left / GIB, ratio=ratio)
    except Exception as error:  # whatever a GPU or a compiler throws belongs to this setting alone
        record["error"] = one_sentence(error)
    return record


def line(r):
    """A record for people."""
    what = "compiled" if r["compile"] else "eager"
    what += "".join(f" {k}={v}" for k, v in r["changed"].items())
    name = f"{r['shape']:12} {r['batch_size']:3} x {r['seq_len']:4}  {what:46}"
    if "error" in r:
        return f"{name} predicted {r['predicted_gib']:6.2f} GiB, {r['error']}"
    sizes = f"predicted {r['predicted_gib']:6.2f}, measured {r['measured_gib']:6.2f} GiB"
    return f"{name} {sizes}, ratio {r['ratio']:.3f}, {MOMENTS[r['moment']]}"


def run_child(shape, mode, out):
    """Measure in a fresh process; append what it prints to the file as it comes. Returns the
    records that it made."""
    words = [sys.executable, __file__, "--child", shape, mode]
    records, said = [], ""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for text in process.stdout:
            if text.startswith("{"):
                about = origin(f"python bench/memory.py --shapes {shape} --modes {mode}")
                records.append(json.loads(text) | about)
                append_record(out, records[-1])
                print(line(records[-1]), flush=True)
            else:
                said = text.strip() or said
    if process.returncode:
        print(f"{shape} {mode}: exit status {process.returncode}, {said}", flush=True)
    return records


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which (all)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="which (all)")
    add("--jobs", type=int, default=3, help="processes at a time; 3 need about 120 GiB (3)")
    add("--out", type=Path, default=OUT, help="file (readme.assets/runs/memory.jsonl)")
    add("--table", action="store_true", help="print that file and stop")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.table:
        print(*map(line, read_records(args.out)), sep="\n")
        return
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here; --table prints what was measured on one")
    if args.child:
        shape, mode = args.child
        for changes in MODES[mode][shape]:
            print(json.dumps(measure(shape, changes, mode == "compiled")), flush=True)
        return
    check_writable(args.out, "out")
    jobs = [(shape, mode) for mode in args.modes for shape in MODES[mode] if shape in args.shapes]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        found = pool.map(lambda job: run_child(*job, args.out), jobs)
        ratios = [r["ratio"] for records in found for r in records if "ratio" in r]
    expected = sum(len(MODES[mode][shape]) for shape, mode in jobs)
    if ratios:
        print(
            f"{len(ratios)} of {expected} settings measured; predicted over measured: "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    return int(len(ratios) < expected)


if __name__ == "__main__":
    command(main)
