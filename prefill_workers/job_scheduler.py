"""Orders a rank's jobs. A turn computes about one layer of a job. The next turn goes to the runnable job with the
earliest due time.

The orchestrator gives each job a due time and an ascending number. If due times are equal, the job with the lower
number is served first. Because a turn is short, a job with an earlier due time can run between two layers of a long
job. A job that waits for an earlier rank's KV gets no turn until the KV has arrived. So no rank is idle while any job
can continue, and jobs may be submitted in any order. Ranks cannot wait for each other in a cycle, because a job waits
only for lower ranks, and messages are sent without waiting.

Due times are used only to order jobs, so they may be in the past. They grow with the clock, so that later jobs have
later due times and no long job waits forever. `orchestrator.placement.chain_width` assigns due times, and limits how
much later jobs may delay a job.

Used by `prefill_workers.epoch`. Does no I/O. The engine's lock guards it.
"""

from baton.types import JobId
from prefill_workers.chain import ChainJob

_MAX_REMEMBERED = 4096


class JobScheduler:
    """Jobs of one rank in one epoch (period with one set of links). Also records the numbers of jobs that are no longer
    served because they are done, aborted or refused."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, ChainJob] = {}
        self._buried: dict[JobId, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[ChainJob]:
        """Return all current jobs in the order in which they are served."""
        return sorted(self._jobs.values(), key=lambda job: (job.job.due_s, job.job.number))

    def add(self, job: ChainJob) -> None:
        """Add a job. Its number must not belong to another current job, or to a job that is no longer served."""
        assert job.job.number not in self._jobs and not self.is_buried(job.job.number)
        self._jobs[job.job.number] = job

    def get(self, number: JobId) -> ChainJob | None:
        """Return the current job with this number; None if no job has it."""
        return self._jobs.get(number)

    def bury(self, number: JobId) -> None:
        """Remove the job, if it exists, and record its number as no longer served. Only the latest few thousand such
        numbers are kept."""
        self._jobs.pop(number, None)
        self._buried[number] = None
        if len(self._buried) > _MAX_REMEMBERED:
            del self._buried[next(iter(self._buried))]

    def is_buried(self, number: JobId) -> bool:
        """Return True if the job with this number is recorded as no longer served."""
        return number in self._buried

    def next_runnable(self) -> ChainJob | None:
        """Return the job that the engine must work on next; None if no job is runnable."""
        return next((job for job in self.jobs if job.runnable), None)

    def take_over(self) -> list[ChainJob]:
        """Remove and return all jobs that are over. Their numbers are recorded as no longer served."""
        over = [job for job in self.jobs if job.over]
        for job in over:
            self.bury(job.job.number)
        return over
