import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import pytest

import baton.transport.kv_routes
import baton.transport.shared_memory
from baton.errors import RequestCancelledError
from baton.transport.kv_frame import Piece, encode_piece
from baton.transport.kv_receiver import Context, KvReceiverServicer
from baton.transport.kv_routes import MAX_PIECE_BYTES, NUM_CELLS
from baton.transport.shared_memory import SharedCells
from baton.types import KvLayout, Lease, TokenRange
from baton.v1 import kv_pb2
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock
from tests.support.wire.kv_loopback import (
    FIRST,
    LAYOUT,
    NUM_TOKENS,
    ROUTES,
    WHOLE,
    WIDE,
    Loopback,
    loopback,
    offer_all,
    result_of,
    rows,
)

pytestmark = pytest.mark.integration

by_either_route = pytest.mark.parametrize("may_share", ROUTES.values(), ids=ROUTES)


async def test_offered_bytes_arrive(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.push_all(lease)
    assert [loop.sink.read(lease.ref, layer, WHOLE) for layer in (0, 1)] == [rows(WHOLE, 0), rows(WHOLE, 1)]


async def test_summary_counts_bytes_and_pieces(loop: Loopback) -> None:
    session = loop.open_push(await loop.reserve())
    offer_all(session)
    offer_all(session)
    session.finish()
    summary = await session.result()
    assert (summary.num_bytes, summary.num_pieces) == (2 * NUM_TOKENS * LAYOUT.token_bytes, 4)
    assert summary.num_duplicates == 2
    assert summary.num_bytes_shared == (0 if loop.pool is None else summary.num_bytes)


async def test_summary_is_timed_from_first_offer_to_last_acknowledgement() -> None:
    clock = ManualClock(start_s=1000)
    async with loopback(clock=clock) as loop:
        session = loop.open_push(await loop.reserve())
        clock.advance(1)
        offer_all(session)
        clock.advance(2)
        session.finish()
        summary = await session.result()
    assert (summary.first_unix_ns, summary.last_unix_ns) == (1001 * 10**9, 1003 * 10**9)


async def test_push_of_nothing_succeeds(loop: Loopback) -> None:
    session = loop.open_push(await loop.reserve())
    session.finish()
    assert (await session.result()).num_bytes == 0


@by_either_route
async def test_thousands_of_offers_from_another_thread_arrive(may_share: bool) -> None:
    num_tokens = 2000
    async with loopback(capacity_tokens=num_tokens, may_share=may_share) as loop:
        lease = await loop.reserve(num_tokens)
        session = loop.open_push(lease)
        memory = [memoryview(rows(TokenRange(0, num_tokens), layer)) for layer in (0, 1)]

        def engine() -> None:
            for token in range(num_tokens):
                for layer in (0, 1):
                    row = memory[layer][token * LAYOUT.row_bytes : (token + 1) * LAYOUT.row_bytes]
                    session.offer(layer, TokenRange(token, token + 1), row)
            session.finish()

        thread = threading.Thread(target=engine)
        thread.start()
        summary = await asyncio.wait_for(session.result(), 60)
        thread.join()
        assert summary.num_pieces == 2 * num_tokens
        assert [loop.sink.read(lease.ref, layer, TokenRange(0, num_tokens)) for layer in (0, 1)] == memory


async def test_many_offers_wake_the_loop_once(loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    session = loop.open_push(await loop.reserve(64))
    wakes = 0
    running = asyncio.get_running_loop()
    call_soon_threadsafe = running.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return call_soon_threadsafe(callback, *args)

    with monkeypatch.context() as patched:
        patched.setattr(running, "call_soon_threadsafe", counted)
        for token in range(64):
            tokens = TokenRange(token, token + 1)
            session.offer(0, tokens, memoryview(rows(tokens)))
        session.finish()
        assert wakes == 1
    assert (await session.result()).num_pieces == 64


@by_either_route
async def test_large_ranges_are_split_by_whole_tokens(may_share: bool) -> None:
    num_tokens = 2000
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, may_share=may_share) as loop:
        lease = await loop.reserve(num_tokens)
        summary = await loop.push_all(lease)
        per_layer = -(-num_tokens // (MAX_PIECE_BYTES // WIDE.row_bytes))
        assert (summary.num_pieces, summary.num_bytes) == (2 * per_layer, num_tokens * WIDE.token_bytes)
        whole = TokenRange(0, num_tokens)
        assert loop.sink.read(lease.ref, 1, whole) == rows(whole, 1, WIDE)


@by_either_route
async def test_token_larger_than_a_piece_is_sent_whole(may_share: bool) -> None:
    giant = KvLayout("weights", num_layers=1, num_kv_heads=1, head_dim=2**18, dtype="float32")
    async with loopback(layout=giant, capacity_tokens=2, may_share=may_share) as loop:
        assert (await loop.push_all(await loop.reserve(2))).num_pieces == 2


async def test_memory_is_let_go_at_the_end(loop: Loopback) -> None:
    memory = bytearray(rows(WHOLE))
    session = loop.open_push(await loop.reserve())
    session.offer(0, WHOLE, memoryview(memory))
    session.finish()
    await session.result()
    memory.extend(b"more")  # a BufferError if a view were left


async def test_elements_of_any_format_are_sent_as_bytes(loop: Loopback) -> None:
    lease = await loop.reserve()
    session = loop.open_push(lease)
    session.offer(0, WHOLE, memoryview(rows(WHOLE)).cast("I", shape=[NUM_TOKENS, 4]))
    session.finish()
    await session.result()
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE)


async def test_result_may_be_asked_for_again(loop: Loopback) -> None:
    session = loop.open_push(await loop.reserve())
    offer_all(session)
    session.finish()
    assert await session.result() == await session.result()


async def test_cancelling_the_wait_leaves_the_session_alone(loop: Loopback) -> None:
    session = loop.open_push(await loop.reserve())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.result(), 0.01)
    offer_all(session)
    session.finish()
    assert (await session.result()).num_pieces == 2


class Gated(KvReceiverServicer):
    """Reads no piece before its gate is open."""

    gate: asyncio.Event

    async def push(self, pieces: AsyncIterator[Piece], context: Context) -> kv_pb2.PushReply:
        await self.gate.wait()
        return await super().push(pieces, context)

    async def push_shared(
        self, messages: AsyncIterator[kv_pb2.SharedPieces], context: Context
    ) -> AsyncGenerator[kv_pb2.SharedAnswer, None]:
        async with aclosing(super().push_shared(self._behind_gate(messages), context)) as answers:
            async for answer in answers:
                yield answer

    async def _behind_gate(self, messages: AsyncIterator[kv_pb2.SharedPieces]) -> AsyncIterator[kv_pb2.SharedPieces]:
        async for message in messages:
            if message.pieces:
                await self.gate.wait()
            yield message


async def turns(loop: Loopback, lease: Lease) -> None:
    """Give the sender as many turns of the loop as it would need to push all that it may."""
    for _ in range(200):
        await loop.client.renew(lease.ref, 60)


async def test_receiver_that_does_not_read_bounds_what_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0

    def counted(header: kv_pb2.KvPieceHeader, payload: memoryview) -> bytes:
        nonlocal encoded
        encoded += payload.nbytes
        return encode_piece(header, payload)

    monkeypatch.setattr(baton.transport.kv_routes, "encode_piece", counted)
    Gated.gate = asyncio.Event()
    num_tokens = 30_000  # 92 MB
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, servicer=Gated, may_share=False) as loop:
        lease = await loop.reserve(num_tokens)
        pushing = asyncio.create_task(loop.push_all(lease))
        await eventually(lambda: asyncio.sleep(0, encoded), lambda num_bytes: num_bytes > 0)
        await turns(loop, lease)
        # gRPC's window and the sockets hold what the system gives them, however much is to come.
        assert 0 < encoded <= num_tokens * WIDE.token_bytes // 2
        Gated.gate.set()
        assert (await pushing).num_bytes == num_tokens * WIDE.token_bytes


class Counted(SharedCells):
    """Counts the bytes that are put into cells."""

    num_bytes = 0

    def write(self, offset: int, payload: memoryview) -> None:
        super().write(offset, payload)
        Counted.num_bytes += payload.nbytes


async def test_receiver_that_does_not_read_bounds_what_is_in_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.transport.shared_memory, "SharedCells", Counted)
    Counted.num_bytes = 0
    Gated.gate = asyncio.Event()
    num_tokens = 12_000  # 37 MB
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, servicer=Gated) as loop:
        lease = await loop.reserve(num_tokens)
        pushing = asyncio.create_task(loop.push_all(lease))
        most = NUM_CELLS * (MAX_PIECE_BYTES // WIDE.row_bytes * WIDE.row_bytes)
        await eventually(lambda: asyncio.sleep(0, Counted.num_bytes), lambda num_bytes: num_bytes >= most)
        await turns(loop, lease)
        assert Counted.num_bytes == most
        Gated.gate.set()
        assert (await pushing).num_bytes_shared == num_tokens * WIDE.token_bytes


@by_either_route
async def test_cancel_ends_a_push_that_the_receiver_holds_back(may_share: bool) -> None:
    Gated.gate = asyncio.Event()
    num_tokens = 30_000
    async with loopback(layout=WIDE, capacity_tokens=num_tokens, servicer=Gated, may_share=may_share) as loop:
        session = loop.open_push(lease := await loop.reserve(num_tokens))
        offer_all(session, WIDE, num_tokens)
        await turns(loop, lease)
        session.cancel()
        assert type(await result_of(session)) is RequestCancelledError


async def test_two_ranks_fill_one_slot(loop: Loopback) -> None:
    """The way it is used: each rank pushes its own tokens, the last one commits meanwhile."""
    lease = await loop.reserve()
    chunks = WHOLE.split(5)
    sessions = [loop.open_push(lease) for _ in chunks]
    commit = asyncio.create_task(loop.client.commit(lease.ref, [FIRST], timeout_s=60))
    for session, chunk in zip(sessions, chunks, strict=True):
        for layer in (0, 1):
            session.offer(layer, chunk, memoryview(rows(chunk)))
        session.finish()
    assert await commit == NUM_TOKENS * LAYOUT.token_bytes
    assert sum([(await session.result()).num_bytes for session in sessions]) == await commit
