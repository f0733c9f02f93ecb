"""Explains as readable text why the orchestrator does not serve requests, and why it serves them worse than it could.

Used by `orchestrator.observability.state`. The health is NOT_SERVING if no generation group can serve a request. It is
also NOT_SERVING if a worker's counts of slots or bytes do not add up, or if slots are leaked, because then the workers
cannot be relied on. Pure.
"""

from collections.abc import Collection, Sequence

from baton.calls.cluster_state import GroupState
from orchestrator.membership.view import AbsentGroup


def why_not_serving(
    groups: Sequence[GroupState], *, is_asleep: bool = False, leaks_count: bool = True
) -> tuple[str, ...]:
    """Return a line for each reason why no request is served; empty if requests are served.

    `is_asleep` is True if all generation groups are stopped and the next request will start one. `leaks_count` is False
    while leases of an earlier orchestrator may still exist.
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
    """Return a line for each group that gets no work, for the consequence if a role has no ready group, and for each
    group that cannot use its node's disk. Groups in `surplus`, which were drained because fewer groups suffice, get no
    line."""
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
