"""Compares the predictions of a new calibration, or of new step times, with the predictions of those that are in use.
Predictions that differ too much are rejected. All functions are pure."""

from collections.abc import Iterable

import numpy as np

from baton.errors import InvalidArgumentError
from baton.planning.calibration import Calibration
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.step_times import StepTimes
from baton.planning.work_cost import RowDrafts, verifying_work

MEASURED_FACTOR = 10.0
"""Maximum ratio between new predictions and predictions from earlier measurements."""
NOMINAL_FACTOR = 100.0
"""Maximum ratio between new predictions and predictions from nominal rates. It is larger than MEASURED_FACTOR, because
no machine reaches its nominal rates."""
_CHAINS = ((256,), (4096,), (2048, 2048))
"""Prefill chains whose predicted time to first token is compared. Each entry lists the tokens of each rank."""
_STEPS = ((1, 256), (1, 4096), (16, 1024))
"""Generation steps whose predicted time is compared, as (number of sequences, tokens of each sequence)."""
_DRAFTS = 4
"""Number of draft tokens per sequence in the verification steps whose predicted times are compared."""


def require_close(what: str, given: Calibration | StepTimes, own: Calibration | StepTimes) -> None:
    """Raise InvalidArgumentError if predictions of `given` and of `own` differ too much.

    `given` is the new calibration, and `what` is its name in error messages. `own` is the present one. Predictions may
    differ by MEASURED_FACTOR if `own` is measured, and otherwise by NOMINAL_FACTOR.
    """
    most = MEASURED_FACTOR if own.is_measured else NOMINAL_FACTOR
    for what_takes, new_s, old_s in zip(_names(given), _seconds(given), _seconds(own), strict=True):
        if not old_s / most <= new_s <= old_s * most:
            raise InvalidArgumentError(
                f"{what}: {what_takes} would be predicted to take {new_s:.3g} s, now {old_s:.3g} s, more than {most:g} "
                "times apart: measure again, or force it"
            )


def _names(of: Calibration | StepTimes) -> Iterable[str]:
    if isinstance(of, Calibration):
        return [f"a prompt of {sum(chunks)} tokens on {len(chunks)} ranks" for chunks in _CHAINS]
    steps = [f"a step of {rows} rows with {context} tokens each" for rows, context in _STEPS]
    return [*steps, *(f"{step} and {_DRAFTS} drafts" for step in steps)]


def _seconds(of: Calibration | StepTimes) -> Iterable[float]:
    if isinstance(of, Calibration):
        with np.errstate(over="ignore", invalid="ignore"):  # a prediction beyond the range of floats is not close
            return [float(chain_ttft(chunks, of.cost, BATON)) for chunks in _CHAINS]
    verifying = [verifying_work([RowDrafts(context, _DRAFTS)] * rows) for rows, context in _STEPS]
    return [*(of.step_s(rows, context) for rows, context in _STEPS), *map(of.cost.seconds, verifying)]
