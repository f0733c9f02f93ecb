"""The port of batching: which tokens run in the next step, decided in plain integers.

`preemption` asks for a plan and gives its rows their memory, `step_runner` runs it. A row is a sequence of which
`num_known` tokens are known and `num_cached` have their KV in place; it has to run the difference. A row that decodes
has one token to run, a row that prefills has many, so a batch may mix them. `decode_first` is the implementation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.engine.step_bound import NO_DECODING, Decoding


class Progress(Protocol):
    """How far a row of the batch has come."""

    @property
    def num_cached(self) -> int:
        """Return how many tokens have their KV in place."""
        ...

    @property
    def num_known(self) -> int:
        """Return how many tokens are known, prompt and output."""
        ...

    @property
    def num_output(self) -> int:
        """Return how many tokens of the answer are known."""
        ...


@dataclass(frozen=True)
class RowSpan:
    """One row's part of one step."""

    slot: SlotId
    tokens: TokenRange
    """Positions to run; their KV is in place afterwards."""
    samples: bool
    """Whether `tokens` reaches the last known token, so that the next one is sampled."""
    num_drafts: int = 0
    """Most drafts to verify behind `tokens`; the row has memory for their KV."""


@dataclass(frozen=True)
class StepPlan:
    """The work of one step: one forward over all spans."""

    spans: tuple[RowSpan, ...]
    num_prefill_tokens: int = 0
    """Tokens of the spans that do not decode."""
    decoding: Decoding = NO_DECODING
    """Rows that run exactly their last known token, and what they attend to."""
    prefill_work: float = 0.0
    """Work of the prefill spans, in units of PrefillWork."""
    expected_s: float = field(default=0.0, compare=False)
    """Rough prediction of the step's seconds, after which an engine may be thought to hang; 0 while unknown."""

    def __bool__(self) -> bool:
        return bool(self.spans)


class Batcher(Protocol):
    """Decides what each step runs. Owned by the engine's thread; knows no tensors, no memory, no text."""

    def plan(self, rows: Mapping[SlotId, Progress]) -> StepPlan:
        """Return what to run next of the rows, given as they joined. A span begins at its row's `num_cached`; while any
        row has tokens to run, some span does. May be asked again, with fewer rows, before a plan is run."""
        ...

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Note how long the plan's step took, including everything that belongs to a step."""
        ...
