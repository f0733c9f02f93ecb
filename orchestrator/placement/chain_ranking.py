"""Finds the cheapest chain for a generation group without comparing all chains for each group.

The cost of a chain is the sum of a term of the chain alone, a term of the generation group alone, and the transfer of
KV. The transfer depends only on the number of tokens missing on the group's node, on the duration of the chain, and on
whether one of its ranks is on the group's node. So among chains with the same duration and the same nearness, only the
one with the least cost alone can be the cheapest. These few chains are compared once for each number of missing tokens.
The time to select among all combinations of groups is then linear in the number of groups, unless almost every node has
a different part of the prompt cached.

Made by `orchestrator.placement.predictions` for one moment. Pure.
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
"""Number of decimals to which seconds are compared. Chains that wait for the same link differ only by rounding
errors."""
_Rank = tuple[float, int, bool]
"""Sort key of a chain: cost in seconds, then, for ties, the group's number in the view and whether a fetch precedes."""


@dataclass(frozen=True)
class GroupChain:
    """Prompt's chain in one prefill group at one moment, independent of the generation group that receives its KV."""

    group: PrefillGroup
    place: int
    """Number of the group in the cluster view. On ties the chain with the smallest number is selected."""
    chain: ChainPlan
    fetch: BlockFetch | None = None
    """Cached KV that is first fetched to the chain's node. The chain starts after it. None if there is no fetch."""
    without_fetch: "GroupChain | None" = None
    """Chain in the same group without the fetch; None if this chain has no fetch."""

    @property
    def queue_s(self) -> float:
        """Return the predicted seconds for which the chain waits for other jobs, without the time of its fetch."""
        return max(self._own_s - self.chain.ttft_s - self.fetch_s, 0.0)

    @property
    def others_s(self) -> float:
        """Return the predicted delay of other prompts due to the chain, in seconds."""
        return self.chain.cost_s - self._own_s

    @property
    def fetch_s(self) -> float:
        """Return the predicted seconds of the fetch; 0 if there is no fetch."""
        return 0.0 if self.fetch is None else self.fetch.predicted_s

    @cached_property
    def alone_s(self) -> float:
        """Return the predicted cost of the chain without the transfer of KV, in seconds: to its own prompt and to
        others."""
        return self.queue_s + self.chain.ttft_s + self.fetch_s + self.others_s

    @property
    def _own_s(self) -> float:
        return self.chain.choice.predicted_s or 0.0

    def rank(self, transfer_s: float = 0.0) -> _Rank:
        """Return the sort key of the chain if its transfer of KV takes `transfer_s` seconds. The chain with the
        smallest key is selected."""
        return round(self.alone_s + transfer_s, _DIGITS), self.place, self.fetch is not None


class ChainRanking:
    """Chains of one prompt for all generation groups with the same KV layout."""

    def __init__(self, planner: ChainPlanner, chains: Sequence[GroupChain]) -> None:
        self._planner = planner
        self._fetching = [chain for chain in chains if chain.fetch is not None]
        by_node: defaultdict[str, list[GroupChain]] = defaultdict(list)
        for chain in chains:
            for node in {*map(node_of, chain.group.endpoints)}:
                by_node[node].append(chain)
        self._ahead: dict[str | None, list[GroupChain]] = {node: _ahead(found) for node, found in by_node.items()}
        """Chains that can be the cheapest, in ascending cost, by a node that has one of their ranks. The key None has
        the chains that can be the cheapest if no rank is on the node."""
        self._ahead[None] = _ahead(chains)
        self._found: dict[Hashable, tuple[_Rank, GroupChain] | None] = {}
        """Cached results of `_least`, by number of missing tokens and node."""

    def best(self, num_missing: int, node: str) -> GroupChain | None:
        """Return the chain with the least cost for a generation group on this node; None if there are no chains.

        `num_missing` is the number of tokens whose KV the node does not have. On ties, the chain of the first group is
        returned, without a fetch if possible.
        """
        nearby = self._least(num_missing, node) if node in self._ahead else None
        # a chain near this node is overpriced in the second result, but the first has its true cost
        found = [each for each in (nearby, self._least(num_missing, None)) if each is not None]
        return min(found, key=lambda each: each[0])[1] if found else None

    def passes_over_fetch(self, num_missing: int) -> bool:
        """Return True if some chain could start with a fetch but is cheaper without it."""
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
