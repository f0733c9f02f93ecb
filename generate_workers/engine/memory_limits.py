"""Limits of KV memory. They are configured, or computed from the memory that is free when the engine starts.

`servicer` calls `make_memory` once, before it makes the slots.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.device.port import MemoryUse
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.planning.speculation import MOST_DRAFTS
from baton.process.memory import free_bytes
from generate_workers.config import CHOOSING_DRAFTS, EngineConfig
from generate_workers.engine.device_steps import device_step_bytes
from generate_workers.residency.draft_window import DraftWindow
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.policies import SelectionSource, make_residency
from generate_workers.residency.port import DraftKeys, KvShape, Residency
from generate_workers.residency.sparse.pool import Eviction, PoolSize
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits

_DEVICE_SHARE = 0.9
"""Default fraction of a device's free memory that KV may use. The rest is left for activations."""
_SHARE = 0.5
"""Default fraction of the free host memory that the KV of all engines may use, if KV is stored in host memory. The rest
is left for weights and other processes."""


def make_memory(
    decoder: Decoder, config: EngineConfig, num_engines: int = 1, *, draft_model: Decoder | None = None
) -> KvMemory:
    """Return the KV memory of an engine, as configured. By default, KV that is stored in device memory is limited by
    device memory, and other KV by host memory. `num_engines` is the number of engines that share the host memory.
    `draft_model`: its weights and KV are deducted from the limits; None: there is no draft model. Raises ConfigError
    for an unknown policy, or if memory cannot be allocated. Raises ModelError when the file of `baton prepare` does not
    exist."""
    decoder.device.bound(None)  # remove the limit that an earlier rank or engine of this process has set
    drafts = DraftKeys.of(config.draft_keys, MOST_DRAFTS) if _drafts_over_keys(config) else None
    shape = KvShape(
        decoder.layout,
        decoder.config.windows,
        config.num_slots,
        config.max_slot_tokens,
        most_new_tokens=config.max_batched_tokens,
        draft_keys=drafts,
        chosen_drafts=config.speculation in CHOOSING_DRAFTS,
    )
    path = Path(config.selection_file) if config.selection_file else None
    pool = PoolSize(config.pool_tokens, Eviction(config.pool_eviction)) if config.pool_tokens else None
    taken = TakenBytes(weight_bytes(decoder.weights), num_step_bytes=device_step_bytes(decoder, config))
    if draft_model is not None:
        taken = _with_drafts(taken, draft_model, config)
    device_bytes = _device_bytes(config, taken, decoder.device.memory_use)
    kv_bytes = max(config.kv_memory_bytes - taken.draft_kv, 0) if config.kv_memory_bytes else None
    serves_drafts = config.speculation == "infinigen"
    source = SelectionSource(decoder, path, pool, device_bytes, kv_bytes, serves_drafts=serves_drafts)
    residency = make_residency(config.residency, shape, decoder.device, source)
    if device_bytes is not None and config.residency == "device" and not decoder.device.is_home:
        home_bytes = device_bytes - residency.scratch_bytes
    else:
        home_bytes = int(_SHARE * free_bytes()) // num_engines - taken.draft_kv
    limits = memory_limits(config, residency, taken, home_bytes, device_bytes)
    if isinstance(residency, PagedResidency):
        residency.bound(limits.kv_bytes)
    if device_bytes is not None:
        decoder.device.bound(device_bytes + taken.draft_kv)
    return KvMemory(residency, shape, limits, config.growth_tokens)


def _drafts_over_keys(config: EngineConfig) -> bool:
    """Return whether drafts attend to copies of each sequence's first and latest keys. If KV is in host memory and
    device memory is limited, they do so only if the configuration names such a draft source: the copies use device
    memory that sequences could use."""
    if config.speculation == "auto":
        return config.residency != "host" or not config.device_memory_bytes
    return config.speculation not in ("off", "ngram", "model")


@dataclass(frozen=True)
class TakenBytes:
    """Memory that is used for other data than the KV of sequences, by kind of data."""

    weights: int
    """Bytes of the weights of the served model and of a draft model."""
    draft_kv: int = 0
    """Bytes of a draft model's KV for all slots together. 0 if there is no draft model."""
    num_step_bytes: int = 0
    """Bytes of device memory that captured steps use. 0 if there are none."""

    def __str__(self) -> str:
        """Return a readable text that names each use of the memory and its bytes."""
        others = {"the KV of drafts": self.draft_kv, "step_graphs": self.num_step_bytes}
        return " and ".join(
            [f"weights take {self.weights}", *(f"{name} {taken}" for name, taken in others.items() if taken)]
        )


def memory_limits(
    config: EngineConfig, residency: Residency, taken: TakenBytes, home_bytes: int, device_bytes: int | None = None
) -> MemoryLimits:
    """Return the memory limits of an engine's KV. `taken` is memory that other data uses. `home_bytes` is the number of
    bytes that are available for KV in the memory where the policy stores it. `device_bytes` is that number for device
    memory; None: no limit. Raises ConfigError if `taken.draft_kv` or the KV of one token exceeds the limits."""
    kv_bytes = config.kv_memory_bytes
    if kv_bytes:
        kv_bytes -= taken.draft_kv
        if kv_bytes <= 0:
            raise ConfigError(
                f"kv_memory_bytes = {config.kv_memory_bytes} is out of range: the KV of drafts takes {taken.draft_kv},"
                " use more, or fewer draft_keys"
            )
    else:
        all_slots = residency.bytes_for(config.max_slot_tokens).home * config.num_slots
        kv_bytes = min(all_slots, home_bytes)
    if device_bytes is not None:
        device_bytes -= residency.scratch_bytes
    limits = MemoryLimits(kv_bytes, device_bytes)
    if limit := limits.exceeded_by(residency.bytes_for(1)):
        raise ConfigError(f"{limit}, less than one token of KV takes: raise it")
    return limits


def _device_bytes(config: EngineConfig, taken: TakenBytes, memory: MemoryUse) -> int | None:
    """Return the bytes of device memory for the KV of sequences: the configured memory minus `taken` or, by default, a
    fraction of the free memory if the device has its own memory; None: no limit. The weights must be loaded already.
    Raises ConfigError if `taken` uses all of the configured memory."""
    if config.device_memory_bytes:
        left = config.device_memory_bytes - taken.weights - taken.draft_kv - taken.num_step_bytes
        if left <= 0:
            raise ConfigError(f"device_memory_bytes = {config.device_memory_bytes} is out of range: {taken}, use more")
        return left
    if memory.limit_bytes is None:
        return None
    return int(_DEVICE_SHARE * (memory.limit_bytes - memory.num_bytes)) - taken.draft_kv - taken.num_step_bytes


def _with_drafts(taken: TakenBytes, draft_model: Decoder, config: EngineConfig) -> TakenBytes:
    """Return `taken` plus the memory of a draft model: its weights, and the maximum KV that it keeps for all slots."""
    keys = DraftKeys.of(config.draft_keys, MOST_DRAFTS)
    kv = DraftWindow(draft_model.layout, draft_model.device.row_memory, keys)
    return replace(
        taken,
        weights=taken.weights + weight_bytes(draft_model.weights),
        draft_kv=config.num_slots * kv.bytes_for(config.max_slot_tokens),
    )
