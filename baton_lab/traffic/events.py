"""The simulator's time: actions ordered by their instants, and the clock that production policies read. Pure."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Runs actions in the order of their instants, and is the clock meanwhile (`baton.process.clock.Clock`)."""

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
        """Run `action` at that instant; at once, after the actions of the present instant, if that has passed."""
        heapq.heappush(self._actions, (max(time_s, self._now_s), next(self._numbers), action))

    def run(self) -> None:
        """Run actions, and those that they add, until none is left."""
        actions = self._actions
        while actions:
            self._now_s, _, action = heapq.heappop(actions)
            self.num_run += 1
            action()
