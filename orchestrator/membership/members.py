"""Tracks the groups of the cluster, and how much work this orchestrator has assigned to each of them.

The supervisor pushes a view of the cluster periodically and after each change, through `orchestrator.api.host`. The
orchestrator itself does not start or stop workers. Read by `orchestrator.placement` and `orchestrator.dispatch`. Runs
on the event loop.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TypeVar

from baton.errors import NotFoundError, UnavailableError
from baton.planning.step_cost import LearntCosts
from baton.process.clock import SystemClock
from orchestrator.membership.breakers import Breakers, BreakerState
from orchestrator.membership.loads import Load
from orchestrator.membership.prefill_queues import PrefillQueues
from orchestrator.membership.view import (
    AbsentGroup,
    ClusterView,
    G,
    GenerationGroup,
    Group,
    Orders,
    PrefillGroup,
    role_of,
)

T = TypeVar("T")

_TIMER_S = 0.001
"""Margin in seconds when waiting for a breaker's transition. Timers of the event loop may fire one tick early."""


class Membership:
    """Latest view of the cluster, with the load of each group. Decides which groups may get new work: drained and
    failing groups get none."""

    def __init__(self, breakers: Breakers | None = None, on_failure: Callable[[], None] = lambda: None) -> None:
        """Create an empty membership. `breakers` are the circuit breakers of the groups; None: breakers with default
        limits, on the system clock. `on_failure` is called after each failed attempt, so that a supervisor can check
        its workers immediately."""
        self.present = ClusterView()
        """All groups of the cluster, including drained ones, as last reported by the supervisor."""
        self.view_changed = asyncio.Event()
        """Event that is set at the next change of `view`, and then replaced by a new Event."""
        self.breakers = Breakers(SystemClock()) if breakers is None else breakers
        """Circuit breakers by incarnation of a group. A repaired or replaced group is a new incarnation."""
        self.prefill_queues = PrefillQueues()
        """Unfinished jobs of prefill groups, by incarnation of the group. Updated by `orchestrator.dispatch`."""
        self.num_bytes_free: dict[str, int] = {}
        """Last reported number of free KV bytes of each generation group, by name. Updated by the worker poller."""
        self.step_costs: dict[str, LearntCosts] = {}
        """Last reported costs of the steps of each generation group, by name. Updated by the worker poller."""
        self.orders = Orders()
        """Operators' orders in force. Replaced as a whole by `keep_orders`."""
        self._loads: dict[str, Load] = {}
        """Load of each group, by group name. Groups without load have no entry."""
        self._returning = Counter[str]()
        """Number of running operations that have drained a group only temporarily, by group name."""
        self._kept: Orders | None = None
        """Last orders that the supervisor stored for a restart of the orchestrator; None without a supervisor."""
        self._on_failure = on_failure
        self._changed = asyncio.Event()

    @property
    def view(self) -> ClusterView:
        """Return the view of the cluster without the drained groups. A group that is being repaired, or whose circuit
        breaker is open, is included with `ready` False."""
        if not self.orders.drained and not self.orders.lent and not self.breakers:
            return self.present
        return ClusterView(
            prefill=tuple(self._seen(group) for group in self.present.prefill if not self.is_drained(group)),
            generation=tuple(self._seen(group) for group in self.present.generation if not self.is_drained(group)),
        )

    def update(self, view: ClusterView) -> None:
        """Replace the view of the cluster. A group's load stays counted until its requests have ended."""
        self.present = view
        left = {group.name for group in view.absent if not group.starts}
        self.orders = self.orders.without(left & self.orders.leaving & self.orders.stand_ins)
        self.breakers.keep({group.incarnation for group in view.groups})
        self._tell_view()

    def drain(self, name: str) -> None:
        """Give the group no new work, not even after a repair. Raises NotFoundError for an unknown name."""
        self._require(name)
        self.keep_orders(replace(self.orders, drained=self.orders.drained | {name}))

    def let_go(self, name: str) -> None:
        """Drain the group because fewer groups suffice. The autoscaler may undrain it later, even after a restart of
        the orchestrator. Raises NotFoundError for an unknown name."""
        self.drain(name)
        self.keep_orders(replace(self.orders, surplus=self.orders.surplus | {name}))

    def dismiss(self, name: str) -> None:
        """Order the supervisor to stop a drained, idle group. Raises UnavailableError without a supervisor."""
        assert name in self.orders.drained, f"{name} may get work"
        if self._kept is None:
            raise UnavailableError(f"{name} cannot leave, as no supervisor ends its workers: drain it with --keep")
        self.keep_orders(replace(self.orders, leaving=self.orders.leaving | {name}))

    def undrain(self, name: str, model: str = "") -> None:
        """Allow new work for the group again. If the group's workers were stopped, they are started first. They load
        the model in the folder `model` if it is not empty.

        Raises NotFoundError for an unknown name. Raises UnavailableError if a model is given while the group has
        workers, or if other groups have borrowed all its workers.
        """
        self._require(name)
        if model and self.is_present(name):
            raise UnavailableError(f"{name} has workers, which keep their model: drain it first, without --keep")
        if self.has_lent_all(name):
            raise UnavailableError(f"{name} has lent its workers: return them by `baton flip {name} --undo`")
        if model:
            self.use_model(name, model)
        drained, leaving = self.orders.drained - {name}, self.orders.leaving - {name}
        surplus = self.orders.surplus - {name}
        self.keep_orders(replace(self.orders, drained=drained, leaving=leaving, surplus=surplus))

    def use_model(self, name: str, model: str | None) -> None:
        """Order the group to load the model in the folder `model` at its next start; None: the configured model."""
        others = {each: folder for each, folder in self.orders.models.items() if each != name}
        self.keep_orders(replace(self.orders, models=others if model is None else {**others, name: model}))

    def stand_in(self, name: str) -> str:
        """Order the start of an additional group (a stand-in) of the same kind as group `name`, and return the new
        group's name. Raises NotFoundError for an unknown name. Raises UnavailableError if there is no supervisor that
        can start workers."""
        self._require(name)
        if self._kept is None:
            raise UnavailableError(f"nothing can stand in for {name}, as no supervisor starts workers here")
        made = self._unused(name.rpartition("-")[0])
        self.use_model(made, self.orders.models.get(name))
        self.keep_orders(replace(self.orders, stand_ins=self.orders.stand_ins | {made}))
        return made

    def give_up(self, name: str) -> None:
        """Order a stand-in (a group added to the configured ones) to stop, even if it has not started yet. It is then
        deleted. Does nothing for other groups."""
        if name in self.orders.stand_ins:
            drained, leaving = self.orders.drained | {name}, self.orders.leaving | {name}
            self.keep_orders(replace(self.orders, drained=drained, leaving=leaving))

    def require_flippable(self, name: str) -> None:
        """Raise an error if no worker of the group can change its role. The message names the remedy.

        Raises NotFoundError for an unknown name. Raises UnavailableError if there is no supervisor, if the group has no
        workers, or if no other group can generate tokens.
        """
        self._require(name)
        if self._kept is None:
            raise UnavailableError(f"{name} keeps its role, as no supervisor is here that could change it")
        if not self.is_present(name):
            raise UnavailableError(f"{name} has no workers: start it first by `baton drain {name} --undo`")
        others = [group for group in self.view.generation if group.ready and group.name != name]
        if not others and any(group.name == name for group in self.present.generation):
            raise UnavailableError(
                f"{name} is the only group that may generate: have another first, by `baton scale generate 2`"
            )

    def lend(self, name: str) -> str:
        """Order a worker of a drained, idle group to serve as a new group of the other role, and return the new group's
        name. The worker is a prefill group's highest rank that is not lent yet, or a generation group's only worker.

        The remaining workers of the lending group may get work again. When the new group is drained, it is deleted, and
        its worker returns to the lending group.
        """
        assert name in self.orders.drained, f"{name} may get work"
        (group,) = (each for each in self.present.groups if each.name == name)
        if isinstance(group, PrefillGroup):
            lent = self.orders.borrowers(name)
            rank = max(set(range(len(group.endpoints) + len(lent))) - lent.keys())
            made, worker = self._unused("generate"), f"{name}.{rank}"
        else:
            made, worker = self._unused("prefill"), name
        models = {**self.orders.models, **({made: self.orders.models[name]} if name in self.orders.models else {})}
        self.keep_orders(
            replace(
                self.orders,
                drained=self.orders.drained - {name},
                stand_ins=self.orders.stand_ins | {made},
                models=models,
                lent={**self.orders.lent, made: worker},
                surplus=self.orders.surplus - {name},
            )
        )
        return made

    def give_back(self, name: str) -> None:
        """Order a borrowed worker to return to the group that lent it. The lending group may get new work when the
        worker is back. `name` is the drained, idle group that has borrowed the worker."""
        drained = (self.orders.drained | {name}) - {self.orders.lender(name)}
        self.keep_orders(replace(self.orders, drained=drained, leaving=self.orders.leaving | {name}))

    def keep_orders(self, orders: Orders) -> None:
        """Replace all orders for groups, such as drains. Groups without workers may have orders too."""
        self.orders = orders
        self._tell_view()

    def hear_kept(self, orders: Orders) -> None:
        """Record that the supervisor has stored these orders. A restarted orchestrator would get them back."""
        self._kept = orders
        self._tell()

    def is_kept(self, name: str) -> bool:
        """Return True if the supervisor has stored whether the group is drained, so that a restarted orchestrator would
        know it. Always True without a supervisor."""
        return self._kept is None or (name in self._kept.drained) == (name in self.orders.drained)

    def is_present(self, name: str) -> bool:
        """Return True if the group of that name has workers at present."""
        return any(group.name == name for group in self.present.groups)

    @property
    def away(self) -> tuple[str, ...]:
        """Return the sorted names of the groups whose workers were stopped by an operator's order. These groups may be
        started again."""
        left = {group.name for group in self.present.absent if not group.starts}
        return tuple(sorted(left & self.orders.leaving))

    @property
    def roles(self) -> dict[str, str]:
        """Return the role ("prefill" or "generate") of each known group by name, also of groups without workers."""
        roles = {name: role_of(name) for name in self.orders.stand_ins}
        roles |= {group.name: group.role for group in self.present.absent}
        roles |= dict.fromkeys((group.name for group in self.present.prefill), "prefill")
        return roles | dict.fromkeys((group.name for group in self.present.generation), "generate")

    def is_coming(self, role: str) -> bool:
        """Return True if at least one group of that role is being started and its start has not failed."""
        absent = {group.name: group for group in self.present.absent}
        starts = any(group.role == role and group.starts and not group.error for group in absent.values())
        ordered = {name for name in self.orders.stand_ins - self.orders.drained if role_of(name) == role}
        return starts or any(name not in absent and not self.is_present(name) for name in ordered)

    def is_asleep(self, role: str) -> bool:
        """Return True if no group of the role has workers now, but one can be started. This is the case if the
        autoscaler drained all groups, or if a first group is being started."""
        there = self.present.prefill if role == "prefill" else self.present.generation
        if there:
            return False
        return self.is_coming(role) or any(self.roles.get(name) == role for name in self.orders.surplus)

    def absence(self, name: str) -> AbsentGroup | None:
        """Return the entry of a known group without workers; None if the group has workers or is unknown."""
        return next((group for group in self.present.absent if group.name == name), None)

    def is_starting(self, name: str) -> bool:
        """Return True if the group of that name has no workers yet, but will be started."""
        absence = self.absence(name)
        return absence is not None and absence.starts

    def is_drained(self, group: Group) -> bool:
        """Return True if the group is drained. A group also counts as drained while one of its workers is about to be
        lent to another group or to return from another group."""
        return group.name in self.orders.drained or any(map(self._moves, self.orders.borrowers(group.name).values()))

    @contextlib.contextmanager
    def returning(self, *names: str) -> Iterator[None]:
        """Open a context for an operation that drains these groups only temporarily. While the context is open, the
        groups are not treated as withdrawn by operators."""
        self._returning.update(names)
        try:
            yield
        finally:
            self._returning -= Counter(names)  # drops names whose count is 0
            self._tell()

    def withdrawn(self, could_serve: Callable[[GenerationGroup], bool]) -> tuple[str, ...]:
        """Return the sorted names of all generation groups that could serve a request, if operators have drained all of
        them. Otherwise return an empty tuple. Drains by the autoscaler and temporary drains (`returning`) do not count.

        `could_serve` is called for groups with workers. Groups without workers are assumed to be able to serve. A group
        that has lent all its workers is ignored, unless one of these workers is about to return.
        """
        orders = self.orders
        if not orders.drained:
            return ()
        names = {name for name, role in self.roles.items() if role == "generate"}
        names -= {group.name for group in self.present.generation if not could_serve(group)}
        names -= {
            name
            for name in names
            if self.has_lent_all(name) and not orders.drained & {*orders.borrowers(name).values()}
        }
        is_withdrawn = names <= orders.drained - orders.surplus - self._returning.keys()
        return tuple(sorted(names)) if is_withdrawn else ()

    def has_lent_all(self, name: str) -> bool:
        """Return True if the group has no workers because other groups have borrowed all its workers."""
        is_away = not self.is_present(name) and name not in self.orders.leaving
        return is_away and bool(self.orders.borrowers(name)) and not self.is_starting(name)

    def is_broken(self, group: Group) -> bool:
        """Return True if the group's circuit breaker is not closed. A breaker opens when attempts on the group fail
        repeatedly."""
        return self.breakers.of(group.incarnation).state is not BreakerState.CLOSED

    def may_have_work(self, group: Group) -> bool:
        """Return True if the group may get new work: it is ready, not drained, and admitted by its circuit breaker."""
        return group.ready and not self.is_drained(group) and self.breakers.admits(group.incarnation)

    @property
    def has_work(self) -> bool:
        """Return True if any group has unfinished requests of this orchestrator."""
        return bool(self._loads)

    def load(self, name: str) -> Load:
        return self._loads.get(name, Load())

    @contextlib.contextmanager
    def hold(self, name: str, num_slots: int = 0) -> Iterator[None]:
        """Count an attempt with `num_slots` slots in the load of the group `name` while the context is open. If the
        context ends without an exception, record the attempt as successful."""
        self._add_load(name, 1, num_slots)
        incarnation = next((group.incarnation for group in self.present.groups if group.name == name), None)
        if is_probe := self.breakers.of(incarnation).began():
            self._tell_later(incarnation)
        try:
            yield
            self.breakers.of(incarnation).succeeded(is_probe=is_probe)
        finally:
            self._add_load(name, -1, -num_slots)
            self._tell()

    def failed(self, incarnation: Hashable | None) -> None:
        """Record that an attempt failed. `incarnation` is the incarnation of the group that caused the failure; None if
        no group did."""
        if incarnation is not None:
            self.breakers.failed(incarnation)
            self._tell_later(incarnation)
        self._on_failure()

    async def change(self, timeout_s: float) -> bool:
        """Wait for the next change of the membership. Return False if none happens within `timeout_s` seconds."""
        changed = self._changed
        return await self.until(lambda: changed.is_set() or None, timeout_s) or False

    async def until(self, choose: Callable[[], T | None], timeout_s: float) -> T | None:
        """Call `choose` now and after every change of the membership until it returns a value other than None. Return
        this value, or None after `timeout_s` seconds. No other task runs between the last call of `choose` and the
        return, so the caller may safely reserve what `choose` has returned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (found := choose()) is None:
                    await self._changed.wait()
                return found
        return None

    def _add_load(self, name: str, num_requests: int, num_slots: int) -> None:
        load = self.load(name)
        self._loads[name] = load = Load(load.num_requests + num_requests, load.num_slots + num_slots)
        if not load.num_requests:
            del self._loads[name]

    def _seen(self, group: G) -> G:
        return group if self.breakers.admits(group.incarnation) else replace(group, ready=False)

    def _moves(self, borrower: str) -> bool:
        """Return True if the worker that the group borrows is on its way to the group or back. False if the group's
        start failed."""
        if borrower in self.orders.leaving:
            return True
        absence = self.absence(borrower)
        return not self.is_present(borrower) and not (absence is not None and absence.error)

    def _unused(self, kind: str) -> str:
        """Return an unused group name, such as generate-2."""
        taken = {*self._names(), *self.orders.stand_ins}
        return next(f"{kind}-{number}" for number in itertools.count() if f"{kind}-{number}" not in taken)

    def _names(self) -> list[str]:
        """Return the names of all known groups, sorted."""
        return sorted(group.name for group in (*self.present.groups, *self.present.absent))

    def _require(self, name: str) -> None:
        names = self._names()
        if name not in names:
            raise NotFoundError(
                f"there is no group {name}: name one of {', '.join(names) or 'none, as no group exists'}"
            )

    def _tell_later(self, incarnation: Hashable) -> None:
        """Wake the tasks that wait for a group at the time when the breaker's state changes without another event."""
        if left_s := self.breakers.of(incarnation).left_s:
            asyncio.get_running_loop().call_later(left_s + _TIMER_S, self._tell)

    def _tell_view(self) -> None:
        self.view_changed.set()
        self.view_changed = asyncio.Event()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
