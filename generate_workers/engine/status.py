"""What a generation engine holds and does, as plain values, safe to share between threads.

`generate_workers.servicer` sends it: fields of EngineStatus and of SlotLedger that GenerationStatus has under the same
names.
"""

from dataclasses import dataclass
from typing import Self

from generate_workers.engine.inbox import StreamBook
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.slots.leases import SlotLedger
from generate_workers.slots.table import SlotTable


@dataclass(frozen=True)
class StepStats:
    """What one step ran, read and took."""

    num_decode_rows: int
    num_prefill_tokens: int
    """Tokens of local prefill."""
    duration_s: float
    num_kv_bytes: int
    """Bytes of KV that attention read, in all layers, for drafts and for verifying them."""
    num_weight_bytes: int
    """Bytes of weights: those of the model once, and for each draft step those of the model that drafts."""
    num_link_bytes: int
    """Bytes copied between host and device, those for drafts included."""
    num_drafts: int = 0
    """Drafts that were verified, of all rows."""
    num_draft_kv_bytes: int = 0
    """Bytes of `num_kv_bytes` that draft steps read."""
    predicted_s: float = 0.0
    """Seconds predicted for the drafts and the step; 0 without drafts, and with local prefill."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the device's memory had to deliver; divided by its bandwidth, the least time of the
        step."""
        return self.num_kv_bytes + self.num_weight_bytes


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot of the engine for heartbeats and metrics."""

    ledger: SlotLedger
    num_streams: int
    """Open requests, including those that wait for a slot or a commit."""
    num_rows: int
    """Rows in the batch."""
    num_steps: int
    """Forwards begun so far."""
    num_preemptions: int
    """Preemptions so far: rows that gave their memory to older rows and are prefilled again later."""
    num_preempted: int
    """Preempted rows that wait to resume."""
    last_step: StepStats | None
    speculation: SpeculationStats | None = None
    """Drafts of speculative decoding; None where it is off."""
    device: str = ""
    """Name of the device that the engine computes on."""
    stall: str = ""
    """Why the engine is thought to hang, so that its worker must be replaced; empty while it works."""
    num_not_finite: int = 0
    """Sequences so far that ended because their logits were NaN or infinite."""

    @classmethod
    def of(
        cls,
        slots: SlotTable,
        book: StreamBook,
        running: RunningRows,
        *,
        num_steps: int,
        last_step: StepStats | None,
        device: str,
        stall: str = "",
        num_not_finite: int = 0,
    ) -> Self:
        """Count what an engine with these slots, streams and rows holds now."""
        return cls(
            ledger=slots.ledger(),
            num_streams=len(book.streams()),
            num_rows=len(running.rows),
            num_steps=num_steps,
            num_preemptions=running.num_preemptions,
            num_preempted=len(running.waiting),
            last_step=last_step,
            speculation=None if running.speculation is None else running.speculation.stats,
            device=device,
            stall=stall,
            num_not_finite=num_not_finite,
        )
