"""First and latest KV of a sequence on the device, for drafts: either a copy of KV in host memory, or a draft model's
KV.

A copy is a RowPart of a slot (`row_parts`). The KV of each token is copied once, when it is final. So drafts copy only
a few tokens per round over the link, for sequences of any length. `generate_workers.speculation` runs draft steps over
the copy. A draft model's forwards write their own KV (`generate_workers.speculation.draft_model`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.modeling.kv.buffers import KvBuffer, KvPlace, KvRows
from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import DraftKeys
from generate_workers.residency.row_parts import MakeMemory

Fetch = Callable[[list[tuple[Tensor, Tensor]]], None]
"""Function that takes a list of `(target, source)` tensors, copies each source in host memory to its target on the
device, and returns when all copies are complete."""


class DraftWindow:
    """First and latest KV of a slot's sequence. The object is reused by the slot's claims, one after another."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, size: DraftKeys) -> None:
        """Raises the errors of `make_memory`."""
        self._layout, self._size = layout, size
        self._memory = make_memory(layout, size.num_places)
        self._buffer: KvBuffer | None = None
        self._num_copied = 0
        """Number of the sequence's tokens whose final KV was copied or left out."""
        self._start = size.num_first
        """Position of the token that is stored right after the `num_first` first tokens."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self._memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the copy for a sequence of `num_tokens` tokens. They grow with the tokens up to a
        maximum."""
        return self._memory.bytes_for(min(num_tokens, self._size.num_places))

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim, without copied KV."""
        self._memory.expect(min(num_tokens, self._size.num_places))
        tokens = TokenRange(0, self._size.num_places)
        self._buffer = KvBuffer.of(self._layout, tokens, self._memory.data_LS2GH, self._memory.access)
        self._num_copied, self._start = 0, self._size.num_first

    def copy_from(self, other: "DraftWindow", num_tokens: int) -> None:
        """Do nothing: each copy is made from its own sequence's KV."""

    def release(self) -> None:
        """End the claim, if one exists."""
        self._buffer = None
        self._memory.release()

    def follow(self, home: KvBuffer, num_tokens: int, fetch: Fetch) -> None:
        """Copy KV that the window lacks. The KV of the sequence's first `num_tokens` tokens must be final. `home` holds
        all KV of the sequence. `fetch` runs the copies."""
        for tokens in self.missing(num_tokens):
            place = self._place(tokens.start)
            to = TokenRange(place, place + len(tokens))
            self._memory.commit(to)
            layers = range(self._layout.num_layers)
            fetch([(self.buffer.span(layer, to), home.span(layer, tokens)) for layer in layers])
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """Record that the final KV of exactly the sequence's first `num_tokens` tokens is in the window or left out."""
        self._num_copied = num_tokens

    def missing(self, num_tokens: int) -> list[TokenRange]:
        """Return the ranges of the sequence's first `num_tokens` tokens whose KV the window lacks, in the order in
        which they must be written: the sequence's first tokens, then the latest. Make room for these tokens and for
        drafts after them."""
        size, copied = self._size, self._num_copied
        first_last = max(num_tokens - size.num_last, size.num_first)
        first = min(size.num_first, num_tokens)
        wanted = [
            TokenRange(min(copied, first), first),
            TokenRange(max(copied, min(first_last, num_tokens)), num_tokens),
        ]
        if self._place(num_tokens) + size.most_drafts > size.num_places:
            self._move(TokenRange(first_last, max(copied, first_last)))
        return [tokens for tokens in wanted if tokens]

    def span(self, tokens: TokenRange) -> "DraftWindowSpan":
        """Return the span of new tokens. All earlier tokens must be in the window or left out. The new tokens attend to
        the first tokens, to themselves, and to the tokens before them that are among the `num_last` tokens that end
        with the last new token."""
        place = self._place(tokens.start)
        self._memory.commit(TokenRange(place, place + len(tokens)))
        first = self._size.num_first
        last = min(max(place + len(tokens) - self._size.num_last, first), max(place, first))
        return DraftWindowSpan(self.buffer, tokens, place, TokenRange(first, last) if last > first else None)

    @property
    def buffer(self) -> KvBuffer:
        """Return the buffer of the current claim."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def _place(self, position: int) -> int:
        return position if position < self._size.num_first else self._size.num_first + position - self._start

    def _move(self, tokens: TokenRange) -> None:
        """Move the latest `tokens` to the start of the buffer's area for latest tokens. Other tokens in this area are
        discarded."""
        place, to = self._place(tokens.start), TokenRange(self._size.num_first, self._size.num_first + len(tokens))
        for layer in range(self._layout.num_layers if tokens else 0):
            kept = self.buffer.span(layer, TokenRange(place, place + len(tokens)))
            self.buffer.span(layer, to).copy_(kept.clone())
        self._start = tokens.start


@dataclass(frozen=True)
class DraftWindowSpan:
    """SequenceSpan of new tokens over a sequence's first and latest KV."""

    buffer: KvBuffer
    tokens: TokenRange
    """Positions of the new tokens."""
    index: int
    """Index of the first new token in the buffer; the other new tokens follow."""
    unseen: TokenRange | None
    """Range of buffer indices before the new tokens to which the new tokens do not attend. None: they attend to all
    tokens."""

    def own(self, layer: int) -> Tensor:
        return self.buffer.span(layer, TokenRange(self.index, self._end))

    def segments(self, layer: int) -> Iterator[KvRows]:
        unseen = self.unseen or TokenRange(0, 0)
        for start, end in ((0, unseen.start), (unseen.end, self._end)):
            if start < end:  # keys are numbered by index, so that the new keys have their true positions
                rows = self.buffer.rows(layer, TokenRange(start, end))
                yield KvRows(rows.k_SGH, rows.v_SGH, self.tokens.start - self.index + start)

    def place(self) -> KvPlace:
        data = self.buffer.data
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(data.data_ptr(), layer_bytes, len(data), self._end, len(self.tokens), unseen=self.unseen)

    @property
    def _end(self) -> int:
        return self.index + len(self.tokens)
