"""One factor for all transfers of a link, whatever a few of them took."""

import pytest

from baton.planning.pace import Pace


def paced(*operations: tuple[float, float]) -> Pace:
    """The pace after operations: observed and predicted seconds."""
    pace = Pace()
    for observed_s, predicted_s in operations:
        pace.note(observed_s, predicted_s)
    return pace


def test_nothing_observed_changes_nothing() -> None:
    assert Pace().factor == 1.0
    assert paced((1.0, 0.0)).factor == 1.0


def test_what_operations_took_counts_from_the_first_one_on() -> None:
    assert paced((0.3, 0.1)).factor == pytest.approx(3)
    assert paced((0.02, 0.1)).factor == pytest.approx(0.2)


def test_a_few_disturbed_operations_do_not_count_and_long_ones_count_for_more() -> None:
    assert paced(*((0.3 if at % 3 else 5.0, 0.1) for at in range(1, 10))).factor == pytest.approx(3)
    assert paced(*((0.1, 0.005) for _ in range(10)), (2.5, 1.0)).factor == pytest.approx(2.5)


def test_what_is_passed_over_or_long_ago_is_forgotten() -> None:
    pace = paced((30.0, 1.0))
    for _ in range(64):
        assert pace.factor == pytest.approx(30.0)
        pace.pass_over()
    assert pace.factor == 1.0
    assert paced(*((0.1 if at <= 50 else 0.4, 0.1) for at in range(1, 67))).factor == pytest.approx(4)


@pytest.mark.parametrize(("seconds", "factor"), [(1e4, 32.0), (1e-6, 1 / 32)])
def test_a_factor_has_bounds(seconds: float, factor: float) -> None:
    assert paced((seconds, 0.1)).factor == factor
