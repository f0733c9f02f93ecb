"""Port of speculation: it makes drafts of the next tokens of sequences, and one step verifies the drafts of all
sequences.

`preemption` calls `plan` after memory was promised to the plan's sequences. `core` calls `draft`, verifies the drafts
(`verified`), and calls `observe`. `generate_workers.speculation` is the implementation. Under the coupled rule of
`verified`, drafts never change the text in fp32. In bf16 they may, because a step of more tokens rounds differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.results.timings import DraftCounts
from baton.types import SlotId
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import StepPlan
from generate_workers.engine.verified import Drafts, Verified


@dataclass(frozen=True)
class SourceStats:
    """Statistics of one draft source."""

    counts: DraftCounts
    draft_keys: int
    """Number of keys that a draft step attends to; 0 for a source without draft steps."""


@dataclass(frozen=True)
class SpeculationStats:
    """Statistics of all drafts so far, and of the latest round."""

    num_drafted: int = 0
    """Number of drafts verified so far."""
    num_accepted: int = 0
    """Number of drafts accepted so far."""
    num_drafts: int = 0
    """Number of drafts in the latest round, of all sequences."""
    expected_tokens: float = 0.0
    """Number of tokens predicted for the latest round; 0 for a round whose step also prefilled."""
    predicted_s: float = 0.0
    """Seconds predicted for the latest round; 0 for a round whose step also prefilled."""
    measured_s: float = 0.0
    """Seconds that the latest round took: its draft steps, and the step that verified the drafts."""
    num_draft_kv_bytes: int = 0
    """Bytes of KV that these forward passes read in all layers, assuming `draft_keys` keys per sequence. The true
    number is larger where keys are selected, and for drafts over keys that were selected in an earlier round. A draft
    model's prefill before a sequence's first draft is not counted."""
    num_draft_weight_bytes: int = 0
    """Bytes of the drafting model's weights that the forward passes of the latest round's drafts read."""
    sources: tuple[SourceStats, ...] = ()
    """Statistics of each draft source of the engine."""


class Speculation(Protocol):
    """Makes drafts for decoding sequences. Owned by the engine's thread, except `stats`."""

    @property
    def stats(self) -> SpeculationStats:
        """Return the statistics of the drafts so far. Any thread."""
        ...

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return the plan with a number of drafts for each decoding sequence, and with the work that drafts add.
        Promises memory for the drafts. Sequences for which no memory is free get no drafts."""
        ...

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return the drafts of the plan's sequences, at most the planned number for each. Called right before the plan
        is run."""
        ...

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> None:
        """Learn from a round that has ended: from the drafts accepted and the time that its steps took."""
        ...

    def forget(self, row: Row) -> None:
        """Drop all state of a sequence that releases its slot."""
        ...
