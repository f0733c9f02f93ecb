"""Device memory for the pages of KV that all sequences share (`baton.modeling.kv.pages`).

L layers, P pages, S tokens of a page, G kv heads, H head dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.modeling.kv.arena import Arena
from baton.modeling.kv.buffers import HOME, TORCH_DTYPES, HostAccess
from baton.modeling.kv.row_memory import PagedMemory
from baton.types import KvLayout


class PoolMemory(Protocol):
    """Memory of all pages of a pool."""

    data_LPS2GH: Tensor
    """All of the memory. Only allocated pages may be accessed."""
    access: HostAccess
    """Host's access to the memory."""

    def take(self, pages: Sequence[int]) -> None:
        """Count these pages as in use. If this would exceed the device's limit, raises MemoryError and does not count
        them."""

    def give(self, pages: Sequence[int]) -> None:
        """Count these pages as free."""


class MappedPool:
    """PoolMemory in the CPU's memory: host memory or an emulated device's. The operating system commits a page at its
    first write. The page stays committed until the pool is freed, as a GPU's memory would."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        page_tokens: int,
        arena: Arena | None = None,
        access: HostAccess = HOME,
    ) -> None:
        """`arena`: the emulated device's arena that the memory is part of; None: host memory. `access`: the host's
        access to it. Raises OSError when the address space cannot be reserved."""
        self.access = access
        self._arena = arena
        self._page_bytes = page_tokens * layout.token_bytes
        self._memory = PagedMemory(layout, num_pages * page_tokens, arena, access)
        self._memory.expect(num_pages * page_tokens)
        self.data_LPS2GH = self._memory.data_LS2GH.view(_shape(layout, num_pages, page_tokens))

    def take(self, pages: Sequence[int]) -> None:
        """Count the pages as in use in the arena. If this would exceed its limit, raises MemoryError and does not count
        them."""
        if self._arena is not None:
            self._arena.take(len(pages) * self._page_bytes)

    def give(self, pages: Sequence[int]) -> None:
        """Count the pages as free."""
        if self._arena is not None:
            self._arena.give(len(pages) * self._page_bytes)


class TensorPool:
    """PoolMemory of a CUDA device: one tensor, allocated when the pool is made."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_tokens: int, device: torch.device, access: HostAccess
    ) -> None:
        """`access`: the host's access to the device's memory. Raises RuntimeError when the device has too little."""
        self.access = access
        shape, dtype = _shape(layout, num_pages, page_tokens), TORCH_DTYPES[layout.dtype]
        self.data_LPS2GH = torch.empty(shape, dtype=dtype, device=device)

    def take(self, pages: Sequence[int]) -> None:
        """Do nothing: the memory is already allocated."""

    def give(self, pages: Sequence[int]) -> None:
        """Do nothing: the memory stays allocated."""


def _shape(layout: KvLayout, num_pages: int, page_tokens: int) -> tuple[int, ...]:
    return (layout.num_layers, num_pages, page_tokens, 2, layout.num_kv_heads, layout.head_dim)
