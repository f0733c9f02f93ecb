"""Finds groups for a request: the best of those there are, and waits a while where there is none (step 3).

The one place that knows what a choice rests on: the view and the load of the groups, the book of what prefill ranks
have before them, the index of what is cached where, and the planner. `placement` compares, `widths` plans. On the loop.
"""

import logging
from typing import TypeVar

from baton.clock import Clock
from baton.types import TokenRange
from orchestrator.config import OrchestratorConfig
from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import GenerationGroup, Members, NoGroupError, PrefillGroup
from orchestrator.placement import Choose, choose_generation, choose_prefill
from orchestrator.prefix_blocks import PromptBlocks
from orchestrator.prefix_index import PrefixIndex
from orchestrator.widths import ChainPlan, PromptChains, WidthPolicy
from planning.planner import ChainPlanner

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Chooser:
    """Changes nothing but what it counts."""

    def __init__(self, members: Members, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig) -> None:
        self.num_degraded = 0
        """Attempts whose generation group prefilled because no prefill group was ready in time."""
        self.prefixes = PrefixIndex()
        """What is cached where; written by whoever hears from ranks."""
        self._members = members
        self._policy = WidthPolicy(planner, elastic=config.elastic, overtaking=config.overtaking)
        self._clock = clock
        self._config = config

    async def find_generation(self, record: RequestRecord) -> GenerationGroup:
        """A group with room for the request. Raises NoGroupError when none has in time."""
        found = await self._find(self.generation(record), record, self._config.generation_wait_s)
        if found is None:
            raise NoGroupError(
                f"no generation group had a free slot of {record.capacity_tokens} tokens within "
                f"{self._config.generation_wait_s:g} s: see the workers' state, or try again later"
            )
        return found

    def generation(self, record: RequestRecord) -> Choose[GenerationGroup]:
        """The group that has room now, but for some lives."""
        return lambda avoid: choose_generation(self._members.view, self._members.load, record, avoid)

    async def find_prefill(
        self, record: RequestRecord, blocks: PromptBlocks, uses_cached: bool
    ) -> tuple[PrefillGroup, ChainPlan] | None:
        """As `prefill`. None: the generation group is to prefill by itself."""
        if not self._members.view.prefill or record.wants_prompt_scores:
            return None  # a chain's ranks compute no logits but the last
        found = await self._find(self.prefill(record, blocks, uses_cached), record, self._config.prefill_wait_s)
        if found is None:
            self.num_degraded += 1
            logger.warning("degraded request=%s attempt=%d: no prefill group", record.request_id, record.attempt)
        return found

    def prefill(
        self, record: RequestRecord, blocks: PromptBlocks, uses_cached: bool
    ) -> Choose[tuple[PrefillGroup, ChainPlan]]:
        """The group where the prompt costs least as things are, but for some lives, and its chain there. It begins
        behind what is cached there of the prompt's `blocks`, if `uses_cached`."""
        chains: dict[int, PromptChains] = {}

        def plan_for(group: PrefillGroup) -> ChainPlan:
            num_held = self.prefixes.num_held(group.prefix_store, blocks.names) if uses_cached else 0
            start = blocks.cached_tokens(num_held)
            if start not in chains:
                chains[start] = self._policy.chains(TokenRange(start, record.num_tokens))
            now_s = self._clock.unix_ns() / 1e9
            pending = self._members.backlogs.pending(group.life, now_s)
            return chains[start].plan(len(group.endpoints), pending, now_s)

        return lambda avoid: choose_prefill(self._members.view, plan_for, avoid)

    async def _find(self, choose: Choose[T], record: RequestRecord, wait_s: float) -> T | None:
        """A group that has not failed this request, if one comes soon; else any."""
        if record.avoid:
            found = await self._members.until(lambda: choose(record.avoid), self._config.avoid_s)
            if found is not None:
                return found
        return await self._members.until(lambda: choose(()), wait_s)
