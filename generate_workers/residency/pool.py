"""The host pool of InfiniGen (Lee et al., 2024, section 4.4): which place of a row's bounded memory holds which token.

Step 8 of a request's way (DESIGN.md, section 4). A user limits how many tokens of KV a row may keep. Once that many are
there, each new token takes the place of a victim, and K, V and partial key are overwritten there, so that a place means
the same token in all three. Which place that is differs between kv heads, for each has its own picks. The first tokens
and the latest are never victims: the paper's pool protects neither, and its FIFO loses the first tokens at once, from
which its quality does not recover. Victims are, by Eviction, the token that came first, the one that was picked longest
ago, or the one that was picked least often, by counters that are all halved when one of them is full.

What lies in places is in no order of positions; attention with picks asks for none, since keys are stored after RoPE.

How a policy that picks keys runs on a pool, a KvPool for each slot and layer:
- memory and partial keys have `num_places + 1` places. A new token's K and V land in the last one, outside the pool,
  as `append` wants it: a row's `num_keys` is that number, once the pool is full;
- keys are scored, and picked, by place: the partial keys' indices are places. `first` and `latest` are the places of
  the tokens that are always picked, the last place that of the own token. `pick` notes what was picked;
- after the layer, `append` says where each kv head's K, V and partial key of the new token go: they are copied there;
- pushed KV is written to `PoolLimit.prompt_places`; what has no place is dropped as it comes, in whatever order, so
  that a prompt never takes more than the limit. Before the first step, `fill` tells the pool how long the prompt was.
  A prompt that is prefilled locally attends to itself, and is put into places when it is done.

G kv heads, P places, K picks at most, T tokens.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError
from baton.types import TokenRange

Places = NDArray[np.int32]

NOWHERE = -1
"""The place of a token that is not kept, and the position in a place that holds none."""
_MARK_BITS = 32
"""Of an order, below the mark: the position, by which equal marks are told apart."""


class Eviction(Enum):
    """Whose place a new token takes; among equals, that of the earliest token."""

    FIFO = "fifo"
    """The token that came first."""
    LRU = "lru"
    """The one that was picked longest ago; to come counts as to be picked."""
    COUNTER = "counter"
    """The one that was picked least often: the paper's choice, for it keeps no list."""


@dataclass(frozen=True)
class PoolLimit:
    """How much of a row's KV is kept in a layer, and who goes."""

    num_places: int
    """Tokens."""
    eviction: Eviction = Eviction.COUNTER
    num_first: int = 4
    """First tokens of the sequence that stay for good: attention sinks."""
    num_last: int = 16
    """Latest tokens that stay, a new one included."""
    most_count: int = 255
    """COUNTER: a counter that comes to this makes all of its kv head's counters half of what they are."""

    def __post_init__(self) -> None:
        """Raises ConfigError that names the first field that is out of range."""
        if self.num_first < 0:
            raise ConfigError(f"num_first = {self.num_first} is out of range: use 0 or more")
        if self.num_last < 1:
            raise ConfigError(f"num_last = {self.num_last} is out of range: a new token must stay, use 1 or more")
        if self.num_places < self.num_first + self.num_last:
            kept = f"num_first + num_last = {self.num_first + self.num_last} tokens"
            raise ConfigError(f"num_places = {self.num_places} holds less than {kept}: raise it to that, or lower them")
        if self.most_count < 2:
            raise ConfigError(f"most_count = {self.most_count} is out of range: half of it must count, use 2 or more")

    @classmethod
    def within(cls, num_bytes: int, place_bytes: int, eviction: Eviction = Eviction.COUNTER) -> "PoolLimit":
        """As many places as `num_bytes` hold, at `place_bytes` for a token's K, V and partial keys in a layer. Raises
        ConfigError when these are too few."""
        return cls(num_bytes // place_bytes, eviction)

    def prompt_places(self, tokens: TokenRange, num_tokens: int) -> Places:
        """Where `tokens` of a prompt of `num_tokens` go, for all kv heads, `[T]`; NOWHERE: not kept. Of a prompt
        nothing was picked yet, so every Eviction keeps its first tokens and its last."""
        positions_T = np.arange(tokens.start, tokens.end, dtype=np.int32)
        others = self.num_places - self.num_first
        places_T = np.where(
            positions_T < self.num_first, positions_T, self.num_first + (positions_T - self.num_first) % others
        )
        is_kept_T = (positions_T < self.num_first) | (positions_T >= num_tokens - others)
        return np.where(is_kept_T, places_T, NOWHERE).astype(np.int32)


class KvPool:
    """What one layer of one row keeps. Owned by whoever owns the row; not thread-safe."""

    def __init__(self, num_kv_heads: int, limit: PoolLimit) -> None:
        """Nothing is kept yet."""
        self.limit = limit
        self.num_tokens = 0
        """That came so far: the next one's position."""
        shape = (num_kv_heads, limit.num_places)
        self.positions_GP: Places = np.full(shape, NOWHERE, np.int32)
        """Of the token in each place. To be read only."""
        self._orders_GP = np.zeros(shape, np.int64)
        """Of two tokens, the one with the less goes first."""
        self._latest_GR: Places = np.zeros((num_kv_heads, limit.num_last), np.int32)
        """The places of the latest tokens: that of position p in column p modulo R."""

    @property
    def num_kept(self) -> int:
        """Tokens in places, the same number for each kv head: those in places [0, num_kept)."""
        return min(self.num_tokens, self.limit.num_places)

    @property
    def first(self) -> range:
        """The places of the first tokens, which stay."""
        return range(min(self.limit.num_first, self.num_tokens))

    def latest(self) -> Places:
        """The places of the latest `num_last` tokens, or of as many as there are: `[G, R]`, in no order."""
        return self._latest_GR[:, : self.num_tokens].copy()

    def fill(self, num_tokens: int) -> None:
        """The prompt is there, `num_tokens` of it, each in its `PoolLimit.prompt_places`; nothing was before."""
        assert self.num_tokens == 0, "the pool holds another prompt"
        places_T = self.limit.prompt_places(TokenRange(0, num_tokens), num_tokens)
        kept_K = np.flatnonzero(places_T != NOWHERE)
        self.positions_GP[:, places_T[kept_K]] = kept_K
        self._orders_GP[:, places_T[kept_K]] = self._orders(self._came(kept_K), kept_K)
        recent_R = np.arange(max(num_tokens - self.limit.num_last, 0), num_tokens)
        self._latest_GR[:, recent_R % self.limit.num_last] = places_T[recent_R]
        self.num_tokens = num_tokens

    def pick(self, places_GK: Places, num_G: Places) -> None:
        """The next token attends to these places, for each kv head the first `num_G` of its list, none twice. Called
        before that token's `append`."""
        if self.limit.eviction is Eviction.FIFO:
            return
        for orders_P, places_K, num in zip(self._orders_GP, places_GK, num_G, strict=True):
            picked = places_K[:num]
            if self.limit.eviction is Eviction.LRU:
                positions = orders_P[picked] & ((1 << _MARK_BITS) - 1)
                orders_P[picked] = self._orders(np.int64(self.num_tokens), positions)
            else:
                orders_P[picked] += 1 << _MARK_BITS
                self._halve_if_full(orders_P)

    def append(self) -> Places:
        """The next token has come: its place for each kv head, `[G]`; whoever was there is gone."""
        position, limit = self.num_tokens, self.limit
        num_heads = len(self.positions_GP)
        heads_G = np.arange(num_heads)
        has_room = position < limit.num_places
        places_G = np.full(num_heads, position, np.int32) if has_room else self._victims()
        self.positions_GP[heads_G, places_G] = position
        self._orders_GP[heads_G, places_G] = self._orders(self._came(np.int64(position)), np.int64(position))
        self._latest_GR[:, position % limit.num_last] = places_G
        self.num_tokens += 1
        return places_G

    def copy_from(self, other: "KvPool") -> None:
        """Becomes what another pool of the same limit is: its row's memory was copied, place by place."""
        assert self.limit == other.limit
        self.num_tokens = other.num_tokens
        self.positions_GP[:] = other.positions_GP
        self._orders_GP[:] = other._orders_GP
        self._latest_GR[:] = other._latest_GR

    def clear(self) -> None:
        """The row has ended: nothing is kept."""
        self.num_tokens = 0
        self.positions_GP[:] = NOWHERE

    def _victims(self) -> Places:
        """Of a full pool; the oldest of the latest tokens may go, for the new one is the latest."""
        orders_GP = self._orders_GP.copy()
        orders_GP[:, : self.limit.num_first] = np.iinfo(np.int64).max
        stay_R = np.arange(self.num_tokens - self.limit.num_last + 1, self.num_tokens) % self.limit.num_last
        np.put_along_axis(orders_GP, self._latest_GR[:, stay_R].astype(np.int64), np.iinfo(np.int64).max, axis=1)
        victims_G: Places = orders_GP.argmin(axis=1).astype(np.int32)
        return victims_G

    def _came(self, positions: NDArray[np.int64] | np.int64) -> NDArray[np.int64] | np.int64:
        """The marks of tokens as they come."""
        return positions if self.limit.eviction is Eviction.LRU else positions * 0

    def _orders(
        self, marks: NDArray[np.int64] | np.int64, positions: NDArray[np.int64] | np.int64
    ) -> NDArray[np.int64] | np.int64:
        return (marks << _MARK_BITS) | positions

    def _halve_if_full(self, orders_P: NDArray[np.int64]) -> None:
        counts_P = orders_P >> _MARK_BITS
        if counts_P[: self.num_kept].max(initial=0) >= self.limit.most_count:
            orders_P[:] = self._orders(counts_P // 2, orders_P & ((1 << _MARK_BITS) - 1))
