"""Interface of a compute device: its memory, the host memory, and the link that copies between the two.

`making` creates a device by name. Implementations:

    cpu       Device memory is host memory. No copy over a link is needed.
    cuda      A GPU. Host memory is pinned, and copies run on their own CUDA streams.
    emulated  The CPU computes in a separate memory region, the arena. Every byte between the arena and host memory
              is copied and counted, and takes as long as on a link of the configured rate.

The decoder runs attention and linear layers on `torch_device`. A tensor stays in the memory in which it was allocated.
Only a link accesses both memories.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pool_memory import PoolMemory
from baton.modeling.kv.row_memory import RowMemory
from baton.modeling.kv.transfers import Transfer
from baton.types import KvLayout, TokenRange

Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors to copy, as pairs `(target, source)`. Both tensors of a pair are contiguous and have the same shape and
dtype."""


def num_bytes_of(copies: Copies) -> int:
    """Return the total number of bytes of these copies."""
    return sum(source.nbytes for _, source in copies)


class Link(Protocol):
    """Copies between host memory and a device's memory. Copies in one direction run in the order of the calls.
    Thread-safe."""

    @property
    def num_bytes_fetched(self) -> int:
        """Return the number of bytes that have been copied to the device."""

    @property
    def num_bytes_stored(self) -> int:
        """Return the number of bytes that have been copied to host memory."""

    def queued(self) -> Transfer:
        """Return the work that this thread has queued on the device so far, as a transfer that ends with it."""

    def fetch(self, copies: Copies, *, after: Transfer | None) -> Transfer:
        """Start to copy from host memory to the device. The copies begin when `after` has ended. Pass `queued()` if
        queued work may still use the memory that they overwrite. None: they do not wait for any work of the device."""

    def store(self, copies: Copies) -> Transfer:
        """Start to copy from the device to host memory. The copy begins after the work that this thread has queued on
        the device."""

    def rest(self) -> None:
        """Wait for the requested copies, and end the threads that copy. Later copies start the threads again.
        Idempotent."""


@dataclass(frozen=True)
class MemoryUse:
    """Limit, current use and peak use of a device's memory, in bytes."""

    limit_bytes: int | None
    """Number of bytes that this process may use. None: only the size of host memory limits the number."""
    num_bytes: int
    """Number of bytes that are in use now."""
    peak_bytes: int
    """Maximum number of bytes that have been in use at the same time."""


NO_MEMORY = MemoryUse(None, 0, 0)
"""MemoryUse of a device that computes in host memory. Such a device does not count its own memory."""


class Device(Protocol):
    """Device that computes for one process."""

    @property
    def name(self) -> str:
        """Return the device's name: cpu, cuda or emulated."""

    @property
    def torch_device(self) -> torch.device:
        """Return the torch device on which tensors in the device's memory are allocated."""

    @property
    def is_home(self) -> bool:
        """Return True if the device computes in host memory. In this case no copies over a link are needed."""

    @property
    def link(self) -> Link:
        """Return the link that copies between host memory and the device's memory."""

    @property
    def memory_use(self) -> MemoryUse:
        """Return the limit, the current use and the peak use of the device's memory."""

    def row_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Create device memory for the KV of one sequence of up to `max_tokens` tokens. Raises OSError, or one of the
        errors in OUT_OF_MEMORY."""

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> PoolMemory:
        """Create device memory for a pool of KV pages that sequences share. Raises OSError, or one of the errors in
        OUT_OF_MEMORY."""

    def home_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Create host memory for the KV of one sequence of up to `max_tokens` tokens. Raises OSError, or one of the
        errors in OUT_OF_MEMORY."""

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in the device's memory. If there is too little memory, raises one of the errors in
        OUT_OF_MEMORY."""

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in host memory that the link can access fast. If there is too little memory, raises one
        of the errors in OUT_OF_MEMORY."""

    def bound(self, limit_bytes: int | None) -> None:
        """Limit the total memory for sequences and buffers to `limit_bytes`. None: all of the device's memory may be
        used. Only devices that count their memory themselves apply the limit."""

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all `num_bytes` bytes from `address` on are in the device's memory. Devices
        that cannot check addresses do nothing."""


class Running:
    """Transfer that runs on a host thread."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def result(self) -> None:
        """Wait until the copy is done. Raises the error of the copy if it failed."""
        self._future.result()

    join = result  # the host computes

    def wait(self) -> None:
        """Wait until the copy has ended. Does not raise an error if the copy failed."""
        wait([self._future])
