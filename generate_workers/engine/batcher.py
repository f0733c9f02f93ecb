"""The tokens that run in the next step: continuous batching as bookkeeping in plain integers.

`preemption` asks for a plan, `step_runner` runs it. A row is a sequence of which `num_known` tokens are known and
`num_cached` have their KV in place; it has to run the difference. A row that decodes has one token to run, a row that
prefills has many and takes them in chunks, so one rule serves both and a batch may mix them:

1. every row that lacks one token runs it (a decode step never waits for a prefill);
2. the other rows share what a step may prefill, in the order in which they joined. That is at most
   `max_prefill_tokens`, and beside rows that decode no more than keeps the step within its bound (`step_bound`), but
   always a few tokens, except in the rare steps by which the bound learns what decoding alone takes.

A row is identified by the slot that it holds. Owned by the engine's thread; knows no tensors, no memory, no text.
"""

import math
from dataclasses import dataclass

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.engine.step_bound import NO_DECODING, Decoding, PrefillWork, StepBound
from planning.local_prefill import LEAST_STEP_TOKENS


@dataclass(frozen=True)
class RowSpan:
    """One row's part of one step."""

    slot: SlotId
    tokens: TokenRange
    """Positions to run; their KV is in place afterwards."""
    samples: bool
    """Whether `tokens` reaches the last known token, so that the next one is sampled."""


@dataclass(frozen=True)
class StepPlan:
    """The work of one step: one forward over all spans."""

    spans: tuple[RowSpan, ...]
    num_decode_rows: int
    """Rows that run exactly their last known token."""
    num_prefill_tokens: int
    """Tokens of all other spans."""
    decoding: Decoding = NO_DECODING
    """Load of the decode rows."""
    prefill_work: float = 0.0
    """Work of the prefill spans, in units of PrefillWork."""

    def __bool__(self) -> bool:
        return bool(self.spans)


@dataclass
class _Progress:
    num_cached: int
    num_known: int


class Batcher:
    """The rows of the running batch, and how far each has come."""

    def __init__(
        self, max_prefill_tokens: int, bound: StepBound | None = None, work: PrefillWork | None = None
    ) -> None:
        """`bound` and `work` limit a step's prefill by predicted time. Without a bound only `max_prefill_tokens`
        counts."""
        assert max_prefill_tokens >= 1
        self._max_prefill_tokens = max_prefill_tokens
        self._bound = bound
        self._work = work or PrefillWork()
        self._rows: dict[SlotId, _Progress] = {}

    def __len__(self) -> int:
        """Return the number of rows in the batch."""
        return len(self._rows)

    def __contains__(self, slot: SlotId) -> bool:
        """Return whether the row in that slot is in the batch."""
        return slot in self._rows

    def join(self, slot: SlotId, *, num_cached: int, num_known: int) -> None:
        """Add a row between two steps: `num_known` tokens are known, the KV of `num_cached` of them is in place."""
        assert slot not in self._rows and 0 <= num_cached <= num_known
        self._rows[slot] = _Progress(num_cached, num_known)

    def leave(self, slot: SlotId) -> None:
        """Remove a row that has ended; the other rows are not disturbed."""
        del self._rows[slot]

    def plan(self) -> StepPlan:
        """Return what to run next; empty when there are no rows. Changes nothing."""
        decoding = self._decoding()
        max_tokens = 0 if self._decodes_alone(decoding) else self._max_prefill_tokens
        budget = _Budget(max_tokens, self._max_work(decoding), self._work)
        spans = []
        for slot, row in self._rows.items():
            num_tokens = row.num_known - row.num_cached
            if num_tokens != 1:
                num_tokens = budget.take(row.num_cached, num_tokens)
            if num_tokens:
                end = row.num_cached + num_tokens
                spans.append(RowSpan(slot, TokenRange(row.num_cached, end), end == row.num_known))
        return StepPlan(tuple(spans), decoding.num_rows, budget.num_taken, decoding, budget.work_taken)

    def ran(self, plan: StepPlan) -> None:
        """Note that the plan was run, so that its KV is in place."""
        for span in plan.spans:
            row = self._rows[span.slot]
            assert row.num_cached == span.tokens.start
            row.num_cached = span.tokens.end

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Tell the bound how long the plan's step took, including everything that belongs to a step."""
        if self._bound is not None:
            self._bound.observe(plan.decoding, plan.prefill_work, seconds)

    def sampled(self, slot: SlotId) -> None:
        """Count one more known token of a row."""
        self._rows[slot].num_known += 1

    def _decoding(self) -> Decoding:
        contexts = [row.num_known for row in self._rows.values() if row.num_known - row.num_cached == 1]
        return Decoding(len(contexts), sum(contexts))

    def _decodes_alone(self, decoding: Decoding) -> bool:
        return self._bound is not None and self._bound.is_to_decode_alone(decoding)

    def _max_work(self, decoding: Decoding) -> float:
        """Return how much prefill fits beside these decode rows; asks the bound only if any row has prefill to do."""
        if self._bound is None or decoding.num_rows == len(self._rows):
            return math.inf
        return self._bound.max_work(decoding)


class _Budget:
    """What is left of one step's prefill."""

    def __init__(self, max_tokens: int, max_work: float, work: PrefillWork) -> None:
        self.num_taken = 0
        """Tokens given out so far."""
        self.work_taken = 0.0
        self._max_tokens = max_tokens
        self._max_work = max_work
        self._work = work

    def take(self, start: int, num_tokens: int) -> int:
        """Return how many of a row's `num_tokens` tokens from `start` on run in this step, and count them."""
        most = min(num_tokens, self._max_tokens - self.num_taken)
        if self._max_work < math.inf:
            fitting = self._work.num_fitting(start, self._max_work - self.work_taken)
            most = min(most, max(fitting, LEAST_STEP_TOKENS - self.num_taken))
        if most == 1 < min(num_tokens, self._max_tokens):
            return 0  # a span of one token counts as a decode row, whose keys a residency policy may choose
        self.num_taken += most
        self.work_taken += self._work.of(TokenRange(start, start + most))
        return most
