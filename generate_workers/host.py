"""The host of one generation engine: loads its model and runs its server, in whatever process it is made.

deploy makes it in a child process or in a Ray actor; it knows of neither. Runs on that process's asyncio loop.
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
from modeling.kernels.products import KERNELS
from modeling.prefix_store.folder import allow_files, node_folder, share_bytes, sweep
from modeling.prefix_store.node import disk_place
from modeling.threads import use_cores
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationHost:
    """What an engine needs to know of its place."""

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
    """Interface of the server."""
    engine: EngineConfig
    cluster: str = ""
    """Whose prefixes are kept on the node, and shared by all of its workers there."""
    prefix_share: float = 0.0
    """Part of the node's memory file system that they may take; 0: none are kept."""
    prefix_disk: str = ""
    """Folder of the node for what has no room there."""
    prefix_disk_bytes: int = 0
    """That they may take there; 0: nothing is kept there."""
    kernels: Sequence[KernelChoice] = ()
    """That the cluster has chosen, one for a kind of processor."""

    async def start(self) -> GenerationServer:
        """Returns the engine's server, which serves. Raises ModelError or ConfigError, one line."""
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
        if self.cores:  # which others do not share: what pushes take of them is felt between two tokens
            give_way_to(server.engine.thread_id)
        await asyncio.to_thread(sweep)  # what killed clusters left; after it is known which folder is in use
        if disk is not None:
            await asyncio.to_thread(sweep, disk.folder.parent)
        collect_rarely()
        return server

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        KERNELS.use(self.kernels)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
