"""The prefix cache's tier in device memory: pages with the KV of named blocks, which rows that begin alike share.

`generate_workers.residency.paged` keeps the blocks of rows here, under the names of `baton.prefix_blocks`, and begins
new rows with them. The tier owns its pages as rows do, so that they outlive the row that filled them. It takes what
rows leave of the pool: when a row needs a page and none is free, the block that was used longest ago is evicted, of
those with a page that no row has.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from modeling.kv.pages import PagePool


class PagePrefixes:
    """Blocks by name, each with its pages, in one pool. Thread-safe."""

    def __init__(self, pool: PagePool) -> None:
        """Become what the pool reclaims pages from."""
        self.num_shared_blocks = 0
        """Blocks with which rows have begun so far."""
        self._pool = pool
        self._lock = threading.Lock()
        """Taken before the pool's."""
        self._blocks: OrderedDict[str, list[int]] = OrderedDict()
        """Pages of each block; that used last is the last."""
        self._is_closed = False
        pool.reclaim = self.evict

    def keep(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """Own the pages of consecutive blocks, whose KV is final. Blocks that are here already stay as they are. Does
        nothing after `close`."""
        size = len(pages) // len(names) if names else 0
        with self._lock:
            if self._is_closed:
                return
            for index in reversed(range(len(names))):  # a block is of no use without those before it
                if names[index] not in self._blocks:
                    own = list(pages[index * size : (index + 1) * size])
                    self._pool.share(own)
                    self._blocks[names[index]] = own
                self._blocks.move_to_end(names[index])

    def begin(self, names: Sequence[str]) -> list[int]:
        """Return the pages of the longest run of leading blocks that are here, with the caller as one more owner."""
        pages: list[int] = []
        with self._lock:
            found = []
            for name in names:
                if name not in self._blocks:
                    break
                found.append(name)
            for name in reversed(found):
                self._blocks.move_to_end(name)
            for name in found:
                pages += self._blocks[name]
            self._pool.share(pages)
            self.num_shared_blocks += len(found)
        return pages

    def evict(self, num_pages: int) -> bool:
        """Drop blocks with pages that no row has, those used longest ago first, until so many pages are free; return
        whether there was any."""
        dropped, num_spared = list[str](), 0
        with self._lock:
            for name, pages in self._blocks.items():
                if num_spared >= num_pages:
                    break
                if num_own := len(pages) - sum(map(self._pool.is_shared, pages)):
                    dropped.append(name)
                    num_spared += num_own
            for name in dropped:
                self._pool.give(self._blocks.pop(name))
        return bool(dropped)

    def close(self) -> None:
        """Drop all blocks, even those whose pages rows share, and keep none any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            while self._blocks:
                self._pool.give(self._blocks.popitem()[1])
