"""How the programs of this folder time a device, and forget what they have measured."""

import gc
import time

import torch


def moment(device):
    """A moment in the device's work, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(moments, device):
    """Between each moment and the next; the device must be idle."""
    pairs = zip(moments, moments[1:])
    if device.type != "cuda":
        return [1000 * (b - a) for a, b in pairs]
    return [a.elapsed_time(b) for a, b in pairs]


def time_updates(run, count):
    """(milliseconds of each of so many updates, losses of this process's part of them, gpu_state)
    of a Run."""
    device, losses = run.world.device, []
    run.world.synchronize()
    moments = [moment(device)]
    for _ in range(count):
        losses.append(run.update()[0])
        moments.append(moment(device))
    run.world.synchronize()
    return milliseconds(moments, device), [loss.sum().item() for loss in losses], gpu_state(device)


def gpu_state(device):
    """Which GPU it is, as those of one name differ."""
    cuda = device.type == "cuda"
    return {"uuid": str(torch.cuda.get_device_properties(device).uuid)} if cuda else {}


def peak_gib(device):
    """Most memory that torch has held since the last forget(), in GiB; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def forget(device):
    """Let go of what the last measurement has compiled and allocated."""
    torch.compiler.reset()
    gc.collect()  # DDP and compiled models hold themselves
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
