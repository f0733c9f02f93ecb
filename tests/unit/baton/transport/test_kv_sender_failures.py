"""How a PushSession ends when it does not end well; the good ends are in test_kv_sender."""

import asyncio
from collections.abc import AsyncIterator

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
from baton.transport.channel import make_channel
from baton.transport.kv_frame import Piece
from baton.transport.kv_receiver import Context
from baton.transport.kv_sender import PushSession, open_push
from baton.types import Lease
from baton.v1 import kv_pb2
from tests.support.wire.kv_loopback import (
    LAYOUT,
    ROUTES,
    WHOLE,
    Loopback,
    loopback,
    offer_all,
    push_long,
    result_of,
    rows,
    stale,
)
from tests.support.wire.rpc import serving_methods

pytestmark = pytest.mark.integration

NUM_TRIES = 24
"""A write that fails as the call ends races with the status that ended it: both orders come up in so many pushes."""
by_either_route = pytest.mark.parametrize("may_share", ROUTES.values(), ids=ROUTES)


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


@pytest.mark.parametrize("in_another_thread", [False, True])
async def test_cancel_from_any_thread_ends_the_stream(loop: Loopback, in_another_thread: bool) -> None:
    lease, session = await open_writer(loop)
    if in_another_thread:
        await asyncio.to_thread(session.cancel)
    else:
        session.cancel()
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


@by_either_route
async def test_session_ends_when_its_receiver_is_gone(may_share: bool) -> None:
    async with loopback(may_share=may_share) as loop:
        lease = await loop.reserve()
        channel = make_channel(loop.endpoint)
        session = open_push(channel, LAYOUT, lease, pool=loop.pool)
        session.offer(0, WHOLE, memoryview(rows(WHOLE)))
        await loop.sink.writers_become(lease.ref.slot, 1)
    assert type(await result_of(session)) is UnavailableError
    await channel.close()


@by_either_route
async def test_unreachable_receiver_is_unavailable(may_share: bool) -> None:
    async with loopback(may_share=may_share) as loop, make_channel("127.0.0.1:1") as channel:
        session = open_push(channel, LAYOUT, await loop.reserve(), pool=loop.pool)
        offer_all(session)
        assert type(await result_of(session)) is UnavailableError


async def ends_of(reply: kv_pb2.PushReply | BatonError) -> list[object]:
    """Return the ends of NUM_TRIES sessions. The receiver replies after the first of twelve pieces, and knows no
    PushShared."""

    async def push(pieces: AsyncIterator[Piece], context: Context) -> kv_pb2.PushReply:
        await anext(aiter(pieces))
        if isinstance(reply, BatonError):
            raise reply
        return reply

    method: grpc.RpcMethodHandler[bytes, kv_pb2.PushReply] = grpc.stream_unary_rpc_method_handler(
        push, None, kv_pb2.PushReply.SerializeToString
    )
    async with (
        serving_methods("baton.v1.KvReceiver", {"Push": method}) as port,
        make_channel(f"127.0.0.1:{port}") as channel,
    ):
        return [await push_long(channel, 8000) for _ in range(NUM_TRIES)]


async def test_receiver_that_counts_differently_is_not_believed() -> None:
    errors = await ends_of(kv_pb2.PushReply(num_bytes=1, num_pieces=1))
    assert {type(error) for error in errors} == {ByteCountError}


@pytest.mark.parametrize("error", [ChecksumError("damaged"), RequestCancelledError("gone"), BatonError("what")])
async def test_refusal_amid_the_stream_is_what_result_raises(error: BatonError) -> None:
    errors = await ends_of(error)
    assert {(type(each), str(each)) for each in errors} == {(type(error), str(error))}
