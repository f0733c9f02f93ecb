"""Carries the autoscaler's decisions out by the verbs that operators have: groups start, are drained and leave, or take
the other role. No work is ended.

    start   a group that is being let go is taken back; else another one of its kind is started
    drain   a group that has not come up yet is given up; else the one with least to do is let go
    flip    the group with least to do takes the other role, once it is idle

Each change has a task of its own, until it has been carried out. What a change took is kept, so that the next decision
expects it. Drains that an orchestrator ordered before it ended go on in its next life. On the loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.errors import BatonError
from baton.process.endless import Pauses, tell_failure
from orchestrator.autoscaling.actions import Action, LeadTimes, Move
from orchestrator.membership.members import Members
from orchestrator.membership.view import Group
from orchestrator.observability.state import Overview

logger = logging.getLogger(__name__)

_REFUSED = Pauses(10.0, 300.0)
"""Pauses in starts of a role after those that failed, as for want of room."""
_STARTS = {Move.START_PREFILL: "prefill", Move.START_GENERATE: "generate"}
_DRAINS = {Move.DRAIN_PREFILL: "prefill", Move.DRAIN_GENERATE: "generate"}


class Actuator:
    """Changes the groups of one cluster. `carry_out` and `resume` return at once."""

    def __init__(self, members: Members, overview: Overview, clock: Clock, times: LeadTimes) -> None:
        """`times` are supposed until changes have been seen."""
        self.times = times
        """How long changes take: as supposed, then as measured last. Replaced as a whole."""
        self._members = members
        self._overview = overview
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Changes under way, by what they are about: the name of a group, or a number for one that has no name yet."""
        self._num_started = 0
        self._failures: dict[str, tuple[int, float]] = {}
        """By role, the failed starts in a row, and the instant before which no further one is made."""

    async def close(self) -> None:
        """Stop waiting for changes under way. Orders that were given stay."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Begin to change the groups as these actions say."""
        for action in actions:
            for _ in range(action.num_groups):
                if action.move in _STARTS:
                    self._start(_STARTS[action.move])
                elif action.move in _DRAINS:
                    self._let_go(_DRAINS[action.move])

    def resume(self) -> None:
        """Go on with drains that were ordered and have no task: those of an earlier life, and those that failed."""
        orders = self._members.orders
        for name in orders.surplus - orders.leaving - self._tasks.keys():
            if self._members.is_present(name):
                self._run(name, self._leave(name))

    def may_start(self, role: str) -> bool:
        """Return whether starts of that role are made now, and not put off because the last ones failed."""
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
            self._members.undrain(name)  # at once, so that the next start takes another one
            self._begin(role, partial(self._overview.undrain, name), is_cold=name not in present)
        elif own:
            self._begin(role, partial(self._overview.stand_in, min(own)))
        else:
            logger.warning("no %s group can be started: the configuration has none to be like", role)

    def _begin(self, role: str, start: Callable[[], Awaitable[object]], *, is_cold: bool = True) -> None:
        self._num_started += 1
        self._run(f"start {self._num_started}", self._come(role, start, is_cold))

    async def _come(self, role: str, start: Callable[[], Awaitable[object]], is_cold: bool) -> None:
        """Start a group; a cold start that succeeds tells how long the next will take."""
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
        """Give up a group that is still being started, else drain the one with least to do."""
        members = self._members
        starting = [
            name
            for name in sorted(members.orders.stand_ins - members.orders.drained, reverse=True)
            if members.roles[name] == role and not members.is_present(name)
        ]
        if starting:
            members.give_up(starting[0])
            return
        groups: Iterable[Group] = members.view.prefill if role == "prefill" else members.view.generation
        name = min((group.name for group in groups), key=self._worth, default=None)
        if name is not None:
            members.let_go(name)
            self._run(name, self._leave(name))

    def _worth(self, name: str) -> tuple[int, int, bool, int]:
        """Return a sort key: groups with least to do first, and of equals those that stand in, the latest first."""
        load, number = self._members.load(name), name.rpartition("-")[2]
        is_configured = name not in self._members.orders.stand_ins
        return load.num_requests, load.num_slots, is_configured, -int(number) if number.isdigit() else 0

    async def _leave(self, name: str) -> None:
        """See a group through until it has left, or is wanted again."""
        async with aclosing(self._overview.drain(name, leave=True)) as states:
            async for _ in states:
                if name not in self._members.orders.surplus:
                    return  # taken back

    def _run(self, what: str, change: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[what] = asyncio.create_task(change)
        task.add_done_callback(partial(self._settle, what))

    def _settle(self, what: str, task: asyncio.Task[None]) -> None:
        del self._tasks[what]
        if not task.cancelled() and (error := task.exception()) is not None:
            tell_failure(f"a change to the groups failed ({what})", error)
