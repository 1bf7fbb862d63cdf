"""What this machine can do: precision, compilation, memory, peak rate. Probed or looked up, never assumed."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

# Words in the names of other chips, or parts of one, that share a name with one in the tables and are not in there
OTHER_CHIPS = ("Laptop", "Ti", "SUPER", "D", "MIG", "H200 NVL", "H800 PCIe")

# Dense peak in TFLOP/s at 16 bits with 32-bit accumulation, from the vendors' datasheets. First match wins.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A30": 165,
    "A10G": 70, "A10": 125, "RTX A6000": 155, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165, "RTX 4080": 97,
    "RTX 3090": 71, "V100": 125, "T4": 65,
}  # fmt: skip

WITHOUT_FP8 = ("A100", "A800", "A40", "A30", "A10G", "A10", "RTX A6000", "RTX 3090", "V100", "T4")  # before Ada and Hopper

# GiB that nvidia-smi shows; the smallest where there are several sizes. They are the GB of the name within 1 % (H200: 143,771
# MiB), but for cards whose error correction takes its bits from the same GDDR memory: about 15/16. (T4 15,360 MiB, A10 23,028,
# L4 23,034, L40S 46,068: github.com/modal-labs/modal-client/pull/2797; A10G, A40 and L40 are taken to be like them.)
MEMORY_GIB = {
    "B200": 180, "GH200": 96, "H200": 141, "H100 PCIe": 80, "H100 NVL": 94, "H100": 80,
    "H800": 80, "A100": 40, "A800": 40, "L40S": 45, "L40": 45, "L4": 22.5, "A40": 45, "A30": 24, "A10G": 22.5, "A10": 22.5,
    "RTX A6000": 48, "RTX 6000 Ada": 48, "RTX 5090": 32, "RTX 4090": 24, "RTX 4080": 16, "RTX 3090": 24, "V100": 16,
    "T4": 15,
}  # fmt: skip


def is_other_chip(words):
    """True if a card's name, cut into words (a set), is one of OTHER_CHIPS; any letter case."""
    words = {word.upper() for word in words}
    return any(set(chip.upper().split()) <= words for chip in OTHER_CHIPS)


def peak_flops(device):
    """The card's dense 16-bit peak in FLOP/s, or None for one that is not in the table: no MFU is better than a guess."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = name.replace("-", " ").split()
    if is_other_chip(words):
        return None
    for card, tflops in PEAK_TFLOPS.items():
        if all(word in words for word in card.split()):
            return tflops * 1e12
    return None


def find_device(name, local_rank):
    """The torch.device of this process; name is auto, cuda (one for each local rank), cuda:N, mps or cpu. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.split(":")[0] not in ("cuda", "mps", "cpu"):
        raise ValueError(f"device={name} is not one of auto, cuda, cuda:N, mps and cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name} is not there: torch sees no GPU; pass --device cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device=mps is not there: this machine has none, or this torch was built without it; "
                         "pass --device cpu")  # fmt: skip
    if name == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"--nproc_per_node asks for more processes than the {torch.cuda.device_count()} GPUs of this machine"
            )
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name} is no device; pass cuda, cuda:0, mps or cpu") from None
    if name.startswith("cuda") and device.index >= torch.cuda.device_count():
        raise ValueError(f"device={name} is not there: the {torch.cuda.device_count()} GPUs here begin with cuda:0")
    return device


class Precision:
    """How numbers are kept on this device: probed, not assumed."""

    def __init__(self, wanted, device):
        self.device, self.name = device, wanted
        if wanted == "auto" and device.type == "cuda":
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            self.name = "bf16" if bf16 else "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "fp32"
        elif wanted == "auto":
            self.name = "fp32"  # CPU and MPS: float32 is the safe choice there; bf16 on CPU is for --precision to ask
        if self.name == "fp16" and device.type == "cpu":
            raise ValueError("precision=fp16 needs a GPU; on CPU use fp32 or bf16")
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        # fp16 ends at 6e-8: the scaler multiplies the loss up so that small gradients survive (Micikevicius 2018, 3.2)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.name == "fp16")

    def autocast(self):
        """Products in 16 bits; weights, norms, softmax and sums stay in 32."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype else contextlib.nullcontext()

    def prepare(self):
        """Let matrix products that stay in float32 round their inputs to TF32 (10 bits of mantissa), except in fp32."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")


def why_no_compile(device):
    """"" if torch.compile works on this device, else the reason in a few words."""
    if device.type == "mps":
        return "not supported well on MPS"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # whatever the toolchain throws: no compiler, old card, missing headers
        first = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {first[:120]}"
    return ""


def why_no_fp8(precision, model_config, cfg):
    """"" if this run can compute products in 8 bits, else what they need, in a few words."""
    if precision.device.type != "cuda" or torch.cuda.get_device_capability(precision.device) < (8, 9):
        return "need an NVIDIA GPU that multiplies them (RTX 40, H100 and newer)"
    if importlib.util.find_spec("triton") is None:
        return "need Triton, which is not installed"
    return why_no_fp8_anywhere(precision.name, model_config, cfg)


def why_no_fp8_anywhere(precision, model_config, cfg):
    """The same for a card that has them. precision: its name."""
    if precision != "bf16":
        return f"go with precision=bf16, not with {precision}"
    if model_config.n_embd % 16 or model_config.padded_vocab_size % 16 or cfg.seq_len % 16:
        return (f"need multiples of 16, not n_embd={model_config.n_embd}, seq_len={cfg.seq_len} and "
                f"{model_config.padded_vocab_size} rows of the embedding")  # fmt: skip
    return ""


def num_params(c):
    """Of a model with this GPTConfig: (all the parameters, those in the matrices of the blocks)."""
    matrices = 12 * c.n_layer * c.n_embd**2
    vectors = (13 * c.n_layer + 2) * c.n_embd  # 9 biases and 4 of LayerNorm in a block
    return (c.padded_vocab_size + c.block_size) * c.n_embd + matrices + vectors, matrices


def memory_of(device):
    """(bytes, "card" or "machine") of memory that there is in all; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "card"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "machine"
    return float("inf"), "machine"


def check_size(c, device):
    """Raise ValueError for a model (a GPTConfig) that this machine has no room for, before minutes are spent on that."""
    (n, _), (memory, what) = num_params(c), memory_of(device)
    if 12 * n > memory:  # weights, gradients and the lesser optimizer's state, 4 bytes each
        raise ValueError(f"n_layer={c.n_layer} and n_embd={c.n_embd} make {n:,} weights, which take {12 * n / 2**30:,.0f} GiB "
                         f"or more in training; this {what} has {memory / 2**30:,.0f}: make the model smaller")  # fmt: skip


def out_of_memory(error):
    """True for what CUDA, Python and torch's CPU allocator raise when memory is full."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in said or "allocate memory" in said


def fit_batch_size(model, cfg, world, precision):
    """Most sequences per micro-step, at most 64, that divide the step evenly and fit in memory.

    Tried for real, largest first, with the eager model, which needs a little more memory than the compiled one. On CPU
    nothing is tried: it takes at most 16384 tokens at a time.
    """
    each = cfg.total_batch_size // (cfg.seq_len * world.world_size)  # sequences of a step for each process
    most = 64 if world.device.type == "cuda" else max(1, 16384 // cfg.seq_len)
    sizes = [b for b in range(min(most, each), 0, -1) if each % b == 0]
    if world.device.type != "cuda":
        return sizes[0]
    for size in sizes:
        fits = True
        try:
            idx = torch.randint(model.config.vocab_size, (size, cfg.seq_len), device=world.device)
            with precision.autocast():
                _, loss = model(idx, idx)
            loss.backward()
            # AdamW's two moments and DDP's buckets come on top, or shares of the moments and of the weights, and gradients that
            # are kept over micro-steps; 5 % is left for fragments
            more = 1 + 3 / world.world_size if cfg.zero1 and world.distributed else 3
            more *= sum(p.numel() * p.element_size() for p in model.parameters())
            ours = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
            fits = torch.cuda.max_memory_allocated(world.device) + more < 0.95 * ours
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            fits = False
        idx = loss = None
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
        if world.smallest(fits):
            return size
    raise ValueError(
        f"not even one sequence of seq_len={cfg.seq_len} fits on {torch.cuda.get_device_name(world.device)}; "
        "pass --activation_checkpointing, a shorter --seq_len or a smaller --preset"
    )


def quoted(text):
    """A word of a command that is printed for people to type, as this system's shell reads it."""
    return subprocess.list2cmdline([text]) if os.name == "nt" else shlex.quote(text)


def script(name):
    """What to type for one of this project's scripts, from the folder that we are in."""
    folder = Path(__file__).resolve().parent.parent
    return name if Path.cwd() == folder else quoted(str(folder / name))


def this_python():
    """What to type for the interpreter that runs this: python, where that is the same one, else its path."""
    found = shutil.which("python")
    here = Path(sys.executable)
    if found and Path(found).parent.absolute() == here.parent.absolute() and os.path.realpath(found) == os.path.realpath(here):
        return "python"
    return os.path.relpath(sys.executable) if Path.cwd() in Path(sys.executable).parents else sys.executable
