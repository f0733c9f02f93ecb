"""Measures fixed costs of a device: launches from the host, replays of CUDA graphs, allocation of pinned memory.

Times of launches are the host's: it does not wait for the device in between. On other devices than a GPU only torch's
own launches are measured.
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
"""Kernels of a decode step of a model of 32 layers."""
_ROUNDS = 5


def launches_us(device: Device) -> dict[str, float]:
    """Return the host's microseconds of one launch, by what is launched: an operator of torch, a kernel of ours in
    Triton, and a node of a replayed graph, the device's time included."""
    x_TD = torch.zeros(1, 256, device=device.torch_device)
    found = {"torch operator": _us(device, lambda: x_TD.add_(1.0))}
    if x_TD.is_cuda:
        weight_D = torch.ones(256, device=device.torch_device)
        found["Triton kernel"] = _us(device, lambda: rms_norm(x_TD, weight_D, 1e-5))
        found["node of a graph"] = _graph_us(device, x_TD) / _NODES
    return found


def pinning_ms(num_bytes: int) -> float:
    """Return the milliseconds in which `num_bytes` bytes of host memory are allocated and pinned. Needs a GPU."""
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
    """Return the microseconds of a graph of `_NODES` tiny kernels, from its launch to its end."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NODES):
            x_TD.add_(1.0)
    return 1e6 * statistics.median(times_s(device, graph.replay))
