"""Interfaces through which a supervisor starts workers: processes on any machine that serve gRPC and always end when
they are killed.

The orchestrator is also started as a worker (deploy.groups.keeper). Implementations: child processes
(deploy.groups.processes) and Ray actors (deploy.ray_cluster.spawner). Both pass the same conformance suite. On Ray,
workers run in room that was reserved for their group (deploy.ray_cluster.places). Child processes need no room.
"""

from typing import Protocol

from baton.process.crash_notes import Crash
from deploy.config.worker import WorkerConfig


class WorkerHandle(Protocol):
    """Process of a worker that has started to serve. Owned by the supervisor that requested it; used on the
    supervisor's loop."""

    @property
    def config(self) -> WorkerConfig: ...

    @property
    def endpoint(self) -> str:
        """Address of the worker's gRPC server, host:port."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the worker, on the machine that it runs on."""
        ...

    @property
    def ended(self) -> bool:
        """True if the worker's process has ended. Never blocks."""
        ...

    async def wait(self) -> str:
        """Wait until the worker's process has ended, and return a text that describes how it ended. May be called any
        number of times."""
        ...

    async def crash(self) -> Crash | None:
        """Return how the worker's process crashed, after it has ended. Return None if it did not crash, or if this is
        unknown. Raises nothing. Only the first call returns the crash."""
        ...

    async def serve_as(self, config: WorkerConfig) -> None:
        """Make the process serve with this configuration, at another endpoint. The process ends its current server and
        the calls that still run in it, and starts the next server. The model stays loaded if both servers have the
        same. Raises WorkerStartError with the worker's own reason, or UnavailableError if the process ends or does not
        answer for too long. After an error or a cancelled call the process has ended or is about to end."""
        ...

    def kill(self) -> None:
        """Kill the process, even if it is stopped. Does nothing if it has ended. `wait` returns when the process has
        ended."""
        ...

    async def close(self) -> None:
        """Request the worker to exit, and kill it if it does not exit within a few seconds. Returns when its process
        has ended."""
        ...


class Spawner(Protocol):
    """Starts workers from their configurations."""

    async def start(self, config: WorkerConfig) -> WorkerHandle:
        """Start a worker and return it when it serves. Raises WorkerStartError with the worker's own reason, or
        UnavailableError if its process ends or does not answer for too long. After an error or a cancelled call no
        process of the worker is left."""
        ...


class Room(Protocol):
    """Reserves room (resources on nodes) for the workers of groups."""

    async def reserve(self, group: str, num_workers: int) -> None:
        """Reserve room for `num_workers` workers of the group of that name. Returns when the room is reserved. May be
        called again for the same group. Raises ConfigError if no node has room, or none has room in time; then nothing
        stays reserved."""
        ...

    async def release(self, group: str) -> None:
        """Release the room that was reserved for the group, even by an earlier supervisor. Workers that still run in
        that room end. Does nothing if no room is reserved."""
        ...
