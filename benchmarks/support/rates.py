"""Measures the rates of one core in the parts of a prefill: matrix products, attention, and memory copies.

Rates are measured on random data, and are medians over repeated runs. Every call blocks for about `seconds` seconds.
Rates that Baton also measures in production are in `deploy.machine.prefill_rates`.
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
"""Attention kernels for prefill on a CPU, by the names that output rows use."""
_CACHED_WIDTH = 256
_STREAM_BYTES = 2**27


def runnable(names: list[str]) -> list[str]:
    """Return the names of those kernels in KERNELS that this machine can run. Kernels that must be compiled are
    compiled first."""
    return [name for name in names if name != "native" or native.load()]


@dataclass(frozen=True)
class RateProbe:
    """Measurement of one kind of hardware rate, for example memory bandwidth. A prefill rank runs it."""

    kind: str
    """Kind of rate:

    - cached: bf16 matrix product within the second-level cache
    - stream: copy of more data than the caches hold
    - layer: matrix products of one layer
    - attention: causal attention with as many queries as keys
    """
    seconds: float
    shape: ModelShape
    num_tokens: int
    kernel: str = "native"

    def run(self) -> float:
        """Measure the rate and return it in FLOP/s. The rate of kind `stream` is in bytes per second, where bytes read
        and bytes written are both counted."""
        if self.kind == "cached":
            return matmul_rate(_CACHED_WIDTH, _CACHED_WIDTH, _CACHED_WIDTH, self.seconds)
        if self.kind == "stream":
            return stream_rate(self.seconds)
        if self.kind == "layer":
            return rate_of(layer_work(self.shape, self.num_tokens), self.seconds)
        work = attention_work(KERNELS[self.kernel], self.shape, (self.num_tokens, self.num_tokens))
        return rate_of(work, self.seconds)


def matmul_rate(num_rows: int, num_in: int, num_out: int, seconds: float) -> float:
    """Return the rate of torch's linear layer in bf16, in FLOP/s. The input has `num_rows` rows, and the weight has
    `num_in` inputs and `num_out` outputs."""
    x, weight = random_numbers(num_rows, num_in), random_numbers(num_out, num_in)
    return 2 * num_rows * num_in * num_out / median_s(lambda: torch.nn.functional.linear(x, weight), seconds)


def stream_rate(seconds: float) -> float:
    """Return the memory bandwidth in bytes per second, measured with a copy. Bytes read and bytes written are both
    counted."""
    source = torch.zeros(_STREAM_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * _STREAM_BYTES / median_s(lambda: target.copy_(source), seconds)
