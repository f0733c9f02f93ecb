"""Exponential backoff: delays that grow with each consecutive failure. Used before a call is retried, a process is
restarted, or a loop continues. Does no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Delays of exponential backoff in seconds: `first_s` after one failure, doubled with each further failure, at most
    `most_s`."""

    first_s: float
    most_s: float

    def after(self, num_failures: int) -> float:
        """Return the delay in seconds after `num_failures` consecutive failures (at least 1)."""
        return float(min(self.first_s * 2.0 ** min(num_failures - 1, 30), self.most_s))
