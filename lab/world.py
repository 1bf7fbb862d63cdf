"""The processes of a run and the device of this one."""

import datetime
import os
import sys

import torch
import torch.distributed as dist

from lab.cli import UserError, say
from lab.device import find_device


class World:
    """Who this process is among those that torchrun started. A lone process has the same methods,
    doing nothing. It does not start the process group: the program does, in one line."""

    def __init__(self, device="auto", timeout=600):
        """timeout: seconds until a process that does not answer is taken for lost."""
        self.timeout = datetime.timedelta(seconds=timeout)
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main, self.distributed = self.rank == 0, self.world_size > 1
        self.device = find_device(device, self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # before NCCL starts, or all open a context on GPU 0
        # gloo carries what is on the CPU, NCCL what is on GPUs
        self.backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        self.device_id = self.device if self.device.type == "cuda" else None

    def say(self, text):
        """A line for people, from rank 0 alone."""
        if self.is_main:
            say(text, sys.stdout)

    def all_reduce(self, tensor):
        """The sum of all processes' tensors, in place."""
        if self.distributed:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, number):
        """The mean of all processes' numbers."""
        return self.all_reduce(torch.tensor(number, dtype=torch.float64)).item() / self.world_size

    def all(self, condition):
        """Whether it is true on every process; through the CPU, so that no GPU waits."""
        return self.all_reduce(torch.tensor(int(not condition))).item() == 0

    def all_gather(self, every, mine, async_op=False):
        """every (processes * n, ...): each process's mine (n, ...), one after the other."""
        # torch 2.13 has another name for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(every, mine, async_op=async_op)

    def gather(self, value):
        """Every process's value, as a list."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value):
        """Rank 0's value, on every process."""
        box = [value]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, work):
        """What work() returns on rank 0, which alone calls it; a UserError is raised on all."""
        found = None
        if self.is_main:
            try:
                found = work()
            except UserError as error:
                found = error
        found = self.broadcast(found)
        if isinstance(found, UserError):
            raise found
        return found

    def barrier(self):
        """Nobody goes on before all are here."""
        self.all(True)

    def synchronize(self):
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
