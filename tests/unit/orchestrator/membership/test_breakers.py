"""Breakers open after failures in a row, let one attempt try, and close; retries are a bounded part of the load."""

import pytest

from baton.errors import InvalidArgumentError, LinkBrokenError, ResourceExhaustedError, UnavailableError
from baton.process.backoff import Backoff
from orchestrator.membership.breakers import Breakers, BreakerState, RetryBudget, tells_of_the_group
from tests.support.manual_clock import ManualClock

LIFE = "a group's incarnation"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=100.0)


@pytest.fixture
def breakers(clock: ManualClock) -> Breakers:
    return Breakers(clock, 3, Backoff(1.0, 4.0))


def fail(breakers: Breakers, count: int) -> None:
    for _ in range(count):
        breakers.failed(LIFE)


def test_failures_in_a_row_open_a_breaker(breakers: Breakers) -> None:
    fail(breakers, 2)
    assert breakers.of(LIFE).admits
    fail(breakers, 1)
    assert (breakers.of(LIFE).admits, breakers.of(LIFE).state) == (False, BreakerState.OPEN)
    assert breakers.of("another incarnation").admits


def test_a_success_in_between_starts_the_count_anew(breakers: Breakers) -> None:
    fail(breakers, 2)
    breakers.of(LIFE).succeeded(is_probe=False)
    fail(breakers, 2)
    assert breakers.of(LIFE).admits


def test_after_its_pause_one_attempt_is_let_through(breakers: Breakers, clock: ManualClock) -> None:
    fail(breakers, 3)
    assert breakers.of(LIFE).left_s == 1.0
    clock.advance(0.9)
    assert not breakers.of(LIFE).admits
    clock.advance(0.1)
    assert (breakers.of(LIFE).admits, breakers.of(LIFE).left_s) == (True, 0.0)
    assert breakers.of(LIFE).began()
    assert (breakers.of(LIFE).admits, breakers.of(LIFE).began()) == (False, False)


def test_a_probe_that_goes_well_closes_it_and_forgets(breakers: Breakers, clock: ManualClock) -> None:
    fail(breakers, 3)
    clock.advance(1.0)
    breakers.of(LIFE).succeeded(is_probe=breakers.of(LIFE).began())
    assert breakers.of(LIFE).state is BreakerState.CLOSED
    fail(breakers, 2)
    assert breakers.of(LIFE).admits
    fail(breakers, 1)
    assert breakers.of(LIFE).left_s == 1.0


def test_a_probe_that_fails_makes_the_next_pause_twice_as_long_up_to_a_bound(
    breakers: Breakers, clock: ManualClock
) -> None:
    fail(breakers, 3)
    pauses = []
    for _ in range(5):
        pauses.append(breakers.of(LIFE).left_s)
        clock.advance(pauses[-1])
        assert breakers.of(LIFE).began()
        fail(breakers, 1)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_probe_that_has_not_failed_for_a_pause_closes_it_on_parole(breakers: Breakers, clock: ManualClock) -> None:
    """A long stream keeps nobody out; what fails then opens it at once, for twice as long."""
    fail(breakers, 3)
    clock.advance(1.0)
    assert breakers.of(LIFE).began()
    clock.advance(1.0)
    assert breakers.of(LIFE).state is BreakerState.CLOSED
    fail(breakers, 1)
    assert breakers.of(LIFE).left_s == 2.0


def test_what_began_before_the_pause_changes_nothing_in_it(breakers: Breakers, clock: ManualClock) -> None:
    fail(breakers, 3)
    clock.advance(0.5)
    fail(breakers, 7)
    breakers.of(LIFE).succeeded(is_probe=False)
    assert (breakers.of(LIFE).state, breakers.of(LIFE).left_s) == (BreakerState.OPEN, 0.5)
    clock.advance(0.5)
    assert breakers.of(LIFE).began()
    breakers.of(LIFE).succeeded(is_probe=False)
    assert breakers.of(LIFE).state is BreakerState.PROBING


def test_breakers_of_lives_that_are_over_are_forgotten(breakers: Breakers) -> None:
    fail(breakers, 3)
    breakers.keep({"another incarnation"})
    assert (len(breakers), breakers.of(LIFE).admits) == (0, True)


@pytest.mark.parametrize(
    ("error", "tells"),
    [
        (UnavailableError("gone"), True),
        (LinkBrokenError("broke"), True),
        (InvalidArgumentError("the request's own"), False),
        (ResourceExhaustedError("full"), False),
    ],
)
def test_only_what_tells_of_the_group_counts(error: UnavailableError, tells: bool) -> None:
    assert tells_of_the_group(error) is tells


def test_a_burst_of_retries_begins_at_once_and_no_more(clock: ManualClock) -> None:
    budget = RetryBudget(clock, share=0.0, burst=3, window_s=6.0)
    assert [budget.take(60) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [budget.take(60) for _ in range(2)] == pytest.approx([2.0, 4.0])


def test_what_would_wait_too_long_is_refused_and_takes_nothing(clock: ManualClock) -> None:
    budget = RetryBudget(clock, share=0.0, burst=1, window_s=6.0)
    assert budget.take(5) == 0.0
    assert budget.take(5) is None
    clock.advance(1.0)
    assert budget.take(5) == pytest.approx(5.0)


def test_time_and_requests_earn_retries_up_to_the_burst(clock: ManualClock) -> None:
    budget = RetryBudget(clock, share=0.25, burst=2, window_s=8.0)
    assert [budget.take(60) for _ in range(2)] == [0.0, 0.0]
    for _ in range(4):
        budget.earn()
    assert budget.take(60) == 0.0
    clock.advance(4.0)
    assert budget.take(60) == 0.0
    clock.advance(1000.0)
    assert [budget.take(60) for _ in range(3)] == pytest.approx([0.0, 0.0, 4.0])


def test_every_stream_of_a_cluster_may_be_tried_again_at_once(clock: ManualClock) -> None:
    budget = RetryBudget(clock, share=0.0, burst=2, window_s=10.0)
    budget.resize(num_slots=64)
    assert {budget.take(60) for _ in range(64)} == {0.0}
    assert budget.take(60) == pytest.approx(10 / 64)


def test_with_fewer_slots_the_burst_is_smaller_but_never_below_its_least(clock: ManualClock) -> None:
    budget = RetryBudget(clock, share=0.0, burst=2, window_s=10.0)
    budget.resize(num_slots=64)
    budget.resize(num_slots=0)
    assert [budget.take(60) for _ in range(3)] == pytest.approx([0.0, 0.0, 5.0])


def test_retries_are_a_bounded_share_of_the_requests(clock: ManualClock) -> None:
    """Everything fails all the time: what is tried again stays within the burst, its refill and the share."""
    budget = RetryBudget(clock, share=0.2, burst=10, window_s=10.0)
    num_retries = 0
    for _ in range(1000):
        budget.earn()
        num_retries += budget.take(0.0) is not None
        clock.advance(0.01)
    assert num_retries == pytest.approx(10 + 10 + 200, abs=2)
