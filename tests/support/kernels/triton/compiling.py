"""Compilation of the Triton kernels on a machine without a GPU. Each operator runs up to its kernel launch, which
compiles the kernel.

Call it only in a separate process, because it registers a fake GPU with Triton until the process ends.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.modeling.forward.drawing import compile_draws
from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.copies import copy_heads, copy_rows
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.launch import launching_by
from baton.modeling.kernels.triton.pointwise import gate, rms_norm, turn_heads
from baton.modeling.kernels.triton.prefill import Visibility, prefill_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows, span_attention
from baton.modeling.kernels.triton.tiles import prefill_tiles, span_tiles


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel."""

    name: str
    shared_bytes: int
    """Shared memory in bytes that a program uses."""
    num_cubin_bytes: int
    num_registers: int
    """Number of registers of a thread."""
    num_spilled_bytes: int
    """Bytes of local memory of a thread: registers that do not fit, and arrays with variable indices."""


class AbsentGpu:
    """Fake driver with what Triton needs to compile for architecture 9.0. It cannot launch kernels."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compiled(dtype: torch.dtype, head_dim: int, group: int, most_queries: int) -> list[Compiled]:
    """Call each operator on the CPU with its default block sizes, and return the compiled kernels."""
    return _compiling(lambda: _call_all(dtype, head_dim, group, most_queries))


def compiled_wide(
    dtype: torch.dtype, head_dim: int, shared_bytes: int | None, window: int | None = None
) -> list[Compiled]:
    """Compile prefill attention, over a segment of keys and over pages, with the block sizes that are chosen for
    `shared_bytes` of shared memory per program."""
    q_TNH, kv_SGH = torch.zeros(300, 8, head_dim, dtype=dtype), torch.zeros(300, 2, head_dim, dtype=dtype)
    tiles = prefill_tiles(head_dim, dtype, len(q_TNH), shared_bytes)
    pages_PS2GH = torch.zeros(8, 64, 2, 2, head_dim, dtype=dtype)
    rows = StepRows(_whole(2, 16), _whole(2), _whole(3), most_queries=256, most_keys=1024)
    spans = SpanRows(rows, _whole(4, 2), span_tiles(head_dim, dtype, shared_bytes))

    def call() -> None:
        prefill_attention(q_TNH, kv_SGH, kv_SGH, Visibility(), tiles=tiles)
        span_attention(q_TNH, pages_PS2GH, spans, window=window)

    return _compiling(call)


def compiled_sampler(vocab_size: int) -> list[Compiled]:
    """Compile the kernels that draw tokens from a vocabulary."""
    return _compiling(lambda: compile_draws(torch.zeros(2, vocab_size)))


def _compiling(call: Callable[[], object]) -> list[Compiled]:
    from triton.runtime.driver import driver

    found: list[Compiled] = []

    def compile_kernel(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        made = kernel.run(*arguments, grid=grid, warmup=True, **options)
        found.append(Compiled(kernel.__name__, made.metadata.shared, len(made.asm["cubin"]), *_resources(made)))

    driver.set_active(AbsentGpu())
    with launching_by(compile_kernel):
        call()
    return found


def _resources(made: Any) -> tuple[int, int]:
    """Return the number of registers of a thread, and the number of bytes of registers that a thread spills to local
    memory, of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(knobs.nvidia.cuobjdump.path), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _call_all(dtype: torch.dtype, head_dim: int, group: int, most_queries: int) -> None:
    num_kv_heads, page_tokens, num_rows = 2, 16, 4
    pages_PS2GH = torch.zeros(8, page_tokens, 2, num_kv_heads, head_dim, dtype=dtype)
    rows = StepRows(_whole(num_rows, 64), _whole(num_rows), _whole(num_rows + 1), most_queries, 1024)
    q_TNH = torch.zeros(300, num_kv_heads * group, head_dim, dtype=dtype)
    kv_S2GH = torch.zeros(500, 2, num_kv_heads, head_dim, dtype=dtype)
    decode_attention(q_TNH[: num_rows * most_queries], pages_PS2GH, rows)
    picks = _whole(num_rows, num_kv_heads, 200), _whole(num_rows, num_kv_heads)
    seen = SeenKeys(window=100, picks=picks, unseen_B2=_whole(num_rows, 2))
    decode_attention(q_TNH[: num_rows * most_queries], pages_PS2GH, rows, seen)
    prefill_attention(q_TNH, kv_S2GH[:, 0], kv_S2GH[:, 1], Visibility())
    append_kv(kv_S2GH[:num_rows, 0], kv_S2GH[:num_rows, 1], pages_PS2GH, _whole(num_rows))
    span_attention(q_TNH, pages_PS2GH, SpanRows(rows, _whole(4, 2), span_tiles(head_dim, dtype, None)))
    home_B, there_B = torch.zeros(2, num_rows, dtype=torch.int64)
    head_bytes = head_dim * dtype.itemsize
    copy_heads(home_B, there_B, _whole(num_rows, num_kv_heads, 200, 2), _whole(num_rows, num_kv_heads), head_bytes)
    copy_rows(home_B, there_B, 2 * num_kv_heads * head_bytes)
    channels_TD = torch.zeros(num_rows, 2 * head_dim, dtype=dtype)
    rms_norm(channels_TD, channels_TD[0], 1e-5)
    gate(channels_TD)
    turn_heads(q_TNH, *torch.zeros(2, len(q_TNH), 1, head_dim, dtype=dtype))


def refusal_on_cpu() -> str:
    """Return the error with which prefill attention refuses CPU tensors if Triton's interpreter is off; empty if it
    accepts them."""
    q_TNH, kv_SGH = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    try:
        prefill_attention(q_TNH, kv_SGH, kv_SGH)
    except RuntimeError as error:
        return str(error)
    return ""


def _whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
