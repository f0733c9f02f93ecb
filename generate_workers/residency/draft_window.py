"""KV of the first and the latest tokens of a sequence, in device memory, for drafts. It is either copied from the
sequence's KV in host memory, or computed by a draft model.

A window whose KV is copied is a RowPart, a part of the slot's memory (`row_parts`). The KV of each token is copied
once, after it is final (later steps do not change it). Therefore only the KV of a few tokens is copied each time that
drafts are made, even for long sequences. `generate_workers.speculation` runs draft steps with the copy. A draft model
writes its own KV to a window (`generate_workers.speculation.draft_model`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.modeling.kv.buffers import KvBuffer, KvPlace, KvRows
from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import DraftKeys
from generate_workers.residency.row_parts import MakeMemory

Fetch = Callable[[list[tuple[Tensor, Tensor]]], None]
"""Function that copies tensors from host memory to the device. It takes a list of pairs (target, source), and returns
when all copies are complete."""


class DraftWindow:
    """KV of the first and latest tokens of the sequence in one slot. All sequences that use the slot, one after
    another, use the same object. A sequence's use of it, from `open` to `release`, is called a claim."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, size: DraftKeys) -> None:
        """Make a window of the given `size`, in memory from `make_memory`. Raises the errors of `make_memory`."""
        self._layout, self._size = layout, size
        self._memory = make_memory(layout, size.num_places)
        self._buffer: KvBuffer | None = None
        self._num_copied = 0
        """Number of tokens from the start of the sequence that have been processed. The window has the final KV of
        those processed tokens that drafts attend to."""
        self._start = size.num_first
        """Position, in the sequence, of the first token in the buffer's range for latest tokens. This range follows the
        `num_first` first tokens of the sequence."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the window uses now."""
        return self._memory.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that a window uses for a sequence of `num_tokens` tokens. The number grows with the tokens
        up to the maximum size of the window."""
        return self._memory.bytes_for(min(num_tokens, self._size.num_places))

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin to use the window for a new sequence. The window has no KV yet. `num_tokens`: number of tokens that are
        certain to be written, such as the prompt. `capacity_tokens` is not used."""
        self._memory.expect(min(num_tokens, self._size.num_places))
        tokens = TokenRange(0, self._size.num_places)
        self._buffer = KvBuffer.of(self._layout, tokens, self._memory.data_LS2GH, self._memory.access)
        self._num_copied, self._start = 0, self._size.num_first

    def copy_from(self, other: "DraftWindow", num_tokens: int) -> None:
        """Do nothing. A window is never copied from another slot: it is filled later, from the KV of its own
        sequence."""

    def release(self) -> None:
        """End the use of the window by the current sequence. Does nothing if the window is not in use."""
        self._buffer = None
        self._memory.release()

    def follow(self, home: KvBuffer, num_tokens: int, fetch: Fetch) -> None:
        """Copy KV from `home`, the buffer with all KV of the sequence, to the window. Only KV that drafts attend to and
        that the window lacks is copied. The KV of the first `num_tokens` tokens must be final. `fetch` runs the
        copies."""
        for tokens in self.missing(num_tokens):
            place = self._place(tokens.start)
            to = TokenRange(place, place + len(tokens))
            self._memory.commit(to)
            layers = range(self._layout.num_layers)
            fetch([(self.buffer.span(layer, to), home.span(layer, tokens)) for layer in layers])
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """Record that the sequence's first `num_tokens` tokens have been processed. The window must have the final KV
        of those processed tokens that drafts attend to."""
        self._num_copied = num_tokens

    def missing(self, num_tokens: int) -> list[TokenRange]:
        """Make room in the window, and return the ranges of tokens whose KV must be written to it before drafts are
        made for a sequence of `num_tokens` tokens. Write the ranges in the returned order: the range at the start of
        the sequence, then the range of its latest tokens."""
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
        """Return the span of new tokens at the positions `tokens`. They attend to the sequence's first tokens and to
        its latest `num_last` tokens, which include the new tokens. The window must already have the KV of the earlier
        ones among these tokens."""
        place = self._place(tokens.start)
        self._memory.commit(TokenRange(place, place + len(tokens)))
        first = self._size.num_first
        last = min(max(place + len(tokens) - self._size.num_last, first), max(place, first))
        return DraftWindowSpan(self.buffer, tokens, place, TokenRange(first, last) if last > first else None)

    @property
    def buffer(self) -> KvBuffer:
        """Return the buffer with the KV of the current sequence. The slot must be in use."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def _place(self, position: int) -> int:
        return position if position < self._size.num_first else self._size.num_first + position - self._start

    def _move(self, tokens: TokenRange) -> None:
        """Move the KV of the latest `tokens` to the start of the buffer's range for latest tokens. Other tokens in this
        range are discarded."""
        place, to = self._place(tokens.start), TokenRange(self._size.num_first, self._size.num_first + len(tokens))
        for layer in range(self._layout.num_layers if tokens else 0):
            kept = self.buffer.span(layer, TokenRange(place, place + len(tokens)))
            self.buffer.span(layer, to).copy_(kept.clone())
        self._start = tokens.start


@dataclass(frozen=True)
class DraftWindowSpan:
    """SequenceSpan of a draft step: new tokens of a sequence, which attend to the sequence's first and latest KV in a
    DraftWindow."""

    buffer: KvBuffer
    tokens: TokenRange
    """Positions of the new tokens in the sequence."""
    index: int
    """Index, in the buffer, of the first new token. The other new tokens follow it directly."""
    unseen: TokenRange | None
    """Range of indices in the buffer that the new tokens do not attend to. None: they attend to all tokens in the
    buffer."""

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
