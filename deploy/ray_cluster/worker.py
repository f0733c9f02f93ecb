"""A worker as a Ray actor: one process for one rank, which runs the same server as a child process would.

Runs on the actor's asyncio loop.
"""

import asyncio
import logging
import os
from dataclasses import dataclass

import ray

from baton.errors import BatonError
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import Server, start_server


@dataclass(frozen=True)
class Served:
    """A worker's answer to its start."""

    pid: int
    node_id: str
    port: int = 0
    error: str = ""
    """Why the worker cannot serve, in one line; empty when it serves."""


class WorkerActor:
    """Hosts one worker's server. Called by its spawner only."""

    def __init__(self, config: WorkerConfig) -> None:
        level = logging.INFO if config.role == "orchestrator" else logging.WARNING
        logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._config = config
        self._server: Server | None = None
        self._starting = asyncio.Lock()

    async def serve(self) -> Served:
        """Start the server unless it runs already, because a supervisor that was restarted asks again. Return its port
        or its error."""
        pid, node_id = os.getpid(), ray.get_runtime_context().get_node_id()
        async with self._starting:
            if self._server is None:
                try:
                    self._server = await start_server(self._config)
                except BatonError as error:
                    return Served(pid, node_id, error=str(error))
            return Served(pid, node_id, port=self._server.port)

    async def config(self) -> WorkerConfig:
        """Return the configuration that the worker was made with."""
        return self._config

    async def live(self) -> None:
        """Never return, so that the caller's reference fails when this process ends."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """End the server and the engine; the process stays until it is killed."""
        if self._server is not None:
            await self._server.stop()
