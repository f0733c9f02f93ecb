"""Speculation for the sequences of the batch: plans the drafts of the next round, and learns from the results of each
round.

Implements `engine.speculation`, on the engine's thread. A round consists of draft steps and the step that verifies the
drafts. Sequences join and leave the batch between rounds. Each sequence has its own draft source, number of drafts, and
number of accepted drafts. The work of a round is expressed as StepWork (`baton.planning.work_cost`). The time of a
round is predicted from its work, and measured times update the predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.planning.speculation import MOST_DRAFTS, Prospect, expected_tokens, plan_round
from baton.planning.step_costs import StepCosts
from baton.planning.work_cost import NO_WORK, RowDrafts, StepWork, drafting_work, verifying_work
from baton.results.timings import DraftCounts
from baton.types import SlotId
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import RowSpan, StepPlan
from generate_workers.engine.speculation import SourceStats, SpeculationStats
from generate_workers.engine.verified import Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.port import DraftRequest, Proposer


@dataclass(frozen=True)
class DraftSource:
    """Draft source, with the estimates of how often its drafts are accepted."""

    proposer: Proposer
    acceptances: Acceptances
    draft_keys: int = 0
    """Configured number of keys that a draft step attends to; 0 for a source without draft steps."""


@dataclass(frozen=True)
class DraftSteps:
    """Costs of draft steps, which are forward passes of the model itself or of a draft model."""

    costs: StepCosts
    """Predicted costs of draft steps. If the model itself runs the draft steps, this is the same object as the costs of
    its other steps."""
    token_bytes: int
    """Number of bytes of one token's key and value in all layers of the drafting model."""
    weight_bytes: int
    """Number of bytes of model weights that a draft step reads."""


@dataclass(frozen=True)
class DraftPlan:
    """Option for the drafts of one sequence: a draft source, and one of the kinds of drafts that the source
    distinguishes."""

    source: str
    """Name of the draft source."""
    kind: int
    """Kind of the drafts, as numbered by the source. Drafts of one kind are expected to be accepted equally often."""
    prospect: Prospect
    is_configured: bool = True
    """True for the first option of a source, which attends to the source's configured number of keys."""

    def expected_tokens(self, num_drafts: int) -> float:
        """Return the expected number of tokens that a sequence gets from a round with `num_drafts` drafts. A round is
        the draft steps and the step that verifies the drafts. The token that the verifying step samples itself is
        included. If `num_drafts` exceeds `prospect.most_drafts`, the sequence's maximum, the result is the one for
        `prospect.most_drafts`."""
        return expected_tokens(self.prospect.acceptance, min(num_drafts, self.prospect.most_drafts))


class Speculator:
    """Plans, makes and evaluates the drafts of the batch. For each decoding sequence, it plans the number of drafts
    that saves time."""

    def __init__(
        self,
        sources: Mapping[str, DraftSource],
        slots: SlotTable,
        costs: StepCosts,
        draft_steps: DraftSteps,
        *,
        fixed_drafts: int | None = None,
    ) -> None:
        """`sources`: draft sources by name. If the number of drafts is fixed, a sequence uses the source with the
        largest expected number of tokens, or the first of several equal sources. Otherwise the source is planned
        together with the number of drafts. `costs`: costs of the steps that verify drafts. `draft_steps`: costs of the
        draft steps of all sources. If the model itself runs the draft steps, `draft_steps.costs` must be the same
        object as `costs`.

        `fixed_drafts`: number of drafts per sequence and round. A request may override it. None: the number is planned
        from costs and expected tokens.
        """
        self._sources = sources
        self._slots = slots
        self._costs = costs
        self._draft_steps = draft_steps
        self._clock = slots.clock
        self._fixed_drafts = fixed_drafts
        self._counts = {name: DraftCounts(name) for name in sources}
        self.stats = SpeculationStats(sources=self._source_stats())
        """Statistics of the drafts so far. Any thread may read this object, because it is replaced by a new object
        instead of being changed."""
        self._draft_plan_of: dict[SlotId, DraftPlan] = {}
        """Draft source and kind of drafts of each sequence in the next round, by slot."""
        self._expected = 0.0, 0.0
        """Predicted number of tokens, and predicted seconds, of the next round."""
        self._draft_s = self._verifying_since_s = 0.0

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return `plan` with a number of drafts for each decoding sequence. The returned plan also contains the
        additional work of making and verifying the drafts. A sequence gets no drafts if no memory is free for them."""
        decoding = [rows[span.slot] for span in plan.spans if _decodes(span)]
        taken = self._take(decoding)
        self._draft_plan_of = {row.slot: draft_plan for row, (draft_plan, _) in zip(decoding, taken, strict=True)}
        with_drafts = {
            row.slot: num if num and self._slots.extend(row.slot, row.num_known + num) is None else 0
            for row, (_, num) in zip(decoding, taken, strict=True)
        }
        spans = tuple([replace(span, num_drafts=with_drafts.get(span.slot, 0)) for span in plan.spans])
        drafting, verifying = self._works(spans, with_drafts)
        tokens = sum(
            expected_tokens(draft_plan.prospect.acceptance, with_drafts[slot])
            for slot, draft_plan in self._draft_plan_of.items()
        )
        draft_s = self._draft_steps.costs.cost.seconds(drafting)
        self._expected = tokens, draft_s + self._costs.cost.seconds(verifying)
        added = verifying - StepWork.plain(len(decoding), sum(row.num_known for row in decoding))
        if self._draft_steps.costs is self._costs:
            return replace(plan, spans=spans, decoding=replace(plan.decoding, drafts=added + drafting))
        return replace(plan, spans=spans, decoding=replace(plan.decoding, drafts=added, draft_model_s=draft_s))

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of the sequences in `plan`. Each draft is made by the source that the method `plan` has
        selected."""
        draft_requests: dict[str, list[DraftRequest]] = {}
        for span in plan.spans:
            if span.num_drafts:
                chosen = self._draft_plan_of[span.slot]
                request = DraftRequest(rows[span.slot], span.num_drafts, chosen.prospect.draft_keys)
                draft_requests.setdefault(chosen.source, []).append(request)
        for name, mine in draft_requests.items():
            self._sources[name].proposer.prepare([request.row for request in mine])
        started_s = self._clock.now_s()
        found: dict[SlotId, Draft] = {}
        for name, mine in draft_requests.items():
            drafts = self._sources[name].proposer.draft(mine)
            for request, draft in zip(mine, drafts, strict=True):
                # cut before the first token that a mask forbids
                if num := request.row.sampler.foresee(draft.token_ids):
                    found[request.row.slot] = replace(draft.first(num), source=name)
        self._verifying_since_s = self._clock.now_s()
        self._draft_s = self._verifying_since_s - started_s
        return found

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> None:
        """Record the results of a round (the draft steps and the step that verifies the drafts): the numbers of
        accepted drafts, and the measured seconds of the steps."""
        verify_s = self._clock.now_s() - self._verifying_since_s
        for slot, (row, num_accepted) in verified.num_accepted.items():
            name, num = drafts[slot].source, len(drafts[slot])
            self._sources[name].acceptances.took(row, num_accepted, num, self._draft_plan_of[slot].kind)
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
            num_draft_kv_bytes=drafting.num_keys * self._draft_steps.token_bytes,
            num_draft_weight_bytes=drafting.num_steps * self._draft_steps.weight_bytes,
            sources=self._source_stats(),
        )
        if plan.num_prefill_tokens:
            return  # the costs do not cover prefill
        self._costs.observe(verifying, verify_s)
        if drafting.num_steps:
            self._draft_steps.costs.observe(drafting, self._draft_s)

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence in all sources."""
        for source in self._sources.values():
            source.proposer.forget(row)
            source.acceptances.forget(row)

    def _take(self, rows: Sequence[Row]) -> list[tuple[DraftPlan, int]]:
        """Return the option and the number of drafts of each sequence. The number is set by the request, else by the
        configuration, else it is planned."""
        draft_plans = [self._draft_plans(row) for row in rows]
        asked = [row.sampler.params.num_drafts for row in rows]
        fixed = [self._fixed_drafts if num is None else num for num in asked]
        open_rows = [
            [draft_plan.prospect for draft_plan in each]
            for each, num in zip(draft_plans, fixed, strict=True)
            if num is None
        ]
        planned = plan_round(open_rows, self._costs.cost, self._draft_steps.costs.cost) if open_rows else None
        places = iter(() if planned is None else zip(planned.offers, planned.num_drafts, strict=True))
        taken = []
        for each, num in zip(draft_plans, fixed, strict=True):
            if num is None:
                place, planned_num = next(places)
                taken.append((each[place], planned_num))
            else:
                draft_plan = max(
                    (draft_plan for draft_plan in each if draft_plan.is_configured),
                    key=lambda draft_plan: draft_plan.expected_tokens(num),
                )
                taken.append((draft_plan, min(num, draft_plan.prospect.most_drafts)))
        return taken

    def _works(self, spans: Sequence[RowSpan], num_drafts: Mapping[SlotId, int]) -> tuple[StepWork, StepWork]:
        """Return the work of the draft steps, and of the step that verifies the drafts. `num_drafts`: number of drafts
        by slot."""
        decoding = [span for span in spans if _decodes(span)]
        rows = [RowDrafts(span.tokens.end, num_drafts.get(span.slot, 0)) for span in decoding]
        by_source: dict[str, list[RowDrafts]] = {}
        for span, row in zip(decoding, rows, strict=True):
            if row.num_drafts:
                draft_plan = self._draft_plan_of[span.slot]
                by_source.setdefault(draft_plan.source, []).append(
                    replace(row, draft_keys=draft_plan.prospect.draft_keys)
                )
        return sum(map(drafting_work, by_source.values()), NO_WORK), verifying_work(rows)

    def _source_stats(self) -> tuple[SourceStats, ...]:
        return tuple([SourceStats(self._counts[name], each.draft_keys) for name, each in self._sources.items()])

    def _draft_plans(self, row: Row) -> list[DraftPlan]:
        """Return the options to make drafts for a sequence; a single option without drafts if no source has an
        option."""
        most = 0 if row.followers else min(MOST_DRAFTS, row.num_left - 1)
        draft_plans = []
        for name, source in self._sources.items():
            for place, offer in enumerate(source.proposer.offers(row, most) if most > 0 else ()):
                acceptance = source.acceptances.of(row, offer.kind)
                prospect = Prospect(row.num_known, acceptance, offer.num_drafts, offer.num_keys)
                draft_plans.append(DraftPlan(name, offer.kind, prospect, is_configured=not place))
        return draft_plans or [DraftPlan(next(iter(self._sources)), 0, Prospect(row.num_known, 0.0, 0, 0))]


def _decodes(span: RowSpan) -> bool:
    """Return whether the span belongs to a decoding sequence."""
    return len(span.tokens) == 1 and span.samples
