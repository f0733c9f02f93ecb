"""Circuit breakers and the retry budget: what fails does not get work again and again, and failures make no storm.

    CLOSED --so many failures in a row--> OPEN --its pause is over--> HALF_OPEN --one attempt--> PROBING
       ^                                    ^                                                     |   |
       |                                    +---------- it failed: the pause is twice as long ----+   |
       +--------------------------------------------- it went well, or has not failed for a pause ----+

A breaker is of one life of a group: a group that was repaired starts anew, and how fast its supervisor does that is a
matter of its own. Step 3 of a request's way (DESIGN.md, section 4). Pure; on the loop.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from enum import Enum

from baton.clock import Clock
from baton.errors import BatonError, InvalidArgumentError, NotFoundError, ResourceExhaustedError


class BreakerState(Enum):
    """What a group may be given."""

    CLOSED = "closed"
    """Work."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half open"
    """One attempt, to see."""
    PROBING = "probing"
    """Nothing: that attempt runs."""


@dataclass(frozen=True)
class BreakerPolicy:
    """When breakers open, and for how long."""

    num_failures: int = 5
    """In a row."""
    pause_s: float = 1.0
    """The first; each that follows without a success in between is twice as long."""
    longest_s: float = 10.0

    def nth_pause_s(self, num_opened: int) -> float:
        """Of the pause of that number, from 1."""
        return float(min(self.pause_s * 2 ** min(num_opened - 1, 32), self.longest_s))


class Breaker:
    """Of one life of a group."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._state = BreakerState.CLOSED
        self._until_s = 0.0
        """When OPEN or PROBING ends by itself."""
        self._num_failures = 0
        """Since the last success."""
        self._num_opened = 0
        """Likewise."""

    def state(self, now_s: float) -> BreakerState:
        """As of now."""
        if now_s >= self._until_s:
            if self._state is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
            elif self._state is BreakerState.PROBING:
                self._state = BreakerState.CLOSED  # on parole: the next failure opens it
        return self._state

    def left_s(self, now_s: float) -> float:
        """Seconds until it changes by itself; 0 when it will not."""
        is_timed = self.state(now_s) in (BreakerState.OPEN, BreakerState.PROBING)
        return self._until_s - now_s if is_timed else 0.0

    def began(self, now_s: float) -> bool:
        """An attempt begins; returns whether it is the probe."""
        if self.state(now_s) is not BreakerState.HALF_OPEN:
            return False
        self._state = BreakerState.PROBING
        self._until_s = now_s + self._policy.nth_pause_s(self._num_opened)
        return True

    def succeeded(self, now_s: float, *, is_probe: bool) -> None:
        """An attempt went well to its end. One from before a pause says nothing about what comes after it."""
        if is_probe or self.state(now_s) is BreakerState.CLOSED:
            self._state = BreakerState.CLOSED
            self._num_failures = self._num_opened = 0

    def failed(self, now_s: float) -> None:
        """An attempt failed here. Those that began before a pause, and fail in it, do not make it longer."""
        state = self.state(now_s)
        self._num_failures += 1
        has_failed_enough = state is BreakerState.CLOSED and self._num_failures >= self._policy.num_failures
        if has_failed_enough or state is BreakerState.PROBING:
            self._num_opened += 1
            self._state = BreakerState.OPEN
            self._until_s = now_s + self._policy.nth_pause_s(self._num_opened)


class Breakers:
    """A breaker for each life of a group that has failed; those without one are closed."""

    def __init__(self, clock: Clock, policy: BreakerPolicy | None = None) -> None:
        self._clock = clock
        self._policy = policy or BreakerPolicy()
        self._breakers: dict[Hashable, Breaker] = {}

    def state(self, life: Hashable) -> BreakerState:
        """As of now."""
        breaker = self._breakers.get(life)
        return BreakerState.CLOSED if breaker is None else breaker.state(self._clock.now_s())

    def admits(self, life: Hashable) -> bool:
        """Whether the group may be given an attempt."""
        return self.state(life) in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    def left_s(self, life: Hashable) -> float:
        """Seconds until that changes by itself; 0 when it will not."""
        breaker = self._breakers.get(life)
        return 0.0 if breaker is None else breaker.left_s(self._clock.now_s())

    def began(self, life: Hashable) -> bool:
        """As `Breaker.began`."""
        breaker = self._breakers.get(life)
        return breaker is not None and breaker.began(self._clock.now_s())

    def succeeded(self, life: Hashable, *, is_probe: bool) -> None:
        """As `Breaker.succeeded`."""
        breaker = self._breakers.get(life)
        if breaker is not None:
            breaker.succeeded(self._clock.now_s(), is_probe=is_probe)

    def failed(self, life: Hashable) -> None:
        """As `Breaker.failed`."""
        self._breakers.setdefault(life, Breaker(self._policy)).failed(self._clock.now_s())

    def keep(self, lives: Collection[Hashable]) -> None:
        """Forgets all lives but these."""
        for life in self._breakers.keys() - set(lives):
            del self._breakers[life]

    def __len__(self) -> int:
        """How many lives have failed since they began."""
        return len(self._breakers)


def tells_of_the_group(error: BatonError) -> bool:
    """Whether an attempt's failure says something about where it ran, and not about the request or the load."""
    return not isinstance(error, InvalidArgumentError | NotFoundError | ResourceExhaustedError)


class RetryBudget:
    """How fast attempts may be repeated, over all requests: a share of the requests that come, and a burst.

    The burst is what a group's death takes: every stream that it had is tried again, at once, and none is lost. What
    exceeds it waits, so that failures cost the other requests a bounded part of what there is. A token bucket whose
    tokens may be owed: whoever is promised one that is not there yet is told how long to wait for it.
    """

    def __init__(self, clock: Clock, *, share: float = 0.2, burst: int = 100, window_s: float = 10.0) -> None:
        """`share`: retries that each request earns. `burst`: at least so many may be tried again at once. Within
        `window_s` seconds an empty bucket is full again."""
        self._clock = clock
        self._share = share
        self._least = float(burst)
        self._window_s = window_s
        self._burst = self._left = self._least
        self._at_s = clock.now_s()

    def resize(self, num_slots: int) -> None:
        """So many streams may run, and fail together, from now on."""
        self._refill()
        added = max(float(num_slots), self._least) - self._burst
        self._burst += added
        self._left = min(self._left + max(added, 0.0), self._burst)

    def earn(self) -> None:
        """A request has come."""
        self._refill()
        self._left = min(self._left + self._share, self._burst)

    def take(self, longest_s: float) -> float | None:
        """A retry: seconds to wait before it begins; None, and nothing taken, for more than `longest_s`."""
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
