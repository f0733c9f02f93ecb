"""Host pool of InfiniGen (Lee et al., 2024, section 4.4): assigns tokens to places in a sequence's limited memory.

`infinigen_pooled` owns pools and copies KV as they require. A user limits the number of tokens whose KV a sequence may
keep. When the pool is full, each new token replaces an evicted token, the victim. K, V and partial key are overwritten
together, so that a place holds all three of the same token. Victims differ between layers and kv heads, because each
layer and kv head selects its own keys.

The first tokens and the latest are never victims. The paper's pool protects neither; its FIFO rule evicts the first
tokens at once, and its quality does not recover from this. Depending on Eviction, the victim is the earliest token, the
token that was selected longest ago, or the token that was selected least often. When a counter is full, all counters of
the same layer and kv head are halved. Much of a prompt was never selected when the first eviction is necessary: among
equal tokens, the victim is the token with the lowest score in the current step.

Places are not ordered by position. Attention with selected keys does not need that, since keys are stored after RoPE.
There are P places, and one more for the new token of a step (its own token). F and R are the numbers of first and
latest tokens that are never evicted. While the pool is not full, a token's place is its position. In a full pool the
places are

    [0, F)          the first F tokens
    [F, P - R + 1)  tokens that may be evicted
    [P - R + 1, P)  the latest R - 1 tokens before the own one; the next one overwrites the earliest of them
    P               the own token, which is always selected in its step and has no mark yet

So keys that are always selected are at both ends, as a Selection requires. A token that is no longer among the latest
moves to the victim's place, and the own token moves to the place that this token had.

The pieces of a prompt arrive in any order, before any key is selected. With each Eviction, a prompt's first tokens and
its last tokens are kept. The last tokens are stored in a ring after the first tokens until the sequence's first step,
when the latest tokens are moved to the end.

A pool handles places, not memory: it returns the places that the caller must copy. Owned by its slot; not thread-safe.

Shape suffixes: L layers that select, G kv heads, P places, B sequences, T tokens.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.types import TokenRange

Integers = NDArray[np.int64]
Orders = NDArray[np.signedinteger[Any]]
"""Eviction order of tokens, as integers: a mark in the high bits, and in the bits below it the position, which orders
tokens with equal marks."""

MAX_TOKENS = 1 << 23
"""Maximum number of tokens of a sequence: positions have 23 bits, next to a counter."""
_MAX_COUNT = 255
_FULL_COUNT = 127
"""Count at which counters are halved. With a much lower value, counts are lost before they are useful. With a much
higher value, old selections count as much as recent selections (docs/infinigen.md)."""
_ALL = slice(None)


class Eviction(Enum):
    """Rule that decides which token a new token evicts. Among equal tokens, the one with the lowest score in the step
    is evicted or, if there are no scores, the earliest."""

    COUNTER = "counter"
    """Evict the token that was selected least often: the paper's choice, because it needs no list."""
    LRU = "lru"
    """Evict the token that was selected longest ago. A token counts as selected when it is added; all tokens of a
    prompt are added at the same time."""
    FIFO = "fifo"
    """Evict the token with the lowest position."""


@dataclass(frozen=True)
class PoolSize:
    """Size and eviction of pools, as a user configures them."""

    num_tokens: int
    """Number of tokens whose KV a sequence keeps in each layer that selects keys."""
    eviction: Eviction = Eviction.COUNTER


@dataclass(frozen=True)
class PoolLimit:
    """Limit on a sequence's KV in a layer, and eviction rule. Raises ConfigError for a field out of range."""

    num_places: int
    """Number of tokens that a layer keeps."""
    eviction: Eviction = Eviction.COUNTER
    num_first: int = 4
    """Number of first tokens of the sequence that are never evicted: attention sinks."""
    num_last: int = 16
    """Number of latest tokens that are never evicted, including the new one."""
    most_count: int = _FULL_COUNT
    """Count at which all counters of a layer and kv head are halved; used only with Eviction COUNTER."""

    def __post_init__(self) -> None:
        if self.num_first < 0:
            raise ConfigError(f"num_first = {self.num_first} is out of range: use 0 or more")
        if self.num_last < 1:
            raise ConfigError(f"num_last = {self.num_last} is out of range: a new token must stay, use 1 or more")
        if self.num_places < self.num_first + self.num_last:
            always = f"the {self.num_first} first and the {self.num_last} latest, which always stay"
            least = self.num_first + self.num_last
            raise ConfigError(f"pool_tokens = {self.num_places} has no room for {always}: use {least} or more, or 0")
        if not 2 <= self.most_count <= _MAX_COUNT:
            raise ConfigError(f"most_count = {self.most_count} is out of range: use 2, of which half counts, to 255")

    @property
    def position_bits(self) -> int:
        """Return the number of bits of a position in an eviction order. With LRU, marks are positions as well."""
        return 32 if self.eviction is Eviction.LRU else 23

    @property
    def order_bytes(self) -> int:
        return 8 if self.eviction is Eviction.LRU else 4

    @property
    def end_others(self) -> int:
        """Return the end of [num_first, end_others), the places whose tokens may be evicted. The places of the latest
        tokens follow."""
        return self.num_places - self.num_last + 1

    def late_place(self, position: int) -> int:
        """Return the place in a full pool of one of the latest tokens, which has this position."""
        return self.end_others + (position - self.end_others) % (self.num_last - 1)


class KvPool:
    """Places and marks of one sequence's tokens, in all layers that select keys."""

    def __init__(self, limit: PoolLimit, orders_LGP: Orders) -> None:
        """Make an empty pool. `orders_LGP`: zeros, with one place more than the limit. The pool takes ownership."""
        self.limit = limit
        self._orders_LGP = orders_LGP
        """Eviction order of the token at each place. The token with the lowest order is evicted first. The order of the
        last place is not used."""

    def take_prompt(self, layer: int, tokens: TokenRange) -> tuple[Integers, Integers]:
        """Add `tokens` of a prompt, whose pieces may arrive in any order. Return `(positions, places)` of the tokens
        that must be copied, by ascending position. Other tokens are not kept, because later tokens have their
        places."""
        positions_T = np.arange(tokens.start, tokens.end)
        num_first, num_others = self.limit.num_first, self.limit.num_places - self.limit.num_first
        positions_K = positions_T[(positions_T < num_first) | (positions_T >= tokens.end - num_others)]
        behind_K = num_first + (positions_K - num_first) % num_others
        places_K = np.where(positions_K < num_first, positions_K, behind_K)
        is_latest_K = positions_K >= self._orders_LGP[layer, 0, places_K]
        positions_K, places_K = positions_K[is_latest_K], places_K[is_latest_K]
        self._orders_LGP[layer, :, places_K] = positions_K[:, None]
        return positions_K, places_K

    def arrange(self, num_tokens: int) -> tuple[Integers, Integers]:
        """Arrange a prompt of `num_tokens` tokens for the first decode step. Return `(sources, targets)`: the places
        from and to which tokens must be moved, all at once, in all layers."""
        limit = self.limit
        if num_tokens <= limit.num_places or limit.num_last == 1:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        latest_R = np.arange(num_tokens - limit.num_last + 1, num_tokens)
        sources_R = limit.num_first + (latest_R - limit.num_first) % (limit.num_places - limit.num_first)
        targets_R = np.array([limit.late_place(int(position)) for position in latest_R])
        sources = np.concatenate((sources_R, np.setdiff1d(targets_R, sources_R)))
        targets = np.concatenate((targets_R, np.setdiff1d(sources_R, targets_R)))
        self._orders_LGP[:, :, targets] = self._orders_LGP[:, :, sources]
        return sources, targets

    def append(self, position: int, layers: slice = _ALL, victims_LG: Integers | None = None) -> Integers | None:
        """Keep the next token (the own token), which is at place P, or at the place of its position while the pool is
        not full. Return None if it stays there, else the places of the victims, `[L, G]`. The caller must then move the
        token at `late_place` to the victim's place, and the own token to `late_place`. If the pool protects no latest
        token except the own token, the caller must move the own token to the victim's place. `victims_LG`: victims that
        PoolNotes found; None: no keys were scored."""
        limit, orders_LGP = self.limit, self._orders_LGP[layers]
        order = np.int64(position)
        if limit.eviction is Eviction.LRU:
            order |= order << limit.position_bits
        if position < limit.num_places:
            orders_LGP[:, :, position] = order
            return None
        orders_LGP[:, :, limit.num_places] = 0
        if victims_LG is None:
            victims_LG = orders_LGP[:, :, limit.num_first : limit.end_others].argmin(axis=2) + limit.num_first
        leaving_LG: Orders = np.broadcast_to(order, victims_LG.shape)
        if limit.num_last > 1:
            late = limit.late_place(position)
            leaving_LG = orders_LGP[:, :, late].copy()
            orders_LGP[:, :, late] = order
        np.put_along_axis(orders_LGP, victims_LG[:, :, None], leaving_LG[:, :, None], axis=2)
        return victims_LG

    def copy_from(self, other: "KvPool") -> None:
        """Copy the state of a pool with the same limit. The caller must copy the KV, place by place."""
        assert self.limit == other.limit
        self._orders_LGP[:] = other._orders_LGP


class KvPools:
    """Pools of all slots, in memory that is reserved at the start and committed as it is written."""

    def __init__(self, num_slots: int, num_layers: int, num_kv_heads: int, limit: PoolLimit) -> None:
        """Raise OSError when the address space cannot be reserved."""
        self.limit = limit
        self.lists = num_layers, num_kv_heads
        """Number of layers and number of kv heads. A slot has one list of eviction orders for each pair."""
        num_bytes = num_layers * num_kv_heads * (limit.num_places + 1) * limit.order_bytes
        self.row_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        """Bytes that one slot's orders take, in whole pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # pages of a shared mapping would not be freed
        self._mapping = mmap.mmap(-1, num_slots * self.row_bytes, flags=flags)
        with contextlib.suppress(OSError):  # a kernel built without huge pages refuses advice about them
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a page must not contain orders of two slots
        orders: Orders = np.frombuffer(self._mapping, np.dtype(f"int{8 * limit.order_bytes}"))
        row_size, list_size = self.row_bytes // limit.order_bytes, limit.num_places + 1
        rows_SX = orders.reshape(num_slots, row_size)[:, : math.prod(self.lists) * list_size]
        self._rows = [KvPool(limit, row_X.reshape(*self.lists, list_size)) for row_X in rows_SX]
        self._start = orders.ctypes.data
        self._starts_L1 = np.arange(num_layers)[:, None] * (num_kv_heads * list_size * limit.order_bytes)
        """Offset of each layer's lists in bytes, from a slot's first list."""

    def __getitem__(self, slot: int) -> KvPool:
        return self._rows[slot]

    def addresses(self, slots: Sequence[int | None]) -> Integers:
        """Return the addresses of the slots' lists of orders, `[L, B]`; 0 for a slot None."""
        is_there_B = np.array([slot is not None for slot in slots])
        firsts_B = self._start + np.array([slot or 0 for slot in slots]) * self.row_bytes
        found: Integers = (firsts_B + self._starts_L1) * is_there_B
        return found

    def clear(self, slot: int) -> None:
        """Free the memory of a slot's pool. Its sequence must have ended."""
        self._mapping.madvise(mmap.MADV_DONTNEED, slot * self.row_bytes, self.row_bytes)


class PoolNotes:
    """Records the keys that a step's sequences select in their pools, layer by layer, and finds the sequences'
    victims."""

    def __init__(self, pools: KvPools, slots: Sequence[int | None], positions: Sequence[int]) -> None:
        """`slots`, `positions`: slot and position of the new token of each sequence, which has one new token. Slot
        None: selections of this sequence are not recorded. Must not be used with FIFO. Requires the kernel
        `pool_notes`."""
        limit = pools.limit
        assert limit.eviction is not Eviction.FIFO, "it asks for nothing"
        self._limit = limit
        self._is_heard = [slot is not None for slot in slots]
        self._addresses_LB = torch.from_numpy(pools.addresses(slots))
        self._positions_B = torch.tensor(positions)
        self._victims_BLG = torch.zeros(len(slots), *pools.lists, dtype=torch.int64)
        native.load()

    def note(self, layer: int, picks: Picks, closeness_BGS: Tensor) -> None:
        """Record the selected keys of a layer. `layer` is counted from the first layer that selects keys. Call this
        once per layer. `closeness_BGS`: closeness of all kept keys, as `PartialRows.select` writes it."""
        limit = self._limit
        most_count = 0 if limit.eviction is Eviction.LRU else limit.most_count
        self._victims_BLG[:, layer] = native.operators().note_picks(
            picks.keys_BGK,
            picks.num_BG,
            closeness_BGS,
            (self._addresses_LB[layer], self._positions_B),
            (limit.num_places, limit.num_first, limit.end_others, limit.position_bits, most_count),
        )

    def victims(self) -> list[Integers | None]:
        """Return each sequence's victims as places, `[L, G]`, after all layers were recorded; None for a slot None.
        Results for sequences whose pool is not full are not valid."""
        victims_BLG = self._victims_BLG.numpy()
        return [each if is_heard else None for each, is_heard in zip(victims_BLG, self._is_heard, strict=True)]
