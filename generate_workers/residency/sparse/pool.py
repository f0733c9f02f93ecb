"""Host pool of InfiniGen (Lee et al., 2024, section 4.4): assigns tokens to places (indices) in a sequence's limited KV
memory.

`infinigen_pooled` owns pools, and copies KV as they require. A user limits the number of tokens whose KV a sequence
keeps. When the pool is full, each new token replaces an evicted token, the victim. The K, V and partial key of a place
are overwritten together, so that they always belong to the same token. Victims differ between layers and kv heads,
because each layer and kv head selects its own keys.

The first tokens and the latest tokens are never victims. The paper's pool protects neither: with the FIFO rule, it
evicts the first tokens at once, and the quality of the output does not recover. The configured Eviction rule selects
the victim: the earliest token, the token that was selected longest ago, or the token that was selected least often.
For the last of these rules, each token has a counter of its selections. When a counter is full, all counters of the
same layer and kv head are halved. At the first eviction, many tokens of a prompt are equal by the rule, because they
were never selected. Of several equal tokens, the victim is the one with the lowest score in the current step.

Places are not ordered by position. Attention to selected keys does not need an order, because keys are stored after
RoPE. There are P places, and one more for the new token of a step (its own token). F and R are the numbers of first and
latest tokens that are never evicted. While the pool is not full, a token's place is its position. In a full pool the
places are

    [0, F)          the first F tokens
    [F, P - R + 1)  tokens that may be evicted
    [P - R + 1, P)  the latest R - 1 tokens before the own token, in a ring
    P               the own token, which is always selected in its step and has no eviction order yet

The keys that are always selected are therefore at both ends. `baton.modeling.forward.selection`, which selects keys,
requires this, because it always selects the keys at both ends. When a step ends, the earliest of the latest R - 1
tokens moves to the victim's place. The own token moves to the place that becomes free.

The pieces of a prompt arrive in any order, before any key is selected. With every Eviction rule, the first tokens and
the last tokens of a prompt are kept. Until the sequence's first step, the last tokens are stored in a ring after the
first tokens. The first step moves the latest tokens to the end.

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
"""Eviction order of tokens, as integers. The token with the lowest integer is evicted first. The high bits are a mark:
the count or the time of selections, according to the eviction rule. The low bits are the token's position, which orders
tokens with equal marks."""

MAX_TOKENS = 1 << 23
"""Maximum number of tokens of a sequence. In an eviction order, 23 bits store the position, and other bits a
counter."""
_MAX_COUNT = 255
_FULL_COUNT = 127
"""Default number of selections of a token at which all counters of the same layer and kv head are halved. With a much
lower value, counts are lost before they are useful. With a much higher value, old selections count as much as recent
selections (docs/infinigen.md)."""
_ALL = slice(None)


class Eviction(Enum):
    """Rule that decides which token is evicted when a new token is added to a full pool. Among tokens that are equal by
    the rule, the token with the lowest score in the step is evicted, or the earliest token if there are no scores."""

    COUNTER = "counter"
    """Evict the token that was selected least often. This is the paper's rule. It needs only a counter for each token,
    and no list of tokens in the order of their selection."""
    LRU = "lru"
    """Evict the token that was selected longest ago. Adding a token counts as selecting it. All tokens of a prompt
    count as added at the same time."""
    FIFO = "fifo"
    """Evict the token with the lowest position. The protected first tokens are not evicted."""


@dataclass(frozen=True)
class PoolSize:
    """Size and eviction rule of pools, as configured by a user."""

    num_tokens: int
    """Maximum number of tokens whose KV a sequence keeps in each layer that selects keys."""
    eviction: Eviction = Eviction.COUNTER


@dataclass(frozen=True)
class PoolLimit:
    """Limit on the number of tokens that a sequence keeps in a layer, and eviction rule. Raises ConfigError for a field
    out of range."""

    num_places: int
    """Maximum number of tokens whose KV a sequence keeps in each layer that selects keys."""
    eviction: Eviction = Eviction.COUNTER
    num_first: int = 4
    """Number of first tokens of a sequence that are never evicted (attention sinks)."""
    num_last: int = 16
    """Number of latest tokens of a sequence that are never evicted, including the new token."""
    most_count: int = _FULL_COUNT
    """Number of selections, from 2 to 255. When a token's counter reaches this number, all counters of the same layer
    and kv head are halved. Used only with Eviction COUNTER."""

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
        """Return the number of low bits of an eviction order that store the token's position. The high bits store how
        often the token was selected. With Eviction LRU, they store instead the position of the step that last selected
        the token, and an order has 64 bits instead of 32."""
        return 32 if self.eviction is Eviction.LRU else 23

    @property
    def order_bytes(self) -> int:
        return 8 if self.eviction is Eviction.LRU else 4

    @property
    def end_others(self) -> int:
        """Return the end of the range of places whose tokens may be evicted: [num_first, end_others). A place is an
        index in the sequence's KV memory. The places of the latest tokens follow this range."""
        return self.num_places - self.num_last + 1

    def late_place(self, position: int) -> int:
        """Return the place (index in the sequence's KV memory) that a full pool uses for the token at `position`. The
        token must be one of the latest tokens, which are never evicted."""
        return self.end_others + (position - self.end_others) % (self.num_last - 1)


class KvPool:
    """Pool of one sequence, in all layers that select keys: the place (index in the sequence's KV memory) of each kept
    token, and the order in which tokens are evicted."""

    def __init__(self, limit: PoolLimit, orders_LGP: Orders) -> None:
        """Make an empty pool. `orders_LGP`: memory for the eviction orders, filled with zeros, of which the pool takes
        ownership. Its size P is `limit.num_places` + 1: one more place is for the new token of a step."""
        self.limit = limit
        self._orders_LGP = orders_LGP
        """Eviction order of the token at each place (index in the sequence's KV memory). The token with the lowest
        value is evicted first. The value of the last place is not used."""

    def take_prompt(self, layer: int, tokens: TokenRange) -> tuple[Integers, Integers]:
        """Add `tokens` of a prompt to the pool. Pieces of a prompt may be added in any order. Return `(positions,
        places)`: the positions, in ascending order, of the tokens whose KV must be copied, and the place (index in the
        sequence's KV memory) to which each of them must be copied. The other tokens of the piece are not kept, because
        later tokens of the prompt use their places."""
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
        """Rearrange a prompt of `num_tokens` tokens for the first decode step. Return `(sources, targets)`: places
        (indices in the sequence's KV memory) from which and to which the caller must move tokens in all layers. A place
        may be both a source and a target, so the caller must read all sources before it writes a target. Both are empty
        if no token has to be moved."""
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
        """Add a step's new token, at `position` in the sequence, to the pool. Return None if the pool is not full. The
        token then stays at the place (index in the sequence's KV memory) that equals its position. If the pool is full,
        return the places of the evicted tokens (victims), `[L, G]`. The new token is then at the last place, whose
        index is `limit.num_places`.

        If the pool is full, the caller must move KV: first the token at `late_place(position)` to the victim's place,
        then the new token to `late_place(position)`. If `limit.num_last` is 1, no late place exists, and the caller
        must move the new token directly to the victim's place. `layers`: layers to change. `victims_LG`: result of
        `PoolNotes.victims`; None: the pool selects the victims by eviction order.
        """
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
        """Copy the places (indices in KV memory) and eviction orders of the tokens of `other`, which must have the same
        limit. The caller must copy the KV to the same places."""
        assert self.limit == other.limit
        self._orders_LGP[:] = other._orders_LGP


class KvPools:
    """Pools of all slots. Their memory is reserved at the start, and committed when it is first written."""

    def __init__(self, num_slots: int, num_layers: int, num_kv_heads: int, limit: PoolLimit) -> None:
        """Reserve memory for the pools of `num_slots` slots. Raises OSError when the address space cannot be
        reserved."""
        self.limit = limit
        self.lists = num_layers, num_kv_heads
        """Number of layers, and number of kv heads. A slot has one list of eviction orders, with one entry per place,
        for each layer and kv head."""
        num_bytes = num_layers * num_kv_heads * (limit.num_places + 1) * limit.order_bytes
        self.row_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        """Number of bytes of one slot's lists of eviction orders, in whole pages."""
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
        """Offset in bytes of each layer's eviction orders from the start of a slot's eviction orders."""

    def __getitem__(self, slot: int) -> KvPool:
        return self._rows[slot]

    def addresses(self, slots: Sequence[int | None]) -> Integers:
        """Return memory addresses, `[L, B]`: for each layer and each of `slots`, the address of the eviction orders of
        the layer's first kv head. The address is 0 if the slot is None."""
        is_there_B = np.array([slot is not None for slot in slots])
        firsts_B = self._start + np.array([slot or 0 for slot in slots]) * self.row_bytes
        found: Integers = (firsts_B + self._starts_L1) * is_there_B
        return found

    def clear(self, slot: int) -> None:
        """Free the memory of a slot's pool. Its sequence must have ended."""
        self._mapping.madvise(mmap.MADV_DONTNEED, slot * self.row_bytes, self.row_bytes)


class PoolNotes:
    """Records the keys that the sequences of a step select, in the sequences' pools, layer by layer. `victims` then
    returns the tokens to evict."""

    def __init__(self, pools: KvPools, slots: Sequence[int | None], positions: Sequence[int]) -> None:
        """`slots`, `positions`: slot of each sequence of a step, and position of its one new token. If a slot is None,
        the selections of its sequence are not recorded. Must not be used with Eviction FIFO. Requires the kernel
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
        """Record the keys `picks`, which the sequences of the step have selected in a layer. Must be called once per
        layer. `layer` is counted from the first layer that selects keys. `closeness_BGS`: for each kept key, the
        difference between its score and the best score (at most 0), as written by `PartialRows.select`."""
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
        """Return, for each sequence, the places of the tokens to evict (victims), `[L, G]`: one for each layer and kv
        head. A place is an index in the sequence's KV memory. The entry is None for a sequence whose slot is None. Must
        be called after all layers were recorded. The result for a sequence whose pool is not full must not be used."""
        victims_BLG = self._victims_BLG.numpy()
        return [each if is_heard else None for each, is_heard in zip(victims_BLG, self._is_heard, strict=True)]
