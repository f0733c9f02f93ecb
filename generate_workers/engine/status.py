"""Status of a generation engine, as immutable values that threads may share.

`generate_workers.servicer` sends the status as the message GenerationStatus, whose fields have the same names as those
of EngineStatus and SlotLedger.
"""

from dataclasses import dataclass

from baton.planning.step_cost import LearntCosts
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.slots.leases import SlotLedger


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step of the engine."""

    num_decode_rows: int
    num_prefill_tokens: int
    """Number of prompt tokens that the step prefilled."""
    duration_s: float
    num_kv_bytes: int
    """Bytes of KV that attention read in all layers. They include the draft steps before the step."""
    num_weight_bytes: int
    """Bytes of weights that were read. The model's weights count once. The weights of the model that makes drafts count
    once for each draft step."""
    num_link_bytes: int
    """Bytes that were copied between host and device. They include the draft steps before the step."""
    num_drafts: int = 0
    """Number of drafts of all sequences that the step verified."""
    num_draft_kv_bytes: int = 0
    """Bytes of KV that the draft steps read. They are included in `num_kv_bytes`."""
    predicted_s: float = 0.0
    """Predicted duration in seconds of this step and of the draft steps before it, together. 0 if the step had no
    drafts, or if it also prefilled."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the step read from the device's memory. The step takes at least this number divided by the memory
        bandwidth in bytes per second."""
        return self.num_kv_bytes + self.num_weight_bytes


@dataclass(frozen=True)
class EngineStatus:
    """Snapshot of an engine's state, for heartbeats and metrics."""

    ledger: SlotLedger
    num_streams: int
    """Number of open requests. It includes requests that wait for a slot, or for their KV to be committed."""
    num_rows: int
    """Number of sequences in the batch."""
    num_steps: int
    """Number of steps that have begun so far."""
    num_preemptions: int
    """Total number of preemptions so far. A preempted sequence releases its memory to older sequences, and is prefilled
    again later."""
    num_preempted: int
    """Number of preempted sequences that wait to resume."""
    last_step: StepStats | None
    step_costs: LearntCosts
    """Costs of steps, as learnt so far."""
    speculation: SpeculationStats | None = None
    """Statistics of speculative decoding; None if it is off."""
    device: str = ""
    """Name of the device that the engine computes on."""
    stall: str = ""
    """Reason why the engine counts as hung, so that its worker must be replaced. Empty if the engine does not hang."""
    num_not_finite: int = 0
    """Total number of sequences that ended because their logits were NaN or infinite."""
