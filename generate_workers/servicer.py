"""A generation group over gRPC: streams, status, and the KvReceiver of its slots on one server.

Steps 7 to 9 of a request's way (DESIGN.md, section 4). Runs on the process's asyncio loop; events come over from the
engine's thread. The calls' errors become statuses in the interceptor that transport.channel.make_server installs.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Self

import grpc

from baton import __version__
from baton.clock import Clock
from baton.errors import InvalidArgumentError
from baton.ids import RequestId, StreamNumber
from baton.proto_types import kv_ledger_to_proto
from baton.types import KvLayout
from baton.v1 import generate_pb2, generate_pb2_grpc
from generate_workers.engine import EngineConfig, GenerationEngine, StepStats
from generate_workers.machine_memory import make_memory
from generate_workers.open_streams import OpenStreams
from generate_workers.rows import GenerationRequest
from generate_workers.slots import SlotTable
from modeling.decoder import Decoder
from text.tokenizer import Tokenizer
from transport.channel import bind, make_server
from transport.kv_receiver import MAX_TTL_S, KvReceiverServicer
from transport.proto_types import event_to_proto, history_from_proto, lease_ref_from_proto

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generate_pb2_grpc.GenerationGroupServicer):
    """Serves baton.v1.GenerationGroup over a running engine."""

    def __init__(self, engine: GenerationEngine, layout: KvLayout) -> None:
        self.engine = engine
        self._streams = OpenStreams(engine)
        self._layout = layout

    async def Stream(
        self, request: generate_pb2.StreamRequest, context: Context
    ) -> AsyncIterator[generate_pb2.TokenEvent]:
        """Streams a request's events up to the last choice's terminal event."""
        asked = request_from_proto(request)
        if request.HasField("takeover"):
            outputs = [tuple(output.token_ids) for output in request.takeover.outputs]
            stream = self._streams.take_over(asked, StreamNumber(request.number), outputs)
        else:
            outputs = [asked.output_ids] * asked.params.n
            stream = self._streams.open(asked, StreamNumber(request.number), _checked_keep(request.keep_s))
        async with aclosing(self._streams.read(stream, [len(output) for output in outputs])) as events:
            async for event in events:
                yield event_to_proto(event)

    async def Cancel(self, request: generate_pb2.CancelRequest, context: Context) -> generate_pb2.CancelReply:
        """Ends a stream, also one that outlived its call."""
        self._streams.cancel(StreamNumber(request.number))
        return generate_pb2.CancelReply()

    def close(self) -> None:
        """Lets kept streams go; once no call runs."""
        self._streams.close()

    async def GetStatus(
        self, request: generate_pb2.GenerationStatusRequest, context: Context
    ) -> generate_pb2.GenerationStatus:
        """Answers a heartbeat; UNAVAILABLE when the engine has failed, so that the worker is replaced."""
        status = self.engine.status()
        ledger = status.ledger
        return generate_pb2.GenerationStatus(
            num_slots=ledger.num_slots,
            num_free=ledger.num_free,
            num_leased=ledger.num_leased,
            num_active=ledger.num_active,
            num_quarantined=ledger.num_quarantined,
            num_bytes_held=ledger.num_bytes_held,
            num_steps=status.num_steps,
            layout_fingerprint=self._layout.fingerprint,
            version=__version__,
            kept=[
                generate_pb2.KeptStream(request_id=request_id, num_slots=num_slots)
                for request_id, num_slots in self._streams.kept()
            ],
            kv=kv_ledger_to_proto(ledger.kv),
            num_preemptions=status.num_preemptions,
            imbalance=ledger.imbalance,
            last_step=None if status.last_step is None else self._step_to_proto(status.last_step),
        )

    def _step_to_proto(self, step: StepStats) -> generate_pb2.StepSample:
        rows = max(step.num_decode_rows, 1)
        return generate_pb2.StepSample(
            num_rows=step.num_decode_rows,
            num_prefill_tokens=step.num_prefill_tokens,
            context_tokens=step.num_kv_bytes / (rows * self._layout.token_bytes),
            duration_s=step.duration_s,
        )


class GenerationServer:
    """An engine, its slots, and the server that both services are on. Make one with `start`, on the loop."""

    def __init__(self, server: grpc.aio.Server, servicer: GenerationServicer, slots: SlotTable, port: int) -> None:
        self.engine = servicer.engine
        self.slots = slots
        self.port = port
        self._server = server
        self._servicer = servicer

    @classmethod
    async def start(
        cls,
        decoder: Decoder,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Clock,
        host: str,
        port: int = 0,
    ) -> Self:
        """Serves on host:port; port 0 takes any free one. Leases name `host`, so pushers must be able to reach it.

        Raises ConfigError when it cannot listen there, and for memory that cannot be had.
        """
        memory = make_memory(decoder, config)
        server = make_server()
        bound = bind(server, host, port)
        slots = SlotTable(memory, clock, endpoint=f"{host}:{bound}")
        engine = GenerationEngine(decoder, tokenizer, slots, clock, config)
        servicer = GenerationServicer(engine, decoder.layout)
        generate_pb2_grpc.add_GenerationGroupServicer_to_server(servicer, server)
        KvReceiverServicer(slots).add_to(server)
        await server.start()
        engine.start()
        return cls(server, servicer, slots, bound)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more calls, gives running ones `grace_s` seconds, then ends them and the engine. Idempotent."""
        await self._server.stop(grace_s)
        self._servicer.close()
        await asyncio.to_thread(self.engine.close)


def _checked_keep(keep_s: float) -> float:
    if not 0 <= keep_s <= MAX_TTL_S:  # also false for NaN
        raise InvalidArgumentError(f"keep_s = {keep_s} is out of range: use 0 to {MAX_TTL_S:g} seconds")
    return keep_s


def request_from_proto(message: generate_pb2.StreamRequest) -> GenerationRequest:
    """What a client asks for, as the engine takes it. Raises InvalidArgumentError for a sampling field out of range."""
    if not message.request_id:
        raise InvalidArgumentError("request_id is empty: name the request")
    history = history_from_proto(message.history)
    return GenerationRequest(
        request_id=RequestId(message.request_id),
        prompt_ids=history.prompt_ids,
        output_ids=history.output_ids,
        params=history.params,
        lease_ref=lease_ref_from_proto(message.lease) if message.HasField("lease") else None,
    )
