"""Predicts when a request that is admitted now gets its first token. The prediction is used to refuse requests that
would miss their deadline, and for retry hints.

The prediction is the sum of two waits:

    for slots    Time until the request, and all requests served before it, have slots. Slots are assumed to become
                 free at the recent rate, measured while a request waited for one (`Turnover`). Before that rate is
                 known, it is computed from the mean duration for which requests hold their slots (Little, 1961).
                 Before that duration is known, the wait is 0.
    for prefill  Prefill time on the workers that `orchestrator.placement.chooser` would select now: a chain (prefill
                 ranks that share a prompt), including unfinished jobs on its ranks, or the generation group itself. The
                 time is multiplied by the recent ratio of measured to predicted time (`Correction`), plus a margin. The
                 margin is so large that only one request in forty takes longer.

The prediction does not consider how many tokens the earlier requests will generate, so the costs of steps are not
used. It considers neither later requests that are more urgent or due earlier, nor failures of workers. The wait for
slots is a mean, so a caller that refuses requests because of this wait must allow for variance. Used by
`orchestrator.admission.gate` and `orchestrator.scheduler`. Does no I/O.
"""

import math

from orchestrator.placement.chooser import Chooser
from orchestrator.requests.record import RequestRecord

_KEPT = 0.95
_ONE_IN_FORTY = 1.960
"""Threshold that one value in forty of a normal distribution exceeds. It is given in standard deviations above the
mean."""
_MOST_LATE = 3.0
"""Limit on the delay (measured time minus corrected prediction) that is recorded for a request, as a multiple of the
corrected prediction. Due to this limit, a request that hung has little effect on later predictions."""

_MOST_SLOW = 32.0
"""Limit on the measured prefill time that is recorded for a request, as a multiple of the predicted prefill time. Due
to this limit, a request that hung has little effect on later predictions."""


class Turnover:
    """Measures how fast slots become free while a request waits for one.

    The latest ends of requests have the most weight: the weight of an end falls by 5 % with each later end. The mean is
    therefore based on about forty ends. If requests end at random times, the standard deviation of this mean is about a
    sixth of the mean.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_slots = 0.0
        self._since_s: float | None = None
        """Start of the present measurement: the time when a slot last became free, or when the present wait for a slot
        began, whichever is later. None while no request waits."""

    @property
    def slot_s(self) -> float | None:
        """Return the mean number of seconds between two slots that become free; None before the first measurement."""
        return self._seconds / self._num_slots if self._num_slots else None

    def freed(self, num_slots: int, now_s: float) -> None:
        """Record that a request has ended and has freed `num_slots` slots. Does nothing if no request waits for a
        slot."""
        if self._since_s is None:
            return
        self._seconds = _KEPT * self._seconds + now_s - self._since_s
        self._num_slots = _KEPT * self._num_slots + num_slots
        self._since_s = now_s

    def waited_for(self, somebody_waits: bool, now_s: float) -> None:
        """Record whether a request waits for free slots, at the time `now_s` in seconds. The state is assumed to last
        until the next call. `somebody_waits`: True if a request waits, and the only reason is that too few slots are
        free."""
        if not somebody_waits:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s


class Correction:
    """Recent ratio of measured to predicted prefill time, and its variance.

    The latest requests have the most weight, as in `Turnover`. The sums start as if there had been one request with a
    predicted and a measured time of one second, so that a single unusual request has little effect.
    """

    def __init__(self) -> None:
        self._predicted_s = 1.0
        self._measured_s = 1.0
        self._squares = 1.0
        """Sum of the squares of the predicted seconds of past requests. Earlier requests have less weight."""
        self._square_delays = 0.0
        """Sum of the squares of the delays. Earlier requests have less weight. A delay is max(measured - corrected
        prediction, 0) seconds."""

    @property
    def factor(self) -> float:
        """Return the factor that corrects a prediction: the recent ratio of measured to predicted time."""
        return self._measured_s / self._predicted_s

    @property
    def cautious_factor(self) -> float:
        """Return the factor by which a prediction must be multiplied so that only one request in forty takes longer."""
        # times 2, because only the late half of the requests contributes to the sum
        return self.factor + _ONE_IN_FORTY * math.sqrt(2 * self._square_delays / self._squares)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Record the predicted and the measured prefill time of a request. The measured time begins when the request
        leaves the queue. It ends with the first token or, if there was none, at the end of the request."""
        measured_s = min(measured_s, _MOST_SLOW * predicted_s)
        corrected_s = self.factor * predicted_s
        delay_s = min(max(measured_s - corrected_s, 0.0), _MOST_LATE * corrected_s)
        self._squares = _KEPT * self._squares + predicted_s**2
        self._square_delays = _KEPT * self._square_delays + delay_s**2
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._measured_s = _KEPT * self._measured_s + measured_s


def predict_wait_s(num_free: int, num_before: float, num_needed: int, slot_s: float | None) -> float:
    """Return the predicted number of seconds until a request has `num_needed` slots. Other requests get `num_before`
    slots first.

    `slot_s` is the mean number of seconds between two slots that become free. None: this number is unknown, and the
    result is 0. `num_free` is the number of slots that are free now. It is negative if slots were removed from the
    cluster while requests were using them.
    """
    num_missing = num_before + num_needed - num_free
    return 0.0 if num_missing <= 0 or slot_s is None else num_missing * slot_s


class ChainForecast:
    """Predicts the prefill time of a request on the workers that would be selected for it now: a prefill chain, or a
    generation group. A call of `predict_s` costs as much time as selecting the workers."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._correction = Correction()

    def predict_s(self, record: RequestRecord) -> float:
        """Return the predicted number of seconds from the time when a request gets slots to its first token, under the
        present load of the workers. Cached prefixes are taken into account. The correction by recent results is not
        applied. Returns 0 if no prediction is possible."""
        return self._chooser.predict_s(record)

    def cautious_s(self, predicted_s: float) -> float:
        """Return the number of seconds within which 39 of 40 requests get their first token, if their predicted time is
        `predicted_s`."""
        return predicted_s * self._correction.cautious_factor

    def ended(self, record: RequestRecord, predicted_s: float, finished_s: float) -> None:
        """Correct later predictions by the result of a request. `predicted_s` is the request's predicted prefill time
        in seconds, and `finished_s` is the time at which the request ended.

        Ignores requests without a prediction or without slots, and requests with more than one attempt. If a request
        ended without a token, its full prefill time is unknown. Such a request is counted only if it had already run
        longer than its corrected prediction.
        """
        if not predicted_s or record.attempt.leased_s is None or record.attempt.number > 1:
            return
        has_token = record.first_seen_s is not None
        took_s = (finished_s if record.first_seen_s is None else record.first_seen_s) - record.admitted_s
        if has_token or took_s > predicted_s * self._correction.factor:
            self._correction.observe(predicted_s, took_s)
