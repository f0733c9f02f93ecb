"""What operators see and ask of a running orchestrator: its state, its health, and that a group be drained.

On the loop. Over gRPC: `frontend` (state and health) and `admin_service` (drain).
"""

import logging
from collections.abc import AsyncGenerator
from functools import partial

from baton import __version__
from baton.clock import Clock
from baton.results import ClusterState, GroupState
from orchestrator.admission import Admission
from orchestrator.census import Census
from orchestrator.dispatch import Dispatcher
from orchestrator.health import why_degraded, why_not_serving
from orchestrator.membership import Members

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.5
"""Between two looks at what a drained group's workers hold, unless its requests change meanwhile."""


class Overview:
    """Reads what the controller's parts know; owns nothing but what is said of drains."""

    def __init__(
        self,
        members: Members,
        census: Census,
        admission: Admission,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        lease_ttl_s: float,
    ) -> None:
        """For `lease_ttl_s` seconds, what an earlier life of the orchestrator left may be held, and is no leak."""
        self._members = members
        self._census = census
        self._admission = admission
        self._dispatcher = dispatcher
        self._clock = clock
        self._leaks_count_from_s = clock.now_s() + lease_ttl_s
        self.metrics_endpoint = ""
        """host:port; set once, by whoever serves them."""

    async def state(self) -> ClusterState:
        """Groups, queue and slots, asked for now; within a second or so."""
        await self._census.ask()
        return self.last_state()

    def last_state(self) -> ClusterState:
        """The same, as the workers answered when last asked."""
        groups = self._census.groups()
        return ClusterState(
            groups=groups,
            num_queued=self._admission.num_queued,
            num_running=self._admission.num_running,
            num_degraded=self._dispatcher.num_degraded,
            version=__version__,
            num_queued_tokens=self._admission.num_queued_tokens,
            why_not_serving=self._why_not_serving(groups),
            why_degraded=why_degraded(groups),
            metrics_endpoint=self.metrics_endpoint,
        )

    def is_serving(self) -> bool:
        """What health says: whether a request has a way to go, and the workers' books are in order."""
        return not self._why_not_serving(self._census.groups())

    async def drain(self, name: str) -> AsyncGenerator[GroupState, None]:
        """Keeps new work from the group from now on, and tells how it stands, now and whenever that changes; ends when
        it has nothing left to do and the supervisor knows, when it is wanted again, or is gone. Raises NotFoundError
        when there is none of that name."""
        self._members.drain(name)
        logger.info("draining group=%s", name)
        told: GroupState | None = None
        while True:
            await self._census.ask()
            state = self._census.group(name)
            if state is None:
                logger.info("drained group=%s: it is gone", name)
                return
            if state != told:
                yield state
                told = state
            if not state.is_drained or (is_idle(state) and self._members.is_kept(name)):
                logger.info("group=%s is %s", name, "drained" if state.is_drained else "wanted again")
                return
            await self._members.until(partial(self._moved, name, state.num_requests), _DRAIN_POLL_S)

    def undrain(self, name: str) -> GroupState:
        """The group may get work again; how it stands, as last asked. Raises NotFoundError as `drain`."""
        self._members.undrain(name)
        logger.info("no longer drained group=%s", name)
        state = self._census.group(name)
        assert state is not None, f"{name} is present and not in the census"
        return state

    def _moved(self, name: str, num_requests: int) -> bool | None:
        return True if self._members.load(name).num_requests != num_requests else None

    def _why_not_serving(self, groups: tuple[GroupState, ...]) -> tuple[str, ...]:
        return why_not_serving(groups, leaks_count=self._clock.now_s() > self._leaks_count_from_s)


def is_idle(group: GroupState) -> bool:
    """Whether it has nothing left to do: no request is its, and no slot or memory is held."""
    return not group.num_requests and group.num_free == group.num_slots and not group.num_bytes_held
