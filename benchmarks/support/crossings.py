"""Where one curve overtakes another, and whether a prediction agrees. Pure.

Curves are sampled at the same ascending points, here bandwidths; between two points they are straight in log-log.
"""

import math
from collections.abc import Sequence


def crossing(points: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return the first point at which `ratios`, one curve over another, pass 1; None when they never do."""
    for index in range(len(points) - 1):
        low, high = math.log(ratios[index]), math.log(ratios[index + 1])
        if low == 0.0:
            return points[index]
        if low * high < 0:
            part = low / (low - high)
            return math.exp((1 - part) * math.log(points[index]) + part * math.log(points[index + 1]))
    return points[-1] if ratios[-1] == 1.0 else None


def value_at(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value of a curve between its points; outside, the nearest point's value."""
    if at <= points[0]:
        return values[0]
    for index in range(len(points) - 1):
        if at <= points[index + 1]:
            low, high = math.log(points[index]), math.log(points[index + 1])
            part = (math.log(at) - low) / (high - low)
            return math.exp((1 - part) * math.log(values[index]) + part * math.log(values[index + 1]))
    return values[-1]


def disagreement(points: Sequence[float], measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return how far apart two curves are, as a fraction, where measurement and prediction differ on which is lower.

    Both arguments are ratios of the one curve over the other. Where the prediction says they cross, the measured ones
    ought to meet, and the other way round; the larger gap counts. When neither crosses: 0 when both agree on which is
    lower, else the smallest measured gap.
    """
    gaps = []
    for ours, theirs in ((predicted, measured), (measured, predicted)):
        at = crossing(points, ours)
        if at is not None:
            gaps.append(abs(math.log(value_at(points, theirs, at))))
    if not gaps and (measured[0] < 1) != (predicted[0] < 1):
        gaps = [min(abs(math.log(ratio)) for ratio in measured)]
    return math.exp(max(gaps)) - 1 if gaps else 0.0
