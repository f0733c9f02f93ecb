"""Hosts one generation engine: loads its model and starts its server, in the process that calls `start_engine`.

`deploy.groups.hosting` calls it in a child process or in a Ray actor; this module knows of neither. Starts
`generate_workers.servicer`. Runs on that process's asyncio loop.
"""

import asyncio
from dataclasses import replace

from baton.clock import SystemClock
from baton.process.cores import give_way_to
from baton.process.garbage import collect_rarely
from baton.settings.place import WorkerPlace
from generate_workers.config import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.hosting import load, prefix_options, sweep_node
from text.tokenizer import Tokenizer


async def start_engine(place: WorkerPlace, config: EngineConfig) -> GenerationServer:
    """Load the model and return the engine's server, accepting calls. Raises ModelError or ConfigError, one line."""
    decoder = await asyncio.to_thread(load, place)
    tokenizer = await asyncio.to_thread(Tokenizer.load, place.model_folder)
    server = await GenerationServer.start(
        decoder,
        tokenizer,
        replace(config, max_slot_tokens=min(config.max_slot_tokens, decoder.config.max_position)),
        clock=SystemClock(),
        host=place.host,
        num_engines=place.num_engines,
        **prefix_options(place),
    )
    if place.cores:  # no other process shares them: what pushes take of them would delay tokens
        give_way_to(server.engine.thread_id)
    await asyncio.to_thread(sweep_node, place)
    collect_rarely()
    return server
