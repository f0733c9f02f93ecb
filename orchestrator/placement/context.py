"""Data on which the predictions for placements are based: the state of the cluster, and the prompt of an attempt.

Read by `orchestrator.placement.options`. Runs on the event loop.
"""

from collections.abc import Mapping

from baton.planning.planner import ChainPlanner
from baton.prefix_blocks import PromptBlocks
from baton.process.clock import Clock
from baton.types import TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.view import GenerationGroup, Group
from orchestrator.placement.block_fetches import BlockSources
from orchestrator.placement.chain_width import PromptChains
from orchestrator.placement.generation_load import GenerationLoad
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord

_LEAST_STEPS = 32
"""Minimum number of steps from which an engine must have learnt its costs, so that they replace the planner's."""


class PlacementContext:
    """State of the cluster and settings that predictions are based on. Owned by the chooser."""

    def __init__(self, members: Membership, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self.members, self.planner, self.clock, self.config = members, planner, clock, config
        self.prefixes = PrefixIndex()
        """Index of the blocks in all prefix stores, as reported by workers. Updated by `orchestrator.dispatch` and
        `orchestrator.workers.prefix_discovery`."""
        self.sources = BlockSources(members, self.prefixes, planner, clock)
        """Prefix stores from which cached KV may be fetched. `orchestrator.dispatch` reports the result of each fetch
        to this object."""
        self.generation_load = GenerationLoad()
        """List of the attempts that run on each generation group."""

    def planner_of(self, group: Group) -> ChainPlanner:
        """Return the planner for the device on which the group's workers compute."""
        return self.planner if group.profile is None else self.planner.for_device(group.profile)

    def step_s(self, group: GenerationGroup, num_rows: int, num_tokens: int) -> float:
        """Return the predicted seconds of a decode step of the group with `num_rows` sequences; 0 if there are none. It
        follows from the costs that the engine has learnt, or else from the planner of its device. `num_tokens` is the
        number of tokens of a sequence, used if the group has none yet."""
        context = self.generation_load.context_tokens(group.incarnation) or num_tokens
        learnt = self.members.step_costs.get(group.name)
        if num_rows < 1:
            return 0.0
        if learnt is not None and learnt.num_steps >= _LEAST_STEPS:
            return learnt.plain.plain_s(num_rows, context)
        return self.planner_of(group).step_s(num_rows, context)


class AttemptPrompt:
    """Prompt of one attempt: its KV blocks, and the chains of ranks that could prefill it. Blocks and chains do not
    change while the attempt waits. They are computed at first use, because hashing and predicting a long prompt takes a
    while."""

    def __init__(
        self, context: PlacementContext, record: RequestRecord, blocks: Mapping[str, PromptBlocks] | None = None
    ) -> None:
        """Create the object. `blocks` are the prompt's KV blocks that have been computed already, by the fingerprint of
        their KV layout."""
        self.context = context
        self.record = record
        self._blocks = dict(blocks or {})
        self._chains: dict[tuple[int, int], PromptChains] = {}

    def blocks(self, layout_fingerprint: str) -> PromptBlocks:
        """Return the KV blocks of all tokens whose KV the attempt needs. `layout_fingerprint` identifies the KV
        layout."""
        if layout_fingerprint not in self._blocks:
            request = self.record.request
            token_ids = (*request.prompt_ids, *self.record.output_ids)
            made = PromptBlocks.of(token_ids, self.context.config.block_tokens, layout_fingerprint, request.prefix_salt)
            self._blocks[layout_fingerprint] = made
        return self._blocks[layout_fingerprint]

    def chains(self, planner: ChainPlanner, start: int) -> PromptChains:
        """Return the planner of chains that prefill the prompt from position `start` to its end, on ranks whose costs
        `planner` predicts."""
        key = id(planner), start
        if key not in self._chains:
            tokens, config = TokenRange(start, self.record.num_tokens), self.context.config
            self._chains[key] = PromptChains(planner, config, tokens, self.record.request.tenant)
        return self._chains[key]
