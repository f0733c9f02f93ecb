"""Clock that is passed to every component whose decisions depend on time. Tests pass a clock that they can advance."""

import time
from typing import Protocol


class Clock(Protocol):
    """Interface of a clock, which returns monotonic seconds and wall-clock nanoseconds."""

    def now_s(self) -> float:
        """Return the time of a monotonic clock in seconds. Use it for durations and deadlines within one process;
        values of different processes are not comparable."""

    def unix_ns(self) -> int:
        """Return the wall-clock time in unix nanoseconds, for timestamps that are sent to other processes."""


class SteadyTime:
    """Unix time that does not jump. The wall clock is read once, and then the monotonic clock is added. Differences
    between two values are correct durations even if the wall clock is changed meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unix_ns, self._at_s = clock.unix_ns(), clock.now_s()

    def unix_ns(self) -> int:
        """Return the current time in unix nanoseconds."""
        return self._unix_ns + round((self._clock.now_s() - self._at_s) * 1e9)


class SystemClock:
    """Clock that reads the real time of the machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()
