"""Who runs, who waits and who is refused, within bounds; whoever leaves makes room at once. Order: test_fair_queue."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from baton.errors import ResourceExhaustedError
from baton.types import Priority
from orchestrator.admission.fair_queue import FairQueue
from orchestrator.admission.gate import Admission, Entry
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import Tenant
from tests.support.clusters.asked import asking
from tests.support.manual_clock import ManualClock

ONE = asking(1)
HEAVY, LIGHT = Tenant("heavy"), Tenant("light")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=1000.0)


def admission(clock: ManualClock | None = None, **fields: Any) -> Admission:
    return Admission(OrchestratorConfig(**{"max_running": 2, **fields}), clock or ManualClock(), FairQueue())


def running(*entries: Entry) -> list[bool]:
    return [entry.started_s is not None for entry in entries]


def test_requests_run_in_order_of_arrival() -> None:
    queue = admission()
    entries = [queue.join(asking(10)) for _ in range(4)]
    assert running(*entries) == [True, True, False, False]
    queue.leave(entries[1])
    assert running(*entries) == [True, True, True, False]
    assert (queue.num_running, queue.num_queued) == (2, 1)


async def test_waiting_ends_with_the_turn() -> None:
    queue = admission(max_running=1)
    first, second = queue.join(ONE), queue.join(ONE)
    await first.admitted()
    waiting = asyncio.create_task(second.admitted())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.leave(first)
    await asyncio.wait_for(waiting, 60)


def test_who_leaves_the_queue_makes_room_in_it() -> None:
    queue = admission(max_running=1, max_queued_requests=1)
    queue.join(ONE)
    waiting = queue.join(ONE)
    with pytest.raises(ResourceExhaustedError, match="1 requests wait already: the queue holds 1"):
        queue.join(ONE)
    queue.leave(waiting)
    assert queue.num_queued == 0
    queue.join(ONE)


def test_leaving_twice_changes_nothing() -> None:
    queue = admission()
    first, second, third = (queue.join(ONE) for _ in range(3))
    queue.leave(first)
    queue.leave(first)
    assert running(second, third) == [True, True]
    assert queue.num_running == 2


def test_waiting_prompt_tokens_are_bounded() -> None:
    queue = admission(max_running=1, max_queued_tokens=100)
    queue.join(asking(1000))  # does not wait
    queue.join(asking(70))
    with pytest.raises(ResourceExhaustedError, match="70 prompt tokens wait already: with 31 more .* 100"):
        queue.join(asking(31))
    queue.join(asking(30))


def test_the_time_to_come_back_grows_with_the_queue_and_with_how_long_requests_run(clock: ManualClock) -> None:
    queue = admission(clock, max_running=1, max_queued_requests=1)

    def retry_after_s() -> float:
        with pytest.raises(ResourceExhaustedError) as caught:
            queue.join(ONE)
        assert caught.value.retry_after_s is not None
        return caught.value.retry_after_s

    first = queue.join(ONE)
    second = queue.join(ONE)
    before_s = retry_after_s()
    clock.advance(50)
    queue.leave(first)
    queue.join(ONE)
    assert before_s < retry_after_s() <= 60
    assert running(second) == [True]


def test_more_slots_let_more_run() -> None:
    queue = admission(max_running=3)
    queue.resize(1)
    entries = [queue.join(ONE) for _ in range(5)]
    queue.resize(2)
    assert running(*entries) == [True, True, False, False, False]
    queue.resize(8)
    assert running(*entries) == [True, True, True, False, False]


def test_fewer_slots_stop_nobody_who_runs() -> None:
    queue = admission()
    first, second, third = (queue.join(ONE) for _ in range(3))
    queue.resize(1)
    assert running(first, second) == [True, True]
    queue.leave(first)
    assert running(third) == [False]
    queue.leave(second)
    assert running(third) == [True]


def refused(queue: Admission, request: Request, chain_s: float = 0.0) -> ResourceExhaustedError:
    with pytest.raises(ResourceExhaustedError) as caught:
        queue.join(request, chain_s)
    return caught.value


def busy(clock: ManualClock, hold_s: float, **fields: Any) -> tuple[Admission, Entry]:
    """A queue with one slot, taken, whose requests ran so long."""
    queue = admission(clock, **{"max_running": 1, **fields})
    first = queue.join(ONE)
    clock.advance(hold_s)
    queue.leave(first)
    return queue, queue.join(ONE)


# Bounds of one tenant, and whose place in a full queue it is.


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        ({"max_queued_requests": 1}, "tenant t may have 1 requests waiting, this makes 2"),
        ({"max_queued_tokens": 15}, "tenant t may have 15 prompt tokens waiting, this makes 20"),
    ],
)
def test_a_tenant_has_bounds_of_its_own(bound: dict[str, int], text: str) -> None:
    queue = admission(max_running=1)
    tenant = Tenant("t", **bound)  # type: ignore[arg-type]
    queue.join(asking(1000, tenant=tenant))  # does not wait
    queue.join(asking(10, tenant=tenant))
    assert text in str(refused(queue, asking(10, tenant=tenant)))
    queue.join(asking(10, tenant=LIGHT))
    assert (queue.num_queued, queue.num_queued_tokens) == (2, 20)


def test_a_tenant_at_its_bound_of_running_waits_for_itself_and_nobody_for_it() -> None:
    queue = admission(max_running=4)
    tenant = Tenant("t", max_running=1)
    mine = [queue.join(asking(1, tenant=tenant)) for _ in range(3)]
    others = [queue.join(asking(1, tenant=LIGHT)) for _ in range(3)]
    assert (running(*mine), running(*others)) == ([True, False, False], [True, True, True])
    queue.leave(mine[0])
    assert running(*mine) == [True, True, False]


async def test_in_a_full_queue_a_light_tenant_takes_the_place_of_a_heavy_ones_last() -> None:
    queue = admission(max_running=1, max_queued_requests=3)
    queue.join(asking(10, tenant=HEAVY))
    first, second, third = (queue.join(asking(10, tenant=HEAVY)) for _ in range(3))
    light = queue.join(asking(10, tenant=LIGHT))
    with pytest.raises(ResourceExhaustedError, match="a request with a better claim got this place in it: try"):
        await asyncio.wait_for(third.admitted(), 60)
    queue.leave(third)
    assert queue.num_queued == 3
    refused(queue, asking(10, tenant=HEAVY))  # two of three are more than its share, if not more than it may have
    queue.leave(first)
    assert running(second, light) == [False, False]


def test_in_a_full_queue_an_urgent_request_takes_a_batch_ones_place() -> None:
    queue = admission(max_running=1, max_queued_requests=2)
    queue.join(ONE)
    batch = [queue.join(asking(1, priority=Priority.BATCH)) for _ in range(2)]
    queue.join(asking(1, priority=Priority.INTERACTIVE))
    refused(queue, asking(1, priority=Priority.BATCH))
    assert queue.num_queued == 2
    queue.leave(batch[0])
    assert queue.num_queued == 1


def test_who_cannot_be_given_enough_places_takes_none() -> None:
    queue = admission(max_running=1, max_queued_tokens=100)
    queue.join(ONE)
    waiting = [queue.join(asking(20, tenant=HEAVY)) for _ in range(5)]
    refused(queue, asking(70, tenant=LIGHT))  # would have more waiting than the heavy one, with its last two gone
    assert (queue.num_queued, queue.num_queued_tokens) == (5, 100)
    for entry in waiting:
        queue.leave(entry)
    assert queue.num_queued == 0


# Requests that need several slots.


def test_whoever_is_next_and_needs_more_slots_than_are_free_is_waited_for() -> None:
    queue = admission(max_running=4)
    small = [queue.join(ONE) for _ in range(3)]
    large = queue.join(asking(1, n=4))
    later = queue.join(ONE)
    assert running(large, later) == [False, False]
    for entry in small:
        assert running(large, later) == [False, False]
        queue.leave(entry)
    assert running(large, later) == [True, False]


def test_a_request_for_more_slots_than_there_are_runs_alone() -> None:
    queue = admission(max_running=4)
    first = queue.join(ONE)
    large = queue.join(asking(1, n=5))
    queue.leave(first)
    assert running(large) == [True]
    assert running(queue.join(ONE)) == [False]


# Deadlines, and when to come again.


def test_a_deadline_that_the_first_token_would_miss_is_refused_at_once(clock: ManualClock) -> None:
    queue, _ = busy(clock, hold_s=4.0)
    queue.join(asking(1, deadline_s=clock.now_s() + 11.9), 0.0)  # due before it
    deadline_s = clock.now_s() + 12.0
    error = refused(queue, asking(1, deadline_s=deadline_s), chain_s=0.5)  # 8 s may well be 12
    assert str(error) == (
        "the first token is predicted after 8.00 s in the queue, perhaps 12.00, and 0.50 s of prefill, "
        "the deadline is in 12.00 s: try again in 0.5 s"
    )
    assert error.retry_after_s == pytest.approx(0.5)
    assert queue.num_queued == 1
    queue.join(asking(1, deadline_s=deadline_s + 0.51), 0.5)


def test_how_fast_slots_come_free_counts_more_than_how_long_one_is_kept(clock: ManualClock) -> None:
    queue = admission(clock, max_running=4)
    first = [queue.join(ONE) for _ in range(4)]
    clock.advance(8.0)
    second = [queue.join(ONE) for _ in range(4)]
    for entry in first:
        clock.advance(1.0)
        queue.leave(entry)
    assert running(*second) == [True] * 4  # kept for 10.5 s in the mean, and one came free each second
    assert refused(queue, asking(1, deadline_s=clock.now_s() + 1.4)).retry_after_s == pytest.approx(0.1)
    queue.join(asking(1, deadline_s=clock.now_s() + 1.6), 0.0)


def test_a_time_in_which_nobody_waited_for_slots_tells_nothing_of_how_fast_they_come_free(clock: ManualClock) -> None:
    queue = admission(clock, max_running=2, max_queued_requests=1)
    tenant = Tenant("t", max_running=1)
    other, *_ = (queue.join(asking(1, tenant=each)) for each in (LIGHT, tenant, tenant))
    refused(queue, ONE)  # has waited for nothing
    clock.advance(20.0)
    queue.leave(other)
    queue.join(ONE)
    assert refused(queue, ONE).retry_after_s == pytest.approx(2 * 20.0 / 2)  # two before the next, by Little's law


def test_due_earlier_is_served_earlier_and_so_predicted(clock: ManualClock) -> None:
    queue, first = busy(clock, hold_s=4.0)
    patient = queue.join(ONE)
    hasty = queue.join(asking(1, deadline_s=clock.now_s() + 7.0), 0.5)
    queue.leave(first)
    assert running(hasty, patient) == [True, False]


@pytest.mark.parametrize("deadline_s", [None, 4600.0])
def test_without_a_near_deadline_a_request_is_not_put_off_for_ever(
    clock: ManualClock, deadline_s: float | None
) -> None:
    queue = admission(clock, max_running=1)
    running_now, patient = queue.join(ONE), queue.join(asking(1, deadline_s=deadline_s))
    for _ in range(100):
        later = queue.join(asking(1, deadline_s=clock.now_s() + 20))
        queue.leave(running_now)
        if patient.started_s is not None:
            break
        running_now = later
        clock.advance(1.0)
    assert patient.started_s is not None and 1030 < patient.started_s <= 1060


def test_a_passed_deadline_is_no_reason_to_come_again(clock: ManualClock) -> None:
    queue, _ = busy(clock, hold_s=4.0)
    queue.join(asking(1, deadline_s=clock.now_s()), 1.0)
    assert queue.num_queued == 1


def test_nobody_is_refused_by_a_guess() -> None:
    queue = admission(max_running=1)
    queue.join(ONE)
    queue.join(asking(1, deadline_s=0.5), 0.4)  # how long a request runs is unknown yet
    assert refused(queue, asking(1, deadline_s=0.5), chain_s=0.6).retry_after_s == pytest.approx(0.1)


def test_alone_a_request_finds_out_for_itself() -> None:
    queue = admission()
    assert running(queue.join(asking(1, deadline_s=1.0), 5.0)) == [True]


def test_a_tenant_waits_for_its_own_slots_and_so_predicted(clock: ManualClock) -> None:
    queue = admission(clock, max_running=100)
    tenant = Tenant("t", max_running=1)
    first = queue.join(asking(1, tenant=tenant))
    clock.advance(4.0)
    queue.leave(first)
    queue.join(asking(1, tenant=tenant))
    assert refused(queue, asking(1, tenant=tenant, deadline_s=1008.0)).retry_after_s == pytest.approx(2.0)
    queue.join(asking(1, tenant=LIGHT, deadline_s=1008.0), 0.0)


@pytest.mark.parametrize(("hold_s", "retry_s"), [(4.0, 12.0), (1e-3, 0.1), (1000.0, 60.0)])
def test_a_full_queue_has_room_when_what_waits_has_been_served(hold_s: float, retry_s: float) -> None:
    queue, _ = busy(ManualClock(), hold_s, max_queued_requests=2)
    queue.join(ONE)
    queue.join(ONE)
    assert refused(queue, ONE).retry_after_s == pytest.approx(retry_s)


def test_counts_of_the_waiting_are_kept_whoever_comes_and_goes() -> None:
    rng, queue = random.Random(3), admission(max_running=3, max_queued_requests=8, max_queued_tokens=200)
    entries: list[Entry] = []
    for _ in range(2000):
        if entries and rng.random() < 0.5:
            queue.leave(entries.pop(rng.randrange(len(entries))))
            continue
        bounded = Tenant("bounded", max_queued_requests=3, max_queued_tokens=60)
        with contextlib.suppress(ResourceExhaustedError):
            who = {"tenant": rng.choice([HEAVY, LIGHT, bounded]), "priority": rng.choice(list(Priority))}
            entries.append(queue.join(asking(rng.randint(1, 50), n=rng.randint(1, 2), **who)))
        entries = [entry for entry in entries if not is_refused(entry)]
        waiting = [entry for entry in entries if entry.started_s is None]
        assert (queue.num_queued, queue.num_running) == (len(waiting), len(entries) - len(waiting))
        assert queue.num_queued_tokens == sum(entry.num_tokens for entry in waiting) <= 200
        theirs = [entry.num_tokens for entry in waiting if entry.tenant.name == "bounded"]
        assert len(theirs) <= 3
        assert sum(theirs) <= 60
    for entry in entries:
        queue.leave(entry)
    assert (queue.num_queued, queue.num_queued_tokens, queue.num_running) == (0, 0, 0)


def is_refused(entry: Entry) -> bool:
    """Whether the entry's place was given to another: its waiter has been woken, though it does not run."""
    return entry.started_s is None and entry._turn.is_set()
