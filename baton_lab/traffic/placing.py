"""Fast assignment of simulated requests to groups. It compares groups as the orchestrator does, but considers only a
few candidates.

The orchestrator's own code (Chooser) examines every group. This takes milliseconds for hundreds of groups, and a
simulation assigns millions of requests. In the simulator, all groups of a role have the same hardware. Therefore the
cheapest prefill group is one of those that finish their work first, or the group that has cached the longest prefix of
the prompt. The cheapest generation group is one of those with the most free slots. Only these candidates are planned
(`orchestrator.placement.chain_width`) and compared. Does no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange
from baton_lab.study.terms import Batch, chain_terms
from baton_lab.traffic.fleet import Fleet, Member
from orchestrator.membership.prefill_queues import PrefillQueues
from orchestrator.placement.chain_width import ChainPlan, PromptChains
from orchestrator.placement.options import ALIKE_S
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.config import OrchestratorConfig

_NO_BATCH: Batch = (0.0, 0.0)
"""Batch of the generation group that is assumed when prefill groups are compared: (number of sequences, mean number of
tokens of a sequence). It is empty, because the generation group is chosen separately."""
SHORTLIST = 2
"""Maximum number of candidate groups of each role that are compared for a request."""


@dataclass(frozen=True)
class Asked:
    """Properties of a request that determine which groups can serve it."""

    number: int
    num_tokens: int
    """Number of prompt tokens."""
    num_output_tokens: int
    blocks: Sequence[int] = ()
    """Ids of the prompt's KV blocks, in order. Empty if the prompt shares no prefix with other prompts."""
    block_tokens: int = 512


@dataclass(frozen=True)
class Spot:
    """Groups that were chosen for a request, and the plan by which the ranks of the prefill group compute the
    prompt."""

    prefill: Member
    generation: Member
    plan: ChainPlan
    transfer_s: float
    """Predicted seconds from the end of prefill until the generation group has received all KV."""


class Placer(Protocol):
    """Interface that assigns requests to groups and records the load of each group."""

    prefill_queues: PrefillQueues
    num_cached_tokens: int

    def place(self, asked: Asked) -> Spot | None:
        """Choose the groups that serve the request. Return None if no prefill group or no generation group is available
        now."""

    def sent(self, number: int) -> None:
        """Record that the first token of request `number` has been sent."""

    def ended(self, number: int) -> None:
        """Record that request `number` has ended."""


class Placing:
    """Assigns requests to groups, and compares only a few candidate groups for each request. Implements `Placer`. Its
    methods `sent` and `ended` do nothing."""

    def __init__(
        self, fleet: Fleet, planner: ChainPlanner, config: OrchestratorConfig, clock: Clock, *, max_blocks: int = 0
    ) -> None:
        """Create a placer over the groups of `fleet`. `max_blocks`: number of KV blocks that the prefix cache of each
        prefill group can hold; 0: no prefix cache."""
        self._fleet = fleet
        self._planner = planner
        self._config = config
        self._clock = clock
        self._max_blocks = max_blocks
        self._prefixes = PrefixIndex(max_blocks or 1)
        self._computed_by: dict[int, int] = {}
        """For each block id, the number (id) of the prefill group that last computed this block."""
        self.prefill_queues = PrefillQueues()
        """Job queues of the prefill groups, of the same class as in the orchestrator."""
        self.num_cached_tokens = 0
        """Number of prompt tokens whose KV was found in a prefix cache and not computed, summed over all requests so
        far."""

    def sent(self, number: int) -> None:
        """Do nothing, because the fleet counts the requests of each group."""

    def ended(self, number: int) -> None:
        """Do nothing, because the fleet counts the requests of each group."""

    def place(self, asked: Asked) -> Spot | None:
        """Choose the groups that serve the request. Return None if no prefill group or no generation group is available
        now."""
        roomy = list(self._fleet.most_room(SHORTLIST))
        prefill = self._fleet.least_work(SHORTLIST)
        if not roomy or not prefill:
            return None
        chains: dict[int, PromptChains] = {}
        blocks, now_s = asked.blocks, self._clock.now_s()
        names = [str(block) for block in blocks] if self._max_blocks else []
        if not len(prefill[0].chain):
            del prefill[1:]  # no other group is free earlier than an idle one
        prefill += self._owners(prefill, blocks)
        ways = [self._way(member, asked, names, chains, now_s) for member in prefill]
        chain, terms = min(ways, key=lambda way: way[1].cost_s)
        chosen = min(roomy, key=lambda each: (each.batch.step_s / 2 // ALIKE_S, each.num_held))
        member = prefill[ways.index((chain, terms))]
        self._note_blocks(member, names, blocks)
        self.num_cached_tokens += chain.num_cached_tokens
        return Spot(member, chosen, chain, terms.transfer_s)

    def _way(
        self,
        member: Member,
        asked: Asked,
        names: list[str],
        chains: dict[int, PromptChains],
        now_s: float,
    ) -> tuple[ChainPlan, PlacementTerms]:
        """Return the chain that would compute the prompt in this prefill group, and its predicted costs."""
        store, num_tokens = member.prefill_view.prefix_store, asked.num_tokens
        held = self._prefixes.num_held(store, names) * asked.block_tokens if names else 0
        start = min(held, num_tokens - 1)
        if start not in chains:
            chains[start] = PromptChains(self._planner, self._config, TokenRange(start, num_tokens))
        pending = self.prefill_queues.pending(member.prefill_view.incarnation, now_s)
        chain = chains[start].plan(len(member.prefill_view.endpoints), pending, now_s)
        own_s = chain.choice.predicted_s or 0.0
        terms = chain_terms(self._planner, chain.ttft_s, num_tokens, _NO_BATCH, is_elsewhere=True)
        terms = replace(terms, queue_s=max(own_s - chain.ttft_s, 0.0), others_s=chain.cost_s - own_s)
        return chain, terms

    def _owners(self, known: list[Member], blocks: Sequence[int]) -> list[Member]:
        """Return the prefill group that has computed the longest prefix of the prompt; empty if there is none, or if it
        is in `known`."""
        if not self._max_blocks:
            return []
        for block in reversed(blocks):
            member = self._fleet.members.get(self._computed_by.get(block, -1))
            if member is not None and self._fleet.serves_prompts(member):
                return [] if member in known else [member]
        return []

    def _note_blocks(self, member: Member, names: list[str], blocks: Sequence[int]) -> None:
        if self._max_blocks:
            self._prefixes.use(member.prefill_view.prefix_store, names)
            self._computed_by.update(dict.fromkeys(blocks, member.number))
