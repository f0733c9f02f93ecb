"""The book of what prefill groups have before them: each job's predicted seconds on each of its ranks, and its turn.

Ranks report nothing while they work, so the book supposes that each spends its time as its sequencer does: on the job
due first, at the predicted speed. What is left of a job never falls below nothing, and its entry goes when its run on
that rank has ended, however it did: a wrong prediction is forgotten with its job. A group's book belongs to one life of
its links, and survives nothing. Step 3 of a request's way (DESIGN.md, section 4). Pure; on the loop.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.ids import JobId, Rank
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True)
class Pending:
    """One job in flight, as its ranks still have it before them."""

    due_s: float
    """Its place in the order, in unix seconds: of two jobs that could go on, a rank serves the one due earlier."""
    latest_s: float
    """Unix seconds: a job that comes later may be served before this one only if this one is still done by then."""
    left_s: Mapping[Rank, float]
    """Predicted seconds of computation left on each rank that has not done its part."""
    tenant: Tenant = DEFAULT_TENANT
    """Whose it is."""


class Backlog:
    """What the ranks of one group have before them. Times are unix seconds, `now_s` never far in the past."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, Pending] = {}
        self._left_s: dict[JobId, dict[Rank, float]] = {}
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def pending(self, now_s: float) -> tuple[Pending, ...]:
        """All jobs, in the order in which they are served."""
        self._advance(now_s)
        return tuple(replace(job, left_s=dict(self._left_s[number])) for number, job in self._in_order())

    def add(self, number: JobId, job: Pending, now_s: float) -> None:
        """From now on the job is before its ranks."""
        assert number not in self._jobs, f"job {number} is booked twice"
        self._advance(now_s)
        self._jobs[number] = job
        self._left_s[number] = dict(job.left_s)

    def release(self, number: JobId, ranks: Iterable[Rank], now_s: float) -> None:
        """These ranks are done with the job, or will never begin it; the last one takes the job along. Idempotent."""
        if number not in self._jobs:
            return
        self._advance(now_s)
        left_s = self._left_s[number]
        for rank in ranks:
            left_s.pop(rank, None)
        if not left_s:
            del self._jobs[number], self._left_s[number]

    def _in_order(self) -> list[tuple[JobId, Pending]]:
        return sorted(self._jobs.items(), key=lambda each: (each[1].due_s, each[0]))

    def _advance(self, now_s: float) -> None:
        """The ranks have worked until now."""
        spare_s: dict[Rank, float] = {}
        for number, _ in self._in_order():
            left_s = self._left_s[number]
            for rank, left in left_s.items():
                had_s = spare_s.get(rank, max(now_s - self._at_s, 0.0))
                left_s[rank] = max(left - had_s, 0.0)
                spare_s[rank] = max(had_s - left, 0.0)
        self._at_s = max(self._at_s, now_s)


class Backlogs:
    """A book for every life of a group that has jobs in flight."""

    def __init__(self) -> None:
        self._backlogs: dict[Hashable, Backlog] = {}

    def __len__(self) -> int:
        """Jobs in flight, in all groups."""
        return sum(len(backlog) for backlog in self._backlogs.values())

    def pending(self, life: Hashable, now_s: float) -> tuple[Pending, ...]:
        """As `Backlog.pending`, of the group in that life."""
        backlog = self._backlogs.get(life)
        return () if backlog is None else backlog.pending(now_s)

    def add(self, life: Hashable, number: JobId, job: Pending, now_s: float) -> None:
        """As `Backlog.add`."""
        self._backlogs.setdefault(life, Backlog()).add(number, job, now_s)

    def release(self, life: Hashable, number: JobId, ranks: Sequence[Rank], now_s: float) -> None:
        """As `Backlog.release`."""
        backlog = self._backlogs.get(life)
        if backlog is not None:
            backlog.release(number, ranks, now_s)
            if not len(backlog):
                del self._backlogs[life]
