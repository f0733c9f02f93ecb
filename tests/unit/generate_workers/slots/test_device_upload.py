"""Pushed KV on its way to a device with memory of its own, while its link copies: nothing waits but what must."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from baton.errors import (
    ConfigError,
    IncompletePushError,
    InvalidArgumentError,
    LeaseExpiredError,
    ResourceExhaustedError,
    StaleStampError,
    TransferError,
)
from baton.modeling.device.copying import LinkAccess
from baton.modeling.kv.staging import StagingFrames
from baton.transport.channel import bind, make_channel, make_server
from baton.transport.kv_client import KvClient
from baton.transport.kv_receiver import KvReceiverServicer
from baton.transport.kv_routes import make_pool
from baton.transport.kv_sender import open_push
from baton.types import LeaseRef, TokenRange
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape
from generate_workers.slots.kv_memory import KvMemory
from generate_workers.slots.table import SlotTable
from tests.support.engines.devices import STANDING_FOR_A_GPU, PoisonedDevice
from tests.support.engines.gated_devices import Gate, gated_device
from tests.support.engines.generation import WAIT_S
from tests.support.engines.slot_tables import FIRST, LAYOUT, UNLIMITED, activated, ends_empty, lease, make_slots
from tests.support.manual_clock import ManualClock

pytestmark = pytest.mark.integration

TTL_S = 5.0
NUM_FRAMES = 2
FRAME_TOKENS = 2
PIECES = TokenRange(0, 4).split(FRAME_TOKENS)
WHOLE = TokenRange(0, 4)


@dataclass
class Landed:
    """A table of two slots on a device whose link waits at a gate."""

    slots: SlotTable
    gate: Gate
    clock: ManualClock
    frames: StagingFrames

    def lease(self, num_tokens: int = 4) -> LeaseRef:
        return lease(self.slots, num_tokens, ttl_s=TTL_S).ref

    async def write(self, ref: LeaseRef, layer: int, tokens: TokenRange) -> bool:
        """Pushes one piece, and leaves without waiting for its copy."""
        with self.slots.open_push(ref) as target:
            return await target.write(layer, tokens, rows(tokens, layer))

    async def push(self, ref: LeaseRef, layer: int, tokens: TokenRange) -> None:
        """Pushes one piece, and waits until it has landed."""
        with self.slots.open_push(ref) as target:
            await target.write(layer, tokens, rows(tokens, layer))
            await target.settle()

    async def settled(self) -> None:
        """Returns once no copy is on its way."""
        await asyncio.to_thread(self.slots.rest)


def rows(tokens: TokenRange, layer: int) -> memoryview:
    """Bytes that differ by layer and position."""
    start = tokens.start * LAYOUT.row_bytes
    return memoryview(bytes((layer * 100 + start + at) % 251 for at in range(len(tokens) * LAYOUT.row_bytes)))


@pytest.fixture(params=STANDING_FOR_A_GPU)
def landed(request: pytest.FixtureRequest) -> Iterator[Landed]:
    gate, clock = Gate(), ManualClock(100.0)
    device = gated_device(request.param, gate, NUM_FRAMES, FRAME_TOKENS * LAYOUT.row_bytes)
    shape = KvShape(LAYOUT, (None,) * LAYOUT.num_layers, num_slots=2, max_slot_tokens=12)
    residency = PagedResidency(shape, device, page_tokens=4)
    slots = SlotTable(KvMemory(residency, shape, UNLIMITED, 4), clock, endpoint="127.0.0.1:1")
    assert residency.frames is not None
    try:
        with ends_empty(slots):
            yield Landed(slots, gate, clock, residency.frames)
            gate.open()
            slots.rest()
        assert residency.frames.num_free == NUM_FRAMES
        assert "kv-upload" not in [thread.name for thread in threading.enumerate()]
    finally:
        gate.open()
        slots.rest()
        residency.close()


async def test_while_a_copy_is_on_its_way_the_loop_and_other_slots_go_on(landed: Landed) -> None:
    first = landed.lease()
    assert await landed.write(first, 0, PIECES[0])
    await landed.gate.begun()
    second = landed.lease()
    landed.slots.renew(second, TTL_S)
    assert landed.slots.ledger().num_leased == 2
    assert not await landed.write(first, 0, PIECES[0])  # a duplicate of what is on its way
    assert await landed.write(second, 1, PIECES[0])  # another frame
    assert landed.frames.num_free == 0
    for ref in (first, second):
        landed.slots.abort(ref)


async def test_what_has_landed_is_what_was_pushed(landed: Landed) -> None:
    landed.gate.open()
    ref = landed.lease()
    for layer in range(LAYOUT.num_layers):
        with landed.slots.open_push(ref) as target:
            for piece in reversed(PIECES):
                await target.write(layer, piece, rows(piece, layer))
            await target.settle()
    await landed.slots.commit(ref, [FIRST])
    [batch_slot] = activated(landed.slots, ref)
    for layer in range(LAYOUT.num_layers):
        assert bytes(batch_slot.row.export(layer, WHOLE)) == bytes(rows(WHOLE, layer))
    landed.slots.release(ref)


async def test_a_piece_waits_while_all_frames_are_on_their_way(landed: Landed) -> None:
    refs = [landed.lease(), landed.lease()]
    for piece in PIECES:
        await landed.write(refs[0], 0, piece)
    await landed.gate.begun()
    waiting = [asyncio.create_task(landed.write(ref, 1, PIECES[0])) for ref in refs]
    assert not (await asyncio.wait(waiting, timeout=0.1))[0]
    assert landed.frames.num_free == 0
    landed.gate.open()
    assert await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S) == [True, True]
    for ref in refs:
        landed.slots.abort(ref)


async def test_a_wait_for_a_frame_that_is_cancelled_changes_nothing(landed: Landed) -> None:
    ref = landed.lease()
    for piece in PIECES:
        await landed.write(ref, 0, piece)
    waiting = asyncio.create_task(landed.write(ref, 1, PIECES[0]))
    await landed.gate.begun()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    landed.gate.open()
    await landed.settled()
    assert landed.frames.num_free == NUM_FRAMES
    for piece in PIECES:
        assert await landed.write(ref, 1, piece)
    await asyncio.wait_for(landed.slots.commit(ref, [FIRST]), WAIT_S)
    landed.slots.abort(ref)


async def test_a_lease_that_ends_while_its_piece_waits_for_a_frame_takes_none(landed: Landed) -> None:
    ref = landed.lease()
    for piece in PIECES:
        await landed.write(ref, 0, piece)
    waiting = asyncio.create_task(landed.write(ref, 1, WHOLE))
    await landed.gate.begun()
    landed.slots.abort(ref)
    landed.gate.open()
    with pytest.raises(StaleStampError):
        await asyncio.wait_for(waiting, WAIT_S)
    await landed.settled()
    assert landed.frames.num_free == NUM_FRAMES


@pytest.mark.parametrize("end", ["abort", "expiry"])
async def test_a_slot_whose_lease_ended_is_not_claimed_anew_before_its_copy_is_done(landed: Landed, end: str) -> None:
    ref, other = landed.lease(), landed.lease()
    await landed.write(ref, 0, PIECES[0])
    await landed.gate.begun()
    if end == "abort":
        landed.slots.abort(ref)
    else:
        landed.slots.renew(other, 10 * TTL_S)
        landed.clock.advance(TTL_S + 1)
        landed.slots.expire()
    assert landed.slots.ledger().num_quarantined == 1
    with pytest.raises(ResourceExhaustedError):
        landed.lease()
    with pytest.raises(StaleStampError if end == "abort" else LeaseExpiredError):
        await landed.write(ref, 0, PIECES[1])
    landed.gate.open()
    await landed.settled()
    again = landed.lease()
    assert again.slot == ref.slot
    for each in (again, other):
        landed.slots.abort(each)


async def test_a_lease_that_runs_out_during_a_copy_is_not_revived_by_it(landed: Landed) -> None:
    ref = landed.lease()
    await landed.write(ref, 0, PIECES[0])
    await landed.gate.begun()
    landed.clock.advance(TTL_S + 1)
    landed.gate.open()
    await landed.settled()
    with pytest.raises(LeaseExpiredError):
        landed.slots.renew(ref, TTL_S)


async def test_commit_waits_for_copies_and_names_what_is_on_its_way(landed: Landed) -> None:
    ref = landed.lease(2)
    for layer in range(LAYOUT.num_layers):
        await landed.write(ref, layer, PIECES[0])
    await landed.gate.begun()
    with pytest.raises(IncompletePushError, match=r"layer 0, tokens \[0, 2\) are on their way to the device"):
        await landed.slots.commit(ref, [FIRST], wait_s=0)
    commit = asyncio.create_task(landed.slots.commit(ref, [FIRST]))
    assert not (await asyncio.wait([commit], timeout=0.1))[0]
    landed.gate.open()
    assert await asyncio.wait_for(commit, WAIT_S) == 2 * LAYOUT.token_bytes
    landed.slots.abort(ref)


async def test_a_copy_that_fails_fails_its_push_and_ends_the_lease(landed: Landed) -> None:
    ref = landed.lease()
    landed.gate.error = RuntimeError("the bus is gone")
    failed = r"layer 1, tokens \[0, 2\) of slot 0 could not be copied to the device \(.*the bus is gone.*reserve"
    with landed.slots.open_push(ref) as target:
        await target.write(1, PIECES[0], rows(PIECES[0], 1))
        commit = asyncio.create_task(landed.slots.commit(ref, [FIRST]))
        await landed.gate.begun()
        landed.gate.open()
        with pytest.raises(TransferError, match=failed):
            await target.settle()
        with pytest.raises(TransferError, match=failed):
            await target.write(1, PIECES[1], rows(PIECES[1], 1))
    with pytest.raises(TransferError, match=failed):
        await asyncio.wait_for(commit, WAIT_S)
    with pytest.raises(StaleStampError):
        await landed.slots.commit(ref, [FIRST], wait_s=0)
    await landed.settled()
    assert landed.frames.num_free == NUM_FRAMES


async def test_a_piece_for_which_the_device_has_no_memory_fails_its_push(landed: Landed) -> None:
    residency = landed.slots.memory.residency
    assert isinstance(residency, PagedResidency)
    residency.bound(0)
    landed.gate.open()
    taken = residency.pool.take(1)
    with pytest.raises(TransferError, match="pages are needed"):
        await landed.push(landed.lease(), 0, PIECES[0])
    residency.pool.give(taken)


async def test_a_failed_copy_is_raised_by_the_next_piece_too(landed: Landed) -> None:
    ref = landed.lease()
    landed.gate.error = RuntimeError("the bus is gone")
    landed.gate.open()
    with landed.slots.open_push(ref) as target:
        await target.write(0, PIECES[0], rows(PIECES[0], 0))
        await landed.settled()
        with pytest.raises(TransferError, match="the bus is gone"):
            await target.write(0, PIECES[1], rows(PIECES[1], 0))


async def test_a_piece_of_several_frames_lands_whole_and_one_of_too_many_is_refused(landed: Landed) -> None:
    ref = landed.lease(8)
    landed.gate.open()
    await landed.push(ref, 0, WHOLE)  # two frames
    with pytest.raises(InvalidArgumentError, match="5 tokens is out of range: this device takes 4 at a time"):
        await landed.push(ref, 1, TokenRange(0, 5))
    with landed.slots.open_push(ref) as target:  # another thread's way takes any size
        await asyncio.to_thread(target.copy_in, 1, TokenRange(0, 8), rows(TokenRange(0, 8), 1))
        assert not await asyncio.to_thread(target.copy_in, 1, TokenRange(0, 8), rows(TokenRange(0, 8), 1))
        await asyncio.to_thread(target.drain)
    await landed.push(ref, 0, TokenRange(4, 8))
    await landed.slots.commit(ref, [FIRST])
    [batch_slot] = activated(landed.slots, ref)
    for layer in range(LAYOUT.num_layers):
        exported = [bytes(batch_slot.row.export(layer, part)) for part in TokenRange(0, 8).split(4)]
        expected = (TokenRange(0, 8),) if layer else TokenRange(0, 8).split(4)
        assert b"".join(exported) == b"".join(bytes(rows(part, layer)) for part in expected)
    landed.slots.release(ref)


async def test_rows_at_home_are_written_in_place_by_the_caller() -> None:
    slots, before = make_slots(ManualClock(100.0)), threading.active_count()
    ref = lease(slots).ref
    with slots.open_push(ref) as target:
        for layer in range(LAYOUT.num_layers):
            with pytest.raises(StopIteration) as ended:
                target.write(layer, WHOLE, rows(WHOLE, layer)).send(None)  # no wait, not even once
            assert ended.value.value is True
        assert threading.active_count() == before
        await slots.commit(ref, [FIRST], wait_s=0)
    [batch_slot] = activated(slots, ref)
    assert bytes(batch_slot.row.export(1, WHOLE)) == bytes(rows(WHOLE, 1))


def test_frames_that_hold_no_token_are_refused() -> None:
    device = PoisonedDevice()
    device._access = LinkAccess.plain(device.link, 2, LAYOUT.row_bytes - 1)
    shape = KvShape(LAYOUT, (None,) * LAYOUT.num_layers, 1, 12)
    memory = KvMemory(PagedResidency(shape, device, page_tokens=4), shape, UNLIMITED, 4)
    with pytest.raises(ConfigError, match="takes 16 bytes, and a staging frame has 15"):
        SlotTable(memory, ManualClock(100.0), endpoint="127.0.0.1:1")


# Over gRPC: a push is answered by what its copies came to.


@asynccontextmanager
async def served(slots: SlotTable) -> AsyncIterator[grpc.aio.Channel]:
    server = make_server()
    KvReceiverServicer(slots).add_to(server)
    endpoint = f"127.0.0.1:{bind(server, '127.0.0.1')}"
    await server.start()
    try:
        async with make_channel(endpoint) as channel:
            yield channel
    finally:
        await server.stop(grace=0)


@pytest.mark.parametrize("is_shared", [False, True], ids=["stream", "shared"])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "badly"])
async def test_a_push_is_answered_once_its_copies_have_ended(landed: Landed, is_shared: bool, fails: bool) -> None:
    landed.gate.error = RuntimeError("the bus is gone") if fails else None
    pool = make_pool(LAYOUT) if is_shared else None
    leased = lease(landed.slots, 2, ttl_s=60.0)
    async with served(landed.slots) as channel:
        session = open_push(channel, LAYOUT, leased, pool=pool)
        for layer in range(LAYOUT.num_layers):
            session.offer(layer, PIECES[0], rows(PIECES[0], layer))
        session.finish()
        result = asyncio.create_task(session.result())
        await landed.gate.begun()
        await asyncio.wait_for(KvClient(channel).renew(leased.ref, 60.0), WAIT_S)  # the loop serves others
        assert not result.done()
        landed.gate.open()
        ended = (await asyncio.wait_for(asyncio.gather(result, return_exceptions=True), WAIT_S))[0]
        if fails:
            assert isinstance(ended, TransferError)
            assert "the bus is gone" in str(ended)
        else:
            assert await asyncio.wait_for(landed.slots.commit(leased.ref, [FIRST], wait_s=0), WAIT_S)
            landed.slots.abort(leased.ref)
    if pool is not None:
        pool.close()
