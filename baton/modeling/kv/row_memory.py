"""Memory for the KV of one sequence. Address space is reserved once, and memory pages are committed when they are
written.

Residency policies (`generate_workers.residency`) decide where KV is stored, and use this memory for the KV of a slot.
The KV can grow without being copied. The committed bytes are counted exactly, and `release` returns them to the
operating system immediately.

Shape letters: L layers, S tokens, G kv heads, H head dim.
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
"""Value of MAP_NORESERVE on Linux. Python defines this constant only from version 3.12 on."""
_MADV_POPULATE_WRITE = 23
"""Value of MADV_POPULATE_WRITE on Linux 5.14 and later. Python does not define this constant."""
_LEAST_POPULATED_PAGES = 4
"""Minimum number of new memory pages for which one system call commits all of them. Fewer pages are committed by page
faults when they are first written."""


class RowMemory(Protocol):
    """Interface of memory that holds the KV of one sequence at a time, for at most `max_tokens` tokens. After
    `release`, the next sequence can use it. Not thread-safe."""

    data_LS2GH: Tensor
    """KV of the sequence in all layers, `[L, S, 2, G, H]`, where S is at least `max_tokens`. On the third axis, index 0
    is K and index 1 is V. Only committed bytes may be accessed."""
    num_bytes: int
    """Number of bytes that are committed now."""
    access: HostAccess
    """Interface through which the host reads and writes this memory."""

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes that the first `num_tokens` tokens take after they have been committed in all
        layers."""

    def expect(self, num_tokens: int) -> None:
        """Announce that `num_tokens` tokens will certainly be written, so that memory can be prepared for them. Call it
        at most once between two calls of `release`."""

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Commit memory for `tokens` in `layer` (None: in all layers), before the tokens are written. If `layer` is
        None, the memory of all earlier tokens must already be committed in every layer."""

    def release(self) -> None:
        """Free all memory. No thread may read or write the memory any more. Idempotent."""


class PagedMemory:
    """RowMemory in host memory, or in the arena of an emulated device.

    Each layer starts at the boundary of a huge page, so the layers of a long prompt can use huge pages. Huge pages are
    requested only for memory that will be written completely. The count of committed bytes is therefore exact, except
    for up to one huge page per layer while a prompt is being written.
    """

    def __init__(
        self, layout: KvLayout, max_tokens: int, arena: Arena | None = None, access: HostAccess = HOME
    ) -> None:
        """Reserve address space for `max_tokens` tokens. Raises OSError if it cannot be reserved. `arena`: the emulated
        device's arena in which the memory is counted. None: host memory. `access`: interface through which the host
        reads and writes the memory."""
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
        """Address at which layer 0 starts."""
        self.data_LS2GH = _strided(whole[self._offset :], layout, max_tokens, self._layer_bytes)
        if arena is not None:
            arena.add_region(self.address, self._size)
            weakref.finalize(self, arena.remove_region, self.address, self._size)  # once it is not read any more
        self._has_page_LP = np.zeros(
            (self._num_layers, _ceil(max_tokens * self._row_bytes, PAGE_BYTES) // PAGE_BYTES), bool
        )
        self._num_whole = 0
        """Number of leading tokens for which memory is committed in all layers."""
        self._is_advised = False

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the memory pages that the first `num_tokens` tokens need in all layers."""
        return self._num_layers * _ceil(num_tokens * self._row_bytes, PAGE_BYTES)

    def expect(self, num_tokens: int) -> None:
        """Request huge pages for the part of the memory that `num_tokens` tokens will fill completely."""
        num_huge_bytes = num_tokens * self._row_bytes // _HUGE_BYTES * _HUGE_BYTES
        if num_huge_bytes:
            self._is_advised = True
            for layer in range(self._num_layers):
                self._advise(mmap.MADV_HUGEPAGE, self._offset + layer * self._layer_bytes, num_huge_bytes)

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Count the new memory pages of `tokens` in `layer` (None: in all layers) as committed. The operating system
        commits a page when it is first written. If one layer needs many new pages, they are committed immediately by
        one system call, which takes a third of the time of the page faults. Raises MemoryError if the limit of an
        emulated device is exceeded."""
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
        """Return all memory pages to the operating system. If the memory is read later, it contains zeros."""
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
    """RowMemory on a CUDA device or in pinned host memory: one tensor for `max_tokens` tokens. The whole tensor counts
    as in use from `expect` until `release`."""

    def __init__(
        self,
        layout: KvLayout,
        max_tokens: int,
        device: torch.device,
        *,
        pinned: bool = False,
        access: HostAccess = HOME,
    ) -> None:
        """Describe the memory without allocating it. `pinned`: host memory is pinned. `access`: interface through which
        the host reads and writes the memory."""
        self.num_bytes = 0
        self.access = access
        self._shape = (layout.num_layers, max_tokens, 2, layout.num_kv_heads, layout.head_dim)
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._whole_bytes = max_tokens * layout.token_bytes
        self._device = device
        self._pinned = pinned
        self.data_LS2GH = torch.empty(0)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the size of the whole tensor in bytes, or 0 if `num_tokens` is 0. The tensor always has room for
        `max_tokens` tokens, even if `num_tokens` is smaller."""
        return self._whole_bytes if num_tokens else 0

    def expect(self, num_tokens: int) -> None:
        """Allocate the tensor for `max_tokens` tokens. Raises RuntimeError if there is too little memory."""
        if not self.num_bytes:
            self.data_LS2GH = torch.empty(self._shape, dtype=self._dtype, device=self._device, pin_memory=self._pinned)
            self.num_bytes = self._whole_bytes

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        assert self.num_bytes

    def release(self) -> None:
        """Drop the tensor. Its memory is freed when its last view is freed."""
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
