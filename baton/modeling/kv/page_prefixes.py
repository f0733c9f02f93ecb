"""The prefix cache's tier in device memory: pages with the KV of named blocks, shared by sequences of equal prefix.

`generate_workers.residency.paged` stores sequences' blocks here, under the names of `baton.prefix_blocks`, and uses
them as prefixes of new sequences. The tier is an owner of its pages, like a sequence, so that the pages remain when the
sequence that filled them has ended. It uses pages that sequences do not need. When a sequence needs a page and none is
free, the least recently used block is evicted, among the blocks that have a page that no sequence owns.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from baton.modeling.kv.pages import PagePool


class PagePrefixes:
    """Named blocks, each with its pages, in one pool. Thread-safe."""

    def __init__(self, pool: PagePool) -> None:
        """Store blocks in `pool`, and set the pool's `reclaim` to `evict`."""
        self.num_shared_blocks = 0
        """Number of blocks that sequences have reused so far."""
        self._pool = pool
        self._lock = threading.Lock()
        """Guards `_blocks` and `_is_closed`. It is acquired before the pool's lock."""
        self._blocks: OrderedDict[str, list[int]] = OrderedDict()
        """Pages of each block; the most recently used block is last."""
        self._is_closed = False
        pool.reclaim = self.evict

    def keep(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """Become an owner of the pages of consecutive blocks, whose KV is final. Blocks that are already stored are not
        changed. Does nothing after `close`."""
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
        """Return the pages of the leading blocks that are stored, up to the first gap. The caller becomes an additional
        owner of these pages."""
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
        """Drop blocks that have pages that no sequence owns, least recently used first, until `num_pages` pages are
        free. Return whether a block was dropped."""
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
        """Drop all blocks, including those whose pages are shared with sequences. Later calls of `keep` do nothing.
        Idempotent."""
        with self._lock:
            self._is_closed = True
            while self._blocks:
                self._pool.give(self._blocks.popitem()[1])
