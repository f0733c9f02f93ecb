"""Device memory for a pool of KV pages that all sequences share (`baton.modeling.kv.pages`).

Shape letters: L layers, P pages, S tokens of a page, G kv heads, H head dim.
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
    """Interface of the memory for all pages of a pool."""

    data_LPS2GH: Tensor
    """Memory of all pages. Only pages that are in use may be accessed."""
    access: HostAccess
    """Interface through which the host reads and writes the memory of the pages."""

    def take(self, pages: Sequence[int]) -> None:
        """Count these pages as in use. If they would exceed the device's limit, raises MemoryError and does not count
        them."""

    def give(self, pages: Sequence[int]) -> None:
        """Count these pages as free."""


class MappedPool:
    """PoolMemory in host memory, or in the arena of an emulated device. The operating system commits memory when it is
    first written. The memory stays committed until the pool is freed, like memory of a GPU."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        page_tokens: int,
        arena: Arena | None = None,
        access: HostAccess = HOME,
    ) -> None:
        """Reserve address space for all pages. Raises OSError if it cannot be reserved. `arena`: the emulated device's
        arena in which the memory is counted. None: host memory. `access`: interface through which the host reads and
        writes the memory."""
        self.access = access
        self._arena = arena
        self._page_bytes = page_tokens * layout.token_bytes
        self._memory = PagedMemory(layout, num_pages * page_tokens, arena, access)
        self._memory.expect(num_pages * page_tokens)
        self.data_LPS2GH = self._memory.data_LS2GH.view(_shape(layout, num_pages, page_tokens))

    def take(self, pages: Sequence[int]) -> None:
        """Count the pages as in use in the arena (memory of the emulated device). If the arena's limit would be
        exceeded, raises MemoryError and does not count them."""
        if self._arena is not None:
            self._arena.take(len(pages) * self._page_bytes)

    def give(self, pages: Sequence[int]) -> None:
        """Count the pages as free in the arena (memory of the emulated device). The memory of the pages stays
        committed."""
        if self._arena is not None:
            self._arena.give(len(pages) * self._page_bytes)


class TensorPool:
    """PoolMemory on a CUDA device: one tensor, which is allocated when the pool is created."""

    def __init__(
        self, layout: KvLayout, num_pages: int, page_tokens: int, device: torch.device, access: HostAccess
    ) -> None:
        """Allocate the memory of all pages on `device`. `access` is the interface through which the host reads and
        writes this memory. Raises RuntimeError if the device has too little memory."""
        self.access = access
        shape, dtype = _shape(layout, num_pages, page_tokens), TORCH_DTYPES[layout.dtype]
        self.data_LPS2GH = torch.empty(shape, dtype=dtype, device=device)

    def take(self, pages: Sequence[int]) -> None:
        """Do nothing. The memory of all pages is already allocated."""

    def give(self, pages: Sequence[int]) -> None:
        """Do nothing. The memory of free pages stays allocated."""


def _shape(layout: KvLayout, num_pages: int, page_tokens: int) -> tuple[int, ...]:
    return (layout.num_layers, num_pages, page_tokens, 2, layout.num_kv_heads, layout.head_dim)
