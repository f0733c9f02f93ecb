"""Residency `infinigen` with a limit on the tokens of KV that a row keeps: its KV lies in a pool, which evicts.

A Residency for `engine.step_runner`; `pool` decides which token lies where. Layers 0 and 1 are whole. In the others a
row has a place for each token that it may keep, and one for a step's own token; keys are scored and picked by place. A
step notes in the pool which keys were picked, and when the forward has ended, its own token's K, V and partial key move
to the place that the pool says.

    home    layers 0 and 1 whole; of the others the places, and the order in which their tokens are evicted
    device  layers 0 and 1, and partial keys of the places

Pushed KV goes to its places as it comes, so a prompt never takes more than the limit. A prompt that is prefilled here
and is longer than the limit runs chunk by chunk over the tokens that are kept: the first, the latest, and the chunk
itself.

A row that cannot come to have more tokens than places computes the same, bit by bit, as one without a pool.

L layers that choose, T tokens, G kv heads, H head dim, R columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.infinigen import InfinigenStep
from generate_workers.residency.sparse.pool import (
    MAX_TOKENS,
    Eviction,
    Integers,
    KvPools,
    PoolLimit,
    PoolNotes,
    PoolSize,
)
from generate_workers.residency.sparse.selective import SelectiveResidency
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import Decoder, SequenceSpan
from modeling.forward.selection import PartialKeys, Picks
from modeling.kernels import native
from modeling.kv.buffers import KvBuffer, KvPlace, KvRows
from modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from modeling.sparse.selection_file import PreparedSelection

_BLOCK = 16
"""Keys whose partial keys lie together."""


class PooledRow:
    """A KeyedRow whose layers that choose lie in a pool."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, basis: Basis, pools: KvPools, slot: int) -> None:
        """Raise what is in OUT_OF_MEMORY, or OSError, when the slot's address space cannot be had."""
        layout, most = shape.layout, shape.max_slot_tokens
        num_places = min(pools.limit.num_places + 1, most)
        self._layers = range(NUM_WHOLE_LAYERS, layout.num_layers)
        self._whole = _row(replace(layout, num_layers=NUM_WHOLE_LAYERS), make_memory, most)
        self._kept = _row(replace(layout, num_layers=len(self._layers)), make_memory, num_places)
        self._partial = PartialKeys(self._layers, layout.num_kv_heads, basis.num_columns, num_places)
        self._num_places = num_places
        self._basis = basis
        self._pools, self._slot = pools, slot
        self._can_overflow = False
        """Whether the present claim may come to have more tokens than places; if not, picks need not be noted."""
        self._has_begun = False
        """Whether a step has run on the claim. Before the first step no key was picked."""
        self._kv_LP2GH: NDArray[np.int64] = self._kept.memory.data_LS2GH.view(torch.int64).numpy()
        """All places. An int64 here holds several numbers of K and V: faster to move, and numpy knows no bf16."""
        self._k_LCGRI: NDArray[np.int16] = self._partial.data_LCGRI.view(torch.int16).numpy()
        self._head_G = np.arange(layout.num_kv_heads)
        self._layer_L1 = np.arange(len(self._layers))[:, None]

    @property
    def tokens(self) -> TokenRange:
        """Return the tokens that the present claim may come to have, evicted ones included."""
        return self._whole.tokens

    @property
    def partial(self) -> PartialKeys:
        """Return the partial keys of the places."""
        return self._partial

    @property
    def pool_slot(self) -> int | None:
        """Return the slot in the pools where picks are to be noted. None: they need not be noted."""
        return self._slot if self._can_overflow and self._pools.limit.eviction is not Eviction.FIFO else None

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes that are committed now."""
        whole, orders = self._whole.memory.num_bytes, self._pools.row_bytes if self._can_overflow else 0
        return KvBytes(whole + self._kept.memory.num_bytes + orders, whole + self.partial.num_bytes)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that so many tokens take once all have come; layers that choose take no more than the
        limit."""
        num_places = min(num_tokens, self._num_places)
        whole, kept = self._whole.memory.bytes_for(num_tokens), self._kept.memory.bytes_for(num_places)
        return KvBytes(whole + kept + self._pools.row_bytes, whole + self.partial.bytes_for(num_places))

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of tokens kept of so many: at most the limit."""
        return min(num_tokens, self._pools.limit.num_places)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; when it fails, nothing is held."""
        num_places = self.num_kept(num_tokens)
        self._can_overflow = capacity_tokens > self._pools.limit.num_places
        try:
            self._whole.open(num_tokens, capacity_tokens)
            self._kept.open(num_places, min(capacity_tokens, self._num_places))
            self.partial.expect(num_places)
        except BaseException:
            self.release()
            raise

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy pushed KV home. In a layer that chooses only tokens that have a place now are copied."""
        if layer not in self._layers:
            self._whole.write(layer, tokens, data)
            return
        row_bytes = data.nbytes // len(tokens)
        for part, places in self._prompt_parts(layer, tokens):
            start = (part.start - tokens.start) * row_bytes
            self._kept.write(self._layers.index(layer), places, data[start : start + len(part) * row_bytes])
            self._take_keys(layer, places)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`. May not be called for a row that evicts, whose tokens may be gone."""
        if layer not in self._layers:
            return self._whole.export(layer, tokens)
        assert not self._can_overflow, "what a pool has evicted cannot be read"
        return self._kept.export(self._layers.index(layer), tokens)

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to write. A step's own token that has no place of its own
        yet uses the last place."""
        self._whole.memory.commit(tokens)
        start, end = self.num_kept(tokens.start), self.num_kept(tokens.end)
        if len(tokens) == 1 or self._has_begun:
            end = min(tokens.end, self._num_places)
        self._kept.memory.commit(TokenRange(start, end))

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a span over the places; tokens that do not all have a place get memory beside them. The first step's
        span moves the latest tokens of the prompt to the end of the pool."""
        if len(tokens) != 1 and tokens.end > self._pools.limit.num_places:
            return PooledSpan(self, tokens, KvBuffer(replace(self._kept.buffer.layout, num_layers=1), tokens))
        if len(tokens) == 1 and not self._has_begun:
            self._has_begun = True
            if self._can_overflow:
                self._arrange(tokens.start)
        return PooledSpan(self, tokens, None)

    def whole_rows(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a view `[T, 2, G, H]` of a whole layer."""
        return self._whole.buffer.span(layer, tokens)

    def placed_rows(self, layer: int, places: TokenRange) -> Tensor:
        """Return a view `[T, 2, G, H]` of places in a layer that chooses."""
        return self._kept.buffer.span(self._layers.index(layer), places)

    def place(self, num_tokens: int) -> KvPlace:
        """Return where the keys of a step lie, the own token's included, which is the last of `num_tokens`."""
        kept = _place(self._kept, self.num_kept(num_tokens - 1) + 1)
        return replace(_place(self._whole, num_tokens), others=kept)

    def own_keys(self, position: int) -> Tensor:
        """Return a view of the own token's keys in the layers that choose: `[L, G, H]`."""
        return self._kept.buffer.data[:, self.num_kept(position), 0]

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Copy new tokens to their places and make their partial keys: in runs as long as no step has run or the row
        cannot evict, else token by token, each evicting another."""
        if self._has_begun and self._can_overflow:
            for position, kv_2GH in zip(range(tokens.start, tokens.end), kv_T2GH, strict=True):
                own = TokenRange(self.num_kept(position), self.num_kept(position) + 1)
                self.placed_rows(layer, own)[0] = kv_2GH
                self._take_keys(layer, own)
                self.keep(position, slice(self._layers.index(layer), self._layers.index(layer) + 1))
            return
        for part, places in self._prompt_parts(layer, tokens):
            self.placed_rows(layer, places).copy_(kv_T2GH[part.start - tokens.start : part.end - tokens.start])
            self._take_keys(layer, places)

    def keep(self, position: int, layers: slice = slice(None), victims_LG: Integers | None = None) -> None:
        """Keep a step's own token, whose partial keys are made; in a full pool K, V and partial keys move to the places
        that the pool says. `layers`: those that choose, counted from the first of them. `victims_LG`: places to evict,
        where they were found already."""
        if not self._can_overflow:
            return
        limit = self._pools.limit
        victims_LG = self._pools[self._slot].append(position, layers, victims_LG)
        if victims_LG is None:
            return
        leaving = limit.late_place(position) if limit.num_last > 1 else limit.num_places
        layer_L1, head_G = self._layer_L1[: len(victims_LG)], self._head_G
        kv_LP2GH, k_LCGRI = self._kv_LP2GH[layers], self._k_LCGRI[layers]
        block, at = divmod(leaving, _BLOCK)
        kv_LP2GH[layer_L1, victims_LG, :, head_G] = kv_LP2GH[:, leaving].swapaxes(1, 2)
        k_LCGRI[layer_L1, victims_LG // _BLOCK, head_G, :, victims_LG % _BLOCK] = k_LCGRI[:, block, :, :, at]
        if leaving != limit.num_places:
            own_block, own_at = divmod(limit.num_places, _BLOCK)
            kv_LP2GH[:, leaving] = kv_LP2GH[:, limit.num_places]
            k_LCGRI[:, block, :, :, at] = k_LCGRI[:, own_block, :, :, own_at]

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy all that another row of the same capacity holds."""
        tokens, num_places = TokenRange(0, num_tokens), self.num_kept(num_tokens)
        self._whole.copy_from(other._whole, len(tokens))
        self._kept.copy_from(other._kept, num_places)
        self.partial.copy_from(other.partial, num_places)
        self._has_begun = other._has_begun
        if self._can_overflow:
            self._pools[self._slot].copy_from(self._pools[other._slot])

    def release(self) -> None:
        """End the claim, if there is one."""
        self._whole.release()
        self._kept.release()
        self.partial.release()
        if self._can_overflow:
            self._pools.clear(self._slot)
        self._can_overflow = self._has_begun = False

    def _prompt_parts(self, layer: int, tokens: TokenRange) -> list[tuple[TokenRange, TokenRange]]:
        """Return runs of a prompt's tokens that are to be copied, each with its places, which follow each other."""
        if not self._can_overflow:
            return [(tokens, tokens)]
        positions_K, places_K = self._pools[self._slot].take_prompt(self._layers.index(layer), tokens)
        ends = np.flatnonzero((np.diff(places_K) != 1) | (np.diff(positions_K) != 1)) + 1
        return [
            (_range(positions), _range(places))
            for positions, places in zip(np.split(positions_K, ends), np.split(places_K, ends), strict=True)
            if len(places)
        ]

    def _take_keys(self, layer: int, places: TokenRange) -> None:
        """Make the partial keys of the tokens that lie at `places`."""
        k_TGH = self.placed_rows(layer, places)[:, 0]
        self.partial.write(layer, places.start, k_TGH, self._basis.key_projection(layer))

    def _arrange(self, num_tokens: int) -> None:
        """Move tokens as the pool wants it at the row's first step, whose own token comes after `num_tokens`."""
        sources, targets = self._pools[self._slot].arrange(num_tokens)
        kv_LP2GH, k_LCGRI = self._kv_LP2GH, self._k_LCGRI
        kv_LP2GH[:, targets] = kv_LP2GH[:, sources]
        k_LCGRI[:, targets // _BLOCK, :, :, targets % _BLOCK] = k_LCGRI[:, sources // _BLOCK, :, :, sources % _BLOCK]


@dataclass(frozen=True)
class PooledSpan:
    """A SequenceSpan of a row on a pool."""

    row: PooledRow
    tokens: TokenRange
    beside: KvBuffer | None
    """Buffer with one layer's new tokens, which do not lie in places yet. None: they lie in places."""

    def own(self, layer: int) -> Tensor:
        if layer < NUM_WHOLE_LAYERS:
            return self.row.whole_rows(layer, self.tokens)
        if self.beside is not None:
            return self.beside.span(0, self.tokens)
        start = self.row.num_kept(self.tokens.start)
        return self.row.placed_rows(layer, TokenRange(start, start + len(self.tokens)))

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the kept keys, then the new ones. Positions in a pool are not consecutive; the keys are numbered as if
        they came last before the new tokens, which is all that masks need."""
        start, end = self.tokens.start, self.tokens.end
        if layer < NUM_WHOLE_LAYERS:
            yield _rows(self.row.whole_rows(layer, TokenRange(0, end)), 0)
            return
        num_kept = self.row.num_kept(start)
        if self.beside is None:
            num_keys = num_kept + len(self.tokens)
            yield _rows(self.row.placed_rows(layer, TokenRange(0, num_keys)), end - num_keys)
            return
        if num_kept:
            yield _rows(self.row.placed_rows(layer, TokenRange(0, num_kept)), start - num_kept)
        yield self.beside.rows(0, self.tokens)

    def place(self) -> KvPlace:
        return self.row.place(self.tokens.end)


class PooledStep(InfinigenStep[PooledRow]):
    """A step that notes in the pools which keys are picked, and keeps its own tokens."""

    def __init__(
        self,
        shape: KvShape,
        rows: Sequence[tuple[PooledRow, TokenRange]],
        source: tuple[PreparedSelection, Decoder],
        pools: KvPools,
    ) -> None:
        super().__init__(shape.layout, rows, *source)
        slots = [row.pool_slot for row, _ in self.choosing]
        self._notes: PoolNotes | None = None
        if any(slot is not None for slot in slots):
            self._notes = PoolNotes(pools, slots, [tokens.start for _, tokens in self.choosing])
            num_places = pools.limit.num_places
            self._closeness_BGS = torch.empty(len(slots), shape.layout.num_kv_heads, num_places)

    def settle(self) -> None:
        super().settle()
        victims = [None] * len(self.choosing) if self._notes is None else self._notes.victims()
        for (row, tokens), victims_LG in zip(self.choosing, victims, strict=True):
            row.keep(tokens.start, victims_LG=victims_LG)

    def _select(self, layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        if self._notes is None:
            return super()._select(layer, q_BNH)
        picks = super()._select(layer, q_BNH, self._closeness_BGS)
        self._notes.note(self._layers.index(layer), picks, self._closeness_BGS)
        return picks


class PooledResidency(SelectiveResidency[PooledRow]):
    """A Residency that chooses keys by partial scores, and keeps a limited number of tokens."""

    traits = POLICIES["infinigen"]

    def __init__(
        self,
        shape: KvShape,
        make_memory: MakeMemory,
        prepared: PreparedSelection,
        decoder: Decoder,
        size: PoolSize,
    ) -> None:
        """`prepared` must be for `decoder`; its first and latest keys are never evicted. Raises ConfigError for a
        `size` that has no room for these; what is in OUT_OF_MEMORY, or OSError, when the slots' address space cannot be
        had."""
        layout, selection = shape.layout, prepared.selection
        assert shape.max_slot_tokens <= MAX_TOKENS, "no model takes so many"
        limit = PoolLimit(size.num_tokens, size.eviction, selection.num_first, selection.num_last)
        num_layers = layout.num_layers - NUM_WHOLE_LAYERS
        self._pools = KvPools(shape.num_slots, num_layers, layout.num_kv_heads, limit)
        slots = range(shape.num_slots)
        super().__init__([PooledRow(shape, make_memory, prepared.basis, self._pools, slot) for slot in slots])
        self._shape = shape
        self._source = prepared, decoder
        for kernel in ("key_selection", "pool_notes"):
            native.load(kernel)  # builds it now, not when the first KV is pushed

    def make_step(self, rows: Sequence[tuple[PooledRow, TokenRange]]) -> PooledStep:
        return PooledStep(self._shape, rows, self._source, self._pools)


def _row(layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> PagedRow:
    return PagedRow(layout, make_memory(layout, max_tokens))


def _place(row: PagedRow, num_keys: int) -> KvPlace:
    data = row.buffer.data
    return KvPlace(data.data_ptr(), data.stride(0) * data.element_size(), len(data), num_keys)


def _rows(kv_T2GH: Tensor, first_position: int) -> KvRows:
    return KvRows(kv_T2GH[:, 0], kv_T2GH[:, 1], first_position)


def _range(numbers: Integers) -> TokenRange:
    return TokenRange(int(numbers[0]), int(numbers[-1]) + 1)
