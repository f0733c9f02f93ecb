"""Which groups there are, and what this orchestrator has given them to do (step 3 of a request's way).

A view of the cluster is pushed by its supervisor, whenever something changes and regularly; the orchestrator makes no
worker and ends none. On the loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from baton.clock import Clock
from baton.errors import NotFoundError, UnavailableError
from baton.ids import Epoch, JobId
from orchestrator.backlog import Backlogs
from orchestrator.breakers import Breakers, BreakerState

T = TypeVar("T")

_TIMER_S = 0.001
"""After a breaker's time: the loop's timers may be early by as much as their clock is coarse."""


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
    prefix_store: str = ""
    """Where its ranks keep prefixes: equal for groups that share one; empty: nowhere."""

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


Group = PrefillGroup | GenerationGroup
G = TypeVar("G", PrefillGroup, GenerationGroup)


@dataclass(frozen=True)
class ClusterView:
    """All groups, present and expected: one that is being repaired is in it, not ready."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()

    @property
    def num_slots(self) -> int:
        return sum(group.num_slots for group in self.generation)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of both roles."""
        return (*self.prefill, *self.generation)

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
    """The latest view, each group's load, and which groups get no work though they could: the drained, the broken."""

    def __init__(self) -> None:
        self.present = ClusterView()
        """All groups, as the supervisor said last."""
        self.on_update: Callable[[], None] = _ignore
        """Called whenever `view` has other groups; set once, by the controller."""
        self.breakers: Breakers | None = None
        """Set once, by the controller. None: no group ever counts as broken."""
        self.backlogs = Backlogs()
        """What prefill groups have before them, by their lives. Written by whoever dispatches."""
        self._loads: dict[str, Load] = {}
        self._drained: set[str] = set()
        self._kept: frozenset[str] | None = None
        """Of the drained, those that the supervisor has for this orchestrator's next life; None without such a one."""
        self._changed = asyncio.Event()

    @property
    def view(self) -> ClusterView:
        """Where new work may go: the groups present without the drained ones. One that is being repaired, or broken,
        is not ready."""
        if not self._drained and not self.breakers:
            return self.present
        return ClusterView(
            prefill=tuple(self._seen(group) for group in self.present.prefill if not self.is_drained(group)),
            generation=tuple(self._seen(group) for group in self.present.generation if not self.is_drained(group)),
        )

    @property
    def drained(self) -> frozenset[str]:
        """Names of groups that are to get no new work, present or not."""
        return frozenset(self._drained)

    def update(self, view: ClusterView) -> None:
        """Replaces what is known. A group keeps its load for as long as its requests hold it."""
        self.present = view
        if self.breakers:
            self.breakers.keep({group.life for group in view.groups})
        self.on_update()
        self._tell()

    def drain(self, name: str) -> None:
        """From now on the group gets no new work, in any of its lives. Raises NotFoundError when there is none of that
        name."""
        self._require(name)
        self.keep_drained({*self._drained, name})

    def undrain(self, name: str) -> None:
        """The group may get work again. Raises NotFoundError as `drain`."""
        self._require(name)
        self.keep_drained(self._drained - {name})

    def keep_drained(self, names: Collection[str]) -> None:
        """These groups are drained, and no others; whether they are present or not."""
        self._drained = set(names)
        self.on_update()
        self._tell()

    def hear_kept(self, names: Collection[str]) -> None:
        """The supervisor has these drains for the orchestrator's next life."""
        self._kept = frozenset(names)
        self._tell()

    def is_kept(self, name: str) -> bool:
        """Whether the group's drain outlives this orchestrator, as far as any does here."""
        return self._kept is None or name in self._kept

    def is_drained(self, group: Group) -> bool:
        """Whether it gets no new work because somebody said so."""
        return group.name in self._drained

    def is_broken(self, group: Group) -> bool:
        """Whether it gets none for a while because attempts there failed again and again."""
        return self.breakers is not None and self.breakers.state(group.life) is not BreakerState.CLOSED

    def may_have_work(self, group: Group) -> bool:
        """Whether it is ready, and neither drained nor broken."""
        return group.ready and not self.is_drained(group) and self._is_admitted(group)

    def load(self, name: str) -> Load:
        """Of the group of that name."""
        return self._loads.get(name, Load())

    @contextlib.contextmanager
    def hold(self, name: str, num_slots: int = 0) -> Iterator[None]:
        """Counts a request as that group's: an attempt, which has gone well when nothing is raised within."""
        self._add(name, 1, num_slots)
        life = self._life_of(name)
        is_probe = self._began(life)
        try:
            yield
            if self.breakers:
                self.breakers.succeeded(life, is_probe=is_probe)
        finally:
            self._add(name, -1, -num_slots)
            self._tell()

    def failed(self, life: Hashable) -> None:
        """An attempt failed because of the group in that life."""
        if self.breakers is not None:
            self.breakers.failed(life)
            self._tell_later(life)

    async def until(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `choose` finds, asked now and after every change; None when that was nothing for `timeout_s` seconds.
        Nothing else runs between the finding and this call's return: the caller may hold what was found."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (found := choose()) is None:
                    await self._changed.wait()
                return found
        return None

    def _seen(self, group: G) -> G:
        return group if self._is_admitted(group) else replace(group, ready=False)

    def _is_admitted(self, group: Group) -> bool:
        return self.breakers is None or self.breakers.admits(group.life)

    def _require(self, name: str) -> None:
        names = sorted(group.name for group in self.present.groups)
        if name not in names:
            raise NotFoundError(f"there is no group {name}: name one of {', '.join(names) or 'none, as none is there'}")

    def _life_of(self, name: str) -> Hashable:
        return next((group.life for group in self.present.groups if group.name == name), None)

    def _began(self, life: Hashable) -> bool:
        if not self.breakers or not self.breakers.began(life):
            return False
        self._tell_later(life)
        return True

    def _tell_later(self, life: Hashable) -> None:
        """When the breaker changes by itself, those who wait for a group look again."""
        if self.breakers and (left_s := self.breakers.left_s(life)):
            asyncio.get_running_loop().call_later(left_s + _TIMER_S, self._tell)

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
