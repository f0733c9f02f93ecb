"""Clock as a dependency: every component whose decisions depend on time is passed a clock, so that tests can advance
it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Clock that a component reads: monotonic seconds and wall-clock nanoseconds."""

    def now_s(self) -> float:
        """Return the seconds of a monotonic clock, for durations and deadlines. Comparable only within one process."""

    def unix_ns(self) -> int:
        """Return the wall-clock time in unix nanoseconds, for timestamps that are sent to other processes."""


class SteadyTime:
    """Unix time that is read once and then advanced by the monotonic clock. Differences are correct durations, even if
    the wall clock is changed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unix_ns, self._at_s = clock.unix_ns(), clock.now_s()

    def unix_ns(self) -> int:
        """Return the current time in unix nanoseconds."""
        return self._unix_ns + round((self._clock.now_s() - self._at_s) * 1e9)


class SystemClock:
    """Clock of the machine on which this process runs."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()
