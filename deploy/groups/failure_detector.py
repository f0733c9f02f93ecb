"""Measures for how long a process has not answered heartbeats, as seen by the process that sends them."""

_MOST_INTERVALS = 3
"""Maximum number of heartbeat intervals that one unanswered heartbeat adds to the measured silence. Normally, the pause
before a heartbeat and the wait for its answer take at most two intervals together. They take longer only if the sending
process itself was stopped."""


class FailureDetector:
    """Measures for how long a process has not answered heartbeats, counted from its first unanswered heartbeat."""

    def __init__(self) -> None:
        self._seconds, self._looked_s = 0.0, 0.0

    @property
    def has_begun(self) -> bool:
        """True if the latest heartbeat was not answered."""
        return self._seconds > 0

    def end(self) -> None:
        """Record that a heartbeat was answered. The measured time without an answer is set to 0."""
        self._seconds = 0.0

    def go_on(self, asked_s: float, now_s: float, interval_s: float) -> float:
        """Record that a heartbeat is still unanswered, and return the length of the silence so far in seconds.

        The heartbeat was sent at `asked_s`, and the current time is `now_s`; both are times of a monotonic clock. A
        heartbeat is sent every `interval_s` seconds. The silence begins when the first unanswered heartbeat was sent.
        One call adds at most `_MOST_INTERVALS` intervals to it, because this process itself may have been stopped for a
        longer time.
        """
        since_s = self._looked_s if self.has_begun else asked_s
        self._seconds += min(now_s - since_s, _MOST_INTERVALS * interval_s)
        self._looked_s = now_s
        return self._seconds
