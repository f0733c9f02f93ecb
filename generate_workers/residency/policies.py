"""Construction of residency policies. `traits` lists their names.

`engine.memory_limits` makes a group's policy here when the group starts.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import OUT_OF_MEMORY
from baton.modeling.sparse.bases import NUM_WHOLE_LAYERS
from baton.modeling.sparse.selection_file import PreparedSelection, load_prepared, prepared_path
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.fetched.infinigen import FetchedInfinigenResidency
from generate_workers.residency.host import HostResidency
from generate_workers.residency.int4.int4_infinigen import InfinigenInt4Residency
from generate_workers.residency.int4.whole import make_int4
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.sparse.draft_index import IndexedResidency
from generate_workers.residency.sparse.infinigen import InfinigenResidency
from generate_workers.residency.sparse.infinigen_pooled import PooledResidency
from generate_workers.residency.sparse.pool import PoolSize
from generate_workers.residency.sparse.selective import NO_CHOSEN_DRAFTS, require_no_windows, require_selective
from generate_workers.residency.traits import POLICIES, POOLED, policy_named

logger = logging.getLogger(__name__)

_EARLY_REMEDY = "run `baton prepare --lookahead 1` with this model, dtype and model.weights"


@dataclass(frozen=True)
class SelectionSource:
    """Inputs of policies that select keys: the model, the file that `baton prepare` wrote for it, and memory limits."""

    decoder: Decoder
    path: Path | None = None
    """Path of the file that `baton prepare` wrote. None: the default path for the model."""
    pool: PoolSize | None = None
    """Limit on the number of tokens whose KV a sequence keeps, and eviction rule. None: all tokens are kept."""
    device_bytes: int | None = None
    """Bytes of device memory for the KV of all slots. None: no limit."""
    kv_bytes: int | None = None
    """Configured limit in bytes for the KV of all slots, in host or device memory. None: not configured."""
    serves_drafts: bool = False
    """True if speculative drafts select keys with the data in the file that `baton prepare` wrote. The policy `device`
    then stores partial keys (keys reduced to few columns) in addition to KV."""

    @property
    def pool_bytes(self) -> int | None:
        """Return the maximum number of bytes of KV for a policy that stores all KV on the device: the smaller of
        `device_bytes` and `kv_bytes`. None: no limit."""
        return min((each for each in (self.device_bytes, self.kv_bytes) if each is not None), default=None)

    def load(self) -> PreparedSelection:
        """Read the file that `baton prepare` wrote for this model, and return its data for selecting keys. Raises
        ModelError if the file does not exist or does not fit the model."""
        return load_prepared(self.path or prepared_path(self.decoder.layout.model_fingerprint), self.decoder)

    def load_early(self) -> PreparedSelection:
        """Return the data for selecting keys one layer early. Read it from the default file of `baton prepare
        --lookahead 1` for this model. If `path` is set, or the default file does not exist, return the result of `load`
        instead. If `load` reads a file that was prepared without lookahead, the loss of quality is larger. Raises
        ModelError if no file exists, or if the file does not fit the model."""
        early = prepared_path(self.decoder.layout.model_fingerprint, lookahead=1)
        prepared = self.load() if self.path or not early.is_file() else load_prepared(early, self.decoder)
        if not prepared.lookahead:
            logger.warning("keys are picked a layer early, by a selection that was not tuned so: %s", _EARLY_REMEDY)
        return prepared


Make = Callable[[KvShape, Device, SelectionSource | None], Residency]


def _device(shape: KvShape, device: Device, source: SelectionSource | None) -> Residency:
    if source is None or not source.serves_drafts:
        if device.is_home or shape.chosen_drafts:
            return DeviceResidency(shape, device.row_memory)
        return PagedResidency(shape, device, None if source is None else source.pool_bytes)
    require_selective("speculation = 'infinigen'", shape, device, NO_CHOSEN_DRAFTS)
    return IndexedResidency(shape, device.row_memory, source.load())


def selecting(name: str, make: Callable[[KvShape, SelectionSource], Residency]) -> Make:
    """Return a function that makes the policy `name`, which selects keys. The returned function checks that the policy
    supports the device and the model, and that the native kernels are loaded. Then it calls `make`. If a check fails,
    it raises ConfigError."""

    def made(shape: KvShape, device: Device, source: SelectionSource | None) -> Residency:
        require_selective(f"residency = {name!r}", shape, device)
        if not native.load():
            raise ConfigError(f"residency = {name!r} needs the native kernels: see the log why they are not loaded")
        assert source is not None, f"{name} needs a model"
        return make(shape, source)

    return made


def _infinigen(shape: KvShape, source: SelectionSource) -> Residency:
    decoder = source.decoder
    if source.pool is not None and _is_pooled(shape, source.pool):
        return PooledResidency(shape, decoder.device, source.load(), decoder, source.pool)
    if decoder.device.is_home:
        return InfinigenResidency(shape, decoder.device.row_memory, source.load(), decoder)
    require_others("infinigen", shape)
    return FetchedInfinigenResidency(shape, source.load_early(), decoder, source.device_bytes)


def _is_pooled(shape: KvShape, pool: PoolSize) -> bool:
    """Return whether sequences may have more tokens than the pool holds, in a model with layers that use it."""
    return pool.num_tokens < shape.max_slot_tokens and shape.layout.num_layers > NUM_WHOLE_LAYERS


def _infinigen_anywhere(shape: KvShape, device: Device, source: SelectionSource | None) -> Residency:
    """Return policy `infinigen` for the device: with native kernels on a CPU, with tensor operations and Triton on a
    GPU."""
    if device.name != "cuda":
        return selecting("infinigen", _infinigen)(shape, device, source)
    assert source is not None, "infinigen needs a model"
    if source.pool is not None and _is_pooled(shape, source.pool):
        raise ConfigError("pool_tokens is not supported on device cuda: leave it at 0, or use device cpu")
    require_no_windows("residency = 'infinigen'", shape)
    if not source.decoder.has_triton_rows:
        text = f"residency = 'infinigen' is not supported on device cuda without Triton, or for {shape.layout.dtype}"
        raise ConfigError(f"{text}: run `pip install 'baton-serve[cuda]'`, or use residency device or host")
    require_others("infinigen", shape)
    return FetchedInfinigenResidency(shape, source.load_early(), source.decoder, source.device_bytes)


def infinigen_int4(shape: KvShape, source: SelectionSource) -> Residency:
    """Return policy `infinigen_int4`. Raises ConfigError on a device with memory of its own."""
    device = source.decoder.device
    if not device.is_home:
        raise ConfigError(f"residency = 'infinigen_int4' needs device cpu: use residency infinigen on {device.name}")
    return InfinigenInt4Residency(shape, device.row_memory, source.load(), source.decoder)


def require_others(name: str, shape: KvShape) -> None:
    """Raise ConfigError if the model has too few layers for the policy `name`. The policy keeps the first two layers on
    the device, and stores only the other layers in host memory. A model must therefore have more than two layers."""
    if shape.layout.num_layers <= NUM_WHOLE_LAYERS:
        raise ConfigError(f"residency = {name!r} needs more than {NUM_WHOLE_LAYERS} layers: use residency device")


MAKERS: Mapping[str, Make] = {
    "device": _device,
    "host": lambda shape, device, source: HostResidency(shape, device),
    "infinigen": _infinigen_anywhere,
    "infinigen_int4": selecting("infinigen_int4", infinigen_int4),
    "int4": lambda shape, device, source: make_int4(shape, device),
}
"""Functions that make residency policies, by the policy's name."""


def make_residency(
    name: str,
    shape: KvShape,
    device: Device,
    source: SelectionSource | None = None,
    makers: Mapping[str, Make] = MAKERS,
) -> Residency:
    """Return the residency policy `name` for all slots. Policies that select keys need a `source`. `makers`: functions
    that make policies, by name.

    Raises ConfigError if the name is unknown, the policy is not supported on this device, or the slots' address space
    cannot be reserved. Raises ModelError if the file that `baton prepare` writes (`source.path`) does not exist or does
    not fit the model.
    """
    make = policy_named(name, makers)
    if source is not None and source.pool is not None and not (name in POLICIES and POLICIES[name].has_pool):
        raise ConfigError(f"residency = {name!r} keeps all KV: leave pool_tokens at 0, or use residency {POOLED}")
    try:
        return make(shape, device, source)
    except (*OUT_OF_MEMORY, OSError) as error:
        tokens = f"{shape.num_slots} slots of {shape.max_slot_tokens} tokens"
        raise ConfigError(
            f"address space for {tokens} cannot be reserved ({error}): use fewer or smaller slots"
        ) from error
