"""Rows whose KV lives in 4 bits (`format`): layers 0 and 1 whole, the others packed, and an area for one layer.

Shared by residencies `int4` (`whole`) and `infinigen_int4` (`infinigen`). Attention reads areas. Each row's area is as
long as the row, so that unpacked KV lies where it would in a plain row, and a new token has the values that it had
before it was packed.

B rows, T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format
from generate_workers.residency.rows import Area, AreaRow, MakeMemory, PagedKv, Part
from modeling.forward.selection import Picks
from modeling.kv.buffers import KvBuffer
from modeling.kv.transfers import Transfer
from modeling.sparse.bases import NUM_WHOLE_LAYERS


class Int4Row(AreaRow):
    """A StoredRow with whole layers and packed ones at home, and on the device an area for one layer."""

    def __init__(
        self,
        form: Int4Format,
        make_memory: MakeMemory,
        max_tokens: int,
        index: Sequence[Part] = (),
        *,
        is_apart: bool = False,
        make_home: MakeMemory | None = None,
    ) -> None:
        """`index`: what the policy keeps to choose keys by; with one, the device has the whole layers as well.
        `is_apart`: whether `make_memory` makes the memory of a device that is not home. `make_home`: makes memory for
        the packed layers then; None: they are the device's, too. Raises what is in OUT_OF_MEMORY when the slot's
        address space cannot be had."""
        layout = form.plain
        num_whole = min(layout.num_layers, NUM_WHOLE_LAYERS)
        self.whole = PagedKv(replace(layout, num_layers=num_whole), make_memory, max_tokens)
        self.packed = PagedKv(form.packed(layout.num_layers - num_whole), make_home or make_memory, max_tokens)
        self.area = Area(replace(layout, num_layers=1), make_memory, max_tokens)
        device: list[Part] = [self.area, *index]
        if index or is_apart:
            device.append(self.whole)
        if is_apart and make_home is None:
            device.append(self.packed)
        self.reads_home = not is_apart
        super().__init__([self.whole, self.packed], device)
        self._form = form

    @property
    def codes(self) -> PagedKv:
        """Return the memory in which steps find a packed layer, and leave their new tokens packed."""
        return self.packed

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV of a whole layer into place, or that of another layer, packed."""
        if layer < NUM_WHOLE_LAYERS:
            return super().write(layer, tokens, data)
        plain = KvBuffer(self.area.layout, tokens)
        plain.write(0, tokens, data)
        self.take_in(layer, tokens, plain.span(0, tokens))
        packed = KvBuffer(self._form.packed(1), tokens)
        self._form.pack(plain.span(0, tokens), packed.span(0, tokens))
        return self.packed.write(layer - NUM_WHOLE_LAYERS, tokens, packed.export(0, tokens))

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`: the memory itself of a whole layer, an unpacked copy of a packed one."""
        if layer < NUM_WHOLE_LAYERS:
            return super().export(layer, tokens)
        return self.unpacked(layer, tokens).export(0, tokens)

    def unpacked(self, layer: int, tokens: TokenRange) -> KvBuffer:
        """Return an unpacked copy of `tokens` of a layer that is not whole, in a buffer of one layer at home."""
        packed = super().export(layer, tokens)
        plain = KvBuffer(self.area.layout, tokens)
        self._form.unpack(KvBuffer.over(self._form.packed(1), tokens, packed).span(0, tokens), plain.span(0, tokens))
        return plain


class PackedRows:
    """The packed layers of a step's rows. Holds addresses of cached and new KV: the rows must outlive it."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]]) -> None:
        """`rows`: each with its new tokens, whose memory is committed. May be empty."""
        self._form = form
        self._row_bytes = form.packed(1).row_bytes
        self._num_old_B = _numbers(new.start for _, new in rows)
        self._num_new_B = _numbers(len(new) for _, new in rows)
        self._areas_B = _numbers(row.area.buffer.data.data_ptr() for row, _ in rows)
        packed = [row.codes.buffer.data for row, _ in rows]
        self._num_layers = len(packed[0]) if packed else 1
        """Layers that have memory for codes; the packed ones take turns in it."""
        self._packed_B = _numbers(data.data_ptr() for data in packed)
        self._layer_bytes_B = _numbers(data.stride(0) * data.element_size() for data in packed)

    def unpack(self, layer: int) -> int:
        """Unpack all cached tokens of a layer into the areas. Return the packed bytes."""
        self._form.unpack_rows(self._layer(layer), self._areas_B, self._num_old_B)
        return int(self._num_old_B.sum()) * self._row_bytes

    def unpack_picked(self, layer: int, picks: Picks) -> int:
        """Unpack the keys and values of a layer that each kv head picks into the areas; other bytes there stay. Picks
        may name new tokens, which are in the areas already. Return the packed bytes."""
        num_picks = self._form.unpack_picked(self._layer(layer), self._areas_B, self._num_old_B, picks)
        return num_picks * 2 * self._form.head_bytes

    def pack(self, layer: int) -> int:
        """Pack the new tokens' KV from the areas into the rows' codes. Return the packed bytes."""
        new_areas_B = self._areas_B + self._num_old_B * self._form.plain.row_bytes
        new_packed_B = self._layer(layer) + self._num_old_B * self._row_bytes
        self._form.pack_rows(new_areas_B, new_packed_B, self._num_new_B)
        return int(self._num_new_B.sum()) * self._row_bytes

    def _layer(self, layer: int) -> Tensor:
        """Return the addresses of the rows' packed KV in a layer."""
        return self._packed_B + (layer - NUM_WHOLE_LAYERS) % self._num_layers * self._layer_bytes_B


def _numbers(of_rows: Iterable[int]) -> Tensor:
    return torch.tensor(list(of_rows), dtype=torch.int64)
