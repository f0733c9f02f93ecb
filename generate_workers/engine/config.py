"""What a generation engine is told, and what it tells about itself. Plain values, safe to share between threads."""

from dataclasses import dataclass

from baton.errors import ConfigError
from generate_workers.slots.leases import SlotLedger


@dataclass(frozen=True)
class EngineConfig:
    """How much a generation group takes on. Raises ConfigError on a bad field."""

    num_slots: int = 16
    """Rows in the batch."""
    max_slot_tokens: int = 8192
    """Tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int = 256
    """Tokens of local prefill in one step, over all rows."""
    max_waiting: int = 64
    """Choices that may wait for a slot to prefill locally, those that a free slot awaits not counted."""
    residency: str = "device"
    """Where KV lives, and which of it rows attend to (generate_workers.residency.policies)."""
    selection_file: str = ""
    """What `baton prepare` wrote, for policies that choose keys; empty: where it wrote for the model."""
    pool_tokens: int = 0
    """Residency infinigen: most tokens of KV that a row keeps in a layer that chooses; 0: all."""
    pool_eviction: str = "counter"
    """Who goes, when a row has so many (generate_workers.residency.sparse.pool.Eviction)."""
    kv_memory_bytes: int = 0
    """Of KV, over all slots; 0: what all slots could hold, but at most this engine's part of half of the memory that is
    free at the start."""
    device_memory_bytes: int = 0
    """Of the device, for weights and KV, accounted on the CPU as well; 0: no limit but kv_memory_bytes."""
    growth_tokens: int = 256
    """By which a row is expected to grow yet, when it is taken on: less packs more rows, and preempts more often."""
    num_engines: int = 1
    """That share the machine's memory, this one included."""
    max_step_stretch: float = 1.5
    """How many times as long a step may take for the sake of local prefill, where rows decode: what a prefill may add
    to the time between two tokens, but that a few tokens run in any step. inf: no bound."""

    def __post_init__(self) -> None:
        counts = ("num_slots", "max_slot_tokens", "max_prefill_tokens_per_step", "max_waiting")
        for name in (*counts, "growth_tokens", "num_engines"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is out of range: use at least 1")
        if not self.max_step_stretch >= 1:
            raise ConfigError(
                f"max_step_stretch = {self.max_step_stretch!r} is out of range: use 1 (as little as can be) or more"
            )
        if self.pool_tokens < 0:
            raise ConfigError(f"pool_tokens = {self.pool_tokens!r} is out of range: use 0 (all are kept) or more")
        for name in ("kv_memory_bytes", "device_memory_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is out of range: use 0 (derived) or more")


@dataclass(frozen=True)
class StepStats:
    """What one step did."""

    num_decode_rows: int
    num_prefill_tokens: int
    """Tokens of local prefill."""
    duration_s: float
    num_kv_bytes: int
    """KV that attention read, in all layers."""
    num_weight_bytes: int
    """Weights, read once."""
    num_link_bytes: int
    """Copied between host and device."""

    @property
    def num_bytes(self) -> int:
        """What the device's memory had to deliver: over its bandwidth, the least time that the step can take."""
        return self.num_kv_bytes + self.num_weight_bytes


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for heartbeats and metrics."""

    ledger: SlotLedger
    num_streams: int
    """Open requests, those that wait for a slot or a commit included."""
    num_rows: int
    """Rows in the batch."""
    num_steps: int
    """Forwards begun so far."""
    num_preemptions: int
    """Rows so far that gave their memory to older ones, and were prefilled again later."""
    num_preempted: int
    """Rows that wait to come back."""
    last_step: StepStats | None
