"""What a receiver does with shared memory. What it has in common with a stream is in test_kv_receiver."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.errors import (
    ChecksumError,
    InvalidArgumentError,
    LeaseExpiredError,
    ResourceExhaustedError,
    StaleStampError,
)
from baton.types import LeaseRef, Stamp, TokenRange
from baton.v1 import kv_pb2
from tests.support.manual_clock import ManualClock
from tests.support.wire.kv_loopback import FIRST, LAYOUT, NUM_TOKENS, WHOLE, Loopback, loopback, rows
from tests.support.wire.shared_push import SharedPush, files_in_memory, shared_files, shared_push

pytestmark = pytest.mark.integration

NOTHING = bytes(NUM_TOKENS * LAYOUT.row_bytes)


@pytest.fixture
async def loop() -> AsyncIterator[Loopback]:
    async with loopback(num_slots=2) as both_ends:
        yield both_ends


@pytest.fixture
async def push(loop: Loopback) -> AsyncIterator[SharedPush]:
    async with shared_push(loop) as opened:
        assert await opened.name()
        yield opened


async def test_each_message_is_answered_and_the_last_answer_counts(loop: Loopback, push: SharedPush) -> None:
    lease = await loop.reserve()
    first, second = (push.put(loop.piece(lease.ref, layer)) for layer in (0, 1))
    assert await push.send(first, second) == 2
    assert await push.send(first) == 1
    reply = await push.finish()
    assert (reply.num_pieces, reply.num_duplicates) == (3, 1)
    assert reply.num_bytes == NUM_TOKENS * (LAYOUT.token_bytes + LAYOUT.row_bytes)
    assert await loop.client.commit(lease.ref, [FIRST]) == NUM_TOKENS * LAYOUT.token_bytes


async def test_only_a_message_that_asks_is_answered(loop: Loopback) -> None:
    lease = await loop.reserve()
    async with shared_push(loop) as push:
        assert await push.name()
        pieces = [push.put(loop.piece(lease.ref, 0, TokenRange(token, token + 1))) for token in range(5)]
        await push.call.write(kv_pb2.SharedPieces(pieces=pieces[:2]))
        assert await push.send(*pieces[2:4]) == 4
        await push.call.write(kv_pb2.SharedPieces(pieces=pieces[4:]))
        assert (await push.finish()).num_pieces == 5


async def test_cell_may_be_filled_anew_once_its_message_is_answered(loop: Loopback, push: SharedPush) -> None:
    lease = await loop.reserve()
    for layer in (0, 1):
        piece = push.put(loop.piece(lease.ref, layer, seed=layer))
        await push.send(piece)
        push.cells.give_back(piece.offset)
    assert [loop.sink.read(lease.ref, layer, WHOLE) for layer in (0, 1)] == [rows(WHOLE, 0), rows(WHOLE, 1)]


async def test_byte_that_is_flipped_in_the_memory_is_refused(loop: Loopback, push: SharedPush) -> None:
    lease = await loop.reserve()
    good, bad = push.put(loop.piece(lease.ref, layer=0)), push.put(loop.piece(lease.ref, layer=1))
    push.cells.write(bad.offset + 5, memoryview(bytes((rows(WHOLE)[5] ^ 1,))))
    with pytest.raises(ChecksumError):
        await push.send(good, bad)
    assert loop.sink.read(lease.ref, 0, WHOLE) == rows(WHOLE)
    assert loop.sink.read(lease.ref, 1, WHOLE) == NOTHING


@pytest.mark.parametrize("offset", [0, 2**40, 2**64 - 1, -1])
async def test_payload_outside_the_memory_is_refused(loop: Loopback, push: SharedPush, offset: int) -> None:
    lease = await loop.reserve()
    piece = push.put(loop.piece(lease.ref))
    piece.offset = push.cells.name.num_bytes - piece.num_bytes + 1 if offset == -1 else offset
    with pytest.raises(InvalidArgumentError, match="out of range"):
        await push.send(piece)
    assert loop.sink.read(lease.ref, 0, WHOLE) == NOTHING


async def test_lease_that_expires_during_a_push_is_refused() -> None:
    clock = ManualClock()
    async with loopback(clock=clock) as loop, shared_push(loop) as push:
        lease = await loop.reserve(ttl_s=5)
        assert await push.name()
        await push.send(push.put(loop.piece(lease.ref)))
        clock.advance(6)
        with pytest.raises(LeaseExpiredError):
            await push.send(push.put(loop.piece(lease.ref, layer=1)))
        await loop.sink.writers_become(lease.ref.slot, 0)


async def test_aborted_lease_takes_nothing_and_its_slot_waits_for_the_writer(loop: Loopback, push: SharedPush) -> None:
    lease, other = await loop.reserve(), await loop.reserve()
    await push.send(push.put(loop.piece(lease.ref)))
    await loop.client.abort(lease.ref)
    with pytest.raises(ResourceExhaustedError):
        await loop.reserve()
    with pytest.raises(StaleStampError):
        await push.send(push.put(loop.piece(lease.ref, layer=1)))
    await loop.sink.writers_become(lease.ref.slot, 0)
    anew = await loop.reserve()
    assert anew.ref.slot == lease.ref.slot != other.ref.slot
    assert loop.sink.read(anew.ref, 1, WHOLE) == NOTHING


async def test_stale_writer_does_not_reach_a_slot_that_is_leased_anew(loop: Loopback) -> None:
    lease = await loop.reserve()
    await loop.client.abort(lease.ref)
    anew = await loop.reserve()
    assert anew.ref == LeaseRef(lease.ref.slot, Stamp(anew.ref.stamp)) != lease.ref
    async with shared_push(loop) as push:
        assert await push.name()
        with pytest.raises(StaleStampError):
            await push.send(push.put(loop.piece(lease.ref)))
    assert loop.sink.read(anew.ref, 0, WHOLE) == NOTHING


async def test_writer_leaves_when_its_call_is_cancelled(loop: Loopback, push: SharedPush) -> None:
    lease = await loop.reserve()
    await push.send(push.put(loop.piece(lease.ref)))
    push.call.cancel()
    await loop.sink.writers_become(lease.ref.slot, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", 2**31 - 1),
        ("pid", 1),
        ("descriptor", 2**31 - 1),
        ("descriptor", 0),
        ("num_bytes", 2**40),
        ("num_bytes", 0),
        ("key", bytes(16)),
        ("key", b""),
    ],
)
async def test_memory_that_is_not_the_one_named_is_not_mapped(loop: Loopback, field: str, value: object) -> None:
    async with shared_push(loop) as push:
        memory = push.cells.name
        setattr(memory, field, value)
        assert not await push.name(memory)
        assert await push.call.code() is not None  # the receiver has ended the call


async def test_nothing_is_left_of_a_push_that_was_refused(loop: Loopback) -> None:
    lease = await loop.reserve()
    before = files_in_memory()
    async with shared_push(loop) as push:
        assert await push.name()
        assert shared_files()
        bad = push.put(loop.piece(lease.ref))
        bad.header.checksum ^= 1
        with pytest.raises(ChecksumError):
            await push.send(bad)
        await loop.sink.writers_become(lease.ref.slot, 0)
    async with asyncio.timeout(60):
        while shared_files():
            await loop.client.renew(lease.ref, 60)  # the loop turns
    assert files_in_memory() == before
