"""Simulated time: a queue of actions ordered by time, and the clock that scaling policies read. Does no I/O."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Queue of actions that runs them in the order of their times. It is also the clock that the actions read.
    Implements `baton.process.clock.Clock`."""

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
        """Schedule `action` for the simulated time `time_s`. If this time has passed, the action runs at the current
        time, after the actions that are already scheduled for the current time."""
        heapq.heappush(self._actions, (max(time_s, self._now_s), next(self._numbers), action))

    def run(self) -> None:
        """Run all scheduled actions until none is left, including those that actions schedule."""
        actions = self._actions
        while actions:
            self._now_s, _, action = heapq.heappop(actions)
            self.num_run += 1
            action()
