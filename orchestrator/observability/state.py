"""Combines the state of an orchestrator's components into one ClusterState, for operators, metrics and health.

The health is NOT_SERVING if no generation group can serve a request. It is also NOT_SERVING if a worker's counts of
slots or bytes do not add up, or if slots are leaked, because then the workers cannot be relied on. Served over gRPC by
`orchestrator.api.frontend`; scraped by `orchestrator.observability.metrics_server`. Runs on the event loop.
"""

from collections.abc import Callable, Collection, Sequence

from baton import __version__
from baton.calls.cluster_state import ClusterState, GroupState, Scaling
from orchestrator.admission.gate import Admission
from orchestrator.membership.members import Membership
from orchestrator.membership.view import AbsentGroup
from orchestrator.placement.chooser import Chooser
from orchestrator.workers.worker_poller import WorkerPoller

_SUPERSEDED = "workers refuse this orchestrator, because another one has replaced it"


class Overview:
    """Reads the state of all components of an orchestrator, and reports it as one ClusterState."""

    def __init__(
        self,
        members: Membership,
        poller: WorkerPoller,
        admission: Admission,
        chooser: Chooser,
        scaling: Callable[[], Scaling | None],
    ) -> None:
        """Create an overview of these components. `scaling` returns the latest decision of the autoscaler; None before
        the first decision."""
        self._members = members
        self._poller = poller
        self._admission = admission
        self._chooser = chooser
        self._scaling = scaling

    async def state(self) -> ClusterState:
        """Poll all workers, and return the state of the groups, the queue and the slots. Polling takes at most about a
        second. If all workers have answered an earlier call within the last 0.25 s, these answers are reused."""
        await self._poller.refresh()
        return self.last_state()

    def last_state(self) -> ClusterState:
        """Return the state of the groups, the queue and the slots without calling any worker. The last answers of the
        workers are used."""
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
        """Return True if the orchestrator is healthy: a generation group can serve requests, the workers' counts are
        consistent, and no slots or jobs are leaked."""
        return not self._why_not_serving(self._poller.groups())

    def _why_not_serving(self, groups: tuple[GroupState, ...]) -> tuple[str, ...]:
        is_asleep = self._members.is_asleep("generate")
        reasons = why_not_serving(groups, is_asleep=is_asleep, leaks_count=self._poller.leaks_count)
        return (*reasons, _SUPERSEDED) if self._poller.is_superseded else reasons


def why_not_serving(
    groups: Sequence[GroupState], *, is_asleep: bool = False, leaks_count: bool = True
) -> tuple[str, ...]:
    """Return a line for each reason why no request is served; empty if requests are served.

    `is_asleep` is True if all generation groups are stopped and the next request will start one. `leaks_count` is True
    if leaked slots and jobs are a reason. It is False while they may belong to leases of an earlier orchestrator.
    """
    reasons = []
    if not is_asleep and not any(group.is_ready for group in groups if group.role == "generate"):
        reasons.append("no generation group is ready")
    reasons += [f"{group.name}: {group.imbalance}" for group in groups if group.imbalance]
    if leaks_count:
        reasons += [f"{group.name}: {_leaked(group)} held by no request" for group in groups if group.num_leaked]
    return tuple(reasons)


def why_degraded(
    groups: Sequence[GroupState], absent: Sequence[AbsentGroup] = (), surplus: Collection[str] = ()
) -> tuple[str, ...]:
    """Return a line for each problem that does not stop the service: a group gets no work, a group cannot use its
    node's disk, or no prefill group is ready, so that generation groups prefill by themselves. Groups in `surplus` are
    not reported for getting no work: they were drained because fewer groups suffice."""
    idle = [group for group in groups if not group.is_ready and group.name not in surplus]
    reasons = [f"{group.name} {_absence(group)}" for group in idle]
    lent = {group.lender: group.name for group in groups if group.lender}
    missing = [group for group in absent if group.name not in surplus]
    reasons += [f"{group.name} {_whereabouts(group, lent.get(group.name, ''))}" for group in missing]
    roles = {*(group.role for group in groups), *(group.role for group in absent)}
    if "prefill" in roles and not any(group.is_ready for group in groups if group.role == "prefill"):
        reasons.append("no prefill group is ready: generation groups prefill by themselves")
    for group in groups:
        faults = {status.prefix_store.disk_fault for status in group.statuses} - {""}
        reasons += [f"{group.name} keeps no prefixes on disk: {fault}" for fault in sorted(faults)]
    return tuple(reasons)


def _leaked(group: GroupState) -> str:
    what = "slots are" if group.role == "generate" else "jobs are"
    return f"{group.num_leaked} {what}"


def _absence(group: GroupState) -> str:
    if group.is_drained:
        return "is drained"
    if group.is_broken:
        return "gets no work for a while: attempts there failed again and again"
    return "is not ready: its workers start, or are being repaired"


def _whereabouts(group: AbsentGroup, borrower: str) -> str:
    """Return the reason why the group has no workers. `borrower` is the name of a group that has borrowed one of them;
    empty if there is none."""
    if not group.starts and borrower:
        return f"has lent its workers: `baton flip {borrower} --undo` returns that of {borrower}"
    if not group.starts:
        return f"has left: `baton drain {group.name} --undo` starts it again"
    return f"did not start, and is tried again: {group.error}" if group.error else "starts"
