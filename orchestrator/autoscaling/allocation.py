"""Chooses an allocation of groups in a budget: the cheapest that meets the targets, else the one that serves most.

Latencies only fall when a pool grows. So for each number of prefill groups the least number of generation groups is
found by bisection, and O(n log n) of the n^2 / 2 allocations are predicted. Pure.
"""

from orchestrator.autoscaling.config import AutoscalingConfig
from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor


def cheapest_within_targets(predictor: Predictor, config: AutoscalingConfig, least: int = 0) -> Prediction | None:
    """Return the allocation of fewest groups, `least` or more, that meets both targets; of equals, the one with most
    good requests. None when none in the budget meets them."""
    found: list[Prediction] = []
    for num_prefill in range(1, config.max):
        fitting = _least_generate(predictor, config, num_prefill)
        if fitting is not None:
            found.append(fitting)
    if not found:
        return None
    fewest = max(min(each.allocation.total for each in found), config.min, least)
    return max(
        (predictor.predict(_widen(each.allocation, fewest)) for each in found if each.allocation.total <= fewest),
        key=lambda each: each.good_share,
    )


def most_good(predictor: Predictor, config: AutoscalingConfig) -> Prediction:
    """Return the allocation of the whole budget that serves the largest share of requests within the targets."""
    splits = [Allocation(num_prefill, config.max - num_prefill) for num_prefill in range(1, config.max)]
    return max((predictor.predict(each) for each in splits), key=lambda each: each.good_share)


def _least_generate(predictor: Predictor, config: AutoscalingConfig, num_prefill: int) -> Prediction | None:
    low, high = 0, config.max - num_prefill
    if not predictor.predict(Allocation(num_prefill, high)).meets(config):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        meets = predictor.predict(Allocation(num_prefill, middle)).meets(config)
        low, high = (low, middle) if meets else (middle, high)
    return predictor.predict(Allocation(num_prefill, high))


def _widen(allocation: Allocation, total: int) -> Allocation:
    """Return the allocation with further generation groups, up to `total` groups in all."""
    return Allocation(allocation.num_prefill, max(total - allocation.num_prefill, allocation.num_generate))
