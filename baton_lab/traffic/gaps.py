"""Histogram of the gaps between tokens, with bins 1.5 % wide. Pure."""

import math

import numpy as np

_BINS_A_DOUBLING = 48
_LEAST_S = 1e-6


class GapHistogram:
    """Histogram of the seconds between consecutive tokens of streams, with bins 1.5 % wide."""

    def __init__(self) -> None:
        self._counts = [0] * (_BINS_A_DOUBLING * 40)
        self.num_gaps = 0
        """Number of gaps counted."""

    def add(self, seconds: float, num_gaps: int) -> None:
        """Count `num_gaps` gaps of about `seconds` each."""
        place = int(_BINS_A_DOUBLING * math.log2(seconds / _LEAST_S)) if seconds > _LEAST_S else 0
        self._counts[min(place, len(self._counts) - 1)] += num_gaps
        self.num_gaps += num_gaps

    def percentile(self, percent: float) -> float:
        """Return the given percentile of the gaps in seconds, accurate to one bin width. Return NaN if there are no
        gaps."""
        if not self.num_gaps:
            return math.nan
        reached = np.cumsum(np.array(self._counts, dtype=np.float64))
        place = int(np.searchsorted(reached, percent / 100 * self.num_gaps))
        return _LEAST_S * float(2 ** ((place + 0.5) / _BINS_A_DOUBLING))
