"""Hardware: devices, peak rates, memory, and whether torch.compile works."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import torch

from lab.cli import UserError, is_oom, wrap
from lab.files import first_line

# name: (dense 16-bit peak in TFLOP/s with 32-bit accumulation, memory of the smallest variant in GiB, as
# shown by nvidia-smi). The first match wins. Peaks are from the vendors' datasheets; for GeForce cards,
# multiprocessors (NVIDIA's product pages) x 512 FLOP per cycle x boost clock.
# GDDR memory with error correction shows 15/16 of its size (T4, L4, A10, L40S: modal-labs/modal-client, pull
# 2797).
GPUS = {
    "B200": (2250, 180), "GH200": (989, 96), "H200": (989, 141), "H100 PCIe": (756, 80),
    "H100 NVL": (835, 94), "H100": (989, 80), "H800": (989, 80), "A100": (312, 40), "A800": (312, 40),
    "L40S": (362, 45), "L40": (181, 45), "L4": (121, 22.5), "A40": (150, 45), "A30": (165, 24),
    "A10G": (70, 22.5), "A10": (125, 22.5), "V100": (125, 16), "T4": (65, 15),
    "RTX A6000": (155, 48), "RTX 6000 Ada": (364, 48),
    "RTX 5090": (210, 32), "RTX 5080": (113, 16), "RTX 5070 Ti": (88, 16), "RTX 5070": (62, 12),
    "RTX 5060 Ti": (47, 8), "RTX 5060": (38, 8), "RTX 4090": (165, 24), "RTX 4080 SUPER": (104, 16),
    "RTX 4080": (97, 16), "RTX 4070 Ti SUPER": (88, 16), "RTX 4070 Ti": (80, 12),
    "RTX 4070 SUPER": (71, 12), "RTX 4070": (58, 12), "RTX 4060 Ti": (44, 8), "RTX 4060": (30, 8),
    "RTX 3090 Ti": (80, 24), "RTX 3090": (71, 24), "RTX 3080 Ti": (68, 12), "RTX 3080": (60, 10),
    "RTX 3070 Ti": (43, 8), "RTX 3070": (41, 8), "RTX 3060 Ti": (32, 8), "RTX 3060": (25, 12),
}  # fmt: skip
# words in the names of variants that are not in the table
UNLISTED_VARIANTS = ("Laptop", "Ti", "SUPER", "D", "MIG", "H200 NVL", "H800 PCIe")
CPU_FLOPS = 1e11  # rough FLOP/s of a process; used to warn about models too large for a CPU


def peak_flops(device: torch.device) -> float | None:
    """The GPU's dense 16-bit peak in FLOP/s, or None if it is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = set(name.replace("-", " ").split())
    gpu = next((gpu for gpu in GPUS if set(gpu.split()) <= words), None)
    if gpu is None or any(set(v.split()) <= words and v not in gpu for v in UNLISTED_VARIANTS):
        return None
    return GPUS[gpu][0] * 1e12


def resolve_device(name: str, local_rank: int) -> torch.device:
    """The device of this process. name: auto, cuda (one GPU per local rank), cuda:N, mps or cpu.
    Raises UserError if there is no such device."""
    available = dict(
        cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True
    )
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    kind, _, index = name.partition(":")
    if kind not in available or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device={name} must be one of auto, cuda, cuda:N, mps and cpu")
    if not available[kind]:
        raise UserError(
            f"device={name} is not available to PyTorch on this machine; pass --device cpu"
        )
    if kind != "cuda":
        return torch.device(kind)
    number, count = int(index or local_rank), torch.cuda.device_count()
    if number >= count:
        raise UserError(
            f"device=cuda:{number} does not exist: this machine has {count} GPUs, starting at "
            "cuda:0; pass another --device, or a smaller --nproc_per_node to torchrun"
        )
    return torch.device(kind, number)


def check_mps_sums(device: torch.device, vocab_rows: int, batch_tokens: int) -> None:
    """Raise UserError if training on MPS needs a matmul that may be wrong without an error.

    On M1 and M2, a matmul that sums 32,767 terms or more may also add what lies behind its operands in
    memory (pytorch/pytorch#195163). Torch 2.14 avoids this for two matrices and more than 32,768 terms
    (#183535). The gradient of the hidden states sums over the rows of the head, vocab_rows, and that of a
    weight over the tokens of a micro-batch, batch_tokens.
    """
    old = torch.__version__ < "2.14"
    for name, terms, fix in (
        ("the padded vocabulary", vocab_rows, "pass --device cpu"),
        ("the tokens of a micro-batch", batch_tokens, "pass a smaller --batch_size"),
    ):
        if device.type == "mps" and (terms in (32767, 32768) or (terms > 32768 and old)):
            upgrade = "upgrade to torch 2.14, or " if old and terms > 32768 else ""
            raise UserError(
                f"device=mps: gradients that sum {terms:,} terms ({name}) may be wrong on M1 and M2 in torch "
                f"{torch.__version__} (pytorch/pytorch#195163); {upgrade}{fix}"
            )


def set_deterministic(enabled: bool) -> None:
    """Let PyTorch use only algorithms that always add in the same order, so that the same run on the same
    kind of GPU has the same bits (pytorch.org/docs/stable/notes/randomness.html). Results on a CPU do not
    depend on it. Call it before the first matmul: cuBLAS reads the variable once. This is a global setting
    of torch, so each run sets it again."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    # True would fill new tensors with NaN, which takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def compile_unsupported_reason(device: torch.device, model_config, precision) -> str:
    """Why torch.compile should not be used for this model on this device; "" if it should."""
    if device.type == "mps":
        return "not well supported on MPS"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        # triton-lang/triton#10924: a race that gives wrong losses without an error (docs/LOG.md) if
        # matmuls are in 16 bits and the residual stream is in float32
        residual_in_32 = precision.is_16_bit and not (
            model_config.bf16_residual and precision.name == "bf16"
        )
        if model_config.n_embd > 1024 and residual_in_32 and torch.__version__ < "2.14":
            return (
                f"torch {torch.__version__} miscompiles models with n_embd > 1024 in this precision; "
                "upgrade to 2.14"
            )
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # of any type: no compiler, an old GPU, missing headers
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels of this project run on a device: Triton is installed, and the GPU has compute
    capability 8.0 or newer, which Triton's README requires. Older ones (T4: 7.5, V100: 7.0) use torch's
    own kernels."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def can_compile(world, model_config, precision) -> bool:
    """Whether torch.compile should be used; rank 0 prints the reason if not."""
    reason = compile_unsupported_reason(world.device, model_config, precision)
    if reason:
        world.print0(wrap(f"torch.compile is off: {reason}"))
    return not reason


def total_memory(device: torch.device) -> float:
    """Total memory of the device in bytes; infinite if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


@contextlib.contextmanager
def oom_hint(
    fix: str = "pass a smaller --batch_size, a shorter --seq_len or a smaller model",
) -> Iterator[None]:
    """Convert an out-of-memory error raised in the body into a UserError that ends with `fix`."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_oom(error):
            raise
        raise UserError(f"out of memory ({first_line(error)}); {fix}") from error
