"""A generation group's server, and a client that acts as its orchestrator, over real gRPC in one process."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import torch

from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import PrefixPlace
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.node import DiskPlace
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import make_channel
from baton.transport.kv_client import KvClient
from baton.transport.kv_sender import open_push
from baton.transport.kv_sink import ReserveSpec
from baton.transport.proto_types import history_to_proto, lease_ref_to_proto
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import Lease, LeaseRef, RequestId, TokenEvent
from baton.v1 import generate_pb2, generate_pb2_grpc
from generate_workers.config import EngineConfig
from generate_workers.engine.served_model import ServedModel
from generate_workers.servicer import GenerationServer
from orchestrator.workers.streams import SharedStreams, StreamPart
from tests.support.engines.generation import eos_decoder, prefilled, sampled_next
from tests.support.engines.prefixes import PLENTY
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.secret import PLACE, SECRET

SHORT = SamplingParams(max_tokens=8, temperature=0.8, seed=5, ignore_eos=True)
IDLE = generate_pb2.GenerationStatusRequest()


class Client:
    """Client that acts as the orchestrator of one generation group."""

    def __init__(self, server: GenerationServer, channel: grpc.aio.Channel, decoder: Decoder) -> None:
        self.server = server
        self.decoder = decoder
        self.kv = KvClient(channel)
        self._channel = channel
        self.streams = SharedStreams(channel)
        self._numbers = itertools.count(1)
        self.stub: generate_pb2_grpc.GenerationGroupAsyncStub = generate_pb2_grpc.GenerationGroupStub(channel)

    def open(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams = SHORT,
        ref: LeaseRef | None = None,
        output_ids: tuple[int, ...] = (),
    ) -> StreamPart:
        history = history_to_proto(prompt_ids, output_ids, params)
        lease = None if ref is None else lease_ref_to_proto(ref)
        return self.send(generate_pb2.StreamRequest(request_id="r", history=history, lease=lease))

    def send(self, request: generate_pb2.StreamRequest) -> StreamPart:
        """Start a stream under a new stream number."""
        request.number = next(self._numbers)
        return self.streams.open(request)

    async def reserve(self, num_tokens: int, capacity_tokens: int, ttl_s: float = 30.0) -> Lease:
        spec = ReserveSpec(RequestId("r"), 1, num_tokens, capacity_tokens, ttl_s)
        return await self.kv.reserve(spec, self.decoder.layout.fingerprint)

    async def push(self, lease: Lease, prompt_ids: tuple[int, ...]) -> None:
        """Compute the prompt's KV, and push it layer by layer, each layer in two halves."""
        buffer, _ = prefilled(self.decoder, prompt_ids)
        await self.push_kv(lease, buffer)

    async def push_kv(self, lease: Lease, buffer: KvBuffer) -> None:
        """Push the whole contents of the buffer."""
        whole = buffer.tokens
        push = open_push(self._channel, self.decoder.layout, lease)
        for layer in range(self.decoder.config.num_layers):
            for tokens in whole.split(max(1, len(whole) // 2)):
                push.offer(layer, tokens, buffer.export(layer, tokens))
        push.finish()
        assert (await push.result()).num_bytes == buffer.num_bytes

    async def push_and_commit(self, lease: Lease, prompt_ids: tuple[int, ...], params: SamplingParams = SHORT) -> None:
        await self.push(lease, prompt_ids)
        await self.kv.commit(lease.ref, [sampled_next(self.decoder, prompt_ids, (), params)])

    async def status(self) -> generate_pb2.GenerationStatus:
        with translate_rpc_errors():
            return await self.stub.GetStatus(IDLE)

    async def num_streams(self) -> int:
        return self.server.engine.status().num_streams

    async def until_empty(self) -> None:
        status = await eventually(self.status, lambda held: held.num_free == held.num_slots)
        assert status.num_bytes_held == 0


async def read(call: StreamPart) -> list[TokenEvent]:
    """Read a stream to its end, and return its token events."""
    events = []
    while isinstance(message := await call.read(), TokenEvent):
        events.append(message)
    return events


def ids_in(events: list[TokenEvent]) -> list[int]:
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    return [event.token.token_id for event in events if event.token is not None]


@asynccontextmanager
async def serving(
    config: EngineConfig,
    decoder: Decoder | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    prefix_folder: Path | None = None,
    prefix_disk: DiskPlace | None = None,
) -> AsyncIterator[Client]:
    """Run a generation group's server, and yield its client. Default model: a tiny random one."""
    torch.set_num_threads(1)
    decoder, tokenizer = decoder or eos_decoder(), tokenizer or letter_tokenizer()
    server = await GenerationServer.start(
        ServedModel(decoder, tokenizer),
        PLACE,
        config,
        clock=SystemClock(),
        prefix_place=None if prefix_folder is None else PrefixPlace(prefix_folder, PLENTY, prefix_disk),
    )
    try:
        async with make_channel(f"127.0.0.1:{server.port}", secret=SECRET) as channel:
            client = Client(server, channel, decoder)
            yield client
            await client.streams.close()
    finally:
        await server.stop()
    assert server.slots.ledger().num_active == 0
