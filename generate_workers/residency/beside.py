"""A copy of a row's first and latest KV on the device, for drafts of a row whose KV lives at home.

A Part of a row (`rows`). It follows the row: tokens are copied once, when they have their final KV, so that drafts cost
the link a few tokens a round, however long the row is. `generate_workers.speculation` runs draft steps over it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import DraftKeys
from generate_workers.residency.rows import MakeMemory
from modeling.kv.buffers import KvBuffer, KvPlace, KvRows

Fetch = Callable[[list[tuple[Tensor, Tensor]]], None]
"""Copies pairs `(to, from)` from home to the device, and returns when that is done."""


class Beside:
    """The copy of one slot's row, claim after claim."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, size: DraftKeys) -> None:
        """Raise what `make_memory` raises."""
        self._layout, self._size = layout, size
        self._memory = make_memory(layout, size.num_places)
        self._buffer: KvBuffer | None = None
        self._num_copied = 0
        """Tokens of the row that have their final KV here, or were left out."""
        self._start = size.num_first
        """Position of the token that lies behind the first ones."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self._memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of a row's copy: all that there is room for, once the row is as long."""
        return self._memory.bytes_for(min(num_tokens, self._size.num_places))

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim: nothing is copied yet."""
        self._memory.expect(min(num_tokens, self._size.num_places))
        tokens = TokenRange(0, self._size.num_places)
        self._buffer = KvBuffer.of(self._layout, tokens, self._memory.data_LS2GH)
        self._num_copied, self._start = 0, self._size.num_first

    def copy_from(self, other: "Beside", num_tokens: int) -> None:
        """Do nothing: a row's copy is made of its own KV."""

    def release(self) -> None:
        """End the claim, if there is one."""
        self._buffer = None
        self._memory.release()

    def follow(self, home: KvBuffer, num_tokens: int, fetch: Fetch) -> None:
        """Copy what is missing of the row's first `num_tokens` tokens, and of their latest."""
        size, copied = self._size, self._num_copied
        first_last = max(num_tokens - size.num_last, size.num_first)
        first = min(size.num_first, num_tokens)
        wanted = [
            TokenRange(min(copied, first), first),
            TokenRange(max(copied, min(first_last, num_tokens)), num_tokens),
        ]
        if self._place(num_tokens) + size.most_drafts > size.num_places:
            self._move(TokenRange(first_last, max(copied, first_last)))
        for tokens in wanted:
            if tokens.start < tokens.end:
                place = self._place(tokens.start)
                to = TokenRange(place, place + len(tokens))
                self._memory.commit(to)
                layers = range(self._layout.num_layers)
                fetch([(self.buffer.span(layer, to), home.span(layer, tokens)) for layer in layers])
        self._num_copied = num_tokens

    def span(self, tokens: TokenRange) -> "BesideSpan":
        """Return the span of a draft whose new token is at `tokens`; the tokens before are copied, or drafts."""
        place = self._place(tokens.start)
        self._memory.commit(TokenRange(place, place + 1))
        first, last = self._size.num_first, max(place + 1 - self._size.num_last, self._size.num_first)
        return BesideSpan(self.buffer, tokens, place, TokenRange(first, last) if last > first else None)

    @property
    def buffer(self) -> KvBuffer:
        """Return the present claim's memory."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def _place(self, position: int) -> int:
        """Return where a position lies."""
        return position if position < self._size.num_first else self._size.num_first + position - self._start

    def _move(self, tokens: TokenRange) -> None:
        """Move latest tokens to the start of their room; all others there are given up."""
        place, to = self._place(tokens.start), TokenRange(self._size.num_first, self._size.num_first + len(tokens))
        for layer in range(self._layout.num_layers if tokens else 0):
            kept = self.buffer.span(layer, TokenRange(place, place + len(tokens)))
            self.buffer.span(layer, to).copy_(kept.clone())
        self._start = tokens.start


@dataclass(frozen=True)
class BesideSpan:
    """A SequenceSpan of one new token over a row's copy."""

    buffer: KvBuffer
    tokens: TokenRange
    """Position of the new token."""
    index: int
    """Where the new token lies in the copy."""
    unseen: TokenRange | None
    """Tokens of the copy that the new one does not attend to."""

    def own(self, layer: int) -> Tensor:
        return self.buffer.span(layer, TokenRange(self.index, self.index + 1))

    def segments(self, layer: int) -> Iterator[KvRows]:
        unseen = self.unseen or TokenRange(0, 0)
        for start, end in ((0, unseen.start), (unseen.end, self.index + 1)):
            if start < end:  # keys are numbered as they lie, and come before the token wherever they are
                rows = self.buffer.rows(layer, TokenRange(start, end))
                yield KvRows(rows.k_SGH, rows.v_SGH, self.tokens.end - (self.index + 1) + start)

    def place(self) -> KvPlace:
        data = self.buffer.data
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(data.data_ptr(), layer_bytes, len(data), self.index + 1, unseen=self.unseen)
