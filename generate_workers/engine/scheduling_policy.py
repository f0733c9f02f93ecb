"""Port of batching policies, which decide on plain integers which tokens run in the next step.

`preemption` requests a plan and promises memory to its sequences, and `model_runner` runs it. A sequence has
`num_known` known tokens, and the KV of the first `num_cached` of them is in place; the other tokens have to run. A
decoding sequence has one token to run, a prefilling sequence has more. One batch may mix both. `chunked_prefill` is the
implementation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.types import SlotId, TokenRange
from generate_workers.engine.step_bound import NO_DECODING, Decoding


class Progress(Protocol):
    """Progress of one sequence of the batch."""

    @property
    def num_cached(self) -> int:
        """Return the number of tokens whose KV is in place."""
        ...

    @property
    def num_known(self) -> int:
        """Return the number of known tokens, prompt and output."""
        ...

    @property
    def num_output(self) -> int:
        """Return the number of known output tokens."""
        ...


@dataclass(frozen=True)
class RowSpan:
    """Part of a step that belongs to one sequence."""

    slot: SlotId
    tokens: TokenRange
    """Positions to run. Their KV is in place afterwards."""
    samples: bool
    """True if `tokens` includes the last known token, so that the next token is sampled."""
    num_drafts: int = 0
    """Largest number of drafts to verify after `tokens`. The sequence has memory for their KV."""


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step: one forward over all spans."""

    spans: tuple[RowSpan, ...]
    num_prefill_tokens: int = 0
    """Number of tokens of the spans that do not decode."""
    decoding: Decoding = NO_DECODING
    """Decoding part: the sequences that run exactly their last known token."""
    prefill_work: float = 0.0
    """Work of the prefill spans, in units of PrefillWork."""
    expected_s: float = field(default=0.0, compare=False)
    """Rough prediction of the step's seconds, which the watchdog uses to detect a hang; 0 while unknown."""

    def __bool__(self) -> bool:
        return bool(self.spans)


class SchedulingPolicy(Protocol):
    """Plans steps. Owned by the engine's thread. It handles neither tensors nor memory nor text."""

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        """Return the plan of the next step. `rows`: the sequences in the order in which they joined. A span begins at
        its sequence's `num_cached`. While any sequence has tokens to run, the plan is not empty. May be called again,
        with fewer sequences, before a plan is run."""
        ...

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Record the seconds that the plan's step took, from taking messages to the last event."""
        ...
