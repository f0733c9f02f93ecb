"""How a PushSession ends when it does not end well; the good ends are in test_kv_sender."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from baton.errors import (
    BatonError,
    ByteCountError,
    ChecksumError,
    JobAbortedError,
    RequestCancelledError,
    StaleStampError,
    UnavailableError,
)
from baton.ids import RequestId, SlotId, Stamp
from baton.types import Lease, LeaseRef, TokenRange
from baton.v1 import kv_pb2
from tests.support.wire.kv_loopback import (
    LAYOUT,
    NUM_TOKENS,
    WHOLE,
    WIDE,
    Loopback,
    loopback,
    offer_all,
    result_of,
    rows,
    stale,
)
from transport.channel import bind, make_channel, make_server
from transport.kv_frame import Piece
from transport.kv_receiver import Context
from transport.kv_routes import make_pool
from transport.kv_sender import PushSession, open_push
from transport.shared_memory import CellPool

pytestmark = pytest.mark.integration

NUM_TRIES = 24
"""A write that fails as the call ends races with the status that ended it: both orders come up in so many pushes."""


ROUTES = [pytest.param(True, id="shared"), pytest.param(False, id="stream")]
"""Whether sessions may push through shared memory, as all processes of these tests are on one node."""


@pytest.fixture(params=ROUTES)
async def loop(request: pytest.FixtureRequest) -> AsyncIterator[Loopback]:
    async with loopback(may_share=request.param) as both_ends:
        yield both_ends


async def test_receivers_error_is_raised(loop: Loopback) -> None:
    session = loop.open_push(stale(await loop.reserve()))
    offer_all(session)
    session.finish()
    assert type(await result_of(session)) is StaleStampError


async def test_refusal_is_noticed_without_a_further_offer(loop: Loopback) -> None:
    session = loop.open_push(stale(await loop.reserve()))
    session.offer(0, WHOLE, memoryview(rows(WHOLE)))
    assert type(await result_of(session)) is StaleStampError


async def test_offers_after_a_failure_are_dropped(loop: Loopback) -> None:
    session = loop.open_push(stale(await loop.reserve()))
    offer_all(session)
    assert type(await result_of(session)) is StaleStampError
    memory = bytearray(rows(WHOLE))
    session.offer(0, WHOLE, memoryview(memory))
    session.finish()
    memory.extend(b"more")  # a BufferError if it had been kept


@pytest.mark.parametrize("end", ["refused", "cancelled"])
async def test_memory_is_let_go_after_a_failure(loop: Loopback, end: str) -> None:
    lease = await loop.reserve()
    session = loop.open_push(stale(lease) if end == "refused" else lease)
    memory = [bytearray(rows(WHOLE)) for _ in range(50)]
    for each in memory:
        session.offer(0, WHOLE, memoryview(each))
    if end == "cancelled":
        session.cancel()
    error = await result_of(session)
    assert isinstance(error, BatonError)
    for each in memory:
        each.extend(b"more")  # a BufferError if a view were left


async def open_writer(loop: Loopback) -> tuple[Lease, PushSession]:
    """A session whose first piece is in."""
    lease = await loop.reserve()
    session = loop.open_push(lease)
    session.offer(0, WHOLE, memoryview(rows(WHOLE)))
    await loop.sink.writers_become(lease.ref.slot, 1)
    return lease, session


async def test_cancel_ends_the_stream(loop: Loopback) -> None:
    lease, session = await open_writer(loop)
    session.cancel()
    assert type(await result_of(session)) is RequestCancelledError
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_cancel_from_another_thread_ends_the_stream(loop: Loopback) -> None:
    lease, session = await open_writer(loop)
    await asyncio.to_thread(session.cancel)
    assert type(await result_of(session)) is RequestCancelledError
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_cancel_before_anything_was_offered(loop: Loopback) -> None:
    session = loop.open_push(await loop.reserve())
    session.cancel()
    assert type(await result_of(session)) is RequestCancelledError


async def test_fail_is_what_result_raises(loop: Loopback) -> None:
    lease, session = await open_writer(loop)
    why = JobAbortedError("rank 0 gave up")
    session.fail(why)
    assert await result_of(session) is why
    await loop.sink.writers_become(lease.ref.slot, 0)


async def test_first_failure_counts(loop: Loopback) -> None:
    _, session = await open_writer(loop)
    why = JobAbortedError("rank 0 gave up")
    session.fail(why)
    session.cancel()
    assert await result_of(session) is why


async def test_fail_after_the_end_changes_nothing(loop: Loopback) -> None:
    lease = await loop.reserve()
    session = loop.open_push(lease)
    offer_all(session)
    session.finish()
    summary = await session.result()
    session.fail(JobAbortedError("too late"))
    await loop.client.renew(lease.ref, 60)  # the loop has turned meanwhile
    assert await session.result() == summary


async def test_session_ends_when_its_channel_is_closed(loop: Loopback) -> None:
    lease = await loop.reserve()
    async with make_channel(loop.endpoint) as channel:
        session = open_push(channel, LAYOUT, lease, pool=loop.pool)
        session.offer(0, WHOLE, memoryview(rows(WHOLE)))
        await loop.sink.writers_become(lease.ref.slot, 1)
    assert isinstance(await result_of(session), BatonError)
    await loop.sink.writers_become(lease.ref.slot, 0)


@pytest.mark.parametrize("may_share", ROUTES)
async def test_session_ends_when_its_receiver_is_gone(may_share: bool) -> None:
    async with loopback(may_share=may_share) as loop:
        lease = await loop.reserve()
        channel = make_channel(loop.endpoint)
        session = open_push(channel, LAYOUT, lease, pool=loop.pool)
        session.offer(0, WHOLE, memoryview(rows(WHOLE)))
        await loop.sink.writers_become(lease.ref.slot, 1)
    assert type(await result_of(session)) is UnavailableError
    await channel.close()


@pytest.fixture
def pool() -> Iterator[CellPool]:
    made = make_pool(WIDE)
    yield made
    made.close()


@pytest.mark.parametrize("may_share", ROUTES)
async def test_unreachable_receiver_is_unavailable(pool: CellPool, may_share: bool) -> None:
    async with make_channel("127.0.0.1:1") as channel:
        lease = Lease(LeaseRef(SlotId(0), Stamp(1)), RequestId("r"), 1, NUM_TOKENS, "", 1.0)
        session = open_push(channel, LAYOUT, lease, pool=pool if may_share else None)
        offer_all(session)
        assert type(await result_of(session)) is UnavailableError


async def answers_of(pool: CellPool, reply: kv_pb2.PushReply | BatonError) -> list[object]:
    """What NUM_TRIES sessions come to whose receiver answers like that after the first of twelve pieces."""

    async def push(pieces: AsyncIterator[Piece], context: Context) -> kv_pb2.PushReply:
        await anext(aiter(pieces))
        if isinstance(reply, BatonError):
            raise reply
        return reply

    server = make_server()
    method: grpc.RpcMethodHandler[bytes, kv_pb2.PushReply] = grpc.stream_unary_rpc_method_handler(
        push, None, kv_pb2.PushReply.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.KvReceiver", {"Push": method}),))
    port = bind(server, "127.0.0.1")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            memory = memoryview(bytes(8000 * WIDE.row_bytes))
            return [await push_long(channel, pool, memory) for _ in range(NUM_TRIES)]
    finally:
        await server.stop(grace=0)


async def push_long(channel: grpc.aio.Channel, pool: CellPool, memory: memoryview) -> object:
    lease = Lease(LeaseRef(SlotId(0), Stamp(1)), RequestId("r"), 1, NUM_TOKENS, "", 1.0)
    session = open_push(channel, WIDE, lease, pool=pool)  # the receiver knows no PushShared
    session.offer(0, TokenRange(0, memory.nbytes // WIDE.row_bytes), memory)
    session.finish()
    return await result_of(session)


async def test_receiver_that_counts_differently_is_not_believed(pool: CellPool) -> None:
    errors = await answers_of(pool, kv_pb2.PushReply(num_bytes=1, num_pieces=1))
    assert {type(error) for error in errors} == {ByteCountError}


@pytest.mark.parametrize("error", [ChecksumError("damaged"), RequestCancelledError("gone"), BatonError("what")])
async def test_refusal_amid_the_stream_is_what_result_raises(pool: CellPool, error: BatonError) -> None:
    errors = await answers_of(pool, error)
    assert {(type(each), str(each)) for each in errors} == {(type(error), str(error))}
