"""The host of one generation engine: loads its model and starts its server, in the process that calls `start`.

`deploy` makes it in a child process or in a Ray actor; this module knows of neither. Runs on that process's asyncio
loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.clock import SystemClock
from baton.process.cores import give_way_to
from baton.process.garbage import collect_rarely
from baton.types import KernelChoice
from generate_workers.engine.core import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.checkpoints.weights import load_decoder
from modeling.forward.decoder import Decoder
from modeling.kernels.process_kernels import KERNELS
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes, sweep
from modeling.prefix_store.node import disk_place
from modeling.threads import use_cores
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationHost:
    """Configuration of an engine and of the place that it runs in."""

    model_folder: Path
    dtype: str
    """Dtype of the weights and KV: bfloat16 or float32."""
    quantization: str
    """Quantization of weights: none or int8."""
    num_threads: int
    """Threads that torch computes with."""
    cores: Sequence[int]
    """Cores that the process is pinned to. Empty: not pinned."""
    host: str
    """Interface that the server listens on."""
    engine: EngineConfig
    cluster: str = ""
    """Cluster whose prefixes are kept on the node, and shared by all of its workers there."""
    prefix_share: float = 0.0
    """Part of the node's memory file system that prefixes may take. 0: none are kept."""
    prefix_disk: str = ""
    """Folder of the node for prefixes that have no room in memory."""
    prefix_disk_bytes: int = 0
    """Bytes that prefixes may take on disk. 0: none are kept there."""
    kernels: Sequence[KernelChoice] = ()
    """Kernels that the cluster has chosen, one choice per kind of processor."""

    async def start(self) -> GenerationServer:
        """Load the model and return the engine's server, which accepts calls. Raises ModelError or ConfigError, in one
        line."""
        allow_files()
        decoder = await asyncio.to_thread(self._load)
        tokenizer = await asyncio.to_thread(Tokenizer.load, self.model_folder)
        most = min(self.engine.max_slot_tokens, decoder.config.max_position)
        engine = replace(self.engine, max_slot_tokens=most)
        keeps = self.prefix_share > 0
        disk = disk_place(self.cluster, self.prefix_disk, self.prefix_disk_bytes)
        server = await GenerationServer.start(
            decoder,
            tokenizer,
            engine,
            clock=SystemClock(),
            host=self.host,
            prefix_folder=node_folder(self.cluster) if keeps else None,
            prefix_bytes=share_bytes(self.prefix_share) if keeps else 0,
            prefix_disk=disk if keeps else None,
        )
        if self.cores:  # no other process shares them: what pushes take of them would delay tokens
            give_way_to(server.engine.thread_id)
        # remove what killed clusters left, now that this cluster's folder is known to be in use
        await asyncio.to_thread(sweep)
        if disk is not None:
            await asyncio.to_thread(sweep, disk.folder.parent)
        collect_rarely()
        return server

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        KERNELS.use(self.kernels)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
