"""Residency `infinigen` with a limit on the number of tokens whose KV a sequence keeps. The kept tokens form a pool,
which evicts tokens when it is full.

A Residency for `engine.model_runner`. The module `pool` assigns each token a place, which is an index in the sequence's
KV memory. Layers 0 and 1 keep all tokens. In the other layers, a sequence has a place for each token that it may keep,
and one more place for the new token of a step (its own token). Keys are scored and selected by place. A step records
the selected keys in the pool. When the forward pass has ended, the K, V and partial key of the own token are moved to
the place that the pool returns. A partial key is a key reduced to few columns, from which its score is approximated.

    `home`  KV of all tokens in layers 0 and 1, KV of the kept tokens in other layers, and their order of eviction
    device  KV of all tokens in layers 0 and 1, and partial keys of the kept tokens in other layers

`home` is the memory that stores KV between steps. A device with its own memory also stores the KV of kept tokens, which
then has no copy in host memory. With copies in two memories, one copy would soon contain outdated keys, because a full
pool moves a token in each layer and kv head at each step. In addition, a pool is small enough for the device.

Pushed KV is written to its places as it arrives, so a prompt never uses more memory than the limit. A prompt that is
prefilled here and is longer than the limit runs chunk by chunk. Each chunk attends to the tokens that are kept: the
first tokens, the latest tokens, and the chunk itself.

If a sequence can never have more tokens than the limit, its results are bit-identical to those without a limit.

Shape suffixes: L layers that select, T tokens, G kv heads, H head dim, R columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder, SequenceSpan
from baton.modeling.forward.selection import Picks
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvPlace, KvRows
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS, Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import TokenRange
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.sparse.infinigen import InfinigenRow, InfinigenStep
from generate_workers.residency.sparse.pool import (
    MAX_TOKENS,
    Eviction,
    Integers,
    KvPools,
    PoolLimit,
    PoolNotes,
    PoolSize,
)
from generate_workers.residency.sparse.selective import SplitSpan
from generate_workers.residency.steps import RowResidency
from generate_workers.residency.traits import POLICIES

_BLOCK = 16
"""Number of partial keys that are stored together as one block."""


class PooledInfinigenRow(InfinigenRow):
    """Memory of one slot that keeps a limited number of tokens in the layers that select keys. A pool assigns a place
    (index in the sequence's KV memory) to each kept token."""

    def __init__(self, shape: KvShape, device: Device, basis: Basis, pools: KvPools, slot: int) -> None:
        """Raises an error of OUT_OF_MEMORY, or OSError, if the slot's address space cannot be reserved."""
        self._num_places = min(pools.limit.num_places + 1, shape.max_slot_tokens)
        super().__init__(shape, device.row_memory, basis, self._num_places, reads_home=device.is_home)
        self._make_buffer = device.buffer
        self._pools, self._slot = pools, slot
        self._can_overflow = False
        """True if the current sequence may have more tokens than its pool keeps. If False, no token is ever evicted,
        and selected keys are not recorded."""
        self._has_begun = False
        """True after the first decode step of the current sequence has begun. Before this step, no key was selected."""
        self._kv_LP2GH: NDArray[np.int64] = self.others.memory.data_LS2GH.view(torch.int64).numpy()
        """KV of all tokens in the pool, by layer and place (index in the pool), viewed as int64. Each int64 contains
        several elements of K or V: numpy does not support bf16, and copies of int64 are fast."""
        self._k_LCGRI: NDArray[np.int16] = self.partial.data_LCGRI.view(torch.int16).numpy()
        self._head_G = np.arange(shape.layout.num_kv_heads)
        self._layer_L1 = np.arange(len(self._kv_LP2GH))[:, None]

    @property
    def pool_slot(self) -> int | None:
        """Return the index of the slot's pool in the KvPools, if selected keys are recorded in this pool. None:
        selected keys are not recorded, because the sequence never evicts tokens, or evicts them in FIFO order."""
        return self._slot if self._can_overflow and self._pools.limit.eviction is not Eviction.FIFO else None

    @property
    def num_bytes(self) -> KvBytes:
        """Return the number of bytes of memory that are committed now."""
        return super().num_bytes + KvBytes(home=self._pools.row_bytes if self._can_overflow else 0)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the number of bytes of memory for a sequence of `num_tokens` tokens. In layers that select keys, the
        number stops growing at the limit on kept tokens."""
        whole, num_places = self.whole.bytes_for(num_tokens), min(num_tokens, self._num_places)
        others = self.others.bytes_for(num_places)
        device = whole + self.partial.bytes_for(num_places) + (0 if self.reads_home else others)
        return KvBytes(whole + others + self._pools.row_bytes, device)

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of tokens that the pool keeps of a sequence of `num_tokens` tokens: `num_tokens`, but at
        most the limit."""
        return min(num_tokens, self._pools.limit.num_places)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens`: maximum number of tokens. If this raises, no memory stays allocated."""
        self._can_overflow = capacity_tokens > self._pools.limit.num_places
        try:
            self.whole.open(num_tokens, capacity_tokens)
            for part in (self.others, self.partial):
                part.open(self.num_kept(num_tokens), min(capacity_tokens, self._num_places))
        except BaseException:
            self.release()
            raise

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV into the slot. In a layer that selects keys, KV is copied only for tokens that the
        pool keeps at this time. For such a layer, the KV and the partial keys are stored when this method returns. For
        other layers, the returned transfer may still be running."""
        if layer < NUM_WHOLE_LAYERS:
            return self.whole.write(layer, tokens, data)
        row_bytes = data.nbytes // len(tokens)
        for part, places in self._parts_of(layer, tokens):
            start = (part.start - tokens.start) * row_bytes
            self.others.write(layer - NUM_WHOLE_LAYERS, places, data[start : start + len(part) * row_bytes]).result()
            self.partial.add(layer, places.start, self.kv(layer, places))
        return DoneTransfer()

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens` in a layer as bytes. Must not be called for a sequence that may evict tokens,
        because their KV may be lost."""
        assert layer < NUM_WHOLE_LAYERS or not self._can_overflow, "what a pool has evicted cannot be read"
        return super().export(layer, tokens)

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for the new `tokens` of a step. If the pool is full, a step's new token is stored at one
        additional place, the last one. A place is an index in the sequence's KV memory."""
        self.whole.memory.commit(tokens)
        start, end = self.num_kept(tokens.start), self.num_kept(tokens.end)
        if len(tokens) == 1 or self._has_begun:
            end = min(tokens.end, self._num_places)
        self.others.memory.commit(TokenRange(start, end))

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`. If there are several new tokens and they
        do not all fit into the pool, they get a separate buffer. The call for a sequence's first decode step also moves
        the prompt's latest tokens to the end of the pool, if the sequence may outgrow the pool."""
        kept, beside = self.others.buffer, None
        if len(tokens) != 1 and tokens.end > self._pools.limit.num_places:
            beside = self._make_buffer(replace(kept.layout, num_layers=1), tokens)
        elif len(tokens) == 1 and not self._has_begun:
            self._has_begun = True
            if self._can_overflow:
                self._arrange(tokens.start)
        places = PooledInfinigenSpan(kept, tokens, self.num_kept(tokens.start), beside)
        return SplitSpan(BufferSpan(self.whole.buffer, tokens), places)

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Copy the KV of `tokens` to their places (indices in KV memory) in the pool, and compute their partial keys.
        Before the sequence's first decode step, or if the sequence can never be longer than its pool, consecutive
        tokens are copied together. In all other cases they are copied one by one. If the pool is full, each of them
        then replaces another token."""
        at = layer - NUM_WHOLE_LAYERS
        if at < 0:
            return
        for part, places in self._parts_of(layer, tokens):
            kept_T2GH = self.kv(layer, places)
            kept_T2GH.copy_(kv_T2GH[part.start - tokens.start : part.end - tokens.start])
            self.partial.add(layer, places.start, kept_T2GH)
            if self._has_begun:
                self.keep(part.start, slice(at, at + 1))

    def keep(self, position: int, layers: slice = slice(None), victims_LG: Integers | None = None) -> None:
        """Add a step's new token, at `position` in the sequence, to the pool. The token's partial keys must exist.
        If the pool is full, evict one token per layer and kv head, and move the K, V and partial keys of other tokens
        to the places that become free, as described at `KvPool.append`.

        A place is an index in the sequence's KV memory. `layers`: layers in which the token is added, counted from the
        first layer that selects keys. `victims_LG`: places of the tokens to evict; None: the pool selects them.
        """
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
        """Copy the KV and partial keys of the first `num_tokens` tokens of another slot's sequence, and the state of
        its pool. The sequences must have the same capacity."""
        num_places = self.num_kept(num_tokens)
        self.whole.copy_from(other.whole, num_tokens)
        self.others.copy_from(other.others, num_places)
        self.partial.copy_from(other.partial, num_places)
        self._has_begun = other._has_begun
        if self._can_overflow:
            self._pools[self._slot].copy_from(self._pools[other._slot])

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        super().release()
        if self._can_overflow:
            self._pools.clear(self._slot)
        self._can_overflow = self._has_begun = False

    def _parts_of(self, layer: int, tokens: TokenRange) -> list[tuple[TokenRange, TokenRange]]:
        """Return the runs of `tokens` that must be copied, each with its range of places."""
        if not self._can_overflow:
            return [(tokens, tokens)]
        if self._has_begun:
            firsts = [self.num_kept(token.start) for token in tokens.split(1)]
            return [(token, TokenRange(at, at + 1)) for token, at in zip(tokens.split(1), firsts, strict=True)]
        positions_K, places_K = self._pools[self._slot].take_prompt(layer - NUM_WHOLE_LAYERS, tokens)
        ends = np.flatnonzero((np.diff(places_K) != 1) | (np.diff(positions_K) != 1)) + 1
        return [
            (_range(positions), _range(places))
            for positions, places in zip(np.split(positions_K, ends), np.split(places_K, ends), strict=True)
            if len(places)
        ]

    def _arrange(self, num_tokens: int) -> None:
        """Move tokens as the pool requires at the sequence's first decode step, which follows `num_tokens` tokens."""
        sources, targets = self._pools[self._slot].arrange(num_tokens)
        kv_LP2GH, k_LCGRI = self._kv_LP2GH, self._k_LCGRI
        kv_LP2GH[:, targets] = kv_LP2GH[:, sources]
        k_LCGRI[:, targets // _BLOCK, :, :, targets % _BLOCK] = k_LCGRI[:, sources // _BLOCK, :, :, sources % _BLOCK]


@dataclass(frozen=True)
class PooledInfinigenSpan:
    """SequenceSpan over the kept tokens of one sequence, in the layers that select keys."""

    kept: KvBuffer
    """KV of the kept tokens. A token's index in this buffer is its place in the pool, not its position in the
    sequence."""
    tokens: TokenRange
    num_kept: int
    """Number of tokens that were in the pool before the step."""
    beside: KvBuffer | None
    """Separate buffer for the new tokens' KV of one layer, if the new tokens do not fit into the pool. None: the new
    tokens are stored in the pool, directly after the kept tokens."""

    def own(self, layer: int) -> Tensor:
        if self.beside is not None:
            return self.beside.span(0, self.tokens)
        return self.kept.span(layer, TokenRange(self.num_kept, self.num_kept + len(self.tokens)))

    def segments(self, layer: int) -> Iterator[KvRows]:
        """Yield the KV of the kept tokens, then of the new tokens. The true positions of the kept tokens are not
        consecutive. For attention masks, the kept tokens count as if they directly preceded the new tokens."""
        num_keys = self.num_kept + (len(self.tokens) if self.beside is None else 0)
        if num_keys:
            yield replace(
                self.kept.rows(layer, TokenRange(0, num_keys)), first_position=self.tokens.start - self.num_kept
            )
        if self.beside is not None:
            yield self.beside.rows(0, self.tokens)

    def place(self) -> KvPlace:
        return BufferSpan(self.kept, TokenRange(self.num_kept, self.num_kept + 1)).place()


class PooledStep(InfinigenStep[PooledInfinigenRow]):
    """Step that records the selected keys in the sequences' pools, and adds its new tokens to the pools."""

    def __init__(
        self,
        rows: Sequence[tuple[PooledInfinigenRow, TokenRange]],
        prepared: PreparedSelection,
        decoder: Decoder,
        pools: KvPools,
    ) -> None:
        super().__init__(rows, prepared, decoder)
        slots = [row.pool_slot for row, _ in self.choosing]
        self._notes: PoolNotes | None = None
        if any(slot is not None for slot in slots):
            self._notes = PoolNotes(pools, slots, [tokens.start for _, tokens in self.choosing])
            self._closeness_BGS = torch.empty(len(slots), self.layout.num_kv_heads, pools.limit.num_places)

    def settle(self) -> None:
        super().settle()
        victims = [None] * len(self.choosing) if self._notes is None else self._notes.victims()
        for (row, tokens), victims_LG in zip(self.choosing, victims, strict=True):
            row.keep(tokens.start, victims_LG=victims_LG)

    def _select(self, layer: int, q_BNH: Tensor, closeness_BGS: Tensor | None = None) -> Picks:
        if self._notes is None:
            return super()._select(layer, q_BNH)
        picks = super()._select(layer, q_BNH, self._closeness_BGS)
        self._notes.note(layer - NUM_WHOLE_LAYERS, picks, self._closeness_BGS)
        return picks


class PooledResidency(RowResidency[PooledInfinigenRow]):
    """Residency that keeps the KV of a limited number of tokens per sequence. It selects keys by approximate scores,
    which are computed from partial keys (keys reduced to few columns)."""

    traits = POLICIES["infinigen"]

    def __init__(
        self, shape: KvShape, device: Device, prepared: PreparedSelection, decoder: Decoder, size: PoolSize
    ) -> None:
        """`prepared`: results of `baton prepare` for the model of `decoder`, with which keys are selected. They include
        the numbers of first and latest keys that are always selected; these keys are never evicted. `decoder` must be
        on `device`. `size`: limit on the kept tokens, and eviction rule. Raises ConfigError if `size` is too small for
        the keys that are never evicted. Raises an error of OUT_OF_MEMORY, or OSError, if the address space cannot be
        reserved."""
        layout, selection = shape.layout, prepared.selection
        assert shape.max_slot_tokens <= MAX_TOKENS, "max_slot_tokens exceeds MAX_TOKENS"
        limit = PoolLimit(size.num_tokens, size.eviction, selection.num_first, selection.num_last)
        pools = KvPools(shape.num_slots, layout.num_layers - NUM_WHOLE_LAYERS, layout.num_kv_heads, limit)
        rows = [PooledInfinigenRow(shape, device, prepared.basis, pools, slot) for slot in range(shape.num_slots)]
        self.scratch_bytes = 0 if device.is_home else shape.long_span_bytes
        super().__init__(rows, lambda rows: PooledStep(rows, prepared, decoder, pools))


def _range(numbers: Integers) -> TokenRange:
    return TokenRange(int(numbers[0]), int(numbers[-1]) + 1)
