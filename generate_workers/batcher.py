"""Which tokens run in the next step: continuous batching as bookkeeping in plain integers.

Step 8 of a request's way (DESIGN.md, section 4). A row is a sequence of which `num_known` tokens are known and
`num_cached` have their KV in place; it has to run the difference. A row that decodes has one token to run, a row
that prefills has many and takes them in chunks, so one rule serves both and a batch may mix them:

1. every row that lacks one token runs it (a decode step never waits for a prefill);
2. the other rows share `max_prefill_tokens` a step, in the order in which they joined.

A row is known by the slot that it holds. Owned by the engine's thread; knows no tensors, no memory, no text.
"""

from dataclasses import dataclass

from baton.ids import SlotId
from baton.types import TokenRange


@dataclass(frozen=True)
class RowSpan:
    """A row's part of one step."""

    slot: SlotId
    tokens: TokenRange
    """Positions to run; their KV is in place afterwards."""
    samples: bool
    """Whether this reaches the last known token, so that the next one is sampled."""


@dataclass(frozen=True)
class StepPlan:
    """What one step runs: one forward over all spans."""

    spans: tuple[RowSpan, ...]
    num_decode_rows: int
    """Rows that run exactly their last known token."""
    num_prefill_tokens: int
    """Tokens of all other spans."""

    def __bool__(self) -> bool:
        return bool(self.spans)


@dataclass
class _Progress:
    num_cached: int
    num_known: int


class Batcher:
    """The rows of the running batch and how far each has come."""

    def __init__(self, max_prefill_tokens: int) -> None:
        assert max_prefill_tokens >= 1
        self._max_prefill_tokens = max_prefill_tokens
        self._rows: dict[SlotId, _Progress] = {}

    def __len__(self) -> int:
        """Rows in the batch."""
        return len(self._rows)

    def __contains__(self, slot: SlotId) -> bool:
        """Whether the row in that slot is in the batch."""
        return slot in self._rows

    def join(self, slot: SlotId, *, num_cached: int, num_known: int) -> None:
        """A row enters between two steps: `num_known` tokens are known, the KV of `num_cached` of them is in place."""
        assert slot not in self._rows and 0 <= num_cached <= num_known
        self._rows[slot] = _Progress(num_cached, num_known)

    def leave(self, slot: SlotId) -> None:
        """A row has ended; the others are not disturbed."""
        del self._rows[slot]

    def plan(self) -> StepPlan:
        """What to run next; empty when there are no rows. Changes nothing."""
        budget = self._max_prefill_tokens
        spans = []
        num_decode_rows = 0
        for slot, row in self._rows.items():
            num_tokens = row.num_known - row.num_cached
            if num_tokens == 1:
                num_decode_rows += 1
            else:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                end = row.num_cached + num_tokens
                spans.append(RowSpan(slot, TokenRange(row.num_cached, end), end == row.num_known))
        return StepPlan(tuple(spans), num_decode_rows, self._max_prefill_tokens - budget)

    def ran(self, plan: StepPlan) -> None:
        """The plan was run: its KV is in place."""
        for span in plan.spans:
            row = self._rows[span.slot]
            assert row.num_cached == span.tokens.start
            row.num_cached = span.tokens.end

    def sampled(self, slot: SlotId) -> None:
        """One more token of the row is known."""
        self._rows[slot].num_known += 1
