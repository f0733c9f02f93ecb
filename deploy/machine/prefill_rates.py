"""Measures the rates of the operations of prefill on random data: a layer's matrix products, attention, and reading
memory.

A multiply-add counts as two FLOPs. In causal attention only the visible query-key pairs are counted. `core_rates`
stores the rates of one core. Benchmarks compare kernels with the functions of this module. The parameter `seconds` is
the approximate duration of a measurement, during which the function blocks.

Shape suffixes: T tokens, N heads, G kv heads, H head dim.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.modeling.forward.attention import Kernel
from baton.modeling.forward.linear import make_linear
from baton.modeling.kv.buffers import KvRows
from baton.planning.model_shape import ModelShape

Clock = Callable[[], float]
"""Function that returns a time in seconds. It is either elapsed time, or `time.thread_time`, the processor time of the
calling thread."""
WALL: Clock = time.perf_counter
Work = tuple[Callable[[], object], float]
"""Pair of a function to be timed and the number of FLOPs of one call."""
_LEAST_REPEATS = 3
_READ_BYTES = 2**28


def layer_work(shape: ModelShape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Return a function that runs all linear layers of one decoder layer on a chunk of `num_tokens` tokens, and its
    number of FLOPs. The function uses the kernels that the decoder uses on this machine."""
    width, heads = shape.hidden, shape.num_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    up = (2 if shape.gated else 1) * shape.active_ffn
    sizes = ((width, qkv), (heads, width), (width, up), (shape.active_ffn, width))
    layers = [
        (random_numbers(num_tokens, num_in, dtype=dtype), make_linear(random_numbers(num_out, num_in, dtype=dtype)))
        for num_in, num_out in sizes
    ]

    def run() -> None:
        for x, linear in layers:
            linear(x)

    return run, shape.linear_flops * num_tokens


def attention_work(
    kernel: Kernel, shape: ModelShape, size: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Work:
    """Return a function that runs an attention kernel on random data, and its number of FLOPs. `size` is a pair (number
    of queries, number of keys). If the two numbers are equal, attention is causal. Otherwise every query attends to
    every key."""
    num_queries, num_keys = size
    q_TNH = random_numbers(num_queries, shape.num_heads, shape.head_dim, dtype=dtype)
    kv = random_numbers(num_keys, 2, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    rows, causal = KvRows(kv[:, 0], kv[:, 1], 0), num_queries == num_keys
    pairs = num_queries * (num_queries + 1) / 2 if causal else num_queries * num_keys
    return lambda: kernel(q_TNH, [rows], causal, None), shape.pair_flops * pairs


def rate_of(work: Work, seconds: float, clock: Clock = WALL) -> float:
    """Time the function in `work` for about `seconds` seconds, and return its rate in FLOP/s."""
    call, flops = work
    return flops / median_s(call, seconds, clock)


def read_rate(seconds: float) -> float:
    """Return the bytes per second that all threads of this process together read from memory."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / median_s(data.sum, seconds)


def median_s(call: Callable[[], object], seconds: float, clock: Clock = WALL) -> float:
    """Call `call` repeatedly for about `seconds` seconds, and return the median duration of a call, in seconds. `clock`
    measures the durations. The first call is not counted."""
    times: list[float] = []
    with torch.inference_mode():
        call()
        end_s = time.perf_counter() + seconds
        while len(times) < _LEAST_REPEATS or time.perf_counter() < end_s:
            start_s = clock()
            call()
            times.append(clock() - start_s)
    return statistics.median(times)


def random_numbers(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor of normally distributed random numbers."""
    return torch.randn(*size, dtype=torch.float32).to(dtype)
