"""Interface of speculative decoding. A Speculation makes drafts of the next tokens of sequences. One step then verifies
the drafts of all sequences.

`preemption` calls `plan` after it has reserved memory for the plan's sequences. `pipeline` calls `draft`, runs the step
that verifies the drafts, and calls `read` and `observe`. `generate_workers.speculation` is the implementation. With the
setting `acceptance` = coupled, a draft is accepted only if the model samples the same token (`verified`). Drafts then
never change the text in fp32. In bf16 they may change it, because a step with more tokens rounds differently.
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
    """Number of keys that a draft step attends to. 0 for a source that makes drafts without running a model."""


@dataclass(frozen=True)
class SpeculationStats:
    """Statistics of speculative decoding: totals so far, and values of the latest round. A round is a step that
    verifies drafts, and the steps that made the drafts."""

    num_drafted: int = 0
    """Total number of drafts that were verified so far."""
    num_accepted: int = 0
    """Total number of drafts that were accepted so far."""
    num_drafts: int = 0
    """Number of drafts of all sequences in the latest round. A round is the draft steps, and the step that verifies the
    drafts."""
    expected_tokens: float = 0.0
    """Predicted number of output tokens of the latest round (draft steps, and the step that verifies the drafts). 0 if
    this step also prefilled."""
    predicted_s: float = 0.0
    """Predicted duration in seconds of the latest round (draft steps, and the step that verifies the drafts). 0 if this
    step also prefilled."""
    measured_s: float = 0.0
    """Measured duration of the latest round in seconds. It includes the draft steps and the step that verified the
    drafts."""
    num_draft_kv_bytes: int = 0
    """Estimated bytes of KV that the draft steps of the latest round read in all layers. A round is the draft steps,
    and the step that verifies the drafts. The estimate assumes `draft_keys` keys per sequence. The true number is
    larger if a draft step also reads keys in order to select some of them, if it attends to keys that were selected in
    an earlier round, or if it reads whole pages (`KvPlace.without_unseen`). A draft model's prefill before its first
    draft of a sequence is not counted."""
    num_draft_weight_bytes: int = 0
    """Bytes of weights that the draft steps of the latest round read. A round is the draft steps, and the step that
    verifies the drafts. The weights are those of the model that makes the drafts."""
    sources: tuple[SourceStats, ...] = ()
    """Statistics of each draft source of the engine."""


class Speculation(Protocol):
    """Interface of an object that makes drafts for decoding sequences. Owned by the engine's thread, except `stats`."""

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of all drafts so far. Any thread may read them."""
        ...

    def plan(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> StepPlan:
        """Return a copy of the plan with a number of drafts for each decoding sequence, and with the work that drafts
        add. The method reserves memory for the drafts' KV. A sequence gets no drafts if no memory is free."""
        ...

    def draft(self, plan: StepPlan, rows: Mapping[SlotId, Row]) -> Drafts:
        """Return drafts for the plan's sequences, by slot. A sequence gets at most the planned number of drafts. Called
        directly before the plan is run. The device may still be computing the drafts."""
        ...

    def read(self, drafts: Drafts) -> None:
        """Wait for drafts that the device is still computing. Must be called before they are verified on the host.
        Later calls do nothing."""
        ...

    def observe(self, plan: StepPlan, drafts: Drafts, verified: Verified) -> StepPlan:
        """Record the result of a round (the draft steps, and the step that verified the drafts): the accepted drafts.
        Later plans are based on it. Return the plan with the work of the drafts that were made."""
        ...

    def forget(self, row: Row) -> None:
        """Delete all state of a sequence, because the sequence releases its slot."""
        ...
