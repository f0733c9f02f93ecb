"""Delays that grow with each consecutive failure: before calls are retried, processes restarted and loops continued.
Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds: `first_s` after one failure, doubled after each further failure, up to `most_s`."""

    first_s: float
    most_s: float

    def after(self, num_failures: int) -> float:
        """Return the seconds to wait after `num_failures` (>= 1) consecutive failures."""
        return float(min(self.first_s * 2.0 ** min(num_failures - 1, 30), self.most_s))
