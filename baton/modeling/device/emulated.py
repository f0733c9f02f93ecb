"""The device `emulated`: the CPU computes in a separate memory region (the arena), which host memory reaches only over
a link of a configured rate.

It emulates an accelerator on a machine without one, with the same buffers, fetches and limits. Its kernels are those of
the CPU. Weights and activations are allocated by torch outside the arena, and the limit of KV leaves room for the
weights (`generate_workers.engine.memory_limits`). KV that attention reads is checked, by its address, to be in the
arena (`require`). The host cannot take a view of the arena's bytes (`baton.modeling.kv.buffers.byte_view`).
"""

import weakref

import torch

from baton.modeling.device.copying import UNBOUND, LinkAccess, LinkRate, PacedLink
from baton.modeling.device.port import MemoryUse
from baton.modeling.kv.arena import Arena
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pool_memory import MappedPool
from baton.modeling.kv.row_memory import PagedMemory
from baton.types import KvLayout, TokenRange


class EmulatedDevice:
    """A device with memory of its own, emulated by the CPU. Implements Device."""

    name = "emulated"
    torch_device = torch.device("cpu")
    is_home = False

    def __init__(self, rate: LinkRate = UNBOUND) -> None:
        self.link = PacedLink(rate)
        self.arena = Arena()
        self._access = LinkAccess.plain(self.link)

    @property
    def memory_use(self) -> MemoryUse:
        """Return the arena's counts of bytes."""
        arena = self.arena
        return MemoryUse(arena.limit_bytes, arena.num_bytes, arena.peak_bytes)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory in the arena, committed when it is written."""
        return PagedMemory(layout, max_tokens, self.arena, self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        """Make memory in the arena. Its pages count as used while they are in use."""
        return MappedPool(layout, num_pages, page_tokens, self.arena, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory outside the arena, committed when it is written."""
        return PagedMemory(layout, max_tokens)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in the arena. All of its bytes count as used until the buffer is freed."""
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
