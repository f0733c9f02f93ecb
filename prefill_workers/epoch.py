"""One epoch on one rank: its jobs, its links, the messages that arrive on them, and its end.

An epoch begins when all ranks of a group have connected to each other. It ends for all ranks if any link breaks, if any
rank closes its links, if a peer that should send or receive is silent for too long, or if the next epoch begins. The
end of an epoch fails all of its jobs with one typed, retryable error. The next epoch has new links and a new
EpochSession.

Messages are matched to jobs by number:

- A message may arrive before its job is submitted to this rank. The message then waits for a bounded time. If a caller
  has declared with `announce` that it is preparing the job, the message waits until the caller has called `withdraw`.
- If the job has not been submitted by then, its messages are received into scratch memory and dropped. Messages of jobs
  that are done or aborted are dropped in the same way.
- A job whose messages were dropped is refused when it is submitted later, and later ranks of its chain are notified.

Owned by `prefill_workers.engine`; calls `prefill_workers.job_scheduler` and `prefill_workers.watchdog`, and handles the
messages of `prefill_workers.links`. The engine's lock guards all state. `admit` and `patience_s` are called with the
lock held. All other methods acquire the lock and may be called on any thread. No method waits, except `place_for`.
"""

import threading
from collections import Counter

from baton.errors import (
    BatonError,
    ChainError,
    EpochEndedError,
    InvalidArgumentError,
    JobAbortedError,
    LinkStalledError,
)
from baton.types import Epoch, JobId, Rank
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.job_scheduler import JobScheduler
from prefill_workers.links import LinkHeader, Links, LinkStatus, Payload
from prefill_workers.watchdog import Watchdog

_DOUBT_S = 0.25
"""Seconds between finding that a peer is overdue and ending the epoch. A process that got no CPU time on a crowded
machine first finds all its peers overdue, because it has not read their messages yet. The delay gives its link threads
time to read them."""


class EpochSession:
    """Jobs and links of one epoch (period with one set of links between the group's ranks) on one rank. Implements
    `prefill_workers.links.LinkHandler` for the epoch's links."""

    def __init__(self, epoch: Epoch, rank: Rank, num_ranks: int, watchdog: Watchdog, lock: threading.Condition) -> None:
        self.epoch = epoch
        self.rank = rank
        self.num_ranks = num_ranks
        self.links: Links | None = None
        """Links of the epoch; None until all ranks have connected."""
        self.error: BatonError | None = None
        """Error that ended the epoch; None while the epoch is running."""
        self.num_messages = 0
        """Number of messages that were sent in this epoch, plus the number of headers and of payloads received."""
        self.job_scheduler = JobScheduler()
        self._changed = lock
        self._watchdog = watchdog
        self._announced: Counter[JobId] = Counter()
        """Number of callers that are preparing a job for submission, by job number."""
        self._doubted_s: float | None = None
        """Time at which a peer became overdue, as a value of the clock's `now_s`; None while no peer is overdue."""

    def open(self, links: Links) -> None:
        """Start to serve jobs over `links`, which connect all ranks. If the epoch has already ended, close the links
        and raise the error that ended the epoch."""
        with self._changed:
            self.links = links
            if self.error is not None:
                links.close()
                raise self.error

    def end(self, error: BatonError) -> None:
        """Fail all jobs with `error` and close the links. Does nothing if the epoch has already ended."""
        with self._changed:
            if self.error is None:
                self.error = error
                for job in self.job_scheduler.jobs:
                    job.fail(error)
                if self.links is not None:
                    self.links.close()
                self._changed.notify_all()

    def announce(self, number: JobId) -> None:
        """Record that a caller is preparing this job for submission. Messages that arrive for the job then wait and are
        not dropped. The caller must call `withdraw` when it has submitted the job, or when it gives up submitting the
        job."""
        with self._changed:
            self._announced[number] += 1

    def withdraw(self, number: JobId) -> None:
        """End the effect of one call of `announce` for this job, because the caller has submitted the job or will not
        submit it."""
        with self._changed:
            self._announced[number] -= 1
            if not self._announced[number]:
                del self._announced[number]

    def admit(self, job: Job) -> None:
        """Check that this rank can serve `job`. Raises EpochEndedError if the epoch is not running, and
        InvalidArgumentError if the job is invalid. Raises JobAbortedError if the job was aborted before it was
        submitted; later ranks are then notified."""
        number = job.number
        if self.error is not None:
            raise EpochEndedError(f"epoch {self.epoch} has ended ({self.error}): wait for the next") from self.error
        if self.links is None or job.epoch != self.epoch:
            raise EpochEndedError(f"job {number} is of epoch {job.epoch}, and this is {self.epoch}: make it a new one")
        if self.rank not in job.ranks or job.ranks[-1] >= self.num_ranks:
            raise InvalidArgumentError(f"job {number}: ranks = {job.ranks}, sent to {self.rank} of {self.num_ranks}")
        if self.job_scheduler.get(number) is not None:
            raise InvalidArgumentError(f"job {number} is already being served: give every job a number of its own")
        if self.job_scheduler.is_buried(number):
            behind = job.ranks[job.ranks.index(self.rank) + 1 :]
            if behind:
                self.send(behind[0], LinkHeader.bare(self.epoch, number, LinkStatus.ABORT), None)
            raise JobAbortedError(f"job {number} is no longer served by rank {self.rank}: make it a new attempt")

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        """Send a message over the links to the rank `target`, and let the watchdog track it. Drop the message if the
        epoch has ended."""
        with self._changed:
            if self.error is None and self.links is not None:
                self._watchdog.sending(target)
                self.links.send(target, header, payload)

    def patience_s(self) -> float | None:
        """Check the times by which peers must show a sign of life, and return the seconds until the next check. Return
        None if the epoch has ended, or if no peer must show a sign of life. If a check finds a peer overdue, and a peer
        is still overdue `_DOUBT_S` seconds later, end the epoch with LinkStalledError, and return 0."""
        if self.error is not None:
            return None
        jobs = [job for job in self.job_scheduler.jobs if job.error is None]
        waits = [(job.pipeline.source, job.parked_s) for job in jobs if job.starved and job.pipeline.source is not None]
        # the prediction, or, on a machine that is slower than predicted, the time measured here
        turns_s = (max(job.job.layer_s, job.expected_turn_s) for job in jobs)
        due = self._watchdog.first_due(waits, max(turns_s, default=0.0))
        if due is None:
            self._doubted_s = None
            return None
        now_s = self._watchdog.clock.now_s()
        if now_s < due.deadline_s:
            self._doubted_s = None
            return due.deadline_s - now_s
        self._doubted_s = now_s if self._doubted_s is None else self._doubted_s
        if now_s < self._doubted_s + _DOUBT_S:
            return self._doubted_s + _DOUBT_S - now_s
        self.end(
            LinkStalledError(
                f"rank {due.peer} has shown rank {self.rank} no sign of life for {due.limit_s:.1f} s: "
                f"epoch {self.epoch} is over, retry in the next"
            )
        )
        return 0.0

    def tell_waiting(self, has_worked: bool) -> None:
        """Send ALIVE messages to the ranks that may be waiting for this one, so that they do not treat it as stalled.

        If the engine has made progress (`has_worked`), one message per job goes to the next rank of the job's chain.
        For each job that is still being prepared on this rank (`announce`), one message goes to all other ranks,
        because earlier ranks may wait for this rank to receive KV, and later ranks may wait for this rank's KV. A rank
        gets no ALIVE message while another message to this rank waits to be sent.
        """
        with self._changed:
            ranks = (Rank(number) for number in range(self.num_ranks) if number != self.rank)
            idle = [rank for rank in ranks if self._watchdog.is_idle(rank)]
            for job in self.job_scheduler.jobs if has_worked else []:
                if job.error is None and job.pipeline.target in idle:
                    job.pipeline.alive()
            for number in [each for each in self._announced if not self._is_known(each)]:
                for rank in idle:
                    self.send(rank, LinkHeader.bare(self.epoch, number, LinkStatus.ALIVE), None)

    def place_for(self, source: Rank, header: LinkHeader) -> Payload | None:
        """Return the memory of the job into which a payload must be received. Return None if the payload must be
        dropped. Blocks until the job is submitted or refused."""
        with self._changed:
            self._heard(source)
            self._await_job(header.job)
            job = self._job_of(header)
            try:
                return job.pipeline.place(source, header) if job is not None else None
            except ChainError as error:
                assert job is not None
                job.fail(error)
                self._changed.notify_all()
                return None

    def received(self, source: Rank, header: LinkHeader) -> None:
        """Handle a received message (KV, ABORT or ALIVE), and pass it to its job. If the job of an ABORT message is
        unknown, the job is refused when it is submitted later."""
        with self._changed:
            self._heard(source)
            job = self._job_of(header)
            if job is None:
                if header.status is LinkStatus.ABORT and self.job_scheduler.get(header.job) is None:
                    self.job_scheduler.bury(header.job)  # a present job was given up: the engine settles it
            elif header.status is LinkStatus.ABORT:
                job.fail(JobAbortedError(f"rank {source} gave job {header.job} up: retry it as a new attempt"))
            elif header.status is LinkStatus.ALIVE:
                if source == job.pipeline.source:  # ALIVE of other ranks is not about the job's KV
                    job.pipeline.alive()
            else:
                job.pipeline.received(header)

    def sent(self, target: Rank, header: LinkHeader) -> None:
        """Record that a message was sent, for the watchdog and for the pipeline of the message's job."""
        with self._changed:
            self._watchdog.sent(target)
            self.num_messages += 1
            job = self.job_scheduler.get(header.job)
            if job is not None:
                job.pipeline.sent(header)
            self._changed.notify_all()

    def broken(self, error: ChainError) -> None:
        """End the epoch because a link broke. `error` is the error of the link."""
        self.end(error)

    def _heard(self, source: Rank) -> None:
        self._watchdog.heard(source)
        self.num_messages += 1
        self._changed.notify_all()

    def _await_job(self, number: JobId) -> None:
        """Wait until the job is known. Mark it as not served if it stays unknown and no caller is preparing it.

        The wait for a job that a caller is preparing (`announce`) lasts until the job is submitted, the caller calls
        `withdraw`, or the epoch ends. Dropping the job's message instead would fail the attempt, and blame the group
        for a slow disk. Other messages of the same source wait too.
        No rank is considered silent meanwhile: this rank sends ALIVE (`tell_waiting`), and the source shows that it
        works by receiving ALIVE.
        """
        while not self._changed.wait_for(
            lambda: self._is_known(number) or self.error is not None, self._watchdog.floor_s / 2
        ):
            if number not in self._announced:
                self.job_scheduler.bury(number)
                return

    def _is_known(self, number: JobId) -> bool:
        return self.job_scheduler.get(number) is not None or self.job_scheduler.is_buried(number)

    def _job_of(self, header: LinkHeader) -> ChainJob | None:
        """Return the job that a message belongs to; None if the job is unknown, has failed, or is of another epoch."""
        job = self.job_scheduler.get(header.job) if header.epoch == self.epoch else None
        return job if job is not None and job.error is None else None
