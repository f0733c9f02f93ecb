"""First in, first out, within bounds; whoever leaves makes room at once."""

import asyncio
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.errors import ResourceExhaustedError
from orchestrator.admission import Admission, Entry
from orchestrator.config import OrchestratorConfig


def admission(clock: ManualClock | None = None, **fields: Any) -> Admission:
    return Admission(OrchestratorConfig(**{"max_running": 2, **fields}), clock or ManualClock())


def running(*entries: Entry) -> list[bool]:
    return [entry.started_s is not None for entry in entries]


def test_requests_run_in_order_of_arrival() -> None:
    queue = admission()
    entries = [queue.join(10) for _ in range(4)]
    assert running(*entries) == [True, True, False, False]
    queue.leave(entries[1])
    assert running(*entries) == [True, True, True, False]
    assert (queue.num_running, queue.num_queued) == (2, 1)


async def test_waiting_ends_with_the_turn() -> None:
    queue = admission(max_running=1)
    first, second = queue.join(1), queue.join(1)
    await first.admitted()
    waiting = asyncio.create_task(second.admitted())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.leave(first)
    await asyncio.wait_for(waiting, 5)


def test_who_leaves_the_queue_makes_room_in_it() -> None:
    queue = admission(max_running=1, max_queued=1)
    queue.join(1)
    waiting = queue.join(1)
    with pytest.raises(ResourceExhaustedError, match="1 requests wait already: the queue holds 1"):
        queue.join(1)
    queue.leave(waiting)
    assert queue.num_queued == 0
    queue.join(1)


def test_leaving_twice_changes_nothing() -> None:
    queue = admission()
    first, second, third = (queue.join(1) for _ in range(3))
    queue.leave(first)
    queue.leave(first)
    assert running(second, third) == [True, True]
    assert queue.num_running == 2


def test_waiting_prompt_tokens_are_bounded() -> None:
    queue = admission(max_running=1, max_queued_tokens=100)
    queue.join(1000)  # does not wait
    queue.join(70)
    with pytest.raises(ResourceExhaustedError, match="70 prompt tokens wait already: with 31 more .* 100"):
        queue.join(31)
    queue.join(30)


def test_the_time_to_come_back_grows_with_the_queue_and_with_how_long_requests_run() -> None:
    clock = ManualClock()
    queue = admission(clock, max_running=1, max_queued=1)

    def retry_after_s() -> float:
        with pytest.raises(ResourceExhaustedError) as caught:
            queue.join(1)
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    first = queue.join(1)
    second = queue.join(1)
    before_s = retry_after_s()
    clock.advance(50)
    queue.leave(first)
    queue.join(1)
    assert before_s < retry_after_s() <= 60
    assert running(second) == [True]


def test_more_slots_let_more_run() -> None:
    queue = admission(max_running=3)
    queue.resize(1)
    entries = [queue.join(1) for _ in range(5)]
    queue.resize(2)
    assert running(*entries) == [True, True, False, False, False]
    queue.resize(8)
    assert running(*entries) == [True, True, True, False, False]


def test_fewer_slots_stop_nobody_who_runs() -> None:
    queue = admission()
    first, second, third = (queue.join(1) for _ in range(3))
    queue.resize(1)
    assert running(first, second) == [True, True]
    queue.leave(first)
    assert running(third) == [False]
    queue.leave(second)
    assert running(third) == [True]
