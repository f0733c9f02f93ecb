"""KV in pages: a device's memory that all sequences share, and each sequence's block table.

A page holds a fixed number of tokens in all layers. So one block table serves all layers of a sequence, and prefixes
are shared, copied and counted as whole tokens. Within a layer pages are adjacent in memory, so that a sequence with
adjacent pages is in few pieces. Residency `device` keeps sequences in pages on devices with memory of their own
(`generate_workers.residency.paged`). The decoder's kernels read the block tables
(`baton.modeling.forward.decode_rows`).

L layers, P pages, S tokens of a page, G kv heads, H head dim, T tokens of a run.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.modeling.kv.buffers import BlockTable, KvPlace, KvRows
from baton.modeling.kv.pool_memory import PoolMemory
from baton.types import TokenRange

PAGE_TOKENS = 64
"""Number of tokens of a page. It equals the tile size of the decode kernel for CPUs, so that the keys of a tile are in
at most two pages."""


class PagePool:
    """Pages of a device, with the number of owners of each page. Thread-safe."""

    def __init__(self, memory: PoolMemory) -> None:
        self.memory = memory
        num_layers, self.num_pages, self.page_tokens = memory.data_LPS2GH.shape[:3]
        self.page_bytes = num_layers * memory.data_LPS2GH[0, 0].nbytes
        self.most_taken = self.num_pages
        """Maximum number of pages that have an owner at a time."""
        self.reclaim: Callable[[int], bool] = lambda num_pages: False
        """Function that is called, without the lock, when `num_pages` more pages are needed than are free. It releases
        that number of pages, or as many as it can, and returns whether it released any. It must be set before the pool
        is used."""
        self._lock = threading.Lock()
        self._num_owners_P = np.zeros(self.num_pages, np.int32)
        self._num_gifts = 0
        """Number of calls of `give`."""

    @property
    def num_taken(self) -> int:
        """Return the number of pages that have an owner."""
        return int(np.count_nonzero(self._num_owners_P))

    @property
    def num_free(self) -> int:
        """Return the number of pages that can still be allocated."""
        return self.most_taken - self.num_taken

    def take(self, num_pages: int) -> list[int]:
        """Allocate free pages and return their numbers. Each page then has one owner. The lowest numbers are used, so
        that pages are mostly adjacent. If too few pages are free even after `reclaim`, raises MemoryError and allocates
        none."""
        while True:
            num_gifts = self._num_gifts
            try:
                return self._take(num_pages)
            except MemoryError:
                num_missing = max(num_pages - self.num_free, 1)
                if not self.reclaim(num_missing) and self._num_gifts == num_gifts:
                    raise

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to each of these pages, which must already have an owner."""
        with self._lock:
            assert (self._num_owners_P[pages] > 0).all(), "a page without an owner cannot be shared"
            self._num_owners_P[pages] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Remove an owner from each of these pages. A page without an owner is free."""
        with self._lock:
            assert (self._num_owners_P[pages] > 0).all(), "a released page has no owner"
            self._num_gifts += 1
            self._num_owners_P[pages] -= 1
            self.memory.give([page for page in pages if not self._num_owners_P[page]])

    def is_shared(self, page: int) -> bool:
        """Return whether a page has several owners."""
        return bool(self._num_owners_P[page] > 1)

    def _take(self, num_pages: int) -> list[int]:
        with self._lock:
            if self.num_free < num_pages:
                raise MemoryError(f"{num_pages} pages are needed, and {self.num_free} of {self.most_taken} are free")
            pages: list[int] = np.flatnonzero(self._num_owners_P == 0)[:num_pages].tolist()
            self.memory.take(pages)
            self._num_owners_P[pages] = 1
            return pages


class RowPages:
    """Pages of the sequence in a slot. It is reused by one sequence after another. Only one thread at a time may use
    it; several instances share a pool."""

    def __init__(self, pool: PagePool, max_tokens: int) -> None:
        self._pool = pool
        self.table = BlockTable(
            pool.memory.data_LPS2GH, torch.zeros(-(-max_tokens // pool.page_tokens), dtype=torch.int32)
        )
        self._pages: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the sequence's pages. Shared pages count completely."""
        return len(self._pages) * self._pool.page_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes that the pages of `num_tokens` tokens have."""
        return self._num_for(num_tokens) * self._pool.page_bytes

    def prepare(self, tokens: TokenRange, num_tokens: int) -> None:
        """Allocate pages for `tokens`, which are about to be written, and for the first `num_tokens` tokens of the
        sequence. Shared pages that contain some of `tokens` are copied first. Raises MemoryError when too few pages are
        free."""
        num_new = self._num_for(max(tokens.end, num_tokens)) - len(self._pages)
        if num_new > 0:
            self._set(len(self._pages), self._pool.take(num_new))
        for index in range(tokens.start // self._pool.page_tokens, self._num_for(tokens.end)):
            if self._pool.is_shared(self._pages[index]):
                self._copy(index)

    def pages_of(self, tokens: TokenRange) -> list[int]:
        return self._pages[tokens.start // self._pool.page_tokens : self._num_for(tokens.end)]

    def share(self, pages: Sequence[int]) -> None:
        """Use pages that another owner has filled as the beginning of the sequence, which must not have pages yet. An
        owner that writes to a shared page copies it first."""
        self._pool.share(pages)
        self.adopt(pages)

    def adopt(self, pages: Sequence[int]) -> None:
        """Use filled pages as the beginning of the sequence, which must not have pages yet. The caller must have
        allocated or shared them for this sequence."""
        assert not self._pages, "pages are adopted by rows that have none"
        self._set(0, pages)

    def runs(self, tokens: TokenRange) -> Iterator[tuple[TokenRange, int]]:
        """Yield `tokens` in parts that are contiguous in each layer. Each part comes with the index of its first token
        among the tokens of all pages of the layer."""
        size, start = self._pool.page_tokens, tokens.start
        while start < tokens.end:
            first = last = start // size
            while (last + 1) * size < tokens.end and self._pages[last + 1] == self._pages[last] + 1:
                last += 1
            end = min((last + 1) * size, tokens.end)
            yield TokenRange(start, end), self._pages[first] * size + start % size
            start = end

    def spans(self, layer: int, tokens: TokenRange) -> Iterator[tuple[TokenRange, Tensor]]:
        """Yield views `[T, 2, G, H]` of `tokens` in a layer. Each view comes with the token range that it contains."""
        data_S2GH = self.table.data_LPS2GH[layer].flatten(0, 1)
        for part, place in self.runs(tokens):
            yield part, data_S2GH[place : place + len(part)]

    def release(self) -> None:
        """Release all pages. Idempotent."""
        pages, self._pages = self._pages, []
        self._pool.give(pages)

    def _copy(self, index: int) -> None:
        """Replace a shared page by a copy."""
        shared, [copy] = self._pages[index], self._pool.take(1)
        data_LPS2GH = self.table.data_LPS2GH
        data_LPS2GH[:, copy].copy_(data_LPS2GH[:, shared])
        self._set(index, [copy])
        self._pool.give([shared])

    def _set(self, index: int, pages: Sequence[int]) -> None:
        self._pages[index : index + len(pages)] = pages
        self.table.pages_C[index : index + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def _num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.page_tokens)


@dataclass(frozen=True)
class PageSpan:
    """New tokens `tokens` of a sequence whose old and new KV is in pages."""

    pages: RowPages
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        ((_, own_T2GH),) = self.pages.spans(layer, self.tokens)
        return own_T2GH

    def owns(self, layer: int) -> Iterator[tuple[TokenRange, Tensor]]:
        """Yield views of the new tokens' KV. Each view comes with the token range that it contains."""
        return self.pages.spans(layer, self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        for part, kv_T2GH in self.pages.spans(layer, TokenRange(0, self.tokens.end)):
            yield KvRows(kv_T2GH[:, 0], kv_T2GH[:, 1], part.start)

    def place(self) -> KvPlace:
        data = self.pages.table.data_LPS2GH
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(0, layer_bytes, len(data), self.tokens.end, len(self.tokens), table=self.pages.table)
