"""A leak is what was unknown all the time, for over two seconds; where the workers are real: tests/system."""

from orchestrator.census import LEAK_S, Excess


def test_what_is_unknown_for_long_is_leaked() -> None:
    excess = Excess()
    for step in range(5):
        excess.observe(step * LEAK_S / 4, 2)
        assert excess.num_leaked == (2 if step == 4 else 0)


def test_what_was_known_meanwhile_is_not_leaked() -> None:
    excess = Excess()
    for step, unknown in enumerate([1, 1, 0, 1, 1]):
        excess.observe(step * LEAK_S / 4, unknown)
    assert excess.num_leaked == 0


def test_the_least_of_the_last_seconds_counts() -> None:
    excess = Excess()
    for step, unknown in enumerate([0, 3, 1, 2, 5]):
        excess.observe(step * LEAK_S / 2, unknown)
    assert excess.num_leaked == 1


def test_old_observations_do_not_count() -> None:
    excess = Excess()
    excess.observe(0.0, 0)
    excess.observe(10.0, 4)
    excess.observe(10.0 + LEAK_S, 4)
    assert excess.num_leaked == 4


def test_a_gap_in_answers_starts_anew() -> None:
    excess = Excess()
    excess.observe(0.0, 1)
    excess.forget()
    excess.observe(10.0, 1)
    assert excess.num_leaked == 0


def test_requests_that_hold_nothing_yet_are_no_negative_leak() -> None:
    excess = Excess()
    excess.observe(0.0, -3)
    excess.observe(LEAK_S, -3)
    assert excess.num_leaked == 0
