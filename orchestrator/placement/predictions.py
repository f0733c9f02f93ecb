"""Predicts the cost of each option to serve one request. `orchestrator.placement.comparison` compares these costs.

Created by `orchestrator.placement.chooser` from the state of the cluster at one moment, and not updated later. The
chains of all prefill groups are planned once. `orchestrator.placement.chain_ranking` then finds the cheapest of them
for each generation group. Changes no state. Runs on the event loop.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from baton.planning.planner import ChainPlanner
from baton.planning.terms import chain_terms, local_terms
from baton.prefix_blocks import PromptBlocks
from baton.process.clock import Clock
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.prefill_queues import Pending
from orchestrator.membership.view import ClusterView, GenerationGroup, PrefillGroup
from orchestrator.placement.block_fetches import BlockFetch, BlockSources, PromptSources, node_of
from orchestrator.placement.chain_ranking import ChainRanking, GroupChain
from orchestrator.placement.chain_width import ChainPlan, PromptChains, WidthPolicy
from orchestrator.placement.comparison import ChainWay, LocalWay
from orchestrator.placement.generation_load import GenerationLoad
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord


@dataclass(frozen=True)
class Outlook:
    """State of the cluster and settings that predictions are based on. Owned by the chooser."""

    members: Membership
    planner: ChainPlanner
    policy: WidthPolicy
    prefixes: PrefixIndex
    sources: BlockSources
    generation_load: GenerationLoad
    clock: Clock
    block_tokens: int

    @property
    def now_s(self) -> float:
        """Return the present time in seconds, on the monotonic clock."""
        return self.clock.now_s()


class AttemptPrompt:
    """Prompt of one attempt: its KV blocks, and the chains of ranks that could prefill it. Blocks and chains do not
    change while the attempt waits. They are computed at first use, because hashing and predicting a long prompt takes a
    while."""

    def __init__(
        self, outlook: Outlook, record: RequestRecord, blocks: Mapping[str, PromptBlocks] | None = None
    ) -> None:
        """Create the object. `blocks` are the prompt's KV blocks that have been computed already, by the fingerprint of
        their KV layout."""
        self.record = record
        self._outlook = outlook
        self._blocks = dict(blocks or {})
        self._chains: dict[int, PromptChains] = {}

    def blocks(self, layout_fingerprint: str) -> PromptBlocks:
        """Return the KV blocks of all tokens whose KV the attempt needs. `layout_fingerprint` identifies the KV
        layout."""
        if layout_fingerprint not in self._blocks:
            request = self.record.request
            token_ids = (*request.prompt_ids, *self.record.output_ids)
            made = PromptBlocks.of(token_ids, self._outlook.block_tokens, layout_fingerprint, request.prefix_salt)
            self._blocks[layout_fingerprint] = made
        return self._blocks[layout_fingerprint]

    def chains(self, start: int) -> PromptChains:
        """Return the planner of chains that prefill the prompt from position `start` to its end."""
        if start not in self._chains:
            tokens = TokenRange(start, self.record.num_tokens)
            self._chains[start] = self._outlook.policy.chains(tokens, self.record.request.tenant)
        return self._chains[start]


class Prospects:
    """Predictions for one attempt at one request. They are valid only at the moment of their creation, so no other task
    may run between the creation and the last call of a method."""

    def __init__(
        self,
        outlook: Outlook,
        prompt: AttemptPrompt,
        *,
        uses_cached: bool = True,
        fetches: bool = True,
        held: str = "",
    ) -> None:
        """Create the predictions for the present moment.

        `uses_cached` is True if blocks that the prefix index lists on a group's own node count as cached. `fetches` is
        True if blocks of other nodes may be fetched, where this is predicted to be faster than computing them. `held`
        is the name of the group whose load already includes this request; empty if there is none.
        """
        self.held = held
        self.uses_cached = uses_cached
        self._outlook = outlook
        self._prompt = prompt
        self._record = prompt.record
        self._fetches = uses_cached and fetches
        self._now_s = outlook.now_s
        self._cached: dict[tuple[str, str], int] = {}
        """Number of leading prompt tokens whose KV is in a store, by the fingerprint of the KV layout and the name of
        the store."""
        self._sources: dict[str, PromptSources] = {}
        """Stores that have leading blocks of the prompt, by the fingerprint of the KV layout."""
        self._chains: dict[str, list[GroupChain]] = {}
        """Possible chains for the prompt in all ready prefill groups, by the fingerprint of the KV layout."""
        self._rankings: dict[tuple[str, frozenset[Hashable]], ChainRanking] = {}
        """Rankings of chains by cost. The key is the fingerprint of the KV layout and the set of incarnations that were
        excluded."""
        self._idle: dict[tuple[int, int], ChainPlan] = {}
        """Plans of chains in groups without unfinished jobs, by the position of the first token to compute and the
        group's number of ranks."""
        self._alone_s: dict[int, float | None] = {}
        """Predicted seconds of a prefill on a generation group that runs no other sequences. The key is the position of
        the first token to compute. The value is None if the time cannot be predicted."""
        self._batches: dict[str, tuple[int, float]] = {}
        """Batch of each generation group, by group name: the number of its sequences, and their mean length in
        tokens."""

    @cached_property
    def view(self) -> ClusterView:
        """Return the groups that may get new work."""
        return self._outlook.members.view

    def blocks(self, layout_fingerprint: str) -> PromptBlocks:
        """Return the names of the KV blocks of all tokens whose KV the attempt needs. The names depend on the KV layout
        with this fingerprint."""
        return self._prompt.blocks(layout_fingerprint)

    def best_chain(self, generation: GenerationGroup, avoid: Collection[Hashable] = ()) -> ChainWay | None:
        """Return the cheapest chain whose KV layout the group `generation` accepts. Only ready prefill groups whose
        incarnation is not in `avoid` are considered. Return None if no such chain exists."""
        found = self._ranking(generation, avoid).best(self._num_missing(generation), node_of(generation.endpoint))
        if found is None:
            return None
        terms = self._terms(found, generation)
        if found.fetch is None or found.without_fetch is None:
            return ChainWay(found.group, found.chain, terms)
        fetch = _saving(found.fetch, self._terms(found.without_fetch, generation), terms)
        return ChainWay(found.group, found.chain, terms, fetch)

    def local(self, generation: GenerationGroup) -> LocalWay | None:
        """Return the option to prefill on the generation group itself. The prefill starts behind the blocks that are
        cached on the group's node. The option includes a fetch of further blocks from another node if this is predicted
        to be faster. Return None if the costs cannot be predicted."""
        plain, fetching = self._local_ways(generation)
        if plain is None or fetching is None or fetching.fetch is None or not _is_cheaper(fetching, plain):
            return plain
        return replace(fetching, fetch=_saving(fetching.fetch, plain.terms, fetching.terms))

    def least_s(self, generation: GenerationGroup) -> float:
        """Return the cost in seconds of the best option that uses this generation group; 0 if no option can be
        predicted."""
        chain, local = self.best_chain(generation), self.local(generation)
        return min((way.terms.cost_s for way in (chain, local) if way is not None), default=0.0)

    def passes_over_fetch(self, generation: GenerationGroup, *, by_chain: bool) -> bool:
        """Return True if cached KV could be fetched, but computing it is predicted to be faster. The prefill by the
        generation group itself is checked. If `by_chain` is True, chains are checked too."""
        plain, fetching = self._local_ways(generation)
        if plain is not None and fetching is not None and not _is_cheaper(fetching, plain):
            return True
        return by_chain and self._ranking(generation).passes_over_fetch(self._num_missing(generation))

    def lacks_memory(self, generation: GenerationGroup) -> bool:
        """Return True if the group's free memory, as last reported, is too small for the KV of the prompt. Return False
        if the free memory is unknown."""
        free, cost = self._outlook.members.num_bytes_free.get(generation.name), self._outlook.planner.cost
        if free is None:
            return False
        num_tokens = self._record.request.num_slots * self._record.num_tokens
        return free < num_tokens * cost.num_layers * cost.kv_bytes

    def _local_ways(self, generation: GenerationGroup) -> tuple[LocalWay | None, LocalWay | None]:
        """Return two options for a prefill by the generation group itself. The first starts behind the blocks that its
        node has cached, the second after a fetch of further blocks. An option is None if its cost cannot be predicted.
        The second is also None if nothing can be fetched."""
        plain = self._local(generation, None)
        fetch = None if self._record.wants_prompt_scores else self._fetch(generation, generation.prefix_store)
        return plain, None if fetch is None else self._local(generation, fetch)

    def _local(self, generation: GenerationGroup, fetch: BlockFetch | None) -> LocalWay | None:
        outlook, record = self._outlook, self._record
        start = 0 if record.wants_prompt_scores else self._start(generation, generation.prefix_store, fetch)
        tokens = TokenRange(start, record.num_tokens)
        if start not in self._alone_s:
            self._alone_s[start] = outlook.planner.alone_s(tokens)
        fetch_s = 0.0 if fetch is None else fetch.predicted_s
        terms = local_terms(
            outlook.planner,
            tokens,
            self._batch(generation),
            alone_s=self._alone_s[start],
        )
        if terms is None:
            return None
        queue_s = max(outlook.generation_load.queue_s(generation.incarnation, self._now_s) - fetch_s, 0.0)
        return LocalWay(replace(terms, queue_s=queue_s, fetch_s=fetch_s), fetch)

    def _ranking(self, generation: GenerationGroup, avoid: Collection[Hashable] = ()) -> ChainRanking:
        """Return the prompt's chains with KV that the group takes, except those of incarnations in `avoid`."""
        layout = generation.layout_fingerprint
        key = layout, frozenset(avoid)
        if key not in self._rankings:
            if layout not in self._chains:
                self._chains[layout] = list(self._all_chains(generation))
            chains = [each for each in self._chains[layout] if each.group.incarnation not in avoid]
            self._rankings[key] = ChainRanking(self._outlook.planner, chains)
        return self._rankings[key]

    def _all_chains(self, generation: GenerationGroup) -> Iterator[GroupChain]:
        """Yield the prompt's chains in all ready prefill groups whose KV layout `generation` accepts. Each chain starts
        after the blocks that its node has cached. If further blocks can be fetched, also yield the chain that starts
        after them."""
        for place, group in enumerate(self.view.chains_for(generation).prefill):
            if not group.ready:
                continue
            pending = self._outlook.members.prefill_queues.pending(group.incarnation, self._now_s)
            start = self._cached_tokens(generation, group.prefix_store)
            plain = GroupChain(group, place, self._plan(start, group, pending))
            yield plain
            fetch = self._fetch(generation, group.prefix_store)
            if fetch is not None:
                yield GroupChain(group, place, self._plan(fetch.num_tokens, group, pending), fetch, plain)

    def _plan(self, start: int, group: PrefillGroup, pending: Sequence[Pending]) -> ChainPlan:
        chains, num_ranks = self._prompt.chains(start), len(group.endpoints)
        if pending:
            return chains.plan(num_ranks, pending, self._now_s)
        if (start, num_ranks) not in self._idle:
            self._idle[start, num_ranks] = chains.plan(num_ranks, (), self._now_s)
        return self._idle[start, num_ranks]

    def _terms(self, found: GroupChain, generation: GenerationGroup) -> PlacementTerms:
        terms = chain_terms(
            self._outlook.planner,
            found.chain.ttft_s,
            self._num_missing(generation),
            self._batch(generation),
            is_elsewhere=node_of(generation.endpoint) not in map(node_of, found.group.endpoints),
        )
        return replace(terms, queue_s=found.queue_s, others_s=found.others_s, fetch_s=found.fetch_s)

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

    def _num_missing(self, generation: GenerationGroup) -> int:
        """Return the number of tokens whose KV a chain pushes to the group."""
        return self._record.num_tokens - self._cached_tokens(generation, generation.prefix_store)

    def _cached_tokens(self, generation: GenerationGroup, store: str) -> int:
        """Return how many of the first tokens have KV in the store, of the layout that the group takes."""
        if not self.uses_cached or not store:
            return 0
        key = generation.layout_fingerprint, store
        if key not in self._cached:
            blocks = self.blocks(generation.layout_fingerprint)
            self._cached[key] = blocks.cached_tokens(self._outlook.prefixes.num_held(store, blocks.names))
        return self._cached[key]

    def _batch(self, generation: GenerationGroup) -> tuple[int, float]:
        """Return the number of the group's sequences, including those that have not started, and their mean number of
        tokens. The sequences of this request are not counted."""
        if generation.name not in self._batches:
            load = self._outlook.members.load(generation.name)
            num_own = self._record.request.num_slots if generation.name == self.held else 0
            context = self._outlook.generation_load.context_tokens(generation.incarnation)
            num_rows = max(load.num_slots - num_own, 0)
            self._batches[generation.name] = num_rows, self._record.num_tokens if context is None else context
        return self._batches[generation.name]


def _is_cheaper(way: LocalWay, other: LocalWay) -> bool:
    return way.terms.cost_s < other.terms.cost_s


def _saving(fetch: BlockFetch, plain: PlacementTerms, fetching: PlacementTerms) -> BlockFetch:
    """Return the fetch with `saved_s` set to the predicted seconds of computation that it saves."""
    return replace(fetch, saved_s=plain.cost_s - fetching.cost_s + fetch.predicted_s)
