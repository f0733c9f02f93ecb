"""Rows whose KV lives in 4 bits (`format`): layers 0 and 1 whole, the others packed, and an area for one layer.

Shared by residencies `int4` (`whole`) and `infinigen_int4` (`infinigen`). Attention reads areas. Each row's area is as
long as the row, so that unpacked KV lies where it would in a plain row, and a new token has the values that it had
before it was packed.

B rows, T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.int4.format import Int4Format
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes
from modeling.forward.selection import Picks
from modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS


@dataclass(frozen=True)
class LayerSpan:
    """A SequenceSpan whose KV is present for one layer at a time."""

    inner: BufferSpan

    @property
    def tokens(self) -> TokenRange:
        return self.inner.tokens

    def own(self, layer: int) -> Tensor:
        return self.inner.own(0)

    def segments(self, layer: int) -> Iterator[KvRows]:
        return self.inner.segments(0)

    def place(self) -> KvPlace:
        return self.inner.place()


class Int4Row:
    """A RowKv with whole layers and packed ones at home, and on the device an area for one layer."""

    def __init__(self, form: Int4Format, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raise what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
        layout = form.plain
        num_whole = min(layout.num_layers, NUM_WHOLE_LAYERS)
        self.whole = _row(replace(layout, num_layers=num_whole), make_memory, max_tokens)
        self.packed = _row(form.packed(layout.num_layers - num_whole), make_memory, max_tokens)
        self.area = _row(replace(layout, num_layers=1), make_memory, max_tokens)
        self._form = form
        self._layer_layout = replace(layout, num_layers=1)
        self._parts = (self.whole, self.packed, self.area)

    @property
    def tokens(self) -> TokenRange:
        """Return the tokens that the present claim may hold."""
        return self.whole.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the committed bytes: at home whole layers and packed ones, on the device the area."""
        return KvBytes(self.whole.memory.num_bytes + self.packed.memory.num_bytes, self.area.memory.num_bytes)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of a row of that many tokens: at home all layers, on the device the area."""
        whole, packed, area = (part.memory.bytes_for(num_tokens) for part in self._parts)
        return KvBytes(whole + packed, area)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; when it fails, nothing is held."""
        try:
            for part in self._parts:
                part.open(num_tokens, capacity_tokens)
        except BaseException:
            self.release()
            raise

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy pushed KV of a whole layer into place, or pack that of another layer."""
        if layer < NUM_WHOLE_LAYERS:
            self.whole.write(layer, tokens, data)
            return
        plain = KvBuffer(self._layer_layout, tokens)
        plain.write(0, tokens, data)
        self.packed.memory.commit(tokens, layer - NUM_WHOLE_LAYERS)
        self.take_pushed(layer, tokens, plain.span(0, tokens))

    def take_pushed(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Pack pushed KV of a layer that is not whole into place. Its memory is committed."""
        self._form.pack(kv_T2GH, self._packed_span(layer, tokens))

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`: the memory itself of a whole layer, an unpacked copy of a packed one."""
        if layer < NUM_WHOLE_LAYERS:
            return self.whole.export(layer, tokens)
        return self.unpacked(layer, tokens).export(0, tokens)

    def unpacked(self, layer: int, tokens: TokenRange) -> KvBuffer:
        """Return an unpacked copy of `tokens` of a layer that is not whole, in a buffer of one layer."""
        plain = KvBuffer(self._layer_layout, tokens)
        self._form.unpack(self._packed_span(layer, tokens), plain.span(0, tokens))
        return plain

    def copy_from(self, other: "Int4Row", num_tokens: int) -> None:
        """Copy another row's first tokens, as they are packed."""
        self.whole.copy_from(other.whole, num_tokens)
        self.packed.copy_from(other.packed, num_tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        for part in self._parts:
            part.release()

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to add."""
        self.whole.memory.commit(tokens)
        self.packed.memory.commit(tokens)
        self.area.memory.commit(TokenRange(0, tokens.end))

    def area_span(self, tokens: TokenRange) -> LayerSpan:
        """Return the span of a step over the area; `tokens` are its new ones."""
        return LayerSpan(BufferSpan(self.area.buffer, tokens))

    def _packed_span(self, layer: int, tokens: TokenRange) -> Tensor:
        return self.packed.buffer.span(layer - NUM_WHOLE_LAYERS, tokens)


class PackedRows:
    """The packed layers of a step's rows: cached KV is unpacked into the areas, new KV is packed home. Holds addresses:
    the rows must outlive it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]]) -> None:
        """`rows`: each with its new tokens, whose memory is committed. May be empty."""
        self.num_link_bytes = 0
        """Bytes of packed layers copied so far, in both directions."""
        self._form = form
        self._row_bytes = form.packed(1).row_bytes
        self._num_old_B = _numbers(new.start for _, new in rows)
        self._num_new_B = _numbers(len(new) for _, new in rows)
        self._areas_B = _numbers(row.area.buffer.data.data_ptr() for row, _ in rows)
        packed = [row.packed.buffer.data for row, _ in rows]
        self._packed_B = _numbers(data.data_ptr() for data in packed)
        self._layer_bytes_B = _numbers(data.stride(0) * data.element_size() for data in packed)

    def unpack(self, layer: int) -> None:
        """Unpack all cached tokens of a layer into the areas."""
        self._form.unpack_rows(self._layer(layer), self._areas_B, self._num_old_B)
        self._count(self._num_old_B)

    def unpack_picked(self, layer: int, picks: Picks) -> None:
        """Unpack the keys and values of a layer that each kv head picks into the areas; other bytes there stay. Picks
        may name new tokens, which are in the areas already."""
        num_picks = self._form.unpack_picked(self._layer(layer), self._areas_B, self._num_old_B, picks)
        self.num_link_bytes += num_picks * 2 * self._form.head_bytes

    def pack(self, layer: int) -> None:
        """Pack the new tokens' KV from the areas into home memory."""
        new_areas_B = self._areas_B + self._num_old_B * self._form.plain.row_bytes
        new_packed_B = self._layer(layer) + self._num_old_B * self._row_bytes
        self._form.pack_rows(new_areas_B, new_packed_B, self._num_new_B)
        self._count(self._num_new_B)

    def _layer(self, layer: int) -> Tensor:
        """Return the addresses of the rows' packed KV in a layer."""
        return self._packed_B + (layer - NUM_WHOLE_LAYERS) * self._layer_bytes_B

    def _count(self, num_tokens_B: Tensor) -> None:
        self.num_link_bytes += int(num_tokens_B.sum()) * self._row_bytes


def _row(layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> PagedRow:
    return PagedRow(layout, make_memory(layout, max_tokens))


def _numbers(of_rows: Iterable[int]) -> Tensor:
    return torch.tensor(list(of_rows), dtype=torch.int64)
