"""Measures the rates of a device's operations on random data: a layer's matrix products, attention, reading memory,
launching kernels, and copies between host and device.

A multiply-add counts as two FLOPs. In causal attention only the visible query-key pairs are counted.
`deploy.machine.device_profile` stores the rates of a device. Benchmarks compare kernels with the functions of this
module. The parameter `seconds` is the approximate duration of a measurement, during which the function blocks.

Shape suffixes: B sequences, C pages of a sequence, E the ends of sequences, P pages, S tokens of a page, T tokens, N
heads, G kv heads, H head dim.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import Kernel
from baton.modeling.forward.linear import make_linear
from baton.modeling.kernels.triton.decode import decode_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kv.buffers import BufferSpan, KvRows
from baton.modeling.kv.pages import PAGE_TOKENS
from baton.planning.model_shape import ModelShape
from baton.types import TokenRange
from deploy.machine.probe import write_model

Clock = Callable[[], float]
"""Function that returns a time in seconds. It is either elapsed time, or `time.thread_time`, the processor time of the
calling thread."""
Work = tuple[Callable[[], object], float]
"""Pair of a function to be timed and the number of FLOPs of one call, or of the bytes or layers whose rate is
measured."""
CPU = torch.device("cpu")
_LEAST_REPEATS = 3
_READ_BYTES = 2**28
_CACHE_BYTES = 2**24
"""Upper estimate of the bytes of a processor's caches for each of its cores."""
_DECODES = 8
"""Number of calls of decode attention that are timed together, so that launching them takes no noticeable time."""


def layer_work(
    shape: ModelShape, num_tokens: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU
) -> Work:
    """Return a function that runs all linear layers of one decoder layer on a chunk of `num_tokens` tokens, and its
    number of FLOPs. The function uses the kernels that the decoder uses on this machine."""
    width, heads = shape.hidden, shape.num_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    up = (2 if shape.gated else 1) * shape.active_ffn
    make = partial(random_numbers, dtype=dtype, device=device)
    sizes = ((width, qkv), (heads, width), (width, up), (shape.active_ffn, width))
    layers = [(make(num_tokens, num_in), make_linear(make(num_out, num_in))) for num_in, num_out in sizes]

    def run() -> None:
        for x, linear in layers:
            linear(x)

    return run, shape.linear_flops * num_tokens


def attention_work(
    kernel: Kernel,
    shape: ModelShape,
    size: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> Work:
    """Return a function that runs an attention kernel on random data, and its number of FLOPs. `size` is a pair (number
    of queries, number of keys). If the two numbers are equal, attention is causal. Otherwise every query attends to
    every key."""
    num_queries, num_keys = size
    q_TNH = random_numbers(num_queries, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    kv = random_numbers(num_keys, 2, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    rows, causal = KvRows(kv[:, 0], kv[:, 1], 0), num_queries == num_keys
    pairs = num_queries * (num_queries + 1) / 2 if causal else num_queries * num_keys
    return lambda: kernel(q_TNH, [rows], causal, None), shape.pair_flops * pairs


def decode_work(shape: ModelShape, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Work:
    """Return a function that runs the decode attention of one layer on a GPU several times, and the number of bytes of
    KV that it reads. `size` is a pair (number of sequences, number of keys of each). The keys are in pages in random
    order."""
    batch, num_keys = size
    row_pages = -(-num_keys // PAGE_TOKENS)
    pages_PS2GH = random_numbers(
        *(batch * row_pages, PAGE_TOKENS, 2, shape.num_kv_heads, shape.head_dim), dtype=dtype, device=device
    )
    order = torch.randperm(batch * row_pages, device=device).to(torch.int32)
    rows = StepRows(
        table_BC=order.view(batch, row_pages),
        lengths_B=torch.full((batch,), num_keys, dtype=torch.int32, device=device),
        starts_E=torch.arange(batch + 1, dtype=torch.int32, device=device),
        most_queries=1,
        most_keys=num_keys,
    )
    q_BNH = random_numbers(batch, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    return lambda: [decode_attention(q_BNH, pages_PS2GH, rows) for _ in range(_DECODES)], _DECODES * pages_PS2GH.nbytes


def launch_work(shape: ModelShape, num_tokens: int, dtype: str, device: Device) -> Work:
    """Return a function that prefills a prompt of `num_tokens` tokens with a decoder of random weights on `device`, and
    the number of the decoder's layers. With few tokens and small layers, the time of a layer on a GPU is the time of
    launching its kernels."""
    with tempfile.TemporaryDirectory(prefix="baton-launches-") as folder:
        write_model(Path(folder), shape, dtype, shape.num_layers)
        decoder = load_decoder(Path(folder), dtype=dtype, device=device)
    tokens = TokenRange(0, num_tokens)
    span = BufferSpan(device.buffer(decoder.layout, tokens), tokens)
    return lambda: decoder.forward([1] * num_tokens, [span]), shape.num_layers


def copy_work(device: torch.device) -> Work:
    """Return a function that copies bytes from pinned host memory to a GPU, and the number of bytes."""
    home = torch.zeros(_READ_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_READ_BYTES, dtype=torch.uint8, device=device)
    return lambda: there.copy_(home, non_blocking=True), _READ_BYTES


def read_work(num_threads: int) -> Work:
    """Return a function that reads from host memory with all threads of torch, and the number of bytes. They exceed the
    caches of `num_threads` cores."""
    num_bytes = max(_READ_BYTES, num_threads * _CACHE_BYTES)
    return torch.ones(num_bytes // 4).sum, num_bytes


def rate_of(work: Work, seconds: float, clock: Clock = time.perf_counter) -> float:
    """Time the function in `work` for about `seconds` seconds, and return its rate: the work of a call divided by the
    median duration of a call."""
    call, amount = work
    return amount / median_s(call, seconds, clock)


def median_s(call: Callable[[], object], seconds: float, clock: Clock = time.perf_counter) -> float:
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


def random_numbers(*size: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU) -> Tensor:
    """Return a tensor of normally distributed random numbers."""
    return torch.randn(*size, dtype=torch.float32, device=device).to(dtype)
