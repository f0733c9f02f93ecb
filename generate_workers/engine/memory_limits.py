"""How much memory KV may take: as configured, or derived from the memory that is free when the group starts.

`servicer` calls `make_memory` once, before it makes the slots.
"""

from pathlib import Path

from baton.errors import ConfigError
from baton.process.memory import free_bytes
from generate_workers.config import EngineConfig
from generate_workers.engine.step_runner import weight_bytes
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import DraftKeys, KvShape, Residency
from generate_workers.residency.sparse.pool import Eviction, PoolSize
from generate_workers.slots.memory import KvMemory, MemoryLimits
from modeling.forward.decoder import Decoder
from planning.speculation import MOST_DRAFTS

_SHARE = 0.5
"""Largest part of the free memory for KV of all engines by default: weights and other processes need some too."""


def make_memory(decoder: Decoder, config: EngineConfig, num_engines: int = 1) -> KvMemory:
    """Make a group's KV memory as configured, for one of `num_engines` that share the machine. Raises ConfigError for
    an unknown policy or memory that cannot be had, ModelError when the file of `baton prepare` is missing."""
    drafts = None if config.speculation in ("off", "ngram") else DraftKeys.of(config.draft_keys, MOST_DRAFTS)
    shape = KvShape(decoder.layout, decoder.config.windows, config.num_slots, config.max_slot_tokens, drafts)
    path = Path(config.selection_file) if config.selection_file else None
    pool = PoolSize(config.pool_tokens, Eviction(config.pool_eviction)) if config.pool_tokens else None
    source = SelectionSource(decoder, path, pool, serves_drafts=config.speculation == "infinigen")
    residency = make_residency(config.residency, shape, decoder.device, source)
    limits = memory_limits(config, residency, weight_bytes(decoder.weights), num_engines)
    return KvMemory(residency, shape, limits, config.growth_tokens)


def memory_limits(
    config: EngineConfig, residency: Residency, num_weight_bytes: int, num_engines: int = 1
) -> MemoryLimits:
    """Return the limits of KV. Raises ConfigError when weights, or one token's KV, exceed the device's memory."""
    kv_bytes = config.kv_memory_bytes
    if not kv_bytes:
        all_slots = residency.bytes_for(config.max_slot_tokens).home * config.num_slots
        kv_bytes = min(all_slots, int(_SHARE * free_bytes()) // num_engines)
    device_bytes = None
    if config.device_memory_bytes:
        device_bytes = config.device_memory_bytes - num_weight_bytes
        if device_bytes <= 0:
            raise ConfigError(
                f"device_memory_bytes = {config.device_memory_bytes} is out of range: weights take {num_weight_bytes}, "
                "use more"
            )
    limits = MemoryLimits(kv_bytes, device_bytes)
    if limit := limits.exceeded_by(residency.bytes_for(1)):
        raise ConfigError(f"{limit}, less than one token of KV takes: raise it")
    return limits
