"""Predicts when a request that is admitted now will have its first token, for refusals by deadline and for retry hints.

The prediction adds two waits:

    for slots    time until the request, and all requests served before it, have slots. Slots are assumed to come free
                 at the rate of late while a request waited for one (`Turnover`). Before that rate is known, all slots
                 are assumed to come free once in the mean time that requests keep theirs (Little, 1961), or at once
    for prefill  its own chain, including the jobs that the ranks have before them, or its generation group's own
                 prefill, as `orchestrator.placement.chooser` would place it now; times the ratio of measured to
                 predicted time of late (`Correction`), raised so that one request in forty takes longer

Unknown are the number of tokens that the requests in between will generate (so baton.planning.step_times do not help
here), later requests that are more urgent or due earlier, and failures of workers. The wait for slots is a mean: a
caller that refuses by it allows for scatter. Used by `orchestrator.admission.gate` and `orchestrator.scheduler`. Pure.
"""

import math

from orchestrator.placement.chooser import Chooser
from orchestrator.requests.record import RequestRecord

_KEPT = 0.95
_ONE_IN_FORTY = 1.960
"""Standard deviations above the mean of a normal distribution that one value in forty exceeds."""
_MOST_LATE = 3.0
"""Largest delay that counts, in corrected predictions: a request that hung says little about the next one."""

_MOST_SLOW = 32.0
"""Largest factor by which one request may count as slower than predicted. It limits the effect of a hanging request."""


class Turnover:
    """Measures how fast slots come free while a request waits for one.

    Rests on the latest ends: each counts 5 % less than the one after it, so that the mean rests on some forty, and
    scatters by a sixth if they come at random.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_slots = 0.0
        self._since_s: float | None = None
        """Time when the latest slot came free, or when waiting began; None while no request waits."""

    @property
    def slot_s(self) -> float | None:
        """Return the mean seconds from one free slot to the next; None before one has come free."""
        return self._seconds / self._num_slots if self._num_slots else None

    def freed(self, num_slots: int, now_s: float) -> None:
        """Record that a request has ended and freed its slots."""
        if self._since_s is None:
            return
        self._seconds = _KEPT * self._seconds + now_s - self._since_s
        self._num_slots = _KEPT * self._num_slots + num_slots
        self._since_s = now_s

    def waited_for(self, somebody_waits: bool, now_s: float) -> None:
        """Record whether, from now on, some request would run if there were a slot."""
        if not somebody_waits:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s


class Correction:
    """The ratio of measured to predicted prefill time of late, and its scatter.

    Rests on the latest requests, weighted as in `Turnover`. Begins as if one second had been predicted and measured, so
    that one odd request does not decide alone.
    """

    def __init__(self) -> None:
        self._predicted_s = 1.0
        self._measured_s = 1.0
        self._squares = 1.0
        """Decayed sum of the predictions' squares."""
        self._square_delays = 0.0
        """Decayed sum of the squares of delays beyond the corrected predictions; being early counts as 0."""

    @property
    def factor(self) -> float:
        """Return the factor by which a prediction is to be multiplied."""
        return self._measured_s / self._predicted_s

    @property
    def cautious_factor(self) -> float:
        """Return the factor for a prediction if only one request in forty shall take longer."""
        # twice the sum of squares, because only the late half of the requests adds to it
        return self.factor + _ONE_IN_FORTY * math.sqrt(2 * self._square_delays / self._squares)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Record a request's measured seconds from leaving the queue to its first token, or to its end without one."""
        measured_s = min(measured_s, _MOST_SLOW * predicted_s)
        corrected_s = self.factor * predicted_s
        delay_s = min(max(measured_s - corrected_s, 0.0), _MOST_LATE * corrected_s)
        self._squares = _KEPT * self._squares + predicted_s**2
        self._square_delays = _KEPT * self._square_delays + delay_s**2
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._measured_s = _KEPT * self._measured_s + measured_s


def predict_wait_s(num_free: int, num_before: float, num_needed: int, slot_s: float | None) -> float:
    """Return the seconds until `num_needed` slots are free beyond the `num_before` that other requests get first.

    One slot comes free every `slot_s` seconds; None counts as no wait. `num_free` is negative where slots were removed
    while in use.
    """
    num_missing = num_before + num_needed - num_free
    return 0.0 if num_missing <= 0 or slot_s is None else num_missing * slot_s


class ChainForecast:
    """Predicts the prefill time of a request that is placed now. A call takes as long as a choice of groups."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._correction = Correction()

    def predict_s(self, record: RequestRecord) -> float:
        """Return the predicted seconds from a request's slots to its first token, not corrected, for the present state,
        cached prefixes included; 0 if the workers that would prefill are unknown."""
        return self._chooser.predict_s(record)

    def cautious_s(self, predicted_s: float) -> float:
        """Return the seconds within which 39 of 40 requests with this prediction have their first token."""
        return predicted_s * self._correction.cautious_factor

    def ended(self, record: RequestRecord, predicted_s: float, finished_s: float) -> None:
        """Correct later predictions by a request that ended at `finished_s`, and for which this was predicted.

        Counts only a request that was predicted, got its slots and had one attempt. One that ended without a token
        would have taken longer, so it counts only if it had already taken longer than predicted.
        """
        if not predicted_s or record.attempt.leased_s is None or record.attempt.number > 1:
            return
        has_token = record.first_seen_s is not None
        took_s = (finished_s if record.first_seen_s is None else record.first_seen_s) - record.admitted_s
        if has_token or took_s > predicted_s * self._correction.factor:
            self._correction.observe(predicted_s, took_s)
