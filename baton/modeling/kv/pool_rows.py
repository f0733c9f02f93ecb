"""Pool whose pages each hold one whole sequence. A kernel can then read all sequences by their page numbers.

All pages of a layer are in one tensor. GPU kernels take indices of pages in this tensor
(`baton.modeling.kernels.triton`), whereas CPU kernels take addresses.

Shape letters: L layers, P pages of the pool, S tokens, G kv heads, H head dim.
"""

import torch

from baton.modeling.kv.pages import PagePool
from baton.types import TokenRange


class PoolRow:
    """RowMemory that consists of one page of a pool. It is used by one sequence after another. The whole page counts as
    in use from `expect` until `release`."""

    def __init__(self, pool: PagePool) -> None:
        """Create the memory without allocating a page. Each page of `pool` must be large enough for the longest
        sequence."""
        self.pool = pool
        self.num_bytes = 0
        self.access = pool.memory.access
        self.data_LS2GH = torch.empty(0)
        self._pages: list[int] = []

    @property
    def number(self) -> int:
        """Return the index of the sequence's page in the pool. The sequence must have a page: `expect` has been called,
        and `release` has not."""
        (page,) = self._pages
        return page

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of a page, or 0 if `num_tokens` is 0. A sequence always takes a whole page."""
        return self.pool.page_bytes if num_tokens else 0

    def expect(self, num_tokens: int) -> None:
        """Allocate a page of the pool for the sequence. Raises MemoryError if no page is free."""
        if not self._pages:
            self._pages = self.pool.take(1)
            self.data_LS2GH = self.pool.memory.data_LPS2GH[:, self.number]
            self.num_bytes = self.pool.page_bytes

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Do nothing. `expect` has already allocated the memory."""
        assert self._pages

    def release(self) -> None:
        """Release the page of the sequence. Idempotent."""
        pages, self._pages = self._pages, []
        self.data_LS2GH, self.num_bytes = torch.empty(0), 0
        self.pool.give(pages)
