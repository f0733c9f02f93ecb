"""Two sampled curves cross where their ratio passes 1, and a prediction is judged by the gap there."""

import pytest

from benchmarks.support.crossings import crossing, disagreement, value_at

POINTS = (10.0, 100.0, 1000.0)


def test_a_crossing_lies_between_its_neighbours_in_log_log() -> None:
    assert crossing(POINTS, (2.0, 0.5, 0.4)) == pytest.approx(10**1.5)
    assert crossing(POINTS, (0.5, 0.5, 8.0)) == pytest.approx(10**2.25)


def test_a_crossing_on_a_point_counts() -> None:
    assert crossing(POINTS, (2.0, 1.0, 0.5)) == 100.0
    assert crossing(POINTS, (4.0, 2.0, 1.0)) == 1000.0


def test_curves_that_keep_their_order_do_not_cross() -> None:
    assert crossing(POINTS, (2.0, 1.5, 1.1)) is None


def test_values_between_points() -> None:
    assert value_at(POINTS, (1.0, 100.0, 100.0), 10**1.5) == pytest.approx(10.0)
    assert value_at(POINTS, (3.0, 2.0, 1.0), 5.0) == 3.0
    assert value_at(POINTS, (3.0, 2.0, 1.0), 5000.0) == 1.0


def test_equal_curves_agree() -> None:
    assert disagreement(POINTS, (2.0, 0.9, 0.5), (2.0, 0.9, 0.5)) == pytest.approx(0.0)
    assert disagreement(POINTS, (2.0, 1.9, 1.5), (3.0, 2.9, 1.7)) == 0.0


def test_a_crossing_that_was_not_foretold_is_as_bad_as_the_gap_predicted_there() -> None:
    assert disagreement(POINTS, (2.0, 1.0, 0.5), (2.0, 1.2, 1.1)) == pytest.approx(0.2)


def test_of_two_crossings_the_worse_counts() -> None:
    assert disagreement(POINTS, (2.0, 1.0, 0.8), (1.5, 1.3, 1.0)) == pytest.approx(0.3)


def test_opposite_orders_without_a_crossing() -> None:
    assert disagreement(POINTS, (2.0, 1.5, 1.3), (0.9, 0.9, 0.9)) == pytest.approx(0.3)
