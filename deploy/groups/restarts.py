"""When a worker that ended may be started again: at once after a long life, later and later after short ones. Pure."""

from dataclasses import dataclass

from baton.clock import Clock


@dataclass(frozen=True)
class Backoff:
    """How fast a worker that ends again and again is started again."""

    first_s: float = 1.0
    """Seconds before the second start in a row; doubles with each further one. The first is made at once."""
    most_s: float = 30.0
    """Seconds before a start, at most."""
    healthy_s: float = 60.0
    """Seconds of life after which a worker's earlier ends no longer count."""


class Restarts:
    """The lives of one worker. Owned by its group."""

    def __init__(self, backoff: Backoff, clock: Clock, num_at_once: int = 1) -> None:
        """`num_at_once` starts in a row are made without a pause."""
        self.num_ends = 0
        """Lives in a row that were short, or did not begin."""
        self._backoff = backoff
        self._clock = clock
        self._num_at_once = num_at_once
        self._began_s: float | None = None
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        """The next life may begin."""
        return self._clock.now_s() >= self._due_s

    def began(self) -> None:
        """The worker serves."""
        self._began_s = self._clock.now_s()

    def ended(self) -> float:
        """A life has ended, or could not begin; returns the seconds until the next may."""
        now_s = self._clock.now_s()
        if self._began_s is not None and now_s - self._began_s >= self._backoff.healthy_s:
            self.num_ends = 0
        self._began_s = None
        self.num_ends += 1
        num_pauses = self.num_ends - self._num_at_once
        doubled_s = self._backoff.first_s * 2.0 ** min(num_pauses - 1, 30)
        delay_s = min(doubled_s, self._backoff.most_s) if num_pauses > 0 else 0.0
        self._due_s = now_s + delay_s
        return delay_s
