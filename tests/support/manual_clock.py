"""A clock that tests move by hand."""


class ManualClock:
    """A clock for tests that moves only by `advance`; both readings advance together."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def unix_ns(self) -> int:
        return int(self._now_s * 1e9)

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds`, which must not be negative."""
        assert seconds >= 0
        self._now_s += seconds
