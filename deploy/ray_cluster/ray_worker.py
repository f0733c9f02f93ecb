"""A worker that runs as a Ray actor. The actor's process can serve as several workers, one after another. It runs the
same servers as a worker that is a child process (`deploy.groups.worker_process`).

Functions run on the actor's asyncio loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray

from baton.errors import BatonError
from baton.process.crash_notes import begin_note, end_note
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import WorkerHost
from deploy.machine.device_profile import DTYPE_BYTES, measure_in_child, must_measure
from deploy.machine.model_folder import folder_on_node, section_on_node
from deploy.options.logs import set_up_logs


@dataclass(frozen=True)
class Served:
    """Result of a worker's start: the address at which it serves, or an error."""

    pid: int
    node_id: str
    host: str = ""
    """Address at which the worker serves."""
    port: int = 0
    crash_note: str = ""
    """Path of the file on the worker's node into which the process writes the reason of a crash. Empty if the process
    has no such file."""
    error: str = ""
    """Reason why the worker cannot serve, in one line; empty if it serves."""


class WorkerActor:
    """Ray actor that hosts the server of one worker. Only the worker's spawner calls it."""

    def __init__(self, config: WorkerConfig) -> None:
        level = logging.INFO if config.role == "orchestrator" else logging.WARNING
        set_up_logs(level, config.place.log_format)
        self._config = config
        self._note = "" if config.role == "orchestrator" else begin_note()
        self._host = WorkerHost(note=self._note)
        self._served: Served | None = None
        """Result of the latest start. None before the first start, and while a start is in progress."""
        self._starting = asyncio.Lock()

    async def serve(self, config: WorkerConfig) -> Served:
        """Start to serve with `config`, and return the server's address or its error. A server with another
        configuration is ended first. A server that already has this configuration keeps running: a restarted supervisor
        repeats this call for workers that still serve."""
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
        """Wait forever. The caller waits for Ray's reference to this call. When the actor's process ends, the reference
        raises an error. From this error the caller learns that the process has ended."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """End the server and the engine. The actor's process continues to run until it is killed."""
        await self._host.stop()
        end_note(self._note)


def node_address() -> str:
    """Return the address of the node on which this process runs, as Ray reports it."""
    find: Callable[[], str] = ray.util.get_node_ip_address  # untyped in ray
    return find()


def _on_this_node(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration, completed with the values of this node: its address, and the path of the model on it.
    Blocks. Converts or downloads the model if necessary. On a Ray that Baton did not start, no launcher has prepared
    the node, so the rates of its cores are measured if they are not kept. Raises ModelError or ConfigError."""
    place = config.place
    here = replace(place, host=place.host or node_address(), model_folder=folder_on_node(place))
    if not place.host and place.device != "cuda" and must_measure("cpu", DTYPE_BYTES[place.dtype]):
        measure_in_child("cpu", place.dtype)
    return replace(config, place=here, section=section_on_node(config.section, place))
