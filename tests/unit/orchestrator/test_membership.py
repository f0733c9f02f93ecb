"""Views replace each other, loads balance, waiting is bounded, and job numbers never come again."""

import asyncio

import pytest

from baton.clock import ManualClock
from baton.ids import Epoch
from orchestrator.membership import ClusterView, GenerationGroup, JobNumbers, Load, Members, PrefillGroup

GROUP = GenerationGroup("g", "h:1", "layout", num_slots=4, max_slot_tokens=100)
CHAIN = PrefillGroup("p", ("h:2", "h:3"), Epoch(1))


def first_group(members: Members) -> GenerationGroup | None:
    return next(iter(members.view.generation), None)


async def test_waiting_ends_with_the_view_that_brings_a_group() -> None:
    members = Members()
    waiting = asyncio.create_task(members.until(lambda: first_group(members), 20))
    await asyncio.sleep(0)
    members.update(ClusterView())
    await asyncio.sleep(0)
    assert not waiting.done()
    members.update(ClusterView(generation=(GROUP,)))
    assert await waiting == GROUP


async def test_waiting_ends_when_a_group_is_let_go() -> None:
    members = Members()
    with members.hold("g"):
        waiting = asyncio.create_task(members.until(lambda: None if members.load("g").num_requests else GROUP, 20))
        await asyncio.sleep(0)
    assert await waiting == GROUP


async def test_waiting_is_bounded() -> None:
    members = Members()
    assert await members.until(lambda: first_group(members), 0.01) is None


async def test_a_cancelled_wait_is_cancelled() -> None:
    waiting = asyncio.create_task(Members().until(lambda: None, 20))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_loads_add_up_and_go() -> None:
    members = Members()
    with members.hold("g", 3), members.hold("g", 1):
        assert members.load("g") == Load(num_requests=2, num_slots=4)
    assert members.load("g") == Load()


async def test_a_group_s_load_outlives_its_view() -> None:
    members = Members()
    with members.hold("g"):
        members.update(ClusterView())
        assert members.load("g").num_requests == 1


async def test_an_update_is_told() -> None:
    members, told = Members(), []
    members.on_update = lambda: told.append(members.view)
    members.update(ClusterView(generation=(GROUP,)))
    assert told == [members.view]


def test_a_view_knows_its_slots_and_workers() -> None:
    view = ClusterView((CHAIN,), (GROUP, GROUP))
    assert view.num_slots == 8
    assert view.endpoints == {"h:1", "h:2", "h:3"}


def test_job_numbers_ascend_over_lives_of_the_orchestrator() -> None:
    clock = ManualClock(start_s=100)
    numbers = JobNumbers(clock)
    issued = [numbers.issue() for _ in range(3)]
    clock.advance(1)
    issued.append(JobNumbers(clock).issue())
    assert issued == sorted(set(issued))
    assert 0 < issued[0] < 2**63
