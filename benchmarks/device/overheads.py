"""Measures fixed costs of a device: kernel launches by the host, replays of CUDA graphs, and allocation of pinned
memory.

Launch times are host times, because the host does not wait for the device between launches. On devices other than a
GPU, only launches of torch operators are measured.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.kernels.triton.pointwise import rms_norm
from benchmarks.device.rates import synchronize, times_s

_LAUNCHES = 200
_NODES = 360
"""Number of nodes of the measured CUDA graph: as many as the kernels in one decode step of a model with 32 layers."""
_ROUNDS = 5


def launches_us(device: Device) -> dict[str, float]:
    """Return the host's time per launch in microseconds, by kind of launch. The kinds are a torch operator, a Triton
    kernel of Baton, and a node of a replayed CUDA graph. The time of a graph node includes the device's time."""
    x_TD = torch.zeros(1, 256, device=device.torch_device)
    found = {"torch operator": _us(device, lambda: x_TD.add_(1.0))}
    if x_TD.is_cuda:
        weight_D = torch.ones(256, device=device.torch_device)
        found["Triton kernel"] = _us(device, lambda: rms_norm(x_TD, weight_D, 1e-5))
        found["node of a graph"] = _graph_us(device, x_TD) / _NODES
    return found


def pinning_ms(num_bytes: int) -> float:
    """Return the time in milliseconds to allocate and pin `num_bytes` bytes of host memory. Requires a GPU."""
    began_s = time.perf_counter()
    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return 1e3 * (time.perf_counter() - began_s)


def _us(device: Device, launch: Callable[[], object]) -> float:
    launch()
    found = []
    for _ in range(_ROUNDS):
        synchronize(device)
        began_s = time.perf_counter()
        for _ in range(_LAUNCHES):
            launch()
        found.append(1e6 * (time.perf_counter() - began_s) / _LAUNCHES)
    return statistics.median(found)


def _graph_us(device: Device, x_TD: Tensor) -> float:
    """Return the microseconds from the launch to the end of a graph of `_NODES` tiny kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NODES):
            x_TD.add_(1.0)
    return 1e6 * statistics.median(times_s(device, graph.replay))
