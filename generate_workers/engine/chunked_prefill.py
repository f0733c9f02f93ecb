"""Scheduling policy: decoding sequences run first, and prefill gets the rest of a step. Runs on the engine's thread.

1. Every decoding sequence (its KV is complete except for the last token) runs in each step. Decoding never waits for
   prefill.
2. The other sequences share the step's prefill tokens, in the order in which they joined. A step prefills at most
   `max_prefill_tokens` tokens. If the step also decodes, its predicted time (`step_bound`) limits prefill further. The
   limit is never zero, except in the rare steps that measure the time of decoding alone.
3. If `step_budget_s` is set and no decoding sequence has more than one output token, all waiting prompts run in one
   step. Otherwise a stream would send its first token, and then pause until other prompts are prefilled. The prompts
   must be short: each has at most `max_prefill_tokens` tokens, and their sum is at most
   max(`max_prefill_tokens`, min(4 * `max_prefill_tokens`, 2,048)).
4. A prompt may not fit into the rest of this step, although it fits completely into an empty step. Such a prompt waits
   for the next step, where it runs first. A later, shorter prompt may use the rest of this step. Of several
   prompts, those that joined first therefore get their first output tokens early.
"""

import math
from collections.abc import Mapping
from typing import Self

from baton.planning.local_prefill import LEAST_STEP_TOKENS
from baton.types import SlotId, TokenRange
from generate_workers.config import EngineConfig
from generate_workers.engine.scheduling_policy import Progress, RowSpan, StepPlan
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.step_bound import Decoding, PrefillWork, StepBound

_BURST_STEPS, _BURST_TOKENS = 4, 2048
"""Limits of a step that prefills all waiting prompts. It may have `_BURST_STEPS` times as many prefill tokens as a
normal step, but at most `_BURST_TOKENS` tokens, because activations of more tokens need much memory."""


class ChunkedPrefillPolicy:
    """SchedulingPolicy with chunked prefill: each step runs all decoding sequences and a limited number of prefill
    tokens."""

    def __init__(self, max_prefill_tokens: int, bound: StepBound, work: PrefillWork) -> None:
        """Make a policy. `max_prefill_tokens` (at least 1) is the maximum number of prefill tokens of a step. `bound`
        also limits prefill by the predicted time of a step. `work` converts prefill tokens to work."""
        assert max_prefill_tokens >= 1
        self._max_prefill_tokens = max_prefill_tokens
        self._max_burst_tokens = max(max_prefill_tokens, min(_BURST_STEPS * max_prefill_tokens, _BURST_TOKENS))
        self._bound = bound
        self._work = work

    @classmethod
    def of(cls, config: EngineConfig, model: ServedModel) -> Self:
        """Return the scheduling policy for an engine's configuration and model."""
        bound = StepBound.of(config.step_budget_s, model.step_cost)
        return cls(config.max_batched_tokens, bound, PrefillWork.of_model(model.decoder.config))

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        """Return the plan of the next step. `rows` has the progress of each sequence, by slot. The plan is empty when
        no sequence has tokens to run. Changes no state."""
        decoding = _decoding(rows)
        is_alone = self._bound.is_to_decode_alone(decoding)
        max_tokens = 0 if is_alone else self._most_tokens(rows, decoding)
        max_work = math.inf
        if decoding.num_rows != len(rows):
            max_work = self._bound.max_work(decoding)
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
        """Return the largest number of tokens that the next step may prefill."""
        waiting = [row.num_known - row.num_cached for row in rows.values() if row.num_known - row.num_cached > 1]
        is_one_step = max(waiting, default=0) <= self._max_prefill_tokens and sum(waiting) <= self._max_burst_tokens
        return self._max_burst_tokens if is_one_step and self._bound.may_burst(decoding) else self._max_prefill_tokens

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Report the duration of a step, in seconds, to the StepBound, which predicts later steps from it."""
        self._bound.observe(plan.decoding, plan.prefill_work, seconds)


def _decoding(rows: Mapping[SlotId, Progress]) -> Decoding:
    """Return the decoding part of a step: all sequences that lack the KV of one token."""
    decode_rows = [row for row in rows.values() if row.num_known - row.num_cached == 1]
    is_streaming = any(row.num_output > 1 for row in decode_rows)
    return Decoding(len(decode_rows), sum(row.num_known for row in decode_rows), is_streaming=is_streaming)


class _Budget:
    """Remaining prefill tokens and remaining prefill work of a step that is being planned."""

    def __init__(self, max_tokens: int, max_work: float, work: PrefillWork) -> None:
        self.num_taken = 0
        """Number of prefill tokens of this budget that were assigned to sequences so far."""
        self.work_taken = 0.0
        self._max_tokens = max_tokens
        self._max_work = max_work
        self._work = work

    def take(self, start: int, num_tokens: int) -> int:
        """Assign prefill tokens of this budget to one sequence: at most `num_tokens` tokens, which begin at position
        `start`. Return the number of assigned tokens, which may be 0."""
        room = self._max_tokens - self.num_taken
        most = min(num_tokens, room)
        if self._max_work < math.inf:
            fitting = self._work.num_fitting(start, self._max_work - self.work_taken)
            most = min(most, max(fitting, LEAST_STEP_TOKENS - self.num_taken))
        if most == room < num_tokens <= self._max_tokens:
            return 0  # the next step has room for all of it
        if most == 1 < min(num_tokens, self._max_tokens):
            return 0  # a span of one token counts as decoding, for which a residency policy may select keys
        self.num_taken += most
        self.work_taken += self._work.of(TokenRange(start, start + most))
        return most
