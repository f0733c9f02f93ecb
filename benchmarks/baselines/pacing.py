"""Computes the delivery times of messages on a link that is slow or shared with other traffic. It only calculates and
never waits.

The link transmits one message after the other at a given bandwidth. Other traffic occupies the link in bursts, during
which messages make no progress. The lengths of bursts and of the gaps between them are exponentially distributed. The
two directions between two ranks are separate links with separate bursts. Does no I/O. Seeds are arguments.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Speed of a simulated link, and the other traffic on it."""

    bandwidth: float = math.inf
    """Bandwidth in bytes per second in each direction. Infinity: the speed of the underlying link."""
    busy_share: float = 0.0
    """Fraction of time during which other traffic occupies the link, in [0, 1)."""
    burst_s: float = 0.0
    """Mean length of a burst of other traffic, in seconds."""
    seed: int = 0
    """Seed of the random times of bursts."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not 0 <= self.busy_share < 1 or not 0 <= self.burst_s < math.inf:
            raise ValueError(f"{self} is out of range: give a bandwidth above 0, and a busy share from 0 to below 1")
        if self.busy_share and not self.burst_s:
            raise ValueError(f"{self}: bursts take no time: give burst_s in seconds")

    @property
    def is_full_speed(self) -> bool:
        """True if messages pass without delay."""
        return self.bandwidth == math.inf and not self.busy_share


FULL_SPEED = Pace()


class LinkSchedule:
    """Delivery times of the messages on one direction of a link, in seconds of a monotonic clock."""

    def __init__(self, pace: Pace, direction: int) -> None:
        self._pace = pace
        self._free_s = -math.inf
        self._bursts: Iterator[tuple[float, float]] | None = None
        self._burst = (math.inf, math.inf)
        self._rng = random.Random(f"{pace.seed}/{direction}")

    def delivered_s(self, now_s: float, num_bytes: int) -> float:
        """Return the delivery time of a message of `num_bytes` bytes that is posted at `now_s`. `now_s` must not
        decrease from call to call."""
        if self._bursts is None:
            self._bursts = bursts(self._pace, now_s, self._rng)
            self._burst = next(self._bursts)
        at_s, left_s = max(now_s, self._free_s), num_bytes / self._pace.bandwidth
        while at_s + left_s > self._burst[0]:
            start_s, end_s = self._burst
            if end_s > at_s:
                left_s -= max(start_s - at_s, 0.0)
                at_s = end_s
            self._burst = next(self._bursts)
        self._free_s = at_s + left_s
        return self._free_s


def bursts(pace: Pace, start_s: float, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of each burst of other traffic, in seconds, ascending and disjoint. The sequence is
    endless."""
    if not pace.busy_share:
        while True:
            yield math.inf, math.inf
    mean_gap_s = pace.burst_s * (1 - pace.busy_share) / pace.busy_share
    at_s = start_s
    while True:
        at_s += rng.expovariate(1 / mean_gap_s)
        end_s = at_s + rng.expovariate(1 / pace.burst_s)
        yield at_s, end_s
        at_s = end_s
