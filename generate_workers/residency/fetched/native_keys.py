"""Finds places on the device for selected keys (picks) with C++ kernels. Used on CPUs, and on the device that a CPU
emulates. A place is an index in an area, the device memory that holds selected keys of one layer at a time
(`hot_keys`).

Each slot has its own memory, which is committed as the slot's sequence grows. A record lists the keys that are cached
in one area for one kv head. The records are in host memory. The C++ code in baton/modeling/kernels/sparse/hot_keys.cpp
reads and writes them.

Shape suffixes: A areas, B sequences of one new token, G kv heads, H head dim, K maximum number of picks, C cache slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import PartialKeys, PartialRows, Picks
from baton.modeling.kernels import native
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import KvLayout
from generate_workers.residency.fetched.hot_keys import HotKeys, HotSize
from generate_workers.residency.fetched.mechanism import Choosing
from generate_workers.residency.fetched.rows import FetchedRow, PassingPieces, others_of
from generate_workers.residency.fetched.storing import LayerAddresses
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import PartialIndex

_RECORD_HEAD = 3
"""Number of int32 values at the start of a record, before its list of keys. The C++ kernel uses the same number."""


class RecordedKeys(HotKeys):
    """HotKeys whose records (lists of the keys on the device) are in host memory. The C++ kernel accesses the records
    by address."""

    records = torch.empty(0, dtype=torch.int32)
    """Records (lists of the keys on the device). The first dimension is the area, which is the device memory of one
    layer. Empty if no sequence uses the slot."""

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence, and make empty records for its hot keys. `num_tokens`: number of
        tokens that are certain to be written, such as the prompt. `capacity_tokens` is not used."""
        super().open(num_tokens, capacity_tokens)
        numbers = self.size.layout.num_kv_heads * (_RECORD_HEAD + 2 * self.most_slots)
        self.records = torch.zeros(self.size.num_areas, numbers, dtype=torch.int32)

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        self.records = torch.empty(0, dtype=torch.int32)
        super().release()


class NativeStepKeys:
    """Sequences that select keys in one step, with the memory addresses of their KV and records. Implements
    StepKeys."""

    def __init__(self, choosing: Choosing, layout: KvLayout) -> None:
        self._hot = hot = [_recorded(row) for row, _ in choosing]
        self._records = LayerAddresses([each.records for each in hot])
        self._places = LayerAddresses([each.buffer.data for each in hot])
        self._homes = LayerAddresses([row.others.buffer.data for row, _ in choosing])
        own = [each.buffer.data[:, tokens.start - each.start] for each, (_, tokens) in zip(hot, choosing, strict=True)]
        self._own_k = [data_A2GH[:, 0] for data_A2GH in own]
        self._own_places = LayerAddresses(own)
        self._own_homes = LayerAddresses([row.others.buffer.data[:, tokens.start] for row, tokens in choosing])
        self._row_bytes = layout.row_bytes
        self._starts_B = torch.tensor([row.hot.start for row, _ in choosing])
        self._lengths_B = torch.tensor([tokens.end for _, tokens in choosing])
        self._slots_B = torch.tensor([row.hot.size.num_slots(tokens.end) for row, tokens in choosing])
        self._head_bytes = layout.row_bytes // (2 * layout.num_kv_heads)

    def admit(self, layer: int, picks: Picks) -> tuple[Picks, PickedHeads]:
        """Assign a place (index in device memory) to each key in `picks`, the keys that `layer` selects. Return `picks`
        with places instead of token indices, and the keys and values that must be fetched to their places."""
        area = self._area(layer)
        is_fresh_B = torch.tensor([each.takes_over(layer) for each in self._hot])
        places_BGK, pairs_BGK2, num_BG = native.operators().admit_picks(
            picks.keys_BGK,
            picks.num_BG,
            self._records.of(area),
            (self._slots_B, self._starts_B, self._lengths_B, is_fresh_B),
            (self._hot[0].size.num_latest, self._hot[0].most_slots),
        )
        homes_B, there_B = self._homes.of(layer), self._places.of(area)
        heads = PickedHeads(homes_B, there_B, pairs_BGK2, num_BG, self._head_bytes)
        return Picks(places_BGK, picks.num_BG), heads

    def own_keys(self, layer: int) -> Tensor:
        """Return the keys of the new tokens in `layer`, `[B, G, H]`, from the device memory that the layer uses."""
        area = self._area(layer)
        return torch.stack([k_AGH[area] for k_AGH in self._own_k])

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies that write the KV of the new tokens in `layer` from the device to host memory."""
        return RowCopies(self._own_places.of(self._area(layer)), self._own_homes.of(layer), self._row_bytes)

    def _area(self, layer: int) -> int:
        """Return the number of the area (device memory that several layers may share) that a layer uses, the same in
        all slots."""
        return self._hot[0].area(layer)


class NativeMechanism:
    """FetchMechanism for CPUs: memory of all slots, and C++ kernels that decide where selected keys are stored in
    it."""

    scratch_bytes = 0

    def __init__(self, shape: KvShape, decoder: Decoder, prepared: PreparedSelection, pieces: PassingPieces) -> None:
        """Make the mechanism. `pieces`: two buffers on the device, which all FetchedRows share. Each holds one piece (a
        range of tokens) of one layer's KV at a time. The first is for keys that were computed elsewhere and written to
        a slot: their partial keys (projections to fewer columns) are computed from it. The second is for the earlier KV
        of a sequence that has several new tokens in a step: attention reads it there. Raises an error of OUT_OF_MEMORY,
        or OSError."""
        assert native.load()
        self.basis, self._selection = prepared.basis, prepared.selection
        self._shape, self._device, self._pieces = shape, decoder.device, pieces

    def row_bytes(self, num_areas: int) -> int:
        """Return the number of bytes of device memory that a sequence of the maximum length needs with `num_areas`
        areas, each of which holds selected keys and values of one layer at a time."""
        return self._make(num_areas).bytes_for(self._shape.max_slot_tokens).device

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Make a FetchedRow, the memory of one slot, for every slot. `num_rows` is not used, because memory is
        committed as sequences grow."""
        return [self._make(num_areas) for _ in range(self._shape.num_slots)]

    def scored(self, keys: Sequence[PartialKeys], lengths: Sequence[int], num_tokens: Sequence[int]) -> PartialRows:
        """Return an object that scores the partial keys (keys projected to fewer columns) of several sequences.
        `lengths`: number of keys of each sequence, including the new token's key. `num_tokens`: number of tokens of
        each sequence; it is larger than the number of keys if keys were evicted."""
        return PartialRows(keys, lengths, num_tokens)

    def begin(self, choosing: Choosing) -> NativeStepKeys:
        """Begin a step of the sequences in `choosing`, and return the StepKeys of this step."""
        return NativeStepKeys(choosing, self._shape.layout)

    def _make(self, num_areas: int) -> FetchedRow:
        shape, make_memory, most = self._shape, self._device.row_memory, self._shape.max_slot_tokens
        partial = PartialIndex(shape.layout, self.basis, most, make_memory)
        hot = RecordedKeys(HotSize(others_of(shape.layout), num_areas, self._selection), make_memory, most)
        return FetchedRow(shape, self._device, (partial, hot), self._pieces)


def _recorded(row: FetchedRow) -> RecordedKeys:
    assert isinstance(row.hot, RecordedKeys)
    return row.hot
