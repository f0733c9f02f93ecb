"""Memory for one sequence's KV: address space is reserved once, and pages are committed as they are written.

Residency policies (`generate_workers.residency`) keep a slot's KV in it. The KV grows without ever being copied, its
committed bytes are counted exactly, and `release` returns them to the operating system at once.

L layers, S tokens, G kv heads, H head dim.
"""

import contextlib
import mmap
import weakref
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.modeling.kv.arena import Arena
from baton.modeling.kv.buffers import HOME, TORCH_DTYPES, HostAccess
from baton.types import KvLayout, TokenRange

PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000
"""Value of MAP_NORESERVE on Linux. Python defines the name from version 3.12 on."""
_MADV_POPULATE_WRITE = 23
"""Value of MADV_POPULATE_WRITE on Linux, from 5.14 on. Python does not define the name."""
_LEAST_POPULATED_PAGES = 4
"""Minimum number of new pages that one call commits. Fewer pages are committed by the page faults of their first
writes."""


class RowMemory(Protocol):
    """Memory for the KV of up to `max_tokens` tokens, used by one sequence after another. Not thread-safe."""

    data_LS2GH: Tensor
    """All of the memory. Only committed bytes may be accessed."""
    num_bytes: int
    """Number of bytes that are committed now."""
    access: HostAccess
    """Host's access to the memory."""

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the first `num_tokens` tokens, once committed in all layers."""

    def expect(self, num_tokens: int) -> None:
        """Announce that `num_tokens` tokens will certainly be written. May be called once between two releases."""

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Commit memory for `tokens`, before they are written, in `layer` or in all layers. Calls for all layers must
        have ascending tokens, without a gap after the tokens that were committed for single layers."""

    def release(self) -> None:
        """Free all memory. No thread may read or write it any more. Idempotent."""


class PagedMemory:
    """RowMemory in the CPU's memory: host memory or an emulated device's.

    Each layer begins at a huge page, so that a long prompt's layers can consist of huge pages. Huge pages are requested
    only where every byte will be written. So the count of committed bytes is exact, except for up to one huge page per
    layer while a prompt is being written."""

    def __init__(
        self, layout: KvLayout, max_tokens: int, arena: Arena | None = None, access: HostAccess = HOME
    ) -> None:
        """`arena`: the emulated device's arena that the memory is part of; None: host memory. `access`: the host's
        access to it. Raises OSError when the address space cannot be reserved."""
        self.num_bytes = 0
        self.access = access
        self._arena = arena
        self._row_bytes = layout.row_bytes
        self._num_layers = layout.num_layers
        self._layer_bytes = _ceil(max_tokens * layout.row_bytes, _HUGE_BYTES)
        self._size = self._num_layers * self._layer_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, self._size + _HUGE_BYTES, flags=flags)
        self._advise(mmap.MADV_NOHUGEPAGE, 0, self._size + _HUGE_BYTES)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._offset = -whole.data_ptr() % _HUGE_BYTES
        self.address = whole.data_ptr() + self._offset
        """Address of layer 0 in the mapping."""
        self.data_LS2GH = _strided(whole[self._offset :], layout, max_tokens, self._layer_bytes)
        if arena is not None:
            arena.add_region(self.address, self._size)
            weakref.finalize(self, arena.remove_region, self.address, self._size)  # once it is not read any more
        self._has_page_LP = np.zeros(
            (self._num_layers, _ceil(max_tokens * self._row_bytes, PAGE_BYTES) // PAGE_BYTES), bool
        )
        self._num_whole = 0
        """Number of leading tokens that have all their pages in every layer."""
        self._is_advised = False

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the pages that these tokens take in all layers."""
        return self._num_layers * _ceil(num_tokens * self._row_bytes, PAGE_BYTES)

    def expect(self, num_tokens: int) -> None:
        """Request huge pages for the memory that these tokens will fill completely."""
        num_huge_bytes = num_tokens * self._row_bytes // _HUGE_BYTES * _HUGE_BYTES
        if num_huge_bytes:
            self._is_advised = True
            for layer in range(self._num_layers):
                self._advise(mmap.MADV_HUGEPAGE, self._offset + layer * self._layer_bytes, num_huge_bytes)

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Count the pages that were not committed before. The operating system commits them at the first write. Many
        pages of one layer are committed here by one call, which takes a third of the time of their page faults. Raises
        MemoryError when an emulated device's limit is exceeded."""
        if tokens.end <= self._num_whole:
            return
        end = _ceil(tokens.end * self._row_bytes, PAGE_BYTES) // PAGE_BYTES
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        start = tokens.start * self._row_bytes // PAGE_BYTES
        has_LP = self._has_page_LP[layers, start:end]
        num_new = has_LP.size - int(np.count_nonzero(has_LP))
        if self._arena is not None:
            self._arena.take(PAGE_BYTES * num_new)
        self.num_bytes += PAGE_BYTES * num_new
        has_LP[:] = True
        if layer is not None and num_new >= _LEAST_POPULATED_PAGES:
            first = self._offset + layer * self._layer_bytes + start * PAGE_BYTES
            self._advise(_MADV_POPULATE_WRITE, first, (end - start) * PAGE_BYTES)
        if layer is None:
            self._num_whole = end * PAGE_BYTES // self._row_bytes

    def release(self) -> None:
        """Return the pages to the operating system. A later read of the memory would find zeros."""
        if not self.num_bytes and not self._is_advised:
            return
        self._mapping.madvise(mmap.MADV_DONTNEED)
        if self._is_advised:
            self._advise(mmap.MADV_NOHUGEPAGE, 0, self._size + _HUGE_BYTES)
        self._has_page_LP[:] = False
        if self._arena is not None:
            self._arena.give(self.num_bytes)
        self.num_bytes, self._num_whole, self._is_advised = 0, 0, False

    def _advise(self, advice: int, start: int, length: int) -> None:
        with contextlib.suppress(OSError):  # a kernel refuses advice that it does not support
            self._mapping.madvise(advice, start, length)


class TensorMemory:
    """RowMemory of a CUDA device, or in pinned host memory: one tensor of `max_tokens` tokens, which counts as in use
    from `expect` to `release`."""

    def __init__(
        self,
        layout: KvLayout,
        max_tokens: int,
        device: torch.device,
        *,
        pinned: bool = False,
        access: HostAccess = HOME,
    ) -> None:
        """`access`: the host's access to the device's memory."""
        self.num_bytes = 0
        self.access = access
        self._shape = (layout.num_layers, max_tokens, 2, layout.num_kv_heads, layout.head_dim)
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._whole_bytes = max_tokens * layout.token_bytes
        self._device = device
        self._pinned = pinned
        self.data_LS2GH = torch.empty(0)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of `max_tokens` tokens, or 0 for no tokens."""
        return self._whole_bytes if num_tokens else 0

    def expect(self, num_tokens: int) -> None:
        """Allocate the memory. Raises RuntimeError when the device has too little."""
        if not self.num_bytes:
            self.data_LS2GH = torch.empty(self._shape, dtype=self._dtype, device=self._device, pin_memory=self._pinned)
            self.num_bytes = self._whole_bytes

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        assert self.num_bytes

    def release(self) -> None:
        """Drop the tensor. Its memory is freed with its last view."""
        self.data_LS2GH = torch.empty(0)
        self.num_bytes = 0


def _strided(memory: Tensor, layout: KvLayout, max_tokens: int, layer_bytes: int) -> Tensor:
    elements = memory.view(TORCH_DTYPES[layout.dtype])
    size = elements.element_size()
    heads, dim = layout.num_kv_heads, layout.head_dim
    strides = (layer_bytes // size, 2 * heads * dim, heads * dim, dim, 1)
    return elements.as_strided((layout.num_layers, max_tokens, 2, heads, dim), strides)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit) * unit
