"""The rates that one core reaches at the parts of prefill: matrices, attention, and moving memory.

Rates on random data, medians over repeats; every call blocks for `seconds` or a little more. FLOPs count a multiply-add
as two, and of causal attention only the visible pairs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modeling.forward.attention import Kernel, cpu_flash_kernel, has_native_kernel, native_kernel
from modeling.forward.linear import make_linear
from modeling.kv.buffers import KvRows
from planning.model_shape import ModelShape

KERNELS: Mapping[str, Kernel] = MappingProxyType({"native": native_kernel, "sdpa": cpu_flash_kernel})
"""Kernels of prefill attention on a CPU, by the names that results carry."""
_LEAST_REPEATS = 3
_CACHED_WIDTH = 256
_STREAM_BYTES = 2**27


def runnable(names: list[str]) -> list[str]:
    """Return those of KERNELS that this machine can run; builds a kernel that has to be built."""
    return [name for name in names if name != "native" or has_native_kernel()]


@dataclass(frozen=True)
class RateProbe:
    """A rate that a rank is asked to measure."""

    kind: str
    """Kind of rate. cached: bf16 matmul within the second-level cache; stream: a copy that no cache holds; layer: the
    matmuls of a layer; attention: a causal square."""
    seconds: float
    shape: ModelShape
    num_tokens: int
    kernel: str = "native"

    def run(self) -> float:
        """Measure and return FLOP/s; for stream, bytes a second, read and written."""
        if self.kind == "cached":
            return matmul_rate(_CACHED_WIDTH, _CACHED_WIDTH, _CACHED_WIDTH, self.seconds)
        if self.kind == "stream":
            return stream_rate(self.seconds)
        if self.kind == "layer":
            return layer_rate(self.shape, self.num_tokens, self.seconds)
        return attention_rate(KERNELS[self.kernel], self.shape, (self.num_tokens, self.num_tokens), self.seconds)


def matmul_rate(num_rows: int, num_in: int, num_out: int, seconds: float) -> float:
    """Return FLOP/s of torch's bf16 linear."""
    x, weight = _random(num_rows, num_in), _random(num_out, num_in)
    return 2 * num_rows * num_in * num_out / _seconds(lambda: torch.nn.functional.linear(x, weight), seconds)


def layer_rate(shape: ModelShape, num_tokens: int, seconds: float) -> float:
    """Return FLOP/s of a layer's bf16 linears, as the decoder runs them here, over a chunk of `num_tokens`."""
    width, heads = shape.hidden, shape.num_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    up = (2 if shape.gated else 1) * shape.ffn
    sizes = ((width, qkv), (heads, width), (width, up), (shape.ffn, width))
    layers = [(_random(num_tokens, num_in), make_linear(_random(num_out, num_in))) for num_in, num_out in sizes]

    def run() -> None:
        for x, linear in layers:
            linear(x)

    return shape.linear_flops * num_tokens / _seconds(run, seconds)


def attention_rate(kernel: Kernel, shape: ModelShape, size: tuple[int, int], seconds: float) -> float:
    """Return FLOP/s of a kernel with (queries, keys): a causal square when the two are equal, else dense."""
    num_queries, num_keys = size
    q_TNH = _random(num_queries, shape.num_heads, shape.head_dim)
    kv = _random(num_keys, 2, shape.num_kv_heads, shape.head_dim)
    rows, causal = KvRows(kv[:, 0], kv[:, 1], 0), num_queries == num_keys
    pairs = num_queries * (num_queries + 1) / 2 if causal else num_queries * num_keys
    return shape.pair_flops * pairs / _seconds(lambda: kernel(q_TNH, [rows], causal, None), seconds)


def stream_rate(seconds: float) -> float:
    """Return the bytes a second, read and written, of a copy."""
    source = torch.zeros(_STREAM_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * _STREAM_BYTES / _seconds(lambda: target.copy_(source), seconds)


def _seconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median of a call's seconds, after one that is not counted."""
    times: list[float] = []
    with torch.inference_mode():
        call()
        end_s = time.perf_counter() + seconds
        while len(times) < _LEAST_REPEATS or time.perf_counter() < end_s:
            start_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _random(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float32).to(torch.bfloat16)
