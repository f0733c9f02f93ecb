"""Runs each request from its arrival to its end: the queue, the attempts, and the stream of events.

Called by `orchestrator.api.frontend`, which serves it over gRPC, and by `deploy.commands.session` (`baton local`)
without gRPC. Each request has its own task, which writes the events of its stream. A client that reads slowly or
disconnects does not delay the task. The deadline is enforced in any case. Runs on the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidArgumentError,
    LeaseError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
)
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.process.endless import repeat
from baton.process.request_log import SERVED_REQUEST
from baton.types import FinishReason, TokenEvent
from orchestrator.actuation.fleet import LiveFleet
from orchestrator.admission.forecast import ChainForecast
from orchestrator.admission.gate import Admission, Entry
from orchestrator.admission.undelivered import Outbox, Outboxes
from orchestrator.dispatch.attempt import AttemptRunner
from orchestrator.dispatch.suspects import Suspects
from orchestrator.dispatch.token_streams import Emit
from orchestrator.membership.breakers import RetryBudget, tells_of_the_group
from orchestrator.membership.members import Membership
from orchestrator.observability.journal import Journal
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Event, Finished, RequestRecord, Started
from orchestrator.requests.request import Request
from orchestrator.requests.states import RequestMove
from orchestrator.requests.tenants import DEFAULT_TENANT

logger = logging.getLogger(__name__)

_FOLLOWING_PAUSES = Backoff(0.1, 5.0)
_CLOSING = "the orchestrator is shutting down: try again"


@dataclass(frozen=True)
class _Run:
    """State of one accepted request, until the request ends."""

    record: RequestRecord
    entry: Entry
    """Entry of the request in the admission gate. The request first waits in the queue, then counts as running."""
    predicted_s: float | None
    """Time to the first token in seconds, predicted when the request arrived; None for a resumed stream."""
    outbox: Outbox
    """Buffer of events that are to be sent on the request's stream."""


@dataclass(kw_only=True, eq=False)
class RequestScheduler:
    """Accepts requests, queues them, and runs them. Owns the queue and all running requests.

    Built by `orchestrator.composition`. Call `start` once, `generate` for each request, and `close` at the end.
    """

    config: OrchestratorConfig
    clock: Clock
    members: Membership
    admission: Admission
    attempt_runner: AttemptRunner
    suspects: Suspects
    forecast: ChainForecast
    budget: RetryBudget
    fleet: LiveFleet
    """Component that records the arrivals and the ends of requests for the autoscaler."""
    journal: Journal
    _outboxes: Outboxes = field(init=False, default_factory=Outboxes)
    _following: asyncio.Task[NoReturn] | None = field(init=False, default=None)
    _tasks: set[asyncio.Task[Finished]] = field(init=False, default_factory=set)
    _closing: bool = field(init=False, default=False)

    def start(self) -> None:
        """Start to adapt the limit of running requests to the number of slots of all groups. Call it once, on the event
        loop."""
        self._resize()
        self._following = asyncio.create_task(repeat("following the groups' slots", self._follow, _FOLLOWING_PAUSES))

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait `grace_s` seconds for running requests, then end the remaining ones with
        UnavailableError.

        Frees the slots and streams of all attempts. Idempotent.
        """
        self._closing = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await _cancel(*self._tasks)
        if self._following is not None:
            await _cancel(self._following)
        await self.attempt_runner.close()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run one request, and yield the events of its stream: Started, then tokens, then Finished.

        If the caller closes the generator, the request is cancelled, also on the workers. The following errors are
        raised before Started. Every later failure is reported in Finished.

        - InvalidArgumentError: the request has more choices than any group has slots, or it requires exact attention
          and all groups are approximate.
        - ResourceExhaustedError: the queue is full, or the deadline cannot be met.
        - UnavailableError: the scheduler is closing.
        """
        if self._closing:
            raise UnavailableError(_CLOSING)
        self._check_choices(request.num_slots)
        request = request.with_a_token()
        request = replace(request, exact=self._check_exact(request.exact), prefix_salt=self._salt(request))
        record = RequestRecord.of(request, self.clock.unix_ns())
        started = Started(request.request_id, len(request.prompt_ids), request.params.seed, request.exact)
        first: tuple[Event, ...] = (started, *record.end_known(record.received_ns))
        if record.is_complete:
            for event in (*first, record.finish(self.clock.unix_ns())):
                yield event
            return
        run = self._join(record, give_up=lambda: task.cancel())
        SERVED_REQUEST.set(request.request_id)
        task = asyncio.create_task(self._complete(run))
        for event in first:
            run.outbox.put(event)
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, run))
        try:
            finished = False
            while not finished:
                event = await run.outbox.take()
                finished = isinstance(event, Finished)
                yield event
        finally:
            run.outbox.close()
            await _cancel(task)

    def _join(self, record: RequestRecord, give_up: Callable[[], object]) -> _Run:
        """Put the request into the queue. `give_up` is a function that cancels the request.

        A resumed stream gets no prediction and so is never refused because of one: it has already had its first token.
        """
        predicted_s = None if record.request.is_resumed else self.forecast.predict_s(record)
        try:
            entry = self.admission.join(
                record.request, None if predicted_s is None else self.forecast.cautious_s(predicted_s)
            )
        except BatonError as error:
            self.journal.metrics.refused(error)
            raise
        self.budget.earn()
        self.fleet.arrived(record)
        self.journal.book.opened(record)
        return _Run(record, entry, predicted_s, self._outboxes.open(record.request.tenant, give_up))

    def _check_choices(self, num_choices: int) -> None:
        """Raise InvalidArgumentError if the request has more choices than any generation group has slots, because all
        choices of a request run on the same group."""
        most = max((group.num_slots for group in self.members.view.generation), default=num_choices)
        if num_choices > most:
            raise InvalidArgumentError(f"sampling.n = {num_choices} is out of range: a group here has {most} slots")

    def _emit(self, run: _Run, event: TokenEvent) -> None:
        echo = run.record.request.echo
        if event.token is not None:
            run.record.see_token(self.clock.now_s())
            if not run.record.request.has_output:
                event = replace(event, token=None, text="", finish=FinishReason.LENGTH)
            if echo and event.index == 0:
                event = replace(event, text=echo + event.text)
        run.outbox.put(event)

    def _salt(self, request: Request) -> str:
        """Return the salt that separates the cached blocks of the request's prompt from the blocks of other requests.

        It consists of the tenant's name, if tenants are isolated, and of the client's own salt. The default tenant's
        name is left out, so that isolation does not invalidate the cached prompts of a cluster without tenants.
        """
        is_apart = self.config.prefix_isolation and request.tenant.name != DEFAULT_TENANT.name
        tenant = request.tenant.name if is_apart else ""
        return f"{tenant}\0{request.prefix_salt}" if request.prefix_salt else tenant

    def _check_exact(self, wanted: bool) -> bool:
        """Return True if all tokens of the request will be exact, i.e. made with attention to all earlier tokens.

        Raises InvalidArgumentError if the client requires exact tokens and all groups are approximate. The result is
        reported in Started and holds until the request ends. So if no group is approximate now, an approximate group
        that joins later must not serve the request.
        """
        groups = self.members.present.generation  # drained groups too: they may be undrained, or still keep a stream
        if wanted and groups and all(group.is_approximate for group in groups):
            policies = ", ".join(sorted({group.residency for group in groups}))
            raise InvalidArgumentError(
                f"exact is not available: all generation groups here are approximate (residency {policies}); leave it "
                "out, or use a cluster whose generate.residency is device or host"
            )
        return wanted or (bool(groups) and not any(group.is_approximate for group in groups))

    async def _follow(self) -> None:
        changed = self.members.view_changed
        self._resize()
        await changed.wait()

    def _resize(self) -> None:
        num_slots = self.members.view.num_slots
        self.admission.resize(num_slots, is_asleep=self.members.is_asleep("generate"))
        self.budget.resize(num_slots)

    async def _complete(self, run: _Run) -> Finished:
        """Run the request to its end and return its last event. All errors except cancellation are reported in that
        event."""
        record, emit, deadline_s = run.record, partial(self._emit, run), run.record.request.deadline_s
        left_s = None if deadline_s is None else deadline_s - self.clock.now_s()
        reason: FinishReason | None = None
        error: BatonError | None = None
        try:
            async with asyncio.timeout(left_s):
                await run.entry.admitted()
                record.admit(self.clock)
                await self._attempts(record, emit, record.request.is_resumed)
        except TimeoutError:
            if not record.is_complete:  # a complete request has only waited for the ranks' timings
                made = f"its deadline passed after {record.num_output_tokens} output tokens"
                error = DeadlineExceededError(f"request {record.request_id}: {made}")
                for event in record.end_open(FinishReason.DEADLINE, self.clock.unix_ns()):
                    emit(event)
        except BatonError as failure:
            reason, error = FinishReason.ERROR, failure
        except Exception:
            logger.exception("failed request=%s", record.request_id)
            bug = f"request {record.request_id} failed in the orchestrator: its log has the traceback"
            reason, error = FinishReason.ERROR, BatonError(bug)
        return record.finish(self.clock.unix_ns(), reason, error)

    def _settle(self, run: _Run, task: asyncio.Task[Finished]) -> None:
        """Release the request's entry in the queue and emit Finished as the last event, even if the task was cancelled
        before it started."""
        record = run.record
        self._tasks.discard(task)
        self.admission.leave(run.entry)
        finished = self._interrupted(run) if task.cancelled() else task.result()
        run.outbox.put(finished)  # first: the client's stream must end even if a later line fails
        self.fleet.ended(record)
        if run.predicted_s is not None:
            self.forecast.ended(record, run.predicted_s, self.clock.now_s())
        self.journal.ended(record, finished)

    def _interrupted(self, run: _Run) -> Finished:
        """Return the last event of a request that was cancelled by its client, by its outbox or by `close`. Its last
        token may have been emitted before."""
        record, refusal = run.record, run.outbox.refusal
        if record.is_complete:
            return record.finish(self.clock.unix_ns())
        if refusal is not None:
            return record.finish(self.clock.unix_ns(), FinishReason.ERROR, refusal)
        if self._closing:
            return record.finish(self.clock.unix_ns(), FinishReason.ERROR, UnavailableError(_CLOSING))
        gone = RequestCancelledError(f"request {record.request_id} was cancelled")
        return record.finish(self.clock.unix_ns(), FinishReason.CANCELLED, gone)

    async def _attempts(self, record: RequestRecord, emit: Emit, may_be_kept: bool) -> None:
        """Make attempts until one succeeds. Each attempt continues after the tokens of the earlier attempts. Raises the
        last attempt's error.

        `may_be_kept` is True if a generation group may still run the stream that an earlier orchestrator had opened. A
        LeaseError is retried too, because every attempt gets a new lease.
        """
        if may_be_kept and await self._taken_over(record, emit):
            return
        while True:
            if record.is_apart:
                await self._branch(record, emit, may_be_kept)
                return
            num_before = record.num_output_tokens
            try:
                async with self.suspects.trial(record, emit) as watched:
                    await self.attempt_runner.attempt(record, watched)
                return
            except BatonError as error:
                self._note_failure(record, error)
                may_succeed = error.retryable or isinstance(error, LeaseError)
                if may_succeed:  # also after the last attempt: the client may send the request again
                    await self.suspects.judge(record, num_before)
                if not may_succeed or record.attempt.number >= self.config.max_attempts:
                    raise
                pause_s = self.budget.take(self.config.generation_wait_s)
                if pause_s is None:
                    logger.warning("too many retries: request=%s gets none", record.request_id)
                    raise
            record.retry()
            await asyncio.sleep(pause_s)

    async def _taken_over(self, record: RequestRecord, emit: Emit) -> bool:
        """Take over the request's stream from the generation group that kept it, and run it to its end. Return False if
        no group has kept it or if it fails."""
        try:
            await self.attempt_runner.take_over(record, emit)
        except NotFoundError as error:
            logger.info("resumed again request=%s: %s", record.request_id, error)
            return False
        except BatonError as error:
            self._note_failure(record, error)
            record.retry()
            return False
        return True

    def _note_failure(self, record: RequestRecord, error: BatonError) -> None:
        """Report a failed attempt to the log, the metrics and the group's circuit breaker, before the next attempt is
        placed."""
        self.journal.failed(record, error)
        self.members.failed(record.attempt.blamed if tells_of_the_group(error) else None)

    async def _branch(self, record: RequestRecord, emit: Emit, may_be_kept: bool) -> None:
        """Retry each choice that has not ended as a separate request, in its own task."""
        branches = record.branches()
        tasks = [asyncio.create_task(self._attempts(branch, emit, may_be_kept)) for branch in branches]
        for branch, task in zip(branches, tasks, strict=True):
            task.add_done_callback(partial(_end, branch))
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel(*tasks)
            record.merge(branches)


def _end(branch: RequestRecord, task: asyncio.Task[None]) -> None:
    """Advance a branch's record to its final state after its task has ended for any reason, so that it no longer counts
    as running."""
    branch.advance(RequestMove.FINISH)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until all of them have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
