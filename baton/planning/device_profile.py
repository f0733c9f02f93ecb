"""Profile of the device on which a worker computes: its identity, its rates and its memory.

`deploy.machine.device_profile` measures profiles and keeps them in files. Each worker reports its profile when it
starts, and the supervisor passes it on to the orchestrator in the cluster's view. The file of a profile:

  {"kind": "baton-device-profile", "schema": 1, "name": "NVIDIA H200", "device": "cuda", "shared_bandwidth": ...,
   "hardware": {"linear_flops": ..., ..., "link": {"latency_s": ..., "bandwidth": ...}},
   "memory_bytes": ..., "used_bytes": ..., "is_measured": true}

`load` and `save` block on the disk; all other functions are pure.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.planning import json_file
from baton.planning.cost_model import LinkModel
from baton.planning.gpus import ASSUMED, gpu_rank
from baton.planning.hardware import Hardware, cpu_rank

KIND = "baton-device-profile"
SCHEMA = 1
_STORED = ("name", "device", "shared_bandwidth", "memory_bytes", "used_bytes", "is_measured")


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
        if not self.shared_bandwidth > 0:
            raise ConfigError(f"shared_bandwidth = {self.shared_bandwidth} is out of range: give a rate above 0")

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


def save(profile: DeviceProfile, path: Path) -> None:
    """Write the profile to a file, replacing an existing one. Raises ConfigError when it cannot be written."""
    fields = asdict(profile)
    del fields["hardware"]["scores_per_s"]  # infinite, as Baton's kernels do not store scores; JSON has no infinity
    json_file.write(path, json_file.dump(KIND, SCHEMA, fields))


def load(path: Path) -> DeviceProfile:
    """Read a profile from a file that `save` has written. Raises ConfigError if it cannot be read; the message names
    the file and the remedy."""
    text = json_file.read(path, KIND)
    with json_file.naming(str(path)):
        data = json_file.parse(text, KIND, SCHEMA)
        try:
            link = LinkModel(**data["hardware"].pop("link"))
            hardware = Hardware(link=link, **data["hardware"])
            return DeviceProfile(**{name: data[name] for name in _STORED}, hardware=hardware)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"is not a complete profile ({error!r}): delete the file") from error


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.3g}" if rate < 1e12 else f"{rate / 1e9:,.0f}"
