"""Lists the options to serve a request, with their predicted costs in seconds.

An option is a generation group together with the workers that prefill: a chain of ranks in a prefill group, or the
generation group itself. It may begin with a fetch of cached KV from another node. The cost of an option is the sum of
`baton.results.prefill_trace.PlacementTerms`. A prefill by the generation group delays the group's running sequences.
This delay is not a term of the cost, because the engine limits it (`generate_workers.engine.step_bound`).

Each term is predicted for the workers that would do the work, by the planner of their device
(`baton.planning.planner.ChainPlanner.for_device`). If there are more than `_MOST_PRICED` groups of a role, only that
many of them are compared.

Created by `orchestrator.placement.chooser`. Changes no state. Runs on the event loop.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from baton.results.prefill_trace import Placement, PlacementTerms
from baton.types import TokenRange
from orchestrator.membership.view import ClusterView, G, GenerationGroup, Group, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch, PromptSources, node_of
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.placement.context import AttemptPrompt
from orchestrator.requests.config import Disaggregation
from orchestrator.requests.record import RequestRecord

Reuse = Literal["none", "node", "cluster"]
"""Cached blocks that a plan may rely on: none, those that the prefix index lists on a group's own node, or also those
of other nodes. The latter are fetched where this is predicted to be faster than computing them."""
_MOST_PRICED = 16
"""Maximum number of groups of each role whose costs are predicted for a request."""
ALIKE_S = 1e-3
"""Resolution in seconds for comparing generation groups. If several have equal costs at this resolution, the group with
the most free slots is selected."""
_DIGITS = 9
"""Number of decimals to which costs in seconds are rounded before they are compared. Equal options may differ by
rounding errors."""


@dataclass(frozen=True)
class GroupChain:
    """Chain of ranks in a prefill group that could prefill a prompt now."""

    group: PrefillGroup
    plan: ChainPlan
    fetch: BlockFetch | None = None
    """Fetch of cached KV to the chain's node, which must end before the chain starts. None if no KV is fetched."""

    @cached_property
    def nodes(self) -> frozenset[str]:
        """Nodes (host names) on which the chain's ranks run."""
        return frozenset(map(node_of, self.group.endpoints))

    def terms(self, steps_s: float = 0.0, transfer_s: float = 0.0) -> PlacementTerms:
        """Return the chain's predicted costs. `steps_s` is the time that the request waits for decode steps of the
        generation group, and `transfer_s` the time of the transfer of KV that does not overlap with the prefill."""
        own_s = self.plan.choice.predicted_s or 0.0
        fetch_s = 0.0 if self.fetch is None else self.fetch.predicted_s
        queue_s = max(own_s - self.plan.ttft_s - fetch_s, 0.0)
        return PlacementTerms(queue_s, self.plan.ttft_s, steps_s, transfer_s, self.plan.cost_s - own_s, fetch_s)


class Option(NamedTuple):
    """Option to serve a request: groups, and the predicted cost."""

    generation: GenerationGroup
    terms: PlacementTerms | None
    """Predicted costs. None if they cannot be predicted."""
    chain: GroupChain | None = None
    """Chain that prefills; None if the generation group prefills by itself."""
    fetch: BlockFetch | None = None
    """Fetch of cached KV from another node before the prefill. None if no KV is fetched."""
    lacks_memory: bool = False
    """True if the group's free memory is too small for the KV of the prompt, so that the request would wait."""
    start: int = 0
    """Number of leading tokens whose KV is cached, or is fetched, if the generation group prefills by itself."""

    @property
    def cost_s(self) -> float:
        """Return the cost of the option in seconds; infinity if it cannot be predicted."""
        return float("inf") if self.terms is None else round(self.terms.cost_s, _DIGITS)


class ClusterSnapshot:
    """Options for one attempt at one moment. They are valid only until another task runs."""

    def __init__(self, prompt: AttemptPrompt, *, reuse: Reuse = "cluster", held: str = "") -> None:
        """Create the object for the present moment. `reuse` states which blocks count as cached. `held` is the name of
        the group whose load already includes this request; empty if there is none."""
        self.record = prompt.record
        self._context = prompt.context
        self.prompt = prompt
        self.reuse: Reuse = "none" if prompt.record.wants_prompt_scores else reuse  # scores need all logits
        self._held = held
        self.policy: Disaggregation = "always" if self.record.request.by_chain else self._context.config.disaggregation
        """Setting `disaggregation`, or "always" if the request demands a chain."""
        self._refusal = "never" if self.policy == "never" else ""
        """Reason why no chain may prefill the request in any cluster: a chain computes only the last logits, or chains
        are switched off. Empty if there is none."""
        if prompt.record.wants_prompt_scores:
            self._refusal = "prompt_scores"
        self._now_s = prompt.context.clock.now_s()
        self._cached: dict[tuple[str, str], int] = {}
        """Number of leading prompt tokens whose KV is in a store, by the fingerprint of the KV layout and the name of
        the store."""
        self._sources: dict[str, PromptSources] = {}
        """Stores that have leading blocks of the prompt, by the fingerprint of the KV layout."""
        self._chains: dict[tuple[str, frozenset[Hashable]], list[tuple[float, GroupChain]]] = {}
        """Possible chains for the prompt in ready prefill groups, each with its cost in seconds without the transfer of
        KV. The key is the fingerprint of the KV layout and the set of incarnations that were excluded."""
        self._plans: dict[tuple[int, int, int, Hashable], ChainPlan] = {}
        """Plans of chains, by planner, position of the first token to compute, number of ranks, and incarnation of the
        group. Groups without unfinished jobs share a plan, with None as the incarnation."""
        self._alone_s: dict[tuple[int, int], float | None] = {}
        """Predicted seconds of a prefill on a generation group that runs no other sequences, by planner and position of
        the first token to compute. None if the time cannot be predicted."""
        self._steps_s: dict[str, float] = {}
        """Predicted seconds of a decode step of each generation group, by name."""

    def options(self, groups: Sequence[GenerationGroup], avoid: Collection[Hashable] = ()) -> list[Option]:
        """Return the options to serve the request on each of these generation groups: the cheapest chain, and the group
        itself, each without a fetch and, if KV can be fetched, with one.

        Only ready prefill groups whose incarnation is not in `avoid` are considered, and none if no chain may prefill.
        If a chain can prefill, the group itself is an option only if its cost can be predicted.
        """
        found: list[Option] = []
        for group in self._sample(groups, groups[0].layout_fingerprint if groups else ""):
            lacks_memory = self._lacks_memory(group)
            chains = [] if self._refusal else self.by_chains(group, avoid, lacks_memory)
            is_compared = not chains or not lacks_memory  # the wait for memory is unknown
            local = self._locals(group, lacks_memory) if is_compared else ()
            found += [*chains, *(each for each in local if each.terms is not None or not chains)]
        return found

    def by_chains(
        self, generation: GenerationGroup, avoid: Collection[Hashable] = (), lacks_memory: bool = False
    ) -> list[Option]:
        """Return the options that prefill by a chain: the cheapest chain without a fetch of cached KV, and the cheapest
        one with a fetch. Of chains with equal costs, the first in the cluster view is selected."""
        num_cached = self._cached_tokens(generation.layout_fingerprint, generation.prefix_store)
        num_missing = self.record.num_tokens - num_cached
        node = node_of(generation.endpoint)
        best: dict[bool, tuple[float, float, GroupChain]] = {}
        for alone_s, chain in self._chains_for(generation, avoid):
            planner, is_elsewhere = self._context.planner_of(chain.group), node not in chain.nodes
            moved_s = planner.transfer_s(num_missing, chain.plan.ttft_s, is_elsewhere=is_elsewhere)
            cost_s = round(alone_s + moved_s, _DIGITS)
            known = best.get(chain.fetch is not None)
            if known is None or cost_s < known[0]:
                best[chain.fetch is not None] = cost_s, moved_s, chain
        waited_s = self._step_s(generation) / 2  # half of the step that runs when the last KV arrives, on average
        return [
            Option(generation, chain.terms(waited_s, moved_s), chain, chain.fetch, lacks_memory)
            for _, (_, moved_s, chain) in sorted(best.items(), key=lambda each: each[0])
        ]

    def rule(self, generation: GenerationGroup) -> str:
        """Return the reason why no chain may prefill for this generation group: that of `_refusal`, or that no prefill
        group exists. Return an empty string if a chain may prefill."""
        has_groups = self._context.members.view.chains_for(generation).prefill
        return self._refusal or ("" if has_groups else "no_prefill_groups")

    def order(self, option: Option) -> tuple[bool, float, int]:
        """Return the sort key by which generation groups are compared. Groups that lack memory come last. Among nearly
        equal costs, the group with the most free slots comes first. An unknown cost counts as 0."""
        group, cost_s = option.generation, 0.0 if option.terms is None else option.terms.cost_s
        num_slots = self._context.members.load(group.name).num_slots
        return option.lacks_memory, cost_s // ALIKE_S, num_slots - group.num_slots

    def _locals(self, generation: GenerationGroup, lacks_memory: bool) -> Iterator[Option]:
        """Yield the options to prefill on the generation group itself, one for each start (see `_starts`)."""
        planner, step_s = self._context.planner_of(generation), self._step_s(generation)
        queue_s = self._context.generation_load.queue_s(generation.incarnation, self._now_s)
        for start, fetch in self._starts(generation.layout_fingerprint, generation.prefix_store):
            tokens, key = TokenRange(start, self.record.num_tokens), (id(planner), start)
            if key not in self._alone_s:
                self._alone_s[key] = planner.alone_s(tokens)
            terms, found = None, planner.local_s(tokens, step_s, self._alone_s[key])
            if found is not None:
                fetch_s = 0.0 if fetch is None else fetch.predicted_s
                left_s = max(queue_s - fetch_s, 0.0)
                terms = PlacementTerms(left_s, *found, transfer_s=0.0, others_s=0.0, fetch_s=fetch_s)
            yield Option(generation, terms, None, fetch, lacks_memory, start)

    def _chains_for(self, generation: GenerationGroup, avoid: Collection[Hashable]) -> list[tuple[float, GroupChain]]:
        """Return the prompt's chains whose KV layout the generation group accepts, each with its cost in seconds
        without the transfer of KV. Chains of incarnations in `avoid` are left out."""
        key = generation.layout_fingerprint, frozenset(avoid)
        if key not in self._chains:
            groups = self._context.members.view.chains_for(generation).prefill
            ready = [group for group in groups if group.ready and group.incarnation not in avoid]
            chains = [each for group in self._sample(ready, key[0]) for each in self._chains_of(group, key[0])]
            self._chains[key] = [(chain.terms().cost_s, chain) for chain in chains]
        return self._chains[key]

    def _chains_of(self, group: PrefillGroup, layout: str) -> Iterator[GroupChain]:
        """Yield the group's chains, one for each start (see `_starts`)."""
        planner, num_ranks = self._context.planner_of(group), len(group.endpoints)
        pending = self._context.members.prefill_queues.pending(group.incarnation, self._now_s)
        for start, fetch in self._starts(layout, group.prefix_store):
            key = id(planner), start, num_ranks, group.incarnation if pending else None
            if key not in self._plans:
                self._plans[key] = self.prompt.chains(planner, start).plan(num_ranks, pending, self._now_s)
            yield GroupChain(group, self._plans[key], fetch)

    def _step_s(self, generation: GenerationGroup) -> float:
        """Return the predicted seconds of a decode step of the group's sequences, including those that have not
        started; 0 if there are none. The sequences of this request are not counted."""
        if generation.name not in self._steps_s:
            num_own = self.record.request.num_slots if generation.name == self._held else 0
            num_rows = self._context.members.load(generation.name).num_slots - num_own
            self._steps_s[generation.name] = self._context.step_s(generation, num_rows, self.record.num_tokens)
        return self._steps_s[generation.name]

    def _starts(self, layout: str, store: str) -> Iterator[tuple[int, BlockFetch | None]]:
        """Yield the possible positions of the first computed token, for workers with this prefix store: after the
        blocks that the store has and, if further blocks can be fetched into it, after these, with the fetch."""
        yield self._cached_tokens(layout, store), None
        if self.reuse == "cluster" and store:
            if layout not in self._sources:
                self._sources[layout] = PromptSources(self._context.sources, self.prompt.blocks(layout))
            if (fetch := self._sources[layout].into(store)) is not None:
                yield fetch.num_tokens, fetch

    def _cached_tokens(self, layout: str, store: str) -> int:
        """Return how many of the first tokens have KV of this layout in the store."""
        if self.reuse == "none" or not store:
            return 0
        if (layout, store) not in self._cached:
            blocks = self.prompt.blocks(layout)
            self._cached[layout, store] = blocks.cached_tokens(self._context.prefixes.num_held(store, blocks.names))
        return self._cached[layout, store]

    def _lacks_memory(self, generation: GenerationGroup) -> bool:
        """Return True if the group's free memory, as last reported, is too small for the KV of the prompt. Return False
        if the free memory is unknown."""
        free, cost = self._context.members.num_bytes_free.get(generation.name), self._context.planner.cost
        num_tokens = self.record.request.num_slots * self.record.num_tokens
        return free is not None and free < num_tokens * cost.num_layers * cost.kv_bytes

    def _sample(self, groups: Sequence[G], layout: str) -> Sequence[G]:
        """Return at most `_MOST_PRICED` of the groups: those with the most cached tokens of the prompt, and then those
        with the least load. Groups on different devices alternate, because their loads cannot be compared."""
        if len(groups) <= _MOST_PRICED:
            return groups
        members, by_device = self._context.members, defaultdict[int, list[G]](list)
        for group in groups:
            by_device[id(self._context.planner_of(group))].append(group)

        def order(group: Group) -> tuple[int, float]:
            num_cached = self._cached_tokens(layout, group.prefix_store)
            if isinstance(group, PrefillGroup):
                return -num_cached, members.prefill_queues.left_s(group.incarnation, self._now_s)
            return -num_cached, members.load(group.name).num_slots / group.num_slots

        alternating = itertools.zip_longest(*(sorted(alike, key=order) for alike in by_device.values()))
        return [group for each in alternating for group in each if group is not None][:_MOST_PRICED]


def decide(options: Sequence[Option], rule: str, policy: Disaggregation) -> tuple[Option, Placement]:
    """Select the cheapest of the options on one generation group, and return it with the reason. Chains are preferred
    to a local prefill of equal cost, and options without a fetch to those with one.

    `rule` is the reason why no chain may prefill, or empty. If `policy` is "always", a chain prefills even if a local
    prefill is predicted to be faster.
    """
    chains, locals_ = ([each for each in options if (each.chain is not None) == wanted] for wanted in (True, False))
    chain, local = (min(found, key=lambda each: each.cost_s, default=None) for found in (chains, locals_))
    chain_terms, local_terms = chain and chain.terms, local and local.terms
    if chain is None:
        assert local is not None, "no option"
        chosen, reason = local, rule or "none_ready"
    elif policy == "always":
        chosen, reason = chain, "always"
    elif local is None:
        chosen, reason = chain, "not_predicted"
    elif local.cost_s < chain.cost_s:
        chosen, reason = local, "local_faster"
    else:
        chosen, reason = chain, "chain_faster"
    if chosen.fetch is not None:
        chosen = _with_saving(chosen, chains if chosen is chain else locals_)
    return chosen, Placement(reason, chain_terms, local_terms)


def _with_saving(chosen: Option, options: Sequence[Option]) -> Option:
    """Return an option that fetches cached KV, with the predicted seconds of computation that this saves. They follow
    from the cheapest of `options` that computes the KV instead."""
    assert chosen.fetch is not None and chosen.terms is not None
    plain_s = min(each.terms.cost_s for each in options if each.fetch is None and each.terms is not None)
    saved_s = plain_s - chosen.terms.cost_s + chosen.fetch.predicted_s
    return chosen._replace(fetch=replace(chosen.fetch, saved_s=saved_s))


def able_groups(view: ClusterView, record: RequestRecord, avoid: Collection[Hashable] = ()) -> list[GenerationGroup]:
    """Return the ready generation groups that may serve the request and whose slots are large enough. Groups whose
    incarnation is in `avoid` are excluded."""
    return [
        group
        for group in view.generation
        if group.ready and group.incarnation not in avoid and could_serve(group, record)
    ]


def could_serve(group: GenerationGroup, record: RequestRecord) -> bool:
    """Return True if the group could serve the request once it is ready: its slots are large enough, and it attends to
    all tokens if the request requires this."""
    return group.may_serve(exact=record.request.exact) and group.max_slot_tokens >= record.request.capacity_tokens
