"""Cached KV that an attempt may fetch from another node's prefix store instead of computing it: from where, at what
cost.

The prefix index says which store has most of a prompt's first blocks; the planner predicts what fetching the missing
ones takes. `orchestrator.placement.predictions` weighs that against computing them; `orchestrator.dispatch.fetching`
fetches. After a fetch that failed, a pair of stores gets a growing pause. On the loop.
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
"""Least time that a fetch is given, in seconds: calls of busy processes may take as long."""
_MOST_HOLDERS = 8
"""Stores that are compared as sources of one prompt's blocks: those with the most of them."""
_PAUSES = Backoff(1.0, 60.0)
"""Pauses of a pair of stores after fetches that failed."""


@dataclass(frozen=True)
class StoreAccess:
    """A prefix store, and the worker that the orchestrator asks to read or fill it."""

    store: str
    """Name of the store."""
    group: str
    """Name of the worker's group."""
    endpoint: str
    """The worker's host:port."""

    @property
    def node(self) -> str:
        """Return the host part of the endpoint, which identifies a node as far as addresses do."""
        return node_of(self.endpoint)


@dataclass(frozen=True)
class BlockFetch:
    """A prompt's first blocks, which are to be copied from one node's store to another's."""

    source: StoreAccess
    target: StoreAccess
    names: tuple[str, ...]
    """Names of the prompt's first blocks, those that the target has included."""
    num_held: int
    """How many of them the target has, as far as the index knows."""
    block_tokens: int
    predicted_s: float
    saved_s: float = 0.0
    """Predicted seconds of computing that the fetch saves."""

    @property
    def num_tokens(self) -> int:
        """Return the number of first tokens whose KV the target has after the fetch."""
        return len(self.names) * self.block_tokens

    @property
    def is_far(self) -> bool:
        """Return whether the stores' workers have different hosts."""
        return self.source.node != self.target.node

    @property
    def within_s(self) -> float:
        """Return the seconds after which the fetch is given up: as long as computing would take, so that a fetch which
        comes too late costs no more than that."""
        return max(self.saved_s, _LEAST_BOUND_S)

    @property
    def pair(self) -> tuple[str, str]:
        """Return the names of both stores, by which pauses are kept."""
        return self.source.store, self.target.store


class BlockSources:
    """Finds the stores from which blocks may be fetched. Owned by the chooser; dispatch says how fetches end."""

    def __init__(self, members: Membership, index: PrefixIndex, planner: ChainPlanner, clock: Clock) -> None:
        self._pauses = Breakers(clock, 1, _PAUSES)
        """Pauses of pairs of stores after failed fetches."""
        self._failed: set[tuple[str, str]] = set()
        """Pairs that have a breaker."""
        self._members = members
        self._index = index
        self._planner = planner

    def of(self, names: Sequence[str], block_tokens: int) -> "PromptSources":
        """Return the stores that have the most of a prompt's first blocks at present."""
        held = self._index.holders(names[0]) if names else ()
        return PromptSources(self._accesses() if held else {}, self._index, self, tuple(names), block_tokens)

    def admits(self, source: str, target: str) -> bool:
        """Return whether blocks may be fetched now from the one store into the other: no pause is in force."""
        return self._pauses.admits((source, target))

    def began(self, fetch: BlockFetch) -> bool:
        """Record that a fetch begins; return whether it is the first one after a pause, which no other may join."""
        return self._pauses.of(fetch.pair).began()

    def succeeded(self, fetch: BlockFetch, *, is_probe: bool) -> None:
        """Record that a fetch went well; `is_probe` is what `began` returned."""
        self._pauses.of(fetch.pair).succeeded(is_probe=is_probe)

    def failed(self, fetch: BlockFetch) -> None:
        """Record that a fetch failed, so that its pair of stores gets a pause. Forgets pairs whose stores are gone."""
        stores = {group.prefix_store for group in self._members.present.groups}
        self._failed = {pair for pair in self._failed | {fetch.pair} if stores.issuperset(pair)}
        self._pauses.keep(self._failed)
        self._pauses.failed(fetch.pair)

    def fetch_s(self, num_tokens: int, source: StoreAccess, target: StoreAccess) -> float:
        """Return the predicted seconds of fetching the KV of so many tokens."""
        return self._planner.fetch_s(num_tokens, is_far=source.node != target.node)

    def _accesses(self) -> dict[str, StoreAccess]:
        """Return each store with the worker that is asked for it: always the same one while the groups stay, so that it
        notices when the same blocks are asked for twice. Stores of drained groups are among them."""
        found: dict[str, StoreAccess] = {}
        for group in self._members.present.groups:
            if group.prefix_store and group.ready and self._members.breakers.admits(group.incarnation):
                found.setdefault(group.prefix_store, StoreAccess(group.prefix_store, group.name, endpoint_of(group)))
        return found


class PromptSources:
    """The stores that have a prompt's first blocks, as the index knew when this was made."""

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
        """The stores with the most blocks, and how many of the prompt's first blocks each has."""
        self._found: dict[str, BlockFetch | None] = {}

    def into(self, store: str) -> BlockFetch | None:
        """Return the fetch into `store` of as many of the blocks as any other store has; None where none has more of
        them than this one, or only stores from which fetching has just failed."""
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
    """Return the endpoint of the group's worker that is asked for the group's prefix store."""
    return group.endpoints[0] if isinstance(group, PrefillGroup) else group.endpoint


def node_of(endpoint: str) -> str:
    """Return the host part of an endpoint, which identifies a node as far as addresses do."""
    return endpoint.rpartition(":")[0]
