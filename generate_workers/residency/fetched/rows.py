"""Slots whose KV is stored in host memory, and their spans over the KV that the device has.

    host    KV of all layers except the first two
    device  the first two layers' KV, and parts of the policy: for InfiniGen partial keys and hot keys (`hot_keys`)

A sequence of one new token attends to places on the device. A longer span attends to all keys, which are fetched a
piece at a time; partial results are merged by log-sum-exp.

Shape suffixes: T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import PassingSpan, SequenceSpan
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import KvLayout, TokenRange
from generate_workers.residency.fetched.hot_keys import HotKeys
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, PagedKv, RowPart, StoredRow
from generate_workers.residency.sparse.infinigen import PartialPart, ScoredRow
from generate_workers.residency.sparse.selective import SplitSpan

PIECE_TOKENS = 512
"""Number of tokens of a piece of KV that is fetched to be read once."""


class Pieces:
    """Device memory through which KV passes in pieces. Used by one thread at a time."""

    def __init__(self, layout: KvLayout, device: Device) -> None:
        """Raises an error of OUT_OF_MEMORY if the buffer cannot be allocated."""
        self.num_bytes = 0
        """Bytes fetched so far."""
        self._buffer = device.buffer(replace(layout, num_layers=1), TokenRange(0, PIECE_TOKENS))
        self._link = device.link

    def bring(self, source_T2GH: Tensor) -> Tensor:
        """Fetch a piece, and return it on the device. The next piece overwrites it."""
        return self._fetch(self._buffer.span(0, TokenRange(0, len(source_T2GH))), source_T2GH)

    def bring_keys(self, source_T2GH: Tensor) -> Tensor:
        """Fetch the keys of a piece, and return them on the device, `[T, G, H]`. The next piece overwrites them."""
        k_TGH = source_T2GH[:, 0].contiguous()
        return self._fetch(self._buffer.data.view(-1)[: k_TGH.numel()].view(k_TGH.shape), k_TGH)

    def _fetch(self, to: Tensor, source: Tensor) -> Tensor:
        self._link.fetch([(to, source)]).join()
        self.num_bytes += source.nbytes
        return to


PassingPieces = tuple[Pieces, Pieces]
"""Pieces for pushed keys, from which partial keys are made, and pieces for long spans."""


class AwayRow(StoredRow):
    """StoredRow that stores all layers except the first two in host memory, from which longer spans read pieces."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        parts: Sequence[RowPart],
        pieces: Pieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """`parts`: the policy's parts on the device in addition to the first two layers. `pieces`: memory through which
        longer spans read. `make_whole`: makes memory for the first two layers; None: `device.row_memory`. Raises an
        error of OUT_OF_MEMORY when the slot's address space cannot be reserved."""
        layout, most = shape.layout, shape.max_slot_tokens
        self.whole = PagedKv(whole_of(layout), make_whole or device.row_memory, most)
        self.others = PagedKv(others_of(layout), device.home_memory, most)
        super().__init__([self.whole, self.others], [self.whole, *parts])
        self._read = pieces
        self._make_buffer, self._new = device.buffer, replace(layout, num_layers=1)

    def long_span(self, tokens: TokenRange) -> "LongSpan":
        """Return the span of several new tokens, with device memory for their KV of one layer."""
        whole = BufferSpan(self.whole.buffer, tokens)
        return LongSpan(whole, self.others.buffer, self._make_buffer(self._new, tokens), self._read)


class FetchedRow(AwayRow, ScoredRow):
    """ScoredRow whose selected KV is fetched."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        keys: tuple[PartialPart, HotKeys],
        pieces: PassingPieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """`keys`: the slot's own parts. `make_whole`: see AwayRow. Raises an error of OUT_OF_MEMORY when the slot's
        address space cannot be reserved."""
        self.partial, self.hot = keys
        self._pushed, read = pieces
        super().__init__(shape, device, keys, read, make_whole)

    def commit(self, tokens: TokenRange) -> None:
        """Commit host memory for `tokens`, and device memory for the hot keys of a sequence of that length."""
        super().commit(tokens)
        self.hot.commit(tokens.end)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Make the partial keys, on the device, of tokens whose KV is in host memory."""
        bring_partial(self.partial, self._pushed, layer, tokens, kv_T2GH)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Make room for the new tokens in device memory, and return a step's span over it."""
        if len(tokens) != 1:
            self.hot.forget()
            return self.long_span(tokens)
        return self.placed_span(tokens)

    def placed_span(self, tokens: TokenRange) -> SplitSpan:
        """Make room for one new token, and return its span."""
        whole, num_places = BufferSpan(self.whole.buffer, tokens), self.hot.places_of(tokens.end)
        return SplitSpan(whole, PlacedSpan(self.hot.buffer, tokens, self.hot.own_place(tokens.start), num_places))


def whole_of(layout: KvLayout) -> KvLayout:
    """Return the layout of the first two layers."""
    return replace(layout, num_layers=NUM_WHOLE_LAYERS)


def others_of(layout: KvLayout) -> KvLayout:
    """Return the layout of the layers after the first two."""
    return replace(layout, num_layers=layout.num_layers - NUM_WHOLE_LAYERS)


def bring_partial(partial: PartialPart, pieces: Pieces, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
    """Make the partial keys of tokens whose KV is in host memory, from keys that are fetched through `pieces`."""
    for part in tokens.split(PIECE_TOKENS) if layer in partial.layers else []:
        home_T2GH = kv_T2GH[part.start - tokens.start : part.end - tokens.start]
        partial.add_keys(layer, part.start, pieces.bring_keys(home_T2GH))


@dataclass(frozen=True)
class PlacedSpan:
    """SequenceSpan of one new token over places on the device, in layers that select keys."""

    places: KvBuffer
    """Areas as layers, and places as tokens. Layer l uses area l modulo their number."""
    tokens: TokenRange
    own_place: int
    """Place of the new token in each area."""
    num_places: int
    """Number of places that picks may name."""

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
    """SequenceSpan of several new tokens. The first layers' KV is on the device; that of others is read in pieces."""

    whole: BufferSpan
    home: KvBuffer
    """KV of the other layers, in host memory."""
    new: KvBuffer
    """Device memory for the new tokens' KV of one layer."""
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
        """Return None: the KV is not contiguous."""
