"""A simulated batch whose sequences are plain integers and advance as a scheduling policy plans, and a minimal
scheduling policy."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.planning.step_cost import StepCost
from baton.planning.work_cost import WorkCost
from baton.types import SlotId, TokenRange
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.scheduling_policy import Progress, RowSpan, SchedulingPolicy, StepPlan
from generate_workers.engine.step_bound import Decoding, PrefillWork, StepBound


@dataclass
class PlainRow:
    """Progress of a sequence, without the sequence itself."""

    num_cached: int
    num_known: int
    num_output: int


class Batch:
    """Sequences of a simulated engine that runs every plan."""

    def __init__(self, scheduling_policy: SchedulingPolicy) -> None:
        self.rows: dict[SlotId, PlainRow] = {}
        self._scheduling_policy = scheduling_policy

    def join(self, slot: SlotId, *, num_cached: int, num_known: int, num_output: int = 0) -> None:
        self.rows[slot] = PlainRow(num_cached, num_known, num_output)

    def plan(self) -> StepPlan:
        return self._scheduling_policy.plan(self.rows)

    def run(self, took_s: Callable[[StepPlan], float] | None = None) -> StepPlan:
        """Run one step as the engine does: advance all planned sequences, and add an output token to each sequence that
        samples."""
        plan = self.plan()
        for span in plan.spans:
            row = self.rows[span.slot]
            assert row.num_cached == span.tokens.start and len(span.tokens) > 0
            row.num_cached = span.tokens.end
            assert span.samples == (row.num_cached == row.num_known)
            row.num_known += span.samples
            row.num_output += span.samples
        if took_s is not None:
            self._scheduling_policy.took(plan, took_s(plan))
        return plan


def bounded(stretch: float) -> StepBound:
    """Return a limit for steps of an engine with small costs."""
    cost = StepCost(WorkCost(8e-3, 5e-4, 2e-6, 2e-6))
    cost.prefill_s = 1e-3
    return StepBound(cost, stretch)


def by_tokens(max_prefill_tokens: int) -> ChunkedPrefillPolicy:
    """Return a policy that limits prefill only by the number of tokens."""
    return ChunkedPrefillPolicy(max_prefill_tokens, bounded(math.inf), PrefillWork())


class OneByOne:
    """Scheduling policy that runs a single sequence per step, with all its missing tokens. It selects the shortest
    sequence."""

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        missing = {slot: row.num_known - row.num_cached for slot, row in rows.items()}
        waiting = [slot for slot in rows if missing[slot]]
        if not waiting:
            return StepPlan(())
        slot = min(waiting, key=lambda each: rows[each].num_known)
        row = rows[slot]
        spans = (RowSpan(slot, TokenRange(row.num_cached, row.num_known), samples=True),)
        if missing[slot] == 1:
            return StepPlan(spans, decoding=Decoding(1, row.num_known))
        return StepPlan(spans, num_prefill_tokens=missing[slot])

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Ignore the step's duration."""
