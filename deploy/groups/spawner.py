"""Interfaces through which a supervisor starts workers. A worker is a process that serves gRPC, on any machine. It
always ends when it is killed.

The orchestrator is also started as a worker (`deploy.groups.keeper`). The interfaces are implemented by child processes
(`deploy.groups.processes`) and by Ray actors (`deploy.ray_cluster.spawner`). Both pass the same conformance tests. On
Ray, workers run in resources that were reserved for their group (`deploy.ray_cluster.places`). Child processes need no
reservation.
"""

from typing import Protocol

from baton.process.crash_notes import Crash
from deploy.config.worker import WorkerConfig


class WorkerHandle(Protocol):
    """Interface to the process of a worker that serves. Owned by the supervisor that started the worker, and used on
    the supervisor's asyncio loop."""

    @property
    def config(self) -> WorkerConfig: ...

    @property
    def endpoint(self) -> str:
        """Address of the worker's gRPC server, host:port."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the worker on its own machine."""
        ...

    @property
    def ended(self) -> bool:
        """True if the worker's process has ended. Never blocks."""
        ...

    async def wait(self) -> str:
        """Wait until the worker's process has ended, and return a text that describes how it ended. May be called
        several times."""
        ...

    async def crash(self) -> Crash | None:
        """Return a description of the crash of the worker's process. Call it after the process has ended. Return None
        if the process did not crash, or if this is not known. Never raises. Later calls return None."""
        ...

    async def serve_as(self, config: WorkerConfig) -> None:
        """Make the process serve with this configuration, at another endpoint. The process ends its current server and
        the calls that still run in it, and starts the next server. The model stays loaded if both servers use the same
        model.

        Raises WorkerStartError with the worker's reason if it refuses to start. Raises UnavailableError if the process
        ends or does not answer in time. If the call fails or is cancelled, the process has ended or is about to end.
        """
        ...

    def kill(self) -> None:
        """Kill the process, even if it is stopped (SIGSTOP). Does nothing if the process has ended. Does not wait for
        its end; use `wait` for this."""
        ...

    async def close(self) -> None:
        """Request the worker to exit, and kill it if it does not exit within a few seconds. Returns when the worker's
        process has ended."""
        ...


class Spawner(Protocol):
    """Interface that starts workers from their configurations."""

    async def start(self, config: WorkerConfig) -> WorkerHandle:
        """Start a worker, and return it when it serves. Raises WorkerStartError with the worker's reason if it refuses
        to start. Raises UnavailableError if its process ends or does not answer in time. If the call fails or is
        cancelled, no process of the worker is left."""
        ...


class Room(Protocol):
    """Interface that reserves resources on nodes for the workers of groups."""

    async def reserve(self, group: str, num_workers: int) -> None:
        """Reserve resources for `num_workers` workers of the group `group`. Returns when the resources are reserved.
        May be called again for the same group. Raises ConfigError if the nodes do not have enough resources, or if the
        resources do not become free in time. After an error, nothing stays reserved."""
        ...

    async def release(self, group: str) -> None:
        """Release the resources that are reserved for the group, including a reservation by an earlier supervisor.
        Workers that still run in these resources are ended. Does nothing if no resources are reserved."""
        ...
