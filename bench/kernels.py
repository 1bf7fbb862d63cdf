"""Kernel time of a training step by class, from a profiler trace. Used by ladder.py and parallel.py.

kernel_ms is the kernel time of each class in a step, including the optimizer's, divided by the number of
micro-steps. Its sum over the classes, times the number of micro-steps, is the time of a step. Kernels
launched after the last backward pass are "optimizer"; all others are classified by name. Matmuls of
math attention count as matmul, its softmax as attention. idle is time in which no kernel runs;
profiling increases it.
"""

import json
import re
import tempfile
from pathlib import Path

import torch
from records import ROOT  # noqa: F401 - puts the project on the path

from lab.cli import UserError
from lab.files import read_json

# The first pattern that matches the kernel's name decides. Other kernels are elementwise or norms.
KINDS = [
    ("communication", r"nccl"),
    ("loss", r"^(loss|row|tile)$|log_?softmax|nll_loss|cross_entropy|loss_kernel"),
    # Inductor names a kernel after the operations it fuses, and sometimes after neighboring ones: a
    # triton_ kernel with attention in its name is a copy next to it, except the softmax of math
    # attention. dot_do_o and convert_dq run before and after cuDNN's backward kernel.
    ("attention", r"^(?!triton_).*(sdpa|flash|fmha|attention|attn|dot_do_o|convert_dq)|softmax"),
    (
        "matmul",
        r"^triton_tem|^(?!triton_).*(nvjet|gemm|gemv|cutlass|xmma|cublas|splitk|scaled_mm|s\d+(16816|bf16))",
    ),
    ("elementwise", r"^triton_"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|foreach"),
    ("copy", r"memcpy|memset|copy"),
]
CLASSES = "matmul attention loss elementwise optimizer communication copy idle".split()
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep


def kind_of(name):
    """Class of a kernel, by its name in a profile."""
    matches = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(matches, "elementwise")


class KernelMarker:
    """Replaces a trainer's StepTimer: marks the end of phases in a profile with a special kernel.

    The last two marks of a step are the ends of the last backward pass and of the optimizer step, so the
    kernels between them belong to the optimizer."""

    def mark(self, phase):
        if phase in ("backward", "optimizer"):
            torch.cuda._sleep(1)


def device_events(events):
    """The events of a Chrome trace that ran on the GPU, sorted by start time."""
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(found, key=lambda e: e["ts"])


def kernel_times(events, micro_steps):
    """(kernel_ms by class per micro-step, ms from the first kernel to the last) of a step's Chrome
    trace events. ts and dur are in microseconds."""
    kernels = device_events(events)
    marks = [e["ts"] for e in kernels if MARKER in e["name"]]
    kernels = [e for e in kernels if MARKER not in e["name"]]
    if not kernels:
        raise RuntimeError("the profiler saw no kernels; is another profiler running on this GPU?")
    spent = dict.fromkeys(CLASSES, 0.0)
    for e in kernels:
        in_optimizer = len(marks) > 1 and marks[-2] < e["ts"] < marks[-1]
        kind = "optimizer" if in_optimizer else kind_of(e["name"])
        spent[kind] += e["dur"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels]
    window = max(end for _, end in spans) - spans[0][0]
    spent["idle"] = window - covered(spans)  # overlapping kernels count once
    kernel_ms = {kind: round(us / 1000 / micro_steps, 3) for kind, us in spent.items()}
    return kernel_ms, round(window / 1000, 2)


def profile(trainer):
    """Do one more update and return its kernel_times."""
    timer, trainer.timer = trainer.timer, KernelMarker()
    try:
        events = trace(trainer.train_step)
    finally:
        trainer.timer = timer
    return kernel_times(events, trainer.loader.grad_accum_steps)


def trace(step):
    """The Chrome trace events of step()."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def read_extract(path):
    """Read an extract of a trace: {mode, world_size, device, torch, kernels: [class, name, stream,
    start_us, dur_us]}. Raises UserError if it is damaged or has no kernels."""
    hint = "bench/parallel.py --trace FOLDER writes one"
    fields = dict(mode=str, world_size=int, device=str, torch=str, kernels=list)
    extract = read_json(path, hint, **fields)
    if not extract["kernels"]:
        raise UserError(f"{path} has no kernels; {hint}, on a GPU")
    return extract


def communication(kernels):
    """Microseconds of a step, of its communication, and of the communication that overlaps with
    computation, from the kernels of an extract. NCCL kernels that wait for a slower GPU count as
    communication."""
    spans = [(start, start + dur) for _, _, _, start, dur in kernels]
    sends = [span for span, kernel in zip(spans, kernels) if kernel[0] == "communication"]
    computes = [span for span, kernel in zip(spans, kernels) if kernel[0] != "communication"]
    step = max(end for _, end in spans) - min(start for start, _ in spans)
    nccl = covered(sends)
    hidden = nccl + covered(computes) - covered(spans)
    return dict(step_us=step, nccl_us=nccl, hidden_us=hidden)


def covered(intervals):
    """Total length of the union of intervals (start, end)."""
    length, reached = 0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length
