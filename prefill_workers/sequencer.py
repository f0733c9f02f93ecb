"""In which order a group's jobs are served: by number, and nobody waits for one that waits.

A group's jobs are numbered, ascending, where they are handed out. On every rank a `Sequencer` gives each turn to the
lowest number that can use it: a job that waits for an earlier rank's KV yields its turns until that has come. So jobs
overtake only where a rank would else stand idle, submissions may arrive in any order, and with all messages first in,
first out no cycle of waits can form.

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
        """All present jobs, by number."""
        return [self._jobs[number] for number in sorted(self._jobs)]

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
