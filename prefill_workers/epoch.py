"""One epoch on one rank: its jobs, its links, the messages that arrive on them, and its end.

An epoch begins when all ranks of a group have met. It ends, for all of them, when any link breaks, any rank closes its
links, a peer that owes a sign of life stays silent too long, or the next epoch begins. Its end fails all of its jobs
with one typed, retryable error. The next epoch shares nothing with it: it has new links and an EpochSession of its own.

Messages are matched to jobs by number:
- A job that is not known yet may still be on its way to this rank. Its first message waits for a bounded time. If the
  job is announced, as it is while its call prepares it, the message waits until the call has submitted it or ended.
- After that, and for jobs that are done or were given up, messages are received into scratch memory and dropped.
- A job whose messages were dropped is refused when it arrives later, and later ranks are notified.

Owned by `prefill_workers.engine`; calls `prefill_workers.job_scheduler` and `prefill_workers.watchdog`, and handles the
messages of `prefill_workers.links`. The engine's lock guards all state: `admit` and `patience_s` are called under it,
all other methods take it, on any thread. No method waits, except `place_for`.
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
"""Seconds between finding a peer overdue and giving it up. A rank that was not scheduled itself, on a crowded machine,
finds all of its peers overdue at first, while their messages are unread. In this time its link threads read them."""


class EpochSession:
    """One epoch's jobs and links on one rank. Implements `prefill_workers.links.LinkHandler` for the epoch's links."""

    def __init__(self, epoch: Epoch, rank: Rank, num_ranks: int, watchdog: Watchdog, lock: threading.Condition) -> None:
        self.epoch = epoch
        self.rank = rank
        self.num_ranks = num_ranks
        self.links: Links | None = None
        """The epoch's links; None until all ranks have met."""
        self.error: BatonError | None = None
        """The error that ended the epoch; None while it is running."""
        self.num_messages = 0
        """Number of messages sent and received."""
        self.job_scheduler = JobScheduler()
        self._changed = lock
        self._watchdog = watchdog
        self._announced: Counter[JobId] = Counter()
        """Number of running calls that will submit a job, by the job's number."""
        self._doubted_s: float | None = None
        """Time at which a peer became overdue, on the clock's now_s; None while no peer is overdue."""

    def open(self, links: Links) -> None:
        """Begin to serve jobs over `links`, now that all ranks have met. When the epoch has ended in the meantime,
        closes the links and raises the epoch's error."""
        with self._changed:
            self.links = links
            if self.error is not None:
                links.close()
                raise self.error

    def end(self, error: BatonError) -> None:
        """Fail all jobs with `error` and close the links; does nothing when the epoch has already ended."""
        with self._changed:
            if self.error is None:
                self.error = error
                for job in self.job_scheduler.jobs:
                    job.fail(error)
                if self.links is not None:
                    self.links.close()
                self._changed.notify_all()

    def announce(self, number: JobId) -> None:
        """Note that a running call will submit this job or give up; the call ends the announcement by `withdraw`."""
        with self._changed:
            self._announced[number] += 1

    def withdraw(self, number: JobId) -> None:
        """Note that a call that announced this job has submitted it or has ended."""
        with self._changed:
            self._announced[number] -= 1
            if not self._announced[number]:
                del self._announced[number]

    def admit(self, job: Job) -> None:
        """Check that this rank can serve `job`. Raises EpochEndedError, InvalidArgumentError, or, for a job that was
        given up before it arrived, JobAbortedError. Later ranks are notified of such a job."""
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
        """Send a pipeline's message, watched by the watchdog, through the links; drop it once the epoch has ended."""
        with self._changed:
            if self.error is None and self.links is not None:
                self._watchdog.sending(target)
                self.links.send(target, header, payload)

    def patience_s(self) -> float | None:
        """Return the seconds until a peer may be overdue; None when no peer owes a sign of life. Ends the epoch with
        LinkStalledError when a peer has been overdue for a while already."""
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
        """Send ALIVE to the ranks that may wait for this one, so that they keep waiting. While this rank works
        (`has_worked`), sends it to the next rank of each of its jobs. For each announced job, sends it to all ranks:
        the rank before may have sent KV that waits here, and the rank after may wait already."""
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
        """Return the job's memory for a payload; None to drop the payload. Blocks until the job is known."""
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
        """Pass a message on to its job, as KV, abort or sign of life; an abort of an unknown job buries its number."""
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
        """Note that a message has left, with the watchdog and with its job's pipeline."""
        with self._changed:
            self._watchdog.sent(target)
            self.num_messages += 1
            job = self.job_scheduler.get(header.job)
            if job is not None:
                job.pipeline.sent(header)
            self._changed.notify_all()

    def broken(self, error: ChainError) -> None:
        """End the epoch with the error of the link that broke."""
        self.end(error)

    def _heard(self, source: Rank) -> None:
        self._watchdog.heard(source)
        self.num_messages += 1
        self._changed.notify_all()

    def _await_job(self, number: JobId) -> None:
        """Wait until the job is known, or bury a job that no call has announced in time.

        The wait for an announced job lasts until it is submitted, its call ends, or the epoch ends: dropping its
        message would fail the attempt, and blame the group for a slow disk. Other messages of the same source wait too.
        No rank counts this as silence: this rank sends ALIVE, and receiving that is the source's sign of life
        (`tell_waiting`).
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
        """Return the job that a message is for; None when it is unknown, given up, or of another epoch."""
        job = self.job_scheduler.get(header.job) if header.epoch == self.epoch else None
        return job if job is not None and job.error is None else None
