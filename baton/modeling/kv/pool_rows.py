"""Pool whose pages each hold one whole sequence, so that one kernel reads all sequences by their page numbers.

All pages of a layer are in one tensor. A GPU's kernels take page numbers in that tensor
(`baton.modeling.kernels.triton`), whereas kernels of the CPU take addresses.

L layers, P pages of the pool, S tokens, G kv heads, H head dim.
"""

import torch

from baton.modeling.kv.pages import PagePool
from baton.types import TokenRange


class PoolRow:
    """RowMemory that is one page of a pool, for one sequence after another. The whole page counts as in use from
    `expect` to `release`."""

    def __init__(self, pool: PagePool) -> None:
        """`pool`: a pool whose pages are as long as the longest sequence."""
        self.pool = pool
        self.num_bytes = 0
        self.access = pool.memory.access
        self.data_LS2GH = torch.empty(0)
        self._pages: list[int] = []

    @property
    def number(self) -> int:
        """Return the number of the page in the pool. It is valid while the sequence has memory."""
        (page,) = self._pages
        return page

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of a page, or 0 for no tokens."""
        return self.pool.page_bytes if num_tokens else 0

    def expect(self, num_tokens: int) -> None:
        """Allocate a page of the pool. Raises MemoryError when no page is free."""
        if not self._pages:
            self._pages = self.pool.take(1)
            self.data_LS2GH = self.pool.memory.data_LPS2GH[:, self.number]
            self.num_bytes = self.pool.page_bytes

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Do nothing: the memory is already allocated."""
        assert self._pages

    def release(self) -> None:
        """Release the page. Idempotent."""
        pages, self._pages = self._pages, []
        self.data_LS2GH, self.num_bytes = torch.empty(0), 0
        self.pool.give(pages)
