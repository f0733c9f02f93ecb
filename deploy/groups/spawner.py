"""The ports by which a supervisor gets workers: started somewhere, reachable by gRPC, and certain to end when killed.

The orchestrator is a worker, too (deploy.groups.keeper). Implementations: child processes (deploy.groups.processes) and
Ray actors (deploy.ray_cluster.spawner). Both pass one conformance suite. Workers of groups on Ray take room that is
reserved for their group (deploy.ray_cluster.places); child processes need none.
"""

from typing import Protocol

from baton.process.crash_notes import Crash
from deploy.config.worker import WorkerConfig


class WorkerHandle(Protocol):
    """The process of a worker, from when it serves. Owned by the supervisor that asked for it; used on its loop."""

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
        """Wait until the worker's process has ended, and return how. May be called any number of times."""
        ...

    async def crash(self) -> Crash | None:
        """Return how the worker's process crashed, once it has ended; None when it did not crash or that cannot be
        found out. Raises nothing. Only the first call is answered."""
        ...

    async def serve_as(self, config: WorkerConfig) -> None:
        """Serve with this configuration from now on, at another endpoint: the process ends its server, with the calls
        that it still has, and starts the next, for which the model stays loaded if it is the same. Raises
        WorkerStartError with the worker's own reason, or UnavailableError when the process ends or stays silent for too
        long. After an error or a cancelled call the process has ended or is about to."""
        ...

    def kill(self) -> None:
        """End the process by force, even a stopped one; harmless when it has ended. `wait` returns when it has
        ended."""
        ...

    async def close(self) -> None:
        """Request the worker to exit, and kill it if it does not exit within a few seconds. Returns when its process
        has ended."""
        ...


class Spawner(Protocol):
    """Makes workers from their configurations."""

    async def start(self, config: WorkerConfig) -> WorkerHandle:
        """Start a worker and return it when it serves. Raises WorkerStartError with the worker's own reason, or
        UnavailableError when it ends or stays silent for too long. After an error or a cancelled call nothing of the
        worker is left."""
        ...


class Room(Protocol):
    """Reserves the places that the workers of groups take."""

    async def reserve(self, group: str, num_workers: int) -> None:
        """Reserve room for the group of that name; returns when there is room, which is then kept. May be called again.
        Raises ConfigError when there is none, or none in time; then nothing is kept."""
        ...

    async def release(self, group: str) -> None:
        """Release the room that was reserved for the group, even by an earlier supervisor. Workers that still run in it
        end. Does nothing when nothing is reserved."""
        ...
