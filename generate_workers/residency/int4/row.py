"""Memory of slots whose KV is stored in 4 bits (`format`). Layers 0 and 1 are not packed. Each slot has an area: device
memory that holds the unpacked KV of one layer, for attention.

The residencies `int4` (module `whole`) and `infinigen_int4` (module `int4_infinigen`) use this module. An area has one
entry per token of its sequence, so that a token has the same index in the area as in the sequence. The area holds the
KV of a step's new tokens as it was computed, before packing.

Shape suffixes: B sequences, T tokens, G kv heads, H head dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.transfers import Transfer
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.types import TokenRange
from generate_workers.residency.int4.format import Int4Format
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import Area, AreaRow, MakeMemory, PagedKv, RowPart


class Int4Row(AreaRow):
    """Memory of one slot (a StoredRow) with three parts. The first two layers are not packed. The other layers are
    packed in 4 bits. An area, which is device memory, holds the unpacked KV of one layer."""

    def __init__(
        self,
        shape: KvShape,
        make_memory: MakeMemory,
        index: Sequence[RowPart] = (),
        *,
        is_apart: bool = False,
        make_home: MakeMemory | None = None,
    ) -> None:
        """Make the memory of a slot. `index`: parts of the memory with the data by which a policy selects keys; empty:
        the policy selects no keys. `is_apart`: True if `make_memory` makes memory of a device that has its own memory.
        `make_home` may be set only if `is_apart` is true. It is a function that makes host memory for the packed
        layers; None: the packed layers are stored on the device. In KvBytes, the first two layers count as `home`, the
        memory that stores KV between steps. They count as device memory, too, if `index` is not empty or `is_apart` is
        true.

        Raises ConfigError for KV that cannot be packed, and an error of OUT_OF_MEMORY when the slot's address space
        cannot be reserved.
        """
        layout, max_tokens, form = shape.layout, shape.max_slot_tokens, Int4Format(shape.layout)
        num_whole = min(layout.num_layers, NUM_WHOLE_LAYERS)
        self.whole = PagedKv(replace(layout, num_layers=num_whole), make_memory, max_tokens)
        self.packed = PagedKv(form.packed(layout.num_layers - num_whole), make_home or make_memory, max_tokens)
        self.area = Area(replace(layout, num_layers=1), make_memory, max_tokens)
        device: list[RowPart] = [self.area, *index]
        if index or is_apart:
            device.append(self.whole)
        if is_apart and make_home is None:
            device.append(self.packed)
        self.reads_home = not is_apart
        super().__init__([self.whole, self.packed], device)
        self._form = form

    @property
    def codes(self) -> PagedKv:
        """Return the memory of packed KV: steps unpack a layer from this memory, and pack the KV of new tokens into
        it."""
        return self.packed

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV into the slot. The KV of packed layers is packed first."""
        if layer < NUM_WHOLE_LAYERS:
            return super().write(layer, tokens, data)
        plain = KvBuffer(self.area.layout, tokens)
        plain.write(0, tokens, data)
        self.take_in(layer, tokens, plain.span(0, tokens))
        packed = KvBuffer(self._form.packed(1), tokens)
        self._form.pack(plain.span(0, tokens), packed.span(0, tokens))
        return self.packed.write(layer - NUM_WHOLE_LAYERS, tokens, packed.export(0, tokens))

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens` in a layer as bytes. The KV of a packed layer is returned as an unpacked copy."""
        if layer < NUM_WHOLE_LAYERS:
            return super().export(layer, tokens)
        return self.unpacked(layer, tokens).export(0, tokens)

    def unpacked(self, layer: int, tokens: TokenRange) -> KvBuffer:
        """Return an unpacked copy of the KV of `tokens` in a packed layer. The copy is a buffer of one layer in host
        memory."""
        packed = super().export(layer, tokens)
        plain = KvBuffer(self.area.layout, tokens)
        self._form.unpack(KvBuffer.over(self._form.packed(1), tokens, packed).span(0, tokens), plain.span(0, tokens))
        return plain


class PackedRows:
    """Packed layers of a step's sequences, as the memory addresses of their cached KV and of their new KV. This memory
    must exist as long as the object is used."""

    def __init__(self, form: Int4Format, rows: Sequence[tuple[Int4Row, TokenRange]]) -> None:
        """Collect the addresses. `rows`: sequences of the step, each with its new tokens. Memory for the new tokens
        must be committed. `rows` may be empty."""
        self._form = form
        self._row_bytes = form.packed(1).row_bytes
        self._num_old_B = _numbers(new.start for _, new in rows)
        self._num_new_B = _numbers(len(new) for _, new in rows)
        self._areas_B = _numbers(row.area.buffer.data.data_ptr() for row, _ in rows)
        packed = [row.codes.buffer.data for row, _ in rows]
        self._num_layers = len(packed[0]) if packed else 1
        """Number of packed layers that have memory at the same time. Packed layer l, counted from 0, uses the memory
        with index l modulo this number."""
        self._packed_B = _numbers(data.data_ptr() for data in packed)
        self._layer_bytes_B = _numbers(data.stride(0) * data.element_size() for data in packed)

    def unpack(self, layer: int) -> int:
        """Unpack the KV of all cached tokens of `layer` into the sequences' areas, the memory from which attention
        reads. Return the number of packed bytes that were read."""
        self._form.unpack_rows(self._layer(layer), self._areas_B, self._num_old_B)
        return int(self._num_old_B.sum()) * self._row_bytes

    def unpack_picked(self, layer: int, picks: Picks) -> int:
        """Unpack the keys and values in `picks`, which the kv heads have selected in `layer`, into the sequences'
        areas, the memory from which attention reads. Other bytes of the areas do not change. New tokens in `picks` are
        skipped, because their KV is in the areas already. Return the number of packed bytes that were read."""
        num_picks = self._form.unpack_picked(self._layer(layer), self._areas_B, self._num_old_B, picks)
        return num_picks * 2 * self._form.head_bytes

    def pack(self, layer: int) -> int:
        """Pack the new tokens' KV of `layer`. It is read from the sequences' areas (memory for one unpacked layer) and
        written to their packed memory. Return the number of packed bytes."""
        new_areas_B = self._areas_B + self._num_old_B * self._form.plain.row_bytes
        new_packed_B = self._layer(layer) + self._num_old_B * self._row_bytes
        self._form.pack_rows(new_areas_B, new_packed_B, self._num_new_B)
        return int(self._num_new_B.sum()) * self._row_bytes

    def _layer(self, layer: int) -> Tensor:
        """Return the addresses of the sequences' packed KV in a layer."""
        return self._packed_B + (layer - NUM_WHOLE_LAYERS) % self._num_layers * self._layer_bytes_B


def _numbers(of_rows: Iterable[int]) -> Tensor:
    return torch.tensor(list(of_rows), dtype=torch.int64)
