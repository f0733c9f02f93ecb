"""Pauses between a worker's incarnations: none at first, doubled up to a cap, forgotten after a long incarnation."""

import pytest

from baton.process.backoff import Backoff
from deploy.groups.restarts import Restarts
from tests.support.manual_clock import ManualClock

BACKOFF = Backoff(first_s=1.0, most_s=5.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=100.0)


@pytest.fixture
def restarts(clock: ManualClock) -> Restarts:
    return Restarts(BACKOFF, clock)


def _end_after(restarts: Restarts, clock: ManualClock, incarnation_s: float) -> float:
    restarts.began()
    clock.advance(incarnation_s)
    return restarts.ended()


def test_pauses_double_up_to_the_cap(restarts: Restarts, clock: ManualClock) -> None:
    assert [_end_after(restarts, clock, 2.0) for _ in range(6)] == [0, 1, 2, 4, 5, 5]
    assert restarts.num_ends == 6


def test_lives_that_do_not_begin_count_and_a_crash_loop_stays_at_the_cap(restarts: Restarts) -> None:
    assert [restarts.ended() for _ in range(2000)] == [0, 1, 2, 4, *[5] * 1996]


def test_a_long_life_is_a_new_beginning(restarts: Restarts, clock: ManualClock) -> None:
    assert [_end_after(restarts, clock, 59.9) for _ in range(3)] == [0, 1, 2]
    assert _end_after(restarts, clock, 60.0) == 0
    assert _end_after(restarts, clock, 1.0) == 1


def test_the_time_between_two_lives_is_no_life(restarts: Restarts, clock: ManualClock) -> None:
    assert _end_after(restarts, clock, 1.0) == 0
    clock.advance(1000.0)
    assert restarts.ended() == 1


def test_the_next_life_is_due_after_the_pause(restarts: Restarts, clock: ManualClock) -> None:
    assert restarts.is_due
    restarts.ended()
    assert restarts.is_due
    restarts.ended()
    clock.advance(0.99)
    assert not restarts.is_due
    clock.advance(0.01)
    assert restarts.is_due


def test_the_first_start_may_have_to_wait_too(clock: ManualClock) -> None:
    restarts = Restarts(BACKOFF, clock, num_at_once=0)
    assert [restarts.ended() for _ in range(4)] == [1, 2, 4, 5]
