"""Combines the state of an orchestrator's parts, for operators, metrics and health.

Put on gRPC by `orchestrator.api.frontend`; scraped by `orchestrator.observability.metrics_server`. On the loop.
"""

from collections.abc import Callable

from baton import __version__
from baton.calls.cluster_state import ClusterState, GroupState, Scaling
from orchestrator.admission.gate import Admission
from orchestrator.membership.members import Membership
from orchestrator.observability.health import why_degraded, why_not_serving
from orchestrator.placement.chooser import Chooser
from orchestrator.workers.worker_poller import WorkerPoller


class Overview:
    """Reads the state of an orchestrator's parts."""

    def __init__(
        self,
        members: Membership,
        poller: WorkerPoller,
        admission: Admission,
        chooser: Chooser,
        scaling: Callable[[], Scaling | None],
    ) -> None:
        """`scaling` returns the autoscaler's latest decision; None before the first."""
        self._members = members
        self._poller = poller
        self._admission = admission
        self._chooser = chooser
        self._scaling = scaling

    async def state(self) -> ClusterState:
        """Return the state of groups, queue and slots, after polling all workers, which takes at most about a
        second. Answers of the last 0.25 s are reused."""
        await self._poller.refresh()
        return self.last_state()

    def last_state(self) -> ClusterState:
        """Return the state of groups, queue and slots from the last answers of the workers."""
        groups = self._poller.groups()
        return ClusterState(
            groups=groups,
            num_queued=self._admission.num_queued,
            num_running=self._admission.num_running,
            num_degraded=self._chooser.num_degraded,
            version=__version__,
            num_queued_tokens=self._admission.num_queued_tokens,
            why_not_serving=self._why_not_serving(groups),
            why_degraded=why_degraded(groups, self._members.present.absent, self._members.orders.surplus),
            groups_away=self._members.away,
            scaling=self._scaling(),
        )

    def is_serving(self) -> bool:
        """Return whether a generation group can take requests and the workers' books are in order."""
        return not self._why_not_serving(self._poller.groups())

    def _why_not_serving(self, groups: tuple[GroupState, ...]) -> tuple[str, ...]:
        is_asleep = self._members.is_asleep("generate")
        return why_not_serving(groups, is_asleep=is_asleep, leaks_count=self._poller.leaks_count)
