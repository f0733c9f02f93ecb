"""A prefill rank's engine: one thread that gives the rank's jobs their turns, and settles each exactly once.

A step is: settle what is over, give one job one turn, or, when none can use it, wait until a message, a call, or a
watchdog's deadline changes that. Everything else happens on other threads and is short: the servicer's calls register
jobs and cancels, link threads receive, and pass on what is ready (relay.py). They only mark; the engine's thread alone
computes, calls outlets, and resolves futures. One lock guards all bookkeeping; nobody computes, sends or receives while
holding it.

Steps 4 to 6 of a request's way (DESIGN.md, section 4). Knows no gRPC: it sees the ports KvOutlet and Links.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from baton.clock import Clock
from baton.errors import (
    BatonError,
    ChainError,
    EpochEndedError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.ids import Epoch, JobId, Rank
from baton.types import KvLayout, TokenRange
from modeling.decoder import Decoder
from modeling.kv_buffers import KvBuffer
from prefill_workers.chain import ChainJob
from prefill_workers.epoch import EpochLife, Tally
from prefill_workers.job import Job, JobReport, KvOutlet
from prefill_workers.links import ConnectLinks
from prefill_workers.relay import Relay

logger = logging.getLogger(__name__)

MakeBuffer = Callable[[KvLayout, TokenRange], KvBuffer]


@dataclass(frozen=True)
class EngineStatus:
    """What the supervisor's heartbeat reads."""

    epoch: Epoch
    """0 before the first."""
    epoch_error: str
    """Why no job can be served; empty while the epoch lives."""
    num_jobs: int
    progress: int
    """Grows with every turn taken and every message passed."""
    num_jobs_done: int
    """Jobs settled, in success or failure."""


class PrefillEngine:
    """One rank of a prefill group. All public methods may be called from any thread; only `start_epoch` and `close`
    block. `watchdog_floor_s`: seconds without a sign of life from a peer that owes one before the epoch is ended, at
    least. `max_jobs`: jobs in flight before more are refused. `make_buffer`: where the jobs' KV lies meanwhile."""

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock,
        *,
        watchdog_floor_s: float = 2.0,
        max_jobs: int = 64,
        make_buffer: MakeBuffer = KvBuffer,
    ) -> None:
        self.decoder = decoder
        self._clock = clock
        self._floor_s = watchdog_floor_s
        self._max_jobs = max_jobs
        self._make_buffer = make_buffer
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._tally = Tally()
        self._life: EpochLife | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="prefill-engine")
        self._thread.start()

    def start_epoch(self, epoch: Epoch, rank: Rank, num_ranks: int, connect: ConnectLinks) -> None:
        """Ends the present epoch and joins the next, as `rank` of `num_ranks`. Blocks until all ranks have met.

        Raises EpochEndedError for an epoch that is not above the last, UnavailableError while closing, and what
        `connect` raises; no epoch lives then.
        """
        with self._starting:
            life = self._begin_life(epoch, rank, num_ranks)
            try:
                life.open(connect(life))
            except BaseException as error:
                life.end(error if isinstance(error, BatonError) else ChainError(f"epoch {epoch}: {error!r}"))
                raise

    def end_epoch(self, error: BatonError) -> None:
        """Fails all jobs with `error`; serves none until the next `start_epoch`. Harmless when none lives."""
        with self._changed:
            if self._life is not None:
                self._life.end(error)

    def submit(self, job: Job, outlet: KvOutlet) -> Future[JobReport]:
        """Takes a job. The future resolves, on the engine's thread, when all is computed, pushed to `outlet` and passed
        on, or with a BatonError; it cannot be cancelled, `cancel` is for that.

        Raises at once, and leaves `outlet` alone: EpochEndedError, JobAbortedError (the job was given up before it
        came), InvalidArgumentError, ResourceExhaustedError.
        """
        self._check_tokens(job)
        with self._changed:
            life = self._life
            if life is None:
                raise EpochEndedError(f"job {job.number}: no epoch has begun on this rank: start one")
            life.admit(job)
            if len(life.sequencer) >= self._max_jobs:
                raise ResourceExhaustedError(f"{self._max_jobs} jobs are in flight on rank {life.rank}: retry later")
            chain_job = self._make(job, outlet, life)
            life.sequencer.add(chain_job)
            self._changed.notify_all()
            return chain_job.future

    def cancel(self, number: JobId, error: BatonError | None = None) -> None:
        """Gives a job up: its future fails, soon, with `error`, by default RequestCancelledError, unless it was over.
        The ranks behind are told in band. A number that is not in flight is ignored."""
        with self._changed:
            job = self._life.sequencer.get(number) if self._life is not None else None
            if job is not None:
                job.fail(error or RequestCancelledError(f"job {number} was cancelled"))
                self._changed.notify_all()

    def status(self) -> EngineStatus:
        """A snapshot."""
        with self._changed:
            life = self._life
            if life is None:
                return EngineStatus(Epoch(0), "no epoch has begun", 0, 0, 0)
            error = str(life.error or "") if life.links or life.error else "the ranks are meeting"
            tally = self._tally
            return EngineStatus(life.epoch, error, len(life.sequencer), tally.progress, tally.num_jobs_done)

    def close(self, timeout_s: float = 1.0) -> None:
        """Ends the epoch and the thread; waits up to `timeout_s` seconds for peers to close their links as well. May
        be called again."""
        with self._changed:
            self._closing = True
            self.end_epoch(UnavailableError("this prefill rank is leaving: use another"))
            self._changed.notify_all()
        self._thread.join()
        if self._life is not None and self._life.links is not None:
            self._life.links.wait_closed(timeout_s)

    def _begin_life(self, epoch: Epoch, rank: Rank, num_ranks: int) -> EpochLife:
        with self._changed:
            last = self._life
            if last is not None and epoch <= last.epoch:
                raise EpochEndedError(f"epoch {epoch} is not above {last.epoch}, the last: use a higher number")
            if last is not None:
                last.end(EpochEndedError(f"epoch {last.epoch} is over: epoch {epoch} begins"))
                self._changed.wait_for(lambda: not len(last.sequencer))
            if self._closing:
                raise UnavailableError("this prefill rank is leaving: use another")
            life = EpochLife(
                epoch,
                rank,
                num_ranks,
                lock=self._changed,
                clock=self._clock,
                floor_s=self._floor_s,
                tally=self._tally,
            )
            self._life = life
            return life

    def _check_tokens(self, job: Job) -> None:
        config = self.decoder.config
        num_tokens = job.chunks[-1].end
        if num_tokens > config.max_position:
            raise InvalidArgumentError(f"prompt of {num_tokens} tokens: the model takes at most {config.max_position}")
        highest = max(job.token_ids)
        if highest >= config.vocab_size:
            raise InvalidArgumentError(f"token id {highest}: the model knows ids below {config.vocab_size}")

    def _make(self, job: Job, outlet: KvOutlet, life: EpochLife) -> ChainJob:
        tokens = TokenRange(job.cached.end, job.chunks[job.ranks.index(life.rank)].end)
        try:
            buffer = self._make_buffer(self.decoder.layout, tokens)
        except RuntimeError as error:  # what torch raises when memory is short
            raise ResourceExhaustedError(
                f"job {job.number}: no memory for {len(tokens)} tokens: retry later"
            ) from error
        relay = Relay(job, life.rank, buffer, clock=self._clock, lock=self._changed, send=life.send)
        chain_job = ChainJob(job, outlet, relay, buffer=buffer, decoder=self.decoder, clock=self._clock)
        chain_job.future.set_running_or_notify_cancel()
        return chain_job

    def _serve(self) -> None:
        """The thread's life."""
        with torch.inference_mode():
            while self._step():
                pass

    def _step(self) -> bool:
        """Settles what is over, or gives one job a turn, or waits for a change. False: there is nothing more to do."""
        with self._changed:
            life = self._life
            patience_s = life.patience_s() if life is not None else None
            over = life.sequencer.take_over() if life is not None else []
            job = life.sequencer.next_runnable() if life is not None else None
            if not over and job is None:
                if self._closing:
                    return False
                self._changed.wait(patience_s)
        for ended in over:
            self._settle(ended)
        if life is not None and job is not None:
            self._turn(job)
            life.tell_waiting(busy_with=job)
        return True

    def _turn(self, job: ChainJob) -> None:
        error: BatonError | None = None
        try:
            job.turn()
        except BatonError as refused:
            error = refused.with_traceback(None)  # which would hold the job's memory
        except Exception as failure:
            logger.exception("job %d failed in its turn", job.job.number)
            error = ChainError(f"job {job.job.number} failed in its turn ({failure!r}): see this rank's log")
            error.__cause__ = failure.with_traceback(None)
        with self._changed:
            self._tally.progress += 1
            if error is not None:
                job.fail(error)

    def _settle(self, job: ChainJob) -> None:
        """The end of a job that is over: its future resolves here and nowhere else."""
        job.close()
        with self._changed:
            self._tally.num_jobs_done += 1
            self._changed.notify_all()  # `_begin_life` waits for the last of an epoch's jobs
        if job.error is None:
            job.future.set_result(job.report())
            return
        job.relay.abort()
        try:
            job.outlet.abort(job.error)
        except Exception:
            logger.exception("the outlet of job %d failed to abort", job.job.number)
        job.future.set_exception(job.error)
