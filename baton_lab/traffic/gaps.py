"""Histogram of the time between output tokens, in bins of a relative width of 1.5 %. Does no I/O."""

import math

import numpy as np

_BINS_A_DOUBLING = 48
_LEAST_S = 1e-6


class GapHistogram:
    """Histogram of the seconds between consecutive output tokens of a stream, in bins of a relative width of 1.5 %."""

    def __init__(self) -> None:
        self._counts = [0] * (_BINS_A_DOUBLING * 40)
        self.num_gaps = 0
        """Number of gaps (times between consecutive tokens) that were added so far."""

    def add(self, seconds: float, num_gaps: int) -> None:
        """Add `num_gaps` gaps (times between consecutive tokens), each `seconds` long, to the histogram."""
        place = int(_BINS_A_DOUBLING * math.log2(seconds / _LEAST_S)) if seconds > _LEAST_S else 0
        self._counts[min(place, len(self._counts) - 1)] += num_gaps
        self.num_gaps += num_gaps

    def percentile(self, percent: float) -> float:
        """Return the given percentile (0 to 100) of the gaps (times between tokens) in seconds. The relative error is
        at most the bin width. Return NaN if the histogram is empty."""
        if not self.num_gaps:
            return math.nan
        reached = np.cumsum(np.array(self._counts, dtype=np.float64))
        place = int(np.searchsorted(reached, percent / 100 * self.num_gaps))
        return _LEAST_S * float(2 ** ((place + 0.5) / _BINS_A_DOUBLING))
