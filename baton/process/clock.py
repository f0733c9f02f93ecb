"""Time as a dependency: every component that decides by time is given a clock, so that tests can advance it."""

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that a component reads: monotonic seconds and wall-clock nanoseconds."""

    def now_s(self) -> float:
        """Return a monotonic clock's seconds, for durations and deadlines; comparable within one process only."""

    def unix_ns(self) -> int:
        """Return wall-clock time in unix nanoseconds, for timestamps that leave the process."""


class SteadyTime:
    """Unix time that is read once and then advanced by the monotonic clock. Its differences are true durations, even
    when the wall clock is set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unix_ns, self._at_s = clock.unix_ns(), clock.now_s()

    def unix_ns(self) -> int:
        """Return the present time, in unix nanoseconds."""
        return self._unix_ns + round((self._clock.now_s() - self._at_s) * 1e9)


class SystemClock:
    """The clock of the machine that this process runs on."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()
