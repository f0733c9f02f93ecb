"""Profile of the device on which a worker computes: its identity, its rates and its memory.

`deploy.machine.device_profile` measures profiles and keeps them in files. Each worker reports its profile when it
starts, and the supervisor passes it on to the orchestrator in the cluster's view. The file of a profile:

  {"schema": 2, "profile": {"name": "NVIDIA H200", "device": "cuda", "shared_bandwidth": ...,
   "hardware": {"linear_flops": ..., ..., "link": {"latency_s": ..., "bandwidth": ...}},
   "memory_bytes": ..., "used_bytes": ..., "is_measured": true}}

Fields with default values are left out. Infinite rates are among them, which JSON cannot express.

`load` and `save` block on the disk; all other functions are pure.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from baton.errors import ConfigError
from baton.planning.gpus import ASSUMED, gpu_rank
from baton.planning.hardware import Hardware, cpu_rank
from baton.process.whole_files import whole

SCHEMA = 2
"""Version of the format of profiles in files."""


@dataclass(frozen=True)
class DeviceProfile:
    """Identity, rates and memory of a device, for one dtype."""

    name: str
    """Identity of the device: the processor or GPU, and the part of it that the worker may use. Workers with equal
    names compute on equal devices."""
    device: str
    """Kind of device: cpu, cuda or emulated."""
    hardware: Hardware
    """Rates that the worker reaches on the device while no other worker uses it."""
    shared_bandwidth: float
    """Memory bandwidth of the whole device in bytes per second. On a CPU, it is that of all cores together."""
    memory_bytes: int = 0
    """Capacity in bytes of the memory from which the device computes: the memory of the GPU, or of the host or
    container. 0: not known."""
    used_bytes: int = 0
    """Bytes of this memory that were in use before the worker loaded its model."""
    is_measured: bool = False
    """True if the rates were measured on a device of this kind; False if they are nominal."""

    def __post_init__(self) -> None:
        if not 0 < self.shared_bandwidth < math.inf:
            raise ConfigError(f"shared_bandwidth = {self.shared_bandwidth} is out of range: give a finite rate above 0")

    def __str__(self) -> str:
        rates = self.hardware
        return (
            f"{self.name}: {_giga(rates.linear_flops)} GFLOP/s in matrices, {_giga(rates.pair_flops)} in attention, "
            f"reads {_giga(rates.memory_bandwidth)} GB/s ({'measured' if self.is_measured else 'nominal'})"
        )


def nominal_core(dtype_bytes: int) -> DeviceProfile:
    """Return the profile of one CPU core whose rates were not measured. `dtype_bytes` is 2 for bf16 and 4 for fp32."""
    core = cpu_rank(1, dtype_bytes)
    return DeviceProfile("CPU core", "cpu", core, core.memory_bandwidth)


def nominal_gpu(name: str, dtype_bytes: int) -> DeviceProfile:
    """Return the profile of the GPU with this name, whose rates were not measured. They follow from its data sheet."""
    rates = gpu_rank(name, dtype_bytes)
    return DeviceProfile(name or f"unknown GPU, taken for {ASSUMED.name}", "cuda", rates, rates.memory_bandwidth)


def slowest(profiles: Collection[DeviceProfile]) -> DeviceProfile | None:
    """Return the profile with the lowest rate of matrix products; None if there are no profiles."""
    return min(profiles, key=lambda profile: profile.hardware.linear_flops, default=None)


@dataclass(frozen=True)
class _File:
    schema: int
    profile: DeviceProfile


def save(profile: DeviceProfile, path: Path) -> None:
    """Write the profile to a file, replacing an existing one. Raises ConfigError when it cannot be written."""
    try:
        with whole(path) as partial:
            text = TypeAdapter(_File).dump_json(_File(SCHEMA, profile), indent=1, exclude_defaults=True)
            partial.write_text(text.decode(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): make its folder writable") from error


def load(path: Path) -> DeviceProfile:
    """Read a profile from a file that `save` has written. Raises ConfigError if it cannot be read; the message names
    the file and the remedy."""
    try:
        found = TypeAdapter(_File).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): make it readable, or delete it") from error
    except ValidationError as error:
        field, reason = ".".join(map(str, error.errors()[0]["loc"])) or "JSON", error.errors()[0]["msg"]
        raise ConfigError(f"{path}: is not a device profile ({field}: {reason}): delete the file") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: is not a device profile ({error}): delete the file") from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path}: schema = {found.schema}, and this version reads {SCHEMA}: delete the file")
    return found.profile


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.3g}" if rate < 1e12 else f"{rate / 1e9:,.0f}"
