"""The port by which a supervisor gets workers: started somewhere, reachable by gRPC, and certain to end when killed.

Implementations: child processes (deploy.processes) and Ray actors (deploy.ray_spawner). Both pass one
conformance suite.
"""

from typing import Protocol

from deploy.config import WorkerConfig


class WorkerHandle(Protocol):
    """One life of one worker, from when it serves. Owned by the supervisor that asked for it; used on its loop."""

    @property
    def config(self) -> WorkerConfig: ...

    @property
    def endpoint(self) -> str:
        """host:port of the worker's gRPC server."""
        ...

    @property
    def pid(self) -> int:
        """Its process, on the machine that it runs on."""
        ...

    @property
    def ended(self) -> bool:
        """The process is gone. Never blocks."""
        ...

    async def wait(self) -> str:
        """Returns when the process is gone: how it ended. May be called any number of times."""
        ...

    def kill(self) -> None:
        """Ends the process by force, a stopped one too; harmless when it has ended. `wait` tells when it is gone."""
        ...

    async def close(self) -> None:
        """Asks the worker to leave, kills it when it does not within a few seconds; returns when it is gone."""
        ...


class Spawner(Protocol):
    """Makes workers."""

    async def start(self, config: WorkerConfig) -> WorkerHandle:
        """A worker that serves. Raises WorkerStartError with the worker's own reason, or UnavailableError when it
        ends or stays silent for too long; nothing of it is left then, nor after a cancelled call."""
        ...
