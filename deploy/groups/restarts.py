"""Decides when a worker that ended is restarted. A worker that had run for a long time is restarted immediately. If a
worker repeatedly ends after a short run, it is restarted after increasing pauses."""

from baton.process.backoff import Backoff
from baton.process.clock import Clock

RESTART_PAUSES = Backoff(1.0, 30.0)
"""Pauses before restarts that are delayed: 1 second, doubled with each further failure, at most 30 seconds. The class
Restarts decides which restarts are delayed."""
_HEALTHY_S = 60.0
"""Seconds after which a running worker counts as healthy. Its earlier failures are then no longer counted."""


class Restarts:
    """Counter of the failures of one worker, which decides when the worker may be restarted. Owned by the worker's
    group."""

    def __init__(self, backoff: Backoff, clock: Clock, num_at_once: int = 1) -> None:
        """Create the counter for a worker that has not run yet. The first `num_at_once` successive restarts have no
        pause; `backoff` determines the pauses before later ones."""
        self.num_ends = 0
        """Number of successive failures: short runs and failed starts. A long run resets it."""
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
        """Record that the worker has started to serve."""
        self._began_s = self._clock.now_s()

    def ended(self) -> float:
        """Record that the worker ended or failed to start. Return the number of seconds after which it may be
        restarted."""
        now_s = self._clock.now_s()
        if self._began_s is not None and now_s - self._began_s >= _HEALTHY_S:
            self.num_ends = 0
        self._began_s = None
        self.num_ends += 1
        num_pauses = self.num_ends - self._num_at_once
        delay_s = self._backoff.after(num_pauses) if num_pauses > 0 else 0.0
        self._due_s = now_s + delay_s
        return delay_s
