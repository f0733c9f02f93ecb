"""Serves a generation group over gRPC: streams, status, and the KvReceiver of its slots, all on one server.

The orchestrator calls the server through `orchestrator.workers`, and prefill ranks push KV to it.
`streams.open_streams` serves streams, and `baton.transport.kv_receiver` serves leases. Runs on the process's asyncio
loop. Events arrive from the engine's thread. An interceptor that baton.transport.channel.make_server installs converts
the errors of calls to gRPC statuses.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import grpc

from baton import __version__
from baton.errors import InvalidArgumentError, StaleTermError
from baton.modeling.hosting import PrefixPlace
from baton.modeling.kernels.process_kernels import KERNELS
from baton.planning.device_profile import DeviceProfile
from baton.planning.step_cost import LearntCosts
from baton.prefix_blocks import BlockNaming
from baton.process.clock import Clock
from baton.process.own_thread import in_own_thread
from baton.proto_types import read, scalars
from baton.settings.addresses import join_address
from baton.settings.place import WorkerPlace
from baton.transport.block_exchange import BlockExchange
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.identity import ClusterSecret
from baton.transport.kv_receiver import MAX_TTL_S, KvReceiverServicer
from baton.transport.proto_types import history_from_proto, kernels_to_proto, lease_ref_from_proto
from baton.transport.terms import SeenTerms, term_of
from baton.types import KvLayout, StreamNumber
from baton.v1 import common_pb2, generate_pb2, generate_pb2_grpc
from generate_workers.compiling import compile_steps
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.device_steps import make_device_steps
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.rows import GenerationRequest
from generate_workers.engine.served_model import ServedModel
from generate_workers.engine.speculation import SpeculationStats
from generate_workers.engine.status import StepStats
from generate_workers.prefixes.answer_saving import AnswerSaver
from generate_workers.prefixes.loading import PrefixLoader
from generate_workers.slots.table import SlotTable
from generate_workers.speculation.making import make_speculation
from generate_workers.stream_messages import StreamMessage, encode_end, encode_event, messages_of
from generate_workers.streams.open_streams import OpenStream, OpenStreams
from generate_workers.streams.shared_reader import SharedReader

Context = grpc.aio.ServicerContext[Any, Any]


class GroupPrefixes:
    """Access of a generation group to the prefix store of its node, which is shared with the node's prefill ranks. A
    leased slot may begin with blocks from the store. The KV of answers is saved to the store, and blocks of other nodes
    are copied to the store."""

    def __init__(self, place: PrefixPlace, slots: SlotTable, secret: ClusterSecret) -> None:
        """`place`: location of the node's prefix store. `secret`: secret of the cluster, which is sent in calls to
        workers of other nodes. It also determines the alternative name of a store folder whose name is taken by another
        user. Raises ConfigError if a folder cannot be created."""
        self._node = place.open(slots.layout, slots.clock, secret.text)
        self.store = self._node.blocks
        self.loader = PrefixLoader(slots, self.store)
        self.saver = AnswerSaver(slots, self.store)
        self.exchange = BlockExchange(self.store, clock=slots.clock, connect=partial(make_channel, secret=secret))

    async def close(self) -> None:
        """Wait until running loads of blocks have ended, and release the store's folders. Answers (the KV of ended
        sequences) that are not saved yet are dropped. Must be called once, after the engine has ended."""
        await self.loader.close()
        await in_own_thread(self.saver.close)
        await self.exchange.close()
        await in_own_thread(self._node.close)


class GenerationServicer(generate_pb2_grpc.GenerationGroupServicer):
    """Serves baton.v1.GenerationGroup with a running engine. `terms` checks the calls of the servicer's server.
    `prefixes`: access to the node's prefix store; None: no store. `profile`: profile of the engine's device; None: it
    is not reported."""

    def __init__(
        self,
        engine: GenerationEngine,
        layout: KvLayout,
        terms: SeenTerms,
        prefixes: GroupPrefixes | None = None,
        profile: DeviceProfile | None = None,
    ) -> None:
        self.engine = engine
        self._terms = terms
        self._profile = None if profile is None else common_pb2.DeviceProfile(**asdict(profile))
        self.prefixes = prefixes
        # approximate KV is not saved, because exact groups would use it
        saver = prefixes.saver if prefixes is not None and engine.residency.traits.is_exact else None
        self._streams = OpenStreams(engine, saver)
        self._readers = dict[SharedReader[StreamMessage], int]()
        """Readers of all Streams calls, with the term of each caller."""
        terms.on_rise = self._end_superseded
        self._layout = layout

    async def Streams(
        self, commands: AsyncIterator[generate_pb2.StreamCommand], context: Context
    ) -> AsyncIterator[generate_pb2.StreamEvents]:
        """Yield the events of all streams that `commands` opens. Ends when the client has ended `commands` and all
        streams have ended, or when an orchestrator of a higher term than the client's has called this worker."""
        reader = SharedReader(self._streams, encode_event, encode_end)
        self._readers[reader] = term_of(context.invocation_metadata() or ())
        obeying = asyncio.create_task(self._obey(commands, reader))
        try:
            async with aclosing(reader.batches()) as batches:
                async for batch in batches:
                    for message in messages_of(batch):
                        yield message
            await obeying  # raises the error of reading the commands, if any
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            reader.close()
            del self._readers[reader]

    async def _obey(
        self, commands: AsyncIterator[generate_pb2.StreamCommand], reader: SharedReader[StreamMessage]
    ) -> None:
        try:
            async for command in commands:
                if command.WhichOneof("command") == "open":
                    reader.add(StreamNumber(command.open.number), partial(self._open, command.open))
                else:
                    reader.leave(StreamNumber(command.leave))
        finally:
            reader.complete()

    def _end_superseded(self) -> None:
        """End the Streams calls of orchestrators that have been replaced. Their streams can be taken over."""
        for reader, term in self._readers.items():
            try:
                self._terms.require(term)
            except StaleTermError as error:
                reader.break_off(error.with_traceback(None))

    def _open(self, request: generate_pb2.StreamRequest, on_message: Callable[[], None]) -> OpenStream:
        """Open a new stream, or take over an existing one."""
        asked, number = request_from_proto(request), StreamNumber(request.number)
        naming = _naming_from_proto(request.store) if request.HasField("store") else None
        if request.HasField("takeover"):
            outputs = [tuple(output.token_ids) for output in request.takeover.outputs]
            return self._streams.take_over(asked, number, outputs, on_message)
        return self._streams.open(asked, number, _checked_keep(request.keep_s), on_message, naming)

    async def Cancel(self, request: generate_pb2.CancelRequest, context: Context) -> generate_pb2.CancelReply:
        """End a stream, even if the call that opened it was lost."""
        self._streams.cancel(StreamNumber(request.number))
        return generate_pb2.CancelReply()

    async def ListPrefixBlocks(
        self, request: common_pb2.ListPrefixBlocksRequest, context: Context
    ) -> common_pb2.ListPrefixBlocksReply:
        """Return the names of all blocks in the node's prefix store."""
        blocks = await in_own_thread(self.prefixes.store.names) if self.prefixes is not None else []
        return common_pb2.ListPrefixBlocksReply(blocks=blocks)

    def close(self) -> None:
        """Stop the timers of streams that no call reads. Must be called only when no gRPC call is running."""
        self._streams.close()

    async def GetStatus(
        self, request: generate_pb2.GenerationStatusRequest, context: Context
    ) -> generate_pb2.GenerationStatus:
        """Return the status for a heartbeat. Raises UnavailableError when the engine has failed or is closed; the
        worker must then be replaced."""
        status, traits = self.engine.status(), self.engine.residency.traits
        kept = [generate_pb2.KeptStream(request_id=name, num_slots=held) for name, held in self._streams.kept()]
        return generate_pb2.GenerationStatus(
            **scalars(generate_pb2.GenerationStatus, status),
            **scalars(generate_pb2.GenerationStatus, status.ledger),
            kv=generate_pb2.KvLedger(**scalars(generate_pb2.KvLedger, status.ledger.kv)),
            layout_fingerprint=self._layout.fingerprint,
            version=__version__,
            kept=kept,
            last_step=None if status.last_step is None else self._step_to_proto(status.last_step),
            step_costs=_step_costs_to_proto(status.step_costs),
            residency=traits.name,
            is_approximate=not traits.is_exact,
            kernels=kernels_to_proto(KERNELS.choice),
            prefix_store=None if self.prefixes is None else await _prefix_store(self.prefixes),
            speculation=None if status.speculation is None else _speculation_to_proto(status.speculation),
            profile=self._profile,
            term=self._terms.highest,
        )

    def _step_to_proto(self, step: StepStats) -> generate_pb2.StepSample:
        rows = max(step.num_decode_rows, 1)
        return generate_pb2.StepSample(
            num_rows=step.num_decode_rows,
            num_prefill_tokens=step.num_prefill_tokens,
            context_tokens=(step.num_kv_bytes - step.num_draft_kv_bytes) / (rows * self._layout.token_bytes),
            duration_s=step.duration_s,
            num_drafts=step.num_drafts,
            predicted_s=step.predicted_s,
        )


class GenerationServer:
    """Engine of a generation group, its slots, and the gRPC server of GenerationGroup and KvReceiver. Made with
    `start`, on the asyncio loop."""

    def __init__(self, server: grpc.aio.Server, servicer: GenerationServicer, slots: SlotTable, port: int) -> None:
        self.engine, self.slots, self.port = servicer.engine, slots, port
        self.prefixes = servicer.prefixes.store if servicer.prefixes is not None else None
        """Prefix store of the node; None if this group does not use a prefix store."""
        self._server, self._servicer = server, servicer

    @classmethod
    async def start(
        cls,
        model: ServedModel,
        place: WorkerPlace,
        config: EngineConfig,
        *,
        clock: Clock,
        prefix_place: PrefixPlace | None = None,
    ) -> Self:
        """Start a server on a free port of `place.host`. Only callers that have the cluster's secret are served. Leases
        contain the server's address, so prefill ranks must be able to reach it.

        `place.num_engines` is the number of engines, including this one, that share the machine's memory.
        `prefix_place`: folders of the node's prefix store; None: no store is used. The folders are created if missing,
        and are removed by the last process that uses them. Slots may begin with blocks from the store, and answers are
        saved to it. Raises ConfigError if the server cannot listen, a folder cannot be created, memory cannot be
        allocated, or the configured speculation is not supported.
        """
        secret, decoder = ClusterSecret(place.secret), model.decoder
        memory = make_memory(decoder, config, place.num_engines, draft_model=model.draft_model)
        terms = SeenTerms(secret)
        server = make_server(check=terms.check)
        port = bind(server, place.host)
        slots = SlotTable(memory, clock, endpoint=join_address(place.host, port))
        await asyncio.to_thread(compile_steps, decoder, memory.residency, config)
        device_steps = await asyncio.to_thread(make_device_steps, decoder, memory.residency, config, clock)
        speculation = make_speculation(model, slots, config, device_steps=device_steps)  # may raise: before the store
        prefixes = None if prefix_place is None else GroupPrefixes(prefix_place, slots, secret)
        reclaim = prefixes.saver.give_up if prefixes is not None else None
        running = RunningRows(slots, ChunkedPrefillPolicy.of(config, model), speculation, reclaim)
        engine = GenerationEngine(model, running, config, device_steps=device_steps, crash_note=place.crash_note)
        servicer = GenerationServicer(engine, decoder.layout, terms, prefixes, model.profile)
        generate_pb2_grpc.add_GenerationGroupServicer_to_server(servicer, server)
        KvReceiverServicer(slots, prefixes.loader if prefixes is not None else None, clock=clock).add_to(server)
        if prefixes is not None:
            prefixes.exchange.add_to(server)
        await server.start()
        engine.start()
        return cls(server, servicer, slots, port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, and wait at most `grace_s` seconds for running calls. Then cancel the remaining ones and
        close the engine. Idempotent."""
        await self._server.stop(grace_s)
        self._servicer.close()
        await in_own_thread(self.engine.close)
        prefixes, self._servicer.prefixes = self._servicer.prefixes, None
        if prefixes is not None:
            await prefixes.close()
            await in_own_thread(self.engine.close)  # closed again: a block's copy may have restarted the link's threads


def _speculation_to_proto(stats: SpeculationStats) -> generate_pb2.SpeculationStatus:
    sources = [
        generate_pb2.DraftSource(counts=generate_pb2.DraftCounts(**vars(each.counts)), draft_keys=each.draft_keys)
        for each in stats.sources
    ]
    return generate_pb2.SpeculationStatus(**scalars(generate_pb2.SpeculationStatus, stats), sources=sources)


def _step_costs_to_proto(costs: LearntCosts) -> generate_pb2.StepCosts:
    plain, verifying = (generate_pb2.WorkCost(**vars(each)) for each in (costs.plain, costs.verifying))
    return generate_pb2.StepCosts(**scalars(generate_pb2.StepCosts, costs), plain=plain, verifying=verifying)


async def _prefix_store(prefixes: GroupPrefixes) -> common_pb2.PrefixStoreStatus:
    return common_pb2.PrefixStoreStatus(
        **scalars(common_pb2.PrefixStoreStatus, await asyncio.to_thread(prefixes.store.holdings)),
        **scalars(common_pb2.PrefixStoreStatus, prefixes.loader),
        **scalars(common_pb2.PrefixStoreStatus, prefixes.saver),
        **scalars(common_pb2.PrefixStoreStatus, prefixes.exchange),
        identity=prefixes.store.identity,
    )


def _checked_keep(keep_s: float) -> float:
    if not 0 <= keep_s <= MAX_TTL_S:  # also false for NaN
        raise InvalidArgumentError(f"keep_s = {keep_s} is out of range: use 0 to {MAX_TTL_S:g} seconds")
    return keep_s


def request_from_proto(message: generate_pb2.StreamRequest) -> GenerationRequest:
    """Convert a stream request to the engine's type. Raises InvalidArgumentError for a sampling field out of range."""
    if not message.request_id:
        raise InvalidArgumentError("request_id is empty: name the request")
    lease_ref = lease_ref_from_proto(message.lease) if message.HasField("lease") else None
    return read(GenerationRequest, message, lease_ref=lease_ref, **history_from_proto(message.history)._asdict())


def _naming_from_proto(message: generate_pb2.BlockNaming) -> BlockNaming:
    if not message.block_tokens:
        raise InvalidArgumentError("store.block_tokens = 0 is out of range: say how many tokens a block has")
    return BlockNaming(message.block_tokens, message.salt)
