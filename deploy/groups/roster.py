"""Which groups of a cluster have workers: those that operators did not send away, and those that stand in for others.
They leave and come back one by one, while the rest serves.

What is wanted comes with every heartbeat (`orchestrator.membership.members.Orders`), and is compared with what there
is: an order that was missed is carried out later, and one that was taken back meanwhile is not. A group that cannot be
started is tried again, after pauses that grow. Runs on the supervisor's loop, in one task for each group on its way.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from baton.errors import BatonError, UnavailableError
from deploy.groups.cluster import Cluster
from deploy.groups.group import Surroundings, WorkerGroup
from deploy.groups.restarts import Restarts
from orchestrator.membership.members import AbsentGroup, Orders

logger = logging.getLogger(__name__)


MakeGroup = Callable[[str, str], WorkerGroup]
"""A group's next life, by its name and the folder of its model; empty: the configured one. Raises ConfigError for a
model that cannot be served here."""


class Roster:
    """Owns the coming and going of a cluster's groups; used by its supervisor."""

    def __init__(self, cluster: Cluster, names: Iterable[str], make: MakeGroup, around: Surroundings) -> None:
        """`names`: of all groups that are configured, like prefill-0."""
        self._cluster = cluster
        self._configured = tuple(names)
        self._make = make
        self._around = around
        self._orders = Orders()
        self._absent: dict[str, AbsentGroup] = {}
        self._restarts: dict[str, Restarts] = {}
        """Of groups that could not be started."""
        self._moves: dict[str, asyncio.Task[None]] = {}

    @property
    def absent(self) -> tuple[AbsentGroup, ...]:
        """Groups without workers."""
        return tuple(self._absent[name] for name in sorted(self._absent))

    async def adopt(self, orders: Orders) -> None:
        """For a supervisor's second life: finds the groups that are to be there, and ends what is left of the others.
        One that does not come up is tried again later; UnavailableError when none does."""
        self._orders = orders
        for name in self._known:
            is_leaving = name in orders.leaving
            self._move(name, self._end(self._make(name, "")) if is_leaving else self._start(name))
        await asyncio.gather(*self._moves.values())
        errors = [f"{group.name}: {group.error}" for group in self.absent if group.error]
        if errors and not self._cluster.groups:
            raise UnavailableError(f"no group could be started again: {'; '.join(errors)}")

    def follow(self, orders: Orders) -> None:
        """Groups that are configured or stand in are to have workers, but for those that are to leave. To be called
        again and again."""
        self._orders = orders
        present = {group.name: group for group in self._cluster.groups}
        for name in {*self._known, *present, *self._absent} - self._moves.keys():  # those are seen to when they arrive
            if name not in self._known or name in orders.leaving:
                self._send_away(name, present.get(name))
            elif name not in present and (name not in self._restarts or self._restarts[name].is_due):
                self._move(name, self._start(name))

    @property
    def _known(self) -> tuple[str, ...]:
        return (*self._configured, *sorted(self._orders.stand_ins))

    async def close(self) -> None:
        """Gives up what is under way: a group that was being started is ended. The cluster's own are its to end."""
        moves = tuple(self._moves.values())
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    def _send_away(self, name: str, group: WorkerGroup | None) -> None:
        self._restarts.pop(name, None)
        if group is not None:
            self._move(name, self._end(group))
        elif name not in self._absent or self._absent[name].starts:  # its end or start failed: something may be left
            self._move(name, self._end(self._make(name, "")))
        elif name not in self._known:
            del self._absent[name]

    def _move(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._moves[name] = asyncio.create_task(self._watch(name, work))

    async def _watch(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # whatever it is: with the next heartbeat it is tried again
            logger.warning("%s could not be ended", name, exc_info=True)
        finally:
            del self._moves[name]

    async def _start(self, name: str) -> None:
        before = self._absent.get(name, AbsentGroup(name, _role(name)))
        self._set_absent(replace(before, starts=True))
        try:
            group = self._make(name, self._orders.models.get(name, ""))
            await _started(group)
        except Exception as error:  # whatever it is: it is told, and tried again
            logger.warning("%s could not be started", name, exc_info=not isinstance(error, BatonError))
            self._failed(name, error)
            return
        self._restarts.pop(name, None)
        self._absent.pop(name)
        self._cluster.add(group)
        self._around.changed()

    def _failed(self, name: str, error: Exception) -> None:
        # Not at once: who ordered this start hears of it first, and may order another model.
        restarts = self._restarts.setdefault(name, Restarts(self._around.backoff, self._around.clock, num_at_once=0))
        text = str(error) if isinstance(error, BatonError) else repr(error)
        self._around.report(f"{name} could not be started ({text}): next try in {restarts.ended():g} s")
        self._set_absent(AbsentGroup(name, _role(name), starts=True, error=text))

    async def _end(self, group: WorkerGroup) -> None:
        try:
            await group.close()
        except Exception:  # closed in part, it serves no more: it is ended again, or started anew if it is wanted again
            self._cluster.remove(group)
            self._set_absent(AbsentGroup(group.name, _role(group.name), starts=True))
            raise
        self._cluster.remove(group)
        self._around.report(f"{group.name} has left")
        self._set_absent(AbsentGroup(group.name, _role(group.name)))

    def _set_absent(self, group: AbsentGroup) -> None:
        self._absent[group.name] = group
        self._around.changed()


async def _started(group: WorkerGroup) -> None:
    """Nothing of a group is left that could not be started, or was not to be in the end."""
    try:
        await group.start()
    except BaseException:
        await group.close()
        raise


def _role(name: str) -> str:
    return name.partition("-")[0]
