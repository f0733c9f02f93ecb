"""Wrapper of a spawner whose calls raise exceptions, as an operating system or Ray may raise them. Each exception is
raised once."""

from random import Random

from baton.process.crash_notes import Crash
from deploy.config.worker import WorkerConfig
from deploy.groups.spawner import Spawner, WorkerHandle

CALLS = ("start", "kill", "wait", "close")
"""Methods of Spawner and WorkerHandle that a group's repair calls, and that can fail."""


class Failures:
    """Exceptions to raise, by name of the method."""

    def __init__(self) -> None:
        self.due: dict[str, Exception] = {}
        """Exceptions by name of the method. The next call of the method removes its exception and raises it."""
        self.num_raised = 0

    def strike(self, call: str) -> None:
        """Raise the exception that is scheduled for this method, if there is one."""
        error = self.due.pop(call, None)
        if error is not None:
            self.num_raised += 1
            raise error


class RandomFailures(Failures):
    """Random failures, repeatable by seed. Each call fails with the given probability, until `num_left` calls have
    failed."""

    def __init__(self, seed: int, errors: tuple[Exception, ...], probability: float, num_left: int) -> None:
        super().__init__()
        self.num_left = num_left
        self._rng = Random(seed)
        self._errors = errors
        self._probability = probability

    def strike(self, call: str) -> None:
        if self.num_left and self._rng.random() < self._probability:
            self.num_left -= 1
            self.due[call] = self._rng.choice(self._errors)
        super().strike(call)


class FailingWorker:
    """Worker whose calls fail as scheduled. Implements WorkerHandle."""

    def __init__(self, inner: WorkerHandle, failures: Failures) -> None:
        self.inner = inner
        self.pid = inner.pid
        self._failures = failures

    @property
    def config(self) -> WorkerConfig:
        return self.inner.config

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    @property
    def ended(self) -> bool:
        return self.inner.ended

    async def wait(self) -> str:
        self._failures.strike("wait")
        return await self.inner.wait()

    async def crash(self) -> Crash | None:
        return await self.inner.crash()

    async def serve_as(self, config: WorkerConfig) -> None:
        self._failures.strike("serve_as")
        await self.inner.serve_as(config)

    def kill(self) -> None:
        self._failures.strike("kill")
        self.inner.kill()

    async def close(self) -> None:
        self._failures.strike("close")
        await self.inner.close()


class FailingSpawner:
    """Spawner whose calls, and whose workers' calls, fail as scheduled. Implements Spawner."""

    def __init__(self, inner: Spawner, failures: Failures) -> None:
        self.failures = failures
        self._inner = inner

    async def start(self, config: WorkerConfig) -> FailingWorker:
        self.failures.strike("start")
        return FailingWorker(await self._inner.start(config), self.failures)
