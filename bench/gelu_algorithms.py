"""The algorithms that cuBLASLt has for the MLP's two products with GELU inside, timed one by one: the trainer takes the first.

    python bench/gelu_algorithms.py                                      # at 64 x 1024 positions of 124M
    python bench/gelu_algorithms.py --positions 32768 --channels 1600    # 1558M, 32 sequences

The plain product of the same shape, PyTorch's choice, stands beside them. Each time is a median of 30 calls on two sets of
operands in turn; an algorithm whose result differs from the first one's by more than rounding is marked. On an H200 the
best ones would save 0.7 ms of 112 at 64 x 1024 positions (2026-11-22), which does not pay for a search at every start.
"""

import argparse
import ctypes
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from floor import median_ms  # noqa: E402
from records import card_name  # noqa: E402

from lab.kernels import fused_mlp  # noqa: E402
from lab.kernels.fused_mlp import DGELU, GELU_AUX_BIAS, product  # noqa: E402
from lab.run.stop import running  # noqa: E402


def algorithms(desc, layouts, device, most):
    """At most so many algorithms for a product that fused_mlp.plan has described, the one that the library likes best first."""
    call, (handle, _), preference = fused_mlp.library(), fused_mlp.handle_and_workspace(device), ctypes.c_void_p()
    call("MatmulPreferenceCreate", ctypes.byref(preference))
    limit = ctypes.c_size_t(fused_mlp.WORKSPACE)
    call("MatmulPreferenceSetAttribute", preference, fused_mlp.MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.sizeof(limit))
    count, found, (b, a, out) = ctypes.c_int(), (fused_mlp.Heuristic * most)(), layouts
    call("MatmulAlgoGetHeuristic", handle, desc, b, a, out, out, preference, most, found, ctypes.byref(count))
    return [heuristic.algo for heuristic in found[: count.value]]


def measure(forward, N, C, most, device):
    """Print one line for each algorithm of the forward product, (N, C) by (C, 4 C), or of its like in the backward pass."""
    name, sets = "forward" if forward else "backward", []
    for _ in range(2):
        a, w = (torch.randn(n, C, device=device, dtype=torch.bfloat16) for n in (N, 4 * C))
        aux = torch.randn(N, 4 * C, device=device, dtype=torch.bfloat16)
        bias = torch.zeros(4 * C, device=device, dtype=torch.bfloat16) if forward else None
        epilogue = GELU_AUX_BIAS if forward else DGELU
        sets.append((a, w if forward else w.t().contiguous(), epilogue, aux, bias, forward))
    outs, tflop = [torch.empty_like(aux) for *_, aux, _, _ in sets], 2 * N * C * 4 * C / 1e9
    ms = median_ms([lambda s=s, out=out: torch.mm(s[0], s[1].t() if forward else s[1], out=out)
                    for s, out in zip(sets, outs)], device)  # fmt: skip
    print(f"{name}, plain: {ms:.4f} ms, {tflop / ms:.0f} TFLOP/s")
    desc, layouts, _ = fused_mlp.plan(device, N, C, 4 * C, forward, sets[0][2])
    first = None
    for i, algo in enumerate(algorithms(desc, layouts, device, most)):
        with mock.patch.object(fused_mlp, "plan", lambda *_, algo=algo: (desc, layouts, algo)):
            try:
                result = product(*sets[0]).float()
                first = result if first is None else first
                off = (result - first).norm() / first.norm()
                ms = median_ms([lambda s=s: product(*s) for s in sets], device)
                print(f"{name} {i:2}: {ms:.4f} ms, {tflop / ms:.0f} TFLOP/s{'  WRONG' if off > 0.01 else ''}")
            except RuntimeError as error:
                print(f"{name} {i:2}: {error}")


def main():
    parser = argparse.ArgumentParser(
        prog="bench/gelu_algorithms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--positions", type=int, default=65536, help="B x T (%(default)s)")
    parser.add_argument("--channels", type=int, default=768, help="C (%(default)s)")
    parser.add_argument("--most", type=int, default=32, help="algorithms to ask for (%(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gelu_algorithms.py: error: needs an NVIDIA GPU, whose library is asked", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{card_name(device)}, torch {torch.__version__}, N = {args.positions:,}, C = {args.channels}")
    for forward in (True, False):
        measure(forward, args.positions, args.channels, args.most, device)


if __name__ == "__main__":
    with running("gelu_algorithms.py"):
        main()
