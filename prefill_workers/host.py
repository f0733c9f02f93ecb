"""The host of one prefill rank: loads its model and runs its server, in whatever process it is made.

deploy makes it in a child process or in a Ray actor; it knows of neither. Runs on that process's asyncio loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.clock import SystemClock
from baton.types import KernelChoice
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kernels.products import KERNELS
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes, sweep
from modeling.prefix_store.node import disk_place
from modeling.threads import use_cores
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
    cluster: str = ""
    """Whose prefixes are kept on the node, and shared by all of its ranks there."""
    prefix_share: float = 0.0
    """Part of the node's memory file system that they may take; 0: none are kept."""
    prefix_disk: str = ""
    """Folder of the node for what has no room there."""
    prefix_disk_bytes: int = 0
    """That they may take there; 0: nothing is kept there."""
    kernels: Sequence[KernelChoice] = ()
    """That the cluster has chosen, one for a kind of processor."""

    async def start(self) -> PrefillServer:
        """Returns the rank's server, which serves. Raises ModelError or ConfigError, one line."""
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
        await asyncio.to_thread(sweep)  # what killed clusters left; after it is known which folder is in use
        if disk is not None:
            await asyncio.to_thread(sweep, disk.folder.parent)
        return server

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        KERNELS.use(self.kernels)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
