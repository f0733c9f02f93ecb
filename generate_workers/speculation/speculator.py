"""Speculation in the batch: what drafts the rows of the next step get, and what is learnt from each round.

An implementation of `engine.speculation`, on the engine's thread. Rows join and leave between rounds; each has its own
source of drafts, its own number of them, and its own number of accepted ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.clock import Clock
from baton.ids import SlotId
from generate_workers.engine.batcher import StepPlan
from generate_workers.engine.rows import Row
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.engine.verified import NO_DRAFT, Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.port import Drafter, DraftWish
from planning.speculation import MOST_DRAFTS, Prospect, Round, plan_round
from planning.step_costs import StepCosts
from planning.work_cost import StepWork


@dataclass(frozen=True)
class Source:
    """A way to draft, and how often its drafts are accepted."""

    drafter: Drafter
    acceptances: Acceptances
    draft_keys: int = 0
    """Keys that a draft step attends to; 0: drafts take no step."""


class Speculator:
    """Drafts for rows that decode, as many as pay."""

    def __init__(
        self,
        sources: Sequence[Source],
        slots: SlotTable,
        costs: StepCosts,
        clock: Clock,
        fixed_drafts: int | None = None,
    ) -> None:
        """`sources`: a row is drafted for by the one whose drafts are most likely accepted, of equals the first.
        `fixed_drafts`: drafts of each row in each round; None: planned by what they cost and bring."""
        self.stats = SpeculationStats()
        """What was drafted so far."""
        self._planned: Round | None = None
        """The round that was planned; None while numbers of drafts are fixed, and where no row decodes."""
        self._sources = sources
        self._slots = slots
        self._costs = costs
        self._clock = clock
        self._fixed_drafts = fixed_drafts
        self._source_of: dict[SlotId, Source] = {}
        """Sources of the rows of the next round."""
        self._draft_s = self._verifying_since_s = 0.0

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return the plan with drafts for the rows where they pay."""
        decoding = [rows[span.slot] for span in plan.spans if len(span.tokens) == 1 and span.samples]
        sources, prospects = zip(*map(self._prospect, decoding), strict=True) if decoding else ((), ())
        self._source_of = {row.slot: source for row, source in zip(decoding, sources, strict=True)}
        if self._fixed_drafts is None:
            self._planned = plan_round(prospects, self._costs.cost) if decoding else None
            numbers: Sequence[int] = () if self._planned is None else self._planned.num_drafts
        else:
            numbers = [min(self._fixed_drafts, prospect.most_drafts) for prospect in prospects]
        with_drafts = {
            row.slot: num
            for row, num in zip(decoding, numbers, strict=True)
            if num and self._slots.extend(row.slot, row.num_known + num) is None
        }
        spans = [replace(span, num_drafts=with_drafts.get(span.slot, 0)) for span in plan.spans]
        return replace(plan, spans=tuple(spans))

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of a plan's rows, by the sources that the rows were planned with."""
        started_s = self._clock.now_s()
        found: dict[SlotId, Draft] = {}
        for source in self._sources:
            mine = [span for span in plan.spans if span.num_drafts and self._source_of[span.slot] is source]
            if mine:
                drafts = source.drafter.draft([DraftWish(rows[span.slot], span.num_drafts) for span in mine])
                found |= {span.slot: each for span, each in zip(mine, drafts, strict=True) if each}
        self._verifying_since_s = self._clock.now_s()
        self._draft_s = self._verifying_since_s - started_s
        return found

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> None:
        """Note what was accepted, and what the round's steps took."""
        verify_s = self._clock.now_s() - self._verifying_since_s
        planned, num_drafts = self._planned, sum(map(len, drafts.values()))
        self.stats = SpeculationStats(
            num_drafted=self.stats.num_drafted + num_drafts,
            num_accepted=self.stats.num_accepted + sum(num for _, num in verified.num_accepted.values()),
            num_drafts=num_drafts,
            expected_tokens=planned.num_tokens if planned is not None else 0.0,
            predicted_s=planned.draft_s + planned.verify_s if planned is not None else 0.0,
            measured_s=self._draft_s + verify_s,
        )
        for slot, (row, num_accepted) in verified.num_accepted.items():
            self._source_of[slot].acceptances.took(row, num_accepted, len(drafts[slot]))
        if plan.num_prefill_tokens:
            return  # prefill is not what these costs are of
        drafted = {span.slot: len(drafts.get(span.slot, NO_DRAFT)) for span in plan.spans}
        num_keys = sum(span.tokens.end for span in plan.spans)
        num_pairs = sum((1 + drafted[span.slot]) * span.tokens.end for span in plan.spans)
        self._costs.observe(StepWork(len(plan.spans) + sum(drafted.values()), num_keys, num_pairs), verify_s)
        stepped = [span for span in plan.spans if drafted[span.slot] and self._source_of[span.slot].draft_keys]
        if stepped:
            keys = [min(self._source_of[span.slot].draft_keys, span.tokens.end) for span in stepped]
            num_keys = sum(each * drafted[span.slot] for each, span in zip(keys, stepped, strict=True))
            num_tokens, num_steps = (of(drafted[span.slot] for span in stepped) for of in (sum, max))
            self._costs.observe(StepWork(num_tokens, num_keys, num_keys, num_steps), self._draft_s)

    def forget(self, row: Row) -> None:
        """Let all sources forget the row."""
        for source in self._sources:
            source.drafter.forget(row)
            source.acceptances.forget(row)

    def _prospect(self, row: Row) -> tuple[Source, Prospect]:
        """Return the source with which the row's drafts are most likely accepted, and what to expect of it."""
        most = 0 if row.followers else min(MOST_DRAFTS, row.num_left - 1)
        offers = [
            (source, Prospect(row.num_known, source.acceptances.of(row), num_drafts, source.draft_keys))
            for source in self._sources
            if (num_drafts := source.drafter.most_drafts(row, most)) > 0
        ]
        if not offers:
            return self._sources[0], Prospect(row.num_known, 0.0, 0, 0)
        return max(offers, key=lambda offer: offer[1].acceptance)
