"""Speculation in the batch: what drafts the rows of the next step get, and what is learnt from each round.

An implementation of `engine.speculation`, on the engine's thread. Rows join and leave between rounds; each has its own
source of drafts, its own number of them, and its own number of accepted ones. A round is some draft steps and the step
that verifies; what it does is counted as StepWork (`planning.work_cost`), by which it is predicted and learnt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.clock import Clock
from baton.ids import SlotId
from baton.results.timings import DraftCounts
from generate_workers.engine.batcher import RowSpan, StepPlan
from generate_workers.engine.rows import Row
from generate_workers.engine.speculation import SourceStats, SpeculationStats
from generate_workers.engine.verified import Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.port import Drafter, DraftWish
from planning.speculation import MOST_DRAFTS, Prospect, expected_tokens, plan_round
from planning.step_costs import StepCosts
from planning.work_cost import NO_WORK, RowDrafts, StepWork, drafting_work, verifying_work


@dataclass(frozen=True)
class Source:
    """A way to draft, and how often its drafts are accepted."""

    drafter: Drafter
    acceptances: Acceptances
    draft_keys: int = 0
    """Keys that a draft step attends to, as configured; 0: drafts take no step."""


@dataclass(frozen=True)
class DraftSteps:
    """What draft steps cost and read: they are forwards of the model itself, or of another."""

    costs: StepCosts
    """Costs of draft steps; where the model itself takes them, those of its other steps, too."""
    token_bytes: int
    """Bytes of a key and value that a draft step attends to, in all layers."""
    weight_bytes: int
    """Bytes of weights that a draft step reads."""


@dataclass(frozen=True)
class Way:
    """A way in which a row can be drafted for."""

    source: str
    """Name of the source of drafts."""
    kind: int
    """Kind of the drafts, as the source tells them apart."""
    prospect: Prospect
    is_configured: bool = True
    """Whether the source drafts as configured: over as many keys as it says."""

    def expected_tokens(self, num_drafts: int) -> float:
        """Return the tokens that the row gets of a round with as many drafts, as far as it can have them."""
        return expected_tokens(self.prospect.acceptance, min(num_drafts, self.prospect.most_drafts))


class Speculator:
    """Drafts for rows that decode, as many as pay."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        slots: SlotTable,
        costs: StepCosts,
        draft_steps: DraftSteps,
        clock: Clock,
        *,
        fixed_drafts: int | None = None,
    ) -> None:
        """`sources`: by name; each row is drafted for by the one that brings most, of equals the first. `costs`: of the
        steps that verify. `draft_steps`: those of all sources, with `costs` where the model itself takes them.
        `fixed_drafts`: drafts of each row in each round, where its request does not say; None: planned by what they
        cost and bring."""
        self._sources = sources
        self._slots = slots
        self._costs = costs
        self._draft_steps = draft_steps
        self._clock = clock
        self._fixed_drafts = fixed_drafts
        self._counts = {name: DraftCounts(name) for name in sources}
        self.stats = SpeculationStats(sources=self._source_stats())
        """What was drafted so far."""
        self._way_of: dict[SlotId, Way] = {}
        """How the rows of the next round are drafted for."""
        self._expected = 0.0, 0.0
        """Tokens and seconds expected of the next round."""
        self._draft_s = self._verifying_since_s = 0.0

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return the plan with drafts for the rows where they pay, and with the work that drafts add."""
        decoding = [rows[span.slot] for span in plan.spans if _decodes(span)]
        taken = self._take(decoding)
        self._way_of = {row.slot: way for row, (way, _) in zip(decoding, taken, strict=True)}
        with_drafts = {
            row.slot: num if num and self._slots.extend(row.slot, row.num_known + num) is None else 0
            for row, (_, num) in zip(decoding, taken, strict=True)
        }
        spans = tuple([replace(span, num_drafts=with_drafts.get(span.slot, 0)) for span in plan.spans])
        drafting, verifying = self._works(spans, with_drafts)
        tokens = sum(expected_tokens(way.prospect.acceptance, with_drafts[slot]) for slot, way in self._way_of.items())
        draft_s = self._draft_steps.costs.cost.seconds(drafting)
        self._expected = tokens, draft_s + self._costs.cost.seconds(verifying)
        added = verifying - StepWork.plain(len(decoding), sum(row.num_known for row in decoding))
        if self._draft_steps.costs is self._costs:
            return replace(plan, spans=spans, decoding=replace(plan.decoding, drafts=added + drafting))
        return replace(plan, spans=spans, decoding=replace(plan.decoding, drafts=added, draft_model_s=draft_s))

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of a plan's rows, by the sources that the rows were planned with."""
        wishes: dict[str, list[DraftWish]] = {}
        for span in plan.spans:
            if span.num_drafts:
                source = self._way_of[span.slot].source
                wish = DraftWish(rows[span.slot], span.num_drafts, self._way_of[span.slot].prospect.draft_keys)
                wishes.setdefault(source, []).append(wish)
        for name, mine in wishes.items():
            self._sources[name].drafter.prepare([wish.row for wish in mine])
        started_s = self._clock.now_s()
        found: dict[SlotId, Draft] = {}
        for name, mine in wishes.items():
            drafts = self._sources[name].drafter.draft(mine)
            for wish, draft in zip(mine, drafts, strict=True):
                if num := wish.row.sampler.foresee(draft.token_ids):  # a constrained row's draft is cut where it errs
                    found[wish.row.slot] = replace(draft.first(num), source=name)
        self._verifying_since_s = self._clock.now_s()
        self._draft_s = self._verifying_since_s - started_s
        return found

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> None:
        """Note what was accepted, and what the round's steps took."""
        verify_s = self._clock.now_s() - self._verifying_since_s
        for slot, (row, num_accepted) in verified.num_accepted.items():
            name, num = drafts[slot].source, len(drafts[slot])
            self._sources[name].acceptances.took(row, num_accepted, num, self._way_of[slot].kind)
            self._counts[name] += DraftCounts(name, 1, num, num_accepted)
        drafting, verifying = self._works(plan.spans, {slot: len(draft) for slot, draft in drafts.items()})
        tokens, seconds = (0.0, 0.0) if plan.num_prefill_tokens else self._expected
        self.stats = SpeculationStats(
            num_drafted=sum(each.num_drafted for each in self._counts.values()),
            num_accepted=sum(each.num_accepted for each in self._counts.values()),
            num_drafts=sum(map(len, drafts.values())),
            expected_tokens=tokens,
            predicted_s=seconds,
            measured_s=self._draft_s + verify_s,
            num_draft_steps=drafting.num_steps,
            num_draft_kv_bytes=drafting.num_keys * self._draft_steps.token_bytes,
            num_draft_weight_bytes=drafting.num_steps * self._draft_steps.weight_bytes,
            sources=self._source_stats(),
        )
        if plan.num_prefill_tokens:
            return  # prefill is not what these costs are of
        self._costs.observe(verifying, verify_s)
        if drafting.num_steps:
            self._draft_steps.costs.observe(drafting, self._draft_s)

    def forget(self, row: Row) -> None:
        """Let all sources forget the row."""
        for source in self._sources.values():
            source.drafter.forget(row)
            source.acceptances.forget(row)

    def _take(self, rows: Sequence[Row]) -> list[tuple[Way, int]]:
        """Return how each row is drafted for, and its number of drafts: as its request says, else as configured, else
        as pays most."""
        ways = [self._ways(row) for row in rows]
        asked = [row.sampler.params.num_drafts for row in rows]
        fixed = [self._fixed_drafts if num is None else num for num in asked]
        open_rows = [[way.prospect for way in each] for each, num in zip(ways, fixed, strict=True) if num is None]
        planned = plan_round(open_rows, self._costs.cost, self._draft_steps.costs.cost) if open_rows else None
        places = iter(() if planned is None else zip(planned.offers, planned.num_drafts, strict=True))
        taken = []
        for each, num in zip(ways, fixed, strict=True):
            if num is None:
                place, planned_num = next(places)
                taken.append((each[place], planned_num))
            else:
                way = max((way for way in each if way.is_configured), key=lambda way: way.expected_tokens(num))
                taken.append((way, min(num, way.prospect.most_drafts)))
        return taken

    def _works(self, spans: Sequence[RowSpan], num_drafts: Mapping[SlotId, int]) -> tuple[StepWork, StepWork]:
        """Return the work of the draft steps, and of the step that verifies these numbers of drafts."""
        decoding = [span for span in spans if _decodes(span)]
        rows = [RowDrafts(span.tokens.end, num_drafts.get(span.slot, 0)) for span in decoding]
        by_source: dict[str, list[RowDrafts]] = {}
        for span, row in zip(decoding, rows, strict=True):
            if row.num_drafts:
                way = self._way_of[span.slot]
                by_source.setdefault(way.source, []).append(replace(row, draft_keys=way.prospect.draft_keys))
        return sum(map(drafting_work, by_source.values()), NO_WORK), verifying_work(rows)

    def _source_stats(self) -> tuple[SourceStats, ...]:
        return tuple([SourceStats(self._counts[name], each.draft_keys) for name, each in self._sources.items()])

    def _ways(self, row: Row) -> list[Way]:
        """Return the ways in which the row can be drafted for; one that drafts nothing, where there is none."""
        most = 0 if row.followers else min(MOST_DRAFTS, row.num_left - 1)
        ways = []
        for name, source in self._sources.items():
            for place, offer in enumerate(source.drafter.offers(row, most) if most > 0 else ()):
                acceptance = source.acceptances.of(row, offer.kind)
                prospect = Prospect(row.num_known, acceptance, offer.num_drafts, offer.num_keys)
                ways.append(Way(name, offer.kind, prospect, is_configured=not place))
        return ways or [Way(next(iter(self._sources)), 0, Prospect(row.num_known, 0.0, 0, 0))]


def _decodes(span: RowSpan) -> bool:
    """Return whether the span is of a row that decodes."""
    return len(span.tokens) == 1 and span.samples
