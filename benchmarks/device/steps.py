"""Decode steps over KV in pages, beside the time in which their bytes could be read.

L layers, P pages, S tokens of a page, G kv heads, H head dim.
"""

import statistics
from dataclasses import dataclass

import torch

from benchmarks.device.rates import times_s
from modeling.device.port import Device
from modeling.forward.decoder import Decoder
from modeling.forward.step_graphs import PagedSteps, StepGraphs

PAGE_TOKENS = 64
_STEPS = 10


@dataclass(frozen=True)
class StepTimes:
    """Times of one case, in milliseconds."""

    launched_ms: list[float]
    """Steps whose kernels are launched one by one."""
    captured_ms: list[float] | None
    """Steps that are replayed from a CUDA graph. None: not on this device."""
    num_bytes: int
    """Bytes that a step reads: weights but the embedding, and the KV of all rows."""


@torch.inference_mode()
def measure(decoder: Decoder, device: Device, batch: int, context: int, rounds: int) -> StepTimes:
    """Measure greedy steps of `batch` rows whose KV, of `context` tokens each at first, is random."""
    layout, where = decoder.layout, device.torch_device
    # Each way of running makes one step that is not counted, and a capture two more on padding.
    row_pages = -(-(context + 2 * (rounds * _STEPS + 1)) // PAGE_TOKENS)
    shape = (layout.num_layers, batch * row_pages, PAGE_TOKENS, 2, layout.num_kv_heads, layout.head_dim)
    pages_LPS2GH = torch.empty(shape, dtype=decoder.dtype, device=where).normal_()
    order = torch.randperm(batch * row_pages, device=where).int()
    steps = PagedSteps(decoder, pages_LPS2GH, order.view(batch, row_pages))
    is_gpu = where.type == "cuda"
    ways = [StepGraphs(steps, [batch], captures=captures) for captures in ((True, False) if is_gpu else (False,))]
    steps.lengths_B.fill_(context)
    steps.starts_E.copy_(torch.arange(batch + 1))
    found = [[1e3 * s for s in times_s(device, lambda way=way: way.run(batch), rounds, _STEPS)] for way in ways]  # type: ignore[misc]
    mean_keys = context + len(ways) * (rounds * _STEPS + 1) / 2
    num_bytes = _weight_bytes(decoder) + int(batch * mean_keys * layout.token_bytes)
    return StepTimes(found[-1], found[0] if is_gpu else None, num_bytes)


def roofline_ms(times: StepTimes, rate: float) -> float:
    """Return the milliseconds in which a memory of that many bytes a second reads what a step reads."""
    return 1e3 * times.num_bytes / rate


def best_ms(times: StepTimes) -> list[float]:
    """Return the times of the faster way."""
    ways = [times.launched_ms] if times.captured_ms is None else [times.launched_ms, times.captured_ms]
    return min(ways, key=statistics.median)


def _weight_bytes(decoder: Decoder) -> int:
    config, size = decoder.config, decoder.dtype.itemsize
    heads = config.num_heads + config.num_kv_heads
    layer = config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)
    return size * (config.num_layers * layer + config.vocab_size * config.hidden_size)
