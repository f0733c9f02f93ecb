"""Selects the workers that serve an attempt at a request, and returns the decision as a `Plan`. Waits for a limited
time if no group can serve the request.

Called by `orchestrator.dispatch.attempt`, which carries out the plan, and by
`orchestrator.admission.forecast`. Only this module waits for groups. `orchestrator.placement.predictions`
predicts costs, `comparison` compares them, and `chain_width` plans chains. Runs on the event loop.
"""

import logging
from collections.abc import Callable, Collection, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from baton.errors import DrainedError
from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.process.clock import Clock
from baton.results.prefill_trace import Placement, PlacementTerms
from orchestrator.membership.members import Membership, NoGroupError
from orchestrator.membership.view import GenerationGroup
from orchestrator.placement.block_fetches import BlockFetch, BlockSources
from orchestrator.placement.chain_width import WidthPolicy
from orchestrator.placement.comparison import (
    ChainWay,
    LocalWay,
    able_groups,
    cheapest_group,
    compare,
    could_serve,
    groups_with_room,
)
from orchestrator.placement.generation_load import GenerationLoad
from orchestrator.placement.predictions import AttemptPrompt, Outlook, Prospects
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from orchestrator.requests.record import RequestRecord

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ASKED_LAST_S = 1e6
"""Cost in seconds that is assigned to a group with too little memory for the request. All other groups are then
preferred."""


@dataclass(frozen=True)
class Plan:
    """Selection of the groups that serve one attempt. The plan is made before any worker is called. Later only its
    chain may be replaced."""

    generation: GenerationGroup
    way: ChainWay | None
    """Chain of ranks that prefills the prompt, with its group and its predicted costs. None if the generation group
    prefills by itself."""
    placement: Placement
    """Decision whether a chain or the generation group prefills, with the reason and the predicted costs of both
    options."""
    blocks: PromptBlocks
    """Names of the KV blocks of all tokens whose KV the attempt needs."""
    slot_blocks: tuple[str, ...]
    """Names of the leading blocks that a slot of the generation group loads from its node's prefix store. Blocks that
    the store does not have are skipped."""
    reserves: bool
    """True if slots are leased before the stream is opened. This is done if a chain sends KV to the slots, or if cached
    blocks are loaded into them."""
    uses_cached: bool
    """True if the plan relies on cached blocks that the prefix index lists."""
    fetch: BlockFetch | None = None
    """Fetch of cached KV from another node before the attempt begins. None if no KV is fetched."""


class Chooser:
    """Selects groups for requests. Records each selection in the load of the generation group (see `plan`) and in
    `generation_load`, and counts in `num_degraded` the attempts for which no prefill group was ready in time."""

    def __init__(self, members: Membership, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self.num_degraded = 0
        """Number of attempts whose generation group prefilled by itself, because no prefill group was ready in time."""
        self.prefixes = PrefixIndex()
        """Index of the blocks in all prefix stores, as reported by workers. Updated by `orchestrator.dispatch` and
        `orchestrator.workers.prefix_discovery`."""
        self._members = members
        self._planner = planner
        self.generation_load = GenerationLoad(planner)
        """List of the attempts that run on each generation group."""
        policy = WidthPolicy(planner, elastic=config.elastic, overtaking=config.overtaking)
        self.sources = BlockSources(members, self.prefixes, planner, clock)
        """Prefix stores from which cached KV may be fetched. `orchestrator.dispatch` reports the result of each fetch
        to this object."""
        self._outlook = Outlook(
            *(members, planner, policy, self.prefixes, self.sources, self.generation_load, clock),
            block_tokens=config.block_tokens,
        )
        self._config = config

    async def plan(
        self,
        record: RequestRecord,
        held: ExitStack,
        *,
        full: Collection[Hashable] = (),
        uses_cached: bool = True,
        fetches: bool = True,
    ) -> Plan:
        """Return the plan for the attempt: the groups that serve it. Waits for groups if necessary.

        As soon as a generation group is selected, the attempt is added to the group's load, until the context stack
        `held` is closed. Other requests therefore do not get the attempt's slots while the attempt waits for a chain.
        Groups whose incarnation is in `full` have refused the attempt and are tried last. If `uses_cached` is True, a
        chain starts after the cached blocks. If `fetches` is True too, missing blocks may first be fetched from another
        node. Raises NoGroupError if no group has enough free slots in time.
        """
        look = partial(Prospects, self._outlook, AttemptPrompt(self._outlook, record), fetches=fetches)
        generation, prospects = await self._find_generation(record, look, record.avoid | {*full})
        held.enter_context(self._members.hold(generation.name, record.request.num_slots))
        prospects.held = generation.name
        look = partial(look, uses_cached=uses_cached, held=generation.name)
        return await self._decide(generation, record, prospects if uses_cached else look(), look)

    def _planned(
        self,
        generation: GenerationGroup,
        record: RequestRecord,
        prospects: Prospects,
        way: ChainWay | None,
        placement: Placement,
    ) -> Plan:
        """Add the attempt to the list of attempts on its generation group, and return its plan."""
        local = prospects.local(generation) if way is None else None
        fetch = _fetch_of(way or local)
        if fetch is None and prospects.passes_over_fetch(generation, by_chain=placement.chain is not None):
            self._planner.pass_over_fetch()
        logger.info(
            "placed request=%s attempt=%d group=%s: %s",
            *(record.request_id, record.attempt.number, generation.name, placement.text),
        )
        self.generation_load.place(
            record,
            generation.incarnation,
            None if local is None else local.terms,
            now_s=self._outlook.now_s,
            has_room=self._members.load(generation.name).num_slots <= generation.num_slots
            and not prospects.lacks_memory(generation),
        )
        blocks = prospects.blocks(generation.layout_fingerprint)
        names = _slot_blocks(generation, blocks, way, record.wants_prompt_scores)
        finds_blocks = fetch is not None or bool(self.prefixes.num_held(generation.prefix_store, names))
        reserves, uses_cached = way is not None or finds_blocks, prospects.uses_cached
        return Plan(generation, way, placement, blocks, names, reserves=reserves, uses_cached=uses_cached, fetch=fetch)

    def replan(self, plan: Plan, record: RequestRecord) -> Plan:
        """Return the plan with its chain replaced by the chain that is cheapest now. No new fetch of cached KV is
        planned. Returns the plan unchanged if it has no chain or if no prefill group is ready."""
        if plan.way is None:
            return plan
        prompt = AttemptPrompt(self._outlook, record, {plan.generation.layout_fingerprint: plan.blocks})
        held = plan.generation.name
        prospects = Prospects(self._outlook, prompt, uses_cached=plan.uses_cached, fetches=False, held=held)
        return replace(plan, way=prospects.best_chain(plan.generation, record.avoid) or plan.way)

    def has_room(self, record: RequestRecord, avoid: Collection[Hashable]) -> bool:
        """Return True if a generation group has enough free slots for the request now. Groups whose incarnation is in
        `avoid` are ignored."""
        groups = able_groups(self._members.view, record, avoid)
        return bool(groups_with_room(groups, self._members.load, record.request.num_slots))

    def predict_s(self, record: RequestRecord) -> float:
        """Return the predicted seconds to the first token if the request is placed now on the best ready group. If some
        groups have enough free slots, only these are considered. Return 0 if no prediction is possible."""
        groups = able_groups(self._members.view, record)
        roomy = groups_with_room(groups, self._members.load, record.request.num_slots)
        prospects = Prospects(self._outlook, AttemptPrompt(self._outlook, record))
        return min((self._predict_at_s(group, record, prospects) for group in roomy or groups), default=0.0)

    def _predict_at_s(self, generation: GenerationGroup, record: RequestRecord, prospects: Prospects) -> float:
        local, policy = _terms_of(prospects.local(generation)), self._policy(record)
        takes_chain = policy != "never" and not record.wants_prompt_scores
        way = prospects.best_chain(generation) if takes_chain else None
        if way is None:
            return 0.0 if local is None else local.own_s
        is_compared = policy == "auto" and not prospects.lacks_memory(generation)
        return local.own_s if local and is_compared and compare(way.terms, local).is_local else way.terms.own_s

    def _choose_generation(
        self, record: RequestRecord, prospects: Prospects, avoid: Collection[Hashable]
    ) -> GenerationGroup | None:
        """Return the generation group with room on which the request costs least; None if none has room. Groups whose
        incarnation is in `avoid` are excluded."""

        def cost_s(group: GenerationGroup) -> float:
            return _ASKED_LAST_S if prospects.lacks_memory(group) else prospects.least_s(group)

        load = self._members.load
        groups = groups_with_room(able_groups(self._members.view, record, avoid), load, record.request.num_slots)
        return cheapest_group(groups, load, cost_s)

    async def _find_generation(
        self, record: RequestRecord, look: Callable[[], Prospects], avoid: Collection[Hashable]
    ) -> tuple[GenerationGroup, Prospects]:
        """Return the generation group with room on which the request costs least, and the predictions used. Waits if
        necessary.

        If no group has workers, waits as long as one is being started. Raises DrainedError if operators have kept all
        groups drained for the whole waiting time, and NoGroupError if no group has room in time.
        """
        is_withdrawn = True  # all groups drained since this wait began: `choose` sees each change

        def choose(avoid: Collection[Hashable]) -> tuple[GenerationGroup, Prospects] | None:
            nonlocal is_withdrawn
            is_withdrawn = is_withdrawn and bool(self._withdrawn(record))
            prospects = look()
            group = self._choose_generation(record, prospects, avoid)
            return None if group is None else (group, prospects)

        wait_s = self._config.generation_wait_s
        while (found := await self._find(choose, avoid, wait_s)) is None:
            names = self._withdrawn(record)
            if names and is_withdrawn:
                raise DrainedError(
                    f"every generation group that could serve the request is drained: `baton drain {names[0]} --undo` "
                    "lets one have work again"
                )
            if not names and (self._members.present.generation or not self._members.is_coming("generate")):
                kind = "exact generation group" if record.request.exact else "generation group"
                raise NoGroupError(
                    f"no {kind} had a free slot of {record.request.capacity_tokens} tokens within {wait_s:g} s: see "
                    "the workers' state, or try again later"
                )
            is_withdrawn, avoid = True, ()
        return found

    def _withdrawn(self, record: RequestRecord) -> tuple[str, ...]:
        return self._members.withdrawn(partial(could_serve, record=record))

    async def _decide(
        self, generation: GenerationGroup, record: RequestRecord, prospects: Prospects, look: Callable[[], Prospects]
    ) -> Plan:
        """Return the plan for this generation group, to whose load the attempt was added. If no prefill group is ready,
        waits for one and then uses new predictions."""
        placement = self._without_chain(generation, record, prospects)
        if placement is not None:
            return self._planned(generation, record, prospects, None, placement)
        local, wait_s = self._local(generation, prospects), self._config.prefill_wait_s
        if self._policy(record) == "auto" and local is not None:
            wait_s = min(wait_s, local.own_s)  # by then a local prefill would be done

        found = _chain_of(prospects, generation, record.avoid) or await self._find(
            lambda avoid: _chain_of(look(), generation, avoid), record.avoid, wait_s
        )
        if found is None:
            self.num_degraded += 1
            logger.warning("degraded request=%s attempt=%d: no prefill group", record.request_id, record.attempt.number)
            return self._planned(generation, record, look(), None, Placement("none_ready", local=local))
        way, prospects = found
        return self._planned(generation, record, prospects, *self._compared(way, local, record))

    def _without_chain(
        self, generation: GenerationGroup, record: RequestRecord, prospects: Prospects
    ) -> Placement | None:
        """Return the placement if no chain is wanted or no prefill group exists; None if a chain may prefill."""
        if record.wants_prompt_scores:  # a chain computes only the last logits
            return Placement("prompt_scores", local=_terms_of(prospects.local(generation)))
        if self._policy(record) == "never":
            return Placement("never", local=_terms_of(prospects.local(generation)))
        if not self._members.view.chains_for(generation).prefill:
            return Placement("no_prefill_groups", local=_terms_of(prospects.local(generation)))
        return None

    def _local(self, generation: GenerationGroup, prospects: Prospects) -> PlacementTerms | None:
        """Return the terms of a prefill by the group itself; None if it lacks memory, because the wait for memory is
        unknown."""
        return None if prospects.lacks_memory(generation) else _terms_of(prospects.local(generation))

    def _compared(
        self, way: ChainWay, local: PlacementTerms | None, record: RequestRecord
    ) -> tuple[ChainWay | None, Placement]:
        """Return the chain and the reason for the decision. The chain is None if the generation group is predicted to
        be faster."""
        policy = self._policy(record)
        placement = compare(way.terms, local) if policy == "auto" else Placement("always", way.terms, local)
        if placement.reason == "chain_faster":
            self._planner.pass_over_local()
        return None if placement.is_local else way, placement

    def _policy(self, record: RequestRecord) -> Disaggregation:
        return "always" if record.request.by_chain else self._config.disaggregation

    async def _find(
        self, choose: Callable[[Collection[Hashable]], T | None], avoid: Collection[Hashable], wait_s: float
    ) -> T | None:
        """Return the first result of `choose` that is not None. Waits `avoid_s` seconds for a group that is not in
        `avoid`, then `wait_s` seconds for any group; None if none is found in time."""
        if avoid:
            found = await self._members.until(partial(choose, avoid), self._config.avoid_s)
            if found is not None:
                return found
        return await self._members.until(partial(choose, ()), wait_s)


def _chain_of(
    prospects: Prospects, generation: GenerationGroup, avoid: Collection[Hashable]
) -> tuple[ChainWay, Prospects] | None:
    """Return the cheapest chain for the group by these predictions, and the predictions; None if there is no chain."""
    way = prospects.best_chain(generation, avoid)
    return None if way is None else (way, prospects)


def _terms_of(way: LocalWay | None) -> PlacementTerms | None:
    return None if way is None else way.terms


def _fetch_of(way: ChainWay | LocalWay | None) -> BlockFetch | None:
    return None if way is None else way.fetch


def _slot_blocks(
    generation: GenerationGroup, blocks: PromptBlocks, way: ChainWay | None, wants_prompt_scores: bool
) -> tuple[str, ...]:
    """Return the names of the blocks that a slot of the group may load from its node's prefix store."""
    if not generation.prefix_store or (way is None and wants_prompt_scores):
        return ()
    return blocks.names if way is not None else blocks.cached(blocks.cached_tokens(len(blocks.names)))
