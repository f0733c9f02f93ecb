"""Nominal rates of accelerators, from which the maximum speed of a generation step is computed.

Measured rates of a machine have the same form. Rates that CPU cores reach in practice are in `baton.planning.hardware`.
All functions are pure.
"""

import math
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """Rates of an accelerator or machine that limit the speed of a generation step. With the default values of the
    optional fields, step times follow the roofline model."""

    flops: float
    """FLOP/s of matrix products. A multiply-add counts as two operations."""
    memory_bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory_bytes: float
    kv_bandwidth: float | None = None
    """Bytes of KV per second that the attention kernel reads. None: the same as `memory_bandwidth`."""
    overlap: float = 1.0
    """Degree to which reading a matrix from memory overlaps with computing, as a fraction of the shorter of the two
    times. 1: complete overlap. 0: no overlap."""
    layer_s: float = 0.0
    """Fixed overhead of each layer in seconds, for function calls and small operations. It does not depend on the batch
    size."""

    def __str__(self) -> str:
        """Return the rates as readable text in one line."""
        text = f"reads {self.memory_bandwidth / 1e9:.4g} GB/s, computes {self.flops / 1e12:.4g} TFLOP/s"
        if self.kv_bandwidth is not None:
            text += f", attends to {self.kv_bandwidth / 1e9:.4g} GB/s"
        if self.layer_s:
            text += f", {self.layer_s * 1e6:.0f} us a layer in addition"
        return text if self.overlap == 1 else f"{text}, {self.overlap:.0%} overlapped"

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "memory_bytes", "kv_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"chip: {name} = {value} is out of range: give a number above 0")
        for name in ("overlap", "layer_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"chip: {name} = {getattr(self, name)} is out of range: give a number of at least 0")
        if self.overlap > 1:
            raise ConfigError(f"chip: overlap = {self.overlap} is out of range: give 0 to 1")
