"""Paged KV: a pool of pages in device memory that all sequences share, and the block table of each sequence.

A page holds a fixed number of tokens, with their KV in all layers. One block table therefore serves all layers of a
sequence. Sharing or copying a prefix always applies to all layers. In memory, the pages of one layer are adjacent, so
consecutive page numbers are contiguous memory.

Residency `device` stores sequences in pages on devices with separate memory (`generate_workers.residency.paged`). The
decoder's kernels read the block tables (`baton.modeling.forward.decode_rows`).

Shape letters: L layers, P pages, S tokens of a page, G kv heads, H head dim, T tokens of a contiguous run.
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
"""Number of tokens of a page. It equals the tile size of the CPU's decode kernel, so the keys of a tile are in at most
two pages."""


class PagePool:
    """Pool of pages in device memory. It counts the owners of each page. Thread-safe."""

    def __init__(self, memory: PoolMemory) -> None:
        self.memory = memory
        num_layers, self.num_pages, self.page_tokens = memory.data_LPS2GH.shape[:3]
        self.page_bytes = num_layers * memory.data_LPS2GH[0, 0].nbytes
        self.most_taken = self.num_pages
        """Maximum number of pages that may be allocated at the same time. At most `num_pages`."""
        self.reclaim: Callable[[int], bool] = lambda num_pages: False
        """Function that releases pages if too few are free. Its argument `num_pages` is the number of missing pages. It
        releases that many pages, or as many as it can, and returns True if it released any. It is called without the
        pool's lock. It must be set before the pool is used."""
        self._lock = threading.Lock()
        self._num_owners_P = np.zeros(self.num_pages, np.int32)
        self._num_gifts = 0
        """Number of calls of `give`. `take` uses it to detect that pages were released while it reclaimed pages."""

    @property
    def num_taken(self) -> int:
        """Return the number of pages that have at least one owner."""
        return int(np.count_nonzero(self._num_owners_P))

    @property
    def num_free(self) -> int:
        """Return the number of pages that can be allocated without reclaiming pages."""
        return self.most_taken - self.num_taken

    def take(self, num_pages: int) -> list[int]:
        """Allocate pages, each with one owner, and return their numbers. The lowest free numbers are used, so that
        pages are mostly adjacent. If too few pages are free, `reclaim` is called. If there are still too few, raises
        MemoryError and allocates nothing."""
        while True:
            num_gifts = self._num_gifts
            try:
                return self._take(num_pages)
            except MemoryError:
                num_missing = max(num_pages - self.num_free, 1)
                if not self.reclaim(num_missing) and self._num_gifts == num_gifts:
                    raise

    def share(self, pages: Sequence[int]) -> None:
        """Add one owner to each of these pages. Each page must already have an owner."""
        with self._lock:
            assert (self._num_owners_P[pages] > 0).all(), "a page without an owner cannot be shared"
            self._num_owners_P[pages] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Remove one owner from each of these pages. Pages without an owner become free."""
        with self._lock:
            assert (self._num_owners_P[pages] > 0).all(), "a released page has no owner"
            self._num_gifts += 1
            self._num_owners_P[pages] -= 1
            self.memory.give([page for page in pages if not self._num_owners_P[page]])

    def is_shared(self, page: int) -> bool:
        """Return True if a page has more than one owner."""
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
    """Pages of the sequence in a slot. The object is reused for one sequence after another. Only one thread at a time
    may use it. The objects of several slots share one pool."""

    def __init__(self, pool: PagePool, max_tokens: int) -> None:
        self._pool = pool
        self.table = BlockTable(
            pool.memory.data_LPS2GH, torch.zeros(-(-max_tokens // pool.page_tokens), dtype=torch.int32)
        )
        self._pages: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of the sequence's pages. Shared pages are counted in full."""
        return len(self._pages) * self._pool.page_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of the pages that `num_tokens` tokens need."""
        return self._num_for(num_tokens) * self._pool.page_bytes

    def prepare(self, tokens: TokenRange, num_tokens: int) -> None:
        """Prepare for writing `tokens`. Allocates pages for these tokens and for the first `num_tokens` tokens of the
        sequence. Shared pages that contain some of `tokens` are replaced by copies. Raises MemoryError if too few pages
        are free."""
        num_new = self._num_for(max(tokens.end, num_tokens)) - len(self._pages)
        if num_new > 0:
            self._set(len(self._pages), self._pool.take(num_new))
        for index in range(tokens.start // self._pool.page_tokens, self._num_for(tokens.end)):
            if self._pool.is_shared(self._pages[index]):
                self._copy(index)

    def pages_of(self, tokens: TokenRange) -> list[int]:
        return self._pages[tokens.start // self._pool.page_tokens : self._num_for(tokens.end)]

    def share(self, pages: Sequence[int]) -> None:
        """Use pages that another owner has filled with KV as the start of the sequence. The sequence must not have
        pages yet, and it becomes an additional owner of `pages`. An owner that writes to a shared page must copy it
        first."""
        self._pool.share(pages)
        self.adopt(pages)

    def adopt(self, pages: Sequence[int]) -> None:
        """Use pages that already contain KV as the start of the sequence. The sequence must not have pages yet, and it
        must already be an owner of `pages`."""
        assert not self._pages, "pages are adopted by rows that have none"
        self._set(0, pages)

    def runs(self, tokens: TokenRange) -> Iterator[tuple[TokenRange, int]]:
        """Split `tokens` into runs: token ranges whose KV is contiguous in the memory of each layer. Yield each run
        with the index at which it begins in a layer's memory. The index counts the tokens of all pages of the pool."""
        size, start = self._pool.page_tokens, tokens.start
        while start < tokens.end:
            first = last = start // size
            while (last + 1) * size < tokens.end and self._pages[last + 1] == self._pages[last] + 1:
                last += 1
            end = min((last + 1) * size, tokens.end)
            yield TokenRange(start, end), self._pages[first] * size + start % size
            start = end

    def spans(self, layer: int, tokens: TokenRange) -> Iterator[tuple[TokenRange, Tensor]]:
        """Yield views `[T, 2, G, H]` of the KV of `tokens` in a layer, one for each contiguous run. Each view comes
        with the range of tokens that it contains."""
        data_S2GH = self.table.data_LPS2GH[layer].flatten(0, 1)
        for part, place in self.runs(tokens):
            yield part, data_S2GH[place : place + len(part)]

    def release(self) -> None:
        """Release all pages of the sequence. Idempotent."""
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
    """Span in pages. A span is a range of consecutive new tokens of one sequence, at the positions `tokens`. `pages`
    hold the KV of these tokens and of all earlier tokens."""

    pages: RowPages
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        ((_, own_T2GH),) = self.pages.spans(layer, self.tokens)
        return own_T2GH

    def owns(self, layer: int) -> Iterator[tuple[TokenRange, Tensor]]:
        """Yield views of the KV of the new tokens in a layer. Each view comes with the range of tokens that it
        contains."""
        return self.pages.spans(layer, self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        for part, kv_T2GH in self.pages.spans(layer, TokenRange(0, self.tokens.end)):
            yield KvRows(kv_T2GH[:, 0], kv_T2GH[:, 1], part.start)

    def place(self) -> KvPlace:
        data = self.pages.table.data_LPS2GH
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(0, layer_bytes, len(data), self.tokens.end, len(self.tokens), table=self.pages.table)
