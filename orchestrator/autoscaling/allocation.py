"""Selects the numbers of prefill and generation groups (an allocation) within a budget. Selects the smallest allocation
that meets the latency targets. If no allocation meets them, selects the one that serves the most requests within the
targets.

More groups of a role never increase a latency. Therefore bisection finds, for each role, the minimum number of groups
that suffices if the other role has the maximum number. The search starts at the sum of these two minimums and increases
the total number of groups. If many allocations have the same total, a few evenly spaced ones are predicted first, and
then those near the best of them. Does no I/O.
"""

from bisect import bisect_left
from collections.abc import Callable

from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor
from orchestrator.requests.config import AutoscalingConfig

_SPACED = 32
"""Approximate number of evenly spaced allocations that one pass of the search predicts. They all have the same total
number of groups, but different numbers of prefill groups."""


def cheapest_within_targets(predictor: Predictor, config: AutoscalingConfig, least: int = 0) -> Prediction | None:
    """Return the prediction of the smallest allocation that has at least `least` groups and meets both latency targets.
    If several allocations have that size, return the best one. Return None if no allocation within the budget meets the
    targets."""
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
    """Return the prediction of the best allocation that uses the whole budget of groups. The best allocation serves the
    largest share of requests within the targets."""
    return _best(predictor, config.max, 1, config.max - 1)


def best_by_lending(predictor: Predictor, config: AutoscalingConfig, before: Allocation, ranks: int) -> Prediction:
    """Return the prediction of the best allocation that can be reached from `before` only by lending and returning
    ranks. A lent rank is a worker of a prefill group that serves as a generation group instead.

    `ranks` is the number of ranks of each prefill group. If several allocations meet both targets, the one whose number
    of lent ranks is nearest to that of `before` is selected. If none meets them, the one with the largest share of
    requests within the targets is selected.
    """
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
    """Return True if prediction `one` is at least as good as prediction `other`.

    An allocation that meets the targets is better than one that does not. If both meet the targets, the one with fewer
    groups is better. If neither meets them, the one with the larger share of requests within the targets is better.
    """
    if one.meets(config) != other.meets(config):
        return one.meets(config)
    if one.meets(config):
        return one.allocation.total <= other.allocation.total
    return _worth(one) >= _worth(other)


def _best(predictor: Predictor, total: int, low: int, high: int) -> Prediction:
    """Return the prediction of the best allocation of `total` groups with `low` to `high` prefill groups."""
    while True:
        step = max((high - low) // _SPACED, 1)
        found = [predictor.predict(Allocation(num, total - num)) for num in range(low, high + 1, step)]
        best = max(found, key=_worth)
        if step == 1:
            return best
        middle = best.allocation.num_prefill
        low, high = max(middle - step + 1, low), min(middle + step - 1, high)


def _worth(prediction: Prediction) -> tuple[float, float]:
    """Return a sort key: the share of requests within the targets and, for equal shares, the free capacity of the more
    loaded role."""
    return round(prediction.good_share, 3), -max(prediction.prefill_load, prediction.generation_load)


def _fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` for which `is_enough` is True; None if there is none. If a number is
    enough, all larger numbers must be enough too."""
    found = 1 + bisect_left(range(1, most + 1), True, key=is_enough)
    return found if found <= most else None
