"""The device `emulated`. The CPU computes in a separate memory region (the arena). Data moves between the arena and
host memory only over a link with a configured rate.

The device emulates an accelerator on a machine without one, with the same buffers, fetches and limits. Its kernels are
the kernels of the CPU. Torch allocates weights and activations outside the arena. The limit on KV leaves room for the
weights (`generate_workers.engine.memory_limits`).

`require` checks by address that all KV read by attention is in the arena. The host cannot get a view of the arena's
bytes (`baton.modeling.kv.buffers.byte_view`).
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
    """Device with separate memory (the arena), emulated by the CPU. Implements Device."""

    name = "emulated"
    torch_device = torch.device("cpu")
    is_home = False

    def __init__(self, rate: LinkRate = UNBOUND) -> None:
        self.link = PacedLink(rate)
        self.arena = Arena()
        self._access = LinkAccess.plain(self.link)

    @property
    def memory_use(self) -> MemoryUse:
        """Return the limit, the current use and the peak use of the arena, the memory of this device, in bytes."""
        arena = self.arena
        return MemoryUse(arena.limit_bytes, arena.num_bytes, arena.peak_bytes)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Reserve memory for the KV of one sequence in the arena, the memory of this device. Memory pages are committed
        when they are first written."""
        return PagedMemory(layout, max_tokens, self.arena, self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        """Reserve a pool of KV pages in the arena, the memory of this device. A page counts as used only while it has
        an owner."""
        return MappedPool(layout, num_pages, page_tokens, self.arena, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Reserve host memory, outside the memory of this device, for the KV of one sequence. Memory pages are
        committed when they are first written."""
        return PagedMemory(layout, max_tokens)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in the arena, the memory of this device. All its bytes count as used until the buffer is
        freed."""
        memory = PagedMemory(layout, len(tokens), self.arena, self._access)
        memory.commit(TokenRange(0, len(tokens)))
        buffer = KvBuffer.of(layout, tokens, memory.data_LS2GH, self._access)
        weakref.finalize(buffer, memory.release)
        return buffer

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in host memory, outside the memory of this device."""
        return KvBuffer(layout, tokens)

    def bound(self, limit_bytes: int | None) -> None:
        """Set the maximum number of bytes in use in the arena, the memory of this device. None: no limit."""
        self.arena.limit_bytes = limit_bytes

    def require(self, address: int, num_bytes: int) -> None:
        """Raise WrongMemoryError unless all `num_bytes` bytes from `address` on are in the arena, the memory of this
        device."""
        self.arena.require(address, num_bytes)
