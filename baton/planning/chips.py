"""Nominal rates of accelerators, which limit the speed of a generation step. The rates of a measured machine have the
same form. Pure. The rates that prefill ranks reach in practice are in `baton.planning.hardware`."""

import math
from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True)
class Chip:
    """Rates of one accelerator or machine that limit the speed of a generation step. The default values of the fields
    describe a roofline model."""

    flops: float
    """FLOP/s of matrices; a multiply-add counts as two."""
    memory_bandwidth: float
    """Bytes a second that are read from memory."""
    memory_bytes: float
    kv_bandwidth: float | None = None
    """Bytes of KV that attention reads a second; None: the memory's bandwidth."""
    overlap: float = 1.0
    """Overlap of reading a matrix with computing by it, as a fraction of the shorter of the two times. 1: complete
    overlap, 0: none."""
    layer_s: float = 0.0
    """Fixed seconds of each layer, added for any batch: function calls and small operations."""

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
