"""Chooses an allocation of groups in a budget: the cheapest that meets the targets, else the one that serves most.

Latencies only fall when a pool grows. So bisection finds the smallest number of groups of each role that suffices with
more than enough groups of the other. The search starts at these two numbers and proceeds upwards. Of many allocations
of equal size, some evenly spaced ones are predicted, and then those around the best. Pure.
"""

from bisect import bisect_left
from collections.abc import Callable

from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor
from orchestrator.requests.config import AutoscalingConfig

_SPACED = 32
"""Allocations of one size that are predicted at once."""


def cheapest_within_targets(predictor: Predictor, config: AutoscalingConfig, least: int = 0) -> Prediction | None:
    """Return the allocation of fewest groups, `least` or more, that meets both targets; of equals, the best. None when
    none in the budget meets them."""
    num_prefill = _fewest(lambda number: predictor.predict(Allocation(number, config.max)).meets(config), config.max)
    num_generate = _fewest(lambda number: predictor.predict(Allocation(config.max, number)).meets(config), config.max)
    if num_prefill is None or num_generate is None:
        return None
    for total in range(max(num_prefill + num_generate, config.min, least), config.max + 1):
        best = _best(predictor, total, num_prefill, total - num_generate)
        if best.meets(config):
            return best
    return None


def most_good(predictor: Predictor, config: AutoscalingConfig) -> Prediction:
    """Return the allocation of the whole budget that serves the largest share of requests within the targets."""
    return _best(predictor, config.max, 1, config.max - 1)


def best_by_lending(predictor: Predictor, config: AutoscalingConfig, before: Allocation, ranks: int) -> Prediction:
    """Return the allocation of the same groups, of `ranks` ranks each for prefill, with more or fewer ranks lent: the
    one nearest to `before` that meets both targets, else the best."""
    most = before.num_prefill * (ranks - 1)
    found = []
    for change in sorted(range(-before.num_lent, most - before.num_lent + 1), key=abs):
        if before.num_generate + change > 0:
            after = Allocation(before.num_prefill, before.num_generate + change, before.num_lent + change)
            found.append(predictor.predict(after))
            if found[-1].meets(config):
                return found[-1]
    return max(found, key=_worth)


def is_better(one: Prediction, other: Prediction, config: AutoscalingConfig) -> bool:
    """Return whether one prediction is at least as good as the other: in meeting the targets, in groups, then in the
    share of good requests."""
    if one.meets(config) != other.meets(config):
        return one.meets(config)
    if one.meets(config):
        return one.allocation.total <= other.allocation.total
    return _worth(one) >= _worth(other)


def _best(predictor: Predictor, total: int, low: int, high: int) -> Prediction:
    """Return the best allocation of `total` groups, `low` to `high` of them for prefill."""
    while True:
        step = max((high - low) // _SPACED, 1)
        found = [predictor.predict(Allocation(num, total - num)) for num in range(low, high + 1, step)]
        best = max(found, key=_worth)
        if step == 1:
            return best
        middle = best.allocation.num_prefill
        low, high = max(middle - step + 1, low), min(middle + step - 1, high)


def _worth(prediction: Prediction) -> tuple[float, float]:
    """Return a sort key: the share of good requests, and of equals, how far from full the fuller pool is."""
    return round(prediction.good_share, 3), -max(prediction.prefill_load, prediction.generation_load)


def _fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the least number from 1 to `most` that is enough, where more are enough too; None when none is."""
    found = 1 + bisect_left(range(1, most + 1), True, key=is_enough)
    return found if found <= most else None
