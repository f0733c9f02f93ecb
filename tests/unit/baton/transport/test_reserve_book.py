"""A Reserve that was aborted by its number leaves no lease, in whatever order the two come."""

import asyncio

import pytest

from baton.errors import LeaseError, ResourceExhaustedError, UnavailableError
from baton.transport.reserve_book import MAX_REMEMBERED, REMEMBER_S, ReserveBook
from baton.types import Lease, LeaseRef, RequestId, ReserveNumber, SlotId, Stamp
from tests.support.manual_clock import ManualClock

NUMBER = ReserveNumber(7)


class Receiver:
    """A book over leases that are counted."""

    def __init__(self) -> None:
        self.clock = ManualClock(start_s=100.0)
        self.book = ReserveBook(self.clock)
        self.live: list[LeaseRef] = []
        self.may_grant = asyncio.Event()
        self.may_grant.set()
        self.num_stamps = 0
        self.failure: Exception | None = None

    async def reserve(self, number: ReserveNumber = NUMBER) -> Lease:
        return await self.book.grant(number, self._make, self.live.remove)

    def abort(self, number: ReserveNumber = NUMBER) -> None:
        ref = self.book.abort(number)
        if ref in self.live:
            self.live.remove(ref)

    async def _make(self) -> Lease:
        await self.may_grant.wait()
        if self.failure is not None:
            raise self.failure
        self.num_stamps += 1
        ref = LeaseRef(SlotId(0), Stamp(self.num_stamps))
        self.live.append(ref)
        return Lease(ref, RequestId("r"), 1, 4, "h:1", 30.0)


@pytest.fixture
async def receiver() -> Receiver:
    return Receiver()


async def test_an_abort_after_the_grant_names_the_lease(receiver: Receiver) -> None:
    lease = await receiver.reserve()
    assert receiver.book.abort(NUMBER) == lease.ref
    assert receiver.book.abort(NUMBER) is None  # once is enough


async def test_an_abort_during_the_grant_ends_the_lease(receiver: Receiver) -> None:
    receiver.may_grant.clear()
    reserving = asyncio.create_task(receiver.reserve())
    await asyncio.sleep(0)
    receiver.abort()
    receiver.may_grant.set()
    with pytest.raises(LeaseError, match="Reserve 7 was aborted while it was granted"):
        await reserving
    assert not receiver.live


async def test_a_reserve_that_comes_after_its_abort_is_refused(receiver: Receiver) -> None:
    receiver.abort()
    with pytest.raises(LeaseError, match="Reserve 7 was aborted before it came: reserve again"):
        await receiver.reserve()
    assert not receiver.live and receiver.num_stamps == 0
    await receiver.reserve(ReserveNumber(8))
    assert len(receiver.live) == 1


async def test_a_reserve_that_is_heard_twice_gets_one_lease(receiver: Receiver) -> None:
    assert await receiver.reserve() == await receiver.reserve()
    assert len(receiver.live) == 1


async def test_a_reserve_that_is_heard_again_before_it_is_granted_is_told_to_wait(receiver: Receiver) -> None:
    receiver.may_grant.clear()
    reserving = asyncio.create_task(receiver.reserve())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="Reserve 7 is under way"):
        await receiver.reserve()
    receiver.may_grant.set()
    await reserving
    assert len(receiver.live) == 1


async def test_a_refused_reserve_may_come_again(receiver: Receiver) -> None:
    receiver.failure = ResourceExhaustedError("all slots are taken")
    with pytest.raises(ResourceExhaustedError):
        await receiver.reserve()
    receiver.failure = None
    await receiver.reserve()
    assert len(receiver.live) == 1


async def test_a_refused_reserve_that_was_aborted_meanwhile_stays_aborted(receiver: Receiver) -> None:
    receiver.may_grant.clear()
    receiver.failure = ResourceExhaustedError("all slots are taken")
    reserving = asyncio.create_task(receiver.reserve())
    await asyncio.sleep(0)
    receiver.abort()
    receiver.may_grant.set()
    with pytest.raises(ResourceExhaustedError):
        await reserving
    receiver.failure = None
    with pytest.raises(LeaseError):
        await receiver.reserve()


async def test_numbers_are_forgotten_in_time(receiver: Receiver) -> None:
    receiver.abort()
    receiver.clock.advance(REMEMBER_S - 1)
    with pytest.raises(LeaseError):
        await receiver.reserve()
    receiver.clock.advance(2)
    await receiver.reserve(ReserveNumber(8))
    assert len(receiver.book._known) == 1


async def test_no_more_than_so_many_are_remembered(receiver: Receiver) -> None:
    for number in range(1, MAX_REMEMBERED + 100):
        receiver.abort(ReserveNumber(number))
    assert len(receiver.book._known) == MAX_REMEMBERED
    await receiver.reserve(ReserveNumber(1))
    with pytest.raises(LeaseError):
        await receiver.reserve(ReserveNumber(MAX_REMEMBERED + 99))
