"""Configuration of a generation engine. A plain value, safe to share between threads."""

from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    """Limits and policies of a generation group. Raises ConfigError on a bad field."""

    num_slots: int = 16
    """Rows in the batch."""
    max_slot_tokens: int = 8192
    """Tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int = 256
    """Tokens of local prefill in one step, over all rows."""
    max_waiting: int = 64
    """Choices that may wait for a slot to prefill locally, not counting those for which a slot is free."""
    residency: str = "device"
    """Residency policy: where KV lives and which of it rows attend to (generate_workers.residency.policies)."""
    selection_file: str = ""
    """File that `baton prepare` wrote, for policies that choose keys. Empty: the default file for the model."""
    pool_tokens: int = 0
    """Most tokens of KV that a row keeps in each layer that chooses keys, for residency infinigen. 0: all."""
    pool_eviction: str = "counter"
    """Which token a full pool evicts (generate_workers.residency.sparse.pool.Eviction)."""
    kv_memory_bytes: int = 0
    """Bytes of KV over all slots. 0: what all slots could hold, but at most this engine's part of half of the memory
    that is free at the start."""
    device_memory_bytes: int = 0
    """Bytes of the device for weights and KV, counted on the CPU as well. 0: no limit besides kv_memory_bytes."""
    growth_tokens: int = 256
    """Tokens of growth that a new row is promised: fewer pack more rows and preempt more often."""
    num_engines: int = 1
    """Engines that share the machine's memory, including this one."""
    max_step_stretch: float = 1.5
    """How many times as long as decoding alone a step may take when it also prefills: bounds what local prefill adds to
    the time between two tokens. A few tokens run in any step. inf: no bound."""

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
