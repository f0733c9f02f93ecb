"""When a request will have its first token if it is taken now: what deadlines are refused by, and retry hints made of.

Two waits, one after the other:

    for slots    those that are served before it, and it, need so many more slots than are free; slots come free as
                 fast as they did of late while somebody waited for one (`Turnover`), whatever limits that; before that
                 is known, all of them once in the mean time that requests keep theirs (Little, 1961)
    for prefill  its own chain, the jobs that the ranks have before them included, or its generation group's own
                 prefill, as `orchestrator.placement.chooser` would place it now; times as long as that took of late,
                 over what was predicted (`Correction`): the books may be fuller when its turn comes, what workers
                 share, and what a request costs besides its tokens, nobody predicts. So long that one in forty takes
                 longer: under overload whoever is taken is near its deadline, and by a mean half of them would be late

What nobody can know: how much the requests in between will say (so planning.step_times, seconds a step, are no help
here), who comes later and is more urgent or due earlier, that workers fail. Until a request has ended, how long one
keeps its slot is unknown, and the first wait counts as nothing. That wait is a mean: who refuses by it makes allowance
for scatter. Step 2 of a request's way (DESIGN.md, section 4). Pure.
"""

import math

from orchestrator.membership.members import Members
from orchestrator.placement.chooser import Chooser
from orchestrator.requests.record import RequestRecord

_KEPT = 0.95
_ONE_IN_FORTY = 1.960
"""Standard deviations above the mean, where deviations are normal."""
_MOST_LATE = 3.0
"""How late a request counts at most, in corrected predictions: one that hung says little of the next."""


class Turnover:
    """How fast slots come free while somebody waits for one. Of the latest ends: each counts 5 % less than the one
    after it, so that the mean rests on some forty, and scatters by a sixth if they come at random."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_slots = 0.0
        self._since_s: float | None = None
        """When the latest slot came free, or the waiting began; None while nobody waits."""

    @property
    def slot_s(self) -> float | None:
        """Mean seconds from one free slot to the next; None before one has come free."""
        return self._seconds / self._num_slots if self._num_slots else None

    def freed(self, num_slots: int, now_s: float) -> None:
        """A request has ended."""
        if self._since_s is None:
            return
        self._seconds = _KEPT * self._seconds + now_s - self._since_s
        self._num_slots = _KEPT * self._num_slots + num_slots
        self._since_s = now_s

    def waited_for(self, somebody_waits: bool, now_s: float) -> None:
        """Whether, from now on, there is somebody who would run if there were a slot."""
        if not somebody_waits:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s


class Correction:
    """What prefill took of late, over what was predicted of it, and how that scatters. Of the latest requests, as in
    Turnover; at first as if a second had been predicted, and taken, so that one odd request does not say it all."""

    def __init__(self) -> None:
        self._predicted_s = 1.0
        self._measured_s = 1.0
        self._squares = 1.0
        """Of predictions."""
        self._square_delays = 0.0
        """Of how much longer it took than they said, corrected; what took less makes nobody late."""

    @property
    def factor(self) -> float:
        """By which a prediction is to be multiplied."""
        return self._measured_s / self._predicted_s

    @property
    def cautious_factor(self) -> float:
        """Likewise, if only one request in forty shall take longer."""
        return self.factor + _ONE_IN_FORTY * math.sqrt(2 * self._square_delays / self._squares)  # half of all are late

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A request had its first token so long after its turn came, or none in all that time."""
        corrected_s = self.factor * predicted_s
        delay_s = min(max(measured_s - corrected_s, 0.0), _MOST_LATE * corrected_s)
        self._squares = _KEPT * self._squares + predicted_s**2
        self._square_delays = _KEPT * self._square_delays + delay_s**2
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._measured_s = _KEPT * self._measured_s + measured_s


def predict_wait_s(num_free: int, num_before: float, num_needed: int, slot_s: float | None) -> float:
    """Seconds until `num_needed` slots are free beyond the `num_before` that others get first, when one comes free
    every `slot_s` seconds; `num_free` is less than none where slots went while they were in use."""
    num_missing = num_before + num_needed - num_free
    return 0.0 if num_missing <= 0 or slot_s is None else num_missing * slot_s


class ChainForecast:
    """What prefill takes that is placed now. Asks the planner: some tenths of a millisecond a call."""

    def __init__(self, members: Members, chooser: Chooser) -> None:
        self._members = members
        self._chooser = chooser
        self._correction = Correction()

    def chain_s(self, request: RequestRecord) -> float:
        """Seconds in which 39 of forty such requests have their first token, once they have their slots, as
        things are, what is cached included; 0 where nothing is known of whoever would prefill. The request keeps what
        was predicted."""
        request.forecast_s = self._chooser.predict_s(request)
        return request.forecast_s * self._correction.cautious_factor

    def ended(self, request: RequestRecord, finished_ns: int) -> None:
        """What became of a request; tells of predictions if it was predicted, got its slots, and had one attempt only.
        One that ended without a token would have taken longer: that tells something if it was too long already."""
        if not request.forecast_s or not request.leased_ns or request.attempt > 1:
            return
        took_s = ((request.first_seen_ns or finished_ns) - request.admitted_ns) / 1e9
        if request.first_seen_ns or took_s > request.forecast_s * self._correction.factor:
            self._correction.observe(request.forecast_s, took_s)
