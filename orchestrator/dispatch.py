"""One attempt at a request: groups, a slot, the chain, the stream (steps 3 to 9 of a request's way).

A slot is leased before prefill starts, so that KV always has a home; the stream is opened before prefill, so that the
lease has an owner; every rank runs its chunk and pushes its KV straight to the slot. However an attempt ends, its
calls have ended, its job is in no book, and its slot is free or about to be. On the loop, in the request's task.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.clock import Clock
from baton.errors import BatonError, NotFoundError, ResourceExhaustedError, UnavailableError
from baton.ids import JobId, Rank, RequestId, StreamNumber
from baton.results import RankTiming
from baton.types import FinishReason, Lease, LeaseRef, TokenEvent, TokenRange
from orchestrator.clients import Clients, EventStream, PrefillPlan, WorkerClient
from orchestrator.config import OrchestratorConfig
from orchestrator.lifecycle import RequestRecord
from orchestrator.membership import GenerationGroup, JobNumbers, Members, NoGroupError, PrefillGroup
from orchestrator.placement import Choose, choose_generation, choose_prefill
from orchestrator.widths import ChainPlan, WidthPolicy
from planning.planner import ChainPlanner
from transport.kv_sink import ReserveSpec

T = TypeVar("T")

logger = logging.getLogger(__name__)

Emit = Callable[[TokenEvent], None]
"""Where an attempt's events go."""
_Slot = tuple[WorkerClient, Lease]
Chain = asyncio.Task[tuple[RankTiming, ...]]
"""One attempt's prefill, on all ranks."""

_FULL_PAUSE_S = 0.05
"""Between two tries for a slot that should be free and is not yet: quarantined, or another orchestrator's."""
_ANSWER_S = 1.0
"""For a group to say whether it has kept a stream, and for a stream to close after its last event."""
_DOUBT_S = 0.2
"""How much later than a chain that could not push the dead group's stream may fail."""
_ENDED_BY_WORKER = (FinishReason.ERROR, FinishReason.CANCELLED)


@dataclass(frozen=True)
class _Prefill:
    """One attempt's place in the order of a prefill group."""

    group: PrefillGroup
    chain: ChainPlan
    number: JobId


@dataclass
class _Refusals:
    """Of one attempt, by groups that have slots and no memory."""

    since_s: float = math.inf
    """Of the first."""
    full: set[object] = field(default_factory=set)
    """Lives of those asked since all had been: one that is asked again has had a pause."""


class Dispatcher:
    """Runs attempts, any number at once. Writes the book of the prefill groups, which `members` holds."""

    def __init__(
        self, members: Members, clients: Clients, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig
    ) -> None:
        self.num_degraded = 0
        """Attempts whose generation group prefilled because no prefill group was ready in time."""
        self._members = members
        self._clients = clients
        self._planner = planner
        self._policy = WidthPolicy(planner, elastic=config.elastic, overtaking=config.overtaking)
        self._clock = clock
        self._config = config
        self._numbers = JobNumbers(clock)
        self._givebacks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits, for a bounded time, until what past attempts held is given back; once no attempt runs."""
        await asyncio.gather(*self._givebacks)

    async def attempt(self, record: RequestRecord, emit: Emit) -> None:
        """Runs the request on from where its record is to its end: events go into the record, then to `emit`. Raises
        what failed, having noted in the record which group to avoid."""
        record.width = None
        refusals = _Refusals()
        generation: GenerationGroup | None = await self._find_generation(record)
        while generation is not None:
            generation = await self._attempt_at(generation, record, refusals, emit)

    async def _attempt_at(
        self, generation: GenerationGroup, record: RequestRecord, refusals: _Refusals, emit: Emit
    ) -> GenerationGroup | None:
        """To the request's end; or returns the group to go to instead, as this one has no memory. The job is in no
        book before it has its slot: others are not planned around what does not run."""
        with (
            self._members.hold(generation.name, record.num_slots),
            self._clients.use(generation.endpoint) as worker,
        ):
            found = await self._find_prefill(record)
            if found is None:
                await self._generate(record, generation, worker, emit)
                return None
            granted = await self._reserve(record, generation, worker, refusals)
            if isinstance(granted, GenerationGroup):
                return granted
            group, chain = self._choose_prefill(record)(record.avoid) or found  # anew: others were booked meanwhile
            with self._members.hold(group.name), self._booked(record, group, chain) as prefill:
                await self._relay(record, (generation, prefill), (worker, granted), emit)
        return None

    async def take_over(self, record: RequestRecord, emit: Emit) -> None:
        """As `attempt`, by the stream that a generation group has kept since an earlier orchestrator's end. Raises
        NotFoundError when there is none."""
        generation = await self._find_kept(record)
        with (
            self._members.hold(generation.name, record.num_slots),
            self._clients.use(generation.endpoint) as worker,
        ):
            number = StreamNumber(self._numbers.issue())
            with self._ending(record, generation, number, worker.take_over(record, number)) as stream:
                event = await stream.read()
                record.place(self._clock.unix_ns())
                logger.info("taken over request=%s group=%s", record.request_id, generation.name)
                await _follow(record, stream, event, emit)

    async def _find_generation(self, record: RequestRecord) -> GenerationGroup:
        found = await self._find(self._choose_generation(record), record, self._config.generation_wait_s)
        if found is None:
            raise NoGroupError(
                f"no generation group had a free slot of {record.capacity_tokens} tokens within "
                f"{self._config.generation_wait_s:g} s: see the workers' state, or try again later"
            )
        return found

    def _choose_generation(self, record: RequestRecord) -> Choose[GenerationGroup]:
        return lambda avoid: choose_generation(self._members.view, self._members.load, record, avoid)

    def _choose_prefill(self, record: RequestRecord) -> Choose[tuple[PrefillGroup, ChainPlan]]:
        chains = self._policy.chains(TokenRange(0, record.num_tokens))

        def plan_for(group: PrefillGroup) -> ChainPlan:
            now_s = self._unix_s()
            pending = self._members.backlogs.pending(group.life, now_s)
            return chains.plan(len(group.endpoints), pending, now_s)

        return lambda avoid: choose_prefill(self._members.view, plan_for, avoid)

    async def _find_prefill(self, record: RequestRecord) -> tuple[PrefillGroup, ChainPlan] | None:
        """None: the generation group is to prefill by itself."""
        if not self._members.view.prefill or record.wants_prompt_scores:
            return None  # a chain's ranks compute no logits but the last
        found = await self._find(self._choose_prefill(record), record, self._config.prefill_wait_s)
        if found is None:
            self.num_degraded += 1
            logger.warning("degraded request=%s attempt=%d: no prefill group", record.request_id, record.attempt)
        return found

    async def _find(self, choose: Choose[T], record: RequestRecord, wait_s: float) -> T | None:
        """A group that has not failed this request, if one comes soon; else any."""
        if record.avoid:
            found = await self._members.until(lambda: choose(record.avoid), self._config.avoid_s)
            if found is not None:
                return found
        return await self._members.until(lambda: choose(()), wait_s)

    async def _find_kept(self, record: RequestRecord) -> GenerationGroup:
        groups = [group for group in self._members.view.generation if group.ready]
        answers = await asyncio.gather(*(self._keeps(group, record.request_id) for group in groups))
        found = next((group for group, keeps in zip(groups, answers, strict=True) if keeps), None)
        if found is None:
            raise NotFoundError(f"request {record.request_id} runs on no generation group")
        return found

    async def _keeps(self, group: GenerationGroup, request_id: RequestId) -> bool:
        try:
            with self._clients.use(group.endpoint) as worker:
                return request_id in (await worker.generation_holdings(_ANSWER_S)).kept
        except BatonError as error:
            logger.info("%s does not say what it has kept: %s", group.name, error)
            return False

    async def _generate(
        self, record: RequestRecord, generation: GenerationGroup, worker: WorkerClient, emit: Emit
    ) -> None:
        """Prefill and generation by one group."""
        record.place(self._clock.unix_ns())
        try:
            with self._streaming(record, generation, worker, None) as stream:
                await _follow(record, stream, await stream.read(), emit)
        except BatonError:
            record.avoid.add(generation.life)
            raise

    def _streaming(
        self, record: RequestRecord, generation: GenerationGroup, worker: WorkerClient, lease: Lease | None
    ) -> contextlib.AbstractContextManager[EventStream]:
        number = StreamNumber(self._numbers.issue())
        stream = worker.stream(record, number, self._config.lease_ttl_s, lease)
        return self._ending(record, generation, number, stream)

    @contextlib.contextmanager
    def _ending(
        self, record: RequestRecord, generation: GenerationGroup, number: StreamNumber, stream: EventStream
    ) -> Iterator[EventStream]:
        """The stream ends with the attempt, whatever comes; only one whose orchestrator dies is kept."""
        try:
            yield stream
        finally:
            if not record.is_complete:
                self._keep(self._cancel(generation.endpoint, number))
            stream.cancel()

    @contextlib.contextmanager
    def _booked(self, record: RequestRecord, group: PrefillGroup, chain: ChainPlan) -> Iterator[_Prefill]:
        """The job is in the group's book, on each rank until its run there has ended."""
        prefill = _Prefill(group, chain, self._numbers.issue())
        self._members.backlogs.add(group.life, prefill.number, chain.job, self._unix_s())
        record.width = chain.choice
        logger.info(
            "prefill request=%s attempt=%d group=%s ranks=%s: %s",
            *(record.request_id, record.attempt, group.name, ",".join(map(str, chain.ranks)), chain.choice.reason),
        )
        try:
            yield prefill
        finally:
            self._release(prefill, chain.ranks)

    def _release(self, prefill: _Prefill, ranks: Sequence[Rank]) -> None:
        self._members.backlogs.release(prefill.group.life, prefill.number, ranks, self._unix_s())

    def _unix_s(self) -> float:
        return self._clock.unix_ns() / 1e9

    async def _relay(
        self, record: RequestRecord, places: tuple[GenerationGroup, _Prefill], slot: _Slot, emit: Emit
    ) -> None:
        """Prefill by a chain, whose last rank commits the slot; generation by the group that owns it."""
        (generation, prefill), (worker, lease) = places, slot
        record.place(self._clock.unix_ns())
        chain = asyncio.create_task(self._run_chain(record, prefill, lease, worker))
        try:
            with self._streaming(record, generation, worker, lease) as stream:
                await _follow(record, stream, await _first(stream, chain), emit)
            record.ranks = await self._reports(chain)
        except BaseException as error:
            if isinstance(error, BatonError):
                record.avoid.add(prefill.group.life if error is _failure(chain) else generation.life)
            self._keep(self._abort(generation.endpoint, lease.ref))
            raise
        finally:
            chain.cancel()
            await asyncio.gather(chain, return_exceptions=True)

    async def _reserve(
        self, record: RequestRecord, generation: GenerationGroup, worker: WorkerClient, refusals: _Refusals
    ) -> Lease | GenerationGroup:
        """A slot for each choice; or another group that has room, as this one has none. A reservation under way is
        never cancelled: it might be granted, and nobody would know."""
        spec = ReserveSpec(
            request_id=record.request_id,
            attempt=record.attempt,
            num_tokens=record.num_tokens,
            capacity_tokens=record.capacity_tokens,
            ttl_s=self._config.lease_ttl_s,
            num_choices=record.num_slots,
        )
        while True:
            granting = asyncio.create_task(worker.reserve(spec, generation.layout_fingerprint))
            try:
                return await asyncio.shield(granting)
            except asyncio.CancelledError:
                self._keep(self._give_back(generation.endpoint, granting))
                raise
            except BatonError as error:
                refusals.since_s = min(refusals.since_s, self._clock.now_s())
                give_up_s = refusals.since_s + self._config.generation_wait_s
                if not isinstance(error, ResourceExhaustedError) or self._clock.now_s() > give_up_s:
                    record.avoid.add(generation.life)
                    raise
            refusals.full.add(generation.life)
            if other := self._choose_generation(record)(record.avoid | refusals.full):
                return other
            refusals.full.clear()
            await asyncio.sleep(_FULL_PAUSE_S)

    async def _run_chain(
        self, record: RequestRecord, prefill: _Prefill, lease: Lease, owner: WorkerClient
    ) -> tuple[RankTiming, ...]:
        """Runs the job on all its ranks, and keeps the lease alive meanwhile: a job may wait long for its turn. The
        first failure cancels the other ranks and is raised."""
        runs = [asyncio.create_task(self._run_rank(rank, record, prefill, lease)) for rank in prefill.chain.ranks]
        pending = set(runs)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=self._config.lease_ttl_s / 3, return_when=asyncio.FIRST_EXCEPTION
                )
                for run in done:
                    run.result()
                if pending:
                    await self._renew(owner, lease)
            timings = tuple(run.result() for run in runs)
            self._planner.observe(prefill.group.name, timings)
            return timings
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run_rank(self, rank: Rank, record: RequestRecord, prefill: _Prefill, lease: Lease) -> RankTiming:
        plan = PrefillPlan(prefill.group.epoch, prefill.number, prefill.chain, lease)
        try:
            with self._clients.use(prefill.group.endpoints[rank]) as worker:
                return await worker.run(record, plan)
        finally:
            self._release(prefill, (rank,))

    async def _renew(self, owner: WorkerClient, lease: Lease) -> None:
        """A lease that is lost is no rank's fault: its stream says so."""
        try:
            await owner.renew(lease)
        except BatonError as error:
            logger.warning("slot %d at %s was not renewed: %s", lease.ref.slot, lease.endpoint, error)

    async def _reports(self, chain: Chain) -> tuple[RankTiming, ...]:
        """The ranks' timings, which are no reason to fail a request that has all its tokens, nor to keep it long."""
        await asyncio.wait({chain}, timeout=self._config.report_wait_s)
        return chain.result() if chain.done() and _failure(chain) is None else ()

    def _keep(self, giveback: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(giveback)
        self._givebacks.add(task)
        task.add_done_callback(self._givebacks.discard)

    async def _give_back(self, endpoint: str, granting: asyncio.Task[Lease]) -> None:
        try:
            lease = await granting
        except BatonError as error:
            logger.debug("nothing to give back at %s: %s", endpoint, error)
        else:
            await self._abort(endpoint, lease.ref)

    async def _cancel(self, endpoint: str, number: StreamNumber) -> None:
        try:
            with self._clients.use(endpoint) as worker:
                await worker.cancel(number)
        except BatonError as error:
            logger.info("stream %d at %s is left to its ttl: %s", number, endpoint, error)

    async def _abort(self, endpoint: str, ref: LeaseRef) -> None:
        try:
            with self._clients.use(endpoint) as worker:
                await worker.abort(ref)
        except BatonError as error:
            logger.info("slot %d at %s is left to its ttl: %s", ref.slot, endpoint, error)


async def _first(stream: EventStream, chain: Chain) -> TokenEvent:
    """The stream's first event. A chain that fails before it ends the wait with its error, unless the stream fails as
    well: then the chain had nowhere to push to."""
    reading = asyncio.create_task(stream.read())
    try:
        await asyncio.wait({reading, chain}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() and (failure := _failure(chain)) is not None:
            await asyncio.wait({reading}, timeout=_DOUBT_S)
            if not reading.done():
                raise failure
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _follow(record: RequestRecord, stream: EventStream, event: TokenEvent, emit: Emit) -> None:
    """From this event of the stream to the last of its last choice, and to the stream's own end: a stream whose reader
    leaves before is kept."""
    while True:
        if event.finish in _ENDED_BY_WORKER:
            raise UnavailableError(f"the generation group gave the request up: {event.error or event.finish.value}")
        accepted = record.accept(event)
        if accepted is not None:
            emit(accepted)
        if record.is_complete:
            await stream.closed(_ANSWER_S)
            return
        event = await stream.read()


def _failure(chain: Chain) -> BaseException | None:
    return chain.exception() if chain.done() and not chain.cancelled() else None
