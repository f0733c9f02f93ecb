"""Forecasts traffic: how many requests of which lengths come a second, as distributions.

Requests are sorted into classes by prompt length, each class twice as long as the one before it. The rate of a class is
counted over a window. The window restarts when the last few seconds differ from it by more than chance, so a change is
recognized within seconds, and scatter is averaged out. Output lengths are kept by class for a long time, so that they
are known at once when traffic returns. If the rate of a class rises or falls steadily, its line is extrapolated to the
forecast's instant. Pure; owned by one autoscaler.
"""

import math
from collections import deque
from dataclasses import dataclass

SHORT_S = (2.0, 4.0, 8.0)
"""Numbers of latest seconds that are compared with the window before them."""
LONG_S = 60.0
"""Longest window over which a rate is counted."""
_SURPRISE = 3.5
"""Standard deviations of a count beyond which a difference is a change of rate and not chance."""
_KEPT_LENGTHS = 256
"""Latest lengths kept of each class."""
_GUESSED_OUTPUT = 256
"""Tokens of an answer that are assumed before any request has ended, unless fewer were asked for."""
_MOST_RISE = 2.0
"""Largest factor by which a forecast may exceed the present rate."""


@dataclass(frozen=True)
class TrafficClass:
    """The forecast for requests of similar prompt length."""

    rate: float
    """Requests of the class a second."""
    prompts: tuple[int, ...]
    """Prompt lengths in tokens, each as likely as the others."""
    outputs: tuple[int, ...]
    """Lengths of answers in tokens, each as likely as the others."""
    cached_share: float = 0.0
    """Part of a prompt's tokens whose KV is cached, on average."""


@dataclass(frozen=True)
class TrafficForecast:
    """The traffic that is expected."""

    classes: tuple[TrafficClass, ...] = ()
    gap_scv: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals; 1 for Poisson arrivals."""

    @property
    def rate(self) -> float:
        """Return the requests a second, of all classes."""
        return sum(each.rate for each in self.classes)


class _ClassWindow:
    """Arrivals and lengths of one class."""

    def __init__(self, now_s: float) -> None:
        self.begin_s = now_s
        self.arrivals_s: deque[float] = deque()
        self.prompts: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        self.outputs: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        self.cached_shares: deque[float] = deque(maxlen=_KEPT_LENGTHS)
        self.guesses: deque[int] = deque(maxlen=_KEPT_LENGTHS)
        """Lengths of answers that are assumed as long as none is known."""

    def arrived(self, now_s: float) -> None:
        """Record an arrival, and drop arrivals that are too old for any forecast."""
        self.arrivals_s.append(now_s)
        self._begin_at(now_s - LONG_S)

    def rate(self, now_s: float, ahead_s: float, scatter: float) -> float:
        """Return the rate `ahead_s` from now; `scatter` is the variance of counts by their mean."""
        self._shorten(now_s, scatter)
        seconds = max(now_s - self.begin_s, 1.0)
        rate = len(self.arrivals_s) / seconds
        middle_s = now_s - seconds / 2
        num_late = sum(1 for each in self.arrivals_s if each > middle_s)
        rise = 2 * num_late - len(self.arrivals_s)
        if seconds < LONG_S / 2 or abs(rise) < _SURPRISE * math.sqrt(scatter * len(self.arrivals_s)):
            return rate
        slope = rise / (seconds / 2) ** 2  # the middles of the window's halves are half a window apart
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
        """Let the window begin at that instant at the earliest."""
        self.begin_s = max(self.begin_s, earliest_s)
        while self.arrivals_s and self.arrivals_s[0] <= self.begin_s:
            self.arrivals_s.popleft()


class TrafficWindow:
    """Observes requests as they come and end, and forecasts those to come."""

    def __init__(self) -> None:
        self._classes: dict[int, _ClassWindow] = {}
        self._gaps: deque[float] = deque(maxlen=_KEPT_LENGTHS)
        self.latest_s: float | None = None
        """Time of the latest arrival; None before the first."""
        self._begun_s = 0.0

    def is_guess(self, now_s: float, patience_s: float) -> bool:
        """Return whether no answer has ended yet, and the first request came less than `patience_s` seconds ago."""
        is_known = any(window.outputs for window in self._classes.values())
        return not is_known and self.latest_s is not None and now_s - self._begun_s < patience_s

    def arrived(self, now_s: float, num_prompt_tokens: int, most_output_tokens: int = _GUESSED_OUTPUT) -> None:
        """Record a request that has come; `most_output_tokens` bounds its answer."""
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
        """Record the length of an answer, and how much of its prompt was cached."""
        window = self._class(num_prompt_tokens)
        window.outputs.append(num_output_tokens)
        window.cached_shares.append(min(num_cached_tokens / max(num_prompt_tokens, 1), 1.0))

    def longest_output(self, num_prompt_tokens: int) -> int:
        """Return the longest of the latest output lengths for prompts of about that length, in tokens; an assumed
        length before any is known."""
        window = self._class(num_prompt_tokens)
        return max(window.outputs or window.guesses, default=_GUESSED_OUTPUT)

    def forecast(self, now_s: float, ahead_s: float = 0.0) -> TrafficForecast:
        """Return the traffic expected `ahead_s` seconds from now."""
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
        """Return the variation of gaps; that of Poisson arrivals until enough are known."""
        if len(self._gaps) < _KEPT_LENGTHS // 4:
            return 1.0
        mean = sum(self._gaps) / len(self._gaps)
        variance = sum((gap - mean) ** 2 for gap in self._gaps) / len(self._gaps)
        return min(variance / mean**2, 50.0) if mean > 0 else 1.0
