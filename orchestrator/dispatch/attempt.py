"""Runs one attempt at a request: plans it, leases its slots, runs its prefill, and reads its stream.

Called by `orchestrator.scheduler`. The attempt leases slots before it starts the prefill, so that the KV always has a
destination. It opens the stream before the prefill, so that the lease has an owner. Every rank computes its chunk and
pushes the KV directly to the slots. When an attempt has ended, for any reason, all its calls have ended, its
prefill job has been removed from the queue, and its slots are free or about to be freed. Runs on the event loop, in the
request's task.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from baton.errors import BatonError, NotFoundError, ResourceExhaustedError, StalePrefixError
from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from baton.results.prefill_trace import PrefixFetch
from baton.transport.kv_sink import ReserveSpec
from baton.types import JobId, Lease, RequestId, ReserveNumber, StreamNumber
from orchestrator.dispatch.fetching import BlockFetcher
from orchestrator.dispatch.lease_reaper import LeaseReaper
from orchestrator.dispatch.prefilling import ChainRunner, PrefillTask, failure_of
from orchestrator.dispatch.token_streams import Emit, StreamDrainer, first_event, follow, with_origins
from orchestrator.membership.members import Membership
from orchestrator.membership.view import GenerationGroup
from orchestrator.placement.chooser import Chooser, Plan
from orchestrator.placement.options import Reuse
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Attempt, RequestRecord
from orchestrator.workers.client import AttemptEvents, Clients, WorkerClient
from orchestrator.workers.messages import PrefillJob
from orchestrator.workers.prefix_discovery import PrefixStores

logger = logging.getLogger(__name__)

_FULL_PAUSE_S = 0.05
"""Pause in seconds before Reserve is called again on a group that refused although it should have a free slot. The slot
may be quarantined or leased to another orchestrator."""
_ANSWER_S = 5.0
"""Timeout in seconds of the status call that reports whether a group has kept a stream."""


@dataclass(frozen=True)
class _Home:
    """Generation group that serves one attempt. It receives the KV and generates the tokens."""

    record: RequestRecord
    group: GenerationGroup
    worker: WorkerClient
    held: ExitStack
    """Context stack of the attempt. Until it is closed, the attempt counts in the group's load, and the connection to
    the worker stays open."""
    fetch: PrefixFetch | None = None
    """Result of the attempt's fetch of cached KV from another node; None if no fetch was made."""


@dataclass
class _Learnt:
    """Facts about groups and caches that one attempt has learned so far."""

    full_since_s: float = math.inf
    """Time of the first refusal by a group that should have had enough free slots, as a value of `Clock.now_s()`.
    Infinite if no group has refused."""
    full: set[Hashable] = field(default_factory=set)
    """Incarnations of the groups that refused the attempt for lack of slots or memory. A group gets a new incarnation
    when it is repaired or replaced. The set is cleared when all groups have refused."""
    reuse: Reuse = "cluster"
    """Cached blocks that the next plan may rely on. "node" after an incomplete fetch of cached KV from another node.
    "none" after the prefix index has listed blocks that were missing."""
    fetch: PrefixFetch | None = None
    """Result of the attempt's most recent fetch of cached KV from another node; None before the first fetch."""


class AttemptRunner:
    """Runs attempts at requests. Any number of attempts may run at the same time."""

    def __init__(
        self, members: Membership, clients: Clients, planner: ChainPlanner, clock: Clock, config: OrchestratorConfig
    ) -> None:
        self.chooser = Chooser(members, planner, clock, config)
        """Component that selects the groups for each attempt."""
        self._members = members
        self._clients = clients
        self._prefixes = prefixes = self.chooser.context.prefixes
        self._stores = PrefixStores(members, clients, prefixes)
        self._chains = ChainRunner(members, clients, prefixes, clock, config)
        self._clock = clock
        self._config = config
        self._numbers = itertools.count(clock.unix_ns())
        """Counter that numbers jobs, streams and Reserve calls. It starts at the present time in nanoseconds, so its
        numbers are larger than those of earlier orchestrators."""
        self._lease_reaper = LeaseReaper(members, clients, clock, lease_ttl_s=config.lease_ttl_s)
        self._stream_drainer = StreamDrainer(prefixes)
        self._fetcher = BlockFetcher(clients, prefixes, self.chooser.context.sources, planner, clock)

    async def close(self) -> None:
        """Wait for a bounded time until the resources of all past attempts have been freed. Call it only when no
        attempt is running."""
        await self._stores.close()
        await self._stream_drainer.close()
        await self._lease_reaper.close()

    async def attempt(self, record: RequestRecord, emit: Emit) -> None:
        """Run the request from the state in its record to its end. Each event is recorded first, then passed to `emit`.

        If the attempt fails, the group that caused the failure is recorded, and the error is raised. In three cases the
        attempt does not fail but is planned again:

        - The generation group has too few free slots or too little memory, but another group has enough.
        - A fetch of cached KV from another node was incomplete.
        - Cached blocks are missing. The prompt is then computed from its beginning.
        """
        self._stores.look()
        learnt = _Learnt()
        while not record.is_complete:
            try:
                with ExitStack() as held:
                    plan = await self.chooser.plan(record, held, full=learnt.full, reuse=learnt.reuse)
                    if plan.fetch is not None:
                        learnt.fetch = await self._fetcher.run(plan.fetch, record)
                        if learnt.fetch.shortfall:
                            learnt.reuse = "node"
                            continue  # the blocks that the plan relies on are missing
                    home = self._home(record, plan.generation, held, learnt.fetch)
                    await self._serve(home, plan, learnt, emit)
            except StalePrefixError as stale:
                if learnt.reuse == "none":
                    raise
                logger.info("stale prefix request=%s attempt=%d: %s", record.request_id, record.attempt.number, stale)
                learnt.reuse = "none"
                record.replan()

    async def take_over(self, record: RequestRecord, emit: Emit) -> None:
        """Continue a request whose stream was kept by a generation group after an earlier orchestrator ended. Run the
        request to its end. Each event is recorded first, then passed to `emit`. Raises NotFoundError if no group has
        kept the stream, and the stream's error if the stream fails."""
        generation = await self._find_kept(record)
        with ExitStack() as held:
            held.enter_context(self._members.hold(generation.name, record.request.num_slots))
            home = self._home(record, generation, held)
            number = StreamNumber(next(self._numbers))
            async with self._ending(home, number, home.worker.take_over(record, number)) as stream:
                event = await stream.read()
                record.place(self._clock, Attempt(residency=generation.residency, generation=generation.name))
                logger.info("taken over request=%s group=%s", record.request_id, generation.name)
                await follow(record, stream, event, self._with_origins(home, emit))

    async def _find_kept(self, record: RequestRecord) -> GenerationGroup:
        present = self._members.present.generation  # including drained ones, and ones with late heartbeats
        groups = [each for each in present if each.may_serve(exact=record.request.exact)]
        asking = [asyncio.create_task(self._keeper(group, record.request_id)) for group in groups]
        try:
            for answer in asyncio.as_completed(asking):
                if (found := await answer) is not None:
                    return found
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise NotFoundError(f"request {record.request_id} runs on no generation group")

    async def _keeper(self, group: GenerationGroup, request_id: RequestId) -> GenerationGroup | None:
        """Return the group if it reports that it has kept the request's stream; otherwise None."""
        try:
            with self._clients.use(group.endpoint) as worker:
                status = await worker.generation_status(_ANSWER_S)
        except BatonError as error:
            logger.info("%s does not say what it has kept: %s", group.name, error)
            return None
        return group if any(each.request_id == request_id for each in status.kept) else None

    async def _serve(self, home: _Home, plan: Plan, learnt: _Learnt, emit: Emit) -> None:
        """Run the request to its end as planned. Return early if the group has no room while another group has;
        `learnt` then names the full groups.

        The job is entered in the group's list of jobs only when it has its slots, so that other prompts are not planned
        around a job that does not run.
        """
        lease = None
        if plan.reserves:
            lease = await self._reserve(home, plan, learnt)
            if lease is None:
                return
            plan = self.chooser.replan(plan, home.record)  # other jobs may have been added meanwhile
        if plan.chain is None or lease is None:
            await self._generate(home, plan, lease, None, emit)
            return
        number = JobId(next(self._numbers))
        job = PrefillJob(home.record, number, plan.chain.group, plan.chain.plan, plan.blocks, lease)
        async with self._chains.running(job, home.worker) as prefill:
            prefill.add_done_callback(partial(self._note_ranks, job))
            await self._generate(home, plan, lease, prefill, emit)

    async def _generate(
        self, home: _Home, plan: Plan, lease: Lease | None, prefill: PrefillTask | None, emit: Emit
    ) -> None:
        """Generate to the end, after the KV that a chain pushes to the slots or after the tokens that the group's node
        has cached."""
        record, chain = home.record, plan.chain
        num_present = 0 if lease is None else lease.num_present_tokens
        placed = Attempt(
            residency=home.group.residency,
            placement=plan.placement,
            width=None if chain is None else chain.plan.choice,
            num_cached_tokens=num_present if chain is None else chain.plan.num_cached_tokens,
            fetch=home.fetch,
            generation=home.group.name,
            prefill="" if chain is None else chain.group.name,
        )
        record.place(self._clock, placed)
        emit = self._with_origins(home, emit, placed.prefill)
        try:
            number = StreamNumber(next(self._numbers))
            async with self._ending(home, number, home.worker.stream(record, number, self._config, lease)) as stream:
                await follow(record, stream, await first_event(stream, prefill), emit)
            if prefill is not None:
                record.report(await self._chains.reports(prefill))
        except BaseException as error:
            if isinstance(error, BatonError) and not isinstance(error, StalePrefixError):
                is_chains = chain is not None and prefill is not None and error is failure_of(prefill)
                record.blame(chain.group.incarnation if chain is not None and is_chains else home.group.incarnation)
            if lease is not None and not record.is_complete:  # the answers of a complete one may still be stored
                self._lease_reaper.abort(home.group.endpoint, lease.ref)
            raise

    def _with_origins(self, home: _Home, emit: Emit, prefill: str = "") -> Emit:
        """Return a function that adds the origin of tokens to events and passes them to `emit`. `prefill` is the name
        of the prefill group whose chain serves the attempt; empty without a chain."""
        num_rows = max(self._members.load(home.group.name).num_slots, 1)
        predicted_s = self.chooser.context.step_s(home.group, num_rows, home.record.num_tokens)
        return with_origins(emit, home.group.name, prefill, predicted_s)

    def _home(
        self, record: RequestRecord, group: GenerationGroup, held: ExitStack, fetch: PrefixFetch | None = None
    ) -> _Home:
        return _Home(record, group, held.enter_context(self._clients.use(group.endpoint)), held, fetch)

    @contextlib.asynccontextmanager
    async def _ending(self, home: _Home, number: StreamNumber, stream: AttemptEvents) -> AsyncIterator[AttemptEvents]:
        """Open a context that ends the stream with the attempt. If all tokens have arrived, the stream is read until
        the group has reported the stored blocks. Otherwise the stream is cancelled at the group."""
        try:
            yield stream
        finally:
            if home.record.is_complete:
                await self._stream_drainer.add(stream, home.group.prefix_store, home.held.pop_all())
            else:
                self._lease_reaper.cancel(home.group.endpoint, number)
                stream.cancel()

    async def _reserve(self, home: _Home, plan: Plan, learnt: _Learnt) -> Lease | None:
        """Lease a slot for each choice. If the group has no room, try again, or return None as soon as another group
        has room.

        A Reserve call in progress is never cancelled, because it might be granted without a caller that frees the slot.
        A Reserve call whose answer was lost is undone by its number.
        """
        record, group, spec = home.record, home.group, self._reserve_spec(home.record, plan)
        while True:
            number = ReserveNumber(next(self._numbers))
            granting = asyncio.create_task(home.worker.reserve(replace(spec, number=number), group.layout_fingerprint))
            try:
                lease = await asyncio.shield(granting)
            except asyncio.CancelledError:
                self._lease_reaper.unwanted(group.endpoint, number, granting)
                raise
            except BatonError as error:
                self._lease_reaper.failed(group.endpoint, number, error)
                learnt.full_since_s = min(learnt.full_since_s, self._clock.now_s())
                give_up_s = learnt.full_since_s + self._config.generation_wait_s
                if not isinstance(error, ResourceExhaustedError) or self._clock.now_s() > give_up_s:
                    record.blame(group.incarnation)
                    raise
            else:
                self._note_present(plan, lease)
                return lease
            learnt.full.add(group.incarnation)
            if self.chooser.with_room(record, record.avoid | learnt.full):
                return None
            learnt.full.clear()
            await asyncio.sleep(_FULL_PAUSE_S)

    def _reserve_spec(self, record: RequestRecord, plan: Plan) -> ReserveSpec:
        return ReserveSpec(
            request_id=record.request_id,
            attempt=record.attempt.number,
            num_tokens=record.num_tokens,
            capacity_tokens=record.request.capacity_tokens,
            ttl_s=self._config.lease_ttl_s,
            num_choices=record.request.num_slots,
            prefix_blocks=plan.slot_blocks,
            block_tokens=plan.blocks.block_tokens,
            prefills_locally=plan.chain is None,
        )

    def _note_present(self, plan: Plan, lease: Lease) -> None:
        """Correct the prefix index from a lease, which reports how many of the plan's blocks the node really has."""
        store, num_present = plan.generation.prefix_store, lease.num_present_tokens // plan.blocks.block_tokens
        self._prefixes.use(store, plan.slot_blocks[:num_present])
        self._prefixes.forget(store, plan.slot_blocks[num_present : num_present + 1])

    def _note_ranks(self, job: PrefillJob, prefill: PrefillTask) -> None:
        """Report the ranks' timings to the planner and the record when the prefill has succeeded."""
        if not prefill.cancelled() and failure_of(prefill) is None:
            self.chooser.context.planner_of(job.group).observe(job.group.name, prefill.result())
            job.record.report(prefill.result())
