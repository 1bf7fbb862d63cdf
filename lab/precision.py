"""Numeric precision: which dtype a device computes in. Used by everything that runs a model."""

import torch

from lab.cli import UserError


class Precision:
    """The precision of a run, probed on its device.

    name: the precision in use, "bf16", "fp16", "tf32" or "fp32"; "auto" becomes the best that the
    device supports. dtype: the dtype of matmuls under autocast, None for float32. scaler: torch's loss
    scaler, enabled for fp16 only. Raises UserError for fp16 on a CPU, and for 16 bits on MPS in old
    versions of torch.
    """

    def __init__(self, name: str, device: torch.device):
        self.device = device
        cuda = device.type == "cuda"
        if name == "auto" and cuda:
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            fp16 = torch.cuda.get_device_capability(device) >= (7, 0)
            name = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        elif name == "auto" or (name == "tf32" and not cuda):
            name = "fp32"  # on CPU and MPS, 16 bits are used only on request; TF32 exists only on NVIDIA GPUs
        if name == "fp16" and device.type == "cpu":
            raise UserError("precision=fp16 needs a GPU; on CPU use fp32 or bf16")
        if name in ("bf16", "fp16") and device.type == "mps" and torch.__version__ < "2.14":
            raise UserError(
                f"{name} on MPS needs torch 2.14, because attention of torch {torch.__version__} sees later "
                "tokens there (pytorch/pytorch#195910); upgrade torch, or use fp32"
            )
        self.name = name
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.is_16_bit = self.dtype is not None
        # fp16 rounds numbers below 3e-8 to 0, so the scaler multiplies the loss by a large factor
        # (Micikevicius et al. 2018, 3.2)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        """Matmuls in 16 bits, if that is the precision; weights, gradients and loss stay in float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.is_16_bit)

    def set_matmul_precision(self) -> None:
        """On a GPU, let matmuls in float32 round their inputs to TF32 (10 mantissa bits), except if the
        precision is fp32. This is a global setting of torch, so each run sets it again."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if self.name == "fp32" else "high")


def is_bf16_autocast(x: torch.Tensor) -> bool:
    """Whether autocast computes matmuls with x in bf16."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
