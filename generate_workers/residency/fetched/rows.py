"""Rows of InfiniGen whose KV lives at home, and their spans over what the device has of it.

    home    KV of all layers but the first two
    device  the first two layers' KV, partial keys, and hot keys (`hot_keys`)

A row of one new token attends to hot keys. A longer span attends to all keys, which are fetched a piece at a time, and
merged by log-sum-exp.

T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.fetched.hot_keys import HotKeys, HotSize
from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import PagedKv
from generate_workers.residency.sparse.infinigen import PartialIndex, ScoredRow
from generate_workers.residency.sparse.selective import SplitSpan
from modeling.device.port import Device
from modeling.forward.decoder import PassingSpan, SequenceSpan
from modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis

PIECE_TOKENS = 512
"""Tokens of a piece of KV that is fetched to be read once."""


class Pieces:
    """Memory of the device through which KV passes in pieces. Used by one thread at a time."""

    def __init__(self, layout: KvLayout, device: Device) -> None:
        """Raise what is in OUT_OF_MEMORY."""
        self.num_bytes = 0
        """Bytes that were fetched so far."""
        self._buffer = device.buffer(replace(layout, num_layers=1), TokenRange(0, PIECE_TOKENS))
        self._link = device.link

    def bring(self, source_T2GH: Tensor) -> Tensor:
        """Fetch a piece; return its place on the device, which the next one takes."""
        piece = self._buffer.span(0, TokenRange(0, len(source_T2GH)))
        self._link.fetch([(piece, source_T2GH)]).join()
        self.num_bytes += source_T2GH.nbytes
        return piece


class FetchedRow(ScoredRow):
    """A ScoredRow whose picks are fetched."""

    def __init__(
        self, shape: KvShape, device: Device, size: HotSize, basis: Basis, pieces: tuple[Pieces, Pieces]
    ) -> None:
        """`pieces`: those through which pushed KV passes, to be made partial keys of, and those that long spans read.
        Raises what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        self.whole = PagedKv(replace(layout, num_layers=NUM_WHOLE_LAYERS), device.row_memory, most)
        self.others = PagedKv(size.layout, device.home_memory, most)
        self.partial = PartialIndex(layout, basis, most, device.row_memory)
        self.hot = HotKeys(size, device.row_memory, most)
        super().__init__([self.whole, self.others], [self.whole, self.partial, self.hot])
        self._pushed, self._read = pieces
        self._make_buffer, self._new = device.buffer, replace(layout, num_layers=1)

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens` at home, and for hot keys of a row as long."""
        super().commit(tokens)
        self.hot.commit(tokens.end)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of tokens whose KV came home, on the device."""
        for part in tokens.split(PIECE_TOKENS) if layer in self.partial.layers else []:
            home = kv_T2GH[part.start - tokens.start : part.end - tokens.start]
            self.partial.add(layer, part.start, self._pushed.bring(home))

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a step's span over the device's memory, having made room there for the new tokens."""
        whole = BufferSpan(self.whole.buffer, tokens)
        if len(tokens) == 1:
            return SplitSpan(whole, HotSpan(self.hot, tokens, self.hot.own_place(tokens.start)))
        self.hot.forget()
        return LongSpan(whole, self.others.buffer, self._make_buffer(self._new, tokens), self._read)


@dataclass(frozen=True)
class HotSpan:
    """A SequenceSpan of one new token over hot keys, in the layers whose picks are fetched."""

    hot: HotKeys
    tokens: TokenRange
    own_place: int
    """Place of the new token in each area."""

    def own(self, layer: int) -> Tensor:
        return self.hot.buffer.span(self.hot.area(layer), TokenRange(self.own_place, self.own_place + 1))

    def segments(self, layer: int) -> Iterator[KvRows]:
        raise AssertionError("picks are attended to by the decode kernel alone")

    def place(self) -> KvPlace:
        data, num_places = self.hot.buffer.data, self.hot.size.num_places(self.tokens.end)
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(data.data_ptr(), layer_bytes, len(data), num_places, own=self.own_place)


@dataclass(frozen=True)
class LongSpan(PassingSpan):
    """A SequenceSpan of several new tokens: the first layers' KV is on the device, earlier tokens' of others passes."""

    whole: BufferSpan
    home: KvBuffer
    """KV of the other layers."""
    new: KvBuffer
    """Memory of the device for the new tokens' KV of one layer."""
    pieces: Pieces

    @property
    def tokens(self) -> TokenRange:
        return self.whole.tokens

    def own(self, layer: int) -> Tensor:
        return self.whole.own(layer) if layer < NUM_WHOLE_LAYERS else self.new.span(0, self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield earlier tokens' pieces, then the new tokens."""
        if layer < NUM_WHOLE_LAYERS:
            yield from self.whole.segments(layer)
            return
        for part in TokenRange(0, self.tokens.start).split(PIECE_TOKENS) if self.tokens.start else []:
            piece = self.pieces.bring(self.home.span(layer - NUM_WHOLE_LAYERS, part))
            yield KvRows(piece[:, 0], piece[:, 1], part.start)
        yield self.new.rows(0, self.tokens)

    def place(self) -> None:
        """Return None: the KV is in no one piece."""
