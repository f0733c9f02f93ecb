"""Which groups there are, and what this orchestrator has given them to do (step 3 of a request's way).

A view of the cluster is pushed by its supervisor, whenever something changes and regularly; the orchestrator makes no
worker and ends none. On the loop.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from baton.clock import Clock
from baton.errors import NotFoundError, UnavailableError
from baton.ids import Epoch, JobId
from baton.results import KvLedger
from orchestrator.membership.breakers import Breakers, BreakerState
from orchestrator.membership.prefill_book import Backlogs

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
    """Where its ranks keep prefixes: equal for groups of either role that share one; empty: nowhere."""
    layout_fingerprint: str = ""
    """Of the KV that it makes; empty: nobody says, and all groups have the same."""
    processors: tuple[str, ...] = ()
    """Kinds of processor that its ranks run on, each with the kernels in use there; for people."""

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
    prefix_store: str = ""
    """Where its slots find prefixes, and its answers are kept; likewise."""
    residency: str = ""
    """Its policy: where KV lives, and which of it is attended to."""
    is_approximate: bool = False
    """Whether its rows attend to less than all tokens."""
    processors: tuple[str, ...] = ()
    """The kind of processor that it runs on, with the kernels in use there; for people."""

    def may_serve(self, *, exact: bool) -> bool:
        """Whether its attention is what a request wants."""
        return not (exact and self.is_approximate)

    @property
    def life(self) -> Hashable:
        """What is another after the group was replaced."""
        return self.name, self.endpoint


Group = PrefillGroup | GenerationGroup
G = TypeVar("G", PrefillGroup, GenerationGroup)


@dataclass(frozen=True)
class AbsentGroup:
    """A group that is known, and has no workers now."""

    name: str
    role: str
    """prefill or generate."""
    starts: bool = False
    """Whether it is to have some; else it has left, as operators wanted."""
    error: str = ""
    """Why its last start failed, in one line; it is tried again."""


@dataclass(frozen=True)
class ClusterView:
    """All groups, present and expected: one that is being repaired is in it, not ready."""

    prefill: tuple[PrefillGroup, ...] = ()
    generation: tuple[GenerationGroup, ...] = ()
    absent: tuple[AbsentGroup, ...] = ()

    @property
    def num_slots(self) -> int:
        return sum(group.num_slots for group in self.generation)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of both roles."""
        return (*self.prefill, *self.generation)

    def chains_for(self, generation: GenerationGroup) -> "ClusterView":
        """The same with those prefill groups alone whose KV that group can take: while models are changed, some have
        another."""
        layouts = ("", generation.layout_fingerprint)
        return replace(self, prefill=tuple(group for group in self.prefill if group.layout_fingerprint in layouts))

    @property
    def endpoints(self) -> frozenset[str]:
        """Of all workers."""
        ranks = (endpoint for group in self.prefill for endpoint in group.endpoints)
        return frozenset((*ranks, *(group.endpoint for group in self.generation)))


@dataclass(frozen=True)
class Orders:
    """What operators want of groups, present or not. The orchestrator's to change; the supervisor carries them out, and
    keeps them for the next life of either."""

    drained: frozenset[str] = frozenset()
    """Names of groups that are to get no new work."""
    leaving: frozenset[str] = frozenset()
    """Of those, the ones that are to have no workers: they had nothing left to do."""
    stand_ins: frozenset[str] = frozenset()
    """Groups beyond those that are configured, for while others are away; one that has left is forgotten."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Folder of the model that a group loads when it starts, by name; the configured one where none is named."""

    def without(self, names: Collection[str]) -> "Orders":
        """None for groups of these names."""
        models = {name: model for name, model in self.models.items() if name not in names}
        return Orders(self.drained - {*names}, self.leaving - {*names}, self.stand_ins - {*names}, models)


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
        self.memory: dict[str, KvLedger] = {}
        """What generation groups said last of their KV memory, by their names. Written by the census."""
        self.orders = Orders()
        """Replaced as a whole, by `keep_orders`."""
        self._loads: dict[str, Load] = {}
        self._kept: Orders | None = None
        """Those that the supervisor has for this orchestrator's next life; None without such a one."""
        self._changed = asyncio.Event()

    @property
    def view(self) -> ClusterView:
        """Where new work may go: the groups present without the drained ones. One that is being repaired, or broken,
        is not ready."""
        if not self.orders.drained and not self.breakers:
            return self.present
        return ClusterView(
            prefill=tuple(self._seen(group) for group in self.present.prefill if not self.is_drained(group)),
            generation=tuple(self._seen(group) for group in self.present.generation if not self.is_drained(group)),
        )

    def update(self, view: ClusterView) -> None:
        """Replaces what is known. A group keeps its load for as long as its requests hold it."""
        self.present = view
        left = {group.name for group in view.absent if not group.starts}
        self.orders = self.orders.without(left & self.orders.leaving & self.orders.stand_ins)
        if self.breakers:
            self.breakers.keep({group.life for group in view.groups})
        self.on_update()
        self._tell()

    def drain(self, name: str) -> None:
        """From now on the group gets no new work, in any of its lives. Raises NotFoundError when there is none of that
        name."""
        self._require(name)
        self.keep_orders(replace(self.orders, drained=self.orders.drained | {name}))

    def dismiss(self, name: str) -> None:
        """A drained group that has nothing left to do leaves: its workers are to end. Raises UnavailableError when
        nobody ends workers here."""
        assert name in self.orders.drained, f"{name} may get work"
        if self._kept is None:
            raise UnavailableError(f"{name} cannot leave, as no supervisor ends its workers: drain it with --keep")
        self.keep_orders(replace(self.orders, leaving=self.orders.leaving | {name}))

    def undrain(self, name: str, model: str = "") -> None:
        """The group may get work again; one that has left comes back first, with the model in that folder, if one is
        named. Raises NotFoundError as `drain`, and UnavailableError for another model while its workers are up."""
        self._require(name)
        if model and self.is_present(name):
            raise UnavailableError(f"{name} has workers, which keep their model: drain it first, without --keep")
        if model:
            self.use_model(name, model)
        drained, leaving = self.orders.drained - {name}, self.orders.leaving - {name}
        self.keep_orders(replace(self.orders, drained=drained, leaving=leaving))

    def use_model(self, name: str, model: str | None) -> None:
        """The group loads the model in that folder when it starts; None: the configured one."""
        others = {each: folder for each, folder in self.orders.models.items() if each != name}
        self.keep_orders(replace(self.orders, models=others if model is None else {**others, name: model}))

    def stand_in(self, name: str) -> str:
        """Another group like that of this name is to be there for a while; its name. Raises NotFoundError as `drain`,
        UnavailableError when nobody starts workers here."""
        self._require(name)
        if self._kept is None:
            raise UnavailableError(f"nothing can stand in for {name}, as no supervisor starts workers here")
        kind = name.rpartition("-")[0]
        taken = {*self._names(), *self.orders.stand_ins}
        made = next(f"{kind}-{number}" for number in itertools.count() if f"{kind}-{number}" not in taken)
        self.use_model(made, self.orders.models.get(name))
        self.keep_orders(replace(self.orders, stand_ins=self.orders.stand_ins | {made}))
        return made

    def give_up(self, name: str) -> None:
        """A stand-in leaves, whether it is there yet or not, and is forgotten once it is away. Harmless when it is."""
        if name in self.orders.stand_ins:
            drained, leaving = self.orders.drained | {name}, self.orders.leaving | {name}
            self.keep_orders(replace(self.orders, drained=drained, leaving=leaving))

    def keep_orders(self, orders: Orders) -> None:
        """These are in force, and no others; whether their groups are present or not."""
        self.orders = orders
        self.on_update()
        self._tell()

    def hear_kept(self, orders: Orders) -> None:
        """The supervisor has these orders for the orchestrator's next life."""
        self._kept = orders
        self._tell()

    def is_kept(self, name: str) -> bool:
        """Whether it outlives this orchestrator, as far as anything does here, that the group is drained, or is not."""
        return self._kept is None or (name in self._kept.drained) == (name in self.orders.drained)

    def is_present(self, name: str) -> bool:
        """Whether the group of that name has workers."""
        return any(group.name == name for group in self.present.groups)

    def absence(self, name: str) -> AbsentGroup | None:
        """Of the group of that name; None when it is present, or unknown."""
        return next((group for group in self.present.absent if group.name == name), None)

    def is_drained(self, group: Group) -> bool:
        """Whether it gets no new work because somebody said so."""
        return group.name in self.orders.drained

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

    def _names(self) -> list[str]:
        """Of all groups that are known."""
        return sorted(group.name for group in (*self.present.groups, *self.present.absent))

    def _require(self, name: str) -> None:
        names = self._names()
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
