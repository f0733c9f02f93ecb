"""A worker as a Ray actor. Its process can serve as several workers, one after another, with the same servers as a
child process (`deploy.groups.worker_process`).

Runs on the actor's asyncio loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from baton.errors import BatonError
from baton.process.crash_notes import begin_note, end_note
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import WorkerHost
from deploy.machine.model_folder import folder_on_node, section_on_node
from deploy.options.logs import set_up_logs
from deploy.ray_cluster.kept_files import file_here


@dataclass(frozen=True)
class Served:
    """A worker's answer to its start."""

    pid: int
    node_id: str
    host: str = ""
    """Address at which the worker serves."""
    port: int = 0
    crash_note: str = ""
    """Path of the process's crash note on its node; empty if it has none."""
    error: str = ""
    """Reason why the worker cannot serve, in one line; empty if it serves."""


class WorkerActor:
    """Hosts a worker's server. Called by its spawner only."""

    def __init__(self, config: WorkerConfig) -> None:
        level = logging.INFO if config.role == "orchestrator" else logging.WARNING
        set_up_logs(level, config.place.log_format)
        self._config = config
        self._note = "" if config.role == "orchestrator" else begin_note()
        self._host = WorkerHost(note=self._note)
        self._served: Served | None = None
        """Answer to the latest start; None before the first start and while a start is running."""
        self._starting = asyncio.Lock()

    async def serve(self, config: WorkerConfig) -> Served:
        """Serve with this configuration instead of the former one, if any. If the server already has this
        configuration, it keeps running, because a restarted supervisor calls this method again. Return the server's
        address, or its error."""
        async with self._starting:
            if self._served is None or config != self._config:
                self._config, self._served = config, None
                self._served = await self._start(config)
            return self._served

    async def _start(self, config: WorkerConfig) -> Served:
        pid, node_id = os.getpid(), ray.get_runtime_context().get_node_id()
        try:
            here = await asyncio.to_thread(_on_this_node, config)
            return Served(pid, node_id, here.place.host, await self._host.serve(here), self._note)
        except BatonError as error:
            where = "" if config.place.host else f"on node {node_address()}: "
            return Served(pid, node_id, error=f"{where}{error}")

    async def config(self) -> WorkerConfig:
        """Return the configuration that the worker serves with."""
        return self._config

    async def live(self) -> None:
        """Never return. The reference that the caller holds fails when this process ends."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """End the server and the engine. The process runs until it is killed."""
        await self._host.stop()
        end_note(self._note)


def node_address() -> str:
    """Return the address that this process's node has in its Ray."""
    find: Callable[[], str] = ray.util.get_node_ip_address  # untyped in ray
    return find()


def _on_this_node(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration, completed with the values of this node: its address, and the paths of the model and of
    other files on it. Blocks. Converts or downloads the model if necessary. Raises ModelError or ConfigError."""
    place, namespace = config.place, ray.get_runtime_context().namespace
    step_times = str(file_here(namespace, Path(place.step_times))) if place.step_times else ""
    here = replace(place, host=place.host or node_address(), model_folder=folder_on_node(place), step_times=step_times)
    return replace(config, place=here, section=section_on_node(config.section, place))
