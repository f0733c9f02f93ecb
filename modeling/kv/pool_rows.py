"""Rows of one pool: the memory of all rows is one tensor a layer, so that one kernel reads every row by its number.

A page of the pool is a whole row. A GPU's kernels take pages by their numbers in one tensor
(`modeling.kernels.triton`), where kernels of the CPU take addresses.

L layers, P rows of the pool, S tokens, G kv heads, H head dim.
"""

import torch

from baton.types import TokenRange
from modeling.kv.pages import PagePool


class PoolRow:
    """RowMemory of one sequence after another: one page of a pool while there is one, counted whole."""

    def __init__(self, pool: PagePool) -> None:
        """`pool`: pages as long as the longest row."""
        self.pool = pool
        self.num_bytes = 0
        self.access = pool.memory.access
        self.data_LS2GH = torch.empty(0)
        self._pages: list[int] = []

    @property
    def number(self) -> int:
        """Return the number of the row in its pool, while it has memory."""
        (page,) = self._pages
        return page

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the longest row, or 0 for no tokens."""
        return self.pool.page_bytes if num_tokens else 0

    def expect(self, num_tokens: int) -> None:
        """Take a row of the pool. Raises MemoryError when all are taken."""
        if not self._pages:
            self._pages = self.pool.take(1)
            self.data_LS2GH = self.pool.memory.data_LPS2GH[:, self.number]
            self.num_bytes = self.pool.page_bytes

    def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
        """Do nothing: the memory is there."""
        assert self._pages

    def release(self) -> None:
        """Give the row back. Idempotent."""
        pages, self._pages = self._pages, []
        self.data_LS2GH, self.num_bytes = torch.empty(0), 0
        self.pool.give(pages)
