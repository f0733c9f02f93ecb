"""Leases beyond what every KvSink must do (tests/conformance/test_kv_sinks.py): rows, ledger, stamps, notification."""

import asyncio
import threading

import pytest

from baton.errors import (
    IncompletePushError,
    InvalidArgumentError,
    LeaseError,
    LeaseExpiredError,
    ResourceExhaustedError,
    StaleStampError,
)
from baton.modeling.kv.row_memory import PagedMemory
from baton.transport.kv_sink import ReserveSpec
from baton.types import LeaseRef, RequestId, SampledToken, TokenRange
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.slots.kv_memory import KvMemory
from generate_workers.slots.leases import SlotLedger
from generate_workers.slots.table import SlotTable
from tests.support.engines.generation import WAIT_S
from tests.support.engines.slot_tables import (
    FIRST,
    LAYOUT,
    UNLIMITED,
    Standing,
    activated,
    ends_empty,
    is_empty,
    kv_ledger,
    lease,
    make_slots,
    page_bytes,
    push_zeros,
    standing,
)
from tests.support.manual_clock import ManualClock

TTL_S = 5.0
ROW_BYTES = page_bytes(8)
"""A page a layer."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=100.0)


@pytest.fixture
def slots(clock: ManualClock) -> SlotTable:
    return make_slots(clock)


async def committed(slots: SlotTable, num_tokens: int = 4) -> LeaseRef:
    ref = lease(slots, num_tokens).ref
    push_zeros(slots, ref, num_tokens)
    await slots.commit(ref, [FIRST])
    return ref


async def test_a_committed_lease_becomes_a_row_and_is_released(slots: SlotTable) -> None:
    ref = await committed(slots)
    assert standing(slots, ref) is Standing.READY
    with pytest.raises(LeaseError):
        await slots.commit(ref, [SampledToken(FIRST.token_id + 1)])
    [batch_slot] = activated(slots, ref)
    assert (batch_slot.ref, batch_slot.first, len(batch_slot.row.tokens)) == (ref, FIRST, 8)
    assert slots.ledger().num_active == 1
    with ends_empty(slots):
        slots.release(ref)


def test_a_local_row_takes_a_slot_at_once_and_none_when_all_are_taken(slots: SlotTable) -> None:
    batch_slots = [*(slots.occupy(4, 8) or ()), *(slots.occupy(4, 12) or ())]
    assert slots.occupy(1, 1) is None
    assert slots.ledger() == SlotLedger(2, 0, 0, 2, 0, 0, 0, kv_ledger(active=2 * ROW_BYTES))
    with ends_empty(slots):
        for batch_slot in batch_slots:
            slots.release(batch_slot.ref)


async def test_a_lease_becomes_rows_once_and_not_before_its_commit(slots: SlotTable) -> None:
    ref = lease(slots).ref
    assert slots.activate(ref) is None
    push_zeros(slots, ref, 4)
    await slots.commit(ref, [FIRST])
    activated(slots, ref)
    with pytest.raises(LeaseError, match="another row's"):
        slots.activate(ref)
    slots.release(ref)
    with pytest.raises(StaleStampError):
        slots.activate(ref)


def test_stamps_are_never_given_twice_and_grow(slots: SlotTable) -> None:
    stamps = []
    for _ in range(20):
        refs = [lease(slots).ref for _ in range(2)]
        stamps += [ref.stamp for ref in refs]
        for ref in refs:
            slots.abort(ref)
    assert stamps == sorted(set(stamps))


def test_a_restarted_table_does_not_repeat_stamps(clock: ManualClock) -> None:
    first = make_slots(clock)
    used = set()
    for _ in range(50):
        ref = lease(first).ref
        used.add(ref.stamp)
        first.abort(ref)
    clock.advance(0.001)
    assert lease(make_slots(clock)).ref.stamp not in used


def test_refused_reserve_names_field_value_and_limit(slots: SlotTable) -> None:
    with pytest.raises(InvalidArgumentError, match=r"capacity_tokens = 13 is out of range: .* at most 12"):
        lease(slots, capacity_tokens=13)


@pytest.mark.parametrize(("num_tokens", "ttl_s"), [(0, 5.0), (9, 5.0), (4, 0.0), (4, -1.0), (4, float("nan"))])
def test_reserve_checks_its_fields(slots: SlotTable, num_tokens: int, ttl_s: float) -> None:
    with pytest.raises(InvalidArgumentError), ends_empty(slots):
        lease(slots, num_tokens, ttl_s=ttl_s)
    assert is_empty(slots.ledger())


def test_a_device_with_too_little_memory_is_no_room_and_takes_no_slot(clock: ManualClock) -> None:
    class Small(PagedMemory):
        """The second row's memory cannot be had."""

        num_rows = 0

        def expect(self, num_tokens: int) -> None:
            Small.num_rows += 1
            if Small.num_rows % 2 == 0:
                raise RuntimeError("out of memory")

    shape = KvShape(LAYOUT, (None, None), 2, 12)
    memory = KvMemory(DeviceResidency(shape, Small), shape, UNLIMITED, 4)
    table = SlotTable(memory, clock, endpoint="127.0.0.1:1")
    with pytest.raises(ResourceExhaustedError, match="no memory for 2 slots of 8 tokens"):
        table.reserve(ReserveSpec(RequestId("r"), 1, 4, 8, 5.0, 2))
    with pytest.raises(ResourceExhaustedError):
        table.occupy(4, 8, 2)
    assert (is_empty(table.ledger()), memory.promised) == (True, KvBytes())


async def test_local_rows_take_no_commit(slots: SlotTable) -> None:
    [batch_slot] = slots.occupy(4, 8) or []
    with pytest.raises(LeaseError):
        await slots.commit(batch_slot.ref, [FIRST])


async def test_commit_of_a_running_row_is_repeatable(slots: SlotTable) -> None:
    ref = await committed(slots)
    slots.activate(ref)
    assert await slots.commit(ref, [FIRST]) == 4 * LAYOUT.token_bytes
    assert standing(slots, ref) is Standing.RUNNING


async def test_a_lease_that_another_thread_expires_ends_a_waiting_commit(slots: SlotTable, clock: ManualClock) -> None:
    ref = lease(slots, ttl_s=60.0).ref
    commit = asyncio.create_task(slots.commit(ref, [FIRST]))
    await asyncio.sleep(0)  # it waits now: the clock stands still, so nothing but the expiry can wake it
    clock.advance(61.0)
    thread = threading.Thread(target=slots.expire)
    thread.start()
    with pytest.raises(IncompletePushError, match=r"layer 0, tokens \[0, 4\)"):
        await asyncio.wait_for(commit, WAIT_S)
    thread.join()
    assert is_empty(slots.ledger())


async def test_a_push_that_completes_from_another_thread_wakes_commit(slots: SlotTable) -> None:
    ref = lease(slots, ttl_s=60.0).ref
    commit = asyncio.create_task(slots.commit(ref, [FIRST]))
    await asyncio.sleep(0)
    await asyncio.to_thread(push_zeros, slots, ref, 4)
    assert await asyncio.wait_for(commit, WAIT_S) == 4 * LAYOUT.token_bytes
    slots.abort(ref)


def test_next_deadline_is_the_earliest_of_the_timed_claims(slots: SlotTable, clock: ManualClock) -> None:
    assert slots.next_deadline_s() == float("inf")
    lease(slots, ttl_s=7.0)
    second = lease(slots, ttl_s=3.0)
    assert slots.next_deadline_s() == 103.0
    slots.renew(second.ref, 30.0)
    assert slots.next_deadline_s() == 107.0


async def test_rows_do_not_expire(slots: SlotTable, clock: ManualClock) -> None:
    ref = await committed(slots)
    slots.activate(ref)
    [batch_slot] = slots.occupy(4, 8) or []
    clock.advance(1e9)
    slots.expire()
    assert [standing(slots, each) for each in (ref, batch_slot.ref)] == [Standing.RUNNING] * 2


def test_the_last_of_many_writers_frees_the_slot(slots: SlotTable) -> None:
    ref = lease(slots).ref
    with slots.open_push(ref):
        with slots.open_push(ref):
            slots.abort(ref)
        assert slots.ledger().num_quarantined == 1
    assert is_empty(slots.ledger())


async def test_the_engine_hears_every_change(
    slots: SlotTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []
    doing = "reserve"
    monkeypatch.setattr(slots.changes, "wake", lambda: changes.append(doing))
    ref = lease(slots).ref
    doing = "push"
    push_zeros(slots, ref, 4)
    doing = "commit"
    await slots.commit(ref, [FIRST])
    doing = "activate and release"
    slots.activate(ref)
    slots.release(ref)
    doing = "nothing"
    slots.abort(ref)
    slots.expire()
    doing = "expire"
    other = lease(slots).ref
    changes.clear()
    clock.advance(TTL_S)
    with pytest.raises(LeaseExpiredError):
        slots.renew(other, TTL_S)
    assert changes == ["expire"]


async def test_the_engine_is_not_told_of_nothing(slots: SlotTable, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = await committed(slots)
    slots.activate(ref)
    slots.release(ref)
    changes: list[bool] = []
    monkeypatch.setattr(slots.changes, "wake", lambda: changes.append(True))
    slots.abort(ref)
    slots.expire()
    with pytest.raises(StaleStampError), slots.open_push(ref):
        pytest.fail("opened")
    assert changes == []


def test_the_table_may_be_called_as_a_change_is_told(slots: SlotTable, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SlotLedger] = []
    monkeypatch.setattr(slots.changes, "wake", lambda: seen.append(slots.ledger()))
    slots.abort(lease(slots).ref)
    assert [ledger.num_free for ledger in seen] == [1, 2]


def test_a_piece_that_could_not_be_copied_can_never_be_committed(clock: ManualClock) -> None:
    class Broken(PagedMemory):
        def commit(self, tokens: TokenRange, layer: int | None = None) -> None:
            raise MemoryError

    shape = KvShape(LAYOUT, (None, None), 1, 12)
    table = SlotTable(KvMemory(DeviceResidency(shape, Broken), shape, UNLIMITED, 4), clock, endpoint="127.0.0.1:1")
    ref = lease(table).ref
    with pytest.raises(MemoryError):
        push_zeros(table, ref, 4)
    assert standing(table, ref) is Standing.GONE
    assert is_empty(table.ledger())


async def committed_choices(slots: SlotTable, num_choices: int) -> LeaseRef:
    spec = ReserveSpec(RequestId("r"), 1, 4, 8, 5.0, num_choices)
    ref = slots.reserve(spec).ref
    push_zeros(slots, ref, 4)
    await slots.commit(ref, [SampledToken(choice) for choice in range(num_choices)])
    return ref


async def test_a_lease_of_several_choices_becomes_as_many_rows(clock: ManualClock) -> None:
    slots = make_slots(clock, num_slots=4)
    ref = await committed_choices(slots, 3)
    assert slots.ledger() == SlotLedger(4, 1, 3, 0, 0, ROW_BYTES, ROW_BYTES, kv_ledger(leased=3 * ROW_BYTES))
    batch_slots = activated(slots, ref)
    assert batch_slots[0].ref == ref
    assert [batch_slot.first for batch_slot in batch_slots] == [SampledToken(0), SampledToken(1), SampledToken(2)]
    assert len({batch_slot.ref for batch_slot in batch_slots}) == 3
    with ends_empty(slots):
        for num_left, batch_slot in zip((2, 1, 0), batch_slots, strict=True):  # each on its own
            slots.release(batch_slot.ref)
            assert slots.ledger().num_active == num_left


def test_choices_get_all_their_slots_or_none(slots: SlotTable) -> None:
    first = lease(slots).ref
    with pytest.raises(ResourceExhaustedError, match="fewer than 2 of 2 slots are free"):
        slots.reserve(ReserveSpec(RequestId("r"), 1, 4, 8, 5.0, 2))
    assert slots.occupy(4, 8, 2) is None
    assert slots.ledger().num_free == 1
    slots.abort(first)


@pytest.mark.parametrize("num_choices", [0, 3])
def test_more_choices_than_slots_are_refused(slots: SlotTable, num_choices: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"n = {num_choices} is out of range: this group has 2 slots"):
        slots.reserve(ReserveSpec(RequestId("r"), 1, 4, 8, 5.0, num_choices))


async def test_a_commit_needs_a_token_for_each_choice(slots: SlotTable) -> None:
    ref = slots.reserve(ReserveSpec(RequestId("r"), 1, 4, 8, 5.0, 2)).ref
    push_zeros(slots, ref, 4)
    with pytest.raises(LeaseError, match="1 first tokens for the 2 choices"):
        await slots.commit(ref, [FIRST])
    assert standing(slots, ref) is Standing.PENDING
