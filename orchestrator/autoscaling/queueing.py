"""Queueing formulas: the wait of requests for servers, and the number of sequences in a batch in a steady state.

The queue has k servers and serves requests in order of arrival. Arrivals and service times have any distribution:

    W = C / (k mu (1 - rho)) x (Ca2 + Cs2) / 2          mean wait (Allen and Cunneen)
    P(W > t) = C exp(-t C / W)                          probability of a wait longer than t

lambda is the arrival rate, mu the service rate of one server, and rho = lambda / (k mu). C is the probability that a
request has to wait (Erlang C). Ca2 and Cs2 are the squared coefficients of variation of the time between arrivals and
of the service time. The formulas are exact for Poisson arrivals and exponential service times. All functions are pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import InvalidArgumentError

_MANY_SERVERS = 500
"""Number of servers above which Erlang's formula is replaced by an approximation for many servers. The approximation
differs from the exact formula by a few percent."""


@dataclass(frozen=True)
class Wait:
    """Distribution of the time that a request waits for a server. The wait is 0 with probability 1 - `probability`;
    otherwise it is exponentially distributed."""

    probability: float
    """Probability that a request has to wait."""
    mean_s: float
    """Mean wait in seconds over all requests, including those that do not wait."""

    def tail(self, seconds: float) -> float:
        """Return the probability that a request waits longer than `seconds`. The result is 1 if `seconds` is
        negative."""
        if seconds < 0:
            return 1.0
        if self.mean_s <= 0:
            return 0.0
        return self.probability * math.exp(-seconds * self.probability / self.mean_s)

    def percentile(self, percent: float) -> float:
        """Return the percentile of the wait in seconds. `percent` is in 0 to 100."""
        late = 1 - percent / 100
        if self.probability <= late or self.mean_s <= 0:
            return 0.0
        return self.mean_s / self.probability * math.log(self.probability / late)


NO_WAIT = Wait(0.0, 0.0)


def erlang_c(num_servers: int, load: float) -> float:
    """Return the probability that a request has to wait (Erlang C), for Poisson arrivals and exponential service times.
    `load` is the arrival rate divided by the service rate of one server.

    Returns 1 if `load` is at least `num_servers`. Raises InvalidArgumentError if there is no server or if `load` is
    negative.
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
    """Return an approximation of `erlang_c` for many servers (Halfin and Whitt, 1981)."""
    spare = (num_servers - load) / math.sqrt(num_servers)
    density = math.exp(-spare * spare / 2) / math.sqrt(2 * math.pi)
    below = (1 + math.erf(spare / math.sqrt(2))) / 2
    return density / (density + spare * below)


def wait_for_servers(
    num_servers: int, rate: float, service_s: float, *, service_scv: float = 1.0, gap_scv: float = 1.0
) -> Wait | None:
    """Return the distribution of the time that requests wait for a server. `rate` is the number of requests that arrive
    per second, and `service_s` is the mean service time of a request in seconds. Returns None if the queue grows
    without limit.

    `service_scv` and `gap_scv` are the squared coefficients of variation of the service time and of the time between
    arrivals.
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
    """Return the number of sequences in a batch in a steady state, in which each sequence gets one token per step.

    By Little's law, this number n satisfies n = token_rate * step_s(max(n, 1)). `token_rate` is the number of tokens
    per second that all requests of the batch need together. `step_s` returns the duration in seconds of a step with n
    sequences. Returns None if n would exceed `most`.
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
    """Return the approximate 95th percentile of a Poisson distribution with the given mean."""
    return mean + 1.6449 * math.sqrt(mean) if mean > 0 else 0.0
