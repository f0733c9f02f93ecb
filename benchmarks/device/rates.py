"""Measures the rates of a device and of its link. The minimum time of a step or a prefill is computed from these
rates."""

import statistics
import time
from collections.abc import Callable

import torch

from baton.modeling.device.port import Device

_ROUNDS = 5


def synchronize(device: Device) -> None:
    """Wait until the device has completed all submitted work."""
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize(device.torch_device)


def times_s(device: Device, run: Callable[[], object], rounds: int = _ROUNDS, repeats: int = 1) -> list[float]:
    """Measure `run` in `rounds` rounds of `repeats` calls each, after one warm-up call. Return the mean seconds per
    call of each round."""
    run()
    found = []
    for _ in range(rounds):
        synchronize(device)
        began_s = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        found.append((time.perf_counter() - began_s) / repeats)
    return found


def memory_rate(device: Device, num_bytes: int) -> float:
    """Return the device's memory bandwidth in bytes per second, measured with a copy of `num_bytes` bytes on the
    device. Bytes read and bytes written are both counted."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    to = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(times_s(device, lambda: to.copy_(source)))


def product_rate(device: Device, size: int, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a product of two random `size` x `size` matrices."""
    a, b = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / statistics.median(times_s(device, lambda: a @ b, repeats=5))


def link_rates(device: Device, num_bytes: int) -> tuple[float, float]:
    """Return the rates in bytes per second of copies of `num_bytes` bytes: (from host to device, from device to host).
    On a GPU, the host memory is pinned."""
    is_gpu = device.torch_device.type == "cuda"
    home = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    fetch_s = times_s(device, lambda: device.link.fetch([(there, home)], after=None).result())
    store_s = times_s(device, lambda: device.link.store([(home, there)]).result())
    return num_bytes / statistics.median(fetch_s), num_bytes / statistics.median(store_s)
