"""Memory of slots whose KV is stored in host memory, and the spans through which a step's attention reads this KV on
the device.

    host    KV of all layers except the first two
    device  the first two layers' KV, and the policy's own data. InfiniGen has partial keys (keys projected to fewer
            columns) and hot keys (recently selected keys, see `hot_keys`)

A sequence with one new token attends only to selected keys. They are on the device when the layer runs. A sequence with
several new tokens attends to all keys. Their KV is fetched in pieces (ranges of tokens), one piece at a time, and the
partial results of the pieces are merged by log-sum-exp.

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
"""Maximum number of tokens in a piece of KV. A piece is fetched to a buffer on the device and read once. The next piece
overwrites it."""


class Pieces:
    """Buffer on the device for one piece of KV of one layer. Long KV is fetched through it, in pieces of at most
    `PIECE_TOKENS` tokens, one after another. Used by one thread at a time."""

    def __init__(self, layout: KvLayout, device: Device) -> None:
        """Allocate the buffer. Raises an error of OUT_OF_MEMORY if memory is short."""
        self.num_bytes = 0
        """Number of bytes fetched so far."""
        self._buffer = device.buffer(replace(layout, num_layers=1), TokenRange(0, PIECE_TOKENS))
        self._link = device.link

    def bring(self, source_T2GH: Tensor) -> Tensor:
        """Fetch a piece of KV from host memory, and return its copy on the device. The next fetch overwrites the
        copy."""
        return self._fetch(self._buffer.span(0, TokenRange(0, len(source_T2GH))), source_T2GH)

    def bring_keys(self, source_T2GH: Tensor) -> Tensor:
        """Fetch the keys of a piece of KV from host memory, and return the keys on the device, `[T, G, H]`. The next
        fetch overwrites them."""
        k_TGH = source_T2GH[:, 0].contiguous()
        return self._fetch(self._buffer.data.view(-1)[: k_TGH.numel()].view(k_TGH.shape), k_TGH)

    def _fetch(self, to: Tensor, source: Tensor) -> Tensor:
        # Queued kernels may still read the last piece.
        self._link.fetch([(to, source)], after=self._link.queued()).join()
        self.num_bytes += source.nbytes
        return to


PassingPieces = tuple[Pieces, Pieces]
"""Two buffers on the device. Each holds one piece (a range of tokens) of one layer's KV at a time. The first is for
keys that were computed elsewhere and written to a slot: their partial keys (projections to fewer columns) are computed
from it. The second is for the earlier KV of a sequence that has several new tokens in a step: attention reads it
there."""


class AwayRow(StoredRow):
    """Memory of one slot (a StoredRow) with the first two layers on the device and all other layers in host memory.
    If a step has several new tokens of the sequence, the KV in host memory is copied to the device and attended to in
    pieces, one range of tokens at a time."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        parts: Sequence[RowPart],
        pieces: Pieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """Make the memory of a slot. `parts`: the policy's own data on the device, in addition to the KV of the first
        two layers. `pieces`: buffer on the device through which a step with several new tokens reads the sequence's
        earlier KV. `make_whole`: function that makes memory for the first two layers; None: `device.row_memory`. Raises
        an error of OUT_OF_MEMORY when the slot's address space cannot be reserved."""
        layout, most = shape.layout, shape.max_slot_tokens
        self.whole = PagedKv(whole_of(layout), make_whole or device.row_memory, most)
        self.others = PagedKv(others_of(layout), device.home_memory, most)
        super().__init__([self.whole, self.others], [self.whole, *parts])
        self._read = pieces
        self._make_buffer, self._new = device.buffer, replace(layout, num_layers=1)

    def long_span(self, tokens: TokenRange) -> "LongSpan":
        """Return the SequenceSpan of a step that runs several new `tokens`. The span has device memory for the new
        tokens' KV of one layer. The layers after the first two use this memory one after another."""
        whole = BufferSpan(self.whole.buffer, tokens)
        return LongSpan(whole, self.others.buffer, self._make_buffer(self._new, tokens), self._read)


class FetchedRow(AwayRow, ScoredRow):
    """Memory of one slot whose selected keys and values are fetched to the device. Extends ScoredRow, which stores
    partial keys (keys projected to fewer columns, from which the scores of keys are estimated)."""

    def __init__(
        self,
        shape: KvShape,
        device: Device,
        keys: tuple[PartialPart, HotKeys],
        pieces: PassingPieces,
        make_whole: MakeMemory | None = None,
    ) -> None:
        """Make the memory of a slot. `keys`: the slot's partial keys (keys projected to fewer columns) and hot keys
        (recently selected keys). `pieces`: two buffers on the device. Keys that were computed elsewhere and written to
        the slot are read through the first buffer. A step with several new tokens reads the sequence's earlier KV
        through the second. `make_whole`: function that makes memory for the first two layers; None:
        `device.row_memory`. Raises an error of OUT_OF_MEMORY when the slot's address space cannot be reserved."""
        self.partial, self.hot = keys
        self._pushed, read = pieces
        super().__init__(shape, device, keys, read, make_whole)

    def commit(self, tokens: TokenRange) -> None:
        """Commit host memory for the new `tokens`, and device memory for the hot keys (recently selected keys) of a
        sequence that ends with `tokens`."""
        super().commit(tokens)
        self.hot.commit(tokens.end)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Compute the partial keys (projections of keys to fewer columns) of `tokens`, and store them on the device.
        `kv_T2GH` is the KV of `tokens` in host memory."""
        bring_partial(self.partial, self._pushed, layer, tokens, kv_T2GH)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`: the KV that they attend to, and device
        memory for their own KV. If there are several new tokens, all hot keys (recently selected keys) are dropped."""
        if len(tokens) != 1:
            self.hot.forget()
            return self.long_span(tokens)
        return self.placed_span(tokens)

    def placed_span(self, tokens: TokenRange) -> SplitSpan:
        """Assign a place (index in device memory) to the one new token in `tokens`. Return the SequenceSpan of a step
        that runs this token: the KV that it attends to, and memory for its own KV."""
        whole, num_places = BufferSpan(self.whole.buffer, tokens), self.hot.places_of(tokens.end)
        return SplitSpan(whole, PlacedSpan(self.hot.buffer, tokens, self.hot.own_place(tokens.start), num_places))


def whole_of(layout: KvLayout) -> KvLayout:
    """Return `layout` with only the first two layers, which attend to all keys."""
    return replace(layout, num_layers=NUM_WHOLE_LAYERS)


def others_of(layout: KvLayout) -> KvLayout:
    """Return `layout` with all layers except the first two, which attend to all keys."""
    return replace(layout, num_layers=layout.num_layers - NUM_WHOLE_LAYERS)


def bring_partial(partial: PartialPart, pieces: Pieces, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
    """Compute the partial keys (projections of keys to fewer columns) of `tokens` in `layer`. `kv_T2GH` is the tokens'
    KV in host memory. Its keys are fetched to the device through the buffer `pieces`. Does nothing if `layer` has no
    partial keys."""
    for part in tokens.split(PIECE_TOKENS) if layer in partial.layers else []:
        home_T2GH = kv_T2GH[part.start - tokens.start : part.end - tokens.start]
        partial.add_keys(layer, part.start, pieces.bring_keys(home_T2GH))


@dataclass(frozen=True)
class PlacedSpan:
    """SequenceSpan of one new token, in the layers that select keys. Attention reads the selected keys and values on
    the device. They are stored in areas: an area is device memory that holds keys and values of one layer at a time."""

    places: KvBuffer
    """Device memory for selected keys and values. Its layer index is the number of an area, the memory for one layer at
    a time. Model layer l uses area l modulo the number of areas. Its token index is the index of a key in the area."""
    tokens: TokenRange
    own_place: int
    """Index of the new token in each area (device memory for the selected keys of one layer)."""
    num_places: int
    """Number of keys that each area (device memory for the selected keys of one layer) can hold for each kv head. All
    selected keys have indices below this number."""

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
    """SequenceSpan of several new tokens. The KV of the first two layers is on the device. The earlier KV of the other
    layers is fetched from host memory in pieces."""

    whole: BufferSpan
    home: KvBuffer
    """KV of all layers except the first two, in host memory."""
    new: KvBuffer
    """Device memory for the new tokens' KV of one layer."""
    pieces: Pieces

    @property
    def tokens(self) -> TokenRange:
        return self.whole.tokens

    def own(self, layer: int) -> Tensor:
        return self.whole.own(layer) if layer < NUM_WHOLE_LAYERS else self.new.span(0, self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the KV of the earlier tokens, a piece at a time, then the KV of the new tokens."""
        if layer < NUM_WHOLE_LAYERS:
            yield from self.whole.segments(layer)
            return
        for part in TokenRange(0, self.tokens.start).split(PIECE_TOKENS) if self.tokens.start else []:
            piece = self.pieces.bring(self.home.span(layer - NUM_WHOLE_LAYERS, part))
            yield KvRows(piece[:, 0], piece[:, 1], part.start)
        yield self.new.rows(0, self.tokens)

    def place(self) -> None:
        """Return None. Kernels cannot address the span's KV, because most of it is in host memory and is fetched in
        pieces."""
