"""Circuit breakers and the retry budget: failing groups get no work for a while, and retries are bounded.

    CLOSED --too many failures in a row-> OPEN --its pause is over--> HALF_OPEN --one attempt--> PROBING
       ^                                    ^                                                     |   |
       |                                    +---------- it failed: the pause is twice as long ----+   |
       +--------------------------------------------- it went well, or has not failed for a pause ----+

A breaker belongs to one incarnation of a group: a group that was repaired starts with a new breaker. The supervisor
alone decides how fast it repairs a group. Used by `orchestrator.membership.members` and `orchestrator.scheduler`.
Pure; on the loop.
"""

from collections.abc import Collection, Hashable
from enum import Enum

from baton.errors import BatonError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from baton.process.backoff import Backoff
from baton.process.clock import Clock

_PAUSES = Backoff(1.0, 10.0)


class BreakerState(Enum):
    """The work that a group may be given."""

    CLOSED = "closed"
    """The group may be given any work."""
    OPEN = "open"
    """The group is given no work."""
    HALF_OPEN = "half open"
    """The group may be given one attempt, as a probe."""
    PROBING = "probing"
    """The group is given no work while its probe runs."""


class Breaker:
    """Circuit breaker of one incarnation of a group."""

    def __init__(self, clock: Clock, failures_to_open: int, pauses: Backoff) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._pauses = pauses
        self._state = BreakerState.CLOSED
        self._until_s = 0.0
        """Time when OPEN or PROBING ends by itself."""
        self._num_failures = 0
        """Number of failures since the last success."""
        self._num_opened = 0
        """Number of times that the breaker has opened since the last success."""

    @property
    def state(self) -> BreakerState:
        """Return the present state, after any change that is due by now."""
        if self._clock.now_s() >= self._until_s:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
            elif self._state is BreakerState.PROBING:
                self._state = BreakerState.CLOSED  # but with its failures still counted: the next one opens it
        return self._state

    @property
    def left_s(self) -> float:
        """Return the seconds until the state changes by itself; 0 when it will not."""
        left_s = self._until_s - self._clock.now_s()  # read before the state: above 0 if that is still timed
        return left_s if self.state in (BreakerState.OPEN, BreakerState.PROBING) else 0.0

    @property
    def admits(self) -> bool:
        """Return whether the group may be given an attempt now."""
        return self.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    def began(self) -> bool:
        """Record that an attempt begins; return whether it is the probe."""
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self._pause(BreakerState.PROBING)
        return True

    def succeeded(self, *, is_probe: bool) -> None:
        """Record that an attempt succeeded. Only a probe closes an open breaker."""
        if is_probe or self.state is BreakerState.CLOSED:
            self._state = BreakerState.CLOSED
            self._num_failures = self._num_opened = 0

    def failed(self) -> None:
        """Record that an attempt failed. Attempts that began before a pause and fail during it do not prolong it."""
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
    """Breakers of all incarnations of groups that have failed. An incarnation without a breaker counts as closed."""

    def __init__(self, clock: Clock, failures_to_open: int = 5, pauses: Backoff = _PAUSES) -> None:
        """`failures_to_open` is the number of failures in a row that open a breaker. `pauses` are the times for which
        it is open, by how often it has opened since the last success."""
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._pauses = pauses
        self._breakers: dict[Hashable, Breaker] = {}

    def of(self, incarnation: Hashable) -> Breaker:
        """Return the breaker of this incarnation. If there is none, return a closed breaker, which is not kept."""
        return self._breakers.get(incarnation) or Breaker(self._clock, self._failures_to_open, self._pauses)

    def admits(self, incarnation: Hashable) -> bool:
        """Return whether this incarnation of a group may be given an attempt now."""
        breaker = self._breakers.get(incarnation)
        return breaker is None or breaker.admits

    def failed(self, incarnation: Hashable) -> None:
        """Record that an attempt at this incarnation of a group failed."""
        self._breakers.setdefault(incarnation, self.of(incarnation)).failed()

    def keep(self, incarnations: Collection[Hashable]) -> None:
        """Forget the breakers of all incarnations except these."""
        for incarnation in self._breakers.keys() - set(incarnations):
            del self._breakers[incarnation]

    def __len__(self) -> int:
        """Return the number of incarnations that have failed since they began."""
        return len(self._breakers)


def tells_of_the_group(error: BatonError) -> bool:
    """Return whether a failure may be the fault of the attempt's group, and not only of the request or the load."""
    return not isinstance(error, InvalidArgumentError | NotFoundError | ResourceExhaustedError)


class RetryBudget:
    """Bounds how fast attempts may be retried, over all requests: by a share of the requests that come, and a burst.

    The burst covers a group's death: every stream that the group had is retried at once, and none is lost. Retries
    beyond it wait, so that failures cost the other requests a bounded part of the capacity. It is a token bucket whose
    tokens may be borrowed: a retry that takes a token in advance gets the time to wait for it.
    """

    def __init__(self, clock: Clock, *, share: float = 0.2, burst: int = 100, window_s: float = 10.0) -> None:
        """`share`: retries that each request earns. `burst`: least number of retries at once. An empty bucket is full
        again within `window_s` seconds."""
        self._clock = clock
        self._share = share
        self._least = float(burst)
        self._window_s = window_s
        self._burst = self._left = self._least
        self._at_s = clock.now_s()

    def resize(self, num_slots: int) -> None:
        """Set the burst to the streams that may run, and so fail together, if that is above its least number."""
        self._refill()
        added = max(float(num_slots), self._least) - self._burst
        self._burst += added
        self._left = min(self._left + max(added, 0.0), self._burst)

    def earn(self) -> None:
        """Record that a request has come, which earns a share of a retry."""
        self._refill()
        self._left = min(self._left + self._share, self._burst)

    def take(self, longest_s: float) -> float | None:
        """Take a retry; return the seconds to wait for it. Returns None, taking none, above `longest_s`."""
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
