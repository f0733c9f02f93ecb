"""Speculation controlled by tests: they determine which tokens, or how many, are drafted. Implements the port of
generate_workers.engine.speculation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from baton.types import SlotId
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.speculation import Speculation, SpeculationStats
from generate_workers.engine.verified import Draft, Drafts, Verified
from generate_workers.slots.table import SlotTable


class Told:
    """Drafts the tokens that the test supplies, if they fit into the slot. Implements Speculation."""

    def __init__(self, slots: SlotTable, tell: Callable[[Row], Sequence[int]]) -> None:
        """Create the speculation. `tell` returns a sequence's drafts for the next round; an empty result means no
        drafts."""
        self.stats = SpeculationStats()
        self.accepted: list[tuple[int, int]] = []
        """(number of accepted drafts, number of drafts) of each sequence and round."""
        self._slots = slots
        self._tell = tell
        self._told: dict[SlotId, list[int]] = {}

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        self._told = {}
        for span in plan.spans:
            row = rows[span.slot]
            if len(span.tokens) == 1 and span.samples and not row.followers:
                told = list(self._tell(row))[: row.num_left - 1]
                if told and self._slots.extend(span.slot, row.num_known + len(told)) is None:
                    self._told[span.slot] = told
        spans = [replace(span, num_drafts=len(self._told.get(span.slot, ()))) for span in plan.spans]
        return replace(plan, spans=tuple(spans))

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        return {slot: Draft(told) for slot, told in self._told.items()}

    def read(self, drafts: Drafts) -> None:
        """Do nothing: the drafts are known."""

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> StepPlan:
        self.accepted += [(num, len(drafts[slot])) for slot, (_, num) in verified.num_accepted.items()]
        return plan

    def forget(self, row: Row) -> None:
        """Do nothing: no state is kept per sequence."""


class Curbed:
    """Wrapper of a speculation that limits the number of drafts per sequence and round to a value set by the test.
    Implements Speculation."""

    def __init__(self, speculation: Speculation, most_drafts: Callable[[], int]) -> None:
        self.num_drafts: list[int] = []
        """Number of drafts of each sequence and round."""
        self._speculation = speculation
        self._most_drafts = most_drafts

    @property
    def stats(self) -> SpeculationStats:
        return self._speculation.stats

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        whole = self._speculation.plan(plan, rows)
        return replace(
            whole,
            spans=tuple(replace(each, num_drafts=min(each.num_drafts, self._most_drafts())) for each in whole.spans),
        )

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        self.num_drafts += [span.num_drafts for span in plan.spans]
        return self._speculation.draft(plan, rows)

    def read(self, drafts: Drafts) -> None:
        self._speculation.read(drafts)

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> StepPlan:
        return self._speculation.observe(plan, drafts, verified)

    def forget(self, row: Row) -> None:
        self._speculation.forget(row)
