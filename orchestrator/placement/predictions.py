"""Predicts each way to serve one request at present: the terms that `orchestrator.placement.comparison` compares.

Made by `orchestrator.placement.chooser` for one choice; its chains are predicted once, however many groups are looked
at. Changes nothing; on the loop.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar

from baton.clock import Clock
from baton.prefix_blocks import PromptBlocks
from baton.types import TokenRange
from orchestrator.membership.members import Members
from orchestrator.membership.view import GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch, BlockSources, PromptSources, node_of
from orchestrator.placement.chain_width import PromptChains, WidthPolicy
from orchestrator.placement.comparison import ChainWay, LocalWay, cheapest_chain
from orchestrator.placement.generation_book import Occupancy
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord
from planning.planner import ChainPlanner
from planning.terms import chain_terms, local_terms

Way = TypeVar("Way", ChainWay, LocalWay)


@dataclass(frozen=True)
class Outlook:
    """The state that predictions rest on. Owned by the chooser."""

    members: Members
    planner: ChainPlanner
    policy: WidthPolicy
    prefixes: PrefixIndex
    sources: BlockSources
    occupancy: Occupancy
    clock: Clock
    block_tokens: int

    @property
    def now_s(self) -> float:
        """Return the present time, in unix seconds."""
        return self.clock.unix_ns() / 1e9


class Prospects:
    """Predictions for one attempt at one request."""

    def __init__(
        self,
        outlook: Outlook,
        record: RequestRecord,
        *,
        uses_cached: bool,
        holds: bool,
        fetches: bool = True,
        blocks: dict[str, PromptBlocks] | None = None,
    ) -> None:
        """`uses_cached`: whether the blocks that the prefix index names are counted as cached; `fetches`: whether those
        of other nodes are, too, where fetching them is predicted to be faster than computing.

        `holds`: whether the load of the group that is asked about includes the request's own slots. `blocks` are the
        prompt's blocks as far as they are known, by the fingerprint of their layout; others are added, for naming a
        long prompt's blocks takes a while.
        """
        self._outlook = outlook
        self._record = record
        self.passed_over_fetch = False
        """Whether a fetch was possible on some way, and computing was predicted to be faster."""
        self._uses_cached = uses_cached
        self._fetches = uses_cached and fetches
        self._sources: dict[str, PromptSources] = {}
        """Stores that have the prompt's first blocks, by the fingerprint of the blocks' layout."""
        self._num_own = record.request.num_slots if holds else 0
        self._blocks = {} if blocks is None else blocks
        self._chains: dict[int, PromptChains] = {}
        """Chains of the prompt, by their first token."""
        self._batches: dict[str, tuple[int, float]] = {}
        """Number of rows and mean tokens of a row, by group; counting them is slow when many requests run."""

    @property
    def uses_cached(self) -> bool:
        """Return whether the blocks that the prefix index names are counted as cached."""
        return self._uses_cached

    def blocks(self, layout_fingerprint: str) -> PromptBlocks:
        """Return the blocks of all tokens whose KV the attempt has to make, in KV of that layout."""
        if layout_fingerprint not in self._blocks:
            request = self._record.request
            token_ids = (*request.prompt_ids, *self._record.output_ids)
            made = PromptBlocks.of(token_ids, self._outlook.block_tokens, layout_fingerprint, request.prefix_salt)
            self._blocks[layout_fingerprint] = made
        return self._blocks[layout_fingerprint]

    def best_chain(self, generation: GenerationGroup, avoid: Collection[Hashable] = ()) -> ChainWay | None:
        """Return the chain of least cost with KV for `generation`, in a ready prefill group whose life is not in
        `avoid`; None when there is none."""
        groups = self._outlook.members.view.chains_for(generation).prefill
        return cheapest_chain(
            self._chain(generation, group) for group in groups if group.ready and group.life not in avoid
        )

    def local(self, generation: GenerationGroup) -> LocalWay | None:
        """Return the prefill by the generation group itself, behind what its node has or fetches; None when its terms
        cannot be predicted."""
        fetch = None if self._record.wants_prompt_scores else self._fetch(generation, generation.prefix_store)
        return self._cheaper(lambda each: self._local(generation, each), fetch)

    def least_s(self, generation: GenerationGroup) -> float:
        """Return the predicted seconds of the best way that uses this group; 0 when nothing is known."""
        chain, local = self.best_chain(generation), self.local(generation)
        return min((way.terms.cost_s for way in (chain, local) if way is not None), default=0.0)

    def lacks_memory(self, generation: GenerationGroup) -> bool:
        """Return whether the group's free memory, as last reported, is too small even for the KV to be made."""
        free, cost = self._outlook.members.num_bytes_free.get(generation.name), self._outlook.planner.cost
        if free is None:
            return False
        num_tokens = self._record.request.num_slots * self._record.num_tokens
        return free < num_tokens * cost.num_layers * cost.kv_bytes

    def _local(self, generation: GenerationGroup, fetch: BlockFetch | None) -> LocalWay | None:
        outlook, record = self._outlook, self._record
        start = 0 if record.wants_prompt_scores else self._start(generation, generation.prefix_store, fetch)
        queue_s, fetch_s = outlook.occupancy.queue_s(generation.life, outlook.now_s), _fetch_s(fetch)
        terms = local_terms(
            outlook.planner,
            TokenRange(start, record.num_tokens),
            self._batch(generation),
            queue_s=max(queue_s - fetch_s, 0.0),
            fetch_s=fetch_s,
        )
        return None if terms is None else LocalWay(terms, fetch)

    def _chain(self, generation: GenerationGroup, group: PrefillGroup) -> ChainWay:
        """Return the prompt's chain in that prefill group: behind what its node has or fetches, with KV for
        `generation`."""
        fetch = self._fetch(generation, group.prefix_store)
        way = self._cheaper(lambda each: self._chain_behind(generation, group, each), fetch)
        assert way is not None, "chains are always predicted"
        return way

    def _cheaper(self, way_of: Callable[[BlockFetch | None], Way | None], fetch: BlockFetch | None) -> Way | None:
        """Return the way with the fetch if that makes it cheaper as a whole, else the way without."""
        plain = way_of(None)
        fetching = way_of(fetch) if fetch is not None else None
        if fetch is None or plain is None or fetching is None:
            return plain
        if plain.terms.cost_s <= fetching.terms.cost_s:
            self.passed_over_fetch = True
            return plain
        saved_s = plain.terms.cost_s - fetching.terms.cost_s + fetch.predicted_s
        return replace(fetching, fetch=replace(fetch, saved_s=saved_s))

    def _chain_behind(
        self, generation: GenerationGroup, group: PrefillGroup, fetch: BlockFetch | None
    ) -> ChainWay | None:
        outlook, start = self._outlook, self._start(generation, group.prefix_store, fetch)
        now_s = outlook.now_s
        if start not in self._chains:
            tokens = TokenRange(start, self._record.num_tokens)
            self._chains[start] = outlook.policy.chains(tokens, self._record.request.tenant)
        pending = outlook.members.backlogs.pending(group.life, now_s)
        chain = self._chains[start].plan(len(group.endpoints), pending, now_s)
        own_s = chain.choice.predicted_s or 0.0
        num_missing = self._record.num_tokens - self._cached_tokens(generation, generation.prefix_store)
        terms = chain_terms(
            outlook.planner,
            chain.ttft_s,
            num_missing,
            self._batch(generation),
            is_elsewhere=node_of(generation.endpoint) not in map(node_of, group.endpoints),
            queue_s=max(own_s - chain.ttft_s - _fetch_s(fetch), 0.0),  # others are served during the fetch
            others_s=chain.cost_s - own_s,
            fetch_s=_fetch_s(fetch),
        )
        return ChainWay(group, chain, terms, fetch)

    def _fetch(self, generation: GenerationGroup, store: str) -> BlockFetch | None:
        """Return the fetch into the store of the prompt's first blocks that another store has; None when none has any
        that would save computing."""
        if not (self._fetches and store):
            return None
        layout = generation.layout_fingerprint
        if layout not in self._sources:
            blocks = self.blocks(layout)
            names = blocks.cached(blocks.cached_tokens(len(blocks.names)))
            self._sources[layout] = self._outlook.sources.of(names, blocks.block_tokens)
        return self._sources[layout].into(store)

    def _start(self, generation: GenerationGroup, store: str, fetch: BlockFetch | None) -> int:
        """Return how many of the first tokens need not be computed with KV in the store, after the fetch if there is
        one."""
        return self._cached_tokens(generation, store) if fetch is None else fetch.num_tokens

    def _cached_tokens(self, generation: GenerationGroup, store: str) -> int:
        """Return how many of the first tokens have KV in the store, of the layout that the group takes."""
        if not self._uses_cached or not store:
            return 0
        blocks = self.blocks(generation.layout_fingerprint)
        return blocks.cached_tokens(self._outlook.prefixes.num_held(store, blocks.names))

    def _batch(self, generation: GenerationGroup) -> tuple[int, float]:
        """Return the group's number of rows, including those to come but not this request's own, and the mean tokens of
        a row."""
        if generation.name not in self._batches:
            load = self._outlook.members.load(generation.name)
            context = self._outlook.occupancy.context_tokens(generation.life)
            num_rows = max(load.num_slots - self._num_own, 0)
            self._batches[generation.name] = num_rows, self._record.num_tokens if context is None else context
        return self._batches[generation.name]


def _fetch_s(fetch: BlockFetch | None) -> float:
    return 0.0 if fetch is None else fetch.predicted_s
