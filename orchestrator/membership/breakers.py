"""Circuit breakers and the retry budget: failing groups get no work for a while, and the rate of retries is limited.

    CLOSED --too many failures in a row-> OPEN --pause ends--> HALF_OPEN --one attempt starts--> PROBING
       ^                                    ^                                                     |   |
       |                                    +---------- attempt failed: the pause doubles --------+   |
       +-------------------------- attempt succeeded, or has not failed for the length of a pause ----+

A breaker belongs to one incarnation of a group. A group that was repaired or replaced is a new incarnation and starts
with a new breaker. Breakers have no influence on repairs, which are made by the supervisor. Used by
`orchestrator.membership.members` and `orchestrator.scheduler`. Does no I/O. Runs on the event loop.
"""

from collections.abc import Collection, Hashable
from enum import Enum

from baton.errors import BatonError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from baton.process.backoff import Backoff
from baton.process.clock import Clock

_PAUSES = Backoff(1.0, 10.0)


class BreakerState(Enum):
    """State of a group's circuit breaker. The state decides whether the group may get work."""

    CLOSED = "closed"
    """The group may get any work."""
    OPEN = "open"
    """The group gets no work."""
    HALF_OPEN = "half open"
    """The pause has ended. The group may get one attempt, called the probe."""
    PROBING = "probing"
    """The probe, i.e. the single attempt that is allowed after a pause, is running. The group gets no other work."""


class Breaker:
    """Circuit breaker of one incarnation of a group. It stops new attempts on the group after too many consecutive
    failures."""

    def __init__(self, clock: Clock, failures_to_open: int, pauses: Backoff) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._pauses = pauses
        self._state = BreakerState.CLOSED
        self._until_s = 0.0
        """Time in seconds at which the state OPEN or PROBING ends if no event ends it earlier."""
        self._num_failures = 0
        """Number of failures since the last success."""
        self._num_opened = 0
        """Number of times that the breaker has opened since the last success."""

    @property
    def state(self) -> BreakerState:
        """Return the present state, after applying any transition that is due."""
        if self._clock.now_s() >= self._until_s:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
            elif self._state is BreakerState.PROBING:
                self._state = BreakerState.CLOSED  # failures stay counted: the next one opens it
        return self._state

    @property
    def left_s(self) -> float:
        """Return the seconds until the state changes by the passage of time. Return 0 if only an event can change
        it."""
        left_s = self._until_s - self._clock.now_s()  # read first: the state may change in between
        return left_s if self.state in (BreakerState.OPEN, BreakerState.PROBING) else 0.0

    @property
    def admits(self) -> bool:
        """Return True if the group may start an attempt now."""
        return self.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    def began(self) -> bool:
        """Record that an attempt begins. Return True if the attempt is the probe, i.e. the single attempt that is
        allowed after a pause."""
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self._pause(BreakerState.PROBING)
        return True

    def succeeded(self, *, is_probe: bool) -> None:
        """Record that an attempt succeeded: close the breaker, and reset its counts of failures. If the breaker is not
        closed, only the success of the probe (the single attempt after a pause) has this effect. `is_probe` is the
        value that `began` returned for the attempt."""
        if is_probe or self.state is BreakerState.CLOSED:
            self._state = BreakerState.CLOSED
            self._num_failures = self._num_opened = 0

    def failed(self) -> None:
        """Record that an attempt failed. A failure while the breaker is open does not prolong its pause."""
        state = self.state
        self._num_failures += 1
        has_failed_enough = state is BreakerState.CLOSED and self._num_failures >= self._failures_to_open
        if has_failed_enough or state is BreakerState.PROBING:
            self._num_opened += 1
            self._pause(BreakerState.OPEN)

    def _pause(self, state: BreakerState) -> None:
        self._state = state
        self._until_s = self._clock.now_s() + self._pauses.after(self._num_opened)


class Breakers:
    """Circuit breakers of all group incarnations that have failed at least once. An incarnation without an entry counts
    as closed, i.e. it may get work."""

    def __init__(self, clock: Clock, failures_to_open: int = 5, pauses: Backoff = _PAUSES) -> None:
        """Create a collection without breakers. A breaker opens after `failures_to_open` consecutive failures. `pauses`
        gives the time for which a breaker stays open. This time grows each time the breaker opens again before an
        attempt succeeds."""
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._pauses = pauses
        self._breakers: dict[Hashable, Breaker] = {}

    def of(self, incarnation: Hashable) -> Breaker:
        """Return the breaker of this incarnation of a group. If the incarnation has no breaker, return a new closed one
        without storing it."""
        return self._breakers.get(incarnation) or Breaker(self._clock, self._failures_to_open, self._pauses)

    def admits(self, incarnation: Hashable) -> bool:
        """Return True if this incarnation of a group may start an attempt at a request now."""
        breaker = self._breakers.get(incarnation)
        return breaker is None or breaker.admits

    def failed(self, incarnation: Hashable) -> None:
        """Record that an attempt at a request failed because of this incarnation of a group."""
        self._breakers.setdefault(incarnation, self.of(incarnation)).failed()

    def keep(self, incarnations: Collection[Hashable]) -> None:
        """Delete the breakers of all incarnations except those in `incarnations`."""
        for incarnation in self._breakers.keys() - set(incarnations):
            del self._breakers[incarnation]

    def __len__(self) -> int:
        """Return the number of incarnations that have a breaker, i.e. that have failed at least once."""
        return len(self._breakers)


def tells_of_the_group(error: BatonError) -> bool:
    """Return True if the group may have caused the error; False if the error concerns only the request or the load."""
    return not isinstance(error, InvalidArgumentError | NotFoundError | ResourceExhaustedError)


class RetryBudget:
    """Limits the rate of retries over all requests.

    The budget is a number of retries. It grows with time, and by a fraction of a retry with each arriving request, up
    to its capacity, which `resize` sets. The capacity is large enough for the failure of one group, when all its
    streams are retried together. Further retries must wait, so that they do not crowd out other requests.

    Implemented as a token bucket whose level may become negative. A retry that finds the bucket empty is still counted,
    but must wait until the bucket has been refilled for it.
    """

    def __init__(self, clock: Clock, *, share: float = 0.2, burst: int = 100, window_s: float = 10.0) -> None:
        """Create a full budget of `burst` retries. `burst` is the capacity until `resize` is called, and the minimum
        capacity later. Each arriving request adds `share` retries (a fraction of one) to the budget. Even without
        requests, an empty budget is full again after `window_s` seconds."""
        self._clock = clock
        self._share = share
        self._least = float(burst)
        self._window_s = window_s
        self._burst = self._left = self._least
        self._at_s = clock.now_s()

    def resize(self, num_slots: int) -> None:
        """Set the capacity of the budget to `num_slots` retries: one for each slot, because all streams may fail
        together. If `num_slots` is below the minimum capacity, set the minimum capacity."""
        self._refill()
        added = max(float(num_slots), self._least) - self._burst
        self._burst += added
        self._left = min(self._left + max(added, 0.0), self._burst)

    def earn(self) -> None:
        """Record the arrival of a request. Each arrival adds a fraction of a retry to the budget."""
        self._refill()
        self._left = min(self._left + self._share, self._burst)

    def take(self, longest_s: float) -> float | None:
        """Take one retry from the budget, and return the number of seconds to wait before making it. If the wait would
        exceed `longest_s` seconds, take nothing and return None."""
        self._refill()
        wait_s = max(1.0 - self._left, 0.0) * self._window_s / self._burst
        if wait_s > longest_s:
            return None
        self._left -= 1.0
        return wait_s

    def _refill(self) -> None:
        now_s = self._clock.now_s()
        self._left = min(self._left + (now_s - self._at_s) * self._burst / self._window_s, self._burst)
        self._at_s = now_s
