"""A clock that tests advance manually."""


class ManualClock:
    """Clock that advances only by `advance`. Both readings advance together, except when `step` changes unix time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._stepped_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def unix_ns(self) -> int:
        return int((self._now_s + self._stepped_s) * 1e9)

    def step(self, seconds: float) -> None:
        """Change unix time alone, forwards or backwards, as an operator or NTP does."""
        self._stepped_s += seconds

    def advance(self, seconds: float) -> None:
        """Advance both readings by `seconds`, which must not be negative."""
        assert seconds >= 0
        self._now_s += seconds


class StoppedClock:
    """Clock that never advances. Its unix time is `unix_ns`, and its other reading is the same time in seconds."""

    def __init__(self, unix_ns: int) -> None:
        self._unix_ns = unix_ns

    def now_s(self) -> float:
        return self._unix_ns / 1e9

    def unix_ns(self) -> int:
        return self._unix_ns


class StandingTime:
    """Replacement of the module `time` for emulated links. Its time passes only while a thread sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
