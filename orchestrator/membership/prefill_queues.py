"""The book of the jobs that prefill groups have before them: predicted seconds on each rank, and each job's turn.

Ranks do not report while they work, so the book supposes that each works on the job due first, at the predicted speed.
The rest of a job never falls below 0, and its entry is removed when its run on that rank has ended, in any way. So a
wrong prediction is forgotten with its job. A group's book ends when its links are made again. Held by
`orchestrator.membership.members`, written by `orchestrator.dispatch.prefilling`. Pure; on the loop.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
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


class PrefillQueue:
    """The jobs of one group's ranks. Times are those of the orchestrator's monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, tuple[Pending, dict[Rank, float]]] = {}
        """Jobs as they came, and the work that is left of them now."""
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def pending(self, now_s: float) -> tuple[Pending, ...]:
        """Return all jobs, in the order in which they are served, with the work left at `now_s`."""
        self._advance(now_s)
        return tuple(replace(job, left_s=dict(left_s)) for job, left_s in self._in_order())

    def add(self, number: JobId, job: Pending, now_s: float) -> None:
        """Add a job to the work of its ranks."""
        assert number not in self._jobs, f"job {number} is booked twice"
        self._advance(now_s)
        self._jobs[number] = job, dict(job.left_s)

    def release(self, number: JobId, ranks: Iterable[Rank], now_s: float) -> None:
        """Record that these ranks are done with the job, or never begin it; the last removes it. Idempotent."""
        if number not in self._jobs:
            return
        self._advance(now_s)
        _, left_s = self._jobs[number]
        for rank in ranks:
            left_s.pop(rank, None)
        if not left_s:
            del self._jobs[number]

    def _in_order(self) -> list[tuple[Pending, dict[Rank, float]]]:
        return [self._jobs[number] for number in sorted(self._jobs, key=lambda each: (self._jobs[each][0].due_s, each))]

    def _advance(self, now_s: float) -> None:
        """Subtract the work that the ranks have done from the last call until `now_s`."""
        spare_s: dict[Rank, float] = {}
        for _, left_s in self._in_order():
            for rank, left in left_s.items():
                had_s = spare_s.get(rank, max(now_s - self._at_s, 0.0))
                left_s[rank] = max(left - had_s, 0.0)
                spare_s[rank] = max(had_s - left, 0.0)
        self._at_s = max(self._at_s, now_s)


class PrefillQueues:
    """Backlogs of all incarnations of groups that have jobs in flight."""

    def __init__(self) -> None:
        self._prefill_queues: dict[Hashable, PrefillQueue] = {}

    def __len__(self) -> int:
        """Return the number of jobs in flight, in all groups."""
        return sum(len(prefill_queue) for prefill_queue in self._prefill_queues.values())

    def pending(self, incarnation: Hashable, now_s: float) -> tuple[Pending, ...]:
        """Return the jobs of that incarnation of a group, in serving order, with the work left at `now_s`."""
        prefill_queue = self._prefill_queues.get(incarnation)
        return () if prefill_queue is None else prefill_queue.pending(now_s)

    def add(self, incarnation: Hashable, number: JobId, job: Pending, now_s: float) -> None:
        """Add a job to the work of its ranks, in that incarnation of a group."""
        self._prefill_queues.setdefault(incarnation, PrefillQueue()).add(number, job, now_s)

    def release(self, incarnation: Hashable, number: JobId, ranks: Sequence[Rank], now_s: float) -> None:
        """Record that these ranks are done with the job, or will never begin it. Idempotent."""
        prefill_queue = self._prefill_queues.get(incarnation)
        if prefill_queue is not None:
            prefill_queue.release(number, ranks, now_s)
            if not len(prefill_queue):
                del self._prefill_queues[incarnation]
