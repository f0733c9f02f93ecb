"""Engine of a prefill rank: one thread runs the turns of the rank's jobs, and resolves each job's future exactly once.

Each step of the thread resolves the futures of jobs that are over, and runs one turn of one job, i.e. computes about
one layer. If no job can run a turn, the step waits for a message, a call, or a watchdog's deadline. Only this thread
computes, calls KvSenders, and resolves futures. All other work is short and runs on other threads: the servicer's calls
register jobs and cancellations, and link threads receive KV and send it on to the next rank
(`prefill_workers.kv_pipeline`). A second thread of the engine checks periodically whether the first still works
(`baton.process.turn_watch`). One lock guards all bookkeeping; no thread computes, sends or receives while holding it.

Called by `prefill_workers.servicer`. Runs the jobs of `prefill_workers.chain` within an epoch of
`prefill_workers.epoch`: the period in which one set of links connects the group's ranks. Does not depend on gRPC: it
uses the interfaces KvSender and Links.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton.errors import (
    BatonError,
    ChainError,
    EpochEndedError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.modeling.device.faults import device_failure
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import OUT_OF_MEMORY, LayerBuffers, MakeBuffer
from baton.process.clock import Clock
from baton.process.crash_notes import ComputedNow
from baton.process.thread_names import show_thread_name
from baton.process.turn_watch import TurnWatch
from baton.types import Epoch, JobId, Rank, TokenRange
from prefill_workers.chain import ChainJob
from prefill_workers.config import PrefillConfig
from prefill_workers.device_room import DeviceRoom
from prefill_workers.epoch import EpochSession
from prefill_workers.job import Job, JobReport, KvSender
from prefill_workers.job_batch import begin_together
from prefill_workers.kv_pipeline import KvPipeline, RankKv
from prefill_workers.links import ConnectLinks
from prefill_workers.watchdog import Watchdog

logger = logging.getLogger(__name__)

MAX_JOBS = 1024
"""Maximum number of unfinished jobs on a rank. Usually there are fewer jobs, because each job holds a lease on a
slot, and there are fewer slots than this."""


@dataclass(frozen=True)
class PrefillEngineStatus:
    """Snapshot of an engine's state, which is sent to the supervisor as a heartbeat."""

    epoch: Epoch
    """Identifier of the current or latest epoch (period with one set of links between the ranks); 0 before the first
    epoch."""
    epoch_error: str
    """Reason why the engine cannot serve jobs now; empty while an epoch is running."""
    num_jobs: int
    progress: int
    """Number of turns that have run, plus the number of messages sent, and of headers and payloads received. A turn is
    the work on about one layer of a job. The supervisor uses this number to detect progress."""
    num_jobs_done: int
    """Number of jobs that have ended, including failed ones."""
    stall: str = ""
    """Reason why the engine is considered hung and this rank must be replaced; empty while the engine works."""


class PrefillEngine:
    """Engine of one rank of a prefill group. All public methods may be called from any thread. Only `start_epoch` and
    `close` block.

    `config.watchdog_floor_s` is a lower bound, in seconds, for two timeouts. The first ends the epoch if a peer neither
    sends nor receives although it should. The second marks this engine as hung if a turn (the work on about one layer
    of a job) makes no progress.

    `make_buffer` allocates the host memory for the jobs' KV; None: the device's own function. If links transfer device
    memory, the KV is allocated on the device instead. `crash_note` is the path of the process's crash note, a file
    that names the request of the current turn and remains if the process crashes; empty: no crash note. Raises
    ConfigError if the weights exceed `config.device_memory_bytes`.
    """

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock,
        config: PrefillConfig,
        *,
        make_buffer: MakeBuffer | None = None,
        crash_note: str = "",
    ) -> None:
        self.decoder = decoder
        self.clock = clock
        self._floor_s = config.watchdog_floor_s
        self._make_buffer = make_buffer or decoder.device.home_buffer
        self._room = DeviceRoom.of(decoder, config.device_memory_bytes)
        decoder.device.bound(self._room.limit_bytes)  # a generation engine in this process may have set another
        self._computed = ComputedNow(crash_note)
        self._has_failed = False
        """True if the device has failed. The engine's thread then ends, so that the worker is replaced."""
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._num_jobs_done = 0
        self._progress = 0
        """Number of turns (the work on about one layer of a job) that have run, plus `EpochSession.num_messages` of all
        epochs before the current one. The session of the current epoch counts its own messages."""
        self._session: EpochSession | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="prefill-engine")
        self._thread.start()  # uses only the lock before the first job, so other fields may be set later
        self._turns = TurnWatch.over(self._thread, clock, self._floor_s)
        self._has_left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="prefill-watch")
        self._watcher.start()

    def start_epoch(self, epoch: Epoch, rank: Rank, num_ranks: int, connect: ConnectLinks) -> None:
        """End the current epoch (period with one set of links between the ranks), and join the epoch `epoch` as rank
        `rank` of `num_ranks` ranks. Blocks until all ranks have joined.

        Raises EpochEndedError if `epoch` is not higher than the last one. Raises UnavailableError if the engine is
        closing or hung. Raises all errors of `connect`, which connects the links. After an error, no epoch is running.
        """
        with self._starting:
            session = self._begin_session(epoch, rank, num_ranks)
            try:
                session.open(connect(session))
            except BaseException as error:
                session.end(error if isinstance(error, BatonError) else ChainError(f"epoch {epoch}: {error!r}"))
                raise

    def end_epoch(self, error: BatonError) -> None:
        """Fail all jobs with `error`, and refuse new jobs until the next `start_epoch`. Does nothing if no epoch is
        running."""
        with self._changed:
            if self._session is not None:
                self._session.end(error)

    @contextmanager
    def expect(self, epoch: Epoch, number: JobId) -> Iterator[None]:
        """Open a context in which the caller prepares the job `number` for `submit`. Other ranks may already send
        messages for this job. While the context is open, these messages wait, and all other ranks are notified that
        they should keep waiting. So the preparation may take any time. Does nothing if `epoch` is not the current
        epoch."""
        with self._changed:
            session = self._session if self._session is not None and self._session.epoch == epoch else None
            if session is not None:
                session.announce(number)
        try:
            yield
        finally:
            if session is not None:
                session.withdraw(number)

    def submit(self, job: Job, kv_sender: KvSender) -> Future[JobReport]:
        """Accept a job, and return a future of its report. The future is resolved when the job's KV has been computed,
        pushed to `kv_sender` and sent to the next rank, or when the job has failed with a BatonError. The future cannot
        be cancelled: call `cancel` instead.

        If the job is not accepted, this call raises an error and does not call `kv_sender`. The error is
        EpochEndedError, JobAbortedError (the job was aborted before it was submitted), InvalidArgumentError or
        ResourceExhaustedError.
        """
        self._check_tokens(job)
        with self._changed:
            session = self._session
            if session is None:
                raise EpochEndedError(f"job {job.number}: no epoch has begun on this rank: start one")
            session.admit(job)
            if len(session.job_scheduler) >= MAX_JOBS:
                raise ResourceExhaustedError(f"{MAX_JOBS} jobs are in flight on rank {session.rank}: retry later")
            chain_job = self._make(job, kv_sender, session)
            session.job_scheduler.add(chain_job)
            self._changed.notify_all()
        if job.masks is not None:
            job.masks.add_done_callback(self._wake)
        return chain_job.future

    def cancel(self, number: JobId, error: BatonError | None = None) -> None:
        """Abort the job `number` if it is unfinished. Its future soon fails with `error` (default:
        RequestCancelledError), unless the job is already over. Later ranks of the chain are notified by a message on
        the links."""
        with self._changed:
            job = self._session.job_scheduler.get(number) if self._session is not None else None
            if job is not None:
                job.fail(error or RequestCancelledError(f"job {number} was cancelled"))
                self._changed.notify_all()

    def status(self) -> PrefillEngineStatus:
        """Return a snapshot of the engine's epoch, jobs and progress."""
        with self._changed:
            session = self._session
            if session is None:
                return PrefillEngineStatus(Epoch(0), "no epoch has begun", 0, 0, 0)
            error = str(session.error or "") if session.links or session.error else "the ranks are meeting"
            progress, num_jobs = self._progress + session.num_messages, len(session.job_scheduler)
            return PrefillEngineStatus(session.epoch, error, num_jobs, progress, self._num_jobs_done, self._stall)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the epoch, and stop both threads. Waits at most `timeout_s` seconds for other ranks to close their links.
        Idempotent."""
        with self._changed:
            self._closing = True
            self.end_epoch(UnavailableError("this prefill rank is leaving: use another"))
            self._changed.notify_all()
        self._thread.join()
        self._has_left.set()
        self._watcher.join()
        self.decoder.device.link.rest()
        if self._session is not None and self._session.links is not None:
            self._session.links.wait_closed(timeout_s)

    @property
    def rank(self) -> Rank | None:
        """Return this rank's number in the current epoch's group; None before the first epoch."""
        with self._changed:
            return self._session.rank if self._session is not None else None

    @property
    def _stall(self) -> str:
        if not self._thread.is_alive() and not self._closing:
            return "the engine's thread has ended, see its log"
        return self._turns.stall

    def _wake(self, _: object) -> None:
        """Wake the engine's thread to look for a job that can continue. Any thread."""
        with self._changed:
            self._changed.notify_all()

    def _begin_session(self, epoch: Epoch, rank: Rank, num_ranks: int) -> EpochSession:
        with self._changed:
            last = self._session
            if last is not None and epoch <= last.epoch:
                raise EpochEndedError(f"epoch {epoch} is not above {last.epoch}, the last: use a higher number")
            if last is not None:
                last.end(EpochEndedError(f"epoch {last.epoch} is over: epoch {epoch} begins"))
                self._changed.wait_for(lambda: not len(last.job_scheduler) or self._stall)
            if self._stall:
                raise UnavailableError(f"this prefill rank hangs ({self._stall}): replace it")
            if self._closing:
                raise UnavailableError("this prefill rank is leaving: use another")
            if last is not None:
                self._progress += last.num_messages
            watchdog = Watchdog(self.clock, self._floor_s)
            session = self._session = EpochSession(epoch, rank, num_ranks, watchdog, self._changed)
            return session

    def _check_tokens(self, job: Job) -> None:
        config = self.decoder.config
        num_tokens = job.chunks[-1].end
        if num_tokens > config.max_position:
            raise InvalidArgumentError(f"prompt of {num_tokens} tokens: the model takes at most {config.max_position}")
        highest = max(job.token_ids)
        if highest >= config.vocab_size:
            raise InvalidArgumentError(f"token id {highest}: the model knows ids below {config.vocab_size}")

    def _make(self, job: Job, kv_sender: KvSender, session: EpochSession) -> ChainJob:
        layout, own = self.decoder.layout, job.chunks[job.ranks.index(session.rank)]
        is_linked = session.links is not None and session.links.on_device
        make_buffer = self.decoder.device.buffer if is_linked else self._make_buffer
        # Memory for staged KV is allocated on the engine's thread, because the caller must not wait until it is pinned.
        is_staged = not (is_linked or self.decoder.device.is_home)
        self._room.promise(job, own, num_layers=layout.num_layers if is_linked else 1)
        try:
            own_kv = LayerBuffers(layout, own, make_buffer) if is_staged else make_buffer(layout, own)
        except OUT_OF_MEMORY as error:
            self._room.give_back(job.number)
            raise ResourceExhaustedError(f"job {job.number}: no memory for {len(own)} tokens: retry later") from error
        earlier_kv = LayerBuffers(layout, TokenRange(job.cached.end, own.start), make_buffer)
        kv = RankKv(job, session.rank, own_kv, earlier_kv, is_linked)
        pipeline = KvPipeline(kv, clock=self.clock, lock=self._changed, send=session.send)
        chain_job = ChainJob(kv_sender, pipeline, decoder=self.decoder, clock=self.clock)
        chain_job.future.set_running_or_notify_cancel()
        return chain_job

    def _serve(self) -> None:
        """Run steps until the engine closes, as the engine thread's main function."""
        show_thread_name()
        try:
            with torch.inference_mode():
                while self._step():
                    pass
        finally:
            with self._changed:
                self._turns.end()

    def _step(self) -> bool:
        """Resolve the futures of jobs that are over, and run a turn or wait for a change. Return False if the engine is
        closed and has no jobs, or if its device has failed."""
        with self._changed:
            session = self._session
            patience_s = session.patience_s() if session is not None else None
            over = session.job_scheduler.take_over() if session is not None else []
            job = session.job_scheduler.next_runnable() if session is not None else None
            if session is not None and job is not None:
                begin_together(job, session.job_scheduler, self.decoder, self.clock)
            if not over and job is None and not self._has_failed:
                if self._closing:
                    return False
                self._changed.wait(patience_s)
        for ended in over:
            self._settle(ended)
        if self._has_failed:
            return bool(over)
        if job is not None:
            self._turn(job)
        return True

    def _watch(self) -> None:
        """Check periodically whether the engine's thread still works, as the watching thread's main function."""
        while not self._has_left.wait(self._turns.period_s):
            with self._changed:
                has_worked = self._turns.look()
                if self._stall:
                    self._changed.notify_all()  # `_begin_session` does not wait for a thread that hangs
                elif self._session is not None:
                    self._session.tell_waiting(has_worked)

    def _turn(self, job: ChainJob) -> None:
        error: BatonError | None = None
        jobs = list(job.together)
        with self._changed:
            longest_s = max(max(each.job.layer_s, each.slowest_turn_s) for each in jobs)
            self._turns.begin(f"job {job.job.number}", longest_s)
        try:
            self._computed.set(tuple(each.job.fingerprint for each in jobs))
            job.turn()
        except BatonError as refused:
            error = refused.with_traceback(None)  # the traceback would hold the job's memory
        except CancelledError:  # of its token masks
            error = RequestCancelledError(f"job {job.job.number} was cancelled")
        except Exception as failure:
            if text := device_failure(failure):
                logger.error("the device of the prefill engine failed: %s", text)
                self._has_failed = True
                self.end_epoch(ChainError(f"the device of this rank has failed ({text})"))
            else:
                logger.exception("job %d failed in its turn", job.job.number)
            error = ChainError(f"job {job.job.number} failed in its turn ({failure!r}): see this rank's log")
            error.__cause__ = failure.with_traceback(None)
        finally:
            self._computed.set(())
        with self._changed:
            self._turns.end()
            self._progress += 1
            if error is not None:
                job.fail(error)
                for each in jobs:  # no effect on `job`, which has failed already
                    each.fail(
                        ChainError(f"job {each.job.number} was computed together with a job that failed: {error}")
                    )

    def _settle(self, job: ChainJob) -> None:
        """End a job that is over, and resolve its future. No other method resolves it."""
        try:
            job.close()
        except RuntimeError as error:
            if not device_failure(error):
                raise
            self._has_failed = True  # copies of the job cannot be waited for, and the process ends
            job.fail(ChainError(f"job {job.job.number}: the device of this rank has failed"))
        with self._changed:
            self._room.give_back(job.job.number)
            self._num_jobs_done += 1
            self._changed.notify_all()  # `_begin_session` waits for the last of an epoch's jobs
        if job.error is None:
            job.future.set_result(job.report())
            return
        job.pipeline.abort()
        try:
            job.kv_sender.abort(job.error)
        except Exception:
            logger.exception("the sender of job %d failed to abort", job.job.number)
        job.future.set_exception(job.error)
