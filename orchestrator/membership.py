"""Which groups there are, and what this orchestrator has given them to do (step 3 of a request's way).

A view of the cluster is pushed by its supervisor, whenever something changes and regularly; the orchestrator makes no
worker and ends none. On the loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from baton.clock import Clock
from baton.errors import UnavailableError
from baton.ids import Epoch, JobId
from orchestrator.backlog import Backlogs

T = TypeVar("T")


class NoGroupError(UnavailableError):
    """No group could take the request in time; that was waited for, so it is not tried again."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True)
class PrefillGroup:
    """A chain of ranks, in one life of its links."""

    name: str
    endpoints: tuple[str, ...]
    """host:port of each rank, in rank order."""
    epoch: Epoch
    ready: bool = True

    @property
    def life(self) -> Hashable:
        """What is another after the group was repaired."""
        return self.name, self.endpoints, self.epoch


@dataclass(frozen=True)
class GenerationGroup:
    """Slots and a batch."""

    name: str
    endpoint: str
    layout_fingerprint: str
    """Of the KV that it takes."""
    num_slots: int
    max_slot_tokens: int
    """Tokens that a slot may hold, prompt and output."""
    ready: bool = True

    @property
    def life(self) -> Hashable:
        """What is another after the group was replaced."""
        return self.name, self.endpoint


@dataclass(frozen=True)
class ClusterView:
    """All groups, present and expected: one that is being repaired is in it, not ready."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()

    @property
    def num_slots(self) -> int:
        return sum(group.num_slots for group in self.generation)

    @property
    def endpoints(self) -> frozenset[str]:
        """Of all workers."""
        ranks = (endpoint for group in self.prefill for endpoint in group.endpoints)
        return frozenset((*ranks, *(group.endpoint for group in self.generation)))


@dataclass(frozen=True)
class Load:
    """What this orchestrator has given a group."""

    num_requests: int = 0
    num_slots: int = 0
    """That those requests hold, or are about to."""


class Members:
    """The latest view, and each group's load."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self.on_update: Callable[[], None] = _ignore
        """Called after each update; set once, by the controller."""
        self.backlogs = Backlogs()
        """What prefill groups have before them, by their lives. Written by whoever dispatches."""
        self._loads: dict[str, Load] = {}
        self._changed = asyncio.Event()

    def update(self, view: ClusterView) -> None:
        """Replaces what is known. A group keeps its load for as long as its requests hold it."""
        self.view = view
        self.on_update()
        self._tell()

    def load(self, name: str) -> Load:
        """Of the group of that name."""
        return self._loads.get(name, Load())

    @contextlib.contextmanager
    def hold(self, name: str, num_slots: int = 0) -> Iterator[None]:
        """Counts a request as that group's."""
        self._add(name, 1, num_slots)
        try:
            yield
        finally:
            self._add(name, -1, -num_slots)
            self._tell()

    async def until(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `choose` finds, asked now and after every change; None when that was nothing for `timeout_s` seconds.
        Nothing else runs between the finding and this call's return: the caller may hold what was found."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (found := choose()) is None:
                    await self._changed.wait()
                return found
        return None

    def _add(self, name: str, num_requests: int, num_slots: int) -> None:
        load = self.load(name)
        load = Load(load.num_requests + num_requests, load.num_slots + num_slots)
        self._loads[name] = load
        if not load.num_requests:
            del self._loads[name]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class JobNumbers:
    """Numbers of prefill jobs: ascending, and above all that an earlier life of the orchestrator gave out."""

    def __init__(self, clock: Clock) -> None:
        self._last = clock.unix_ns()

    def issue(self) -> JobId:
        self._last += 1
        return JobId(self._last)


def _ignore() -> None:
    pass
