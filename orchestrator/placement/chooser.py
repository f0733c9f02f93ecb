"""Finds groups for a request: the best of those that can take it, waiting a while where there is none.

Called by `orchestrator.dispatch.attempt`. Only this module reads everything that a choice rests on: the view and the
load of the groups, the book of prefill jobs, the attempts at generation groups
(`orchestrator.placement.generation_book`), the index of cached prefixes, and the planner.
`orchestrator.placement.predictions` predicts, `comparison` compares, `chain_width` plans chains. On the loop.
"""

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from baton.clock import Clock
from baton.prefix_blocks import PromptBlocks
from baton.results import Placement, PlacementTerms
from orchestrator.membership.members import GenerationGroup, Members, NoGroupError, PrefillGroup
from orchestrator.placement.chain_width import ChainPlan, WidthPolicy
from orchestrator.placement.comparison import Chain, Choose, choose_generation, choose_prefill, compare
from orchestrator.placement.generation_book import Occupancy
from orchestrator.placement.predictions import Outlook, Prospects
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from planning.planner import ChainPlanner

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ASKED_LAST_S = 1e6
"""Cost of a request at a group that lacks memory for it: all other groups are asked before."""


class Chooser:
    """Chooses groups for requests. Changes only its counts and its book of which request is at which group."""

    def __init__(self, members: Members, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self.num_degraded = 0
        """Number of attempts whose generation group prefilled because no prefill group was ready in time."""
        self.prefixes = PrefixIndex()
        """Index of the blocks that prefix stores hold; written by the dispatcher and by prefix discovery, from workers'
        reports."""
        self._members = members
        self._planner = planner
        self._occupancy = Occupancy(planner)
        policy = WidthPolicy(planner, elastic=config.elastic, overtaking=config.overtaking)
        self._outlook = Outlook(members, planner, policy, self.prefixes, self._occupancy)
        self._clock = clock
        self._config = config

    async def find_generation(self, record: RequestRecord) -> GenerationGroup:
        """Return a generation group with room for the request, waiting for one if need be.

        Raises NoGroupError when none has room in time.
        """
        found = await self._find(self.generation(record), record, self._config.generation_wait_s)
        if found is None:
            kind = "exact generation group" if record.exact else "generation group"
            raise NoGroupError(
                f"no {kind} had a free slot of {record.capacity_tokens} tokens within "
                f"{self._config.generation_wait_s:g} s: see the workers' state, or try again later"
            )
        return found

    def generation(self, record: RequestRecord) -> Choose[GenerationGroup]:
        """Return a function that chooses, outside some lives, the group that has room now and where the request costs
        least."""
        prospects_at = self._prospects_of(record)

        def cost_s(group: GenerationGroup) -> float:
            if self._lacks_memory(group, record):
                return _ASKED_LAST_S
            return prospects_at(group).least_s(group, self._unix_s())

        members = self._members
        return lambda avoid: choose_generation(members.view, members.load, record, avoid, cost_s)

    def blocks(self, record: RequestRecord, layout_fingerprint: str) -> PromptBlocks:
        """Return the blocks of all tokens whose KV an attempt has to make."""
        token_ids = (*record.prompt_ids, *record.output_ids)
        return PromptBlocks.of(token_ids, self._config.block_tokens, layout_fingerprint, record.prefix_salt)

    async def find_prefill(
        self, generation: GenerationGroup, record: RequestRecord, blocks: PromptBlocks, uses_cached: bool
    ) -> tuple[PrefillGroup, ChainPlan] | None:
        """Return the prefill group and chain for the request; None when the generation group is to prefill by itself.

        Waits for a prefill group if need be. The record's placement says why, with the predictions.
        """
        prospects = Prospects(self._outlook, record, blocks, uses_cached=uses_cached, holds=True)
        local = prospects.local(generation, self._unix_s())
        found, record.placement = await self._decide(generation, record, prospects, local)
        self._note(record, generation, prospects.local(generation, self._unix_s()) if found is None else None)
        return found

    async def _decide(
        self, generation: GenerationGroup, record: RequestRecord, prospects: Prospects, local: PlacementTerms | None
    ) -> tuple[tuple[PrefillGroup, ChainPlan] | None, Placement]:
        config = self._config
        if record.wants_prompt_scores:  # a chain's ranks compute no logits but the last
            return None, Placement("prompt_scores", local=local)
        way = _way(record, config)
        if way == "never":
            return None, Placement("never", local=local)
        if not self._members.view.chains_for(generation).prefill:
            return None, Placement("no_prefill_groups", local=local)
        compares = way == "auto"
        if self._lacks_memory(generation, record):
            local = None  # it is unknown when memory will be free
        wait_s = config.prefill_wait_s
        if compares and local is not None:
            wait_s = min(wait_s, local.own_s)  # by then a local prefill would be done
        found = await self._find(self._chains(generation, prospects), record, wait_s)
        if found is None:
            self.num_degraded += 1
            logger.warning("degraded request=%s attempt=%d: no prefill group", record.request_id, record.attempt)
            return None, Placement("none_ready", local=local)
        group, plan, chain = found
        placement = compare(chain, local) if compares else Placement("always", chain, local)
        if placement.reason == "chain_faster":
            self._planner.pass_over_local()
        return None if placement.is_local else (group, plan), placement

    def prefill(
        self, generation: GenerationGroup, record: RequestRecord, blocks: PromptBlocks, uses_cached: bool
    ) -> Choose[tuple[PrefillGroup, ChainPlan]]:
        """Return a function that chooses, outside some lives, the prefill group where the prompt costs least now.

        It returns the group and the prompt's chain there, with KV for `generation`. If `uses_cached`, the chain begins
        behind the cached ones of the prompt's `blocks`.
        """
        prospects = Prospects(self._outlook, record, blocks, uses_cached=uses_cached, holds=True)
        choose = self._chains(generation, prospects)

        def chosen(avoid: Collection[object]) -> tuple[PrefillGroup, ChainPlan] | None:
            found = choose(avoid)
            return None if found is None else found[:2]

        return chosen

    def predict_s(self, record: RequestRecord) -> float:
        """Return the predicted seconds to the first token of a request that is placed now; 0 where nothing is known.

        Predicts for the best of the ready groups that can serve the request, or of those with room, if any has room.
        """
        groups = [
            group
            for group in self._members.view.generation
            if group.ready and group.may_serve(exact=record.exact) and group.max_slot_tokens >= record.capacity_tokens
        ]
        load = self._members.load
        roomy = [group for group in groups if load(group.name).num_slots + record.num_slots <= group.num_slots]
        prospects_at = self._prospects_of(record)
        return min((self._predict_at_s(group, record, prospects_at(group)) for group in roomy or groups), default=0.0)

    def _predict_at_s(self, generation: GenerationGroup, record: RequestRecord, prospects: Prospects) -> float:
        local, way = prospects.local(generation, self._unix_s()), _way(record, self._config)
        found = None
        if way != "never" and not record.wants_prompt_scores:
            found = self._chains(generation, prospects)(())
        if found is None:
            return 0.0 if local is None else local.own_s
        takes_local = way == "auto" and not self._lacks_memory(generation, record)
        if takes_local and local is not None and local.cost_s < found[2].cost_s:
            return local.own_s
        return found[2].own_s

    def _prospects_of(self, record: RequestRecord) -> Callable[[GenerationGroup], Prospects]:
        """Return a function from a group to the request's predictions before it is placed, made once for groups of one
        layout."""
        made: dict[str, Prospects] = {}

        def prospects_at(group: GenerationGroup) -> Prospects:
            layout = group.layout_fingerprint
            if layout not in made:
                blocks = self.blocks(record, layout)
                made[layout] = Prospects(self._outlook, record, blocks, uses_cached=True, holds=False)
            return made[layout]

        return prospects_at

    def _lacks_memory(self, group: GenerationGroup, record: RequestRecord) -> bool:
        """Return whether the group's free memory, as last reported, is too small even for the KV to be made."""
        free, cost = self._members.num_bytes_free.get(group.name), self._planner.cost
        if free is None:
            return False
        return free < record.num_slots * record.num_tokens * cost.num_layers * cost.kv_bytes

    def _chains(
        self, generation: GenerationGroup, prospects: Prospects
    ) -> Choose[tuple[PrefillGroup, ChainPlan, PlacementTerms]]:
        def chain_for(group: PrefillGroup) -> Chain:
            return prospects.chain(generation, group, self._unix_s())

        return lambda avoid: choose_prefill(self._members.view.chains_for(generation), chain_for, avoid)

    def _note(self, record: RequestRecord, generation: GenerationGroup, local: PlacementTerms | None) -> None:
        """Record in the book that the attempt is at that group, which prefills it if `local` has its predictions."""
        assert record.placement is not None
        logger.info(
            "placed request=%s attempt=%d group=%s: %s",
            *(record.request_id, record.attempt, generation.name, record.placement.text),
        )
        if local is None:
            self._occupancy.place(record, generation.life)
            return
        is_over = self._members.load(generation.name).num_slots > generation.num_slots
        has_room = not is_over and not self._lacks_memory(generation, record)
        self._occupancy.place_local(record, generation.life, local, self._unix_s(), has_room=has_room)

    def _unix_s(self) -> float:
        return self._clock.unix_ns() / 1e9

    async def _find(self, choose: Choose[T], record: RequestRecord, wait_s: float) -> T | None:
        """Wait `avoid_s` seconds for a group that has not failed this request, then `wait_s` seconds for any group."""
        if record.avoid:
            found = await self._members.until(lambda: choose(record.avoid), self._config.avoid_s)
            if found is not None:
                return found
        return await self._members.until(lambda: choose(()), wait_s)


def _way(record: RequestRecord, config: OrchestratorConfig) -> Disaggregation:
    return "always" if record.by_chain else config.disaggregation
