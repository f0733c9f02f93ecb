"""Finds places on a GPU for selected keys and values (picks) with tensor operations. A place is an index in an area,
the device memory in which a layer finds its selected keys and values. The host reads no result until a step ends.

The memory of all sequences is in pools, one page per sequence, so that kernels can address a sequence by its page
number. There are pools for the first two layers, for partial keys (keys projected to fewer columns), and for areas. An
area has places for the latest tokens, and cache slots for other selected keys (`hot_keys`). Records list the key in
each cache slot, and are indexed by page, too. Pools are allocated once, for as many sequences as fit on the device.

The numbers that a step needs are copied to the device when the step begins. After that, the lengths of the sequences
determine all shapes, and data on selected, hot and missing keys stays on the device. A kernel fetches missing keys from
pinned host memory (`baton.modeling.kernels.triton.copies`). A selected key that is not in a cache slot replaces another
key. The cache slots are searched in cyclic order for a key that is not selected in this step.

Shape suffixes: B sequences of one new token, G kv heads, H head dim, K maximum number of picks, W latest, C cache
slots, A areas, L layers, P pages of pools.
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
"""Size in bytes of one number in a record (list of the keys that are cached on the device)."""


class TensorPartialIndex(TensorPartialKeys, PartialPart):
    """Partial keys (keys projected to fewer columns) of one slot, stored in a page of a pool on the device. Implements
    PartialPart."""

    def __init__(self, layout: KvLayout, basis: Basis, pool: PagePool) -> None:
        """Make the partial keys (keys projected to fewer columns) of one slot. `pool`: pool for partial keys, with one
        page per sequence."""
        layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        super().__init__(layers, layout.num_kv_heads, basis.num_columns, pool)
        self._basis = basis


class TensorHotKeys(HotKeys):
    """HotKeys whose memory is a page of a pool. The records (lists of the keys that are cached) are on the device,
    too."""

    def places_of(self, num_tokens: int) -> int:
        """Return the number of places (indices) in an area, the device memory of one layer. It does not depend on
        `num_tokens`, because even a short sequence may use all places."""
        return self.size.num_latest + self.most_slots

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that the sequence uses now, including its records (lists of the keys that are
        cached)."""
        return super().num_bytes + (self._record_bytes if super().num_bytes else 0)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes that a sequence uses, including its records (lists of the keys that are cached); 0
        if `num_tokens` is 0. Otherwise, it is as many bytes as for a sequence of the maximum length."""
        return super().bytes_for(num_tokens) + (self._record_bytes if num_tokens else 0)

    @property
    def memory(self) -> PoolRow:
        """Return the current sequence's page in the pool. The page holds the sequence's hot keys and their values."""
        assert isinstance(self._kv.memory, PoolRow)
        return self._kv.memory

    @property
    def _record_bytes(self) -> int:
        return _record_bytes(self.size, self.most_slots)


class Records:
    """Records of the keys that are cached on the device, for all sequences. An area, the device memory of one layer,
    has cache slots. Each cache slot holds one key of each kv head. The records are tensors on the device."""

    def __init__(self, size: HotSize, num_rows: int, most_slots: int, device: torch.device) -> None:
        """Allocate records without keys. `num_rows`: number of pages in the pool of hot keys, which is the maximum
        number of sequences. `most_slots`: number of cache slots of an area (device memory of one layer), for each kv
        head. Raises an error of OUT_OF_MEMORY."""
        shape = (size.num_areas, num_rows, size.layout.num_kv_heads, most_slots)
        self.keys_APGC = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Token index of the key in each cache slot; -1: the cache slot is empty. The dimensions are area, page of the
        sequence, kv head and cache slot."""
        self.turn_APG1 = torch.zeros((*shape[:3], 1), dtype=torch.int32, device=device)
        """Cache slot at which the search for a replaceable key begins, for each area, page and kv head. Keys that are
        selected in this step are not replaced."""


@dataclass(frozen=True)
class PooledSpan(SplitSpan):
    """SplitSpan (a SequenceSpan with two separate memories) whose memories are pages of pools. One page has the KV of
    the first two layers. The other page has the hot keys (recently selected keys) of all later layers."""

    tables: tuple[BlockTable, BlockTable]
    """Block tables of the sequence in two pools: the pool of the first two layers' KV, and the pool of hot keys. Each
    table has one page."""

    def place(self) -> KvPlace:
        place, (whole, areas) = super().place(), self.tables
        assert place.others is not None
        return replace(place, address=0, table=whole, others=replace(place.others, address=0, table=areas))


class PooledRow(FetchedRow):
    """FetchedRow (memory of one slot) whose device memory consists of pages of pools."""

    def placed_span(self, tokens: TokenRange) -> PooledSpan:
        """Assign a place (index in device memory) to the one new token in `tokens`. Return the SequenceSpan of a step
        that runs this token. It contains the block tables of the slot's memory."""
        span = super().placed_span(tokens)
        return PooledSpan(span.whole, span.others, (_table(self.whole.memory), _table(_hot(self).memory)))


class TensorStepKeys:
    """Sequences that select keys in one step, processed with tensor operations. Implements StepKeys."""

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
        """Assign a place (index in device memory) to each key in `picks`, the keys that `layer` selects. Return `picks`
        with places instead of token indices, and the keys and values that must be fetched to their places."""
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
        """Return the keys of the new tokens in `layer`, `[B, G, H]`, from the device memory that the layer uses."""
        return self._areas_APS2GH[layer % self._num_areas, self._rows_B, self._own_places_B, 0]

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies that write the KV of the new tokens in `layer` from the device to host memory."""
        return RowCopies(self._own_there_LB[layer], self._own_homes_LB[layer], self._row_bytes)


class TensorMechanism:
    """FetchMechanism for GPUs: pools of memory for all slots, and tensor operations that decide where selected keys are
    stored in the pools."""

    def __init__(self, shape: KvShape, decoder: Decoder, prepared: PreparedSelection, pieces: PassingPieces) -> None:
        """Make the mechanism. `pieces`: two buffers on the device, which all FetchedRows share. Each holds one piece (a
        range of tokens) of one layer's KV at a time. The first is for keys that were computed elsewhere and written to
        a slot: their partial keys (projections to fewer columns) are computed from it. The second is for the earlier KV
        of a sequence that has several new tokens in a step: attention reads it there."""
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
        """Return the number of bytes of device memory that a sequence of the maximum length needs with `num_areas`
        areas, each of which holds selected keys and values of one layer at a time."""
        layout, most, size = self._shape.layout, self._shape.max_slot_tokens, self._size(num_areas)
        areas = replace(size.layout, num_layers=num_areas).token_bytes * size.num_places(most)
        partial_bytes = self._partial.token_bytes * self._blocks
        return whole_of(layout).token_bytes * most + partial_bytes + areas + _record_bytes(size, size.num_slots(most))

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Allocate pools of `num_rows` pages, and return a FetchedRow, the memory of one slot, for every slot. A slot
        gets a page in each pool when a sequence begins to use it."""
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
        """Return an object that scores the partial keys (keys projected to fewer columns) of several sequences.
        `lengths`: number of keys of each sequence, including the new token's key. `num_tokens`: number of tokens of
        each sequence; it is larger than the number of keys if keys were evicted."""
        return TensorPartialRows(keys, lengths, num_tokens)

    def begin(self, choosing: Choosing) -> TensorStepKeys:
        """Begin a step of the sequences in `choosing`, and return the StepKeys of this step. `make_rows` must have been
        called."""
        assert self._records is not None, "there are no rows yet"
        return TensorStepKeys(choosing, self._shape.layout, self._records)

    def _size(self, num_areas: int) -> HotSize:
        return HotSize(others_of(self._shape.layout), num_areas, self._selection)


def _into_slots(keys_BGK: Tensor, is_early_BGK: Tensor, held_BGC: Tensor, turn_BG1: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pair of tensors, each with one entry per pick: the cache slot of each early pick, and True if its key
    must be fetched. An early pick is older than the latest tokens, which have places of their own. Updates the keys in
    cache slots, and the next cache slot to use, in place. Picks must be ascending, and there must be at most C."""
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
