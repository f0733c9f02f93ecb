"""Measures the rates of the parts of prefill on random data: a layer's matrices, attention, and reading memory.

FLOPs count a multiply-add as two, and of causal attention only the visible pairs. `core_rates` keeps what one core
reaches; benchmarks compare kernels by the same functions. Measurements block for `seconds` or a little more.

T tokens, N heads, G kv heads, H head dim.
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
"""Clock in seconds: elapsed time, or time.thread_time, which counts only the work of the calling thread."""
WALL: Clock = time.perf_counter
Work = tuple[Callable[[], object], float]
"""A call, and its FLOPs."""
_LEAST_REPEATS = 3
_READ_BYTES = 2**28


def layer_work(shape: ModelShape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Return the linears of a layer, as the decoder runs them here, over a chunk of `num_tokens`."""
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
    """Return a call of a kernel with (queries, keys): a causal square when the two are equal, else dense."""
    num_queries, num_keys = size
    q_TNH = random_numbers(num_queries, shape.num_heads, shape.head_dim, dtype=dtype)
    kv = random_numbers(num_keys, 2, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    rows, causal = KvRows(kv[:, 0], kv[:, 1], 0), num_queries == num_keys
    pairs = num_queries * (num_queries + 1) / 2 if causal else num_queries * num_keys
    return lambda: kernel(q_TNH, [rows], causal, None), shape.pair_flops * pairs


def rate_of(work: Work, seconds: float, clock: Clock = WALL) -> float:
    """Return FLOP/s of the work."""
    call, flops = work
    return flops / median_s(call, seconds, clock)


def read_rate(seconds: float) -> float:
    """Return the bytes a second that this process's threads together read from memory."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / median_s(data.sum, seconds)


def median_s(call: Callable[[], object], seconds: float, clock: Clock = WALL) -> float:
    """Return the median of a call's seconds by `clock`, after one that is not counted."""
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
    """Return random numbers of about 1."""
    return torch.randn(*size, dtype=torch.float32).to(dtype)
