"""Fetching of selected keys and values (picks) with tensor operations, for GPUs: the host reads no result until a step
ends.

The memory of all sequences is in pools, one page per sequence, so that kernels access them by number: the first two
layers, partial keys, areas of hot keys, and records of the keys in slots. Pools are allocated once, for as many
sequences as the device has room for. The numbers that a step needs are copied to the device when it begins. After that
all shapes follow from lengths, and the data on picked, hot and missing keys stays on the device. A kernel that reads
pinned host memory fetches missing keys (`baton.modeling.kernels.triton.copies`).

A pick that is not in a slot gets the next slot, in cyclic order, whose key is not picked now.

Shape suffixes: B sequences of one new token, G kv heads, H head dim, K picks at most, W latest, C slots, A areas, L
layers, P pages of pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Picks
from baton.modeling.forward.tensor_selection import (
    TensorPartialKeys,
    TensorPartialRows,
    packed,
    partial_blocks,
    partial_layout,
    selecting_bytes,
)
from baton.modeling.kv.buffers import BlockTable, KvPlace
from baton.modeling.kv.pages import PagePool
from baton.modeling.kv.pool_rows import PoolRow
from baton.modeling.kv.row_memory import RowMemory
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import KvLayout, TokenRange
from generate_workers.residency.fetched.hot_keys import HotKeys, HotSize
from generate_workers.residency.fetched.mechanism import Choosing
from generate_workers.residency.fetched.rows import FetchedRow, PassingPieces, others_of, whole_of
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import PartialPart
from generate_workers.residency.sparse.selective import SplitSpan

_NUMBER_BYTES = 4
"""Bytes of a number in a record."""


class TensorPartialIndex(TensorPartialKeys, PartialPart):
    """PartialPart in a pool of the device."""

    def __init__(self, layout: KvLayout, basis: Basis, pool: PagePool) -> None:
        """`pool`: see TensorPartialKeys. One page per sequence."""
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        super().__init__(layers, layout.num_kv_heads, basis.num_columns, pool)
        self._basis = basis


class TensorHotKeys(HotKeys):
    """HotKeys in a pool, with records on the device."""

    def places_of(self, num_tokens: int) -> int:
        """Return the number of places of the longest sequence, because any sequence may use all slots."""
        return self.size.num_latest + self.most_slots

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the sequence uses now, including its records."""
        return super().num_bytes + (self._record_bytes if super().num_bytes else 0)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes of the longest sequence, including its records; 0 for no tokens."""
        return super().bytes_for(num_tokens) + (self._record_bytes if num_tokens else 0)

    @property
    def memory(self) -> PoolRow:
        """Return the sequence's memory in the pool."""
        assert isinstance(self._kv.memory, PoolRow)
        return self._kv.memory

    @property
    def _record_bytes(self) -> int:
        return _record_bytes(self.size, self.most_slots)


class Records:
    """Records, on the device, of the keys in the slots of all sequences' areas."""

    def __init__(self, size: HotSize, num_rows: int, most_slots: int, device: torch.device) -> None:
        """`num_rows`: number of pages in the pool of areas. Raises an error of OUT_OF_MEMORY."""
        shape = (size.num_areas, num_rows, size.layout.num_kv_heads, most_slots)
        self.keys_APGC = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Key in each slot; -1: none."""
        self.turn_APG1 = torch.zeros((*shape[:3], 1), dtype=torch.int32, device=device)
        """Slot that the next key gets, unless the key in this slot is picked."""


@dataclass(frozen=True)
class PooledSpan(SplitSpan):
    """SplitSpan whose memories are pages of pools."""

    tables: tuple[BlockTable, BlockTable]
    """Block tables with the sequence's page in the pool of the whole layers, and in the pool of areas."""

    def place(self) -> KvPlace:
        place, (whole, areas) = super().place(), self.tables
        assert place.others is not None
        return replace(place, address=0, table=whole, others=replace(place.others, address=0, table=areas))


class PooledRow(FetchedRow):
    """FetchedRow whose device memory is in pools."""

    def placed_span(self, tokens: TokenRange) -> PooledSpan:
        """Make room for one new token, and return its span."""
        span = super().placed_span(tokens)
        return PooledSpan(span.whole, span.others, (_table(self.whole.memory), _table(_hot(self).memory)))


class TensorStepKeys:
    """Selecting sequences of one step, handled with tensor operations. Implements StepKeys."""

    def __init__(self, choosing: Choosing, layout: KvLayout, records: Records) -> None:
        hot = [_hot(row) for row, _ in choosing]
        size, where = hot[0].size, records.keys_APGC.device
        self._records, self._num_areas, self._num_latest = records, size.num_areas, size.num_latest
        self._areas_APS2GH = hot[0].memory.pool.memory.data_LPS2GH
        self._row_bytes = layout.row_bytes
        self._head_bytes = layout.row_bytes // (2 * layout.num_kv_heads)
        starts = [each.start for each in hot]
        own = [tokens.start - start for (_, tokens), start in zip(choosing, starts, strict=True)]
        numbers = [each.memory.number for each in hot], own, starts, [tokens.start for _, tokens in choosing]
        self._rows_B, self._own_places_B, starts_B, positions_B = torch.tensor(numbers, device=where).unbind()
        self._starts_B11, self._positions_B11 = (each.int().view(-1, 1, 1) for each in (starts_B, positions_B))
        layers = range(size.layout.num_layers)
        is_fresh = [[each.takes_over(layer) for each in hot] for layer in layers]
        self._is_fresh_LB = torch.tensor(is_fresh, device=where)
        homes = [[row.others.buffer.data[layer].data_ptr() for row, _ in choosing] for layer in layers]
        there = [[each.buffer.data[each.area(layer)].data_ptr() for each in hot] for layer in layers]
        self._homes_LB, self._there_LB = torch.tensor([homes, there], device=where).unbind()
        self._own_homes_LB = self._homes_LB + positions_B * layout.row_bytes
        self._own_there_LB = self._there_LB + self._own_places_B * layout.row_bytes

    def admit(self, layer: int, picks: Picks) -> tuple[Picks, PickedHeads]:
        """Find places for a layer's picks."""
        area, is_fresh_B11 = layer % self._num_areas, self._is_fresh_LB[layer].view(-1, 1, 1)
        keys_BGK, most = picks.keys_BGK, picks.keys_BGK.shape[2]
        is_pick_BGK = torch.arange(most, device=keys_BGK.device) < picks.num_BG.unsqueeze(2)
        is_early_BGK = is_pick_BGK & (keys_BGK < self._starts_B11)
        held_BGC = self._records.keys_APGC[area, self._rows_B].masked_fill_(is_fresh_B11, -1)
        turn_BG1 = self._records.turn_APG1[area, self._rows_B]
        slots_BGK, is_missing_BGK = _into_slots(keys_BGK, is_early_BGK, held_BGC, turn_BG1)
        self._records.keys_APGC[area, self._rows_B] = held_BGC
        self._records.turn_APG1[area, self._rows_B] = turn_BG1
        places_BGK = torch.where(is_early_BGK, slots_BGK + self._num_latest, keys_BGK - self._starts_B11).int()
        is_late_BGK = is_pick_BGK & ~is_early_BGK & is_fresh_B11 & (keys_BGK != self._positions_B11)
        from_BGK, to_BGK, num_BG = packed(is_missing_BGK | is_late_BGK, most, keys_BGK, places_BGK)
        pairs_BGK2 = torch.stack((from_BGK, to_BGK), 3)
        heads = PickedHeads(self._homes_LB[layer], self._there_LB[layer], pairs_BGK2, num_BG, self._head_bytes)
        return Picks(places_BGK, picks.num_BG), heads

    def own_keys(self, layer: int) -> Tensor:
        """Return the new tokens' keys of a layer."""
        return self._areas_APS2GH[layer % self._num_areas, self._rows_B, self._own_places_B, 0]

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies that write the new tokens' KV to host memory."""
        return RowCopies(self._own_there_LB[layer], self._own_homes_LB[layer], self._row_bytes)


class TensorMechanism:
    """Pools of all slots, and the search for places in the pools on a GPU. Implements FetchMechanism."""

    def __init__(self, shape: KvShape, decoder: Decoder, prepared: PreparedSelection, pieces: PassingPieces) -> None:
        """`pieces`: pieces that are passed to each FetchedRow."""
        device = decoder.device
        self.basis, self._selection = prepared.basis.to(device.torch_device), prepared.selection
        self._shape, self._device, self._pieces = shape, device, pieces
        layout = shape.layout
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._partial = partial_layout(layers, layout.num_kv_heads, self.basis.num_columns)
        self._blocks = partial_blocks(shape.max_slot_tokens)
        key_bytes = selecting_bytes(decoder.config.num_heads, layout.num_kv_heads, self.basis.num_columns)
        self.scratch_bytes = shape.num_slots * shape.max_slot_tokens * key_bytes
        self._records: Records | None = None

    def row_bytes(self, num_areas: int) -> int:
        """Return the bytes of device memory that the longest sequence needs."""
        layout, most, size = self._shape.layout, self._shape.max_slot_tokens, self._size(num_areas)
        areas = replace(size.layout, num_layers=num_areas).token_bytes * size.num_places(most)
        partial_bytes = self._partial.token_bytes * self._blocks
        return whole_of(layout).token_bytes * most + partial_bytes + areas + _record_bytes(size, size.num_slots(most))

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Make pools of `num_rows` pages, and return the Rows of all slots, which allocate a page when a claim
        begins."""
        layout, most, size = self._shape.layout, self._shape.max_slot_tokens, self._size(num_areas)
        whole, partials, areas = (
            PagePool(self._device.pool_memory(each, num_rows, num_tokens))
            for each, num_tokens in (
                (whole_of(layout), most),
                (self._partial, self._blocks),
                (replace(size.layout, num_layers=num_areas), size.num_places(most)),
            )
        )
        self._records = Records(size, num_rows, size.num_slots(most), self._device.torch_device)

        def make() -> PooledRow:
            hot = TensorHotKeys(size, partial(_row_of, areas), most)
            keys = TensorPartialIndex(layout, self.basis, partials), hot
            return PooledRow(self._shape, self._device, keys, self._pieces, partial(_row_of, whole))

        return [make() for _ in range(self._shape.num_slots)]

    def scored(
        self, keys: Sequence[TensorPartialKeys], lengths: Sequence[int], num_tokens: Sequence[int]
    ) -> TensorPartialRows:
        """Return the ScoredKeys of sequences' partial keys."""
        return TensorPartialRows(keys, lengths, num_tokens)

    def begin(self, choosing: Choosing) -> TensorStepKeys:
        """Begin a step of these sequences."""
        assert self._records is not None, "there are no rows yet"
        return TensorStepKeys(choosing, self._shape.layout, self._records)

    def _size(self, num_areas: int) -> HotSize:
        return HotSize(others_of(self._shape.layout), num_areas, self._selection)


def _into_slots(keys_BGK: Tensor, is_early_BGK: Tensor, held_BGC: Tensor, turn_BG1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slot of each early pick, and whether its key must be fetched. Updates the keys in slots, and the next
    slot to use, in place. Picks must be ascending, and there must be at most C."""
    num_slots = held_BGC.shape[2]
    sorted_BGC, order_BGC = held_BGC.sort(2)
    at_BGK = torch.searchsorted(sorted_BGC, keys_BGK).clamp_(max=num_slots - 1)
    is_hot_BGK = is_early_BGK & (sorted_BGC.gather(2, at_BGK) == keys_BGK)
    hot_BGK = order_BGC.gather(2, at_BGK)
    is_missing_BGK = is_early_BGK & ~is_hot_BGK

    stays_BGX = torch.zeros((*held_BGC.shape[:2], num_slots + 1), dtype=torch.bool, device=held_BGC.device)
    stays_BGX.scatter_(2, torch.where(is_hot_BGK, hot_BGK, num_slots), True)  # the last is for what is not hot
    slot_C = torch.arange(num_slots, device=held_BGC.device)
    wait_BGC = torch.where(stays_BGX[:, :, :num_slots], num_slots, (slot_C - turn_BG1) % num_slots)
    rank_BGK = is_missing_BGK.cumsum(2) - 1
    given_BGK = wait_BGC.argsort(2).gather(2, rank_BGK.clamp(0, num_slots - 1))
    last_BG1 = given_BGK.masked_fill(~is_missing_BGK, -1).gather(2, rank_BGK.argmax(2, keepdim=True))
    turn_BG1.copy_(torch.where(last_BG1 >= 0, (last_BG1 + 1) % num_slots, turn_BG1))

    held_BGX = torch.cat((held_BGC, held_BGC[:, :, :1]), 2)
    held_BGX.scatter_(2, torch.where(is_missing_BGK, given_BGK, num_slots), keys_BGK)
    held_BGC.copy_(held_BGX[:, :, :num_slots])
    return torch.where(is_hot_BGK, hot_BGK, given_BGK), is_missing_BGK


def _record_bytes(size: HotSize, most_slots: int) -> int:
    return size.num_areas * size.layout.num_kv_heads * (most_slots + 1) * _NUMBER_BYTES


def _row_of(pool: PagePool, layout: KvLayout, max_tokens: int) -> RowMemory:
    return PoolRow(pool)


def _hot(row: FetchedRow) -> TensorHotKeys:
    assert isinstance(row.hot, TensorHotKeys)
    return row.hot


def _table(memory: RowMemory) -> BlockTable:
    assert isinstance(memory, PoolRow)
    return BlockTable(memory.pool.memory.data_LPS2GH, torch.tensor([memory.number], dtype=torch.int32))
