"""List of the unfinished jobs of each prefill group: predicted seconds of work on each rank, and the order of the jobs.

Ranks do not report progress while they work. So the list assumes that each rank works on its job with the earliest due
time, at the predicted speed. The remaining work of a job never falls below 0. Its entry is removed when its run on that
rank has ended for any reason, so an error of a prediction disappears with its job. The list of a group is dropped when
the links between the group's ranks are replaced. Held by `orchestrator.membership.members`, written by
`orchestrator.dispatch.prefilling`. Pure; on the loop.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.types import JobId, Rank
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Pending:
    """Unfinished job, with the work that remains on its ranks."""

    due_s: float
    """Due time, which decides the order: a rank serves the job with the earliest due time first."""
    latest_s: float
    """Latest time at which this job may end because of later jobs. A later job is served before this one only if this
    one still ends by that time."""
    left_s: Mapping[Rank, float]
    """Predicted seconds of computation that remain, by rank. Ranks that have finished their chunk are absent."""
    tenant: Tenant = DEFAULT_TENANT
    """The tenant that sent the job's request."""


class PrefillQueues:
    """Unfinished jobs of all prefill groups, by incarnation of the group (a group that is repaired is a new
    incarnation). Times are on the orchestrator's monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, dict[JobId, tuple[Pending, dict[Rank, float]]]] = {}
        """Jobs in order of arrival, each with its remaining seconds of work by rank, by incarnation of the group."""
        self._at_s: dict[Hashable, float] = {}
        """Time at which the remaining work was last updated, by incarnation of the group."""

    def __len__(self) -> int:
        """Return the number of unfinished jobs in all groups."""
        return sum(map(len, self._jobs.values()))

    def pending(self, incarnation: Hashable, now_s: float) -> tuple[Pending, ...]:
        """Return the unfinished jobs of that incarnation of a group, in the order of service, with the work that
        remains at `now_s`."""
        if incarnation not in self._jobs:
            return ()
        self._advance(incarnation, now_s)
        return tuple(replace(job, left_s=dict(left_s)) for job, left_s in self._in_order(incarnation))

    def add(self, incarnation: Hashable, number: JobId, job: Pending, now_s: float) -> None:
        """Add a job to the list of that incarnation of a group."""
        jobs = self._jobs.setdefault(incarnation, {})
        assert number not in jobs, f"job {number} is booked twice"
        self._advance(incarnation, now_s)
        jobs[number] = job, dict(job.left_s)

    def release(self, incarnation: Hashable, number: JobId, ranks: Iterable[Rank], now_s: float) -> None:
        """Record that these ranks have finished the job or will never begin it. The job is removed with its last rank.
        Idempotent."""
        jobs = self._jobs.get(incarnation, {})
        if number not in jobs:
            return
        self._advance(incarnation, now_s)
        _, left_s = jobs[number]
        for rank in ranks:
            left_s.pop(rank, None)
        if not left_s:
            del jobs[number]
        if not jobs:
            del self._jobs[incarnation], self._at_s[incarnation]

    def _in_order(self, incarnation: Hashable) -> list[tuple[Pending, dict[Rank, float]]]:
        jobs = self._jobs[incarnation]
        return [jobs[number] for number in sorted(jobs, key=lambda each: (jobs[each][0].due_s, each))]

    def _advance(self, incarnation: Hashable, now_s: float) -> None:
        """Subtract the work that the ranks have done between the last call and `now_s`."""
        at_s, spare_s = self._at_s.get(incarnation, 0.0), dict[Rank, float]()
        for _, left_s in self._in_order(incarnation):
            for rank, left in left_s.items():
                had_s = spare_s.get(rank, max(now_s - at_s, 0.0))
                left_s[rank] = max(left - had_s, 0.0)
                spare_s[rank] = max(had_s - left, 0.0)
        self._at_s[incarnation] = max(at_s, now_s)
