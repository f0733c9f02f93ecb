"""What every KvSink must do, whoever owns the memory: leases fence writers, and nothing refused changes a slot.

An implementation joins with a factory in SINKS. Its sink has two slots of CAPACITY tokens and reads a ManualClock.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pytest

from baton.errors import (
    IncompletePushError,
    InvalidArgumentError,
    LeaseError,
    LeaseExpiredError,
    RangeError,
    ResourceExhaustedError,
    StaleStampError,
)
from baton.transport.kv_sink import KvSink, ReserveSpec
from baton.types import KvLayout, Lease, LeaseRef, RequestId, SampledToken, SlotId, Stamp, TokenRange
from generate_workers.slots.leases import BatchSlot
from generate_workers.slots.table import SlotTable
from tests.support.engines.generation import WAIT_S
from tests.support.engines.slot_tables import activated, make_slots
from tests.support.manual_clock import ManualClock
from tests.support.wire.memory_sink import MemorySink

LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
NUM_TOKENS = 8
CAPACITY = 12
NUM_SLOTS = 2
TTL_S = 5.0
FIRST = SampledToken(token_id=7)
WHOLE = TokenRange(0, NUM_TOKENS)
RETRY_S = 0.05
"""Real seconds after which a waiting commit looks at the manual clock again."""


@dataclass(frozen=True)
class SinkUnderTest:
    sink: KvSink
    clock: ManualClock
    read: Callable[[LeaseRef, int, TokenRange], bytes]
    """The memory of a lease that is committed."""


def memory_sink() -> SinkUnderTest:
    clock = ManualClock(start_s=100.0)
    sink = MemorySink(LAYOUT, clock, num_slots=NUM_SLOTS, capacity_tokens=CAPACITY)
    return SinkUnderTest(sink, clock, sink.read)


def slot_table(policy: str) -> SinkUnderTest:
    clock = ManualClock(start_s=100.0)
    table = make_slots(clock, num_slots=NUM_SLOTS, max_slot_tokens=CAPACITY, layout=LAYOUT, policy=policy)
    batch_slots: dict[LeaseRef, BatchSlot] = {}

    def read(ref: LeaseRef, layer: int, tokens: TokenRange) -> bytes:
        if ref not in batch_slots:
            [batch_slots[ref]] = activated(table, ref)
        return bytes(batch_slots[ref].row.export(layer, tokens))

    return SinkUnderTest(table, clock, read)


SINKS: dict[str, Callable[[], SinkUnderTest]] = {
    "memory": memory_sink,
    "slots-device": partial(slot_table, "device"),
    "slots-host": partial(slot_table, "host"),
    "slots-paged": partial(slot_table, "paged"),
}


@pytest.fixture(params=SINKS)
def subject(request: pytest.FixtureRequest) -> Iterator[SinkUnderTest]:
    made = SINKS[request.param]()
    yield made
    if isinstance(made.sink, SlotTable):
        made.sink.rest()
        made.sink.memory.residency.close()


@pytest.fixture
def sink(subject: SinkUnderTest) -> KvSink:
    return subject.sink


@pytest.fixture
def lease(sink: KvSink) -> Lease:
    return reserve(sink)


def spec(num_tokens: int = NUM_TOKENS, capacity_tokens: int = CAPACITY) -> ReserveSpec:
    return ReserveSpec(RequestId("r"), 1, num_tokens, capacity_tokens, TTL_S)


def reserve(sink: KvSink) -> Lease:
    return sink.reserve(spec())


def rows(tokens: TokenRange, seed: int = 0) -> bytes:
    """Bytes of `tokens` that differ by position and seed."""
    return bytes((seed + position) % 251 for position in range(len(tokens) * LAYOUT.row_bytes))


async def push(sink: KvSink, ref: LeaseRef, layer: int, tokens: TokenRange, seed: int = 0) -> bool:
    with sink.open_push(ref) as target:
        is_new = await target.write(layer, tokens, memoryview(rows(tokens, seed)))
        await target.settle()
        return is_new


async def push_all(sink: KvSink, ref: LeaseRef) -> None:
    for layer in range(LAYOUT.num_layers):
        await push(sink, ref, layer, WHOLE, seed=layer)


def test_lease_repeats_what_was_asked_for(lease: Lease) -> None:
    assert (lease.request_id, lease.attempt, lease.num_tokens, lease.ttl_s) == (RequestId("r"), 1, NUM_TOKENS, TTL_S)


def test_leases_hold_different_slots_until_none_is_free(sink: KvSink) -> None:
    slots = {reserve(sink).ref.slot for _ in range(NUM_SLOTS)}
    assert len(slots) == NUM_SLOTS
    with pytest.raises(ResourceExhaustedError):
        reserve(sink)


def test_reserve_refuses_more_than_a_slot_holds_and_takes_none_then(sink: KvSink) -> None:
    with pytest.raises(InvalidArgumentError):
        sink.reserve(spec(capacity_tokens=CAPACITY + 1))
    assert len({reserve(sink).ref.slot for _ in range(NUM_SLOTS)}) == NUM_SLOTS


async def test_committed_slot_holds_what_was_pushed(subject: SinkUnderTest, lease: Lease) -> None:
    await push_all(subject.sink, lease.ref)
    await subject.sink.commit(lease.ref, [FIRST])
    assert [subject.read(lease.ref, layer, WHOLE) for layer in range(2)] == [rows(WHOLE, seed=0), rows(WHOLE, seed=1)]


async def test_pieces_come_in_any_order_and_from_many_writers(subject: SinkUnderTest, lease: Lease) -> None:
    parts = [TokenRange(5, 8), TokenRange(0, 2), TokenRange(2, 5)]
    with ExitStack() as stack:
        targets = [stack.enter_context(subject.sink.open_push(lease.ref)) for _ in parts]
        for target, part in zip(targets, parts, strict=True):
            for layer in (1, 0):
                await target.write(layer, part, memoryview(rows(part, seed=layer + part.start)))
    await subject.sink.commit(lease.ref, [FIRST])
    assert subject.read(lease.ref, 1, parts[2]) == rows(parts[2], seed=3)
    assert subject.read(lease.ref, 0, WHOLE) == b"".join(rows(part, seed=part.start) for part in sorted(parts))


async def test_duplicate_piece_is_absorbed_and_changes_nothing(subject: SinkUnderTest, lease: Lease) -> None:
    assert await push(subject.sink, lease.ref, 0, WHOLE) is True
    await push(subject.sink, lease.ref, 1, WHOLE)
    assert await push(subject.sink, lease.ref, 0, WHOLE, seed=99) is False
    await subject.sink.commit(lease.ref, [FIRST])
    assert subject.read(lease.ref, 0, WHOLE) == rows(WHOLE, seed=0)


@pytest.mark.parametrize(
    ("layer", "tokens"),
    [
        pytest.param(0, TokenRange(2, 6), id="overlaps in part"),
        pytest.param(0, TokenRange(0, 3), id="lies inside an earlier piece"),
        pytest.param(1, TokenRange(0, NUM_TOKENS + 1), id="beyond the lease, within the slot"),
        pytest.param(1, TokenRange(CAPACITY, CAPACITY + 4), id="beyond the slot"),
        pytest.param(2, TokenRange(0, 4), id="no such layer"),
        pytest.param(1, TokenRange(3, 3), id="empty"),
    ],
)
async def test_bad_range_is_refused_and_changes_nothing(
    subject: SinkUnderTest, lease: Lease, layer: int, tokens: TokenRange
) -> None:
    head, tail = TokenRange(0, 4), TokenRange(4, NUM_TOKENS)
    await push(subject.sink, lease.ref, 0, head)
    with pytest.raises(RangeError):
        await push(subject.sink, lease.ref, layer, tokens, seed=99)
    await push(subject.sink, lease.ref, 0, tail, seed=5)
    await push(subject.sink, lease.ref, 1, WHOLE, seed=1)
    await subject.sink.commit(lease.ref, [FIRST])
    assert subject.read(lease.ref, 0, WHOLE) == rows(head) + rows(tail, seed=5)
    assert subject.read(lease.ref, 1, WHOLE) == rows(WHOLE, seed=1)


@pytest.mark.parametrize("verb", ["renew", "push", "commit"])
@pytest.mark.parametrize(
    "ref",
    [
        pytest.param(LeaseRef(SlotId(0), Stamp(2**63)), id="stamp never given"),
        pytest.param(LeaseRef(SlotId(NUM_SLOTS), Stamp(1)), id="no such slot"),
        pytest.param(LeaseRef(SlotId(2**32 - 1), Stamp(0)), id="giant slot"),
    ],
)
async def test_unknown_lease_is_stale(sink: KvSink, lease: Lease, verb: str, ref: LeaseRef) -> None:
    with pytest.raises(StaleStampError):
        await use(sink, verb, ref)


@pytest.mark.parametrize("verb", ["renew", "push", "commit"])
async def test_aborted_lease_is_stale(sink: KvSink, lease: Lease, verb: str) -> None:
    sink.abort(lease.ref)
    with pytest.raises(StaleStampError):
        await use(sink, verb, lease.ref)


@pytest.mark.parametrize("verb", ["renew", "push", "commit"])
async def test_expired_lease_is_refused_as_such(subject: SinkUnderTest, lease: Lease, verb: str) -> None:
    subject.clock.advance(TTL_S + 1)
    with pytest.raises(LeaseExpiredError):
        await use(subject.sink, verb, lease.ref)


async def use(sink: KvSink, verb: str, ref: LeaseRef) -> None:
    if verb == "renew":
        sink.renew(ref, TTL_S)
    elif verb == "push":
        await push(sink, ref, 0, WHOLE)
    else:
        await sink.commit(ref, [FIRST], wait_s=0)


def test_expiry_frees_the_slot(subject: SinkUnderTest) -> None:
    old = [reserve(subject.sink).ref for _ in range(NUM_SLOTS)]
    subject.clock.advance(TTL_S + 1)
    assert not {reserve(subject.sink).ref for _ in range(NUM_SLOTS)} & set(old)


@pytest.mark.parametrize("verb", ["renew", "push"])
async def test_sign_of_life_keeps_the_lease(subject: SinkUnderTest, lease: Lease, verb: str) -> None:
    for _ in range(3):
        subject.clock.advance(TTL_S * 0.75)
        await use(subject.sink, verb, lease.ref)


async def test_each_written_piece_keeps_the_lease(subject: SinkUnderTest, lease: Lease) -> None:
    with subject.sink.open_push(lease.ref) as target:
        for position in range(NUM_TOKENS):
            subject.clock.advance(TTL_S * 0.75)
            part = TokenRange(position, position + 1)
            assert await target.write(0, part, memoryview(rows(part)))


async def test_write_after_abort_is_refused(sink: KvSink, lease: Lease) -> None:
    with sink.open_push(lease.ref) as target:
        sink.abort(lease.ref)
        with pytest.raises(StaleStampError):
            await target.write(0, WHOLE, memoryview(rows(WHOLE)))


async def test_write_after_expiry_is_refused(subject: SinkUnderTest, lease: Lease) -> None:
    with subject.sink.open_push(lease.ref) as target:
        subject.clock.advance(TTL_S + 1)
        with pytest.raises(LeaseExpiredError):
            await target.write(0, WHOLE, memoryview(rows(WHOLE)))


@pytest.mark.parametrize("end", ["abort", "expiry"])
def test_slot_is_not_reused_before_its_last_writer_has_left(subject: SinkUnderTest, end: str) -> None:
    leases = [reserve(subject.sink) for _ in range(NUM_SLOTS)]
    with subject.sink.open_push(leases[0].ref), subject.sink.open_push(leases[0].ref):
        for each in leases[1:]:
            subject.sink.renew(each.ref, 10 * TTL_S)
        if end == "abort":
            subject.sink.abort(leases[0].ref)
        else:
            subject.clock.advance(TTL_S + 1)
        with pytest.raises(ResourceExhaustedError):
            reserve(subject.sink)
    assert reserve(subject.sink).ref.slot == leases[0].ref.slot


async def test_writer_of_an_earlier_lease_cannot_write_into_the_next(subject: SinkUnderTest) -> None:
    old = reserve(subject.sink)
    subject.sink.abort(old.ref)
    new = [reserve(subject.sink) for _ in range(NUM_SLOTS)]
    with pytest.raises(StaleStampError):
        await push(subject.sink, old.ref, 0, WHOLE, seed=99)
    for each in new:
        await push_all(subject.sink, each.ref)
        await subject.sink.commit(each.ref, [FIRST])
        assert subject.read(each.ref, 0, WHOLE) == rows(WHOLE, seed=0)


def test_abort_may_be_repeated(sink: KvSink, lease: Lease) -> None:
    sink.abort(lease.ref)
    sink.abort(lease.ref)
    assert len({reserve(sink).ref.slot for _ in range(NUM_SLOTS)}) == NUM_SLOTS


async def test_stale_abort_changes_nothing(sink: KvSink) -> None:
    old = reserve(sink)
    sink.abort(old.ref)
    new = [reserve(sink) for _ in range(NUM_SLOTS)]
    for ref in (old.ref, LeaseRef(SlotId(NUM_SLOTS), Stamp(1))):
        sink.abort(ref)
    for each in new:
        assert await push(sink, each.ref, 0, WHOLE)


async def test_commit_returns_the_leased_bytes_and_may_be_repeated_with_the_same_token_only(
    sink: KvSink, lease: Lease
) -> None:
    await push_all(sink, lease.ref)
    for _ in range(2):
        assert await sink.commit(lease.ref, [FIRST]) == NUM_TOKENS * LAYOUT.token_bytes
    with pytest.raises(LeaseError):
        await sink.commit(lease.ref, [SampledToken(token_id=FIRST.token_id + 1)])


async def begin_commit(sink: KvSink, ref: LeaseRef, wait_s: float = 60.0) -> "asyncio.Task[int]":
    """A commit of a lease that lacks bytes, once it waits for them."""
    commit = asyncio.create_task(sink.commit(ref, [FIRST], wait_s))
    await asyncio.sleep(0)  # it runs until it waits
    assert not commit.done()
    return commit


async def test_commit_waits_for_the_last_byte(sink: KvSink, lease: Lease) -> None:
    await push(sink, lease.ref, 0, WHOLE)
    commit = await begin_commit(sink, lease.ref)
    await push(sink, lease.ref, 1, WHOLE)
    assert await asyncio.wait_for(commit, WAIT_S) == NUM_TOKENS * LAYOUT.token_bytes


async def test_commit_names_the_first_missing_range(sink: KvSink, lease: Lease) -> None:
    await push(sink, lease.ref, 0, WHOLE)
    await push(sink, lease.ref, 1, TokenRange(0, 3))
    with pytest.raises(IncompletePushError, match=r"layer 1, tokens \[3, 8\)"):
        await sink.commit(lease.ref, [FIRST], wait_s=0)


async def test_commit_waits_no_longer_than_told(subject: SinkUnderTest, lease: Lease) -> None:
    commit = await begin_commit(subject.sink, lease.ref, wait_s=RETRY_S)
    subject.clock.advance(2 * RETRY_S)
    with pytest.raises(IncompletePushError):
        await asyncio.wait_for(commit, WAIT_S)


async def test_commit_waits_no_longer_than_the_lease_lives(subject: SinkUnderTest) -> None:
    short = subject.sink.reserve(ReserveSpec(RequestId("r"), 1, NUM_TOKENS, CAPACITY, ttl_s=RETRY_S))
    commit = await begin_commit(subject.sink, short.ref, wait_s=float("inf"))
    subject.clock.advance(2 * RETRY_S)
    with pytest.raises(IncompletePushError):
        await asyncio.wait_for(commit, WAIT_S)


async def test_push_may_be_finished_after_a_commit_that_came_too_early(subject: SinkUnderTest, lease: Lease) -> None:
    await push(subject.sink, lease.ref, 0, WHOLE)
    with pytest.raises(IncompletePushError):
        await subject.sink.commit(lease.ref, [FIRST], wait_s=0)
    await push(subject.sink, lease.ref, 1, WHOLE, seed=1)
    await subject.sink.commit(lease.ref, [FIRST])
    assert subject.read(lease.ref, 1, WHOLE) == rows(WHOLE, seed=1)


async def test_cancelled_commit_changes_nothing(sink: KvSink, lease: Lease) -> None:
    commit = await begin_commit(sink, lease.ref)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    await push_all(sink, lease.ref)
    assert await sink.commit(lease.ref, [SampledToken(token_id=FIRST.token_id + 1)]) > 0


async def test_abort_ends_a_waiting_commit(sink: KvSink, lease: Lease) -> None:
    commit = await begin_commit(sink, lease.ref)
    sink.abort(lease.ref)
    with pytest.raises(StaleStampError):
        await asyncio.wait_for(commit, WAIT_S)


async def test_committed_lease_still_expires(subject: SinkUnderTest, lease: Lease) -> None:
    await push_all(subject.sink, lease.ref)
    await subject.sink.commit(lease.ref, [FIRST])
    subject.clock.advance(TTL_S + 1)
    assert len({reserve(subject.sink).ref.slot for _ in range(NUM_SLOTS)}) == NUM_SLOTS
