"""Pauses that grow with each failure in a row: before retried calls, restarts and turns of loops. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses in seconds: `first_s`, doubled by each further failure, up to `most_s`."""

    first_s: float
    most_s: float

    def after(self, num_failures: int) -> float:
        """Return the seconds to wait after `num_failures` (>= 1) failures in a row."""
        return float(min(self.first_s * 2.0 ** min(num_failures - 1, 30), self.most_s))
