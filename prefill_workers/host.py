"""Hosts one prefill rank: loads its model and runs its server, in whatever process it is made.

`deploy.groups.hosting` makes it in a child process or in a Ray actor; this module knows neither. Starts
`prefill_workers.servicer`. Runs on its process's asyncio loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.clock import SystemClock
from baton.types import KernelChoice
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kernels.process_kernels import KERNELS
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes, sweep
from modeling.prefix_store.node import disk_place
from modeling.threads import use_cores
from prefill_workers.servicer import PrefillServer


@dataclass(frozen=True)
class PrefillHost:
    """Configuration of one prefill rank."""

    model_folder: Path
    dtype: str
    """Element type of weights and KV: bfloat16 or float32."""
    quantization: str
    """Quantization of the weights: none or int8."""
    num_threads: int
    """Number of threads that torch uses."""
    cores: Sequence[int]
    """Cores to which the process is pinned; empty: not pinned."""
    host: str
    """Address of the interface that the server and the links use."""
    watchdog_floor_s: float
    """Least number of seconds without progress after which the links are given up."""
    cluster: str = ""
    """Name of the cluster. All of its ranks on a node share the prefixes kept there."""
    prefix_share: float = 0.0
    """Part of the node's memory file system that cached prefixes may take, from 0 to 1; 0: none are kept."""
    prefix_disk: str = ""
    """Folder of the node for cached prefixes that have no room in memory."""
    prefix_disk_bytes: int = 0
    """Bytes that cached prefixes may take in `prefix_disk`; 0: none are kept there."""
    kernels: Sequence[KernelChoice] = ()
    """Kernels that the cluster has chosen, one choice per kind of processor."""

    async def start(self) -> PrefillServer:
        """Load the model, start the rank's server and return it, serving. Raises ModelError or ConfigError, one
        line."""
        allow_files()
        decoder = await asyncio.to_thread(self._load)
        keeps = self.prefix_share > 0
        disk = disk_place(self.cluster, self.prefix_disk, self.prefix_disk_bytes)
        server = await PrefillServer.start(
            decoder,
            clock=SystemClock(),
            host=self.host,
            watchdog_floor_s=self.watchdog_floor_s,
            prefix_folder=node_folder(self.cluster) if keeps else None,
            prefix_bytes=share_bytes(self.prefix_share) if keeps else 0,
            prefix_disk=disk if keeps else None,
        )
        await asyncio.to_thread(sweep)  # removes what killed clusters left, now that the folder in use is known
        if disk is not None:
            await asyncio.to_thread(sweep, disk.folder.parent)
        return server

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        KERNELS.use(self.kernels)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
