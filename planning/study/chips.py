"""Kinds of accelerator by the rates that bound a generation step, as their makers state them; and what is measured of a
machine, in the same form. Pure. Rates of prefill ranks, which are reached in practice, are in `planning.hardware`.
"""

import math
from dataclasses import dataclass, fields

from baton.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """What bounds a generation step on one accelerator, or on one machine. The defaults are those of a roofline: what
    is computed hides behind what is read, and nothing else takes time."""

    flops: float
    """FLOP/s of matrices; a multiply-add is two."""
    memory_bandwidth: float
    """Bytes a second that are read."""
    memory_bytes: float
    kv_bandwidth: float | None = None
    """Bytes of KV a second that attention gets through; None: the memory's."""
    overlap: float = 1.0
    """How much of a matrix's shorter half, reading or computing, hides behind the longer one: 1 all, 0 nothing."""
    layer_s: float = 0.0
    """Seconds of a layer besides, whatever the batch: calls, small operations."""

    def __str__(self) -> str:
        """Its numbers, in words."""
        text = f"reads {self.memory_bandwidth / 1e9:.4g} GB/s, computes {self.flops / 1e12:.4g} TFLOP/s"
        if self.kv_bandwidth is not None:
            text += f", attends to {self.kv_bandwidth / 1e9:.4g} GB/s"
        if self.layer_s:
            text += f", {self.layer_s * 1e6:.0f} us a layer besides"
        return text if self.overlap == 1 else f"{text}, {self.overlap:.0%} overlapped"

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "memory_bytes", "kv_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"chip: {name} = {value} is out of range: give a number above 0")
        for field in fields(self)[4:]:
            if not 0 <= getattr(self, field.name) < math.inf:
                value = getattr(self, field.name)
                raise ConfigError(f"chip: {field.name} = {value} is out of range: give a number of at least 0")
        if self.overlap > 1:
            raise ConfigError(f"chip: overlap = {self.overlap} is out of range: give 0 to 1")


CHIPS = {
    "tpu-v5e": Chip(flops=1.97e14, memory_bandwidth=8.2e11, memory_bytes=16e9),
    "a100": Chip(flops=3.12e14, memory_bandwidth=2.039e12, memory_bytes=80e9),
    "h100": Chip(flops=9.894e14, memory_bandwidth=3.35e12, memory_bytes=80e9),
    "h200": Chip(flops=9.894e14, memory_bandwidth=4.8e12, memory_bytes=141e9),
}
"""By name, dense bf16: A100 with 80 GB, H100 and H200 as SXM modules, by their data sheets; TPU v5e as in "How To Scale
Your Model"."""


def chip_of(name: str) -> Chip:
    """A known chip, in whatever case its name is written. Raises ConfigError for an unknown name."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"hardware = {name!r} is unknown: use one of {', '.join(CHIPS)}, or here for this machine")
    return CHIPS[name.lower()]
