"""Serves one prefill rank over gRPC: epochs, jobs and heartbeats. Pushes KV to a leased slot.

Called by `orchestrator.workers.client` (Run, GetStatus, ListPrefixBlocks) and by `deploy.groups` (StartEpoch,
GetStatus). Submits jobs to `prefill_workers.engine`, and pushes KV by `baton.transport.kv_sender`. Runs on the event
loop of the process and never touches a tensor: the engine's thread passes views of KV to a push session, and the event
loop awaits the engine's futures. The interceptor of `baton.transport.channel.make_server` converts errors to gRPC
statuses.
"""

import asyncio
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

import grpc

from baton import __version__
from baton.errors import BatonError, InvalidArgumentError, StalePrefixError, TransferError
from baton.modeling.hosting import PrefixPlace
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.node import NodeStore
from baton.modeling.prefix_store.store import Filled
from baton.planning.device_profile import DeviceProfile
from baton.process.own_thread import in_own_thread
from baton.proto_types import range_from_proto, range_to_proto, read, scalars
from baton.sampling_params import StructuredOutput
from baton.settings.place import WorkerPlace
from baton.text.grammars import Grammars
from baton.text.token_masks import ChoiceMasks
from baton.transport.block_exchange import BlockExchange
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.channel_cache import ChannelCache
from baton.transport.identity import ClusterSecret
from baton.transport.kv_client import KvClient
from baton.transport.kv_routes import make_pool
from baton.transport.kv_sender import PushSession, PushSummary, open_push
from baton.transport.proto_types import history_from_proto, kernels_to_proto, lease_from_proto
from baton.transport.terms import SeenTerms
from baton.types import MAX_EPOCH, Epoch, JobId, Rank, SampledToken, TokenRange
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from prefill_workers.block_threads import BlockThreads
from prefill_workers.communicators import Rendezvous, backend_of
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport
from prefill_workers.prefix_filling import PrefixFilling
from prefill_workers.torch_links import connect_torch_links

Context = grpc.aio.ServicerContext[Any, Any]


class PushSender:
    """KvSender that pushes a job's KV to the leased slots. If this rank stores the prompt's KV, it also writes the KV
    to the prefix store."""

    def __init__(self, session: PushSession, num_present: int, filling: PrefixFilling | None = None) -> None:
        self.num_present = num_present
        self.firsts: tuple[SampledToken, ...] = ()
        """First sampled token of each choice. Empty until the job is computed, and always empty on all ranks except the
        last."""
        self._session, self._filling = session, filling

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Push `data`, the KV of `tokens` in `layer`, to the slots, except for tokens whose KV the slots already have.
        If this rank stores the prompt's KV in the prefix store, also keep `data`, so that it can be stored later."""
        missing = TokenRange(min(max(tokens.start, self.num_present), tokens.end), tokens.end)
        if len(missing):
            self._session.offer(layer, missing, data[(len(tokens) - len(missing)) * (data.nbytes // len(tokens)) :])
        if self._filling is not None:
            self._filling.hold(layer, tokens, data)

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Write `data`, the KV that earlier ranks computed for `tokens` in `layer`, to the prefix store. Does nothing
        if this rank does not store the prompt's KV."""
        if self._filling is not None:
            self._filling.write(layer, tokens, data)

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        """Record `firsts`, the first sampled token of each choice, and end the push session. The tokens are sent when
        the push is committed."""
        self.firsts = firsts
        self._session.finish()

    def abort(self, error: BaseException) -> None:
        """End the push session with the error that made the job fail."""
        self._session.fail(error)


class PrefillRankServicer(prefill_pb2_grpc.PrefillRankServicer):
    """Serves the gRPC service baton.v1.PrefillRank with an engine. Takes ownership of `engine`, `store` and `grammars`.

    `terms` checks the calls of the servicer's server. `place` has the settings of the worker process. Two of them are
    used: the address of the network interface for links, and the cluster's secret, which is sent to generation groups.
    `store` is the node's prefix store; None if the node has none. `may_share` is True if KV may be sent through shared
    memory to groups of the same node. `grammars` are the model's output grammars; None: constrained outputs are
    refused. `profile` describes the rank's device; None: it is not reported.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        place: WorkerPlace,
        terms: SeenTerms,
        store: NodeStore | None = None,
        *,
        may_share: bool = True,
        grammars: Grammars | None = None,
        profile: DeviceProfile | None = None,
    ) -> None:
        self.engine, self.prefixes = engine, store.blocks if store is not None else None
        self._store, self._grammars = store, grammars
        self._host, self._terms = place.host, terms
        self._backend = backend_of(engine.decoder.device)
        self._pool = make_pool(engine.decoder.layout) if may_share else None
        connect = partial(make_channel, secret=ClusterSecret(place.secret))
        self._channels = ChannelCache(connect)
        self._exchange = None
        """Service that exchanges prefix blocks with other nodes; None if there is no prefix store."""
        if store is not None:
            self._exchange = BlockExchange(store.blocks, clock=engine.clock, connect=connect)
        self._blocks = BlockThreads()
        self._profile = None if profile is None else common_pb2.DeviceProfile(**asdict(profile))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the PrefillRank service with the server. If the node has a prefix store, also register the service
        from which other nodes fetch blocks."""
        prefill_pb2_grpc.add_PrefillRankServicer_to_server(self, server)
        if self._exchange is not None:
            self._exchange.add_to(server)

    async def StartEpoch(self, request: prefill_pb2.StartEpochRequest, context: Context) -> prefill_pb2.StartEpochReply:
        """Join the next epoch, i.e. connect to all other ranks. Replies when all ranks have joined. Other calls are
        served in the meantime."""
        rendezvous = rendezvous_from_proto(request, self._host)
        connect = partial(connect_torch_links, rendezvous, backend=self._backend)
        await asyncio.to_thread(
            self.engine.start_epoch, rendezvous.epoch, rendezvous.rank, rendezvous.num_ranks, connect
        )
        return prefill_pb2.StartEpochReply()

    async def Run(self, request: prefill_pb2.PrefillJob, context: Context) -> prefill_pb2.PrefillReport:
        """Run a job on this rank, and return its report. If the call fails, the job and its push of KV end immediately
        or soon after."""
        with self.engine.expect(Epoch(request.epoch), JobId(request.job)):  # first: other ranks may send already
            async with self._channels.use(request.lease.endpoint) as channel:
                return await self._run(request, channel)

    async def _run(self, request: prefill_pb2.PrefillJob, channel: grpc.aio.Channel) -> prefill_pb2.PrefillReport:
        job = job_from_proto(request, await self._open_prefix(request))
        filling = self._filling(request, job)
        lease = lease_from_proto(request.lease)
        if lease.num_tokens != job.chunks[-1].end:
            raise InvalidArgumentError(f"lease.num_tokens = {lease.num_tokens}: the prompt has {job.chunks[-1].end}")
        session = open_push(channel, self.engine.decoder.layout, lease, pool=self._pool)
        kv_sender = PushSender(session, lease.num_present_tokens, filling)
        filled = Filled()
        try:
            if job.params.structured_output is not None:
                job = replace(job, masks=self._masks(job, job.params.structured_output))
            if filling is not None and len(job.ranks) > 1:
                await self._blocks.run(filling.take)
            report = await self._compute(job, kv_sender, session)
            summary = await session.result()
            if kv_sender.firsts:
                await KvClient(channel).commit(lease.ref, kv_sender.firsts)
            if filling is not None:
                filled = await self._blocks.run(filling.finish)
                self._blocks.sink(partial(filling.sink, filled.stored))
        finally:
            session.cancel()
            if job.masks is not None:
                job.masks.cancel()
            if filling is not None:
                filling.drop()
            # The session may keep an error whose traceback has this frame, long after the job has ended.
            del job, session, kv_sender
        return report_to_proto(report, summary, Filled(filled.stored, filled.evicted + self._blocks.take_evicted()))

    async def GetStatus(self, request: prefill_pb2.PrefillStatusRequest, context: Context) -> prefill_pb2.PrefillStatus:
        """Answer a heartbeat with the status of the engine and a summary of the prefix store."""
        store = None
        if self.prefixes is not None:
            held = scalars(common_pb2.PrefixStoreStatus, await asyncio.to_thread(self.prefixes.holdings))
            moved = scalars(common_pb2.PrefixStoreStatus, self._exchange)
            store = common_pb2.PrefixStoreStatus(identity=self.prefixes.identity, **held, **moved)
        return prefill_pb2.PrefillStatus(
            **scalars(prefill_pb2.PrefillStatus, self.engine.status()),
            layout_fingerprint=self.engine.decoder.layout.fingerprint,
            version=__version__,
            kernels=kernels_to_proto(KERNELS.choice),
            prefix_store=store,
            profile=self._profile,
            term=self._terms.highest,
        )

    async def ListPrefixBlocks(
        self, request: common_pb2.ListPrefixBlocksRequest, context: Context
    ) -> common_pb2.ListPrefixBlocksReply:
        """Return the names of all blocks in the node's prefix store. Return no names if the node has no store."""
        blocks = await in_own_thread(self.prefixes.names) if self.prefixes is not None else []
        return common_pb2.ListPrefixBlocksReply(blocks=blocks)

    async def close(self) -> None:
        """Close the engine, the block threads, and everything else that the servicer owns. Call this when no gRPC call
        is running. Idempotent."""
        await in_own_thread(self.engine.close)
        await in_own_thread(self._blocks.close)
        if self._grammars is not None:
            await in_own_thread(self._grammars.close)
        if self._exchange is not None:
            await self._exchange.close()
        await self._channels.close()
        if self._pool is not None:
            self._pool.close()
        store, self._store = self._store, None
        if store is not None:
            await in_own_thread(store.close)

    async def _compute(self, job: Job, kv_sender: PushSender, session: PushSession) -> JobReport:
        """Run the job on the engine and return its report. Cancel the job if its push fails or the call ends."""
        computed = asyncio.wrap_future(self.engine.submit(job, kv_sender))
        pushed = asyncio.create_task(session.result())
        for each in (computed, pushed):
            each.add_done_callback(_retrieve)
        try:
            await asyncio.wait((computed, pushed), return_when=asyncio.FIRST_EXCEPTION)
            if pushed.done() and (error := pushed.exception()) is not None:
                self.engine.cancel(job.number, _as_baton(error))
            return await computed
        finally:
            pushed.cancel()
            if not computed.done():
                self.engine.cancel(job.number)

    async def _open_prefix(self, request: prefill_pb2.PrefillJob) -> tuple[KvBuffer, ...]:
        """Return the job's cached blocks, which stay mapped as long as the job or its push needs them. Raises
        StalePrefixError if there is no prefix store, and the errors of PrefixStore.open."""
        if not request.prefix_blocks:
            return ()
        if self.prefixes is None:
            raise StalePrefixError("prefix_blocks: this rank has no prefix store: prefill without them")
        return await self._blocks.run(partial(self.prefixes.open, tuple(request.prefix_blocks), _block_tokens(request)))

    def _masks(self, job: Job, form: StructuredOutput) -> "Future[list[ChoiceMasks]] | None":
        """Begin to compute the token masks of the job's first token, and return their future; None on all ranks except
        the last. Raises InvalidArgumentError if `grammars` is None."""
        if self.engine.rank != job.ranks[-1]:
            return None
        if self._grammars is None:
            raise InvalidArgumentError("sampling.structured_output: this rank has no tokenizer; leave it out")
        return self._grammars.prepare(form, job.output_ids)

    def _filling(self, request: prefill_pb2.PrefillJob, job: Job) -> PrefixFilling | None:
        """Return the PrefixFilling that stores the job's blocks; None on all ranks except the last, and if no blocks
        are to be stored."""
        if self.prefixes is None or not request.keep_blocks or self.engine.rank != job.ranks[-1]:
            return None
        block_tokens = _block_tokens(request)
        start = len(request.prefix_blocks) * block_tokens
        end = start + len(request.keep_blocks) * block_tokens
        if start < job.chunks[0].start or end > job.chunks[-1].end:
            raise InvalidArgumentError(f"keep_blocks are tokens [{start}, {end}): name whole blocks of the prompt")
        return PrefixFilling(self.prefixes, request.keep_blocks, start, block_tokens)


class PrefillServer:
    """Prefill engine together with its gRPC server. Create it with `start`, on the event loop."""

    def __init__(self, server: grpc.aio.Server, servicer: PrefillRankServicer, port: int) -> None:
        self.engine, self.port = servicer.engine, port
        self.prefixes = servicer.prefixes
        """Prefix store of the node; None if this rank does not store prefixes."""
        self._server, self._servicer = server, servicer

    @classmethod
    async def start(
        cls,
        engine: PrefillEngine,
        place: WorkerPlace,
        *,
        prefixes: PrefixPlace | None = None,
        may_share: bool = True,
        grammars: Grammars | None = None,
        profile: DeviceProfile | None = None,
    ) -> Self:
        """Start a server on a free port of `place.host`. It accepts callers that have the cluster's secret. Links use
        the same address.

        Takes ownership of `engine` and `grammars`, and closes them if this call raises. `prefixes` are the folders of
        the node's prefix store. They are created if they do not exist, and removed by their last user. `may_share` is
        True if KV may be sent through shared memory to groups of the same node. `grammars` constrain outputs; None:
        constrained outputs are refused. `profile` describes the rank's device. Raises ConfigError if the server cannot
        listen, or if a folder cannot be created.
        """
        try:
            secret = ClusterSecret(place.secret)
            terms = SeenTerms(secret)
            server = make_server(check=terms.check)
            port = bind(server, place.host)
            store = None if prefixes is None else prefixes.open(engine.decoder.layout, engine.clock, secret.text)
        except BaseException:
            await in_own_thread(engine.close)
            if grammars is not None:
                await in_own_thread(grammars.close)
            raise
        servicer = PrefillRankServicer(
            engine, place, terms, store, may_share=may_share, grammars=grammars, profile=profile
        )
        servicer.add_to(server)
        await server.start()
        return cls(server, servicer, port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, wait `grace_s` seconds for running calls, then cancel the remaining ones and close the
        engine. Idempotent."""
        await self._server.stop(grace_s)
        await self._servicer.close()


def rendezvous_from_proto(message: prefill_pb2.StartEpochRequest, host: str) -> Rendezvous:
    """Return the parameters of an epoch that a protobuf message describes. `host` is the address of the network
    interface for links.

    Raises InvalidArgumentError if the epoch is out of range, the rank is not in the group, the timeout is not positive,
    or the store's address is malformed.
    """
    if (epoch := message.epoch) > MAX_EPOCH:
        raise InvalidArgumentError(f"epoch = {epoch} is out of range: use at most {MAX_EPOCH}, one after another")
    if not message.rank < message.num_ranks:
        raise InvalidArgumentError(f"rank = {message.rank} is out of range: num_ranks is {message.num_ranks}")
    if not message.timeout_s > 0:
        raise InvalidArgumentError(f"timeout_s = {message.timeout_s} is out of range: give the ranks time to meet")
    if not message.store.rpartition(":")[2].isdigit():
        raise InvalidArgumentError(f"store = {message.store!r} is not an address: use host:port")
    return read(Rendezvous, message, host=host)


def job_from_proto(message: prefill_pb2.PrefillJob, prefix: tuple[KvBuffer, ...] = ()) -> Job:
    """Return the job that a protobuf message describes. `prefix` has the memory of the cached blocks that the message
    names. Raises InvalidArgumentError if ranks, chunks, prompt and prefix are inconsistent."""
    return read(
        Job,
        message,
        number=JobId(message.job),
        ranks=tuple(Rank(rank) for rank in message.ranks),
        chunks=tuple(range_from_proto(chunk) for chunk in message.chunks),
        prefix=prefix,
        masks=None,
        **history_from_proto(message.history)._asdict(),
    )


def report_to_proto(report: JobReport, push: PushSummary, filled: Filled) -> prefill_pb2.PrefillReport:
    """Return the protobuf message with one rank's report of a job. `push` describes the push of KV to the slots,
    `filled` the blocks that were stored."""
    timing = prefill_pb2.RankTiming(
        **scalars(prefill_pb2.RankTiming, report),
        tokens=range_to_proto(report.tokens),
        layers=[prefill_pb2.TimeSpan(**vars(layer)) for layer in report.layers],
        push_start_ns=push.first_unix_ns,
        push_end_ns=push.last_unix_ns,
        num_bytes_pushed=push.num_bytes,
        num_bytes_shared=push.num_bytes_shared,
    )
    return prefill_pb2.PrefillReport(timing=timing, stored_blocks=filled.stored, evicted_blocks=filled.evicted)


def _block_tokens(request: prefill_pb2.PrefillJob) -> int:
    if not request.block_tokens:
        raise InvalidArgumentError("block_tokens = 0 is out of range: say how many tokens a block has")
    return request.block_tokens


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """Read a future's exception, so that asyncio does not log it as never retrieved when the call reports another
    error."""
    if not future.cancelled():
        future.exception()


def _as_baton(error: BaseException) -> BatonError:
    return error if isinstance(error, BatonError) else TransferError(f"the push failed: {error!r}")
