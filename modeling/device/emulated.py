"""The device emulated: the CPU computes in an arena of its own, across a link of a configured rate.

What runs on it is what runs on an accelerator: the same buffers, fetches and limits, on a machine without one. Only its
kernels are the CPU's; weights and activations lie wherever torch puts them, and the limit of KV leaves room for the
weights (`generate_workers.engine.memory_limits`). KV that is computed with is checked, by its address, to be in the
arena (`require`), and bytes of the arena are refused to the host (`modeling.kv.buffers.byte_view`).
"""

import weakref

import torch

from baton.types import KvLayout, TokenRange
from modeling.device.copying import UNBOUND, LinkAccess, LinkRate, PacedLink
from modeling.device.port import MemoryUse
from modeling.kv.arena import Arena
from modeling.kv.buffers import KvBuffer
from modeling.kv.memory import PagedMemory
from modeling.kv.pool_memory import MappedPool


class EmulatedDevice:
    """A device with memory of its own, played by the CPU. Implements Device."""

    name = "emulated"
    torch_device = torch.device("cpu")
    is_home = False

    def __init__(self, rate: LinkRate = UNBOUND) -> None:
        self.link = PacedLink(rate)
        self.arena = Arena()
        self._access = LinkAccess.plain(self.link)

    @property
    def memory_use(self) -> MemoryUse:
        """Return what the arena counts."""
        arena = self.arena
        return MemoryUse(arena.limit_bytes, arena.num_bytes, arena.peak_bytes)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory in the arena, committed as it is written."""
        return PagedMemory(layout, max_tokens, self.arena, self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        """Make memory in the arena, of which pages count while they are in use."""
        return MappedPool(layout, num_pages, page_tokens, self.arena, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory outside the arena, committed as it is written."""
        return PagedMemory(layout, max_tokens)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in the arena, which is counted whole until the buffer is gone."""
        memory = PagedMemory(layout, len(tokens), self.arena, self._access)
        memory.commit(TokenRange(0, len(tokens)))
        buffer = KvBuffer.of(layout, tokens, memory.data_LS2GH, self._access)
        weakref.finalize(buffer, memory.release)
        return buffer

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer outside the arena."""
        return KvBuffer(layout, tokens)

    def bound(self, limit_bytes: int | None) -> None:
        """Set the arena's limit."""
        self.arena.limit_bytes = limit_bytes

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all of these bytes are in the arena."""
        self.arena.require(address, num_bytes)
