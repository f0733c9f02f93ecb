"""One epoch on one rank: its jobs, its links, what the links report, and its end.

An epoch begins when all ranks of a group have met, and ends, for all of them, when any link breaks, any rank closes its
links, a peer that owes something stays silent too long, or the next epoch begins. Its end fails all of its jobs with
one typed, retryable error; nothing of it reaches the next epoch, which has new links and an object of its own here.

Messages find their job by number:
  - a job that is not known yet may still be on its way to this rank: its first message waits, for a bounded time, or,
    if the job is announced, which it is while its call prepares it, for as long as that takes;
  - after that, and for jobs that are done or were given up, messages are received into scratch memory and dropped;
  - a job whose messages were dropped is refused when it comes after all, and the ranks behind are told.

Steps 4 and 5 of a request's way (DESIGN.md, section 4). The engine's lock guards all state: `admit` and `patience_s`
are called under it, all other methods take it, on any thread. No method waits, except `place_for`.
"""

import threading
from collections import Counter
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import (
    BatonError,
    ChainError,
    EpochEndedError,
    InvalidArgumentError,
    JobAbortedError,
    LinkStalledError,
)
from baton.ids import Epoch, JobId, Rank
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, Links, LinkStatus
from prefill_workers.sequencer import Sequencer
from prefill_workers.watchdog import Watchdog

_DOUBT_S = 0.25
"""Before a peer that is overdue is given up. A rank that stood still itself, on a crowded machine, finds all of its
peers overdue at first: what they have sent lies unread, and its link threads get their turn now."""


@dataclass
class Tally:
    """What an engine has done in all its epochs. Guarded by the engine's lock."""

    progress: int = 0
    """Turns taken and messages passed."""
    num_jobs_done: int = 0


class EpochLife:
    """See the module. Implements `prefill_workers.links.LinkHandler` for the epoch's links."""

    def __init__(
        self,
        epoch: Epoch,
        rank: Rank,
        num_ranks: int,
        *,
        lock: threading.Condition,
        clock: Clock,
        floor_s: float,
        tally: Tally,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.num_ranks = num_ranks
        self.links: Links | None = None
        """None until all ranks have met."""
        self.error: BatonError | None = None
        """Why the epoch has ended."""
        self.sequencer = Sequencer()
        self._changed = lock
        self._clock = clock
        self._floor_s = floor_s
        self._tally = tally
        self._watchdog = Watchdog(clock, floor_s)
        self._announced: Counter[JobId] = Counter()
        """Calls that run, by their job's number."""
        self._doubted_s: float | None = None
        """Since when a peer has been overdue, on the clock's now_s; None while none is."""

    def open(self, links: Links) -> None:
        """All ranks have met. Raises the epoch's error when it has ended in the meantime; the links are closed then."""
        with self._changed:
            self.links = links
            if self.error is not None:
                links.close()
                raise self.error

    def end(self, error: BatonError) -> None:
        """Fails all jobs and closes the links, unless that has been done."""
        with self._changed:
            if self.error is None:
                self.error = error
                for job in self.sequencer.jobs:
                    job.fail(error)
                if self.links is not None:
                    self.links.close()
                self._changed.notify_all()

    def announce(self, number: JobId) -> None:
        """A call has come that will submit this job, or be over, sooner or later: ended by `withdraw`."""
        with self._changed:
            self._announced[number] += 1

    def withdraw(self, number: JobId) -> None:
        """The call is over."""
        with self._changed:
            self._announced[number] -= 1
            if not self._announced[number]:
                del self._announced[number]

    def admit(self, job: Job) -> None:
        """Raises when this rank cannot serve `job`: EpochEndedError, InvalidArgumentError, or, when the job has been
        given up before it came, JobAbortedError; the ranks behind are told of that."""
        number = job.number
        if self.error is not None:
            raise EpochEndedError(f"epoch {self.epoch} has ended ({self.error}): wait for the next") from self.error
        if self.links is None or job.epoch != self.epoch:
            raise EpochEndedError(f"job {number} is of epoch {job.epoch}, and this is {self.epoch}: make it a new one")
        if self.rank not in job.ranks or job.ranks[-1] >= self.num_ranks:
            raise InvalidArgumentError(f"job {number}: ranks = {job.ranks}, sent to {self.rank} of {self.num_ranks}")
        if self.sequencer.get(number) is not None:
            raise InvalidArgumentError(f"job {number} is already being served: give every job a number of its own")
        if self.sequencer.is_buried(number):
            behind = job.ranks[job.ranks.index(self.rank) + 1 :]
            if behind:
                self.send(behind[0], LinkHeader.bare(self.epoch, number, LinkStatus.ABORT), None)
            raise JobAbortedError(f"job {number} is no longer served by rank {self.rank}: make it a new attempt")

    def send(self, target: Rank, header: LinkHeader, payload: memoryview | None) -> None:
        """For relays: Links.send, watched. Drops the message once the epoch has ended."""
        with self._changed:
            if self.error is None and self.links is not None:
                self._watchdog.sending(target)
                self.links.send(target, header, payload)

    def patience_s(self) -> float | None:
        """Ends the epoch if a peer has owed this rank a sign of life for too long. Else: seconds until that may be so,
        or None when nobody owes anything."""
        if self.error is not None:
            return None
        jobs = [job for job in self.sequencer.jobs if job.error is None]
        waits = [(job.relay.source, job.parked_s) for job in jobs if job.starved and job.relay.source is not None]
        # what was predicted, or, where the machine is slower than that, what was seen here
        turns_s = (max(job.job.layer_s, job.expected_turn_s) for job in jobs)
        due = self._watchdog.first_due(waits, max(turns_s, default=0.0))
        if due is None:
            self._doubted_s = None
            return None
        now_s = self._clock.now_s()
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
        """Asks for patience with what this rank is slow with: while it works, the ranks behind, with its jobs; and all
        ranks, with each job that is announced: the one before it may have sent, the one behind waits already."""
        with self._changed:
            ranks = (Rank(number) for number in range(self.num_ranks) if number != self.rank)
            idle = [rank for rank in ranks if self._watchdog.is_idle(rank)]
            for job in self.sequencer.jobs if has_worked else []:
                if job.error is None and job.relay.target in idle:
                    job.relay.alive()
            for number in [each for each in self._announced if not self._is_known(each)]:
                for rank in idle:
                    self.send(rank, LinkHeader.bare(self.epoch, number, LinkStatus.ALIVE), None)

    def place_for(self, source: Rank, header: LinkHeader) -> memoryview | None:
        with self._changed:
            self._heard(source)
            self._await_job(header.job)
            job = self._job_of(header)
            try:
                return job.relay.place(source, header) if job is not None else None
            except ChainError as error:
                assert job is not None
                job.fail(error)
                self._changed.notify_all()
                return None

    def received(self, source: Rank, header: LinkHeader) -> None:
        with self._changed:
            self._heard(source)
            job = self._job_of(header)
            if job is None:
                if header.status is LinkStatus.ABORT and self.sequencer.get(header.job) is None:
                    self.sequencer.bury(header.job)  # a present one was given up, and will be settled
            elif header.status is LinkStatus.ABORT:
                job.fail(JobAbortedError(f"rank {source} gave job {header.job} up: retry it as a new attempt"))
            elif header.status is LinkStatus.ALIVE:
                if source == job.relay.source:  # others say it of themselves
                    job.relay.alive()
            else:
                job.relay.received(header)

    def sent(self, target: Rank, header: LinkHeader) -> None:
        with self._changed:
            self._watchdog.sent(target)
            self._tally.progress += 1
            job = self.sequencer.get(header.job)
            if job is not None:
                job.relay.sent(header)
            self._changed.notify_all()

    def broken(self, error: ChainError) -> None:
        self.end(error)

    def _heard(self, source: Rank) -> None:
        self._watchdog.heard(source)
        self._tally.progress += 1
        self._changed.notify_all()

    def _await_job(self, number: JobId) -> None:
        """Until it is known what becomes of a job's messages. Whom nobody announces is buried in time.

        An announced job is waited for until it is submitted, its call is over, which ends with its attempt, or the
        epoch ends: dropping its message would fail the attempt, and the group would be blamed for a slow disk. All else
        that the source sends waits as well. No rank takes that for silence: this one says that it lives, and as the
        source takes that in, it shows that it lives too (`tell_waiting`).
        """
        while not self._changed.wait_for(lambda: self._is_known(number) or self.error is not None, self._floor_s / 2):
            if number not in self._announced:
                self.sequencer.bury(number)
                return

    def _is_known(self, number: JobId) -> bool:
        return self.sequencer.get(number) is not None or self.sequencer.is_buried(number)

    def _job_of(self, header: LinkHeader) -> ChainJob | None:
        """The job that a message is for, if it is still wanted."""
        job = self.sequencer.get(header.job) if header.epoch == self.epoch else None
        return job if job is not None and job.error is None else None
