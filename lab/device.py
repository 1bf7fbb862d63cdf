"""What this machine can do, probed or looked up: precision, compilation, memory, peak rate."""

import importlib.util
import os

import torch

from lab.cli import UserError, out_of_memory, program
from lab.data.loader import grad_accum_steps
from lab.files import first_line

# name: (dense peak in TFLOP/s at 16 bits with 32-bit sums, from the vendors' datasheets; GiB that
# nvidia-smi shows, the smallest where there are several sizes). The first match wins. GDDR with
# error correction shows 15/16 of its size (T4, L4, A10, L40S: modal-labs/modal-client, pull 2797)
GPUS = {
    "B200": (2250, 180), "GH200": (989, 96), "H200": (989, 141), "H100 PCIe": (756, 80),
    "H100 NVL": (835, 94), "H100": (989, 80), "H800": (989, 80), "A100": (312, 40), "A800": (312, 40),
    "L40S": (362, 45), "L40": (181, 45), "L4": (121, 22.5), "A40": (150, 45), "A30": (165, 24),
    "A10G": (70, 22.5), "A10": (125, 22.5), "RTX A6000": (155, 48), "RTX 6000 Ada": (364, 48),
    "RTX 5090": (210, 32), "RTX 4090": (165, 24), "RTX 4080": (97, 16), "RTX 3090": (71, 24),
    "V100": (125, 16), "T4": (65, 15),
}  # fmt: skip
# words in the names of other chips, or of parts of one, that share a name with one in the table
OTHER_CHIPS = ("Laptop", "Ti", "SUPER", "D", "MIG", "H200 NVL", "H800 PCIe")


def peak_flops(device):
    """The GPU's dense 16-bit peak in FLOP/s, or None where the table has none."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    words = set(name.replace("-", " ").split())
    if any(set(chip.split()) <= words for chip in OTHER_CHIPS):
        return None
    found = [peak * 1e12 for gpu, (peak, _) in GPUS.items() if set(gpu.split()) <= words]
    return found[0] if found else None


def find_device(name, local_rank):
    """The torch.device of this process; name is auto, cuda (one for each local rank), cuda:N, mps
    or cpu. Raises UserError."""
    here = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if name == "auto":
        name = next(kind for kind, there in here.items() if there)
    kind, _, index = name.partition(":")
    if kind not in here or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device={name} is not one of auto, cuda, cuda:N, mps and cpu")
    if not here[kind]:
        raise UserError(f"device={name} is not there: torch sees none; pass --device cpu")
    if kind != "cuda":
        return torch.device(kind)
    index, count = int(index or local_rank), torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"device=cuda:{index} is not there: the {count} GPUs here begin with cuda:0; pass another "
            "--device, or torchrun a smaller --nproc_per_node"
        )
    return torch.device(kind, index)


class Precision:
    """How numbers are kept on this device: probed, not assumed."""

    def __init__(self, wanted, device):
        self.device, self.name = device, wanted
        if wanted == "auto" and device.type == "cuda":
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            fp16 = torch.cuda.get_device_capability(device) >= (7, 0)
            self.name = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        elif wanted == "auto":
            self.name = "fp32"  # the safe choice on CPU and MPS; 16 bits are for --precision to ask
        if self.name == "fp16" and device.type == "cpu":
            raise UserError("precision=fp16 needs a GPU; on CPU use fp32 or bf16")
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        self.is_16_bit = self.dtype is not None
        # below 6e-8 fp16 has only 0: the scaler multiplies the loss up so that small gradients survive
        # (Micikevicius 2018, 3.2)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.name == "fp16")

    def autocast(self):
        """Products in 16 bits; weights, their gradients and the loss stay in 32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.is_16_bit)

    def prepare(self):
        """Let matrix products that stay in float32 round their inputs to TF32 (10 bits of
        mantissa), except in fp32."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")


def in_bf16(x):
    """Whether autocast computes the products of x in bf16."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


def random_state(device):
    """The states of torch's generators, for set_random_state: {"cpu": ..., "cuda": ... or None}."""
    cuda = torch.cuda.get_rng_state() if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state, device):
    """Have torch's generators go on from where random_state found them, as far as they are here."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


class Underway:
    """Copy of a tensor on its way to the CPU. arrive() waits for what was launched before the copy
    was, and no longer; item() would wait for all that was launched since, and the device would then
    have nothing to do while the host launches the next step."""

    def __init__(self, tensor):
        cuda = tensor.is_cuda
        copy = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        self.copy = copy.copy_(tensor, non_blocking=cuda)
        self.there = torch.cuda.Event() if cuda else None
        if self.there:
            self.there.record()

    def arrive(self):
        if self.there:
            self.there.synchronize()
        return self.copy


def why_no_compile(device, model_config, precision):
    """Empty if torch.compile is to be used on this device, else the reason in a few words."""
    if device.type == "mps":
        return "not supported well on MPS"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        # triton-lang/triton#10924, a race: wrong losses without a word (docs/LOG.md) where products
        # have 16 bits and the residual stream 32
        in_32 = precision.is_16_bit and not (
            model_config.bf16_residual and precision.name == "bf16"
        )
        if model_config.n_embd > 1024 and in_32 and torch.__version__ < "2.14":
            return f"torch {torch.__version__} compiles so wide a model wrongly; 2.14 does not"
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # of any kind: no compiler, an old GPU, missing headers
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def can_compile(world, model_config, precision):
    """Whether torch.compile is to be used on this device; says why not."""
    reason = why_no_compile(world.device, model_config, precision)
    if reason:
        world.say(f"torch.compile is off: {reason}")
    return not reason


def memory_of(device):
    """Bytes of memory that there are in all; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


def fit_batch_size(model, cfg, world, precision, state=None):
    """Most sequences per micro-step that divide the step evenly and fit in memory, at most 64. With
    the `state` of a checkpoint at most its own: in another micro-batch, sums would be rounded
    otherwise.

    Tried for real, largest first, with the eager model, which needs a little more memory than the
    compiled one. On a CPU nothing is tried: it takes at most 16384 tokens at a time. Raises
    UserError where total_batch_size cannot be divided, where not even one sequence fits, or for
    FSDP2.
    """
    most = state["batch_size"] if state else 64
    sizes = micro_batches(cfg, world.world_size, world.device.type, most)
    if world.device.type != "cuda":
        return sizes[0]
    if cfg.parallel == "fsdp2":
        raise UserError(
            "with parallel=fsdp2 no micro-batch is sought, as the whole model may not fit: pass "
            f"--batch_size; `{program('lab plan')}`, with the same flags, says how large"
        )
    for size in sizes:
        if world.all(fits(model, size, cfg, world, precision)):
            return size
    raise UserError(
        f"not even one sequence of seq_len={cfg.seq_len} fits on {torch.cuda.get_device_name(world.device)}; "
        "pass a shorter --seq_len, a smaller --preset, or --activation_checkpointing where there is one"
    )


def micro_batches(cfg, world_size, device_type, most=64):
    """Sequences per micro-step that divide the step evenly, at most `most`, largest first. Raises
    UserError where there are none."""
    each = grad_accum_steps(cfg, 1, world_size)  # a process's sequences of a step
    if device_type != "cuda":
        most = min(most, max(1, 16384 // cfg.seq_len))
    return [b for b in range(min(most, each), 0, -1) if each % b == 0]


def fits(model, size, cfg, world, precision):
    """Whether a micro-step of so many sequences fits, and what training holds beside it."""
    # AdamW's two moments and DDP's buckets come on top; with ZeRO-1 shares of the moments and of the
    # weights, and gradients that are kept over micro-steps. 5 % is left for fragments
    n = world.world_size
    copies = 1 + 3 / n if cfg.parallel == "zero1" and n > 1 else 3
    beside = copies * sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        idx = torch.randint(model.config.vocab_size, (size, cfg.seq_len), device=world.device)
        with precision.autocast():
            _, loss = model(idx, idx)
        loss.backward()
        ours = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
        return torch.cuda.max_memory_allocated(world.device) + beside < 0.95 * ours
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        idx = loss = None  # freed, or the next try would find less
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
