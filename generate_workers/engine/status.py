"""Status of a generation engine, as immutable values that threads may share.

`generate_workers.servicer` sends it: the fields of EngineStatus and SlotLedger that GenerationStatus has under the same
names.
"""

from dataclasses import dataclass

from generate_workers.engine.speculation import SpeculationStats
from generate_workers.slots.leases import SlotLedger


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step."""

    num_decode_rows: int
    num_prefill_tokens: int
    """Number of tokens of local prefill."""
    duration_s: float
    num_kv_bytes: int
    """Bytes of KV that attention read in all layers, in the step and in the draft steps before it."""
    num_weight_bytes: int
    """Bytes of weights read: the model's weights once, and the drafting model's weights once per draft step."""
    num_link_bytes: int
    """Bytes copied between host and device, including those for drafts."""
    num_drafts: int = 0
    """Number of drafts that were verified, of all sequences."""
    num_draft_kv_bytes: int = 0
    """Part of `num_kv_bytes` that draft steps read."""
    predicted_s: float = 0.0
    """Seconds predicted for the drafts and the step; 0 for a step without drafts or with local prefill."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes read from the device's memory. The minimum duration of the step is this number divided by
        the memory's bandwidth in bytes per second."""
        return self.num_kv_bytes + self.num_weight_bytes


@dataclass(frozen=True)
class EngineStatus:
    """Snapshot of the engine for heartbeats and metrics."""

    ledger: SlotLedger
    num_streams: int
    """Number of open requests, including those that wait for a slot or a commit."""
    num_rows: int
    """Number of sequences in the batch."""
    num_steps: int
    """Number of steps begun so far."""
    num_preemptions: int
    """Number of preemptions so far. A preempted sequence releases its memory to older ones and is prefilled again
    later."""
    num_preempted: int
    """Number of preempted sequences that wait to resume."""
    last_step: StepStats | None
    speculation: SpeculationStats | None = None
    """Statistics of speculative decoding; None if it is off."""
    device: str = ""
    """Name of the device that the engine computes on."""
    stall: str = ""
    """Reason why the engine is considered hung, so that its worker must be replaced; empty while it works."""
    num_not_finite: int = 0
    """Number of sequences so far that ended because their logits were NaN or infinite."""
