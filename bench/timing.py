"""Time and memory of a device. Used by other programs of bench/."""

import gc
import time

import torch


def timestamp(device):
    """Record a timestamp in the device's queue, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(timestamps, device):
    """Milliseconds between consecutive timestamps; the device must be idle."""
    pairs = zip(timestamps, timestamps[1:])
    if device.type != "cuda":
        return [1000 * (b - a) for a, b in pairs]
    return [a.elapsed_time(b) for a, b in pairs]


def time_updates(trainer, count):
    """Time `count` updates. Returns (milliseconds of each, this rank's loss of each, gpu_state)."""
    device, losses = trainer.world.device, []
    trainer.world.synchronize()
    timestamps = [timestamp(device)]
    for _ in range(count):
        losses.append(trainer.train_step()[0])
        timestamps.append(timestamp(device))
    trainer.world.synchronize()
    return (
        milliseconds(timestamps, device),
        [loss.sum().item() for loss in losses],
        gpu_state(device),
    )


def gpu_state(device):
    """The UUID of the GPU, because GPUs with the same name differ in speed."""
    cuda = device.type == "cuda"
    return {"uuid": str(torch.cuda.get_device_properties(device).uuid)} if cuda else {}


def peak_gib(device):
    """Peak memory allocated by torch since the last reset_state(), in GiB; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def reset_state(device):
    """Free what the previous measurement compiled and allocated, and reset the memory peak."""
    torch.compiler.reset()
    gc.collect()  # DDP and compiled models are reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
