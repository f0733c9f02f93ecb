"""In which order a group's jobs are served: the one due first, and nobody waits for one that waits.

Whoever hands jobs out says when each is due and numbers them, ascending. On every rank a `Sequencer` gives each turn to
the job due first that can use it, of two due at once to the lower number. A turn is a layer, so a short job that is due
before a long one runs between two of its layers. A job that waits for an earlier rank's KV yields its turns until that
has come: no rank stands idle while any job can go on, submissions may arrive in any order, and in whatever order, no
cycle of waits can form, for a job waits only for lower ranks, and messages are sent without waiting.

Dues bind no one and may have passed. What keeps long jobs from waiting for ever is that dues grow with the time of day:
who is due later comes later (`orchestrator.placement.chain_width` says how they are given out, and bounds how many
overtake).

Step 4 of a request's way (DESIGN.md, section 4). Pure; whoever owns one guards it.
"""

from baton.ids import JobId
from prefill_workers.chain import ChainJob

_MAX_REMEMBERED = 4096


class Sequencer:
    """One rank's jobs in one epoch, and the numbers that are no longer served: done, given up, or refused."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, ChainJob] = {}
        self._buried: dict[JobId, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[ChainJob]:
        """All present jobs, in the order in which they are served."""
        return sorted(self._jobs.values(), key=lambda job: (job.job.due_s, job.job.number))

    def add(self, job: ChainJob) -> None:
        assert job.job.number not in self._jobs and not self.is_buried(job.job.number)
        self._jobs[job.job.number] = job

    def get(self, number: JobId) -> ChainJob | None:
        return self._jobs.get(number)

    def bury(self, number: JobId) -> None:
        """Forgets the job, present or not, and remembers its number, as the last of a few thousand."""
        self._jobs.pop(number, None)
        self._buried[number] = None
        if len(self._buried) > _MAX_REMEMBERED:
            del self._buried[next(iter(self._buried))]

    def is_buried(self, number: JobId) -> bool:
        return number in self._buried

    def next_runnable(self) -> ChainJob | None:
        """Who gets the next turn; None when all wait."""
        return next((job for job in self.jobs if job.runnable), None)

    def take_over(self) -> list[ChainJob]:
        """Buries and returns all jobs that are over."""
        over = [job for job in self.jobs if job.over]
        for job in over:
            self.bury(job.job.number)
        return over
