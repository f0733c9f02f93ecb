"""Which route a push takes, and how a shared one behaves when its receiver does not as it should."""

import asyncio
import itertools
import os
import random
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import ClassVar

import grpc
import pytest

from baton.errors import (
    BatonError,
    ByteCountError,
    ChecksumError,
    RequestCancelledError,
    StaleStampError,
    UnavailableError,
)
from baton.transport.channel import make_channel
from baton.transport.kv_receiver import Context, KvReceiverServicer
from baton.transport.kv_routes import MAX_PIECES
from baton.transport.kv_sender import PushSummary
from baton.types import TokenRange
from baton.v1 import kv_pb2
from tests.support.wire.kv_loopback import (
    FIRST,
    LAYOUT,
    NUM_TOKENS,
    WHOLE,
    WIDE,
    Loopback,
    loopback,
    offer_all,
    push_long,
    result_of,
    rows,
    stale,
)
from tests.support.wire.rpc import serving_methods
from tests.support.wire.shared_push import files_in_memory, shared_files

pytestmark = pytest.mark.integration

NUM_TRIES = 24
"""A message that is written as the call ends races with the status: both orders come up in so many pushes."""


@pytest.fixture
async def loop() -> AsyncIterator[Loopback]:
    async with loopback(num_slots=4) as both_ends:
        yield both_ends


@pytest.fixture(autouse=True)
async def _nothing_stays() -> AsyncIterator[None]:
    """No shared memory is open or mapped after a test, and none lies in a folder."""
    before, folder = shared_files(), files_in_memory()
    yield
    async with asyncio.timeout(60):
        while shared_files() != before:
            await asyncio.to_thread(os.getpid)  # the loop turns
    assert files_in_memory() == folder


async def pushed(loop: Loopback) -> PushSummary:
    """Push and commit the KV of a new lease."""
    lease = await loop.reserve()
    summary = await loop.push_all(lease)
    assert await loop.client.commit(lease.ref, [FIRST]) == NUM_TOKENS * LAYOUT.token_bytes
    assert [loop.sink.read(lease.ref, layer, WHOLE) for layer in (0, 1)] == [rows(WHOLE, 0), rows(WHOLE, 1)]
    return summary


async def test_a_receiver_of_the_same_node_is_reached_through_shared_memory(loop: Loopback) -> None:
    summary = await pushed(loop)
    assert summary.num_bytes_shared == summary.num_bytes > 0


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process may not become as large as the memory of a push."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_without_memory_to_share_the_stream_is_taken(loop: Loopback) -> None:
    with no_room():
        summary = await pushed(loop)
    assert summary.num_bytes_shared == 0


class Elsewhere(KvReceiverServicer):
    """Finds another process by the sender's number, as a receiver on another node does."""

    async def push_shared(
        self, messages: AsyncIterator[kv_pb2.SharedPieces], context: Context
    ) -> AsyncGenerator[kv_pb2.SharedAnswer, None]:
        async with aclosing(super().push_shared(self._seen(messages), context)) as answers:
            async for answer in answers:
                yield answer

    async def _seen(self, messages: AsyncIterator[kv_pb2.SharedPieces]) -> AsyncIterator[kv_pb2.SharedPieces]:
        async for message in messages:
            message.memory.pid = os.getppid()
            yield message


async def test_a_receiver_that_finds_no_such_memory_gets_a_stream() -> None:
    async with loopback(servicer=Elsewhere) as loop:
        assert (await pushed(loop)).num_bytes_shared == 0


async def test_pushes_at_once_do_not_mix() -> None:
    num_tokens, num_pushes = 3000, 4  # three rounds of all cells
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, num_slots=num_pushes) as loop:
        leases = [await loop.reserve(num_tokens) for _ in range(num_pushes)]
        sessions = [loop.open_push(lease) for lease in leases]
        whole = TokenRange(0, num_tokens)
        for seed, session in enumerate(sessions):
            for layer in range(WIDE.num_layers):
                session.offer(layer, whole, memoryview(rows(whole, seed + 10 * layer, WIDE)))
            session.finish()
        summaries = await asyncio.wait_for(asyncio.gather(*(session.result() for session in sessions)), 60)
        assert [each.num_bytes_shared for each in summaries] == [num_tokens * WIDE.token_bytes] * num_pushes
        for seed, lease in enumerate(leases):
            for layer in range(WIDE.num_layers):
                assert loop.sink.read(lease.ref, layer, whole) == rows(whole, seed + 10 * layer, WIDE)


class Recorded(Elsewhere):
    """Keeps the messages that come."""

    messages: ClassVar[list[kv_pb2.SharedPieces]] = []

    async def _seen(self, messages: AsyncIterator[kv_pb2.SharedPieces]) -> AsyncIterator[kv_pb2.SharedPieces]:
        async for message in messages:
            Recorded.messages.append(message)
            yield message


async def test_small_pieces_share_cells_and_messages() -> None:
    num_pieces = 2 * MAX_PIECES + 1
    Recorded.messages = []
    async with loopback(layout=WIDE, capacity_tokens=num_pieces, servicer=Recorded) as loop:
        session = loop.open_push(lease := await loop.reserve(num_pieces))
        for token in range(num_pieces):
            tokens = TokenRange(token, token + 1)
            session.offer(0, tokens, memoryview(rows(tokens, 0, WIDE)))
        session.finish()
        assert isinstance(await result_of(session), PushSummary)
        whole = TokenRange(0, num_pieces)
        assert loop.sink.read(lease.ref, 0, whole) == rows(whole, 0, WIDE)
    sent = Recorded.messages[1:]
    assert [len(message.pieces) for message in sent] == [MAX_PIECES, MAX_PIECES, 1]
    assert not any(message.answer for message in sent)
    offsets = [piece.offset for message in sent for piece in message.pieces]
    assert [after - before for before, after in itertools.pairwise(offsets)] == [WIDE.row_bytes] * (num_pieces - 1)


@pytest.mark.parametrize("seed", range(3))
async def test_pieces_of_any_size_arrive_whole(seed: int) -> None:
    """Layers come one by one or many at once, in parts of any size, more than all cells hold."""
    rng, num_tokens = random.Random(seed), 12_000
    whole = TokenRange(0, num_tokens)
    Recorded.messages = []
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, servicer=Recorded) as loop:
        session = loop.open_push(lease := await loop.reserve(num_tokens))
        for layer in range(WIDE.num_layers):
            start = 0
            while start < num_tokens:
                tokens = TokenRange(start, min(start + rng.choice((1, 40, 341, 500, 682, 2000)), num_tokens))
                session.offer(layer, tokens, memoryview(rows(tokens, layer, WIDE)))
                start = tokens.end
                if rng.random() < 0.3:
                    await asyncio.to_thread(os.getpid)  # the loop turns, and sends what there is
        session.finish()
        assert isinstance(await asyncio.wait_for(result_of(session), 60), PushSummary)
        for layer in range(WIDE.num_layers):
            assert loop.sink.read(lease.ref, layer, whole) == rows(whole, layer, WIDE)
    assert any(message.answer for message in Recorded.messages)


async def test_memory_of_a_push_that_ended_well_serves_the_next(loop: Loopback) -> None:
    await pushed(loop)
    assert loop.pool is not None
    cells = loop.pool.take()
    assert cells is not None
    loop.pool.give_back(cells)
    for lease in [await loop.reserve() for _ in range(3)]:
        await loop.push_all(lease)
    again = loop.pool.take()
    assert again is cells
    loop.pool.give_back(again)


async def test_memory_of_a_push_that_failed_serves_no_other(loop: Loopback) -> None:
    await pushed(loop)
    assert loop.pool is not None
    cells = loop.pool.take()
    assert cells is not None
    loop.pool.give_back(cells)
    session = loop.open_push(stale(await loop.reserve()))
    offer_all(session)
    assert type(await result_of(session)) is StaleStampError
    other = loop.pool.take()
    assert other is not None
    assert other is not cells
    loop.pool.give_back(other)


async def test_a_cancelled_push_leaves_its_slot_to_the_next(loop: Loopback) -> None:
    lease = await loop.reserve()
    session = loop.open_push(lease)
    session.offer(0, WHOLE, memoryview(rows(WHOLE)))
    await loop.sink.writers_become(lease.ref.slot, 1)
    session.cancel()
    assert type(await result_of(session)) is RequestCancelledError
    await loop.sink.writers_become(lease.ref.slot, 0)
    await loop.client.abort(lease.ref)
    assert (await pushed(loop)).num_bytes_shared


@asynccontextmanager
async def answering(*answers: kv_pb2.SharedAnswer | BatonError) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a receiver that answers each message in turn like that, then ends the call."""

    async def push(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[kv_pb2.SharedAnswer]:
        for answer in answers:
            await anext(aiter(messages), None)
            if isinstance(answer, BatonError):
                raise answer
            yield answer

    method: grpc.RpcMethodHandler[bytes, kv_pb2.SharedAnswer] = grpc.stream_stream_rpc_method_handler(
        push, None, kv_pb2.SharedAnswer.SerializeToString
    )
    async with (
        serving_methods("baton.v1.KvReceiver", {"PushShared": method}) as port,
        make_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


MAPPED = kv_pb2.SharedAnswer(mapped=True)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((kv_pb2.SharedAnswer(num_pieces=1),), id="too few pieces"),
        pytest.param((kv_pb2.SharedAnswer(num_pieces=99),), id="too many pieces"),
        pytest.param((kv_pb2.SharedAnswer(total=kv_pb2.PushReply(num_bytes=1, num_pieces=1)),), id="another total"),
        pytest.param((), id="an early end"),
    ],
)
async def test_receiver_that_counts_differently_is_not_believed(answers: Sequence[kv_pb2.SharedAnswer]) -> None:
    async with answering(MAPPED, *answers) as channel:
        assert type(await push_long(channel, 4000)) is ByteCountError


async def test_answer_without_a_message_is_not_believed() -> None:
    async with answering(MAPPED, kv_pb2.SharedAnswer(num_pieces=4), kv_pb2.SharedAnswer(num_pieces=0)) as channel:
        assert isinstance(await push_long(channel, 4000), BatonError)


@pytest.mark.parametrize("error", [ChecksumError("damaged"), RequestCancelledError("gone"), BatonError("what")])
async def test_refusal_is_what_result_raises(error: BatonError) -> None:
    async with answering(MAPPED, error) as channel:
        errors = [await push_long(channel, 4000) for _ in range(NUM_TRIES)]
    assert {(type(each), str(each)) for each in errors} == {(type(error), str(error))}


async def test_refused_call_is_no_reason_for_a_stream() -> None:
    async with answering(UnavailableError("the worker leaves")) as channel:
        assert type(await push_long(channel, 4000)) is UnavailableError
