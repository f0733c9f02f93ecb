"""A prefill rank over gRPC: its epochs, its jobs, its heartbeat, and the pushes by which KV leaves to the leased slot.

Step 4, and step 6's way out, of a request's way (DESIGN.md, section 4). Runs on the process's asyncio loop and never
touches a tensor: the engine's thread offers views of KV to a push session, and this loop's futures follow the engine's.
The calls' errors become statuses in the interceptor that transport.channel.make_server installs.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc

from baton import __version__
from baton.clock import Clock
from baton.errors import BatonError, InvalidArgumentError, StalePrefixError, TransferError
from baton.ids import MAX_EPOCH, Epoch, JobId, Rank, RequestId
from baton.types import SampledToken, TokenRange
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from modeling.forward.decoder import Decoder
from modeling.kernels.products import KERNELS
from modeling.kv.buffers import KvBuffer
from modeling.prefix_store.node import DiskPlace, NodeStore
from modeling.prefix_store.store import Filled, Holdings, PrefixStore
from prefill_workers.block_threads import BlockThreads
from prefill_workers.channel_cache import ChannelCache
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job, JobReport, TimeSpan
from prefill_workers.prefix_filling import PrefixFilling
from prefill_workers.torch_links import Meeting, connect_torch_links
from transport.channel import bind, make_channel, make_server
from transport.kv_sender import KvPushClient, PushSession, PushSummary
from transport.proto_types import history_from_proto, kernels_to_proto, lease_from_proto, range_from_proto

Context = grpc.aio.ServicerContext[Any, Any]


class PushOutlet:
    """A KvOutlet into a push session and, on a rank that keeps the prompt, the prefix store. The slot has the first
    `num_present` tokens already: only what lies beyond is pushed. Called on the engine's thread; `firsts` is read once
    the job is computed."""

    def __init__(self, session: PushSession, num_present: int, filling: PrefixFilling | None = None) -> None:
        self.firsts: tuple[SampledToken, ...] = ()
        self._session = session
        self.num_present = num_present
        self._filling = filling

    def push(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        missing = TokenRange(min(max(tokens.start, self.num_present), tokens.end), tokens.end)
        if len(missing):
            self._session.offer(layer, missing, data[(len(tokens) - len(missing)) * (data.nbytes // len(tokens)) :])
        if self._filling is not None:
            self._filling.hold(layer, tokens, data)

    def received(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        if self._filling is not None:
            self._filling.write(layer, tokens, data)

    def finish(self, firsts: tuple[SampledToken, ...]) -> None:
        self.firsts = firsts
        self._session.finish()

    def abort(self, error: BaseException) -> None:
        self._session.fail(error)


class PrefillRankServicer(prefill_pb2_grpc.PrefillRankServicer):
    """Serves baton.v1.PrefillRank over an engine. `host`: address of the interface that the links use. `prefixes`: the
    node's, if it keeps any."""

    def __init__(self, engine: PrefillEngine, host: str, prefixes: PrefixStore | None = None) -> None:
        self._engine = engine
        self._host = host
        self.prefixes = prefixes
        self._channels = ChannelCache(make_channel)
        self._blocks = BlockThreads()

    async def StartEpoch(self, request: prefill_pb2.StartEpochRequest, context: Context) -> prefill_pb2.StartEpochReply:
        """Joins the next epoch; other calls are served meanwhile."""
        meeting = meeting_from_proto(request, self._host)
        connect = partial(connect_torch_links, meeting)
        await asyncio.to_thread(self._engine.start_epoch, meeting.epoch, meeting.rank, meeting.num_ranks, connect)
        return prefill_pb2.StartEpochReply()

    async def Run(self, request: prefill_pb2.PrefillJob, context: Context) -> prefill_pb2.PrefillReport:
        """Runs a job on this rank; however the call ends, the job and its push have ended or are about to."""
        with self._engine.expect(Epoch(request.epoch), JobId(request.job)):  # first: other ranks may be ahead
            async with self._channels.use(request.lease.endpoint) as channel:
                return await self._run(request, KvPushClient(channel, self._engine.decoder.layout))

    async def _run(self, request: prefill_pb2.PrefillJob, client: KvPushClient) -> prefill_pb2.PrefillReport:
        job = job_from_proto(request, await self._open_prefix(request))
        filling = self._filling(request, job)
        lease = lease_from_proto(request.lease)
        if lease.num_tokens != job.chunks[-1].end:
            raise InvalidArgumentError(f"lease.num_tokens = {lease.num_tokens}: the prompt has {job.chunks[-1].end}")
        session = client.open_push(lease)
        outlet = PushOutlet(session, lease.num_present_tokens, filling)
        filled = Filled()
        try:
            if filling is not None and len(job.ranks) > 1:
                await self._blocks.run(filling.take)
            report = await self._compute(job, outlet, session)
            summary = await session.result()
            if outlet.firsts:
                await client.commit(lease.ref, outlet.firsts)
            if filling is not None:
                filled = await self._blocks.run(filling.finish)
                self._blocks.sink(partial(filling.sink, filled.stored))
        finally:
            session.cancel()
            if filling is not None:
                filling.drop()
            # An error that the session keeps has this frame in its traceback, and may outlive the job by long.
            del job, session, outlet
        return report_to_proto(report, summary, Filled(filled.stored, filled.evicted + self._blocks.take_evicted()))

    async def GetStatus(self, request: prefill_pb2.PrefillStatusRequest, context: Context) -> prefill_pb2.PrefillStatus:
        """Answers a heartbeat."""
        status = self._engine.status()
        holdings = await asyncio.to_thread(self.prefixes.holdings) if self.prefixes is not None else Holdings(0, 0, 0)
        return prefill_pb2.PrefillStatus(
            epoch=status.epoch,
            epoch_error=status.epoch_error,
            num_jobs=status.num_jobs,
            progress=status.progress,
            num_jobs_done=status.num_jobs_done,
            layout_fingerprint=self._engine.decoder.layout.fingerprint,
            version=__version__,
            stall=status.stall,
            prefix_bytes=holdings.num_bytes,
            num_prefix_blocks=holdings.num_blocks,
            prefix_room_bytes=holdings.bound_bytes,
            prefix_store=self.prefixes.identity if self.prefixes is not None else "",
            kernels=kernels_to_proto(KERNELS.choice),
        )

    async def ListPrefixBlocks(
        self, request: common_pb2.ListPrefixBlocksRequest, context: Context
    ) -> common_pb2.ListPrefixBlocksReply:
        """All that the node's store holds."""
        blocks = await asyncio.to_thread(self.prefixes.names) if self.prefixes is not None else []
        return common_pb2.ListPrefixBlocksReply(blocks=blocks)

    async def close(self) -> None:
        """Closes the channels to all receivers of KV, and ends work on blocks; once no call runs."""
        await asyncio.to_thread(self._blocks.close)
        await self._channels.close()

    async def _compute(self, job: Job, outlet: PushOutlet, session: PushSession) -> JobReport:
        """The job's report. A push that fails, or the end of the call, gives the job up."""
        computed = asyncio.wrap_future(self._engine.submit(job, outlet))
        pushed = asyncio.create_task(session.result())
        for each in (computed, pushed):
            each.add_done_callback(_retrieve)
        try:
            await asyncio.wait((computed, pushed), return_when=asyncio.FIRST_EXCEPTION)
            if pushed.done() and (error := pushed.exception()) is not None:
                self._engine.cancel(job.number, _as_baton(error))
            return await computed
        finally:
            pushed.cancel()
            if not computed.done():
                self._engine.cancel(job.number)

    async def _open_prefix(self, request: prefill_pb2.PrefillJob) -> tuple[KvBuffer, ...]:
        """Mapped as long as the job, or its push, needs it. Raises what PrefixStore.open raises."""
        if not request.prefix_blocks:
            return ()
        if self.prefixes is None:
            raise StalePrefixError("prefix_blocks: this rank has no prefix store: prefill without them")
        names, block_tokens = tuple(request.prefix_blocks), _block_tokens(request)
        return await self._blocks.run(partial(self.prefixes.open, names, block_tokens))

    def _filling(self, request: prefill_pb2.PrefillJob, job: Job) -> PrefixFilling | None:
        """None where nothing is to be kept: by all ranks but the last, and on a node without a prefix store."""
        if self.prefixes is None or not request.keep_blocks or self._engine.rank != job.ranks[-1]:
            return None
        block_tokens = _block_tokens(request)
        start = len(request.prefix_blocks) * block_tokens
        end = start + len(request.keep_blocks) * block_tokens
        if start < job.chunks[0].start or end > job.chunks[-1].end:
            raise InvalidArgumentError(f"keep_blocks are tokens [{start}, {end}): name whole blocks of the prompt")
        return PrefixFilling(self.prefixes, request.keep_blocks, start, block_tokens)


class PrefillServer:
    """An engine, and the server that its service is on. Make one with `start`, on the loop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        engine: PrefillEngine,
        servicer: PrefillRankServicer,
        port: int,
        store: NodeStore | None = None,
    ) -> None:
        self.engine = engine
        self.port = port
        self._server = server
        self._servicer = servicer
        self._store = store

    @property
    def prefixes(self) -> PrefixStore | None:
        """The node's, if this rank keeps any."""
        return self._servicer.prefixes

    @classmethod
    async def start(
        cls,
        decoder: Decoder,
        *,
        clock: Clock,
        host: str,
        port: int = 0,
        watchdog_floor_s: float = 2.0,
        prefix_folder: Path | None = None,
        prefix_bytes: int = 0,
        prefix_disk: DiskPlace | None = None,
    ) -> Self:
        """Serves on host:port, and links over `host`; port 0 takes any free one. Jobs may begin behind the prefixes in
        `prefix_folder`, which is made if need be and removed by its last user; up to `prefix_bytes` are kept there,
        and more on disk, if there is a place. Raises ConfigError when it cannot listen there, or make that folder."""
        server = make_server()
        bound = bind(server, host, port)
        store = None
        if prefix_folder is not None:
            layout = decoder.layout
            store = NodeStore(prefix_folder, layout, bound_bytes=prefix_bytes, clock=clock, disk=prefix_disk)
        engine = PrefillEngine(decoder, clock, watchdog_floor_s=watchdog_floor_s)
        servicer = PrefillRankServicer(engine, host, store.blocks if store is not None else None)
        prefill_pb2_grpc.add_PrefillRankServicer_to_server(servicer, server)
        await server.start()
        return cls(server, engine, servicer, bound, store)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more calls, gives running ones `grace_s` seconds, then ends them and the engine. Idempotent."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(self.engine.close)
        await self._servicer.close()
        store, self._store = self._store, None
        if store is not None:
            await asyncio.to_thread(store.close)


def meeting_from_proto(message: prefill_pb2.StartEpochRequest, host: str) -> Meeting:
    """Raises InvalidArgumentError for an epoch beyond all bounds, a place that is not in the group, or no time to
    meet."""
    if message.epoch > MAX_EPOCH:
        raise InvalidArgumentError(
            f"epoch = {message.epoch} is out of range: use at most {MAX_EPOCH}, one after another"
        )
    if not message.rank < message.num_ranks:
        raise InvalidArgumentError(f"rank = {message.rank} is out of range: num_ranks is {message.num_ranks}")
    if not message.timeout_s > 0:
        raise InvalidArgumentError(f"timeout_s = {message.timeout_s} is out of range: give the ranks time to meet")
    if not message.store.rpartition(":")[2].isdigit():
        raise InvalidArgumentError(f"store = {message.store!r} is no address: use host:port")
    return Meeting(
        epoch=Epoch(message.epoch),
        rank=Rank(message.rank),
        num_ranks=message.num_ranks,
        store=message.store,
        host=host,
        timeout_s=message.timeout_s,
    )


def job_from_proto(message: prefill_pb2.PrefillJob, prefix: tuple[KvBuffer, ...] = ()) -> Job:
    """`prefix`: the blocks that the message names. Raises InvalidArgumentError for ranks, chunks, a prompt and a prefix
    that do not fit together."""
    history = history_from_proto(message.history)
    return Job(
        number=JobId(message.job),
        epoch=Epoch(message.epoch),
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        ranks=tuple(Rank(rank) for rank in message.ranks),
        chunks=tuple(range_from_proto(chunk) for chunk in message.chunks),
        prompt_ids=history.prompt_ids,
        output_ids=history.output_ids,
        params=history.params,
        prefix=prefix,
        due_s=message.due_s,
        layer_s=message.layer_s,
    )


def report_to_proto(report: JobReport, push: PushSummary, filled: Filled) -> prefill_pb2.PrefillReport:
    """What one rank did, as a message."""
    return prefill_pb2.PrefillReport(
        rank=report.rank,
        run=_span_to_proto(report.run),
        layers=[_span_to_proto(layer) for layer in report.layers],
        wait_s=report.wait_s,
        push=prefill_pb2.TimeSpan(start_unix_ns=push.first_unix_ns, end_unix_ns=push.last_unix_ns),
        num_bytes_pushed=push.num_bytes,
        num_bytes_sent=report.num_bytes_sent,
        num_messages_sent=report.num_messages_sent,
        send_s=report.send_s,
        stored_blocks=filled.stored,
        evicted_blocks=filled.evicted,
    )


def _block_tokens(request: prefill_pb2.PrefillJob) -> int:
    if not request.block_tokens:
        raise InvalidArgumentError("block_tokens = 0 is out of range: say how many tokens a block has")
    return request.block_tokens


def _span_to_proto(span: TimeSpan) -> prefill_pb2.TimeSpan:
    return prefill_pb2.TimeSpan(start_unix_ns=span.start_unix_ns, end_unix_ns=span.end_unix_ns)


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """Of two failures the call reports one; asyncio need not log the other as lost."""
    if not future.cancelled():
        future.exception()


def _as_baton(error: BaseException) -> BatonError:
    return error if isinstance(error, BatonError) else TransferError(f"the push failed: {error!r}")
