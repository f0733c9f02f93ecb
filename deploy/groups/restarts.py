"""Decides when a worker that ended is restarted: at once if it had run for a long time, after growing pauses if its
runs are short."""

from baton.process.backoff import Backoff
from baton.process.clock import Clock

RESTART_PAUSES = Backoff(1.0, 30.0)
"""Pauses before the second and later restarts in a row. The first restart is made at once."""
_HEALTHY_S = 60.0
"""Seconds that a worker must run for its earlier failures to be forgotten."""


class Restarts:
    """Counts the short runs of one worker, and decides when it may be restarted. Owned by the worker's group."""

    def __init__(self, backoff: Backoff, clock: Clock, num_at_once: int = 1) -> None:
        """Make the counter of a worker that has not run yet. The first `num_at_once` restarts in a row are made without
        a pause."""
        self.num_ends = 0
        """Number of successive runs that were short, or failed to start."""
        self._backoff = backoff
        self._clock = clock
        self._num_at_once = num_at_once
        self._began_s: float | None = None
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        """True if the worker may be restarted now."""
        return self._clock.now_s() >= self._due_s

    def began(self) -> None:
        """Record that the worker began to serve."""
        self._began_s = self._clock.now_s()

    def ended(self) -> float:
        """Record that the worker ended, or failed to start. Return the seconds until it may be restarted."""
        now_s = self._clock.now_s()
        if self._began_s is not None and now_s - self._began_s >= _HEALTHY_S:
            self.num_ends = 0
        self._began_s = None
        self.num_ends += 1
        num_pauses = self.num_ends - self._num_at_once
        delay_s = self._backoff.after(num_pauses) if num_pauses > 0 else 0.0
        self._due_s = now_s + delay_s
        return delay_s
