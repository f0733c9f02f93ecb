"""Finds the cheapest chain for a generation group without comparing all chains for each group.

What a chain costs has three parts: one of the chain alone, one of the generation group alone, and the transfer of KV.
The transfer depends on how many tokens the group's node lacks, on how long the chain computes, and on whether one of
its ranks is on the group's node. So of chains that compute equally long and are equally near, only the one that costs
least alone can win, and these few are compared once for each number of lacking tokens. A choice among all pairs of
groups takes as long as there are groups, unless nearly every node has another part of the prompt.

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
"""Decimals to which seconds are compared, because chains that wait for the same link cost the same but for rounding."""
_Rank = tuple[float, int, bool]
"""Seconds, then what decides between equals: a group's place among all, and whether its chain begins with a fetch."""


@dataclass(frozen=True)
class GroupChain:
    """A prompt's chain in one prefill group at one moment, apart from the generation group that takes its KV."""

    group: PrefillGroup
    place: int
    """The group's number in the view: of equal chains the first is taken."""
    chain: ChainPlan
    fetch: BlockFetch | None = None
    """Cached KV that is fetched to the chain's node before, and behind which the chain begins; None if none is."""
    without_fetch: "GroupChain | None" = None
    """The same group's chain without the fetch; None if there is no fetch."""

    @property
    def queue_s(self) -> float:
        """Return the predicted seconds in which others are served before the chain, and not during the fetch."""
        return max(self._own_s - self.chain.ttft_s - self.fetch_s, 0.0)

    @property
    def others_s(self) -> float:
        """Return the predicted seconds that the chain costs other prompts."""
        return self.chain.cost_s - self._own_s

    @property
    def fetch_s(self) -> float:
        """Return the predicted seconds of the fetch; 0 without one."""
        return 0.0 if self.fetch is None else self.fetch.predicted_s

    @cached_property
    def alone_s(self) -> float:
        """Return the predicted seconds that the chain costs, to its own prompt and others, until it has computed."""
        return self.queue_s + self.chain.ttft_s + self.fetch_s + self.others_s

    @property
    def _own_s(self) -> float:
        return self.chain.choice.predicted_s or 0.0

    def rank(self, transfer_s: float = 0.0) -> _Rank:
        """Return the chain's cost with a transfer of so many seconds, as a key: the chain with the least is chosen."""
        return round(self.alone_s + transfer_s, _DIGITS), self.place, self.fetch is not None


class ChainRanking:
    """The chains of one prompt for generation groups of one layout of KV."""

    def __init__(self, planner: ChainPlanner, chains: Sequence[GroupChain]) -> None:
        self._planner = planner
        self._fetching = [chain for chain in chains if chain.fetch is not None]
        by_node: defaultdict[str, list[GroupChain]] = defaultdict(list)
        for chain in chains:
            for node in {*map(node_of, chain.group.endpoints)}:
                by_node[node].append(chain)
        self._ahead: dict[str | None, list[GroupChain]] = {node: _ahead(found) for node, found in by_node.items()}
        """Chains that may win, the cheapest first, by a node that has a rank of theirs; for None among all chains."""
        self._ahead[None] = _ahead(chains)
        self._found: dict[Hashable, tuple[_Rank, GroupChain] | None] = {}
        """The cheapest chains that were asked for, by tokens and node."""

    def best(self, num_missing: int, node: str) -> GroupChain | None:
        """Return the chain of least cost for a generation group on this node, which lacks the KV of so many tokens;
        None without chains. Of equals the first group's, and of its chains the one without a fetch."""
        nearby = self._least(num_missing, node) if node in self._ahead else None
        # what any chain costs from another node: too much for one on this node, which is then found nearby
        found = [each for each in (nearby, self._least(num_missing, None)) if each is not None]
        return min(found, key=lambda each: each[0])[1] if found else None

    def passes_over_fetch(self, num_missing: int) -> bool:
        """Return whether some chain could begin with a fetch, and costs no more without it."""
        return any(
            self._rank(chain.without_fetch, num_missing) < self._rank(chain, num_missing)
            for chain in self._fetching
            if chain.without_fetch is not None
        )

    def _least(self, num_missing: int, node: str | None) -> tuple[_Rank, GroupChain] | None:
        """Return the cheapest of the chains with a rank on that node, or, for None, of all as seen from elsewhere."""
        key = num_missing, node
        if key not in self._found:
            best, least = None, (math.inf, 0, False)
            for chain in self._ahead[node]:
                if chain.rank() > least:
                    break  # so are all that follow, whose transfers take time besides
                rank = self._rank(chain, num_missing, node)
                if rank < least:
                    best, least = chain, rank
            self._found[key] = None if best is None else (least, best)
        return self._found[key]

    def _rank(self, chain: GroupChain, num_missing: int, node: str | None = None) -> _Rank:
        return chain.rank(transfer_s(self._planner, num_missing, chain.chain.ttft_s, is_elsewhere=node is None))


def _ahead(chains: Iterable[GroupChain]) -> list[GroupChain]:
    """Return the cheapest of the chains that compute equally long, for each such time; the cheapest of all first."""
    ahead: dict[float, GroupChain] = {}
    for chain in sorted(chains, key=GroupChain.rank):
        ahead.setdefault(chain.chain.ttft_s, chain)
    return list(ahead.values())
