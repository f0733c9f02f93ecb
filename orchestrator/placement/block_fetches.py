"""Plans fetches of cached KV from another node's prefix store, as an alternative to computing the KV again.

The prefix index shows which store has the most leading blocks of a prompt. The planner predicts how long it takes to
fetch the missing blocks. `orchestrator.placement.options` compares this time with the time to compute the blocks,
and `orchestrator.dispatch.fetching` runs the fetch. After a failed fetch, no fetch between the same two stores is made
for a while. This pause grows with each failure. Runs on the event loop.
"""

import heapq
from dataclasses import dataclass

from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from orchestrator.membership.breakers import Breakers
from orchestrator.membership.members import Membership
from orchestrator.membership.view import Group, PrefillGroup
from orchestrator.placement.prefix_index import PrefixIndex

_LEAST_BOUND_S = 0.05
"""Minimum time limit of a fetch in seconds, because calls to busy processes may take this long."""
_MOST_HOLDERS = 8
"""Maximum number of stores that are considered as sources of a prompt's blocks. The stores with the most leading blocks
are considered."""
_PAUSES = Backoff(1.0, 60.0)
"""Increasing pauses of fetches between the same two stores after failed fetches."""


@dataclass(frozen=True)
class StoreAccess:
    """Prefix store of a node, with the worker that is called to read from it or to write to it."""

    store: str
    """Name of the prefix store."""
    group: str
    """Name of the group that the worker belongs to."""
    endpoint: str
    """Address (host:port) of the worker."""

    @property
    def node(self) -> str:
        """Return the host part of the endpoint. Workers with the same host are assumed to run on the same node."""
        return node_of(self.endpoint)


@dataclass(frozen=True)
class BlockFetch:
    """Planned copy of a prompt's leading blocks from one node's store to another node's store."""

    source: StoreAccess
    target: StoreAccess
    names: tuple[str, ...]
    """Names of the prompt's leading blocks that the target has after the fetch. Blocks that it already has are
    included."""
    num_held: int
    """Number of blocks in `names` that the target already has, according to the prefix index."""
    block_tokens: int
    predicted_s: float
    saved_s: float = 0.0
    """Predicted seconds that computing the missing blocks would take."""

    @property
    def num_tokens(self) -> int:
        """Return the number of leading tokens whose KV the target has after the fetch."""
        return len(self.names) * self.block_tokens

    @property
    def is_far(self) -> bool:
        """Return True if the workers of the source store and of the target store run on different hosts."""
        return self.source.node != self.target.node

    @property
    def within_s(self) -> float:
        """Return the time limit of the fetch in seconds. It is the time that computing the blocks would take, but at
        least 0.05 s."""
        return max(self.saved_s, _LEAST_BOUND_S)

    @property
    def pair(self) -> tuple[str, str]:
        """Return the names of the source store and the target store. `BlockSources` uses this pair as the key of the
        pause after a failure."""
        return self.source.store, self.target.store


class BlockSources:
    """Finds the prefix stores from which blocks may be fetched, and pauses fetches between two stores after a failure.
    Owned by the chooser. `orchestrator.dispatch` reports the result of each fetch."""

    def __init__(self, members: Membership, index: PrefixIndex, planner: ChainPlanner, clock: Clock) -> None:
        self.pauses = Breakers(clock, 1, _PAUSES)
        """Circuit breakers by pair (source store, target store). A breaker pauses fetches between its two stores after
        a failure. The first fetch after a pause is a probe: no other one begins until it ends."""
        self._failed: set[tuple[str, str]] = set()
        """Pairs (source store, target store) that have a circuit breaker because a fetch has failed."""
        self._members = members
        self.index = index
        self.planner = planner

    def failed(self, fetch: BlockFetch) -> None:
        """Record that a fetch failed, and pause fetches between its two stores. Also removes the records of stores that
        no longer exist."""
        stores = {group.prefix_store for group in self._members.present.groups}
        self._failed = {pair for pair in self._failed | {fetch.pair} if stores.issuperset(pair)}
        self.pauses.keep(self._failed)
        self.pauses.failed(fetch.pair)

    def accesses(self) -> dict[str, StoreAccess]:
        """Return each store with the worker that is called for it. The worker stays the same while the groups stay, so
        that it notices duplicate requests for the same blocks. Stores of drained groups are included."""
        found: dict[str, StoreAccess] = {}
        for group in self._members.present.groups:
            if group.prefix_store and group.ready and self._members.breakers.admits(group.incarnation):
                found.setdefault(group.prefix_store, StoreAccess(group.prefix_store, group.name, endpoint_of(group)))
        return found


class PromptSources:
    """Finds the prefix store from which a prompt's leading blocks can be fetched. Uses the prefix index as it was when
    this object was created."""

    def __init__(self, sources: BlockSources, blocks: PromptBlocks) -> None:
        self._sources = sources
        self._block_tokens = blocks.block_tokens
        self._names = names = blocks.cached(blocks.cached_tokens(len(blocks.names)))
        """Names of the prompt's blocks, except the block of its last token, which is always computed."""
        self._accesses = sources.accesses() if names and sources.index.holders(names[0]) else {}
        held = ((sources.index.num_held(store, names), access) for store, access in self._accesses.items())
        self._holders = heapq.nlargest(_MOST_HOLDERS, (each for each in held if each[0]), key=lambda each: each[0])
        """Possible source stores, those with the most blocks first. Each entry is the number of the prompt's leading
        blocks in the store, and the store."""

    def into(self, store: str) -> BlockFetch | None:
        """Return the planned fetch of blocks into `store` from the store that has the most leading blocks of the
        prompt. Return None if no other store has more of these blocks. Stores from which fetches into `store` are
        paused are ignored."""
        target, num_held = self._accesses.get(store), self._sources.index.num_held(store, self._names)
        if target is None:
            return None
        admits = self._sources.pauses.admits
        more = [(num, source) for num, source in self._holders if num > num_held and admits((source.store, store))]
        if not more:
            return None
        num, source = max(more, key=lambda each: (each[0], each[1].node == target.node))
        num_tokens = (num - num_held) * self._block_tokens
        predicted_s = self._sources.planner.fetch_s(num_tokens, is_far=source.node != target.node)
        return BlockFetch(source, target, self._names[:num], num_held, self._block_tokens, predicted_s)


def endpoint_of(group: Group) -> str:
    """Return the endpoint (host:port) of the worker that reads and fills the group's prefix store: rank 0 of a prefill
    group, or the generation worker."""
    return group.endpoints[0] if isinstance(group, PrefillGroup) else group.endpoint


def node_of(endpoint: str) -> str:
    """Return the host part of an endpoint (host:port). Workers with the same host are assumed to run on the same
    node."""
    return endpoint.rpartition(":")[0]
