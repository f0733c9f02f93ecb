"""Points at which two curves cross, and the error of a prediction at these points. Performs no I/O.

Curves are sampled at the same ascending points, which in the benchmarks are bandwidths. Between two points, curves are
straight lines in log-log scale.
"""

import math
from collections.abc import Sequence


def crossing(points: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return the first point at which the ratio of two curves crosses 1. `ratios` has one value for each of `points`.
    Return None if the ratio never crosses 1."""
    for index in range(len(points) - 1):
        low, high = math.log(ratios[index]), math.log(ratios[index + 1])
        if low == 0.0:
            return points[index]
        if low * high < 0:
            part = low / (low - high)
            return math.exp((1 - part) * math.log(points[index]) + part * math.log(points[index + 1]))
    return points[-1] if ratios[-1] == 1.0 else None


def value_at(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value of a curve at the point `at`. Outside of the curve's points, return the value of the nearest
    point."""
    if at <= points[0]:
        return values[0]
    for index in range(len(points) - 1):
        if at <= points[index + 1]:
            low, high = math.log(points[index]), math.log(points[index + 1])
            part = (math.log(at) - low) / (high - low)
            return math.exp((1 - part) * math.log(values[index]) + part * math.log(values[index + 1]))
    return values[-1]


def disagreement(points: Sequence[float], measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the error of a prediction of which of two curves is lower, as a relative difference. 0: the prediction is
    right everywhere.

    `measured` and `predicted` are the measured and the predicted ratio of the first curve to the second, one value for
    each of `points`. The first curve is lower where the ratio is below 1. At the first point where the predicted ratio
    is 1, the error is the distance of the measured ratio from 1. At the first point where the measured ratio is 1, the
    error is the distance of the predicted ratio from 1. The larger of the two errors is returned. A ratio that never
    crosses 1 gives no error. If neither ratio crosses 1, but one is below 1 and the other is above 1, the smallest
    distance of the measured ratio from 1 is returned.
    """
    gaps = []
    for ours, theirs in ((predicted, measured), (measured, predicted)):
        at = crossing(points, ours)
        if at is not None:
            gaps.append(abs(math.log(value_at(points, theirs, at))))
    if not gaps and (measured[0] < 1) != (predicted[0] < 1):
        gaps = [min(abs(math.log(ratio)) for ratio in measured)]
    return math.exp(max(gaps)) - 1 if gaps else 0.0
