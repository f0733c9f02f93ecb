"""Time as a dependency: whoever decides by the clock is handed one, so that tests can move it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock: for durations, deadlines and leases; compared within one process only."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds of wall-clock time: for timestamps that leave the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()
