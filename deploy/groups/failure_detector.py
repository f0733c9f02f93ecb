"""Measures how long a process has not answered heartbeats, from the viewpoint of the process that sends them."""

_MOST_INTERVALS = 3
"""Maximum number of heartbeat intervals that one unanswered heartbeat adds to the silence. The pause before a heartbeat
and the wait for its answer together take at most two intervals, unless the sending process itself was stopped."""


class FailureDetector:
    """Measures how long a process has not answered: the time since its first unanswered heartbeat."""

    def __init__(self) -> None:
        self._seconds, self._looked_s = 0.0, 0.0

    @property
    def has_begun(self) -> bool:
        """True if the last heartbeat was not answered."""
        return self._seconds > 0

    def end(self) -> None:
        """Record that a heartbeat was answered."""
        self._seconds = 0.0

    def go_on(self, asked_s: float, now_s: float, interval_s: float) -> float:
        """Record that at `now_s` a heartbeat that was sent at `asked_s` is still unanswered. Both times are of a
        monotonic clock; a heartbeat is sent every `interval_s` seconds. Return the seconds of silence so far. The
        silence begins when the first unanswered heartbeat was sent. One call adds at most `_MOST_INTERVALS` intervals,
        because this process itself may have been stopped for a longer time."""
        since_s = self._looked_s if self.has_begun else asked_s
        self._seconds += min(now_s - since_s, _MOST_INTERVALS * interval_s)
        self._looked_s = now_s
        return self._seconds
