"""How long a process has left heartbeats unanswered, as far as the process that sends them can know."""

_MOST_INTERVALS = 3
"""Intervals between heartbeats that an unanswered one counts for at most: the pause before it and the wait for its
answer take two, unless the process that sends them does not run itself."""


class FailureDetector:
    """The time since the first heartbeat that a process left unanswered after its last answer."""

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
        """Record that a heartbeat sent at `asked_s` is found unanswered at `now_s`, both of a monotonic clock, where
        one is sent every `interval_s` seconds. Return how many seconds of silence are known: time in which no heartbeat
        was out is none, nor is time in which this process itself was stopped."""
        since_s = self._looked_s if self.has_begun else asked_s
        self._seconds += min(now_s - since_s, _MOST_INTERVALS * interval_s)
        self._looked_s = now_s
        return self._seconds
