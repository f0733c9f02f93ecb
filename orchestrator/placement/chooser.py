"""Selects the workers that serve an attempt at a request, and returns the decision as a `Plan`. Waits for a limited
time if no group can serve the request.

Called by `orchestrator.dispatch.attempt`, which carries out the plan, and by `orchestrator.admission.forecast`. Only
this module waits for groups. `orchestrator.placement.options` lists the options with their predicted costs. Runs on the
event loop.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from baton.errors import DrainedError, UnavailableError
from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.process.clock import Clock
from baton.results.prefill_trace import Placement
from baton.types import TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.view import GenerationGroup
from orchestrator.placement.block_fetches import BlockFetch
from orchestrator.placement.context import AttemptPrompt, PlacementContext
from orchestrator.placement.options import ClusterSnapshot, GroupChain, Option, Reuse, able_groups, could_serve, decide
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord

logger = logging.getLogger(__name__)


class NoGroupError(UnavailableError):
    """No group could serve the request in time. Not retryable, because the request has already waited for a group."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True)
class Plan:
    """Selection of the groups that serve one attempt. The plan is made before any worker is called. Later only its
    chain may be replaced."""

    generation: GenerationGroup
    chain: GroupChain | None
    """Chain of ranks that prefills the prompt, with its group. None if the generation group prefills by itself."""
    placement: Placement
    """Decision whether a chain or the generation group prefills, with the reason and the predicted costs of both."""
    blocks: PromptBlocks
    """Names of the KV blocks of all tokens whose KV the attempt needs."""
    slot_blocks: tuple[str, ...]
    """Names of the leading blocks that a slot of the generation group loads from its node's prefix store. Blocks that
    the store does not have are skipped."""
    reserves: bool
    """True if slots are leased before the stream is opened. This is done if a chain sends KV to the slots, or if cached
    blocks are loaded into them."""
    reuse: Reuse
    """Cached blocks that `replan` may rely on. They are never those of other nodes, because it plans no new fetch."""
    fetch: BlockFetch | None = None
    """Fetch of cached KV from another node before the attempt begins. None if no KV is fetched."""


class Chooser:
    """Selects groups for requests. Records each selection in the load of the generation group (see `plan`) and in
    `context.generation_load`, and counts in `num_degraded` the attempts for which no prefill group was ready in
    time."""

    def __init__(self, members: Membership, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self.num_degraded = 0
        """Number of attempts whose generation group prefilled by itself, because no prefill group was ready in time."""
        self.context = PlacementContext(members, planner, clock, config)
        """State and settings on which predictions are based."""

    async def plan(
        self, record: RequestRecord, held: ExitStack, *, full: Collection[Hashable] = (), reuse: Reuse = "cluster"
    ) -> Plan:
        """Return the plan for the attempt: the groups that serve it. Waits for groups if necessary.

        As soon as a generation group is selected, the attempt is added to the group's load, until the context stack
        `held` is closed. Other requests therefore do not get the attempt's slots while the attempt waits for a chain.
        Groups whose incarnation is in `full` have refused the attempt and are tried last. A chain starts after the
        cached blocks, unless `reuse` is "none". If `reuse` is "cluster", missing blocks may first be fetched from
        another node. Raises NoGroupError if no group has enough free slots in time.
        """
        groups = await self._await_room(record, record.avoid | {*full})
        look = partial(ClusterSnapshot, AttemptPrompt(self.context, record), reuse=reuse)
        snapshot = look()
        options = self.cheapest(snapshot, groups)
        generation = options[0].generation
        held.enter_context(self.context.members.hold(generation.name, record.request.num_slots))
        if self.lacks_chain(snapshot, options):
            local = min(options, key=lambda each: each.cost_s)
            snapshot, options = await self._await_chain(snapshot, partial(look, held=generation.name), local)
        return self.planned(snapshot, options)

    def cheapest(self, snapshot: ClusterSnapshot, groups: Sequence[GenerationGroup]) -> list[Option]:
        """Return the options on that one of these generation groups which has the cheapest permitted option."""
        options = snapshot.options(groups, snapshot.record.avoid)
        chains = [each for each in options if each.chain is not None]
        permitted = chains if chains and snapshot.policy == "always" else options
        chosen = min(permitted, key=snapshot.order).generation
        return [each for each in options if each.generation is chosen]

    def lacks_chain(self, snapshot: ClusterSnapshot, options: Sequence[Option]) -> bool:
        """Return True if none of these options, which are on one generation group, has a chain, although a chain may
        prefill and prefill groups exist."""
        has_chain = any(each.chain is not None for each in options)
        return not (has_chain or snapshot.rule(options[0].generation))

    def planned(self, snapshot: ClusterSnapshot, options: Sequence[Option]) -> Plan:
        """Select one of these options, which are on one generation group. Add the attempt to the list of attempts on
        this group, and return its plan."""
        record, generation = snapshot.record, options[0].generation
        option, placement = decide(options, snapshot.rule(generation), snapshot.policy)
        if placement.reason == "none_ready":
            self.num_degraded += 1
            logger.warning("degraded request=%s attempt=%d: no prefill group", record.request_id, record.attempt.number)
        planner = self.context.planner_of(generation)
        if placement.reason == "chain_faster":
            planner.pass_over_local()
        if option.fetch is None and any(each.fetch is not None for each in options):
            self.context.planner.pass_over_fetch()
        logger.info(
            "placed request=%s attempt=%d group=%s: %s",
            *(record.request_id, record.attempt.number, generation.name, placement.text),
        )
        fits = self.context.members.load(generation.name).num_slots <= generation.num_slots and not option.lacks_memory
        local = None if option.chain is not None else option.terms
        tokens = TokenRange(option.start, record.num_tokens if fits else option.start)
        self.context.generation_load.place(
            record, generation.incarnation, planner, local, tokens=tokens, now_s=self.context.clock.now_s()
        )
        blocks = snapshot.prompt.blocks(generation.layout_fingerprint)
        names: tuple[str, ...] = ()
        if generation.prefix_store and not record.wants_prompt_scores:
            names = blocks.names if option.chain is not None else blocks.cached(blocks.cached_tokens(len(blocks.names)))
        finds_blocks = option.fetch is not None or bool(self.context.prefixes.num_held(generation.prefix_store, names))
        return Plan(
            *(generation, option.chain, placement, blocks, names),
            reserves=option.chain is not None or finds_blocks,
            reuse="none" if snapshot.reuse == "none" else "node",
            fetch=option.fetch,
        )

    def replan(self, plan: Plan, record: RequestRecord) -> Plan:
        """Return the plan with its chain replaced by the chain that is cheapest now. No new fetch of cached KV is
        planned. Returns the plan unchanged if it has no chain or if no prefill group is ready."""
        if plan.chain is None:
            return plan
        prompt = AttemptPrompt(self.context, record, {plan.generation.layout_fingerprint: plan.blocks})
        snapshot = ClusterSnapshot(prompt, reuse=plan.reuse, held=plan.generation.name)
        chains = snapshot.by_chains(plan.generation, record.avoid)
        return replace(plan, chain=chains[0].chain if chains else plan.chain)

    def with_room(self, record: RequestRecord, avoid: Collection[Hashable] = ()) -> list[GenerationGroup]:
        """Return the generation groups that may serve the request and have enough free slots for it. A slot counts as
        used only if a request of this orchestrator uses it. Groups whose incarnation is in `avoid` are left out."""
        num_slots, load = record.request.num_slots, self.context.members.load
        groups = able_groups(self.context.members.view, record, avoid)
        return [group for group in groups if load(group.name).num_slots + num_slots <= group.num_slots]

    def predict_s(self, record: RequestRecord) -> float:
        """Return the predicted seconds to the first token if the request is placed now on the best ready group. If some
        groups have enough free slots, only these are considered. Return 0 if no prediction is possible."""
        groups = self.with_room(record) or able_groups(self.context.members.view, record)
        if not groups:
            return 0.0
        snapshot = ClusterSnapshot(AttemptPrompt(self.context, record))
        options = self.cheapest(snapshot, groups)
        option, _ = decide(options, snapshot.rule(options[0].generation), snapshot.policy)
        return 0.0 if option.terms is None else option.terms.own_s

    async def _await_room(self, record: RequestRecord, avoid: Collection[Hashable]) -> list[GenerationGroup]:
        """Return the generation groups that have room for the request, when there is at least one. Groups whose
        incarnation is in `avoid` are considered only if no other group has room within `avoid_s` seconds.

        If no group has workers, waits as long as one is being started. Raises DrainedError if operators have kept all
        groups drained for the whole waiting time, and NoGroupError if no group has room in time.
        """
        is_withdrawn, end_s = True, self._end_s(avoid, self.context.config.generation_wait_s)
        while not (groups := self.with_room(record, avoid)):
            is_withdrawn = is_withdrawn and bool(self._withdrawn(record))
            if await self.context.members.change(end_s - self.context.clock.now_s()):
                continue
            if not avoid:
                self._require_coming(record, is_withdrawn)
                is_withdrawn = True
            avoid, end_s = (), self._end_s((), self.context.config.generation_wait_s)
        return groups

    async def _await_chain(
        self, snapshot: ClusterSnapshot, look: Callable[[], ClusterSnapshot], local: Option
    ) -> tuple[ClusterSnapshot, list[Option]]:
        """Wait until a prefill group is ready for the generation group of `local`, at most as long as a local prefill
        is predicted to take. Return a snapshot that `look` has created, and the options on this group."""
        is_over, avoid, wait_s = False, snapshot.record.avoid, self.context.config.prefill_wait_s
        if snapshot.policy == "auto" and local.terms is not None and not local.lacks_memory:
            wait_s = min(wait_s, local.terms.own_s)
        end_s = self._end_s(avoid, wait_s)
        while True:
            snapshot = look()
            options = snapshot.options([local.generation], avoid)
            if is_over or any(each.chain is not None for each in options):
                return snapshot, options
            if not await self.context.members.change(end_s - self.context.clock.now_s()):
                is_over, avoid, end_s = not avoid, set(), self._end_s((), wait_s)

    def _end_s(self, avoid: Collection[Hashable], wait_s: float) -> float:
        """Return the time at which a wait ends that begins now: after `avoid_s` seconds if groups are avoided, else
        after `wait_s` seconds."""
        return self.context.clock.now_s() + (self.context.config.avoid_s if avoid else wait_s)

    def _require_coming(self, record: RequestRecord, is_withdrawn: bool) -> None:
        """Raise DrainedError if operators have drained all groups that could serve the request (`is_withdrawn`: for the
        whole waiting time), and NoGroupError unless a first group is being started."""
        names = self._withdrawn(record)
        if names and is_withdrawn:
            raise DrainedError(
                f"every generation group that could serve the request is drained: `baton drain {names[0]} --undo` "
                "lets one have work again"
            )
        if not names and (self.context.members.present.generation or not self.context.members.is_coming("generate")):
            kind = "exact generation group" if record.request.exact else "generation group"
            raise NoGroupError(
                f"no {kind} had a free slot of {record.request.capacity_tokens} tokens within "
                f"{self.context.config.generation_wait_s:g} s: see the workers' state, or try again later"
            )

    def _withdrawn(self, record: RequestRecord) -> tuple[str, ...]:
        return self.context.members.withdrawn(partial(could_serve, record=record))
