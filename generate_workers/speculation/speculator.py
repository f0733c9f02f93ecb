"""Speculation for the sequences of the batch: plans the drafts of the next round, and learns from the results of each
round.

Implements `engine.speculation`, on the engine's thread. A round consists of draft steps and the step that verifies the
drafts. Sequences join and leave the batch between rounds. Each sequence has its own draft source, number of drafts, and
number of accepted drafts. The work of a round is expressed as StepWork (`baton.planning.work_cost`). The time of a
round is predicted from its work, and measured times update the predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from baton.planning.speculation import (
    MOST_DRAFTS,
    DraftOptions,
    Ints,
    Round,
    expected_drafts,
    plan_at_rate,
    plan_round,
)
from baton.planning.step_cost import StepCost, StepKind
from baton.planning.work_cost import NO_WORK, RowDrafts, StepWork, drafting_work, expected_tokens
from baton.results.timings import DraftCounts
from baton.types import SlotId
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import RowSpan, StepPlan
from generate_workers.engine.speculation import SourceStats, SpeculationStats
from generate_workers.engine.verified import Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.acceptance import Acceptances
from generate_workers.speculation.port import DraftOffers, DraftRequest, Proposer

_MOST_LATE = 3
"""Maximum number of rounds between two full plans. The rounds between them are planned at the rate of the round before
(`plan_at_rate`)."""
_MOST_LATE_WITHOUT_DRAFTS = 15
"""Maximum number of rounds between two full plans, while the planned rounds have no drafts."""


@dataclass(frozen=True)
class DraftSource:
    """Draft source, with the estimates of how often its drafts are accepted."""

    proposer: Proposer
    acceptances: Acceptances
    draft_keys: int = 0
    """Configured number of keys that a draft step attends to; 0 for a source without draft steps."""


class PlannedDrafts(NamedTuple):
    """Drafts that are planned for one sequence."""

    source: str
    """Name of the draft source."""
    kind: int
    """Kind of the drafts, as numbered by the source."""
    num_drafts: int
    context: int
    """Number of keys that the last token of the sequence attends to."""
    draft_keys: int
    """Number of keys that a draft step attends to; 0 for drafts without draft steps."""
    num_tokens: float
    """Expected number of accepted drafts."""


class Speculator:
    """Plans, makes and evaluates the drafts of the batch. For each decoding sequence, it plans the number of drafts
    that saves time."""

    def __init__(
        self,
        sources: Mapping[str, DraftSource],
        slots: SlotTable,
        cost: StepCost,
        *,
        draft_model_cost: StepCost | None = None,
        draft_bytes: tuple[int, int] = (0, 0),
        fixed_drafts: int | None = None,
    ) -> None:
        """`sources`: draft sources by name. If the number of drafts is fixed, a sequence uses the source with the
        largest expected number of tokens, or the first of several equal sources. Otherwise the source is planned
        together with the number of drafts. `cost`: cost of the model's steps, which the scheduling policy updates.
        `draft_model_cost`: cost of the steps of a draft model; None: the model itself runs the draft steps.
        `draft_bytes`: bytes of one token's KV in all layers of the drafting model, and bytes of weights that a draft
        step reads.

        `fixed_drafts`: number of drafts per sequence and round. A request may override it. None: the number is planned
        from costs and expected tokens.
        """
        self._sources = sources
        self._slots = slots
        self._cost = cost
        self._draft_cost = draft_model_cost or cost
        self._draft_bytes = draft_bytes
        self._clock = slots.clock
        self._fixed_drafts = fixed_drafts
        self._counts = {name: DraftCounts(name) for name in sources}
        self.stats = SpeculationStats(sources=self._source_stats())
        """Statistics of the drafts so far. Any thread may read this object, because it is replaced by a new object
        instead of being changed."""
        self._planned: dict[SlotId, PlannedDrafts] = {}
        """Drafts of the next round, by slot. Sequences without drafts are left out."""
        self._plain = NO_WORK
        """Work of the next step without drafts."""
        self._expected = 0.0, 0.0
        """Predicted number of tokens, and predicted seconds, of the next round."""
        self._draft_s = self._drafting_since_s = self._verifying_since_s = 0.0
        self._drafting, self._verifying = NO_WORK, NO_WORK
        """Work of the latest round: that of its draft steps, and that of the step that verified the drafts."""
        self._round: Round | None = None
        """Latest round whose numbers of drafts were planned. None: the next round must be planned in full."""
        self._num_late = 0
        """Number of rounds since the latest full plan."""
        self._num_since_update = 0
        """Number of rounds since the estimates of acceptance were updated."""
        self._index_of: dict[Row, int] = {}
        """Number of each sequence in the estimates of acceptance."""
        self._free_indices = list(range(slots.num_slots))
        self._indices_B: Ints = np.zeros(0, np.int64)
        """Numbers of the next round's sequences."""

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return `plan` with a number of drafts for each decoding sequence. The returned plan also contains the
        additional work of making and verifying the drafts. A sequence gets no drafts if no memory is free for them."""
        is_mixed = plan.num_prefill_tokens > 0
        decoding = [rows[span.slot] for span in plan.spans if not is_mixed or _decodes(span)]
        num_known_B = np.fromiter([row.num_known for row in decoding], np.int64, len(decoding))
        self._plain = StepWork.plain(len(decoding), int(num_known_B.sum()))
        planned = self._take(decoding, num_known_B)
        self._planned = {
            row.slot: drafts
            for row, drafts in planned
            if self._slots.extend(row.slot, drafts.context + drafts.num_drafts) is None
        }
        num_drafts = {slot: drafts.num_drafts for slot, drafts in self._planned.items()}
        drafting, verifying = self._works(num_drafts)
        num_tokens = len(decoding) + sum([each.num_tokens for each in self._planned.values()])
        draft_s = self._draft_cost.drafting.seconds(drafting)
        verify_cost = self._cost.verifying if num_drafts else self._cost.plain
        self._expected = num_tokens, draft_s + verify_cost.seconds(verifying)
        if not num_drafts:
            return plan
        spans = tuple(
            [
                RowSpan(span.slot, span.tokens, span.samples, num) if (num := num_drafts.get(span.slot)) else span
                for span in plan.spans
            ]
        )
        drafts = verifying - self._plain
        return replace(plan, spans=spans, decoding=replace(plan.decoding, drafts=drafts, draft_s=draft_s))

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of the sequences in `plan`. Each draft is made by the source that the method `plan` has
        selected."""
        draft_requests: dict[str, list[DraftRequest]] = {}
        for span in plan.spans:
            if span.num_drafts:
                chosen = self._planned[span.slot]
                request = DraftRequest(rows[span.slot], span.num_drafts, chosen.draft_keys)
                draft_requests.setdefault(chosen.source, []).append(request)
        for name, mine in draft_requests.items():
            self._sources[name].proposer.prepare([request.row for request in mine])
        self._drafting_since_s = self._clock.now_s()
        found: dict[SlotId, Draft] = {}
        for name, mine in draft_requests.items():
            drafts = self._sources[name].proposer.draft(mine)
            for request, draft in zip(mine, drafts, strict=True):
                # cut before the first token that a mask forbids
                if num := request.row.sampler.foresee(draft.token_ids):
                    found[request.row.slot] = replace(draft.first(num), source=name)
        self._drafting, self._verifying = self._works({slot: len(draft) for slot, draft in found.items()})
        if not any(draft.unread for draft in found.values()):
            self._drafted()
        return found

    def read(self, drafts: Drafts) -> None:
        """Wait for drafts that the device is still computing, and record how long they took."""
        unread = [draft for draft in drafts.values() if draft.unread]
        for draft in unread:
            draft.read()
        if unread:
            self._drafted()

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> StepPlan:
        """Record the results of a round (the draft steps and the step that verifies the drafts). Return the plan with
        the work of the drafts that were made, and the measured seconds of the draft steps."""
        verify_s = self._clock.now_s() - self._verifying_since_s
        self._took(drafts, verified)
        tokens, seconds = (0.0, 0.0) if plan.num_prefill_tokens else self._expected
        token_bytes, weight_bytes = self._draft_bytes
        self.stats = SpeculationStats(
            num_drafted=sum(each.num_drafted for each in self._counts.values()),
            num_accepted=sum(each.num_accepted for each in self._counts.values()),
            num_drafts=sum(map(len, drafts.values())),
            expected_tokens=tokens,
            predicted_s=seconds,
            measured_s=self._draft_s + verify_s,
            num_draft_kv_bytes=self._drafting.num_keys * token_bytes,
            num_draft_weight_bytes=self._drafting.num_steps * weight_bytes,
            sources=self._source_stats(),
        )
        if not self._planned:
            return plan
        made = replace(plan.decoding, drafts=self._verifying - self._plain, draft_s=self._draft_s)
        return replace(plan, decoding=made)

    def _drafted(self) -> None:
        """Record that the drafts of the round are made."""
        self._verifying_since_s = self._clock.now_s()
        self._draft_s = self._verifying_since_s - self._drafting_since_s
        if self._drafting.num_steps:
            self._draft_cost.observe(self._drafting, 0.0, self._draft_s, StepKind.DRAFT)

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence in all sources."""
        index = self._index_of.pop(row, None)
        for source in self._sources.values():
            source.proposer.forget(row)
            if index is not None:
                source.acceptances.forget(index)
        if index is not None:
            self._free_indices.append(index)

    def _took(self, drafts: Drafts, verified: Verified) -> None:
        """Record which drafts were accepted."""
        counts = {name: [0, 0, 0] for name in self._sources}
        for slot, (row, num_accepted) in verified.num_accepted.items():
            draft, kind = drafts[slot], self._planned[slot].kind
            num_drafts, mine = len(draft.token_ids), counts[draft.source]
            self._sources[draft.source].acceptances.took(self._index_of.get(row, -1), kind, num_accepted, num_drafts)
            mine[:] = mine[0] + 1, mine[1] + num_drafts, mine[2] + num_accepted
        for name, each in counts.items():
            self._counts[name] += DraftCounts(name, *each)

    def _without_drafts(self, rows: Sequence[Row], num_known_B: Ints, offers: Mapping[str, DraftOffers]) -> bool:
        """Return whether the next round needs no plan and is a normal decode step. This is the case if the round before
        had no drafts, and if no drafts in `offers` are worthwhile at its rate. `offers`: drafts that are made without
        draft steps, by source."""
        last = self._round
        if last is None or last.num_drafts_B.any():
            return False
        if self._fixed_drafts is not None or any(row.sampler.params.num_drafts is not None for row in rows):
            return False
        verifying = self._cost.verifying
        seconds_B1 = (verifying.token_s + num_known_B * verifying.pair_s)[:, None]
        for name, offer in offers.items():
            estimates_BK = self._sources[name].acceptances.of(self._indices_B, offer.kinds)
            if ((estimates_BK > last.rate * seconds_B1) & (offer.num_drafts > 0)).any():
                return False
        self._num_late += 1
        return True

    def _number(self, rows: Sequence[Row]) -> None:
        """Set `_indices_B`. If the sequences are not those of the round before, or if too many rounds were not planned
        in full, the next round is planned in full."""
        for row in rows:
            if row not in self._index_of:
                self._index_of[row] = self._free_indices.pop()
                self._round = None  # the number may be that of a sequence of the round before
        indices_B = np.fromiter([self._index_of[row] for row in rows], np.int64, len(rows))
        is_late = self._round is not None and self._num_late >= (
            _MOST_LATE if self._round.num_drafts_B.any() else _MOST_LATE_WITHOUT_DRAFTS
        )
        if is_late or not np.array_equal(indices_B, self._indices_B):
            self._round = None
        self._indices_B = indices_B
        self._num_since_update += 1

    def _take(self, rows: Sequence[Row], num_known_B: Ints) -> list[tuple[Row, PlannedDrafts]]:
        """Return the drafts of the sequences that get some. The number of drafts is set by the request, else by the
        configuration, else it is planned."""
        self._number(rows)
        most_B = np.array([0 if row.followers else min(row.num_left - 1, MOST_DRAFTS) for row in rows], np.int64)
        sources = self._sources.values()
        looked_up = {
            name: source.proposer.offers(rows, num_known_B, most_B)
            for name, source in self._sources.items()
            if not source.draft_keys
        }
        if not rows or self._without_drafts(rows, num_known_B, looked_up):
            return []
        offers = [
            looked_up[name] if name in looked_up else source.proposer.offers(rows, num_known_B, most_B)
            for name, source in self._sources.items()
        ]
        if self._round is None:
            for source, offer in zip(sources, offers, strict=True):
                source.acceptances.update(self._indices_B, offer.kinds, offer.num_drafts > 0, self._num_since_update)
            self._num_since_update = 0
        estimates = [
            source.acceptances.of(self._indices_B, offer.kinds) for source, offer in zip(sources, offers, strict=True)
        ]
        num_drafts_BK, kinds_BK, num_keys_BK = (np.concatenate(each, 1) for each in zip(*offers, strict=True))
        options = DraftOptions(num_known_B, np.concatenate(estimates, 1), num_drafts_BK, num_keys_BK)
        names = [name for name, offer in zip(self._sources, offers, strict=True) for _ in range(offer.kinds.shape[1])]
        asked = [row.sampler.params.num_drafts for row in rows]
        fixed = [self._fixed_drafts if num is None else num for num in asked]
        num_B, chosen_B = self._choose(fixed, options, [names.index(name) for name in self._sources])
        drafting_D = num_B.nonzero()[0]
        num_D, chosen_D = num_B[drafting_D], chosen_B[drafting_D]
        places = drafting_D, chosen_D
        columns = (
            kinds_BK[places],
            num_D,
            num_known_B[drafting_D],
            num_keys_BK[places],
            expected_drafts(options.acceptance_BK[places], num_D),
        )
        sources_D = [names[chosen] for chosen in chosen_D.tolist()]
        planned = map(PlannedDrafts, sources_D, *[column.tolist() for column in columns])
        return list(zip([rows[index] for index in drafting_D.tolist()], planned, strict=True))

    def _choose(self, fixed: Sequence[int | None], options: DraftOptions, firsts: Sequence[int]) -> tuple[Ints, Ints]:
        """Return the number of drafts and the option of each sequence. `fixed`: numbers of drafts; None if the number
        is planned. `firsts`: first option of each source, of which one is chosen for a fixed number."""
        open_B = np.array([num is None for num in fixed])
        if open_B.all():
            planned = self._plan_round(options)
            return planned.num_drafts_B, planned.chosen_B
        num_B, chosen_B = np.zeros((2, len(fixed)), np.int64)
        if open_B.any():
            planned = self._plan_round(options.of(open_B))
            num_B[open_B], chosen_B[open_B] = planned.num_drafts_B, planned.chosen_B
        for index, num in enumerate(fixed):
            if num is not None:
                most_K, acceptance_K = options.most_drafts_BK[index].clip(0, num), options.acceptance_BK[index]
                tokens = [expected_tokens(float(acceptance_K[first]), int(most_K[first])) for first in firsts]
                chosen_B[index] = firsts[tokens.index(max(tokens))]
                num_B[index] = most_K[chosen_B[index]]
        return num_B, chosen_B

    def _plan_round(self, options: DraftOptions) -> Round:
        """Return a round for sequences whose numbers of drafts are planned, by a full plan or at the rate of the latest
        round."""
        costs, plain, last = (self._cost.verifying, self._draft_cost.drafting), self._cost.plain, self._round
        if last is None:
            self._round, self._num_late = plan_round(options, *costs, plain), 0
        else:
            self._round, self._num_late = plan_at_rate(options, *costs, last, plain), self._num_late + 1
        return self._round

    def _works(self, num_drafts: Mapping[SlotId, int]) -> tuple[StepWork, StepWork]:
        """Return the work of the draft steps, and of the step that verifies the drafts. `num_drafts`: number of drafts
        by slot."""
        num_tokens = num_pairs = 0
        by_source: dict[str, list[RowDrafts]] = {}
        for slot, num in num_drafts.items():
            planned = self._planned[slot]
            num_tokens, num_pairs = num_tokens + num, num_pairs + num * planned.context
            if planned.draft_keys:
                by_source.setdefault(planned.source, []).append(RowDrafts(planned.context, num, planned.draft_keys))
        drafting = sum(map(drafting_work, by_source.values()), NO_WORK)
        return drafting, self._plain + StepWork(num_tokens, 0, num_pairs, 0)

    def _source_stats(self) -> tuple[SourceStats, ...]:
        return tuple([SourceStats(self._counts[name], each.draft_keys) for name, each in self._sources.items()])


def _decodes(span: RowSpan) -> bool:
    """Return whether the span belongs to a decoding sequence."""
    return len(span.tokens) == 1 and span.samples
