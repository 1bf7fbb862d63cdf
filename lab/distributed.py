"""Processes of a run: rank, device and collectives. Used by every program that trains or evaluates."""

import datetime
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lab.cli import UserError, eprint, listed, require, torchrun_env
from lab.hardware import resolve_device


class World:
    """Rank, world size and device of this process. Its collectives do nothing if world_size is 1.

    It does not initialize the process group; each program calls dist.init_process_group itself.
    """

    def __init__(self, device: str = "auto", timeout: int = 600):
        """timeout: seconds after which a process that does not answer is considered lost."""
        self.timeout = datetime.timedelta(seconds=timeout)
        self.rank, self.local_rank, self.world_size = torchrun_env()
        self.is_main, self.distributed = self.rank == 0, self.world_size > 1
        self.device = resolve_device(device, self.local_rank)
        if self.distributed and self.device.type == "mps":
            raise UserError(
                "device=mps works in one process only; pass --device cpu, or no torchrun"
            )
        if self.device.type == "cuda":
            # before NCCL starts, because otherwise every rank opens a context on GPU 0
            torch.cuda.set_device(self.device)
        # gloo for tensors on the CPU, NCCL for those on GPUs
        self.backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        self.device_id = self.device if self.device.type == "cuda" else None

    def print0(self, text: str) -> None:
        """Print a line on rank 0 only."""
        if self.is_main:
            eprint(text, sys.stdout)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, number: float) -> float:
        """Mean of a number over all ranks."""
        return self.all_reduce(torch.tensor(number, dtype=torch.float64)).item() / self.world_size

    def all_true(self, condition: bool) -> bool:
        """Whether the condition holds on every rank; reduced on the CPU, so that no GPU waits."""
        return self.all_reduce(torch.tensor(int(not condition))).item() == 0

    def all_gather_into(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> Any:
        """Gather `input` (n, ...) of all ranks into `output` (world_size * n, ...)."""
        # renamed in torch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output, input, async_op=async_op)

    def gather(self, value: Any) -> list:
        """Every rank's value, as a list."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def run_on_rank0(self, work: Callable[[], Any]) -> Any:
        """Call work() on rank 0 only and return its result, or raise its UserError, on every rank."""
        result = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, UserError):
            raise result
        return result

    def barrier(self) -> None:
        """Block until every rank arrives."""
        self.all_true(True)

    def synchronize(self) -> None:
        """Wait until the device has finished all work launched so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()


class AsyncCopy:
    """Asynchronous copy of a tensor from the device to the CPU.

    wait() blocks only until this copy is complete. item() would also wait for all work launched since,
    and the GPU would then idle while the CPU launches the next step.
    """

    def __init__(self, tensor: torch.Tensor):
        cuda = tensor.is_cuda
        copy = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        self.copy = copy.copy_(tensor, non_blocking=cuda)
        self.event = torch.cuda.Event() if cuda else None
        if self.event:
            self.event.record()

    def wait(self) -> torch.Tensor:
        if self.event:
            self.event.synchronize()
        return self.copy


def warmup_ddp_buckets(model: torch.nn.Module, precision) -> None:
    """Run one backward pass and discard it, so that DDP rebuilds its buckets before the first update.

    DDP sorts its buckets after the first backward pass. With three ranks or more the order affects how
    sums are rounded, so without this the first update of a resumed run would differ from the same
    update of an uninterrupted run. Raises UserError for parameters without a gradient, for which DDP
    would wait.
    """
    idx = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with precision.autocast():
        _, loss = model(idx, idx)
    loss.backward()
    named = [(n.removeprefix("module."), p) for n, p in model.named_parameters()]
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    require(
        not unused,
        f"the loss does not depend on some parameters, for which DDP would wait: {listed(unused, 1)}; "
        "remove them, or look for a detach() or no_grad()",
    )
    model.zero_grad(set_to_none=True)
