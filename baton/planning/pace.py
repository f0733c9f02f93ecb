"""Corrects predicted durations by the durations of finished operations. It is used for durations that are only
estimates before the first observation, such as those of transfers.

A prediction is multiplied by the weighted median of observed over nominal seconds, with nominal seconds as weights,
over the latest operations. Operations are always compared with nominal predictions, so corrections do not accumulate.
"""

from collections import deque
from collections.abc import Iterable

NUM_RECENT = 16
"""Number of latest operations from which a correction is computed."""
_PASSED_OVER = 64
"""Number of consecutive decisions against an option after which its oldest observation is dropped."""
MOST_RATIO = 32.0
"""Maximum factor by which one operation may count as slower or faster than its prediction."""


class PassedOver:
    """Counts consecutive decisions against an option because of its predicted duration."""

    def __init__(self) -> None:
        self._num_decisions = 0

    def count(self) -> bool:
        """Record a decision. Return True if the oldest observation must be dropped, because there were many decisions
        in a row. Otherwise an option that was slow once would never be tried again."""
        self._num_decisions = (self._num_decisions + 1) % _PASSED_OVER
        return not self._num_decisions

    def reset(self) -> None:
        """Record that the option was chosen."""
        self._num_decisions = 0


class Pace:
    """Estimate of how much slower operations are than their nominal prediction. It is derived from finished operations,
    and depends only on these observations."""

    def __init__(self) -> None:
        """Create an estimate without observations."""
        self.factor = 1.0
        """Factor by which operations take longer than their nominal prediction. 1 if nothing was observed."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)
        """Recent operations, each as (observed seconds, predicted seconds)."""
        self._passed_over = PassedOver()

    def note(self, observed_s: float, predicted_s: float) -> None:
        """Record an observed duration of `observed_s` seconds. `predicted_s` is the nominal prediction in seconds,
        without correction. Ignored if `predicted_s` is not above 0."""
        if predicted_s > 0:
            self._passed_over.reset()
            self._recent.append((observed_s, predicted_s))
            self.factor = median_ratio(self._recent)

    def pass_over(self) -> None:
        """Record that the option whose duration this object predicts (for example, fetching cached KV) was not chosen.
        After many such decisions in a row, the oldest observation is dropped."""
        if self._passed_over.count() and self._recent:
            self._recent.popleft()
            self.factor = median_ratio(self._recent)


def median_ratio(operations: Iterable[tuple[float, float]]) -> float:
    """Return the median, weighted by predicted seconds, of observed over predicted seconds. Each operation is given as
    (observed seconds, predicted seconds). Return 1 if there are none."""
    ascending = sorted(
        (min(max(observed_s / predicted_s, 1 / MOST_RATIO), MOST_RATIO), predicted_s)
        for observed_s, predicted_s in operations
    )
    left_s = sum(seconds for _, seconds in ascending) / 2
    for ratio, seconds in ascending:
        left_s -= seconds
        if left_s <= 0:
            return ratio
    return 1.0
