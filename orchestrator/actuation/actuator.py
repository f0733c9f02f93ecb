"""Carries out the autoscaler's decisions: starts groups, drains groups, and changes the role of groups.

It uses the same operations as operators do. No running request is aborted.

    start   Undrains a group that was being removed. If there is none, starts another group of the same kind.
    drain   Cancels a group that has not started yet. If there is none, removes the group with the least work.
    flip    Cancels a pending flip in the other direction. If there is none, selects the group with the least work.
            Once idle, that group lends its worker to the other role, or returns a worker that it has borrowed.

Each change has its own task until it is complete. The measured durations of changes are used in later decisions. If an
orchestrator ends during a drain, its replacement continues the drain. Runs on the asyncio loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from baton.errors import BatonError, UnavailableError
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.process.endless import tell_failure
from orchestrator.actuation.operations import GroupOperations
from orchestrator.autoscaling.actions import Action, LeadTimes, Move
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.membership.members import Membership
from orchestrator.membership.view import Group, PrefillGroup, role_of

logger = logging.getLogger(__name__)

_REFUSED = Backoff(10.0, 300.0)
"""Pauses after failed starts of groups of one role: 10 seconds after the first failure, then longer, up to 300 seconds.
A start fails, for example, if no machine is free."""
_STARTS = {Move.START_PREFILL: "prefill", Move.START_GENERATE: "generate"}
_DRAINS = {Move.DRAIN_PREFILL: "prefill", Move.DRAIN_GENERATE: "generate"}
_FLIPS = {
    Move.FLIP_TO_GENERATE: "prefill",
    Move.FLIP_TO_PREFILL: "generate",
    Move.LEND_RANK: "prefill",
    Move.RETURN_RANK: "generate",
}


class Actuator:
    """Changes the groups of one cluster. The methods `carry_out` and `resume` begin changes, and return before the
    changes are complete."""

    def __init__(
        self,
        members: Membership,
        operations: GroupOperations,
        clock: Clock,
        times: LeadTimes,
        *,
        lends_ranks: bool = False,
    ) -> None:
        """`times` are estimates of the durations of changes, used until changes have been measured. `lends_ranks` is
        True if a prefill group is a chain of several ranks (workers). In this case, single ranks change their role, the
        highest rank first, and the other ranks of the group continue to prefill."""
        self.times = times
        """Durations of changes: the given estimates, or the latest measured values. The object is replaced as a whole
        when a value changes."""
        self._members = members
        self._lends_ranks = lends_ranks
        self._operations = operations
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks of changes in progress. The key is the name of the group, or `start` and a number if the group has no
        name yet."""
        self._flipping: dict[str, str] = {}
        """Groups that are being drained to change their role. Key: group name. Value: role before the change."""
        self._num_started = 0
        self._failures: dict[str, tuple[int, float]] = {}
        """Failed starts by role: the number of consecutive failures, and the time until which no further start is
        tried."""

    async def close(self) -> None:
        """Stop the tasks of all changes in progress. Orders that the supervisor already has stay in force."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Begin to apply the given actions to the groups, in order. Returns before they are complete."""
        for action in actions:
            for _ in range(action.num_groups):
                if action.move in _STARTS:
                    self._start(_STARTS[action.move])
                elif action.move in _DRAINS:
                    self._let_go(_DRAINS[action.move])
                else:
                    self._flip(_FLIPS[action.move])

    def resume(self) -> None:
        """Continue drains that were ordered but have no task in this object. Either an earlier orchestrator ordered the
        drain, or the task of the drain has failed."""
        orders = self._members.orders
        for name in orders.surplus - orders.leaving - self._tasks.keys():
            if self._members.is_present(name):
                self._run(name, self._leave(name))

    def target(self) -> Allocation:
        """Return the numbers of groups that the cluster will have after all changes in progress.

        Every group that is not drained is counted, even if its workers have not started. One exception: a group is not
        counted while other groups have borrowed all its workers, because those groups are counted instead. A group that
        is being drained to change its role is counted for its new role.
        """
        members, orders = self._members, self._members.orders
        roles = [role for name, role in members.roles.items() if name not in orders.drained and not self._is_lent(name)]
        turning = [role for name, role in self._flipping.items() if name in orders.drained - orders.leaving]
        num_generate = roles.count("generate") + turning.count("prefill")
        if not self._lends_ranks:
            return Allocation(roles.count("prefill") + turning.count("generate"), num_generate)
        kept = [
            name for name in orders.lent if name not in orders.drained and role_of(orders.lender(name)) == "prefill"
        ]
        num_lent = min(len(kept) + turning.count("prefill"), num_generate)
        return Allocation(roles.count("prefill") + turning.count("prefill"), num_generate, num_lent)

    def _is_lent(self, name: str) -> bool:
        """Return True if all workers of the group have been lent, or are about to be lent, to groups that are not
        leaving."""
        members, orders = self._members, self._members.orders
        kept = [each for each in orders.borrowers(name).values() if each not in orders.leaving]
        if self._lends_ranks and members.roles[name] == "prefill":
            return members.has_lent_all(name)
        return bool(kept)

    def may_start(self, role: str) -> bool:
        """Return True if a group of this role may be started now. Return False during the pause after a failed
        start."""
        return self._clock.now_s() >= self._failures.get(role, (0, 0.0))[1]

    def _start(self, role: str) -> None:
        if not self.may_start(role):
            return
        roles, orders = self._members.roles, self._members.orders
        own = [name for name, each in roles.items() if each == role]
        known = [name for name in own if name in orders.surplus]
        present = [name for name in known if self._members.is_present(name)]
        if present or known:
            name = max(present or known, key=lambda each: (self._members.load(each).num_slots, each))
            self._members.undrain(name)  # now, so that the next start selects another group
            self._begin(role, partial(self._operations.undrain, name), is_cold=name not in present)
        elif own:
            self._begin(role, partial(self._operations.stand_in, min(own)))
        else:
            logger.warning("no %s group can be started: the configuration has none to be like", role)

    def _begin(self, role: str, start: Callable[[], Awaitable[object]], *, is_cold: bool = True) -> None:
        self._num_started += 1
        self._run(f"start {self._num_started}", self._come(role, start, is_cold))

    async def _come(self, role: str, start: Callable[[], Awaitable[object]], is_cold: bool) -> None:
        """Start a group. The measured duration of a successful cold start becomes the estimate for the next one."""
        begin_s = self._clock.now_s()
        try:
            await start()
        except BatonError as error:
            num_failures = self._failures.get(role, (0, 0.0))[0] + 1
            pause_s = _REFUSED.after(num_failures)
            self._failures[role] = num_failures, self._clock.now_s() + pause_s
            tell_failure(f"no further {role} group came up; the next try is in {pause_s:g} s", error)
            return
        self._failures.pop(role, None)
        if is_cold:
            self.times = replace(self.times, cold_start_s=max(self._clock.now_s() - begin_s, 1e-3))

    def _let_go(self, role: str) -> None:
        """Cancel a group that is still being started; if there is none, drain the group with the least work."""
        members = self._members
        starting = [
            name
            for name in sorted(members.orders.stand_ins - members.orders.drained, reverse=True)
            if members.roles[name] == role and not members.is_present(name)
        ]
        if starting:
            members.give_up(starting[0])
            return
        orders = members.orders
        names = [group.name for group in self._working(role)]
        own = [name for name in names if name not in orders.lent and not orders.borrowers(name)]
        if name := min(own or names, key=self._worth, default=""):
            members.let_go(name)
            self._run(name, self._leave(name))

    def _flip(self, role: str) -> None:
        members, orders = self._members, self._members.orders
        turning = [name for name, each in self._flipping.items() if each != role and name in orders.drained]
        if turning and (called_off := min(turning, key=self._worth)) not in orders.leaving:
            members.undrain(called_off)
            return
        groups = [group for group in self._working(role) if group.ready]
        if self._lends_ranks and role == "prefill":
            groups = [group for group in groups if isinstance(group, PrefillGroup) and len(group.endpoints) > 1]
        names = [group.name for group in groups]
        borrowed = [name for name in names if name in orders.lent]
        if name := min(
            borrowed or ([] if self._lends_ranks and role == "generate" else names), key=self._worth, default=""
        ):
            members.let_go(name)  # the next orchestrator drains it if this one ends before the flip
            self._flipping[name] = role
            self._run(name, self._turn(name))

    def _working(self, role: str) -> Sequence[Group]:
        """Return the groups of that role that are not drained and have no change in progress. A change that was called
        off is in progress until its task has noticed that: a second change of the group would have the same name."""
        view = self._members.view
        groups: Sequence[Group] = view.prefill if role == "prefill" else view.generation
        return [group for group in groups if group.name not in self._tasks]

    def _worth(self, name: str) -> tuple[int, int, bool, int]:
        """Return a sort key for groups: the least work first. Of groups with equal work, stand-ins (groups that were
        started in addition to the configured ones) come before configured groups, the newest stand-in first."""
        load, number = self._members.load(name), name.rpartition("-")[2]
        is_configured = name not in self._members.orders.stand_ins
        return load.num_requests, load.num_slots, is_configured, -int(number) if number.isdigit() else 0

    async def _turn(self, name: str) -> None:
        """Wait until the group's worker has changed its role. The time from idle to the new role becomes the estimate
        for the next flip. If the flip fails or is cancelled, the group continues to work in its role."""
        idle_s = self._clock.now_s()
        try:
            async with aclosing(self._operations.flip(name)) as states:
                async for state in states:
                    if state.name == name:
                        idle_s = self._clock.now_s()
            self.times = replace(self.times, flip_s=max(self._clock.now_s() - idle_s, 1e-3))
        except UnavailableError as error:
            logger.warning("group=%s keeps its role: %s", name, error)
            if name in self._members.orders.surplus - self._members.orders.leaving:
                self._members.undrain(name)
        finally:
            del self._flipping[name]

    async def _leave(self, name: str) -> None:
        """Drain the group and wait until it has left, or until the order is withdrawn."""
        async with aclosing(self._operations.drain(name, leave=True)) as states:
            async for _ in states:
                if name not in self._members.orders.surplus:
                    return  # the drain was withdrawn

    def _run(self, what: str, change: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[what] = asyncio.create_task(change)
        task.add_done_callback(partial(self._settle, what))

    def _settle(self, what: str, task: asyncio.Task[None]) -> None:
        del self._tasks[what]
        if not task.cancelled() and (error := task.exception()) is not None:
            tell_failure(f"a change to the groups failed ({what})", error)
