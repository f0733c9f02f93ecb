"""A real KvReceiver with a MemorySink, and its client, on one event loop over loopback gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import xxhash

from baton.errors import BatonError
from baton.process.clock import Clock, SystemClock
from baton.proto_types import range_to_proto
from baton.transport.channel import make_channel, make_server
from baton.transport.kv_client import KvClient
from baton.transport.kv_receiver import KvReceiverServicer
from baton.transport.kv_routes import make_pool
from baton.transport.kv_sender import PushSession, PushSummary, open_push
from baton.transport.kv_sink import ReserveSpec
from baton.transport.proto_types import lease_ref_to_proto
from baton.transport.shared_memory import CellPool
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import KvLayout, Lease, LeaseRef, RequestId, SampledToken, SlotId, Stamp, TokenRange
from baton.v1 import kv_pb2
from tests.support.wire.memory_sink import MemorySink
from tests.support.wire.rpc import listening

LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
NUM_TOKENS = 8
WHOLE = TokenRange(0, NUM_TOKENS)
WIDE = KvLayout("weights", num_layers=2, num_kv_heads=3, head_dim=64, dtype="float32")
"""Layout with 1.5 KiB per token and layer, so that a piece holds 682 tokens."""
FIRST = SampledToken(token_id=7)
ROUTES = {"shared": True, "stream": False}
"""Permission to push through shared memory, by name of the test case."""


@dataclass(frozen=True)
class Loopback:
    """A KvReceiver and its client."""

    sink: MemorySink
    client: KvClient
    channel: grpc.aio.Channel
    endpoint: str
    layout: KvLayout
    clock: Clock
    pool: CellPool | None
    """Memory that push sessions share with the receiver; None: they push over gRPC."""

    async def reserve(self, num_tokens: int = NUM_TOKENS, ttl_s: float = 60.0) -> Lease:
        spec = ReserveSpec(RequestId("r"), 1, num_tokens, num_tokens, ttl_s)
        return await self.client.reserve(spec, self.layout.fingerprint)

    def open_push(self, lease: Lease) -> PushSession:
        return open_push(self.channel, self.layout, lease, clock=self.clock, pool=self.pool)

    async def push_all(self, lease: Lease) -> PushSummary:
        """Push the KV of all tokens of the lease."""
        session = self.open_push(lease)
        offer_all(session, self.layout, lease.num_tokens)
        session.finish()
        return await asyncio.wait_for(session.result(), 60)

    async def push(self, messages: Iterable[kv_pb2.KvPiece]) -> kv_pb2.PushReply:
        """Call Push with protobuf messages, valid or not. Raises the receiver's error."""
        return await self.push_bytes([message.SerializeToString() for message in messages])

    async def push_bytes(self, frames: Iterable[bytes]) -> kv_pb2.PushReply:
        """Call Push with raw frames, which may be invalid as messages. Raises the receiver's error."""
        method = self.channel.stream_unary(
            "/baton.v1.KvReceiver/Push", request_serializer=bytes, response_deserializer=kv_pb2.PushReply.FromString
        )
        with translate_rpc_errors():
            return await method(iter(frames))

    def piece(self, ref: LeaseRef, layer: int = 0, tokens: TokenRange = WHOLE, seed: int = 0) -> kv_pb2.KvPiece:
        """Return a piece that the receiver accepts. Tests modify it to make it invalid."""
        payload = rows(tokens, seed, self.layout)
        header = kv_pb2.KvPieceHeader(
            lease=lease_ref_to_proto(ref),
            layout_fingerprint=self.layout.fingerprint,
            layer=layer,
            tokens=range_to_proto(tokens),
            checksum=xxhash.xxh3_64_intdigest(payload),
        )
        return kv_pb2.KvPiece(header=header, payload=payload)


@asynccontextmanager
async def loopback(
    *,
    layout: KvLayout = LAYOUT,
    clock: Clock | None = None,
    capacity_tokens: int = 64,
    servicer: type[KvReceiverServicer] = KvReceiverServicer,
    num_slots: int = 1,
    may_share: bool = True,
) -> AsyncIterator[Loopback]:
    """Run a receiver of KV on 127.0.0.1, and yield it with its client."""
    clock = clock or SystemClock()
    sink = MemorySink(layout, clock, num_slots=num_slots, capacity_tokens=capacity_tokens)
    server = make_server()
    servicer(sink).add_to(server)
    pool = make_pool(layout) if may_share else None
    try:
        async with listening(server) as port, make_channel(f"127.0.0.1:{port}") as channel:
            yield Loopback(sink, KvClient(channel), channel, f"127.0.0.1:{port}", layout, clock, pool)
    finally:
        if pool is not None:
            pool.close()


def rows(tokens: TokenRange, seed: int = 0, layout: KvLayout = LAYOUT) -> bytes:
    """Return KV bytes of `tokens` in one layer. They depend on position and seed."""
    period = bytes(range(251))
    start = (seed + tokens.start * layout.row_bytes) % 251
    num_bytes = len(tokens) * layout.row_bytes
    return (period * (num_bytes // 251 + 2))[start : start + num_bytes]


def offer_all(session: PushSession, layout: KvLayout = LAYOUT, num_tokens: int = NUM_TOKENS) -> None:
    """Offer (enqueue for the push) the KV of the first `num_tokens` tokens in every layer."""
    tokens = TokenRange(0, num_tokens)
    for layer in range(layout.num_layers):
        session.offer(layer, tokens, memoryview(rows(tokens, layer, layout)))


async def result_of(session: PushSession) -> object:
    """Return the session's summary or its error. Fails if the session does not end in time."""
    try:
        return await asyncio.wait_for(session.result(), 60)
    except BatonError as error:
        return error


def stale(lease: Lease) -> Lease:
    """Return a lease of the same slot whose stamp was never issued."""
    return Lease(LeaseRef(lease.ref.slot, Stamp(lease.ref.stamp + 1)), RequestId("r"), 1, NUM_TOKENS, "", 1.0)


async def push_long(channel: grpc.aio.Channel, num_tokens: int) -> object:
    """Push many pieces of KV to a slot that is not leased. Return the summary or the error."""
    lease = Lease(LeaseRef(SlotId(0), Stamp(1)), RequestId("r"), 1, NUM_TOKENS, "", 1.0)
    pool = make_pool(WIDE)
    session = open_push(channel, WIDE, lease, pool=pool)
    session.offer(0, TokenRange(0, num_tokens), memoryview(bytes(num_tokens * WIDE.row_bytes)))
    session.finish()
    try:
        return await result_of(session)
    finally:
        pool.close()
