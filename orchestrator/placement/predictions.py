"""Predicts each way to serve one request at present: the terms that `orchestrator.placement.comparison` compares.

Made by `orchestrator.placement.chooser` for one attempt at a request; its chains are predicted once, however many
groups are looked at. Changes nothing; on the loop.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton.prefix_blocks import PromptBlocks
from baton.results import PlacementTerms
from baton.types import TokenRange
from orchestrator.membership.members import GenerationGroup, Members, PrefillGroup
from orchestrator.placement.chain_width import PromptChains, WidthPolicy
from orchestrator.placement.comparison import Chain, choose_prefill
from orchestrator.placement.generation_book import Occupancy
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord
from planning.planner import ChainPlanner


@dataclass(frozen=True)
class Outlook:
    """The state that predictions rest on. Owned by the chooser."""

    members: Members
    planner: ChainPlanner
    policy: WidthPolicy
    prefixes: PrefixIndex
    occupancy: Occupancy


class Prospects:
    """Predictions for one attempt at one request."""

    def __init__(
        self, outlook: Outlook, record: RequestRecord, blocks: PromptBlocks, *, uses_cached: bool, holds: bool
    ) -> None:
        """`uses_cached`: whether the blocks that the prefix index names are counted as cached.

        `holds`: whether the load of the group that is asked about includes the request's own slots.
        """
        self._outlook = outlook
        self._record = record
        self._blocks = blocks
        self._uses_cached = uses_cached
        self._num_own = record.num_slots if holds else 0
        self._chains: dict[int, PromptChains] = {}
        """Chains of the prompt, by their first token."""
        self._batches: dict[str, tuple[int, float]] = {}
        """Number of rows and mean tokens of a row, by group. Counting them takes longer than the rest when many
        requests run."""

    def chain(self, generation: GenerationGroup, group: PrefillGroup, now_s: float) -> Chain:
        """Return the prompt's chain in that prefill group and its terms: behind what is cached there, with KV for
        `generation`."""
        outlook, start = self._outlook, self._cached_tokens(group.prefix_store)
        if start not in self._chains:
            tokens = TokenRange(start, self._record.num_tokens)
            self._chains[start] = outlook.policy.chains(tokens, self._record.request.tenant)
        pending = outlook.members.backlogs.pending(group.life, now_s)
        plan = self._chains[start].plan(len(group.endpoints), pending, now_s)
        own_s = plan.choice.predicted_s or 0.0
        num_missing = self._record.num_tokens - self._cached_tokens(generation.prefix_store)
        transfer_s = outlook.planner.push_s(num_missing, plan.ttft_s)
        if _node(generation.endpoint) not in map(_node, group.endpoints):
            transfer_s += 2 * outlook.planner.cost.link.latency_s  # the last piece there, and the commit's answer back
        num_rows, context = self._batch(generation)
        step_s = outlook.planner.step_s(num_rows, context) if num_rows and outlook.planner.steps is not None else 0.0
        return plan, PlacementTerms(
            queue_s=max(own_s - plan.ttft_s, 0.0),
            prefill_s=plan.ttft_s,
            steps_s=step_s / 2,  # on average half of the step that runs when the last KV arrives
            transfer_s=transfer_s,
            others_s=plan.cost_s - own_s,
        )

    def local(self, generation: GenerationGroup, now_s: float) -> PlacementTerms | None:
        """Return the terms of a local prefill by the generation group; None when its duration cannot be predicted."""
        outlook = self._outlook  # a prompt that is scored is computed from its first token
        start = 0 if self._record.wants_prompt_scores else self._cached_tokens(generation.prefix_store)
        found = outlook.planner.local_s(TokenRange(start, self._record.num_tokens), *self._batch(generation))
        if found is None:
            return None
        queue_s = outlook.occupancy.queue_s(generation.life, now_s)
        return PlacementTerms(queue_s, *found, transfer_s=0.0, others_s=0.0)

    def least_s(self, generation: GenerationGroup, now_s: float, avoid: Collection[object] = ()) -> float:
        """Return the predicted seconds of the best way that uses this group; 0 when nothing is known."""
        view = self._outlook.members.view.chains_for(generation)
        found = choose_prefill(view, lambda group: self.chain(generation, group, now_s), avoid)
        ways = [terms for terms in (found and found[2], self.local(generation, now_s)) if terms is not None]
        return min((terms.cost_s for terms in ways), default=0.0)

    def _cached_tokens(self, store: str) -> int:
        if not self._uses_cached or not store:
            return 0
        return self._blocks.cached_tokens(self._outlook.prefixes.num_held(store, self._blocks.names))

    def _batch(self, generation: GenerationGroup) -> tuple[int, float]:
        """Return the group's number of rows, including those to come but not this request's own, and the mean tokens of
        a row."""
        if generation.name not in self._batches:
            load = self._outlook.members.load(generation.name)
            context = self._outlook.occupancy.context_tokens(generation.life)
            num_rows = max(load.num_slots - self._num_own, 0)
            self._batches[generation.name] = num_rows, self._record.num_tokens if context is None else context
        return self._batches[generation.name]


def _node(endpoint: str) -> str:
    """Return the host part of an endpoint, which identifies a node as far as addresses do."""
    return endpoint.rpartition(":")[0]
