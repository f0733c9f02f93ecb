"""Residency `device` on a device with its own memory: the KV of sequences is stored in pages of one pool.

A Residency for `engine.model_runner`. A sequence allocates pages as it grows and frees them at its end, so memory is
not reserved for the maximum length. Choices of one request share the pages of their prompt. A sequence that writes to a
shared page copies the page first (`baton.modeling.kv.pages`). Sequences whose prompts begin with the same blocks share
the pages of these blocks (`baton.modeling.kv.page_prefixes`). Pushed KV is copied over the link into pages. Steps read
and write KV in the pages, without a copy.

Memory is promised to sequences (reserved before it is used) and counted for each sequence. A shared page counts for
each of its sequences, so that a free page always exists when a sequence must copy the page. Pages that only cached
blocks use are promised to no sequence, and are evicted when a sequence needs them.

Shape suffixes: L layers, T tokens of a piece.
"""

import threading
from collections.abc import Sequence
from typing import Self

from baton.modeling.device.faults import device_failure
from baton.modeling.device.port import Device
from baton.modeling.kv.buffers import HostAccess
from baton.modeling.kv.page_prefixes import PagePrefixes
from baton.modeling.kv.pages import PAGE_TOKENS, PagePool, PageSpan, RowPages
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.types import TokenRange
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.steps import InPlaceStep, RowResidency
from generate_workers.residency.traits import POLICIES

KvPiece = tuple[int, TokenRange, memoryview]
"""Piece of pushed KV: a layer, a range of tokens, and the KV of these tokens in this layer."""


class PoolUse:
    """Use of a pool's pages by work that is queued on the device, shared by all slots. Thread-safe.

    A free page may still be used by work that was queued before its last sequence released it, such as a step that was
    not read. Only this work matters to a push: no work that is queued later uses the page. Usually it has ended long
    before the page gets a new sequence, because the host has read the step with which a sequence ends. So pushes do not
    wait for the present step.
    """

    def __init__(self, access: HostAccess) -> None:
        self.last: Transfer = DoneTransfer()
        """Work that was queued on the device when pages were last released."""
        self._access = access
        self._releasing = threading.Lock()

    def release(self, pages: RowPages) -> None:
        """Release the pages of a sequence that has ended."""
        with self._releasing:  # so that `last` never goes back
            if pages.num_bytes:
                try:
                    self.last = self._access.queued()
                except RuntimeError as error:
                    if not device_failure(error):
                        raise  # otherwise the device does no more work, and the process ends
        pages.release()


class PagedRow:
    """KV of one slot's sequence, stored in pages of a pool. Implements RowKv."""

    def __init__(self, pool: PagePool, prefixes: PagePrefixes, pool_use: PoolUse, shape: KvShape) -> None:
        self._prefixes, self._page_tokens, self._pool_use = prefixes, pool.page_tokens, pool_use
        self.pages = RowPages(pool, shape.max_slot_tokens)
        self._access: HostAccess = pool.memory.access
        self._row_bytes = shape.layout.row_bytes
        self._tokens: TokenRange | None = None
        self._num_expected = 0
        """Number of tokens that are certain to be written, such as the prompt. Pages for these tokens are allocated at
        the same time, so that they are adjacent in memory."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of token positions that the slot's current sequence may use."""
        assert self._tokens is not None, "the slot is not claimed"
        return self._tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the number of bytes of the sequence's pages. Shared pages count in full."""
        return KvBytes(self.pages.num_bytes, self.pages.num_bytes)

    @property
    def frames(self) -> StagingFrames | None:
        return self._access.frames

    def bytes_for(self, num_tokens: int) -> KvBytes:
        num_bytes = self.pages.bytes_for(num_tokens)
        return KvBytes(num_bytes, num_bytes)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. No page is allocated yet. `num_tokens`: number of tokens that
        are certain to be written, such as the prompt. `capacity_tokens`: maximum number of tokens."""
        self._tokens, self._num_expected = TokenRange(0, capacity_tokens), num_tokens

    def commit(self, tokens: TokenRange) -> None:
        """Allocate pages for `tokens`, which are about to be written. Pages for them that are shared are copied first.
        Raises MemoryError if too few pages are free."""
        assert tokens.end <= self.tokens.end, f"{tokens} outside {self.tokens}"
        self.pages.prepare(tokens, self._num_expected)

    def span(self, tokens: TokenRange) -> PageSpan:
        """Return the PageSpan of a step that runs the new tokens `tokens`: the KV that they attend to, and memory for
        their own KV."""
        return PageSpan(self.pages, tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV of `tokens` in a layer over the link into the sequence's pages. Pages for these
        tokens are allocated first."""
        return self.write_all([(layer, tokens, data)])

    def write_all(self, pieces: Sequence[KvPiece]) -> Transfer:
        """Begin to copy pieces of pushed KV over the link into the sequence's pages, all by one call of the link. Pages
        for their tokens are allocated first. If this raises, no copy has begun."""
        writes, num_bytes, has_copied = [], self.pages.num_bytes, False
        for layer, tokens, data in pieces:
            assert data.nbytes == len(tokens) * self._row_bytes, f"{data.nbytes} bytes for {tokens}"
            before = self.pages.pages_of(tokens)
            self.commit(tokens)
            has_copied |= self.pages.pages_of(tokens)[: len(before)] != before
            writes.append(([kv_T2GH for _, kv_T2GH in self.pages.spans(layer, tokens)], data))
        after = self._pool_use.last if self.pages.num_bytes > num_bytes else None
        if has_copied:  # the copy of a shared page is queued, and must not overwrite what is pushed to the page
            after = self._access.queued()
        return self._access.write(writes, after=after)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return a copy of the KV of `tokens` in a layer as bytes. The KV must have been written."""
        return self._access.read([kv_T2GH for _, kv_T2GH in self.pages.spans(layer, tokens)])

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Share the pages of the first `num_tokens` tokens of another slot's sequence."""
        self.pages.share(other.pages.pages_of(TokenRange(0, num_tokens)))

    def begin_with(self, names: Sequence[str], block_tokens: int) -> int:
        """Begin an empty sequence with cached blocks, by sharing their pages. `names`: names of the sequence's leading
        blocks, of `block_tokens` tokens each. The pages are shared block by block, up to the first block that is not on
        the device. Return the number of tokens in the shared blocks. It is 0 if `block_tokens` is not a multiple of the
        tokens of a page."""
        if not self._has_whole_pages(block_tokens):
            return 0
        pages = self._prefixes.begin(names)
        self.pages.adopt(pages)
        return len(pages) * self._page_tokens

    def keep(self, names: Sequence[str], block_tokens: int) -> None:
        """Make the pages of the sequence's first blocks available to later sequences with the same prefix. `names`:
        names of these blocks, of `block_tokens` tokens each. The blocks' KV must be final. Does nothing if
        `block_tokens` is not a multiple of the tokens of a page."""
        if self._has_whole_pages(block_tokens):
            self._prefixes.keep(names, self.pages.pages_of(TokenRange(0, len(names) * block_tokens)))

    def _has_whole_pages(self, block_tokens: int) -> bool:
        """Return whether blocks of `block_tokens` tokens are whole pages. Other blocks are not shared."""
        return block_tokens % self._page_tokens == 0

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and free its pages."""
        self._tokens = None
        self._pool_use.release(self.pages)


class PagedResidency(RowResidency[PagedRow]):
    """Residency that stores all KV on the device, in pages of one pool."""

    traits = POLICIES["device"]

    def __init__(
        self, shape: KvShape, device: Device, device_bytes: int | None = None, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """Allocate the pool of pages, for all slots together. `device_bytes`: maximum bytes of device memory for KV;
        None: no limit. `page_tokens`: number of tokens of a page. Raises an error of OUT_OF_MEMORY, or OSError, when
        the pool cannot be allocated."""
        num_pages = shape.num_slots * -(-shape.max_slot_tokens // page_tokens)
        if device_bytes is not None:
            num_pages = max(min(num_pages, device_bytes // (page_tokens * shape.layout.token_bytes)), 1)
        self.pool = PagePool(device.pool_memory(shape.layout, num_pages, page_tokens))
        self.prefixes = PagePrefixes(self.pool)
        self._link = device.link
        pool_use = PoolUse(self.pool.memory.access)
        rows = [PagedRow(self.pool, self.prefixes, pool_use, shape) for _ in range(shape.num_slots)]
        super().__init__(rows, lambda rows: InPlaceStep(rows, shape.bytes_read(tokens for _, tokens in rows)))

    def bound(self, num_bytes: int) -> None:
        """Limit the memory of sequences and cached blocks to `num_bytes` bytes in total. At least one page remains
        usable."""
        self.pool.most_taken = min(self.pool.num_pages, max(num_bytes // self.pool.page_bytes, 1))

    def close(self) -> None:
        """Free the pages of cached blocks, and stop the threads that copy data over the link between host and device.
        Idempotent."""
        self.prefixes.close()
        self._link.rest()
