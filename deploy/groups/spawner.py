"""The ports by which a supervisor gets workers: started somewhere, reachable by gRPC, and certain to end when killed.

Implementations: child processes (deploy.groups.processes) and Ray actors (deploy.ray_cluster.spawner). Both pass one
conformance suite. Workers on Ray take room that is reserved for their group (deploy.ray_cluster.places); child
processes none.
"""

from typing import Protocol

from deploy.config.worker import WorkerConfig


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


class Room(Protocol):
    """Where groups get the place that their workers take."""

    async def reserve(self, group: str, num_workers: int) -> None:
        """Returns when there is room for the group of that name, which is kept for it. May be called again. Raises
        ConfigError when there is none, or none in time; nothing is kept then."""
        ...

    async def release(self, group: str) -> None:
        """Gives back what was reserved for the group, also by an earlier supervisor; workers that are left there end.
        Harmless when there is nothing."""
        ...
