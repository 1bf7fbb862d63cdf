"""Where a step's time goes: its kernels by class, from a trace of the profiler.

kernel_ms is kernel time by class, divided by the step's micro-steps (optimizer too, so that classes
times micro-steps add up to a step). What is launched after the last backward pass is "optimizer";
the rest goes by the kernel's name. Products of math attention count as matmul, its softmax as
attention. idle is time in which no kernel runs, and the profiler adds to it.
"""

import contextlib
import json
import re
import tempfile
from pathlib import Path

import torch
from records import ROOT  # noqa: F401 - it puts the project on the path

from lab.cli import UserError
from lab.files import read_json

# The first pattern that is found in a kernel's name decides; what none fits is elementwise or norm.
KINDS = [
    ("communication", r"nccl"),
    ("loss", r"^(loss|row|tile)$|log_?softmax|nll_loss|cross_entropy|loss_kernel"),
    # Inductor names a kernel after the operations it fuses and sometimes after their neighbours:
    # one that begins with triton_ and holds attention's is a copy beside it, but for the softmax of
    # math attention. dot_do_o and convert_dq are cuDNN's, before and after its backward kernel
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
MARKER = "spin_kernel"  # what torch.cuda._sleep launches


def kind_of(name):
    """Class of a kernel, by its name in a profile."""
    matches = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(matches, "elementwise")


@contextlib.contextmanager
def marked(run):
    """Within, each update drops a kernel of its own into the stream before the gradient is clipped
    and after the optimizer's step, so that a profile shows which kernels are the optimizer's."""
    clip, zero_grad = run.clip_grad_norm, run.optimizer.zero_grad

    def marked_clip(max_norm):
        torch.cuda._sleep(1)
        return clip(max_norm)

    def marked_zero_grad(**how):
        torch.cuda._sleep(1)
        zero_grad(**how)

    run.clip_grad_norm, run.optimizer.zero_grad = marked_clip, marked_zero_grad
    try:
        yield
    finally:
        run.clip_grad_norm, run.optimizer.zero_grad = clip, zero_grad


def device_events(events):
    """Those of a Chrome trace's events that ran on the GPU, in the order of their beginning."""
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(found, key=lambda e: e["ts"])


def kernel_times(events, micro_steps):
    """(kernel_ms by class for a micro-step, ms of the whole window) of a step's Chrome trace
    events. ts and dur are in microseconds."""
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
    spent["idle"] = window - covered(spans)  # kernels that overlap count once
    kernel_ms = {kind: round(us / 1000 / micro_steps, 3) for kind, us in spent.items()}
    return kernel_ms, round(window / 1000, 2)


def profile(run):
    """kernel_times of one more update of a Run."""
    with marked(run):
        events = trace(run.update)
    return kernel_times(events, run.loader.grad_accum_steps)


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
    """An extract of a trace: {mode, world_size, device, torch, kernels: [class, name, stream,
    start_us, dur_us]}. Raises UserError."""
    way_out = "bench/parallel.py --trace FOLDER writes one"
    fields = dict(mode=str, world_size=int, device=str, torch=str, kernels=list)
    extract = read_json(path, way_out, **fields)
    if not extract["kernels"]:
        raise UserError(f"{path} has no kernel; {way_out}, on a GPU")
    return extract


def communication(kernels):
    """Microseconds of a step, of it with communication, and of that hidden under computation, from
    the kernels of an extract. NCCL's that wait for a slower GPU are no different here."""
    spans = [(start, start + dur) for _, _, _, start, dur in kernels]
    sends = [span for span, kernel in zip(spans, kernels) if kernel[0] == "communication"]
    computes = [span for span, kernel in zip(spans, kernels) if kernel[0] != "communication"]
    step = max(end for _, end in spans) - min(start for start, _ in spans)
    nccl = covered(sends)
    hidden = nccl + covered(computes) - covered(spans)
    return dict(step_us=step, nccl_us=nccl, hidden_us=hidden)


def covered(intervals):
    """Length of the points that lie in at least one of the intervals (start, end)."""
    length, reached = 0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length
