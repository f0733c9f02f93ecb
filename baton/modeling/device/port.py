"""Interface of devices: a device that computes, its memory, host memory, and the link between the two memories.

`making` makes a device by its name. Implementations:

    cpu       The device's memory is host memory. No copy over a link is needed.
    cuda      A GPU. Host memory is pinned, and copies run on streams of their own.
    emulated  The CPU computes, but only in an arena of its own memory. Every byte between the arena and host memory is
              copied and counted, and takes as long as on a link of the configured rate.

The decoder runs attention and linears on `torch_device`. A tensor stays in the memory in which it was allocated. Only a
link touches both memories.
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
"""Pairs `(to, from)`, contiguous and of equal shape and dtype."""


def num_bytes_of(copies: Copies) -> int:
    """Return the total bytes of these copies."""
    return sum(source.nbytes for _, source in copies)


class Link(Protocol):
    """Copies between host memory and the device's memory, in the order of the calls in each direction. Thread-safe."""

    @property
    def num_bytes_fetched(self) -> int:
        """Return the bytes of finished transfers to the device."""

    @property
    def num_bytes_stored(self) -> int:
        """Return the bytes of finished transfers to host memory."""

    def fetch(self, copies: Copies) -> Transfer:
        """Start to copy from host memory to the device."""

    def store(self, copies: Copies) -> Transfer:
        """Start to copy from the device to host memory, after the work that this thread has queued."""

    def rest(self) -> None:
        """Wait for the requested copies, and end the threads. Later copies start the threads again. Idempotent."""


@dataclass(frozen=True)
class MemoryUse:
    """Use of a device's memory."""

    limit_bytes: int | None
    """Number of bytes available to this process. None: the number is limited only by host memory."""
    num_bytes: int
    """Bytes in use now."""
    peak_bytes: int
    """Maximum number of bytes that were in use at the same time."""


NO_MEMORY = MemoryUse(None, 0, 0)
"""Memory use that is reported for a device that computes in host memory."""


class Device(Protocol):
    """A device of one process."""

    @property
    def name(self) -> str:
        """Return cpu, cuda or emulated."""

    @property
    def torch_device(self) -> torch.device:
        """Return the torch device of tensors in the device's memory."""

    @property
    def is_home(self) -> bool:
        """Return whether the device computes in host memory, so that no copies over a link are needed."""

    @property
    def link(self) -> Link:
        """Return the link to host memory."""

    @property
    def memory_use(self) -> MemoryUse:
        """Return how much of the device's memory is in use."""

    def row_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Make device memory for one sequence's KV. Raises OSError or an error in OUT_OF_MEMORY."""

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> PoolMemory:
        """Make device memory for pages, which sequences share. Raises the same errors as `row_memory`."""

    def home_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Make host memory for one sequence's KV. Raises the same errors as `row_memory`."""

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in the device's memory. Raises an error in OUT_OF_MEMORY."""

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in host memory that the link can read and write fast. Raises an error in OUT_OF_MEMORY."""

    def bound(self, limit_bytes: int | None) -> None:
        """Limit the memory for sequences and buffers to `limit_bytes` in total, if the device itself counts its memory.
        None: all of the device's memory may be used."""

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all of these bytes are in the device's memory. Devices that cannot check this
        do nothing."""


class Running:
    """Transfer that a host thread carries out."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def result(self) -> None:
        """Wait until the thread has copied. Raises the error of the copy."""
        self._future.result()

    join = result  # the host computes

    def wait(self) -> None:
        """Wait until the thread has ended, even if the copy failed."""
        wait([self._future])
