"""Queueing formulas: the wait of requests for servers, and the number of sequences at which a batch settles.

The queue has several servers, general arrivals and services, and serves in order of arrival:

    W = C / (k mu (1 - rho)) x (Ca2 + Cs2) / 2          mean wait (Allen and Cunneen)
    P(W > t) = C exp(-t C / W)                          its tail

with C the probability to wait at all (Erlang C), rho = lambda / (k mu), and Ca2 and Cs2 the squared coefficients of
variation of gaps between arrivals and of services. Exact for Poisson arrivals and exponential services. Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

_MANY_SERVERS = 500
"""Number of servers above which Erlang's formula is replaced by its limit, which differs from it by a few percent."""


@dataclass(frozen=True)
class Wait:
    """Distribution of the wait for a server: zero with some probability, else exponential."""

    probability: float
    """Probability that a request waits at all."""
    mean_s: float
    """Mean seconds of waiting, over all requests."""

    def tail(self, seconds: float) -> float:
        """Return the probability that a request waits longer than `seconds`; 1 for a negative number."""
        if seconds < 0:
            return 1.0
        if self.mean_s <= 0:
            return 0.0
        return self.probability * math.exp(-seconds * self.probability / self.mean_s)

    def percentile(self, percent: float) -> float:
        """Return the number of seconds that the wait of `percent` of the requests does not exceed."""
        late = 1 - percent / 100
        if self.probability <= late or self.mean_s <= 0:
            return 0.0
        return self.mean_s / self.probability * math.log(self.probability / late)


NO_WAIT = Wait(0.0, 0.0)


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability that a request has to wait, for Poisson arrivals and exponential service times. `load` is
    lambda / mu.

    Returns 1 for a load of at least `num_servers`. Raises InvalidArgumentError for no server or a negative load.
    """
    if num_servers < 1 or not load >= 0:
        raise InvalidArgumentError(f"num_servers = {num_servers}, load = {load}: give a server, and no negative load")
    if load >= num_servers:
        return 1.0
    if num_servers > _MANY_SERVERS:
        return _erlang_c_of_many(num_servers, load)
    blocking = 1.0
    for server in range(1, num_servers + 1):
        blocking = load * blocking / (server + load * blocking)
    return blocking / (1 - load / num_servers * (1 - blocking))


def _erlang_c_of_many(num_servers: int, load: float) -> float:
    """Return the limit of Erlang C for many servers (Halfin and Whitt, 1981)."""
    spare = (num_servers - load) / math.sqrt(num_servers)
    density = math.exp(-spare * spare / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(spare / math.sqrt(2))) / 2
    return density / (density + spare * below)


def wait_for_servers(
    num_servers: int, rate: float, service_s: float, *, service_scv: float = 1.0, gap_scv: float = 1.0
) -> Wait | None:
    """Return the distribution of the wait of requests. `rate` requests arrive per second, and each takes `service_s`
    seconds. None if the queue grows without bound.

    `service_scv` and `gap_scv` are the squared coefficients of variation of services and of gaps between arrivals.
    """
    load = rate * service_s
    if load >= num_servers:
        return None
    if not load:
        return NO_WAIT
    probability = erlang_c(num_servers, load)
    mean_s = probability * service_s / (num_servers - load) * (gap_scv + service_scv) / 2
    return Wait(probability, mean_s)


def settled_rows(token_rate: float, step_s: Callable[[float], float], most: float) -> float | None:
    """Return the number of sequences at which a batch settles, if each sequence gets one token a step.

    By Little's law, the number n satisfies n = token_rate * step_s(max(n, 1)). `token_rate` is the number of tokens per
    second of all requests of the batch, and `step_s` returns the seconds of a step. None if n would exceed `most`.
    """
    if token_rate <= 0:
        return 0.0
    if token_rate * step_s(max(most, 1.0)) > most:
        return None
    low, high = 0.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if token_rate * step_s(max(middle, 1.0)) > middle else (low, middle)
    return high


def poisson_p95(mean: float) -> float:
    """Return the approximate 95th percentile of a Poisson count with this mean."""
    return mean + 1.6449 * math.sqrt(mean) if mean > 0 else 0.0
