"""Rows whose KV lives in 4 bits (int4_format.py): layers 0 and 1 whole, the others packed, and an area for one layer.

What `int4` and `infinigen_int4` have in common. Step 8 of a request's way (DESIGN.md, section 4). Attention reads
areas: each row's is as long as the row, so that what is unpacked comes to lie where it would in a plain row, and a new
token is what it was before it was packed.

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
    """A SequenceSpan whose KV is at hand for one layer at a time."""

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
    """A RowKv: at home whole layers and packed ones, on the device an area for one layer."""

    def __init__(self, form: Int4Format, make_memory: MakeMemory, max_tokens: int) -> None:
        """Raises what is in OUT_OF_MEMORY when the slot's address space cannot be had."""
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
        """That the present claim may hold."""
        return self.whole.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Whole layers and packed ones, and the area."""
        return KvBytes(self.whole.memory.num_bytes + self.packed.memory.num_bytes, self.area.memory.num_bytes)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Likewise, of a row of that many tokens."""
        whole, packed, area = (part.memory.bytes_for(num_tokens) for part in self._parts)
        return KvBytes(whole + packed, area)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begins a claim; when it fails, nothing is held."""
        try:
            for part in self._parts:
                part.open(num_tokens, capacity_tokens)
        except BaseException:
            self.release()
            raise

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Packs pushed KV into place."""
        if layer < NUM_WHOLE_LAYERS:
            self.whole.write(layer, tokens, data)
            return
        plain = KvBuffer(self._layer_layout, tokens)
        plain.write(0, tokens, data)
        self.packed.memory.commit(tokens, layer - NUM_WHOLE_LAYERS)
        self.take_pushed(layer, tokens, plain.span(0, tokens))

    def take_pushed(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Packs KV that was pushed, of a layer that is not whole, into place, which is committed."""
        self._form.pack(kv_T2GH, self._packed_span(layer, tokens))

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """The bytes of `tokens`: the memory itself of a whole layer, a copy of a packed one, unpacked."""
        if layer < NUM_WHOLE_LAYERS:
            return self.whole.export(layer, tokens)
        return self.unpacked(layer, tokens).export(0, tokens)

    def unpacked(self, layer: int, tokens: TokenRange) -> KvBuffer:
        """A copy of `tokens` of a layer that is not whole; it is the buffer's only one."""
        plain = KvBuffer(self._layer_layout, tokens)
        self._form.unpack(self._packed_span(layer, tokens), plain.span(0, tokens))
        return plain

    def copy_from(self, other: "Int4Row", num_tokens: int) -> None:
        """Takes another row's first tokens, as they are packed."""
        self.whole.copy_from(other.whole, num_tokens)
        self.packed.copy_from(other.packed, num_tokens)

    def release(self) -> None:
        """Ends the claim, if there is one."""
        for part in self._parts:
            part.release()

    def commit(self, tokens: TokenRange) -> None:
        """A step is about to add `tokens`."""
        self.whole.memory.commit(tokens)
        self.packed.memory.commit(tokens)
        self.area.memory.commit(TokenRange(0, tokens.end))

    def area_span(self, tokens: TokenRange) -> LayerSpan:
        """For a step, whose new tokens these are."""
        return LayerSpan(BufferSpan(self.area.buffer, tokens))

    def _packed_span(self, layer: int, tokens: TokenRange) -> Tensor:
        return self.packed.buffer.span(layer - NUM_WHOLE_LAYERS, tokens)


class PackedRows:
    """The packed layers of a step's rows: what was cached comes into the areas, what is new goes home. Holds addresses:
    the rows must outlive it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]]) -> None:
        """`rows`: each with its new tokens, whose memory is committed; there may be none."""
        self.num_link_bytes = 0
        """Of these layers, that came and went so far."""
        self._form = form
        self._row_bytes = form.packed(1).row_bytes
        self._num_old_B = _numbers(new.start for _, new in rows)
        self._num_new_B = _numbers(len(new) for _, new in rows)
        self._areas_B = _numbers(row.area.buffer.data.data_ptr() for row, _ in rows)
        packed = [row.packed.buffer.data for row, _ in rows]
        self._packed_B = _numbers(data.data_ptr() for data in packed)
        self._layer_bytes_B = _numbers(data.stride(0) * data.element_size() for data in packed)

    def unpack(self, layer: int) -> None:
        """All that was cached is in the areas on return."""
        self._form.unpack_rows(self._layer(layer), self._areas_B, self._num_old_B)
        self._count(self._num_old_B)

    def unpack_picked(self, layer: int, picks: Picks) -> None:
        """Likewise those heads' keys and values that are picked; what else lies in the areas stays. New tokens may be
        among the picks, for they are there."""
        num_picks = self._form.unpack_picked(self._layer(layer), self._areas_B, self._num_old_B, picks)
        self.num_link_bytes += num_picks * 2 * self._form.head_bytes

    def pack(self, layer: int) -> None:
        """Stores the new tokens' KV, which is in the areas."""
        new_areas_B = self._areas_B + self._num_old_B * self._form.plain.row_bytes
        new_packed_B = self._layer(layer) + self._num_old_B * self._row_bytes
        self._form.pack_rows(new_areas_B, new_packed_B, self._num_new_B)
        self._count(self._num_new_B)

    def _layer(self, layer: int) -> Tensor:
        """Addresses of the rows' packed KV."""
        return self._packed_B + (layer - NUM_WHOLE_LAYERS) * self._layer_bytes_B

    def _count(self, num_tokens_B: Tensor) -> None:
        self.num_link_bytes += int(num_tokens_B.sum()) * self._row_bytes


def _row(layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> PagedRow:
    return PagedRow(layout, make_memory(layout, max_tokens))


def _numbers(of_rows: Iterable[int]) -> Tensor:
    return torch.tensor(list(of_rows), dtype=torch.int64)
