"""Who owes a sign of life, and since when."""

import pytest

from baton.types import Rank
from prefill_workers.watchdog import Watchdog
from tests.support.manual_clock import ManualClock

PEER, OTHER = Rank(1), Rank(2)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=100.0)


@pytest.fixture
def watchdog(clock: ManualClock) -> Watchdog:
    return Watchdog(clock, floor_s=2.0)


def deadline_s(watchdog: Watchdog, waits: list[tuple[Rank, float]] | None = None, turn_s: float = 0.0) -> float | None:
    due = watchdog.first_due(waits or [], turn_s)
    return due.deadline_s if due is not None else None


def test_nobody_owes_anything_at_first(watchdog: Watchdog) -> None:
    watchdog.heard(PEER)
    assert deadline_s(watchdog) is None


def test_unsent_message_is_owed_from_when_it_was_sent(watchdog: Watchdog) -> None:
    watchdog.sending(PEER)
    assert deadline_s(watchdog) == 102.0


def test_further_messages_extend_nothing(watchdog: Watchdog, clock: ManualClock) -> None:
    watchdog.sending(PEER)
    clock.advance(1.0)
    watchdog.sending(PEER)
    assert deadline_s(watchdog) == 102.0


def test_message_taken_is_a_sign_of_life(watchdog: Watchdog, clock: ManualClock) -> None:
    watchdog.sending(PEER)
    watchdog.sending(PEER)
    clock.advance(1.0)
    watchdog.sent(PEER)
    assert deadline_s(watchdog) == 103.0


def test_all_messages_taken_settle_the_debt(watchdog: Watchdog) -> None:
    watchdog.sending(PEER)
    assert not watchdog.is_idle(PEER)
    watchdog.sent(PEER)
    assert watchdog.is_idle(PEER)
    assert deadline_s(watchdog) is None


def test_wait_counts_from_its_begin(watchdog: Watchdog) -> None:
    assert deadline_s(watchdog, [(PEER, 99.5)]) == 101.5


def test_anything_heard_during_a_wait_is_a_sign_of_life(watchdog: Watchdog) -> None:
    watchdog.heard(PEER)
    assert deadline_s(watchdog, [(PEER, 99.5)]) == 102.0


def test_what_was_heard_before_a_wait_does_not_shorten_it(watchdog: Watchdog, clock: ManualClock) -> None:
    watchdog.heard(PEER)
    clock.advance(10.0)
    assert deadline_s(watchdog, [(PEER, 109.0)]) == 111.0


def test_limit_grows_with_the_expected_turn(watchdog: Watchdog) -> None:
    assert deadline_s(watchdog, [(PEER, 100.0)], turn_s=1.0) == 104.0
    assert deadline_s(watchdog, [(PEER, 100.0)], turn_s=0.1) == 102.0


def test_first_of_several_counts(watchdog: Watchdog, clock: ManualClock) -> None:
    watchdog.sending(PEER)
    clock.advance(1.0)
    watchdog.sending(OTHER)
    due = watchdog.first_due([(Rank(0), 100.5)], 0.0)
    assert due is not None
    assert (due.peer, due.deadline_s, due.limit_s) == (PEER, 102.0, 2.0)
