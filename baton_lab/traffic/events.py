"""Time in the simulator: actions ordered by time, and the clock that production policies read. Pure."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Runs actions in the order of their times, and is the clock for them (`baton.process.clock.Clock`)."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.num_run = 0
        """Number of actions that have run."""

    def now_s(self) -> float:
        return self._now_s

    def unix_ns(self) -> int:
        return round(self._now_s * 1e9)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule `action` for `time_s`. If that time has passed, the action runs after those already scheduled for
        the current time."""
        heapq.heappush(self._actions, (max(time_s, self._now_s), next(self._numbers), action))

    def run(self) -> None:
        """Run all actions, including those that they add, until none is left."""
        actions = self._actions
        while actions:
            self._now_s, _, action = heapq.heappop(actions)
            self.num_run += 1
            action()
