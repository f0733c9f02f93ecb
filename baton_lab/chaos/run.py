"""Runs a chaos schedule against a cluster through the client library, and reports violated conditions.

Every request must end exactly once, within its time limit, and with the same tokens as in a run without faults. After
the last request, the cluster must have released all slots, KV memory and jobs. Runs on the cluster's event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.calls.cluster_state import ClusterState, GenerationStatus
from baton.calls.resume import Reconnect
from baton.calls.streams import AsyncStream
from baton.client import AsyncClient
from baton.errors import BatonError, DeadlineExceededError, UnavailableError
from baton.process.clock import Clock
from baton.types import SampledToken, TokenEvent
from baton_lab.chaos.cluster import ChaosCluster
from baton_lab.chaos.engine_faults import EngineTrials
from baton_lab.chaos.report import Answer, Outcome, Report, outcome_of
from baton_lab.chaos.schedule import Act, Ask, Blow, Schedule
from orchestrator.workers.worker_poller import FRESH_S

_RECONNECT = Reconnect(num_connects=120, num_resumes=120, max_delay_s=0.5)
"""Reconnection settings of the clients. They retry for 45 s in total. This is longer than an orchestrator takes to
start on a busy machine, and shorter than `Bounds.request_s`."""
_LOOK_S = 0.05
"""Seconds between two checks for slots, KV memory and jobs that the cluster still holds."""
_STATE_S = 2.0
"""Timeout in seconds for a query of the cluster's state."""
_WATCH_S = 0.25
"""Seconds between two checks that the slot counts and the byte counts of each group are consistent."""
_FAILED_PART = 0.25
"""Maximum fraction of requests that may end with a retryable error."""

Judge = Callable[[Ask, int, Sequence[SampledToken]], str]
"""Function that checks the tokens of a choice, which may be incomplete. It returns a description of the first wrong
token, or an empty string if all are right. Its arguments are the request, the index of the choice, and the tokens."""


@dataclass(frozen=True)
class Bounds:
    """Time limits in seconds for requests and for the recovery of the cluster."""

    request_s: float = 60.0
    """Maximum duration of a request without a deadline, in seconds. Also the maximum time from the end of a hung worker
    until its replacement serves."""
    late_s: float = 5.0
    """Maximum time in seconds from a request's deadline to the request's end. It is above 0 to allow for delays on a
    busy machine."""
    settle_s: float = 10.0
    """Maximum time in seconds from the end of the last request until all workers serve and the cluster has released all
    slots, KV memory and jobs."""


class ChaosRun:
    """One run of one schedule. `run` may be called only once."""

    def __init__(
        self,
        cluster: ChaosCluster,
        schedule: Schedule,
        clock: Clock,
        *,
        bounds: Bounds = Bounds(),
        on_end: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        """Prepare one run of a schedule. `on_end` is called with the answer of each request when the request ends."""
        self._cluster, self._schedule, self._clock = cluster, schedule, clock
        self._bounds, self._on_end = bounds, on_end
        self._due = list(schedule.blows)
        self._trials = EngineTrials(cluster, clock, late_s=bounds.late_s, start_s=bounds.request_s)
        self._trying: set[asyncio.Task[None]] = set()
        """Running tasks that each inject one engine fault."""
        self._num_tokens = 0
        self._report = Report(schedule)

    async def run(self, judge: Judge) -> Report:
        """Run the schedule, wait until the cluster holds no resource of its requests, and return the report. A process
        fault is skipped if the clients never receive the number of tokens at which it is due."""
        began_s, faults = self._clock.now_s(), self._cluster.faults
        async with AsyncClient(self._cluster.endpoint, reconnect=_RECONNECT) as client:
            faults.begin(self._schedule.seed, self._schedule.rate)
            over = asyncio.Event()
            watching = asyncio.create_task(self._watch_books(client, over))
            try:
                async with asyncio.TaskGroup() as group:
                    asking = [group.create_task(self._ask(client, ask)) for ask in self._schedule.asks]
                await self._keep_busy(client)
            finally:
                faults.end()
                over.set()
                for task in self._trying:
                    task.cancel()
                await asyncio.gather(*self._trying, return_exceptions=True)
                await watching
            self._report.answers += [task.result() for task in asking]
            await self._settle(client)
        self._report.num_calls_struck = faults.struck.total()
        self._report.took_s = self._clock.now_s() - began_s
        await asyncio.to_thread(self._judge, judge)
        return self._report

    async def _ask(self, client: AsyncClient, ask: Ask, *, is_again: bool = False) -> Answer:
        """Send one request and return its outcome, also if the request fails."""
        stream = client.generate(token_ids=ask.prompt_ids, params=ask.params, deadline_s=ask.deadline_s)
        bound_s = self._bounds.request_s if ask.deadline_s is None else ask.deadline_s + self._bounds.late_s
        watch = Watch(stream, ask)
        outcome, ended_with = Outcome.ANSWERED, ""
        try:
            async with asyncio.timeout(bound_s):
                async for event in stream:
                    watch.take(event)
                    self._count(event)
        except TimeoutError:
            outcome, ended_with = Outcome.WRONG, f"has not ended after {bound_s:.1f} s"
        except BatonError as error:
            outcome, ended_with = outcome_of(error, ask), f"{type(error).__name__}: {error}"
        finally:
            watch.close()
        if outcome is Outcome.ANSWERED and watch.num_running:
            outcome, ended_with = Outcome.WRONG, "ended without its last event"
        complaints = [*watch.complaints, *([ended_with] if outcome is Outcome.WRONG else [])]
        answer = Answer(ask, outcome, stream.output, ended_with, tuple(complaints))
        if not is_again:
            self._on_end(answer)
        return answer

    async def _watch_books(self, client: AsyncClient, over: asyncio.Event) -> None:
        """Check that the slot counts and the byte counts of each group are consistent, until `over` is set. Checks
        without an answer are skipped."""
        while not over.is_set():
            with contextlib.suppress(BatonError):  # hit by a fault, or no orchestrator: the next round tries again
                amiss = set(imbalances(await client.cluster_state(_STATE_S)))
                self._report.complaints += sorted(amiss - set(self._report.complaints))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _WATCH_S)

    def _count(self, event: TokenEvent) -> None:
        """Count an event's token, and inject the process faults that are due."""
        self._num_tokens += event.token is not None
        while self._due and self._due[0].after_tokens <= self._num_tokens:
            blow = self._due.pop(0)
            if blow.act in (Act.HANG, Act.SLOW):
                self._trying.add(asyncio.create_task(self._try(blow)))
            else:
                self._report.blows.append((blow, self._cluster.strike(blow)))

    async def _try(self, blow: Blow) -> None:
        """Inject an engine fault, and add its outcome to the report."""
        trial = await (self._trials.hang if blow.act is Act.HANG else self._trials.slow)(blow.victim)
        self._report.blows.append((blow, trial.happened))
        self._report.notes.append(trial.note)
        self._report.complaints += [] if trial.holds else [trial.note]

    async def _keep_busy(self, client: AsyncClient) -> None:
        """Resend the schedule's requests, without deadlines and cancellations, until all engine faults are over."""
        while any(not task.done() for task in self._trying):
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(self._ask(client, ask, is_again=True)) for ask in self._schedule.calm.asks]
            self._report.answers += [task.result() for task in asking]
        await asyncio.gather(*self._trying)

    async def _settle(self, client: AsyncClient) -> None:
        """Wait until all workers serve and no resource is held. Report a violation if this exceeds the limit."""
        began_s, bound_s = self._clock.now_s(), self._bounds.settle_s
        try:
            await self._cluster.until_ready(bound_s)
        except UnavailableError as error:
            self._report.complaints.append(str(error))
        waited_s = 0.0
        while (held := await self._held(client)) or waited_s < FRESH_S:  # the state is up to FRESH_S old
            if held and waited_s > bound_s:
                self._report.complaints.append(f"still held after {bound_s:g} s: {held}")
                break
            await asyncio.sleep(_LOOK_S)
            waited_s = self._clock.now_s() - began_s
        self._report.settled_s = self._clock.now_s() - began_s

    async def _held(self, client: AsyncClient) -> str:
        """Return text about resources that are held or do not balance; empty if there are none."""
        try:
            state, num_jobs = await client.cluster_state(_STATE_S), await self._cluster.num_jobs()
        except (UnavailableError, DeadlineExceededError) as error:
            return str(error)
        return holdings(state) + (f" {num_jobs} jobs" if num_jobs else "")

    def _judge(self, judge: Judge) -> None:
        """Check the tokens of all streams, including streams that ended early."""
        complaints = self._report.complaints
        for answer in self._report.answers:
            name = f"request {answer.ask.number}"
            complaints += [f"{name}: {each}" for each in answer.complaints]
            for index, choice in enumerate(answer.output.choices):
                num_tokens, num_due = len(choice.tokens), answer.ask.params.max_tokens
                if num_tokens and (wrong := judge(answer.ask, index, choice.tokens)):
                    complaints.append(f"{name}, choice {index}: {wrong}")
                if answer.outcome is Outcome.ANSWERED and num_tokens != num_due:
                    complaints.append(f"{name}, choice {index}: {num_tokens} of {num_due} tokens")
        num_failed = self._report.outcomes[Outcome.FAILED]
        if num_failed > _FAILED_PART * len(self._report.answers):
            complaints.append(f"{num_failed} of {len(self._report.answers)} requests failed")


class Watch:
    """Checks the events of one stream. Token indexes must have no gaps, and each choice must end once. Also cancels the
    stream at the point that the schedule sets."""

    def __init__(self, stream: AsyncStream, ask: Ask) -> None:
        self.complaints: list[str] = []
        self._stream = stream
        self._leave = ask.leave
        self._num_events = 0
        self._next = [0] * ask.params.n
        self._ended: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._leave_if_due()

    @property
    def num_running(self) -> int:
        """Number of choices that have not ended."""
        return len(self._next) - len(self._ended)

    def take(self, event: TokenEvent) -> None:
        """Check the next event of the stream."""
        self._num_events += 1
        if event.choice in self._ended:
            self.complaints.append(f"choice {event.choice}: an event after the last")
        if event.token is not None:
            if event.index != (due := self._next[event.choice]):
                self.complaints.append(f"choice {event.choice}: token {event.index} after {due - 1}")
            self._next[event.choice] = event.index + 1
        if event.finish is not None:
            self._ended.add(event.choice)
        self._leave_if_due()

    def close(self) -> None:
        """Stop the checks and cancel the stream. Call when the stream has ended or is no longer read."""
        if self._timer is not None:
            self._timer.cancel()
        self._stream.cancel()

    def _leave_if_due(self) -> None:
        if self._leave is not None and self._timer is None and self._num_events >= self._leave.after_events:
            self._timer = asyncio.get_running_loop().call_later(self._leave.pause_s, self._stream.cancel)


def holdings(state: ClusterState) -> str:
    """Return a text that lists the requests, slots and bytes of KV that the cluster still holds, the engines that do
    not answer, and inconsistent counts of slots or bytes. Empty if there is nothing to list."""
    counts = {"queued": state.num_queued, "running": state.num_running}
    for group in state.groups:
        held = group.generation or GenerationStatus()
        counts |= {
            f"slots of {group.name}": held.num_slots - held.num_free,
            f"bytes of {group.name}": held.num_bytes_held,
            f"requests of {group.name}": group.num_requests,
            f"leaked of {group.name}": group.num_leaked,
        }
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    silent = (each for each in state.groups if each.role == "generate" and each.generation is None)
    parts += [f"{group.name} does not answer" for group in silent]
    return ", ".join([*parts, *imbalances(state)])


def imbalances(state: ClusterState) -> list[str]:
    """Return one line for each group whose counts of slots or bytes are inconsistent."""
    return [f"{group.name}: {group.imbalance}" for group in state.groups if group.imbalance]
