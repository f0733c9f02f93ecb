"""Crossings of two curves, and whether a prediction agrees with them. Pure.

Curves are sampled at the same ascending points, here bandwidths. Between two points they are straight in log-log scale.
"""

import math
from collections.abc import Sequence


def crossing(points: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return the first point at which the ratio of two curves passes 1; None if there is none."""
    for index in range(len(points) - 1):
        low, high = math.log(ratios[index]), math.log(ratios[index + 1])
        if low == 0.0:
            return points[index]
        if low * high < 0:
            part = low / (low - high)
            return math.exp((1 - part) * math.log(points[index]) + part * math.log(points[index + 1]))
    return points[-1] if ratios[-1] == 1.0 else None


def value_at(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value of a curve at `at`; outside of its points, the value of the nearest point."""
    if at <= points[0]:
        return values[0]
    for index in range(len(points) - 1):
        if at <= points[index + 1]:
            low, high = math.log(points[index]), math.log(points[index + 1])
            part = (math.log(at) - low) / (high - low)
            return math.exp((1 - part) * math.log(values[index]) + part * math.log(values[index + 1]))
    return values[-1]


def disagreement(points: Sequence[float], measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the largest gap between two curves, as a fraction, where measurement and prediction disagree on which is
    lower.

    `measured` and `predicted` are ratios of one curve to the other. At a crossing of one of them, the gap is the
    difference of the other's ratio from 1; the larger gap counts. If neither has a crossing: 0 if both agree on which
    curve is lower, else the smallest measured gap.
    """
    gaps = []
    for ours, theirs in ((predicted, measured), (measured, predicted)):
        at = crossing(points, ours)
        if at is not None:
            gaps.append(abs(math.log(value_at(points, theirs, at))))
    if not gaps and (measured[0] < 1) != (predicted[0] < 1):
        gaps = [min(abs(math.log(ratio)) for ratio in measured)]
    return math.exp(max(gaps)) - 1 if gaps else 0.0
