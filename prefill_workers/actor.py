"""The host of one prefill rank: loads its model and runs its server, in whatever process it is made.

deploy makes it in a child process or in a Ray actor; it knows of neither. Runs on that process's asyncio loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.clock import SystemClock
from modeling.decoder import Decoder
from modeling.threads import use_cores
from modeling.weights import load_decoder
from prefill_workers.servicer import PrefillServer


@dataclass(frozen=True)
class PrefillHost:
    """What a rank needs to know of its place."""

    model_folder: Path
    dtype: str
    """bfloat16 or float32."""
    quantization: str
    """Of weights: none or int8."""
    num_threads: int
    """Of torch."""
    cores: Sequence[int]
    """That the process is pinned to; empty: not pinned."""
    host: str
    """Interface of the server and the links."""
    watchdog_floor_s: float
    """Seconds without progress, at least, before the links are given up."""

    async def start(self) -> PrefillServer:
        """Returns the rank's server, which serves. Raises ModelError or ConfigError, one line."""
        decoder = await asyncio.to_thread(self._load)
        return await PrefillServer.start(
            decoder, clock=SystemClock(), host=self.host, watchdog_floor_s=self.watchdog_floor_s
        )

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
