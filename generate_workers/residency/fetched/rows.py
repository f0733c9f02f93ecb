"""Rows whose KV lives at home, and their spans over what the device has of it.

    home    KV of all layers but the first two
    device  the first two layers' KV, and what the policy keeps: for InfiniGen partial keys and hot keys (`hot_keys`)

A row of one new token attends to places on the device. A longer span attends to all keys, which are fetched a piece at
a time, and merged by log-sum-exp.

T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.fetched.hot_keys import HotKeys
from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import MakeMemory, PagedKv, Part, StoredRow
from generate_workers.residency.sparse.infinigen import PartialPart, ScoredRow
from generate_workers.residency.sparse.selective import SplitSpan
from modeling.device.port import Device
from modeling.forward.decoder import PassingSpan, SequenceSpan
from modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS

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
        return self._fetch(self._buffer.span(0, TokenRange(0, len(source_T2GH))), source_T2GH)

    def bring_keys(self, source_T2GH: Tensor) -> Tensor:
        """Fetch the keys of a piece, `[T, G, H]`; return their place on the device, which the next one takes."""
        k_TGH = source_T2GH[:, 0].contiguous()
        return self._fetch(self._buffer.data.view(-1)[: k_TGH.numel()].view(k_TGH.shape), k_TGH)

    def _fetch(self, to: Tensor, source: Tensor) -> Tensor:
        self._link.fetch([(to, source)]).join()
        self.num_bytes += source.nbytes
        return to


PassingPieces = tuple[Pieces, Pieces]
"""Pieces through which pushed keys pass, to be made partial keys of, and those that long spans read."""


class AwayRow(StoredRow):
    """A StoredRow whose layers but the first two live at home, and whose longer spans read them there in pieces."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        parts: Sequence[Part],
        pieces: Pieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """`parts`: what the policy keeps on the device besides the first two layers. `pieces`: those through which
        longer spans read. `make_whole`: makes memory for the first two layers; None: the device's for a row. Raises
        what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        self.whole = PagedKv(whole_of(layout), make_whole or device.row_memory, most)
        self.others = PagedKv(others_of(layout), device.home_memory, most)
        super().__init__([self.whole, self.others], [self.whole, *parts])
        self._read = pieces
        self._make_buffer, self._new = device.buffer, replace(layout, num_layers=1)

    def long_span(self, tokens: TokenRange) -> "LongSpan":
        """Return the span of several new tokens, with memory of the device for their KV of one layer."""
        whole = BufferSpan(self.whole.buffer, tokens)
        return LongSpan(whole, self.others.buffer, self._make_buffer(self._new, tokens), self._read)


class FetchedRow(AwayRow, ScoredRow):
    """A ScoredRow whose picks are fetched."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        keys: tuple[PartialPart, HotKeys],
        pieces: PassingPieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """`keys`: the row's own parts. `make_whole`: as AwayRow takes it. Raises what is in OUT_OF_MEMORY when the
        slot's address space cannot be had."""
        self.partial, self.hot = keys
        self._pushed, read = pieces
        super().__init__(shape, device, keys, read, make_whole)

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens` at home, and for hot keys of a row as long."""
        super().commit(tokens)
        self.hot.commit(tokens.end)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys of tokens whose KV came home, on the device."""
        bring_partial(self.partial, self._pushed, layer, tokens, kv_T2GH)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a step's span over the device's memory, having made room there for the new tokens."""
        if len(tokens) != 1:
            self.hot.forget()
            return self.long_span(tokens)
        return self.placed_span(tokens)

    def placed_span(self, tokens: TokenRange) -> SplitSpan:
        """Return the span of one new token, having made room for it."""
        whole, num_places = BufferSpan(self.whole.buffer, tokens), self.hot.places_of(tokens.end)
        return SplitSpan(whole, PlacedSpan(self.hot.buffer, tokens, self.hot.own_place(tokens.start), num_places))


def whole_of(layout: KvLayout) -> KvLayout:
    """Return the layout of the first two layers."""
    return replace(layout, num_layers=NUM_WHOLE_LAYERS)


def others_of(layout: KvLayout) -> KvLayout:
    """Return the layout of the layers behind the first two."""
    return replace(layout, num_layers=layout.num_layers - NUM_WHOLE_LAYERS)


def bring_partial(partial: PartialPart, pieces: Pieces, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
    """Make the partial keys of tokens whose KV came home, of keys that pass through `pieces`."""
    for part in tokens.split(PIECE_TOKENS) if layer in partial.layers else []:
        home_T2GH = kv_T2GH[part.start - tokens.start : part.end - tokens.start]
        partial.add_keys(layer, part.start, pieces.bring_keys(home_T2GH))


@dataclass(frozen=True)
class PlacedSpan:
    """A SequenceSpan of one new token over places on the device, in layers whose keys are picked."""

    places: KvBuffer
    """Areas of the layers, which take turns in them, and places as tokens."""
    tokens: TokenRange
    own_place: int
    """Place of the new token in each area."""
    num_places: int
    """Places of the row, of which picks name some."""

    def own(self, layer: int) -> Tensor:
        return self.places.span(layer % len(self.places.data), TokenRange(self.own_place, self.own_place + 1))

    def segments(self, layer: int) -> Iterator[KvRows]:
        raise AssertionError("picks are attended to by the decode kernel alone")

    def place(self) -> KvPlace:
        data = self.places.data
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(data.data_ptr(), layer_bytes, len(data), self.num_places, own=self.own_place)


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
