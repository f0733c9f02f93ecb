"""The batching policy: rows that decode run first, prefill takes what is left of a step. On the engine's thread.

1. Every row that lacks one token runs it: a decode step never waits for a prefill.
2. The other rows share what a step may prefill, in the order in which they joined. That is at most
   `max_prefill_tokens`, and beside rows that decode no more than keeps the step within its bound (`step_bound`), but
   always a few tokens, except in the rare steps by which the bound learns what decoding alone takes.
3. Prompts that came together, each of at most `max_prefill_tokens`, are one step while no row streams, if all have at
   most four times as many, and 2,048: otherwise the first of them would pause for the others after its first token.
4. A prompt for which `max_prefill_tokens` leave no room waits for the next step, where it comes first, if that can hold
   it whole; a shorter one behind it may take the room. So the first of prompts that come together end early.
"""

import math
from collections.abc import Mapping
from typing import Self

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.batcher import Progress, RowSpan, StepPlan
from generate_workers.engine.step_bound import Decoding, PrefillWork, StepBound
from modeling.forward.model_config import ModelConfig
from planning.local_prefill import LEAST_STEP_TOKENS

_BURST_STEPS, _BURST_TOKENS = 4, 2048
"""Most tokens of prompts that came together and are one step: as many as so many steps take, and no more than these,
whose activations need little memory."""


class DecodeFirst:
    """Rows that decode run in every step, beside bounded chunks of those that prefill."""

    def __init__(
        self, max_prefill_tokens: int, bound: StepBound | None = None, work: PrefillWork | None = None
    ) -> None:
        """`bound` and `work` limit prefill by predicted time; without a bound only `max_prefill_tokens` does."""
        assert max_prefill_tokens >= 1
        self._max_prefill_tokens = max_prefill_tokens
        self._max_burst_tokens = max(max_prefill_tokens, min(_BURST_STEPS * max_prefill_tokens, _BURST_TOKENS))
        self._bound = bound or StepBound(math.inf)
        self._work = work or PrefillWork()

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Self:
        """Make the policy of an engine as configured, with the work of its model."""
        work = PrefillWork.of_model(model)
        bound = StepBound(config.max_step_stretch, config.mixed_step_s, config.burst_step_s)
        return cls(config.max_prefill_tokens_per_step, bound, work)

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        """Return what to run next; empty when no row has tokens to run. Changes nothing."""
        decoding = _decoding(rows)
        max_tokens = 0 if self._bound.is_to_decode_alone(decoding) else self._most_tokens(rows, decoding)
        max_work = math.inf
        if decoding.num_rows != len(rows):
            max_work = self._bound.max_work(decoding, self._waiting(rows))
        budget = _Budget(max_tokens, max_work, self._work)
        spans = []
        for slot, row in rows.items():
            num_tokens = row.num_known - row.num_cached
            if num_tokens != 1:
                num_tokens = budget.take(row.num_cached, num_tokens)
            if num_tokens:
                end = row.num_cached + num_tokens
                spans.append(RowSpan(slot, TokenRange(row.num_cached, end), end == row.num_known))
        expected_s = self._bound.expected_s(decoding, budget.work_taken)
        return StepPlan(tuple(spans), budget.num_taken, decoding, budget.work_taken, expected_s)

    def _most_tokens(self, rows: Mapping[SlotId, Progress], decoding: Decoding) -> int:
        """Return how many tokens the next step may prefill."""
        waiting = [row.num_known - row.num_cached for row in rows.values() if row.num_known - row.num_cached > 1]
        is_one_step = max(waiting, default=0) <= self._max_prefill_tokens and sum(waiting) <= self._max_burst_tokens
        return self._max_burst_tokens if is_one_step and self._bound.may_burst(decoding) else self._max_prefill_tokens

    def _waiting(self, rows: Mapping[SlotId, Progress]) -> float:
        """Return the work of all prefills."""
        left = (TokenRange(row.num_cached, row.num_known) for row in rows.values())
        return sum(self._work.of(tokens) for tokens in left if len(tokens) > 1)

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Tell the bound how long the plan's step took."""
        self._bound.observe(plan.decoding, plan.prefill_work, seconds)


def _decoding(rows: Mapping[SlotId, Progress]) -> Decoding:
    """Return the decoding part of a step that runs all rows which lack one token."""
    decode_rows = [row for row in rows.values() if row.num_known - row.num_cached == 1]
    is_streaming = any(row.num_output > 1 for row in decode_rows)
    return Decoding(len(decode_rows), sum(row.num_known for row in decode_rows), is_streaming=is_streaming)


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
        room = self._max_tokens - self.num_taken
        most = min(num_tokens, room)
        if self._max_work < math.inf:
            fitting = self._work.num_fitting(start, self._max_work - self.work_taken)
            most = min(most, max(fitting, LEAST_STEP_TOKENS - self.num_taken))
        if most == room < num_tokens <= self._max_tokens:
            return 0  # the next step has room for all of it
        if most == 1 < min(num_tokens, self._max_tokens):
            return 0  # a span of one token counts as a decode row, whose keys a residency policy may choose
        self.num_taken += most
        self.work_taken += self._work.of(TokenRange(start, start + most))
        return most
