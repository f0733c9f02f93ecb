"""The port of speculation: drafts of what rows come to sample, which one step verifies for all.

`preemption` asks it for a plan's drafts once the plan has its memory; `core` has them made, verified (`verified`) and
observed. `generate_workers.speculation` is the implementation. By the coupled rule of `verified`, what is drafted
changes how many tokens a step brings, and a text only as far as a step of more tokens rounds otherwise in bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.ids import SlotId
from baton.results.timings import DraftCounts
from generate_workers.engine.batcher import StepPlan
from generate_workers.engine.rows import Row
from generate_workers.engine.verified import Drafts, Verified


@dataclass(frozen=True)
class SourceStats:
    """A way to draft, and what came of it so far."""

    counts: DraftCounts
    draft_keys: int
    """Keys that a draft step attends to; 0 where drafts take no step."""


@dataclass(frozen=True)
class SpeculationStats:
    """What was drafted so far, and the latest round."""

    num_drafted: int = 0
    """Drafts verified so far."""
    num_accepted: int = 0
    """Drafts accepted so far."""
    num_drafts: int = 0
    """Drafts of the latest round, of all rows."""
    expected_tokens: float = 0.0
    """Tokens expected of the latest round; 0 for a round whose step also prefilled."""
    predicted_s: float = 0.0
    """Seconds predicted for the latest round; 0 for a round whose step also prefilled."""
    measured_s: float = 0.0
    """Seconds that the latest round's draft steps and the step that verified took."""
    num_draft_steps: int = 0
    """Forwards of the latest round that made drafts."""
    num_draft_kv_bytes: int = 0
    """Bytes of KV that those forwards read, in all layers, if they attended to `draft_keys` keys of each row: choosing
    keys reads more, and so do drafts over keys that were chosen rounds ago. What a draft model takes in of a row before
    its first draft is not counted."""
    num_draft_weight_bytes: int = 0
    """Bytes of weights that those forwards read, of the model that drafts."""
    sources: tuple[SourceStats, ...] = ()
    """Each way to draft that the engine has."""


class Speculation(Protocol):
    """Drafts for rows that decode. Owned by the engine's thread, but for `stats`."""

    @property
    def stats(self) -> SpeculationStats:
        """Return what was drafted so far. Any thread."""
        ...

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return the plan with numbers of drafts, for which memory is promised, and with the work that they add to its
        decoding. Rows that have no memory for drafts get none."""
        ...

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of a plan's rows: at most as many as planned. Called right before the plan is run."""
        ...

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> None:
        """Learn from a round that has ended: what was accepted, and how long its steps took."""
        ...

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row, which gives its slot back."""
        ...
