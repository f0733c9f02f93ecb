"""Rates of one core for the parts of prefill: matrices, attention, and copying memory.

Rates are measured on random data, as medians over repeats. Every call blocks for about `seconds`. Rates that the
product also measures are in `deploy.machine.prefill_rates`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from baton.modeling.forward.attention import Kernel, cpu_flash_kernel, native_kernel
from baton.modeling.kernels import native
from baton.planning.model_shape import ModelShape
from deploy.machine.prefill_rates import attention_work, layer_work, median_s, random_numbers, rate_of

KERNELS: Mapping[str, Kernel] = MappingProxyType({"native": native_kernel, "sdpa": cpu_flash_kernel})
"""Kernels of prefill attention on a CPU, by their names in results."""
_CACHED_WIDTH = 256
_STREAM_BYTES = 2**27


def runnable(names: list[str]) -> list[str]:
    """Return those of KERNELS that this machine can run; builds a kernel that has to be built."""
    return [name for name in names if name != "native" or native.load()]


@dataclass(frozen=True)
class RateProbe:
    """A rate that a rank measures."""

    kind: str
    """Kind of rate: cached (bf16 matmul within the second-level cache), stream (a copy larger than the caches), layer
    (the matmuls of a layer) or attention (causal, with as many queries as keys)."""
    seconds: float
    shape: ModelShape
    num_tokens: int
    kernel: str = "native"

    def run(self) -> float:
        """Measure the rate in FLOP/s; for stream, in bytes per second read and written together."""
        if self.kind == "cached":
            return matmul_rate(_CACHED_WIDTH, _CACHED_WIDTH, _CACHED_WIDTH, self.seconds)
        if self.kind == "stream":
            return stream_rate(self.seconds)
        if self.kind == "layer":
            return rate_of(layer_work(self.shape, self.num_tokens), self.seconds)
        work = attention_work(KERNELS[self.kernel], self.shape, (self.num_tokens, self.num_tokens))
        return rate_of(work, self.seconds)


def matmul_rate(num_rows: int, num_in: int, num_out: int, seconds: float) -> float:
    """Return the FLOP/s of torch's bf16 linear."""
    x, weight = random_numbers(num_rows, num_in), random_numbers(num_out, num_in)
    return 2 * num_rows * num_in * num_out / median_s(lambda: torch.nn.functional.linear(x, weight), seconds)


def stream_rate(seconds: float) -> float:
    """Return the bytes per second that a copy reads and writes together."""
    source = torch.zeros(_STREAM_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * _STREAM_BYTES / median_s(lambda: target.copy_(source), seconds)
