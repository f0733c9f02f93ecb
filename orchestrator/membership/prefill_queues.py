"""The book of the jobs that prefill groups have before them: predicted seconds on each rank, and each job's turn.

Ranks do not report while they work, so the book supposes that each works on the job due first, at the predicted speed.
The rest of a job never falls below 0, and its entry is removed when its run on that rank has ended, in any way. So a
wrong prediction is forgotten with its job. A group's book ends when its links are made again. Held by
`orchestrator.membership.members`, written by `orchestrator.dispatch.prefilling`. Pure; on the loop.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.types import JobId, Rank
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Pending:
    """One job in flight, with the work that its ranks still have to do."""

    due_s: float
    """Time that decides the order: of two jobs that could run next, a rank serves the one due earlier."""
    latest_s: float
    """Time by which this job must still be done if a job that comes later is to be served before it."""
    left_s: Mapping[Rank, float]
    """Predicted seconds of computation left on each rank that has not done its part."""
    tenant: Tenant = DEFAULT_TENANT
    """The tenant that sent the job's request."""


class PrefillQueues:
    """The jobs in flight of all incarnations of groups. Times are those of the orchestrator's monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, dict[JobId, tuple[Pending, dict[Rank, float]]]] = {}
        """Jobs as they came, and the work that is left of them now, by the incarnation of their group."""
        self._at_s: dict[Hashable, float] = {}
        """Time for which the work that is left holds, by incarnation."""

    def __len__(self) -> int:
        """Return the number of jobs in flight, in all groups."""
        return sum(map(len, self._jobs.values()))

    def pending(self, incarnation: Hashable, now_s: float) -> tuple[Pending, ...]:
        """Return the jobs of that incarnation of a group, in serving order, with the work left at `now_s`."""
        if incarnation not in self._jobs:
            return ()
        self._advance(incarnation, now_s)
        return tuple(replace(job, left_s=dict(left_s)) for job, left_s in self._in_order(incarnation))

    def add(self, incarnation: Hashable, number: JobId, job: Pending, now_s: float) -> None:
        """Add a job to the work of its ranks, in that incarnation of a group."""
        jobs = self._jobs.setdefault(incarnation, {})
        assert number not in jobs, f"job {number} is booked twice"
        self._advance(incarnation, now_s)
        jobs[number] = job, dict(job.left_s)

    def release(self, incarnation: Hashable, number: JobId, ranks: Iterable[Rank], now_s: float) -> None:
        """Record that these ranks are done with the job, or will never begin it; the last removes it. Idempotent."""
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
        """Subtract the work that the ranks have done from the last call until `now_s`."""
        at_s, spare_s = self._at_s.get(incarnation, 0.0), dict[Rank, float]()
        for _, left_s in self._in_order(incarnation):
            for rank, left in left_s.items():
                had_s = spare_s.get(rank, max(now_s - at_s, 0.0))
                left_s[rank] = max(left - had_s, 0.0)
                spare_s[rank] = max(had_s - left, 0.0)
        self._at_s[incarnation] = max(at_s, now_s)
