"""Orders a rank's jobs: the next turn goes to the job due first that can use it.

The orchestrator gives each job a due time and a number, ascending. On every rank a Sequencer gives each turn to the job
due first that can use it, and of equal due times to the job with the lower number. A turn is a layer, so a short job
that is due before a long one runs between two layers of the long one. A job that waits for an earlier rank's KV gets no
turn until that KV has arrived: no rank is idle while any job can continue, and submissions may arrive in any order. No
cycle of waits can form, because a job waits only for lower ranks, and messages are sent without waiting.

Due times only order jobs, and may be in the past. They keep long jobs from waiting for ever because they grow with the
clock: later jobs are due later (`orchestrator.placement.chain_width` assigns due times, and bounds the number of jobs
that may overtake).

Used by `prefill_workers.epoch`. Pure; the engine's lock guards it.
"""

from baton.types import JobId
from prefill_workers.chain import ChainJob

_MAX_REMEMBERED = 4096


class JobScheduler:
    """One rank's jobs in one epoch, and the numbers of jobs no longer served: done, given up, or refused."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, ChainJob] = {}
        self._buried: dict[JobId, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[ChainJob]:
        """Return all present jobs, in the order in which they are served."""
        return sorted(self._jobs.values(), key=lambda job: (job.job.due_s, job.job.number))

    def add(self, job: ChainJob) -> None:
        """Add a job, whose number must be neither present nor buried."""
        assert job.job.number not in self._jobs and not self.is_buried(job.job.number)
        self._jobs[job.job.number] = job

    def get(self, number: JobId) -> ChainJob | None:
        """Return the present job with this number; None if none has it."""
        return self._jobs.get(number)

    def bury(self, number: JobId) -> None:
        """Forget the job, present or not, and remember its number, among the latest few thousand, as not served."""
        self._jobs.pop(number, None)
        self._buried[number] = None
        if len(self._buried) > _MAX_REMEMBERED:
            del self._buried[next(iter(self._buried))]

    def is_buried(self, number: JobId) -> bool:
        """Return whether the job with this number is remembered as no longer served."""
        return number in self._buried

    def next_runnable(self) -> ChainJob | None:
        """Return the job that gets the next turn; None when all jobs wait."""
        return next((job for job in self.jobs if job.runnable), None)

    def take_over(self) -> list[ChainJob]:
        """Bury all jobs that are over, and return them."""
        over = [job for job in self.jobs if job.over]
        for job in over:
            self.bury(job.job.number)
        return over
