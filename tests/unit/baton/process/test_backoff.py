"""Pauses double with each failure in a row, up to the longest, and never overflow."""

from baton.process.backoff import Backoff


def test_pauses_grow_up_to_the_longest() -> None:
    assert [Backoff(0.5, 3.0).after(num) for num in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
