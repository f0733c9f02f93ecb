"""The host of one generation engine: loads its model and runs its server, in whatever process it is made.

deploy makes it in a child process or in a Ray actor; it knows of neither. Runs on that process's asyncio loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.clock import SystemClock
from generate_workers.engine import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.decoder import Decoder
from modeling.threads import use_cores
from modeling.weights import load_decoder
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

    async def start(self) -> GenerationServer:
        """Returns the engine's server, which serves. Raises ModelError or ConfigError, one line."""
        decoder = await asyncio.to_thread(self._load)
        tokenizer = await asyncio.to_thread(Tokenizer.load, self.model_folder)
        most = min(self.engine.max_slot_tokens, decoder.config.max_position)
        engine = replace(self.engine, max_slot_tokens=most)
        return await GenerationServer.start(decoder, tokenizer, engine, clock=SystemClock(), host=self.host)

    def _load(self) -> Decoder:
        use_cores(self.cores, self.num_threads)
        return load_decoder(self.model_folder, dtype=self.dtype, quantization=self.quantization)
