"""Fits find the costs with which measurements were simulated. Fitted costs are never negative."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.planning.fit import fit_relative
from baton.planning.work_cost import StepWork, WorkCost

PLAIN = tuple(StepWork.plain(rows, rows * context) for rows in (1, 4, 16) for context in (192, 1024, 4096))
ROUNDS = tuple(
    StepWork(4 * rows, 1000 * rows, 4000 * rows) + StepWork(3 * rows, 3 * rows * 256, 3 * rows * 256, num_steps=3)
    for rows in (1, 4, 16)
)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_negative_and_no_other_choice_fits_better(seed: int) -> None:
    """Noise drives plain least squares below zero; then the best non-negative numbers are found, as a grid confirms."""
    rng = np.random.default_rng(seed)
    tokens = np.array([1.0, 2.0, 3.0, 4.0])
    columns = np.stack([tokens, tokens**2, np.ones_like(tokens)], axis=1)
    seconds = tokens * 1e-3 * rng.uniform(0.7, 1.3, size=4)
    fitted, residual = fit_relative(columns, seconds)

    def errors(*numbers: float) -> NDArray[np.float64]:
        predicted: NDArray[np.float64] = columns @ np.array(numbers)
        return predicted / seconds - 1

    assert min(fitted) >= 0
    assert residual == pytest.approx(float(np.abs(errors(*fitted)).max()))
    grid = itertools.product(np.linspace(0, 2e-3, 25), np.linspace(0, 4e-4, 25), np.linspace(0, 2e-3, 25))
    found = float((errors(*fitted) ** 2).sum())
    assert found <= min(float((errors(*each) ** 2).sum()) for each in grid) + 1e-12


def fitted_to(works: tuple[StepWork, ...], cost: WorkCost) -> WorkCost:
    """Costs that follow from steps that had these costs."""
    columns = np.array([work.columns for work in works], np.float64)
    return WorkCost(*fit_relative(columns, seconds_of(works, cost))[0])


def seconds_of(works: tuple[StepWork, ...], cost: WorkCost) -> NDArray[np.float64]:
    return np.array([cost.seconds(work) for work in works])


@given(
    step_s=st.floats(1e-3, 0.1),
    token_s=st.floats(1e-5, 1e-2),
    key_s=st.floats(1e-8, 1e-5),
    pair_s=st.floats(1e-8, 1e-6),
)
def test_costs_of_steps_come_back(step_s: float, token_s: float, key_s: float, pair_s: float) -> None:
    cost, works = WorkCost(step_s, token_s, key_s, pair_s), PLAIN + ROUNDS
    assert seconds_of(works, fitted_to(works, cost)) == pytest.approx(seconds_of(works, cost), rel=1e-6)


def test_rounds_of_drafts_tell_what_pairs_cost() -> None:
    true = WorkCost(0.013, 0.4e-3, 2.3e-6, 0.3e-6)
    assert fitted_to(PLAIN + ROUNDS, true).pair_s == pytest.approx(true.pair_s, rel=1e-3)


def test_rounds_tell_what_rows_cost_where_plain_steps_are_of_one_kind() -> None:
    true = WorkCost(0.013, 0.4e-3, 2.3e-6, 0.3e-6)
    rounds = tuple(
        StepWork(1 + drafts, 500, 500 * (1 + drafts)) + StepWork(drafts, drafts * 64, drafts * 64, drafts)
        for drafts in (1, 3, 6)
    )
    works = (StepWork.plain(1, 500), *rounds)
    assert seconds_of(rounds, fitted_to(works, true)) == pytest.approx(seconds_of(rounds, true), rel=1e-3)


def test_weights_decide_between_measurements_that_disagree() -> None:
    columns, seconds = np.ones((2, 1)), np.array([1.0, 2.0])
    (equal,), _ = fit_relative(columns, seconds)
    (first,), residual = fit_relative(columns, seconds, np.array([1.0, 1e-3]))
    assert 1.0 < equal < 2.0
    assert first == pytest.approx(1.0, rel=1e-3)
    assert residual == pytest.approx(0.5, rel=1e-2)  # of a measurement, whatever its weight
