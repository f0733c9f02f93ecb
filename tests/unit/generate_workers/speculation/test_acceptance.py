"""Estimates of acceptance: what was counted, forgotten over rounds, and by kind."""

import numpy as np
import pytest

from generate_workers.speculation.acceptance import Acceptances

ROWS, KINDS = np.array([0, 2]), np.array([[0], [1]])
OFFERED = np.array([[True], [True]])


def estimates(made: Acceptances, num_rounds: int = 1) -> list[float]:
    made.update(ROWS, KINDS, OFFERED, num_rounds)
    return [float(each) for each in made.of(ROWS, KINDS)[:, 0]]


def took(made: Acceptances, row: int, num_accepted: int, num_drafts: int, kind: int) -> None:
    made.took(row, kind, num_accepted, num_drafts)


def test_estimates_begin_as_expected_and_follow_what_was_accepted() -> None:
    made = Acceptances([0.3, 0.8], num_rows=3)
    assert estimates(made) == pytest.approx([0.3, 0.8])
    for _ in range(40):
        took(made, 0, 8, 8, kind=0)
        took(made, 2, 0, 8, kind=1)
    first, second = estimates(made)
    assert first > 0.9 and second < 0.1
    made.forget(0)
    assert 0.3 < estimates(made)[0] < first  # what all sequences have in common stays
    took(made, -1, 0, 8, kind=0)  # a sequence that has ended counts among all
    assert estimates(made)[0] < first


def test_only_kinds_that_are_offered_are_forgotten() -> None:
    made, other = Acceptances([0.5, 0.5], num_rows=3), Acceptances([0.5, 0.5], num_rows=3)
    for each in (made, other):
        for _ in range(10):
            took(each, 0, 0, 4, kind=0)
    for _ in range(500):
        made.update(ROWS, KINDS, ~OFFERED, 1)
        other.update(ROWS, KINDS, OFFERED, 1)
    assert estimates(made)[0] < 0.1 < 0.15 < estimates(other)[0]


def test_rounds_are_forgotten_together_as_one_by_one() -> None:
    made, other = Acceptances([0.5, 0.5], num_rows=3), Acceptances([0.5, 0.5], num_rows=3)
    for each in (made, other):
        took(each, 0, 0, 4, kind=0)
    for _ in range(6):
        made.update(ROWS, KINDS, OFFERED, 1)
    assert estimates(made) == pytest.approx(estimates(other, 7))
