"""Serves one attempt at a request: groups, a slot, the chain, the stream.

Called by `orchestrator.controller`; asks `orchestrator.placement.chooser` for groups, calls workers through
`orchestrator.workers.client`, and reads streams by `orchestrator.dispatch.streaming`. A slot is leased before prefill
starts, so that KV always has a home; the stream is opened before prefill, so that the lease has an owner; every rank
runs its chunk and pushes its KV straight to the slot. When an attempt has ended, in any way, its calls have ended, its
job is in no book, and its slot is free or soon will be. On the loop, in the request's task.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.errors import BatonError, NotFoundError, ResourceExhaustedError, StalePrefixError
from baton.ids import JobId, Rank, RequestId, ReserveNumber, StreamNumber
from baton.prefix_blocks import PromptBlocks
from baton.results import RankTiming
from baton.types import Lease
from orchestrator.dispatch.givebacks import Givebacks
from orchestrator.dispatch.streaming import Chain, Closings, Emit, failure_of, first_event, follow
from orchestrator.membership.members import GenerationGroup, JobNumbers, Members, PrefillGroup
from orchestrator.placement.chain_width import ChainPlan
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.client import Clients, EventStream, PrefillPlan, WorkerClient
from orchestrator.workers.prefix_discovery import PrefixStores
from planning.planner import ChainPlanner
from transport.kv_sink import ReserveSpec

logger = logging.getLogger(__name__)

_FULL_PAUSE_S = 0.05
"""Seconds between two Reserves of a slot that should be free and is not yet: quarantined, or another orchestrator's."""
_ANSWER_S = 1.0
"""Seconds that a group has to say whether it has kept a stream."""


@dataclass(frozen=True)
class _Home:
    """The generation group of one attempt, where its KV goes and its tokens come from."""

    group: GenerationGroup
    worker: WorkerClient
    blocks: PromptBlocks
    """Blocks of all tokens whose KV the attempt has to make."""
    held: ExitStack
    """Holds the group's count of the attempt, and the use of the worker's connection."""


@dataclass(frozen=True)
class _Prefill:
    """One attempt's job for a prefill group."""

    group: PrefillGroup
    chain: ChainPlan
    blocks: PromptBlocks
    """The prompt's blocks: the chain begins behind the first ones, which are cached, and stores the others."""
    number: JobId


@dataclass
class _Learnt:
    """Facts that one attempt has found out about groups so far."""

    full_since_s: float = math.inf
    """Time when a group that should have room first refused the attempt, on the clock's now_s."""
    full: set[object] = field(default_factory=set)
    """Lives of groups that refused the attempt for lack of room since its latest pause; cleared once all have
    refused."""
    trusts_hints: bool = True
    """Whether the attempt still relies on the prefix index: False once blocks that the index named were missing."""


class Dispatcher:
    """Runs any number of attempts at once. Writes the book of prefill jobs, which `Members.backlogs` holds."""

    def __init__(
        self, members: Members, clients: Clients, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig
    ) -> None:
        self._members = members
        self._clients = clients
        self._planner = planner
        self._chooser = Chooser(members, planner, clock, config)
        self._stores = PrefixStores(members, clients, self._chooser.prefixes)
        self._clock = clock
        self._config = config
        self._numbers = JobNumbers(clock)
        self._givebacks = Givebacks(members, clients, clock, lease_ttl_s=config.lease_ttl_s)
        self._closings = Closings(self._chooser.prefixes)

    @property
    def chooser(self) -> Chooser:
        """Return the chooser of groups for attempts."""
        return self._chooser

    @property
    def num_degraded(self) -> int:
        """Return the number of attempts whose generation group prefilled because no prefill group was ready in time."""
        return self._chooser.num_degraded

    async def close(self) -> None:
        """Wait, for a bounded time, until the slots and streams of past attempts are freed; to be called once no
        attempt runs."""
        await self._stores.close()
        await self._closings.close()
        await self._givebacks.close()

    async def attempt(self, record: RequestRecord, emit: Emit) -> None:
        """Run a request from where its record stands to its end: events go into the record, then to `emit`. Raises the
        error of the attempt, after adding the group to blame to the record's groups to avoid. A cached prefix that
        turns out to be missing fails no attempt: the prompt is computed from its beginning, in the same attempt."""
        record.width, record.num_cached_tokens = None, 0
        self._stores.look()
        learnt = _Learnt()
        generation: GenerationGroup | None = await self._chooser.find_generation(record)
        while generation is not None:
            try:
                generation = await self._attempt_at(generation, record, learnt, emit)
            except StalePrefixError as stale:
                if not learnt.trusts_hints:
                    raise
                logger.info("stale prefix request=%s attempt=%d: %s", record.request_id, record.attempt, stale)
                learnt.trusts_hints = False
                record.replan()

    async def _attempt_at(
        self, generation: GenerationGroup, record: RequestRecord, learnt: _Learnt, emit: Emit
    ) -> GenerationGroup | None:
        """Run the request to its end with this group; or return another group to try, as this one has no room. The job
        is booked only once it has its slot: other prompts are not planned around a job that does not run."""
        blocks = self._chooser.blocks(record, generation.layout_fingerprint)
        with self._holding(generation, record) as (worker, held):
            home = _Home(generation, worker, blocks, held)
            found = await self._chooser.find_prefill(generation, record, blocks, learnt.trusts_hints)
            if found is None:
                return await self._generate(record, home, learnt, emit)
            granted = await self._reserve(record, home, learnt)
            if isinstance(granted, GenerationGroup):
                return granted
            anew = self._chooser.prefill(generation, record, blocks, learnt.trusts_hints)
            group, chain = anew(record.avoid) or found  # other jobs were booked meanwhile
            place = _Prefill(group, chain, blocks, self._numbers.issue())
            with self._members.hold(group.name), self._booked(record, place) as prefill:
                await self._relay(record, home, (prefill, granted), emit)
        return None

    async def take_over(self, record: RequestRecord, emit: Emit) -> None:
        """Run a request to its end on the stream that a generation group has kept since an earlier orchestrator's end.
        Events go into the record, then to `emit`. Raises NotFoundError when no group has kept it, and the error of a
        failed stream."""
        generation = await self._find_kept(record)
        with self._holding(generation, record) as (worker, held):
            number = StreamNumber(self._numbers.issue())
            taken_over = worker.take_over(record, number)
            async with self._ending(record, (generation, held), number, taken_over) as stream:
                event = await stream.read()
                record.place(self._clock.unix_ns(), generation.residency)
                logger.info("taken over request=%s group=%s", record.request_id, generation.name)
                await follow(record, stream, event, emit)

    async def _find_kept(self, record: RequestRecord) -> GenerationGroup:
        present = self._members.present.generation  # drained groups too
        groups = [each for each in present if each.ready and each.may_serve(exact=record.exact)]
        answers = await asyncio.gather(*(self._keeps(group, record.request_id) for group in groups))
        found = next((group for group, keeps in zip(groups, answers, strict=True) if keeps), None)
        if found is None:
            raise NotFoundError(f"request {record.request_id} runs on no generation group")
        return found

    async def _keeps(self, group: GenerationGroup, request_id: RequestId) -> bool:
        try:
            with self._clients.use(group.endpoint) as worker:
                status = await worker.generation_status(_ANSWER_S)
            return any(each.request_id == request_id for each in status.kept)
        except BatonError as error:
            logger.info("%s does not say what it has kept: %s", group.name, error)
            return False

    async def _generate(
        self, record: RequestRecord, home: _Home, learnt: _Learnt, emit: Emit
    ) -> GenerationGroup | None:
        """Prefill and generate on one group, behind the tokens that its node has cached, for which a slot is leased.
        Return another group to try when this one has no room."""
        group, lease = home.group, None
        if self._chooser.prefixes.num_held(group.prefix_store, self._wanted(record, home, prefills_locally=True)):
            granted = await self._reserve(record, home, learnt, prefills_locally=True)
            if isinstance(granted, GenerationGroup):
                return granted
            lease, record.num_cached_tokens = granted, granted.num_present_tokens
        record.place(self._clock.unix_ns(), group.residency)
        try:
            async with self._streaming(record, home, lease) as stream:
                await follow(record, stream, await stream.read(), emit)
        except BaseException as error:
            if isinstance(error, BatonError):
                record.avoid.add(group.life)
            if lease is not None and not record.is_complete:
                self._givebacks.abort(group.endpoint, lease.ref)
            raise
        return None

    def _wanted(self, record: RequestRecord, home: _Home, *, prefills_locally: bool) -> tuple[str, ...]:
        """Return the names of the blocks with which a slot of the group may begin, if its node has them."""
        blocks = home.blocks
        if not home.group.prefix_store or (prefills_locally and record.wants_prompt_scores):
            return ()
        return blocks.cached(blocks.cached_tokens(len(blocks.names))) if prefills_locally else blocks.names

    def _streaming(
        self, record: RequestRecord, home: _Home, lease: Lease | None
    ) -> contextlib.AbstractAsyncContextManager[EventStream]:
        number = StreamNumber(self._numbers.issue())
        stream = home.worker.stream(record, number, self._config, lease)
        return self._ending(record, (home.group, home.held), number, stream)

    @contextlib.contextmanager
    def _holding(self, group: GenerationGroup, record: RequestRecord) -> Iterator[tuple[WorkerClient, ExitStack]]:
        """Count the attempt as the group's until the context ends, or until a caller that takes the stack over closes
        it."""
        with ExitStack() as held:
            held.enter_context(self._members.hold(group.name, record.num_slots))
            yield held.enter_context(self._clients.use(group.endpoint)), held

    @contextlib.asynccontextmanager
    async def _ending(
        self, record: RequestRecord, home: tuple[GenerationGroup, ExitStack], number: StreamNumber, stream: EventStream
    ) -> AsyncIterator[EventStream]:
        """End the stream with the attempt; only a stream whose orchestrator dies is kept by its group. A stream that
        has brought all its tokens is read on until its group has said what it stored."""
        generation, held = home
        try:
            yield stream
        finally:
            if record.is_complete:
                await self._closings.add(stream, generation.prefix_store, held.pop_all())
            else:
                self._givebacks.cancel(generation.endpoint, number)
                stream.cancel()

    @contextlib.contextmanager
    def _booked(self, record: RequestRecord, prefill: _Prefill) -> Iterator[_Prefill]:
        """Keep the job in its group's book, on each rank until the run there has ended, at most until the context
        ends."""
        group, chain = prefill.group, prefill.chain
        self._members.backlogs.add(group.life, prefill.number, chain.job, self._unix_s())
        record.width, record.num_cached_tokens = chain.choice, chain.num_cached_tokens
        logger.info(
            "prefill request=%s attempt=%d group=%s ranks=%s cached_tokens=%d: %s",
            *(record.request_id, record.attempt, group.name, ",".join(map(str, chain.ranks))),
            *(chain.num_cached_tokens, chain.choice.reason),
        )
        try:
            yield prefill
        finally:
            self._release(prefill, chain.ranks)

    def _release(self, prefill: _Prefill, ranks: Sequence[Rank]) -> None:
        self._members.backlogs.release(prefill.group.life, prefill.number, ranks, self._unix_s())

    def _unix_s(self) -> float:
        return self._clock.unix_ns() / 1e9

    async def _relay(self, record: RequestRecord, home: _Home, job: tuple[_Prefill, Lease], emit: Emit) -> None:
        """Prefill by a chain, whose last rank commits the slot, and generate on the group that owns the slot."""
        generation, (prefill, lease) = home.group, job
        record.place(self._clock.unix_ns(), generation.residency)
        chain = asyncio.create_task(self._run_chain(record, prefill, lease, home.worker))
        try:
            async with self._streaming(record, home, lease) as stream:
                await follow(record, stream, await first_event(stream, chain), emit)
            record.ranks = await self._reports(chain)
        except BaseException as error:
            if isinstance(error, BatonError) and not isinstance(error, StalePrefixError):
                record.avoid.add(prefill.group.life if error is failure_of(chain) else generation.life)
            if not record.is_complete:  # a complete request's rows may still be stored
                self._givebacks.abort(generation.endpoint, lease.ref)
            raise
        finally:
            chain.cancel()
            await asyncio.gather(chain, return_exceptions=True)

    async def _reserve(
        self, record: RequestRecord, home: _Home, learnt: _Learnt, *, prefills_locally: bool = False
    ) -> Lease | GenerationGroup:
        """Lease a slot for each choice; or return another group that has room, as this one has none. A Reserve under
        way is never cancelled: it might be granted without a caller to free its slot. One whose answer was lost is
        undone by its number."""
        generation, names = home.group, self._wanted(record, home, prefills_locally=prefills_locally)
        spec = ReserveSpec(
            request_id=record.request_id,
            attempt=record.attempt,
            num_tokens=record.num_tokens,
            capacity_tokens=record.capacity_tokens,
            ttl_s=self._config.lease_ttl_s,
            num_choices=record.num_slots,
            prefix_blocks=names,
            block_tokens=home.blocks.block_tokens,
            prefills_locally=prefills_locally,
        )
        while True:
            number = ReserveNumber(self._numbers.issue())
            reserving = home.worker.reserve(replace(spec, number=number), generation.layout_fingerprint)
            granting = asyncio.create_task(reserving)
            try:
                return self._granted(home, names, await asyncio.shield(granting))
            except asyncio.CancelledError:
                self._givebacks.unwanted(generation.endpoint, number, granting)
                raise
            except BatonError as error:
                self._givebacks.failed(generation.endpoint, number, error)
                learnt.full_since_s = min(learnt.full_since_s, self._clock.now_s())
                give_up_s = learnt.full_since_s + self._config.generation_wait_s
                if not isinstance(error, ResourceExhaustedError) or self._clock.now_s() > give_up_s:
                    record.avoid.add(generation.life)
                    raise
            learnt.full.add(generation.life)
            if other := self._chooser.generation(record)(record.avoid | learnt.full):
                return other
            learnt.full.clear()
            await asyncio.sleep(_FULL_PAUSE_S)

    def _granted(self, home: _Home, names: Sequence[str], lease: Lease) -> Lease:
        """Correct the prefix index by the lease, which says how many of these blocks the node really has; return the
        lease."""
        store, num_present = home.group.prefix_store, lease.num_present_tokens // home.blocks.block_tokens
        self._chooser.prefixes.use(store, names[:num_present])
        self._chooser.prefixes.forget(store, names[num_present : num_present + 1])
        return lease

    async def _run_chain(
        self, record: RequestRecord, prefill: _Prefill, lease: Lease, owner: WorkerClient
    ) -> tuple[RankTiming, ...]:
        """Run the job on all its ranks, and renew the lease meanwhile, because a job may wait long for its turn. The
        first failure cancels the other ranks and is raised."""
        plan = PrefillPlan(record, prefill.group.epoch, prefill.number, prefill.chain, prefill.blocks, lease)
        runs = [asyncio.create_task(self._run_rank(rank, prefill, plan)) for rank in prefill.chain.ranks]
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

    async def _run_rank(self, rank: Rank, prefill: _Prefill, plan: PrefillPlan) -> RankTiming:
        group, blocks, prefixes = prefill.group, prefill.blocks, self._chooser.prefixes
        cached = blocks.cached(prefill.chain.num_cached_tokens)
        try:
            with self._clients.use(group.endpoints[rank]) as worker:
                report = await worker.run(plan)
        except StalePrefixError:
            prefixes.forget(group.prefix_store, cached)
            raise
        finally:
            self._release(prefill, (rank,))
        prefixes.forget(group.prefix_store, report.evicted)
        prefixes.use(group.prefix_store, blocks.names[: len(cached) + len(report.stored)])
        return report.timing

    async def _renew(self, owner: WorkerClient, lease: Lease) -> None:
        """Renew the lease. A failure is only logged: the lease's stream reports a lost lease, which is no rank's
        fault."""
        try:
            await owner.renew(lease)
        except BatonError as error:
            logger.warning("slot %d at %s was not renewed: %s", lease.ref.slot, lease.endpoint, error)

    async def _reports(self, chain: Chain) -> tuple[RankTiming, ...]:
        """Return the ranks' timings, or none when they fail or are late, which fails no request that has all its
        tokens."""
        await asyncio.wait({chain}, timeout=self._config.report_wait_s)
        return chain.result() if chain.done() and failure_of(chain) is None else ()
