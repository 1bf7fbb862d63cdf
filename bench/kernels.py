"""Where a step's time goes: its kernels by class, from a trace of the profiler.

    python bench/kernels.py readme.assets/runs/zero1_16bit.kernels.json     # those of one step that parallel.py traced

kernel_ms is kernel time by class, divided by the step's micro-steps (optimizer too, so that classes times micro-steps add up
to a step). Everything launched after the last backward pass is "optimizer"; the rest goes by the kernel's name. Products of
math attention count as matmul, its softmax as attention. idle is time in which no kernel runs, and the profiler adds to it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

# The first pattern that is found in a kernel's name decides; what none fits is elementwise or norm.
KINDS = [
    ("communication", r"nccl"),
    ("loss", r"^(loss|row|tile)$|log_?softmax|nll_loss|cross_entropy|loss_kernel|liger|element_mul_kernel"),
    # Inductor names a kernel after the operations it fuses and sometimes after their neighbours: a name beginning with
    # triton_ that holds attention's is a copy beside it, except for the softmax of math attention. dot_do_o and convert_dq
    # are cuDNN's before and after its backward kernel
    ("attention", r"^(?!triton_).*(sdpa|flash|fmha|attention|attn|dot_do_o|convert_dq)|softmax"),
    ("matmul", r"^triton_tem|^(?!triton_).*(nvjet|gemm|gemv|cutlass|xmma|cublas|splitk|scaled_mm|s\d+(16816|bf16))"),
    ("elementwise", r"^triton_"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|foreach"),
    ("copy", r"memcpy|memset|copy"),
]
CLASSES = ("matmul", "attention", "loss", "elementwise", "optimizer", "communication", "copy", "idle")
MARKER = "spin_kernel"  # what torch.cuda._sleep launches


def kind_of(name):
    """Class of a kernel, by its name in a profile."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "elementwise")


class Markers:
    """A PhaseClock that drops a kernel of its own into the stream where the backward passes and the optimizer end, so that
    a profile shows which kernels are the optimizer's."""

    def mark(self, phase):
        if phase in ("backward", "optimizer"):
            torch.cuda._sleep(1)


def kernel_times(events, micro_steps):
    """(kernel_ms by class for a micro-step, ms of the whole window, the ten kernels that take longest) of a step's Chrome
    trace events. ts and dur are in microseconds."""
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    marks = sorted(e["ts"] for e in kernels if MARKER in e["name"])
    kernels = sorted((e for e in kernels if MARKER not in e["name"]), key=lambda e: e["ts"])
    if not kernels:
        raise RuntimeError("the profiler saw no kernels; is another profiler running on this card?")
    spent, by_name = dict.fromkeys(CLASSES, 0.0), {}
    busy, end = 0.0, kernels[0]["ts"]
    for e in kernels:
        in_optimizer = len(marks) > 1 and marks[-2] < e["ts"] < marks[-1]
        kind = "optimizer" if in_optimizer else kind_of(e["name"])
        spent[kind] += e["dur"]
        name = (e["name"][:120], kind)
        by_name[name] = by_name.get(name, 0.0) + e["dur"]
        busy += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))  # overlapping kernels count once
        end = max(end, e["ts"] + e["dur"])
    window = end - kernels[0]["ts"]
    spent["idle"] = window - busy
    top = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    return (
        {kind: round(us / 1000 / micro_steps, 3) for kind, us in spent.items()},
        round(window / 1000, 2),
        [{"name": name, "class": kind, "ms": round(us / 1000 / micro_steps, 3)} for (name, kind), us in top],
    )


def profile(step, micro_steps):
    """kernel_times of step(clock)."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(Markers())
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernel_times(events, micro_steps)


def table(extract):
    """The kernels of an extract that bench/parallel.py --trace wrote, as text: those whose names differ in their last number
    alone taken together, the longest first. Raises OSError or ValueError for a file that is no extract."""
    try:
        data = json.loads(Path(extract).read_text(encoding="utf-8"))
        rows, spent = data["kernels"], {}
        for kind, name, _, _, us in rows:
            times = spent.setdefault((kind, re.sub(r"_\d+$", "", name)), [])
            times.append(us)
        heading = f"{data['mode']}, {data['world_size']} x {data['device']}, torch {data['torch']}: {len(rows):,} kernels"
    except (FileNotFoundError, IsADirectoryError):
        has = "readme.assets/runs has some, bench/parallel.py --trace makes them"
        raise ValueError(f"there is no file {extract}; {has}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{extract} is no extract of a trace; `bench/parallel.py --trace FOLDER` writes them") from error
    lines = [heading, f"{'ms':>8} {'calls':>6} {'us each':>9}  {'class':14}kernel"]
    for (kind, name), times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times) / 1000:8.3f} {len(times):6} {sum(times) / len(times):9.1f}  {kind:14}{name}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        prog="bench/kernels.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("extract", help="a <mode>.kernels.json of bench/parallel.py --trace")
    args = parser.parse_args()
    try:
        print(table(args.extract))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(f"kernels.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
