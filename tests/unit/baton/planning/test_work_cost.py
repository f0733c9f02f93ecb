"""Costs of steps by hand: what each number is multiplied with, and which numbers are refused."""

import pytest

from baton.errors import ConfigError
from baton.planning.work_cost import NO_WORK, StepWork, WorkCost

COST = WorkCost(step_s=10.0, token_s=1.0, key_s=0.1, pair_s=0.01)


def test_a_step_that_verifies_compares_pairs_beyond_one_query_a_key() -> None:
    plain, verifying = StepWork.plain(2, 600), StepWork(2 * 4, 600, 4 * 600)
    assert COST.seconds(plain) == pytest.approx(10 + 2 + 60) == pytest.approx(COST.plain_s(2, 300))
    assert COST.seconds(verifying) == pytest.approx(10 + 8 + 60 + 18)


def test_works_add_up_as_their_seconds_do() -> None:
    draft, verify = StepWork(6, 3 * 32, 3 * 32, num_steps=3), StepWork(8, 600, 2400)
    assert COST.seconds(draft + verify) == pytest.approx(COST.seconds(draft) + COST.seconds(verify))
    assert draft + NO_WORK == draft and COST.seconds(NO_WORK) == 0


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_numbers_that_no_step_costs_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="cost: key_s = .* is out of range: give a number of at least 0"):
        WorkCost(1.0, 1.0, value, 1.0)
