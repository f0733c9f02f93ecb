"""Decides which groups of a cluster have workers: the configured groups and stand-ins (extra groups that operators or
the autoscaler added), except groups that were ordered to leave. Groups leave and return one by one, while the others
serve.

A stand-in may borrow its worker from a group of the other role. The worker's process then takes the other role, and its
model stays loaded. The lending group continues with its remaining workers. A group that has lent all its workers does
not serve. When the stand-in leaves, the worker returns to the lending group, unless the lending group must leave too.
All workers of the lending group, including the borrowed ones, run in the resources that are reserved for the lending
group. The reservation is released when no worker uses it.

The operators' orders arrive with every heartbeat (`orchestrator.membership.members.Orders`), and are compared with the
existing groups. An order that was missed is therefore carried out later, unless it was withdrawn in the meantime. If a
group cannot be started, the start is retried after increasing pauses. Runs on the supervisor's asyncio loop, in one
task for each group that is starting or ending.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from baton.errors import BatonError
from baton.process.endless import describe
from deploy.groups.cluster import Cluster
from deploy.groups.group import WorkerGroup
from deploy.groups.restarts import Restarts
from deploy.groups.spawner import WorkerHandle
from deploy.groups.surroundings import Surroundings
from orchestrator.membership.view import AbsentGroup, Orders, place_of, role_of

logger = logging.getLogger(__name__)

Given = dict[int, WorkerHandle]
"""Worker processes that move from one group to another, by their rank in the new group."""
MakeGroup = Callable[[str, Orders], WorkerGroup]
"""Type of a function that creates a group from its name and the operators' orders. The orders say which model the group
serves, and which workers it has lent or borrowed. Raises ConfigError if the model cannot be served here."""


class Roster:
    """Starts and ends the groups of a cluster according to the operators' orders. Owned and used by the cluster's
    supervisor."""

    def __init__(self, cluster: Cluster, names: Iterable[str], make: MakeGroup, around: Surroundings) -> None:
        """Create a roster without starting any group. `names` are the names of all configured groups, for example
        prefill-0. `make` creates a group."""
        self._cluster = cluster
        self._configured = tuple(names)
        self._make = make
        self._around = around
        self._orders = Orders()
        self._absent: dict[str, AbsentGroup] = {}
        self._restarts: dict[str, Restarts] = {}
        """Counters of failed starts, by the group's name. They decide when a start is retried."""
        self._moves: dict[str, asyncio.Task[None]] = {}
        """Running tasks that start or end groups, by the group's name. If a worker is moved between two groups, both
        have the same task."""
        self._lent_out: set[str] = set()
        """Names of groups that have no workers because they have lent all of them to groups of the other role."""

    @property
    def absent(self) -> tuple[AbsentGroup, ...]:
        """Groups that have no workers, ordered by name."""
        return tuple(self._absent[name] for name in sorted(self._absent))

    async def adopt(self, orders: Orders, within_s: float | None = None) -> None:
        """Take over a running cluster after a restart of the supervisor. Connect to the groups that the orders
        require, and end the remaining workers of all other groups. Return when this is done, or after `within_s`
        seconds (None: no limit); the work then continues in the background. If a group does not start, `follow`
        starts it again later."""
        back = [name for name in orders.lent if name in orders.leaving and self._returns(name, orders)]
        self._orders = orders.without(back)  # their workers belong to their own groups again
        for name in self._known:
            self._move(self._end_leftover(name) if name in orders.leaving else self._start(name), name)
        await asyncio.wait(self._moves.values(), timeout=within_s)

    def follow(self, orders: Orders) -> None:
        """Carry out the orders: start workers for configured groups and stand-ins (extra groups), and end groups that
        must leave. Must be called with the orders of every heartbeat."""
        self._orders = orders
        present = {group.name: group for group in self._cluster.groups}
        for name in {*self._known, *present, *self._absent}:
            if not {name, orders.lender(name)}.isdisjoint(self._moves):
                continue  # moving groups come later
            group = present.get(name)
            if name not in self._known or name in orders.leaving:
                self._send_away(name, group)
            elif group is not None:
                self._complete(group)
            elif self._is_due(name):
                self._move(self._start(name), name, orders.lender(name))

    @property
    def _known(self) -> tuple[str, ...]:
        return (*self._configured, *sorted(self._orders.stand_ins))

    async def close(self) -> None:
        """Cancel all tasks that start groups, end groups, or move workers. A group that was being started is ended, and
        so is a worker that was being moved. All other groups are ended by the cluster, and the reserved resources are
        released by the supervisor."""
        moves = {*self._moves.values()}
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    def _present(self, name: str) -> WorkerGroup | None:
        return next((group for group in self._cluster.groups if group.name == name), None)

    def _is_due(self, name: str) -> bool:
        """Return whether an absent group should be started now. Return False if it has lent all its workers, or if a
        start failed recently."""
        if name in self._lent_out and self._orders.borrowers(name):
            return False
        return name not in self._restarts or self._restarts[name].is_due

    def _send_away(self, name: str, group: WorkerGroup | None) -> None:
        self._restarts.pop(name, None)
        if group is None and name in self._absent and not self._absent[name].starts:
            if name not in self._known:
                del self._absent[name]
                self._around.changed()
        elif self._returns(name, self._orders):
            self._move(self._return(name, group), name, self._orders.lender(name))
        else:  # without a group its end or start failed: workers may be left
            self._move(self._end_leftover(name) if group is None else self._end(group), name)

    def _returns(self, name: str, orders: Orders) -> bool:
        """Return whether the group has borrowed a worker from a group that should have workers."""
        lender = orders.lender(name)
        return lender in (*self._configured, *orders.stand_ins) and lender not in orders.leaving

    def _move(self, work: Coroutine[Any, Any, None], *names: str) -> None:
        """Run `work` as a task. Until it ends, no other task changes the groups `names`; empty names are ignored."""
        task = asyncio.create_task(self._watch(work, names))
        self._moves |= {name: task for name in names if name}

    async def _watch(self, work: Coroutine[Any, Any, None], names: tuple[str, ...]) -> None:
        try:
            await work
        except Exception:  # any error: the next heartbeat tries again
            logger.warning("%s could not be ended", names[0], exc_info=True)
        finally:
            for name in names:
                self._moves.pop(name, None)

    async def _start(self, name: str) -> None:
        orders = self._orders
        async with _in_transit() as given:
            if name in orders.lent:
                await self._borrow(orders.lent[name], given)
            await self._begin(name, orders, given)

    async def _borrow(self, worker: str, given: Given) -> None:
        """Take the worker of that name from its group, if the group has it, and add it to `given`."""
        name, rank = place_of(worker)
        lender = self._present(name)
        if lender is None:
            return
        handle = await lender.give(rank)
        if handle is not None:
            given[0] = handle
        if not lender.configs:
            await lender.close()
            self._cluster.remove(lender)
            self._set_lent_out(name)

    async def _return(self, name: str, group: WorkerGroup | None) -> None:
        """Return the worker that the group has borrowed to the worker's own group, which may have no other workers."""
        lender, rank = place_of(self._orders.lent[name])
        orders = replace(self._orders, lent=self._orders.without([name]).lent)
        async with _in_transit() as given:
            handle = None if group is None else await group.give(0)
            if handle is not None:
                given[rank] = handle
            if group is not None:
                await group.close()
                self._cluster.remove(group)
            self._set_absent(AbsentGroup(name, role_of(name), starts=True))
            if (home := self._present(lender)) is None:
                await self._begin(lender, orders, given)
            elif rank not in home.configs:
                await home.receive(self._make(lender, orders).configs[rank], handle)
        self._around.report(f"{name} has left; its worker is with {lender} again")
        self._set_absent(AbsentGroup(name, role_of(name)))

    def _complete(self, group: WorkerGroup) -> None:
        """Start a worker that the group had lent and that was not returned, because the orders for it were dropped
        meanwhile."""
        lacking = set(range(group.num_places)) - group.configs.keys() - self._orders.borrowers(group.name).keys()
        if group.room == group.name and lacking:
            self._move(self._refill(group, min(lacking)), group.name)

    async def _refill(self, group: WorkerGroup, rank: int) -> None:
        await group.receive(self._make(group.name, self._orders).configs[rank], None)

    async def _begin(self, name: str, orders: Orders, given: Given) -> None:
        """Start the group. The processes `given` are used for their ranks instead of new ones. A failure is reported,
        and the start is retried later."""
        before = self._absent.get(name, AbsentGroup(name, role_of(name)))
        self._set_absent(replace(before, starts=True))
        try:
            group = self._make(name, orders)
            if not group.configs:
                self._set_lent_out(name)
                return
            await self._started(group, given)
        except Exception as error:  # any error: it is reported, and tried again
            logger.warning("%s could not be started", name, exc_info=not isinstance(error, BatonError))
            self._failed(name, error)
            await _end_all(given)
            return
        given.clear()
        self._restarts.pop(name, None)
        self._lent_out.discard(name)
        self._absent.pop(name)
        self._cluster.add(group)
        self._around.changed()

    async def _started(self, group: WorkerGroup, given: Given) -> None:
        """Start the group. If that fails or is cancelled, close what was started."""
        try:
            await group.start(given)
        except BaseException:
            await group.close()
            await self._leave_room(group)
            raise

    def _failed(self, name: str, error: Exception) -> None:
        # Not at once: the operator who ordered this start hears of its failure first, and may order another model.
        restarts = self._restarts.setdefault(name, Restarts(self._around.backoff, self._around.clock, num_at_once=0))
        text = describe(error)
        self._around.report(f"{name} could not be started ({text}): next try in {restarts.ended():g} s")
        self._set_absent(AbsentGroup(name, role_of(name), starts=True, error=text))

    async def _end_leftover(self, name: str) -> None:
        """End the remaining workers of a group, regardless of its model."""
        await self._end(self._make(name, replace(self._orders, models={})))

    async def _end(self, group: WorkerGroup) -> None:
        try:
            await group.close()
            await self._leave_room(group)
        except Exception:  # a group closed in part serves no more: it is ended again, or started again
            self._cluster.remove(group)
            self._set_absent(AbsentGroup(group.name, role_of(group.name), starts=True))
            raise
        self._cluster.remove(group)
        self._around.report(f"{group.name} has left")
        self._set_absent(AbsentGroup(group.name, role_of(group.name)))

    async def _leave_room(self, group: WorkerGroup) -> None:
        """Release the room of a closed group, unless other groups have workers in it, or should get some."""
        others = (name for name in self._known if name not in self._orders.leaving)
        users = {self._orders.lender(name) or name for name in others if name != group.name}
        users |= {each.room for each in self._cluster.groups if each.workers}
        if self._around.room is not None and group.room not in users:
            await self._around.room.release(group.room)

    def _set_lent_out(self, name: str) -> None:
        self._lent_out.add(name)
        self._set_absent(AbsentGroup(name, role_of(name)))

    def _set_absent(self, group: AbsentGroup) -> None:
        self._absent[group.name] = group
        self._around.changed()


@asynccontextmanager
async def _in_transit() -> AsyncIterator[Given]:
    """Yield a dict for workers that no group has, by their rank in their next group. If the `with` block fails, end the
    workers that are still in the dict."""
    given: Given = {}
    try:
        yield given
    except BaseException:
        await _end_all(given)
        raise


async def _end_all(given: Given) -> None:
    await asyncio.gather(*(handle.close() for handle in given.values()))
    given.clear()
