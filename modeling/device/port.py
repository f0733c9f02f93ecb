"""The device port: one device that computes, its memory, home memory beside it, and the link between the two.

`making` makes a device by its name. Implementations:

    cpu       the device's memory and home memory are one; nothing ever crosses a link
    cuda      a GPU; home memory is pinned; copies run on streams of their own
    emulated  the CPU computes, but only in an arena of its own memory; every byte between it and home memory is copied,
              counted, and takes as long as on a link of the configured rate

What attention and linears run on is the decoder's concern, by `torch_device`. A tensor belongs to one of the two
memories for as long as it lives. Only a link touches both.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.types import KvLayout, TokenRange
from modeling.kv.buffers import KvBuffer
from modeling.kv.memory import RowMemory
from modeling.kv.pool_memory import PoolMemory
from modeling.kv.transfers import Transfer

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs `(to, from)`, contiguous and of equal shape and dtype."""


def num_bytes_of(copies: Copies) -> int:
    """Return the bytes that these copies bring."""
    return sum(source.nbytes for _, source in copies)


class Link(Protocol):
    """Copies between home memory and the device's, in each direction first come, first served. Thread-safe."""

    @property
    def num_bytes_fetched(self) -> int:
        """Return the bytes copied to the device so far, those of finished transfers."""

    @property
    def num_bytes_stored(self) -> int:
        """Return the bytes copied home so far, those of finished transfers."""

    def fetch(self, copies: Copies) -> Transfer:
        """Begin to copy from home to the device."""

    def store(self, copies: Copies) -> Transfer:
        """Begin to copy from the device home, behind what this thread has computed."""

    def rest(self) -> None:
        """Wait for the copies that were asked for, and end threads, which later copies start anew. Idempotent."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a device."""

    limit_bytes: int | None
    """Bytes that there are for this process. None: no limit but home memory's."""
    num_bytes: int
    """Bytes in use now."""
    peak_bytes: int
    """Most bytes in use at a time."""


NO_MEMORY = MemoryUse(None, 0, 0)
"""The memory use of a device that computes in home memory."""


class Device(Protocol):
    """A device of one process."""

    @property
    def name(self) -> str:
        """Return cpu, cuda or emulated."""

    @property
    def torch_device(self) -> torch.device:
        """Return where tensors of the device's memory are for torch."""

    @property
    def is_home(self) -> bool:
        """Return whether home memory is the device's own, so that nothing has to cross a link."""

    @property
    def link(self) -> Link:
        """Return the link to home memory."""

    @property
    def memory_use(self) -> MemoryUse:
        """Return how much of the device's memory is in use."""

    def row_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Make memory of the device for one row's KV. Raises OSError or what is in OUT_OF_MEMORY."""

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> PoolMemory:
        """Make memory of the device for the pages that rows share. Raises as `row_memory` does."""

    def home_memory(self, layout: KvLayout, max_tokens: int) -> RowMemory:
        """Make home memory for one row's KV. Raises as `row_memory` does."""

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in the device's memory. Raises what is in OUT_OF_MEMORY."""

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in home memory from and to which the link copies fast. Raises what is in OUT_OF_MEMORY."""

    def bound(self, limit_bytes: int | None) -> None:
        """Refuse memory for rows and buffers beyond so many bytes in all, where the device counts them itself. None:
        what there is."""

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all of these bytes are the device's, as far as that can be told."""


class Running:
    """A Transfer by a thread of the host."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def result(self) -> None:
        """Wait for the thread; raise what went wrong there."""
        self._future.result()

    join = result  # the host computes

    def wait(self) -> None:
        """Wait for the thread."""
        wait([self._future])
