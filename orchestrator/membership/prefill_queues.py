"""Queues of the unfinished jobs of each prefill group, with the predicted seconds of work that each job has left on
each rank.

Ranks do not report progress while they work. Therefore the queue assumes that each rank works on its job with the
earliest due time, at the predicted speed. The remaining work of a job never falls below 0. When a job ends on a rank
for any reason, its remaining work on this rank is removed, so that a wrong prediction has no further effect. The
queue of a group is dropped when the links between the group's ranks are replaced.

Held by `orchestrator.membership.members`, written by `orchestrator.dispatch.prefilling`. Does no I/O. Runs on the event
loop.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.types import JobId, Rank
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Pending:
    """Unfinished prefill job, with the work that it still has on each rank."""

    due_s: float
    """Due time in seconds. Each rank serves the job with the earliest due time first."""
    latest_s: float
    """Latest acceptable end of this job, as a time in seconds. A job that arrives later may be served before this job
    only if this job still ends by then."""
    left_s: Mapping[Rank, float]
    """Predicted seconds of computation that remain, by rank. Ranks that have finished their part have no entry."""
    tenant: Tenant = DEFAULT_TENANT
    """Tenant that sent the job's request."""


class PrefillQueues:
    """Unfinished jobs of all prefill groups, by incarnation of the group. A group that is repaired becomes a new
    incarnation. Times are in seconds on the orchestrator's monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, dict[JobId, tuple[Pending, dict[Rank, float]]]] = {}
        """Jobs in order of arrival, by incarnation of the group and job id. Each entry has the job and its remaining
        seconds of work by rank."""
        self._at_s: dict[Hashable, float] = {}
        """Time at which the remaining work was last updated, by incarnation of the group."""

    def __len__(self) -> int:
        """Return the number of unfinished jobs in all groups."""
        return sum(map(len, self._jobs.values()))

    def pending(self, incarnation: Hashable, now_s: float) -> tuple[Pending, ...]:
        """Return the unfinished jobs of this incarnation of a group, in the order in which they will be served.
        `left_s` of each job is the work that is predicted to remain at time `now_s`."""
        if incarnation not in self._jobs:
            return ()
        self._advance(incarnation, now_s)
        return tuple(replace(job, left_s=dict(left_s)) for job, left_s in self._in_order(incarnation))

    def left_s(self, incarnation: Hashable, now_s: float) -> float:
        """Return the seconds of work that are predicted to remain at time `now_s`, summed over all jobs and ranks of
        this incarnation of a group."""
        if incarnation not in self._jobs:
            return 0.0
        self._advance(incarnation, now_s)
        return sum(sum(left_s.values()) for _, left_s in self._jobs[incarnation].values())

    def add(self, incarnation: Hashable, number: JobId, job: Pending, now_s: float) -> None:
        """Add a job to the queue of this incarnation of a group."""
        jobs = self._jobs.setdefault(incarnation, {})
        assert number not in jobs, f"job {number} is booked twice"
        self._advance(incarnation, now_s)
        jobs[number] = job, dict(job.left_s)

    def release(self, incarnation: Hashable, number: JobId, ranks: Iterable[Rank], now_s: float) -> None:
        """Record that these ranks have finished the job, or will never begin it. The job is removed when its last rank
        is released. Idempotent."""
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
