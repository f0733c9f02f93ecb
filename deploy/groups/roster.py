"""Which groups of a cluster have workers: configured groups and stand-ins, except those that operators sent away.
Groups leave and come back one by one, while the others serve.

The orders of operators come with every heartbeat (`orchestrator.membership.members.Orders`), and are compared with the
present groups: an order that was missed is carried out later, and one that was taken back meanwhile is not. A group
that cannot be started is tried again, after pauses that grow. Runs on the supervisor's loop, in one task for each group
that is starting or ending.
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
from orchestrator.membership.view import AbsentGroup, Orders

logger = logging.getLogger(__name__)


MakeGroup = Callable[[str, str], WorkerGroup]
"""Makes a group's next life, from its name and the folder of its model (empty: the configured one). Raises ConfigError
for a model that cannot be served here."""


class Roster:
    """Starts and ends the groups of a cluster as operators order. Owned and used by the cluster's supervisor."""

    def __init__(self, cluster: Cluster, names: Iterable[str], make: MakeGroup, around: Surroundings) -> None:
        """Make a roster that starts nothing yet. `names` are those of all configured groups, like prefill-0."""
        self._cluster = cluster
        self._configured = tuple(names)
        self._make = make
        self._around = around
        self._orders = Orders()
        self._absent: dict[str, AbsentGroup] = {}
        self._restarts: dict[str, Restarts] = {}
        """Failed starts of groups that could not be started, by name."""
        self._moves: dict[str, asyncio.Task[None]] = {}

    @property
    def absent(self) -> tuple[AbsentGroup, ...]:
        """Groups without workers, by name."""
        return tuple(self._absent[name] for name in sorted(self._absent))

    async def adopt(self, orders: Orders) -> None:
        """Take over in a supervisor's second life: find the groups that should be there, and end what is left of the
        others. A group that does not come up is tried again later. Raises UnavailableError when none comes up."""
        self._orders = orders
        for name in self._known:
            is_leaving = name in orders.leaving
            self._move(name, self._end(self._make(name, "")) if is_leaving else self._start(name))
        await asyncio.gather(*self._moves.values())
        errors = [f"{group.name}: {group.error}" for group in self.absent if group.error]
        if errors and not self._cluster.groups:
            raise UnavailableError(f"no group could be started again: {'; '.join(errors)}")

    def follow(self, orders: Orders) -> None:
        """Carry out the orders: give workers to groups that are configured or stand in, except those that are to leave.
        To be called with every heartbeat."""
        self._orders = orders
        present = {group.name: group for group in self._cluster.groups}
        for name in {*self._known, *present, *self._absent} - self._moves.keys():  # moving groups come later
            if name not in self._known or name in orders.leaving:
                self._send_away(name, present.get(name))
            elif name not in present and (name not in self._restarts or self._restarts[name].is_due):
                self._move(name, self._start(name))

    @property
    def _known(self) -> tuple[str, ...]:
        return (*self._configured, *sorted(self._orders.stand_ins))

    async def close(self) -> None:
        """Cancel starts and ends that are under way; a group that was being started is ended. Groups of the cluster are
        left to it."""
        moves = tuple(self._moves.values())
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    def _send_away(self, name: str, group: WorkerGroup | None) -> None:
        self._restarts.pop(name, None)
        if group is not None:
            self._move(name, self._end(group))
        elif name not in self._absent or self._absent[name].starts:  # its end or start failed: workers may be left
            self._move(name, self._end(self._make(name, "")))
        elif name not in self._known:
            del self._absent[name]

    def _move(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._moves[name] = asyncio.create_task(self._watch(name, work))

    async def _watch(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # any error: the next heartbeat tries again
            logger.warning("%s could not be ended", name, exc_info=True)
        finally:
            del self._moves[name]

    async def _start(self, name: str) -> None:
        before = self._absent.get(name, AbsentGroup(name, _role(name)))
        self._set_absent(replace(before, starts=True))
        try:
            group = self._make(name, self._orders.models.get(name, ""))
            await _started(group)
        except Exception as error:  # any error: it is reported, and tried again
            logger.warning("%s could not be started", name, exc_info=not isinstance(error, BatonError))
            self._failed(name, error)
            return
        self._restarts.pop(name, None)
        self._absent.pop(name)
        self._cluster.add(group)
        self._around.changed()

    def _failed(self, name: str, error: Exception) -> None:
        # Not at once: the operator who ordered this start hears of its failure first, and may order another model.
        restarts = self._restarts.setdefault(name, Restarts(self._around.backoff, self._around.clock, num_at_once=0))
        text = str(error) if isinstance(error, BatonError) else repr(error)
        self._around.report(f"{name} could not be started ({text}): next try in {restarts.ended():g} s")
        self._set_absent(AbsentGroup(name, _role(name), starts=True, error=text))

    async def _end(self, group: WorkerGroup) -> None:
        try:
            await group.close()
        except Exception:  # a group closed in part serves no more: it is ended again, or started again
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
    """Start the group. If that fails or is cancelled, close what was started."""
    try:
        await group.start()
    except BaseException:
        await group.close()
        raise


def _role(name: str) -> str:
    return name.partition("-")[0]
