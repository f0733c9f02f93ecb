"""Reference implementation of placement. It predicts every combination of a prefill and a generation group separately,
directly by the definitions, and is slow. `orchestrator.placement` must make the same choice."""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace

from baton.prefix_blocks import PromptBlocks
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange
from baton_lab.study.terms import chain_terms, local_terms
from orchestrator.membership.view import GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch, PromptSources, node_of
from orchestrator.placement.chain_width import ChainPlan, PromptChains
from orchestrator.placement.context import PlacementContext
from orchestrator.requests.record import RequestRecord


@dataclass(frozen=True)
class PairWay:
    """One option to serve a request."""

    terms: PlacementTerms
    fetch: BlockFetch | None
    group: PrefillGroup | None = None
    """Prefill group; None: the generation group prefills locally."""
    chain: ChainPlan | None = None


def cost_s(way: PairWay) -> float:
    """Return an option's cost in seconds, rounded to nanoseconds so that floating-point errors do not decide."""
    return round(way.terms.cost_s, 9)


@dataclass(frozen=True)
class AllPairs:
    """All options to serve one request at one point in time."""

    outlook: PlacementContext
    record: RequestRecord

    def chains(self, generation: GenerationGroup, avoid: Collection[Hashable] = ()) -> list[PairWay]:
        """Return the cheapest option of each prefill group that is compatible with the generation group and not in
        `avoid`, in the order of the view."""
        view = self.outlook.members.view
        groups = [group for group in view.prefill if group.layout_fingerprint in ("", generation.layout_fingerprint)]
        ready = [group for group in groups if group.ready and group.incarnation not in avoid]
        return [self._cheaper(self._chains(generation, group)) for group in self._priced(ready, generation)]

    def local(self, generation: GenerationGroup) -> PairWay | None:
        """Return the cheapest option with local prefill by the generation group."""
        ways = list(self.locals(generation))
        return self._cheaper(iter(ways)) if ways else None

    def generation(self, avoid: Collection[Hashable] = ()) -> GenerationGroup | None:
        """Return the generation group with the cheapest option. Only groups with free slots count, and no group whose
        incarnation (one lifetime of its process) is in `avoid`."""
        members, request = self.outlook.members, self.record.request
        able = [
            group
            for group in members.view.generation
            if group.ready
            and group.incarnation not in avoid
            and (not request.exact or not group.is_approximate)
            and group.max_slot_tokens >= request.capacity_tokens
            and members.load(group.name).num_slots + request.num_slots <= group.num_slots
        ]
        if request.by_chain and not self.record.wants_prompt_scores:
            able = [group for group in able if self.chains(group, self.record.avoid)] or able
        if len(able) < 2:
            return able[0] if able else None
        return min(able, key=lambda each: (self._cost_s(each) // 1e-3, self._room(each)))

    def lacks_memory(self, generation: GenerationGroup) -> bool:
        """Return True if the group is known to have too little memory for the request's prompt."""
        free, cost = self.outlook.members.num_bytes_free.get(generation.name), self.outlook.planner.cost
        needed = self.record.request.num_slots * self.record.num_tokens * cost.num_layers * cost.kv_bytes
        return free is not None and free < needed

    def _room(self, generation: GenerationGroup) -> int:
        return self.outlook.members.load(generation.name).num_slots - generation.num_slots

    def _cost_s(self, generation: GenerationGroup) -> float:
        if self.lacks_memory(generation):
            return 1e6
        ways = [] if self.record.wants_prompt_scores else self.chains(generation, self.record.avoid)
        local = self.local(generation)
        if local is not None and not (ways and self.record.request.by_chain):
            ways = [*ways, local]
        return min((way.terms.cost_s for way in ways), default=0.0)

    def _chains(self, generation: GenerationGroup, group: PrefillGroup) -> Iterator[PairWay]:
        outlook = self.outlook
        pending = outlook.members.prefill_queues.pending(group.incarnation, outlook.clock.now_s())
        num_pushed = self.record.num_tokens - self._cached_tokens(generation, generation.prefix_store)
        for start, fetch in self._starts(generation, group.prefix_store):
            tokens, fetch_s = TokenRange(start, self.record.num_tokens), 0.0 if fetch is None else fetch.predicted_s
            planner = outlook.planner_of(group)
            chains = PromptChains(planner, outlook.config, tokens, self.record.request.tenant)
            chain = chains.plan(len(group.endpoints), pending, outlook.clock.now_s())
            own_s = min(chain.choice.options, key=lambda option: option.cost_s).own_s
            terms = chain_terms(
                planner,
                chain.ttft_s,
                num_pushed,
                (0, 0),
                is_elsewhere=all(node_of(each) != node_of(generation.endpoint) for each in group.endpoints),
            )
            terms = replace(terms, steps_s=self._step_s(generation) / 2)
            queue_s = max(own_s - chain.ttft_s - fetch_s, 0.0)
            terms = replace(terms, queue_s=queue_s, others_s=chain.cost_s - own_s, fetch_s=fetch_s)
            yield PairWay(terms, fetch, group, chain)

    def locals(self, generation: GenerationGroup) -> Iterator[PairWay]:
        """Yield the options with local prefill by the generation group."""
        outlook, record = self.outlook, self.record
        queue_s = outlook.generation_load.queue_s(generation.incarnation, outlook.clock.now_s())
        starts = iter([(0, None)]) if record.wants_prompt_scores else self._starts(generation, generation.prefix_store)
        for start, fetch in starts:
            fetch_s = 0.0 if fetch is None else fetch.predicted_s
            terms = local_terms(
                outlook.planner_of(generation), TokenRange(start, record.num_tokens), self._batch(generation)
            )
            if terms is not None:
                yield PairWay(replace(terms, queue_s=max(queue_s - fetch_s, 0.0), fetch_s=fetch_s), fetch)

    def _starts(self, generation: GenerationGroup, store: str) -> Iterator[tuple[int, BlockFetch | None]]:
        """Yield the numbers of leading tokens whose KV the given prefix store provides, first without a fetch and then
        with a fetch into the store."""
        yield self._cached_tokens(generation, store), None
        fetch = PromptSources(self.outlook.sources, self._blocks(generation)).into(store) if store else None
        if fetch is not None:
            yield fetch.num_tokens, fetch

    def _cached_tokens(self, generation: GenerationGroup, store: str) -> int:
        blocks = self._blocks(generation)
        return blocks.cached_tokens(self.outlook.prefixes.num_held(store, blocks.names))

    def _blocks(self, generation: GenerationGroup) -> PromptBlocks:
        request, layout = self.record.request, generation.layout_fingerprint
        return PromptBlocks.of(request.prompt_ids, self.outlook.config.block_tokens, layout, request.prefix_salt)

    def _priced(self, groups: list[PrefillGroup], generation: GenerationGroup) -> list[PrefillGroup]:
        """Return the groups that are compared, of which there are at most 16."""
        if len(groups) <= 16:
            return groups
        by_device: dict[str, list[PrefillGroup]] = {}
        for group in groups:
            by_device.setdefault("" if group.profile is None else group.profile.name, []).append(group)
        ranked = []
        for device, alike in enumerate(by_device.values()):
            keys = [(-self._cached_tokens(generation, group.prefix_store), self._left_s(group)) for group in alike]
            in_order = sorted(range(len(alike)), key=keys.__getitem__)
            ranked += [(place, device, alike[number]) for place, number in enumerate(in_order)]
        return [group for _, _, group in sorted(ranked, key=lambda each: each[:2])[:16]]

    def _left_s(self, group: PrefillGroup) -> float:
        jobs = self.outlook.members.prefill_queues.pending(group.incarnation, self.outlook.clock.now_s())
        return sum(sum(job.left_s.values()) for job in jobs)

    def _step_s(self, generation: GenerationGroup) -> float:
        planner, (num_rows, context) = self.outlook.planner_of(generation), self._batch(generation)
        return planner.step_s(num_rows, context) if num_rows else 0.0

    def _batch(self, generation: GenerationGroup) -> tuple[int, float]:
        context = self.outlook.generation_load.context_tokens(generation.incarnation)
        num_rows = self.outlook.members.load(generation.name).num_slots
        return num_rows, self.record.num_tokens if context is None else context

    @staticmethod
    def _cheaper(ways: Iterator[PairWay]) -> PairWay:
        """Return the option without a fetch (the first one), or the option with a fetch if it is cheaper."""
        plain, *others = ways
        for way in others:
            if cost_s(way) < cost_s(plain) and way.fetch is not None:
                saved_s = plain.terms.cost_s - way.terms.cost_s + way.fetch.predicted_s
                return replace(way, fetch=replace(way.fetch, saved_s=saved_s))
        return plain
