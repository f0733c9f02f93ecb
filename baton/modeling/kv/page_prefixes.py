"""Prefix cache in device memory: named blocks of KV in pages, which sequences with the same prefix share.

`generate_workers.residency.paged` stores the blocks of sequences here, under the names of `baton.prefix_blocks`, and
reuses them as prefixes of new sequences.

The cache is an owner of its pages, like a sequence. The pages therefore remain after the sequence that filled them has
ended. The cache uses only pages that sequences do not need. If a sequence needs a page and none is free, blocks are
evicted, the least recently used first. Blocks whose pages all have other owners are skipped, because evicting them
would free nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from baton.modeling.kv.pages import PagePool


class PagePrefixes:
    """Prefix cache in one page pool: named blocks, each with its pages. Thread-safe."""

    def __init__(self, pool: PagePool) -> None:
        """Create an empty prefix cache in `pool`, and register `evict` as the function with which the pool reclaims
        pages."""
        self.num_shared_blocks = 0
        """Number of blocks that sequences have reused from the cache so far."""
        self._pool = pool
        self._lock = threading.Lock()
        """Lock that protects `_blocks` and `_is_closed`. It must be acquired before the lock of the pool."""
        self._blocks: OrderedDict[str, list[int]] = OrderedDict()
        """Pages of each block, by block name. The most recently used block is last."""
        self._is_closed = False
        pool.reclaim = self.evict

    def keep(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """Store consecutive blocks: `names` contains their names, and `pages` their pages, the same number for each
        block. The KV in these pages must not change any more. The cache becomes an additional owner of the pages.
        Blocks that are already stored are not changed. Does nothing after `close`."""
        size = len(pages) // len(names) if names else 0
        with self._lock:
            if self._is_closed:
                return
            for index in reversed(range(len(names))):  # a block is useless without those before it
                if names[index] not in self._blocks:
                    own = list(pages[index * size : (index + 1) * size])
                    self._pool.share(own)
                    self._blocks[names[index]] = own
                self._blocks.move_to_end(names[index])

    def begin(self, names: Sequence[str]) -> list[int]:
        """Look up the leading blocks of a sequence. Return the pages of the blocks that are stored, up to the first
        missing block. The caller becomes an additional owner of these pages, and must release them."""
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
        """Evict blocks, the least recently used first, until this frees `num_pages` pages. A block whose pages all have
        other owners is skipped, because evicting it would free nothing. Return True if at least one block was
        evicted."""
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
        """Remove all blocks, including blocks whose pages are shared with sequences. Later calls of `keep` do nothing.
        Idempotent."""
        with self._lock:
            self._is_closed = True
            while self._blocks:
                self._pool.give(self._blocks.popitem()[1])
