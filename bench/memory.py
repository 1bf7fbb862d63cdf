"""Is the ledger of `train_gpt2.py --plan` right? Three real steps of each setting on a CUDA GPU, predicted peak against
torch.cuda.max_memory_allocated.

    python bench/memory.py                                          # all settings; about two minutes on an H200
    python bench/memory.py --shapes 4x256 gpt2 --modes eager --jobs 1
    python bench/memory.py --table                                  # what the file of measurements holds

Each setting is one JSON line, appended to readme.assets/runs/memory.jsonl. Shapes run in processes of their own, several at
a time, as memory does not mind company; one that fails takes none of the others with it.
"""

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from records import append_record, card_name, one_sentence, origin, read_records  # noqa: E402

from lab.kernels.fused_mlp import epilogues_work  # noqa: E402
from lab.run.locks import check_writable  # noqa: E402
from lab.run.stop import running  # noqa: E402
from lab.tools.plan import GIB, MOMENTS, Setting, peak, probe  # noqa: E402
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
AGAIN = dict(activation_checkpointing=True)
IN_8_BITS = dict(cross_entropy="fp8", fp8_mlp=True)
MODES = {  # name: {shape: what is changed, one measurement each}
    "eager": {shape: [{}, AGAIN] for shape in SHAPES},
    "compiled": {"gpt2-medium": [{}], "gpt2": [{}, AGAIN, IN_8_BITS], "12x768": [{}], "4x256": [{}, AGAIN]},
    "changed": {
        "gpt2": [IN_8_BITS, dict(fp8_mlp=True)],
        "12x768": [
            dict(bf16_residual=False), dict(fused_mlp=False), dict(fused_mlp=False, **AGAIN), dict(attention="math"),
            dict(attention="math", **AGAIN), dict(document_mask=True), dict(cross_entropy="plain"), dict(cross_entropy="fp8"),
            dict(optimizer="muon"), dict(grad_accum_steps=1), dict(precision="fp16"), dict(precision="tf32"),
        ]
    },
}  # fmt: skip


def setting_of(shape, changes, compiled):
    """A Setting with the changes, which are fields of GPTConfig or of Setting."""
    model_config, batch_size, seq_len = SHAPES[shape]
    fields = {f.name for f in dataclasses.fields(GPTConfig)}
    model_config = dataclasses.replace(model_config, **{k: v for k, v in changes.items() if k in fields})
    return Setting(
        model_config, batch_size, seq_len, compile=compiled, **{k: v for k, v in changes.items() if k not in fields}
    )


def measure(shape, changes, compiled):
    """The record of one setting."""
    device = torch.device("cuda")
    if not epilogues_work(device):
        changes = changes | dict(fused_mlp=False)
    s = setting_of(shape, changes, compiled)
    predicted, moment = peak(s)
    record = dict(
        shape=shape, compile=compiled, changed=changes, batch_size=s.batch_size, seq_len=s.seq_len,
        predicted_gib=predicted / GIB, moment=moment, device=card_name(device),
    )  # fmt: skip
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated(device)  # workspaces that stay; more would be a leak of the setting before
    try:
        measured = probe(s, TrainConfig(optimizer=s.optimizer), device, seconds=0)[2]
        record |= dict(measured_gib=measured / GIB, left_before_gib=left / GIB, ratio=predicted / measured)
    except Exception as error:  # whatever a card or a compiler throws belongs to this setting alone
        record["error"] = one_sentence(error)
    return record


def child(shape, mode):
    for changes in MODES[mode][shape]:
        print(json.dumps(measure(shape, changes, mode == "compiled")), flush=True)


def line(r):
    """A record for people."""
    what = "compiled" if r["compile"] else "eager"
    what += "".join(f" {k}={v}" for k, v in r["changed"].items())
    name = f"{r['shape']:12} {r['batch_size']:3} x {r['seq_len']:4}  {what:46}"
    if "error" in r:
        return f"{name} predicted {r['predicted_gib']:6.2f} GiB, {r['error']}"
    sizes = f"predicted {r['predicted_gib']:6.2f}, measured {r['measured_gib']:6.2f} GiB, ratio {r['ratio']:.3f}"
    return f"{name} {sizes}, {MOMENTS[r['moment']]}"


def run_child(shape, mode, out):
    """Measure in a fresh process; append what it prints to the file as it comes. Returns the records."""
    command = [sys.executable, __file__, "--child", shape, mode]
    records, said = [], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for text in process.stdout:
            if text.startswith("{"):
                records.append(json.loads(text) | origin(f"python bench/memory.py --shapes {shape} --modes {mode}"))
                append_record(out, records[-1])
                print(line(records[-1]), flush=True)
            else:
                said = text.strip() or said
    if process.returncode:
        print(f"{shape} {mode}: exit status {process.returncode}, {said}", flush=True)
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which (all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="which (all)")
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time; 3 need about 120 GiB (3)")
    parser.add_argument("--out", type=Path, default=OUT, help="file of measurements (readme.assets/runs/memory.jsonl)")
    parser.add_argument("--table", action="store_true", help="print that file and stop")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        if not args.out.exists():
            parser.error(f"no measurements in {args.out}; `python bench/memory.py` on a machine with a CUDA GPU makes them")
        try:
            print("\n".join(line(r) for r in read_records(args.out)))
        except ValueError as error:
            parser.error(str(error))
        return
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here; --table prints what was measured on one")
    if args.child:
        return child(*args.child)
    try:
        check_writable(args.out, "out")
    except ValueError as error:
        parser.error(str(error))
    jobs = [(shape, mode) for mode in ("compiled", "eager", "changed") for shape in MODES[mode]]  # the slow ones first
    jobs = [job for job in jobs if job[0] in args.shapes and job[1] in args.modes]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        records = [r for found in pool.map(lambda job: run_child(*job, args.out), jobs) for r in found]
    ratios = [r["ratio"] for r in records if "ratio" in r]
    expected = sum(len(MODES[mode][shape]) for shape, mode in jobs)
    if ratios:
        print(f"{len(ratios)} of {expected} settings measured; predicted over measured: {min(ratios):.3f} to {max(ratios):.3f}")
    sys.exit(len(ratios) < expected)


if __name__ == "__main__":
    with running("memory.py"):
        main()
