"""Interface of scheduling policies, which decide which tokens run in the next step. They work on integers only.

`preemption` requests a plan and reserves memory for its sequences. `model_runner` runs the plan. A sequence has
`num_known` known tokens. The KV of the first `num_cached` of them is complete, and the other tokens must run. A
decoding sequence has one token to run, and a prefilling sequence has more. One batch may contain both.
`chunked_prefill` is the implementation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.types import SlotId, TokenRange
from generate_workers.engine.step_bound import NO_DECODING, Decoding


class Progress(Protocol):
    """Progress of one sequence, as far as a scheduling policy needs to know it."""

    @property
    def num_cached(self) -> int:
        """Number of the sequence's first tokens whose KV is complete."""
        ...

    @property
    def num_known(self) -> int:
        """Number of known tokens, prompt and output together."""
        ...

    @property
    def num_output(self) -> int:
        """Number of known output tokens."""
        ...


@dataclass(frozen=True)
class RowSpan:
    """Tokens of one sequence that a step runs."""

    slot: SlotId
    tokens: TokenRange
    """Positions of the tokens to run. After the step, their KV is complete."""
    samples: bool
    """True if `tokens` includes the sequence's last known token. The step then samples the next token."""
    num_drafts: int = 0
    """Maximum number of drafts that the step verifies. Their positions follow `tokens`. Memory for their KV is
    reserved."""


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step, which is one forward over the spans of several sequences."""

    spans: tuple[RowSpan, ...]
    num_prefill_tokens: int = 0
    """Number of prompt tokens that the step prefills: the tokens of all spans that do not decode."""
    decoding: Decoding = NO_DECODING
    """Decoding part of the step: the sequences that run only their last known token, and their work."""
    prefill_work: float = 0.0
    """Work of the prefill spans, in the unit of PrefillWork (the FLOPs of one token without attention)."""
    expected_s: float = field(default=0.0, compare=False)
    """Rough prediction of the step's duration in seconds, from which the watchdog recognizes a hang. 0 if it is not
    known."""

    def __bool__(self) -> bool:
        return bool(self.spans)


class SchedulingPolicy(Protocol):
    """Interface of an object that plans steps. It is owned by the engine's thread. It does not handle tensors, memory
    or text."""

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        """Return the plan of the next step. `rows` has the sequences by slot, in the order in which they joined. The
        span of a sequence begins at its `num_cached`. The plan is empty only if no sequence has tokens to run. The
        method may be called again with fewer sequences before a plan is run."""
        ...

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of the plan's step in seconds. It includes all work of the step, from processing messages
        to the last event, or, if the step was launched before the step before it was read, the time since that step was
        read. `plan` is the plan as it ran, with the drafts that were made."""
        ...
