"""Forecasts traffic: the rate of requests and the distributions of their lengths.

Requests are sorted into classes by prompt length. Each class covers lengths twice as long as the class before it. The
rate of a class is counted over a time window. The window restarts if the rate of the last few seconds differs from the
rate in the rest of the window by more than chance explains. Therefore a change is recognized within seconds,
while random variation is averaged out.

The latest output lengths of each class are kept even while the class has no traffic, so that they are known when
traffic returns. If the rate of a class rises or falls steadily, it is extrapolated linearly to the time of the
forecast. Does no I/O. Owned by one autoscaler.
"""

import math
from collections import deque
from dataclasses import dataclass

SHORT_S = (2.0, 4.0, 8.0)
"""Lengths in seconds of the recent intervals. Each interval is compared with the part of the window before it, to
detect a change of rate."""
LONG_S = 60.0
"""Maximum length in seconds of the window over which a rate is counted."""
_SURPRISE = 3.5
"""Threshold, in standard deviations, for the difference between the numbers of arrivals in two parts of the window. A
larger difference is treated as a change of rate."""
_KEPT_LENGTHS = 256
"""Number of most recent prompt and output lengths that are kept for each traffic class."""
_GUESSED_OUTPUT = 256
"""Assumed length of an answer in tokens before any request has ended. If the maximum answer length of a request is
smaller, this maximum is assumed."""
_MOST_RISE = 2.0
"""Maximum ratio of a forecast rate of requests to the present rate."""


@dataclass(frozen=True)
class TrafficClass:
    """Forecast for one traffic class, i.e. for requests of similar prompt length."""

    rate: float
    """Number of requests of the class per second."""
    prompts: tuple[int, ...]
    """Sample of prompt lengths in tokens. All entries are equally likely."""
    outputs: tuple[int, ...]
    """Sample of answer lengths in tokens. All entries are equally likely."""
    cached_share: float = 0.0
    """Mean fraction of a prompt's tokens whose KV is in the prefix cache, from 0 to 1."""


@dataclass(frozen=True)
class TrafficForecast:
    """Forecast for all traffic classes together."""

    classes: tuple[TrafficClass, ...] = ()
    gap_scv: float = 1.0
    """Squared coefficient of variation of the times between arrivals (variance divided by the squared mean). It is 1
    for Poisson arrivals."""

    @property
    def rate(self) -> float:
        """Return the number of requests per second, over all classes."""
        return sum(each.rate for each in self.classes)


class _ClassWindow:
    """Recent arrivals, prompt lengths and output lengths of one traffic class."""

    def __init__(self, now_s: float) -> None:
        self.begin_s = now_s
        self.arrivals_s: deque[float] = deque()
        self.prompts: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        self.outputs: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        self.cached_shares: deque[float] = deque(maxlen=_KEPT_LENGTHS)
        self.guesses: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        """Assumed answer lengths in tokens. They are used until the first answer of the class has ended."""

    def arrived(self, now_s: float) -> None:
        """Record an arrival at time `now_s`, and drop arrivals that are older than `LONG_S` seconds."""
        self.arrivals_s.append(now_s)
        self._begin_at(now_s - LONG_S)

    def rate(self, now_s: float, ahead_s: float, scatter: float) -> float:
        """Return the number of requests per second that is predicted for the time `now_s + ahead_s`. `scatter` is the
        ratio of the variance of arrival counts to their mean (1 for Poisson arrivals)."""
        self._shorten(now_s, scatter)
        seconds = max(now_s - self.begin_s, 1.0)
        rate = len(self.arrivals_s) / seconds
        middle_s = now_s - seconds / 2
        num_late = sum(1 for each in self.arrivals_s if each > middle_s)
        rise = 2 * num_late - len(self.arrivals_s)
        if seconds < LONG_S / 2 or abs(rise) < _SURPRISE * math.sqrt(scatter * len(self.arrivals_s)):
            return rate
        slope = rise / (seconds / 2) ** 2  # the halves' middles are half a window apart
        return min(max(rate + slope * (seconds / 2 + ahead_s), 0.0), _MOST_RISE * rate)

    def _shorten(self, now_s: float, scatter: float) -> None:
        for short_s in SHORT_S:
            recent_s = now_s - short_s
            before_s = recent_s - self.begin_s
            if before_s <= 0:
                continue
            num_recent = sum(1 for each in self.arrivals_s if each > recent_s)
            part = short_s / max(before_s, short_s)
            expected = (len(self.arrivals_s) - num_recent) * part
            if abs(num_recent - expected) > _SURPRISE * math.sqrt(scatter * (expected + 1) * (1 + part)):
                self.begin_s = recent_s
                break
        self._begin_at(now_s - LONG_S)

    def _begin_at(self, earliest_s: float) -> None:
        """Move the start of the window forward to `earliest_s` if it is earlier, and drop the arrivals before the
        start."""
        self.begin_s = max(self.begin_s, earliest_s)
        while self.arrivals_s and self.arrivals_s[0] <= self.begin_s:
            self.arrivals_s.popleft()


class TrafficWindow:
    """Observes arrivals and ends of requests, and forecasts traffic."""

    def __init__(self) -> None:
        self._classes: dict[int, _ClassWindow] = {}
        self._gaps: deque[float] = deque(maxlen=_KEPT_LENGTHS)
        self.latest_s: float | None = None
        """Time in seconds of the latest arrival; None before the first arrival."""
        self._begun_s = 0.0

    def is_guess(self, now_s: float, patience_s: float) -> bool:
        """Return True while answer lengths are only assumed: no answer has ended yet, and the first request arrived
        less than `patience_s` seconds before `now_s`."""
        is_known = any(window.outputs for window in self._classes.values())
        return not is_known and self.latest_s is not None and now_s - self._begun_s < patience_s

    def arrived(self, now_s: float, num_prompt_tokens: int, most_output_tokens: int = _GUESSED_OUTPUT) -> None:
        """Record the arrival of a request at time `now_s`. `most_output_tokens` is the maximum length of its answer in
        tokens."""
        if self.latest_s is None:
            self._begun_s = now_s
        else:
            self._gaps.append(now_s - self.latest_s)
        self.latest_s = now_s
        window = self._class(num_prompt_tokens)
        window.arrived(now_s)
        window.prompts.append(num_prompt_tokens)
        window.guesses.append(max(min(most_output_tokens, _GUESSED_OUTPUT), 1))

    def ended(self, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0) -> None:
        """Record the end of a request: the length of its prompt and of its answer, and the number of prompt tokens that
        were in the prefix cache."""
        window = self._class(num_prompt_tokens)
        window.outputs.append(num_output_tokens)
        window.cached_shares.append(min(num_cached_tokens / max(num_prompt_tokens, 1), 1.0))

    def longest_output(self, num_prompt_tokens: int) -> int:
        """Return the length in tokens of the longest recent answer to prompts of similar length. If no answer has ended
        yet, return an assumed length."""
        window = self._class(num_prompt_tokens)
        return max(window.outputs or window.guesses, default=_GUESSED_OUTPUT)

    def forecast(self, now_s: float, ahead_s: float = 0.0) -> TrafficForecast:
        """Return the traffic forecast for the time `now_s + ahead_s`, in seconds."""
        gap_scv = self._gap_scv()
        known = [length for window in self._classes.values() for length in window.outputs]
        classes = [
            TrafficClass(
                *(rate, tuple(window.prompts), tuple(window.outputs or known or window.guesses)),
                cached_share=sum(window.cached_shares) / max(len(window.cached_shares), 1),
            )
            for _, window in sorted(self._classes.items())
            if (rate := window.rate(now_s, ahead_s, max(gap_scv, 1.0))) > 0
        ]
        return TrafficForecast(tuple(classes), gap_scv)

    def _class(self, num_tokens: int) -> _ClassWindow:
        return self._classes.setdefault(max(num_tokens, 1).bit_length(), _ClassWindow(self._begun_s))

    def _gap_scv(self) -> float:
        """Return the squared coefficient of variation of the gaps between arrivals; 1, as for Poisson arrivals, until
        enough gaps are known."""
        if len(self._gaps) < _KEPT_LENGTHS // 4:
            return 1.0
        mean = sum(self._gaps) / len(self._gaps)
        variance = sum((gap - mean) ** 2 for gap in self._gaps) / len(self._gaps)
        return min(variance / mean**2, 50.0) if mean > 0 else 1.0
