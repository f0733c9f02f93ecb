"""Residency `device` on a device with its own memory: the KV of sequences is stored in pages of one pool. A Residency
for `engine.model_runner`. A sequence allocates pages as it grows and frees them at its end, so that no memory is
reserved for the longest one. Choices of one request share the pages of their prompt: a sequence that writes to a shared
page copies it first (`baton.modeling.kv.pages`). Sequences whose prompts begin with the same blocks share the blocks'
pages (`baton.modeling.kv.page_prefixes`). Pushed KV is copied over the link into pages; no other KV is copied.

Memory is promised and counted per sequence. A shared page counts for each of its sequences, so that a free page always
exists when a sequence must copy it. Pages that only cached blocks use are promised to no sequence, and are evicted when
a sequence needs them.

Shape suffixes: L layers, T tokens of a piece.
"""

from collections.abc import Sequence
from typing import Self

from baton.modeling.device.port import Device
from baton.modeling.kv.buffers import HostAccess
from baton.modeling.kv.page_prefixes import PagePrefixes
from baton.modeling.kv.pages import PAGE_TOKENS, PagePool, PageSpan, RowPages
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import TokenRange
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.steps import InPlaceStep, RowResidency
from generate_workers.residency.traits import POLICIES


class PagedRow:
    """RowKv whose KV is stored in pages of a pool."""

    def __init__(self, pool: PagePool, prefixes: PagePrefixes, shape: KvShape) -> None:
        self._prefixes, self._page_tokens = prefixes, pool.page_tokens
        self.pages = RowPages(pool, shape.max_slot_tokens)
        self._access: HostAccess = pool.memory.access
        self._row_bytes = shape.layout.row_bytes
        self._tokens: TokenRange | None = None
        self._num_expected = 0
        """Number of tokens that are certain to be written. Their pages are allocated at once, so that they are
        adjacent."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of tokens that the current claim may hold."""
        assert self._tokens is not None, "the slot is not claimed"
        return self._tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes of the sequence's pages. Shared pages count in full."""
        return KvBytes(self.pages.num_bytes, self.pages.num_bytes)

    @property
    def frames(self) -> StagingFrames | None:
        return self._access.frames

    def bytes_for(self, num_tokens: int) -> KvBytes:
        num_bytes = self.pages.bytes_for(num_tokens)
        return KvBytes(num_bytes, num_bytes)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim, without pages. `num_tokens`: tokens that are certain to be written."""
        self._tokens, self._num_expected = TokenRange(0, capacity_tokens), num_tokens

    def commit(self, tokens: TokenRange) -> None:
        """Allocate unshared pages for `tokens`, which are about to be written. Raises MemoryError if too few pages are
        free."""
        assert tokens.end <= self.tokens.end, f"{tokens} outside {self.tokens}"
        self.pages.prepare(tokens, self._num_expected)

    def span(self, tokens: TokenRange) -> PageSpan:
        """Return the span of a step whose new tokens are `tokens`."""
        return PageSpan(self.pages, tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV into pages, over the device's link."""
        assert data.nbytes == len(tokens) * self._row_bytes, f"{data.nbytes} bytes for {tokens}"
        self.commit(tokens)
        writes = []
        for part, kv_T2GH in self.pages.spans(layer, tokens):
            start = (part.start - tokens.start) * self._row_bytes
            writes.append((kv_T2GH, data[start : start + len(part) * self._row_bytes]))
        return self._access.write(writes)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return a copy of the bytes of `tokens`, which must have been written."""
        return self._access.read([kv_T2GH for _, kv_T2GH in self.pages.spans(layer, tokens)])

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Share the pages of another sequence's first `num_tokens` tokens."""
        self.pages.share(other.pages.pages_of(TokenRange(0, num_tokens)))

    def begin_with(self, names: Sequence[str], block_tokens: int) -> int:
        """Begin an empty sequence with the leading blocks of `names` that the device has, by sharing their pages.
        Return the number of tokens of these blocks."""
        if not self._has_whole_pages(block_tokens):
            return 0
        pages = self._prefixes.begin(names)
        self.pages.adopt(pages)
        return len(pages) * self._page_tokens

    def keep(self, names: Sequence[str], block_tokens: int) -> None:
        """Make the sequence's first blocks, whose KV must be final, available to later sequences with the same
        prefix."""
        if self._has_whole_pages(block_tokens):
            self._prefixes.keep(names, self.pages.pages_of(TokenRange(0, len(names) * block_tokens)))

    def _has_whole_pages(self, block_tokens: int) -> bool:
        """Return whether blocks of `block_tokens` tokens are whole pages. Other blocks are not shared."""
        return block_tokens % self._page_tokens == 0

    def release(self) -> None:
        """End the claim, if one exists, and free its pages."""
        self._tokens = None
        self.pages.release()


class PagedResidency(RowResidency[PagedRow]):
    """Residency that keeps all KV in pages on the device."""

    traits = POLICIES["device"]

    def __init__(
        self, shape: KvShape, device: Device, device_bytes: int | None = None, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """`device_bytes`: bytes of device memory for KV; None: no limit. Raises an error of OUT_OF_MEMORY, or OSError,
        when the pool cannot be allocated."""
        num_pages = shape.num_slots * -(-shape.max_slot_tokens // page_tokens)
        if device_bytes is not None:
            num_pages = max(min(num_pages, device_bytes // (page_tokens * shape.layout.token_bytes)), 1)
        self.pool = PagePool(device.pool_memory(shape.layout, num_pages, page_tokens))
        self.prefixes = PagePrefixes(self.pool)
        self._link = device.link
        rows = [PagedRow(self.pool, self.prefixes, shape) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InPlaceStep(rows, shape.bytes_read(tokens for _, tokens in rows)))

    def bound(self, num_bytes: int) -> None:
        """Limit sequences and cached blocks to `num_bytes` bytes in total, but at least one page."""
        self.pool.most_taken = min(self.pool.num_pages, max(num_bytes // self.pool.page_bytes, 1))

    def close(self) -> None:
        """Free the pages of cached blocks, and end the link's threads. Idempotent."""
        self.prefixes.close()
        self._link.rest()
