"""Combines the state of an orchestrator's components into one ClusterState, for operators, metrics and health.

Served over gRPC by `orchestrator.api.frontend`; scraped by `orchestrator.observability.metrics_server`. On the loop.
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
    """Reads the state of an orchestrator's components."""

    def __init__(
        self,
        members: Membership,
        poller: WorkerPoller,
        admission: Admission,
        chooser: Chooser,
        scaling: Callable[[], Scaling | None],
    ) -> None:
        """`scaling` returns the latest decision of the autoscaler; None before the first."""
        self._members = members
        self._poller = poller
        self._admission = admission
        self._chooser = chooser
        self._scaling = scaling

    async def state(self) -> ClusterState:
        """Return the state of the groups, the queue and the slots after polling all workers, which takes at most about
        a second. Answers from the last 0.25 s are reused."""
        await self._poller.refresh()
        return self.last_state()

    def last_state(self) -> ClusterState:
        """Return the state of the groups, the queue and the slots from the last answers of the workers."""
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
        """Return True if a generation group can serve requests, no counts are inconsistent, and no slots or jobs are
        leaked."""
        return not self._why_not_serving(self._poller.groups())

    def _why_not_serving(self, groups: tuple[GroupState, ...]) -> tuple[str, ...]:
        is_asleep = self._members.is_asleep("generate")
        return why_not_serving(groups, is_asleep=is_asleep, leaks_count=self._poller.leaks_count)
