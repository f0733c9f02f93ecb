"""Fetches of cached KV from another node's prefix store as an alternative to computing it: the source and the cost.

The prefix index shows which store has the most leading blocks of a prompt. The planner predicts the duration of
fetching the missing blocks. `orchestrator.placement.predictions` compares it with computing them, and
`orchestrator.dispatch.fetching` runs the fetch. After a failed fetch, fetches between the same two stores pause, longer
with each failure. On the loop.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.planning.planner import ChainPlanner
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from orchestrator.membership.breakers import Breakers
from orchestrator.membership.members import Membership
from orchestrator.membership.view import Group, PrefillGroup
from orchestrator.placement.prefix_index import PrefixIndex

_LEAST_BOUND_S = 0.05
"""Minimum time limit of a fetch in seconds. Calls to busy processes may take that long."""
_MOST_HOLDERS = 8
"""Maximum number of stores that are compared as sources of a prompt's blocks: those with the most leading blocks."""
_PAUSES = Backoff(1.0, 60.0)
"""Pauses of fetches between two stores after failed fetches."""


@dataclass(frozen=True)
class StoreAccess:
    """Prefix store, and the worker that is called to read or fill it."""

    store: str
    """Name of the store."""
    group: str
    """Name of the worker's group."""
    endpoint: str
    """The worker's host:port."""

    @property
    def node(self) -> str:
        """Return the host part of the endpoint. It identifies the node, as far as addresses do."""
        return node_of(self.endpoint)


@dataclass(frozen=True)
class BlockFetch:
    """Planned copy of a prompt's leading blocks from one node's store to another node's store."""

    source: StoreAccess
    target: StoreAccess
    names: tuple[str, ...]
    """Names of the prompt's leading blocks, including those that the target already has."""
    num_held: int
    """Number of these blocks that the target already has, according to the prefix index."""
    block_tokens: int
    predicted_s: float
    saved_s: float = 0.0
    """Predicted seconds of computation that the fetch saves."""

    @property
    def num_tokens(self) -> int:
        """Return the number of leading tokens whose KV the target has after the fetch."""
        return len(self.names) * self.block_tokens

    @property
    def is_far(self) -> bool:
        """Return True if the two stores' workers have different hosts."""
        return self.source.node != self.target.node

    @property
    def within_s(self) -> float:
        """Return the time limit of the fetch in seconds: the time that computing would take, with a minimum."""
        return max(self.saved_s, _LEAST_BOUND_S)

    @property
    def pair(self) -> tuple[str, str]:
        """Return the names of the source store and the target store, by which pauses are recorded."""
        return self.source.store, self.target.store


class BlockSources:
    """Finds the stores from which blocks may be fetched. Owned by the chooser. Dispatch reports the results of fetches
    to it."""

    def __init__(self, members: Membership, index: PrefixIndex, planner: ChainPlanner, clock: Clock) -> None:
        self._pauses = Breakers(clock, 1, _PAUSES)
        """Circuit breakers of pairs (source store, target store), which pause fetches after a failure."""
        self._failed: set[tuple[str, str]] = set()
        """Pairs of stores that have a circuit breaker."""
        self._members = members
        self._index = index
        self._planner = planner

    def of(self, names: Sequence[str], block_tokens: int) -> "PromptSources":
        """Return the stores that have the most leading blocks of a prompt at present."""
        held = self._index.holders(names[0]) if names else ()
        return PromptSources(self._accesses() if held else {}, self._index, self, tuple(names), block_tokens)

    def admits(self, source: str, target: str) -> bool:
        """Return True if blocks may be fetched from `source` to `target` now, i.e. no pause is in force."""
        return self._pauses.admits((source, target))

    def began(self, fetch: BlockFetch) -> bool:
        """Record that a fetch begins. Return True if it is the first fetch after a pause; no other fetch may begin
        until it ends."""
        return self._pauses.of(fetch.pair).began()

    def succeeded(self, fetch: BlockFetch, *, is_probe: bool) -> None:
        """Record that a fetch succeeded. `is_probe` is the result of `began`."""
        self._pauses.of(fetch.pair).succeeded(is_probe=is_probe)

    def failed(self, fetch: BlockFetch) -> None:
        """Record that a fetch failed, and start a pause for its two stores. Removes pairs of stores that no longer
        exist."""
        stores = {group.prefix_store for group in self._members.present.groups}
        self._failed = {pair for pair in self._failed | {fetch.pair} if stores.issuperset(pair)}
        self._pauses.keep(self._failed)
        self._pauses.failed(fetch.pair)

    def fetch_s(self, num_tokens: int, source: StoreAccess, target: StoreAccess) -> float:
        """Return the predicted seconds of fetching the KV of `num_tokens` tokens."""
        return self._planner.fetch_s(num_tokens, is_far=source.node != target.node)

    def _accesses(self) -> dict[str, StoreAccess]:
        """Return each store with the worker that is called for it. The worker stays the same while the groups stay, so
        that it notices duplicate requests for the same blocks. Stores of drained groups are included."""
        found: dict[str, StoreAccess] = {}
        for group in self._members.present.groups:
            if group.prefix_store and group.ready and self._members.breakers.admits(group.incarnation):
                found.setdefault(group.prefix_store, StoreAccess(group.prefix_store, group.name, endpoint_of(group)))
        return found


class PromptSources:
    """Stores that had a prompt's leading blocks, according to the prefix index, when this object was made."""

    def __init__(
        self,
        accesses: Mapping[str, StoreAccess],
        index: PrefixIndex,
        sources: BlockSources,
        names: tuple[str, ...],
        block_tokens: int,
    ) -> None:
        self._accesses = accesses
        self._index = index
        self._sources = sources
        self._names = names
        self._block_tokens = block_tokens
        held = ((index.num_held(store, names), access) for store, access in accesses.items())
        self._holders = heapq.nlargest(_MOST_HOLDERS, (each for each in held if each[0]), key=lambda each: each[0])
        """Number of the prompt's leading blocks in each source store, and the store, for the stores with the most
        blocks."""
        self._found: dict[str, BlockFetch | None] = {}

    def into(self, store: str) -> BlockFetch | None:
        """Return the fetch into `store` from the store with the most leading blocks; None if no usable store has more
        of them than `store`. A store is not usable while fetches from it to `store` pause."""
        if store not in self._found:
            self._found[store] = self._best(store)
        return self._found[store]

    def _best(self, store: str) -> BlockFetch | None:
        target, num_held = self._accesses.get(store), self._index.num_held(store, self._names)
        if target is None:
            return None
        admits = self._sources.admits
        more = [(num, source) for num, source in self._holders if num > num_held and admits(source.store, store)]
        if not more:
            return None
        num, source = max(more, key=lambda each: (each[0], each[1].node == target.node))
        predicted_s = self._sources.fetch_s((num - num_held) * self._block_tokens, source, target)
        return BlockFetch(source, target, self._names[:num], num_held, self._block_tokens, predicted_s)


def endpoint_of(group: Group) -> str:
    """Return the endpoint of the worker that is called for the group's prefix store."""
    return group.endpoints[0] if isinstance(group, PrefillGroup) else group.endpoint


def node_of(endpoint: str) -> str:
    """Return the host part of an endpoint. It identifies the node, as far as addresses do."""
    return endpoint.rpartition(":")[0]
