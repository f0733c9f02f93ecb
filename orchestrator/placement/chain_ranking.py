"""Finds the cheapest chain of prefill ranks for each generation group, without comparing all chains for each group.

The cost of serving a prompt by a chain and a generation group is the sum of three terms. The first term depends only on
the chain, the second only on the generation group. The third is the transfer of KV. It depends only on three values:
the number of tokens whose KV is missing on the generation group's node, the duration of the chain, and whether one of
the chain's ranks is on that node.

If two chains have the same duration, and either both or neither have a rank on the node, their third terms are equal.
Of all such chains, only the one with the smallest first term is a candidate. These few candidates are compared once for
each number of missing tokens. So the time to select among all combinations of groups is linear in the number of groups,
unless almost every node has a different part of the prompt cached.

Created by `orchestrator.placement.predictions` from the state of the cluster at one moment, and not updated later. Does
no I/O.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.planning.planner import ChainPlanner
from baton.planning.terms import transfer_s
from orchestrator.membership.view import PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch, node_of
from orchestrator.placement.chain_width import ChainPlan

_DIGITS = 9
"""Number of decimals to which costs in seconds are rounded before they are compared. Chains with the same cost may
differ by rounding errors."""
_Rank = tuple[float, int, bool]
"""Sort key of a chain. It has three values: the chain's cost in seconds, the position of its group in the cluster view,
and True if the chain starts with a fetch. Chains are compared by the first value in which they differ."""


@dataclass(frozen=True)
class GroupChain:
    """Chain of ranks in one prefill group that could prefill a prompt now. The generation group that receives the KV is
    not selected yet."""

    group: PrefillGroup
    place: int
    """Position of the group in the cluster view. Of chains with equal costs, the one with the lowest position is
    selected."""
    chain: ChainPlan
    fetch: BlockFetch | None = None
    """Fetch of cached KV to the chain's node, which must end before the chain starts. None if no KV is fetched."""
    without_fetch: "GroupChain | None" = None
    """Alternative chain in the same group that computes the KV instead of fetching it. None if this chain has no
    fetch."""

    @property
    def queue_s(self) -> float:
        """Return the predicted time in seconds that the chain waits for other jobs. The time of its own fetch is not
        included."""
        return max(self._own_s - self.chain.ttft_s - self.fetch_s, 0.0)

    @property
    def others_s(self) -> float:
        """Return the predicted delay, in seconds, that the chain causes to other prompts."""
        return self.chain.cost_s - self._own_s

    @property
    def fetch_s(self) -> float:
        """Return the predicted duration of the fetch of cached KV in seconds; 0 if there is no fetch."""
        return 0.0 if self.fetch is None else self.fetch.predicted_s

    @cached_property
    def alone_s(self) -> float:
        """Return the predicted cost of the chain in seconds, without the transfer of KV. The cost is the time to the
        first token of the chain's own prompt, plus the delay that the chain causes to other prompts."""
        return self.queue_s + self.chain.ttft_s + self.fetch_s + self.others_s

    @property
    def _own_s(self) -> float:
        return self.chain.choice.predicted_s or 0.0

    def rank(self, transfer_s: float = 0.0) -> _Rank:
        """Return the sort key of the chain, given that its transfer of KV takes `transfer_s` seconds. The chain with
        the smallest key is selected."""
        return round(self.alone_s + transfer_s, _DIGITS), self.place, self.fetch is not None


class ChainRanking:
    """Compares the chains of one prompt for all generation groups that accept the same KV layout."""

    def __init__(self, planner: ChainPlanner, chains: Sequence[GroupChain]) -> None:
        self._planner = planner
        self._fetching = [chain for chain in chains if chain.fetch is not None]
        by_node: defaultdict[str, list[GroupChain]] = defaultdict(list)
        for chain in chains:
            for node in {*map(node_of, chain.group.endpoints)}:
                by_node[node].append(chain)
        self._ahead: dict[str | None, list[GroupChain]] = {node: _ahead(found) for node, found in by_node.items()}
        """Candidates for the cheapest chain, in ascending cost. The key is a node (a host name): its candidates are
        chains that have a rank on this node. The key None has candidates from all chains, for any node."""
        self._ahead[None] = _ahead(chains)
        self._found: dict[Hashable, tuple[_Rank, GroupChain] | None] = {}
        """Cached results of `_least`: the cheapest chain and its sort key, or None if no chain exists. The key is the
        number of missing tokens and the node."""

    def best(self, num_missing: int, node: str) -> GroupChain | None:
        """Return the cheapest chain for a generation group on the node `node` (a host name); None if there are no
        chains.

        `num_missing` is the number of tokens whose KV the node does not have. If costs are equal, the group that comes
        first in the cluster view is selected. Within this group, a chain without a fetch is preferred.
        """
        nearby = self._least(num_missing, node) if node in self._ahead else None
        # a chain near this node is overpriced in the second result, but the first has its true cost
        found = [each for each in (nearby, self._least(num_missing, None)) if each is not None]
        return min(found, key=lambda each: each[0])[1] if found else None

    def passes_over_fetch(self, num_missing: int) -> bool:
        """Return True if at least one chain could start with a fetch of cached KV but is predicted to be cheaper
        without the fetch. `num_missing` is the number of tokens whose KV the generation group's node does not have."""
        return any(
            self._rank(chain.without_fetch, num_missing) < self._rank(chain, num_missing)
            for chain in self._fetching
            if chain.without_fetch is not None
        )

    def _least(self, num_missing: int, node: str | None) -> tuple[_Rank, GroupChain] | None:
        """Return the cheapest chain with a rank on that node. If `node` is None, return the cheapest of all chains,
        assuming that no rank is on the generation group's node."""
        key = num_missing, node
        if key not in self._found:
            best, least = None, (math.inf, 0, False)
            for chain in self._ahead[node]:
                if chain.rank() > least:
                    break  # all later chains cost more even without their transfer
                rank = self._rank(chain, num_missing, node)
                if rank < least:
                    best, least = chain, rank
            self._found[key] = None if best is None else (least, best)
        return self._found[key]

    def _rank(self, chain: GroupChain, num_missing: int, node: str | None = None) -> _Rank:
        return chain.rank(transfer_s(self._planner, num_missing, chain.chain.ttft_s, is_elsewhere=node is None))


def _ahead(chains: Iterable[GroupChain]) -> list[GroupChain]:
    """Return, in ascending cost, the cheapest chain for each duration of computation."""
    ahead: dict[float, GroupChain] = {}
    for chain in sorted(chains, key=GroupChain.rank):
        ahead.setdefault(chain.chain.ttft_s, chain)
    return list(ahead.values())
