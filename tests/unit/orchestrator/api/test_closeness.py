"""Predictions replace measurements unforced within ten times of them, or a hundred times of nominal rates."""

import dataclasses
from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton.planning.calibration import Calibration, nominal
from baton.planning.cost_model import LinkModel
from baton.planning.fit import RankRow
from baton.planning.hardware import cpu_rank
from baton.planning.step_times import StepTimes, nominal_steps, tabulate
from baton_lab.study.known_models import SHAPES
from orchestrator.api.closeness import MEASURED_FACTOR, NOMINAL_FACTOR, require_close

SHAPE = SHAPES["smollm2-135m"]
ASSUMED = nominal("smollm2-135m", "a core", SHAPE, cpu_rank(1, SHAPE.dtype_bytes))
MEASURED = dataclasses.replace(ASSUMED, rank_rows=(RankRow(100, 0, True, 0.1),))
STEPS = nominal_steps("smollm2-135m", "a core", SHAPE, cpu_rank(1, SHAPE.dtype_bytes))


def scaled(of: Calibration, factor: float) -> Calibration:
    return dataclasses.replace(of, cost=of.cost.times(factor))


def table(factor: float = 1.0) -> StepTimes:
    rows = ((0.01, 0.02), (0.02, 0.05))
    return tabulate(STEPS, (1, 16), (256, 4096), [[factor * each for each in row] for row in rows])[0]


@pytest.mark.parametrize("own", [MEASURED, ASSUMED], ids=["measured", "nominal"])
def test_calibrations_are_compared_by_what_prompts_would_take(own: Calibration) -> None:
    most = MEASURED_FACTOR if own.is_measured else NOMINAL_FACTOR
    for factor in (1.0, 0.9 * most, 1.1 / most):
        require_close("calibration", scaled(MEASURED, factor), own)
    for factor in (1.1 * most, 0.9 / most):
        with pytest.raises(InvalidArgumentError, match=f"more than {most:g} times apart: measure again, or force it"):
            require_close("calibration", scaled(MEASURED, factor), own)


@pytest.mark.parametrize("field", ["linear_s", "pair_s", "fixed_s", "head_s", "link"])
def test_one_absurd_cost_is_enough(field: str) -> None:
    """A layer that may take 1e300 s would never count as one that hangs."""
    absurd: Any = LinkModel(latency_s=1e300) if field == "link" else 1e300
    given = dataclasses.replace(MEASURED, cost=dataclasses.replace(MEASURED.cost, **{field: absurd}))
    with pytest.raises(InvalidArgumentError, match="calibration: a prompt of .* would be predicted to take"):
        require_close("calibration", given, MEASURED)


def test_step_times_are_compared_by_what_steps_would_take() -> None:
    require_close("step_times", table(), STEPS)
    require_close("step_times", table(9), table())
    for factor in (11.0, 0.05, 1e300):
        with pytest.raises(InvalidArgumentError, match="step_times: a step of 1 rows with 256 tokens each would be"):
            require_close("step_times", table(factor), table())


def test_steps_are_compared_by_the_time_to_verify_drafts_too() -> None:
    absurd = dataclasses.replace(table(), cost=dataclasses.replace(table().cost, pair_s=1.0))
    with pytest.raises(InvalidArgumentError, match="a step of 1 rows with 256 tokens each and 4 drafts would be"):
        require_close("step_times", absurd, table())
